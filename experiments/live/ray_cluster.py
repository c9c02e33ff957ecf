"""A Ray cluster on this machine, and a deployment in it, as studies and tests use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.ray.environment import VARIABLE, ray_python

_PROGRAM = Path(__file__).with_name("ray_nodes.py")


class RayCluster:
    """A head and nodes, each with raylet and workers of its own; see `ray_nodes`."""

    def __init__(self, python: Path, process: subprocess.Popen[str]) -> None:
        self.python = python
        #: Ray's names of nodes, by ours.
        self.nodes: dict[str, str] = {}
        self._process = process
        # Fronts and controllers are asked to be on the head, which no study removes.
        head = {"num_cpus": 2, "resources": {"head": 1}}
        self.address: str = self._tell(head=head)["address"]

    def add(self, name: str, **resources: float) -> None:
        """Add a node with some resources."""
        room = {"num_cpus": 1, "resources": resources}
        self.nodes[name] = self._tell(do="add", name=name, room=room)

    def remove(self, name: str) -> None:
        """Remove a node as a machine is lost: nothing there is told."""
        self._tell(do="remove", name=name)
        del self.nodes[name]

    def kill(self, actor: str) -> None:
        """Kill an actor's process, which is not the one that it supervises."""
        self._tell(do="kill", name=actor)

    def said(self, actor: str) -> dict[str, Any]:
        """What an actor says of itself, or of all, if it is the keeper."""
        said: dict[str, Any] = self._tell(do="said", name=actor)
        return said

    def clockwright(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `clockwright up --ray` with further arguments, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "clockwright.cli", "up", "--ray", self.address, *arguments],
            env={**os.environ, VARIABLE: str(self.python)},
            capture_output=True,
            text=True,
            check=False,
        )

    def _tell(self, **order: Any) -> Any:  # noqa: ANN401  JSON
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the Ray cluster ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A head; nodes are added.

    Raises:
        ConfigError: there is no Ray; says how to get it.
    """
    python = ray_python()
    with subprocess.Popen(
        # Not our packages, and not the modules of this folder.
        [python, "-I", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield RayCluster(python, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def kinds_file(folder: Path, kinds: Mapping[str, Mapping[str, Any]], *, models: Path) -> Path:
    """Write what is wanted: one controller, two fronts, and kinds of modelled devices.

    Args:
        folder: where it is written, and what the processes write.
        kinds: by name, the duration of a batch (`device`), `min` and `max`.
        models: their folder.
    """
    # The node where controller, fronts and keeper are.
    on_head = "resources = { head = 0.1 }"
    quiet = '"--no-http"'
    lines = [
        f'models = "{models}"',
        f'environment = {{ PYTHONPATH = "{os.environ.get("PYTHONPATH", "")}" }}',
        f"keeper = {{ {on_head} }}",
        "[controllers]",
        f'port = 0\ncpus = 0.1\n{on_head}\narguments = [{quiet}, "--no-metrics", "--state={folder}/state"]',
        "[fronts]",
        f"port = 0\nnumber = 2\ncpus = 0.1\n{on_head}\narguments = [{quiet}]",
    ]
    for name, kind in kinds.items():
        lines += [
            "[[kinds]]",
            f'name = "{name}"\nmin = {kind["min"]}\nmax = {kind["max"]}\ncpus = 0.1',
            f'arguments = ["--device=modelled:{kind["device"]}", "--pages=4", "--arena-mib=16", '
            f'"--cache-dir={folder}/cache"]',
        ]
    path = folder / "kinds.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
