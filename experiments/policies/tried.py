"""Policies that differ from `edf_mh`: in one rule, to measure what the rule is worth, or in all of them, plain EDF.

Rules of two kinds: pieces of `edf_mh` that were left out, here added; and rules that have no switch, because nobody
should want them off, here replaced by the obvious other one. `ablation.py` runs them.

Rules of the mechanism cannot be tried so, because nothing overrides it. Where a model is loaded, which idle
GPU is asked first, and prefetch were tried by overriding private methods of the scheduler; `ablation.json`
names the commit that did, and has what those rules were worth.

Interpreted only: what `make native` compiles cannot be derived from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from typing_extensions import override

from controller.core import Scheduler, SchedulerConfig
from controller.core.policies import POLICIES
from controller.core.policies.batch_clients import BatchClients
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.eviction import least_recently_used
from controller.core.policies.runs import best_batch, urgent_run
from controller.core.policy import PolicyKind
from controller.core.state import Batch, Copy, Model, WorkerState
from experiments.simulator import Case


def _with_policy(
    make: Callable[[SchedulerConfig], EdfMhPolicy], case: Case, *, eager_copies: bool = True
) -> Scheduler:
    """The production scheduler with another policy."""
    traits = replace(POLICIES["edf_mh"].traits, eager_copies=eager_copies)
    return Scheduler(case.scheduler, PolicyKind(make, traits))


# --- left out ---------------------------------------------------------------------------------------


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


def _batch_beside_idle(config: SchedulerConfig) -> EdfMhPolicy:
    return EdfMhPolicy(config, batch_clients=BesideIdle(config.batch_slo_ns))


# --- instead of rules that are kept -----------------------------------------------------------------


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
    def victims(self, worker: WorkerState, num_pages: int, now_ns: int) -> list[Copy] | None:
        return least_recently_used(worker, num_pages, wanted=True)


def _largest_fill(config: SchedulerConfig) -> EdfMhPolicy:
    """Appendix B's candidate always: the largest size that the queue fills; requests too old for it are dropped."""
    return EdfMhPolicy(config, run=best_batch)


# --- instead of all of them -------------------------------------------------------------------------

# What makes late binding late, and is no choice among batches.
_KEPT = ("adaptive_lookahead", "adaptive_margin")


def _plain_edf(config: SchedulerConfig) -> EdfMhPolicy:
    """Every switch is off but those of late binding.

    The batch that has to begin soonest runs first, and begins with the most urgent request that can still be in
    time; the hopeless are dropped. Nothing is struck out, nobody is favoured, and no batch waits to grow.
    """
    switches: dict[str, Any] = {
        piece.name: False
        for piece in fields(config.edf_mh)
        if isinstance(piece.default, bool) and piece.name not in _KEPT
    }
    bare = replace(config.edf_mh, **switches, pressure_gain=0.0, isolation=0.0)
    return EdfMhPolicy(replace(config, edf_mh=bare), run=urgent_run)


batch_beside_idle = partial(_with_policy, _batch_beside_idle)
one_copy = partial(_with_policy, OneCopy, eager_copies=False)
copies_at_once = partial(_with_policy, CopiesAtOnce)
plain_lru = partial(_with_policy, PlainLru)
largest_fill = partial(_with_policy, _largest_fill)
plain_edf = partial(_with_policy, _plain_edf)
