"""The worker's end of the socket that carries actions and results.

A thread of its own reads actions and hands them to the lanes, so that nothing else this process does comes
between. Whoever has a result writes it; what the socket does not take at once, the event loop writes when
there is room again.
"""

from __future__ import annotations

import array
import asyncio
import functools
import logging
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from clockwright.actions import Action, FromFronts, Result
from clockwright.bulk import Buffer
from clockwright.data_socket import dial, prepare
from clockwright.errors import ProtocolError
from clockwright.frame_socket import first_record
from clockwright.frames import (
    ExpectFront,
    ForgetMemory,
    FrameReader,
    FrontGone,
    FurtherMemory,
    Inputs,
    Memory,
    MemoryOffer,
    SendQueue,
    Withdrawal,
    decode_order,
    encode_mapped,
    encode_result,
    greeting,
)
from clockwright.shared_memory import map_shared
from clockwright.v1 import worker_pb2 as pb
from worker.timing import tune_thread

logger = logging.getLogger(__name__)

# The controller listens while it welcomes, so what takes longer is no controller.
_DIAL_LIMIT_S = 10.0

# The inputs' memory and the outputs'.
_FILES_MAX = 2
_FILES_BYTES = socket.CMSG_SPACE(_FILES_MAX * array.array("i").itemsize)

#: What the socket leaves to others.
Order = Action | Withdrawal | Inputs | ExpectFront | FrontGone

# A controller that leaves so many bytes of results unread has lost its way.
_UNSENT_BYTES_MAX = 1 << 30


