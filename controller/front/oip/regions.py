"""System shared memory of the Open Inference Protocol: where clients of this host leave tensors, and find them.

A client makes a shared memory object, registers a part of it as a region, and names the region in its requests
instead of sending tensors. This process never maps an object of a client: the client could shorten it, and
a read behind the new end kills the process. Bytes are copied, once, between the object and a slab, so a client
that changes them meanwhile changes only its own answer.

An object belongs to the user that made it, and this process may be able to open objects that the client is not
allowed to open. So only objects of this process's own user are taken. A region belongs to the client that
registered it: requests of other clients, which may be on other machines, find nothing under its name.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final

from clockwright.errors import BadRequestError, NameTakenError, NoRoomError, UnknownRegionError
from clockwright.foreign import check_name_length, quote
from clockwright.wire.bulk import Buffer
from controller.front.oip.protocol import SharedPart
from controller.links.slabs import Slabs

#: Regions that there may be at once. Each takes a file handle.
REGIONS_MAX: Final = 256

# Where Linux keeps objects of `shm_open`, and the longest name that one has.
_OBJECTS = Path("/dev/shm")
_KEY_BYTES_MAX = 255


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Region:
    """A part of a client's object; the file stays open as long as this object lives."""

    name: str
    key: str
    #: Where it begins in the object.
    offset: int
    num_bytes: int
    file: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """A part of a region, to be read or written."""

    region: Region
    #: Where it begins in the object.
    begin: int
    num_bytes: int

    def read(self, room: memoryview) -> None:
        """Fill room for as many bytes.

        Raises BadRequestError if the object has become shorter, or is another user's now.
        """
        self._check()
        position = 0
        while position < self.num_bytes:
            num_bytes = os.preadv(self.region.file, [room[position:]], self.begin + position)
            if num_bytes == 0:
                raise self._too_short(self.begin + position)
            position += num_bytes

    def write(self, data: Buffer) -> None:
        """Write no more bytes than there are.

        Raises BadRequestError if the object has become shorter, or is another user's now, or there is no memory.
        """
        self._check()
        view, position = memoryview(data), 0
        try:
            while position < len(view):
                position += os.pwrite(self.region.file, view[position:], self.begin + position)
        except OSError as error:
            raise BadRequestError(f"region {quote(self.region.name)}: {error.strerror}") from None

    def _check(self) -> None:
        found = os.fstat(self.region.file)
        if found.st_size < self.begin + self.num_bytes:
            raise self._too_short(found.st_size)
        _check_owner(self.region.key, found)

    def _too_short(self, num_bytes: int) -> BadRequestError:
        return BadRequestError(
            f"region {quote(self.region.name)}: found {num_bytes} bytes in {quote(self.region.key)}, expected"
            f" {self.begin + self.num_bytes} or more, as when it was registered"
        )


