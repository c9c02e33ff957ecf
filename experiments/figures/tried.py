"""Schedulers that differ from the production one in one rule, to measure what the rule is worth.

Two kinds: pieces of `edf_mh` that were left out, here added; and rules that have no switch, because nobody
should want them off, here replaced by the obvious other one. `ablation.py` runs them.

Interpreted only: what `make native` compiles cannot be derived from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import ClassVar

from typing_extensions import override

from clockwright.units import NS_PER_S, ModelId
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import Command, Event
from controller.core.policies import POLICIES
from controller.core.policies.batch_clients import BatchClients
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.eviction import least_recently_used
from controller.core.policies.runs import best_batch
from controller.core.policy import Batch, PolicyKind
from controller.core.state import Copy, Model, WorkerState
from experiments.simulator import Case


def with_policy(
    make: Callable[[SchedulerConfig], EdfMhPolicy], case: Case, *, eager_copies: bool = True
) -> Scheduler:
    """The production scheduler with another policy."""
    traits = replace(POLICIES["edf_mh"].traits, eager_copies=eager_copies)
    return Scheduler(case.scheduler, PolicyKind(make, traits))


class Tried(Scheduler):
    """Another scheduler with the production policy."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.scheduler)


# --- left out ---------------------------------------------------------------------------------------


class Prefetch(Tried):
    """Knows every request a second before it comes, and loads what it will ask for over idle PCIe buses.

    No prediction from periods can do better. In the place of the least recently used weights where no
    pages are free, as a request that comes has it.
    """

    ahead_ns = NS_PER_S
    #: Looked at per event.
    most = 8

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._coming = _arrivals(case)
        self._next = next(self._coming, None)
        #: Models that will be asked for, and when first.
        self._soon: dict[ModelId, int] = {}

    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        """As the production one; loads first what is about to be asked for."""
        self._now_ns = now_ns
        while self._next is not None and self._next[0] <= now_ns + self.ahead_ns:
            time_ns, model_id = self._next
            self._soon.setdefault(model_id, time_ns)
            self._next = next(self._coming, None)
        for model_id, time_ns in list(islice(self._soon.items(), self.most)):
            model = self._models.get(model_id)
            if model is None:  # the run begins
                break
            if time_ns > now_ns and not model.copies:
                self._warm_up(model)
            if time_ns <= now_ns or model.copies:
                del self._soon[model_id]
        return super().handle(event, now_ns=now_ns)


def _arrivals(case: Case) -> Iterator[tuple[int, ModelId]]:
    names = [ModelId(name) for name in case.workload.models]
    for arrivals in case.workload.arrivals():
        for time_ns, model in zip(arrivals.time_ns.tolist(), arrivals.model.tolist(), strict=True):
            yield time_ns, names[model]


class BesideIdle(BatchClients):
    """Batch work may run on one GPU more than its limit while yet another is idle."""

    @override
    def may_run(self, batch: Batch, worker: WorkerState, now_ns: int) -> bool:
        if super().may_run(batch, worker, now_ns):
            return True
        others = (other for other in batch.copy.model.ready if other is not worker)
        if all(other.in_flight for other in others):
            return False
        self.workers[worker] = None
        return True


def batch_beside_idle(config: SchedulerConfig) -> EdfMhPolicy:
    """`edf_mh` with `BesideIdle`."""
    return EdfMhPolicy(config, batch_clients=BesideIdle(config.batch_slo_ns))


class _IdleOrder(Tried):
    """Of idle GPUs, which is offered a model's requests first."""

    sign: ClassVar[int]

    def _offer(self, model: Model) -> None:
        now_ns = self._now_ns
        room = [
            worker
            for worker in model.copies
            if worker.exec_wakeup_ns is None
            or worker.exec_wakeup_ns <= now_ns
            or worker.retry_ns is not None
        ]
        room.sort(
            key=lambda worker: (
                worker.exec_lane.available_ns(now_ns),
                self.sign * model.copies[worker].estimates.exec_ns[0],
            )
        )
        for worker in room:
            self._fill_exec(worker)
            if not model.queue:
                return


class SlowestIdle(_IdleOrder):
    """The slowest that is in time, so that faster ones are free for what is more urgent."""

    sign = -1


# --- instead of rules that are kept -----------------------------------------------------------------


class AnyIdle(_IdleOrder):
    """Of idle GPUs the one that has the model longest, however fast it is."""

    sign = 0


class AnyPlace(Tried):
    """A model is loaded where there is room first in the order of joining, whatever each GPU has to do."""

    def _seek_load(self, model: Model) -> None:
        if not self._policy.want_load(model, self._now_ns):
            return super()._seek_load(model)
        for worker in model.ready:
            available_ns = worker.load_lane.available_ns(self._now_ns)
            if (
                not worker.load_blocked
                and worker not in model.copies
                and available_ns <= self._now_ns + worker.load_lookahead_ns
            ):
                self._fill_load(worker)
            if model.load_key is None:
                break
        return None


class OneCopy(EdfMhPolicy):
    """No further copy of a model for want of time."""

    @override
    def want_load(self, model: Model, now_ns: int) -> bool:
        model.short_until_ns = 0
        return super().want_load(model, now_ns)


class CopiesAtOnce(EdfMhPolicy):
    """A further copy as soon as a request has to wait, not only when one was refused."""

    @override
    def want_load(self, model: Model, now_ns: int) -> bool:
        model.short_until_ns = now_ns + 1
        return super().want_load(model, now_ns)


class PlainLru(EdfMhPolicy):
    """Evicts what was used least recently, even if requests wait for it, which is then wanted again."""

    @override
    def copy_gone(self, copy: Copy) -> None:
        super().copy_gone(copy)
        self.want_load(copy.model, now_ns=0)

    @override
    def victims(self, worker: WorkerState, num_pages: int) -> list[Copy] | None:
        return least_recently_used(worker, num_pages, wanted=True)


def largest_fill(config: SchedulerConfig) -> EdfMhPolicy:
    """Appendix B's candidate always: the largest size that the queue fills; requests too old for it are dropped."""
    return EdfMhPolicy(config, run=best_batch)
