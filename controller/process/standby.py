"""A controller that stands by: it listens, says that it is not ready, and does nothing else until it leads."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from clockwright.errors import Refusal, RefusedError
from clockwright.v1 import inference_pb2
from controller.access.caller import Caller
from controller.access.guard import Guard
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.calls import Directly
from controller.front.http.http2_server import Http2Server
from controller.front.methods import (
    HEALTH,
    INFERENCE,
    LEADERSHIP,
    METHODS,
    CallStream,
    Method,
    OnStream,
    bind,
)
from controller.front.oip.health_messages import NOT_SERVING
from controller.front.services.leadership import LeadershipService
from controller.links.slabs import Slabs
from controller.process.config import ControllerConfig
from controller.process.rest_listener import rest_listener
from controller.process.server_tls import use_tls


class _StandingBy:
    """Answers what a controller can say that stands by."""

    async def server_live(self, _: Message, _caller: Caller) -> Message:
        """It lives."""
        return inference_pb2.ServerLiveResponse(live=True)

    async def server_ready(self, _: Message, _caller: Caller) -> Message:
        """It is not ready."""
        return inference_pb2.ServerReadyResponse(ready=False)

    async def check(self, _: Message, _caller: Caller) -> Message:
        """It does not serve."""
        return NOT_SERVING  # type: ignore[no-any-return]


def handlers() -> dict[Method, Any]:
    """What answers each method: those that need a controller are refused."""
    here = bind(INFERENCE, own := _StandingBy()) | bind(HEALTH, own)
    here |= bind(LEADERSHIP, LeadershipService(lambda: None))
    refused = {method: OnStream(_refuse) for method in METHODS.values() if not method.at_standby}
    infer = Directly(lambda call, _: call.fail(_elsewhere()))
    return {**refused, METHODS[f"/{INFERENCE}/ModelInfer"]: infer, **here}


async def _refuse(_: CallStream, _caller: Caller) -> None:
    raise _elsewhere()


def _elsewhere() -> RefusedError:
    return RefusedError(Refusal.NO_WORKER, "this controller stands by: another one leads")


@asynccontextmanager
async def standing_by(
    config: ControllerConfig, guard: Guard
) -> AsyncIterator[tuple[Http2Server, int, int | None]]:
    """Listen where the controller will. Yields the server, its port, and the port of REST or None.

    Raises ConfigError if the port is taken, or a file cannot be used.
    """
    slabs = Slabs(0)
    door = AdmissionLimits(max_requests=config.max_open_requests, max_bytes=config.max_open_bytes)
    server = Http2Server(
        clock=time.monotonic_ns,
        door=door,
        max_message_bytes=config.max_message_bytes,
        max_connections=config.max_connections,
        slabs=slabs,
        authoriser=guard.authoriser,
    )
    use_tls((server,), config, guard)

    methods = handlers()
    server.serve(methods)
    port = server.add_insecure_port(config.address)
    await server.start()
    try:
        # A liveness probe over HTTP would end the process if the port did not answer.
        async with rest_listener(config, guard, server, methods, stop_grace_s=0) as http_port:
            yield server, port, http_port
    finally:
        # No call waits for an answer here.
        await server.stop(0)
        slabs.close()
