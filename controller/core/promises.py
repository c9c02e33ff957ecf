"""Promises: places on exec lanes that are reserved for requests whose clients asked for certainty.

A client may ask that its request is decided within a time: refused then, or promised (`CertaintyAsked`). A promised
request stays in its model's queue, and the policy may run it whenever it likes. In addition it has a *place*: a batch
that its worker will run in time if everything else has to wait. `next_infer` stands between a lane and the policy
where the lane has places. It lets the policy's batch through if all places can still be kept behind it; else it runs
the most urgent place. So no later request, however urgent, takes a promised request's time.

Places of a lane are planned in deadline order, one after the other, behind what the lane has. A request joins the
place of its model that grows least, or gets one of its own, on the lane where that takes the least time. A place that
is run takes along what else waits of its model, as far as the other places allow.

A lane whose time is promised to batches of one has no time left in which they could grow, and stays so. So where
requests are refused, a place is as long as the batch that is likely to come together in it. It is shorter as soon as
a promise would be late for that, because a run took longer or left some requests of its place behind.

Places are looked after when they are looked at: requests that were sent, answered or withdrawn leave then. A lane
without places costs nothing, and no request that does not ask does either.

A promise can be broken by what no plan can know: a worker that is lost, drained or found to be sick, an engine that
fails, an operator who removes the model, or actions that take longer than predicted by more than the margin, also on
a link that has just become thin. On a link that is known to be thin, the bytes of all places are planned as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core.admission import way_back_of
from controller.core.parts import CoreParts
from controller.core.state import (
    WAITING,
    Batch,
    Copy,
    Model,
    Request,
    ReservedPlace,
    WorkerState,
    due_ns_of,
    to_front,
)

# The share of refusals among the decisions is a mean over about so many. From a twentieth of them on places are as long
# as they are going to be.
_DECISIONS = 64
_FEW_REFUSALS = 1 / 20

# A place is made for so many times the requests that are expected to join. What is not used is free again when the
# place is run. 15 models at 0.9 to 1.5 times what a GPU can do, all asking: 1.0 costs a point of goodput more, 2.5
# costs 4 to 9 points more.
_EXPECTED = 1.5

# The mean gap between decisions of a model is over about so many, and no longer than this.
_GAPS = 8
_LONGEST_GAP_NS = NS_PER_S

# A lane that can run neither a place nor anything else without breaking a promise is asked again after this time.
_RETRY_NS = NS_PER_MS

_place_due_ns: Final = attrgetter("due_ns")


@dataclass(slots=True)
class _Room:
    """A place that a request could have."""

    #: Time that it adds to the lane, and when the request would end.
    added_ns: int
    end_ns: int
    copy: Copy
    #: The place to join; None: one of its own.
    place: ReservedPlace | None


class Promises:
    """Finds places, keeps them, and chooses batches where some are at stake."""

    def __init__(self, parts: CoreParts) -> None:
        self._policy = parts.policy
        self._alarms = parts.alarms
        self._way_back_ns = parts.config.way_back_ns
        #: The share of the last decisions that were refusals.
        self._refused = 0.0

    # --- places ---------------------------------------------------------------------------------

    def is_kept(self, request: Request) -> bool:
        """Whether a request has a place on a lane that its model can still count on."""
        place = request.place
        return place is not None and _counts(place)

    def reserve(self, request: Request, now_ns: int, *, loading: Copy | None = None) -> bool:
        """Give a request that waits a place, where it takes the least time. Returns False if no lane has one.

        `loading` is a copy that is loaded for it, where `loads_in_time` found a place for it alone.
        """
        best: _Room | None = None
        together = 1 if loading else self._expected(request, now_ns)
        for copy in [loading] if loading else request.model.copies.values():
            worker = copy.worker
            lane_ns = _free_ns(worker, now_ns)
            own_ns = self._own_ns(request, copy, together)
            places = self._look(worker, lane_ns, now_ns)
            room = _room(request, copy, places, lane_ns, own_ns, now_ns)
            if room is not None and (
                best is None or (room.added_ns, room.end_ns) < (best.added_ns, best.end_ns)
            ):
                best = room
        if best is None:
            return False
        place = best.place
        if place is None:
            place = ReservedPlace(best.copy, reserved_ns=best.added_ns)
            best.copy.worker.promised.append(place)
        place.requests.append(request)
        request.place = place
        return True

    def count_decision(self, model: Model, *, refused: bool, now_ns: int) -> None:
        """A request of the model was refused or promised when it had to be decided."""
        self._refused += (refused - self._refused) / _DECISIONS
        gap_ns = min(now_ns - model.decided_ns, _LONGEST_GAP_NS)
        if model.decided_ns:
            model.decide_gap_ns += (gap_ns - model.decide_gap_ns) // _GAPS
        model.decided_ns = now_ns

    def _expected(self, request: Request, now_ns: int) -> int:
        """How many requests are likely to share a place of this request's own: those that wait, and that come."""
        model = request.model
        waiting = sum([each.place is None for each in model.queue])
        return waiting + int(_EXPECTED * (request.due_ns - now_ns) / max(model.decide_gap_ns, 1))

    def _own_ns(self, request: Request, copy: Copy, together: int) -> int:
        """Time to keep for a place of a request's own, which so many requests are likely to share."""
        estimates = copy.estimates
        alone_ns = _lane_ns(copy, [request])
        if copy.worker.link.is_thin:
            return alone_ns
        size = estimates.densest[max(request.rows, min(together, estimates.sizes[-1]))]
        grown_ns = max(estimates.exec_ns[size] - alone_ns, 0) if size >= 0 else 0
        return alone_ns + int(min(self._refused / _FEW_REFUSALS, 1.0) * grown_ns)

    def loads_in_time(self, request: Request, now_ns: int) -> list[WorkerState]:
        """Workers without a copy that would have a place for a request if its model were loaded now, the best first."""
        model, found = request.model, []
        for worker, readiness in model.ready.items():
            if worker in model.copies:
                continue
            begin_ns = worker.link.expected_ns(now_ns) + now_ns
            ready_ns = max(worker.load_lane.available_ns(now_ns), begin_ns)
            ready_ns += readiness.estimates.load_ns
            copy = Copy(model, worker, readiness.num_pages, readiness.estimates, ready_ns)
            lane_ns = _free_ns(worker, now_ns)
            own_ns = self._own_ns(request, copy, 1)
            places = self._look(worker, lane_ns, now_ns)
            room = _room(request, copy, places, lane_ns, own_ns, now_ns)
            if room is not None:
                found.append((room.end_ns, worker.sequence, worker))
        found.sort()
        return [worker for _, _, worker in found]

    def _look(self, worker: WorkerState, lane_ns: int, now_ns: int) -> list[ReservedPlace]:
        """The worker's places in the order of their deadlines, each with what is true of it now.

        At `lane_ns` its lane could begin something that takes no bytes along.
        """
        if not worker.promised:
            return worker.promised
        places: list[ReservedPlace] = []
        for place in worker.promised:
            place.requests = [
                request
                for request in place.requests
                if request.place is place and request.phase is WAITING
            ]
            if not place.requests or not _counts(place):
                continue
            place.rows = sum([request.rows for request in place.requests])
            place.due_ns = min([request.due_ns for request in place.requests])
            place.exec_ns = exec_ns = _lane_ns(place.copy, place.requests)
            if max(lane_ns, _ready_ns(place.copy)) + exec_ns <= self._latest_end_ns(place.requests):
                places.append(place)
                continue
            # Its time is over, and it must not be in the way of others. Some of its requests may be in time elsewhere.
            for request in place.requests:
                request.place = None
                self._alarms.watch(request, now_ns)
        places.sort(key=_place_due_ns)
        latest_ns = 1 << 62
        for place in reversed(places):
            place.end_ns = latest_ns = min(latest_ns, place.due_ns)
            latest_ns -= place.exec_ns
        end_ns = lane_ns
        for place in places:
            begin_ns, latest_ns = max(end_ns, _ready_ns(place.copy)), place.end_ns
            if worker.link.is_thin:  # its bytes come first
                in_bytes, out_bytes = _bytes_of(place.copy, place.requests)
                begin_ns = max(begin_ns, _free_ns(worker, now_ns, in_bytes, out_bytes))
            end_ns = begin_ns + place.exec_ns
            # More time is kept for those who may join only as long as no place is late for it.
            end_ns = max(end_ns, min(begin_ns + place.reserved_ns, latest_ns))
            place.end_ns, place.exec_ns = end_ns, end_ns - begin_ns
        worker.promised = places
        return places

    def _latest_end_ns(self, requests: list[Request]) -> int:
        """When a batch with some promised requests has to end, whatever margin was planned."""
        most_ns = self._way_back_ns
        return min(
            [
                max(each.due_ns, each.deadline_ns - way_back_of(each.slo_ns, most_ns))
                for each in requests
            ]
        )

    # --- what a lane with places runs -----------------------------------------------------------

    def next_infer(self, worker: WorkerState, free_ns: int, now_ns: int) -> Batch | None:
        """Choose what the exec lane runs next; see `Policy.next_infer`."""
        places = self._look(worker, free_ns, now_ns)
        if not places:
            return self._policy.next_infer(worker, free_ns, now_ns)
        slack_ns = min([place.due_ns - place.end_ns for place in places])
        first = places[0]
        if slack_ns >= first.copy.estimates.exec_ns[0] or _ready_ns(first.copy) > free_ns:
            batch = self._policy.next_infer(worker, free_ns, now_ns)
            if batch is not None:
                taken = batch.copy.model.queue[batch.first : batch.first + batch.count]
                if not _is_risky(batch, taken) and _keeps(places, batch, taken):
                    return batch
                if batch.picked is not None:  # they stand at the front
                    batch.copy.model.queue.sort(key=due_ns_of)
                self._policy.queue_changed(batch.copy.model)  # it waits again
            elif worker.retry_ns is not None and slack_ns > 0:
                # It holds batches back. So may these, until they have to begin.
                worker.retry_ns = min(worker.retry_ns, now_ns + slack_ns)
                return None
        worker.retry_ns = None
        for place in places:
            if place.copy.resident:
                found = self._batch_of(place, free_ns, max(slack_ns, 0), now_ns)
                if found is not None and (place is first or _keeps(places, *found)):
                    batch, taken = found
                    if len(taken) > 1:
                        to_front(place.copy.model.queue, taken)
                    return batch
        worker.retry_ns = now_ns + _RETRY_NS  # weights are on their way, for example
        return None

    def _batch_of(
        self, place: ReservedPlace, begin_ns: int, spare_ns: int, now_ns: int
    ) -> tuple[Batch, list[Request]] | None:
        """The place's batch, with what else waits of its model. Returns None if its time is over.

        It could begin at `begin_ns`, and may take `spare_ns` longer than planned.
        """
        copy, own = place.copy, place.requests
        model, estimates = copy.model, copy.estimates
        sizes, exec_ns = estimates.sizes, estimates.exec_ns
        queue, rows = model.queue, place.rows
        first = min(own, key=due_ns_of)
        alone = now_ns < model.apart_until_ns or copy.worker.link.is_thin
        if alone:  # else the lane might leave out the last ones
            own, rows = [first], first.rows
        index = estimates.cover[rows]
        deadline_ns = self._latest_end_ns(own)
        latest_ns = deadline_ns - exec_ns[index]
        if begin_ns > latest_ns:
            return None
        if alone:
            return Batch(copy, queue.index(first), 1, index, latest_ns, begin_ns), own
        others = [request for request in queue if request.place is not place]
        waiting = rows + sum([request.rows for request in others])
        for larger in range(index + 1, len(sizes)):
            more_ns = exec_ns[larger] - place.exec_ns
            if (
                sizes[larger] > waiting
                or more_ns > spare_ns
                or begin_ns + exec_ns[larger] > deadline_ns
            ):
                break
            if estimates.densest[sizes[larger]] == larger:
                index = larger
        end_ns, taken = begin_ns + exec_ns[index], list(own)
        for request in others:
            if rows == sizes[index]:
                break
            if request.due_ns >= end_ns and rows + request.rows <= sizes[index]:
                taken.append(request)
                rows += request.rows
        if exec_ns[estimates.cover[rows]] < exec_ns[index]:
            index = estimates.cover[rows]
        position = 0 if len(taken) > 1 else queue.index(first)
        latest_ns = deadline_ns - exec_ns[index]
        return Batch(copy, position, len(taken), index, latest_ns, begin_ns), taken


