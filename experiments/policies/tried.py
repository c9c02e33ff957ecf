"""Plain EDF: a policy that no server has, with which the others are compared."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from controller.core import Scheduler, SchedulerConfig
from controller.core.policies import POLICIES
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.runs import urgent_run
from controller.core.policy import PolicyKind
from experiments.simulator import Case

# What makes late binding late, and is no choice among batches.
_KEPT = ("adaptive_lookahead", "adaptive_margin")


def plain_edf(case: Case) -> Scheduler:
    """The production scheduler with `edf_mh` of which every switch is off but those of late binding.

    The batch that has to begin soonest runs first, and begins with the most urgent request that can still be in
    time; the hopeless are dropped. Nothing is struck out, no request is favoured, and no batch waits to grow.
    """
    return Scheduler(case.scheduler, PolicyKind(_plain_edf, POLICIES["edf_mh"].traits))


def _plain_edf(config: SchedulerConfig) -> EdfMhPolicy:
    switches: dict[str, Any] = {
        piece.name: False
        for piece in fields(config.edf_mh)
        if isinstance(piece.default, bool) and piece.name not in _KEPT
    }
    bare = replace(config.edf_mh, **switches, pressure_gain=0.0, isolation=0.0)
    return EdfMhPolicy(replace(config, edf_mh=bare), run=urgent_run)
