"""What is refused when memory gets short, and who is told."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright import AsyncClient, Refusal, RefusedError
from clockwright.client.operator import Operator
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.memory import MemoryWatch, available_bytes, resident_bytes
from controller.front.admission.pressure import LARGE_BYTES, MemoryPressure, MemoryState
from controller.process.app import running
from controller.process.config import ControllerConfig
from tests.kit.front_end import serving, serving_in_thread
from tests.kit.raw_http2 import DATA, END_HEADERS, HEADERS, RawClient, frame, headers

LIMIT_BYTES = 1000


def states(*used: int) -> list[MemoryState]:
    pressure = MemoryPressure(LIMIT_BYTES)
    return [pressure.state for used_bytes in used if pressure.see(used_bytes) or True]


def test_large_requests_are_refused_first_and_then_all() -> None:
    ample, large, shut = MemoryState.AMPLE, MemoryState.LARGE_REFUSED, MemoryState.ALL_REFUSED
    assert states(0, 849, 850, 949, 950, 2000) == [ample, ample, large, large, shut, shut]


def test_what_is_refused_is_taken_again_when_some_more_is_free() -> None:
    ample, large, shut = MemoryState.AMPLE, MemoryState.LARGE_REFUSED, MemoryState.ALL_REFUSED
    assert states(850, 821, 819, 849) == [large, large, ample, ample]
    assert states(950, 921, 919, 949, 819) == [shut, shut, large, large, ample]
    assert states(950, 0) == [shut, ample]


@given(st.lists(st.integers(0, 2 * LIMIT_BYTES), max_size=50))
def test_whatever_happens_the_state_fits_what_is_in_use(used: list[int]) -> None:
    pressure = MemoryPressure(LIMIT_BYTES)
    for used_bytes in used:
        before = pressure.state
        assert pressure.see(used_bytes) == (pressure.state is not before)
        if used_bytes >= 0.95 * LIMIT_BYTES:
            assert pressure.state is MemoryState.ALL_REFUSED
        elif used_bytes >= 0.85 * LIMIT_BYTES:
            assert pressure.state is not MemoryState.AMPLE
        elif used_bytes < 0.82 * LIMIT_BYTES:
            assert pressure.state is MemoryState.AMPLE


# --- what is read ---------------------------------------------------------------------------------


def test_the_least_limit_of_a_control_group_and_those_above_it_holds(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.write_text("12:cpu,cpuacct:/a\n0::/kube/pod\n")
    folder = tmp_path / "fs" / "kube" / "pod"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder.parent / "memory.max").write_text("123456789\n")
    assert available_bytes(group, tmp_path / "fs") == 123_456_789
    (folder / "memory.max").write_text("1000\n")
    assert available_bytes(group, tmp_path / "fs") == 1000


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.write_text("4:memory:/elsewhere/of/the/host\n3:cpuset:/\n")
    folder = tmp_path / "fs" / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    assert available_bytes(group, tmp_path / "fs") == 5000


def test_without_a_limit_the_machine_is_one(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path) > 1 << 28
    assert 1 << 20 < resident_bytes() < available_bytes(tmp_path / "none", tmp_path)


# --- what follows ---------------------------------------------------------------------------------


@pytest.fixture(params=["here", "apart"])
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_door_refuses_what_there_is_no_memory_for_and_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    counted: list[Refusal] = []
    door = AdmissionLimits(
        max_requests=10, max_bytes=1 << 30, count=lambda refusal, _: counted.append(refusal)
    )
    used = [0]
    watch = MemoryWatch(door, LIMIT_BYTES << 20, used_bytes=lambda: used[0] << 20)
    door.enter(LARGE_BYTES)
    used[0] = 870
    for _ in range(3):
        watch.look()
    door.enter(LARGE_BYTES - 1)
    words = (
        "memory is short: found 870 MiB in use, expected less than 850 of 1000; requests of 65536"
    )
    with pytest.raises(RefusedError, match=words) as caught:
        door.enter(LARGE_BYTES)
    assert caught.value.figures == {"memory_bytes": 870 << 20, "memory_limit_bytes": 1000 << 20}
    assert not door.is_shut
    used[0] = 970
    watch.look()
    assert door.is_shut
    with pytest.raises(RefusedError, match="less than 950 of 1000; all requests are refused"):
        door.enter(0)
    used[0] = 100
    watch.look()
    door.enter(LARGE_BYTES)
    assert counted == [Refusal.OVERLOADED] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "memory: 870 of 1000 MiB are in use: large requests are refused",
        "memory: 970 of 1000 MiB are in use: all requests are refused",
        "memory: 100 of 1000 MiB are in use: all requests are taken again",
    ]


async def test_a_large_request_is_refused_and_small_ones_are_served(
    tmp_path: Path, front: str
) -> None:
    door = AdmissionLimits(max_requests=100, max_bytes=1 << 30)
    async with (
        serving(tmp_path, front=front, door=door) as front_end,
        AsyncClient(front_end.address) as client,
    ):
        pressure = MemoryPressure(LIMIT_BYTES)
        pressure.see(900)
        image = {"image": np.zeros((1, 3, 224, 224), np.float32)}
        vector = {"x": np.zeros((1, 3), np.float32)}
        await client.infer("image", image, slo_ms=30_000)
        door.memory_is(pressure)
        with pytest.raises(RefusedError, match="OVERLOADED: memory is short"):
            await client.infer("image", image, slo_ms=30_000)
        await client.infer("double", vector, slo_ms=30_000)
        pressure.see(0)
        door.memory_is(pressure)
        await client.infer("image", image, slo_ms=30_000)
        assert (door.num_requests, door.num_bytes) == (0, 0)


def test_without_memory_a_controller_is_not_ready_and_operators_still_get_in(
    tmp_path: Path,
) -> None:
    """As Kubernetes, Triton's clients and operators see it."""

    async def ask(address: str) -> tuple[bool, bytes, Any]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = channel
            ready = await stub.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"")
            live = await stub.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
            health = await stub.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert live == b"\x08\x01"

        def look() -> Any:  # noqa: ANN401
            with Operator(address) as operator:
                return operator.status()

        return ready == b"\x08\x01", health, await asyncio.to_thread(look)

    async def main(limit_bytes: int) -> tuple[bool, bytes, Any]:
        config = ControllerConfig(port=0, memory_limit_bytes=limit_bytes)
        async with running(config) as controller:
            return await ask(f"127.0.0.1:{controller.port}")

    ready, health, status = asyncio.run(main(1 << 50))
    assert (ready, health, status.ready, status.memory_state) == (True, b"\x08\x01", True, "AMPLE")
    ready, health, status = asyncio.run(main(resident_bytes() // 2))
    assert (ready, health, status.ready) == (False, b"\x08\x02", False)
    assert status.memory_state == "ALL_REFUSED"
    assert status.memory_bytes > status.memory_limit_bytes > 0


async def test_a_front_without_memory_is_not_ready_whatever_its_controller_is(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, front="apart", memory_limit_bytes=1) as front_end:
        async with AsyncClient(front_end.address) as client:
            with pytest.raises(RefusedError, match="all requests are refused"):
                await client.infer("double", {"x": np.zeros((1, 3), "f4")}, slo_ms=30_000)
        for address, expected in (
            (front_end.address, b"\x08\x02"),
            (front_end.controller, b"\x08\x01"),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = channel
                assert await stub.unary_unary("/grpc.health.v1.Health/Check")(b"") == expected


def test_our_own_server_takes_in_no_more_of_a_large_request_than_tells_that_it_is_large(
    tmp_path: Path,
) -> None:
    pressure = MemoryPressure(LIMIT_BYTES)
    pressure.see(900)
    door = AdmissionLimits(max_requests=100, max_bytes=1 << 30)
    door.memory_is(pressure)
    with serving_in_thread(tmp_path, door=door) as server, RawClient(server.address) as client:
        stream_id = client.next_id()
        announced = b"\x00" + (1 << 20).to_bytes(4, "big")
        client.send(frame(HEADERS, END_HEADERS, stream_id, headers()))
        client.send(frame(DATA, 0, stream_id, announced + bytes(10_000)))
        client.settle()
        assert stream_id not in client.ended
        for _ in range(8):
            client.send(frame(DATA, 0, stream_id, bytes(10_000)))
        (end,) = client.wait([stream_id])
        assert end.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert end.text.startswith("OVERLOADED: memory is short")
        server.until(lambda _: door.num_bytes == 0)
