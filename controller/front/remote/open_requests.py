"""Which of a front's requests are with its controller, and which wait for one. No I/O, no clock.

A request is *sent* or *held*. The controller answers those that are sent. If the controller is lost, they are held,
with those that arrive meanwhile, until another controller takes them or until they are due. So every request gets
exactly one answer. Steps of sequences are not asked twice, because the controller may have run them.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from controller.port import Sink


class Waits(Sink, Protocol):
    """A request, to these books."""

    def done(self) -> bool:
        """Whether the request is answered or withdrawn."""

    def is_step(self) -> bool:
        """Whether the request changes the state of a sequence, so that it must not run twice."""

    @property
    def due_ns(self) -> int:
        """When the next answer is due of a request that has several."""


R = TypeVar("R", bound=Waits)


class OpenRequests(Generic[R]):
    """The books. A request that is sent has a tenant."""

    def __init__(self, *, grace_ns: int) -> None:
        """Begin empty. A sent request may be overdue by the grace: the controller refuses it in its own words."""
        self._grace_ns = grace_ns
        self._last_id = 0
        #: When each is due, its tenant, and whether some of its answers came: then it cannot begin again.
        self._sent: dict[int, tuple[R, int, str, bool]] = {}
        self._held: dict[R, int] = {}

    @property
    def num_sent(self) -> int:
        """Requests that are with the controller."""
        return len(self._sent)

    @property
    def num_held(self) -> int:
        """Requests that wait for a controller."""
        return len(self._held)

    def send(self, request: R, due_ns: int, tenant: str) -> int:
        """A request goes to the controller. Returns the id by which the controller knows it."""
        self._last_id += 1
        self._sent[self._last_id] = request, due_ns, tenant, False
        return self._last_id

    def take(self, ask_id: int) -> tuple[R, str] | None:
        """Remove a request that the controller has answered, or that is withdrawn.

        Returns the request and its tenant. None if it is over.
        """
        entry = self._sent.pop(ask_id, None)
        return None if entry is None else (entry[0], entry[2])

    def find(self, ask_id: int) -> R | None:
        """Find a request that is sent. Returns None if it is over."""
        entry = self._sent.get(ask_id)
        return None if entry is None else entry[0]

    def renew(self, ask_id: int, due_ns: int) -> None:
        """One of several answers came, and the next is due then; unless the request is over."""
        if ask_id in self._sent:
            request, _, tenant, _ = self._sent[ask_id]
            self._sent[ask_id] = request, due_ns, tenant, True

    def due_ns(self, ask_id: int) -> int | None:
        """When a request that is sent is due. Returns None if it is over."""
        entry = self._sent.get(ask_id)
        return None if entry is None else entry[1]

    def put_back(self, ask_id: int) -> None:
        """Hold a request that this controller refuses and the next may take."""
        entry = self._sent.pop(ask_id, None)
        if entry is not None:
            self.hold(entry[0], entry[1])

    def hold(self, request: R, due_ns: int) -> None:
        """A request waits until it can go on."""
        self._held[request] = due_ns

    def release(self, request: R) -> bool:
        """Take a request out of those held. Returns False if it was not held or is over."""
        return self._held.pop(request, None) is not None and not request.done()

    def interrupt(self) -> list[R]:
        """The link is lost: requests are held. Returns those that cannot begin again, which are over here."""
        over = []
        for request, due_ns, _, has_begun in self._sent.values():
            if has_begun or request.is_step():
                over.append(request)
            else:
                self.hold(request, due_ns)
        self._sent.clear()
        return over

    def resume(self) -> list[R]:
        """A controller is connected: returns all requests that were held, which go on."""
        held, self._held = self._held, {}
        return [request for request in held if not request.done()]

    def overdue(self, now_ns: int) -> list[R]:
        """Give up those whose time is over."""
        late_held = [request for request, due_ns in self._held.items() if due_ns < now_ns]
        for request in late_held:
            del self._held[request]
        latest_ns = now_ns - self._grace_ns
        late_ids = [
            ask_id for ask_id, (_, due_ns, _, _) in self._sent.items() if due_ns < latest_ns
        ]
        late_sent = [self._sent.pop(ask_id)[0] for ask_id in late_ids]
        # Those withdrawn while they were held are forgotten here.
        gone = [request for request in self._held if request.done()]
        for request in gone:
            del self._held[request]
        return [request for request in late_held + late_sent if not request.done()]
