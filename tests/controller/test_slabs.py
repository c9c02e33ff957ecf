"""Slabs: what is taken never overlaps, comes back whole, and is never free while somebody has a view of it."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ProtocolError
from clockwright.wire.shared_memory import map_shared
from controller.links.slab_book import BLOCK_BYTES_MIN, SlabBook
from controller.links.slabs import Arena, MappedMemory, Slabs

KIB64 = BLOCK_BYTES_MIN
#: A size to take, or which of those taken is given back.
STEPS = st.lists(
    st.tuples(st.just("take"), st.integers(1, 9 * KIB64))
    | st.tuples(st.just("give"), st.integers(0, 1 << 20)),
    max_size=60,
)


@given(st.integers(0, 40), STEPS)
def test_blocks_never_overlap_and_all_of_them_come_back(
    num_blocks: int, steps: list[tuple[str, int]]
) -> None:
    book = SlabBook(num_blocks * KIB64)
    assert book.num_bytes <= num_blocks * KIB64
    taken: dict[int, int] = {}
    for what, number in steps:
        if what == "take":
            begin = book.take(number)
            if begin is not None:
                assert begin + number <= book.num_bytes
                assert all(
                    begin + number <= other or other + size <= begin
                    for other, size in taken.items()
                )
                taken[begin] = number
        elif taken:
            begin = sorted(taken)[number % len(taken)]
            del taken[begin]
            book.give_back(begin)
        assert sum(taken.values()) <= book.used_bytes <= book.num_bytes
    for begin in taken:
        book.give_back(begin)
    assert book.used_bytes == 0
    if book.num_bytes:
        assert book.take(book.num_bytes) == 0


def test_the_lowest_room_that_fits_is_taken_again_first() -> None:
    book = SlabBook(8 * KIB64)
    first, second, third = book.take(1), book.take(1), book.take(1)
    assert (first, second, third) == (0, KIB64, 2 * KIB64)
    book.give_back(KIB64)
    assert book.take(KIB64) == KIB64


def test_what_is_not_taken_cannot_be_given_back() -> None:
    book = SlabBook(8 * KIB64)
    with pytest.raises(KeyError):
        book.give_back(0)


class Told:
    """A request on its way, as front, runtime and link know it: each has views, and lets go when it likes."""

    def __init__(self, number: int, message: memoryview) -> None:
        self.number = number
        #: The call's, until it is answered or the client has gone.
        self.message: memoryview | None = message
        #: The action's, until the worker has reported it or is lost.
        self.inputs: memoryview | None = None
        self.outputs: memoryview | None = None
        #: What waits for the client's socket.
        self.unsent: memoryview | None = None


# What may happen to some request, in any order.
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "send", "cancel", "write", "finish", "lose", "sent"],
        ),
        st.integers(0, 1 << 20),
    ),
    max_size=80,
)


@given(MOVES)
def test_no_slab_is_reused_while_its_action_or_its_answer_is_not_over(
    moves: list[tuple[str, int]],
) -> None:
    size = KIB64
    inputs = Arena("inputs", 4 * size, workers_write=False)
    outputs = Arena("outputs", 2 * size, workers_write=True)
    requests: list[Told] = []

    def pick(number: int, fits: Callable[[Told], bool]) -> Told | None:
        found = [told for told in requests if fits(told)]
        return found[number % len(found)] if found else None

    for count, (move, number) in enumerate(moves):
        if move == "arrive":
            slab = inputs.take(size)
            if slab is not None:
                slab[:8] = count.to_bytes(8, "little")
                requests.append(Told(count, slab))
        elif move == "send":
            if told := pick(number, lambda t: t.message is not None and t.inputs is None):
                assert told.message is not None
                told.inputs = told.message[:size]
                told.outputs = outputs.take(size)
        elif move == "cancel":
            # The client has gone, or the deadline has passed; the action runs on.
            if told := pick(number, lambda t: t.message is not None):
                told.message = None
        elif move == "write":
            if told := pick(number, lambda t: t.inputs is not None and t.outputs is not None):
                assert told.inputs is not None
                assert told.outputs is not None
                told.outputs[:8] = told.inputs[:8]
        elif move == "finish":
            if told := pick(number, lambda t: t.inputs is not None):
                assert told.inputs is not None
                # What the worker reads at the very end is still what came.
                assert int.from_bytes(told.inputs[:8], "little") == told.number
                if told.outputs is not None:
                    told.outputs[:8] = told.inputs[:8]
                    if told.message is not None:
                        told.unsent = told.outputs[: size // 2]
                told.inputs = told.outputs = told.message = None
        elif move == "lose":
            if told := pick(number, lambda t: t.inputs is not None):
                told.inputs = told.outputs = None
        elif told := pick(number, lambda t: t.unsent is not None):
            told.unsent = None
        for told in requests:
            if told.unsent is not None:
                assert int.from_bytes(told.unsent[:8], "little") == told.number
            if told.message is not None:
                assert int.from_bytes(told.message[:8], "little") == told.number
    requests.clear()
    slab = told = None
    assert (inputs.used_bytes, outputs.used_bytes) == (0, 0)
    inputs.close()
    outputs.close()


def test_a_slab_is_free_with_the_last_view_of_any_part_of_it() -> None:
    arena = Arena("inputs", 2 * KIB64, workers_write=False)
    slab = arena.take(2 * KIB64)
    assert slab is not None
    assert arena.take(1) is None
    part = slab[100:200]
    assert arena.find(part) == 100
    del slab
    assert arena.take(1) is None
    del part
    assert arena.take(1) is not None
    arena.close()


def test_what_lies_elsewhere_is_not_found() -> None:
    arena = Arena("inputs", 2 * KIB64, workers_write=False)
    assert arena.find(bytes(KIB64)) == -1
    assert arena.find(memoryview(bytearray(KIB64))) == -1
    assert arena.find(np.zeros(KIB64, np.uint8).data) == -1
    arena.close()


def test_small_messages_and_those_that_find_no_room_get_memory_of_this_process() -> None:
    slabs = Slabs(32 * KIB64)
    assert slabs.inputs is not None
    small = slabs.room(KIB64 - 1)
    assert slabs.inputs.find(small) == -1
    large = slabs.room(16 * KIB64)
    assert slabs.inputs.find(large) == 0
    further = slabs.room(KIB64)
    assert (len(further), slabs.inputs.find(further)) == (KIB64, -1)
    slabs.close()


def test_all_memory_together_has_a_bound_that_lost_workers_give_back() -> None:
    slabs = Slabs(32 * KIB64)
    arenas = [slabs.for_outputs() for _ in range(9)]
    assert [arena is not None for arena in arenas] == [True] * 8 + [False]
    first = arenas[0]
    assert first is not None
    answer = first.take(KIB64)
    first.close()
    del first
    arenas[0] = None
    gc.collect()
    assert slabs.for_outputs() is None, "an answer still lies in it"
    del answer
    gc.collect()
    assert slabs.for_outputs() is not None
    for arena in arenas:
        if arena is not None:
            arena.close()
    slabs.close()


@pytest.mark.parametrize("num_bytes", [0, KIB64])
def test_without_memory_there_is_none(num_bytes: int) -> None:
    slabs = Slabs(num_bytes)
    assert slabs.inputs is None
    assert slabs.for_outputs() is None
    assert len(slabs.room(3 * KIB64)) == 3 * KIB64
    slabs.close()


def test_a_kernel_that_refuses_is_lived_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    slabs = Slabs(32 * KIB64)
    assert slabs.inputs is None
    assert len(slabs.room(3 * KIB64)) == 3 * KIB64
    assert "Cannot allocate memory" in caplog.text


def test_workers_read_inputs_and_cannot_write_or_shrink_them() -> None:
    arena = Arena("inputs", KIB64, workers_write=False)
    slab = arena.take(4)
    assert slab is not None
    slab[:] = b"abcd"
    seen = map_shared(arena.fd, KIB64, to_write=False)
    assert (bytes(seen[:4]), seen.readonly) == (b"abcd", True)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, KIB64)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)
    arena.close()


def test_memory_that_is_smaller_than_said_or_may_shrink_is_not_mapped() -> None:
    arena = Arena("outputs", KIB64, workers_write=True)
    with pytest.raises(ProtocolError, match="cannot be relied on"):
        map_shared(arena.fd, 2 * KIB64, to_write=True)
    arena.close()
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, KIB64)
    with pytest.raises(ProtocolError, match="cannot be relied on"):
        map_shared(loose, KIB64, to_write=True)
    os.close(loose)


def test_a_slab_of_mapped_memory_is_told_of_when_the_last_view_goes_though_the_memory_is_forgotten() -> (
    None
):
    arena = Arena("outputs", 4 * KIB64, workers_write=True)
    told: list[str] = []
    memory = MappedMemory(1, arena.fd, arena.num_bytes)
    view = memory.look(KIB64, KIB64, lambda: told.append("over"))
    part = view[10:20]
    # As when the worker that it belongs to is gone.
    del memory, view
    gc.collect()
    assert told == []
    del part
    assert told == ["over"]
    arena.close()


def test_memory_is_the_kernels_again_when_nobody_has_it_any_more() -> None:
    slabs = Slabs(64 * KIB64)
    outputs = slabs.for_outputs()
    assert slabs.inputs is not None
    assert outputs is not None
    left = [weakref.ref(arena.memory) for arena in (slabs.inputs, outputs)]
    for arena in (slabs.inputs, outputs):
        arena.close()
    del slabs, outputs, arena
    gc.collect()
    assert [memory() for memory in left] == [None, None]
