"""Appendix B of the Clockwork paper, word for word and slow: the oracle of the fast policy.

One strategy per request and batch size in one global queue, walked from the front. Where the text
leaves something open, the choice is named:

* "the model has insufficient requests" / "there are enough requests for a larger batch": counted from
  the strategy's own request on (`from_request=True`, as Clockwork's source counts), or over all that
  wait (`from_request=False`, the other reading of the text).
* which requests go into the batch: the strategy's own and the next ones by deadline. Earlier ones
  would be late: their strategies for this batch size came before and were skipped.
* equal required starts: larger batch, then older model, then earlier deadline.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A waiting request."""

    model: int
    number: int
    due_ns: int


@dataclass(frozen=True)
class Choice:
    """An INFER: a model, a batch size, the requests."""

    model: int
    batch_size: int
    requests: tuple[int, ...]


def pick_infer(
    waiting: list[Waiting],
    exec_ns: dict[int, dict[int, int]],
    loaded: set[int],
    free_ns: int,
    now_ns: int,
    *,
    from_request: bool = True,
) -> Choice | None:
    """Walk the global strategy queue for one executor.

    Args:
        waiting: all waiting requests.
        exec_ns: model -> batch size -> estimate.
        loaded: models loaded on the executor.
        free_ns: when its outstanding work ends.
        now_ns: the present.
        from_request: see the top of the file.
    """
    by_model: dict[int, list[Waiting]] = {}
    for request in sorted(waiting, key=lambda r: r.due_ns):
        by_model.setdefault(request.model, []).append(request)
    strategies = [
        (request.due_ns - duration_ns, -size, request.model, place, request)
        for requests in by_model.values()
        for place, request in enumerate(requests)
        for size, duration_ns in exec_ns[request.model].items()
    ]
    strategies.sort(key=lambda s: s[:4])
    for required_start_ns, negative_size, model, place, _request in strategies:
        size = -negative_size
        if required_start_ns < now_ns:
            continue  # its required start has passed
        if model not in loaded:
            continue
        requests = by_model[model]
        following = len(requests) - place
        enough_of = following if from_request else len(requests)
        if enough_of < size or following < size:
            continue  # too big
        if any(size < larger <= enough_of for larger in exec_ns[model]):
            continue  # too small
        if free_ns > required_start_ns:
            continue  # cannot complete in time
        chosen = requests[place : place + size]
        return Choice(model, size, tuple(request.number for request in chosen))
    return None


def load_priority(
    demand: float, allocations: dict[int, float], loads: dict[int, float], capacity: float
) -> float:
    """p = d - sum over GPUs of a * capacity / l."""
    return demand - sum(a * capacity / loads[gpu] for gpu, a in allocations.items())
