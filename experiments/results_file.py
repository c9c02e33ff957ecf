"""Where every benchmark and experiment leaves its figures: `experiments/results/NAME.json`.

One form for all (architecture.md section 10), so that a figure quoted anywhere can be traced to the
command, commit and machine that made it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clockwright import __version__

RESULTS = Path(__file__).resolve().parent / "results"

_PACKAGES = ("grpcio", "protobuf", "numpy", "uvloop", "onnxruntime", "onnxruntime-gpu", "torch")


def write_results(
    name: str,
    figures: Mapping[str, float],
    *,
    command: str,
    seeds: Sequence[int] = (),
    extra: Mapping[str, Any] | None = None,
    directory: Path = RESULTS,
) -> Path:
    """Write the figures of one run, replacing those of the last.

    Args:
        name: name of the benchmark, and of the file.
        figures: key to number; units are in the key (`_us`, `_rps`, `_ratio`).
        command: repeats the run when typed at the project's root.
        seeds: every seed that was drawn from.
        extra: anything else worth keeping (settings, spread), under its own keys.
        directory: folder of the file; the project's own results unless a test says otherwise.

    Returns:
        The file written.

    Raises:
        ValueError: a figure is not a finite number; JSON has no word for it.
    """
    record = {
        "name": name,
        **_origin(command),
        "seeds": list(seeds),
        "figures": _finite(name, figures),
        **(extra or {}),
    }
    return _write(directory / f"{name}.json", record)


def add_results(
    name: str,
    figures: Mapping[str, float],
    *,
    part: str,
    command: str,
    extra: Mapping[str, Any] | None = None,
    directory: Path = RESULTS,
) -> Path:
    """Write figures of a separate run next to the recorded ones, which stay; those of its part's last run go.

    Args:
        name: name of the benchmark; its record is begun if it is missing.
        figures: as for `write_results`; replace those of the same keys.
        part: the record keeps under this key where these figures come from.
        command: the command line that repeats them.
        extra: anything else worth keeping, in addition to where they come from.
        directory: as for `write_results`.

    Returns:
        The file written.

    Raises:
        ValueError: a figure is not a finite number.
    """
    target = directory / f"{name}.json"
    if not target.exists():
        write_results(name, {}, command=command, directory=directory)
    record = json.loads(target.read_text(encoding="utf-8"))
    others = [value for key, value in record.items() if key != part and isinstance(value, dict)]
    kept = {key for other in others for key in other.get("keys", ())}
    for key in set(record.get(part, {}).get("keys", ())) - kept:
        record["figures"].pop(key, None)
    record["figures"] |= _finite(name, figures)
    record[part] = {"keys": list(figures), **_origin(command), **(extra or {})}
    return _write(target, record)


def _finite(name: str, figures: Mapping[str, float]) -> dict[str, float]:
    for key, figure in figures.items():
        if not math.isfinite(figure):
            raise ValueError(f"figure {key} of {name} is {figure}, expected a finite number")
    return dict(figures)


def _origin(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": _commit(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": _versions(),
    }


def _write(target: Path, record: Mapping[str, Any]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


def _commit() -> str:
    """Name the commit the figures were made from; `+` when tracked files differ from it.

    Results do not count: a figure's table and picture are written before this is asked. A copy without history has
    the commit of CLOCKWRIGHT_COMMIT.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        others = (":(top)", f":(exclude){RESULTS.resolve()}")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", *others)
        return head + "+" * bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("CLOCKWRIGHT_COMMIT") or "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, check=True, capture_output=True, text=True
    ).stdout.strip()


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = (
            next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
        )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "num_cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _versions() -> dict[str, str]:
    versions = {"clockwright": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
