"""Policies that raise, at any method: what that costs, whom, and where it is shown."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from clockwright.errors import ConfigError, Refusal, RefusedError
from controller.selection import plugins
from controller.selection.core.combination import Rule
from controller.selection.core.journal import FeedbackStatus
from controller.selection.core.query import (
    Choice,
    Combined,
    Observation,
    Prediction,
    Query,
    Service,
)
from controller.selection.messages import application_info
from controller.selection.policies.tallies import EpsilonGreedy, Tallies
from tests.kit.desk import Desk, desk, label

pytestmark = pytest.mark.virtual_time

METHODS = [
    *("init", "select", "combine", "observe", "served"),
    *("resize", "dump", "load", "weights", "remark"),
]
RAISED = [
    RuntimeError("boom"),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
]


class Saboteur(EpsilonGreedy):
    """Raises what it is told to, in the methods that it is told to."""

    watches_service = True
    broken: frozenset[str] = frozenset()
    raised: BaseException = RuntimeError("boom")

    def __init__(self) -> None:
        self._may("constructor")
        super().__init__()

    def _may(self, method: str) -> None:
        if method in type(self).broken:
            raise type(self).raised

    def init(self, models: Sequence[str]) -> Tallies:
        self._may("init")
        return super().init(models)

    def select(self, state: Tallies, query: Query) -> Choice:
        self._may("select")
        return super().select(state, query)

    def combine(
        self,
        state: Tallies,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        self._may("combine")
        return super().combine(state, query, choice, predictions, rule)

    def observe(self, state: Tallies, observation: Observation) -> Tallies:
        self._may("observe")
        return super().observe(state, observation)

    def served(self, state: Tallies, service: Service) -> Tallies:
        self._may("served")
        return super().served(state, service)

    def resize(self, state: Tallies, models: Sequence[str]) -> Tallies:
        self._may("resize")
        return super().resize(state, models)

    def dump(self, state: Tallies) -> dict[str, Any]:
        self._may("dump")
        return super().dump(state)

    def load(self, data: Mapping[str, Any]) -> Tallies:
        self._may("load")
        return super().load(data)

    def weights(self, state: Tallies) -> dict[str, float]:
        self._may("weights")
        return super().weights(state)

    def remark(self, state: Tallies) -> str:
        self._may("remark")
        return super().remark(state)


def saboteur(*methods: str, raised: BaseException) -> type[Saboteur]:
    return type("Saboteur", (Saboteur,), {"broken": frozenset(methods), "raised": raised})


async def put_both(app: Desk, policy: type[Saboteur]) -> None:
    """Put an application whose policy may be broken from now on, and a healthy one on the same models."""
    broken, policy.broken = policy.broken, frozenset()
    app.applications._plugins["saboteur"] = policy
    await app.put("right", "wrong", name="broken", policy="saboteur", default_label=-1)
    await app.put("right", "wrong")
    policy.broken = broken


@pytest.mark.parametrize("raised", RAISED, ids=repr)
@pytest.mark.parametrize("method", METHODS)
async def test_a_policy_that_raises_costs_its_own_application_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, raised: BaseException
) -> None:
    policy = saboteur(method, raised=raised)
    async with desk(tmp_path, store=tmp_path / "store.sqlite") as app:
        await put_both(app, policy)
        running = app.applications.find("broken")
        assert running is not None
        for _ in range(5):
            answered = await app.ask(1, name="broken", context="ann")
            if method in ("select", "combine"):
                assert (label(answered), answered.parameters["default"]) == (-1, True)
                assert answered.parameters["default_reason"] == "FAILED"
            else:
                assert label(answered) in (1, 2)
            await app.teach(answered, label=1)
            healthy = await app.ask(1)
            assert label(healthy) == 1
            assert (await app.teach(healthy, label=1)).status is FeedbackStatus.APPLIED
        await app.applications._states.flush()
        info = await application_info(app.applications, running, "")
        told = [r for r in caplog.records if r.name == "controller.selection.guarded"]
        if method not in ("init", "resize", "load"):
            assert len(told) == 1
            assert "the policy has failed" in info.remark
            assert f"last in {method}: {type(raised).__name__}" in info.remark
        if method != "init":
            await app.put("right", name="broken", policy="saboteur", replace=True)
            assert label(await app.ask(1)) == 1
            await app.weights("ann", name="broken")


@pytest.mark.parametrize("method", ["constructor", "init"])
@pytest.mark.parametrize("raised", RAISED, ids=repr)
async def test_a_policy_that_cannot_begin_is_refused_and_stops_no_start(
    tmp_path: Path, method: str, raised: BaseException
) -> None:
    policy = saboteur(method, raised=raised)
    async with desk(tmp_path, store=tmp_path / "store.sqlite") as app:
        await put_both(app, policy)
        with pytest.raises(ConfigError, match=f"policy saboteur: .*{type(raised).__name__}|boom"):
            await app.put("right", name="another", policy="saboteur")
        assert {r.application.name for r in app.applications.all} == {"app", "broken"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "controller.selection.applications.plugin_policies", lambda: {"saboteur": policy}
        )
        async with desk(tmp_path, store=tmp_path / "store.sqlite") as app:
            assert [r.application.name for r in app.applications.all] == ["app"]
            assert label(await app.ask(1)) == 1


async def test_without_a_default_the_query_is_refused_in_the_policys_words(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        app.applications._plugins["saboteur"] = saboteur("select", raised=SystemExit(3))
        await app.put("right", policy="saboteur")
        with pytest.raises(RefusedError, match=r"policy saboteur: select: SystemExit") as caught:
            await app.ask(1)
        assert caught.value.refusal is Refusal.FAILED


@pytest.mark.parametrize(
    ("method", "returned", "words"),
    [
        ("select", None, "expected a Choice"),
        ("select", Choice(("nobody",)), "expected each once"),
        ("select", Choice(("right", "right")), "expected each once"),
        ("select", Choice(("right",), (1.0,), ("nobody",)), "found shadows"),
        ("select", Choice(["right"]), "expected tuples"),  # type: ignore[arg-type]
        ("combine", 3, "expected a Combined"),
        ("combine", Combined(1 << 70, 1.0), "combine"),
        ("combine", Combined("three", 1.0), "combine"),
        ("combine", Combined(1, 1.0, probabilities=(1.0,)), "found 1 probabilities, expected 0"),
    ],
)
async def test_what_a_policy_must_not_return_is_named(
    tmp_path: Path, method: str, returned: object, words: str
) -> None:
    async with desk(tmp_path) as app:
        policy = type("Odd", (Saboteur,), {method: lambda *_: returned})
        app.applications._plugins["odd"] = policy
        await app.put("right", "wrong", policy="odd", default_label=-1)
        answered = await app.ask(1)
        assert (label(answered), answered.parameters["default_reason"]) == (-1, "FAILED")
        running = app.applications.find("app")
        assert running is not None
        assert words in (await application_info(app.applications, running, "")).remark


@pytest.mark.parametrize("raised", RAISED, ids=repr)
def test_a_package_that_raises_when_it_is_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    module = types.ModuleType("stranger")

    def __getattr__(name: str) -> object:
        raise raised

    monkeypatch.setattr(module, "__getattr__", __getattr__, raising=False)
    monkeypatch.setitem(sys.modules, "stranger", module)
    points = [EntryPoint("stranger", "stranger:Policy", plugins.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    assert plugins.plugin_policies() == {}
    assert type(raised).__name__ in caplog.text
