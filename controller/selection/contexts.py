"""States by application and context: the most recently used in memory, all of them in a store.

The context "" is the application's global state. It learns from everybody's feedback, and whoever has no
state of his own yet is served from it; the first feedback of a new context begins with a copy of it.
No I/O here: what is to be written is collected until somebody takes it away.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

GLOBAL = ""

Address = tuple[str, str]


class Contexts:
    """An LRU of states; every change is kept until it is known to be in the store."""

    def __init__(self, *, capacity: int) -> None:
        """Start empty, for `capacity` states beside those that are still to be written."""
        self._capacity = capacity
        self._states: OrderedDict[Address, Any] = OrderedDict()
        #: Changed, and not handed to a writer yet.
        self._dirty: dict[Address, Any] = {}
        #: Handed to a writer, and not known to be written.
        self._writing: dict[Address, Any] = {}

    def __len__(self) -> int:
        return len(self._states)

    def find(self, application: str, context: str) -> Any | None:  # noqa: ANN401
        """The state, if it is in memory; makes it the most recently used."""
        address = (application, context)
        state = self._states.get(address)
        if state is not None:
            self._states.move_to_end(address)
            return state
        for waiting in (self._dirty, self._writing):
            if address in waiting:
                self._keep(address, waiting[address])
                return waiting[address]
        return None

    def loaded(self, application: str, context: str, state: Any) -> None:  # noqa: ANN401
        """Take in a state that the store had; one that is here already is newer and stays."""
        if self.find(application, context) is None:
            self._keep((application, context), state)

    def set(self, application: str, context: str, state: Any) -> None:  # noqa: ANN401
        """Take in a new state, to be written."""
        address = (application, context)
        self._keep(address, state)
        self._dirty[address] = state

    def erase(self, application: str, context: str | None = None) -> None:
        """Forget a context, or all of an application."""
        for states in (self._states, self._dirty, self._writing):
            if context is not None:
                states.pop((application, context), None)
                continue
            for address in [address for address in states if address[0] == application]:
                del states[address]

    def take_changes(self) -> dict[Address, Any]:
        """What is to be written; call `written` when it is."""
        self._writing, self._dirty = {**self._writing, **self._dirty}, {}
        return dict(self._writing)

    def written(self, changes: dict[Address, Any]) -> None:
        """These are in the store, unless they have changed since."""
        for address, state in changes.items():
            if self._writing.get(address) is state:
                del self._writing[address]

    def of_application(self, application: str) -> dict[str, Any]:
        """States in memory, by context; linear in all."""
        return {
            context: state for (name, context), state in self._states.items() if name == application
        }

    def _keep(self, address: Address, state: Any) -> None:  # noqa: ANN401
        self._states[address] = state
        self._states.move_to_end(address)
        while len(self._states) > self._capacity:
            self._states.popitem(last=False)
