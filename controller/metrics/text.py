"""The lines of a page, as Prometheus reads them (text format 0.0.4), or OpenMetrics 1.0. No I/O.

Counters of Triton do not end in `_total`, as OpenMetrics demands. There they are of unknown type, which changes
nothing for whoever asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from controller.metrics.families import MetricFamily
from controller.metrics.histogram import Histogram

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_TOTAL: Final = "_total"
_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def escape(value: str) -> str:
    """Write a label's value as it stands between quotes."""
    return value.translate(_ESCAPED)


def labels_of(**labels: str) -> str:
    """Write labels as they stand between the braces of a line."""
    return ",".join([f'{name}="{escape(value)}"' for name, value in labels.items()])


class Text:
    """A page that grows."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self._parts: list[str] = []

    def begin(self, family: MetricFamily) -> None:
        """Begin a family; its lines follow."""
        name, kind = family.name, family.kind
        if self._openmetrics and kind == "counter":
            name = name.removesuffix(_TOTAL)
            kind = "counter" if name != family.name else "unknown"
        self._parts.append(f"# HELP {name} {family.meaning}\n# TYPE {name} {kind}\n")

    def line(self, name: str, labels: str, value: float) -> None:
        """Write one line of the family that was begun last."""
        number = "+Inf" if value == math.inf else repr(value)
        self._parts.append(f"{name}{{{labels}}} {number}\n" if labels else f"{name} {number}\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Write lines of the family that was begun last, which end as lines do."""
        self._parts.append("".join(lines))

    def histogram(self, name: str, labels: str, histogram: Histogram) -> None:
        """Write the lines of one histogram."""
        before = f"{labels}," if labels else ""
        counts = histogram.cumulative()
        text = "".join(
            [
                f'{name}_bucket{{{before}le="{le}"}} {count}\n'
                for le, count in zip(histogram.buckets.le, counts, strict=True)
            ]
        )
        if not histogram.buckets.signed:
            of = f"{{{labels}}}" if labels else ""
            text += f"{name}_count{of} {counts[-1]}\n{name}_sum{of} {histogram.sum_ns / 1e9!r}\n"
        self._parts.append(text)

    def end(self) -> bytes:
        """The page."""
        if self._openmetrics:
            self._parts.append("# EOF\n")
        return "".join(self._parts).encode()
