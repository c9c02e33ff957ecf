"""What can be known without a GPU: `python -m experiments gpu-ready`.

On the stand-in for CUDA's runtime (`experiments.gpu.stand_in`), for each torch for CUDA that there is: whether
answers are right in random orders, and what each failing call of the runtime costs. On the processor: how many of
the networks that people use compile, and how long a worker takes from its start to a network that is ready.

The stand-in has no cuDNN, cuBLAS or NVML and tells no times, so those wait for a GPU (`make gpu`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from clockwright.errors import ConfigError
from experiments.gpu.stand_in import MissingError, interpreters, rehearse
from experiments.study.bench import Findings, bench

# Seconds from a process's start until ResNet-50 is ready in float32, before compiling was made faster.
_RESNET50_COLD_S_BEFORE = 35.0
_PREPARE = """
import asyncio, sys
from pathlib import Path
from experiments.gpu.hardware import BareDevice, Room
from worker.devices.accelerator import HostAccelerator
room = Room(num_pages=32, arena_bytes=512 << 20, io_bytes=32 << 20, host_bytes=512 << 20)
device = BareDevice(HostAccelerator(), room, cache_dir=Path(sys.argv[2]))
asyncio.run(device.model(sys.argv[1], (1,)))
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is tried."""

    #: How many random orders of a hundred requests are served on each torch.
    orders: int = 10
    #: How many times of one call in one phase a fault is put at, from the first call to the last.
    places: int = 3
    networks: tuple[str, ...] = ("resnet50_v1", "bert_base")


def measure(setting: Setting) -> Findings:
    """Try everything, for a quarter of an hour.

    Raises:
        ConfigError: there is no torch for CUDA, or no compiler.
    """
    pythons = interpreters()
    if not pythons:
        raise ConfigError(
            "found no torch for CUDA, expected those that `make gpu-rehearsal` installs, "
            "or interpreters in CLOCKWRIGHT_CUDA_PYTHONS"
        )
    figures: dict[str, float] = {"resnet50_v1_before_s": _RESNET50_COLD_S_BEFORE}
    extra: dict[str, Any] = {}
    for python in pythons:
        try:
            answers = rehearse(python, "answers", setting.orders)
            faults = rehearse(python, "faults", setting.places, limit_s=1800)
        except MissingError as error:
            raise ConfigError(f"{python}: {error}") from None
        version = "torch" + str(answers["torch"]).partition("+")[0].replace(".", "_")
        asked = answers["right"] + answers["wrong"] + answers["failed"]
        figures |= {
            f"{version}_requests": asked,
            f"{version}_stand_in_answers_right": answers["right"] / asked,
            f"{version}_allocations_while_serving": answers["allocations"],
            f"{version}_pageable_copies": answers["pageable_copies"],
        }
        for key in ("faults_tried", "wrong_answers", "workers_lost_needlessly"):
            figures[f"{version}_{key}"] = faults[key]
        extra[version] = faults
    for name in setting.networks:
        with tempfile.TemporaryDirectory() as cache:
            for key in ("cold", "cached"):
                begin_s = time.monotonic()
                subprocess.run([sys.executable, "-c", _PREPARE, name, cache], check=True)
                figures[f"{name}_{key}_s"] = time.monotonic() - begin_s
    figures |= _corpus()
    return Findings(figures, extra, _fault(figures))


def _corpus() -> dict[str, float]:
    """How many networks of the corpus compile and answer right; nothing where there is no corpus."""
    try:
        corpus = import_module("experiments.gpu.corpus.share")
    except ImportError:
        return {}
    share, outcomes = corpus.compiled_share(processes=2)
    compiled = [each.difference for each in outcomes if not each.refusal]
    return {
        "networks_compiled_share": share,
        "networks": len(outcomes),
        "networks_largest_difference": max(compiled, default=0.0),
    }


def _fault(figures: dict[str, float]) -> str:
    wrong = [
        key
        for key, figure in figures.items()
        if (key.endswith("answers_right") and figure < 1)
        or (key.endswith(("wrong_answers", "lost_needlessly", "pageable_copies")) and figure)
    ]
    return ", ".join(wrong)


STUDY = bench("gpu-ready", Setting(), measure, record="gpu_ready")
