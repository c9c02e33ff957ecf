"""Workloads played on the card by a `clockwright up`, compared with what the simulator says they should come to.

Separate runs on the same server measure what the simulator is told (`experiments.live.rehearsal`). It does not
know that a front end has a limited number of cores. Where the cores cannot carry the requests, the live run answers fewer, and
`exec_busy_pct` says that the card was not the limit. `--fronts N` has more cores carry them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clockwright.cli.worker_settings import default_cache_dir
from clockwright.errors import ConfigError
from clockwright.units import DEFAULT_BATCH_SIZES
from controller.telemetry.tables import OK
from experiments.clockwork_paper.cases import ARCHITECTURE, case_of
from experiments.gpu.hardware import about, open_accelerator
from experiments.live.live_run import Played, Served, hosted, play, unmeasured
from experiments.live.rehearsal import measured, rehearsals, sides
from experiments.study.beside import Beside, say, worst
from experiments.study.sides import simulated
from experiments.study.study import Study
from traces.arrivals import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a run that has figures of its own."""

    key: str
    #: Index of the workload that the stretch is a part of.
    workload: int
    #: Since the workload's begin.
    begin_ns: int
    end_ns: int
    #: Models whose requests and actions count; None: all.
    model_ids: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSetting:
    """The server of a figure, and how much is asked of it."""

    #: As `--device` has it; torch:cpu tries the code only.
    device: str = "cuda:0"
    #: How long the load lasts, rehearsals included.
    seconds: float = 30.0
    #: Another network, weights cache, and share of the clients or of their rates where the processor serves.
    architecture: str = ARCHITECTURE
    pages: int
    share: float = 1.0
    num_models: int
    #: Host memory for weights, which models of one network share.
    host_mib: int = 512
    #: Front processes: inputs of 602 kB keep more than one core busy.
    fronts: int = 0
    seed: int = 1
    #: Compiled models; empty: the user's.
    cache_dir: str = field(default="", metadata={"said": "DIR"})
    #: Where the server's telemetry stays, of one run after the other; empty: nowhere.
    keep_telemetry: str = field(default="", metadata={"said": "DIR"})

    def __post_init__(self) -> None:
        for name in ("seconds", "pages", "share"):
            # The comparison is false for NaN too.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")

    @property
    def copies(self) -> dict[str, int]:
        """Number of copies of each network."""
        return {self.architecture: self.num_models}

    @property
    def served(self) -> Served:
        """The server on which every workload is played."""
        models = tuple(
            model
            for name, count in self.copies.items()
            for model in hosted(unmeasured(name, DEFAULT_BATCH_SIZES), count)
        )
        cache = self.cache_dir or str(default_cache_dir())
        return Served(
            case=case_of(models, seed=1, end_ns=1, num_pages=self.pages),
            device=self.device,
            fronts=self.fronts,
            telemetry=self.keep_telemetry,
            options=("--host-mib", str(self.host_mib), "--cache-dir", cache),
        )

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Ids of all models."""
        return tuple(model.model_id for model in self.served.case.cluster.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(CardSetting, ABC):
    """A figure's load, and which parts of the run count."""

    @property
    @abstractmethod
    def rehearsal_s(self) -> float:
        """Length of each of the three rehearsals."""

    @property
    @abstractmethod
    def mix(self) -> Workload:
        """The measured load with other arrivals: among others, EXEC and LOAD take longer than alone."""

    @property
    @abstractmethod
    def workloads(self) -> Sequence[Workload]:
        """The workloads that are measured."""

    @property
    @abstractmethod
    def stretches(self) -> Sequence[Stretch]:
        """The stretches that have figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard(Beside):
    """A stretch."""

    stretch: str
    #: Models that answered a request, in the whole run.
    answered: frozenset[str]
    #: What the simulator was told, or why nothing was simulated.
    about: Mapping[str, Any]


def ask(setting: Setting) -> Iterator[OnCard]:
    """Rehearse, play, simulate."""
    first = rehearsals(setting.served, setting.rehearsal_s, setting.mix)
    yield from compare(setting, play([*first, *setting.workloads], setting.served))


def compare(setting: Setting, played: Played) -> Iterator[OnCard]:
    """Put what was played, three rehearsals first, compared with its simulation."""
    first, runs = played.runs[:3], played.runs[3:]
    given, told = None, {}
    try:
        given = measured(setting.served, first, played.rows)
        told = given.about
    except ValueError as error:
        told = {"not_simulated": str(error)}
    for index, (workload, live) in enumerate(zip(setting.workloads, runs, strict=True)):
        rows = None
        if given is not None:
            rows = simulated(replace(given.case, workload=workload, duration_ns=workload.end_ns))
        answered = frozenset(row.model_id for row in live.rows.requests if row.outcome == OK)
        for stretch in setting.stretches:
            if stretch.workload == index:
                yield OnCard(
                    stretch=stretch.key,
                    answered=answered,
                    about=told,
                    **sides(live, rows, stretch.begin_ns, stretch.end_ns, stretch.model_ids),
                )


def figures_of(setting: Setting, points: Sequence[OnCard]) -> dict[str, float]:
    """How many instances there were, and the worst gap of all stretches."""
    answered = frozenset[str]().union(*(point.answered for point in points))
    figures = {"num_instances": setting.num_models, "num_instances_answered": len(answered)}
    gaps = worst(points, "goodput_gap_pct")
    return figures | {f"worst_{name}": gap for name, gap in gaps.items()}


def extra(setting: Setting, points: Sequence[OnCard]) -> dict[str, Any]:
    """The hardware, asked afterwards, because the worker had the card to itself; and what was measured of it."""
    return {"hardware": about(open_accelerator(setting.device)), **points[0].about}


def study(name: str, setting: Setting) -> Study[Any, OnCard]:
    """Declare a figure of the paper on the card."""
    return Study(
        name=name,
        folder="gpu",
        command=f"gpu-{name}",
        setting=setting,
        ask=ask,
        key="{stretch}",
        figures=figures_of,
        extra=extra,
        say=say,
    )
