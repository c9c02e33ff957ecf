"""Applications on the request path: a real controller and a worker that is a script.

All tests but those with a gRPC client run on virtual time, so that a machine's pauses make no answer late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.runtime import Answer
from controller.selection.core.combination import Rule
from controller.selection.core.journal import FeedbackItem, FeedbackStatus
from controller.selection.queries import Answered
from tests.kit.desk import Desk, desk, label, run, run_on_real_time
from tests.kit.front_end import serving, until


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
            submit = app.front_end.runtime.submit

            def spied(*args: Any, **options: Any) -> asyncio.Future[Answer]:  # noqa: ANN401
                tenants.append(options["tenant"])
                return submit(*args, **options)

            monkeypatch.setattr(app.front_end.runtime, "submit", spied)
            await app.put("right", "wrong")
            await app.ask(tenant="ann")

    run(main)
    assert tenants == ["ann", "ann"]


def test_an_ensemble_answers_with_its_confidence_and_who_answered(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_averaging_gives_the_label_and_the_mean_probabilities(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong", "right-too", combination=Rule.AVERAGE)
            answered = await app.ask(2)
            assert label(answered) == 2
            chances = np.frombuffer(answered.outputs[1], np.float32)
            np.testing.assert_allclose(chances, [0.1, 0.1, 0.5, 0.3], rtol=1e-6)

    run(main)


def test_with_combination_one_a_models_outputs_pass_as_they_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("double", policy="static", combination=Rule.ONE)
            answered = await app.ask(2)
            assert np.frombuffer(answered.outputs[0], np.float32).tolist() == [4, 0, 0]

    run(main)


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
            two = triton.InferInput("x", [2, 3], "FP32")
            two.set_data_from_numpy(np.zeros((2, 3), np.float32))
            with pytest.raises(triton.InferenceServerException, match="found 2 rows"):
                await client.infer("app", [two])
            with pytest.raises(triton.InferenceServerException, match="expected '1'"):
                await client.infer("app", [image], model_version="2")
            await app.applications.remove("app")
            with pytest.raises(triton.InferenceServerException, match="there is no model 'app'"):
                await client.infer("app", [image])

    run_on_real_time(main)


# --- defaults and stragglers ----------------------------------------------------------------------


def test_a_straggler_is_left_behind_when_time_is_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong", "right-too")
            app.worker.slow = {"wrong"}
            began_ns = app.front_end.runtime.clock()
            answered = await app.ask(2, slo_ns=NS_PER_S)
            assert 990 * NS_PER_MS <= app.front_end.runtime.clock() - began_ns <= NS_PER_S
            assert label(answered) == 2
            assert answered.parameters["missing"] == "wrong"
            assert answered.parameters["confidence"] == "0.6667"
            # The late member's request was withdrawn: its answer comes too late for every query.
            await until(lambda: app.front_end.runtime.num_waiting == 0)
            app.worker.release()
            # A member that was late does not count as wrong.
            result = await app.teach(answered, label=2)
            assert set(result.losses) == {"right", "right-too"}
            assert (await app.weights())["wrong"] == pytest.approx(1 / 3)

    run(main)


def test_an_answer_does_not_wait_longer_than_for_its_members(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong")
            began_ns = app.front_end.runtime.clock()
            await app.ask(2)
            assert app.front_end.runtime.clock() - began_ns < 100 * NS_PER_MS

    run(main)


def test_members_that_cannot_all_be_in_time_are_left_out_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("long-1", "long-2", "long-3")
            answered = await app.ask(2, slo_ns=5 * NS_PER_S)
            assert answered.parameters["models"] == "long-1,long-2"
            assert answered.parameters["missing"] == "long-3"
            assert answered.parameters["confidence"] == "0.6667"
            assert {infer.model_id for infer in app.worker.infers} == {"long-1", "long-2"}
            assert not app.applications.find("app").counts.defaults  # type: ignore[union-attr]

    run(main)


@pytest.mark.parametrize(
    ("reason", "trouble"),
    [
        ("LATE", lambda app: app.worker.slow.add("right")),
        ("FAILED", lambda app: app.worker.failing.add("right")),
        ("NO_WORKER", lambda app: app.worker.leave()),
        ("DRAINING", lambda app: app.front_end.runtime.close_admission()),
    ],
)
def test_the_default_comes_with_its_reason(
    tmp_path: Path, reason: str, trouble: Callable[[Desk], None]
) -> None:
    async def main() -> None:
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

    run(main)


def test_without_a_default_the_query_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("long-1", "long-2")
            with pytest.raises(RefusedError, match="no model answered in time") as caught:
                await app.ask(1, slo_ns=1000 * NS_PER_MS)
            assert caught.value.refusal is Refusal.INFEASIBLE

    run(main)


def test_answers_that_are_not_sure_enough_are_withheld_and_learned_from(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_a_cold_model_that_was_left_out_is_loaded_for_the_next_query(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("cold", default_label=0)
            first = await app.ask(1, slo_ns=5 * NS_PER_S)
            assert first.parameters["default_reason"] == "COLD"
            statistics = app.front_end.runtime.statistics
            await until(lambda: "cold" in statistics().workers[0].resident)
            assert label(await app.ask(1, slo_ns=5 * NS_PER_S)) == 1

    run(main)


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


def test_feedback_says_what_it_changed_and_counts_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong")
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
            assert results[0].weights == await app.weights()
            # A reward says something only of the models that said the served label: here, of one.
            assert results[1].losses == {"right": 0.0}
            assert results[2].losses == results[2].weights == {}

    run(main)


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
def test_bad_feedback_is_refused_whole(tmp_path: Path, item: FeedbackItem, message: str) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong")
            good = FeedbackItem(str((await app.ask(1)).parameters["query_id"]), label=1)
            with pytest.raises(BadRequestError, match=message):
                await app.applications.feedback([good, item])
            (result,) = await app.applications.feedback([good])
            assert result.status is FeedbackStatus.APPLIED

    run(main)


def test_each_user_has_weights_of_his_own_and_a_new_one_everybodys(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


# --- the prediction cache -------------------------------------------------------------------------


def test_a_repeated_question_is_not_computed_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong", cache=True)
            answers = [await app.ask(1), await app.ask(1), await app.ask(2)]
            assert [label(answered) for answered in answers] == [1, 1, 2]
            assert sum(len(infer.rows) for infer in app.worker.infers) == 4
            assert app.applications.cache_statistics().hits == 2

    run(main)


def test_questions_at_the_same_time_share_one_computation(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_with_the_last_who_waits_the_request_is_withdrawn(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_who_joined_a_computation_that_failed_asks_for_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", cache=True)
            app.worker.hold = True
            asking = [asyncio.create_task(app.ask(1)) for _ in range(2)]
            await until(lambda: len(app.worker.held) == 1)
            app.worker.failing = {"right"}
            app.worker.release()
            await asyncio.sleep(0)  # there is no other worker, so it is run here once more
            app.worker.failing = set()
            first, second = await asyncio.gather(*asking, return_exceptions=True)
            assert isinstance(first, RefusedError)
            assert isinstance(second, Answered)
            assert label(second) == 1

    run(main)


def test_a_new_version_is_asked_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", cache=True)
            assert label(await app.ask(1)) == 1
            app.worker.poisoned = {"right"}
            assert label(await app.ask(1)) == 1
            await app.front_end.catalogue.reload("right")
            assert label(await app.ask(1)) == 2

    run(main)


# --- coming, changing, going ----------------------------------------------------------------------


def test_a_changed_application_keeps_what_it_has_learned(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong", options={"eta": 1.0, "crowd": False})
            for context in ("", "ann"):
                await app.teach(await app.ask(1, context=context), label=1)
            before, ann = await app.weights(), await app.weights("ann")
            open_query = await app.ask(1)
            await app.put(
                "right", "wrong", "worse", options={"eta": 0.5, "crowd": False}, replace=True
            )
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

    run(main)


def test_a_state_is_taken_to_a_new_revision_once_and_never_back(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


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
def test_an_application_that_cannot_work_is_refused(
    tmp_path: Path,
    models: tuple[str, ...],
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            with pytest.raises(error, match=message):
                await app.put(*models, **settings)
            assert app.applications.all == []

    run(main)


def test_names_of_applications_and_models_do_not_clash(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_a_removed_model_is_left_out_and_a_returned_one_taken_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong")
            app.front_end.catalogue.remove("wrong")
            assert (await app.ask(1)).parameters["models"] == "right"
            await app.front_end.catalogue.reload("wrong")
            assert (await app.ask(1)).parameters["models"] == "right,wrong"

    run(main)


# --- rollouts on the request path -----------------------------------------------------------------


def test_a_shadow_is_compared_but_never_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            await app.put("right", "wrong", policy="shadow", options={"share": 1.0})
            app.worker.slow = {"wrong"}
            answered = await app.ask(1)
            assert answered.parameters["models"] == "right"
            await until(lambda: len(app.worker.held) == 1)
            app.worker.release()
            await until(lambda: not app.applications._queries._shadowing)
            result = await app.teach(answered, label=1)
            assert result.losses == {"right": 0.0, "wrong": 1.0}

    run(main)


def test_a_canary_whose_engine_fails_is_rolled_back_without_any_feedback(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"

    async def main() -> None:
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

    run(main)


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
