"""What may not get worse unnoticed: short forms of the simulated figures, goodput of `edf_mh`, work per request.

`python -m experiments floors` plays every form, counts the core's lines, and records both in `floors.json`. The
tests play the same forms and name what differs from the record. Nothing in a form depends on the machine, so a
difference is a change of a decision, of a workload or of a bound. If you meant it, run the command again, and record
the figure itself, too.

Two numbers are records in the other sense: the most goodput that `edf_mh` ever had in a form, and the fewest lines that a
request ever cost. To record again keeps them where they are better than today's. Only `--again` lets go of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.bench import explain
from experiments.bench.core_lines import CASES, lines_per_request
from experiments.clipper_paper import fig6 as clipper_fig6
from experiments.clockwork_paper import (
    azure_replay,
    fig5,
    fig6,
    fig7,
    fig8,
    fig9,
    scale,
)
from experiments.clockwork_paper.cases import closed, poisson, pressed, resnets, zoo
from experiments.policies import ablation, contest, edf_mh, lanes, overload
from experiments.policies.contest import Outcome, bound_of, measure
from experiments.policies.load import Load
from experiments.policies.unseen import __main__ as unseen
from experiments.results_file import RESULTS, write_results
from experiments.simulator import CpuCosts
from experiments.study.bench import Findings, bench
from experiments.study.compared import POLICIES
from modelzoo.profile import Noise

COMMAND = "python -m experiments floors"
#: Points of goodput that `edf_mh` may lose.
POINTS = 1.0
#: Share by which a request may cost the core more lines.
MORE_LINES = 0.03

#: Look-aheads differ by too little to be worth the time.
COMPARED = ("clockwork", "edf_mh")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is kept."""

    #: Forget the best that was reached before.
    again: bool = False


# --- settings -------------------------------------------------------------------------------------

#: Without noise the bound holds to the last request.
QUICK5 = fig5.Setting(
    policies=(*COMPARED, "clipper", "infaas"),
    slos_ms=(25, 500),
    warmup_ns=NS_PER_S,
    measured_ns=NS_PER_S,
    noise=Noise(),
)

#: 500 instances where 20 fit: the PCIe bus is the bottleneck from the first seconds on.
QUICK6 = fig6.Setting(
    policies=COMPARED,
    num_models=500,
    num_pages=140,
    step_ns=NS_PER_S // 250,
    lead_ns=NS_PER_S,
    end_state_ns=2 * NS_PER_S,
    bucket_ns=NS_PER_S,
    window_ns=NS_PER_S // 5,
    noise=Noise(),
)

QUICK7 = fig7.Setting(
    policies=COMPARED,
    nums_models=(12,),
    rates_rps=(600, 2400),
    scenarios=((0, 0), (12, 16)),
    num_stages=8,
    stage_ns=NS_PER_S // 4,
    warmup_ns=NS_PER_S // 2,
    noise=Noise(),
)

#: All architectures, of which a quarter fits on the GPUs.
QUICK8 = fig8.Setting(
    policies=COMPARED,
    trace="",
    minutes=2,
    generator_minutes=2,
    replay=azure_replay.Setting(
        num_functions=120,
        num_copies=2,
        num_workers=2,
        num_pages=150,
        rate_rps=30.0,
        num_minutes=2,
        noise=Noise(),
    ),
)

#: A tenth of the Azure replay on a GPU or two.
QUICK9 = fig9.Setting(
    policies=("clockwork",),
    replay=azure_replay.Setting(
        num_minutes=1, num_functions=1000, num_copies=2, num_workers=1, rate_rps=400
    ),
    warmup_ns=NS_PER_S,
    measured_ns=2 * NS_PER_S,
)

QUICK_SCALE = scale.Setting(
    policies=COMPARED,
    num_minutes=2,
    num_functions=1000,
    num_copies=2,
    noise=Noise(),
    sizes=(
        scale.Size(
            num_gpus=1,
            rate_rps=600,
            slos_ms=(100, 5),
            warmup_ns=NS_PER_S,
            measured_ns=NS_PER_S,
        ),
        scale.Size(
            num_gpus=1,
            rate_rps=600,
            slos_ms=(5,),
            warmup_ns=NS_PER_S,
            measured_ns=NS_PER_S,
            costs=CpuCosts(front_ns=2 * NS_PER_MS),
            label="_charged",
        ),
    ),
)

QUICK_OVERLOAD = overload.Setting(
    loads=(0.25, 1.5), warmup_ns=NS_PER_S, measured_ns=2 * NS_PER_S, noise=Noise()
)

QUICK_SHARES = contest.Setting(seeds=(1,), only=("fig7_left_n12_r600_x2.25",), processes=1)

