"""Plain EDF, which any policy that is worth its lines beats: nothing but order and late binding.

The batch that has to begin soonest runs first, and begins with the most urgent request that can still be in
time; the hopeless are dropped. Nothing is struck out, nobody is favoured, and no batch waits to grow.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from controller.core import SchedulerConfig
from controller.core.policies import POLICIES
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.runs import urgent_run
from controller.core.policy import PolicyKind

# What makes late binding late, and is no choice among batches.
_KEPT = ("adaptive_lookahead", "adaptive_margin")


def plain_edf(config: SchedulerConfig) -> EdfMhPolicy:
    """`edf_mh` without any of its pieces: every switch is off but those of late binding."""
    pieces = config.edf_mh
    switches: dict[str, Any] = {
        piece.name: False
        for piece in fields(pieces)
        if isinstance(getattr(pieces, piece.name), bool) and piece.name not in _KEPT
    }
    bare = replace(pieces, **switches, pressure_gain=0.0, isolation=0.0)
    return EdfMhPolicy(replace(config, edf_mh=bare), run=urgent_run)


PLAIN_EDF = PolicyKind(plain_edf, POLICIES["edf_mh"].traits)
