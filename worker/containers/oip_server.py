"""A server of the Open Inference Protocol, as a container."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from typing_extensions import override

from clockwright.client.channel import OPTIONS, Access
from clockwright.client.statuses import error_of
from clockwright.containers import ContainerSpec
from clockwright.errors import ConfigError, ModelError, Refusal, RefusedError
from clockwright.foreign import printable
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.tensors import TensorSpec
from worker.containers.container import (
    Container,
    ContainerAwayError,
    ContainerBusyError,
    ContainerDiedError,
    ContainerFailedError,
    SharedMemory,
)
from worker.containers.frames import Tensor

# A server that says nothing for so long about a model is away.
_ASK_LIMIT_S = 10.0
# What an answer has besides the elements of outputs.
_WORDS_BYTES = 1 << 20
_DETAILS_CHARS_MAX = 2000
# gRPC's own limit.
_MESSAGE_BYTES_MAX = (1 << 31) - 1
_PREFIX = "/inference.GRPCInferenceService/"


class OipServer(Container):
    """One model of a server that runs elsewhere."""

    def __init__(self, spec: ContainerSpec, folder: Path, memory: SharedMemory) -> None:
        """Set up; as `Container`."""
        super().__init__(spec, folder, memory)
        self._model = spec.model or folder.parent.name
        kind, _, self._address = spec.address.partition("://")
        self._access = Access(tls=kind == "grpcs")
        self._channel: Any = None

    @override
    def start(self) -> None:
        # The outputs of a batch fit into the memory.
        most_bytes = min(len(self._memory.bytes) + _WORDS_BYTES, _MESSAGE_BYTES_MAX)
        options = dict(OPTIONS) | {"grpc.max_receive_message_length": most_bytes}
        self._channel = self._access.channel(self._address, options=tuple(options.items()))

    @override
    def wait_ready(self, limit_s: float) -> None:
        self._batch_end_s = time.monotonic() + min(limit_s, _ASK_LIMIT_S)
        name = pb.ModelReadyRequest(name=self._model)
        try:
            found = pb.ModelReadyResponse.FromString(self._call("ModelReady", name, "asking"))
            if not found.ready:
                raise ContainerAwayError(
                    f"{self._spec.address}: model {self._model!r} is not ready there"
                )
            about = pb.ModelMetadataRequest(name=self._model)
            self._check(
                pb.ModelMetadataResponse.FromString(self._call("ModelMetadata", about, "asking"))
            )
        except ContainerDiedError as error:
            raise ContainerAwayError(f"{self._spec.address}: {error}") from None

    def _check(self, metadata: pb.ModelMetadataResponse) -> None:
        """Check that the server's model is the one that was declared.

        Raises ModelError that names all that differs, and how to declare it.
        """
        inputs = {tensor.name: tensor for tensor in metadata.inputs}
        outputs = {tensor.name: tensor for tensor in metadata.outputs}
        spec = self._spec
        wrong = [
            f"{each.name}: found {_spelt(there.get(each.name))}"
            for side, there in ((spec.inputs, inputs), (spec.outputs, outputs))
            for each in side
            if not _fits(each, there.get(each.name))
        ]
        wrong += [f"{name}: not declared" for name in inputs.keys() - {s.name for s in spec.inputs}]
        if wrong:
            raise ModelError(
                f"model {self._model!r} of {spec.address} is not what [container] declares: "
                f"{'; '.join(wrong)}. Of the server: inputs = {{ {_lines(metadata.inputs)} }}, outputs = "
                f"{{ {_lines(metadata.outputs)} }}"
            )

    @override
    def _run_tensors(self, inputs: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        request = pb.ModelInferRequest(
            model_name=self._model,
            outputs=[
                pb.ModelInferRequest.InferRequestedOutputTensor(name=spec.name)
                for spec in self._spec.outputs
            ],
        )
        for spec, (datatype, shape, elements) in zip(self._spec.inputs, inputs, strict=True):
            request.inputs.add(name=spec.name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(bytes(elements))
        response = pb.ModelInferResponse.FromString(
            self._call("ModelInfer", request, f"running a batch of {rows}")
        )
        found = {
            tensor.name: (tensor.datatype, tuple(tensor.shape), raw)
            for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False)
        }
        try:
            return [found[spec.name] for spec in self._spec.outputs]
        except KeyError as error:
            raise ContainerFailedError(
                f"found outputs {sorted(found)} with raw contents, expected {error} too"
            ) from None

    def _call(self, method: str, request: Any, doing: str) -> bytes:  # noqa: ANN401  protobuf's messages
        """Call the server.

        Raises ContainerDiedError if it is away, or takes too long; ContainerFailedError if it refuses; a
        ContainerBusyError if it may take the same call later.
        """
        remaining_s = self._batch_end_s - time.monotonic()
        try:
            answer: bytes = self._channel.unary_unary(_PREFIX + method)(
                request.SerializeToString(), timeout=max(remaining_s, 0)
            )
        except grpc.RpcError as error:
            named = error_of(error, self._address)
            code = error.code()
            # A refusal of the server's own has details.
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():
                raise ContainerDiedError(
                    f"the server hung: {doing} took more than its time limit"
                ) from None
            if isinstance(named, ConfigError) or code is grpc.StatusCode.CANCELLED:
                words = printable(error.details() or code.name, _DETAILS_CHARS_MAX)
                raise ContainerDiedError(f"the server went away while {doing}: {words}") from None
            why = f"the server said: {named}"
            if isinstance(named, RefusedError) and named.refusal is not Refusal.FAILED:
                raise ContainerBusyError(why) from None
            raise ContainerFailedError(why) from None
        except ValueError:  # the channel was closed
            raise ContainerDiedError(f"the server was left while {doing}") from None
        return answer

    @override
    def kill(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _fits(spec: TensorSpec, there: pb.ModelMetadataResponse.TensorMetadata | None) -> bool:
    """Whether the server's tensor takes any number of rows that were declared."""
    if there is None or there.datatype != spec.datatype or len(there.shape) != len(spec.shape(-1)):
        return False
    pairs = zip(there.shape, spec.shape(-1), strict=True)
    return all(found in (-1, size) for found, size in pairs)


def _spelt(there: pb.ModelMetadataResponse.TensorMetadata | None) -> str:
    return "nothing" if there is None else f"{there.datatype} {list(there.shape)} with the batch"


def _lines(tensors: Sequence[pb.ModelMetadataResponse.TensorMetadata]) -> str:
    # How large what is open may be is the operator's to say.
    return ", ".join(
        f'{t.name} = "{t.datatype}{list(t.shape[1:])}"'.replace("-1", "<=LARGEST") for t in tensors
    )
