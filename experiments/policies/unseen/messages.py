"""Links on which single messages come late, or never come.

* `stalls`: now and then one message is late by far more than any other, and what is behind it waits, as TCP has it
  when it sends a packet again. The link is as good as before then, and the same load without the stalls is the bound.
* `lost`: a message never comes, and what is behind it does. No TCP link does that; a faulty peer may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.clockwork_paper.cases import resnets
from experiments.policies.load import Load, alike, ms
from experiments.simulator import Faults

_MODELS = resnets(24)
# A third of the models fits on each GPU, so they are loaded and evicted all the time.
_CHURN: Mapping[str, Any] = {"models": resnets(60), "pages": 140, "seconds": 8}


def _faulty(group: str, name: str, faults: Faults, *load: Any, **others: Any) -> Load:  # noqa: ANN401
    models = others.pop("models", _MODELS)
    settings: dict[str, Any] = {"begin_s": 0.5, "faultless": True, "fault": {"faults": faults}}
    return alike(name, group, models, *load, **settings | others)


def _stall(name: str, stall_ms: float, one_in: int, *load: Any, **others: Any) -> Load:  # noqa: ANN401
    faults = Faults(delay_probability=1 / one_in, delay_ns=ms(stall_ms))
    return _faulty("stalls", f"stall_{name}", faults, *load, **others)


def _lost(name: str, one_in: int, *load: Any, **others: Any) -> Load:  # noqa: ANN401
    faults = Faults(loss_probability=1 / one_in)
    return _faulty("lost", f"lost_{name}", faults, *load, **others)


# What follows the fault is the rate of all models, the SLO in ms, and the number of GPUs.
FAMILIES: tuple[Load, ...] = (
    _stall("200ms", 200, 1000, 600, 60, 4),
    _stall("50ms", 50, 200, 1000, 60, 4),
    _stall("400ms", 400, 1000, 1000, 100, 4),
    _stall("tight", 200, 1000, 700, 25, 6),
    _stall("busy", 200, 2000, 2400, 60, 4),
    _stall("pair", 200, 2000, 500, 60, 2),
    _stall("loads", 200, 1000, 450, 60, 3, **_CHURN),
    _stall("loads_tight", 200, 5000, 300, 12, 3, **_CHURN),
    _stall("loads_400ms", 400, 1000, 450, 100, 4, **_CHURN),
    _lost("one_in_1000", 1000, 1000, 60, 4),
    _lost("one_in_5000", 5000, 1000, 60, 4),
    _lost("busy", 2000, 2400, 60, 4),
    _lost("tight", 1000, 700, 25, 6),
    _lost("loads", 1000, 450, 60, 3, **_CHURN),
    _lost("loads_rare", 5000, 450, 60, 4, **_CHURN),
)
