"""Sockets between the world's processes: what a kernel and a network do, and what goes wrong there.

A connection is two pipes. Each keeps its bytes in order; nothing orders one pipe's bytes against another's. A
link stands between two hosts: it delays, holds everything back while it is cut, as TCP does that sends again, and
breaks what it held back for too long. Bytes may be taken and given in pieces of any length.
"""

from __future__ import annotations

import array
import bisect
import errno
import os
import socket as real
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from experiments.faults.world import Host, World, WorldProcess, current_thread, running_thread

# What the kernels hold on both sides of a pipe together.
_PIPE_BYTES = 256 << 10
# Behind a cut link a connection is given up after this.
_GIVEN_UP_NS = 15 * NS_PER_S
# How long a kernel that has no room at the other end waits before it asks for some.
_PROBE_NS = 200 * NS_PER_MS
_SO_TIMESTAMPNS = 35
_EPHEMERAL_PORT = 32768


class NetworkLink:
    """The way between two hosts."""

    def __init__(self, world: World, same_host: bool) -> None:
        self._world = world
        self.delay_ns = (10 if same_host else 100) * NS_PER_US
        #: Nothing arrives before.
        self.cut_until_ns = 0
        #: One delay in so many is this much longer.
        self.hiccup_one_in = 0
        self.hiccup_ns = 5 * NS_PER_MS

    def arrival_ns(self) -> int:
        """When what is sent now arrives."""
        below = self._world.below
        delay_ns = self.delay_ns + below(self.delay_ns)
        if self.hiccup_one_in and not below(self.hiccup_one_in):
            delay_ns += below(self.hiccup_ns)
        now_ns = self._world.now_ns
        if now_ns < self.cut_until_ns:
            return self.cut_until_ns + delay_ns
        return now_ns + delay_ns


