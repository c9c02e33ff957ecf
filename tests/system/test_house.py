"""Who imports whom, and how large classes are, read off the syntax trees of all product files.

Every import counts: those inside functions and those for type checkers too. What stands below knows
nothing of what stands above it, so that each room is read, tested and changed without the ones above.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: From the roof down. Two packages on one floor do not know each other.
FLOORS = (
    ("experiments",),
    ("traces",),
    ("controller", "engines", "worker"),
    ("modelzoo",),
    ("clockwright",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

#: Packages whose folders are rooms too.
DIVIDED = ("controller", "engines", "worker", "experiments")

#: A class has more lines or attributes than these only for a reason.
MAX_LINES = 450
MAX_ATTRIBUTES = 25
REASONS = {
    "Core": "the worker's one state: the end of a step changes lanes, pages and IO slots together",
    "Http2Connection": "the one state machine of a connection: every frame may change all of it",
}

#: Folders that are read first have no more entries than these.
MOST_ENTRIES = {"controller": 14, "controller/front": 7}

#: What imports what, by name.
Arrows = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """All product files by the name under which they are imported."""
    found = {}
    for package in FLOOR_OF:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(name: str) -> Iterator[str]:
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(filter(None, [*parents[: len(parents) + 1 - node.level], base]))
            for alias in node.names:
                # `from package import name` names a file or something that the package defines.
                whole = f"{base}.{alias.name}"
                yield whole if whole in MODULES else base


@cache  # Reading takes seconds, so whoever only collects tests does without.
def arrows_between_files() -> dict[str, set[str]]:
    return {name: {other for other in imports_of(name) if other in MODULES} for name in MODULES}


def folder_of(name: str) -> str:
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


HAVE_FOLDERS = {folder_of(name).rpartition(".")[0] for name in MODULES}


def room_of(name: str) -> str:
    """A package, or in a divided one a folder; a file beside such folders is a room of its own."""
    package = name.split(".")[0]
    if package not in DIVIDED:
        return package
    folder = folder_of(name)
    return name if folder in HAVE_FOLDERS else folder


def arrows_between_rooms() -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = {room_of(name): set() for name in MODULES}
    for name, others in arrows_between_files().items():
        arrows[room_of(name)] |= {room_of(other) for other in others} - {room_of(name)}
    return arrows


def circle(arrows: Arrows) -> list[str]:
    """One of the circles, or nothing."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        # `TopologicalSorter` lists each before what imports it.
        return found[::-1]
    return []


def arrows_upward(arrows: Arrows) -> list[tuple[str, str]]:
    def upward(name: str, other: str) -> bool:
        package, imported = name.split(".")[0], other.split(".")[0]
        return package != imported and FLOOR_OF[imported] <= FLOOR_OF[package]

    return [(name, other) for name in arrows for other in arrows[name] if upward(name, other)]


def through(circle: Iterable[str], arrows: Arrows) -> list[tuple[str, str]]:
    """The files whose imports make up a circle of rooms."""
    rooms = list(circle)
    steps = set(pairwise(rooms))
    return [
        (name, other)
        for name in arrows
        for other in arrows[name]
        if (room_of(name), room_of(other)) in steps
    ]


def test_no_package_imports_one_above_it_or_beside_it() -> None:
    assert arrows_upward(arrows_between_files()) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(arrows_between_files()) == []


def test_no_scripts_of_a_page_import_each_other_in_a_circle() -> None:
    scripts = [*(ROOT / "controller").rglob("*.js")]
    imported = re.compile(r"""^\s*(?:import|export)\b.*?\bfrom\s+"\./([^"]+)";""", re.MULTILINE)
    arrows = {path.name: set(imported.findall(path.read_text())) for path in scripts}
    assert any(arrows.values())
    assert circle(arrows) == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    found = circle(arrows_between_rooms())
    assert found == [], through(found, arrows_between_files())


@pytest.mark.parametrize(("folder", "most"), MOST_ENTRIES.items())
def test_a_floor_is_seen_at_a_glance(folder: str, most: int) -> None:
    entries = {path.name for path in (ROOT / folder).iterdir()} - {"__init__.py", "__pycache__"}
    assert len(entries) <= most, sorted(entries)


# --- the size of classes ---------------------------------------------------------------------------


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What `__init__` assigns to `self`. The fields of a record are no state that methods share."""
    return {
        target.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def large_classes() -> dict[str, tuple[int, int]]:
    """Lines and attributes of each class of the product that has too many."""
    found = {}
    for name, path in MODULES.items():
        if name.startswith(("experiments.", "clockwright.v1.")):
            continue
        for node in ast.walk(ast.parse(path.read_text(), path)):
            if isinstance(node, ast.ClassDef):
                size = (node.end_lineno or 0) - node.lineno + 1, len(attributes_of(node))
                if size[0] > MAX_LINES or size[1] > MAX_ATTRIBUTES:
                    found[node.name] = size
    return found


def test_every_class_is_small_enough_to_be_read_at_once_or_has_a_reason() -> None:
    found = large_classes()
    assert found.keys() - REASONS.keys() == set(), found
    assert REASONS.keys() - found.keys() == set(), "smaller now: take them off the list"


# --- the reading itself ---------------------------------------------------------------------------


def test_a_lazy_import_and_one_for_type_checkers_are_seen() -> None:
    # Both stand there on purpose: gRPC would slow the command's help down.
    files = arrows_between_files()
    assert "clockwright.client.operator" in files["clockwright.cli.flags"]
    assert "controller.core" in files["controller.process.cli"]


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ({"traces.a": {"controller.b"}, "controller.b": {"clockwright.c"}}, []),
        ({"controller.a": {"worker.b"}}, [("controller.a", "worker.b")]),
        ({"clockwright.a": {"experiments.b"}}, [("clockwright.a", "experiments.b")]),
    ],
)
def test_an_arrow_upward_or_sideways_is_found(
    arrows: dict[str, set[str]], found: list[tuple[str, str]]
) -> None:
    assert arrows_upward(arrows) == found


def test_a_circle_is_found_in_the_order_of_its_imports() -> None:
    found = circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert len(found) == 4
    assert "".join(found) in ("abca", "bcab", "cabc")
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []
