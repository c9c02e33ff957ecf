"""A controller that stands by: it listens, says that it is not ready, and does nothing else until it leads."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from clockwright.errors import Refusal, RefusedError
from clockwright.v1 import inference_pb2
from controller.access.guard import Guard
from controller.access.roles import ROLE_OF
from controller.config import ControllerConfig
from controller.front.door import Door
from controller.front.health import NOT_SERVING
from controller.front.http2_server import Http2Server
from controller.front.leadership import leadership_handler
from controller.front.methods import unary
from controller.front.rest import RestApp
from controller.front.server import SERVICE
from controller.front.statuses import fail
from controller.rest_door import rest_door
from controller.server_tls import use_tls
from controller.slabs import Slabs


class _NotHere(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """The methods of a controller, all of which another has to be asked for."""

    def __init__(self) -> None:
        live = unary("ServerLive", inference_pb2.ServerLiveRequest, _live)
        ready = unary("ServerReady", inference_pb2.ServerReadyRequest, _ready)
        self._handlers = {
            path: grpc.stream_stream_rpc_method_handler(functools.partial(_refuse, path))
            for path in ROLE_OF
        } | {
            f"/{SERVICE}/ServerLive": live,
            f"/{SERVICE}/ServerReady": ready,
            "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(_check),
        }

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Find the handler of a call."""
        return self._handlers.get(call.method)


async def _refuse(
    path: str, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    fail(context, _elsewhere(), method=path.rpartition("/")[2])


def _elsewhere() -> RefusedError:
    return RefusedError(Refusal.NO_WORKER, "this controller stands by: another one leads")


async def _live(_: inference_pb2.ServerLiveRequest) -> inference_pb2.ServerLiveResponse:
    return inference_pb2.ServerLiveResponse(live=True)


async def _ready(_: inference_pb2.ServerReadyRequest) -> inference_pb2.ServerReadyResponse:
    return inference_pb2.ServerReadyResponse(ready=False)


async def _check(_: bytes, __: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return NOT_SERVING


@asynccontextmanager
async def standing_by(
    config: ControllerConfig, guard: Guard
) -> AsyncIterator[tuple[int, int | None]]:
    """Listen where the controller will; gives the port, and that of REST, None: there is none.

    Args:
        config: the controller's settings.
        guard: knows the callers, and looks after the certificate.

    Raises:
        ConfigError: the port is taken, or a file cannot be used.
    """
    slabs = Slabs(0)
    door = Door(max_requests=config.max_open_requests, max_bytes=config.max_open_bytes)
    server = Http2Server(
        clock=time.monotonic_ns,
        door=door,
        max_message_bytes=config.max_message_bytes,
        max_connections=config.max_connections,
        slabs=slabs,
        authoriser=guard.authoriser,
    )
    use_tls((server,), config, guard)

    def mount(app: RestApp) -> None:
        app.add_generic_rpc_handlers((not_here,))
        app.answer_directly(lambda call, _: call.fail(_elsewhere()))

    not_here = _NotHere()
    server.add_generic_rpc_handlers((leadership_handler(lambda: None), not_here))
    port = server.add_insecure_port(config.address)
    await server.start()
    try:
        # Whoever looks by HTTP whether it lives would end it, if nobody answered there.
        async with rest_door(
            config,
            guard,
            clock=time.monotonic_ns,
            door=door,
            throttle=server.throttle,
            turns=server.turns,
            slabs=slabs,
            max_message_bytes=config.max_message_bytes,
            mount=mount,
            stop_grace_s=0,
        ) as http_port:
            yield port, http_port
    finally:
        # Nobody waits for anything here.
        await server.stop(0)
        slabs.close()
