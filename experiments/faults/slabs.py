"""Who uses which slab, as messages and views tell, so that one which is freed or handed out too early is seen at once.

The product keeps a slab for as long as a process has a view of it, and lists no owners (`controller.links.slabs`). Here they
are listed: actions that name a slab, from their message until the controller reads their result; each process that has a view
of it, in whichever process; and a worker that was given up, which may write to its outputs' memory for ever. What a
worker reads for a controller or a front that has hung up is of no account.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from clockwright.units import ActionId
from clockwright.wire.actions import Action, Result
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import PLACE_BITS
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import Frame, decode_result, encode_action
from controller.front.remote.front_memory import FrontMemory
from controller.front.remote.link_frames import LentMemory
from controller.links.slabs import Arena, MappedMemory
from controller.links.worker_actions import WorkerActions
from experiments.faults.sockets import Socket
from experiments.faults.world import World

# What lies in no memory has a negative place.
_NUMBER_BITS = (1 << PLACE_BITS) - 1


@dataclass(slots=True, eq=False)
class _Use:
    """A process reads or writes a part of some memory."""

    begin: int
    end: int
    words: str
    is_over: Callable[[], bool]
    #: It is its owner, who took it.
    is_owner: bool = False


class SlabWatch:
    """The uses of slabs, by the memory's file."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._uses: defaultdict[int, list[_Use]] = defaultdict(list)
        #: Whose action is encoded, or whose result is decoded.
        self.link: WatchedActions | None = None

    def begins(self, memory: int, use: _Use) -> None:
        """A process begins to use a part of a memory; fail unless it is the owner, or this has it still."""
        uses = self._uses[memory]
        if not (use.is_owner or use.is_over() or any([_has(other, use) for other in uses])):
            self.world.fail(f"a slab is free early: {use.words}")
        uses.append(use)

    def ends(self, memory: int, begin: int, end: int, words: str) -> None:
        """Fail if a process still uses a part of a memory, of which the words say what happens to it."""
        uses = self._uses[memory]
        uses[:] = [use for use in uses if not use.is_over()]
        for use in uses:
            if use.begin < end and begin < use.end:
                self.world.fail(f"a slab is {words} early: {use.words}")

    def encode_action(
        self,
        action: Action,
        payload: Sequence[Buffer],
        *,
        places: Sequence[int],
        room: tuple[int, int] | None,
        **others: Any,
    ) -> list[Buffer]:
        """Do what the product's function does, and note what the message names."""
        assert self.link is not None
        if places or room is not None:
            self.link.names(action.action_id, payload, places, room)
        return encode_action(action, payload, places=places, room=room, **others)

    def decode_result(
        self, frame: Frame, *, shift_ns: int
    ) -> tuple[Result, Sequence[Buffer], tuple[int, ...]]:
        """Likewise; from now on its action uses nothing."""
        assert self.link is not None
        decoded = decode_result(frame, shift_ns=shift_ns)
        self.link.named.pop(decoded[0].action_id, None)
        return decoded


def _has(owner: _Use, use: _Use) -> bool:
    inside = owner.is_owner and owner.begin <= use.begin and use.end <= owner.end
    return inside and not owner.is_over()


class WatchedArena(Arena):
    """Memory whose slabs' uses are known."""

    watch: SlabWatch  # of the plant that runs

    @override
    def __init__(self, name: str, num_bytes: int, *, workers_write: bool) -> None:
        super().__init__(name, num_bytes, workers_write=workers_write)
        self.file = os.fstat(self.fd).st_ino
        #: Its worker was given up, and may write there.
        self.is_given_up = False

    @override
    def take(self, num_bytes: int) -> memoryview | None:
        slab = super().take(num_bytes)
        if slab is None:
            return None
        begin = self.find(slab)
        end = begin + num_bytes
        self.watch.ends(self.file, begin, end, "handed out")
        if self.is_given_up:
            self.watch.world.fail(
                "a slab is handed out to which a worker that was given up may write"
            )
        view = weakref.ref(slab.obj, lambda _: self.watch.ends(self.file, begin, end, "free"))
        words = f"{self.watch.world.running.name} has it"
        owner = _Use(begin, end, words, lambda: view() is None, is_owner=True)
        self.watch.begins(self.file, owner)
        return slab


class WatchedMemory(MappedMemory):
    """Another process's memory, in which it is known who looks where."""

    watch: SlabWatch  # of the plant that runs
    #: By which the memory's owner hears of what is over; None: it keeps slabs whatever becomes of connections.
    sock: Socket | None = None

    @override
    def __init__(self, number: int, fd: int, num_bytes: int) -> None:
        super().__init__(number, fd, num_bytes)
        self.file = os.fstat(fd).st_ino

    @property
    def is_cut_off(self) -> bool:
        """Whether its owner waits for no process here any more."""
        return self.sock is not None and (self.sock.peer is None or self.sock.peer.is_closed)

    @override
    def look(self, begin: int, num_bytes: int, over: Callable[[], object]) -> memoryview:
        slab = super().look(begin, num_bytes, over)
        view, process = weakref.ref(slab.obj), self.watch.world.running

        def is_over() -> bool:
            return view() is None or self.is_cut_off or not process.alive

        words = f"{process.name} looks at it"
        self.watch.begins(self.file, _Use(begin, begin + num_bytes, words, is_over))
        return slab


class WatchedFrontMemory(FrontMemory):
    """A front's memory that knows by which connection it came."""

    @override
    def take(self, offer: LentMemory, data: FrameSocket) -> None:
        super().take(offer, data)
        if isinstance(self._memory, WatchedMemory):
            assert isinstance(data._sock, Socket)
            self._memory.sock = data._sock


class WatchedActions(WorkerActions):
    """A worker's actions, with the knowledge which slabs they name."""

    watch: SlabWatch  # of the plant that runs

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Actions in flight that name slabs.
        self.named: dict[ActionId, object] = {}

    @override
    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        self.watch.link = self
        super().send(action, payload)

    @override
    def take_result(self, frame: Frame) -> None:
        self.watch.link = self
        super().take_result(frame)

    @override
    def hang_up(self) -> None:
        self.named.clear()
        if isinstance(self._outputs, WatchedArena):
            self._outputs.is_given_up = True
        super().hang_up()

    def names(
        self,
        action_id: ActionId,
        payload: Sequence[Buffer],
        places: Sequence[int],
        room: tuple[int, int] | None,
    ) -> None:
        """An action names places of inputs, and room for outputs."""
        key = self.named[action_id] = object()
        # There are no places where no input lies in any memory.
        for tensor, place in zip(payload, places, strict=bool(places)):
            if place >= 0:
                number = place >> PLACE_BITS
                memory = self._further_mapped[number] if number else self.slabs.inputs
                self._begins(action_id, key, memory, place & _NUMBER_BITS, len(tensor))
        if room is not None:
            self._begins(action_id, key, self._outputs, *room)

    def _begins(
        self, action_id: ActionId, key: object, memory: object, begin: int, num_bytes: int
    ) -> None:
        assert isinstance(memory, WatchedArena | WatchedMemory)
        process = self.watch.world.running

        def is_over() -> bool:
            if self.named.get(action_id) is not key or not process.alive:
                return True
            return isinstance(memory, WatchedMemory) and memory.is_cut_off

        words = f"{self.worker_id} has action {action_id}, which names it"
        self.watch.begins(memory.file, _Use(begin, begin + num_bytes, words, is_over))
