"""The benchmark of killed and stopped processes: what it counts, and that nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright.v1 import inference_pb2 as pb
from experiments.bench.restart import (
    Inquiry,
    Setting,
    StreamClient,
    account,
    back,
    faults,
)
from experiments.study.aims import AIMS


def ended(kind: str, end: str, took_s: float, **changes: float) -> Inquiry:
    return Inquiry(kind, 100.0, end, 100.0 + took_s, **{"num_ends": 1, **changes})  # type: ignore[arg-type]


def test_what_has_no_end_two_ends_or_a_late_answer_is_counted() -> None:
    fine = [ended("short", "OK", 0.05), ended("short", "NO_WORKER", 0.05), ended("long", "OK", 5.0)]
    assert account(fine) == {
        "requests": 3,
        "answered": 2,
        "asked_again": 0,
        "lost": 0,
        "lost_by_name": 0,
        "double": 0,
        "late_success": 0,
    }
    vanished = account([Inquiry("short", 100.0)])
    assert (vanished["lost"], vanished["lost_by_name"]) == (1, 0)
    # Its slack would have sufficed.
    refused = account([ended("long", "NO_WORKER", 5.0)])
    assert (refused["lost"], refused["lost_by_name"]) == (1, 1)
    assert account([ended("short", "OK", 0.05, num_ends=2)])["double"] == 1
    assert account([ended("short", "OK", 0.12)])["late_success"] == 1
    # The client itself stood still for longer than that.
    assert (
        account([ended("short", "OK", 0.12, stood_before_s=1.0, stood_s=1.03)])["late_success"] == 0
    )


def test_the_client_asks_again_whatever_was_on_a_stream_that_broke() -> None:
    async def answer(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        number = 0
        async for message in requests:
            number += 1
            if number == 5:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            request = pb.ModelInferRequest.FromString(message)
            answered = pb.ModelInferResponse(id=request.id)
            yield pb.ModelStreamInferResponse(infer_response=answered).SerializeToString()

    async def ask() -> StreamClient:
        server: Any
        server = grpc.aio.server()
        methods = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(answer)}
        service = "inference.GRPCInferenceService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(2)]
        await server.start()
        client = StreamClient([f"127.0.0.1:{port}" for port in ports], rate=200)
        running = asyncio.create_task(client.run())
        async with asyncio.timeout(30):
            while sum(each.again for each in client.asked) < 5:
                await client.next_answer()
            client.stop()
            while not all(each.end for each in client.asked):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await running
        await server.stop(None)
        return client

    client = asyncio.run(ask())
    assert [each.num_ends for each in client.asked] == [1] * len(client.asked)


# tests/system/test_front_processes.py kills a controller under load in any run.
@pytest.mark.long
def test_nothing_is_lost_when_the_only_controller_is_killed(tmp_path: Path) -> None:
    figures = back(Setting(times=1), tmp_path)
    assert figures["back_answered"] > 0
    assert figures["back_double"] == 0
    # How long it takes is the machine's; requests that it outlasts may be refused.
    if figures["controller_back_s"] < 10:
        assert figures["back_lost"] == 0


@pytest.mark.long
def test_nothing_is_lost_when_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    figures = faults(Setting(times=1), tmp_path)
    assert {name: figures[name] for name in ("lost", "double")} == {"lost": 0, "double": 0}
    assert figures["standby_takeover_s"] > 0
    assert {aim.key for aim in AIMS["guard"]} & figures.keys()
