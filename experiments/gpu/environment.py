"""The environment of `make gpu`, and the wheels that it is made of on a host without a package registry.

    python experiments/gpu/environment.py make
    python experiments/gpu/environment.py wheels 3.12 numpy scipy torch

The standard library is enough, because this runs before anything is installed. `make` takes the torch of the Python that runs
it, where that was built for CUDA: `.venv-gpu` then holds what this Python lacks, and finds all else there. SYSTEM_TORCH=1 insists
on that torch, SYSTEM_TORCH=0 installs another. `wheels` downloads what the target lacks: what the project
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

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-gpu"
WHEELS = ROOT / "build" / "wheels"
_PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")


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

    def install(self) -> list[str]:
        """What pip is told."""
        words = [*_PIP, "install"]
        if self.wheels is not None:
            words += ["--no-index", "--find-links", str(self.wheels)]
        return [*words, "--editable", f"{ROOT}[{','.join(self.extras)}]"]


def plan(
    wanted: str, cuda_torch: str | None, *, onnxruntime: bool, card: bool, wheels: Path
) -> Plan:
    """Decide where torch and everything else come from.

    Args:
        wanted: SYSTEM_TORCH: "1", "0", or empty where the host decides.
        cuda_torch: the version of this Python's torch; None where it has none for CUDA.
        onnxruntime: whether this Python has an onnxruntime of either kind.
        card: whether there is an NVIDIA driver.
        wheels: the folder that `make gpu-wheels` fills.

    Raises:
        CannotError: there is nothing to run on; says what is missing.
    """
    if wanted != "0" and cuda_torch is not None:
        extras = ("gpu", "measure") if onnxruntime else ("gpu", "gpu-ort", "measure")
        return Plan(True, extras, wheels if any(wheels.glob("*.whl")) else None)
    if wanted == "1":
        raise CannotError(
            f"SYSTEM_TORCH=1: found no torch for CUDA in {sys.executable}; name a Python that has it: "
            "make gpu SYSTEM_TORCH=1 PYTHON=..."
        )
    # Asked before gigabytes are installed. The torch of a system is asked itself, afterwards.
    if not card:
        raise CannotError(
            "nothing was run: no NVIDIA driver on this machine (no /dev/nvidiactl), and no torch for CUDA "
            f"in {sys.executable}"
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
    command = [str(VENV / "bin" / "python"), *plan.install()]
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
    missing = re.search(r"No matching distribution found for (.+?)(?: \(from .*)?$", said, re.M)
    lines = [line for line in said.splitlines() if line.strip()] or ["pip says nothing"]
    what = f"{missing[1]} is missing" if missing else lines[-1].removeprefix("ERROR: ")
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


def fetch(python: str, has: Sequence[str]) -> None:
    """Download wheels for Linux on x86_64, and build the project's own from what is committed.

    Args:
        python: the target's version, as 3.12.
        has: the packages that the target has.
    """
    shutil.rmtree(WHEELS, ignore_errors=True)
    # Which C libraries a wheel may want: those up to that of RHEL 9.
    systems = [f"manylinux_2_{minor}" for minor in range(34, 4, -1)]
    systems += ["manylinux2014", "manylinux2010", "manylinux1"]
    words = [*_PIP, "download", "--only-binary", ":all:", "--dest", str(WHEELS)]
    words += ["--implementation", "cp", "--python-version", python]
    words += [
        word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)
    ]
    words += [word for system in systems for word in ("--platform", f"{system}_x86_64")]
    subprocess.run([sys.executable, *words, *lacking(has)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        head = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=BytesIO(head)) as archive:
            archive.extractall(folder, filter="data")
        words = [*_PIP, "wheel", "--no-deps", "--wheel-dir", str(WHEELS), folder]
        subprocess.run([sys.executable, *words], check=True)
    sizes = {path.name: path.stat().st_size for path in sorted(WHEELS.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    print(
        f"{sum(sizes.values()) / 2**20:6.1f} MiB in {WHEELS.relative_to(ROOT)}, for Python {python}"
    )


def lacking(has: Sequence[str]) -> list[str]:
    """Requirements of the project, of what `make gpu` runs and of their installation, less some."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = described["project"]
    extras = project["optional-dependencies"]
    every = [*described["build-system"]["requires"], *project["dependencies"]]
    every += [*extras["gpu"], *extras["cpu"], *extras["measure"]]
    # On Linux all markers hold.
    every = [each.partition(";")[0] for each in every]
    return [each for each in every if re.split(r"[\[<>=]", each)[0] not in has]


def _cuda_torch() -> str | None:
    try:
        import torch
    except (ImportError, OSError):
        return None
    return str(torch.__version__) if torch.version.cuda else None


def main(words: Sequence[str]) -> int:
    """Do what the module says; returns the exit code."""
    if words[:1] == ["wheels"]:
        fetch(words[1], words[2:])
        return 0
    card = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    onnxruntime = importlib.util.find_spec("onnxruntime") is not None
    wanted = os.environ.get("SYSTEM_TORCH", "")
    torch = None if wanted == "0" else _cuda_torch()
    try:
        make(plan(wanted, torch, onnxruntime=onnxruntime, card=card, wheels=WHEELS))
    except CannotError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
