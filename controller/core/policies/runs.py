"""Which run of one model's queue makes the next batch, seen from one copy: three rules.

Each rule gets a copy and the earliest begin, and returns a batch that is in time, or None. The queue is in
deadline order, so a batch is a run of it: the first request sets the latest begin.

* `best_batch` is Appendix B's: the strategy with the earliest required start that is in time. It may pass
  over requests that a smaller batch could still answer.
* `urgent_run` passes over no request that a batch of one still answers, unless that pays.
* `largest_run` passes over every request that stands in the way of the largest batch, unless all in that can wait.

The last two leave out sizes that take more time per request than a smaller one (`Estimates.densest`).

* Where a model's requests are unlike, because some have several rows or are worth more than others, the last two give
  way to `unlike_run`: the batch that is worth most per time.

A model with no batch size of one always gets Appendix B's. Estimates are taken to grow with the batch size where a
bisection needs it, so a noisy profile may cost the first feasible run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from controller.core.estimator import Estimates
from controller.core.state import Batch, Copy, Request, due_ns_of

_row_worth_of: Final = attrgetter("row_worth")

#: A rule: the batch of a copy's model, given the earliest begin.
Run = Callable[[Copy, int], Batch | None]

# Batches of multi-row requests are looked for from this many queue positions, no more.
_MULTI_ROW_STARTS = 32
# A batch of unlike requests is made of so many of the most urgent ones, no more.
_MOST_UNLIKE = 64

# A request that can wait for so many of the largest batches is in no batch's way, and no reason to run one now: it is
# worth so much of one that has to go.
_PATIENT = 8
_PATIENT_WORTH = 0.25


def best_batch(copy: Copy, begin_ns: int) -> Batch | None:
    """The model's strategy with the earliest required start that is in time from `begin_ns`."""
    queue, estimates = copy.model.queue, copy.estimates
    if copy.model.extra_rows.total or estimates.sizes[0] != 1:
        return _best_multi_row_batch(copy, begin_ns)
    exec_ns, fit = estimates.exec_ns, estimates.fit
    waiting, largest = len(queue), len(fit) - 1
    index = fit[waiting] if waiting <= largest else fit[largest]
    required_ns = queue[0].due_ns - exec_ns[index]
    first = 0
    if required_ns < begin_ns:
        low, high = 1, waiting
        while low < high:
            middle = (low + high) // 2
            left = waiting - middle
            index = fit[left] if left <= largest else fit[largest]
            if queue[middle].due_ns - exec_ns[index] >= begin_ns:
                high = middle
            else:
                low = middle + 1
        if low == waiting:
            return None
        first = low
        left = waiting - first
        index = fit[left] if left <= largest else fit[largest]
        required_ns = queue[first].due_ns - exec_ns[index]
    return Batch(copy, first, estimates.sizes[index], index, required_ns, begin_ns)


def _best_multi_row_batch(copy: Copy, begin_ns: int) -> Batch | None:
    queue, estimates = copy.model.queue, copy.estimates
    for first in range(min(len(queue), _MULTI_ROW_STARTS)):
        index, count = _fill(queue, first, estimates)
        required_ns = queue[first].due_ns - estimates.exec_ns[index]
        if required_ns >= begin_ns:
            worth = sum([r.rows * r.row_worth for r in queue[first : first + count]])
            return Batch(copy, first, count, index, required_ns, begin_ns, worth)
    return None


def _fill(queue: list[Request], first: int, estimates: Estimates) -> tuple[int, int]:
    """Largest compiled size that whole requests from `first` on fill exactly.

    Where none does, because the first request's rows are no compiled size, the smallest that holds it, with as many of
    the following requests as fit: the only case in which a batch is padded. Returns index of the size, and how many
    requests go in.
    """
    sizes = estimates.sizes
    total = 0
    best: tuple[int, int] | None = None
    for position in range(first, len(queue)):
        total += queue[position].rows
        if total > sizes[-1]:
            break
        index = estimates.fit[total]
        if index >= 0 and sizes[index] == total:
            best = index, position - first + 1
    if best is not None:
        return best
    index = estimates.cover[queue[first].rows]
    total = count = 0
    for position in range(first, len(queue)):
        total += queue[position].rows
        if total > sizes[index]:
            break
        count += 1
    return index, count


