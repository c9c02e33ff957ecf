"""Each promise of docs/promises.md has a test, and each test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "promises.md").read_text().splitlines()
    if line.startswith("|") and not set(line) <= set("|-") and not line.endswith("| test |")
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def functions_in(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_promise_names_its_test() -> None:
    assert len(ROWS) > 40
    assert [row for row in ROWS if not NAMED.search(row.rpartition(" | ")[2])] == []


def test_every_test_that_is_named_exists() -> None:
    named = {pair for row in ROWS for pair in NAMED.findall(row)}
    found = {path: functions_in(ROOT / path) for path, _ in named}
    assert sorted(f"{path}::{name}" for path, name in named if name not in found[path]) == []
