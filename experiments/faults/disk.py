"""What a disk has of its files when the power goes: what was synced, and of the rest as much as chance leaves.

An entry of a folder stays if the folder was synced since, and the content of a file as far as the file was. What
is renamed or deleted stays so. SQLite asks the kernel by itself; what it has synced follows from how it was told
to (`PRAGMA synchronous`), because no transaction lasts longer than an event.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# SQLite syncs every transaction as it ends, from this value of its setting on.
_FULL = 2


@dataclass
class Disk:
    """Where a host's files lie, and what of them was synced."""

    folders: set[Path] = field(default_factory=set)
    #: Those are cut when they are closed.
    databases: set[str] = field(default_factory=set)
    _contents: dict[Path, bytes] = field(default_factory=dict)
    _entries: dict[Path, set[str]] = field(default_factory=dict)

    def sync(self, fd: int) -> None:
        """Take a file, or a folder's entries, as they are."""
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            self._entries[path] = set(os.listdir(path))
        else:
            self._contents[path] = path.read_bytes()

    def lose_power(self, draw: random.Random) -> None:
        """Leave what was synced; draw what is left of the rest."""
        for folder in sorted(self.folders):
            for root, folders, names in os.walk(folder):
                folders.sort()
                here = Path(root)
                synced = self._entries.get(here, set())
                for name in [*folders, *sorted(names)]:
                    path = here / name
                    if str(path).removesuffix("-wal") in self.databases:
                        continue
                    if name not in synced and draw.random() < 0.5:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                    elif not path.is_dir():
                        self._tear(path, draw)

    def _tear(self, path: Path, draw: random.Random) -> None:
        content, synced = path.read_bytes(), self._contents.get(path, b"")
        if content == synced:
            return
        kept = len(synced) if content.startswith(synced) else 0
        cut = draw.randint(kept, len(content))
        # Some disks know how long a file is before they have its end.
        end = bytes(len(content) - cut) if draw.random() < 0.3 else b""
        path.write_bytes(content[:cut] + end)


def close_database(
    connection: sqlite3.Connection, path: str, draw: random.Random, *, lost_power: bool
) -> None:
    """Let go of a database, which lies there as it was, with what was being written.

    Args:
        connection: to it; it is not used any more.
        path: of its file.
        draw: says how much of it was written.
        lost_power: what was not synced is lost as well, from a byte on that is drawn.
    """
    if path == ":memory:":
        connection.close()
        return
    parts = [Path(path + suffix) for suffix in ("", "-wal")]
    contents = [part.read_bytes() if part.exists() else None for part in parts]
    is_synced = True
    with suppress(sqlite3.ProgrammingError):  # It was closed, which syncs.
        is_synced = connection.execute("PRAGMA synchronous").fetchone()[0] >= _FULL
    connection.close()  # which writes
    for part, content in zip(parts, contents, strict=True):
        if content is not None:
            part.write_bytes(content)
    wal = contents[1]
    if wal is not None and lost_power and not is_synced:
        parts[1].write_bytes(wal[: draw.randrange(len(wal) + 1)])
    elif wal is not None and draw.random() < 0.5:
        # A transaction that was under way, and of which no client was told that it is done.
        torn = wal[-draw.randrange(1, 9000) :]
        with parts[1].open("ab") as file:
            file.write(bytes(len(torn)) if lost_power and draw.random() < 0.3 else torn)