def urgent_run(copy: Copy, begin_ns: int) -> Batch | None:
    """The densest batch in time that begins with the most urgent request still to be saved.

    Requests that even a batch of one would answer late are skipped. Exception: Appendix B's batch, larger
    and without the oldest requests, when other models wait and the time saved answers more than it drops.
    """
    queue, estimates = copy.model.queue, copy.estimates
    if copy.model.num_unlike or estimates.sizes[0] != 1:
        return unlike_run(copy, begin_ns)
    exec_ns, fit = estimates.exec_ns, estimates.densest
    waiting, largest = len(queue), len(fit) - 1
    first, due_ns = 0, queue[0].due_ns
    index = fit[waiting] if waiting <= largest else fit[largest]
    if due_ns - exec_ns[index] < begin_ns:
        alone_ns = begin_ns + exec_ns[0]
        if due_ns < alone_ns:
            first = bisect_left(queue, alone_ns, key=due_ns_of)
            if first == waiting:
                return None
            left = waiting - first
            index = fit[left] if left <= largest else fit[largest]
            due_ns = queue[first].due_ns
        if due_ns - exec_ns[index] < begin_ns:
            while due_ns - exec_ns[index] < begin_ns:
                index = fit[estimates.sizes[index] - 1]
            if _others_wait(copy):
                other = best_batch(copy, begin_ns)
                if other is not None and _pays(other, first, index):
                    return other
    return Batch(copy, first, estimates.sizes[index], index, due_ns - exec_ns[index], begin_ns)


def _others_wait(copy: Copy) -> bool:
    """Whether requests of another model wait for the copy's lane.

    Only the two that follow the copy in the lane's list are looked at, so the answer may be a false no. To look
    at all of it costs more, and gained nothing.
    """
    strategies = copy.worker.strategies
    position = bisect_left(strategies, (copy.strategy_key,))
    for key, _, _, _, other in strategies[position : position + 3]:
        if other is not copy and other.strategy_key == key and other.model.queue:
            return True
    return False


def _pays(other: Batch, first: int, index: int) -> bool:
    """Whether to drop the requests from `first` on that `other` leaves out, and run `other`.

    The alternative is a batch of size `index` first and the rest after it. Dropping pays when the GPU time
    saved, spent at the rate of `other`, answers more requests than are dropped.
    """
    estimates, waiting = other.copy.estimates, len(other.copy.model.queue)
    dropped = other.first - first
    if dropped <= 0:
        return False
    exec_ns, sizes = estimates.exec_ns, estimates.sizes
    saved_ns = exec_ns[index] - exec_ns[other.size_index]
    saved_ns += _time_ns(estimates, waiting - first - sizes[index])
    saved_ns -= _time_ns(estimates, waiting - other.first - other.count)
    return dropped * exec_ns[other.size_index] < saved_ns * other.count


def _time_ns(estimates: Estimates, waiting: int) -> int:
    """GPU time for so many requests, in full batches, the largest first."""
    exec_ns, sizes, fit = estimates.exec_ns, estimates.sizes, estimates.fit
    whole, waiting = divmod(waiting, sizes[-1])
    time_ns = whole * exec_ns[-1]
    while waiting:
        index = fit[waiting]
        time_ns += exec_ns[index]
        waiting -= sizes[index]
    return time_ns


