"""What a front charges an answer for its way to the client, the schedule keeps free: none is computed for nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from clockwright import Client, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.wire.clock_sync import ClockSync
from controller.core import SchedulerConfig
from controller.core.admission import WAY_BACK_NS, way_back_of
from controller.process.app import running
from tests.kit.echo_serving import config, end, ready, worker
from tests.kit.front_end import serving
from tests.kit.slow_echo import VALUES, SlowEcho


@pytest.mark.parametrize("slo_ms", [0.02, 0.4])
async def test_a_controller_keeps_free_what_its_front_charges_whatever_else_its_margin_is(
    tmp_path: Path, slo_ms: float
) -> None:
    def ask(address: str) -> RefusedError:
        with Client(address) as client, pytest.raises(RefusedError) as caught:
            client.infer("m", np.zeros((1, VALUES), np.float32), slo_ms=slo_ms)
        return caught.value

    device = SlowEcho(tmp_path / "cache")
    scheduler = SchedulerConfig(margin_ns=0, action_timeout_ns=1000 * NS_PER_S)
    async with running(config(tmp_path, scheduler=scheduler)) as controller:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        refused = await asyncio.to_thread(ask, f"127.0.0.1:{controller.port}")
        assert refused.figures["margin_ns"] == way_back_of(int(slo_ms * NS_PER_MS)) > 0
        await end(serving)
    await device.close()


async def test_the_way_to_a_front_that_is_far_away_is_spent_of_the_slo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(address: str, slo_s: float) -> str:
        with Client(address) as client:
            try:
                client.infer("double", np.zeros((1, 3), np.float32), slo_ms=1000 * slo_s)
            except RefusedError as refused:
                return refused.refusal.value
        return "OK"

    async with serving(tmp_path, front="apart") as front_end:
        assert await asyncio.to_thread(ask, front_end.address, 30) == "OK"
        assert front_end.fronts is not None
        (link,) = front_end.fronts.links
        # From now on the front is a minute away, there and back, whatever its lifesigns say.
        monkeypatch.setattr(ClockSync, "heard", lambda *_, **__: None)
        for clock in (link._pulse.clock, link.asks):
            monkeypatch.setattr(clock, "round_trip_ns", 60 * NS_PER_S)
        assert await asyncio.to_thread(ask, front_end.address, 20) == "LATE"
        assert await asyncio.to_thread(ask, front_end.address, 90) == "OK"


def test_a_twentieth_of_an_slo_is_charged_and_four_ms_at_most() -> None:
    assert way_back_of(10 * NS_PER_MS) == NS_PER_MS // 2
    assert way_back_of(NS_PER_S) == WAY_BACK_NS == 4 * NS_PER_MS
