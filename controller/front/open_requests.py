"""Which of a front's requests are with its controller, and which wait for one. No I/O, no clock.

A request is *sent* or *held*. The controller tells what became of those that are sent. If it is gone, they are
held, with those that come meanwhile, until a controller is there and they begin afresh, or until they are due.
So a request is told once, and none is forgotten.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """A request, to these books."""

    def done(self) -> bool:
        """Whether nobody waits any more."""


R = TypeVar("R", bound=Waits)


class OpenRequests(Generic[R]):
    """The books. A request that is sent has a name, for people."""

    def __init__(self, *, grace_ns: int) -> None:
        """Begin empty.

        Args:
            grace_ns: a request that is sent may be overdue by so much: the controller refuses it in its own words.
        """
        self._grace_ns = grace_ns
        self._last_id = 0
        #: When each is due.
        self._sent: dict[int, tuple[R, int, str]] = {}
        self._held: dict[R, int] = {}

    @property
    def num_sent(self) -> int:
        """Requests that are with the controller."""
        return len(self._sent)

    @property
    def num_held(self) -> int:
        """Requests that wait for a controller."""
        return len(self._held)

    def send(self, request: R, due_ns: int, name: str) -> int:
        """A request goes to the controller; gives the id by which the controller knows it."""
        self._last_id += 1
        self._sent[self._last_id] = request, due_ns, name
        return self._last_id

    def take(self, ask_id: int) -> tuple[R, str] | None:
        """The controller has told what became of one, or it is withdrawn.

        Returns:
            The request and its name; None: it is not there any more.
        """
        entry = self._sent.pop(ask_id, None)
        return None if entry is None else (entry[0], entry[2])

    def due_ns(self, ask_id: int) -> int | None:
        """When a request that is sent is due; None: it is not there any more."""
        entry = self._sent.get(ask_id)
        return None if entry is None else entry[1]

    def put_back(self, ask_id: int) -> None:
        """The controller does not take one, but the next may: it is held."""
        entry = self._sent.pop(ask_id, None)
        if entry is not None:
            self.hold(entry[0], entry[1])

    def hold(self, request: R, due_ns: int) -> None:
        """A request waits until it can go on."""
        self._held[request] = due_ns

    def release(self, request: R) -> bool:
        """A request that was held goes on, or not if somebody released it before."""
        return self._held.pop(request, None) is not None and not request.done()

    def interrupt(self) -> None:
        """The controller is gone: all are held."""
        for request, due_ns, _ in self._sent.values():
            self.hold(request, due_ns)
        self._sent.clear()

    def resume(self) -> list[R]:
        """A controller is there: gives all that were held, which go on."""
        held, self._held = self._held, {}
        return [request for request in held if not request.done()]

    def overdue(self, now_ns: int) -> list[R]:
        """Give up those whose time is over."""
        late_held = [request for request, due_ns in self._held.items() if due_ns < now_ns]
        for request in late_held:
            del self._held[request]
        latest_ns = now_ns - self._grace_ns
        late_ids = [ask_id for ask_id, (_, due_ns, _) in self._sent.items() if due_ns < latest_ns]
        late_sent = [self._sent.pop(ask_id)[0] for ask_id in late_ids]
        # Those withdrawn while they were held are forgotten here.
        gone = [request for request in self._held if request.done()]
        for request in gone:
            del self._held[request]
        return [request for request in late_held + late_sent if not request.done()]
