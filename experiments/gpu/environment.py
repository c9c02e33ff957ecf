"""The environment of `make gpu`, and the wheels that it is made of on a host without a package registry.

    python experiments/gpu/environment.py make
    python experiments/gpu/environment.py wheels 3.12 numpy scipy torch

The standard library is enough, because this runs before anything is installed. `make` takes the torch of the Python that runs
it, where that is new enough and was built for CUDA 13: `.venv-gpu` then holds what this Python lacks, and finds all else there.
SYSTEM_TORCH=1 insists on that torch, SYSTEM_TORCH=0 installs another. `wheels` downloads what the target lacks: what the project
needs less the packages that are named.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-gpu"
WHEELS = ROOT / "build" / "wheels"
#: Versions of Python that wheels are fetched for: those of pyproject.toml.
PYTHONS = ("3.11", "3.12", "3.13")
_PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
# As in the extra `gpu`; the CUDA is that of cuda-bindings there.
_TORCH_MIN, _CUDA = (2, 11), 13
_NO_TORCH = "no torch"
_FIT = f"torch {_TORCH_MIN[0]}.{_TORCH_MIN[1]} or later for CUDA {_CUDA}"


class CannotError(Exception):
    """Why there can be no environment, and what helps, in one sentence."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the environment is made."""

    #: Whether torch is that of the Python which makes it.
    system: bool
    extras: tuple[str, ...]
    #: The folder that packages come from; None: a registry.
    wheels: Path | None

    def installs(self) -> list[list[str]]:
        """What pip is told, one command after the other."""
        words = [*_PIP, "install"]
        if self.wheels is not None:
            words += ["--no-index", "--find-links", str(self.wheels)]
        project = ["--editable", f"{ROOT}[{','.join(self.extras)}]"]
        # First what builds the project: in an environment that pip makes for the build alone, the system's setuptools
        # would come before the one that pip puts there.
        return [
            [*words, *_described()["build-system"]["requires"]],
            [*words, "--no-build-isolation", *project],
        ]


def plan(wanted: str, unfit: str, *, onnxruntime: bool, card: bool, wheels: Path) -> Plan:
    """Decide where torch and everything else come from.

    Args:
        wanted: SYSTEM_TORCH: "1", "0", or empty where the host decides.
        unfit: why this Python's torch cannot be used; empty where it can.
        onnxruntime: whether this Python has an onnxruntime of either kind.
        card: whether there is an NVIDIA driver.
        wheels: the folder that `make gpu-wheels` fills.

    Raises:
        CannotError: there is nothing to run on, or SYSTEM_TORCH is another word; says what is missing.
    """
    if wanted not in ("", "0", "1"):
        raise CannotError(
            f"SYSTEM_TORCH is {wanted!r}, expected 1 (this Python's torch), 0 (another) or nothing (this host decides)"
        )
    if wanted != "0" and not unfit:
        place = wheels if any(wheels.glob("*.whl")) else None
        # `make gpu-wheels` brings the small onnxruntime, which compiles models too.
        small = place is not None and not any(wheels.glob("onnxruntime_gpu-*"))
        kind = () if onnxruntime else ("cpu",) if small else ("gpu-ort",)
        return Plan(True, ("gpu", *kind, "measure"), place)
    if wanted == "1":
        raise CannotError(
            f"SYSTEM_TORCH=1: found {unfit} in {sys.executable}, expected {_FIT}; name a Python that has it: "
            "make gpu SYSTEM_TORCH=1 PYTHON=..."
        )
    # Asked before gigabytes are installed. The torch of a system is asked itself, afterwards.
    if not card:
        own = (
            "SYSTEM_TORCH=0"
            if wanted == "0"
            else f"found {unfit} in {sys.executable}, expected {_FIT}"
        )
        raise CannotError(
            f"nothing was run: no NVIDIA driver on this machine (no /dev/nvidiactl), and {own}"
        )
    return Plan(False, ("gpu", "gpu-ort", "tools"), None)


