"""Models that wait to be loaded, the smallest key first.

The order is a lower bound, corrected when it comes to the top, as in `strategies`. An entry is stale unless its
key equals the model's `load_key`. It stays a heap for the reason measured in `strategies`, and because nobody
removes from its middle: a model leaves when it comes to the top.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from controller.core.state import Model

#: (key, sequence, serial, model).
Entry = tuple[float, int, int, Model]


class LoadQueue:
    """A heap in which a model stands once; `Model.load_key` is its key, None when it does not."""

    __slots__ = ("_heap", "_key_of", "_serial", "num_models")

    def __init__(self, key_of: Callable[[Model, int], float | None]) -> None:
        """Make an empty one.

        Args:
            key_of: the key that a queued model has at a time, None when it needs no load any more.
        """
        self._key_of = key_of
        self._heap: list[Entry] = []
        self._serial = count()
        #: Models that stand in it; some may need a load no more.
        self.num_models = 0

    def want(self, model: Model, key: float) -> None:
        """Queue the model, or move it forward; a larger key than it has changes nothing."""
        if model.load_key is None:
            self.num_models += 1
        elif key >= model.load_key:
            return
        model.load_key = key
        heap = self._heap
        heappush(heap, (key, model.sequence, next(self._serial), model))
        # Keys that fall again and again would leave an entry each time.
        if len(heap) > 64 + 4 * self.num_models:
            heap[:] = [entry for entry in heap if entry[3].load_key == entry[0]]
            heapify(heap)

    def unwant(self, model: Model) -> None:
        """The model needs no load any more, or gets one; its entry is stale from now on."""
        model.load_key = None
        self.num_models -= 1

    def first(self, now_ns: int) -> Entry | None:
        """The entry with the smallest key, which stays; models that need no load leave."""
        heap = self._heap
        while heap:
            old, _, _, model = heap[0]
            if model.load_key != old:
                heappop(heap)
                continue
            key = self._key_of(model, now_ns)
            if key is None:
                heappop(heap)
                self.unwant(model)
            elif key > old:
                self.postpone(model, key)
            else:
                return heap[0]
        return None

    def pop(self) -> Entry:
        """Take out the entry that `first` gave. Its model stays queued: `put_back` or `unwant` it."""
        return heappop(self._heap)

    def put_back(self, entry: Entry) -> None:
        """An entry that was taken out is not chosen."""
        heappush(self._heap, entry)

    def put_back_at(self, model: Model, key: float) -> None:
        """A model whose entry was taken out is not chosen, and has another key now."""
        model.load_key = key
        heappush(self._heap, (key, model.sequence, next(self._serial), model))

    def postpone(self, model: Model, key: float) -> bool:
        """Give the first model a larger key; tells whether it is the first still."""
        model.load_key = key
        entry = (key, model.sequence, next(self._serial), model)
        heapreplace(self._heap, entry)
        return self._heap[0] is entry
