"""Shadows: copies of requests to another version of their model, whose answers are dropped.

A copy is asked when the request has been answered, as a batch client's: with so long an SLO that the scheduler runs it when
nothing else waits, for no tenant, and worth as little as a request can be. It passes no quota and no cache. Of copies that are
still open there are a few at most; beyond that, none are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from clockwright.units import WEIGHT_MIN, RequestId
from clockwright.wire.bulk import Buffer, total_bytes
from controller.core.config import BATCH_SLO_NS
from controller.models.entry import Entry
from controller.port import Answered, Ask, Sink, Told
from controller.runtime import Runtime

#: Copies that are open at a time, and the bytes of their inputs.
OPEN_MAX: Final = 64
OPEN_BYTES_MAX: Final = 64 << 20


class Shadows:
    """Makes copies of requests that are answered, and takes their answers."""

    def __init__(self, runtime: Runtime) -> None:
        """Begin with none."""
        self._runtime = runtime
        self._random: Callable[[], float] = Random().random
        self._open: dict[RequestId, int] = {}
        self._num_bytes = 0

    def follow(
        self, model: Entry, share: float, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> Sink:
        """Choose whether a request that is about to be asked gets a copy, as a share of them does.

        The model takes the same tensors. Returns the sink that is to be told instead.
        """
        if self._random() >= share or ask.rows > model.largest_batch:
            return sink
        return _Followed(self, model, ask, inputs, sink)

    def copy(self, model: Entry, asked: Ask, inputs: Sequence[Buffer]) -> None:
        """Ask a shadow what was just answered, if there is room."""
        rows = asked.rows
        num_bytes = total_bytes(inputs)
        if len(self._open) >= OPEN_MAX or self._num_bytes + num_bytes > OPEN_BYTES_MAX:
            return
        if rows > model.largest_batch or not model.ready_on:
            return
        slo_ns = max(BATCH_SLO_NS, asked.slo_ns)
        ask = Ask(0, rows, self._runtime.clock(), slo_ns, weight=WEIGHT_MIN)
        request_id = self._runtime.ask(model.model_id, ask, inputs, self)
        self._open[request_id] = num_bytes
        self._num_bytes += num_bytes

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Drop the answer of a shadow."""
        self._num_bytes -= self._open.pop(request_id)


@dataclass(slots=True, eq=False)
class _Followed:
    """A request that gets a copy once it is answered."""

    _shadows: Shadows
    _model: Entry
    _ask: Ask
    _inputs: Sequence[Buffer]
    _sink: Sink

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Pass the answer on, and then ask the shadow."""
        self._sink.told(request_id, told, outputs)
        if isinstance(told, Answered):
            self._shadows.copy(self._model, self._ask, self._inputs)
