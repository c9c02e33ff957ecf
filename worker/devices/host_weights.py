"""The host's copies of all models' weights, in one block of locked memory.

The workers of one host may share the block, which is then a file in memory. A table after the weights says what lies
where. A worker locks the bytes that it needs, and one byte of the table while it changes something. The kernel
releases the locks of a worker that is killed. Weights that it was writing are not in the table yet.
"""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clockwright.errors import ModelError
from worker.core.io_pool import aligned
from worker.engines.torch_operators import Tensor
from worker.models.model_files import WEIGHTS_FILE, CompiledModel

# One entry of the table. It counts once `is_there` is set, which is written last.
_ENTRY = np.dtype([("sha256", "S64"), ("begin", "u8"), ("end", "u8"), ("is_there", "u8")])
#: The size of the table, for thousands of models.
TABLE_BYTES = 4096 * _ENTRY.itemsize


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostWeights:
    """A weights blob in the host's locked memory; models with the same bytes share it."""

    memory: Tensor


class HostWeightsStore:
    """Allocates room for weights. Weights that no model uses stay until their room is needed."""

    def __init__(self, memory: Tensor, file: int | None = None) -> None:
        """Start with what other workers have put there.

        Args:
            memory: where weights lie.
            file: the file that `memory` maps, with a table of `TABLE_BYTES` at its end; opened by this store alone.
                None: the memory is not shared and has no table.
        """
        table = np.zeros(TABLE_BYTES, dtype=np.uint8)
        if file is not None:
            memory, table = memory[:-TABLE_BYTES], memory[-TABLE_BYTES:].numpy()
        self._memory = memory
        self._file = file
        self._table = table.view(_ENTRY)
        #: How many objects here need the weights that begin at an offset.
        self._needed: Counter[int] = Counter()
        #: Begin and end of weights that an object no longer holds. The last model may go on any thread, so its
        #: finalizer only notes the place, and the setup thread unlocks it.
        self._unused: deque[tuple[int, int]] = deque()
        #: The weights that some model holds, by the hash of their bytes.
        self._blobs: weakref.WeakValueDictionary[str, HostWeights] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._blobs)

    def close(self) -> None:
        """Unlock everything for other workers."""
        if self._file is not None:
            self._lock(fcntl.F_UNLCK, 0, 0)  # to the end; the mapping keeps the file open
            os.close(self._file)

    def get(self, folder: Path, compiled: CompiledModel) -> HostWeights:
        """Read a compiled model's weights into the memory, unless they lie there already.

        Raises ModelError if there is no room.
        """
        known = self._blobs.get(compiled.weights_sha256)
        if known is not None:
            return known
        self._drop_unused()
        with self._turn():
            begin, end = self._find(compiled.weights_sha256) or self._fill(folder, compiled)
            self._lock(fcntl.F_RDLCK, begin, end)
        weights = HostWeights(self._memory[begin : begin + compiled.weights_bytes])
        self._needed[begin] += 1
        weakref.finalize(weights, self._unused.append, (begin, end))
        self._blobs[compiled.weights_sha256] = weights
        return weights

    def _drop_unused(self) -> None:
        while self._unused:
            place = self._unused.popleft()
            self._needed[place[0]] -= 1
            if not self._needed[place[0]]:
                self._lock(fcntl.F_UNLCK, *place)

    def _find(self, sha256: str) -> tuple[int, int] | None:
        for entry in self._entries():
            if entry["sha256"] == sha256.encode():
                return int(entry["begin"]), int(entry["end"])
        return None

    def _fill(self, folder: Path, compiled: CompiledModel) -> tuple[int, int]:
        num_bytes = aligned(max(compiled.weights_bytes, 1))
        begin = self._make_room(num_bytes)
        if begin is None:
            raise ModelError(
                f"no room for {compiled.weights_bytes} bytes of weights in the host's memory, "
                f"{self._memory.nbytes} bytes for all models; start the worker with more (--host-mib)"
            )
        if compiled.weights_bytes:
            with (folder / WEIGHTS_FILE).open("rb") as file:
                found = file.readinto(self._memory[begin : begin + compiled.weights_bytes].numpy())
            if found != compiled.weights_bytes:
                raise ModelError(
                    f"{WEIGHTS_FILE}: found {found} bytes, expected {compiled.weights_bytes}; offer the "
                    "model again"
                )
        end = begin + num_bytes
        entry = self._table[np.flatnonzero(self._table["is_there"] == 0)[0]]
        entry["sha256"], entry["begin"], entry["end"] = compiled.weights_sha256, begin, end
        entry["is_there"] = 1
        return begin, end

    def _make_room(self, num_bytes: int) -> int | None:
        """Find a gap in the memory and in the table; drops weights that no worker needs."""
        while True:
            end = 0
            places = sorted((int(each["begin"]), int(each["end"])) for each in self._entries())
            if len(places) < len(self._table):
                for place in (*places, (self._memory.nbytes, 0)):
                    if place[0] - end >= num_bytes:
                        return end
                    end = place[1]
            unneeded = next((each for each in self._entries() if self._is_unneeded(each)), None)
            if unneeded is None:
                return None
            unneeded["is_there"] = 0

    def _entries(self) -> Iterator[np.void]:
        return (self._table[index] for index in np.flatnonzero(self._table["is_there"]))

    def _is_unneeded(self, entry: np.void) -> bool:
        begin, end = int(entry["begin"]), int(entry["end"])
        if self._needed[begin]:
            return False
        try:
            self._lock(fcntl.F_WRLCK, begin, end)
        except BlockingIOError:
            return False
        self._lock(fcntl.F_UNLCK, begin, end)
        return True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        place = (self._memory.nbytes, self._memory.nbytes + 1)
        self._lock(fcntl.F_WRLCK, *place, wait=True)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK, *place)

    def _lock(self, kind: int, begin: int, end: int, *, wait: bool = False) -> None:
        """Lock or unlock bytes of the file. Raises BlockingIOError if another worker has a lock there."""
        if self._file is None:
            return
        # Locks of the open file: those of the process would go whenever it closes any other file of this memory.
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        fcntl.fcntl(self._file, command, struct.pack("hhqqi4x", kind, 0, begin, end - begin, 0))
