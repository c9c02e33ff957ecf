"""The one command of all studies: `python -m experiments NAME [OPTIONS]`, or without a name their list.

A study is named as its file, with its room before it where two rooms have files of the same name: `fig5`, `clipper_fig5`,
`bench-live`. A hyphen and an underscore mean the same.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from clockwright.errors import ClockwrightError, ConfigError

#: What a room's studies have before the names of their files.
PREFIXES = {
    "clockwork_paper": "",
    "clipper_paper": "clipper_",
    "policies": "",
    "live": "",
    "gpu": "gpu-",
    "bench": "bench-",
    "demo": "",
    "faults": "",
    "study": "",
}
_HERE = Path(__file__).parent
# A declared study, or one with a command line of its own.
_RUNS = re.compile(r'^(STUDY = |if __name__ == "__main__":)', re.M)


def studies() -> dict[str, str]:
    """Every study's module, by the study's name."""
    found = {}
    for room, prefix in PREFIXES.items():
        for path in sorted((_HERE / room).rglob("*.py")):
            if _RUNS.search(path.read_text(encoding="utf-8")):
                package, stem = path.parent, path.stem
                # A package that runs is named as its folder.
                name = prefix + stem if stem != "__main__" else package.name
                parts = path.relative_to(_HERE).with_suffix("").parts
                # Benchmarks have hyphens, figures are called as their records.
                name = name.replace("_", "-") if "-" in prefix else name
                found[name] = ".".join((_HERE.name, *parts))
    return found


def main(arguments: list[str]) -> str | None:
    """Run the study that the command line names, with the options behind its name.

    Returns:
        None, or what was wrong with the name or the options.
    """
    found = studies()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(_lines(found)))
        return None
    name, *options = arguments
    asked = called(name)
    if asked is None:
        return f"study is {name!r}, expected one of {', '.join(found)}"
    try:
        if _is_declared(found[asked]):
            return import_module(found[asked]).STUDY.main(options) or None
        # It is a script, whose module may not be imported before it runs.
        sys.argv = [f"python -m experiments {asked}", *options]
        runpy.run_module(found[asked], run_name="__main__", alter_sys=True)
    except ClockwrightError as error:
        # What a script meets in its course keeps its traceback.
        if not _is_declared(found[asked]) and not isinstance(error, ConfigError):
            raise
        return f"error: {error}"
    return None


def called(*names: str) -> str | None:
    """Give the study that is called by the first of these names that one has."""
    spelt = {name.replace("-", "_"): name for name in studies()}
    return next(
        (spelt[plain] for name in names if (plain := name.replace("-", "_")) in spelt), None
    )


def declared() -> Iterator[Any]:
    """Every study that is a declaration."""
    for module in studies().values():
        if _is_declared(module):
            yield import_module(module).STUDY


def _is_declared(module: str) -> bool:
    return "\nSTUDY = " in _file_of(module).read_text(encoding="utf-8")


def _lines(found: dict[str, str]) -> Iterator[str]:
    for name, module in found.items():
        words = ast.get_docstring(ast.parse(_file_of(module).read_text(encoding="utf-8"))) or ""
        yield f"{name:24} {words.partition(chr(10))[0]}"


def _file_of(module: str) -> Path:
    return _HERE.parent / Path(*module.split(".")).with_suffix(".py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
