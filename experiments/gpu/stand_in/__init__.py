"""A CUDA runtime without a GPU, for tests: torch for CUDA runs on it, work and all (`runtime.cpp`).

It shows that memory, streams, events, captures and errors are used as CUDA wants it: right answers, no forbidden
call, nothing taken while serving. It knows few kernels, and neither cuDNN, cuBLAS nor NVML. No time that it
gives says anything about a GPU. Where `idle_environment` asks for it, what it does not know does nothing, so that whole networks
start and end, and no answer means anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_PROJECT = _HERE.parents[2]
_SOURCES = ("runtime.cpp", "kernels.cpp", "unsupported.c")
_VERSION = """
libcudart.so.13 { global: cuda*; __cuda*; cu[A-Z]*; standIn*; local: *; };
libcublas.so.13 { global: cublas*; };
"""


class MissingError(Exception):
    """The stand-in cannot be built here; says what is missing."""


def environment(python: Path) -> dict[str, str]:
    """What a child process needs in its environment for its torch to run on the stand-in.

    Args:
        python: the child's interpreter, next to whose torch the headers of CUDA lie.

    Raises:
        MissingError: there is no compiler, or no torch for CUDA 13.
    """
    folder = build(python)
    return {
        "LD_PRELOAD": str(folder / "libcudart.so.13"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": f"{_PROJECT}{os.pathsep}{folder}",
    }


def idle_environment(python: Path) -> dict[str, str]:
    """As `environment`, for networks whose kernels start and end and do nothing."""
    # cublasLt's answers would have to be made up.
    return {**environment(python), "STAND_IN_IDLE": "1", "DISABLE_ADDMM_CUDA_LT": "1"}


def without_cudnn() -> None:
    """Have convolutions take torch's own kernels: cuDNN starts on a GPU only. torch calls this when it is imported."""
    if os.environ.get("STAND_IN_IDLE"):
        import torch

        torch.backends.cudnn.enabled = False


def interpreters() -> list[Path]:
    """Those with a torch for CUDA: what CLOCKWRIGHT_CUDA_PYTHONS lists, or what `make gpu-rehearsal` has made."""
    listed = os.environ.get("CLOCKWRIGHT_CUDA_PYTHONS", "")
    if listed:
        return [Path(each) for each in listed.split(os.pathsep)]
    return sorted(_PROJECT.glob(".venv-gpu-torch*/bin/python"))


def rehearse(python: Path, name: str, *numbers: int, limit_s: float = 600) -> dict[str, Any]:
    """Run one of `rehearsal`'s parts under another interpreter; returns what it found.

    Raises:
        MissingError: there is no compiler, or no torch for CUDA 13.
        RuntimeError: the part failed; carries its last words.
    """
    begin = f"from {__name__}.rehearsal import main; main()"
    command = [str(python), "-c", begin, name, *map(str, numbers)]
    done = subprocess.run(
        command,
        env=os.environ | environment(python),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{name} on {python} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def build(python: Path) -> Path:
    """Compile the stand-in, unless it lies ready; returns the folder of its libraries.

    Raises:
        MissingError: there is no compiler, or no torch for CUDA 13.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise MissingError("no C++ compiler (g++, or what CXX names)")
    # Asked, because torch may be another environment's.
    ask = "import nvidia; print(*nvidia.__path__, sep='\\n')"
    done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    found = [Path(line) / "cu13" / "include" for line in done.stdout.splitlines()]
    headers = next(filter(Path.exists, found), None)
    if headers is None:
        raise MissingError(f"no torch for CUDA 13 next to {python}: nvidia/cu13/include is missing")
    digest = hashlib.sha256(str(headers).encode())
    for path in sorted(_HERE.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    digest.update((_PROJECT / "pyproject.toml").read_bytes())
    target = (
        Path(tempfile.gettempdir())
        / f"clockwright-stand-in-{os.getuid()}-{digest.hexdigest()[:16]}"
    )
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        (made / "crt").mkdir(parents=True)
        # The headers next to torch lack this one, whose macros say nothing to a plain compiler.
        (made / "crt" / "host_defines.h").touch()
        (made / "version.map").write_text(_VERSION)
        library = made / "libcudart.so.13"
        command = [
            compiler,
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            "-w",
            "-I",
            str(made),
            "-isystem",
            str(headers),
        ]
        command += [
            f"-Wl,-soname,{library.name}",
            f"-Wl,--version-script={made / 'version.map'}",
            "-o",
            str(library),
        ]
        for name in _SOURCES:
            command += ["-x", "c" if name.endswith(".c") else "c++", str(_HERE / name)]
        command += ["-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the stand-in does not compile:\n{done.stderr}")
        project = tomllib.loads((_PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
        # This tree's commands are found without an installation, which would be of one tree for all.
        _write_entry_points(made, "clockwright", project["project"]["entry-points"])
        backend = {"torch.backends": {"stand_in": f"{__name__}:without_cudnn"}}
        _write_entry_points(made, "clockwright-stand-in", backend)
        # One file of two names is loaded once, so that the runtime and the driver know the same streams.
        (made / "libcuda.so.1").symlink_to(library.name)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    return target


def _write_entry_points(made: Path, name: str, points_of: Mapping[str, Mapping[str, str]]) -> None:
    folder = made / f"{name.replace('-', '_')}-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    with (folder / "entry_points.txt").open("w") as file:
        for group, points in points_of.items():
            file.write(
                f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
            )
