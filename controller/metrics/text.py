"""The lines of a page in Prometheus' text format 0.0.4, or OpenMetrics 1.0. No I/O.

Triton's counters do not end in `_total`, as OpenMetrics demands, so they have the type `unknown` there. Queries work
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from clockwright.units import NS_PER_S
from controller.metrics.families import FAMILIES
from controller.metrics.histogram import Histogram

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Encoding a piece takes a tenth of a millisecond.
_PIECE_CHARS: Final = 64 << 10

_TOTAL: Final = "_total"
_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def escape(value: str) -> str:
    """Write a label's value as between quotes."""
    return value.translate(_ESCAPED)


def labels_of(**labels: str) -> str:
    """Write labels as between the braces of a line."""
    return ",".join([f'{name}="{escape(value)}"' for name, value in labels.items()])


def _template(name: str, labels: str, histogram: Histogram) -> str:
    """The lines of a histogram, with a gap for each number; filling the gaps takes a third of the time."""
    before = f"{labels}," if labels else ""
    lines = [f'{name}_bucket{{{before}le="{le}"}} ' for le in histogram.buckets.le]
    if not histogram.buckets.signed:
        of = f"{{{labels}}}" if labels else ""
        lines += [f"{name}_count{of} ", f"{name}_sum{of} "]
    return "".join([line.replace("%", "%%") + "%r\n" for line in lines])


class Text:
    """A page that grows."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        #: Lines that are not a piece yet, and their length.
        self._parts: list[str] = []
        self._num_chars = 0
        self._pieces: list[bytes] = []

    def begin(self, name: str) -> None:
        """Begin a family; its lines follow."""
        family = FAMILIES[name]
        kind = family.kind
        if self._openmetrics and kind == "counter":
            name = name.removesuffix(_TOTAL)
            kind = "counter" if name != family.name else "unknown"
        self._add(f"# HELP {name} {family.meaning}\n# TYPE {name} {kind}\n")

    def line(self, name: str, labels: str, value: float) -> None:
        """Write one line of the family that was begun last."""
        number = "+Inf" if value == math.inf else repr(value)
        self._add(f"{name}{{{labels}}} {number}\n" if labels else f"{name} {number}\n")

    def each(self, name: str, samples: Iterable[tuple[str, float]]) -> None:
        """Write a whole family of labels and values."""
        self.begin(name)
        for labels, value in samples:
            self.line(name, labels, value)

    def one(self, name: str, value: float) -> None:
        """Write a whole family that has no labels."""
        self.each(name, [("", value)])

    def lines(self, lines: Iterable[str]) -> None:
        """Write lines of the family that was begun last, which end as lines do."""
        self._add("".join(lines))

    def histogram(self, name: str, labels: str, histogram: Histogram) -> None:
        """Write the lines of one histogram."""
        if not histogram.template:
            histogram.template = _template(name, labels, histogram)
        counts = histogram.cumulative()
        if not histogram.buckets.signed:
            counts += (counts[-1], histogram.sum_ns / NS_PER_S)
        self._add(histogram.template % tuple(counts))

    def end(self) -> list[bytes]:
        """The page, in pieces: one of megabytes would take milliseconds to be made, and to be sent."""
        if self._openmetrics:
            self._add("# EOF\n")
        self._cut()
        return self._pieces

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._num_chars += len(text)
        if self._num_chars >= _PIECE_CHARS:
            self._cut()

    def _cut(self) -> None:
        self._pieces.append("".join(self._parts).encode())
        self._parts.clear()
        self._num_chars = 0
