"""The host's copies of all models' weights, in one stretch of locked memory."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from clockwright.errors import ModelError
from worker.core.io_pool import IoPool
from worker.engines.torch_operators import Tensor
from worker.models.model_files import WEIGHTS_FILE, CompiledModel


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostWeights:
    """A weights blob in the host's locked memory; models with the same bytes share it."""

    memory: Tensor


class HostWeightsStore:
    """Hands out room for weights, and takes it back when the last model that holds them goes."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._room = IoPool(memory.nbytes)
        #: Offsets of weights that no model holds any more. The last model may go on any thread, so its
        #: finalizer only notes the offset, and the setup thread releases the room.
        self._unused: deque[int] = deque()
        #: The weights that some model holds, by the hash of their bytes.
        self._blobs: weakref.WeakValueDictionary[str, HostWeights] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._blobs)

    def get(self, folder: Path, compiled: CompiledModel) -> HostWeights:
        """Read a compiled model's weights into the memory, unless they lie there already.

        Raises:
            ModelError: there is no room.
        """
        known = self._blobs.get(compiled.weights_sha256)
        if known is not None:
            return known
        while self._unused:
            self._room.release(self._unused.popleft())
        offset = self._room.acquire(compiled.weights_bytes)
        if offset is None:
            raise ModelError(
                f"no room for {compiled.weights_bytes} bytes of weights in the host's memory, "
                f"{self._room.num_bytes} bytes for all models; start the worker with more (--host-mib)"
            )
        memory = self._memory[offset : offset + compiled.weights_bytes]
        weights = HostWeights(memory)
        weakref.finalize(weights, self._unused.append, offset)
        if compiled.weights_bytes:
            with (folder / WEIGHTS_FILE).open("rb") as file:
                file.readinto(memory.numpy())
        self._blobs[compiled.weights_sha256] = weights
        return weights
