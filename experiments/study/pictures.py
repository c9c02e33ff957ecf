"""Pictures as values: panels of curves, each with a title that says what is seen, and one way to draw them all.

A picture is read in the width of a page, about 800 pixels: it has `MOST_PANELS` panels at most and three side by side, labels
curves at their ends if there is room, and uses colours that all readers can distinguish, with different lines and markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from experiments.study.compared import POLICIES
from experiments.study.report import picture

#: Okabe and Ito's colours, which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
#: Colour of bounds and of the paper's numbers.
BLACK = "black"
#: matplotlib's: a name, or lengths of dashes.
Line = str | tuple[int, tuple[int, ...]]
#: Markers, in the order of the colours.
LINES: tuple[Line, ...] = (
    "-",
    "--",
    "-.",
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (7, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MOST_PANELS = 6

# Inches, by panels side by side; at 110 dots each, a page shows them hardly smaller.
_WIDTHS = {1: 7.5, 2: 9.0, 3: 10.5}
_HEIGHT = 3.0
_POINTS_PER_INCH = 72
_FONT, _SMALL_FONT = 10, 9
_SHARES = {0.0: "0", 1.0: "90", 2.0: "99", 3.0: "99.9", 4.0: "99.99", 5.0: "99.999"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points that belong together, joined by a line."""

    x: Sequence[float]
    y: Sequence[float]
    #: Label at the right end, in the curve's colour, or in the panel's legend; empty: no label.
    label: str = ""
    colour: str = BLACK
    line: Line = "-"
    marker: str = ""
    width: float = 1.8
    #: Range around each `y`, below and above.
    spread: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One idea: a title that says it, axes with units, curves."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False
    #: Ticks by place, with their words; None: matplotlib's own.
    x_ticks: Mapping[float, str] | None = None
    y_ticks: Mapping[float, str] | None = None
    x_range: tuple[float | None, float | None] = (None, None)
    y_range: tuple[float | None, float | None] = (0, None)
    #: Vertical lines, by place, with their words.
    marks: Mapping[float, str] = field(default_factory=dict)
    #: Horizontal lines, by place, with their words: an SLO, a bound.
    levels: Mapping[float, str] = field(default_factory=dict)
    #: Where a legend stands, in matplotlib's words; empty: labels are at the ends of curves.
    legend: str = ""


def draw(target: Path, title: str, rows: Sequence[Sequence[Panel]]) -> None:
    """Draw panels.

    Args:
        target: a PNG.
        title: what is seen, one sentence.
        rows: panels of each row; none: nothing is drawn.
    """
    if not rows:
        return
    columns = max(len(row) for row in rows)
    width = _WIDTHS[columns]
    size = (width, _HEIGHT * len(rows) + 0.4)
    with picture(target, len(rows), columns, size=size) as grid:
        figure = grid[0, 0].figure
        words = fill(title, int(width * 9.5))
        figure.suptitle(words, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for axes_of_row, row in zip(grid, rows, strict=True):
            for axes, panel in zip(axes_of_row, row, strict=False):
                _draw(axes, panel, width / columns)
            for axes in axes_of_row[len(row) :]:
                axes.remove()


def _draw(axes: Any, panel: Panel, width: float) -> None:  # noqa: ANN401
    for curve in panel.curves:
        axes.errorbar(
            curve.x,
            curve.y,
            yerr=curve.spread,
            color=curve.colour,
            ls=curve.line,
            marker=curve.marker,
            ms=5,
            lw=curve.width,
            label=curve.label or None,
        )
    grey = {"color": COLOURS[-1], "fontsize": _SMALL_FONT, "textcoords": "offset points"}
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.5}
    for place, words in panel.marks.items():
        axes.axvline(place, color=COLOURS[-1], lw=1, ls=":")
        where = {"xycoords": axes.get_xaxis_transform(), "rotation": 90, "ha": "right"}
        axes.annotate(words, (place, 0.02), (-1, 0), va="bottom", bbox=behind, **where, **grey)
    for place, words in panel.levels.items():
        axes.axhline(place, color=COLOURS[-1], lw=1, ls=":")
        where = {"xycoords": axes.get_yaxis_transform()}
        axes.annotate(words, (0.01, place), (0, -2), va="top", bbox=behind, **where, **grey)
    _scale(axes, panel)
    axes.tick_params(labelsize=_SMALL_FONT)
    axes.set_title(fill(panel.title, int((width - 0.6) * 12)), fontsize=_FONT, loc="left")
    axes.set_xlabel(panel.x, fontsize=_FONT)
    axes.set_ylabel(panel.y, fontsize=_FONT)
    axes.grid(visible=True, lw=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if not any(curve.label for curve in panel.curves):
        return
    if panel.legend:
        axes.legend(fontsize=_SMALL_FONT, loc=panel.legend, handlelength=3, framealpha=0.8)
    else:
        _label_ends(axes, panel.curves, 1.8 * _SMALL_FONT / (_POINTS_PER_INCH * _HEIGHT))


def _scale(axes: Any, panel: Panel) -> None:  # noqa: ANN401
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_xlim(*panel.x_range)
    # A logarithmic axis has no zero.
    axes.set_ylim(None if panel.log_y else panel.y_range[0], panel.y_range[1])
    for ticks, axis, log in (
        (panel.x_ticks, axes.xaxis, panel.log_x),
        (panel.y_ticks, axes.yaxis, panel.log_y),
    ):
        if ticks is not None:
            axis.set_ticks(list(ticks), list(ticks.values()))
        elif log:
            least, most = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1,) if most > 200 * least else (1, 2, 5)))
            axis.set_major_formatter(
                FuncFormatter(lambda at, _: f"{at:,.0f}" if at >= 1 else f"{at:g}")
            )
        if ticks is not None or log:
            axis.set_minor_locator(NullLocator())


