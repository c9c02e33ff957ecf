"""What the live front end and controller were measured to cost, from the records of `make bench`."""

from __future__ import annotations

import json

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_US
from experiments.results_file import RESULTS
from experiments.simulator.case import CpuCosts

# The record, the key in it, and what it counts: CPU us per request, small payload, eight clients.
_PROCESS = ("serve", "grpc_clockwright_small_c8_cpu_us")  # the controller's process, all of it
_ITS_CORE = ("serve", "core_us_15x1")  # the scheduler's part of that
_SCHEDULER = ("serve", "core_us_4026x20")  # the scheduler with 4,026 models on 20 GPUs
_THROUGH = ("frontend", "path_aio_small_c8_cpu_us")  # client to worker and back, no scheduler
_ECHO = ("frontend", "echo_aio_small_c8_cpu_us")  # client to server and back


def measured() -> CpuCosts:
    """The recorded costs.

    The scheduler's is that of 4,026 models on 20 GPUs. A worker's link costs what the way through a
    worker costs above an echo, half of it for the action and half for the result. The front end's is
    what remains of the process.

    Raises:
        ConfigError: a record is missing, or lacks a figure.
    """
    process, core, scheduler, through, echo = map(
        _figure_ns, (_PROCESS, _ITS_CORE, _SCHEDULER, _THROUGH, _ECHO)
    )
    link_ns = max(0, through - echo)
    return CpuCosts(
        front_ns=max(0, process - core - link_ns),
        request_ns=scheduler,
        action_ns=link_ns // 2,
        result_ns=link_ns - link_ns // 2,
    )


def sources() -> list[str]:
    """Where the costs come from, for records made with them."""
    return [
        f"{name}.json[{key}]" for name, key in (_PROCESS, _ITS_CORE, _SCHEDULER, _THROUGH, _ECHO)
    ]


def _figure_ns(source: tuple[str, str]) -> int:
    name, key = source
    path = RESULTS / f"{name}.json"
    try:
        figures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["figures"]
        return round(figures[key] * NS_PER_US)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"measured costs: {path} has no {key}: {error}") from None
