"""The protocol between a worker and the program of a container; docs/containers.md describes the bytes.

A connection carries frames: a head, then a body. The program says READY or ERROR once; then the worker asks, and the
program answers each RUN with DONE or ERROR. An answer has its RUN's number, so that a second one is never taken for
that of the next batch.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from clockwright.errors import ProtocolError
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, ONNX_DATATYPES

VERSION = 1
#: The variable of a program's environment with the path of the socket to connect to.
SOCKET_VARIABLE = "CLOCKWRIGHT_SOCKET"
#: Longer words of an ERROR are a broken frame.
TEXT_BYTES_MAX = 64 << 10

# Version, kind, bytes of the body, number.
_HEAD = struct.Struct("<IIQQ")
# Datatype, dimensions, bytes of the elements. The shape follows, then the elements.
_TENSOR = struct.Struct("<IIQ")
_COUNT = struct.Struct("<Q")
# Every tensor begins at a multiple of it, so that programs may use the elements where they are.
_ALIGNMENT_BYTES = 8

#: A tensor as it travels: datatype, whole shape, little-endian elements.
Tensor = tuple[str, tuple[int, ...], Buffer]


class Kind(enum.IntEnum):
    """What a frame says."""

    #: The program can serve; the body is empty.
    READY = 1
    #: Run a batch; the body is the inputs.
    RUN = 2
    #: It ran; the body is the outputs.
    DONE = 3
    #: It failed, or the program cannot serve; the body is the reason in words.
    ERROR = 4
    #: Run a batch that lies in shared memory, and leave the outputs there. Python code alone gets it.
    RUN_IN_MEMORY = 5


_ASKING = (Kind.RUN, Kind.RUN_IN_MEMORY)


class FrameConnection:
    """One end of a connection, for one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        #: The number of the latest RUN; 0: there was none.
        self._number = 0

    def send(self, kind: Kind, *body: Buffer, deadline_s: float | None = None) -> None:
        """Send a frame, whose body is in pieces, by a time of the monotonic clock; None: never give up.

        Raises TimeoutError if the other end did not take it in time; OSError if the connection is gone.
        """
        self._limit(deadline_s)
        self._number += kind in _ASKING
        head = _HEAD.pack(VERSION, kind, sum(len(piece) for piece in body), self._number)
        self._socket.sendall(b"".join((head, *body)))

    def receive(
        self, *, most_bytes: int = 1 << 62, deadline_s: float | None = None
    ) -> tuple[Kind, bytearray]:
        """Wait for a frame. Returns what it says, and its body.

        Raises ProtocolError if it is none, its body has more than `most_bytes`, or it answers another RUN; TimeoutError
        if it did not come in time; EOFError if the connection ended; OSError if the connection is gone.
        """
        version, kind, num_bytes, number = _HEAD.unpack(self._read(_HEAD.size, deadline_s))
        if version != VERSION:
            raise ProtocolError(
                f"found version {version} of the protocol in a frame, expected {VERSION}"
            )
        if kind not in Kind.__members__.values():
            raise ProtocolError(
                f"found a frame of kind {kind}, expected {', '.join(f'{k} ({k.name})' for k in Kind)}"
            )
        if kind in _ASKING:
            self._number = number
        elif number != self._number:
            raise ProtocolError(
                f"found a frame {Kind(kind).name} of number {number}, expected {self._number}, that of the latest RUN"
            )
        most = TEXT_BYTES_MAX if kind == Kind.ERROR else most_bytes
        if num_bytes > most:
            raise ProtocolError(
                f"found a frame {Kind(kind).name} of {num_bytes} bytes, expected {most} at most"
            )
        return Kind(kind), self._read(num_bytes, deadline_s)

    def interrupt(self) -> None:
        """End the connection; a thread that waits for it wakes up."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which no thread waits for."""
        self._socket.close()

    def _read(self, num_bytes: int, deadline_s: float | None) -> bytearray:
        data = bytearray(num_bytes)
        view, position = memoryview(data), 0
        while position < num_bytes:
            self._limit(deadline_s)
            found = self._socket.recv_into(view[position:])
            if not found:
                raise EOFError
            position += found
        return data

    def _limit(self, deadline_s: float | None) -> None:
        remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining_s)


def join_tensors(tensors: Sequence[Tensor]) -> list[Buffer]:
    """Make the body of a RUN or a DONE, in pieces."""
    pieces: list[Buffer] = [_COUNT.pack(len(tensors))]
    for datatype, shape, elements in tensors:
        head = _TENSOR.pack(DATATYPES[datatype].onnx, len(shape), len(elements))
        pieces += (head, struct.pack(f"<{len(shape)}q", *shape), elements)
        pieces.append(bytes(-len(elements) % _ALIGNMENT_BYTES))
    return pieces


def split_tensors(body: Buffer) -> list[Tensor]:
    """Read the body of a RUN or a DONE; the elements are views of it. Raises ProtocolError if it is malformed."""
    view = memoryview(body)
    try:
        (count,) = _COUNT.unpack_from(view)
        tensors, position = list[Tensor](), _COUNT.size
        for _ in range(count):
            code, rank, num_bytes = _TENSOR.unpack_from(view, position)
            position += _TENSOR.size
            shape = struct.unpack_from(f"<{rank}q", view, position)
            position += 8 * rank
            elements = view[position : position + num_bytes]
            if len(elements) < num_bytes or code not in ONNX_DATATYPES:
                raise ProtocolError(
                    f"tensor {len(tensors)}: found {num_bytes} bytes of datatype {code}, of which "
                    f"{len(elements)} are there"
                )
            tensors.append((ONNX_DATATYPES[code].name, shape, elements))
            position += num_bytes + -num_bytes % _ALIGNMENT_BYTES
    except (struct.error, OverflowError) as error:
        raise ProtocolError(f"found {len(view)} bytes that are no tensors: {error}") from None
    if position != len(view):
        raise ProtocolError(f"found {len(view)} bytes, of which the tensors take {position}")
    return tensors


def most_bytes(tensors: Iterable[tuple[int, int]]) -> int:
    """The bytes of a body of so many tensors at most: of each, its dimensions and the bytes of its elements."""
    return _COUNT.size + sum(
        _TENSOR.size + 8 * rank + num_bytes + _ALIGNMENT_BYTES for rank, num_bytes in tensors
    )
