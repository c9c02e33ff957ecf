"""Asks several models one question: a request for each, with one deadline, through the cache.

A member that has not answered when time is up is left behind. Its request is withdrawn unless a worker has
it already, so that no batch runs for which nobody waits any more. What the worker answers then still goes
into the cache, and to those who left, for the feedback to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from clockwright.bulk import Buffer
from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_S, ModelId, RequestId
from controller.runtime import Answer, Runtime
from controller.selection.core.cache import Key, PredictionCache

#: Tensor bytes per output, in the model's order.
Outputs = tuple[bytes, ...]


class Flight:
    """A request under way, and all ensembles that wait for it."""

    __slots__ = ("_future", "_left", "_waiting", "request_id")

    def __init__(self) -> None:
        #: Its number.
        self.request_id = RequestId(0)
        self._future: asyncio.Future[Answer] | None = None
        self._waiting: dict[tuple[Ensemble, str], bool] = {}
        self._left: list[tuple[Ensemble, str]] = []

    def start(self, request_id: RequestId, future: asyncio.Future[Answer]) -> None:
        """Note the request that is under way."""
        self.request_id = request_id
        self._future = future

    def join(self, ensemble: Ensemble, member: str, *, first: bool) -> None:
        """Have an ensemble told when the request ends; `first`: the ensemble made the request."""
        self._waiting[ensemble, member] = first

    def leave(self, ensemble: Ensemble, member: str) -> None:
        """Let an ensemble wait no more. When the last one leaves, the request is withdrawn."""
        if self._waiting.pop((ensemble, member), None) is not None:
            self._left.append((ensemble, member))
        if not self._waiting and self._future is not None:
            self._future.cancel()

    def came_late(self, outputs: Outputs) -> None:
        """Tell those who have left that there is an answer after all."""
        left, self._left = self._left, []
        for ensemble, member in left:
            if ensemble.late is not None:
                ensemble.late(member, outputs)

    def ended(self, outputs: Outputs | None, refusal: Refusal) -> None:
        """Tell all that wait how the request ended; `outputs` is None after a refusal."""
        waiting, self._waiting = self._waiting, {}
        if outputs is not None:
            self.came_late(outputs)
        for (ensemble, member), first in waiting.items():
            ensemble.member_ended(member, outputs, refusal, first=first)


Cache = PredictionCache[Outputs, Flight]


class Ensemble:
    """One question to several models, and their answers so far."""

    def __init__(
        self,
        runtime: Runtime,
        cache: Cache | None,
        inputs: Sequence[Buffer],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        tenant: str = "",
    ) -> None:
        """Prepare a question; `ask` asks it.

        Args:
            runtime: takes the requests.
            cache: is looked into before a model is asked; None: it never is.
            inputs: tensor bytes per input; kept until all have answered or been left behind.
            rows: of every request.
            arrival_ns: when the question arrived, on the controller's clock.
            slo_ns: the SLO of every request.
            tenant: the tenant of every request.
        """
        #: Outputs of each member that has answered.
        self.answers: dict[str, Outputs] = {}
        #: Members that will not answer in time, and why.
        self.missing: dict[str, Refusal] = {}
        #: Number of the request to each member that was asked; the last one, where it was asked again.
        self.numbers: dict[str, RequestId] = {}
        #: Takes the outputs of a member that was left behind; None: nobody wants them.
        self.late: Callable[[str, Outputs], None] | None = None
        self._runtime = runtime
        self._cache = cache if cache is not None and cache.on else None
        self._inputs = inputs
        self._key_inputs = tuple(map(bytes, inputs)) if self._cache is not None else ()
        self._rows = rows
        self._arrival_ns = arrival_ns
        self._slo_ns = slo_ns
        self._tenant = tenant
        self._under_way: dict[str, tuple[Flight, ModelId]] = {}
        self._over: asyncio.Future[None] | None = None

    def ask(self, member: str, model_id: ModelId) -> None:
        """Ask a member, unless the cache has its answer or knows that it is on its way."""
        if self._cache is None:
            self._start(member, model_id)
            return
        deadline_ns = self._arrival_ns + self._slo_ns
        key = Key(model_id, self._key_inputs)
        found = self._cache.request(key, deadline_ns=deadline_ns, now_ns=self._runtime.clock())
        if isinstance(found, Flight):
            found.join(self, member, first=False)
            self.numbers[member] = found.request_id
            self._under_way[member] = found, model_id
        elif found is not None:
            self.answers[member] = found
        else:
            self._start(member, model_id)

    async def wait(self, until_ns: int) -> None:
        """Wait until all members have answered or failed, or until a time, and leave the rest behind.

        When it is cancelled, it leaves all behind.
        """
        try:
            if self._under_way:
                loop = asyncio.get_running_loop()
                self._over = loop.create_future()
                delay_s = max(until_ns - self._runtime.clock(), 0) / NS_PER_S
                timer = loop.call_later(delay_s, self._end)
                try:
                    await self._over
                finally:
                    timer.cancel()
        finally:
            for member, (flight, _) in self._under_way.items():
                self.missing[member] = Refusal.LATE
                flight.leave(self, member)
            self._under_way.clear()

    def member_ended(
        self, member: str, outputs: Outputs | None, refusal: Refusal, *, first: bool
    ) -> None:
        """Take in how a member's request ended; `first`: this ensemble made the request."""
        _, model_id = self._under_way.pop(member)
        if outputs is not None:
            self.answers[member] = outputs
        elif not first and refusal is not Refusal.MODEL_REMOVED:
            # The refused request was another ensemble's, with an earlier deadline. Ask again with ours.
            self._start(member, model_id)
        else:
            self.missing[member] = refusal
        if not self._under_way:
            self._end()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _start(self, member: str, model_id: ModelId) -> None:
        flight = Flight()
        cache, key = self._cache, Key(model_id, self._key_inputs)

        def keep(views: Sequence[Buffer]) -> Outputs:
            # Outputs are copied: they are views into the message of the whole batch.
            outputs = tuple(map(bytes, views))
            if cache is not None:
                cache.put(key, outputs, sum(map(len, outputs)), now_ns=self._runtime.clock())
            return outputs

        def came(views: Sequence[Buffer]) -> None:
            if future.cancelled() or (future.done() and future.exception() is not None):
                flight.came_late(keep(views))

        future = self._runtime.submit(
            model_id,
            self._inputs,
            rows=self._rows,
            arrival_ns=self._arrival_ns,
            slo_ns=self._slo_ns,
            tenant=self._tenant,
            late=came,
        )
        flight.start(self._runtime.last_id, future)
        self.numbers[member] = flight.request_id
        flight.join(self, member, first=True)
        self._under_way[member] = flight, model_id
        if cache is not None:
            cache.begin(key, flight, deadline_ns=self._arrival_ns + self._slo_ns)

        def ended(future: asyncio.Future[Answer]) -> None:
            if cache is not None:
                cache.end(key, flight)
            if future.cancelled():
                # All ensembles have left, or the loop is ending.
                flight.ended(None, Refusal.LATE)
                return
            error = future.exception()
            if error is not None:
                refusal = error.refusal if isinstance(error, RefusedError) else Refusal.FAILED
                flight.ended(None, refusal)
                return
            flight.ended(keep(future.result().outputs), Refusal.LATE)

        future.add_done_callback(ended)
