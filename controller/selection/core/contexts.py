"""States by application and context: the most recently used in memory, all of them in a store.

It also remembers which contexts have no state: most users never give feedback, and their queries must not cause
reads of the store.

The context "" is the application's global state. It learns from all feedback, and it serves every context
that has no state of its own yet; the first feedback of a new context begins with a copy of it.
No I/O here: a changed state is kept until the caller says that it is written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Any

GLOBAL = ""

Address = tuple[str, str]


class Contexts:
    """An LRU of states, and the states that are still to be written."""

    def __init__(self, *, capacity: int, changes_max: int = 100_000) -> None:
        """Start empty.

        Args:
            capacity: states kept, in addition to those that are still to be written; and as many contexts
                without a state.
            changes_max: states that may wait to be written; those that wait longest are lost first.
        """
        self._capacity = capacity
        self._changes_max = changes_max
        self._states: OrderedDict[Address, Any] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        #: States that have changed and are not known to be written; the one that waits longest is first.
        self._dirty: dict[Address, Any] = {}
        #: Contexts of which the store has no state; the one asked for least recently is first.
        self._stateless: OrderedDict[Address, None] = OrderedDict()
        #: Changes that were given up, because nothing was written for so long that no room was left.
        self.num_lost = 0
        #: A state had to leave memory to make room, so the store may have one that is not here.
        self.has_dropped = False

    def __len__(self) -> int:
        return len(self._states)

    def find(self, application: str, context: str) -> Any | None:  # noqa: ANN401
        """Find a state in memory, and make it the most recently used."""
        address = (application, context)
        state = self._states.get(address)
        if state is not None:
            self._states.move_to_end(address)
            return state
        if address in self._dirty:
            self._keep(address, self._dirty[address])
            return self._dirty[address]
        return None

    def is_stateless(self, application: str, context: str) -> bool:
        """Whether a context, which is not in memory, is known to have no state in the store either."""
        known = (application, context) in self._stateless
        if known:
            self._stateless.move_to_end((application, context))
        return known

    def note_stateless(self, application: str, context: str) -> None:
        """Note that the store has no state of a context."""
        self._stateless[application, context] = None
        if len(self._stateless) > self._capacity:
            self._stateless.popitem(last=False)

    def loaded(self, application: str, context: str, state: Any) -> None:  # noqa: ANN401
        """Take in a state that the store had. A state that is here already is newer and stays."""
        if self.find(application, context) is None:
            self._keep((application, context), state)

    def set(self, application: str, context: str, state: Any) -> None:  # noqa: ANN401
        """Take in a new state, to be written."""
        address = (application, context)
        self._stateless.pop(address, None)
        self._keep(address, state)
        # A state that waits already keeps its place, so one that changes all the time is written too.
        self._dirty[address] = state
        if len(self._dirty) > self._changes_max:
            del self._dirty[next(iter(self._dirty))]
            self.num_lost += 1

    def erase(self, application: str, context: str | None = None) -> None:
        """Forget a context, or all of an application. The latter takes time linear in all states."""
        if context is not None:
            self._drop((application, context))
            self._dirty.pop((application, context), None)
            return
        for address in [address for address in self._states if address[0] == application]:
            self._drop(address)
        # Another policy may find a state where this one could not read any.
        for address in [address for address in self._stateless if address[0] == application]:
            del self._stateless[address]
        for address in [address for address in self._dirty if address[0] == application]:
            del self._dirty[address]

    def changes(self, limit: int) -> dict[Address, Any]:
        """Give up to `limit` states that are to be written; call `written` when they are."""
        return dict(islice(self._dirty.items(), limit))

    def written(self, changes: Mapping[Address, Any]) -> None:
        """Note that these states are in the store. A state that has changed since waits again, last."""
        for address, state in changes.items():
            newest = self._dirty.pop(address, state)
            if newest is not state:
                self._dirty[address] = newest

    def lost(self) -> None:
        """Note that the store has lost everything: all that is in memory is to be written again."""
        for address, state in self._states.items():
            self._dirty.setdefault(address, state)

    @property
    def num_dirty(self) -> int:
        """Number of states that are to be written."""
        return len(self._dirty)

    def num_of(self, application: str) -> int:
        """Number of an application's contexts in memory, without the global one."""
        return self._sizes[application]

    def _keep(self, address: Address, state: Any) -> None:  # noqa: ANN401
        if address not in self._states and address[1] != GLOBAL:
            self._sizes[address[0]] += 1
        self._states[address] = state
        self._states.move_to_end(address)
        while len(self._states) > self._capacity:
            self.has_dropped = True
            self._drop(next(iter(self._states)))

    def _drop(self, address: Address) -> None:
        if self._states.pop(address, None) is not None and address[1] != GLOBAL:
            self._sizes[address[0]] -= 1