class WorldNetwork:
    """All links, and who listens where."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: dict[frozenset[str], NetworkLink] = {}
        self.listening: dict[tuple[str, object], list[Socket]] = {}
        self.addresses: dict[str, Host] = {}
        #: Real files that are under way.
        self.files: set[int] = set()
        self._last_port = _EPHEMERAL_PORT

    def drop(self, files: Sequence[int]) -> None:
        """Close files that do not arrive."""
        for fd in files:
            self.files.discard(fd)
            os.close(fd)

    def address(self, host: Host) -> str:
        """The address of a host."""
        for address, known in self.addresses.items():
            if known is host:
                return address
        address = f"10.0.0.{len(self.addresses) + 1}"
        self.addresses[address] = host
        return address

    def link(self, one: Host, other: Host) -> NetworkLink:
        """Find or make the link between two hosts."""
        key = frozenset((one.name, other.name))
        if key not in self.links:
            self.links[key] = NetworkLink(self.world, one is other)
        return self.links[key]

    def new_port(self) -> int:
        """Make a port that is free."""
        self._last_port += 1
        return self._last_port

    def find(self, host: Host, where: object) -> Socket | None:
        """Find a socket that listens; several share a place in turn."""
        there = self.listening.get((host.name, where))
        if not there:
            return None
        return there[self.world.random.randrange(len(there))]


class _Segment:
    __slots__ = ("ancillary", "data", "sent_ns", "wall_ns")

    def __init__(self, data: bytes, ancillary: Sequence[int], sent_ns: int) -> None:
        self.data, self.ancillary, self.sent_ns = data, ancillary, sent_ns
        self.wall_ns = 0


class _Pipe:
    """One direction of a connection."""

    def __init__(self, link: NetworkLink, reader: Socket) -> None:
        self._link = link
        self._reader = reader
        self._world = reader.process.world
        #: On their way, None is the end, and received.
        self._under_way: deque[_Segment | None] = deque()
        self.received: deque[_Segment] = deque()
        self.num_bytes = 0
        self.writer: Socket | None = None
        self.ended = False
        self._last_ns = 0
        #: When there was no room last.
        self.full_ns = 0
        #: How many bytes had arrived when, ascending.
        self.arrivals: list[tuple[int, int]] = []
        self._num_arrived = 0

    def room(self) -> int:
        return _PIPE_BYTES - self.num_bytes

    def send(self, data: bytes, ancillary: Sequence[int] = ()) -> None:
        """Send bytes on their way."""
        self.num_bytes += len(data)
        self._deliver(_Segment(data, ancillary, self._world.now_ns))

    def end(self) -> None:
        """Nothing more comes."""
        if not self.ended:
            self.ended = True
            self._deliver(None)

    def break_off(self) -> None:
        """The other end is gone without having read all."""
        self._world.at(self._link.arrival_ns(), lambda: self._reader.reset(errno.ECONNRESET))

    def _deliver(self, segment: _Segment | None) -> None:
        arrival_ns = max(self._link.arrival_ns(), self._last_ns)
        self._last_ns = arrival_ns
        if arrival_ns > self._world.now_ns + _GIVEN_UP_NS:
            self._world.after(_GIVEN_UP_NS, self._give_up)
            return
        self._under_way.append(segment)
        self._world.at(arrival_ns, self._arrived)

    def _give_up(self) -> None:
        for each in (self._reader, self.writer):
            if each is not None:
                each.reset(errno.ETIMEDOUT)

    def _arrived(self) -> None:
        if self._world.now_ns < self._link.cut_until_ns:
            # What was on its way when the link was cut is sent again.
            self._world.at(self._link.cut_until_ns, self._arrived)
            return
        # Whichever this was to be: none overtakes another.
        segment = self._under_way.popleft()
        reader = self._reader
        if reader.is_closed:
            if segment is not None and self.writer is not None:
                reader.network.drop(segment.ancillary)
                writer = self.writer
                self._world.at(self._link.arrival_ns(), lambda: writer.reset(errno.ECONNRESET))
            return
        if segment is None:
            reader.has_end = True
        else:
            host = reader.process.host
            segment.wall_ns = host.clock_ns() + host.wall_ns
            self.received.append(segment)
            self._num_arrived += len(segment.data)
            self.arrivals.append((self._num_arrived, self._world.now_ns))
        reader.notify()

    def take(self, num_bytes: int) -> tuple[bytes, list[int], _Segment]:
        """Take received bytes, at most up to the end of a segment with files."""
        parts: list[bytes] = []
        files: list[int] = []
        while num_bytes and self.received:
            segment = self.received[0]
            if segment.ancillary:
                if parts:
                    break
                files += segment.ancillary
                segment.ancillary = ()
            part = segment.data[:num_bytes]
            parts.append(part)
            num_bytes -= len(part)
            self.num_bytes -= len(part)
            if len(part) == len(segment.data):
                self.received.popleft()
            else:
                segment.data = segment.data[len(part) :]
        if self.writer is not None:
            self.writer.notify()
        return b"".join(parts), files, segment


class Socket:
    """In place of `socket.socket`, in a process of the world."""

    network: WorldNetwork  # of the world that runs

    def __init__(
        self, family: int = real.AF_INET, type: int = real.SOCK_STREAM, proto: int = 0
    ) -> None:
        world = self.network.world
        self.family, self.type, self.proto = family, type, proto
        self.process: WorldProcess = world.running
        self.is_closed = False
        self.has_end = False
        #: When what was read last was sent.
        self.last_sent_ns = 0
        self._number = world.number()
        self._error = 0
        self._timeout: float | None = None
        self._stamps = False
        self._incoming: _Pipe | None = None
        self._outgoing: _Pipe | None = None
        self._name: Any = ("", 0)
        self._peer_name: Any = ("", 0)
        self.peer: Socket | None = None
        self._backlog: deque[Socket] | None = None
        self._waiting: list[Callable[[], None]] = []
        self.process.sockets[self] = None

    def __hash__(self) -> int:
        return self._number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what the loop and the world ask --------------------------------------------------------

    def is_readable(self) -> bool:
        if self._backlog is not None:
            return bool(self._backlog)
        incoming = self._incoming
        return bool(incoming and incoming.received) or self.has_end or self._error != 0

    def is_writable(self) -> bool:
        outgoing = self._outgoing
        return self._error != 0 or (outgoing is not None and outgoing.room() > 0)

    def was_full(self, since_ns: int) -> bool:
        """Whether the network has kept the peer waiting with what it had to say, since a time."""
        assert self._incoming is not None
        return self._incoming.full_ns >= since_ns

    def notify(self) -> None:
        """Something has come, or gone."""
        self.process.loop.mark(self)
        self.process.wake_soon()
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            told()

    def arrived_ns(self, position: int) -> int:
        """When the peer's host got a byte that was sent here; 0: it has not."""
        assert self._outgoing is not None
        arrivals = self._outgoing.arrivals
        index = bisect.bisect_right(arrivals, (position, 1 << 62))
        return arrivals[index][1] if index < len(arrivals) else 0

    def reset(self, error: int) -> None:
        """The connection is over."""
        if not self.is_closed and not self._error:
            self._error = error
            self.notify()

    def tell(self, told: Callable[[], None]) -> None:
        """Have a function called at the next thing that happens."""
        self._waiting.append(told)

    def wait(self) -> None:
        """Block the running thread until something happens."""
        thread = running_thread()
        limit_ns = None if self._timeout is None else round(self._timeout * NS_PER_S)
        self._waiting.append(thread.waker())
        thread.block(limit_ns)

    # --- connecting -----------------------------------------------------------------------------

    def bind(self, where: Any) -> None:
        network, host = self.network, self.process.host
        if self.family == real.AF_UNIX:
            if (host.name, where) in network.listening:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            with open(where, "x"):
                pass
            self._name = where
        else:
            port = where[1] or network.new_port()
            if network.listening.get((host.name, port)) and not self._shares:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            self._name = (network.address(host), port)

    _shares = False

    def listen(self, backlog: int = 0) -> None:
        self._backlog = deque()
        where = self._name if self.family == real.AF_UNIX else self._name[1]
        self.network.listening.setdefault((self.process.host.name, where), []).append(self)

    def accept(self) -> tuple[Socket, Any]:
        assert self._backlog is not None
        if not self._backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = self._backlog.popleft()
        sock._stamps = self._stamps
        return sock, sock._peer_name

    def connect(self, where: Any) -> None:
        network, process = self.network, self.process
        host = process.host
        if self.family == real.AF_UNIX:
            to_host, place = host, where
        else:
            found = network.addresses.get(where[0])
            if found is None:
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            to_host, place = found, where[1]
        link = network.link(host, to_host)
        world = network.world
        thread = running_thread()
        limit_ns = 10 * NS_PER_S if self._timeout is None else round(self._timeout * NS_PER_S)
        there_ns = link.arrival_ns()
        if there_ns - world.now_ns > limit_ns:
            thread.block(limit_ns)
            raise TimeoutError("timed out")
        thread.block(there_ns - world.now_ns)
        listening = network.find(to_host, place)
        if listening is not None:
            self._meet(listening, link)
        back_ns = link.arrival_ns()
        thread.block(min(back_ns - world.now_ns, limit_ns))
        if listening is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def _meet(self, listening: Socket, link: NetworkLink) -> None:
        assert listening._backlog is not None
        other = Socket.__new__(type(self))
        world = self.network.world
        current, world.current = world.current, listening.process
        try:
            other.__init__(self.family, self.type)  # type: ignore[misc]
        finally:
            world.current = current
        self.peer, other.peer = other, self
        network = self.network
        if self.family != real.AF_UNIX:
            self._name = (network.address(self.process.host), network.new_port())
        other._name, other._peer_name, self._peer_name = (
            listening._name,
            self._name,
            listening._name,
        )
        self._outgoing = other._incoming = _Pipe(link, other)
        other._outgoing = self._incoming = _Pipe(link, self)
        self._outgoing.writer, other._outgoing.writer = self, other
        listening._backlog.append(other)
        listening.notify()

    def getsockname(self) -> Any:
        return self._name

    def getpeername(self) -> Any:
        return self._peer_name

    # --- settings -------------------------------------------------------------------------------

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def settimeout(self, limit_s: float | None) -> None:
        self._timeout = limit_s

    def setsockopt(self, level: int, option: int, value: Any = None) -> None:
        if (level, option) == (real.SOL_SOCKET, _SO_TIMESTAMPNS):
            self._stamps = bool(value)
        elif (level, option) == (real.SOL_SOCKET, real.SO_REUSEPORT):
            self._shares = bool(value)

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        if (level, option) == (real.SOL_SOCKET, real.SO_PEERCRED):
            assert self.peer is not None
            return struct.pack("iII", self.peer.process.pid, 0, 0)
        if (level, option) == (real.SOL_SOCKET, real.SO_ERROR):
            return self._error
        return b"" if size else 0

    def fileno(self) -> int:
        return -1 if self.is_closed else 1 << 20 | self._number

    # --- bytes ----------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        return self._send(bytes(data), ())

    def sendmsg(self, buffers: Sequence[Any], ancillary: Sequence[Any] = (), flags: int = 0) -> int:
        files: list[int] = []
        for _, _, data in ancillary:
            found = array.array("i")
            found.frombytes(bytes(data))
            files += [os.dup(fd) for fd in found]
        self.network.files.update(files)
        try:
            return self._send(b"".join(buffers), files)
        except OSError:
            self.network.drop(files)
            raise

    def sendall(self, data: Any, flags: int = 0) -> None:
        rest = bytes(data)
        while rest:
            try:
                rest = rest[self._send(rest, ()) :]
            except BlockingIOError:
                self.wait()

    def _send(self, data: bytes, files: Sequence[int]) -> int:
        if self._error or self.is_closed:
            raise OSError(self._error or errno.EBADF, os.strerror(self._error or errno.EBADF))
        pipe = self._outgoing
        if pipe is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if pipe.ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = pipe.room()
        below = self.network.world.below
        if len(data) > 1 and not below(16):
            data = data[: 1 + below(len(data) - 1)]  # in pieces
        if len(data) > room:
            pipe.full_ns = self.network.world.now_ns
        if not room:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        part = data[:room]
        pipe.send(part, files)
        return len(part)

    def recv_segment(self) -> bytes:
        """Receive what was sent at one time, `last_sent_ns`."""
        pipe = self._incoming
        return self.recv(len(pipe.received[0].data) if pipe is not None and pipe.received else 1)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        data, files, _ = self._receive(num_bytes)
        self.network.drop(files)
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view))
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(
        self, buffers: Sequence[Any], ancillary_bytes: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data, files, segment = self._receive(sum(map(len, views)))
        begin = 0
        for view in views:
            part = data[begin : begin + len(view)]
            view[: len(part)] = part
            begin += len(part)
        ancillary = []
        if files:
            self.network.files.difference_update(files)
            self.process.files.update(files)
            ancillary.append((real.SOL_SOCKET, real.SCM_RIGHTS, array.array("i", files).tobytes()))
        if self._stamps and segment is not None:
            stamp = struct.pack("@ll", *divmod(segment.wall_ns, NS_PER_S))
            ancillary.append((real.SOL_SOCKET, _SO_TIMESTAMPNS, stamp))
        return len(data), ancillary, 0, None

    def _receive(self, num_bytes: int) -> tuple[bytes, list[int], _Segment | None]:
        while True:
            if self.is_closed:
                raise OSError(errno.EBADF, "Bad file descriptor")
            pipe = self._incoming
            if pipe is not None and pipe.received:
                # All there is, as kernels do it: the server takes a short read for a sign that there was no more.
                data, files, segment = pipe.take(num_bytes)
                self.last_sent_ns = segment.sent_ns
                return data, files, segment
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            if self.has_end:
                return b"", [], None
            if self._timeout == 0.0 or current_thread() is None:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            before_ns = self.network.world.now_ns
            self.wait()
            if self._timeout and self.network.world.now_ns - before_ns >= self._timeout * NS_PER_S:
                raise TimeoutError("timed out")

    # --- the end --------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        if self._outgoing is None or self._error:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        if how in (real.SHUT_WR, real.SHUT_RDWR):
            self._outgoing.end()
        if how in (real.SHUT_RD, real.SHUT_RDWR):
            self.has_end = True
            self.notify()

    def close(self, *, silently: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.process.sockets.pop(self, None)
        if self._backlog is not None:
            where = self._name if self.family == real.AF_UNIX else self._name[1]
            there = self.network.listening[self.process.host.name, where]
            there.remove(self)
            for newcomer in self._backlog:
                newcomer.close()
        if self.network.world.over:
            return
        if self._incoming is not None and self._outgoing is not None:
            unread = bool(self._incoming.received)
            for segment in self._incoming.received:
                self.network.drop(segment.ancillary)
            self._incoming.received.clear()
            if silently:
                if not self._incoming.room():
                    # The peer has more to send, and its kernel asks for room until it is told that the peer has gone.
                    self.network.world.after(_PROBE_NS, self._outgoing.break_off)
            elif unread and not self._error:
                self._outgoing.break_off()
            else:
                self._outgoing.end()
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            told()


class Waiter:
    """In place of a worker's `SocketWaiter`."""

    def __init__(self) -> None:
        self._readers: dict[Socket, Callable[[], object]] = {}
        self._is_woken = False
        self._wake: Callable[[], None] = lambda: None

    def add(self, sock: Socket, reader: Callable[[], object]) -> None:
        self._readers[sock] = reader
        self.wake()

    def remove(self, sock: Socket) -> None:
        self._readers.pop(sock, None)

    def wait(self, until_ns: int | None) -> list[Callable[[], object]]:
        """Block the running thread until there is something to read, or for `wake`, or until a time."""
        found = self._readable()
        if not found and not self._is_woken:
            thread = running_thread()
            self._wake = thread.waker()
            for sock in self._readers:
                sock.tell(self._wake)
            thread.block(None if until_ns is None else max(until_ns - time.monotonic_ns(), 0))
            found = self._readable()
        self._is_woken = False
        return found

    def _readable(self) -> list[Callable[[], object]]:
        return [reader for sock, reader in self._readers.items() if sock.is_readable()]

    def wake(self) -> None:
        self._is_woken = True
        self._wake()

    def close(self) -> None:
        pass


def create_connection(
    address: tuple[str, int], timeout: float | None = None, *_: object, **__: object
) -> Socket:
    """In place of `socket.create_connection`."""
    sock = Socket()
    sock.settimeout(timeout)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock
