"""A server of another make: the Open Inference Protocol, spoken by grpcio alone, without SLOs and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from clockwright.v1 import inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"


class ForeignServer:
    """What a test sees of it, and has it do."""

    def __init__(self) -> None:
        self.address = ""
        #: Requests as they came.
        self.requests: list[pb.ModelInferRequest] = []
        #: Answers wait for it.
        self.go = threading.Event()
        self.go.set()
        #: It refuses all requests with it.
        self.refusal: grpc.StatusCode | None = None
        #: Called with the number of each request, from 1, before it waits.
        self.came: Callable[[int], object] = lambda _: None
        #: Inputs of the only model, with open dimensions as -1; name, datatype and shape.
        self.inputs: list[tuple[str, str, list[int]]] = [("x", "FP32", [-1, 3])]
        self.outputs: list[tuple[str, str, list[int]]] = []
        #: Fills the answer.
        self.compute: Callable[[pb.ModelInferRequest, pb.ModelInferResponse], object] = (
            lambda _, __: None
        )

    def _server_metadata(self, _: object, __: object) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="another", version="1")

    def _model_metadata(self, request: pb.ModelMetadataRequest, _: object) -> Any:  # noqa: ANN401
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name,
            inputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in self.inputs],
            outputs=[tensor(name=n, datatype=d, shape=s) for n, d, s in self.outputs],
        )

    def _model_ready(self, _: object, __: object) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=True)

    def _infer(
        self, request: pb.ModelInferRequest, context: grpc.ServicerContext
    ) -> pb.ModelInferResponse:
        self.requests.append(request)
        self.came(len(self.requests))
        self.go.wait()
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.INTERNAL, "out of order")
        if self.refusal is not None:
            context.set_trailing_metadata((("said-by", "the server"),))
            context.abort(self.refusal, "busy")
        response = pb.ModelInferResponse(model_name=request.model_name)
        self.compute(request, response)
        return response

    def handler(self) -> Any:  # noqa: ANN401
        """Make what a grpcio server mounts."""
        methods: dict[str, tuple[Any, Any]] = {
            "ServerMetadata": (self._server_metadata, pb.ServerMetadataRequest),
            "ModelMetadata": (self._model_metadata, pb.ModelMetadataRequest),
            "ModelReady": (self._model_ready, pb.ModelReadyRequest),
            "ModelInfer": (self._infer, pb.ModelInferRequest),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    method, message.FromString, lambda response: response.SerializeToString()
                )
                for name, (method, message) in methods.items()
            },
        )


@contextmanager
def foreign_server() -> Iterator[ForeignServer]:
    """Serve on a free port."""
    foreign = ForeignServer()
    server = grpc.server(ThreadPoolExecutor(64))
    server.add_generic_rpc_handlers((foreign.handler(),))
    foreign.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield foreign
    finally:
        foreign.go.set()
        server.stop(None).wait()
