"""Models that wait to be loaded, the smallest key first.

The order is a lower bound, corrected when a look comes to it, as in `strategies`.
"""

from __future__ import annotations

from collections.abc import Callable

from sortedcontainers import SortedList

from controller.core.state import Model


class LoadQueue:
    """Models in order of `Model.load_key`, which is None for a model that is not queued."""

    __slots__ = ("_key_of", "_order", "num_models")

    def __init__(self, key_of: Callable[[Model, int], float | None]) -> None:
        """Make an empty one. `key_of` gives a queued model's key at a time; None: it needs no load any more."""
        self._key_of = key_of
        #: (key, sequence, model).
        self._order = SortedList()
        #: Models that are queued. Some may no longer need a load.
        self.num_models = 0

    def want(self, model: Model, key: float) -> None:
        """Queue the model, or move it forward; a larger key than it has changes nothing."""
        if model.load_key is None:
            model.load_key = key
            self._order.add((key, model.sequence, model))
            self.num_models += 1
        elif key < model.load_key:
            self.move(model, key)

    def move(self, model: Model, key: float) -> None:
        """Give a queued model another key."""
        if key == model.load_key:
            return
        self._order.remove((model.load_key, model.sequence, model))
        model.load_key = key
        self._order.add((key, model.sequence, model))

    def unwant(self, model: Model) -> None:
        """The model needs no load any more, or gets one."""
        self._order.remove((model.load_key, model.sequence, model))
        model.load_key = None
        self.num_models -= 1

    def at(self, place: int, now_ns: int) -> Model | None:
        """The model at a place, 0 for the first. Returns None behind the last. Models that need no load leave."""
        order = self._order
        while place < self.num_models:
            old, _, model = order[place]
            key = self._key_of(model, now_ns)
            if key is None:
                self.unwant(model)
            elif key > old:
                self.move(model, key)
            else:
                found: Model = model
                return found
        return None
