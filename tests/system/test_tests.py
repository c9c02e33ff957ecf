"""Tests of the cores go by the front door, and tests share through `tests.kit` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Tests of pure code, all of which can be asked in public: what they drive, and with what they drive it.
#: Those of shells may look behind a door where an operating system or a card cannot be asked.
OF_CORES = (
    *(ROOT / "tests" / "core").rglob("*.py"),
    *(ROOT / "tests" / "worker").glob("test_lanes*.py"),
    *(ROOT / "tests" / "selection").glob("test_p*.py"),
    ROOT / "tests" / "controller" / "test_ledger.py",
    *(ROOT / "tests" / "kit").rglob("*.py"),
    ROOT / "tests" / "conftest.py",
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes(source: str) -> Iterator[tuple[int, str]]:
    """Lines that reach for a private attribute of something other than the class they stand in."""
    own = ("self", "cls")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in own:
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, f"found {ast.unparse(node)}, expected something public"
            case ast.ImportFrom(names=names):
                for alias in names:
                    if is_private(alias.name):
                        yield node.lineno, f"found {alias.name} imported, expected something public"
            case ast.Call(func=ast.Name(id=("getattr" | "setattr") as how), args=[_, *rest]):
                match rest:
                    case [ast.Constant(value=str(name)), *_] if is_private(name):
                        yield node.lineno, f"found {how} of {name}, expected something public"
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, *rest]):
                match rest:
                    case [ast.Constant(value=str(name)), *_] if is_private(name):
                        yield node.lineno, f"found setattr of {name}, expected something public"


def imports_of_tests(source: str) -> Iterator[tuple[int, str]]:
    """Lines that import something from a folder of tests other than the kit."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases, lineno=line):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=module, level=level, lineno=line):
                names = ["." * level + (module or "")]
            case _:
                continue
        for name in names:
            if name.startswith((".", "tests")) and not f"{name}.".startswith("tests.kit."):
                yield line, f"found {name} imported, expected what is shared in tests.kit"


def test_no_test_of_a_core_reaches_for_what_is_private() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in OF_CORES
        for line, what in private_attributes(path.read_text())
    ] == []


def test_tests_import_nothing_from_each_other() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, what in imports_of_tests(path.read_text())
    ] == []


# --- the reading itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("self._x\ncls._x\nx.__doc__\nx.y", []),
        ("a\nx._y", [2]),
        ("self.x._y.z", [1]),
        ("from a import b, _c", [1]),
        ("getattr(x, '_y')", [1]),
        ("patch.setattr(x, '_y', 1)", [1]),
        ("patch.setattr(x, 'y', 1)", []),
    ],
)
def test_a_private_attribute_is_found(source: str, lines: list[int]) -> None:
    assert [line for line, _ in private_attributes(source)] == lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tests.kit.chaos import Chaos", False),
        ("from tests.core.test_chaos import Chaos", True),
        ("from .test_chaos import Chaos", True),
        ("import tests.core.test_chaos", True),
        ("import pytest", False),
    ],
)
def test_an_import_of_a_test_is_found(source: str, found: bool) -> None:
    assert bool(list(imports_of_tests(source))) is found
