"""Worker processes that a command starts beside itself: by name, `clockwright worker`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from clockwright.cli.flags import WorkerFlags, spell
from clockwright.cli.local_processes import LocalProcesses
from clockwright.containers import CONFIG_FILE, read_container
from clockwright.errors import ModelError

# The longest name that a controller takes.
_ID_MAX = 128


class LocalWorkers(LocalProcesses[WorkerFlags]):
    """Workers of this machine."""

    noun = "worker"

    def plan_containers(self, models_dir: Path, flags: WorkerFlags) -> None:
        """Have `start` start those of the models that are code, with the same flags but their device."""
        for path in sorted(models_dir.glob(f"*/{CONFIG_FILE}")):
            folder = path.parent.resolve()
            try:
                spec, _ = read_container(folder)
            except ModelError:
                continue  # the controller says what is wrong with it
            own = replace(flags, device=f"container:{folder}")
            for index in range(spec.replicas):
                self.plan(f"container-{index}-{folder.name}"[:_ID_MAX], own)

    @override
    def _arguments(self, controller: str, name: str) -> list[str]:
        return [
            *("worker", "--controller", controller, "--id", name),
            *spell(self._planned[name]),
        ]

    @override
    def _needed(self) -> set[str]:
        common = {
            name
            for name, flags in self._planned.items()
            if not flags.device.startswith("container:")
        }
        return common or set(self._planned)
