"""What the live front end and controller were measured to cost, from the records of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_US
from experiments.results_file import RESULTS
from experiments.simulator.case import CpuCosts

# The record, the key in it, and what it counts, in us.
_REQUEST = ("costs", "controller_request_us")  # of the controller's process, per request
_ACTION = ("costs", "controller_action_us")  # and per action, with its result
_ITS_CORE = ("serve", "core_us_15x1")  # the scheduler's part of the process
_SCHEDULER = ("serve", "core_us_4026x20")  # the scheduler with 4,026 models on 20 GPUs
_FIGURES = (_REQUEST, _ACTION, _ITS_CORE, _SCHEDULER)


def measured(directory: Path = RESULTS) -> CpuCosts:
    """The recorded costs.

    The scheduler's is that of 4,026 models on 20 GPUs. The front end's is what else the process takes for a
    request, and an action's is halved between its sending and its result.

    Args:
        directory: folder of the records.

    Raises:
        ConfigError: a record is missing, or lacks a figure.
    """
    request, action, its_core, scheduler = (_figure_ns(figure, directory) for figure in _FIGURES)
    return CpuCosts(
        front_ns=max(0, request - its_core),
        request_ns=scheduler,
        action_ns=action // 2,
        result_ns=action - action // 2,
    )


def sources() -> list[str]:
    """Where the costs come from, for records made with them."""
    return [f"{name}.json[{key}]" for name, key in _FIGURES]


def _figure_ns(source: tuple[str, str], directory: Path) -> int:
    name, key = source
    path = directory / f"{name}.json"
    try:
        figures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["figures"]
        return round(figures[key] * NS_PER_US)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"measured costs: {path} has no {key}: {error}") from None
