"""Can a request still be answered in time, and if not, why not.

The prediction is a lower bound: what the lanes are committed to, the load if there is no copy, the
requests of the same model with earlier deadlines at the best rate any batch size gives, and the EXEC
itself. Other models' waiting requests are left out, because the policy chooses which of them run first.
So no request is refused that could still be served. A request that other models' requests delay too long
is refused when its slack is gone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS
from controller.core.estimator import Estimates
from controller.core.events import RefuseRequest
from controller.core.load_lanes import LoadLanes
from controller.core.state import Model, Request, due_ns_of


@dataclass(slots=True)
class Verdict:
    """Judgement on one request. The durations add up to its predicted latency, arrival to finish."""

    #: None if it can be in time.
    refusal: Refusal | None = None
    load_ns: int = 0
    exec_ns: int = 0
    queue_ns: int = 0
    #: When to judge a waiting request again: with nothing ahead of it, it would be too late then.
    hopeless_ns: int = 0
    detail: str = ""
    #: An estimate that alone ruled it out is less now: a load may help others that wait, which it did not before.
    doubted: bool = False


# Between a front's last look at the clock and the client's machine lies the kernel: 20 to 40 us as a rule, a slice
# of the kernel's scheduler if another process takes the processor.
_WAY_BACK_PART = 20
# Where requests have weights, so many of those ahead say how many are worth as much.
_SAMPLE = 64
WAY_BACK_NS = 4 * NS_PER_MS


def way_back_of(slo_ns: int, most_ns: int = WAY_BACK_NS) -> int:
    """The part of an SLO that is reserved for the way from the front to the client: `most_ns`, or a part that is less.

    A front that charged what no schedule keeps free would throw away answers that took their EXEC.
    """
    return min(slo_ns // _WAY_BACK_PART, most_ns)


def margin_of(slo_ns: int, most_ns: int, most_share: float) -> int:
    """The time that is kept free between the predicted end of a request's EXEC and its deadline.

    Args:
        slo_ns: SLO of the request.
        most_ns: what the policy keeps now: `SchedulerConfig.margin_ns`, or less where it measures.
        most_share: `SchedulerConfig.margin_fraction`; it is less than `most_ns` where the SLO is short.
    """
    return min(most_ns, int(slo_ns * most_share))


def row_worth_of(model: Model, rows: int, weight: float, work_ahead_ns: int) -> float:
    """What each row of a request is worth to the policy.

    Of a pipeline the work that is left counts, not what was done: an answer that completes it is worth its weight, an
    earlier one the part of its own time in all that is still needed for that.

    Args:
        model: it asks for.
        rows: its own.
        weight: what its answer is worth for each row.
        work_ahead_ns: time that its pipeline needs after the answer.
    """
    fastest = model.fastest
    if not work_ahead_ns or fastest is None:
        return weight
    own_ns = fastest.exec_ns[fastest.cover[min(rows, fastest.sizes[-1])]]
    return weight * own_ns / (own_ns + work_ahead_ns)


def judge(
    request: Request,
    now_ns: int,
    lanes: LoadLanes,
    *,
    arriving: bool = False,
    room_ns: int = 0,
    behind: int = 0,
    doubts: bool = True,
) -> Verdict:
    """Predict the earliest finish over all workers of a request that waits, or is about to.

    Args:
        request: it waits, or arrives.
        now_ns: the present.
        lanes: every worker, by when its load lane is free.
        arriving: it is in no queue yet.
        room_ns: time that it leaves to others: it is refused unless it ends so much before it has to.
        behind: rows that are about to arrive before it, and have to end no later.
        doubts: an estimate that alone rules it out may be doubted, and the request tried. Else nothing is changed, and such
            a request is `INFEASIBLE`.
    """
    model = request.model
    if model.removed:
        return Verdict(Refusal.MODEL_REMOVED)
    ready = model.ready
    if not ready:
        return _offered_nowhere(model)
    due_ns, rows = request.due_ns - room_ns, request.rows
    ahead = rows + behind
    if model.queue:
        ahead += _rows_ahead(request, arriving)

    best: Verdict | None = None
    # When that ends; how many rows a ns all workers together run, and would have run if they could begin now.
    best_finish_ns, rate, lost_rows = 0, 0.0, 0.0
    copies = model.copies
    for worker, copy in copies.items():
        estimates = copy.estimates
        if rows > estimates.sizes[-1]:
            continue
        link = worker.link
        way_ns = link.usual_ns
        if not link.is_usual:
            way_ns = link.expected_ns(now_ns, request.num_bytes, rows * model.output_row_bytes)
        begin_ns = max(worker.exec_lane.available_ns(now_ns), now_ns + way_ns)
        if not copy.resident and begin_ns < copy.ready_ns:
            begin_ns = copy.ready_ns
        exec_ns = estimates.exec_ns[estimates.cover[rows]]
        finish_ns = begin_ns + exec_ns
        if ahead > rows:
            shared_ns = begin_ns + int(ahead * estimates.ns_per_row / len(copies))
            finish_ns = max(finish_ns, shared_ns)
        if finish_ns <= due_ns:
            return Verdict(hopeless_ns=due_ns - exec_ns)
        if best is None or finish_ns < best_finish_ns:
            load_ns = 0 if copy.resident else max(0, copy.ready_ns - now_ns)
            best, best_finish_ns = Verdict(load_ns=load_ns, exec_ns=exec_ns), finish_ns
        rate += 1.0 / estimates.ns_per_row
        lost_rows += (begin_ns - now_ns) / estimates.ns_per_row

    # The least time for the EXEC, and for a load before it, on any worker.
    shortest_ns: int | None = None
    cold_ns = 0
    for estimates in model.estimates:
        if rows > estimates.sizes[-1]:
            continue
        exec_ns = estimates.exec_ns[estimates.cover[rows]]
        if shortest_ns is None or estimates.load_ns + exec_ns < cold_ns:
            cold_ns = estimates.load_ns + exec_ns
        if shortest_ns is None or exec_ns < shortest_ns:
            shortest_ns = exec_ns
    if shortest_ns is None:
        largest = max(estimates.sizes[-1] for estimates in model.estimates)
        return Verdict(
            Refusal.INFEASIBLE,
            detail=f"{rows} rows, the largest batch that any worker runs is {largest}",
        )
    for lane_end_ns, _, worker in lanes.among(ready):
        if best is not None and lane_end_ns + cold_ns > max(due_ns, best_finish_ns):
            break  # neither this one nor any after it is in time, or sooner
        readiness = ready.get(worker)
        if readiness is None or worker in copies:
            continue
        estimates = readiness.estimates
        if rows > estimates.sizes[-1]:
            continue
        exec_ns = estimates.exec_ns[estimates.cover[rows]]
        link = worker.link
        way_ns = link.usual_ns
        if not link.is_usual:
            way_ns = link.expected_ns(now_ns, request.num_bytes, rows * model.output_row_bytes)
        load_begin_ns = max(worker.load_lane.available_ns(now_ns), now_ns + way_ns)
        begin_ns = max(load_begin_ns + estimates.load_ns, worker.exec_lane.available_ns(now_ns))
        finish_ns = begin_ns + max(exec_ns, int(ahead * estimates.ns_per_row))
        if finish_ns <= due_ns:
            return Verdict(hopeless_ns=due_ns - exec_ns - (0 if copies else estimates.load_ns))
        if best is None or finish_ns < best_finish_ns:
            best = Verdict(load_ns=estimates.load_ns, exec_ns=exec_ns)
            best_finish_ns = finish_ns
        if ahead > rows:
            # The requests ahead may be shared among the copies there are and those that can be loaded.
            rate += 1.0 / estimates.ns_per_row
            lost_rows += (begin_ns - now_ns) / estimates.ns_per_row
            shared_ns = now_ns + int((ahead + lost_rows) / rate)
            if max(shared_ns, begin_ns + exec_ns) <= due_ns:
                return Verdict(hopeless_ns=due_ns - exec_ns - (0 if copies else estimates.load_ns))

    assert best is not None  # a worker that can hold it has a copy or not
    if not doubts:
        if _is_doubtful(request, shortest_ns, now_ns, lanes):
            return Verdict(Refusal.INFEASIBLE)
    elif _doubt(best, request, shortest_ns, now_ns, lanes) and arriving:
        # This request may be the one that tries; were it refused, so would be all until the next came.
        best = judge(request, now_ns, lanes, arriving=True, room_ns=room_ns)
        best.doubted = True
        return best
    best.queue_ns = best_finish_ns - request.arrival_ns - best.exec_ns - best.load_ns
    # Even an idle worker begins later, by what is planned for on every link alike.
    way_ns = next(iter(ready)).link.usual_ns
    if shortest_ns + way_ns > request.due_ns - request.arrival_ns:
        best.refusal = Refusal.INFEASIBLE
        best.exec_ns, best.load_ns, best.queue_ns = shortest_ns, 0, way_ns
    elif any(copy.resident for copy in copies.values()):
        best.refusal = Refusal.OVERLOADED
    else:
        best.refusal = Refusal.COLD
    return best


def judge_without_prediction(request: Request) -> Verdict:
    """Only whether some worker could run the request at all, at whatever time."""
    model = request.model
    if model.removed:
        return Verdict(Refusal.MODEL_REMOVED)
    if not model.ready:
        return _offered_nowhere(model)
    largest = max(readiness.estimates.sizes[-1] for readiness in model.ready.values())
    if request.rows > largest:
        return Verdict(
            Refusal.INFEASIBLE,
            detail=f"{request.rows} rows, the largest batch that any worker runs is {largest}",
        )
    return Verdict()


def _offered_nowhere(model: Model) -> Verdict:
    """No worker is ready for the model, or none that holds it could load it of late."""
    for suspension in model.suspended.values():
        return Verdict(Refusal.FAILED, detail=suspension.words)
    return Verdict(Refusal.NO_WORKER)


def refusal_of(request: Request, verdict: Verdict) -> RefuseRequest:
    """The response to a request that is judged not to be answered in time."""
    assert verdict.refusal is not None
    return RefuseRequest(
        request_id=request.request_id,
        model_id=request.model.model_id,
        refusal=verdict.refusal,
        slo_ns=request.slo_ns,
        load_ns=verdict.load_ns,
        exec_ns=verdict.exec_ns,
        queue_ns=verdict.queue_ns,
        margin_ns=request.deadline_ns - request.due_ns,
        detail=verdict.detail,
    )


def _is_doubtful(request: Request, shortest_ns: int, now_ns: int, lanes: LoadLanes) -> bool:
    """Whether the way to a worker and the EXEC alone rule the request out there: `_doubt` may have it tried."""
    model = request.model
    budget_ns = request.due_ns - request.arrival_ns - shortest_ns
    if not lanes.unusual:  # all links are alike
        return next(iter(model.ready)).link.usual_ns > budget_ns
    out_bytes = request.rows * model.output_row_bytes
    return any(
        worker.link.expected_ns(now_ns, request.num_bytes, out_bytes) > budget_ns
        for worker in model.ready
    )


def _doubt(
    verdict: Verdict, request: Request, shortest_ns: int, now_ns: int, lanes: LoadLanes
) -> bool:
    """Where one estimate alone rules the request out, make sure that the estimate is true, and note it in the verdict.

    Returns whether an EXEC is to try it from now on.
    """
    model, tries = request.model, False
    if not lanes.unusual:  # where all links are alike, so are workers of the same estimates
        for worker in model.ready:
            budget_ns = request.due_ns - request.arrival_ns - worker.link.usual_ns
            break
        for estimates in model.estimates:
            if request.rows <= estimates.sizes[-1]:
                tries |= _doubt_estimates(
                    verdict, request, estimates, shortest_ns, budget_ns, now_ns
                )
        return tries
    for worker, readiness in model.ready.items():
        estimates = readiness.estimates
        if request.rows > estimates.sizes[-1]:
            continue
        # Even an idle worker begins later, by the link's delay. Without it, an estimate just below the SLO would
        # never be corrected: every request is refused, so nothing runs that could be measured.
        link = worker.link
        link_ns = link.expected_ns(now_ns, request.num_bytes, request.rows * model.output_row_bytes)
        budget_ns = request.due_ns - request.arrival_ns - link_ns
        if shortest_ns > budget_ns:
            link.doubt(now_ns)
            if budget_ns <= 0:
                continue  # Whatever the estimates are, the way alone takes too long.
        tries |= _doubt_estimates(verdict, request, estimates, shortest_ns, budget_ns, now_ns)
    return tries


def _doubt_estimates(
    verdict: Verdict,
    request: Request,
    estimates: Estimates,
    shortest_ns: int,
    budget_ns: int,
    now_ns: int,
) -> bool:
    # Loads of a model that has copies are no trial: they would be for this request only.
    cold = not request.model.copies
    exec_ns = budget_ns
    if cold and estimates.load_ns < budget_ns and not estimates.has_run(request.rows):
        exec_ns -= estimates.load_ns  # where neither is measured, the EXEC is tried
    if shortest_ns > exec_ns:
        index = estimates.cover[request.rows]
        before_ns = estimates.exec_ns[index]
        tries = estimates.doubt_exec(request.rows, exec_ns, now_ns=now_ns)
        verdict.doubted |= estimates.exec_ns[index] < before_ns
        return tries
    if (before_ns := estimates.load_ns) + shortest_ns > budget_ns:
        estimates.doubt_load(budget_ns - shortest_ns, now_ns=now_ns, tries=cold)
        verdict.doubted |= estimates.load_ns < before_ns
    return False


def _rows_ahead(request: Request, arriving: bool) -> int:
    """Rows of waiting requests of the same model that will go first."""
    model, due_ns = request.model, request.due_ns
    if model.num_weighed or request.row_worth > 1.0:
        # The policy may pass over rows that are worth less.
        return _rows_worth(model, due_ns if arriving else due_ns - 1, request.row_worth)
    if not arriving:
        position = bisect_left(model.queue, due_ns, key=due_ns_of)
        return position + model.extra_rows.before(due_ns)
    if due_ns >= model.queue[-1].due_ns:
        return len(model.queue) + model.extra_rows.total
    return rows_due(model, due_ns)


def _rows_worth(model: Model, due_ns: int, worth: float) -> int:
    """Rows that have to end at a time or before and are worth as much; of a long queue, by a sample of it."""
    if not model.num_weighed and worth > 1.0:
        return 0
    position = bisect_right(model.queue, due_ns, key=due_ns_of)
    step = 1 + position // _SAMPLE
    return step * sum([r.rows for r in model.queue[:position:step] if r.row_worth >= worth])


def rows_due(model: Model, due_ns: int) -> int:
    """Rows of the model's waiting requests that have to end at a time or before."""
    position = bisect_right(model.queue, due_ns, key=due_ns_of)
    if not model.num_unlike:
        return position
    return position + model.extra_rows.before(due_ns + 1)
