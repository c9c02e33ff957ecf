"""What Prometheus is told of a controller, asked by HTTP and read by Prometheus' own parsers."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import re
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tritonclient.grpc as triton
import trustme
import uvloop
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from clockwright.errors import ConfigError, Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime
from controller.access.config import AccessConfig
from controller.access.key_file import add_key
from controller.access.roles import Role
from controller.core import SchedulerConfig
from controller.front.http.rest_server import HEADERS_BYTES_MAX
from controller.front.oip.refusals import NoAnswerError
from controller.metrics import page
from controller.metrics.app import CONNECTIONS_MAX
from controller.metrics.families import FAMILIES
from controller.metrics.loop_share import LoopShare
from controller.metrics.tally import NAMES_MAX, OTHER, Tally
from controller.metrics.text import OPENMETRICS, PROMETHEUS
from controller.models.entry import ModelState
from controller.port import Ask
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CANCELLED, OK, Telemetry
from tests.kit.asking import submit
from tests.kit.scripted_worker import LoopbackWorker

ROW = b"0123456789abcdef"
ROOT = Path(__file__).parents[2]

#: By sample name and labels.
Values = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def make_models(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "model.onnx").write_bytes(b"onnx")
    return directory


def config(directory: Path, **changes: Any) -> ControllerConfig:  # noqa: ANN401
    values: dict[str, Any] = {
        "port": 0,
        "metrics_port": 0,
        "models_dir": directory,
        "heartbeat_interval_ms": 20,
        "scheduler": SchedulerConfig(action_timeout_ns=1000 * NS_PER_S),
    }
    return ControllerConfig(**{**values, **changes})


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - any condition, not one that signals
        await asyncio.sleep(0.005)


async def until_ready(controller: Controller, *names: str) -> list[ModelId]:
    """The ids of models that a worker has accepted."""
    models = [controller.catalogue.find(name) for name in names]
    found = [model for model in models if model is not None]
    assert len(found) == len(names)
    catalogue = controller.catalogue
    await until(lambda: all(catalogue.state(model) is ModelState.READY for model in found))
    return [model.model_id for model in found]


async def ask(controller: Controller, model_id: ModelId, *, slo_ns: int = 30 * NS_PER_S) -> str:
    """Ask once; gives "OK" or the refusal's name."""
    runtime = controller.runtime
    try:
        await submit(runtime, model_id, [ROW], Ask(0, 1, runtime.clock(), slo_ns))
    except NoAnswerError as error:
        return error.refusal.value
    return OK


def get(
    port: int,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and body of one answer."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", port)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, context=tls)
    )
    with closing(connection):
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


async def fetch(controller: Controller, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
    """The same, while the controller runs in this thread."""
    assert controller.metrics_port is not None
    return await asyncio.to_thread(get, controller.metrics_port, *arguments, **named)


def parsed(
    text: str, read: Callable[[str], Iterable[Metric]] = text_string_to_metric_families
) -> list[Metric]:
    return list(read(text))


async def scrape(controller: Controller) -> list[Metric]:
    status, headers, text = await fetch(controller)
    assert status == 200
    assert headers["content-type"] == PROMETHEUS
    return parsed(text)


def samples_of(families: Sequence[Metric]) -> Iterator[Sample]:
    """All samples, by the names that they have on the page: the parser lets each counter end in `_total`."""
    for family in families:
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            yield sample._replace(name=name) if name in FAMILIES else sample


def values_of(families: Sequence[Metric]) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for sample in samples_of(families)
    }


