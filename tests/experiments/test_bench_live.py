"""Parts of the benchmarks of the live path: bare servers, processor time, and the climb of a fed controller."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from clockwright.v1 import inference_pb2 as oip
from experiments.bench.controller import (
    CALM_RPS,
    FIRST_RPS,
    GROWTH,
    TRIES,
    RateStep,
    climb,
    fed,
)
from experiments.bench.live import INFER, PAYLOADS, bare_server, infer_request
from experiments.live.processor_time import cpu_ns, family


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_a_bare_server_answers_with_as_many_bytes_as_the_model(kind: str) -> None:
    with bare_server(kind) as (address, _), grpc.insecure_channel(address) as channel:
        ask: Any = channel.unary_unary(
            INFER, bytes, response_deserializer=oip.ModelInferResponse.FromString
        )
        for name, payload in PAYLOADS.items():
            answer = ask(infer_request(name, payload.shape), timeout=60)
            assert answer.model_name == name
            assert [len(raw) for raw in answer.raw_output_contents] == [payload.answer_bytes]


def test_processor_time_of_a_process_is_what_its_threads_used() -> None:
    def work() -> int:
        begin_ns = time.thread_time_ns()
        while time.thread_time_ns() - begin_ns < 20_000_000:
            pass
        return time.thread_time_ns() - begin_ns

    pid = os.getpid()
    with ThreadPoolExecutor(2) as threads:
        before_ns = cpu_ns([pid])
        used_ns = sum(threads.map(lambda _: work(), range(2)))
        assert cpu_ns([pid]) - before_ns >= used_ns


def test_a_family_is_a_process_and_all_that_it_has_started() -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        tree = family(parent.pid)
        assert tree == [parent.pid, child]
        parent.stdin.close()


class ScriptedPump:
    """Answers all in time up to a rate, and at a higher one leaves one out of ten."""

    def __init__(self, most_rps: float) -> None:
        self.most_rps = most_rps
        self.rates: list[float] = []

    def run(self, rate_rps: float, seconds: float, _seed: int) -> RateStep:
        self.rates.append(rate_rps)
        asked = round(rate_rps * seconds)
        return RateStep(asked, asked if rate_rps <= self.most_rps else asked * 9 // 10)


def no_time() -> int:
    return 0


def climbed(pump: ScriptedPump) -> tuple[float, list[float]]:
    shown: list[float] = []
    look: Callable[[float, RateStep], None] = lambda rate_rps, _: shown.append(rate_rps)  # noqa: E731
    rate_rps, step = climb(pump, no_time, look)
    assert step.passed
    return rate_rps, shown


def test_the_last_rate_at_which_all_is_in_time_is_the_figure() -> None:
    rate_rps, shown = climbed(ScriptedPump(FIRST_RPS * GROWTH**2 + 1))
    assert rate_rps == pytest.approx(FIRST_RPS * GROWTH**2)
    above = FIRST_RPS * GROWTH**3
    assert shown == pytest.approx(
        [FIRST_RPS, FIRST_RPS * GROWTH, FIRST_RPS * GROWTH**2] + [above] * TRIES
    )


def test_a_controller_that_is_late_at_the_lowest_rate_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not all were answered in time"):
        climb(ScriptedPump(CALM_RPS), no_time, lambda *_: None)


def test_every_model_of_a_fed_controller_is_answered_by_the_played_workers() -> None:
    with fed(15, {}) as (pump, pid):
        # Returns when each model was answered.
        pump.ask_each()
        step = pump.run(50, 0.5, seed=1)
        assert pid in family(os.getpid())
    assert step.num_asked > 0
    assert step.num_actions > 0
