"""Model files on disk by their content, so that none is sent to this host twice."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# No transfer or compilation pauses for so long: the process that made such a file was killed.
_LEFT_BEHIND_S = 24 * 3600.0


class FileStore:
    """A folder of files named by their sha256; each appears whole or not at all."""

    def __init__(self, folder: Path) -> None:
        """Open or make the folder, and throw away files that killed processes left half done.

        Raises OSError if the folder cannot be made.
        """
        self._folder = folder / "files"
        self._scratch = folder / "scratch"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._scratch.mkdir(exist_ok=True)
        for path in self._scratch.iterdir():
            with contextlib.suppress(OSError):  # another worker may remove the file first
                if time.time() - path.stat().st_mtime > _LEFT_BEHIND_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def has(self, sha256: str) -> bool:
        """Whether a sound file of this content is here. Reads the whole file, and throws a damaged one away."""
        path = self._folder / sha256
        found = sha256_of(path)
        if found and found != sha256:
            path.unlink(missing_ok=True)
        # A file that was missing is not thrown away: another worker may have added it meanwhile.
        return found == sha256

    def new_file(self) -> Path:
        """Make a path to write a file to; hand it to `add`, or delete it."""
        handle, name = tempfile.mkstemp(dir=self._scratch)
        os.close(handle)
        return Path(name)

    def add(self, path: Path, sha256: str) -> None:
        """Move a complete file in, whose hash the caller has verified."""
        path.replace(self._folder / sha256)

    @contextmanager
    def model_folder(self, contents: Mapping[str, str]) -> Iterator[Path]:
        """Lay a model's files out as in its owner's folder, as a context. Slow, because it copies files.

        Args:
            contents: sha256 by relative path; the paths have been checked and the files are here.
        """
        with tempfile.TemporaryDirectory(dir=self._scratch) as name:
            for path, sha256 in contents.items():
                target = Path(name) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                # Copies, not links: onnx takes external data behind a hard or symbolic link for an attack.
                shutil.copyfile(self._folder / sha256, target)
            yield Path(name)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
