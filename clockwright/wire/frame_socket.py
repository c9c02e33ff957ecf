"""Sockets that carry frames, in an event loop: the controller's and fronts' ends of all of them, and workers' to fronts.

The connecting process uses a Unix socket on the listener's own host, otherwise TCP, and sends the token that the
controller gave it; without one the connection is closed. TCP uses TLS if the listener has a certificate. Everything
written during one turn of the event loop leaves in one system call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from clockwright.errors import ProtocolError
from clockwright.wire.bulk import Buffer
from clockwright.wire.data_socket import is_our_users, prepare, receive_with_files
from clockwright.wire.frame_headers import TOKEN_BYTES
from clockwright.wire.frames import (
    GREETING_BYTES,
    PLAIN_HEADER_BYTES,
    Frame,
    FrameReader,
    SendQueue,
    token_of,
)

log = logging.getLogger(__name__)

# Exceptions of a socket that has nothing to read, or no room; TLS has its own.
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# Bytes of small buffers that are sealed together.
_RECORD_BYTES = 16 << 10

# Limit on connections without a token, and the time that each has to send it. A worker sends it immediately, so
# beyond the limit the oldest one is closed.
_NEWCOMERS_MAX = 64
_GREETING_LIMIT_S = 10.0
_BACKLOG = 128
# When there are no file handles left, some may be free again after this.
_ACCEPT_PAUSE_S = 0.1

# A worker with this much unread data counts as lost. The scheduler sends only some milliseconds of work ahead.
_UNSENT_BYTES_MAX = 1 << 30

# Files that come with one message, and that wait at once.
_FILES_MAX = 16


class FrameSocket:
    """A socket to one worker, front or controller: frames in, buffers out. It belongs to the event loop."""

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[Sequence[Frame]], None],
        ended: Callable[[str], None],
        *,
        peer: str = "worker",
        unsent_bytes_max: int | None = None,
        takes_files: bool = False,
    ) -> None:
        """Begin to read a socket that does not block.

        Frames that came together go to `take`, in order; an exception from it ends the link. `ended` is called once,
        with the reason. With `takes_files` the peer may send file descriptors. The link to a peer with more unread
        bytes ends.
        """
        #: The owner sets its limits.
        self.reader = FrameReader(header_bytes_max=PLAIN_HEADER_BYTES, payload_bytes_max=0)
        #: Bytes received and sent.
        self.num_bytes = 0
        #: Calls of `tick` since the peer last read anything, while data waits.
        self.stalled_ticks = 0
        self._sock = sock
        self._take = take
        self._ended = ended
        self._peer = peer
        self._unsent_bytes_max = unsent_bytes_max or _UNSENT_BYTES_MAX
        self._takes_files = takes_files and sock.family == socket.AF_UNIX
        self._queue = SendQueue()
        #: A write is due at the end of this turn, or when the socket has room again.
        self._is_due = False
        self._is_full = False
        self._is_open = True
        self._is_ending = False
        #: Files that the peer has sent, in order; the code that takes one closes it.
        self.files: deque[int] = deque()
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self.resume()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers, together with all others of this turn of the loop."""
        self._queue.add(buffers)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def hold(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers until the next `send` or `flush`; the caller makes sure that one follows."""
        self._queue.add(buffers)

    def flush(self) -> None:
        """Send queued buffers now, or when the socket has room."""
        if not self._is_full:
            self._flush()

    def look(self) -> None:
        """Read what has come, without waiting for the event loop to say so."""
        self._readable()

    def send_now(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers now: they are all of this turn."""
        self._queue.add(buffers)
        self._flush()

    @property
    def hands_over(self) -> bool:
        """Whether files can be sent: the peer is on this host."""
        return self._sock.family == socket.AF_UNIX

    def hand_over(self, message: bytes, files: Sequence[int]) -> bool:
        """Send open files with a message, after the data sent before. Returns whether that worked."""
        self._flush()
        if not self._is_open or self._queue.num_bytes:
            return False
        try:
            num_bytes = socket.send_fds(self._sock, [message], list(files))
        except OSError as error:
            log.warning("cannot send shared memory to a %s: %s", self._peer, error)
            return False
        if num_bytes < len(message):
            self.send_now([message[num_bytes:]])
        return True

    def tick(self) -> None:
        """Count `stalled_ticks`; called periodically."""
        if self._is_full:
            self.stalled_ticks += 1

    def pause(self) -> None:
        """Stop reading until `resume`; data waits at the peer."""
        if self._is_open:
            self._is_paused = True
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Continue reading."""
        if self._is_open:
            self._is_paused = False
            self._loop.add_reader(self._sock, self._readable)
            if self._tls is not None:
                # Data that TLS has already decrypted causes no event.
                self._loop.call_soon(self._readable)

    def close(self) -> None:
        """Close the socket; what was not sent is lost."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            while self.files:
                os.close(self.files.popleft())

    def _end(self, reason: str) -> None:
        if self._is_open and not self._is_ending:
            self._is_ending = True
            # The owner may send a last message.
            self._ended(reason)
            self.close()

    def _readable(self) -> None:
        try:
            self._read()
            while self._tls is not None and self._is_open and self._tls.pending():
                self._read()
        except _NOT_NOW:
            pass
        except OSError as error:
            self._end(f"its connection broke: {error.strerror}")
        except ProtocolError as error:
            self._end(f"protocol error: {error}")
        except Exception as error:
            # This is our bug. The peer reconnects and starts again.
            log.exception("the link to a %s failed", self._peer)
            self._end(f"its link failed: {error!r}")

    def _read(self) -> None:
        if self._is_paused or not self._is_open:
            raise BlockingIOError
        if self._takes_files:
            num_bytes = self._receive_with_files()
        else:
            num_bytes = self._sock.recv_into(self.reader.room())
        if num_bytes == 0:
            self._end(f"the {self._peer} closed its connection")
            return
        self.num_bytes += num_bytes
        self._take(self.reader.received(num_bytes))

    def _receive_with_files(self) -> int:
        num_bytes = receive_with_files(self._sock, self.reader.room(), self.files, most=_FILES_MAX)
        if len(self.files) > _FILES_MAX:
            raise ProtocolError(f"{len(self.files)} files that no frame announced")
        return num_bytes

    def _flush(self) -> None:
        if not self._is_open:
            return
        queue = self._queue
        try:
            while queue.num_bytes:
                buffers = queue.buffers()
                if self._tls is not None:
                    buffers = [first_record(buffers)]
                if len(buffers) == 1:
                    num_bytes = self._sock.send(buffers[0])
                else:
                    num_bytes = self._sock.sendmsg(buffers)
                queue.sent(num_bytes)
                self.num_bytes += num_bytes
                self.stalled_ticks = 0
        except _NOT_NOW:
            if queue.num_bytes > self._unsent_bytes_max:
                self._end(f"{queue.num_bytes} bytes wait unread")
            elif not self._is_full:
                self._is_full = True
                self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as error:
            self._end(f"its connection broke: {error.strerror}")
            return
        self._is_due = False
        if self._is_full:
            self._is_full = False
            self._loop.remove_writer(self._sock)


def first_record(buffers: Sequence[Buffer]) -> Buffer:
    """Join small buffers at the front: TLS makes a system call for each buffer.

    A retry may only append to the waiting data, as OpenSSL demands.
    """
    num_bytes = len(buffers[0])
    together = [buffers[0]]
    for buffer in buffers[1:]:
        num_bytes += len(buffer)
        if num_bytes > _RECORD_BYTES:
            break
        together.append(buffer)
    return together[0] if len(together) == 1 else b"".join(together)


@dataclass(slots=True, eq=False)
class _Newcomer:
    """A connection that has not sent its token yet."""

    sock: socket.socket
    limit: asyncio.TimerHandle
    #: The TLS handshake is complete, or there is no TLS.
    is_agreed: bool
    greeting: bytearray = field(default_factory=bytearray)


class SocketListener:
    """Accepts workers' connections, and gives each to the owner of its token."""

    def __init__(self, *, silence_limit_ms: int) -> None:
        #: Addresses for processes of this host and of others; empty and 0 before `listen`.
        self.path = ""
        #: TLS context for TCP connections from now on; None: no TLS.
        self.tls: ssl.SSLContext | None = None
        self.host = ""
        self.port = 0
        self._silence_limit_ms = silence_limit_ms
        self._listening: list[socket.socket] = []
        self._newcomers: dict[socket.socket, _Newcomer] = {}
        self._expected: dict[bytes, Callable[[socket.socket], None]] = {}
        #: Tokens that are valid for more than one connection.
        self._lasting: set[bytes] = set()

    def listen(self, host: str, port: int, path: Path | None = None) -> None:
        """Accept connections, over TCP and, if there is a path, on a Unix socket; port 0 takes any free one.

        If the Unix socket cannot be made, workers of this host use TCP. Raises OSError if the port is taken, or the
        address does not belong to this host.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with ExitStack() as stack:
                sock = stack.enter_context(socket.socket(family, kind, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(found) > 1)
                sock.bind((where[0], port, *where[2:]))
                stack.pop_all()
            self._add(sock)
            self.host, self.port = host, sock.getsockname()[1]
            port = self.port
        if path is None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(path))
        except OSError as error:
            sock.close()
            log.warning("workers of this host use TCP: %s: %s", path, error)
            return
        self._add(sock)
        self.path = str(path)

    def expect(self, taken: Callable[[socket.socket], None], *, token: bytes = b"") -> bytes:
        """Register a token, whose connection is given to `taken`, and return it.

        A token that is given is valid until `forget`; a new one is made if it is empty, and is valid once.
        """
        if token:
            self._lasting.add(token)
        else:
            token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = taken
        return token

    def forget(self, token: bytes) -> None:
        """Unregister a token."""
        self._expected.pop(token, None)
        self._lasting.discard(token)

    def close(self) -> None:
        """Stop listening. Connections with a token stay open."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock)
            sock.close()
        self._listening.clear()
        for newcomer in list(self._newcomers.values()):
            self._drop(newcomer)

    def _add(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._listening.append(sock)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("cannot accept connections of workers: %s", error.strerror)
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        sock.setblocking(False)
        is_unix = sock.family == socket.AF_UNIX
        if is_unix and not is_our_users(sock):
            log.warning("a process of another user connected to %s: closed", self.path)
            sock.close()
            return
        if self.tls is not None and not is_unix:
            sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        while len(self._newcomers) >= _NEWCOMERS_MAX:
            self._drop(next(iter(self._newcomers.values())))
        limit = loop.call_later(_GREETING_LIMIT_S, self._drop_by_socket, sock)
        newcomer = self._newcomers[sock] = _Newcomer(
            sock, limit, not isinstance(sock, ssl.SSLSocket)
        )
        loop.add_reader(sock, self._hear, newcomer)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _hear(self, newcomer: _Newcomer) -> None:
        greeting = newcomer.greeting
        try:
            if isinstance(newcomer.sock, ssl.SSLSocket) and not newcomer.is_agreed:
                newcomer.sock.do_handshake()
                newcomer.is_agreed = True
            data = newcomer.sock.recv(GREETING_BYTES - len(greeting))
        except _NOT_NOW:
            return
        except OSError as error:
            log.info("a connection broke before it sent a token: %s", error)
            data = b""
        greeting += data
        if data and len(greeting) < GREETING_BYTES:
            asyncio.get_running_loop().call_soon(self._hear_more, newcomer)
            return
        token = token_of(bytes(greeting)) or b""
        taken = self._expected.get(token)
        if taken is None:
            log.info("a connection sent no valid token: closed")
            self._drop(newcomer)
            return
        if token not in self._lasting:
            del self._expected[token]
        self._let_go(newcomer)
        with suppress(OSError):
            prepare(newcomer.sock, silence_limit_ms=self._silence_limit_ms)
        taken(newcomer.sock)

    def _hear_more(self, newcomer: _Newcomer) -> None:
        # TLS may have decrypted more already, which causes no event.
        if newcomer.sock in self._newcomers:
            self._hear(newcomer)

    def _drop_by_socket(self, sock: socket.socket) -> None:
        if (newcomer := self._newcomers.get(sock)) is not None:
            self._drop(newcomer)

    def _drop(self, newcomer: _Newcomer) -> None:
        self._let_go(newcomer)
        newcomer.sock.close()

    def _let_go(self, newcomer: _Newcomer) -> None:
        newcomer.limit.cancel()
        asyncio.get_running_loop().remove_reader(newcomer.sock)
        del self._newcomers[newcomer.sock]
