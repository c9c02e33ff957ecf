"""A front's slabs: where large tensors lie, for itself and for the workers of its host, from socket to device.

There is one piece of memory for inputs, which workers can only read, and one for each worker's
outputs, which only that worker writes. So a lost worker that still writes damages nothing: its
memory is never used again, and is freed with the last answer in it.

A slab is a view, and is free when no view of it is left: not the request that came in it, not a
second attempt, not the client's socket, and not the action that reads or writes it. The sender of an action
keeps its views until the action is over (`controller.links.worker_link`), even if the client has gone by then.
So no list of owners can be wrong.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from clockwright.errors import ProtocolError
from clockwright.wire.bulk import Buffer
from clockwright.wire.shared_memory import make_shared, map_shared
from controller.links.slab_book import BLOCK_BYTES_MIN, SlabBook

log = logging.getLogger(__name__)

#: Tensors of so many bytes are worth a slab.
SLAB_BYTES_MIN: Final = BLOCK_BYTES_MIN
# Share of all shared memory for one worker's outputs; half of all is for inputs.
_WORKERS: Final = 8

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Arena:
    """One piece of shared memory, and the slabs in it. Views may go in any thread; the rest is for one."""

    def __init__(self, name: str, num_bytes: int, *, workers_write: bool) -> None:
        """Make the memory. Raises OSError if the kernel refuses."""
        self._book = SlabBook(num_bytes)
        self.num_bytes = self._book.num_bytes
        #: Handed to workers.
        self.fd, self.memory = make_shared(name, self.num_bytes, others_write=workers_write)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        # Slabs in use and where each begins, by the number of the reference (of an array it has no hash). A class derived from
        # references cannot be compiled (`make native`).
        self._leases: dict[int, tuple[weakref.ref[_Bytes], int]] = {}
        # Filled where the last view is dropped, perhaps by the garbage collector in any thread.
        self._over: deque[weakref.ref[_Bytes]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of all slabs in use."""
        self._collect()
        return self._book.used_bytes

    def take(self, num_bytes: int) -> memoryview | None:
        """Take a slab, whose contents are uninitialised. Returns None if there is no room."""
        if self._over:
            self._collect()
        begin = self._book.take(num_bytes)
        if begin is None:
            return None
        slab: _Bytes = np.frombuffer(self.memory, np.uint8, num_bytes, begin)
        lease = weakref.ref(slab, self._over.append)
        self._leases[id(lease)] = lease, begin
        return slab.data

    def find(self, view: Buffer) -> int:
        """Where a view lies in this memory; -1: elsewhere."""
        if type(view) is not memoryview or view.readonly:
            return -1
        begin = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self._address
        return begin if 0 <= begin < self.num_bytes else -1

    def close(self) -> None:
        """Stop handing out the memory. It lives on while a process has it mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _collect(self) -> None:
        over = self._over
        while over:
            _, begin = self._leases.pop(id(over.popleft()))
            self._book.give_back(begin)


class MappedMemory:
    """Memory that another process has made, mapped here to be read and to be told apart. Its slabs are lent."""

    def __init__(self, number: int, fd: int, num_bytes: int) -> None:
        """Map memory, by a descriptor of the caller; its number is for messages.

        Raises ProtocolError if it is smaller than said, or could become so; OSError if the kernel refuses.
        """
        self.number = number
        self.num_bytes = num_bytes
        self._memory = map_shared(fd, num_bytes, to_write=False)
        self._address = _address(self._memory)

    def look(self, begin: int, num_bytes: int, over: Callable[[], object]) -> memoryview:
        """View a slab. Raises ProtocolError if it does not lie in this memory.

        `over` is called, in any thread, when its last view is gone; this object may be gone too.
        """
        if begin < 0 or begin + num_bytes > self.num_bytes:
            raise ProtocolError(
                f"bytes {begin} to {begin + num_bytes} of memory of {self.num_bytes}"
            )
        slab: _Bytes = np.frombuffer(self._memory, np.uint8, num_bytes, begin)
        weakref.finalize(slab, over).atexit = False
        return slab.data

    def find(self, view: Buffer) -> int:
        """Where a view lies in this memory; -1: elsewhere."""
        if type(view) is not memoryview or not view.readonly:
            return -1
        begin = _address(view) - self._address
        return begin if 0 <= begin < self.num_bytes else -1


def _address(view: Buffer) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


@dataclass(slots=True)
class _Allowance:
    """What may still be taken. It stands apart: what gives bytes back would else keep all memory for ever."""

    num_bytes: int

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


class Slabs:
    """All shared memory of a front."""

    def __init__(self, num_bytes: int) -> None:
        """Make the memory for inputs; with 0 bytes it is off, and tensors travel with their actions."""
        self._left = _Allowance(num_bytes)
        self._outputs_bytes = num_bytes // 2 // _WORKERS
        self.inputs = self._make("clockwright-inputs", num_bytes // 2, workers_write=False)

    def room(self, num_bytes: int) -> memoryview:
        """Make room for a message: in a slab if it is large and there is one, else in this process's memory."""
        if num_bytes >= SLAB_BYTES_MIN and self.inputs is not None:
            slab = self.inputs.take(num_bytes)
            if slab is not None:
                return slab
        return np.empty(num_bytes, np.uint8).data

    def for_outputs(self) -> Arena | None:
        """Make the memory for one worker's outputs. Returns None if no memory is left."""
        return self._make("clockwright-outputs", self._outputs_bytes, workers_write=True)

    def close(self) -> None:
        """Hand nothing out to workers any more."""
        if self.inputs is not None:
            self.inputs.close()

    def _make(self, name: str, num_bytes: int, *, workers_write: bool) -> Arena | None:
        if not SLAB_BYTES_MIN <= num_bytes <= self._left.num_bytes:
            return None
        try:
            arena = Arena(name, num_bytes, workers_write=workers_write)
        except OSError as error:
            log.warning("no shared memory: %s; tensors travel with their actions", error)
            return None
        self._left.num_bytes -= arena.num_bytes
        # Answers in it may outlive the arena.
        weakref.finalize(arena.memory, self._left.give_back, arena.num_bytes)
        return arena
