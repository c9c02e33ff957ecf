"""Calls that a front hands on to its controller, as bytes: whatever is not inference has one implementation.

They are few: health, metadata, the repository, operators. ServerLive the front answers itself, because it is
the front that is asked whether it lives. Clients' shared memory is the front's own, too: it says whether there is any.
Whoever watches the health watches the front, which is as well as its controller, and looks there for him.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from clockwright.errors import Refusal, RefusedError
from clockwright.v1 import control_pb2, inference_pb2
from controller.access.caller import CALLER, FORWARDED, tell
from controller.front import reflection
from controller.front.control import SERVICE as CONTROL_SERVICE
from controller.front.door import Door
from controller.front.health import HEALTH_SERVICE, NOT_SERVING, SERVING, HealthService
from controller.front.methods import unary
from controller.front.repository import SHARED_MEMORY_EXTENSION
from controller.front.server import SERVICE
from controller.front.statuses import DETAILS, PUSHBACK, fail

# What a front says that is not ready, whatever its controller is.
_NOT_READY = {
    f"/{SERVICE}/ServerReady": inference_pb2.ServerReadyResponse(ready=False).SerializeToString(),
    f"/{HEALTH_SERVICE}/Check": NOT_SERVING,
}
_KEPT = (DETAILS, PUSHBACK)

# How long a call that has not been handed on waits for a controller.
_HOLD_S = 5.0
_AT_ONCE = frozenset(("ServerReady", "Check"))


class Forwarding(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """The methods of a controller that is elsewhere."""

    def __init__(
        self,
        channel: Callable[[float], Awaitable[Any]],
        shown: Callable[[], Sequence[tuple[str, str]]] = tuple,
        *,
        door: Door,
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
        live = unary("ServerLive", inference_pb2.ServerLiveRequest, _server_live)
        # Not whatever is asked: a server remembers each method that it has found.
        self._handlers = {
            f"/{service}/{method}": grpc.stream_stream_rpc_method_handler(
                functools.partial(self._forward, f"/{service}/{method}")
            )
            for service, methods in _methods().items()
            for method in methods
        } | {
            f"/{SERVICE}/ServerLive": live,
            f"/{HEALTH_SERVICE}/Watch": self.health.methods()["Watch"],
        }

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Find the handler of a call."""
        return self._handlers.get(call.method)

    async def _forward(
        self,
        method: str,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if self._door.is_shut and method in _NOT_READY:
            await context.write(_NOT_READY[method])
            return
        name = method.rpartition("/")[2]
        # A controller that ends is followed within seconds. Whoever asks how it is wants to know now.
        remaining_s = context.time_remaining()
        hold_s = 0.0 if name in _AT_ONCE else _HOLD_S
        channel = await self._channel(hold_s if remaining_s is None else min(hold_s, remaining_s))
        if channel is None:
            text = "the controller cannot be reached"
            fail(context, RefusedError(Refusal.NO_WORKER, text), method=name)
            return
        # The client's own headers stay here: the front has found out who it is, and says so.
        call = channel.stream_stream(method)(
            requests,
            timeout=context.time_remaining(),
            metadata=(*self._shown(), (FORWARDED, tell(CALLER.get()))),
        )
        try:
            async for message in call:
                own = self._with_own_extensions(message) if name == "ServerMetadata" else message
                await context.write(own)
        except grpc.aio.AioRpcError:
            pass  # The status says it.
        finally:
            call.cancel()
        context.set_code(await call.code())
        context.set_details(await call.details() or "")
        trailing = await call.trailing_metadata()
        context.set_trailing_metadata([each for each in trailing or () if each[0] in _KEPT])

    async def _is_serving(self) -> bool:
        """Whether the front can serve, and its controller says of itself that it can."""
        channel = None if self._door.is_shut else await self._channel(0.0)
        if channel is None:
            return False
        check = channel.unary_unary(f"/{HEALTH_SERVICE}/Check")
        shown = (*self._shown(), (FORWARDED, tell(CALLER.get())))
        try:
            status: bytes = await check(b"", timeout=_HOLD_S, metadata=shown)
        except grpc.aio.AioRpcError:
            return False
        return status == SERVING

    def _with_own_extensions(self, message: bytes) -> bytes:
        metadata = inference_pb2.ServerMetadataResponse.FromString(message)
        theirs = [name for name in metadata.extensions if name != SHARED_MEMORY_EXTENSION]
        metadata.extensions[:] = [*theirs, *([SHARED_MEMORY_EXTENSION] * self._client_shm)]
        return metadata.SerializeToString()


async def _server_live(
    _: inference_pb2.ServerLiveRequest,
) -> inference_pb2.ServerLiveResponse:
    return inference_pb2.ServerLiveResponse(live=True)


def _methods() -> dict[str, list[str]]:
    inference = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    control = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
    return {
        SERVICE: [method.name for method in inference.methods],
        CONTROL_SERVICE: [method.name for method in control.methods],
        HEALTH_SERVICE: ["Check"],
        **{service: [reflection.METHOD] for service in reflection.SERVICES},
    }
