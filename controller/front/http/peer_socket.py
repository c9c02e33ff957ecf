"""The socket of one connection: its bytes and when they came, TLS, and what the peer has not taken yet."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from clockwright.units import NS_PER_S
from clockwright.wire.bulk import Buffer, total_bytes
from controller.access.authoriser import Certificate
from controller.front.http.arrival_clock import ArrivalClock
from controller.front.http.calls import is_local
from controller.front.http.http2 import Http2Connection
from controller.front.http.tls import HANDSHAKE_RECORD, TlsSession

log = logging.getLogger(__name__)

#: Small requests that come together fit in, and what is read of a large one before its place is known is little.
_READ_BYTES = 64 << 10
#: Where that was not all.
READ_BYTES_MORE = 256 << 10
#: From a client that compresses: what it sends may be a thousand times as large when it is unpacked, in one turn.
_READ_BYTES_COMPRESSED = 16 << 10
#: With so much that the socket does not take, nothing more is read from a peer until it reads itself.
UNSENT_BYTES_MAX = 1 << 20
#: So much is made one piece before it is written; larger parts are not copied.
_JOINED_BYTES_MAX = 64 << 10
#: Pieces that the kernel is handed at once; Linux takes 1,024.
_PARTS_PER_CALL = 256

_TIMESPEC = struct.Struct("@ll")
_TCP_INFO_BYTES = 160
#: `tcpi_bytes_received` and `tcpi_data_segs_in` of Linux's `struct tcp_info`.
_RECEIVED = struct.Struct("@128xQ16xI")


class PeerSocket:
    """Reads and writes one connection. It closes nothing: `lost` is to."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        tls: ssl.SSLContext | None,
        arrivals: ArrivalClock,
        buffer: memoryview,
        *,
        floor_ns: int,
        readable: Callable[[], object],
        drained: Callable[[], object],
        lost: Callable[[str], object],
    ) -> None:
        """Begin to watch a socket.

        Args:
            sock: accepted, non-blocking.
            name: the peer's address, as gRPC writes it.
            tls: is required of peers on other machines; None: TLS is off.
            arrivals: knows since when bytes may have waited, on the server's clock.
            buffer: what all connections receive into, one at a time.
            floor_ns: every byte that is unread came later than this.
            readable: is called when there is something to `receive`.
            drained: is called when all is sent that had to wait.
            lost: is called with the reason when the connection is over.
        """
        self.sock = sock
        #: The peer's certificate, which it has shown in TLS.
        self.certificate: Certificate | None = None
        #: Bytes that the socket has not taken.
        self.unsent_bytes = 0
        #: Whether this connection is encrypted is known: its first byte is here.
        self.begun = tls is None
        self._context = tls
        self._tls: TlsSession | None = None
        self._name = name
        self._arrivals = arrivals
        self._buffer = buffer
        self._loop = asyncio.get_running_loop()
        self._readable, self._drained = readable, drained
        self._lost: Callable[[str], object] = lost
        self._floor_ns = floor_ns
        # The last read took all that was there.
        self._emptied = False
        self._bytes_read = 0
        # The kernel's last stamp, as it came and on the server's clock, and the one before it.
        self._stamp = b""
        self._stamp_ns = self._before_ns = floor_ns
        # Bytes to read at a time, if they are few; None: it depends on what there is.
        self._read_bytes: int | None = None
        self._segments: int | None = 0
        self._reading = True
        self._unsent: deque[memoryview] = deque()
        self._loop.add_reader(sock, readable)

    def put_off(self) -> None:
        """What is there is left unread in this turn: it came after the turn before."""
        if self._emptied:
            self._floor_ns = max(self._floor_ns, self._arrivals.bound_ns)
            self._emptied = False

    @property
    def has_more(self) -> bool:
        """Whether the last read left bytes behind."""
        return self._reading and not self._emptied

    @property
    def is_sealed(self) -> bool:
        """Whether the peer speaks TLS."""
        return self._tls is not None

    def read_less(self) -> None:
        """The peer compresses what it sends: take less of it at a time."""
        self._read_bytes = _READ_BYTES_COMPRESSED

    def leave(self) -> None:
        """Watch the socket no more, and call nothing."""
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        # Else the two would keep each other until the collector comes by.
        self._readable = self._drained = self._lost = _nothing

    # --- in -----------------------------------------------------------------------------------

    def receive(self, direct: memoryview | None) -> tuple[Buffer, int, int] | None:
        """Read what is there. The next bytes belong into `direct`, unless they are sealed; None: nowhere yet.

        Returns the bytes behind those in `direct`, how many lie there, and when the first of all came, at the latest;
        None: there is nothing, or the connection is over, as `lost` was told.
        """
        num_wanted = self._read_bytes
        if num_wanted is None:
            num_wanted = _READ_BYTES if self._emptied else READ_BYTES_MORE
        shared = self._buffer[:num_wanted]
        try:
            num_bytes, ancillary, _, _ = self.sock.recvmsg_into(
                (shared,) if direct is None else (direct, shared), 64
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self._lost(error.strerror or str(error))
            return None
        if not num_bytes:
            self._lost("the client hung up")
            return None
        num_direct = 0 if direct is None else min(num_bytes, len(direct))
        room = len(shared) if direct is None else len(shared) + len(direct)
        arrival_ns = self._arrival_ns(num_bytes, ancillary, emptied=num_bytes < room)
        view: Buffer = shared[: num_bytes - num_direct]
        if self._context is not None:
            plaintext = self._unsealed(self._context, shared[: num_bytes - num_direct])
            if plaintext is None:
                return None
            view = plaintext
        return view, num_direct, arrival_ns

    def _unsealed(self, context: ssl.SSLContext, data: memoryview) -> Buffer | None:
        """Read what came on a server that has TLS; None: the connection is over.

        Clients on this machine may come without it, as workers and operators do.
        """
        if not self.begun:
            self.begun = True
            if data[0] == HANDSHAKE_RECORD:
                self._tls = TlsSession(context)
            elif not is_local(self._name):
                self._lost("plaintext on a port that has TLS")
                return None
        if self._tls is None:
            return data
        try:
            was_established = self._tls.established
            plaintext = self._tls.receive(data)
            if self._tls.established and not was_established:
                self.certificate = self._tls.client_certificate()
        except ssl.SSLError as error:
            log.info("connection of %s: %s", self._name, error)
            self._write_sealed(self._tls)
            self._lost(str(error))
            return None
        if self._tls.closed and not plaintext:
            self._lost("the client hung up")
            return None
        return plaintext

    def _arrival_ns(
        self, num_bytes: int, ancillary: Sequence[tuple[int, int, bytes]], *, emptied: bool
    ) -> int:
        """Find a time that is not after the first of the bytes just read came; see to the next's.

        `emptied`: these were all.
        """
        arrivals = self._arrivals
        was_empty = self._emptied
        if was_empty and arrivals.bound_ns > self._floor_ns:
            self._floor_ns = arrivals.bound_ns
        arrival_ns = self._floor_ns
        self._emptied = emptied
        arrivals.left_unread |= not emptied
        self._bytes_read += num_bytes
        if not ancillary:
            return arrival_ns
        seconds, nanoseconds = _TIMESPEC.unpack_from(ancillary[0][2])
        age_ns = time.time_ns() - (seconds * NS_PER_S + nanoseconds)
        last_ns: int = arrivals.clock() - age_ns
        if age_ns < 0 or last_ns < self._floor_ns:
            return arrival_ns  # The wall clock was set.
        # The kernel joins segments, and stamps them with the time of the last. So bytes that it joined to these and that
        # are unread came behind the stamp before this one, and others behind this one.
        if ancillary[0][2] != self._stamp:
            self._stamp, self._before_ns, self._stamp_ns = ancillary[0][2], self._stamp_ns, last_ns
        self._floor_ns = max(self._floor_ns, last_ns if emptied else self._before_ns)
        if not was_empty:
            self._segments = None  # Several came, as a rule: to ask would be in vain.
            return arrival_ns
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:
            return arrival_ns
        received, segments = _RECEIVED.unpack_from(info)
        # The kernel's figures are of this read if nothing came meanwhile. One segment came at one time.
        before, self._segments = self._segments, segments if received == self._bytes_read else None
        if before is not None and self._segments == before + 1:
            return last_ns
        return arrival_ns

    # --- out ----------------------------------------------------------------------------------

    def write(self, connection: Http2Connection) -> None:
        """Send what a connection has to say, as far as the socket takes it."""
        tls = self._tls
        if tls is None:
            if self.begun and (parts := connection.take_output()):
                self._queue(parts)
            return
        if tls.established and (parts := connection.take_output()):
            tls.seal(b"".join(parts))
        self._write_sealed(tls)

    def _write_sealed(self, tls: TlsSession) -> None:
        if sealed := tls.take_output():
            self._queue([sealed])

    def _queue(self, parts: Sequence[Buffer]) -> None:
        waiting = bool(self._unsent)
        self.unsent_bytes += total_bytes(parts)
        if len(parts) > 1 and self.unsent_bytes <= _JOINED_BYTES_MAX:
            parts = [b"".join(parts)]
        if not waiting and len(parts) == 1:
            # As nearly always: all that is queued is one piece, and the socket takes it.
            (part,) = parts
            try:
                sent = self.sock.send(part)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._lost(error.strerror or str(error))
                return
            self.unsent_bytes -= sent
            if not self.unsent_bytes:
                return
            parts = [memoryview(part)[sent:]]
        self._unsent.extend(memoryview(part) for part in parts if part)
        if not waiting:
            self._send()

    def _send(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                if len(unsent) == 1:
                    sent = self.sock.send(unsent[0])
                else:
                    sent = self.sock.sendmsg([*islice(unsent, _PARTS_PER_CALL)])
                self.unsent_bytes -= sent
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = unsent[0][sent:]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self.sock, self._writable)
            if self.unsent_bytes > UNSENT_BYTES_MAX and self._reading:
                self._reading = self._emptied = False
                self._loop.remove_reader(self.sock)
        except OSError as error:
            self._lost(error.strerror or str(error))

    def _writable(self) -> None:
        self._loop.remove_writer(self.sock)
        self._send()
        if self.sock.fileno() < 0 or self._unsent:
            return
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self.sock, self._readable)
        self._drained()


def _nothing(*_: object) -> None:
    pass
