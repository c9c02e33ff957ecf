"""The place of models that workers still prepare, and when to ask for them again."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from clockwright.units import NS_PER_S, ModelId
from clockwright.v1 import control_pb2 as pb
from controller.models.preparing import PreparingModels
from controller.process.preparation import Preparation

SMALL, MIDDLE, LARGE = ModelId("small"), ModelId("middle"), ModelId("large")


def sizes() -> Iterator[tuple[int, ModelId]]:
    yield from ((9, LARGE), (1, SMALL), (5, MIDDLE))


def test_small_models_come_first_and_a_place_is_a_time() -> None:
    now_ns = 0
    preparing = PreparingModels(lambda: now_ns)
    assert [preparing.place(each, sizes) for each in (SMALL, MIDDLE, LARGE)] == [0, 1, 2]
    assert preparing.place(ModelId("new"), sizes) == 3
    assert preparing.retry_ns(LARGE, 2) == 6 * NS_PER_S
    # An hour without models says nothing of how long one takes.
    now_ns += 3600 * NS_PER_S
    preparing.offered()
    for _ in range(20):
        now_ns += 5 * NS_PER_S
        preparing.judged(SMALL)
    assert preparing.retry_ns(LARGE, 2) == pytest.approx(15 * NS_PER_S, rel=0.05)


def test_those_under_way_come_first_share_the_pace_and_may_take_as_long_again() -> None:
    now_ns = 0
    preparing = PreparingModels(lambda: now_ns)
    preparing.begun(SMALL)
    preparing.begun(LARGE)
    assert [preparing.place(each, sizes) for each in (SMALL, LARGE, MIDDLE)] == [0, 0, 2]
    assert [preparing.retry_ns(each, 0) // NS_PER_S for each in (SMALL, LARGE)] == [4, 4]
    assert preparing.retry_ns(MIDDLE, 2) == 6 * NS_PER_S
    # Both end after four seconds: one in two.
    for each in (SMALL, MIDDLE):
        now_ns += 2 * NS_PER_S
        preparing.judged(each)
    assert preparing.retry_ns(MIDDLE, 0) == 2 * NS_PER_S
    now_ns += 50 * NS_PER_S
    assert preparing.retry_ns(LARGE, 0) == 54 * NS_PER_S
    preparing.stopped(LARGE)
    assert preparing.retry_ns(LARGE, 0) == 2 * NS_PER_S


def test_places_are_found_once_in_a_second_however_often_they_are_asked_for() -> None:
    now_ns = 0
    num_looks = 0

    def counted() -> Iterator[tuple[int, ModelId]]:
        nonlocal num_looks
        num_looks += 1
        return sizes()

    preparing = PreparingModels(lambda: now_ns)
    for _ in range(100):
        now_ns += NS_PER_S // 50
        preparing.place(LARGE, counted)
    assert num_looks == 2


def test_progress_is_said_every_ten_models_or_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    said = io.StringIO()
    with Preparation(Console(file=said)) as preparation:
        assert not preparation.count(9, 146)
        assert preparation.count(10, 146)
        assert not preparation.count(11, 146)
        now_s += 10.5
        assert preparation.count(11, 146)
        waiting = pb.ModelInfo(model_id="c", state="LOADING", reason="7 models before it")
        models = [pb.ModelInfo(model_id="b", state="LOADING", reason="optimising"), waiting]
        preparation.say(11, models)
        preparation.show([waiting])
        done = pb.ModelInfo(model_id="a", state="READY")
        preparation.say(1, [done, *models])
        # Nothing is ready meanwhile: what was expected comes nearer, and then is not said.
        now_s += 15
        preparation.say(1, [done, *models])
        now_s += 15
        preparation.say(1, [done, *models])
    assert said.getvalue() == (
        "preparing: 11 of 2 models are ready; b: optimising\n"
        "preparing: 1 of 3 models are ready, the rest in about 21 s; b: optimising\n"
        "preparing: 1 of 3 models are ready, the rest in about 6 s; b: optimising\n"
        "preparing: 1 of 3 models are ready; b: optimising\n"
    )
