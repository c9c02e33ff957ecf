"""Aims for a card, and whether the figures in `experiments/results/gpu` reach them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from experiments.gpu.table1 import MAIN
from experiments.study.report import write_csv

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
_COLUMNS = ("what", "file", "figure", "measured", "aim", "outcome")


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on the absolute value of a figure."""

    what: str
    file: str
    figure: str
    limit: float
    #: The bound is a lower one, not an upper one.
    at_least: bool = False

    def judge(self, directory: Path, since: datetime) -> tuple[float | None, str]:
        """Look the figure up; None when it is missing, or was measured before this run."""
        try:
            record = json.loads((directory / f"{self.file}.json").read_text(encoding="utf-8"))
            when = datetime.fromisoformat(record["when"])
            found = float(record["figures"][self.figure])
        except (
            OSError,
            KeyError,
            ValueError,
        ):  # a part that was ended may have written half a file
            return None, NOT_MEASURED
        # Records say whole seconds.
        if when < since.replace(microsecond=0):
            return None, NOT_MEASURED
        met = abs(found) >= self.limit if self.at_least else abs(found) <= self.limit
        return found, MET if met else MISSED


AIMS = (
    Aim("EXEC runs whose tail is looked at", "table1", f"{MAIN}_b1_runs", 10_000, at_least=True),
    Aim("EXEC p99.99 over the median", "table1", f"{MAIN}_b1_tail_ratio", 1.0003),
    Aim("LOAD over copying", "table1", f"{MAIN}_load_to_copy_ratio", 0.9, at_least=True),
    Aim("gather over copying", "probe", "gather_to_copy_ratio", 0.6, at_least=True),
    Aim("gather from a large cache", "probe", "gather_large_to_copy_ratio", 0.6, at_least=True),
    Aim("EXEC over bare kernels", "table1", f"{MAIN}_paged_to_bare_ratio", 1.1),
    Aim("start lateness p99, us", "serve", "live_start_late_us_p99", 100),
    Aim("pause before a queued EXEC p99, us", "serve", "live_exec_pause_us_p99", 100),
    Aim("EXEC prediction error p99, us", "serve", "live_exec_error_us_p99", 250),
    Aim("LOAD prediction error p99, us", "serve", "live_load_error_us_p99", 250),
    Aim("EXEC completion error p99, us", "serve", "live_exec_completion_error_us_p99", 1000),
    Aim("LOAD completion error p99, us", "serve", "live_load_completion_error_us_p99", 1000),
    Aim("memory taken while serving", "serve", "lanes_memory_taken_while_serving", 0),
    Aim("Fig 2, simulated against live, %", "fig2", "worst_goodput_gap_pct", 3),
    Aim("Fig 5, simulated against live, %", "fig5", "worst_goodput_gap_pct", 3),
    Aim("Fig 6, instances that answered", "fig6", "num_instances_answered", 1000, at_least=True),
)


def judged(
    directory: Path, since: datetime
) -> Iterator[tuple[str, str, str, float | None, str, str]]:
    """Rows of the table: what, file, figure, measured, aim, outcome."""
    for aim in AIMS:
        found, outcome = aim.judge(directory, since)
        limit = f"{'>=' if aim.at_least else '<='} {aim.limit:g}"
        yield aim.what, aim.file, aim.figure, found, limit, outcome


def show(directory: Path, since: datetime) -> None:
    """Print the table and write `aims.csv`.

    Args:
        directory: where the records are.
        since: begin of this run. An older record says nothing about it: the part may have failed now.
    """
    rows = list(judged(directory, since))
    for what, _, _, found, limit, outcome in rows:
        measured = "-" if found is None else f"{found:.4f}"
        print(f"{what:36} {measured:>14} {limit:>10}  {outcome}")
    write_csv(directory / "aims.csv", _COLUMNS, rows)
