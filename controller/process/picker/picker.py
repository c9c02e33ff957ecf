"""An endpoint picker: chooses the controller of each call that a gateway asks about, as a front does.

It speaks Envoy's external processing (ext_proc v3) by the endpoint picker protocol of the Gateway API Inference Extension
(https://gateway-api-inference-extension.sigs.k8s.io, docs/proposals/004-endpoint-picker-protocol): the address goes
back in the header `x-gateway-destination-endpoint` and in the metadata `envoy.lb`; a call for which no controller is in time
is answered at once, with 429, or with 503 if no controller has the model.

gRPC names the model in the first bytes of the body, so the gateway has to send that (FULL_DUPLEX_STREAMED or BUFFERED);
REST names it in the path. The header `x-gateway-model-name` goes before either.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from clockwright.errors import ProtocolError, Refusal, RefusedError
from clockwright.foreign import quote
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, SLO_NS_MAX, format_ns
from clockwright.v1.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from controller.access.caller import Caller
from controller.access.guard import Guard
from controller.access.roles import Role
from controller.front.admission.limits import AdmissionLimits
from controller.front.cells.choice import Choices
from controller.front.http.http2_server import Http2Server
from controller.front.methods import INFERENCE, CallStream, Method, OnStream
from controller.front.oip.protocol import peek_request
from controller.front.oip.statuses import status_of
from controller.front.services.health import HealthService
from controller.links.slabs import Slabs
from controller.process.app import run_loop, signals_to_end
from controller.process.cells.reader import CellReader
from controller.process.config import ServingConfig
from controller.process.lease.places import open_directory
from controller.process.server_tls import use_tls

#: The header and the key of metadata that say where a call goes.
DESTINATION: Final = "x-gateway-destination-endpoint"
#: The key of metadata that says which endpoints are there for a call.
_SUBSET: Final = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
#: The headers that name a call's model and its SLO; REST of this server knows the latter too.
MODEL_HEADER: Final = "x-gateway-model-name"
SLO_HEADER: Final = "x-clockwright-slo-ms"

METHOD: Final = Method(
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "Process",
    Role.INFERENCE,
    ProcessingRequest,
    ProcessingResponse,
    takes_stream=True,
    gives_stream=True,
)

# The statistics of all models are no model's.
_PATH: Final = re.compile(r"/v2/models/(?!stats(?:\?|$))([^/?]+)")
_INFERS: Final = re.compile(r"/(?:infer|generate|generate_stream|Model(?:Stream)?Infer)(?:\?|$)")
_GRPC_PATH: Final = f"/{INFERENCE}/Model"
_TIMEOUT_UNITS_NS: Final = {
    "H": 3600 * NS_PER_S,
    "M": 60 * NS_PER_S,
    "S": NS_PER_S,
    "m": NS_PER_MS,
    "u": NS_PER_US,
    "n": 1,
}
# BodySendMode of ext_proc.
_FULL_DUPLEX: Final = 4
# HeaderAppendAction: OVERWRITE_IF_EXISTS_OR_ADD.
_OVERWRITE: Final = 2
# The first bytes of a body in which the name of a model is looked for: gRPC's five and the message's first fields.
_BODY_BYTES_MAX: Final = 4096
_GRPC_PREFIX_BYTES: Final = 5
# Stands for a model where a call names none: any controller answers. No model has such a name.
_ANY: Final = "*"
_HTTP_STATUSES: Final = {Refusal.OVERLOADED: 429, Refusal.NO_WORKER: 503}
_STOP_GRACE_S: Final = 5.0


@dataclass(slots=True)
class _Picking:
    """One call of a gateway's client."""

    model: str = ""
    slo_ns: int | None = None
    among: frozenset[str] | None = None
    full_duplex: bool = False
    is_grpc: bool = False
    #: It is an inference, which has a deadline; other calls only need a controller that has the model.
    infers: bool = False
    is_picked: bool = False
    #: What has come of the body before.
    begun: bytes = b""


