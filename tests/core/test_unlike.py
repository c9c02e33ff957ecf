"""Requests that are unlike: in rows, in weight, and in the work that their pipelines still need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clockwright.errors import Refusal
from clockwright.units import GpuKind, ModelId, RequestId
from controller.core import SchedulerConfig
from controller.core.admission import row_worth_of
from controller.core.estimator import Estimates
from controller.core.events import ModelAdded, RefuseRequest, RequestArrived
from controller.core.link import LinkPlan
from controller.core.policies.runs import unlike_run, urgent_run
from controller.core.policies.strategies import Strategies
from controller.core.state import Copy, Model, Request, WorkerState
from controller.telemetry.tables import OK, Telemetry
from experiments.policies.load import RESNET, case_of, hosted, poisson
from experiments.simulator import Case, run
from tests.kit.core_bench import GPU, MS, A, CoreBench

EXEC_MS = {1: 10, 2: 12, 4: 16, 8: 24}


def copy_with(*asked: tuple[float, int, float]) -> Copy:
    """A copy of a model whose requests wait, each with when it is due (ms), its rows, and what each row is worth."""
    worker = WorkerState(GPU, GpuKind("k"), 10, 10, 0, LinkPlan(least_ns=0, tolerance_ns=0))
    model = Model(ModelId("m"), 0)
    for number, (due_ms, rows, row_worth) in enumerate(sorted(asked)):
        due_ns = int(due_ms * MS)
        request = Request(RequestId(number), model, rows, 0, due_ns, due_ns, due_ns, False, 0)
        request.row_worth = row_worth
        model.queue.append(request)
    model.num_unlike = len(asked)
    model.num_weighed = sum(worth != 1.0 for _, _, worth in asked)
    exec_ns = {size: ms * MS for size, ms in EXEC_MS.items()}
    copy = Copy(model, worker, 1, Estimates(load_ns=MS, exec_ns=exec_ns), resident=True)
    model.copies[worker] = worker.copies[model] = copy
    return copy


def picked(copy: Copy) -> tuple[list[int], int]:
    """Numbers of the requests of the next batch, and its size."""
    batch = unlike_run(copy, 0)
    assert batch is not None
    assert batch.picked is not None
    assert copy.model.queue[batch.first] is batch.picked[0]
    size = copy.estimates.sizes[batch.size_index]
    return [request.request_id for request in batch.picked], size


def test_a_batch_that_was_looked_at_is_made_anew_when_one_of_it_leaves() -> None:
    """Those that are left are alike, and as many as the batch had: it ran a request that its client had cancelled."""
    copy = copy_with((13, 1, 1.0), (13, 1, 0.001), (3000, 1, 1.0))
    model, strategies = copy.model, Strategies()
    strategies.update(model)
    (before,) = strategies.find(copy.worker, 0, 0, urgent_run, [])
    gone = model.queue[1]
    assert before.picked == model.queue[:2]
    model.queue.remove(gone)
    model.num_unlike = model.num_weighed = 0
    strategies.update(model)
    (batch,) = strategies.find(copy.worker, 0, 0, urgent_run, [])
    strategies.take_out(batch)
    assert gone not in model.queue


def test_a_batch_has_most_rows_per_time_although_no_size_is_filled() -> None:
    copy = copy_with((50, 3, 1.0), (60, 4, 1.0))
    assert picked(copy) == ([0, 1], 8)


def test_a_request_that_does_not_fit_leaves_its_room_to_later_ones() -> None:
    copy = copy_with((50, 5, 1.0), (60, 7, 1.0), (70, 2, 1.0), (80, 1, 1.0))
    assert picked(copy) == ([0, 2, 3], 8)


def test_while_nothing_is_refused_the_most_urgent_request_is_in_the_batch() -> None:
    """A batch with the urgent one takes 12 ms at most; one of eight would answer more rows per time."""
    copy = copy_with((13, 1, 1.0), (60, 4, 5.0), (60, 4, 5.0))
    assert picked(copy)[0] == [0]
    copy.model.short_until_ns = MS
    assert picked(copy) == ([1, 2], 8)


def test_when_requests_are_refused_those_that_are_worth_more_go_first() -> None:
    copy = copy_with((40, 4, 1.0), (50, 4, 1.0), (60, 4, 2.0))
    copy.model.short_until_ns = MS
    assert picked(copy) == ([0, 2], 8)


def test_a_worthy_request_that_can_wait_does_not_make_batches_smaller() -> None:
    copy = copy_with((100, 1, 9.0), *[(100, 1, 1.0)] * 7)
    copy.model.short_until_ns = MS
    assert picked(copy)[1] == 8


def test_a_request_too_large_or_too_late_is_passed_over() -> None:
    copy = copy_with((15, 4, 1.0), (40, 9, 1.0), (50, 2, 1.0))
    assert picked(copy) == ([2], 2)
    assert unlike_run(copy_with((9, 1, 2.0)), 0) is None


@pytest.mark.parametrize(
    ("weight", "ahead_ms", "row_worth"),
    [(1.0, 0, 1.0), (3.0, 0, 3.0), (1.0, 30, 0.25), (2.0, 10, 1.0)],
)
def test_an_answer_is_worth_the_part_of_the_work_left_that_it_completes(
    weight: float, ahead_ms: int, row_worth: float
) -> None:
    """Alone it takes 10 ms. What was done before does not count, because it is spent either way."""
    copy = copy_with()
    copy.model.fastest = copy.estimates
    assert row_worth_of(copy.model, 1, weight, ahead_ms * MS) == row_worth


def test_a_request_that_is_worth_more_is_not_refused_for_those_before_it() -> None:
    """Sixteen wait that take the lane 80 ms. A usual one is too late behind them; one of weight 2 may go first."""
    bench = CoreBench(SchedulerConfig(policy="edf_mh", dispatch_delay_ns=0, margin_ns=0))
    bench.join()
    bench.tell(ModelAdded(model_id=A))
    bench.ready(resident=True)
    for _ in range(17):
        bench.request(slo_ms=90)
    assert [each.refusal for each in refusals_of(bench, weight=1.0)] == [Refusal.OVERLOADED]
    assert refusals_of(bench, weight=2.0) == []


def refusals_of(bench: CoreBench, *, weight: float) -> list[RefuseRequest]:
    """What is refused when a request of a weight arrives."""
    bench.num_requests += 1
    request = RequestArrived(
        request_id=RequestId(bench.num_requests),
        model_id=A,
        rows=1,
        arrival_ns=bench.now_ns,
        slo_ns=90 * MS,
        weight=weight,
    )
    return [each for each in bench.tell(request) if isinstance(each, RefuseRequest)]


def played(case: Case, policy: str = "edf_mh") -> Telemetry:
    """Play a case, with the books audited after each event."""
    telemetry = Telemetry()
    run(
        replace(case, scheduler=SchedulerConfig(policy=policy)),
        telemetry=telemetry,
        check=True,
    )
    return telemetry


def overload(num_models: int, rate_rps: float) -> Case:
    models = tuple(hosted(f"m{number}", RESNET) for number in range(num_models))
    return case_of(models, [poisson(range(num_models), rate_rps, 100, 1.0, 1)], 1, 1.0)


@pytest.mark.parametrize("num_models", [1, 4])
def test_in_overload_requests_of_a_larger_weight_are_answered_more_often(num_models: int) -> None:
    rows = played(replace(overload(num_models, 1500), weights=(1.0, 1.0, 1.0, 5.0))).requests

    def share(weight: float) -> float:
        outcomes = [row.outcome for row in rows if row.weight == weight]
        return outcomes.count(OK) / len(outcomes)

    assert share(5.0) > share(1.0) + 0.3


@pytest.mark.parametrize("policy", ["edf_mh", "clockwork"])
def test_promises_are_kept_beside_requests_that_are_unlike(policy: str) -> None:
    unlike = {"weights": (1.0, 2.0), "rows": (1, 1, 3, 7), "decide_share": 0.5}
    case = replace(overload(4, 600), decide_within_ns=20 * MS, **unlike)  # type: ignore[arg-type]
    rows = played(case, policy).requests
    assert sum(row.outcome == OK for row in rows) > 100
    assert [
        row
        for row in rows
        if row.outcome != OK and row.decided_ns < row.departure_ns and row.decided_ns
    ] == []


def test_pipelines_that_say_what_is_ahead_are_completed_more_often() -> None:
    models = tuple(hosted(stage, RESNET) for stage in "abc")
    case = case_of(models, [poisson((0,), 500, 200, 1.5, 1)], 1, 1.5)
    case = replace(case, pipelines=(tuple(model.model_id for model in models),))

    def completed(*, tells: bool, plans: bool = False) -> int:
        rows = played(replace(case, tells_work_ahead=tells, plans_pipelines=plans)).requests
        return sum(row.model_id == "c" and row.outcome == OK for row in rows)

    told = completed(tells=True)
    assert told > 1.1 * completed(tells=False)
    # What the server leaves to later stages is more than they need.
    assert completed(tells=True, plans=True) > 1.1 * told
