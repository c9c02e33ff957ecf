"""Output that all figures share: the comparison, the files, and the frame of the picture."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.results_file import write_results
from experiments.study.study import POLICIES, Study

# A gap to the paper beyond this share needs a reason.
NOTABLE_GAP = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A number that the paper states in its text, and ours."""

    #: Key of our number, then of the paper's in the same units.
    key: str
    paper_key: str
    #: Why the two numbers differ, if they do.
    reason: str


def write_csv(target: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; floats with six significant digits, so that files can be compared."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])


def write_figure(
    name: str,
    figures: Mapping[str, float],
    comparisons: Iterable[Comparison],
    setting: Study,
    *,
    directory: Path,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print the comparison with the paper, and write `NAME.json` with it and with the whole setting."""
    table = compare(figures, comparisons)
    show(table)
    policies = " ".join(setting.policies)
    write_results(
        name,
        figures,
        command=f"python -m experiments {name} --seed {setting.seed} --policies {policies}",
        seeds=[setting.seed],
        extra={"comparison": table, "setting": asdict(setting), **(extra or {})},
        directory=directory,
    )


def write_points(
    name: str,
    figures: Mapping[str, float],
    comparisons: Iterable[Comparison],
    points: Sequence[Any],
    setting: Any,  # noqa: ANN401  a dataclass, as the points are
    *,
    directory: Path,
    options: str = "",
    seeds: Sequence[int] = (),
) -> None:
    """Print the comparison with the paper, and write `NAME.json` and `NAME.csv`, a row per point."""
    table = compare(figures, comparisons)
    show(table)
    columns = [column.name for column in fields(points[0])]
    write_csv(directory / f"{name}.csv", columns, [tuple(asdict(p).values()) for p in points])
    write_results(
        name,
        figures,
        command=f"python -m experiments {name} {options}".rstrip(),
        seeds=seeds,
        extra={"comparison": table, "setting": asdict(setting)},
        directory=directory,
    )


def compare(
    figures: Mapping[str, float], comparisons: Iterable[Comparison]
) -> list[dict[str, float | str]]:
    """Put our numbers beside the paper's, with the reason where they are more than 10 % apart."""
    table: list[dict[str, float | str]] = []
    for entry in comparisons:
        if entry.key not in figures:
            continue
        ours, paper = figures[entry.key], figures[entry.paper_key]
        gap = ours / paper - 1
        table.append(
            {
                "figure": entry.key,
                "ours": ours,
                "paper": paper,
                "gap_pct": 100 * gap,
                "reason": entry.reason if abs(gap) > NOTABLE_GAP else "",
            }
        )
    return table


def show(table: Iterable[Mapping[str, float | str]]) -> None:
    """Print a table that `compare` made."""
    for row in table:
        print(f"{row['figure']}: {row['ours']:.4g}, paper {row['paper']:.4g}", end="")
        print(f" ({row['gap_pct']:+.0f} %) {row['reason']}".rstrip())


@contextmanager
def picture(
    target: Path, rows: int, columns: int, *, size: tuple[float, float], share_x: bool = False
) -> Iterator[NDArray[np.object_]]:
    """Give a grid of axes to draw on, shape (rows, columns); afterwards the picture is in the file.

    Args:
        target: a PNG.
        rows: number of rows of axes.
        columns: number of columns of axes.
        size: inches, width and height.
        share_x: all axes have the same horizontal range, labelled once.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=share_x
    )
    try:
        yield grid
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
    finally:
        pyplot.close(figure)


def colour_of(policy: str) -> str:
    """The colour that a policy has in every picture."""
    return f"C{list(POLICIES).index(policy)}"
