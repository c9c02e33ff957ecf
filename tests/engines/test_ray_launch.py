"""What `clockwright up --ray` says while it waits, and until when, without Ray: a clock and answers of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.ray import launch
from engines.ray.kinds import Fronts, KindsFile, KindTable, spelled
from engines.ray.reconcile import RUNNING
from engines.ray.supervisor import nothing_said

LIMIT_S = 300.0
KIND = KindTable(name="a100", max=2, min=2, cpus=4, start_limit_s=LIMIT_S)
WISH = spelled(KindsFile(kinds=(KIND,), fronts=Fronts(labels={"zone": "b"})))
READY = {**nothing_said(), "state": RUNNING, "starts": 1, "host": "h"}
SERVES = {
    "controller-0": {**READY, "address": "h:1"},
    "front-0": {**READY, "address": "h:2"},
}
ONE_PLACED = {"worker-a100-0": READY}


class _TimeoutError(Exception):
    """Ray's of `get`."""


class _ActorError(Exception):
    """Ray's of an actor that has died."""


class FakeRay:
    """Time passes while something is asked of the keeper, which says what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.total: dict[str, float] = {}
        self.free: dict[str, float] = {}
        self.say: Callable[[float], dict[str, Any] | Exception] = lambda _: _TimeoutError()
        self.said = SimpleNamespace(remote=lambda seen: seen)
        ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
        ray.__dict__.update(
            get=self.get,
            cluster_resources=lambda: self.total,
            available_resources=lambda: self.free,
        )
        exceptions.__dict__.update(GetTimeoutError=_TimeoutError, RayActorError=_ActorError)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(launch, "time", clock)

    def get(self, seen: int, timeout: float) -> tuple[int, dict[str, Any]]:
        said = self.say(self.now_s)
        self.now_s += timeout if isinstance(said, _TimeoutError) else 10
        if isinstance(said, Exception):
            raise said
        return seen + 1, said

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def unplaced(self, *names: str) -> dict[str, Any]:
        return {name: {**nothing_said(), "age_s": self.now_s} for name in names}

    def show(self) -> int:
        return launch._show(self, WISH)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


def said(actors: dict[str, Any], ready: int = 0) -> dict[str, Any]:
    return {"actors": actors, "wanted": {"a100": {"ready": ready}}}


def test_it_says_what_waits_for_room_and_ends_at_the_limit(
    ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.total, ray.free = {"CPU": 16.0}, {"CPU": 3.0}

    def say(now_s: float) -> dict[str, Any]:
        waiting = ("worker-a100-0", "worker-a100-1") if now_s < 100 else ("worker-a100-1",)
        return said(SERVES | ONE_PLACED | ray.unplaced(*waiting))

    ray.say = say
    assert ray.show() == 1
    out, err = capsys.readouterr()
    needs = "a node with 4 CPU, 1 clockwright_a100 free"
    assert [line for line in out.splitlines() if "placed" in line] == [
        f"worker-a100: {number} not placed, expected {needs}; found 0 clockwright_a100 in the cluster "
        "and too little CPU free. Add a node (ray start --address=... --resources='{\"clockwright_a100\": 1.0}'), "
        "or ask for less in the file of --kinds"
        for number in (2, 1)
    ]
    again, error = err.splitlines()
    assert again.startswith("worker-a100: 1 not placed")
    assert error.startswith(
        "error: found 2 of worker-a100 not ready, and no progress for 300 s, which is the largest start_limit_s; "
        "what has started stays"
    )
    # From the time when one was placed.
    assert 100 + LIMIT_S <= ray.now_s <= 100 + LIMIT_S + 20


def test_it_goes_on_as_long_as_something_comes_nearer(
    ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(now_s: float) -> dict[str, Any]:
        if now_s < 250:
            return said(ray.unplaced("controller-0"))
        if now_s < 500:
            return said({"controller-0": SERVES["controller-0"]} | ray.unplaced("front-0"))
        return said(SERVES, ready=1 if now_s < 750 else 2)

    ray.say = say
    assert ray.show() == 0
    out, err = capsys.readouterr()
    assert "front: 1 not placed, expected a node with 1 CPU, label zone=b free" in out
    assert out.endswith("ready: clients ask h:2\n")
    assert err == ""


def test_a_keeper_without_room_is_named_too(
    ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ray.show() == 1
    out, err = capsys.readouterr()
    assert out.count("keeper: 1 not placed, expected a node with anything free") == 1
    assert "found 1 of controller, 1 of front, 2 of worker-a100 not ready" in err
    assert ray.now_s == LIMIT_S


def test_a_keeper_that_dies_time_after_time_is_not_waited_for_without_limit(
    ray: FakeRay, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.say = lambda _: _ActorError()
    assert ray.show() == 1
    assert "error: found " in capsys.readouterr().err


def test_what_is_placed_and_dies_again_and_again_is_no_progress(ray: FakeRay) -> None:
    def say(now_s: float) -> dict[str, Any]:
        return said(SERVES | ONE_PLACED, ready=int(now_s / 10) % 2)

    ray.say = say
    assert ray.show() == 1
    assert ray.now_s < LIMIT_S + 60
