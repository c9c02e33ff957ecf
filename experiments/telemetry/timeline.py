"""A picture of a worker's steps: a row per lane, a bar per step, and the prediction of each."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from clockwright.units import NS_PER_MS, NS_PER_S

Row = dict[str, str]

_LANES = ("load", "input", "exec", "output")
# The lane whose begin and duration the controller predicts, by kind of action.
_PREDICTED_LANE = {"LoadWeights": "load", "Infer": "exec"}


def read_actions(path: Path) -> list[Row]:
    """Read an `actions.csv`, successful actions of the run that wrote to it last only."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["error"] == "NONE" and row["run"] == rows[-1]["run"]]


def draw_timeline(actions: Sequence[Row], target: Path, *, span_ns: int = NS_PER_S) -> None:
    """Draw the stretch of time in which most weights were loaded.

    Args:
        actions: rows of `actions.csv`.
        target: a PNG.
        span_ns: how much time to show.

    Raises:
        ValueError: there is no action to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    timed = [row for row in actions if row["type"] in _PREDICTED_LANE]
    if not timed:
        raise ValueError("there are no actions to draw")
    begin_ns = _busiest(timed, span_ns)
    shown = [
        row for row in timed if begin_ns <= _begin_ns(row) and _begin_ns(row) < begin_ns + span_ns
    ]
    workers = sorted({row["worker_id"] for row in shown})
    lanes = [(worker, lane) for worker in workers for lane in _LANES]
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 1.0 * len(lanes)), layout="constrained")
    colours = _colours(row["model_id"] for row in shown)
    for position, (worker, lane) in enumerate(lanes):
        for row in shown:
            if row["worker_id"] != worker or not row[f"{lane}_begin_ns"]:
                continue
            first, last = (
                (int(row[f"{lane}_{end}_ns"]) - begin_ns) / NS_PER_MS for end in ("begin", "end")
            )
            # A step that takes less than a pixel stays visible.
            width = max(last - first, span_ns / NS_PER_MS / 2000)
            axes.barh(position, width, left=first, height=0.5, color=colours[row["model_id"]])
            if _PREDICTED_LANE[row["type"]] == lane:
                _draw_prediction(axes, row, position, begin_ns)
    axes.set_yticks(
        range(len(lanes)), [f"{lane.upper()}\n{worker}" for worker, lane in lanes], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlim(0, span_ns / NS_PER_MS)
    axes.set_xlabel("ms")
    axes.set_title(
        "bars: measured   |   outlines: predicted begin and duration   |   "
        "lines below: window in which the action might begin",
        fontsize=9,
    )
    handles = [
        patches.Rectangle((0, 0), 1, 1, color=colour, label=model)
        for model, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _draw_prediction(axes, row: Row, position: int, begin_ns: int) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    expected = (int(row["expected_begin_ns"]) - begin_ns) / NS_PER_MS
    duration = int(row["expected_duration_ns"]) / NS_PER_MS
    axes.barh(
        position, duration, left=expected, height=0.62, fill=False, edgecolor="black", linewidth=0.7
    )
    earliest, latest = (
        (int(row[f"{end}_ns"]) - begin_ns) / NS_PER_MS for end in ("earliest", "latest")
    )
    axes.plot([earliest, latest], [position + 0.4] * 2, color="black", linewidth=1.2)


def _busiest(rows: Sequence[Row], span_ns: int) -> int:
    """Begin of the whole span, counted from the first action, with most loads."""
    first_ns = min(_begin_ns(row) for row in rows)
    loads = Counter(
        (_begin_ns(row) - first_ns) // span_ns for row in rows if row["type"] == "LoadWeights"
    )
    # The first span shows a start from nothing; later ones show serving.
    later = {span: count for span, count in loads.items() if span > 0} or loads
    span = max(later, key=lambda span: (later[span], -span), default=0)
    return first_ns + span * span_ns


def _begin_ns(row: Row) -> int:
    lane = _PREDICTED_LANE[row["type"]]
    return int(row[f"{lane}_begin_ns"] or row["expected_begin_ns"])


def _colours(models: Iterable[str]) -> dict[str, tuple[float, ...]]:
    from matplotlib import colormaps

    names = sorted(set(models))
    palette = colormaps["tab20"]
    return {name: palette(index % 20) for index, name in enumerate(names)}