#: One family that no policy was tuned to.
QUICK_UNSEEN = unseen.Setting(
    only=("arrivals_tiny_slo_2ms",), policies=("edf", "edf_mh"), seeds=(1,), processes=1
)

#: A load that few pieces matter for, so that few runs are enough.
QUICK_PIECES = contest.Setting(seeds=(1,), only=("unseen_random",), processes=1, bounds=False)

#: Containers of this machine are left out.
QUICK_REPLICAS = clipper_fig6.Setting(
    real_replicas=(),
    batch=8,
    replicas=(1, 4),
    simulated_warmup_ns=NS_PER_S // 4,
    simulated_ns=NS_PER_S // 2,
)

QUICK_EXPLAIN = explain.Setting(
    num_workers=1,
    num_busy=15,
    num_rare=60,
    num_pages=250,
    duration_ns=3 * NS_PER_S,
    num_tried=6,
    cold_models=100,
    cold_pages=70,
    cold_rps=80.0,
    cold_duration_ns=2 * NS_PER_S,
    cold_num_tried=6,
    cold_num_pinned=2,
)

#: More than GPUs can do, more than memory holds, and clients that ask again: each kind of bound.
SCENARIOS = (
    Load(
        "small",
        "overload",
        partial(
            poisson,
            resnets(12),
            num_gpus=2,
            rate_rps=1800,
            slo_ns=25 * NS_PER_MS,
            duration_ns=2 * NS_PER_S,
        ),
        NS_PER_S,
    ),
    Load(
        "small",
        "zoo",
        lambda seed: pressed(
            zoo(60, seed),
            seed,
            zipf=0.8,
            num_gpus=1,
            num_pages=100,
            rate_rps=300,
            slo_ns=100 * NS_PER_MS,
            duration_ns=2 * NS_PER_S,
        ),
        NS_PER_S,
        bound="memory",
    ),
    Load(
        "small",
        "fig5",
        partial(closed, slo_ms=50, duration_ns=2 * NS_PER_S),
        NS_PER_S,
        bound="rate_inside",
    ),
)


# --- forms ----------------------------------------------------------------------------------------


def play_scenarios(directory: Path) -> dict[tuple[str, str], Outcome]:
    """Measure both policies under `SCENARIOS`, by scenario and policy."""
    outcomes = {}
    for scenario in SCENARIOS:
        bound = bound_of(scenario, 1)
        for policy in COMPARED:
            outcome = measure(scenario, POLICIES[policy], 1)
            outcomes[scenario.key, policy] = replace(outcome, bound=bound)
    write_results(
        "scenarios",
        {
            f"{policy}_{key}_bound_share_pct": 100 * outcome.bound_share
            for (key, policy), outcome in outcomes.items()
        },
        command=COMMAND,
        directory=directory,
    )
    return outcomes


def play_replay(directory: Path) -> list[fig8.ReplayOutcome]:
    """Figure 8 in small: a trace that is written here, and the generator."""
    with tempfile.TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "azure2019_some_invocations.csv", 40, 3)
        return fig8.STUDY.produce(replace(QUICK8, trace=str(trace)), directory)


def write_trace(path: Path, num_functions: int, num_minutes: int) -> Path:
    """Write a trace of Azure's format, a function less popular than the last."""
    labels = range(480, 480 + num_minutes)
    lines = ["HashOwner,HashApp,HashFunction,Trigger," + ",".join(map(str, labels))]
    for number in range(num_functions):
        count = 1 + 1000 // (number + 1)
        lines.append(f"o,a,f{number},http," + ",".join([str(count)] * num_minutes))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


#: By name of the record whose short form it is: leaves its files in a folder, and returns what the figure does.
FORMS: Mapping[str, Callable[[Path], Any]] = {
    "fig5": lambda directory: fig5.STUDY.produce(QUICK5, directory),
    "fig6": lambda directory: fig6.STUDY.produce(QUICK6, directory),
    "fig7": lambda directory: fig7.STUDY.produce(QUICK7, directory),
    "fig8": play_replay,
    "fig9": lambda directory: fig9.STUDY.produce(QUICK9, directory),
    "scale": lambda directory: scale.STUDY.produce(QUICK_SCALE, directory),
    "overload": lambda directory: overload.STUDY.produce(QUICK_OVERLOAD, directory),
    "lanes": lambda directory: lanes.STUDY.produce(directory=directory),
    "edf_mh": lambda directory: edf_mh.STUDY.produce(QUICK_SHARES, directory),
    "scenarios": play_scenarios,
    "unseen": lambda directory: unseen.STUDY.produce(QUICK_UNSEEN, directory),
    "ablation": lambda directory: ablation.STUDY.produce(QUICK_PIECES, directory),
    "clipper_fig6": lambda directory: clipper_fig6.STUDY.produce(QUICK_REPLICAS, directory),
    "explain": lambda directory: explain.STUDY.produce(QUICK_EXPLAIN, directory),
}

