"""Applications as users and operators meet them: client, operator, command line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from clockwright import (
    AsyncClient,
    BadRequestError,
    Client,
    ClockwrightError,
    Feedback,
    ModelError,
    RefusedError,
)
from clockwright.cli.main import main
from clockwright.client.client import FeedbackOutcome
from clockwright.client.operator import Operator
from clockwright.errors import StoreError
from clockwright.settings import Flags
from clockwright.v1 import control_pb2 as pb
from controller.process.config import ControllerConfig
from controller.selection import plugins
from controller.selection.core.application import Application
from controller.selection.core.policy import Policy
from controller.selection.core.query import Choice, Observation, Query
from controller.selection.messages import read_application, write_application
from controller.selection.policies import make_policy
from tests.kit.front_end import FrontEndInThread, serving_in_thread

Run = Callable[..., tuple[int, str, str]]
ONE = np.array([[1, 0, 0]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEndInThread]:
    with serving_in_thread(tmp_path_factory.mktemp("models")) as front_end:
        front_end.until(lambda f: f.catalogue.ready)
        yield front_end


@pytest.fixture
def operator(server: FrontEndInThread) -> Iterator[Operator]:
    with Operator(server.address) as operator:
        yield operator
        for info in operator.applications():
            operator.remove_application(info.application.name)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    server: FrontEndInThread,
    operator: Operator,
) -> Run:
    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clockwright", *arguments, "--server", server.address])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        if isinstance(code, str):
            return 1, captured.out, captured.err + code
        return int(code or 0), captured.out, captured.err

    return run_command


def app(*models: str, **fields: Any) -> pb.Application:  # noqa: ANN401
    return pb.Application(**{"name": "app", "models": models, "no_cache": True, **fields})


def test_weights_in_a_store_that_is_away_are_an_error_with_its_words(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.put_application(app("right"))

    async def away(*_: object) -> Mapping[str, float]:
        raise StoreError("redis://there: gone fishing")

    with monkeypatch.context() as patch:
        patch.setattr("controller.selection.applications.Applications.weights", away)
        with pytest.raises(ClockwrightError, match="ABORTED: redis://there: gone fishing"):
            operator.applications("app", context="ann")
    assert operator.applications("app")[0].weights


def test_a_client_asks_and_gives_feedback(server: FrontEndInThread, operator: Operator) -> None:
    operator.put_application(app("right", "wrong", "right-too"))
    with Client(server.address) as client:
        result = client.infer("app", ONE, slo_ms=30_000, context="ann")
        assert result.outputs["label"].tolist() == [1]
        assert result.explanation["models"] == "right,wrong,right-too"
        first, second = client.feedback(
            Feedback(result.query_id, label=1), Feedback(result.query_id, reward=0.5)
        )
        assert (first.status, second.status) == ("APPLIED", "DUPLICATE")
        assert first.losses == {"right": 0.0, "wrong": 1.0, "right-too": 0.0}
        assert first.weights["wrong"] < first.weights["right"]
        with pytest.raises(BadRequestError, match="expected one of them"):
            client.feedback(Feedback(result.query_id))
        assert client.infer("right", ONE, slo_ms=30_000).query_id == ""


def test_an_asyncio_client_does_the_same(server: FrontEndInThread, operator: Operator) -> None:
    operator.put_application(app("right", "wrong"))

    async def ask() -> str:
        async with AsyncClient(server.address) as client:
            result = await client.infer("app", {"x": ONE}, slo_ms=30_000, context="ann")
            (outcome,) = await client.feedback(Feedback(result.query_id, label=1))
            return outcome.status

    assert asyncio.run(ask()) == "APPLIED"


def test_an_operator_sees_weights_move_and_what_became_of_queries(
    server: FrontEndInThread, operator: Operator
) -> None:
    info = operator.put_application(app("right", "wrong", default_label=0))
    assert (info.revision, info.state, info.application.policy) == (1, "READY", "exp4-full")
    with Client(server.address) as client:
        for _ in range(5):
            result = client.infer("app", ONE, slo_ms=30_000, context="ann")
            client.feedback(Feedback(result.query_id, label=1))
        server.do(lambda f: f.worker.failing.update({"right", "wrong"}))
        client.infer("app", ONE, slo_ms=30_000)
        server.do(lambda f: f.worker.failing.clear())
    (info,) = operator.applications("app", context="ann")
    assert [row.model for row in info.weights] == ["right", "wrong"]
    assert info.weights[0].weight > info.weights[1].weight
    assert [row.missing for row in info.weights] == [1, 1]
    assert (info.queries, info.num_contexts) == (6, 1)
    assert [(row.reason, row.count) for row in info.defaults] == [("FAILED", 1)]
    assert [(row.reason, row.count) for row in info.feedbacks] == [("APPLIED", 5)]
    assert operator.erase_context("app", "ann")
    assert not operator.erase_context("app", "ann")


@pytest.mark.parametrize(
    ("application", "error", "message"),
    [
        (app("right", "nobody"), ModelError, "there is no model nobody"),
        (app(), BadRequestError, "models: found none"),
        (
            app("right", combination="sum"),
            BadRequestError,
            "expected one of vote, average, mean, one",
        ),
        (app("right", options_json="[1]"), BadRequestError, "expected a JSON object"),
        (app("right", options_json="{"), BadRequestError, "expected a JSON object"),
        (app("right", options_json='{"eta": -1}'), BadRequestError, "option eta: found -1"),
        (app("right", policy="exp5"), BadRequestError, "found 'exp5'"),
        (app("right", name="no/name"), ModelError, "no/name"),
    ],
)
def test_an_operator_is_told_what_is_wrong(
    operator: Operator, application: pb.Application, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operator.put_application(application)
    with pytest.raises(ModelError, match="there is no application"):
        operator.applications("app")


def test_applications_are_changed_only_when_asked_to(operator: Operator) -> None:
    operator.put_application(app("right", "wrong"))
    with pytest.raises(ModelError, match="already"):
        operator.put_application(app("right"))
    assert operator.put_application(app("right"), replace=True).revision == 2


def test_settings_survive_the_wire() -> None:
    settings = Application(
        name="app",
        models=("a", "b"),
        policy="canary",
        options={"stable": "a", "canary": "b", "steps": [0.5]},
        slo_ns=5,
        default_label=0,
        confidence_threshold=0.25,
        cache=False,
    )
    assert read_application(write_application(settings)) == settings


def test_the_command_line_adds_shows_and_removes(run: Run, server: FrontEndInThread) -> None:
    models = ("--model", "right", "--model", "wrong")
    code, out, err = run("app", "add", "digits", *models, "--option", "eta=0.5", "--default", "3")
    assert (code, err) == (0, "")
    assert "digits, revision 1: READY; policy exp4-full" in out
    assert '{"eta": 0.5}' in out
    code, out, _ = run("infer", "digits", "--random", "--slo-ms", "30000", "--json")
    assert code == 0
    query_id = json.loads(out)["explanation"]["query_id"]
    code, out, _ = run("app", "feedback", query_id, "--label", "0")
    assert (code, out) == (0, "APPLIED: loss of right 0, wrong 1\n")
    code, out, _ = run("app", "list")
    assert "queries: 1, defaults: none, refused: none, feedback: 1 APPLIED" in out
    code, out, _ = run("app", "show", "digits", "--json")
    weights = {row["model"]: row["weight"] for row in json.loads(out)["weights"]}
    assert weights["right"] > weights["wrong"]
    code, out, _ = run("app", "erase", "digits", "ann")
    assert out == "digits knows nothing of ann\n"
    assert run("app", "remove", "digits")[1] == "removed digits\n"
    assert run("app", "list")[1] == "no applications\n"


def test_a_label_on_the_command_line_is_sent_as_it_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Feedback] = []

    def feedback(_: Client, *items: Feedback) -> list[FeedbackOutcome]:
        sent.extend(items)
        return [FeedbackOutcome("q", "APPLIED", {}, {})]

    monkeypatch.setattr(Client, "feedback", feedback)
    for label in ("007", "-1", "123456789012345678901234567890", "cat"):
        assert run("app", "feedback", "q", "--label", label)[0] == 0
        assert sent.pop().label == label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("app", "add", "x", "--model", "nobody"), "there is no model nobody"),
        (("app", "add", "x", "--model", "right", "--option", "eta"), "expected NAME=VALUE"),
        (("app", "show", "nothing"), "there is no application 'nothing'"),
        (("app", "remove", "nothing"), "there is no application nothing"),
        (("app", "feedback", "q"), "expected one of them"),
    ],
)
def test_the_command_line_says_in_one_line_what_is_wrong(
    run: Run, arguments: Sequence[str], message: str
) -> None:
    code, _, err = run(*arguments)
    assert code == 1
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 0


def test_a_refusal_of_an_application_reaches_the_client(
    server: FrontEndInThread, operator: Operator
) -> None:
    operator.put_application(app("right", "wrong", confidence_threshold=0.9))
    with (
        Client(server.address) as client,
        pytest.raises(RefusedError, match="LOW_CONFIDENCE: application app: confidence"),
    ):
        client.infer("app", ONE, slo_ms=30_000)


# --- policies that users bring --------------------------------------------------------------------


class Last(Policy[tuple[str, ...]]):
    """Asks the last model."""

    chooses_one = True

    def init(self, models: Sequence[str]) -> tuple[str, ...]:
        return tuple(models)

    def select(self, state: tuple[str, ...], query: Query) -> Choice:
        return Choice(tuple(query.in_time[-1:]), (1.0,))

    def observe(self, state: tuple[str, ...], observation: Observation) -> tuple[str, ...]:
        return state

    def resize(self, state: tuple[str, ...], models: Sequence[str]) -> tuple[str, ...]:
        return tuple(models)

    def dump(self, state: tuple[str, ...]) -> dict[str, Any]:
        return {"models": state}

    def load(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(data["models"])

    def weights(self, state: tuple[str, ...]) -> dict[str, float]:
        return dict.fromkeys(state, 0.0)


def test_a_policy_comes_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [
        EntryPoint("last", f"{__name__}:Last", plugins.GROUP),
        EntryPoint("exp3", f"{__name__}:Last", plugins.GROUP),
        EntryPoint("broken", "no.such.module:X", plugins.GROUP),
        EntryPoint("number", "math:pi", plugins.GROUP),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Last.__module__])
    with caplog.at_level(logging.WARNING):
        found = plugins.plugin_policies()
    assert found == {"last": Last}
    told = [record for record in caplog.records if record.name == plugins.__name__]
    assert len(told) == 3
    assert isinstance(make_policy("last", {}, others=found), Last)


def test_a_users_policy_is_served(server: FrontEndInThread, operator: Operator) -> None:
    server.do(lambda f: f.applications._plugins.update(last=Last))
    try:
        operator.put_application(app("right", "wrong", policy="last"))
        with Client(server.address) as client:
            assert client.infer("app", ONE, slo_ms=30_000).explanation["models"] == "wrong"
    finally:
        server.do(lambda f: f.applications._plugins.clear())


def test_errors_are_this_projects_own(operator: Operator) -> None:
    with pytest.raises(ClockwrightError, match="there is no application nothing"):
        operator.erase_context("nothing", "ann")


def test_a_selection_store_is_a_flag() -> None:
    config = Flags(ControllerConfig, selection_store="redis://store:6379/2").make()
    assert config.selection.store == "redis://store:6379/2"
