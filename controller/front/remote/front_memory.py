"""Memory that the controller shares with fronts of its host.

A front's memory holds inputs: the controller maps it, and has the workers map it. Workers' memory holds outputs:
fronts map it. What a front may still read is kept, even when the front is given up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence

from clockwright.errors import ProtocolError
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import PLACE_BITS
from clockwright.wire.frame_socket import FrameSocket
from controller.front.remote import link_frames as frames
from controller.links.slabs import SLAB_BYTES_MIN, Arena, MappedMemory
from controller.links.worker_link import WorkerLinks

log = logging.getLogger(__name__)

# Process, user and group of a peer.
_CREDENTIALS = struct.Struct("iII")


class SharedMemories:
    """The memory of all workers and fronts of this host, by numbers."""

    def __init__(self, workers: WorkerLinks) -> None:
        self._workers = workers
        self._last_memory = 0
        #: Workers' memory for outputs.
        self.outputs: dict[Arena, int] = {}
        # Outputs that lost fronts may still read, with a descriptor that tells when their process ends; -1: none.
        self._kept: dict[str, tuple[int, dict[int, list[Buffer]]]] = {}

    def close(self) -> None:
        """Keep nothing any more."""
        for instance in list(self._kept):
            self.take_kept(instance)

    def new_number(self) -> int:
        """Make a number for memory, which no other has had."""
        self._last_memory += 1
        return self._last_memory

    def share(self, memory: MappedMemory, file: int) -> None:
        """Let workers read a front's memory, given its file."""
        self._workers.share(memory, file)

    def unshare(self, memory: MappedMemory) -> None:
        """A front is gone."""
        self._workers.unshare(memory)

    def keep_while_alive(self, process: int, views: dict[int, list[Buffer]], instance: str) -> None:
        """Keep views, by request, until a front's process has ended, or the front says which outputs it still reads.

        `process` is a descriptor that tells of its end; -1: it is not known.
        """
        views = self.take_kept(instance) | views
        if process < 0:
            log.warning("a front that is gone may still read outputs: they are kept")
        else:
            asyncio.get_running_loop().add_reader(process, self.take_kept, instance)
        self._kept[instance] = process, views

    def take_kept(self, instance: str) -> dict[int, list[Buffer]]:
        """Keep nothing for a front any more; returns what was kept."""
        process, views = self._kept.pop(instance, (-1, {}))
        if process >= 0:
            asyncio.get_running_loop().remove_reader(process)
            os.close(process)
        return views


class FrontMemory:
    """Memory that one front shares with the controller, and the controller with it."""

    def __init__(
        self,
        memories: SharedMemories,
        name: str,
        instance: str,
        process: int,
        lent: dict[int, list[Buffer]],
    ) -> None:
        """Begin with the outputs that the front still reads, by request; `instance` is the same whenever it attaches.

        `process` is a descriptor that tells of its end; -1: it is not known.
        """
        self._memories = memories
        self._name = name
        self._instance = instance
        self._process = process
        # The front's memory for inputs.
        self._file = -1
        self._memory: MappedMemory | None = None
        # Workers' memory for outputs that the front was handed, what of it it has mapped, and the outputs that
        # it looks at.
        self._offered: dict[int, Arena] = {}
        self._outputs: dict[int, Arena] = {}
        self._lent = lent

    @property
    def has_outputs(self) -> bool:
        """Whether the front has mapped any worker's memory."""
        return bool(self._outputs)

    def lend(self, ask_id: int, outputs: Sequence[Buffer]) -> list[int]:
        """Find where outputs lie, and keep those that the front is to read there; -1: in no memory that it maps."""
        places = [self._place(tensor) for tensor in outputs]
        lent = [tensor for tensor, at in zip(outputs, places, strict=True) if at >= 0]
        if lent:
            self._lent[ask_id] = lent
        return places

    def _place(self, tensor: Buffer) -> int:
        if len(tensor) >= SLAB_BYTES_MIN:
            for number, arena in self._outputs.items():
                if (begin := arena.find(tensor)) >= 0:
                    return number << PLACE_BITS | begin
        return -1

    def offer(self, number: int, outputs: Arena, data: FrameSocket) -> None:
        """Let the front map a worker's memory for outputs."""
        # One without memory of its own is not on this host, or wants none.
        if self._memory is not None and outputs.fd >= 0:
            message = frames.encode_one(frames.LentMemory(number, outputs.num_bytes))
            if data.hand_over(message, (outputs.fd,)):
                self._offered[number] = outputs

    def forget(self, number: int, data: FrameSocket) -> None:
        """A worker is gone."""
        self._outputs.pop(number, None)
        if self._offered.pop(number, None) is not None:
            data.send(frames.encode(frames.Forget(number)))

    def mapped(self, number: int) -> None:
        """The front has mapped a worker's memory that it was offered."""
        if number in self._offered:
            self._outputs[number] = self._offered[number]

    def returned(self, ask_ids: Sequence[int]) -> None:
        """The front does not read an output of these any more."""
        for ask_id in ask_ids:
            if lent := self._lent.get(ask_id):
                lent.pop()
            if not lent:
                self._lent.pop(ask_id, None)

    def take(self, offer: frames.LentMemory, data: FrameSocket) -> None:
        """Map the front's memory here and in the workers, and offer the front theirs.

        Raises ProtocolError if it was handed over already, or not at all.
        """
        if self._memory is not None or not data.files:
            raise ProtocolError("memory that was handed over already, or not at all")
        self._file = data.files.popleft()
        try:
            self._memory = MappedMemory(self._memories.new_number(), self._file, offer.num_bytes)
        except OSError as error:
            log.warning("the memory of front %s cannot be mapped: %s", self._name, error)
            return
        data.send(frames.encode(frames.Mapped(offer.number)))
        self._memories.share(self._memory, self._file)
        for arena, number in list(self._memories.outputs.items()):
            self.offer(number, arena, data)

    def look(self, ask_id: int, place: int, num_bytes: int, over: Callable[[], object]) -> Buffer:
        """Give a view of an input in the front's memory; `over` is called, in any thread, when the view is freed.

        Raises ProtocolError if it is not mapped.
        """
        if self._memory is None:
            raise ProtocolError(f"request {ask_id}: inputs in memory that is not mapped")
        return self._memory.look(place, num_bytes, over)

    def lost(self) -> None:
        """The front is lost."""
        if self._memory is not None:
            self._memories.unshare(self._memory)
            self._memory = None
        if self._file >= 0:
            os.close(self._file)
        if self._lent:
            # The front may still read these for answers on their way to clients. Nothing is written there
            # while its process lives.
            self._memories.keep_while_alive(self._process, self._lent, self._instance)
        elif self._process >= 0:
            os.close(self._process)


def process_of(sock: socket.socket) -> int:
    """Open a descriptor that tells when the peer's process has ended. Returns -1 if it cannot be had."""
    if sock.family != socket.AF_UNIX:
        return -1
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        return os.pidfd_open(pid)
    except OSError:
        return -1  # It has ended, or lives in another name space.