class ControllerSocket:
    """One connection, from dialling to its end."""

    def __init__(
        self,
        host: str,
        welcome: pb.Welcome,
        tls: ssl.SSLContext | None,
        take: Callable[[Order, Sequence[Buffer], memoryview | FromFronts | None], None],
    ) -> None:
        """Dial, and serve until `over`.

        Args:
            host: the controller's.
            welcome: says where to dial, and with which token.
            tls: how to speak TLS over TCP; None: not at all.
            take: called by the link's thread with what the controller sends, as `decode_order` gives it.
        """
        self._host = host
        self._welcome = welcome
        self._tls = tls
        self._take = take
        #: Orders of earlier generations are refused, and end the connection.
        self.oldest = welcome.generation
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
        self._thread = threading.Thread(target=self._run, name="actions", daemon=True)
        self._thread.start()

    def send(
        self, result: Result, outputs: Sequence[Buffer] = (), sent: Sequence[int] = ()
    ) -> None:
        """Send a result, as in `encode_result`; from any thread, at once."""
        self._send(encode_result(result, outputs, sent=sent))

    def _send(self, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._queue.add(buffers)
            if not self._is_full:
                self._flush()

    def finish(self) -> None:
        """Send what is queued and then nothing more: the controller reads up to the end, and hangs up."""
        with self._lock:
            self._is_finished = True
            if not self._is_full:
                self._flush()

    def close(self) -> None:
        """Hang up; what was not sent is lost."""
        with self._lock:
            self._is_closed = True
            if self._sock is not None:
                self._loop.remove_writer(self._sock)
                # Wakes the thread, which may run a step first. The file stays open until it has seen this.
                with suppress(OSError):
                    _shut_down(self._sock, socket.SHUT_RDWR)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        tune_thread(realtime=False)
        reason: str | Exception
        try:
            reason = self._serve(self._dial())
        except ProtocolError as error:
            reason = error
        except OSError as error:
            reason = f"the socket for actions: {error}"
        except Exception as error:
            # Our own bug. The stream starts afresh, and people get to see it.
            logger.exception("the socket for actions failed")
            reason = f"{type(error).__name__}: {error}"
        # The loop may be closed, at the end of the process.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, reason)

    def _dial(self) -> socket.socket:
        sock = self._connect()
        prepare(sock, silence_limit_ms=self._welcome.silence_limit_ms)
        sock.sendall(greeting(self._welcome.token))
        # One thread at a time may read or write where there is TLS, so none may wait meanwhile.
        sock.settimeout(0 if isinstance(sock, ssl.SSLSocket) else None)
        with self._lock:
            self._sock = sock
            if self._is_closed:
                _shut_down(sock, socket.SHUT_RDWR)
            else:
                self._flush()
        return sock

    def _connect(self) -> socket.socket:
        port, path = self._welcome.socket_port, self._welcome.socket_path
        try:
            return dial(self._host, port, path, limit_s=_DIAL_LIMIT_S, tls=self._tls)
        except OSError as error:
            raise ProtocolError(
                f"actions come by {self._host}:{port}, which cannot be reached: {error}"
            ) from None

    def _serve(self, sock: socket.socket) -> str:
        reader, take = FrameReader(), self._take
        # A Unix socket wakes who waits in `recv` also when the peer has read what was sent; `poll` sleeps on.
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        wait = poller.poll
        memory: Memory | None = None
        files: deque[int] = deque()
        receive: Callable[[memoryview], int] = sock.recv_into
        if sock.family == socket.AF_UNIX:
            receive = functools.partial(_receive_with_files, sock, files)
        elif isinstance(sock, ssl.SSLSocket):
            # It looks first, because what is deciphered already wakes nobody.
            receive, wait = functools.partial(self._receive_sealed, sock, poller), _nothing
        wait()
        num_bytes = receive(reader.room())
        try:
            while num_bytes:
                for frame in reader.received(num_bytes):
                    # One that others have followed is not listened to while its session ends.
                    if self._is_closed or self.oldest > self._welcome.generation:
                        break
                    order, payload, room = decode_order(frame, memory, oldest=self.oldest)
                    if isinstance(order, MemoryOffer):
                        memory = _map(order, files)
                        if memory is not None:
                            self._send(encode_mapped())
                    elif isinstance(order, FurtherMemory):
                        if _map_further(order, files, memory):
                            self._send(encode_mapped(order.number))
                    elif isinstance(order, ForgetMemory):
                        if memory is not None:
                            memory.inputs.pop(order.number, None)
                    else:
                        take(order, payload, room)
                    # Nothing of an action stays here while the next is waited for.
                    del order, payload, room
                wait()
                num_bytes = receive(reader.room())
        finally:
            for file in files:
                os.close(file)
        return "closed the socket for actions"

    def _receive_sealed(self, sock: ssl.SSLSocket, poller: select.poll, room: memoryview) -> int:
        while True:
            with self._lock:
                if self._is_closed:
                    return 0
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return sock.recv_into(room)
            poller.poll()

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
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if queue.num_bytes > _UNSENT_BYTES_MAX:
                logger.warning("the controller leaves %d bytes of results unread", queue.num_bytes)
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
        """The thread has ended."""
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


def _receive_with_files(sock: socket.socket, files: deque[int], room: memoryview) -> int:
    """Receive, and put what files come along behind those that are there."""
    num_bytes, ancillary, _, _ = sock.recvmsg_into([room], _FILES_BYTES)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found = array.array("i")
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
            files.extend(found)
    return num_bytes


def _shut_down(sock: socket.socket, how: int) -> None:
    if isinstance(sock, ssl.SSLSocket):
        # Its own would have it go on without TLS.
        super(ssl.SSLSocket, sock).shutdown(how)
    else:
        sock.shutdown(how)


def _nothing(_timeout: float | None = None) -> list[tuple[int, int]]:
    return []


def _map(offer: MemoryOffer, files: deque[int]) -> Memory | None:
    """Map the memory that the controller offers; None where that cannot be: tensors travel by the socket then."""
    if len(files) < _FILES_MAX:
        logger.warning("%d files came of shared memory, expected %d", len(files), _FILES_MAX)
        return None
    inputs = _map_file(files.popleft(), offer.inputs_bytes, to_write=False)
    outputs = _map_file(files.popleft(), offer.outputs_bytes, to_write=True)
    return None if inputs is None or outputs is None else Memory({0: inputs}, outputs)


def _map_further(offer: FurtherMemory, files: deque[int], memory: Memory | None) -> bool:
    """Map a front's memory; says whether that worked."""
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
