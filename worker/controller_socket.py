"""The worker's connection to its controller.

A thread for that (`worker.action_thread`) reads it and hands actions to the lanes, so that nothing else in this process
delays them; the event loop gets all other messages. A result is written by the thread that has it; what the socket does
not take at once, the event loop writes when there is room again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from clockwright.errors import ProtocolError
from clockwright.wire import worker_messages as messages
from clockwright.wire.actions import Action, FromFronts, Result
from clockwright.wire.bulk import Buffer
from clockwright.wire.data_socket import dial, prepare, receive_with_files
from clockwright.wire.frame_headers import OWN_OUTPUTS, Inputs, Withdrawal
from clockwright.wire.frame_socket import first_record
from clockwright.wire.frames import (
    Frame,
    FrameReader,
    Memory,
    SendQueue,
    decode_order,
    encode_result,
    greeting,
)
from clockwright.wire.peer import Welcome
from clockwright.wire.shared_memory import map_shared
from clockwright.wire.worker_messages import ForgetMemory, FurtherMemory, MemoryMapped, MemoryOffer
from worker.action_thread import ActionThread

logger = logging.getLogger(__name__)

# The controller listens while it welcomes, so what takes longer is no controller.
_DIAL_LIMIT_S = 10.0

# The inputs' memory and the outputs'.
_FILES_MAX = 2

#: What the socket leaves to others.
Order = Action | Withdrawal | Inputs

# An offer names each of a model's files.
_HEADER_BYTES_MAX = 64 << 20

# Exceptions of a socket that has nothing to read, or no room; TLS has its own.
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# A controller that leaves so many bytes of results unread counts as lost.
_UNSENT_BYTES_MAX = 1 << 30


@dataclass(eq=False)
class ControllerSocket:
    """One connection, from dialling to its end."""

    #: Reads the connection.
    actions: ActionThread
    #: The controller's.
    host: str
    #: Says where to dial, and with which token.
    welcome: Welcome
    #: How to speak TLS over TCP; None: not at all.
    tls: ssl.SSLContext | None
    #: Called by the thread `actions` with orders of the controller, as `decode_order` gives them.
    take: Callable[[Order, Sequence[Buffer], memoryview | FromFronts | None], None]
    #: Called by the event loop with the controller's other messages, their payload, and when they came.
    hear: Callable[[messages.ToWorker, Buffer, int], None]

    def __post_init__(self) -> None:
        self._has_heard = False
        #: Orders of earlier generations are refused, and end the connection.
        self.oldest = self.welcome.generation
        self._loop = asyncio.get_running_loop()
        #: Why the connection has ended; an exception where the controller broke the protocol.
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._queue = SendQueue()
        #: The event loop writes when there is room again.
        self._is_full = False
        self._is_finished = False
        self._is_closed = False
        # What the thread of actions has of it.
        self._reader = FrameReader(header_bytes_max=_HEADER_BYTES_MAX)
        self._memory: Memory | None = None
        self._files: deque[int] = deque()
        self._receive: Callable[[memoryview], int]
        self._is_sealed = False
        threading.Thread(target=self._begin, name="dial", daemon=True).start()

    def send(
        self, result: Result, outputs: Sequence[Buffer] = (), sent: Sequence[int] = ()
    ) -> None:
        """Send a result, as in `encode_result`; from any thread, at once."""
        self._send(encode_result(result, outputs, sent=sent))

    def send_message(self, message: messages.FromWorker) -> None:
        """Send a message that is no result; from any thread, at once."""
        self._send(messages.frame(message))

    def has_heard(self) -> bool:
        """Whether anything has come since the last call."""
        heard, self._has_heard = self._has_heard, False
        return heard

    def _send(self, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._queue.add(buffers)
            if not self._is_full:
                self._flush()

    def finish(self) -> None:
        """Send what is queued and then the end: the controller reads up to it and closes the connection."""
        with self._lock:
            self._is_finished = True
            if not self._is_full:
                self._flush()

    def close(self) -> None:
        """Close the connection; what was not sent is lost."""
        with self._lock:
            self._is_closed = True
            if self._sock is not None:
                self._loop.remove_writer(self._sock)
                # The thread of actions reads the end, perhaps after a step. The file stays open until then.
                with suppress(OSError):
                    _shut_down(self._sock, socket.SHUT_RDWR)

    # --- a thread that dials ----------------------------------------------------------------------

    def _begin(self) -> None:
        reason: str | Exception
        try:
            sock = self._dial()
            if sock.family == socket.AF_UNIX:
                self._receive = partial(
                    receive_with_files, sock, files=self._files, most=_FILES_MAX
                )
            elif isinstance(sock, ssl.SSLSocket):
                self._receive, self._is_sealed = partial(self._receive_sealed, sock), True
            else:
                self._receive = sock.recv_into
            self.actions.listen(sock, self._readable)
            if self._is_sealed:
                # Bytes that TLS has decrypted already are no news of the socket.
                self.actions.call_at(0, self._readable)
            return
        except Exception as error:
            reason = _reason_of(error)
        self._tell_end(reason)

    def _tell_end(self, reason: str | Exception) -> None:
        # The loop may be closed, at the end of the process.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, reason)

    def _dial(self) -> socket.socket:
        sock = self._connect()
        prepare(sock, silence_limit_ms=self.welcome.silence_limit_ms)
        sock.sendall(greeting(self.welcome.token))
        sock.settimeout(0)
        with self._lock:
            self._sock = sock
            if self._is_closed:
                _shut_down(sock, socket.SHUT_RDWR)
            else:
                self._flush()
        return sock

    def _connect(self) -> socket.socket:
        port, path = self.welcome.socket_port, self.welcome.socket_path
        try:
            return dial(self.host, port, path, limit_s=_DIAL_LIMIT_S, tls=self.tls)
        except OSError as error:
            raise ProtocolError(f"cannot connect to {self.host}:{port}: {error}") from None

    # --- the thread of actions ----------------------------------------------------------------------

    def _readable(self) -> None:
        reason: str | Exception
        reader, take, oldest = self._reader, self.take, self.welcome.generation
        try:
            while num_bytes := self._receive(reader.room()):
                self._has_heard = True
                for frame in reader.received(num_bytes):
                    # One that others have followed is not listened to while its session ends.
                    if self._is_closed or self.oldest > oldest:
                        break
                    if messages.is_message(frame[0]):
                        self._take_message(frame)
                    else:
                        take(*decode_order(frame, self._memory, oldest=self.oldest))
                if not self._is_sealed:
                    return
            reason = "closed the connection"
        except _NOT_NOW:
            return
        except Exception as error:
            reason = _reason_of(error)
        sock = self._sock
        if sock is not None:
            self.actions.ignore(sock)
            while self._files:
                os.close(self._files.popleft())
            self._tell_end(reason)

    def _receive_sealed(self, sock: ssl.SSLSocket, room: memoryview) -> int:
        # One thread at a time may read or write.
        with self._lock:
            return 0 if self._is_closed else sock.recv_into(room)

    def _take_message(self, frame: Frame) -> None:
        """Map and forget memory here, before the next action; pass other messages on."""
        message, memory = messages.decode_to_worker(frame), self._memory
        if isinstance(message, MemoryOffer):
            self._memory = _map(message, self._files)
            if self._memory is not None:
                self.send_message(MemoryMapped())
        elif isinstance(message, FurtherMemory):
            if _map_further(message, self._files, memory):
                self.send_message(MemoryMapped(message.number))
        elif isinstance(message, ForgetMemory):
            if memory is not None:
                memory.inputs.pop(message.number, None)
        else:
            received_ns = time.monotonic_ns()
            self._loop.call_soon_threadsafe(self.hear, message, frame[1], received_ns)

    # --- with the lock held ---------------------------------------------------------------------

    def _flush(self) -> None:
        """Write what the socket takes; leave the rest to the event loop."""
        sock, queue = self._sock, self._queue
        if sock is None or self._is_closed:
            return
        try:
            while queue.num_bytes:
                buffers = queue.buffers()
                if isinstance(sock, ssl.SSLSocket):
                    num_bytes = sock.send(first_record(buffers))
                elif len(buffers) == 1:
                    num_bytes = sock.send(buffers[0], socket.MSG_DONTWAIT)
                else:
                    num_bytes = sock.sendmsg(buffers, (), socket.MSG_DONTWAIT)
                queue.sent(num_bytes)
            if self._is_finished:
                _shut_down(sock, socket.SHUT_WR)
        except _NOT_NOW:
            if queue.num_bytes > _UNSENT_BYTES_MAX:
                logger.warning(
                    "the controller has left %d bytes of results unread", queue.num_bytes
                )
                _shut_down(sock, socket.SHUT_RDWR)
                return
            self._is_full = True
            self._loop.call_soon_threadsafe(self._wait_for_room)
        except OSError:
            pass  # The thread that reads hears of it too, and says so.

    # --- in the event loop ----------------------------------------------------------------------

    def _wait_for_room(self) -> None:
        with self._lock:
            if self._sock is not None and not self._is_closed:
                self._loop.add_writer(self._sock, self._has_room)

    def _has_room(self) -> None:
        with self._lock:
            if self._sock is not None and not self._is_closed:
                self._loop.remove_writer(self._sock)
                self._is_full = False
                self._flush()

    def _end(self, reason: str | Exception) -> None:
        self.close()
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
        if self.over.done():
            return
        if isinstance(reason, str):
            self.over.set_result(reason)
        else:
            self.over.set_exception(reason)


def _reason_of(error: Exception) -> str | Exception:
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, OSError):
        return f"the connection broke: {error}"
    # Our own bug. The link starts afresh, and people get to see it.
    logger.error("the connection failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _shut_down(sock: socket.socket, how: int) -> None:
    if isinstance(sock, ssl.SSLSocket):
        # Its own would have it go on without TLS.
        super(ssl.SSLSocket, sock).shutdown(how)
    else:
        sock.shutdown(how)


def _map(offer: MemoryOffer, files: deque[int]) -> Memory | None:
    """Map the memory that the controller offers. Returns None if that fails: tensors travel by the connection then."""
    if len(files) < _FILES_MAX:
        logger.warning("%d files came of shared memory, expected %d", len(files), _FILES_MAX)
        return None
    inputs = _map_file(files.popleft(), offer.inputs_bytes, to_write=False)
    outputs = _map_file(files.popleft(), offer.outputs_bytes, to_write=True)
    if inputs is None or outputs is None:
        return None
    return Memory({0: inputs, OWN_OUTPUTS: outputs.toreadonly()}, outputs)


def _map_further(offer: FurtherMemory, files: deque[int], memory: Memory | None) -> bool:
    if memory is None or not files:
        return False
    inputs = _map_file(files.popleft(), offer.num_bytes, to_write=False)
    if inputs is not None:
        memory.inputs[offer.number] = inputs
    return inputs is not None


def _map_file(file: int, num_bytes: int, *, to_write: bool) -> memoryview | None:
    try:
        return map_shared(file, num_bytes, to_write=to_write)
    except (OSError, ValueError) as error:
        logger.warning("the controller's shared memory cannot be mapped: %s", error)
        return None
    finally:
        os.close(file)
