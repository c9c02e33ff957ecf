"""What can be known without a GPU: `python -m experiments gpu-ready`.

On the stand-in for CUDA's runtime (`experiments.gpu.stand_in`), for each torch for CUDA that there is: whether
answers are right in random orders, and what each failing call of the runtime costs. On the processor: how many of
the networks that people use compile, and how long a worker takes from its start to a network that is ready.

The stand-in has no cuDNN, cuBLAS or NVML and tells no times, so those wait for a GPU (`make gpu`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clockwright.errors import ConfigError
from experiments.gpu.corpus.share import compiled_share
from experiments.gpu.stand_in import MissingError, interpreters, rehearse
from experiments.gpu.start import medians
from experiments.study.bench import Findings, bench

#: Figures of one torch that are added up over all of them.
_SUMS = ("requests", "faults_tried", "wrong_answers", "workers_lost_needlessly")


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is tried."""

    #: How many random orders of a hundred requests are served on each torch.
    orders: int = 10
    #: How many times of one call in one phase a fault is put at, from the first call to the last.
    places: int = 3
    networks: tuple[str, ...] = ("resnet50_v1", "bert_base")
    #: How often each network's start is timed, cold and cached.
    starts: int = 3


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
    figures: dict[str, float] = {}
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
        figures[f"{version}_wrong_answers"] = answers["wrong"] + faults["wrong_answers"]
        for key in ("faults_tried", "workers_lost_needlessly"):
            figures[f"{version}_{key}"] = faults[key]
        extra[version] = faults
    right = [figure for key, figure in figures.items() if key.endswith("answers_right")]
    figures["stand_in_answers_right"] = min(right)
    for key in _SUMS:
        figures[key] = sum(figure for name, figure in figures.items() if name.endswith(f"_{key}"))
    for name in setting.networks:
        starts = medians(name, setting.starts)
        figures |= {f"{name}_{key}": figure for key, figure in starts.items()}
    share, outcomes = compiled_share(processes=2)
    figures |= {
        "networks_compiled_share": share,
        "networks": len(outcomes),
        "networks_largest_difference": max(
            (each.difference for each in outcomes if not each.refusal), default=0.0
        ),
    }
    extra["refused"] = {each.name: each.refusal for each in outcomes if each.refusal}
    return Findings(figures, extra, _fault(figures))


def _fault(figures: dict[str, float]) -> str:
    wrong = [
        key
        for key, figure in figures.items()
        if (key.endswith("answers_right") and figure < 1)
        or (key.endswith(("wrong_answers", "lost_needlessly", "pageable_copies")) and figure)
    ]
    return ", ".join(wrong)


STUDY = bench("gpu-ready", Setting(), measure, record="gpu_ready")
