"""Pipelines as clients and operators meet them; the models' worker is a script in the controller's loop."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from clockwright import AsyncClient, BadRequestError, Client, Feedback, RefusedError
from clockwright.client.operator import Operator
from clockwright.errors import ModelError, Refusal, UnknownModelError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from clockwright.wire.tensors import TensorSpec
from controller.front.oip.refusals import NoAnswerError
from controller.models.entry import ModelState, Pipeline
from controller.port import Ask
from controller.selection.core.application import Application
from controller.selection.parts import PartStage
from controller.stages.pipelines.stage import PipelineStage
from controller.telemetry.tables import Counts
from tests.kit.asking import Reply, submit
from tests.kit.front_end import (
    FrontEnd,
    FrontEndInThread,
    controlling,
    serving,
    serving_in_thread,
    until,
)

ROW = np.array([[1, 2, 0]], np.float32)
SLO_MS = 30_000


def stage(name: str, model: str, end_if: str = "", **inputs: str) -> str:
    taken = ", ".join(f'{key} = "{tensor}"' for key, tensor in inputs.items())
    lines = ["[[pipeline.stages]]", f'name = "{name}"', f'model = "{model}"']
    lines.append(f"inputs = {{ {taken} }}")
    return "\n".join([*lines, *([f'end_if = "{end_if}"'] if end_if else [])])


def pipeline(outputs: str, *stages: str, head: str = "") -> str:
    first = f'[pipeline]\ninputs = ["x"]\noutputs = {{ {outputs} }}'
    return "\n".join([head, first, *stages])


PIPELINES = {
    # The label of 4 x.
    "chain": pipeline(
        'label = "right.label", four = "second.y"',
        stage("first", "double", x="x"),
        stage("second", "double", x="first.y"),
        stage("right", "right", x="second.y"),
        head="slo_ms = 30000",
    ),
    "cascade": pipeline(
        'first = "cheap.label", label = "dear.label", y = "after.y"',
        stage("dear", "worse", x="x"),
        stage("after", "double", x="x"),
        stage("cheap", "right", "label == 0", x="x"),
    ),
    # Each of the two takes 2 s, it is said.
    "long": pipeline(
        'label = "b.label"', stage("a", "double", x="x"), stage("b", "long-1", x="a.y")
    ),
    "long-twice": pipeline(
        'label = "a.label", other = "b.label"',
        stage("a", "long-1", "label == 99", x="x"),
        stage("b", "long-2", x="x"),
    ),
    "judged": pipeline(
        'label = "r.label", probabilities = "r.probabilities"', stage("r", "right", x="x")
    ),
    "bad": pipeline('label = "right.label"', stage("right", "right", x="x", w="x")),
}


def write(directory: Path, **pipelines: str) -> None:
    for name, text in pipelines.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "config.toml").write_text(text)


@pytest.fixture(scope="module", params=["here", "apart"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontEndInThread]:
    directory = tmp_path_factory.mktemp("models")
    write(directory, **PIPELINES)
    with serving_in_thread(directory, front=request.param, rest=True) as front_end:
        front_end.until(lambda f: f.catalogue.ready)
        yield front_end


@pytest.fixture
def client(server: FrontEndInThread) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def tried(front_end: FrontEnd, name: str, ago_ns: int = -3600 * NS_PER_S) -> None:
    """Pretend that a pipeline was tried some time ago; by default in the future."""
    found = front_end.catalogue.find(name)
    assert isinstance(found, Pipeline)
    found.tried_ns = front_end.runtime.clock() - ago_ns


# --- clients --------------------------------------------------------------------------------------


def test_a_pipeline_is_asked_like_a_model(client: Client) -> None:
    found = client.infer("chain", ROW, slo_ms=SLO_MS).outputs
    assert found["four"].tolist() == [[4, 8, 0]]
    assert found["label"].tolist() == [0]
    rows = np.array([[0.25, 1, 1], [0.5, 0, 0], [0.75, 2, 2]], np.float32)
    found = client.infer("chain", rows).outputs
    assert found["label"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found["four"], rows * 4)


def test_more_rows_than_a_batch_has_pass_all_stages(client: Client) -> None:
    rows = np.arange(21, dtype=np.float32).reshape(7, 3)
    np.testing.assert_array_equal(
        client.infer("chain", rows, slo_ms=SLO_MS).outputs["four"], rows * 4
    )


def test_a_stage_ends_a_pipeline(client: Client) -> None:
    ended = client.infer("cascade", np.array([[0, 5, 5]], np.float32), slo_ms=SLO_MS)
    assert ended.outputs["first"].tolist() == [0]
    assert ended.outputs["label"].tolist() == [0]
    assert ended.outputs["y"].tolist() == [[0, 0, 0]]
    assert ended.explanation == {"ended_by": "cheap"}
    whole = client.infer("cascade", np.array([[1, 5, 5]], np.float32), slo_ms=SLO_MS)
    assert whole.outputs["first"].tolist() == [1]
    assert whole.outputs["label"].tolist() == [3]
    assert whole.outputs["y"].tolist() == [[2, 10, 10]]
    assert not whole.explanation


def test_an_answer_says_where_the_time_of_each_stage_went(client: Client) -> None:
    told = client.infer("chain", ROW, slo_ms=SLO_MS, explain=True).explanation
    assert told["stages"] == "first,second,right"
    assert 0 < told["second.begin_us"] < told["right.begin_us"] <= told["measured_us"]
    assert {"first.exec_us", "second.queue_us", "right.request_id"} <= told.keys()


def test_explain_tells_of_the_stages(server: FrontEndInThread, client: Client) -> None:
    number = client.infer("chain", ROW, slo_ms=SLO_MS, explain=True).explanation["request_id"]
    with Operator(server.front_end.controller) as operator:
        told = operator.explain(str(number))
        assert told.outcome == "OK"
        assert [each.model for each in told.members] == ["double", "double", "right"]
        assert told.words[0].startswith("It asked pipeline chain, and was answered after")
        assert told.words[1].startswith("Stage first, model double, began after")
        row = operator.explain(str(told.members[2].request_id))
        assert (row.model_id, row.outcome) == ("right", "OK")


def test_rest_answers_too(server: FrontEndInThread) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0.25, 1, 1]}
    body = {"inputs": [tensor], "parameters": {"slo_ms": SLO_MS}}
    url = f"http://{server.rest}/v2/models/chain/infer"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        told = json.load(answer)
    assert {each["name"]: each["data"] for each in told["outputs"]} == {
        "label": [1],
        "four": [1, 4, 4],
    }


def test_a_stream_answers_too(server: FrontEndInThread) -> None:
    answers: queue.Queue[tuple[grpcclient.InferResult, Exception | None]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensor = grpcclient.InferInput("x", [1, 3], "FP32")
        tensor.set_data_from_numpy(ROW)
        client.async_stream_infer("chain", [tensor], parameters={"slo_ms": SLO_MS})
        result, error = answers.get(timeout=60)
    assert error is None
    assert result.as_numpy("four").tolist() == [[4, 8, 0]]


def test_metadata_is_that_of_the_stages(server: FrontEndInThread, client: Client) -> None:
    found = client.metadata("chain")
    assert found.inputs == (TensorSpec("x", "FP32", (3,)),)
    assert found.outputs == (TensorSpec("label", "INT64", ()), TensorSpec("four", "FP32", (3,)))
    url = f"http://{server.rest}/v2/models/chain/config"
    with urllib.request.urlopen(url) as answer:
        config = json.load(answer)
    steps = config["ensemble_scheduling"]["step"]
    assert [each["model_name"] for each in steps] == ["double", "double", "right"]
    assert steps[1]["input_map"] == {"x": "first.y"}
    assert steps[1]["output_map"] == {"y": "four"}


def test_what_cannot_end_in_time_is_refused_before_anything_runs(
    server: FrontEndInThread, client: Client
) -> None:
    before = server.do(lambda f: len(f.worker.infers))
    with pytest.raises(RefusedError) as caught:
        client.infer("long", ROW, slo_ms=1000)
    assert caught.value.refusal is Refusal.INFEASIBLE
    assert "stage 'b', model long-1" in str(caught.value)
    # Each stage could be in time, but not one behind the other.
    server.do(lambda f: tried(f, "long-twice"))
    with pytest.raises(RefusedError) as caught:
        client.infer("long-twice", ROW, slo_ms=3000)
    assert caught.value.refusal is Refusal.INFEASIBLE
    assert "the longest way is by a, b" in str(caught.value)
    assert server.do(lambda f: len(f.worker.infers)) == before
    with Operator(server.front_end.controller) as operator:
        told = operator.explain(str(caught.value.figures["request_id"]))
    assert told.outcome == "INFEASIBLE"
    assert told.words[0].startswith("It asked pipeline long-twice, and was refused as INFEASIBLE")


def test_times_that_rule_a_pipeline_out_are_measured_once_in_a_while(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    with serving_in_thread(tmp_path) as server, Client(server.address) as client:
        server.do(lambda f: tried(f, "long-twice", ago_ns=2 * NS_PER_S))
        # Both stages take no time, in truth.
        assert client.infer("long-twice", ROW, slo_ms=3000).outputs["label"].tolist() == [1]


def test_certainty_is_not_to_be_had_of_a_pipeline(client: Client) -> None:
    with pytest.raises(BadRequestError, match="found in a request to pipeline 'chain'"):
        client.infer("chain", ROW, slo_ms=SLO_MS, decide_within_ms=1)


def test_a_pipeline_that_does_not_fit_says_why(client: Client) -> None:
    with pytest.raises(RefusedError) as caught:
        client.infer("bad", ROW, slo_ms=SLO_MS)
    assert caught.value.refusal is Refusal.UNFIT
    assert "stage 'right': inputs has 'w', expected the inputs of model right" in str(caught.value)


# --- operators ------------------------------------------------------------------------------------


def test_pipelines_are_listed_like_models(server: FrontEndInThread) -> None:
    with Operator(server.front_end.controller) as operator:
        states = {each.model_id: each for each in operator.models()}
        assert states["chain"].state == "READY"
        assert states["bad"].state == "UNAVAILABLE"
        assert "inputs has 'w'" in states["bad"].reason
        assert states["chain"].slo_ns == 30_000 * NS_PER_MS
        with pytest.raises(
            UnknownModelError, match="chain is a pipeline, which has no weights; pin"
        ):
            operator.pin_model("chain", pinned=True)


def test_a_pipeline_is_added_replaced_and_removed(server: FrontEndInThread, tmp_path: Path) -> None:
    text = pipeline('y = "a.y"', stage("a", "double", x="x"))
    write(tmp_path, quick=text)
    with Operator(server.front_end.controller) as operator, Client(server.address) as client:
        operator.add_model(tmp_path / "quick", name="quick", replace=False)
        assert client.infer("quick", ROW, slo_ms=SLO_MS).outputs["y"].tolist() == [[2, 4, 0]]
        again = pipeline('y = "b.y"', stage("a", "double", x="x"), stage("b", "double", x="a.y"))
        (tmp_path / "quick" / "config.toml").write_text(again)
        operator.add_model(tmp_path / "quick", name="quick", replace=True)
        assert client.infer("quick", ROW, slo_ms=SLO_MS).outputs["y"].tolist() == [[4, 8, 0]]
        (tmp_path / "quick" / "config.toml").write_text(text.replace("double", "nowhere"))
        with pytest.raises(ModelError, match="stage 'a': there is no model nowhere"):
            operator.add_model(tmp_path / "quick", name="quick", replace=True)
        assert client.infer("quick", ROW, slo_ms=SLO_MS).outputs["y"].tolist() == [[4, 8, 0]]
        operator.remove_model("quick")
        with pytest.raises(UnknownModelError):
            client.infer("quick", ROW, slo_ms=SLO_MS)


def put(server: FrontEndInThread, name: str, *models: str) -> None:
    application = Application(name=name, models=models)
    server.run(server.front_end.applications.put(application))


def test_an_application_may_have_pipelines_as_members(
    server: FrontEndInThread, client: Client
) -> None:
    put(server, "app", "judged", "right", "wrong")
    rows = np.array([[1, 2, 0], [0, 1, 1]], np.float32)
    told = client.infer("app", rows, slo_ms=SLO_MS)
    # `wrong` says 2 and 1: two members outvote it.
    assert told.outputs["label"].tolist() == [1, 0]
    assert told.explanation["models"] == "judged,right,wrong"
    with Operator(server.front_end.controller) as operator:
        explained = operator.explain(told.explanation["query_id"])
        assert [each.model for each in explained.members] == ["judged", "right", "wrong"]
        stages = operator.explain(str(explained.members[0].request_id))
        assert [each.model for each in stages.members] == ["right"]
    [fed] = client.feedback(Feedback(f"{told.explanation['query_id']}/0", label=1))
    assert fed.weights["judged"] > fed.weights["wrong"]


async def test_what_an_application_lacks_is_named_with_what_helps(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    helps = "; `clockwright models add` adds a model, `clockwright app add --replace` changes the application"
    lost = "pipeline judged cannot be served: stage 'r': there is no model right"
    many = ["wrong", "worse", "right-too", "long-1", "long-2"]
    async with serving(tmp_path) as front_end, AsyncClient(front_end.address) as client:
        catalogue, applications = front_end.catalogue, front_end.applications
        await until(lambda: catalogue.ready)
        for name, *models in (
            ("piped", "judged"),
            ("plain", "right"),
            ("both", "judged", "right"),
            ("some", "judged", "long-1"),
            ("many", *many),
        ):
            await applications.put(Application(name=name, models=tuple(models)))

        async def why(name: str, slo_ms: float = SLO_MS) -> str:
            with pytest.raises(RefusedError) as caught:
                await client.infer(name, ROW, slo_ms=slo_ms)
            return str(caught.value)

        catalogue.remove("right")
        none = "none of its models can answer"
        assert f"application piped: {none}: {lost}{helps}" in await why("piped")
        assert f"application plain: {none}: there is no model right{helps}" in await why("plain")
        both = f"application both: {none}: {lost}; there is no model right{helps}"
        assert both in await why("both")
        # The other one takes 2 s, it is said.
        some = f"application some: no model answered in time ({lost}{helps}), and it has no default"
        assert some in await why("some", slo_ms=1_000)
        await catalogue.reload("right")
        told = await client.infer("some", ROW, slo_ms=1_000)
        assert told.explanation["models"] == "judged"
        for name in many:
            catalogue.remove(name)
        first = "; ".join(f"there is no model {name}" for name in many[:4])
        assert f"application many: {none}: {first}; and 1 more{helps}" in await why("many")


async def test_a_pipeline_whose_stages_cannot_all_be_in_time_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with serving(tmp_path) as front_end, AsyncClient(front_end.address) as client:
        await until(lambda: front_end.catalogue.ready)
        await front_end.applications.put(
            Application(name="app", models=("long-twice", "long-1", "right"))
        )
        # Each of its two stages takes 2 s, it is said.
        told = await client.infer("app", ROW, slo_ms=3_500)
        assert told.explanation["models"] == "long-1,right"
        # It was not even asked.
        assert told.explanation["missing"] == ""
        told = await client.infer("app", ROW, slo_ms=SLO_MS)
        assert told.explanation["models"] == "long-twice,long-1,right"


async def test_a_model_that_becomes_a_pipeline_is_no_stage_any_more_but_a_member(
    tmp_path: Path,
) -> None:
    outputs = 'label = "r.label", probabilities = "r.probabilities"'
    write(tmp_path, outer=pipeline(outputs, stage("r", "right", x="x")))
    async with serving(tmp_path) as front_end, AsyncClient(front_end.address) as client:
        await until(lambda: front_end.catalogue.ready)
        await front_end.applications.put(Application(name="app", models=("right", "wrong")))
        assert (await client.infer("outer", ROW, slo_ms=SLO_MS)).outputs["label"].tolist() == [1]
        await client.infer("app", ROW, slo_ms=SLO_MS)
        # It takes and gives what the model did.
        shutil.rmtree(tmp_path / "right")
        write(tmp_path, right=pipeline(outputs, stage("r", "right-too", x="x")))
        await front_end.catalogue.reload("right")
        assert (await client.infer("right", ROW, slo_ms=SLO_MS)).outputs["label"].tolist() == [1]
        with pytest.raises(RefusedError, match="stage 'r': right is a pipeline") as caught:
            await client.infer("outer", ROW, slo_ms=SLO_MS)
        assert caught.value.refusal is Refusal.UNFIT
        told = await client.infer("app", ROW, slo_ms=SLO_MS)
        assert told.explanation["models"] == "right,wrong"
        running = front_end.applications.find("app")
        assert running is not None
        assert running.misfits == {}


# --- inside the loop ------------------------------------------------------------------------------


def counts(front_end: FrontEnd, model_id: str) -> Counts:
    return front_end.runtime.telemetry.by_model[ModelId(model_id)]


class Desk:
    """Pipelines asked from inside the controller's loop."""

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.worker = front_end.worker
        self.stage = PipelineStage(
            PartStage(front_end.applications.queries), front_end.runtime, front_end.catalogue
        )

    def ask(self, name: str, *numbers: float, slo_ms: float = SLO_MS) -> asyncio.Future[Reply]:
        catalogue, runtime = self.front_end.catalogue, self.front_end.runtime
        found = catalogue.find(name)
        assert isinstance(found, Pipeline)
        assert catalogue.state(found) is ModelState.READY
        ask = Ask(0, 1, runtime.clock(), round(slo_ms * NS_PER_MS))
        row = np.array(numbers or [1, 2, 0], np.float32)
        return submit(self.stage, found, [row.tobytes()], ask)

    @property
    def is_idle(self) -> bool:
        return self.front_end.runtime.num_waiting == 0


