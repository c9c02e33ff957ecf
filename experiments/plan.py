"""Plans how many workers a load needs, and prints it."""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from clockwright.cli.show import print_json
from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S
from experiments.plan_flags import Wanted
from experiments.planning import Question, busiest
from experiments.planning import plan as find
from experiments.planning.show import draw, numbers, print_plan
from experiments.simulator import Case
from experiments.simulator.case_file import case_of_tables, read_case
from modelzoo.profile import load_profile

# The busiest stretch of a longer load is planned for: so many requests take seconds per run.
_MOST_REQUESTS = 20_000

# A part of what is planned for.
_WARMUP_SHARE = 0.1

# What only recorded requests need to be told.
_OF_RECORDS = ("profile", "pages", "slo_ms", "hours")


def plan(wanted: Wanted, *, slo_costs: bool, picture: Path | None, as_json: bool) -> None:
    """Find the size, and print it.

    Args:
        wanted: what is planned for.
        slo_costs: find what each SLO costs, too.
        picture: where a picture goes; None: none is drawn.
        as_json: print JSON.

    Raises:
        ConfigError: as `question_of`; or no size meets the target.
    """
    # Each of a hundred short simulations has the collector look at all objects that are not frozen.
    gc.freeze()
    # Progress is for people; standard output may be a file.
    with Live(console=Console(file=sys.stderr), refresh_per_second=4, transient=True) as live:
        live.update(Text(f"reading {wanted.load}"))
        found = find(
            question_of(wanted), slo_costs=slo_costs, tell=lambda words: live.update(Text(words))
        )
    if picture is not None:
        draw(found, picture)
    if as_json:
        print_json(numbers(found))
    else:
        print_plan(found)


def question_of(wanted: Wanted) -> Question:
    """Read the load.

    Raises:
        ConfigError: it cannot be read, or a value is wrong.
        TraceFormatError: a trace is not what its reader expects.
    """
    case = _case(wanted)
    # The comparison is false for NaN too.
    if not 0 < wanted.scale < 1e6:
        raise ConfigError(f"--scale is {wanted.scale:g}, expected more than 0")
    if wanted.scale != 1:
        case = replace(case, workload=case.workload.scaled(wanted.scale))
    if wanted.stretch_s is None:
        asked = case.workload.expected_requests(0, case.duration_ns)
        stretch_ns = round(case.duration_ns * min(1.0, _MOST_REQUESTS / max(asked, 1)))
    else:
        stretch_ns = round(wanted.stretch_s * NS_PER_S)
    if wanted.warmup_s is None:
        warmup_ns = round(min(stretch_ns, case.duration_ns) * _WARMUP_SHARE)
    else:
        warmup_ns = round(wanted.warmup_s * NS_PER_S)
    return Question(
        case=busiest(case, stretch_ns, warmup_ns),
        target=wanted.target / 100,
        warmup_ns=warmup_ns,
        have=dict(map(_counted, wanted.have or ())),
        most_runs=wanted.most_runs,
        most_workers=wanted.most_workers,
    )


def _case(wanted: Wanted) -> Case:
    if wanted.load.suffix == ".toml":
        unsaid = Wanted(load=wanted.load)
        for name in _OF_RECORDS:
            if getattr(wanted, name) != getattr(unsaid, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: expected none with a case, which says it itself")
        return read_case(wanted.load, seed=wanted.seed, one_of_each=True)
    clients: dict[str, Any] = {
        "kind": "recorded",
        "path": str(wanted.load.absolute()),
        "slo_ms": wanted.slo_ms,
    }
    if wanted.hours is not None:
        clients["hours"] = wanted.hours
    noise = asdict(load_profile(wanted.profile).noise)
    tables = {
        "seed": wanted.seed or 0,
        "profile": wanted.profile,
        "clients": [clients],
        "cluster": {"noise": noise, "num_pages": wanted.pages},
    }
    try:
        return case_of_tables(tables, Path.cwd())
    except ValueError as error:
        raise ConfigError(f"{wanted.load}: {error}") from None


def _counted(argument: str) -> tuple[str, int]:
    name, equals, text = argument.rpartition("=")
    if not equals or not text.isdecimal():
        raise ConfigError(f"--have: found {argument!r}, expected KIND=N")
    return name, int(text)
