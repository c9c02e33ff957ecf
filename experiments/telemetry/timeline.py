"""A picture of a worker's steps: a row per lane, a bar per step, and the prediction of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.telemetry.rows import ActionRow

_LANES = ("load", "input", "exec", "output")
# The lane whose begin and duration the controller predicts, by kind of action.
_PREDICTED_LANE = {"LoadWeights": "load", "Infer": "exec"}
_SPAN_NS = NS_PER_S


def draw_timeline(actions: Iterable[ActionRow], target: Path) -> None:
    """Draw the second in which most weights were loaded.

    Args:
        actions: of one run; those that succeeded are drawn.
        target: a PNG.

    Raises:
        ValueError: there is no action to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, patches, pyplot

    timed = [row for row in actions if row.error == "NONE" and row.type in _PREDICTED_LANE]
    if not timed:
        raise ValueError("there are no actions to draw")
    begin_ns = _busiest(timed)
    shown = [row for row in timed if begin_ns <= _begin_ns(row) < begin_ns + _SPAN_NS]
    workers = sorted({row.worker_id for row in shown})
    lanes = [(worker, lane) for worker in workers for lane in _LANES]
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 1.0 * len(lanes)), layout="constrained")
    models = sorted({row.model_id for row in shown})
    colours = {model: colormaps["tab20"](index % 20) for index, model in enumerate(models)}
    for position, (worker, lane) in enumerate(lanes):
        for row in shown:
            step = getattr(row, lane)
            if row.worker_id != worker or step is None:
                continue
            # A step that takes less than a pixel stays visible.
            width_ns = max(step.end_ns - step.begin_ns, _SPAN_NS / 2000)
            left_ms, width_ms = (step.begin_ns - begin_ns) / NS_PER_MS, width_ns / NS_PER_MS
            axes.barh(position, width_ms, left=left_ms, height=0.5, color=colours[row.model_id])
            if _PREDICTED_LANE[row.type] == lane:
                _draw_prediction(axes, row, position, begin_ns)
    names = [f"{lane.upper()}\n{worker}" for worker, lane in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, _SPAN_NS / NS_PER_MS)
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


def _draw_prediction(axes: Any, row: ActionRow, position: int, begin_ns: int) -> None:  # noqa: ANN401
    assert row.earliest_ns is not None
    assert row.latest_ns is not None
    expected_ms = (row.expected_begin_ns - begin_ns) / NS_PER_MS
    axes.barh(
        position, row.expected_duration_ns / NS_PER_MS, left=expected_ms, height=0.62, fill=False,
        edgecolor="black", linewidth=0.7,
    )  # fmt: skip
    window_ms = [(at_ns - begin_ns) / NS_PER_MS for at_ns in (row.earliest_ns, row.latest_ns)]
    axes.plot(window_ms, [position + 0.4] * 2, color="black", linewidth=1.2)


def _busiest(rows: Sequence[ActionRow]) -> int:
    """Begin of the whole span, counted from the first action, with most loads."""
    first_ns = min(map(_begin_ns, rows))
    loads = Counter(
        (_begin_ns(row) - first_ns) // _SPAN_NS for row in rows if row.type == "LoadWeights"
    )
    # The first span shows a start from nothing; later ones show serving.
    later = {span: count for span, count in loads.items() if span > 0} or loads
    span = max(later, key=lambda span: (later[span], -span), default=0)
    return first_ns + span * _SPAN_NS


def _begin_ns(row: ActionRow) -> int:
    step = getattr(row, _PREDICTED_LANE[row.type])
    return row.expected_begin_ns if step is None else int(step.begin_ns)