def largest_run(copy: Copy, begin_ns: int) -> Batch | None:
    """The densest batch in time, though it may pass over requests that a smaller one could still answer."""
    queue, estimates = copy.model.queue, copy.estimates
    if copy.model.num_unlike or estimates.sizes[0] != 1:
        return unlike_run(copy, begin_ns)
    exec_ns, fit, sizes = estimates.exec_ns, estimates.densest, estimates.sizes
    waiting, largest = len(queue), len(fit) - 1
    index = fit[waiting] if waiting <= largest else fit[largest]
    while index >= 0:
        last = waiting - sizes[index]
        due_ns = begin_ns + exec_ns[index]
        if queue[last].due_ns >= due_ns:
            first = 0
            if queue[0].due_ns < due_ns:
                first = bisect_left(queue, due_ns, 0, last, key=due_ns_of)
            if queue[first + sizes[index] - 1].due_ns >= begin_ns + _PATIENT * exec_ns[-1]:
                return _beside_patient(copy, first, index, begin_ns)
            return Batch(
                copy, first, sizes[index], index, queue[first].due_ns - exec_ns[index], begin_ns
            )
        index = fit[sizes[index] - 1]
    return None


def _beside_patient(copy: Copy, first: int, index: int, begin_ns: int) -> Batch:
    """The batch of a size from a request on, or those that it passes over if all in it can wait."""
    queue, exec_ns = copy.model.queue, copy.estimates.exec_ns
    count, wait_ns = copy.estimates.sizes[index], begin_ns + _PATIENT * exec_ns[-1]
    if first and queue[first].due_ns >= wait_ns and (urgent := urgent_run(copy, begin_ns)):
        first, count, index = urgent.first, urgent.count, urgent.size_index
    patient = first + count - bisect_left(queue, wait_ns, first, first + count, key=due_ns_of)
    worth = count - (1.0 - _PATIENT_WORTH) * patient
    return Batch(copy, first, count, index, queue[first].due_ns - exec_ns[index], begin_ns, worth)


def unlike_run(copy: Copy, begin_ns: int) -> Batch | None:
    """The batch in time that is worth most per time, of requests with unlike rows or worths.

    While none of the model's requests are refused, it has the most urgent of them that can be in time.
    """
    model, estimates = copy.model, copy.estimates
    apart = copy.worker.link.is_thin or begin_ns < model.apart_until_ns  # these cut batches shorter
    if apart or not model.num_unlike or estimates.sizes[0] != 1:
        return best_batch(copy, begin_ns)
    queue, exec_ns, cover = model.queue, estimates.exec_ns, estimates.cover
    largest = estimates.sizes[-1]
    begin = bisect_left(queue, begin_ns + exec_ns[0], key=due_ns_of)
    waiting = [
        request
        for request in queue[begin : begin + _MOST_UNLIKE]
        if request.rows <= largest and request.due_ns >= begin_ns + exec_ns[cover[request.rows]]
    ]
    if not waiting:
        return None
    first = None if begin_ns < model.short_until_ns else waiting[0]
    if model.num_weighed and first is None:
        waiting.sort(key=_row_worth_of, reverse=True)
    # One that can wait for another batch is no reason to run a smaller one now, whatever it is worth.
    wait_ns, least = begin_ns + exec_ns[-1], min(map(_row_worth_of, waiting))
    best: list[Request] = []
    dense, index = 0.0, -1
    for size in range(len(exec_ns) - 1, -1, -1):
        end_ns, left = begin_ns + exec_ns[size], estimates.sizes[size]
        if first is not None and (first.due_ns < end_ns or first.rows > left):
            continue
        taken, total = list[Request](), 0.0
        for request in waiting:
            rows, due_ns = request.rows, request.due_ns
            if rows <= left and due_ns >= end_ns:
                taken.append(request)
                total += rows * (
                    least if due_ns >= wait_ns + exec_ns[cover[rows]] else request.row_worth
                )
                left -= rows
                if not left:
                    break
        if total * exec_ns[index] > dense * exec_ns[size]:
            best, dense, index = taken, total, size
    index = cover[sum([request.rows for request in best])]
    best.sort(key=due_ns_of)
    position = bisect_left(queue, best[0].due_ns, key=due_ns_of)
    while queue[position] is not best[0]:
        position += 1
    required_ns = best[0].due_ns - exec_ns[index]
    worth = sum([request.rows * request.row_worth for request in best])
    return Batch(copy, position, len(best), index, required_ns, begin_ns, worth, best)