def _counts(place: ReservedPlace) -> bool:
    """Whether the copy of a place is still there for its model."""
    copy = place.copy
    return copy.model.copies.get(copy.worker) is copy


def _lane_ns(copy: Copy, requests: list[Request]) -> int:
    """The time that the lane of a copy spends on some requests, or its wire, whichever is longer."""
    estimates = copy.estimates
    exec_ns = estimates.exec_ns[estimates.cover[sum([each.rows for each in requests])]]
    return max(exec_ns, _wire_ns(copy, requests))


def _wire_ns(copy: Copy, requests: list[Request]) -> int:
    """The time that the bytes of some requests take the worker's link; 0 where it is not thin."""
    link = copy.worker.link
    return link.wire_ns(*_bytes_of(copy, requests)) if link.is_thin else 0


def _bytes_of(copy: Copy, requests: list[Request]) -> tuple[int, int]:
    """Bytes of the inputs of some requests, and of their outputs."""
    out_bytes = copy.model.output_row_bytes * sum([each.rows for each in requests])
    return sum([each.num_bytes for each in requests]), out_bytes


def _ready_ns(copy: Copy) -> int:
    return 0 if copy.resident else copy.ready_ns


def _free_ns(worker: WorkerState, now_ns: int, in_bytes: int = 0, out_bytes: int = 0) -> int:
    """When the worker could begin a batch with so many bytes of inputs and outputs."""
    there_ns = now_ns + worker.link.expected_ns(now_ns, in_bytes, out_bytes)
    return max(worker.exec_lane.available_ns(now_ns), there_ns)


