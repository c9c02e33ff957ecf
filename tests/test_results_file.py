"""The form in which benchmarks leave their figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from experiments.results_file import write_results


def test_a_result_says_what_made_it_and_on_what(tmp_path: Path) -> None:
    path = write_results(
        "x",
        {"a_us": 1.5},
        command="python -m x",
        seeds=[7],
        extra={"rounds": 3},
        directory=tmp_path,
    )
    record = json.loads(path.read_text())
    assert path.name == "x.json"
    assert list(record) == [
        "name", "command", "commit", "when", "machine", "versions", "seeds", "figures", "rounds",
    ]  # fmt: skip
    assert record["figures"] == {"a_us": 1.5}
    assert record["versions"]["python"]


def test_a_figure_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="figure a of x is nan"):
        write_results("x", {"a": math.nan}, command="", directory=tmp_path)
