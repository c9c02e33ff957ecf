"""The socket of one connection: when the bytes came that it brings."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterable
from typing import Final, cast

from typing_extensions import override

from clockwright.units import NS_PER_S
from controller.front.http.arrival_clock import ArrivalClock
from controller.front.http.peer_socket import PeerSocket

SINCE_NS: Final = time.time_ns()


class Turns:
    """An `ArrivalClock` whose turns a test begins."""

    bound_ns = 0
    left_unread = False

    def clock(self) -> int:
        """The clock of the kernel's stamps."""
        return time.time_ns()


def test_bytes_that_are_left_unread_for_some_turns_are_as_old_as_in_the_first() -> None:
    async def main() -> list[int]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        turns = Turns()
        peer = PeerSocket(
            ours,
            "unix:",
            None,
            cast("ArrivalClock", turns),
            memoryview(bytearray(1 << 18)),
            floor_ns=5,
            readable=lambda: None,
            drained=lambda: None,
            lost=lambda _: None,
        )
        arrivals = []

        def read(*bounds_ns: int) -> None:
            theirs.send(b"data")
            for bound_ns in bounds_ns[:-1]:
                turns.bound_ns = bound_ns
                peer.put_off()
            turns.bound_ns = bounds_ns[-1]
            received = peer.receive(None)
            assert received is not None
            arrivals.append(received[2])

        read(10)
        read(20, 30, 40)
        read(50)
        peer.leave()
        ours.close()
        theirs.close()
        return arrivals

    assert asyncio.run(main()) == [5, 20, 50]


class Stamped(socket.socket):
    """Brings what a test says, with the kernel's stamps."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.reads: list[tuple[int, int]] = []

    @override
    def recvmsg_into(
        self, _buffers: Iterable[object], _space: int = 0, _flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        num_bytes, age_s = self.reads.pop(0)
        stamp = struct.pack("@ll", SINCE_NS // NS_PER_S - age_s, SINCE_NS % NS_PER_S)
        return num_bytes, [(0, 0, stamp)], 0, None

    @override
    def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]
        return b""


def test_bytes_that_the_kernel_joined_to_later_ones_are_no_younger_than_its_stamp_before() -> None:
    async def main() -> list[int]:
        ours, theirs = socket.socketpair()
        sock = Stamped(ours.detach())
        turns = Turns()
        peer = PeerSocket(
            sock,
            "unix:",
            None,
            cast("ArrivalClock", turns),
            memoryview(bytearray(1 << 18)),
            floor_ns=0,
            readable=lambda: None,
            drained=lambda: None,
            lost=lambda _: None,
        )
        # The second and the third read end inside what came until 5 s ago.
        sock.reads = [(10, 9), (64 << 10, 5), (1 << 18, 5), (10, 5), (10, 1)]
        ages_s = []
        while sock.reads:
            received = peer.receive(None)
            assert received is not None
            ages_s.append(round((SINCE_NS - received[2]) / NS_PER_S))
        peer.leave()
        sock.close()
        theirs.close()
        return ages_s[1:]

    assert asyncio.run(main()) == [9, 9, 9, 5]
