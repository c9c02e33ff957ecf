"""Comments and docstrings name what they describe, and a class name stands for one idea.

A comment that begins with "Of" leaves its subject to the line below it, and a docstring that begins with
"See" sends its reader away. A name that two classes share makes a reader look at the imports to learn
which one is meant.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("clockwright", "controller", "worker", "modelzoo", "traces", "experiments")

#: Names that several classes share, and why they may.
SHARED_NAMES = {
    "Policy": (
        "Clockwork's word for a scheduling policy and Clipper's for a selection policy; no file imports both"
    ),
    "Setting": "the numbers of one figure or measurement, varied in tests: the same idea in each of the files",
}


def files_of(*folders: str) -> list[Path]:
    """All Python files below the folders but the stubs, which protoc writes."""
    generated = ROOT / "clockwright" / "v1"
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(generated)
    )


PRODUCT = files_of(*PACKAGES)
EVERYTHING = [*PRODUCT, *files_of("tests", "proto", "docs")]


def comments_in(source: str) -> Iterator[tuple[int, str]]:
    """First line of every block of comments, without `#` and `#:`, and its line number.

    A comment behind code is a block of its own.
    """
    above = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = not token.line[:column].strip()
            if not alone or above != (line - 1, column):
                yield line, token.string.lstrip("#:").strip()
            above = (line, column) if alone else None


def docstrings_in(source: str) -> Iterator[tuple[int, str]]:
    """Every docstring in one line, and the line on which its module, class or function begins."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), " ".join(text.split())


def broken_prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint for every comment and docstring that does not name what it describes."""
    for line, text in comments_in(source):
        if re.match(r"Of\b", text):
            yield line, f"found the comment {text!r}, expected one that names its subject"
    for line, text in docstrings_in(source):
        if re.match(r"Of\b", text):
            yield line, f"found the docstring {text!r}, expected one that names its subject"
        if re.match(r"See\b", text):
            yield line, f"found the docstring {text!r}, expected @override and none, or a sentence"


def public_classes(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every class without a leading underscore."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, node.name


def places_by_class() -> dict[str, list[str]]:
    """Where each public class name of the product is defined."""
    places = defaultdict(list)
    for path in PRODUCT:
        for line, name in public_classes(path.read_text(encoding="utf-8")):
            places[name].append(f"{path.relative_to(ROOT)}:{line}")
    return places


def test_every_comment_and_docstring_names_what_it_describes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {complaint}"
        for path in EVERYTHING
        for line, complaint in broken_prose(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["", *found])


def test_a_class_name_stands_for_one_idea() -> None:
    found = [
        f"{places[0]}: found class {name} again at {', '.join(places[1:])}, expected a name of its own"
        for name, places in places_by_class().items()
        if len(places) > 1 and name not in SHARED_NAMES
    ]
    assert not found, "\n".join(["", *found])


def test_every_exception_among_the_class_names_is_still_needed() -> None:
    places = places_by_class()
    assert [name for name in SHARED_NAMES if len(places[name]) < 2] == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("# Of the worker.\nx = 1\n", 1),
        ("class A:\n    #: Of one row.\n    x: int\n", 2),
        ("x = 1  # Of the link.\n", 1),
        ("x = 1  # An end.\n# Of another block.\n", 2),
        ("x = 1  # An end.\ny = 2  # Of another.\n", 2),
        ('"""Of one link."""\n', 1),
        ('def f():\n    """Of all\n    rows."""\n', 1),
        ('def f():\n    """See `Device`."""\n', 1),
        ('class A:\n    """See the module. Satisfies `B`."""\n', 1),
    ],
)
def test_words_without_a_subject_are_found(source: str, line: int) -> None:
    assert [where for where, _ in broken_prose(source)] == [line]


@pytest.mark.parametrize(
    "source",
    [
        "# The rate is that\n# Of all workers.\n",
        "# Often empty.\n",
        '"""Seed of the source."""\n',
        'x = "# Of a string."\n',
        'def f():\n    """Mean of the rows. See `g`."""\n',
    ],
)
def test_sentences_with_a_subject_are_left_alone(source: str) -> None:
    assert list(broken_prose(source)) == []