def _room(
    request: Request,
    copy: Copy,
    places: list[ReservedPlace],
    lane_ns: int,
    own_added_ns: int,
    now_ns: int,
) -> _Room | None:
    """The place for a request among those of a copy's lane that adds the least time to it.

    Args:
        request: it waits.
        copy: of its model.
        places: of the lane, as `Promises._look` gives them.
        lane_ns: when the lane could begin something that takes no bytes along.
        own_added_ns: time to keep for a place of its own.
        now_ns: the present.
    """
    estimates, rows, due_ns = copy.estimates, request.rows, request.due_ns
    sizes, exec_ns, cover = estimates.sizes, estimates.exec_ns, estimates.cover
    if rows > sizes[-1]:
        return None
    # The request's bytes may take longer than the lane. Places before its own do not wait for them.
    free_ns = _free_ns(copy.worker, now_ns, request.num_bytes, rows * copy.model.output_row_bytes)
    alone = copy.worker.link.is_thin  # there each runs by itself
    # From the last place to the first: the time by which a place may grow without making any after it late.
    slack_ns = 1 << 62
    before_ns, after_ns = lane_ns, 0
    best: _Room | None = None
    before = True
    for place in reversed(places):
        if before and place.due_ns <= due_ns:
            # A place of its own stands behind this one.
            before, before_ns, after_ns = False, place.end_ns, slack_ns
        slack_ns = min(slack_ns, place.due_ns - place.end_ns)
        if place.copy is not copy or alone or place.rows + rows > sizes[-1]:
            continue
        begin_ns = max(place.end_ns - place.exec_ns, free_ns)
        added_ns = max(begin_ns + exec_ns[cover[place.rows + rows]] - place.end_ns, 0)
        if added_ns > max(slack_ns, 0) or place.end_ns + added_ns > due_ns:
            continue
        if best is None or added_ns <= best.added_ns:
            best = _Room(added_ns, place.end_ns + added_ns, copy, place)
    if before:
        after_ns = slack_ns
    begin_ns = max(before_ns, free_ns)
    end_ns = max(begin_ns, _ready_ns(copy)) + own_added_ns
    own_ok = begin_ns + own_added_ns - before_ns <= after_ns and end_ns <= due_ns
    if own_ok and (best is None or own_added_ns < best.added_ns):
        return _Room(own_added_ns, end_ns, copy, None)
    return best


def _is_risky(batch: Batch, requests: list[Request]) -> bool:
    """Whether a batch has promised requests, and would be sent before its weights are there.

    If they come a moment later than predicted, the worker runs what it has in the meantime.
    """
    return not batch.copy.resident and any(request.decided_ns for request in requests)


def _keeps(places: list[ReservedPlace], batch: Batch, requests: list[Request]) -> bool:
    """Whether all places end in time behind a batch of some requests, which takes them out of their places."""
    copy = batch.copy
    exec_ns = copy.estimates.exec_ns[batch.size_index]
    end_ns = batch.begin_ns + max(exec_ns, _wire_ns(copy, requests))
    taken = set(map(id, requests))
    for place in places:
        left, exec_ns, due_ns = place.requests, place.exec_ns, place.due_ns
        if place.copy.model is copy.model:
            left = [request for request in left if id(request) not in taken]
            if not left:
                continue
            if len(left) < len(place.requests):
                exec_ns = _lane_ns(place.copy, left)
            due_ns = min([request.due_ns for request in left])
        end_ns = max(end_ns, _ready_ns(place.copy)) + exec_ns
        if end_ns > due_ns:
            return False
    return True