@dataclass(eq=False)
class Regions:
    """What clients have registered."""

    slabs: Slabs
    _: KW_ONLY
    num_bytes_max: int
    request_bytes_max: int
    objects: Path = _OBJECTS

    def __post_init__(self) -> None:
        # By owner (`Caller.owner`) and name.
        self._regions: dict[tuple[str, str], Region] = {}

    def register(
        self, name: str, key: str, offset: int, num_bytes: int, *, owner: str = ""
    ) -> None:
        """Take a part of an object as a region of its owner.

        Raises BadRequestError if the name or key is none, there is no such object, or it is too small, no memory, or
        another user's; NameTakenError if there is a region of that name; NoRoomError if there are too many regions, or
        too many bytes in them, in all or of this owner.
        """
        if not name:
            raise BadRequestError("name: found none, expected a name for the region")
        check_name_length("name", name)
        if (owner, name) in self._regions:
            raise NameTakenError(f"there is a region {quote(name)} already; unregister it first")
        if len(self._regions) >= REGIONS_MAX:
            raise NoRoomError(f"found {REGIONS_MAX} regions already, expected no more than those")
        if not num_bytes:
            raise BadRequestError("byte_size: found 0, expected 1 or more")
        total = sum(region.num_bytes for region in self._regions.values())
        if total + num_bytes > self.num_bytes_max:
            raise NoRoomError(
                f"byte_size: found {num_bytes} besides {total} of other regions, expected"
                f" {self.num_bytes_max} at most in all (--shared-memory-mib)"
            )
        # Without known tenants, all regions have one owner.
        if owner:
            self._check_share(num_bytes, total, self.list("", owner=owner))
        file = self._open(key)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise BadRequestError(f"key: found {quote(key)}, which is no shared memory object")
            _check_owner(key, found)
            if offset + num_bytes > found.st_size:
                raise BadRequestError(
                    f"key: found {found.st_size} bytes in {quote(key)}, expected {offset + num_bytes} or more:"
                    f" byte_size {num_bytes} from offset {offset} on"
                )
            region = Region(name, key, offset, num_bytes, file)
            weakref.finalize(region, os.close, file)
        except BaseException:
            os.close(file)
            raise
        self._regions[owner, name] = region

    def unregister(self, name: str, *, owner: str = "") -> None:
        """Forget a region, or all of its owner for the empty name. Requests that name it already go on with it.

        Raises UnknownRegionError if no region of that name is registered.
        """
        for region in self.list(name, owner=owner):
            del self._regions[owner, region.name]

    def list(self, name: str, *, owner: str = "") -> list[Region]:
        """Give a region, or all of its owner for the empty name.

        Raises UnknownRegionError if no region of that name is registered.
        """
        if name:
            return [self._find(name, owner)]
        return [region for (other, _), region in self._regions.items() if other == owner]

    def find(self, part: SharedPart, *, owner: str = "") -> RegionSpan:
        """Find a part of a region.

        Raises UnknownRegionError if there is no such region; BadRequestError if the region is smaller.
        """
        region = self._find(part.region, owner)
        if part.offset + part.num_bytes > region.num_bytes:
            raise BadRequestError(
                f"region {quote(part.region)}: found {region.num_bytes} bytes, expected"
                f" {part.offset + part.num_bytes} or more: shared_memory_byte_size {part.num_bytes} from"
                f" shared_memory_offset {part.offset} on"
            )
        return RegionSpan(region, region.offset + part.offset, part.num_bytes)

    def read(self, part: SharedPart, *, owner: str = "") -> Buffer:
        """Copy a part of a region to where inputs lie; as `find` and `RegionSpan.read`."""
        stretch = self.find(part, owner=owner)
        room = self.slabs.room(part.num_bytes)
        stretch.read(room)
        return room

    def _check_share(self, num_bytes: int, total: int, own: Sequence[Region]) -> None:
        """Leave as much free for others as an owner has: no owner can take all, and a new one finds some.

        Raises NoRoomError if one more region of so many bytes would leave less.
        """
        free = REGIONS_MAX - len(self._regions)
        if len(own) + 1 > free - 1:
            raise NoRoomError(
                f"found {len(own)} regions of this tenant and room for {free}, expected as much room as it has regions"
            )
        own_bytes, free_bytes = sum(region.num_bytes for region in own), self.num_bytes_max - total
        if own_bytes + num_bytes > free_bytes - num_bytes:
            raise NoRoomError(
                f"byte_size: found {num_bytes} besides {own_bytes} of this tenant's regions and room for {free_bytes},"
                " expected as much room as it has (--shared-memory-mib)"
            )

    def _find(self, name: str, owner: str) -> Region:
        region = self._regions.get((owner, name))
        if region is None:
            raise UnknownRegionError(f"there is no region {quote(name)}; register it first")
        return region

    def _open(self, key: str) -> int:
        # As `shm_open` reads a key.
        name = key.lstrip("/")
        if (
            not name
            or name in (".", "..")
            or "/" in name
            or "\0" in name
            or len(os.fsencode(name)) > _KEY_BYTES_MAX
        ):
            raise BadRequestError(
                f"key: found {quote(key)}, expected the name of a shared memory object: up to"
                f" {_KEY_BYTES_MAX} bytes without a slash but the first"
            )
        # What is no object may be a pipe or a device: neither waited for nor taken as a terminal.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            return os.open(self.objects / name, flags)
        except OSError as error:
            raise BadRequestError(
                f"key: found {quote(key)}, which cannot be opened: {error.strerror}"
            ) from None


def _check_owner(key: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise BadRequestError(
            f"key: found {quote(key)} of user {found.st_uid}, expected one of the server's own, {os.geteuid()}"
        )