# --- what is held ---------------------------------------------------------------------------------

# What a figure says about the machine.
_TIMED = re.compile(r"wall|rss|cpu|num_cores|per_s(_|$)")
_GOODPUT = re.compile(r"edf_mh_.*(bound_share|goodput)_pct")


@dataclass(frozen=True, slots=True)
class Taken:
    """All that a form has left."""

    #: Its record's numbers, but for those that tell of the machine; with ten significant digits.
    figures: Mapping[str, float]
    #: SHA-256 of each table.
    tables: Mapping[str, str]

    @property
    def goodput_pct(self) -> dict[str, float]:
        """Goodput of `edf_mh`, as a part of the bound or of what was asked."""
        return {key: value for key, value in self.figures.items() if _GOODPUT.fullmatch(key)}


def take(name: str, directory: Path) -> Taken:
    """Read what a form has left in a folder."""
    record = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    return Taken(
        figures={
            key: float(f"{value:.10g}")
            for key, value in sorted(record["figures"].items())
            if not key.startswith("paper_") and not _TIMED.search(key)
        },
        tables={
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.glob(f"{name}*.csv"))
        },
    )


def faults(name: str, directory: Path) -> list[str]:
    """Hold what a form has left in a folder against the record, and name each difference."""
    return Floors().faults(name, take(name, directory))


class Floors:
    """What is recorded in `floors.json`."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        if content is None:
            content = json.loads((RESULTS / "floors.json").read_text(encoding="utf-8"))
        self.forms = {name: Taken(**form) for name, form in content["forms"].items()}
        #: The most goodput of `edf_mh` in percent, and the fewest lines per request, by key.
        self.best: dict[str, float] = content["figures"]

    def faults(self, name: str, taken: Taken) -> list[str]:
        """Name what differs from the record of a form, and whatever lies below its floor."""
        before = self.forms[name]
        found = [
            f"{name}: {key} is {taken.figures.get(key)}, recorded {before.figures.get(key)}"
            for key in sorted({**before.figures, **taken.figures})
            if taken.figures.get(key) != before.figures.get(key)
        ]
        found += [
            f"{name}: {file} is not what was recorded"
            for file in sorted({**before.tables, **taken.tables})
            if taken.tables.get(file) != before.tables.get(file)
        ]
        if found:
            found.append(f"meant so? record it and the figure again: {COMMAND}")
        return found + list(self._lost(name, taken))

    def _lost(self, name: str, taken: Taken) -> Iterator[str]:
        for key, now in taken.goodput_pct.items():
            best = self.best.get(f"{name}_{key}", now)
            if now < best - POINTS:
                yield (
                    f"{name}: {key} is {now:.2f}, more than {POINTS:g} below {best:.2f}; "
                    f"where that is the price of something better: {COMMAND} --again"
                )

    def line_faults(self, case: str, policy: str, lines: float) -> list[str]:
        """Say that a request costs the core more lines than it did; or so few that nothing was counted."""
        best = self.best[lines_key(case, policy)]
        if best / 2 < lines <= best * (1 + MORE_LINES):
            return []
        return [
            f"a request costs `{policy}` {lines:.1f} lines of the core on {case}, recorded {best:.1f}; "
            f"where it is worth that: {COMMAND} --again"
        ]


def lines_key(case: str, policy: str) -> str:
    """Name the figure that says how many lines a request costs."""
    return f"core_lines_{case}_{policy}"


def bests(
    forms: Mapping[str, Taken], lines: Mapping[str, float], before: Mapping[str, float]
) -> dict[str, float]:
    """Today's goodput and lines, or those recorded before where they are better."""
    goodput = {
        f"{name}_{key}": value
        for name, taken in forms.items()
        for key, value in taken.goodput_pct.items()
    }
    return {key: max(value, before.get(key, value)) for key, value in goodput.items()} | {
        key: min(value, before.get(key, value)) for key, value in lines.items()
    }


def measure_all(setting: Setting) -> Findings:
    """Play every form and count the core's lines."""
    is_first = setting.again or not (RESULTS / "floors.json").exists()
    before = {} if is_first else Floors().best
    forms = {}
    for name, play in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            play(Path(folder))
            forms[name] = take(name, Path(folder))
    lines = {
        lines_key(case, policy): lines_per_request(played, policy)
        for case, played in CASES.items()
        for policy in COMPARED
    }
    return Findings(
        bests(forms, lines, before), {"forms": {name: asdict(form) for name, form in forms.items()}}
    )


STUDY = bench("floors", Setting(), measure_all)
