"""Models that were added by upload: their files, a folder per upload, and the record of what they serve.

::

    uploads/NUMBER/NAME/    the files as they came
    uploads/NUMBER.gone/    no longer served; being deleted
    table upload            by number: the model's folder as it was read then, with hashes
    table model             by public name: the upload that serves it

A model is there after a restart if its upload has both, row and folder. So the row, which is written last, adds
it, and renaming the folder removes it even where the disk takes no more rows. Whatever has only one of them was
half done when the controller was killed, and is cleared away at the next start.

Files are not read at a restart: workers have them by their hashes, or are sent them and compare.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from clockwright.errors import ConfigError, ModelError, NoRoomError, StoreError
from controller.models.model_folder import ModelFolder
from controller.models.state_file import LOST_FOUND, StateFile, sync_path

log = logging.getLogger(__name__)

# What a file occupies on a disk even when it is empty.
_BLOCK_BYTES = 4096

_GONE = ".gone"


@dataclass(slots=True, eq=False)
class Upload:
    """Files that came together, for the models of one folder; they go with the last of these."""

    number: int
    folder: Path
    num_bytes: int = 0
    #: Models that need the files, those on trial included.
    num_models: int = 0


@dataclass(frozen=True, slots=True)
class KeptUpload:
    """An upload that an earlier run of the controller has kept."""

    upload: Upload
    #: Public names that it serves.
    names: Sequence[str]
    #: A version each. Empty: the files are not as they were; `fault` says how.
    folders: Sequence[ModelFolder]
    fault: str = ""


@dataclass(eq=False)
class Uploads:
    """A folder for uploads, which together have a limit, and their rows in the state file."""

    #: Not shared; it is made.
    directory: Path
    state: StateFile
    _: KW_ONLY
    #: What all uploads that are there, or under way, may have together.
    bytes_max: int

    def __post_init__(self) -> None:
        self._num_bytes = 0
        self._uploads: set[Upload] = set()
        self._last_number = 0

    # --- coming ---------------------------------------------------------------------------------

    def begin(self) -> Upload:
        """Begin an upload. The caller makes its folder, and discards it."""
        self._last_number += 1
        upload = Upload(self._last_number, self.directory / str(self._last_number))
        self._uploads.add(upload)
        return upload

    def grow(self, upload: Upload, num_bytes: int = _BLOCK_BYTES) -> None:
        """Make room for bytes that are about to be written; by default for a new file.

        Raises NoRoomError if no room is left.
        """
        if self._num_bytes + num_bytes > self.bytes_max:
            raise NoRoomError(
                f"uploaded models have {self._num_bytes} bytes, and {num_bytes} more were found; expected"
                f" {self.bytes_max} in all at most (--upload-limit-mib)"
            )
        self._num_bytes += num_bytes
        upload.num_bytes += num_bytes

    async def switch(
        self,
        new: tuple[Upload, Sequence[ModelFolder]] | None,
        replaced: Iterable[tuple[str, Upload]],
        generations: Mapping[str, int],
    ) -> None:
        """Let names be served by a new upload from the next start on, and others no longer by old ones.

        The upload comes with its folder, once for each version; None: the new models' files are not ours. Generations
        count the models of each new name, or name and version, from 1. Raises StoreError if nothing has changed,
        because of the disk.
        """
        old = [(name, upload.number) for name, upload in replaced]
        row: tuple[int, str, int] | None = None
        names: tuple[str, ...] = ()
        if new is not None:
            upload, folders = new
            text = "\n".join([folder.to_json() for folder in folders])
            row, names = (upload.number, text, upload.num_bytes), folders[0].instance_names
            if self.state.path is not None:
                try:
                    await asyncio.to_thread(_sync, upload.folder)
                except OSError as error:
                    raise StoreError(f"{upload.folder}: {error.strerror}") from error

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                _delete(connection, old)
                if row is not None:
                    connection.execute("INSERT INTO upload VALUES (?, ?, ?)", row)
                    connection.executemany(
                        "INSERT OR REPLACE INTO model VALUES (?, ?)",
                        [(name, row[0]) for name in names],
                    )
                connection.executemany(
                    "INSERT OR REPLACE INTO generation VALUES (?, ?)", list(generations.items())
                )

        await self.state.run(write)

    # --- going ----------------------------------------------------------------------------------

    async def forget(self, models: Sequence[tuple[str, Upload]]) -> None:
        """Take names, each with its upload, from what the next start brings back.

        Raises StoreError if the disk does not take it, and some of the models' files are there still.
        """
        rows = [(name, upload.number) for name, upload in models]

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                _delete(connection, rows)

        try:
            await self.state.run(write)
        except StoreError as error:
            if any(upload.folder.exists() for _, upload in models):
                raise
            # The folder has another name already, which is enough.
            log.warning("%s; what was removed is gone with its files", error)

    def release(self, upload: Upload) -> None:
        """Note that a model needs an upload no longer; the last one takes the files along."""
        upload.num_models -= 1
        if upload.num_models == 0:
            self.discard(upload)

    def discard(self, upload: Upload) -> asyncio.Future[None]:
        """Delete an upload's files, in a thread; a second time it does nothing."""
        loop = asyncio.get_running_loop()
        if upload not in self._uploads:
            done = loop.create_future()
            done.set_result(None)
            return done
        self._uploads.remove(upload)
        self._num_bytes -= upload.num_bytes
        gone = upload.folder.with_name(upload.folder.name + _GONE)
        try:
            upload.folder.rename(gone)
        except FileNotFoundError:
            pass  # Nothing has come of it yet.
        except OSError as error:
            log.error("%s cannot be deleted: %s", upload.folder, error.strerror)
        return loop.run_in_executor(None, shutil.rmtree, gone, True)

    # --- coming back ----------------------------------------------------------------------------

    async def restore(self) -> list[KeptUpload]:
        """Find what earlier runs have kept, and clear away what they left half done. Call it first.

        Raises ConfigError if there are records, and no folder; StoreError if the records cannot be read; OSError if the
        folder cannot be read.
        """
        uploads: dict[int, tuple[str, int]] = {}
        names: dict[int, list[str]] = {}

        def read(connection: sqlite3.Connection) -> None:
            for number, folder, num_bytes in connection.execute("SELECT * FROM upload"):
                uploads[number] = folder, num_bytes
            for name, number in connection.execute("SELECT * FROM model ORDER BY name"):
                names.setdefault(number, []).append(name)

        await self.state.run(read)
        if uploads and not self.directory.is_dir():
            raise ConfigError(
                f"state {self.state.name}: {self.directory} is missing, expected the files of models that were added:"
                " restore the folder, or make an empty one to forget these models"
            )
        self.directory.mkdir(exist_ok=True)
        if self.state.path is not None:
            # Or a folder that was just made goes, with all that it confirms, when the machine loses its power.
            await asyncio.to_thread(sync_path, self.directory.parent)
        found = await asyncio.to_thread(lambda: {path.name for path in self.directory.iterdir()})
        found.discard(LOST_FOUND)
        records = []
        for number, (text, num_bytes) in sorted(uploads.items()):
            if str(number) in found and number in names:
                found.remove(str(number))
                upload = Upload(number, self.directory / str(number), num_bytes)
                self._uploads.add(upload)
                self._num_bytes += num_bytes
                records.append((upload, names[number], text))
        kept = await asyncio.to_thread(lambda: [_read(*record) for record in records])
        numbers = {each.upload.number for each in kept}
        await self._clear((uploads.keys() | names.keys()) - numbers)
        for name in found:
            with suppress(ValueError):
                self._last_number = max(self._last_number, int(name.removesuffix(_GONE)))
            await asyncio.to_thread(shutil.rmtree, self.directory / name, ignore_errors=True)
        self._last_number = max(self._last_number, *uploads, *names, 0)
        return kept

    async def _clear(self, numbers: Iterable[int]) -> None:
        rows = [(number,) for number in numbers]
        if not rows:
            return

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("DELETE FROM model WHERE upload = ?", rows)
                connection.executemany("DELETE FROM upload WHERE number = ?", rows)

        try:
            await self.state.run(write)
        except StoreError as error:
            log.warning("%s; rows of models that are gone stay until the next start", error)


def _delete(connection: sqlite3.Connection, rows: Sequence[tuple[str, int]]) -> None:
    connection.executemany("DELETE FROM model WHERE name = ? AND upload = ?", rows)
    connection.executemany(
        "DELETE FROM upload WHERE number = ? AND number NOT IN (SELECT upload FROM model)",
        [(number,) for number in {number for _, number in rows}],
    )
    connection.executemany(
        "DELETE FROM generation WHERE ? IN (name, substr(name, 1, instr(name, ':') - 1))"
        " AND ? NOT IN (SELECT name FROM model)",
        [(name, name) for name, _ in rows],
    )


def _read(upload: Upload, names: Sequence[str], text: str) -> KeptUpload:
    try:
        folders = [ModelFolder.from_json(line, upload.folder) for line in text.splitlines()]
        return KeptUpload(upload, names, folders)
    except ModelError as error:
        return KeptUpload(upload, names, (), str(error))


def _sync(folder: Path) -> None:
    """Have the disk take a folder with all its files, and the entry of the folder itself."""
    for root, _, files in os.walk(folder):
        for path in (*(os.path.join(root, name) for name in files), root):
            sync_path(path)
    sync_path(folder.parent)
