"""Sends one query to several models: a request for each, with one deadline, through the cache.

A member that has not answered in time is left out. Its request is withdrawn unless a worker has it already, so that no
batch runs without a waiting query. A late answer still goes into the cache, and to the queries that left it out, for
later feedback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clockwright.errors import BadRequestError, Refusal
from clockwright.units import NO_REQUEST, NS_PER_S, RequestId
from clockwright.wire.bulk import Buffer, total_bytes
from controller.models.entry import Entry, Pipeline
from controller.port import Answered, Ask, Refused, Told
from controller.selection.core.cache import Key, PredictionCache
from controller.selection.members import Members

#: Tensor bytes per output, in the model's order.
Outputs = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way, which is the sink of its answer, and all ensembles that wait for it."""

    _members: Members
    _member: Entry
    _cache: Cache | None
    key: Key | None
    #: Its number.
    request_id: RequestId = NO_REQUEST
    _waiting: dict[tuple[Ensemble, str], bool] = field(default_factory=dict)
    _left: list[tuple[Ensemble, str]] = field(default_factory=list)
    _is_answered: bool = False

    def join(self, ensemble: Ensemble, member: str, *, first: bool) -> None:
        """Have an ensemble told when the request ends; `first`: the ensemble made the request."""
        self._waiting[ensemble, member] = first

    def leave(self, ensemble: Ensemble, member: str) -> None:
        """Remove an ensemble. When the last one leaves, the request is withdrawn."""
        if self._waiting.pop((ensemble, member), None) is not None:
            self._left.append((ensemble, member))
        if not self._waiting:
            self._end()
            self._members.withdraw(self._member, self.request_id)

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Tell all that wait how the request ended."""
        self._end()
        kept: Outputs | None = None
        refusal = told.refusal if isinstance(told, Refused) else Refusal.FAILED
        if isinstance(told, Answered):
            self._is_answered = True
            kept = self._keep(outputs)
            self._came_late(kept)
        waiting, self._waiting = self._waiting, {}
        for (ensemble, member), first in waiting.items():
            ensemble.member_ended(member, kept, refusal, first=first)

    def came(self, outputs: Sequence[Buffer]) -> None:
        """Take outputs of a worker, which may come when the request is over: tell those who have left."""
        if not self._is_answered:
            self._came_late(self._keep(outputs))

    def _came_late(self, outputs: Outputs) -> None:
        left, self._left = self._left, []
        for ensemble, member in left:
            if ensemble.late is not None:
                ensemble.late(member, outputs)

    def _keep(self, views: Sequence[Buffer]) -> Outputs:
        if self._cache is None or self.key is None:
            return tuple(map(bytes, views))
        return keep(self._cache, self.key, views, self._members.runtime.clock())

    def _end(self) -> None:
        if self._cache is not None and self.key is not None:
            self._cache.end(self.key, self)


Cache = PredictionCache[Outputs, Flight]


def keep(cache: Cache, key: Key, views: Sequence[Buffer], now_ns: int) -> Outputs:
    """Copy outputs, which are views into the message of a whole batch, into the cache."""
    outputs = tuple(map(bytes, views))
    cache.put(key, outputs, total_bytes(outputs), now_ns=now_ns)
    return outputs


def _nothing() -> None:
    pass


class Ensemble:
    """One query to several models, and their answers so far."""

    def __init__(
        self,
        members: Members,
        cache: Cache | None,
        ask: Ask,
        inputs: Sequence[Buffer],
        over: Callable[[], object],
    ) -> None:
        """Prepare a query; `ask` sends it. Without a cache each model is asked.

        `over` is called once, in a later turn of the event loop than `wait`, unless the ensemble is left before.
        """
        #: Outputs of each member that has answered.
        self.answers: dict[str, Outputs] = {}
        #: Members that will not answer in time, and why.
        self.missing: dict[str, Refusal] = {}
        #: Number of the request to each member that was asked; the last one, where it was asked again.
        self.numbers: dict[str, RequestId] = {}
        #: Called with the outputs of a member that was left out; None: they are dropped.
        self.late: Callable[[str, Outputs], None] | None = None
        self._members = members
        self._cache = cache if cache is not None and cache.on else None
        self._ask = ask
        self._inputs = inputs
        self._key_inputs = tuple(map(bytes, inputs)) if self._cache is not None else ()
        self._under_way: dict[str, tuple[Flight, Entry]] = {}
        self._over = over
        self._timer: asyncio.Handle | None = None

    def ask(self, member: Entry) -> None:
        """Ask a member, unless the cache has its answer or knows that it is on its way."""
        # The models of a pipeline may change while it stays the same.
        if self._cache is None or isinstance(member, Pipeline):
            self._start(member, None)
            return
        deadline_ns = self._ask.arrival_ns + self._ask.slo_ns
        key = Key(member.model_id, self._key_inputs)
        now_ns = self._members.runtime.clock()
        found = self._cache.request(key, deadline_ns=deadline_ns, now_ns=now_ns)
        if isinstance(found, Flight):
            found.join(self, member.name, first=False)
            self.numbers[member.name] = found.request_id
            self._under_way[member.name] = found, member
        elif found is not None:
            self.answers[member.name] = found
        else:
            self._start(member, self._cache)

    def wait(self, until_ns: int) -> None:
        """Be over when all members have answered or failed, or at a time, and leave the rest behind."""
        loop = asyncio.get_running_loop()
        if self._under_way:
            delay_s = max(until_ns - self._members.runtime.clock(), 0) / NS_PER_S
            self._timer = loop.call_later(delay_s, self._end)
        else:
            self._timer = loop.call_soon(self._end)

    def leave(self) -> None:
        """Leave behind all members that have not answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        under_way, self._under_way = self._under_way, {}
        for member, (flight, _) in under_way.items():
            self.missing[member] = Refusal.LATE
            flight.leave(self, member)
        # It may hold the ensemble, which would then wait for the garbage collector with all its tensors.
        self._over = _nothing

    def member_ended(
        self, member: str, outputs: Outputs | None, refusal: Refusal, *, first: bool
    ) -> None:
        """Take in how a member's request ended; `first`: this ensemble made the request."""
        entry = self._under_way.pop(member, None)
        if entry is None:
            return  # It is being left behind: the scheduler refused it when it heard of another one.
        _, asked = entry
        if outputs is not None:
            self.answers[member] = outputs
        elif not first and refusal is not Refusal.MODEL_REMOVED:
            # The refused request was another ensemble's, with an earlier deadline. Ask again with ours.
            self._start(asked, self._cache)
        else:
            self.missing[member] = refusal
        if not self._under_way and self._timer is not None:
            self._timer.cancel()
            # A policy may take long, and other answers wait to be told.
            self._timer = asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        over = self._over
        self.leave()
        over()

    def _start(self, member: Entry, cache: Cache | None) -> None:
        key = None if cache is None else Key(member.model_id, self._key_inputs)
        flight = Flight(self._members, member, cache, key)
        try:
            flight.request_id = self._members.ask(member, self._ask, self._inputs, flight)
        except BadRequestError:  # Its open dimensions do not take the query's sizes.
            self.missing[member.name] = Refusal.FAILED
            return
        self.numbers[member.name] = flight.request_id
        flight.join(self, member.name, first=True)
        self._under_way[member.name] = flight, member
        if cache is not None and key is not None:
            cache.begin(key, flight, deadline_ns=self._ask.arrival_ns + self._ask.slo_ns)
