"""Calls that a front hands on to its controller, as bytes: all methods but inference have one implementation.

They are few: health, metadata, the repository, operators. The front answers ServerLive itself, because the call
asks whether the front lives. Clients' shared memory is the front's own, too, so the front says whether it supports it.
A client that watches the health watches the front, which is as healthy as its controller and asks it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

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

# How long a call that has not been handed on waits for a controller.
_HOLD_S = 5.0
_AT_ONCE = frozenset(("ServerReady", "Check"))


class Forwarding:
    """The methods of a controller that is elsewhere."""

    def __init__(
        self,
        channel: Callable[[float], Awaitable[Any]],
        shown: Callable[[], Sequence[tuple[str, str]]] = tuple,
        *,
        door: AdmissionLimits,
        client_shm: bool,
    ) -> None:
        """Hand calls on.

        Args:
            channel: waits so many seconds at most for the controller, and gives grpc.aio's channel to it; None
                where it is not there.
            shown: gives the headers by which the controller knows the front.
            door: is shut when the front has no memory for requests: then it is not ready.
            client_shm: clients may keep tensors in shared memory of theirs, as the front has been told.
        """
        self._channel = channel
        self._shown = shown
        self._door = door
        self._client_shm = client_shm
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
        if self._door.is_shut and method.path in _NOT_READY:
            await stream.write(_NOT_READY[method.path])
            return
        # The next controller follows within seconds. But a caller that asks for the health needs the answer now.
        remaining_s = stream.time_left_s()
        hold_s = 0.0 if method.name in _AT_ONCE else _HOLD_S
        channel = await self._channel(hold_s if remaining_s is None else min(hold_s, remaining_s))
        if channel is None:
            raise RefusedError(Refusal.NO_WORKER, "the controller cannot be reached")
        # The client's own headers stay here: the front has found out who it is, and says so.
        call = channel.stream_stream(method.path)(
            aiter(stream),
            timeout=stream.time_left_s(),
            metadata=(*self._shown(), (FORWARDED, tell(caller))),
        )
        try:
            async for message in call:
                is_metadata = method.name == "ServerMetadata"
                own = self._with_own_extensions(message) if is_metadata else message
                await stream.write(own)
        except grpc.aio.AioRpcError:
            pass  # The status says it.
        finally:
            call.cancel()
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            trailing = await call.trailing_metadata()
            kept = tuple(each for each in trailing or () if each[0] in _KEPT)
            raise ToldStatusError(Status(code, await call.details() or "", kept))

    async def _is_serving(self) -> bool:
        """Whether the front can serve, and its controller says of itself that it can."""
        channel = None if self._door.is_shut else await self._channel(0.0)
        if channel is None:
            return False
        check = channel.unary_unary(f"/{HEALTH}/Check")
        shown = (*self._shown(), (FORWARDED, tell(ANYBODY)))
        try:
            status: bytes = await check(b"", timeout=_HOLD_S, metadata=shown)
        except grpc.aio.AioRpcError:
            return False
        return status == bytes(SERVING.SerializeToString())

    def _with_own_extensions(self, message: bytes) -> bytes:
        metadata = inference_pb2.ServerMetadataResponse.FromString(message)
        theirs = [name for name in metadata.extensions if name != SHARED_MEMORY_EXTENSION]
        metadata.extensions[:] = [*theirs, *([SHARED_MEMORY_EXTENSION] * self._client_shm)]
        return metadata.SerializeToString()