def make(plan: Plan) -> None:
    """Make the environment, unless there is one of this plan that is newer than pyproject.toml.

    Raises:
        CannotError: something is missing; says what, and what helps.
    """
    stamp, written = VENV / ".installed", f"{sys.executable} {plan}\n"
    wanted_s = (ROOT / "pyproject.toml").stat().st_mtime
    if stamp.exists() and stamp.read_text() == written and stamp.stat().st_mtime >= wanted_s:
        return
    print(f"installing into {VENV.name} (once)", flush=True)
    # A system's pip installs here too, so that nothing is asked of ensurepip, which Debian keeps in a package of its own.
    with_pip = not plan.system or importlib.util.find_spec("pip") is None
    try:
        venv.EnvBuilder(clear=True, with_pip=with_pip, symlinks=True).create(VENV)
    except subprocess.CalledProcessError:
        raise CannotError(
            f"{sys.executable} has no pip, and no ensurepip to make one; install pip into it"
        ) from None
    if plan.system:
        # Not `system_site_packages`: where this Python is a virtual environment itself, that means another's.
        folder = next(VENV.glob("lib/python*/site-packages"))
        places = [
            each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")
        ]
        lines = [f"import site; site.addsitedir({each!r})\n" for each in places]
        (folder / "system.pth").write_text("".join(lines))
    for words in plan.installs():
        command = [str(VENV / "bin" / "python"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotError(complaint(plan, done.stderr))
    stamp.write_text(written)


def complaint(plan: Plan, said: str) -> str:
    """Put pip's complaint into one sentence.

    Args:
        plan: what was tried.
        said: pip's errors.
    """
    what = reason(said)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = "from the package registry" if plan.wheels is None else f"from {plan.wheels}"
    helps = (
        f"run `make gpu-wheels TARGET_PYTHON={version}` in a clone on a machine that reaches a registry, "
        f"and bring its {WHEELS.relative_to(ROOT)} here"
    )
    if plan.wheels is not None:
        helps += "; HAS there names what it leaves out, which has to be here"
    elif not plan.system:
        helps = f"without a registry, name a Python that has torch for CUDA (make gpu PYTHON=...) and {helps}"
    return f"cannot install {place}: {what}; {helps}"


def reason(said: str) -> str:
    """Find the reason among the errors of pip or another program."""
    missing = re.search(r"No matching distribution found for (.+?)(?: \(from .*)?$", said, re.M)
    if missing:
        return f"{missing[1]} is missing"
    # The last error, of a build's output too. What pip says around it only says that the build failed.
    errors = re.findall(r"^\W*((?:[\w.]*Error|error|ERROR|fatal): .+)$", said, re.M)
    errors = [
        each for each in errors if "subprocess-exited" not in each and "Failed to build" not in each
    ]
    lines = errors or [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "it says nothing"


def fetch(python: str, has: Sequence[str]) -> None:
    """Download wheels for Linux on x86_64, and build the project's own from what is committed.

    Earlier wheels stay where this fails.

    Args:
        python: the target's version, as 3.12.
        has: the packages that the target has.

    Raises:
        CannotError: the version is another, or a program failed; says what.
    """
    if python not in PYTHONS:
        raise CannotError(f"TARGET_PYTHON is {python!r}, expected one of {', '.join(PYTHONS)}")
    WHEELS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEELS.parent) as folder:
        new = Path(folder) / "wheels"
        _collect(new, python, has)
        shutil.rmtree(WHEELS, ignore_errors=True)
        new.rename(WHEELS)
    sizes = {path.name: path.stat().st_size for path in sorted(WHEELS.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    print(
        f"{sum(sizes.values()) / 2**20:6.1f} MiB in {WHEELS.relative_to(ROOT)}, for Python {python}"
    )


def _collect(wheels: Path, python: str, has: Sequence[str]) -> None:
    # Which C libraries a wheel may want: those up to that of RHEL 9.
    systems = [f"manylinux_2_{minor}" for minor in range(34, 4, -1)]
    systems += ["manylinux2014", "manylinux2010", "manylinux1"]
    words = [*_PIP, "download", "--only-binary", ":all:", "--dest", str(wheels)]
    words += ["--implementation", "cp", "--python-version", python]
    words += [
        word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)
    ]
    words += [word for system in systems for word in ("--platform", f"{system}_x86_64")]
    _run(sys.executable, *words, *lacking(has))
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(_run("git", "archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        _run(sys.executable, *_PIP, "wheel", "--no-deps", "--wheel-dir", str(wheels), folder)


def _run(*command: str) -> bytes:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise CannotError(f"found no {command[0]} on this machine") from None
    except subprocess.CalledProcessError as error:
        name = "git" if command[0] == "git" else "pip"
        raise CannotError(f"{name} failed: {reason(error.stderr.decode())}") from None


def _described() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def lacking(has: Sequence[str]) -> list[str]:
    """Requirements of the project, of what `make gpu` runs and of their installation, less some."""
    described = _described()
    project = described["project"]
    extras = project["optional-dependencies"]
    every = [*described["build-system"]["requires"], *project["dependencies"]]
    every += [*extras["gpu"], *extras["cpu"], *extras["measure"]]
    # On Linux all markers hold.
    every = [each.partition(";")[0] for each in every]
    # The large onnxruntime has all of the small one, which must not be next to it.
    has = [*has, "onnxruntime"] if "onnxruntime-gpu" in has else has
    return [each for each in every if re.split(r"[\[<>=]", each)[0] not in has]


def _unfit() -> str:
    try:
        import torch
    except (ImportError, OSError):
        return _NO_TORCH
    return unfit(str(torch.__version__), torch.version.cuda)


def unfit(version: str, cuda: str | None) -> str:
    """Say what a torch is, where the project cannot use it.

    Args:
        version: the torch's.
        cuda: the version of CUDA that it was built for; None: it was built without.

    Returns:
        Its version and CUDA; empty where both will do.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    new = found is not None and (int(found[1]), int(found[2])) >= _TORCH_MIN
    if new and cuda is not None and cuda.partition(".")[0] == str(_CUDA):
        return ""
    return f"torch {version} {f'for CUDA {cuda}' if cuda else 'without CUDA'}"


def main(words: Sequence[str]) -> int:
    """Do what the module says; returns the exit code."""
    target = "make gpu-wheels" if words[:1] == ["wheels"] else "make gpu"
    card = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    onnxruntime = importlib.util.find_spec("onnxruntime") is not None
    wanted = os.environ.get("SYSTEM_TORCH", "")
    try:
        if words[:1] == ["wheels"]:
            fetch(words[1], words[2:])
        else:
            torch = _NO_TORCH if wanted == "0" else _unfit()
            chosen = plan(wanted, torch, onnxruntime=onnxruntime, card=card, wheels=WHEELS)
            if torch not in ("", _NO_TORCH):
                print(f"left alone: {torch} in {sys.executable}, expected {_FIT}", flush=True)
            make(chosen)
    except CannotError as error:
        print(f"{target}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
