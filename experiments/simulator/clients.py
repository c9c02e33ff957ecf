"""Plays a workload: open-loop requests at their own times, closed-loop clients once they have a response."""

from __future__ import annotations

import random
from collections.abc import Callable

from clockwright.units import ModelId
from experiments.simulator.loop import NEVER_NS, Loop
from traces.arrivals import ClosedLoop, Workload, WorkloadRequest

#: An arrival: model, SLO in ns, tenant, and the closed-loop client, if it was one.
Arrival = tuple[ModelId, int, str, ClosedLoop | None]

_NO_MORE = WorkloadRequest(NEVER_NS, 0, 0)


class Clients:
    """Hands arrivals to the controller, those of the same instant together."""

    def __init__(
        self,
        workload: Workload,
        loop: Loop,
        generator: random.Random,
        *,
        until_ns: int,
        round_trip_ns: int,
        jitter_ns: int,
        samples_ns: tuple[int, ...] = (),
        refusal_pause_ns: int | None,
        submit: Callable[[list[Arrival]], None],
    ) -> None:
        """Arm the loop with everything that starts.

        No request arrives at or after `until_ns`. From a response's departure to the client's next arrival are
        `round_trip_ns`, an exponential addition of mean `jitter_ns`, and one of the measured `samples_ns`; after a
        refusal the pause too, as in `Case`. `submit` takes the arrivals of the present.
        """
        self._loop = loop
        self._random = generator
        self._until_ns = until_ns
        self._round_trip_ns = round_trip_ns
        self._jitter_ns = jitter_ns
        self._samples_ns = samples_ns
        self._refusal_pause_ns = refusal_pause_ns
        self._submit = submit
        self._names = [ModelId(name) for name in workload.models]
        self._tenants = workload.tenants
        self._source = iter(workload)
        self._next = _NO_MORE
        self._advance()
        loop.arrive = self._arrive
        for client in workload.closed_loops:
            for start_ns in client.starts_ns():
                loop.at(start_ns, self._ask, [client])

    def _advance(self) -> None:
        request = self._next = next(self._source, _NO_MORE)
        time_ns = request[0]
        assert time_ns >= self._loop.now_ns, f"arrival at {time_ns} ns is in the past"
        self._loop.arrival_ns = time_ns if time_ns < self._until_ns else NEVER_NS

    def _arrive(self) -> None:
        loop, now_ns = self._loop, self._loop.now_ns
        arrivals: list[Arrival] = []
        while loop.arrival_ns == now_ns:
            _, model, slo_ns, tenant = self._next
            arrivals.append((self._names[model], slo_ns, self._tenants[tenant], None))
            self._advance()
        self._submit(arrivals)

    def _ask(self, clients: list[ClosedLoop]) -> None:
        now_ns, names = self._loop.now_ns, self._names
        if now_ns >= self._until_ns:
            return
        arrivals: list[Arrival] = [
            (names[client.model], client.slo_ns, self._tenants[client.tenant], client)
            for client in clients
            if now_ns < client.end_ns
        ]
        if arrivals:
            self._submit(arrivals)

    def answered(self, clients: list[ClosedLoop]) -> None:
        """Answers reach these clients, all at the present."""
        self._ask_later(self._loop.now_ns + self._round_trip_ns, clients)

    def refused(self, client: ClosedLoop, deadline_ns: int) -> None:
        """A refusal reaches a client."""
        pause_ns = self._refusal_pause_ns
        now_ns = self._loop.now_ns
        again_ns = max(now_ns, deadline_ns) if pause_ns is None else now_ns + pause_ns
        self._ask_later(again_ns + self._round_trip_ns, [client])

    def _ask_later(self, time_ns: int, clients: list[ClosedLoop]) -> None:
        if not self._jitter_ns and not self._samples_ns:
            self._loop.at(time_ns, self._ask, clients)
            return
        for client in clients:
            late_ns = 0
            if self._jitter_ns:
                late_ns += int(self._random.expovariate(1 / self._jitter_ns))
            if self._samples_ns:
                late_ns += self._random.choice(self._samples_ns)
            self._loop.at(time_ns + late_ns, self._ask, [client])
