"""Calls that a front hands on to its controller, which may be gone before it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from clockwright.errors import Refusal, RefusedError
from controller.access.caller import ANYBODY
from controller.front.admission.limits import AdmissionLimits
from controller.front.methods import METHODS, AtFront
from controller.front.services.forwarding import Forwarding

METHOD = next(each for each in METHODS.values() if each.at_front is AtFront.FORWARDED)


@dataclass
class Found:
    """The controller, which knows no fronts."""

    channel: grpc.aio.Channel
    shown: Sequence[tuple[str, str]] = ()


class OneCall:
    """A client's call with one message, which waits for all answers."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()

    def time_left_s(self) -> None:
        """It waits."""

    async def read(self) -> bytes:
        return b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for message in list[bytes]():
            yield message

    async def write(self, _message: bytes) -> None:
        self.answered.set()


async def answer_once(_requests: object, _context: object) -> AsyncIterator[bytes]:
    """A controller that has more to say, later."""
    yield b""
    await asyncio.Event().wait()


async def test_a_call_that_is_handed_on_is_refused_when_its_controller_is_gone() -> None:
    server = grpc.aio.server()
    service, _, name = METHOD.path[1:].rpartition("/")
    handler = grpc.stream_stream_rpc_method_handler(answer_once)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def to_controller(_limit_s: float, _model: Callable[[], str]) -> Found:
        return Found(channel)

    door = AdmissionLimits(max_requests=1, max_bytes=1)
    forwarding = Forwarding(to_controller, door=door, client_shm=False)
    call: Any = OneCall()
    try:
        handed_on = asyncio.ensure_future(
            forwarding.handlers()[METHOD].handle(call, ANYBODY),
        )
        await call.answered.wait()
        # As the front does, when its connection to the controller has ended.
        await channel.close(None)
        with pytest.raises(RefusedError, match="the controller was lost") as refused:
            await handed_on
        assert refused.value.refusal is Refusal.NO_WORKER
        # A client that leaves is no such case.
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = OneCall()
        handed_on = asyncio.ensure_future(forwarding.handlers()[METHOD].handle(call, ANYBODY))
        await call.answered.wait()
        handed_on.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handed_on
    finally:
        await channel.close(None)
        await server.stop(0)