@dataclass(eq=False)
class Picker:
    """Chooses for gateways."""

    choices: Choices
    _: KW_ONLY
    #: SLO of calls that state none.
    default_slo_ns: int
    clock: Callable[[], int] = time.monotonic_ns

    def handlers(self) -> dict[Method, Any]:
        """What answers the method."""
        return {METHOD: OnStream(self.process)}

    async def process(self, stream: CallStream, _caller: Caller) -> None:
        """Answer for one call."""
        picking = _Picking()
        async for data in stream:
            try:
                request = ProcessingRequest.FromString(data)
            except DecodeError as error:
                raise ProtocolError(
                    f"found {len(data)} bytes, expected ProcessingRequest: {error}"
                ) from None
            for response in self._responses(picking, request):
                await stream.write(response.SerializeToString())

    def _responses(self, picking: _Picking, request: Any) -> list[Any]:  # noqa: ANN401
        kind = request.WhichOneof("request")
        response = ProcessingResponse()
        if kind == "request_headers":
            self._take_headers(picking, request)
            if not picking.model and not request.request_headers.end_of_stream:
                response.request_headers.SetInParent()
                # In full duplex the headers may be answered after the first bytes of the body.
                return [] if picking.full_duplex else [response]
            picking.model = picking.model or _ANY
            return [self._pick(picking, "request_headers")]
        if kind == "request_body":
            return self._take_body(picking, request.request_body)
        if kind in ("request_trailers", "response_trailers", "response_headers"):
            getattr(response, kind).SetInParent()
        elif kind == "response_body":
            body = request.response_body
            _pass_on(response.response_body, body.body, body.end_of_stream, picking)
        return [response]

    def _take_headers(self, picking: _Picking, request: Any) -> None:  # noqa: ANN401
        found = {
            header.key: header.raw_value.decode(errors="replace") or header.value
            for header in request.request_headers.headers.headers
        }
        path = found.get(":path", "")
        picking.full_duplex = request.protocol_config.request_body_mode == _FULL_DUPLEX
        picking.is_grpc = path.startswith(_GRPC_PATH)
        picking.infers = _INFERS.search(path) is not None
        in_path = _PATH.match(path)
        picking.model = found.get(MODEL_HEADER) or (unquote(in_path[1]) if in_path else "")
        if not in_path and not picking.is_grpc:
            # Health, metadata of the server: no body names a model.
            picking.model = picking.model or _ANY
        picking.slo_ns = _slo_ns(found)
        metadata = request.metadata_context.filter_metadata
        if _SUBSET[0] in metadata and _SUBSET[1] in metadata[_SUBSET[0]]:
            hint = metadata[_SUBSET[0]][_SUBSET[1]]
            if isinstance(hint, float | bool | None):
                hint = ""  # It names no endpoint.
            listed = hint.split(",") if isinstance(hint, str) else [str(each) for each in hint]
            picking.among = frozenset(each.strip() for each in listed)

    def _take_body(self, picking: _Picking, body: Any) -> list[Any]:  # noqa: ANN401
        response = ProcessingResponse()
        if picking.is_picked:
            _pass_on(response.request_body, body.body, body.end_of_stream, picking)
            return [response]
        picking.begun += body.body
        peeked = peek_request(picking.begun[_GRPC_PREFIX_BYTES:][:_BODY_BYTES_MAX])
        is_more = not body.end_of_stream and len(picking.begun) < _BODY_BYTES_MAX
        if picking.full_duplex and not peeked.model_name and is_more:
            return []  # It comes in pieces, which go on together.
        # The controller says what is wrong with a body that names no model.
        picking.model = peeked.model_name or _ANY
        if peeked.slo_ns is not None:
            # The call's own time limit is longer than its SLO.
            picking.slo_ns = min(peeked.slo_ns, picking.slo_ns or peeked.slo_ns)
        if not picking.full_duplex:
            return [self._pick(picking, "request_body")]
        picked = self._pick(picking, "request_headers")
        if picked.HasField("immediate_response"):
            return [picked]
        _pass_on(response.request_body, picking.begun, body.end_of_stream, picking)
        picking.begun = b""
        return [picked, response]

    def _pick(self, picking: _Picking, kind: str) -> Any:  # noqa: ANN401
        """Choose, and make the answer to the headers, or to the body."""
        picking.is_picked = True
        now_ns = self.clock()
        slo_ns = picking.slo_ns if picking.slo_ns is not None else self.default_slo_ns
        address, refused = "", RefusedError(Refusal.NO_WORKER, "no controller is there")
        if picking.model == _ANY:
            live = [row.address for row in self.choices.live(now_ns)]
            listed = [a for a in live if picking.among is None or a in picking.among]
            address = listed[0] if listed else ""
        else:
            name = quote(picking.model)
            chosen = self.choices.choose(picking.model, 1, slo_ns, now_ns, among=picking.among)
            if chosen is None:
                words = f"no controller that is there has model {name}"
                refused = RefusedError(Refusal.NO_WORKER, words)
            elif chosen.in_time or not picking.infers:
                address = chosen.address
            else:
                words = (
                    f"model {name}: no controller is in time: the earliest is predicted to answer in"
                    f" {format_ns(chosen.end_ns)} > SLO {format_ns(slo_ns)}; retry later, or with a longer SLO"
                )
                refused = RefusedError(Refusal.OVERLOADED, words, figures={"slo_ns": slo_ns})
        response = ProcessingResponse()
        if address:
            common = getattr(response, kind).response
            option = common.header_mutation.set_headers.add(append_action=_OVERWRITE)
            option.header.key, option.header.raw_value = DESTINATION, address.encode()
            common.clear_route_cache = False
            response.dynamic_metadata.get_or_create_struct("envoy.lb")[DESTINATION] = address
            return response
        _refuse(response.immediate_response, refused, is_grpc=picking.is_grpc)
        return response


