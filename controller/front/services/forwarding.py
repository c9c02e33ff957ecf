"""Calls that a front hands on to its controller, as bytes: all methods but inference have one implementation.

They are few: health, metadata, the repository, operators. The front answers ServerLive itself, because the call
asks whether the front lives. Clients' shared memory is the front's own, too, so the front says whether it supports it.
A client that watches the health watches the front, which is as healthy as its controller and asks it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from clockwright.errors import Refusal, RefusedError
from clockwright.v1 import inference_pb2
from controller.access.caller import ANYBODY, FORWARDED, Caller, tell
from controller.front.admission.limits import AdmissionLimits
from controller.front.methods import (
    HEALTH,
    INFERENCE,
    METHODS,
    AtFront,
    CallStream,
    Method,
    OnStream,
    bind,
)
from controller.front.oip.health_messages import NOT_SERVING, SERVING
from controller.front.oip.statuses import DETAILS, PUSHBACK, Status, ToldStatusError
from controller.front.services.health import HealthService
from controller.front.services.repository import SHARED_MEMORY_EXTENSION

# What a front says that is not ready, whatever its controller is.
_NOT_READY = {
    f"/{INFERENCE}/ServerReady": inference_pb2.ServerReadyResponse(ready=False).SerializeToString(),
    f"/{HEALTH}/Check": NOT_SERVING.SerializeToString(),
}
_KEPT = (DETAILS, PUSHBACK)

# Fields of requests that name a model, or an application.
_MODEL_FIELDS = ("name", "model_name", "model_id")
# How long a call that has not been handed on waits for a controller.
_HOLD_S = 5.0
_AT_ONCE = frozenset(("ServerReady", "Check"))


class FoundLink(Protocol):
    """A controller that is there."""

    #: grpc.aio's channel to it.
    channel: Any
    #: The headers by which it knows the front.
    shown: Sequence[tuple[str, str]]


@dataclass(eq=False)
class Forwarding:
    """The methods of a controller that is elsewhere."""

    #: Waits so many seconds at most for the controller, where there are several for one that has a model.
    find_link: Callable[[float, Callable[[], str]], Awaitable[FoundLink | None]]
    _: KW_ONLY
    #: Shut when there is no memory for requests: then the front is not ready.
    door: AdmissionLimits
    client_shm: bool

    def __post_init__(self) -> None:
        #: The front is about to end: it is not ready, and serves.
        self.is_leaving = False
        self.health = HealthService(self._is_serving)

    def handlers(self) -> dict[Method, Any]:
        """Handlers of those methods, and of those that the front answers itself in addition to inference."""
        return {
            method: OnStream(functools.partial(self._forward, method))
            for method in METHODS.values()
            if method.at_front is AtFront.FORWARDED
        } | {
            method: handler
            for method, handler in (bind(INFERENCE, self) | self.health.handlers()).items()
            if method.at_front is AtFront.ANSWERED
        }

    async def server_live(
        self, _: inference_pb2.ServerLiveRequest, _caller: Caller
    ) -> inference_pb2.ServerLiveResponse:
        """Say that the front lives."""
        return inference_pb2.ServerLiveResponse(live=True)

    async def _forward(self, method: Method, stream: CallStream, caller: Caller) -> None:
        if self._is_closing and method.path in _NOT_READY:
            await stream.write(_NOT_READY[method.path])
            return
        # The next controller follows within seconds. But a caller that asks for the health needs the answer now.
        remaining_s = stream.time_left_s()
        hold_s = 0.0 if method.name in _AT_ONCE else _HOLD_S
        hold_s = hold_s if remaining_s is None else min(hold_s, remaining_s)
        # Who sends a stream sends it as it comes.
        first = None if method.takes_stream else await stream.read()
        link = await self.find_link(hold_s, lambda: _model_in(method, first))
        if link is None:
            raise RefusedError(Refusal.NO_WORKER, "the controller cannot be reached")
        # The client's own headers stay here: the front has found out who it is, and says so.
        call = link.channel.stream_stream(method.path)(
            _behind(first, stream),
            timeout=stream.time_left_s(),
            metadata=(*link.shown, (FORWARDED, tell(caller))),
        )
        try:
            async for message in call:
                is_metadata = method.name == "ServerMetadata"
                own = self._with_own_extensions(message) if is_metadata else message
                await stream.write(own)
        except grpc.aio.AioRpcError:
            pass  # The status says it.
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            text = "the connection to the controller was lost meanwhile"
            raise RefusedError(Refusal.NO_WORKER, text) from None
        finally:
            call.cancel()
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            trailing = await call.trailing_metadata()
            kept = tuple(each for each in trailing or () if each[0] in _KEPT)
            raise ToldStatusError(Status(code, await call.details() or "", kept))

    @property
    def _is_closing(self) -> bool:
        return self.door.is_shut or self.is_leaving

    async def _is_serving(self) -> bool:
        """Whether the front can serve, and its controller says of itself that it can."""
        link = None if self._is_closing else await self.find_link(0.0, str)
        if link is None:
            return False
        check = link.channel.unary_unary(f"/{HEALTH}/Check")
        shown = (*link.shown, (FORWARDED, tell(ANYBODY)))
        try:
            status: bytes = await check(b"", timeout=_HOLD_S, metadata=shown)
        except grpc.aio.AioRpcError:
            return False
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return False
        return status == bytes(SERVING.SerializeToString())

    def _with_own_extensions(self, message: bytes) -> bytes:
        metadata = inference_pb2.ServerMetadataResponse.FromString(message)
        theirs = [name for name in metadata.extensions if name != SHARED_MEMORY_EXTENSION]
        metadata.extensions[:] = [*theirs, *([SHARED_MEMORY_EXTENSION] * self.client_shm)]
        return metadata.SerializeToString()


async def _behind(first: bytes | None, stream: CallStream) -> AsyncIterator[bytes]:
    """The messages of a call of which the first has been read, if any has."""
    if first is not None:
        yield first
    async for message in stream:
        yield message


def _model_in(method: Method, message: bytes | None) -> str:
    """The model that a call is about; empty: none is named."""
    named = [name for name in _MODEL_FIELDS if name in method.request.DESCRIPTOR.fields_by_name]
    if message is None or not named:
        return ""
    try:
        return str(getattr(method.request.FromString(message), named[0]))
    except DecodeError:
        return ""  # The controller says what is wrong.


def _is_cancelled() -> bool:
    """Whether this task was cancelled, because its client is gone.

    A channel that is closed, as it is with the connection to the controller, cancels its calls, and no task.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
