"""Large tensors that a front exchanges with workers of other hosts directly, past its controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clockwright.wire.bulk import Buffer
from clockwright.wire.frames import DIRECT_BYTES, PAYLOAD_BYTES_MAX
from controller.front.remote.fed_requests import FedRequests, Feeding
from controller.front.remote.worker_sockets import WorkerSockets
from controller.port import Answered


class OpenAsks(Protocol):
    """The requests whose tensors these are."""

    def due_ns(self, ask_id: int) -> int | None:
        """When a request is due. Returns None if it is over."""

    def answer_apart(self, answered: Answered, outputs: Sequence[Buffer]) -> None:
        """Answer a request with outputs that came from a worker."""

    def begin_again(self, ask_id: int) -> None:
        """An answer is lost: the request is asked again, if it has slack."""

    def hand_on(self, feeding: Feeding, tensors: Sequence[Buffer] | None) -> None:
        """Send inputs through the controller."""


class DirectTensors:
    """Tensors that a front keeps for workers, has sent to them and awaits from them, over one link."""

    def __init__(self, asks: OpenAsks, *, silence_limit_ms: int, needs_tls: bool) -> None:
        """Begin with no workers."""
        self._asks = asks
        #: Workers with which we share no memory.
        self.workers = WorkerSockets(
            self._take_outputs,
            self._broke,
            outputs_bytes_max=PAYLOAD_BYTES_MAX,
            silence_limit_ms=silence_limit_ms,
            needs_tls=needs_tls,
        )
        #: Inputs that workers may be sent, inputs that they were sent, and the answers to which they send outputs.
        self._held: dict[int, Sequence[Buffer]] = {}
        self._fed = FedRequests()
        self._told: dict[int, Answered] = {}

    @property
    def num_held(self) -> int:
        """Requests whose inputs are kept for workers, or whose outputs are awaited from there."""
        return len({*self._held, *self._told, *self._fed.fed})

    @property
    def awaits(self) -> bool:
        """Whether a request is answered but for its outputs."""
        return bool(self._told)

    @property
    def awaited(self) -> Sequence[int]:
        """Requests that are answered but for their outputs."""
        return self._fed.awaited

    def hold(self, ask_id: int, inputs: Sequence[Buffer]) -> None:
        """Keep inputs until the controller names a worker, if it does."""
        if self.workers.num_known:
            self._held[ask_id] = inputs

    def forget(self, ask_id: int) -> None:
        """A request is over."""
        self._held.pop(ask_id, None)
        self._told.pop(ask_id, None)
        self._fed.forget(ask_id)

    def forget_overdue(self) -> None:
        """Forget requests that were given up."""
        for ask_id in [*self._held, *self._fed.fed]:
            if self._asks.due_ns(ask_id) is None:
                self.forget(ask_id)

    def close(self) -> None:
        """The link to the controller is lost."""
        self.workers.close()

    def feed(self, ask_id: int, feeding: Feeding) -> None:
        """Send a worker the large inputs of a request, or tell it that the request is withdrawn."""
        if self._asks.due_ns(ask_id) is None:
            self._send_inputs(feeding, None)
            return
        self._fed.feed(ask_id, feeding)
        self._feed_again(ask_id, feeding)

    def _feed_again(self, ask_id: int, feeding: Feeding) -> None:
        if (inputs := self._held.get(ask_id)) is not None:
            self._send_inputs(feeding, [each for each in inputs if len(each) >= DIRECT_BYTES])

    def _send_inputs(self, feeding: Feeding, tensors: Sequence[Buffer] | None) -> None:
        if not self.workers.send(feeding, tensors):
            self._asks.hand_on(feeding, tensors)

    def _take_outputs(self, feeding: Feeding, outputs: Sequence[Buffer]) -> None:
        if (ask_id := self._fed.outputs_came(feeding, outputs)) is not None:
            self._asks.answer_apart(self._told[ask_id], outputs)

    def told(self, answered: Answered, feeding: Feeding) -> None:
        """The controller says that a request is answered; its outputs come from a worker."""
        ask_id = answered.ask_id
        if self._asks.due_ns(ask_id) is None:
            return
        if not self._fed.told(ask_id, feeding):
            self._asks.begin_again(ask_id)
            return
        self._told[ask_id] = answered
        outputs = self._fed.outputs(ask_id)
        if outputs is not None:
            self._asks.answer_apart(answered, outputs)

    def _broke(self, worker: int) -> None:
        """The connection to a worker broke: inputs that it may not have received go through the controller."""
        fed, lost = self._fed.broke(worker)
        if self.workers.is_there(worker):
            for ask_id, feeding in fed:
                self._feed_again(ask_id, feeding)
        for ask_id in lost:
            self._asks.begin_again(ask_id)
