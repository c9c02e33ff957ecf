"""Heartbeats, which estimate how a worker's clock differs from the controller's."""

from __future__ import annotations

import random

from clockwright.units import NS_PER_MS
from clockwright.wire.clock_sync import WINDOW_SIZE, ClockSync, MinimumFilter
from experiments.simulator.case import Network, WorkerClock

HEARTBEAT_NS = 200 * NS_PER_MS


class Heartbeats:
    """The production clock synchronisation over simulated delays.

    Heartbeats have a delay of their own instead of a place on the link, so that outcomes with and
    without them can be compared.
    """

    def __init__(self, clock: WorkerClock, network: Network, generator: random.Random) -> None:
        self.sync = ClockSync()
        self._clock = clock
        self._network = network
        self._random = generator
        self._forward = MinimumFilter()

    def settle(self, now_ns: int) -> None:
        """Exchange a window's worth, as if the worker had been connected for a while."""
        for number in range(WINDOW_SIZE, 0, -1):
            self.beat(now_ns - number * HEARTBEAT_NS)

    def beat(self, now_ns: int) -> None:
        """Exchange one heartbeat each way, sent at a virtual time.

        The estimate has them at once, which is one delay early: a heartbeat
        in 200 ms would not show the difference.
        """
        arrives_ns = now_ns + self._delay_ns()
        self._forward.add(self._clock.local_ns(arrives_ns) - now_ns)
        sent_ns = self._clock.local_ns(now_ns)
        self.sync.heard(
            sent_ns=sent_ns,
            received_ns=now_ns + self._delay_ns(),
            peer_min_delta_ns=self._forward.value,
        )

    def _delay_ns(self) -> int:
        jitter_ns = self._network.jitter_ns
        jitter = int(self._random.expovariate(1 / jitter_ns)) if jitter_ns else 0
        return self._network.delay_ns + jitter
