"""The best schedule of a few requests on one GPU: tries every schedule that could be the best.

What makes it possible: with one SLO per model, requests that arrive earlier are due earlier. Then the
members of a model's batches can be exchanged, without hurting any, until the batches are runs of
consecutive requests in order of arrival, with the requests that are given up between them. So a schedule
is a sequence of decisions about the first undecided request of some model: give it up, or run it with the
k - 1 that follow as soon as the GPU is free and the last of them has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product

from experiments.bounds.case import NEVER_NS, BoundProblem

#: Time at which the GPU is free, and the number of requests answered by then.
_Point = tuple[int, int]
#: A resident model: its index, when its weights are there, when its last EXEC ends (-1: not used yet).
_Resident = tuple[int, int, int]


def best_resident(case: BoundProblem) -> int:
    """Most requests that can be answered in time if all models are resident all the time.

    Keeps, for every combination of first undecided requests, the (time, answers) pairs of which none is
    better in both. 2 models with 70 requests, or 4 with 30, take about a second.

    Raises:
        ValueError: several GPUs, or one model with several SLOs.
    """
    queues, slos, batches = _parts(case)
    reached: dict[tuple[int, ...], list[_Point]] = {(0,) * len(queues): [(case.start_ns, 0)]}
    # In lexicographic order every state comes after the states that lead to it.
    for heads in product(*(range(len(queue) + 1) for queue in queues)):
        points = _best(reached.pop(heads, []))
        for model, head in enumerate(heads):
            queue = queues[model]
            if head == len(queue):
                continue
            reached.setdefault(_advance(heads, model, 1), []).extend(points)
            due_ns = queue[head] + slos[model]
            for count, exec_ns in batches[model]:
                if head + count > len(queue):
                    continue
                ready_ns = queue[head + count - 1]
                later = [
                    (max(free_ns, ready_ns) + exec_ns, answers + count)
                    for free_ns, answers in points
                    if max(free_ns, ready_ns) + exec_ns <= due_ns
                ]
                reached.setdefault(_advance(heads, model, count), []).extend(later)
        if not any(head < len(queue) for head, queue in zip(heads, queues, strict=True)):
            return max(answers for _, answers in points)
    raise AssertionError("the last state is always reached")


def best_loading(case: BoundProblem) -> int:
    """Most requests that can be answered in time with pages and LOADs, clairvoyantly.

    Tries all orders in which LOADs, with any least set of models evicted for each, and EXECs may
    begin; each begins as soon as what comes before it allows. For ten requests or so.

    Raises:
        ValueError: several GPUs, or one model with several SLOs.
    """
    queues, slos, batches = _parts(case)
    costs = [case.costs[model] for model in sorted(set(case.model.tolist()))]

    @cache
    def most(
        heads: tuple[int, ...],
        exec_free_ns: int,
        load_free_ns: int,
        residents: tuple[_Resident, ...],
    ) -> int:
        after = moves(heads, exec_free_ns, load_free_ns, residents)
        return max((answers + most(*state) for answers, *state in after), default=0)

    def moves(
        heads: tuple[int, ...],
        exec_free_ns: int,
        load_free_ns: int,
        residents: tuple[_Resident, ...],
    ) -> Iterator[tuple[int, tuple[int, ...], int, int, tuple[_Resident, ...]]]:
        """What each next decision answers, and the state after it."""
        for model, head in enumerate(heads):
            queue = queues[model]
            if head == len(queue):
                continue
            yield 0, _advance(heads, model, 1), exec_free_ns, load_free_ns, residents
            ready = [ready_ns for other, ready_ns, _ in residents if other == model]
            others = tuple(entry for entry in residents if entry[0] != model)
            for count, exec_ns in batches[model] if ready else ():
                if head + count > len(queue):
                    continue
                end_ns = max(exec_free_ns, ready[0], queue[head + count - 1]) + exec_ns
                if end_ns <= queue[head] + slos[model]:
                    used = tuple(sorted((*others, (model, ready[0], end_ns))))
                    yield count, _advance(heads, model, count), end_ns, load_free_ns, used
            for victims in victims_of(model, residents) if not ready else ():
                begin_ns = max([load_free_ns, *(last_ns for _, _, last_ns in victims)])
                end_ns = begin_ns + costs[model].load_ns
                if end_ns + min(ns for _, ns in batches[model]) <= queue[-1] + slos[model]:
                    kept = (entry for entry in residents if entry not in victims)
                    loaded = tuple(sorted((*kept, (model, end_ns, -1))))
                    yield 0, heads, exec_free_ns, end_ns, loaded

    def victims_of(model: int, residents: tuple[_Resident, ...]) -> list[tuple[_Resident, ...]]:
        missing = costs[model].num_pages - case.pages_per_gpu
        missing += sum(costs[other].num_pages for other, _, _ in residents)
        # A model that is evicted before it has run was loaded in vain.
        used = [entry for entry in residents if entry[2] >= 0]
        return _least_sets(used, [costs[entry[0]].num_pages for entry in used], missing)

    starts = [()] if not case.warm else _resident_sets(case, [cost.num_pages for cost in costs])
    heads = (0,) * len(queues)
    return max(most(heads, case.start_ns, case.start_ns, residents) for residents in starts)


def _parts(case: BoundProblem) -> tuple[list[list[int]], list[int], list[list[tuple[int, int]]]]:
    """Arrivals, SLO, and (requests, EXEC) of each model that has requests."""
    if case.num_gpus != 1:
        raise ValueError(f"exact for one GPU, found {case.num_gpus}")
    queues, slos, batches = [], [], []
    for cost, places in case.by_model():
        found = set(case.slo_ns[places].tolist())
        if len(found) != 1:
            raise ValueError(f"exact for one SLO per model, found {sorted(found)}")
        queues.append(case.arrival_ns[places].tolist())
        slos.append(found.pop())
        exec_ns = enumerate(cost.exec_of(padding=case.padding), start=1)
        batches.append([(count, ns) for count, ns in exec_ns if ns < NEVER_NS])
    return queues, slos, batches


def _advance(heads: tuple[int, ...], model: int, count: int) -> tuple[int, ...]:
    return (*heads[:model], heads[model] + count, *heads[model + 1 :])


def _best(points: list[_Point]) -> list[_Point]:
    """States that no other beats: none is earlier with as many answers."""
    kept: list[_Point] = []
    for free_ns, answers in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or answers > kept[-1][1]:
            kept.append((free_ns, answers))
    return kept


def _least_sets(
    entries: list[_Resident], pages: list[int], missing: int
) -> list[tuple[_Resident, ...]]:
    """Sets of entries with at least so many pages, of which none can be left out."""
    if missing <= 0:
        return [()]
    found = []
    for size in range(1, len(entries) + 1):
        for chosen in combinations(range(len(entries)), size):
            total = sum(pages[place] for place in chosen)
            if total >= missing and all(total - pages[place] < missing for place in chosen):
                found.append(tuple(entries[place] for place in chosen))
    return found


def _resident_sets(case: BoundProblem, pages: list[int]) -> list[tuple[_Resident, ...]]:
    """Sets of models that may be resident at the start; as if used, they can be evicted at no cost."""
    start_ns = case.start_ns
    return [
        tuple((model, start_ns, start_ns) for model in chosen)
        for size in range(len(pages) + 1)
        for chosen in combinations(range(len(pages)), size)
        if sum(pages[model] for model in chosen) <= case.pages_per_gpu
    ]
