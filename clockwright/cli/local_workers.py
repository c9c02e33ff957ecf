"""Worker processes that a command starts: `clockwright worker`."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from clockwright.cli.local_processes import LocalProcesses
from clockwright.cli.worker_settings import WorkerSettings
from clockwright.containers import CONFIG_FILE, read_container
from clockwright.errors import ModelError
from clockwright.settings import Flags

# The longest name that a controller takes.
_ID_MAX = 128


class LocalWorkers(LocalProcesses[WorkerSettings]):
    """Workers of this machine."""

    noun = "worker"

    def plan_containers(self, models_dir: Path, flags: Flags[WorkerSettings]) -> None:
        """Have `start` start those of the models that are code, with the same flags but their device."""
        for path in sorted(models_dir.glob(f"*/{CONFIG_FILE}")):
            folder = path.parent.resolve()
            try:
                spec, _ = read_container(folder)
            except ModelError:
                continue  # the controller says what is wrong with it
            own = flags.saying(device=f"container:{folder}", devices=1)
            for index in range(spec.replicas):
                self.plan(f"container-{index}-{folder.name}"[:_ID_MAX], own)

    @property
    def num_alive(self) -> int:
        """Workers of the processes that run: one for each device."""
        return sum(
            self._planned[name]["devices"]
            for name, watcher in self._watchers.items()
            if watcher.is_alive()
        )

    @override
    def _arguments(self, controller: str, name: str) -> list[str]:
        return [
            *("worker", "--controller", controller, "--id", name),
            *self._planned[name].spell(),
        ]

    @override
    def _needed(self) -> set[str]:
        common = {
            name
            for name, flags in self._planned.items()
            if not flags["device"].startswith("container:")
        }
        return common or set(self._planned)
