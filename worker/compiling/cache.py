"""Compiled models and their profiles on disk, so that a worker that restarts compiles nothing again.

    compiled/KEY-SIZES/     graph.onnx, weights.bin, model.json with the hashes of both, and its own in `seal`
    profiles/KEY.json       an architecture's exec ns: by batch size on this processor; on a GPU by
                            batch size and way of running it (worker.engines.choice); a hash before it

Entries appear whole or not at all (written aside, then renamed), so several workers may share one
folder. An entry that cannot be read, or does not match its hash, is deleted and compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clockwright.units import NS_PER_S
from worker.models.file_store import sha256_of
from worker.models.model_files import GRAPH_FILE, METADATA_FILE, WEIGHTS_FILE, CompiledModel

_SEAL_FILE = "seal"
_FILES = (METADATA_FILE, _SEAL_FILE, GRAPH_FILE, WEIGHTS_FILE)

# No batch takes longer; the controller accepts no larger figure.
_EXEC_NS_MAX = 3600 * NS_PER_S


class CompileCache:
    """The folder of compiled models and profiles."""

    def __init__(self, folder: Path, *, target: str) -> None:
        """Open or make the folder, which several workers may share. Raises OSError if it cannot be made.

        `target` is what compiled code depends on besides the model: format, runtime, processor.
        """
        self._target = target
        #: By key, the state in which files matched their hashes: for a thousand copies of a model the files
        #: are read once.
        self._sound: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._compiled = folder / "compiled"
        self._profiles = folder / "profiles"
        self._scratch = folder / "scratch"
        for path in (self._compiled, self._profiles, self._scratch):
            path.mkdir(parents=True, exist_ok=True)

    def key(
        self,
        contents: Mapping[str, str],
        fixed_dimensions: Mapping[str, int],
    ) -> str:
        """Hash everything that a compiled model depends on, except the batch sizes.

        Contents are the sha256 of each of the model's files, by path.
        """
        dimensions = sorted(fixed_dimensions.items())
        return self._hash(["model", sorted(contents.items()), dimensions])

    def find(
        self, key: str, suffices: Callable[[CompiledModel], bool] = lambda compiled: True
    ) -> tuple[Path, CompiledModel] | None:
        """Find a sound compiled model and its folder. Returns None if no entry suffices.

        Reads all of the files, unless an earlier call did and nothing has changed since.
        """
        entries = (self._read(folder) for folder in self._compiled.glob(f"{key}-*"))
        return next((found for found in entries if found and suffices(found[1])), None)

    def _read(self, folder: Path) -> tuple[Path, CompiledModel] | None:
        """Read an entry; throws it away if it is not sound."""
        key = folder.name
        try:
            text = (folder / METADATA_FILE).read_bytes()
            if (folder / _SEAL_FILE).read_text(encoding="ascii") != _digest(text):
                raise ValueError(f"{METADATA_FILE} is not as it was written")
            compiled = CompiledModel.from_json(text.decode())
            seen = tuple(_identity(folder / name) for name in _FILES)
            sound = self._sound.get(key) == seen or (
                sha256_of(folder / GRAPH_FILE)
                == (compiled.graph_sha256 or compiled.architecture_id)
                and sha256_of(folder / WEIGHTS_FILE) == compiled.weights_sha256
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            self._sound.pop(key, None)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        self._sound[key] = seen
        return folder, compiled

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """Make an empty folder to compile into; removed at the end unless it was `publish`ed."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, key: str) -> Path:
        """Make a compiled folder an entry of `key`; returns where it is now."""
        text = (folder / METADATA_FILE).read_bytes()
        seal, tried = _digest(text), CompiledModel.from_json(text.decode()).tried
        target = self._compiled / "-".join((key, *map(str, tried)))
        (folder / _SEAL_FILE).write_text(seal, encoding="ascii")
        try:
            folder.rename(target)
        except OSError:
            # Another worker was faster; its entry is as good, because it was made from the same inputs.
            if not target.is_dir():
                raise
        return target

    def read_profile(self, architecture_id: str) -> dict[int, int]:
        """Read the measured exec ns by batch size; empty when nothing sound is known."""
        try:
            table = _read(self._profile_path(architecture_id))
            return {int(size): _plausible(duration) for size, duration in table.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def write_profile(self, architecture_id: str, exec_ns: Mapping[int, int]) -> None:
        """Remember measurements."""
        self._write(self._profile_path(architecture_id), dict(exec_ns))

    def read_trials(self, architecture_id: str, gpu_kind: str) -> dict[int, dict[str, int | None]]:
        """Read what `write_trials` wrote; empty when nothing sound is known."""
        path = self._profile_path(architecture_id, gpu_kind)
        try:
            table = _read(path)["exec_ns"]
            return {
                int(size): {
                    str(way): None if taken is None else _plausible(taken)
                    for way, taken in ways.items()
                }
                for size, ways in table.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write_trials(
        self,
        architecture_id: str,
        gpu_kind: str,
        exec_ns: Mapping[int, Mapping[str, int | None]],
        *,
        clock_mhz: int,
    ) -> None:
        """Remember how long each way to run an architecture took, by batch size.

        A way that does not work has None. The GPU's clock at that time is for people to read; 0 if not known.
        """
        table = {"exec_ns": exec_ns, "gpu_kind": gpu_kind, "clock_mhz": clock_mhz}
        self._write(self._profile_path(architecture_id, gpu_kind), table)

    def _write(self, path: Path, table: object) -> None:
        text = json.dumps(table)
        handle, name = tempfile.mkstemp(dir=self._scratch)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{_digest(text.encode())}\n{text}\n")
        Path(name).replace(path)

    def _profile_path(self, *parts: str) -> Path:
        return self._profiles / f"{self._hash(['profile', *parts])}.json"

    def _hash(self, parts: list[object]) -> str:
        return hashlib.sha256(json.dumps([self._target, *parts]).encode()).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> Any:  # noqa: ANN401  what JSON has
    """Read what `_write` wrote; ValueError if it is something else."""
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    text = text.removesuffix("\n")
    if digest != _digest(text.encode()):
        raise ValueError(f"{path.name} is not as it was written")
    return json.loads(text)


def _plausible(exec_ns: int) -> int:
    if not 0 < int(exec_ns) <= _EXEC_NS_MAX:
        raise ValueError(f"found {exec_ns} ns, expected a duration of an hour at most")
    return int(exec_ns)


def _identity(path: Path) -> tuple[int, ...]:
    """Numbers that change when the file changes."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
