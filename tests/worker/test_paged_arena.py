"""The pages of a model lie side by side in the arena while it runs, whether they are moved or copied there."""

from __future__ import annotations

import numpy as np
import pytest

from clockwright.units import PAGE_BYTES
from worker.devices.paged_arena import PagedArena, can_move_pages
from worker.engines.onnxruntime import Bytes

# A stretch at the begin, in the middle and at the end of a page tells where the page is.
_MARKS = (0, PAGE_BYTES // 2, PAGE_BYTES - 1)
_WAYS = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(not can_move_pages(), reason="a kernel before Linux 5.7"),
        id="moved",
    ),
    pytest.param(False, id="copied"),
]


def _arena(*, moves: bool) -> PagedArena:
    """Four pages, each filled with its own number, and room to show three."""
    arena = PagedArena(4, 3 * PAGE_BYTES, moves=moves)
    for page in range(4):
        arena.write(page, _full(page))
    return arena


def _full(number: int) -> Bytes:
    return np.full(PAGE_BYTES, number, np.uint8)


def _seen(arena: PagedArena, count: int) -> list[list[int]]:
    return [[int(arena.arena[n * PAGE_BYTES + mark]) for mark in _MARKS] for n in range(count)]


@pytest.mark.parametrize("moves", _WAYS)
def test_pages_are_shown_in_the_order_asked_for_and_keep_what_they_hold(*, moves: bool) -> None:
    arena = _arena(moves=moves)
    for pages in ((3, 0, 2), (1,), (0, 3), (0, 3), (2, 1, 0)):
        arena.show(pages, len(pages) * PAGE_BYTES)
        assert _seen(arena, len(pages)) == [[page] * 3 for page in pages]


@pytest.mark.parametrize("moves", _WAYS)
def test_a_page_that_is_shown_can_be_filled_anew_for_another_model(*, moves: bool) -> None:
    arena = _arena(moves=moves)
    arena.show((3, 0), 2 * PAGE_BYTES)
    arena.write(0, _full(9))
    arena.show((1, 0), 2 * PAGE_BYTES)
    assert _seen(arena, 2) == [[1] * 3, [9] * 3]
    arena.show((3, 2), 2 * PAGE_BYTES)
    assert _seen(arena, 2) == [[3] * 3, [2] * 3]


def test_only_as_much_of_the_last_page_is_copied_as_a_model_fills() -> None:
    arena = _arena(moves=False)
    arena.show((1, 2), PAGE_BYTES + 10)
    assert arena.arena[PAGE_BYTES : PAGE_BYTES + 11].tolist() == [2] * 10 + [0]
