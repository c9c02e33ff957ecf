"""The process of `open_loop`: told a load on standard input, it leaves the account on standard output.

HTTP/2 (RFC 9113), HPACK (RFC 7541), gRPC over HTTP/2 and the messages of the Open Inference Protocol are
written and read by hand here, from what is public about them.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import gc
import json
import pickle
import random
import select
import socket
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from experiments.live.open_loop import Account, ClientLoad, End, Times, before_others

_PATH = "/inference.GRPCInferenceService/ModelInfer"

# RFC 9113.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_HEADER_TABLE_SIZE, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 1, 3, 4
_WINDOW, _WINDOW_MAX = 65_535, (1 << 31) - 1
# What every peer takes unless it says more.
_FRAME_MAX = 16_384
# gRPC's own: values of headers that end in -bin come as they are, not in base64.
_ALLOW_TRUE_BINARY = 0xFE03

# Linux gives no name to Python for it; the control message has the same number.
_SO_TIMESTAMPNS = 35
# How many of the bytes in a socket's queue were never sent.
_SIOCOUTQNSD = 0x894B

_OK: End = ("ok", "")
_SILENCE: End = ("other", "no answer")
_LOST: End = ("other", "connection lost")
_REFUSED_CONNECTION: End = ("other", "no connection")

# --- what travels ---------------------------------------------------------------------------------


def request_bytes(model: str, load: ClientLoad) -> bytes:
    """A ModelInferRequest with one input of zeros, written by hand: fields by their numbers."""
    num_bytes = 4
    for size in load.shape:
        num_bytes *= size
    shape = b"".join(map(_varint, load.shape))
    tensor = _field(1, load.input.encode()) + _field(2, b"FP32") + _field(3, shape)
    said = _field(4, _field(1, b"slo_ms") + _field(2, b"\x10" + _varint(load.slo_ms)))
    return _field(1, model.encode()) + said + _field(5, tensor) + _field(7, bytes(num_bytes))


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def header_block(authority: str) -> bytes:
    """A request's headers as HPACK (RFC 7541): two of the static table, and literals that no table keeps."""

    def text(value: str) -> bytes:
        data = value.encode()
        assert len(data) < 127, f"{value} is longer than one byte of length says"
        return bytes((len(data),)) + data

    return (
        b"\x83\x86"  # :method POST, :scheme http
        + (b"\x04" + text(_PATH))
        + (b"\x01" + text(authority))
        + (b"\x00" + text("te") + text("trailers"))
        + (b"\x00" + text("content-type") + text("application/grpc"))
    )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def judge(trailers: bytes) -> End:
    """Say what an answer's last headers mean, an HPACK block without references to earlier ones."""
    import hpack  # Here, because the client needs it only when its run is over.

    headers = dict(hpack.Decoder().decode(trailers, raw=True))
    status = headers.get(b"grpc-status")
    if status is None:
        return ("other", f"HTTP {headers.get(b':status', b'?').decode()} without grpc-status")
    if status == b"0":
        return _OK
    details = headers.get(b"grpc-status-details-bin", b"")
    if details and details[:1] != b"\0":
        details = base64.b64decode(details + b"=" * (-len(details) % 4))
    return _end_of(int(status), details.removeprefix(b"\0"))


def _end_of(status: int, details: bytes) -> End:
    import grpc
    from google.rpc import error_details_pb2, status_pb2

    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(details).details:
        if detail.Unpack(info) and info.reason:
            return ("refused", info.reason)
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return ("other", names.get(status, f"status {status}"))


# --- the raw client -------------------------------------------------------------------------------

_HEAD = struct.Struct(">IBI")
_TIMESPEC = struct.Struct("@qq")
# The kernel begins to stamp what comes at some time after the first socket asked for it.
_STAMPS_BEGIN_S = 2.0
# Stamps that come without a gap for so long do not come from a kernel that is just switching them off.
_STAMPS_STAY_S = 0.05
# A server says how much it takes in the first frame that it sends; one that does not costs this wait.
_SETTINGS_WAIT_S = 2.0


@functools.cache
def _make_kernel_stamp() -> int:
    """Make the kernel stamp whatever comes, for as long as this process lives.

    Linux switches stamps on for the whole machine, in a task of its own, when the first socket asks for
    them, and off likewise when the last one that asked is closed; what comes while they are off is not
    stamped. So this socket asks, is never closed, and sends itself datagrams until their stamps stay: where
    another process has just ended, the first may still be on their way out. A kernel that never stamps is
    given up after two seconds, and the account says so. Returns the socket's file descriptor.
    """
    stamped = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stamped.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    stamped.bind(("127.0.0.1", 0))
    stamped.settimeout(0.1)
    since_s = time.monotonic()
    end_s = since_s + _STAMPS_BEGIN_S
    while since_s + _STAMPS_STAY_S > (now_s := time.monotonic()) < end_s:
        stamped.sendto(b"?", stamped.getsockname())
        with contextlib.suppress(TimeoutError):
            if stamped.recvmsg(1, 64)[1]:
                time.sleep(0.001)
                continue
        since_s = now_s
    # Nothing owns it from now on, or the interpreter's end would say that it was left open.
    return stamped.detach()


