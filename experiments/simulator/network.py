"""One direction of one worker's link."""

from __future__ import annotations

import random

from clockwright.units import NS_PER_S
from experiments.simulator.case import Faults, Network


class VirtualLink:
    """Says when a message arrives. In order, one message on the wire at a time."""

    def __init__(
        self,
        network: Network,
        faults: Faults,
        generator: random.Random,
        *,
        up: bool = False,
    ) -> None:
        """Make an idle link: `up` is the way to the controller, else it is the way to the worker."""
        self._network = network
        self._samples_ns = network.up_samples_ns if up else network.down_samples_ns
        self._delay_ns = network.delay_ns_of(up=up)
        self._bytes_per_s = network.bytes_per_s_of(up=up)
        self._faults = faults
        self._faulty = bool(faults.delay_probability or faults.loss_probability)
        self._random = generator
        #: How long the wire has been taken by tensors.
        self.busy_ns = 0
        #: Time at which the wire is free, and at which the last message arrives.
        self._free_ns = 0
        self._arrived_ns = 0

    def send(self, now_ns: int, num_bytes: int) -> int | None:
        """Time at which a message that is sent now arrives; None when it never does."""
        network = self._network
        delay_ns = self._delay_ns
        if network.jitter_ns:
            delay_ns += int(self._random.expovariate(1 / network.jitter_ns))
        if self._samples_ns:
            delay_ns += self._random.choice(self._samples_ns)
        if self._faulty:
            faults = self._faults
            if self._random.random() < faults.delay_probability:
                delay_ns += faults.delay_ns
            if self._random.random() < faults.loss_probability:
                return None
        if self._bytes_per_s is not None and num_bytes:
            begin_ns = now_ns if now_ns > self._free_ns else self._free_ns
            wire_ns = num_bytes * NS_PER_S // self._bytes_per_s
            self._free_ns = begin_ns + wire_ns
            self.busy_ns += wire_ns
        sent_ns = now_ns if now_ns > self._free_ns else self._free_ns
        arrives_ns = sent_ns + delay_ns
        if arrives_ns < self._arrived_ns:
            arrives_ns = self._arrived_ns
        self._arrived_ns = arrives_ns
        return arrives_ns