class Found:
    """What one page says."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self.values = values_of(families)

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[name, frozenset(labels.items())]


# --- the list of names ----------------------------------------------------------------------------


def test_the_page_of_docs_lists_every_family() -> None:
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in (ROOT / "docs/metrics.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    listed = {
        name.strip("`"): (kind, tuple(re.findall(r"`(\w+)`", labels)), unit, meaning)
        for name, kind, labels, unit, meaning in rows
    }
    assert listed == {
        family.name: (family.kind, family.labels, family.unit, family.meaning)
        for family in FAMILIES.values()
    }


async def test_a_page_has_every_family_with_its_type_and_labels_and_nothing_else(
    tmp_path: Path,
) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port),
    ):
        (model_id,) = await until_ready(controller, "m")
        assert await ask(controller, model_id) == OK
        assert await ask(controller, model_id, slo_ns=1) == Refusal.INFEASIBLE.value
        controller.runtime.telemetry.refused_at_door(Refusal.QUOTA)
        _, _, text = await fetch(controller)
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert typed == {family.name: family.kind for family in FAMILIES.values()}
    unseen = set(FAMILIES)
    for sample in samples_of(parsed(text)):
        of_histogram = re.sub("_(bucket|sum|count)$", "", sample.name)
        family = FAMILIES.get(of_histogram) or FAMILIES[sample.name]
        wanted = set(family.labels)
        if family.kind == "histogram" and sample.name.endswith("_bucket"):
            wanted.add("le")
        assert set(sample.labels) == wanted, sample
        unseen.discard(family.name)
    # No call was denied, no tenant has a quota, no GPU has a clock, and no run keeps others waiting.
    assert unseen == {
        "clockwright_requests_behind_long_runs_per_second",
        *("clockwright_calls_denied_total", "clockwright_gpu_clock_hertz"),
        *(name for name in FAMILIES if name.startswith("clockwright_quota_")),
    }


# --- values ---------------------------------------------------------------------------------------


async def test_values_agree_with_what_was_served(tmp_path: Path) -> None:
    async with (
        running(config(make_models(tmp_path, "m", "unasked"))) as controller,
        LoopbackWorker(controller.port, exec_ns=2 * NS_PER_MS) as worker,
    ):
        model_id, _ = await until_ready(controller, "m", "unasked")
        for _ in range(5):
            assert await ask(controller, model_id) == OK
        for _ in range(3):
            assert await ask(controller, model_id, slo_ns=1) == Refusal.INFEASIBLE.value
        worker.hold = True
        given_up = asyncio.ensure_future(ask(controller, model_id))
        await until(lambda: bool(worker.held))
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await worker.release()
        await until(lambda: not controller.runtime.cluster_load().workers[0].num_in_flight)
        found = Found(await scrape(controller))
    m = {"model": "m", "version": "1"}
    assert found("nv_inference_request_success", **m) == 5
    assert found("nv_inference_request_success", model="unasked", version="1") == 0
    assert found("nv_inference_request_failure", **m, reason="REJECTED") == 3
    assert found("nv_inference_request_failure", **m, reason="CANCELED") == 1
    assert found("nv_inference_request_failure", **m, reason="BACKEND") == 0
    assert found("clockwright_requests_total", **m, outcome="ok", reason="") == 5
    assert found("clockwright_requests_total", **m, outcome="cancelled", reason="") == 1
    assert found("clockwright_requests_total", **m, outcome="refused", reason="INFEASIBLE") == 3
    assert found("clockwright_cold_starts_total", **m) == 1
    assert found("clockwright_model_loads_total", **m) == 1
    assert found("clockwright_model_copies", **m) == 1
    assert found("clockwright_model_copies", model="unasked", version="1") == 0
    # The batch of the request that was given up ran all the same.
    assert found("nv_inference_exec_count", **m) == 6
    assert found("nv_inference_count", **m) == 6
    rows = controller.runtime.telemetry.requests
    answered = [row for row in rows if row.outcome == OK]
    duration_ns = sum(row.departure_ns - row.arrival_ns for row in answered)
    assert found("nv_inference_request_duration_us", **m) == duration_ns // 1000
    assert found("clockwright_request_duration_seconds_count", **m) == 5
    assert found("clockwright_request_duration_seconds_sum", **m) == duration_ns / 1e9
    actions = {row.action_id: row for row in controller.runtime.telemetry.actions}
    queue_ns = compute_ns = 0
    for row in answered:
        assert row.action_id is not None
        action = actions[row.action_id]
        assert action.input is not None
        assert action.exec is not None
        # The script begins at once, and its clock is known to some microseconds only.
        queue_ns += max(0, action.input.begin_ns - row.arrival_ns)
        compute_ns += action.exec.duration_ns
    assert found("nv_inference_queue_duration_us", **m) == queue_ns // 1000
    assert found("nv_inference_compute_infer_duration_us", **m) == compute_ns // 1000
    assert found("clockwright_deadline_slack_seconds_bucket", le="+Inf") == 5
    assert found("clockwright_deadline_slack_seconds_bucket", le="0.0") == 0
    reason = {"reason": "INFEASIBLE"}
    assert found("clockwright_refusal_duration_seconds_count", **reason) == 3
    for what, number in (("departure", 5), ("exec", 6), ("load", 1)):
        every = {"predicted": what, "le": "+Inf"}
        assert found("clockwright_prediction_error_seconds_bucket", **every) == number
    w0 = {"worker": "w0"}
    assert found("clockwright_actions_total", **w0, type="Infer", error="NONE") == 6
    assert found("clockwright_actions_total", **w0, type="LoadWeights", error="NONE") == 1
    exec_ns = sum(row.exec.duration_ns for row in actions.values() if row.exec is not None)
    assert found("clockwright_gpu_exec_seconds_total", **w0) == exec_ns / 1e9
    states = {state: found("clockwright_pages", **w0, state=state) for state in PAGES}
    assert states["loading"] == 0
    assert sum(states.values()) == worker.register.num_pages
    assert states["resident"] > 0
    assert found("clockwright_workers", state="READY") == 1
    assert found("clockwright_models", state="READY") == 2
    assert found("clockwright_leader") == found("clockwright_ready") == 1
    assert found("clockwright_required_workers", gpu_kind=worker.register.gpu_kind) == 1


PAGES = ("resident", "loading", "free")


async def test_tritons_statistics_say_the_same(tmp_path: Path) -> None:
    def statistics(controller: Controller) -> Any:  # noqa: ANN401  its client's message
        with triton.InferenceServerClient(f"127.0.0.1:{controller.port}") as client:
            (told,) = client.get_inference_statistics("m").model_stats
            return told

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, exec_ns=2 * NS_PER_MS),
    ):
        (model_id,) = await until_ready(controller, "m")
        for _ in range(3):
            assert await ask(controller, model_id) == OK
        assert await ask(controller, model_id, slo_ns=1) == Refusal.INFEASIBLE.value
        await until(lambda: not controller.runtime.cluster_load().workers[0].num_in_flight)
        found = Found(await scrape(controller))
        told = await asyncio.to_thread(statistics, controller)
    assert (told.inference_count, told.execution_count) == (3, 3)
    stats = told.inference_stats
    assert (stats.success.count, stats.fail.count) == (3, 1)
    for name, each in {
        "request": stats.success,
        "queue": stats.queue,
        "compute_input": stats.compute_input,
        "compute_infer": stats.compute_infer,
        "compute_output": stats.compute_output,
    }.items():
        assert each.count == 3
        took_us = found(f"nv_inference_{name}_duration_us", model="m", version="1")
        assert each.ns // 1000 == took_us
    assert stats.success.ns > stats.compute_infer.ns > 0
    assert stats.fail.ns > 0
    assert 0 <= time.time() - told.last_inference / 1e3 < 300
    (batches,) = told.batch_stats
    assert (batches.batch_size, batches.compute_infer.count) == (1, 3)
    assert batches.compute_infer.ns == stats.compute_infer.ns


async def test_who_refuses_for_want_of_workers_says_that_more_are_wanted(tmp_path: Path) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, exec_ns=50 * NS_PER_MS) as worker,
    ):
        (model_id,) = await until_ready(controller, "m")
        labels = {"gpu_kind": worker.register.gpu_kind}
        wanted = Found(await scrape(controller))("clockwright_required_workers", **labels)
        assert wanted == 1
        assert await ask(controller, model_id) == OK
        refused = 0
        while wanted < 2 or not refused:
            # As one that works on something else until their time is over.
            worker.hold = True
            asked = [ask(controller, model_id, slo_ns=200 * NS_PER_MS) for _ in range(50)]
            outcomes = await asyncio.gather(*asked)
            refused += outcomes.count(Refusal.OVERLOADED.value)
            await worker.release()
            found = Found(await scrape(controller))
            wanted = found("clockwright_required_workers", **labels)
        assert refused > 0
        m = {"model": "m", "version": "1"}
        over = {"outcome": "refused", "reason": "OVERLOADED"}
        assert found("clockwright_requests_total", **m, **over) == refused
        assert found("clockwright_slo_attainment_ratio") < 1
        lack = {**labels, "resource": "exec"}
        assert found("clockwright_shortage_requests_per_second", **lack) > 0


async def test_both_formats_say_the_same(tmp_path: Path) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port),
    ):
        (model_id,) = await until_ready(controller, "m")
        await ask(controller, model_id)
        plain = values_of(await scrape(controller))
        accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        _, headers, text = await fetch(controller, headers=accept)
        assert headers["content-type"] == OPENMETRICS
        # It reads strictly: names, order of buckets, sums where times may be negative.
        open_ = values_of(parsed(text, openmetrics.text_string_to_metric_families))
    assert plain.keys() == open_.keys()
    requests = {key: value for key, value in plain.items() if "model" in dict(key[1])}
    assert requests == {key: open_[key] for key in requests}


def test_scrapes_under_load_are_whole_and_counters_never_fall(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            running(config(make_models(tmp_path, "m"))) as controller,
            LoopbackWorker(controller.port),
        ):
            (model_id,) = await until_ready(controller, "m")
            is_over = asyncio.Event()

            async def keep_asking() -> int:
                asked = 0
                while not is_over.is_set():
                    assert await ask(controller, model_id) == OK
                    asked += 1
                return asked

            clients = [asyncio.create_task(keep_asking()) for _ in range(8)]
            pages = []
            for _ in range(10):
                pages += await asyncio.gather(*(scrape(controller) for _ in range(3)))
            is_over.set()
            asked = sum(await asyncio.gather(*clients))
            last = Found(await scrape(controller))
        assert last("nv_inference_request_success", model="m", version="1") == asked
        counters = [
            {
                key: value
                for key, value in values_of(page).items()
                if key[0].startswith("nv_inference_") and "pending" not in key[0]
            }
            for page in pages[::3]
        ]
        for earlier, later in pairwise(counters):
            assert all(later[key] >= value for key, value in earlier.items())

    run(test)


# --- many models ----------------------------------------------------------------------------------


def request(number: int, model: str, outcome: str = OK, *, action: int | None = None) -> RequestRow:
    """A request that arrived at 1 s and was over 5 ms later."""
    arrival_ns, departure_ns = NS_PER_S, NS_PER_S + 5 * NS_PER_MS
    worker = None if action is None else WorkerId("w")
    return RequestRow(
        RequestId(number),
        ModelId(model),
        rows=1,
        arrival_ns=arrival_ns,
        slo_ns=100 * NS_PER_MS,
        departure_ns=departure_ns,
        outcome=outcome,
        worker_id=worker,
        action_id=None if action is None else ActionId(action),
        batch_size=1,
        expected_departure_ns=departure_ns - NS_PER_MS,
    )


def infer(number: int, model: str, num_requests: int) -> ActionRow:
    """A batch that began 2 ms after its requests had arrived and took a millisecond in each step."""
    begin_ns = NS_PER_S + 2 * NS_PER_MS
    step = StepTime(begin_ns=begin_ns, end_ns=begin_ns + NS_PER_MS, duration_ns=NS_PER_MS)
    return ActionRow(
        ActionId(number),
        "Infer",
        WorkerId("w"),
        ModelId(model),
        batch_size=8,
        rows=num_requests,
        num_requests=num_requests,
        sent_ns=NS_PER_S,
        expected_begin_ns=begin_ns,
        expected_duration_ns=NS_PER_MS,
        received_ns=begin_ns,
        result_ns=begin_ns,
        error="NONE",
        input=step,
        exec=step,
        output=step,
    )


def counting(
    *model_ids: str,
    describe: Callable[[ModelId], tuple[str, str] | None] = lambda model_id: (model_id, "1"),
) -> tuple[Telemetry, Tally]:
    """Telemetry of some models, and who counts what it is told."""
    telemetry = Telemetry(1000)
    for model_id in model_ids:
        telemetry.add_model(ModelId(model_id))
    return telemetry, Tally(telemetry, describe)


def count(telemetry: Telemetry, *records: RequestRow) -> None:
    """Requests are over."""
    for record in records:
        telemetry.add_request(record)
    telemetry.count()


def test_a_thousand_models_have_names_and_the_others_are_counted_together() -> None:
    names = [f"m{number}" for number in range(NAMES_MAX + 1)]
    telemetry, tally = counting(*names)
    count(telemetry, *[request(number, name) for number, name in enumerate(names)])
    assert [name for name, _ in tally.models] == names[:NAMES_MAX]
    assert tally.others.answered == 1
    # Whoever comes when one is gone has its place; who had none before stays with the others.
    telemetry.remove_model(ModelId("m0"))
    telemetry.add_model(ModelId("new"))
    count(telemetry, request(1, "new"), request(2, names[-1]))
    assert ("m0", "1") not in tally.models
    assert tally.models["new", "1"].answered == 1
    assert tally.others.answered == 2


def test_a_model_that_is_called_other_is_one_of_them() -> None:
    telemetry, tally = counting(OTHER)
    count(telemetry, request(1, OTHER))
    assert not tally.models
    assert tally.others.answered == 1


def test_a_new_generation_goes_on_counting_and_a_new_version_begins() -> None:
    described = {"m": ("m", "1"), "m@2": ("m", "1"), "m@3": ("m", "2")}
    telemetry, tally = counting(*described, describe=described.get)
    count(telemetry, request(1, "m"), request(2, "m@2"))
    telemetry.remove_model(ModelId("m"))
    count(telemetry, request(3, "m@3"), request(4, "m@2"))
    assert {key: model.answered for key, model in tally.models.items()} == {
        ("m", "1"): 3,
        ("m", "2"): 1,
    }
    telemetry.remove_model(ModelId("m@2"))
    assert list(tally.models) == [("m", "2")]


def test_times_of_a_batch_count_for_each_of_its_requests() -> None:
    telemetry, tally = counting("m")
    answers = [request(number, "m", action=7) for number in range(3)]
    late = request(3, "m", Refusal.LATE.value, action=7)
    count(telemetry, *answers, late, request(4, "m", CANCELLED))
    telemetry.add_action(infer(7, "m", 5))
    telemetry.count()
    model = tally.models["m", "1"]
    assert (model.batches, model.rows) == (1, 5)
    assert model.queue_ns == 4 * 2 * NS_PER_MS
    assert model.input_ns == model.exec_ns == model.output_ns == 4 * NS_PER_MS
    assert model.durations.sum_ns == 3 * 5 * NS_PER_MS
    assert tally.workers[WorkerId("w")].exec_ns == NS_PER_MS
    assert {reason: sum(each.counts) for reason, each in tally.refusals.items()} == {"LATE": 1}


@pytest.mark.parametrize(("together", "most"), [(1, 70), (8, 45)])
def test_a_request_is_counted_in_few_lines(together: int, most: int) -> None:
    telemetry, _ = counting("m")
    num_requests, num_lines = 512, 0

    def line(_frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401
        nonlocal num_lines
        num_lines += event == "line"
        return line

    answers = [request(number, "m", action=number // together) for number in range(num_requests)]
    batches = [infer(number, "m", together) for number in range(num_requests // together)]
    before = sys.gettrace()
    sys.settrace(lambda *_: line)
    try:
        for number, batch in enumerate(batches):
            for answer in answers[number * together : (number + 1) * together]:
                telemetry.add_request(answer)
            telemetry.add_action(batch)
        telemetry.count()
    finally:
        sys.settrace(before)
    # Without metrics telemetry itself takes a dozen. What clients ask for takes some hundred
    # (test_request_cost.py), and some of them far more time than any here.
    assert num_lines / num_requests < most


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    telemetry, tally = counting("m")
    count(telemetry, request(1, "m", action=1))
    durations = tally.models["m", "1"].durations
    assert dict(zip(durations.buckets.le, durations.cumulative(), strict=True))["0.005"] == 1
    assert dict(zip(durations.buckets.le, durations.cumulative(), strict=True))["0.0025"] == 0
    # It left a millisecond later than predicted, 95 ms before its deadline.
    departures = tally.errors["departure"]
    assert departures.counts[departures.buckets.le.index("0.001")] == 1
    assert tally.slacks.counts[tally.slacks.buckets.le.index("0.1")] == 1


def test_a_page_of_many_models_is_made_in_slices_and_says_how_many_have_no_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"onnx")
    num_models = NAMES_MAX + 20
    (tmp_path / "m" / "config.toml").write_text(f"copies = {num_models}\n")

    async def test() -> None:
        async with running(config(tmp_path)) as controller:
            turns = 0
            fetching = asyncio.create_task(fetch(controller))
            while not fetching.done():
                turns += 1
                await asyncio.sleep(0)
            # Nobody has asked for any of them: who comes first gets the names.
            _, _, text = await fetching
            assert rejected(text) == {OTHER: 0}
            telemetry = controller.runtime.telemetry
            for number in range(num_models):
                telemetry.add_request(request(number, f"m-{number}", Refusal.NO_WORKER.value))
            _, _, text = await fetch(controller)
            found = rejected(text)
            assert turns > 1
            assert len(found) == NAMES_MAX + 1
            assert found.pop(OTHER) == num_models - NAMES_MAX
            assert set(found.values()) == {1}
            assert f'\nclockwright_models{{state="LOADING"}} {num_models}\n' in text

    def rejected(text: str) -> dict[str, int]:
        lines = re.findall(
            r'^nv_inference_request_failure{model="(.+?)".*REJECTED"} (\d+)$', text, re.M
        )
        return {model: int(number) for model, number in lines}

    run(test)


async def test_who_asks_without_a_pause_takes_no_more_than_a_part_of_the_loops_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each step of making a page counts as 2 ms, however fast the machine is.
    ticks = itertools.count()
    share = partial(LoopShare, clock=lambda: next(ticks) / 500)
    monkeypatch.setattr(page, "LoopShare", share)
    make_models(tmp_path, "m")
    (tmp_path / "m" / "config.toml").write_text("copies = 1000\n")
    async with running(config(tmp_path)) as controller:
        began_s, first = time.monotonic(), next(ticks)
        await fetch(controller)
        # A step reads the clock twice.
        num_steps = (next(ticks) - first) // 2
        await fetch(controller, headers={"Accept": "application/openmetrics-text"})
        assert num_steps >= 1
        assert time.monotonic() - began_s >= 9 * num_steps / 500


# --- who may see it -------------------------------------------------------------------------------


def test_who_has_no_key_of_the_role_sees_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    client = add_key(keys, "web", frozenset({Role.INFERENCE}))
    scraper = add_key(keys, "prometheus", frozenset({Role.STATISTICS}))

    async def test() -> None:
        access = AccessConfig(keys_file=keys)
        models = make_models(tmp_path / "models", "m")
        async with running(config(models, access=access)) as controller:

            async def status(key: str | None) -> tuple[int, str]:
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                code, _, text = await fetch(controller, headers=headers)
                return code, text

            code, text = await status(None)
            assert (code, text.split(":")[0]) == (401, "NO_CREDENTIALS")
            assert (await status("no key"))[0] == 401
            code, text = await status(client)
            assert (code, text.split(":")[0]) == (403, "NOT_ALLOWED")
            code, text = await status(scraper)
            assert code == 200
            found = Found(parsed(text))
            assert found("clockwright_calls_denied_total", reason="NO_CREDENTIALS") == 1
            assert found("clockwright_calls_denied_total", reason="UNKNOWN_CREDENTIALS") == 1
            assert found("clockwright_calls_denied_total", reason="NOT_ALLOWED") == 1

    run(test)


async def test_with_a_certificate_metrics_are_for_tls_alone_and_a_new_one_is_shown(
    tmp_path: Path,
) -> None:
    authority = trustme.CA()
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def certify() -> bytes:
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def shown(port: int, tls: ssl.SSLContext) -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            tls.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
        ):
            return sock.getpeercert(binary_form=True)

    first = certify()
    files = {"tls_certificate": certificate, "tls_key": key}
    models = make_models(tmp_path / "models", "m")
    async with running(config(models, **files)) as controller:
        assert controller.metrics_port is not None
        tls = ssl.create_default_context()
        authority.configure_trust(tls)
        # As Prometheus' own client does: it would take HTTP/2 if that were offered.
        tls.set_alpn_protocols(["h2", "http/1.1"])
        status, _, _ = await fetch(controller, tls=tls)
        assert status == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            await fetch(controller)
        assert await asyncio.to_thread(shown, controller.metrics_port, tls) == first
        second = certify()
        controller.guard.read_again()
        while await asyncio.to_thread(shown, controller.metrics_port, tls) != second:
            pass


async def test_whoever_begins_tls_and_says_no_more_keeps_nobody_out(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    models = make_models(tmp_path / "models", "m")
    files = {"tls_certificate": certificate, "tls_key": key}
    async with running(config(models, **files)) as controller:
        port = controller.metrics_port
        crowd = []
        for _ in range(CONNECTIONS_MAX + 3):
            crowd.append(await asyncio.open_connection("127.0.0.1", port))
            crowd[-1][1].write(b"\x16")
        status, _, _ = await fetch(controller, tls=tls)
        assert status == 200
        assert await crowd[0][0].read() == b""
        for _, writer in crowd:
            writer.close()


def test_who_signs_clients_certificates_may_change_while_metrics_are_served(tmp_path: Path) -> None:
    authority, before, after = trustme.CA(), trustme.CA(), trustme.CA()
    certificate, key, client_ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)

    async def is_let_in(controller: Controller, signed_by: trustme.CA) -> bool:
        tls = ssl.create_default_context()
        authority.configure_trust(tls)
        signed_by.issue_cert("prometheus").configure_cert(tls)
        try:
            status, _, _ = await fetch(controller, tls=tls)
        except (http.client.HTTPException, OSError):
            return False
        assert status == 401  # nobody has written down what it may
        return True

    async def test() -> None:
        add_key(tmp_path / "keys", "web", frozenset({Role.INFERENCE}))
        before.cert_pem.write_to_path(client_ca)
        files = {"tls_certificate": certificate, "tls_key": key}
        access = AccessConfig(keys_file=tmp_path / "keys", client_ca=client_ca)
        models = make_models(tmp_path / "models", "m")
        async with running(config(models, access=access, **files)) as controller:
            assert await is_let_in(controller, before)
            assert not await is_let_in(controller, after)
            after.cert_pem.write_to_path(client_ca)
            controller.guard.read_again()
            while not await is_let_in(controller, after):
                pass
            assert not await is_let_in(controller, before)

    # As a controller runs: another loop begins TLS in another way.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 300))


# --- HTTP -----------------------------------------------------------------------------------------


async def test_nothing_is_served_there_but_what_is_known(tmp_path: Path) -> None:
    async with running(config(make_models(tmp_path, "m"))) as controller:
        assert (await fetch(controller, "/nothing"))[0] == 404
        assert (await fetch(controller, "/metrics/"))[0] == 404
        assert (await fetch(controller, "/metrics?x=1"))[0] == 200
        status, headers, _ = await fetch(controller, method="POST")
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        status, headers, text = await fetch(controller, method="HEAD")
        assert (status, text) == (200, "")
        assert int(headers["content-length"]) > 1000
        long = {"X": "x" * HEADERS_BYTES_MAX}
        assert (await fetch(controller, headers=long))[0] == 431
        assert (await fetch(controller, headers={"Content-Length": "5"}))[0] == 400
        # What a page of another site makes a browser ask, by a name that it had lead here.
        assert (await fetch(controller, headers={"Host": "evil.example:80"}))[0] == 403
        assert (await fetch(controller, headers={"Origin": "http://evil.example"}))[0] == 403
        assert (await fetch(controller, headers={"Host": "localhost:8002"}))[0] == 200


@pytest.mark.parametrize(
    ("sent", "begins"),
    [
        (b"GET /metrics HTTP/1.1\r\nno header\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HTTP/1.1\r\nhost : x\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"HTTP/1.1 200"),
        (b"\x16\x03\x01\x02\x00\xff\xfe\r\n\r\n", b"HTTP/1.1 400"),
    ],
)
async def test_what_is_no_request_is_told_so_and_the_connection_ends(
    tmp_path: Path, sent: bytes, begins: bytes
) -> None:
    async with running(config(make_models(tmp_path, "m"))) as controller:
        reader, writer = await asyncio.open_connection("127.0.0.1", controller.metrics_port)
        writer.write(sent)
        assert (await reader.read()).startswith(begins)
        writer.close()
        assert (await fetch(controller))[0] == 200


def test_a_connection_serves_again_and_gives_way_when_all_are_taken(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(config(make_models(tmp_path, "m"))) as controller:
            port = controller.metrics_port

            async def again(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter
            ) -> bytes | None:
                writer.write(b"GET /other HTTP/1.1\r\n\r\n")
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(len(b"expected /metrics\n"))
                except (asyncio.IncompleteReadError, ConnectionError):
                    return None
                return head

            first = await asyncio.open_connection("127.0.0.1", port)
            others = []
            assert await again(*first)
            for _ in range(CONNECTIONS_MAX - 1):
                others.append(await asyncio.open_connection("127.0.0.1", port))
                assert await again(*others[-1])
            assert await again(*first)
            # One more takes the place of the one that was used least recently.
            assert (await fetch(controller))[0] == 200
            assert await again(*others[0]) is None
            assert await again(*others[1])
            assert await again(*first)
            for _, writer in (first, *others):
                writer.close()

    run(test)


async def test_a_taken_port_ends_the_start_unless_nobody_chose_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = make_models(tmp_path, "m")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} for metrics"):
            async with running(config(models, metrics_port=port)):
                pass
        unchosen = config(models, metrics_port=port, metrics_optional=True)
        async with running(unchosen) as controller:
            assert controller.metrics_port is None
    assert f"cannot listen on 127.0.0.1:{port} for metrics" in caplog.text


# --- how many workers -----------------------------------------------------------------------------
