"""Files that all studies leave: tables, and the frame of pictures."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_SHADES = 128


def write_csv(target: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; floats with six significant digits, so that files can be compared."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])


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
    from PIL import Image

    figure, grid = pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=share_x
    )
    try:
        yield grid
        target.parent.mkdir(parents=True, exist_ok=True)
        drawn = BytesIO()
        figure.savefig(drawn, dpi=110)
        # A reader sees so many of the thousand shades of a few colours; the file is a third.
        Image.open(drawn).convert("RGB").quantize(_SHADES, dither=Image.Dither.NONE).save(target)
    finally:
        pyplot.close(figure)
