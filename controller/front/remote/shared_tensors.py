"""Tensors in memory that a front shares with the workers of its host: its own inputs, and their outputs."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from clockwright.errors import ProtocolError
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import APART, PLACE_BITS
from clockwright.wire.frame_socket import FrameSocket
from controller.front.remote import link_frames as frames
from controller.links.slabs import SLAB_BYTES_MIN, MappedMemory, Slabs

log = logging.getLogger(__name__)


class SharedTensors:
    """Which tensors are lent, and to whom."""

    def __init__(self, slabs: Slabs, returned: Callable[[], object]) -> None:
        """Begin with none. `returned` is called when an output is not read any more, if that happens in this thread."""
        self._slabs = slabs
        self._is_returned = returned
        #: The controller has mapped our memory for inputs.
        self.is_mapped = False
        #: By request, inputs that the controller reads there, and how many of them it still reads.
        self._lent: dict[int, tuple[Sequence[Buffer], int]] = {}
        #: Workers' memory for outputs, and requests with an output that is not read any more; any thread appends.
        self._outputs: dict[int, MappedMemory] = {}
        self._returned: deque[int] = deque()
        #: Outputs that are being read, by request, over all connections.
        self._looks: Counter[int] = Counter()
        self._thread = threading.get_ident()

    @property
    def has_returned(self) -> bool:
        """Whether there is anything for `take_returned`."""
        return bool(self._returned)

    def find(self, ask_id: int, inputs: Sequence[Buffer]) -> list[int] | None:
        """Find where inputs lie that the controller can read in place, and keep them until it has read them.

        Returns a place for each, -1 outside shared memory. None if the controller can read no input in place.
        """
        arena = self._slabs.inputs
        if arena is None or not self.is_mapped:
            return None
        places = [arena.find(tensor) if len(tensor) >= SLAB_BYTES_MIN else -1 for tensor in inputs]
        if num_lent := sum(place >= 0 for place in places):
            self._lent[ask_id] = inputs, num_lent
        return places

    def freed(self, ask_ids: Sequence[int]) -> None:
        """The controller does not read an input of these any more."""
        for ask_id in ask_ids:
            if ask_id in self._lent:
                inputs, num_lent = self._lent.pop(ask_id)
                if num_lent > 1:
                    self._lent[ask_id] = inputs, num_lent - 1

    def take(self, offer: frames.LentMemory, data: FrameSocket) -> None:
        """Map a worker's memory for outputs."""
        if not data.files:
            raise ProtocolError("memory that was not handed over")
        fd = data.files.popleft()
        try:
            memory = MappedMemory(offer.number, fd, offer.num_bytes)
        except OSError as error:
            log.warning("a worker's memory cannot be mapped: %s", error)
            return
        finally:
            os.close(fd)
        self._outputs[offer.number] = memory
        data.send(frames.encode(frames.Mapped(offer.number)))

    def look(self, ask_id: int, place: int, num_bytes: int) -> Buffer:
        """Find an output by its place; one that comes from its worker is empty.

        Raises ProtocolError if it lies in memory that is not mapped.
        """
        if place == APART:
            return b""
        memory = self._outputs.get(place >> PLACE_BITS)
        if memory is None:
            raise ProtocolError(f"request {ask_id}: outputs in memory that is not mapped")
        begin = place & (1 << PLACE_BITS) - 1
        self._looks[ask_id] += 1
        return memory.look(begin, num_bytes, functools.partial(self._return, ask_id))

    def _return(self, ask_id: int) -> None:
        """An output is not read any more. Called in any thread."""
        self._returned.append(ask_id)
        if threading.get_ident() == self._thread:
            self._is_returned()

    def take_returned(self) -> list[int]:
        """Take the requests of outputs that are not read any more, one for each output."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._looks.subtract(returned)
        for ask_id in returned:
            if not self._looks[ask_id]:
                del self._looks[ask_id]
        return returned

    def still_looks_at(self) -> list[int]:
        """Give the requests of outputs that are still read, one for each output."""
        return list(self._looks.elements())

    def forget(self, number: int) -> None:
        """Nothing comes from a worker's memory any more."""
        self._outputs.pop(number, None)

    def left(self) -> None:
        """The controller is lost. Workers may still read inputs, and their results are dropped."""
        self.is_mapped = False
        self._lent.clear()
        self._outputs.clear()