async def refused(asked: asyncio.Future[Reply]) -> NoAnswerError:
    with pytest.raises(NoAnswerError) as caught:
        await asked
    return caught.value


async def test_what_is_behind_all_stages_of_others_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        await desk.ask("long-twice")  # Loads both.
        desk.worker.hold = True
        # Each stage takes 0.5 s a row, at best, it is said: 1 s each.
        before = [desk.ask("long-twice", slo_ms=60_000) for _ in range(100)]
        reasons = [
            error.refusal
            for error in await asyncio.gather(
                *[refused(desk.ask("long-twice", slo_ms=60_000)) for _ in range(10)]
            )
        ]
        assert reasons == [Refusal.OVERLOADED] * 10
        # One that has more time goes behind them.
        later = desk.ask("long-twice", slo_ms=600_000)
        await asyncio.sleep(0)
        open_ones = [each for each in (*before, later) if not each.done()]
        assert later in open_ones
        assert 30 < len(open_ones) < 90
        for each in open_ones:
            each.cancel()
        await until(lambda: desk.is_idle)


async def test_a_stage_that_is_refused_refuses_the_pipeline(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        desk.worker.failing.add("right")
        error = await refused(desk.ask("chain"))
        assert error.refusal is Refusal.FAILED
        assert "stage 'right', model right" in error.detail
        assert desk.is_idle
        assert counts(front_end, "chain").refusals == {"FAILED": 1}
        assert counts(front_end, "double").answered == 2


async def test_a_request_that_is_cancelled_withdraws_its_stages(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        desk.worker.slow.add("right")
        asked = desk.ask("chain")
        await until(lambda: bool(desk.worker.held))
        asked.cancel()
        await until(lambda: desk.is_idle)
        assert counts(front_end, "chain").cancelled == 1
        assert counts(front_end, "right").cancelled == 1
        desk.worker.release()


async def test_a_query_that_is_cancelled_withdraws_its_pipelines(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with serving(tmp_path) as front_end, AsyncClient(front_end.address) as client:
        await until(lambda: front_end.catalogue.ready)
        await front_end.applications.put(Application(name="app", models=("judged",)))
        front_end.worker.hold = True
        asked = asyncio.create_task(client.infer("app", ROW, slo_ms=SLO_MS))
        await until(lambda: bool(front_end.worker.held))
        asked.cancel()
        await until(lambda: front_end.runtime.num_waiting == 0)
        await until(lambda: counts(front_end, "judged").cancelled == 1)
        front_end.worker.release()


async def test_a_lost_worker_ends_a_pipeline_with_its_stage(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        desk.worker.slow.add("right")
        asked = desk.ask("chain")
        await until(lambda: bool(desk.worker.held))
        desk.worker.leave()
        error = await refused(asked)
        assert error.refusal is Refusal.WORKER_LOST
        assert "stage 'right', model right" in error.detail


async def test_what_is_under_way_when_admission_closes_is_finished(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        desk.worker.slow.add("double")
        asked = desk.ask("chain")
        await until(lambda: bool(desk.worker.held))
        front_end.runtime.close_admission()
        idle = asyncio.create_task(front_end.runtime.wait_idle())
        assert (await refused(desk.ask("chain"))).refusal is Refusal.DRAINING
        assert not idle.done()
        desk.worker.release()
        assert (await asked).told.parameters is None
        await idle


async def test_a_model_that_is_replaced_by_its_like_serves_the_stages_to_come(
    tmp_path: Path,
) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        desk.worker.slow.add("double")
        asked = desk.ask("chain")
        await until(lambda: bool(desk.worker.held))
        await front_end.catalogue.reload("right")
        desk.worker.release()
        assert (await asked).told.parameters is None
        assert counts(front_end, "right@2").answered == 1


async def test_a_model_that_is_removed_while_a_request_runs_is_named(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk, catalogue = Desk(front_end), front_end.catalogue
        desk.worker.slow.add("double")
        asked = desk.ask("chain")
        await until(lambda: bool(desk.worker.held))
        await catalogue.remove("right")
        desk.worker.release()
        error = await refused(asked)
        assert error.refusal is Refusal.MODEL_REMOVED
        assert "stage 'right', model right" in error.detail
        found = catalogue.find("chain")
        assert found is not None
        assert catalogue.state(found) is ModelState.UNAVAILABLE
        assert catalogue.reason(found) == "stage 'right': there is no model right"
        await catalogue.reload("right")
        assert catalogue.state(found) is ModelState.READY


async def test_later_stages_are_loaded_while_earlier_ones_run(tmp_path: Path) -> None:
    write(tmp_path, **PIPELINES)
    async with controlling(tmp_path) as front_end:
        desk = Desk(front_end)
        desk.worker.slow.add("double")
        asked = desk.ask("chain")
        await until(lambda: bool(desk.worker.held))

        def resident() -> bool:
            found = front_end.catalogue.find("right")
            assert found is not None
            row = front_end.runtime.model_statistics(found.model_id)
            return row is not None and bool(row.resident_on)

        await until(resident)
        desk.worker.release()
        await asked
