"""The form in which benchmarks leave their figures."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments import results_file
from experiments.results_file import add_results, write_results


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


def test_a_part_that_is_recorded_again_is_replaced_as_a_whole(tmp_path: Path) -> None:
    def add(part: str, figures: dict[str, float]) -> None:
        add_results("x", figures, part=part, command=part, directory=tmp_path)

    write_results("x", {"own": 1.0, "old": 1.0}, command="x", directory=tmp_path)
    add("first", {"first_old": 1.0, "first": 1.0, "shared": 1.0})
    add("second", {"second": 1.0, "shared": 2.0})
    add("first", {"first": 3.0})
    record = json.loads((tmp_path / "x.json").read_text())
    # What another part has measured since stays.
    assert record["figures"] == {"own": 1, "old": 1, "first": 3, "second": 1, "shared": 2}
    assert record["first"]["keys"] == ["first"]
    write_results("x", {"own": 2.0}, command="x", directory=tmp_path)
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["figures"] == {"own": 2}
    assert "first" not in record


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_results_written_before_do_not_make_the_commit_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@x.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, timeout=60)

    results = tmp_path / "experiments" / "results"
    results.mkdir(parents=True)
    source, table = results.parent / "source.py", results / "x.csv"
    source.write_text("1")
    table.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    monkeypatch.setattr(results_file, "RESULTS", results)

    def commit() -> str:
        path = write_results("y", {}, command="", directory=results)
        said: str = json.loads(path.read_text())["commit"]
        return said

    table.write_text("2")
    assert len(commit()) == 12
    source.write_text("2")
    assert commit().endswith("+")
    # Where the history is, nobody has to say it.
    monkeypatch.setenv("CLOCKWRIGHT_COMMIT", "0123456789ab")
    assert commit().endswith("+")


def test_the_commit_of_a_copy_without_history_is_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path / "results")
    # Git looks for a history no further up than here.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("CLOCKWRIGHT_COMMIT", raising=False)
    for given, said in (("", "unknown"), ("0123456789ab", "0123456789ab")):
        monkeypatch.setenv("CLOCKWRIGHT_COMMIT", given)
        path = write_results("y", {}, command="", directory=tmp_path)
        assert json.loads(path.read_text())["commit"] == said