def _refuse(immediate: Any, refused: RefusedError, *, is_grpc: bool) -> None:  # noqa: ANN401
    """Write a refusal as a controller would, for gRPC or for REST."""
    status = status_of(refused, method="ModelInfer")
    immediate.status.code = _HTTP_STATUSES[refused.refusal]
    immediate.details = refused.refusal.value
    if not is_grpc:
        header = immediate.headers.set_headers.add(append_action=_OVERWRITE).header
        header.key, header.raw_value = "content-type", b"application/json"
        immediate.body = json.dumps({"error": status.text}).encode()
        return
    immediate.grpc_status.status = status.code.value[0]
    # Envoy makes gRPC's message of it.
    immediate.body = status.text.encode()
    for name, value in status.details:
        header = immediate.headers.set_headers.add(append_action=_OVERWRITE).header
        header.key = name
        header.raw_value = value.encode() if isinstance(value, str) else b64encode(value)


def _pass_on(answer: Any, body: bytes, is_end: bool, picking: _Picking) -> None:  # noqa: ANN401
    """Leave a piece of a body as it is; in full duplex that means to send it back."""
    answer.response.SetInParent()
    if picking.full_duplex:
        streamed = answer.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = body, is_end


def _slo_ns(headers: Mapping[str, str]) -> int | None:
    """The SLO that headers state, else the call's own time limit. Returns None if they state none."""
    try:
        if SLO_HEADER in headers:
            return _checked(float(headers[SLO_HEADER]) * NS_PER_MS)
        if timeout := headers.get("grpc-timeout"):
            return _checked(int(timeout[:-1]) * _TIMEOUT_UNITS_NS[timeout[-1]])
    except (ValueError, KeyError, OverflowError):
        pass  # The controller says what is wrong.
    return None


def _checked(slo_ns: float) -> int | None:
    return round(slo_ns) if 0 < slo_ns <= SLO_NS_MAX else None


@dataclass(frozen=True, slots=True)
class RunningPicker:
    """A running picker; `serving` makes it."""

    host: str
    #: Where it listens; never 0.
    port: int
    picker: Picker


@asynccontextmanager
async def serving(
    config: ServingConfig,
    cells: str,
    *,
    default_slo_ns: int,
    clock: Callable[[], int] = time.monotonic_ns,
) -> AsyncIterator[RunningPicker]:
    """Serve in the running event loop, by a directory as of `--cells`.

    Raises ConfigError if a setting is wrong, or the port is taken. The SLO is of calls that state none; rows expire by the
    clock, in ns.
    """
    async with AsyncExitStack() as stack:
        choices = Choices()
        picker = Picker(choices, default_slo_ns=default_slo_ns, clock=clock)
        guard = Guard(config.access)
        slabs = Slabs(0)
        stack.callback(slabs.close)
        server = Http2Server(
            clock=time.monotonic_ns,
            door=AdmissionLimits(
                max_requests=config.max_open_requests, max_bytes=config.max_open_bytes
            ),
            max_message_bytes=4 << 20,
            max_connections=config.max_connections,
            slabs=slabs,
            authoriser=guard.authoriser,
        )
        use_tls((server,), config, guard)

        async def has_cells() -> bool:
            return bool(choices.live(clock()))

        health = HealthService(has_cells, names=("readiness", METHOD.service), lives="liveness")
        server.serve(picker.handlers() | health.handlers())
        reader = CellReader(open_directory(cells), choices, clock=clock)
        await stack.enter_async_context(reader.reading())
        port = server.add_insecure_port(config.address)
        await server.start()
        stack.push_async_callback(server.stop, _STOP_GRACE_S)
        stack.callback(health.leave)
        await stack.enter_async_context(guard.looking())
        yield RunningPicker(config.host, port, picker)


async def _serve(config: ServingConfig, cells: str, default_slo_ns: int) -> int:
    with signals_to_end() as signals:
        async with serving(config, cells, default_slo_ns=default_slo_ns) as running:
            print(f"listening on {running.host}:{running.port}", flush=True)
            await signals.get()
    return 0


def run(config: ServingConfig, cells: str, *, default_slo_ns: int) -> int:
    """Run a picker until SIGTERM or SIGINT. Returns the process's exit code; the arguments are those of `serving`."""
    return run_loop(_serve(config, cells, default_slo_ns))
