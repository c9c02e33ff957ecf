"""Finds a Python that has Ray, and runs a program of this package with it.

The program sees copies of the files that are meant for it, and nothing else of ours: on its path, our packages' versions
of protobuf and gRPC would take the place of Ray's.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clockwright.errors import ConfigError

#: Names a Python that has Ray.
VARIABLE = "CLOCKWRIGHT_RAY_PYTHON"
#: What the tests and records were made with.
VERSION = "2.60"

_CONNECT_S = 5.0

_HERE = Path(__file__).parent
_CARRIED = (
    *("../__init__.py", "__init__.py", "calls.py", "keeper.py", "launch.py"),
    *("reconcile.py", "supervisor.py"),
)
_HELP = (
    f'make one: python3.11 -m venv rayenv && rayenv/bin/pip install "ray=={VERSION}.*"; then say --ray-python '
    f"rayenv/bin/python or set {VARIABLE}. It may not be the environment of clockwright, as Ray needs other "
    "versions of protobuf and gRPC"
)


def ray_python(said: Path | None = None) -> Path:
    """Find a Python that has Ray: the one that is said, that of the environment, or the one of `ray` on the path.

    Raises ConfigError if none was found; says how to make one.
    """
    found = said or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if found is None and (command := shutil.which("ray")):
        found = Path(command).with_name("python")
    if found is None:
        raise ConfigError(f"found no Python with Ray, expected one; {_HELP}")
    # A relative path would be looked for where the program runs.
    found = Path(os.path.abspath(found))
    site = found.parent.parent / "lib"
    if not os.access(found, os.X_OK) or not any(site.glob("python3.*/site-packages/ray")):
        raise ConfigError(f"found no Ray at {found}, expected a Python that has it; {_HELP}")
    return found


def check_cluster(address: str) -> None:
    """Check that something listens at a cluster's address: Ray itself would try for two minutes.

    Raises ConfigError if nothing does, or the address is none.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--ray is {address!r}, expected HOST:PORT, or auto on a node of the cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"found no Ray cluster at {address} ({error}), expected one; `ray start --head` starts it"
        ) from None


@contextmanager
def inside(python: Path, module: str, *, shown: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a module of this package in Ray's environment, with a pipe to its standard input.

    What it prints is for people if `shown`; otherwise standard output is a pipe, too.
    """
    with tempfile.TemporaryDirectory(prefix="clockwright-ray-") as folder:
        target = Path(folder) / "engines" / "ray"
        target.mkdir(parents=True)
        for name in _CARRIED:
            shutil.copyfile(_HERE / name, target / name)
        process = subprocess.Popen(
            [python, "-m", f"engines.ray.{module}"],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=None if shown else subprocess.PIPE,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()
