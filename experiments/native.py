"""Compiles the simulator's inner loop and both cores with mypyc, for runs of hours (`make native`).

Never needed: the results are the same to the bit, in about a third of the time. What is compiled is a
copy of the sources in `build/native`, so that no stale binary ever stands in front of a source::

    PYTHONPATH=build/native .venv/bin/python -P -m experiments fig8
    PYTHONPATH=build/native .venv/bin/python -P -m clockwright.cli up --models MODELS

Before that, the copy's dataclasses get their `__init__` spelled out. mypyc leaves to Python what the
decorator makes, and to build a dozen records per request the slow way costs a quarter of the time.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.simulator import loop

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build/native"
#: With these variables a process runs what was compiled: nothing of the working folder comes before it.
ENVIRONMENT = {"PYTHONPATH": str(TARGET), "PYTHONSAFEPATH": "1"}

PACKAGES = ("clockwright", "controller", "worker", "modelzoo", "traces", "experiments")

# Modules that run per request. The core's other modules look at all of it, for people and for tests.
_CORE = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "controller/core").rglob("*.py")
    if path.stem not in ("__init__", "invariants", "statistics")
)
COMPILED = (
    "clockwright/wire/actions.py",
    *_CORE,
    "controller/ledger.py",
    # What carries requests live, as far as it compiles: not modules of protocols, which would take nothing but
    # what is compiled, nor those of msgspec's records.
    *(f"clockwright/wire/{name}.py" for name in ("bulk", "clock_sync", "frame_socket", "frames")),
    "controller/runtime.py",
    "controller/telemetry/tables.py",
    *(
        f"controller/links/{name}.py"
        for name in ("held_tensors", "slabs", "worker_actions", "worker_link")
    ),
    "controller/front/admission/limits.py",
    "controller/front/http/arrival_clock.py",
    "controller/front/http/http2.py",
    "controller/front/services/templates.py",
    *(
        f"controller/front/remote/{name}.py"
        for name in ("descriptions", "front_asks", "front_link", "front_memory")
    ),
    "worker/core/lanes.py",
    "worker/core/io_pool.py",
    "worker/core/pages.py",
    *(
        f"experiments/simulator/{name}.py"
        for name in ("clients", "controller", "loop", "network", "summary", "worker")
    ),
)


def is_compiled() -> bool:
    """Whether this process runs what was compiled."""
    return not str(loop.__file__).endswith(".py")


def spell_out(source: str) -> str:
    """Give every plain dataclass of a module the `__init__` that its decorator would make.

    Left as they are: frozen ones, derived ones, and those with a `__post_init__` or a field that is
    more than a default.
    """
    module = ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            _spell_out(node)
    return ast.unparse(module) + "\n"


def _spell_out(node: ast.ClassDef) -> None:
    decorator = next(
        (
            call
            for call in node.decorator_list
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclass"
        ),
        None,
    )
    if decorator is None or node.bases:
        return
    options = {option.arg: ast.literal_eval(option.value) for option in decorator.keywords}
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    if options.get("frozen") or "init" in options or methods & {"__init__", "__post_init__"}:
        return
    parameters, body = [], []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign):
            continue
        name, annotation = ast.unparse(item.target), ast.unparse(item.annotation)
        value, default = name, ""
        if isinstance(item.value, ast.Call) and ast.unparse(item.value.func) == "field":
            given = {option.arg: option.value for option in item.value.keywords}
            if set(given) != {"default_factory"}:
                return
            value = f"({ast.unparse(given['default_factory'])})() if {name} is None else {name}"
            annotation, default = f"{annotation} | None", " = None"
        elif item.value is not None:
            default = f" = {ast.unparse(item.value)}"
        parameters.append(f"{name}: {annotation}{default}")
        body.append(f"    self.{name} = {value}")
    if not body:
        return
    star = "*, " if options.get("kw_only") else ""
    lines = [f"def __init__(self, {star}{', '.join(parameters)}) -> None:", *body]
    decorator.keywords.append(ast.keyword("init", ast.Constant(False)))
    node.body += ast.parse("\n".join(lines)).body


def build(target: Path = TARGET, *, optimise: int = 3) -> None:
    """Copy, spell out, compile.

    Args:
        target: what is there is deleted first.
        optimise: level of the C compiler's work.
    """
    shutil.rmtree(target, ignore_errors=True)
    for package in PACKAGES:
        leave = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / package, target / package, ignore=leave)
    # Results measured with it belong to the project.
    results = target / "experiments/results"
    results.symlink_to(os.path.relpath(ROOT / "experiments/results", results.parent))
    for name in COMPILED:
        path = target / name
        path.write_text(spell_out(path.read_text(encoding="utf-8")), encoding="utf-8")
    command = [
        sys.executable,
        str(Path(sys.executable).parent / "mypyc"),
        "--config-file=",
        "--ignore-missing-imports",
        "--explicit-package-bases",
        *COMPILED,
    ]
    environment = {**os.environ, "MYPYC_OPT_LEVEL": str(optimise)}
    environment.pop("PYTHONPATH", None)
    log = target / "build.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, cwd=target, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        print(*log.read_text(encoding="utf-8").splitlines()[-20:], sep="\n", file=sys.stderr)
        sys.exit(f"mypyc failed; all it said is in {log}")
    where = os.path.relpath(target, ROOT)
    print(f"compiled {len(COMPILED)} modules: PYTHONPATH={where} python -P ...")


if __name__ == "__main__":
    build()
