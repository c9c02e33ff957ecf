"""Texts that a test compares with a file, which `pytest --rewrite` writes anew."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest


def compare(path: Path, text: str, *, rewrite: bool) -> None:
    """Fail unless the file holds the text; with `rewrite` make it hold it."""
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if known == text:
        return
    if rewrite:
        path.write_text(text, encoding="utf-8")
        return
    diff = difflib.unified_diff(
        known.splitlines(), text.splitlines(), f"{path.name}", "what happens now", lineterm="", n=6
    )
    pytest.fail(
        "\n".join(
            [
                *diff,
                "",
                f"{path.name} does not hold what happens now. Where that is as it should be: pytest --rewrite, "
                "and read what `git diff` shows.",
            ]
        ),
        pytrace=False,
    )
