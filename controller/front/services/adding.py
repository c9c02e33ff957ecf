"""Models whose files clients send: how files become a folder below the uploads, and the folder models that serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from clockwright.errors import BadRequestError, NoRoomError
from clockwright.foreign import quote
from clockwright.wire.bulk import Buffer
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry
from controller.models.model_folder import check_name
from controller.models.uploads import Upload, Uploads

# Most files in a model's folder: generous for external data, small enough to list.
FILES_MAX = 4096
# Longest path of a file that Linux takes, and folders in each other, which are removed one inside the other.
_PATH_CHARS_MAX = 4096
_NAME_BYTES_MAX = 255
DEPTH_MAX = 32
#: Models that are being added at the same time. Each waits for a compiler.
ADDING_MAX = 64


class ModelAdder:
    """Adds models from files that clients send."""

    def __init__(self, catalogue: Catalogue, uploads: Uploads) -> None:
        """Add to the catalogue what lies below the uploads."""
        self._catalogue = catalogue
        self._uploads = uploads
        self._num_adding = 0

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[Upload]:
        """Begin an upload; its files go at the end unless a model has them.

        Raises NoRoomError if too many are under way, or the disk cannot take the files.
        """
        if self._num_adding >= ADDING_MAX:
            words = f"found {self._num_adding} models that are being added, expected {ADDING_MAX} at most"
            raise NoRoomError(words)
        self._num_adding += 1
        upload = self._uploads.begin()
        try:
            yield upload
        except OSError as error:
            raise NoRoomError(f"the controller cannot store the model: {error.strerror}") from None
        finally:
            self._num_adding -= 1
            if not upload.num_models:
                await asyncio.shield(self._uploads.discard(upload))

    def create(self, upload: Upload, name: str, path: str) -> BinaryIO:
        """Begin a file of a model's folder.

        Raises BadRequestError if the path leads out of the folder, or was sent before; NoRoomError if uploads have
        their limit; OSError if the disk cannot take it.
        """
        self._uploads.grow(upload)
        return _create(upload.folder / name, path)

    async def write(self, upload: Upload, file: BinaryIO, content: Buffer) -> None:
        """Write to a file; errors as of `create`."""
        self._uploads.grow(upload, len(content))
        await asyncio.to_thread(file.write, content)

    async def add(
        self, name: str, files: Mapping[str, bytes], triton_json: str = ""
    ) -> list[Entry]:
        """Add a model from the files of its folder, or replace it; see `Catalogue.add`."""
        check_name(name)
        if len(files) > FILES_MAX:
            raise BadRequestError(f"path: more than {FILES_MAX} files")
        async with self.upload() as upload:
            for path, content in files.items():
                with self.create(upload, name, path) as file:
                    await self.write(upload, file, content)
            return await self._catalogue.add(
                upload.folder / name, replace=True, upload=upload, triton_json=triton_json
            )


def is_too_long(path: str) -> bool:
    """Whether a path has a name that no disk can store."""
    return any(len(each.encode()) > _NAME_BYTES_MAX for each in PurePosixPath(path).parts)


def _create(folder: Path, path: str) -> BinaryIO:
    relative = PurePosixPath(path)
    if (
        relative.is_absolute()
        or ".." in relative.parts
        or not relative.parts
        or "\\" in path
        or not path.isprintable()
        or len(path) > _PATH_CHARS_MAX
    ):
        raise BadRequestError(f"path: found {quote(path)}, expected one inside the model's folder")
    if len(relative.parts) > DEPTH_MAX:
        raise BadRequestError(
            f"path: found {len(relative.parts)} names in {quote(path)}, expected {DEPTH_MAX} at most"
        )
    if is_too_long(path):
        longest = max(len(each.encode()) for each in relative.parts)
        raise BadRequestError(
            f"path: found a name of {longest} bytes, expected {_NAME_BYTES_MAX} at most"
        )
    target = folder / relative
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open("xb")
    except (FileExistsError, NotADirectoryError):
        raise BadRequestError(f"path: {quote(path)} was sent before") from None