def _label_ends(axes: Any, curves: Sequence[Curve], gap: float) -> None:  # noqa: ANN401
    """Put labels at the ends of curves, no two nearer than a share of the panel's height."""
    ends = []
    for curve in curves:
        points = [point for point in zip(curve.x, curve.y, strict=True) if np.isfinite(point[1])]
        if curve.label and points:
            in_panel = axes.transLimits.transform(axes.transScale.transform(points[-1]))
            ends.append((float(np.clip(in_panel[1], 0.0, 1.0)), curve))
    ends.sort(key=itemgetter(0))
    places = [place for place, _ in ends]
    halves = [gap * (curve.label.count("\n") + 1) / 2 for _, curve in ends]
    for number in range(1, len(places)):
        least = places[number - 1] + halves[number - 1] + halves[number]
        places[number] = max(places[number], least)
    # What was pushed out above comes back from above.
    highest = 1.0
    for number in reversed(range(len(places))):
        places[number] = min(places[number], highest - halves[number])
        highest = places[number] - halves[number]
    for place, (_, curve) in zip(places, ends, strict=True):
        axes.annotate(
            curve.label, (1.02, place), xycoords="axes fraction", va="center",
            fontsize=_SMALL_FONT, color=curve.colour,
        )  # fmt: skip


#: A column of a row, or what is made of the row.
Value = str | Callable[[Any], Any]


def lines(
    rows: Iterable[Any],
    x: Value,
    y: Value,
    *,
    by: Value,
    up_to: Value | None = None,
    joined: bool = True,
) -> list[Curve]:
    """A curve for each group of rows, in the order in which they come.

    Args:
        rows: a group's own are in the curve's order.
        x: where a row's point stands.
        y: how high.
        by: the group, as its label names it.
        up_to: the upper end of the range around a point; None: no range.
        joined: a line joins the points.
    """
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(str(_value(by)(row)).replace("_", " "), []).append(row)
    curves = []
    for number, (label, mine) in enumerate(groups.items()):
        heights = [_value(y)(row) for row in mine]
        above = [max(_value(up_to or y)(p) - at, 0.0) for p, at in zip(mine, heights, strict=True)]
        curve = Curve(
            x=[_value(x)(row) for row in mine],
            y=heights,
            label=label,
            colour=COLOURS[number % len(COLOURS)],
            line=LINES[number % len(LINES)] if joined else "none",
            marker=MARKERS[number % len(MARKERS)],
            spread=([0.0] * len(mine), above) if up_to else None,
        )
        curves.append(curve)
    return curves


def _value(of: Value) -> Callable[[Any], Any]:
    return itemgetter(of) if isinstance(of, str) else of


def tail_percentiles(nines: int) -> tuple[float, ...]:
    """Shares of answers, in percent, spread out towards the tail, up to so many nines."""
    at = np.arange(0, nines + 0.01, 0.1)
    return tuple(round(float(100 * (1 - 10**-place)), 4) for place in at)


#: The one of them that is nearest to the median.
MEDIAN = tail_percentiles(1)[3]


def tail(
    title: str,
    x: str,
    curves: Sequence[Curve],
    percentiles: Sequence[float],
    **others: Any,  # noqa: ANN401
) -> Panel:
    """A panel of distributions, their tails stretched: a curve's `x` is at `percentiles`, its `y` is not looked at.

    Args:
        title: what is seen.
        x: what is distributed, with its unit.
        curves: the distributions; one with fewer values has its own percentiles in `y`.
        percentiles: in percent.
        others: more of `Panel`.
    """
    stretched = [
        replace(curve, y=[nines_of(at) for at in curve.y or percentiles]) for curve in curves
    ]
    others = {"legend": "lower right"} | others
    return Panel(title=title, x=x, y="percentile, %", curves=stretched, y_ticks=_SHARES, **others)


def nines_of(percentile: float) -> float:
    """How many nines a percentile has: 2 for 99 %."""
    return -float(np.log10(1 - percentile / 100))


def of_policy(policy: str, curve: Curve) -> Curve:
    """Give a curve the colour, the line and the label that its policy has in every picture."""
    number = list(POLICIES).index(policy)
    return replace(
        curve,
        colour=COLOURS[number],
        line=LINES[number],
        label=curve.label or policy,
        marker=curve.marker and MARKERS[number],
    )


def by_policy(rows: Iterable[Any], x: Value, y: Value, **looks: Any) -> list[Curve]:  # noqa: ANN401
    """A curve for each policy of a table, in the order in which they come.

    Args:
        rows: a policy's own are in the curve's order.
        x: where a row's point stands.
        y: how high.
        looks: more of `Curve`.
    """
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(str(row["policy"]), []).append(row)
    return [
        of_policy(
            policy, Curve(x=list(map(_value(x), mine)), y=list(map(_value(y), mine)), **looks)
        )
        for policy, mine in groups.items()
    ]


def of_paper(x: Sequence[float], y: Sequence[float], label: str = "x the paper") -> Curve:
    """Points that the paper states."""
    return Curve(x=x, y=y, label=label, line="none", marker="x")


def unlabelled(curves: Iterable[Curve]) -> list[Curve]:
    """Curves that another panel of the row has named."""
    return [replace(curve, label="") for curve in curves]


def ticks(numbers: Iterable[float]) -> dict[float, str]:
    """A tick for each number."""
    return {float(number): str(number) for number in numbers}
