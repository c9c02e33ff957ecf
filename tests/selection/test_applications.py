"""Applications on the request path: a real controller and a worker that is a script.

All tests but those with a gRPC client run on virtual time, so that a machine's pauses make no answer late.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from clockwright.errors import (
    BadRequestError,
    ConfigError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from clockwright.wire.bulk import Buffer
from controller.core.events import RefuseRequest
from controller.front.oip.statuses import ToldStatusError
from controller.port import Ask
from controller.selection.core.combination import Rule
from controller.selection.core.journal import FeedbackItem, FeedbackStatus
from controller.selection.messages import application_info
from tests.kit.asking import Reply
from tests.kit.desk import SLO_NS, Desk, desk, label, run, run_on_real_time
from tests.kit.front_end import serving, until
from tests.kit.scripted_worker import SCRIPTS, Script

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def desk_with_client(
    directory: Path,
) -> AsyncIterator[tuple[Desk, triton.InferenceServerClient]]:
    """Serve on real time, and connect a client."""
    async with (
        serving(directory) as front_end,
        triton.InferenceServerClient(front_end.address) as client,
    ):
        await until(lambda: front_end.catalogue.ready)
        yield Desk(front_end), client


# --- answers --------------------------------------------------------------------------------------


def test_the_members_requests_are_the_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []

    async def main() -> None:
        async with desk(tmp_path) as app:
            asks = app.front_end.runtime.ask

            def spied(model_id: ModelId, ask: Ask, *args: Any, **options: Any) -> RequestId:  # noqa: ANN401
                tenants.append(ask.tenant)
                return asks(model_id, ask, *args, **options)

            monkeypatch.setattr(app.front_end.runtime, "ask", spied)
            await app.put("right", "wrong")
            await app.ask(tenant="ann")

    run(main)
    assert tenants == ["ann", "ann"]


async def test_an_ensemble_answers_with_its_confidence_and_who_answered(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", "right-too")
        answered = await app.ask(2)
        assert label(answered) == 2
        parameters = answered.parameters
        assert parameters.pop("query_id")
        assert parameters == {
            "confidence": "0.6667",
            "weight_mass": "0.6667",
            "models": "right,wrong,right-too",
            "missing": "",
            "default": False,
        }


@pytest.mark.parametrize("where", ["_states.read_in_time", "_candidates"])
async def test_a_query_that_cannot_begin_is_answered_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right")
        queries = app.applications.queries
        with monkeypatch.context() as patched:
            if where == "_candidates":
                patched.setattr(queries, where, _broken)
            else:
                patched.setattr(queries._states, "is_at_hand", lambda *_: False)
                patched.setattr(queries._states, "read_in_time", _broken_later)
            with pytest.raises(ToldStatusError, match="internal error: ValueError"):
                await app.ask()
        assert not queries._open
        assert label(await app.ask(2)) == 2


def _broken(*_: object) -> None:
    raise ValueError("a bug")


async def _broken_later(*_: object) -> None:
    raise ValueError("a bug")


async def test_what_an_ended_or_withdrawn_query_kept_is_free_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right")
        app.worker.slow.add("right")
        queries = app.applications.queries
        asked = asyncio.ensure_future(app.ask())
        await until(lambda: bool(queries._open))
        (asking,) = queries._open.values()
        ensemble = weakref.ref(asking.asked)
        asked.cancel()
        await until(lambda: not queries._open)
        del asking
        gc.disable()
        try:
            await until(lambda: ensemble() is None)
        finally:
            gc.enable()


async def test_averaging_gives_the_label_and_the_mean_probabilities(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", "right-too", combination=Rule.AVERAGE)
        answered = await app.ask(2)
        assert label(answered) == 2
        chances = np.frombuffer(answered.outputs[1], np.float32)
        np.testing.assert_allclose(chances, [0.1, 0.1, 0.5, 0.3], rtol=1e-6)


async def test_with_combination_one_a_models_outputs_pass_as_they_are(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("double", policy="static", combination=Rule.ONE)
        answered = await app.ask(2)
        assert np.frombuffer(answered.outputs[0], np.float32).tolist() == [4, 0, 0]


def test_any_client_asks_an_application_like_a_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk_with_client(tmp_path) as (app, client):
            await app.put("right", "wrong", "right-too")
            metadata = await client.get_model_metadata("app", as_json=True)
            assert metadata["platform"] == "clockwright_application"
            assert [row["name"] for row in metadata["outputs"]] == ["label"]
            assert await client.is_model_ready("app")
            index = await client.get_model_repository_index()
            assert "app" in [model.name for model in index.models]
            image = triton.InferInput("x", [1, 3], "FP32")
            image.set_data_from_numpy(np.array([[3, 0, 0]], np.float32))
            parameters = {"slo_ms": 30_000, "context": "ann"}
            result = await client.infer("app", [image], parameters=parameters)
            assert result.as_numpy("label").tolist() == [3]
            response = result.get_response()
            assert response.model_version == "1"
            assert response.parameters["models"].string_param == "right,wrong,right-too"
            for wrong, message in (
                ({"context": 7}, "parameter context: found int64_param, expected string_param"),
                ({"context": "x" * 257}, "found 257 characters, expected 256 at most"),
            ):
                with pytest.raises(triton.InferenceServerException, match=message):
                    await client.infer("app", [image], parameters=wrong)
            # The models take 4 rows at most.
            for rows in (2, 5):
                several = triton.InferInput("x", [rows, 3], "FP32")
                numbers = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
                several.set_data_from_numpy(numbers)
                if rows == 2:
                    result = await client.infer("app", [several], parameters=parameters)
                    assert result.as_numpy("label").tolist() == [0, 3]
                else:
                    with pytest.raises(triton.InferenceServerException, match="found 5 rows"):
                        await client.infer("app", [several])
            with pytest.raises(triton.InferenceServerException, match="expected '1'"):
                await client.infer("app", [image], model_version="2")
            await app.applications.remove("app")
            with pytest.raises(triton.InferenceServerException, match="there is no model 'app'"):
                await client.infer("app", [image])

    run_on_real_time(main)


# --- several rows, and numbers --------------------------------------------------------------------


@pytest.fixture
def more_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def fourfold(inputs: Sequence[Buffer]) -> list[Buffer]:
        return [(np.frombuffer(inputs[0], np.float32) * 4).tobytes()]

    def crooked(inputs: Sequence[Buffer]) -> list[Buffer]:
        numbers = np.frombuffer(inputs[0], np.float32).reshape(-1, 3)[:, 0].astype(np.int64)
        numbers[numbers == 1] = 0
        return [numbers.tobytes(), np.full((len(numbers), 4), 0.25, np.float32).tobytes()]

    double, right = SCRIPTS["double"], SCRIPTS["right"]
    monkeypatch.setitem(SCRIPTS, "fourfold", Script(double.inputs, double.outputs, fourfold))
    monkeypatch.setitem(SCRIPTS, "crooked", Script(right.inputs, right.outputs, crooked))


def labels(answered: Reply) -> list[int]:
    return [int(label) for label in np.frombuffer(answered.outputs[0], np.int64)]


async def test_each_row_is_combined_on_its_own_and_has_feedback_of_its_own(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", "right-too", options={"crowd": False})
        answered = await app.ask_rows(3, 0, 2)
        assert labels(answered) == [3, 0, 2]
        assert answered.parameters["confidence"] == "0.6667,0.6667,0.6667"
        (infer,) = [i for i in app.worker.infers if i.model_id == "wrong"]
        assert infer.rows == (3,)
        query_id = answered.parameters["query_id"]
        items = [FeedbackItem(f"{query_id}/{row}", label=label) for row, label in ((2, 2), (0, 0))]
        second, first = await app.applications.feedback(items)
        assert second.losses == {"right": 0.0, "wrong": 1.0, "right-too": 0.0}
        # The model "wrong" says 0 where the others say 3.
        assert first.losses == {"right": 1.0, "wrong": 0.0, "right-too": 1.0}
        whole, beyond = await app.applications.feedback(
            [FeedbackItem(str(query_id), label=2), FeedbackItem(f"{query_id}/3", label=2)]
        )
        assert (whole.status, beyond.status) == (FeedbackStatus.UNKNOWN,) * 2
        assert "expected the id of one: ID/0" in whole.message


@pytest.mark.usefixtures("more_models")
async def test_rows_that_are_not_sure_enough_get_the_default_and_the_others_do_not(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "crooked", default_label=9, confidence_threshold=0.6)
        # The second model takes a 1 for a 0.
        answered = await app.ask_rows(2, 1, 0)
        assert labels(answered) == [2, 9, 0]
        assert answered.parameters["default"] is True
        assert answered.parameters["default_rows"] == "1"
        query_id = answered.parameters["query_id"]
        items = [FeedbackItem(f"{query_id}/{row}", reward=1.0) for row in (1, 0)]
        withheld, served = await app.applications.feedback(items)
        assert (withheld.status.value, served.status.value) == ("UNINFORMATIVE", "APPLIED")


async def test_a_late_member_of_a_query_of_several_rows_is_heard_for_each(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        app.worker.slow, app.worker.has_begun = {"wrong"}, True
        answered = await app.ask_rows(2, 1, slo_ns=NS_PER_S)
        app.worker.release()
        await until(lambda: app.front_end.runtime.num_waiting == 0)
        query_id = answered.parameters["query_id"]
        items = [FeedbackItem(f"{query_id}/{row}", label=2 - row) for row in (0, 1)]
        for result in await app.applications.feedback(items):
            assert result.losses == {"right": 0.0, "wrong": 1.0}


@pytest.mark.usefixtures("more_models")
async def test_the_answer_of_an_ensemble_over_numbers_is_the_mean_of_those_that_answered(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        # They say twice and four times the number.
        await app.put(
            "double",
            "fourfold",
            combination=Rule.MEAN,
            policy="static",
            options={"ensemble": True},
            default_label=-1,
        )
        answered = await app.ask_rows(1, 2)
        numbers = np.frombuffer(answered.outputs[0], np.float32).reshape(2, 3)
        np.testing.assert_allclose(numbers[:, 0], [3, 6])
        assert answered.parameters["confidence"] == "1.0000,1.0000"
        # No label tells the members apart.
        result = (
            await app.applications.feedback(
                [FeedbackItem(f"{answered.parameters['query_id']}/0", label=3)]
            )
        )[0]
        assert result.status is FeedbackStatus.UNINFORMATIVE
        app.worker.slow = {"fourfold"}
        alone = await app.ask(3, slo_ns=NS_PER_S)
        assert np.frombuffer(alone.outputs[0], np.float32)[0] == 6
        assert alone.parameters["confidence"] == "0.5000"
        app.worker.release()
        app.worker.failing = {"double", "fourfold"}
        nothing = await app.ask(3)
        assert np.frombuffer(nothing.outputs[0], np.float32).tolist() == [-1, -1, -1]


@pytest.mark.usefixtures("more_models")
async def test_a_policy_that_asks_one_model_learns_which_numbers_are_good(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("double", "fourfold", combination=Rule.MEAN, policy="thompson")
        for _ in range(30):
            answered = await app.ask(1)
            good = np.frombuffer(answered.outputs[0], np.float32)[0] == 2
            await app.teach(answered, reward=float(good))
        weights = await app.weights()
        assert weights["double"] > weights["fourfold"]


# --- defaults and stragglers ----------------------------------------------------------------------


async def test_a_straggler_is_left_behind_when_time_is_up(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", "right-too")
        app.worker.slow = {"wrong"}
        began_ns = app.front_end.runtime.clock()
        answered = await app.ask(2, slo_ns=NS_PER_S)
        assert 990 * NS_PER_MS <= app.front_end.runtime.clock() - began_ns <= NS_PER_S
        assert label(answered) == 2
        assert answered.parameters["missing"] == "wrong"
        assert answered.parameters["confidence"] == "0.6667"
        # A member that is late does not count as wrong.
        result = await app.teach(answered, label=2)
        assert set(result.losses) == {"right", "right-too"}
        assert (await app.weights())["wrong"] == pytest.approx(1 / 3)
        app.worker.release()


async def test_a_member_may_be_refused_while_another_one_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", "right-too")
        app.worker.slow = {"wrong", "right-too"}
        runtime = app.front_end.runtime
        withdraw, ledger = runtime.withdraw, runtime._ledger

        def too_late_for_others(request_id: RequestId) -> None:
            withdraw(request_id)
            # The scheduler looks for requests that it cannot answer in time whenever it is told something.
            for request, _ in list(ledger.requests.values()):
                ledger._give_refusal(
                    RefuseRequest(
                        request_id=request.request_id,
                        model_id=request.model_id,
                        refusal=Refusal.LATE,
                        slo_ns=request.slo_ns,
                    )
                )

        monkeypatch.setattr(runtime, "withdraw", too_late_for_others)
        answered = await app.ask(2, slo_ns=NS_PER_S)
        assert label(answered) == 2
        assert answered.parameters["missing"] == "wrong,right-too"
        assert not ledger.requests
        app.worker.release()


@pytest.mark.parametrize("joined", [False, True])
async def test_what_a_late_member_says_reaches_the_cache_and_the_feedback(
    tmp_path: Path, joined: bool
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", "right-too", cache=True)
        app.worker.slow, app.worker.has_begun = {"wrong"}, True
        asking = [app.ask(2, slo_ns=NS_PER_S) for _ in range(1 + joined)]
        answers = await asyncio.gather(*asking)
        assert [a.parameters["missing"] for a in answers] == ["wrong"] * len(answers)
        # Its SLO has passed as well.
        await asyncio.sleep(1)
        app.worker.release()
        await until(lambda: app.front_end.runtime.num_waiting == 0)
        for answered in answers:
            result = await app.teach(answered, label=2)
            assert result.losses == {"right": 0.0, "wrong": 1.0, "right-too": 0.0}
        weights = await app.weights()
        assert weights["wrong"] < 1 / 3 < weights["right"]
        # The next who asks the same gets it from the cache.
        num_rows = sum(len(infer.rows) for infer in app.worker.infers)
        again = await app.ask(2)
        assert again.parameters["models"].count("wrong") == 1  # type: ignore[union-attr]
        assert sum(len(infer.rows) for infer in app.worker.infers) == num_rows


async def test_a_late_answer_after_the_feedback_changes_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        app.worker.slow, app.worker.has_begun = {"wrong"}, True
        answered = await app.ask(2, slo_ns=NS_PER_S)
        await app.teach(answered, label=2)
        app.worker.release()
        await until(lambda: app.front_end.runtime.num_waiting == 0)
        assert (await app.teach(answered, label=2)).status is FeedbackStatus.DUPLICATE


async def test_an_answer_does_not_wait_longer_than_for_its_members(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        began_ns = app.front_end.runtime.clock()
        await app.ask(2)
        assert app.front_end.runtime.clock() - began_ns < 100 * NS_PER_MS


async def test_members_that_cannot_all_be_in_time_are_left_out_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("long-1", "long-2", "long-3")
        answered = await app.ask(2, slo_ns=5 * NS_PER_S)
        assert answered.parameters["models"] == "long-1,long-2"
        assert answered.parameters["missing"] == "long-3"
        assert answered.parameters["confidence"] == "0.6667"
        assert {infer.model_id for infer in app.worker.infers} == {"long-1", "long-2"}
        assert not app.applications.find("app").counts.defaults  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reason", "trouble"),
    [
        ("LATE", lambda app: app.worker.slow.add("right")),
        ("FAILED", lambda app: app.worker.failing.add("right")),
        ("NO_WORKER", lambda app: app.worker.leave()),
        ("DRAINING", lambda app: app.front_end.runtime.close_admission()),
    ],
)
async def test_the_default_comes_with_its_reason(
    tmp_path: Path, reason: str, trouble: Callable[[Desk], None]
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", default_label=-1)
        await app.ask(1)
        trouble(app)
        answered = await app.ask(1, slo_ns=NS_PER_S)
        assert label(answered) == -1
        assert answered.parameters["default"] is True
        assert answered.parameters["default_reason"] == reason
        assert answered.parameters["confidence"] == "0.0000"
        # No model said anything, so nothing is learned.
        result = await app.teach(answered, label=1)
        assert result.status is FeedbackStatus.UNINFORMATIVE


async def test_without_a_default_the_query_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("long-1", "long-2")
        with pytest.raises(RefusedError, match="no model answered in time") as caught:
            await app.ask(1, slo_ns=1000 * NS_PER_MS)
        assert caught.value.refusal is Refusal.INFEASIBLE


async def test_answers_that_are_not_sure_enough_are_withheld_and_learned_from(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", default_label=9, confidence_threshold=0.6)
        answered = await app.ask(1)
        assert label(answered) == 9
        assert answered.parameters["default_reason"] == "LOW_CONFIDENCE"
        assert answered.parameters["models"] == "right,wrong"
        result = await app.teach(answered, label=1)
        assert result.losses == {"right": 0.0, "wrong": 1.0}
        await app.put("right", "wrong", confidence_threshold=0.6, replace=True)
        with pytest.raises(RefusedError, match=r"confidence 0\.50 is below 0\.6"):
            await app.ask(1)


async def test_a_cold_model_that_was_left_out_is_loaded_for_the_next_query(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("cold", default_label=0)
        first = await app.ask(1, slo_ns=5 * NS_PER_S)
        assert first.parameters["default_reason"] == "COLD"
        statistics = app.front_end.runtime.statistics
        await until(lambda: "cold" in statistics().workers[0].resident)
        assert label(await app.ask(1, slo_ns=5 * NS_PER_S)) == 1


# --- learning -------------------------------------------------------------------------------------


def test_weights_follow_feedback_through_a_failure_and_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put(
                "right", "right-too", "wrong", options={"eta": 1.0, "share": 0.01, "crowd": False}
            )

            async def teach(rounds: int) -> dict[str, float]:
                for number in range(rounds):
                    await app.teach(await app.ask(number % 3), label=number % 3)
                return await app.weights()

            assert (await teach(20))["right"] == pytest.approx(0.5, abs=0.01)
            app.worker.poisoned = {"right"}
            assert (await teach(20))["right"] < 0.02
            app.worker.poisoned, app.worker.failing = set(), {"right-too"}
            # Only "right" answers beside the wrong model, so it gains all that the wrong one loses.
            recovered = await teach(60)
            assert recovered["right"] > 10 * recovered["wrong"]

    run(main)


async def test_feedback_says_what_it_changed_and_counts_once(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", policy="exp4")
        answers = [await app.ask(1) for _ in range(3)]
        ids = [str(answered.parameters["query_id"]) for answered in answers]
        items = [
            FeedbackItem(ids[2], label=1),
            FeedbackItem(ids[0], reward=1.0),
            FeedbackItem(ids[2], label=1),
            FeedbackItem("never", label=1),
        ]
        results = await app.applications.feedback(items)
        assert [result.status.value for result in results] == [
            "APPLIED",
            "APPLIED",
            "DUPLICATE",
            "UNKNOWN",
        ]
        assert results[0].losses == {"right": 0.0, "wrong": 1.0}
        assert results[1].weights == await app.weights()
        # A reward says something only of the models that said the served label: here, of one.
        assert list(results[1].losses.values()) == [0.0]
        assert results[2].losses == results[2].weights == {}


async def test_a_query_id_says_nothing_of_another_ones(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", cache=True)
        ids = [str((await app.ask(1)).parameters["query_id"]) for _ in range(200)]
        assert {len(found) for found in ids} == {32}
        # In 200 random ids, each of the 16 digits is missing somewhere with a chance of 0.001 %.
        for digits in zip(*ids, strict=True):
            assert len(set(digits)) > 8
        following = [int(after, 16) - int(before, 16) for before, after in pairwise(ids)]
        assert len(set(following)) == len(following)


async def test_a_reward_that_full_information_cannot_use_is_called_uninformative(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        await app.teach(await app.ask(1), label=1)
        before = await app.weights()
        for reward in (1.0, 0.0):
            result = await app.teach(await app.ask(1, context="ann"), reward=reward)
            assert result.status is FeedbackStatus.UNINFORMATIVE
            assert "exp4-full learns nothing from it" in result.message
        assert await app.weights() == await app.weights("ann") == before


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (FeedbackItem("", label=1), "feedback 1: query_id: found none"),
        (FeedbackItem("q"), "feedback 1: found neither, expected either label or reward"),
        (FeedbackItem("q", label=1, reward=0.5), "feedback 1: found both"),
        (FeedbackItem("q", reward=1.5), "feedback 1: reward: found 1.5, expected 0 to 1"),
        (FeedbackItem("q", reward=float("nan")), "reward: found nan"),
    ],
)
async def test_bad_feedback_is_refused_whole(
    tmp_path: Path, item: FeedbackItem, message: str
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        good = FeedbackItem(str((await app.ask(1)).parameters["query_id"]), label=1)
        with pytest.raises(BadRequestError, match=message):
            await app.applications.feedback([good, item])
        (result,) = await app.applications.feedback([good])
        assert result.status is FeedbackStatus.APPLIED


async def test_each_user_has_weights_of_his_own_and_a_new_one_everybodys(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", options={"eta": 1.0, "crowd": False})
        for _ in range(5):
            await app.teach(await app.ask(1, context="ann"), label=1)
        everybody = await app.weights()
        assert everybody["right"] > 0.9
        assert await app.weights("bob") == everybody
        for _ in range(12):
            # Bob's feedback says that the model "wrong" is right.
            await app.teach(await app.ask(1, context="bob"), label=2)
        assert (await app.weights("bob"))["wrong"] > 0.9
        assert (await app.weights("ann"))["right"] > 0.9


# --- the prediction cache -------------------------------------------------------------------------


async def test_a_repeated_question_is_not_computed_again(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", cache=True)
        answers = [await app.ask(1), await app.ask(1), await app.ask(2)]
        assert [label(answered) for answered in answers] == [1, 1, 2]
        assert sum(len(infer.rows) for infer in app.worker.infers) == 4
        assert app.applications.cache_statistics().hits == 2


def test_a_model_that_is_asked_directly_uses_the_cache_only_if_it_is_told_to(
    tmp_path: Path,
) -> None:
    (tmp_path / "right").mkdir()
    (tmp_path / "right" / "config.toml").write_text("cache = true\n")

    async def main() -> None:
        async with desk_with_client(tmp_path) as (app, client):

            async def ask(model: str, *numbers: float, **parameters: Any) -> list[int]:  # noqa: ANN401
                rows = np.array([[number, 0, 0] for number in numbers], np.float32)
                image = triton.InferInput("x", list(rows.shape), "FP32")
                image.set_data_from_numpy(rows)
                result = await client.infer(
                    model, [image], parameters={"slo_ms": 30_000, **parameters}
                )
                return [int(label) for label in result.as_numpy("label")]

            def num_asked(model: str) -> int:
                return sum(infer.model_id == model for infer in app.worker.infers)

            for _ in range(3):
                assert await ask("right", 2) == [2]
                assert await ask("right", 2, 3) == [2, 3]
                assert await ask("wrong", 2) == [3]
            assert (num_asked("right"), num_asked("wrong")) == (2, 3)
            # Who wants to know where the time went gets an answer that took some.
            assert await ask("right", 2, explain=True) == [2]
            assert num_asked("right") == 3
            # An application finds what was asked for directly, and another version is asked anew.
            await app.put("right", cache=True)
            assert label(await app.ask(2)) == 2
            assert num_asked("right") == 3
            await app.front_end.catalogue.reload("right")
            assert await ask("right", 2) == [2]
            assert num_asked("right@2") == 1

    run_on_real_time(main)


async def test_questions_at_the_same_time_share_one_computation(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", cache=True)
        app.worker.hold = True
        asking = [asyncio.create_task(app.ask(1)) for _ in range(5)]
        await until(lambda: len(app.worker.held) == 1)
        # The query that asked first goes away; the others still wait for the answer.
        asking[0].cancel()
        await asyncio.wait(asking[:1])
        app.worker.release()
        assert [label(answered) for answered in await asyncio.gather(*asking[1:])] == [1] * 4
        assert len(app.worker.infers) == 1


async def test_with_the_last_who_waits_the_request_is_withdrawn(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", cache=True)
        app.worker.hold = True
        asking = [asyncio.create_task(app.ask(1)) for _ in range(2)]
        await until(lambda: len(app.worker.held) == 1)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await until(lambda: app.front_end.runtime.num_waiting == 0)
        app.worker.release()
        assert label(await app.ask(1)) == 1


async def test_who_joined_a_computation_that_was_refused_asks_for_itself(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", cache=True)
        app.worker.hold = True
        asking = [asyncio.create_task(app.ask(1, slo_ns=slo_ns)) for slo_ns in (NS_PER_S, SLO_NS)]
        await until(lambda: len(app.worker.held) == 1)
        assert len(app.worker.infers) == 1
        await asyncio.wait(asking[:1])
        await until(lambda: len(app.worker.infers) == 2)
        app.worker.release()
        first, second = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, RefusedError)
        assert isinstance(second, Reply)
        assert label(second) == 1


async def test_a_new_version_is_asked_anew(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", cache=True)
        assert label(await app.ask(1)) == 1
        app.worker.poisoned = {"right"}
        assert label(await app.ask(1)) == 1
        await app.front_end.catalogue.reload("right")
        assert label(await app.ask(1)) == 2


# --- coming, changing, going ----------------------------------------------------------------------


async def test_a_changed_application_keeps_what_it_has_learned(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", options={"eta": 1.0, "crowd": False})
        for context in ("", "ann"):
            await app.teach(await app.ask(1, context=context), label=1)
        before, ann = await app.weights(), await app.weights("ann")
        open_query = await app.ask(1)
        await app.put("right", "wrong", "worse", options={"eta": 0.5, "crowd": False}, replace=True)
        for old, new in ((before, await app.weights()), (ann, await app.weights("ann"))):
            assert new["right"] / new["wrong"] == pytest.approx(old["right"] / old["wrong"])
            assert new["worse"] == pytest.approx(1 / 3)
        assert (await app.teach(open_query, label=1)).status is FeedbackStatus.UNKNOWN
        # A query that is answered only after the change cannot be learned from either.
        waiting = asyncio.create_task(app.ask(1))
        await asyncio.sleep(0)
        await app.put("right", "wrong", options={"eta": 0.5, "crowd": False}, replace=True)
        assert (await app.teach(await waiting, label=1)).status is FeedbackStatus.UNKNOWN
        # Another policy starts afresh.
        await app.put("right", "wrong", policy="thompson", replace=True)
        assert await app.weights("ann") == {"right": 0.5, "wrong": 0.5}


async def test_a_state_is_taken_to_a_new_revision_once_and_never_back(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        await app.teach(await app.ask(1, context="ann"), label=1)
        earlier = app.applications.find("app")
        assert earlier is not None
        await app.put("right", "worse", replace=True)
        later = await app.weights("ann")
        # This query was under way when the application was changed.
        weights, _ = await app.applications.weights(earlier, "ann")
        assert set(weights) == {"right", "wrong"}
        assert await app.weights("ann") == later
        held = app.applications._states._contexts.find("app", "ann")
        assert held is not None
        assert held.running is app.applications.find("app")


@pytest.mark.parametrize(
    ("models", "settings", "error", "message"),
    [
        (("right", "nobody"), {}, ModelError, "there is no model nobody"),
        (("right", "double"), {}, ModelError, "double does not fit: found outputs y FP32"),
        (("right", "image"), {}, ModelError, "image does not fit: found"),
        (("right",), {"name": "wrong"}, ModelError, "there is a model of that name"),
        (("right",), {"name": "a/b"}, ModelError, "a/b"),
        (("right",), {"label_output": "y"}, ModelError, "expected one named 'y'"),
        (("right",), {"label_output": "probabilities"}, ModelError, "expected one integer"),
        (("right",), {"combination": Rule.ONE}, ConfigError, "expected one that chooses one"),
        (("right",), {"combination": Rule.MEAN}, ModelError, "expected numbers of FP16, FP32"),
        (("right",), {"policy": "exp5"}, ConfigError, "found 'exp5'"),
        (
            ("right",),
            {"policy": "canary", "options": {"stable": "right", "canary": "new"}},
            ConfigError,
            "option canary: found 'new'",
        ),
        (
            ("right",),
            {"policy": "static", "options": {"model": "new"}},
            ConfigError,
            "option model: found 'new'",
        ),
        (("right",), {"policy": "ab", "options": {"shares": [1, 2]}}, ConfigError, "policy ab"),
    ],
)
async def test_an_application_that_cannot_work_is_refused(
    tmp_path: Path,
    models: tuple[str, ...],
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    async with desk(tmp_path) as app:
        with pytest.raises(error, match=message):
            await app.put(*models, **settings)
        assert app.applications.all == []


async def test_names_of_applications_and_models_do_not_clash(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right")
        with pytest.raises(ModelError, match="there is an application app already"):
            await app.put("wrong")
        (tmp_path / "app" / "1").mkdir(parents=True)
        (tmp_path / "app" / "1" / "model.onnx").write_bytes(b"scripted")
        with pytest.raises(ModelError, match="there is an application app already"):
            await app.front_end.catalogue.reload("app")
        await app.applications.remove("app")
        with pytest.raises(UnknownModelError, match="there is no application app"):
            await app.applications.remove("app")


async def test_a_removed_model_is_left_out_and_a_returned_one_taken_back(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        app.front_end.catalogue.remove("wrong")
        assert (await app.ask(1)).parameters["models"] == "right"
        await app.front_end.catalogue.reload("wrong")
        assert (await app.ask(1)).parameters["models"] == "right,wrong"


async def test_an_application_whose_models_are_all_gone_is_unavailable_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right")
        running = app.applications.all[0]
        info = await application_info(app.applications, running, "")
        assert (info.state, info.remark) == ("READY", "")
        app.front_end.catalogue.remove("right")
        info = await application_info(app.applications, running, "")
        assert info.state == "UNAVAILABLE"
        assert info.remark.startswith(
            "application app: none of its models can answer: there is no model right; "
        )


async def test_an_application_whose_only_worker_left_says_that_it_waits_for_one(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong")
        app.worker.leave()
        running = app.applications.all[0]
        info = await application_info(app.applications, running, "")
        waits = "application app: none of its models can answer: waiting for a worker"
        assert (info.state, info.remark) == ("LOADING", waits)
        app.front_end.catalogue.remove("wrong")
        info = await application_info(app.applications, running, "")
        assert info.remark.startswith(f"{waits}; there is no model wrong; ")


# --- rollouts on the request path -----------------------------------------------------------------


async def test_a_shadow_is_compared_but_never_answers(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        await app.put("right", "wrong", policy="shadow", options={"share": 1.0})
        app.worker.slow = {"wrong"}
        answered = await app.ask(1)
        assert answered.parameters["models"] == "right"
        await until(lambda: len(app.worker.held) == 1)
        app.worker.release()
        await until(lambda: not app.applications.queries._shadowing)
        result = await app.teach(answered, label=1)
        assert result.losses == {"right": 0.0, "wrong": 1.0}


async def test_a_canary_that_is_too_slow_for_the_slo_is_remarked_upon(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        options = {"stable": "right", "canary": "long-1", "steps": [1.0]}
        await app.put("right", "long-1", policy="canary", options=options)
        for _ in range(3):
            assert (await app.ask(1, slo_ns=NS_PER_S)).parameters["models"] == "right"
        running = app.applications.find("app")
        assert running is not None
        _, remark = await app.applications.weights(running, "")
        assert "long-1 could not be in time for 3 of the 3 queries" in remark


async def test_a_canary_whose_engine_fails_is_rolled_back_without_any_feedback(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store.sqlite"
    async with desk(tmp_path, store=store) as app:
        options = {"stable": "right", "canary": "wrong", "steps": [1.0]}
        await app.put("right", "wrong", policy="canary", options=options, default_label=0)
        app.worker.failing = {"wrong"}
        for _ in range(10):
            await app.ask(1)
        answered = await app.ask(1)
        assert answered.parameters["models"] == "right"
        assert await app.weights("anybody") == {"right": 1.0, "wrong": 0.0}
    # The rollback stays after a restart.
    async with desk(tmp_path, store=store) as app:
        assert await app.weights("anybody") == {"right": 1.0, "wrong": 0.0}


def test_grpc_statuses_of_an_applications_refusals(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk_with_client(tmp_path) as (app, client):
            await app.put("right", "wrong", confidence_threshold=0.9)
            image = triton.InferInput("x", [1, 3], "FP32")
            image.set_data_from_numpy(np.array([[3, 0, 0]], np.float32))
            with pytest.raises(triton.InferenceServerException, match="LOW_CONFIDENCE") as caught:
                await client.infer("app", [image], parameters={"slo_ms": 30_000})
            assert grpc.StatusCode.FAILED_PRECONDITION.name in str(caught.value.status())

    run_on_real_time(main)