class _Connection:
    """One connection; requests are known by their number in the run."""

    def __init__(self, client: _Client, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.client = client
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.setblocking(False)
        #: Streams that are open, with their requests.
        self.open: dict[int, int] = {}
        #: Requests that the server's windows and limits do not let out yet.
        self.held: deque[int] = deque()
        #: Bytes that the socket did not take yet.
        self.unsent = bytearray()
        self.closing = False
        #: Whether the server has said what it takes.
        self.settled = False
        self._stream = 1
        self._rest = b""
        self._window = _WINDOW
        self._streams_max = _WINDOW_MAX
        settings = struct.pack(
            ">HIHIHI",
            # The server keeps no table, so that each block of headers is read alone.
            *(_HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _WINDOW_MAX, _ALLOW_TRUE_BINARY, 1),
        )
        room = struct.pack(">I", _WINDOW_MAX - _WINDOW)
        self.write(_PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, room))

    def ask(self, requests: Sequence[int]) -> None:
        """Send requests, or hold back what the server has no room for."""
        self.held.extend(requests)
        parts: list[bytes] = []
        asked: list[int] = []
        while self.held:
            data = self.client.data_of(self.held[0])
            if len(data) > self._window or len(self.open) >= self._streams_max:
                break
            stream = self._stream
            self._stream += 2
            self._window -= len(data)
            self.open[stream] = request = self.held.popleft()
            asked.append(request)
            name = stream.to_bytes(4, "big")
            parts += (self.client.headers_head, name, self.client.block)
            parts += (_HEAD.pack(len(data) << 8 | _DATA, _END_STREAM, stream), data)
        if parts:
            self.write(b"".join(parts))
            if self.unsent or self._kernel_keeps():
                self.client.keep(asked)

    def _kernel_keeps(self) -> bool:
        """Whether this machine has not sent all yet: as much as the congestion window allows is on its way."""
        data = fcntl.ioctl(self.socket, _SIOCOUTQNSD, bytes(4))
        return int.from_bytes(data, sys.byteorder) > 0

    def write(self, data: bytes) -> None:
        """Send bytes, now or when the socket takes them."""
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # The reading end hears of it too.
        if sent < len(data):
            self.unsent += data[sent:]

    def flush(self) -> None:
        """Write what the socket did not take before."""
        data = bytes(self.unsent)
        self.unsent.clear()
        self.write(data)

    def read(self) -> bool:
        """Take what has come; False at the connection's end."""
        try:
            data, control, _, _ = self.socket.recvmsg(1 << 18, 64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if control:
            seconds, nanoseconds = _TIMESPEC.unpack(control[0][2])
            self._take(data, seconds * 1_000_000_000 + nanoseconds)
        else:
            self.client.kernel_stamps = False
            self._take(data, time.time_ns())
        return True

    def _take(self, data: bytes, now_ns: int) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= 9:
            head, flags, stream = _HEAD.unpack_from(data, at)
            after = at + 9 + (head >> 8)
            if after > end:
                break
            kind = head & 255
            if kind == _HEADERS:
                if flags & _END_STREAM:
                    block = data[at + 9 : after]
                    self._ended(stream, now_ns, _block_of(block, flags))
            elif kind == _DATA:
                if flags & _END_STREAM:
                    self._ended(stream, now_ns, ("other", "no grpc-status"))
            else:
                self._control(kind, flags, stream, data[at + 9 : after], now_ns)
            at = after
        self._rest = data[at:]
        if self.held:
            self.ask(())

    def _control(self, kind: int, flags: int, stream: int, payload: bytes, now_ns: int) -> None:
        if kind == _WINDOW_UPDATE:
            if not stream:
                self._window += int.from_bytes(payload, "big")
        elif kind == _PING:
            if not flags & _ACK:
                self.write(frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS:
            if not flags & _ACK:
                for name, value in struct.iter_unpack(">HI", payload):
                    if name == _MAX_CONCURRENT_STREAMS:
                        self._streams_max = value
                self.settled = True
                self.write(frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _RST_STREAM:
            code = int.from_bytes(payload, "big")
            self._ended(stream, now_ns, ("other", f"RST_STREAM {code}"))
        elif kind == _GOAWAY:
            last, code = struct.unpack_from(">II", payload)
            self.closing = True
            end = ("other", f"GOAWAY {code}")
            for stream in [stream for stream in self.open if stream > last]:
                self._ended(stream, now_ns, end)
            while self.held:
                self.client.ended(self.held.popleft(), now_ns, end)

    def _ended(self, stream: int, now_ns: int, end: bytes | End) -> None:
        request = self.open.pop(stream, None)
        if request is not None:
            self.client.ended(request, now_ns, end)


def _block_of(payload: bytes, flags: int) -> bytes | End:
    """The headers in a HEADERS frame."""
    if not flags & _END_HEADERS:
        return ("other", "headers in several frames")
    if flags & _PADDED:
        payload = payload[1 : len(payload) - payload[0]]
    return payload[5:] if flags & _PRIORITY else payload


class _Client:
    """Sends, reads and stamps; judges only when all is over."""

    def __init__(self, load: ClientLoad) -> None:
        self._load = load
        self.block = header_block(load.address)
        self.headers_head = struct.pack(">IB", len(self.block) << 8 | _HEADERS, _END_HEADERS)
        messages = [request_bytes(model, load) for model in load.models]
        if load.messages:
            with open(load.messages, "rb") as file:
                messages = pickle.load(file)
        self._data = [struct.pack(">BI", 0, len(message)) + message for message in messages]
        largest = max(map(len, self._data))
        if largest > _FRAME_MAX:
            raise ValueError(
                f"a request of {largest} bytes, expected one frame of at most {_FRAME_MAX}"
            )
        self.kernel_stamps = True
        # One entry per request; arrays, because a run may have millions.
        self.due_ns = array("q")
        self.models = array("q")
        self.sent_ns = array("q")
        self.done_ns = array("q")
        self.ends: list[bytes | End | None] = []
        #: Answers of the same bytes are kept once.
        self._blocks: dict[bytes, bytes] = {}
        self._connections: list[_Connection] = []
        self._by_socket: dict[socket.socket, _Connection] = {}
        self._turn = 0
        self._num_open = 0
        self._rng = random.Random(load.seed)
        self._end_ns = 0
        self._kept = array("b")

    def keep(self, requests: Sequence[int]) -> None:
        """Note of requests that they are written, but have not all left this machine."""
        for request in requests:
            self._kept[request] = 1

    def data_of(self, request: int) -> bytes:
        """A request's message with gRPC's five bytes in front."""
        return self._data[self.models[request]]

    def ended(self, request: int, now_ns: int, end: bytes | End) -> None:
        """Keep how a request ended."""
        self.done_ns[request] = now_ns
        self.ends[request] = self._blocks.setdefault(end, end) if isinstance(end, bytes) else end
        self._num_open -= 1
        if self._load.concurrency and now_ns < self._end_ns:
            self.due_ns.append(now_ns)
            self.models.append(self._rng.randrange(len(self._load.models)))

    def run(self, begin: Callable[[], None]) -> Account:
        """Ask all requests; calls `begin` just before the first."""
        _make_kernel_stamp()
        load = self._load
        for _ in range(load.connections):
            self._connections.append(self._connect())
        self._await_settings()
        times_ns, models = _requests(load, self._rng)
        begin()
        begin_ns, cpu_s, monotonic_ns = time.time_ns(), time.process_time(), time.monotonic_ns()
        self._end_ns = begin_ns + round(load.seconds * 1e9)
        due_ns, sent_ns, done_ns = self.due_ns, self.sent_ns, self.done_ns
        due_ns.frombytes((times_ns + begin_ns).tobytes())
        self.models.frombytes(models.tobytes())
        limit_ns = self._end_ns + load.slo_ms * 1_000_000 + round(load.patience_s * 1e9)
        num_sent = 0
        while num_sent < len(due_ns) or self._num_open:
            now_ns = time.time_ns()
            if now_ns > limit_ns:
                break
            first = num_sent
            while num_sent < len(due_ns) and due_ns[num_sent] <= now_ns:
                num_sent += 1
                sent_ns.append(now_ns)
                done_ns.append(0)
                self._kept.append(0)
                self.ends.append(None)
            if num_sent > first:
                self._num_open += num_sent - first
                self._send(range(first, num_sent), now_ns)
            if num_sent < len(due_ns) or self._num_open:
                self._wait(due_ns[num_sent] if num_sent < len(due_ns) else limit_ns)
        for sock in self._by_socket:
            sock.close()
        cpu_us = (time.process_time() - cpu_s) * 1e6
        shift_ns = time.time_ns() - begin_ns - (time.monotonic_ns() - monotonic_ns)
        account = self._account(begin_ns, cpu_us / max(1, len(self.ends)))
        if abs(shift_ns) > 1_000_000:
            account.remarks.append(f"the clock was set by {shift_ns / 1e6:.1f} ms")
        return account

    def _connect(self) -> _Connection:
        connection = _Connection(self, self._load.address)
        self._by_socket[connection.socket] = connection
        return connection

    def _await_settings(self) -> None:
        """Hear from each connection what the server takes, so that the first requests keep to it too."""
        until_ns = time.time_ns() + round(_SETTINGS_WAIT_S * 1e9)
        while time.time_ns() < until_ns and not all(
            connection.settled or connection.closing for connection in self._connections
        ):
            self._wait(until_ns)

    def _send(self, due: Sequence[int], now_ns: int) -> None:
        self._turn = (self._turn + 1) % len(self._connections)
        connection = self._connections[self._turn]
        if connection.closing:
            # Answers that the server still owes on the old one are read on.
            try:
                connection = self._connections[self._turn] = self._connect()
            except OSError:
                for request in due:
                    self.ended(request, now_ns, _REFUSED_CONNECTION)
                return
        connection.ask(due)

    def _wait(self, until_ns: int) -> None:
        """Sleep until something has come or is due, or until the next tick, and read what has come."""
        connections, tick_ns = self._by_socket, self._load.tick_us * 1000
        if tick_ns:
            now_ns = time.time_ns()
            time.sleep((tick_ns - now_ns % tick_ns) / 1e9)
            until_ns = now_ns
        # No other call of Python that waits for sockets sleeps less than a millisecond.
        readable, writable, _ = select.select(
            connections,
            [sock for sock, connection in connections.items() if connection.unsent],
            (),
            max(0, until_ns - time.time_ns()) / 1e9,
        )
        for sock in writable:
            connections[sock].flush()
        for sock in readable:
            if not connections[sock].read():
                self._lost(connections.pop(sock))

    def _lost(self, connection: _Connection) -> None:
        connection.closing = True
        connection.socket.close()
        now_ns = time.time_ns()
        for request in (*connection.open.values(), *connection.held):
            self.ended(request, now_ns, _LOST)

    def _account(self, begin_ns: int, cpu_us: float) -> Account:
        judged = functools.cache(judge)
        ends = [judged(end) if isinstance(end, bytes) else end or _SILENCE for end in self.ends]
        now_ns = time.time_ns()
        return Account(
            due_ns=np.array(self.due_ns[: len(self.ends)], np.int64) - begin_ns,
            sent_ns=np.array(self.sent_ns, np.int64) - begin_ns,
            done_ns=np.array([done_ns or now_ns for done_ns in self.done_ns], np.int64) - begin_ns,
            ends=ends,
            slo_ms=self._load.slo_ms,
            seconds=self._load.seconds,
            cpu_us=cpu_us,
            kernel_stamps=self.kernel_stamps,
            kept=np.array(self._kept, bool),
        )


def _requests(load: ClientLoad, rng: random.Random) -> tuple[Times, Times]:
    """When requests are due, and the positions of their models; in a closed loop, of the first ones."""
    if load.schedule:
        times_ns, models = np.load(load.schedule)
        return times_ns, models
    times_ns = [0] * load.concurrency
    if load.rate:
        at_s = rng.expovariate(load.rate)
        while at_s < load.seconds:
            times_ns.append(round(at_s * 1e9))
            at_s += rng.expovariate(load.rate)
    models = [rng.randrange(len(load.models)) for _ in times_ns]
    return np.array(times_ns, np.int64), np.array(models, np.int64)


# --- the process ----------------------------------------------------------------------------------


def run(load: ClientLoad, begin: Callable[[], None] = lambda: None) -> Account:
    """Be the client, in this process.

    Raises:
        ValueError: the load is neither an open loop nor a closed one, or not one for this client.
        OSError: the server cannot be reached.
    """
    if (load.rate > 0) + (load.concurrency > 0) + bool(load.schedule) != 1:
        raise ValueError(
            f"rate {load.rate:g}, concurrency {load.concurrency} and schedule {load.schedule!r}, "
            "expected one of the three"
        )
    return _Client(load).run(begin)


def main() -> None:
    """Do what standard input says and leave the account on standard output."""
    told = json.load(sys.stdin)
    load = ClientLoad(**told | {key: tuple(told[key]) for key in ("models", "shape")})
    gc.disable()

    def begin() -> None:
        sys.stdout.buffer.write(b"began\n")
        sys.stdout.buffer.flush()

    with before_others() as hindrance:
        try:
            account = run(load, begin)
        except OSError as error:
            sys.exit(f"open loop: {load.address}: {error}")
    if hindrance:
        account.remarks.append(f"the client ran at ordinary priority: {hindrance}")
    pickle.dump({name: getattr(account, name) for name in Account.__slots__}, sys.stdout.buffer)


if __name__ == "__main__":
    main()
