"""Which inputs a front has sent to workers directly, and which outputs came from there. No I/O, no clock.

The controller tells a front which worker gets the inputs of a request, and later that the request is answered. The
outputs come from the worker, before that or after. The client is answered when both are there. A connection to a
worker that broke may have lost outputs. A request whose outputs are lost begins again.

The inputs of a request may go to several workers, in turn or at once. The controller says whose outputs count.
"""

from __future__ import annotations

from collections.abc import Sequence

from clockwright.wire.bulk import Buffer

#: A worker's number, the action's, and the request's in the action.
Feeding = tuple[int, int, int]


class FedRequests:
    """The books of one connection to a controller."""

    def __init__(self) -> None:
        #: By request: what it was fed to, and the outputs that came from there.
        self._fed: dict[int, dict[Feeding, Sequence[Buffer] | None]] = {}
        self._requests: dict[Feeding, int] = {}
        self._told: dict[int, Feeding] = {}
        #: Outputs of these may be lost.
        self._broken: set[Feeding] = set()

    @property
    def fed(self) -> Sequence[int]:
        """Requests that were fed and are not over."""
        return list(self._fed)

    @property
    def awaited(self) -> Sequence[int]:
        """Requests that are answered but for their outputs."""
        return list(self._told)

    def feed(self, ask_id: int, feeding: Feeding) -> None:
        """A request is sent to a worker."""
        self._fed.setdefault(ask_id, {})[feeding] = None
        self._requests[feeding] = ask_id

    def outputs_came(self, feeding: Feeding, outputs: Sequence[Buffer]) -> int | None:
        """Take outputs in. Returns the request that they answer, or None if the controller has not said so yet."""
        ask_id = self._requests.get(feeding)
        if ask_id is None:
            return None  # The request is withdrawn.
        self._fed[ask_id][feeding] = outputs
        return ask_id if self._told.get(ask_id) == feeding else None

    def told(self, ask_id: int, feeding: Feeding) -> bool:
        """Take in that a request is answered; False: its outputs never come."""
        outputs = self._fed.get(ask_id, {}).get(feeding)
        if outputs is None and (feeding in self._broken or feeding not in self._requests):
            return False
        self._told[ask_id] = feeding
        return True

    def outputs(self, ask_id: int) -> Sequence[Buffer] | None:
        """The outputs of a request that was told; None: they have not come."""
        feeding = self._told.get(ask_id)
        return None if feeding is None else self._fed[ask_id][feeding]

    def forget(self, ask_id: int) -> None:
        """A request is over."""
        self._told.pop(ask_id, None)
        for feeding in self._fed.pop(ask_id, ()):
            self._requests.pop(feeding, None)
            self._broken.discard(feeding)

    def broke(self, worker: int) -> tuple[list[tuple[int, Feeding]], list[int]]:
        """The connection to a worker broke.

        Returns the requests that were fed to it and are not told, whose inputs may have been swallowed; and those that
        are told, whose outputs never come.
        """
        fed = [
            (ask_id, feeding)
            for feeding, ask_id in self._requests.items()
            if feeding[0] == worker and self._fed[ask_id][feeding] is None
        ]
        self._broken.update(feeding for _, feeding in fed)
        lost = [ask_id for ask_id, feeding in fed if self._told.get(ask_id) == feeding]
        return [(ask_id, feeding) for ask_id, feeding in fed if ask_id not in lost], lost
