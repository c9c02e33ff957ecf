"""One server side of an HTTP/2 connection that carries gRPC: bytes in, events out, bytes back. No I/O here.

`Http2Connection.receive` takes whatever a socket brought, however it was cut, and says what happened;
the methods that answer put bytes into a queue that `take_output` empties. No peer is trusted: what it
may have open, send in vain, or leave unread is bounded, and whatever it does against the protocol is an
`Http2Error`, which ends this connection and nothing else.

Four things make it cheap. A block of headers that leaves the HPACK table alone is decoded once, and its
like are a dictionary look-up afterwards. Answers never use the table, so their blocks are constants. A call
that is here whole, headers and message behind each other, is one event and one look. A large message can be
received right where it belongs (`direct`).

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK), and gRPC's "gRPC over HTTP2" (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import base64
import binascii
import enum
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import quote, unquote

from hpack import Decoder, HPACKError
from hpack.table import HeaderTable
from typing_extensions import override

from clockwright.errors import ProtocolError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from clockwright.wire.bulk import Buffer, total_bytes
from controller.access.caller import Caller

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: What a peer may send ahead on a stream, which is what may be unread of it.
WINDOW_BYTES: Final = 16 << 20
#: What a peer may send ahead on a connection: as much as the kernel holds for it (`listener`). What is beyond that stays in
#: the client's library, which knows how long the request has time; in its kernel nothing would see the request's age.
CONNECTION_WINDOW_BYTES: Final = 4 << 20
#: More than any server admits at once (`ControllerConfig.max_open_requests`): calls that a client's library
#: keeps back wait unseen, and those that are refused are told why.
STREAMS_MAX: Final = 32_768
FRAME_BYTES_MAX: Final = 1 << 20
HEADER_BLOCK_BYTES_MAX: Final = 16 << 10
#: CONTINUATION frames that one block of headers may be cut into.
CONTINUATIONS_MAX: Final = 16

#: Frames that bring nothing (PING, SETTINGS, empty DATA, ...) which a peer may send ahead of its work;
#: each request or message earns some, and `forgive` others as time goes by.
IDLE_FRAMES_MAX: Final = 10_000
IDLE_FRAMES_PER_MESSAGE: Final = 64
#: Fields in a block of headers. Each one more costs as much as such a frame, and may be a single byte.
FIELDS_MAX: Final = 16
#: Calls that a peer may reset before it has sent them. A peer that resets 20,000 at once either stalled for
#: seconds or attacks the server.
RESETS_MAX: Final = 20_000

#: Cost of a message in addition to its bytes until it is read. Without it, empty messages would be free.
MESSAGE_COST_BYTES: Final = 256
#: With so much unread a call is ended. Only tiny messages come to it: others fill the window before.
UNREAD_BYTES_MAX: Final = 4 * WINDOW_BYTES

# Blocks of headers that are kept, and their bytes: those of some tokens, which come to more than a kilobyte each.
# With more of them all are forgotten: who changes tokens, or has one for each call, fills no memory.
_BLOCKS_KEPT: Final = 256
_KEPT_BYTES_MAX: Final = 256 << 10

#: A message of which so much is to come in one frame is received where it belongs.
DIRECT_BYTES_MIN: Final = 16 << 10
# Room for a message is at most so many times what has come of it.
_ROOM_GROWS: Final = 16
# Longer answers are not copied once more for the sake of one piece.
_JOINED_BYTES_MAX: Final = 16 << 10

_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(
    10
)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_WINDOW_MAX: Final = 2**31 - 1
_LAST_NUMBER: Final = b"\x7f\xff\xff\xff"

_FRAME = struct.Struct(">IBI")
_PREFIX = struct.Struct(">BI")
# Head of a frame, and of the message that begins in it.
_MESSAGE_HEAD = struct.Struct(">IBIBI")
_U32 = struct.Struct(">I")
# A whole WINDOW_UPDATE, and how it begins: its length and type.
_WINDOW_FRAME = struct.Struct(">IBII")
_WINDOW_UPDATE: Final = 4 << 8 | _WINDOW
_SETTING = struct.Struct(">HI")

_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADERS = range(1, 7)


class ErrorCode(enum.IntEnum):
    """Why a stream or a connection ended; the numbers are HTTP/2's."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(ProtocolError):
    """The peer broke the protocol or a bound of it; the connection is over."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code


@dataclass(slots=True)
class CallHeaders:
    """The headers of a call. Equal blocks of a connection share one object. Only `caller` changes."""

    #: `/package.Service/Method`.
    path: str
    #: What the client leaves for the whole call, from when it sent it; None: no limit.
    timeout_ns: int | None
    #: `identity`, `gzip` or `deflate`; others are broken requests.
    encoding: str
    #: The client's own headers, in its order; values of names in `-bin` are bytes.
    metadata: tuple[tuple[str, str | bytes], ...]
    #: The caller that sent them on this connection, if it may call `path`; None before the first check.
    caller: Caller | None = field(default=None, compare=False)


@dataclass(slots=True)
class CallReceived:
    """A call that came in one piece: opened, its one message, and nothing more to come.

    The message does not count as unread.
    """

    stream_id: int
    request: CallHeaders
    message: bytes
    #: What `receive` was told of the bytes with which the headers began.
    arrival_ns: int
    #: The gate judged it, and let it in.
    judged: bool = False


@dataclass(slots=True)
class RequestBegun:
    """A call was opened."""

    stream_id: int
    request: CallHeaders
    #: What `receive` was told of the bytes with which the headers began.
    arrival_ns: int


@dataclass(slots=True)
class MessageReceived:
    """A message is complete. It counts as unread until `message_read`."""

    stream_id: int
    #: A view of it when it is large and came in parts.
    message: bytes | memoryview
    #: What `receive` was told of the bytes with which the message began.
    arrival_ns: int


@dataclass(slots=True)
class LastMessage:
    """A message came in one piece, and nothing more is to come. It does not count as unread."""

    stream_id: int
    message: bytes
    #: What `receive` was told of the bytes with which the message began.
    arrival_ns: int


@dataclass(slots=True)
class HalfClosed:
    """The client sends nothing more on this stream, and waits for the end of the call."""

    stream_id: int


@dataclass(slots=True)
class StreamReset:
    """The client gave the call up; nothing can be sent on it any more."""

    stream_id: int


@dataclass(slots=True)
class MessageBroken:
    """The client sent something on this stream that is no message; the call cannot go on."""

    stream_id: int
    #: Code of the gRPC status that says so.
    status: int
    text: str


Event = (
    CallReceived
    | LastMessage
    | RequestBegun
    | MessageReceived
    | HalfClosed
    | StreamReset
    | MessageBroken
)


class Gate(Protocol):
    """Refuses calls that a read brings whole before anything is made of them."""

    #: The last refusal holds for every call of this read that has the same headers, and a message as long with the same
    #: beginning, of so many bytes.
    like_bytes: int

    def judge(self, request: CallHeaders, data: bytes, begin: int, end: int) -> bytes | bool:
        """Judge a call by its headers and its message, from `begin` to `end` in the data.

        Returns the end of the call, from `status_block`; or, if it is let in, whether it was judged.
        """

    def refused_alike(self, count: int) -> None:
        """So many more calls are refused that are like the last one."""


# The numbers of gRPC's statuses that this file needs.
_UNIMPLEMENTED, _INTERNAL, _RESOURCE_EXHAUSTED = 12, 13, 8


class _Stream:
    """A call that is open. Most calls change few of these, so that they begin as the class's."""

    #: Bytes that we let the peer send.
    room = WINDOW_BYTES
    #: Bytes taken in for which the peer has not got new room.
    uncredited = 0
    #: Bytes of messages that are complete and unread, with `MESSAGE_COST_BYTES` each.
    unread = 0
    remote_closed = False
    headers_sent = False
    #: The client has sent at least one whole message.
    begun = False
    # The message that is being gathered: its first five bytes, then room for some or all of the rest, how
    # much of it has come, and how much is to come.
    prefix = b""
    message: memoryview | None = None
    gathered = 0
    missing = 0
    compressed = False
    arrival_ns = 0
    #: The block that ends the call, when it waits behind `outgoing`.
    trailers: bytes | None = None
    #: Frames' worth of answers that wait for the peer's window; None: there never were any.
    outgoing: deque[memoryview] | None = None

    def __init__(self, stream_id: int, request: CallHeaders, window: int) -> None:
        self.stream_id = stream_id
        self.request = request
        #: Bytes that the peer lets us send.
        self.window = window


class _Table(HeaderTable):
    """An HPACK table that says when it changed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.changed = False

    @override
    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)


class Http2Connection:
    """The server's end of one connection.

    It is large because a connection is one state machine: windows, open streams and the bounds on both are read and
    changed for each frame, whichever way it goes, and an object more between them costs every request.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int,
        allocate: Callable[[int], memoryview] = lambda num_bytes: memoryview(bytearray(num_bytes)),
    ) -> None:
        """Begin with a peer that has sent nothing yet. The longest message counts compressed or not.

        `allocate` makes room for a message that comes in parts; its initial content does not matter.
        """
        self._allocate = allocate
        self._max_message_bytes = max_message_bytes
        #: Bytes of messages that are not complete, or complete and unread, with `MESSAGE_COST_BYTES` each.
        self.held_bytes = 0
        #: Bytes of answers that wait for the peer's window.
        self.queued_bytes = 0
        # The beginning of a frame, and when that came.
        self._partial = b""
        self._partial_since_ns = 0
        # When what is looked at now came.
        self._arrival_ns = 0
        self._gate: Gate | None = None
        # What the gate gave last, and the frame that it makes, but for the number of its stream.
        self._refusal = (b"", b"", b"")
        #: The peer has sent HTTP/2's preface.
        self.greeted = False
        self._decoder = Decoder(max_header_list_size=HEADER_BLOCK_BYTES_MAX)
        self._table = _Table()
        self._decoder.header_table = self._table
        self._blocks: dict[bytes, CallHeaders | int] = {}
        self._kept_bytes = 0
        self._streams: dict[int, _Stream] = {}
        self._last_stream_id = 0
        # A block of headers that goes on in CONTINUATION frames: stream, flags, bytes so far, frames, arrival.
        self._block: tuple[int, int, bytearray, int, int] | None = None
        # The DATA frame whose payload is coming in: stream (None: of no call), bytes and padding left, end.
        self._data_stream_id = 0
        self._data_left = 0
        self._padding_left = 0
        self._data_ends = False
        self._window = 65_535
        self._room = CONNECTION_WINDOW_BYTES
        self._uncredited = 0
        self._peer_initial_window = 65_535
        self._peer_frame_bytes = 16_384
        #: Streams that wait for the connection's window, and for no other.
        self._ready: dict[int, _Stream] = {}
        self._idle_frames_left = IDLE_FRAMES_MAX
        self._resets_left = RESETS_MAX
        self._out: list[Buffer] = [
            _frame(
                _SETTINGS,
                0,
                0,
                _SETTING.pack(_MAX_STREAMS, STREAMS_MAX)
                + _SETTING.pack(_INITIAL_WINDOW, WINDOW_BYTES)
                + _SETTING.pack(_MAX_FRAME, FRAME_BYTES_MAX)
                + _SETTING.pack(_MAX_HEADERS, HEADER_BLOCK_BYTES_MAX),
            ),
            _frame(_WINDOW, 0, 0, _U32.pack(CONNECTION_WINDOW_BYTES - 65_535)),
        ]

    # --- bytes in -----------------------------------------------------------------------------

    def direct(self) -> memoryview | None:
        """Where the next bytes of the peer belong, if they are of a large message; None: nowhere yet.

        Who has some of them received there says so to `receive`, before anything else happens.
        """
        if self._data_left < DIRECT_BYTES_MIN:
            return None
        stream = self._streams.get(self._data_stream_id)
        if stream is None or stream.missing < DIRECT_BYTES_MIN or stream.message is None:
            return None
        room = self._room_for(stream, DIRECT_BYTES_MIN)
        begin = stream.gathered
        return room[begin : begin + min(self._data_left, stream.missing)]

    def receive(
        self,
        view: Buffer,
        arrival_ns: int = 0,
        *,
        num_direct: int = 0,
        gate: Gate | None = None,
    ) -> list[Event]:
        """Take in what the peer sent; returns what happened, in order.

        Args:
            view: the bytes. They may change when this returns.
            arrival_ns: when the first of them came, on any clock; the events hand it back.
            num_direct: bytes that came before them, and lie in `direct` already.
            gate: refuses calls that it brings whole; None: none are.

        Raises:
            Http2Error: the peer broke the protocol. Say so with `close`, and hang up.
        """
        events: list[Event] = []
        self._arrival_ns = arrival_ns
        self._gate = gate
        if num_direct:
            self._data_left -= num_direct
            self._took(self._streams[self._data_stream_id], num_direct, events)
            if not self._data_left and not self._padding_left:
                self._end_data(events)
        if self._partial:
            data = self._partial + view
            self._arrival_ns = self._partial_since_ns
        elif self.held_bytes >= DIRECT_BYTES_MIN:
            # The call stands before the slice: inside it, mypyc runs the call once per type that `view` may have.
            begin = self._gather_frames(view, events)
            data = bytes(view[begin:])
        else:
            data = bytes(view)
        position, end = 0, len(data)
        if not self.greeted:
            if not data.startswith(PREFACE[:end]):
                raise Http2Error(
                    ErrorCode.PROTOCOL_ERROR, f"found {data[:24]!r}, expected HTTP/2's preface"
                )
            if end < len(PREFACE):
                self._keep(data)
                return events
            self.greeted, self._partial = True, b""
            position = len(PREFACE)
        while True:
            if self._data_left or self._padding_left:
                position = self._take_payload(data, position, events)
                if self._data_left or self._padding_left:
                    break
                self._arrival_ns = arrival_ns
            if end - position < 9:
                break
            word, flags, stream_id = _FRAME.unpack_from(data, position)
            length, kind = word >> 8, word & 0xFF
            if length > FRAME_BYTES_MAX:
                raise Http2Error(
                    ErrorCode.FRAME_SIZE_ERROR,
                    f"found a frame of {length} bytes, expected {FRAME_BYTES_MAX} at most",
                )
            stream_id &= _WINDOW_MAX
            if self._block is not None and (kind != _CONTINUATION or stream_id != self._block[0]):
                raise Http2Error(
                    ErrorCode.PROTOCOL_ERROR,
                    f"found a frame of type {kind} inside the headers of stream {self._block[0]}",
                )
            if word == _WINDOW_UPDATE and end - position >= 13:
                (increment,) = _U32.unpack_from(data, position + 9)
                self._window_update(stream_id, increment & _WINDOW_MAX)
                position += 13
                self._arrival_ns = arrival_ns
                continue
            if kind == _HEADERS and flags == _END_HEADERS:
                behind = self._known_call(data, position, stream_id, length, events)
                if behind > 0:
                    position = behind
                    self._arrival_ns = arrival_ns
                    continue
                if behind:
                    break
            if kind == _DATA:
                if flags == _END_STREAM and (
                    behind := self._last_message(data, position, stream_id)
                ):
                    message = data[position + 14 : behind]
                    events.append(LastMessage(stream_id, message, self._arrival_ns))
                    position = behind
                    self._arrival_ns = arrival_ns
                    continue
                padding = 0
                if flags & _PADDED:
                    if end - position < 10:
                        break
                    padding = data[position + 9]
                    if padding + 1 > length:
                        raise Http2Error(
                            ErrorCode.PROTOCOL_ERROR,
                            f"found {padding} bytes of padding in a DATA frame of {length}",
                        )
                    position += 1
                    self._begin_data(stream_id, flags, length, length - 1 - padding, padding)
                else:
                    self._begin_data(stream_id, flags, length, length, 0)
                position += 9
                if not self._data_left and not self._padding_left:
                    self._end_data(events)
                    self._arrival_ns = arrival_ns
                continue
            if length > HEADER_BLOCK_BYTES_MAX:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM,
                    f"found a frame of type {kind} of {length} bytes, expected"
                    f" {HEADER_BLOCK_BYTES_MAX} at most",
                )
            if end - position - 9 < length:
                break
            position += 9
            payload = data[position : position + length]
            position += length
            if kind == _HEADERS:
                self._headers(stream_id, flags, payload, events)
            else:
                self._other(kind, flags, stream_id, payload, events)
            self._arrival_ns = arrival_ns
        self._keep(data[position:])
        return events

    def _keep(self, rest: bytes) -> None:
        self._partial, self._partial_since_ns = rest, self._arrival_ns

    def _known_call(
        self, data: bytes, position: int, stream_id: int, length: int, events: list[Event]
    ) -> int:
        """Open a call whose headers were seen before; returns the position behind what was taken.

        Returns 0, and does nothing, where anything about the headers is out of the ordinary; -1 where there is a gate, and
        the read cuts off a small message: with the rest of it, the call can be refused like others.
        """
        behind = position + 9 + length
        request = self._blocks.get(data[position + 9 : behind])
        if (
            not isinstance(request, CallHeaders)
            or behind > len(data)
            or stream_id <= self._last_stream_id
            or not stream_id & 1
            or len(self._streams) >= STREAMS_MAX
        ):
            return 0
        opened = self._opened_early(data, behind, stream_id)
        behind += 13 * bool(opened)
        end = self._whole_message(data, behind, stream_id, WINDOW_BYTES)
        judged = False
        if self._gate is not None:
            if not end and _is_cut(data, behind):
                return -1
            verdict = bool(end) and self._gate.judge(request, data, behind + 14, end)
            if isinstance(verdict, bytes):
                self._last_stream_id = stream_id
                self._refuse(stream_id, verdict)
                return self._refuse_alike(data, position, behind, end, bool(opened))
            judged = verdict
        self._last_stream_id = stream_id
        stream = _Stream(stream_id, request, self._peer_initial_window + opened)
        self._streams[stream_id] = stream
        if not end:
            events.append(RequestBegun(stream_id, request, self._arrival_ns))
            return behind
        stream.remote_closed = stream.begun = True
        message = data[behind + 14 : end]
        events.append(CallReceived(stream_id, request, message, self._arrival_ns, judged))
        return end

    def _refuse_alike(
        self, data: bytes, begin: int, message_frame: int, end: int, opened: bool
    ) -> int:
        """Refuse the calls behind one that was refused, as far as they are like it, at a small part of the cost.

        Args:
            data: the bytes of the read.
            begin: where the call begins.
            message_frame: where the frame of its message begins.
            end: where it ends.
            opened: a WINDOW_UPDATE lies before its message.

        Returns:
            The position behind those calls.
        """
        gate = self._gate
        assert gate is not None
        # What calls have in common lies around the numbers of their streams.
        cuts = [begin, message_frame, message_frame + 14 + gate.like_bytes]
        if opened:
            cuts.insert(1, message_frame - 13)
        parts, at = [data[begin : begin + 5]], begin + 9
        for cut in cuts[1:-1]:
            parts.append(data[at : cut + 5])
            at = cut + 9
        parts.append(data[at : cuts[-1]])
        length, size = end - message_frame - 9, end - begin
        most, stop = self._room // length, len(data) - size
        last, position = data[begin + 5 : begin + 9], end
        numbers: list[bytes] = []
        while position <= stop and len(numbers) < most:
            number = data[position + 5 : position + 9]
            if (
                number <= last
                or number > _LAST_NUMBER
                or not number[3] & 1
                or not data.startswith(number.join(parts), position)
            ):
                break
            numbers.append(number)
            last = number
            position += size
        if numbers:
            self._last_stream_id = _U32.unpack(last)[0]
            self._take_room(length * len(numbers))
            earned = IDLE_FRAMES_PER_MESSAGE * len(numbers)
            self._idle_frames_left = max(
                self._idle_frames_left, min(self._idle_frames_left + earned, IDLE_FRAMES_MAX)
            )
            _, head, tail = self._refusal
            self._out += (head, (tail + head).join(numbers), tail)
            gate.refused_alike(len(numbers))
        return position

    def _opened_early(self, data: bytes, position: int, stream_id: int) -> int:
        """Return by how much a WINDOW_UPDATE opens a new stream's window; 0 if it is another frame.

        gRPC's own library sends one between the headers and the message of each call.
        """
        if len(data) < position + 13:
            return 0
        word, _, found_id, increment = _WINDOW_FRAME.unpack_from(data, position)
        fits = word == _WINDOW_UPDATE and found_id == stream_id
        return increment if fits and increment <= _WINDOW_MAX - self._peer_initial_window else 0

    def _last_message(self, data: bytes, position: int, stream_id: int) -> int:
        """Take in the last frame of a call that was begun, where it is a whole message.

        Returns what `_whole_message` does.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.prefix or stream.missing or stream.remote_closed:
            return 0
        behind = self._whole_message(data, position, stream_id, stream.room)
        if behind:
            stream.remote_closed = stream.begun = True
        return behind

    def _whole_message(self, data: bytes, position: int, stream_id: int, room: int) -> int:
        """Take in a message that fills the last frame of its call; returns the position behind it.

        Returns 0, and does nothing, where it is not that, not all there, longer than the stream has room for,
        or out of the ordinary.
        """
        if len(data) < position + 14:
            return 0
        word, flags, found_id, flag, num_bytes = _MESSAGE_HEAD.unpack_from(data, position)
        length: int = num_bytes + 5
        behind: int = position + 9 + length
        if (
            # DATA of this length.
            word != length << 8
            or flags != _END_STREAM
            or found_id != stream_id
            or flag
            or behind > len(data)
            or num_bytes > self._max_message_bytes
            or length > room
            or length > self._room
        ):
            return 0
        self._room -= length
        self._uncredited += length
        if self._uncredited >= CONNECTION_WINDOW_BYTES // 4:
            self._credit_connection()
        if self._idle_frames_left < IDLE_FRAMES_MAX:
            self._idle_frames_left += IDLE_FRAMES_PER_MESSAGE
        return behind

    def _take_room(self, length: int) -> None:
        """Count DATA against the connection's window, and open it again when much of it is used."""
        self._room -= length
        self._uncredited += length
        if self._uncredited >= CONNECTION_WINDOW_BYTES // 4:
            self._credit_connection()

    def _credit_connection(self) -> None:
        self._out.append(_frame(_WINDOW, 0, 0, _U32.pack(self._uncredited)))
        self._room += self._uncredited
        self._uncredited = 0

    def _begin_data(
        self, stream_id: int, flags: int, length: int, data_left: int, padding: int
    ) -> None:
        if not stream_id or stream_id > self._last_stream_id:
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, f"found DATA on stream {stream_id}, which is not open"
            )
        if length > self._room:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR,
                f"found {length} bytes of DATA, expected {self._room} at most on this connection",
            )
        self._take_room(length)
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.remote_closed:
                raise Http2Error(
                    ErrorCode.STREAM_CLOSED, f"found DATA behind the end of stream {stream_id}"
                )
            if length > stream.room:
                raise Http2Error(
                    ErrorCode.FLOW_CONTROL_ERROR,
                    f"found {length} bytes of DATA, expected {stream.room} at most on stream"
                    f" {stream_id}",
                )
            stream.room -= length
            stream.uncredited += length
        if not data_left and not flags & _END_STREAM:
            self._idle_frame("empty DATA")
        self._data_stream_id = stream_id
        self._data_left = data_left
        self._padding_left = padding
        self._data_ends = bool(flags & _END_STREAM)

    def _take_payload(self, data: bytes, position: int, events: list[Event]) -> int:
        """Take in what is there of the present DATA frame; returns the position behind it."""
        end = len(data)
        if left := self._data_left:
            stop = min(position + left, end)
            self._data_left = left - (stop - position)
            stream = self._streams.get(self._data_stream_id)
            if stream is not None:
                self._gather(stream, data, position, stop, events)
            position = stop
        if not self._data_left and self._padding_left:
            skipped = min(self._padding_left, end - position)
            self._padding_left -= skipped
            position += skipped
        if not self._data_left and not self._padding_left:
            self._end_data(events)
        return position

    def _end_data(self, events: list[Event]) -> None:
        stream = self._streams.get(self._data_stream_id)
        if stream is None:
            return
        if self._data_ends:
            self._half_close(stream, events)
        else:
            self._credit(stream)

    def _gather(
        self, stream: _Stream, data: bytes, position: int, end: int, events: list[Event]
    ) -> None:
        """Cut messages out of the payload of DATA frames."""
        while position < end:
            if not stream.missing:
                if not stream.prefix:
                    stream.arrival_ns = self._arrival_ns
                stop = min(position + 5 - len(stream.prefix), end)
                stream.prefix += data[position:stop]
                position = stop
                if len(stream.prefix) < 5:
                    return
                flag, length = _PREFIX.unpack(stream.prefix)
                fault = self._find_fault(stream, flag, length)
                if fault is not None:
                    self._broken(stream, fault, events)
                    self._drop_unread(stream)
                    return
                stream.compressed = bool(flag)
                stream.missing = length
                stream.gathered = 0
                if end - position >= length:
                    # The whole message is here, as nearly always with small ones.
                    stream.prefix = b""
                    stream.missing = 0
                    self._message(stream, data[position : position + length], events)
                    position += length
                    continue
                stream.message = memoryview(bytearray())
                if position == end:
                    return
            if stream.missing < 0:
                return  # What comes is of a call that was broken.
            assert stream.message is not None
            taken = min(stream.missing, end - position)
            gathered = stream.gathered
            room = self._room_for(stream, taken)
            room[gathered : gathered + taken] = memoryview(data)[position : position + taken]
            position += taken
            self._took(stream, taken, events)

    def _room_for(self, stream: _Stream, num_bytes: int) -> memoryview:
        """Where the message that is being gathered lies, with room for some bytes more.

        Room grows as bytes arrive, so that a false length reserves no memory in advance.
        """
        room = stream.message
        assert room is not None
        gathered = stream.gathered
        if gathered + num_bytes > len(room):
            total = gathered + stream.missing
            larger = self._allocate(min(total, max(_ROOM_GROWS * (gathered + num_bytes), 1024)))
            larger[:gathered] = room[:gathered]
            stream.message = room = larger
        return room

    def _took(self, stream: _Stream, num_bytes: int, events: list[Event]) -> None:
        """Count bytes of the message that is being gathered; they lie where they belong."""
        self.held_bytes += num_bytes
        stream.gathered += num_bytes
        stream.missing -= num_bytes
        if not stream.missing:
            message = stream.message
            assert message is not None
            self.held_bytes -= stream.gathered
            stream.gathered = 0
            stream.message, stream.prefix = None, b""
            small = len(message) < DIRECT_BYTES_MIN
            self._message(stream, bytes(message) if small else message, events)

    def _gather_frames(self, view: Buffer, events: list[Event]) -> int:
        """Take in frames of DATA from the middle of large messages; returns the position behind them.

        Nothing else is looked at, and nothing copied but to its place.
        """
        position, end = 0, len(view)
        streams = self._streams
        if self._data_left:
            stream = streams.get(self._data_stream_id)
            if stream is None or self._data_left >= stream.missing:
                return 0
            position = min(self._data_left, end)
            self._data_left -= position
            self._put(stream, view[:position])
            if self._data_left or self._padding_left:
                return position
            self._end_data(events)
        while end - position >= 9:
            word, flags, stream_id = _FRAME.unpack_from(view, position)
            length = word >> 8
            stream = streams.get(stream_id)
            if (
                stream is None
                or word & 0xFF
                or flags
                or not 0 < length < stream.missing
                or length > stream.room
                or length > self._room
                or length > FRAME_BYTES_MAX
                or stream.remote_closed
                or self._block is not None
            ):
                break
            self._take_room(length)
            stream.room -= length
            stream.uncredited += length
            position += 9
            taken = min(length, end - position)
            self._put(stream, view[position : position + taken])
            position += taken
            if taken < length:
                self._data_stream_id, self._data_left = stream_id, length - taken
                self._padding_left, self._data_ends = 0, False
                break
            if stream.uncredited >= WINDOW_BYTES // 4:
                self._credit(stream)
        return position

    def _put(self, stream: _Stream, part: Buffer) -> None:
        """Put a part of the message that is being gathered, not its end, where it belongs."""
        num_bytes = len(part)
        begin = stream.gathered
        room = stream.message
        if room is None or begin + num_bytes > len(room):
            room = self._room_for(stream, num_bytes)
        room[begin : begin + num_bytes] = part
        self.held_bytes += num_bytes
        stream.gathered += num_bytes
        stream.missing -= num_bytes

    def _find_fault(self, stream: _Stream, flag: int, length: int) -> MessageBroken | None:
        if length > self._max_message_bytes:
            return MessageBroken(
                stream.stream_id, _RESOURCE_EXHAUSTED, _too_large(length, self._max_message_bytes)
            )
        if flag > 1 or (flag and stream.request.encoding == "identity"):
            return MessageBroken(
                stream.stream_id,
                _INTERNAL,
                f"found flag {flag} before a message, expected 0, or 1 with grpc-encoding",
            )
        if flag and stream.request.encoding not in _WINDOW_BITS:
            return MessageBroken(
                stream.stream_id,
                _UNIMPLEMENTED,
                f"found grpc-encoding {stream.request.encoding[:80]!r}, expected identity, gzip or deflate",
            )
        return None

    def _message(self, stream: _Stream, message: bytes | memoryview, events: list[Event]) -> None:
        if stream.compressed:
            limit = self._max_message_bytes
            inflater = zlib.decompressobj(_WINDOW_BITS[stream.request.encoding])
            try:
                message = inflater.decompress(message, limit + 1)
                fault = "" if inflater.eof or len(message) > limit else "the message is cut short"
            except zlib.error as error:
                fault = str(error)
            if fault:
                text = f"a message is no {stream.request.encoding}: {fault}"
                self._broken(stream, MessageBroken(stream.stream_id, _INTERNAL, text), events)
                return
            if len(message) > limit:
                text = _too_large(len(message), limit)
                broken = MessageBroken(stream.stream_id, _RESOURCE_EXHAUSTED, text)
                self._broken(stream, broken, events)
                return
        if stream.unread > UNREAD_BYTES_MAX:
            text = f"found {stream.unread} bytes of unread messages, expected {UNREAD_BYTES_MAX} at most"
            self._broken(stream, MessageBroken(stream.stream_id, _RESOURCE_EXHAUSTED, text), events)
            return
        stream.begun = True
        stream.unread += len(message) + MESSAGE_COST_BYTES
        self.held_bytes += len(message) + MESSAGE_COST_BYTES
        self._earn()
        events.append(MessageReceived(stream.stream_id, message, stream.arrival_ns))

    def _broken(self, stream: _Stream, broken: MessageBroken, events: list[Event]) -> None:
        """Note what cannot be taken as a message; whatever else comes on the stream is of no call."""
        self._idle_frame("message that is none")
        events.append(broken)
        stream.missing = -1

    def _half_close(self, stream: _Stream, events: list[Event]) -> None:
        if stream.missing < 0:
            stream.remote_closed = True
            return
        if stream.prefix or stream.missing:
            text = "the stream ended inside a message"
            self._broken(stream, MessageBroken(stream.stream_id, _INTERNAL, text), events)
            self._drop_unread(stream)
        stream.remote_closed = True
        events.append(HalfClosed(stream.stream_id))

    def _credit(self, stream: _Stream) -> None:
        """Grant the peer more bytes, unless too many that it sent are unread."""
        if (
            stream.uncredited >= WINDOW_BYTES // 4
            and stream.unread < WINDOW_BYTES // 2
            and not stream.remote_closed
        ):
            self._out.append(_frame(_WINDOW, 0, stream.stream_id, _U32.pack(stream.uncredited)))
            stream.room += stream.uncredited
            stream.uncredited = 0

    def _drop_unread(self, stream: _Stream) -> None:
        self.held_bytes -= stream.unread + stream.gathered
        stream.unread = stream.gathered = 0
        stream.message = None

    # --- headers ------------------------------------------------------------------------------

    def _headers(self, stream_id: int, flags: int, payload: bytes, events: list[Event]) -> None:
        start, stop = 0, len(payload)
        if flags & _PADDED:
            start, stop = 1, stop - (payload[0] if payload else stop + 1)
        if flags & _WITH_PRIORITY:
            start += 5
        if start > stop:
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, f"found more padding than headers on stream {stream_id}"
            )
        block = payload[start:stop] if start or stop < len(payload) else payload
        if flags & _END_HEADERS:
            self._block_complete(stream_id, flags, block, self._arrival_ns, events)
        else:
            self._block = (stream_id, flags, bytearray(block), 0, self._arrival_ns)

    def _continuation(self, flags: int, payload: bytes, events: list[Event]) -> None:
        if self._block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "found CONTINUATION of nothing")
        stream_id, first_flags, block, count, since_ns = self._block
        block += payload
        if len(block) > HEADER_BLOCK_BYTES_MAX or count >= CONTINUATIONS_MAX:
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"found headers of {len(block)} bytes in {count + 2} frames, expected at most"
                f" {HEADER_BLOCK_BYTES_MAX} in {CONTINUATIONS_MAX + 1}",
            )
        if flags & _END_HEADERS:
            self._block = None
            self._block_complete(stream_id, first_flags, bytes(block), since_ns, events)
        else:
            self._block = (stream_id, first_flags, block, count + 1, since_ns)

    def _block_complete(
        self, stream_id: int, flags: int, block: bytes, arrival_ns: int, events: list[Event]
    ) -> None:
        request = self._blocks.get(block)
        if request is None:
            request = self._decode(block)
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.remote_closed or not flags & _END_STREAM:
                raise Http2Error(
                    ErrorCode.PROTOCOL_ERROR, f"found headers again on stream {stream_id}"
                )
            self._half_close(stream, events)  # They are trailers, which gRPC's clients do not send.
            return
        if not stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "found headers on stream 0")
        if stream_id <= self._last_stream_id:
            self._idle_frame("headers of a call that is over")
            return
        if not stream_id & 1:
            raise Http2Error(
                ErrorCode.PROTOCOL_ERROR, f"found stream {stream_id}, expected an odd number"
            )
        self._last_stream_id = stream_id
        if len(self._streams) >= STREAMS_MAX:
            self._idle_frame("a call beyond MAX_CONCURRENT_STREAMS")
            self._out.append(_frame(_RST, 0, stream_id, _U32.pack(ErrorCode.REFUSED_STREAM)))
            return
        if isinstance(request, int):
            self._idle_frame("a request that is not gRPC's")
            block = b"\x08\x03%d" % request
            self._out.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream_id, block))
            if not flags & _END_STREAM:
                self._out.append(_frame(_RST, 0, stream_id, _U32.pack(ErrorCode.NO_ERROR)))
            return
        stream = _Stream(stream_id, request, self._peer_initial_window)
        self._streams[stream_id] = stream
        events.append(RequestBegun(stream_id, request, arrival_ns))
        if flags & _END_STREAM:
            self._half_close(stream, events)

    def _decode(self, block: bytes) -> CallHeaders | int:
        """Decode headers that were not seen before; an int is the HTTP status of what is not gRPC."""
        self._table.changed = bool(block) and block[0] & 0xE0 == 0x20
        try:
            headers = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError, ValueError) as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from None
        fields = [(bytes(name), bytes(value)) for name, value in headers]
        if len(fields) > FIELDS_MAX:
            self._idle_frame("field of long headers", len(fields) - FIELDS_MAX)
        request = read_headers(fields)
        if self._table.changed:
            # An index means something else from now on.
            self._forget_blocks()
        else:
            if len(self._blocks) >= _BLOCKS_KEPT or self._kept_bytes + len(block) > _KEPT_BYTES_MAX:
                self._forget_blocks()
            self._blocks[block] = request
            self._kept_bytes += len(block)
        return request

    def _forget_blocks(self) -> None:
        self._blocks.clear()
        self._kept_bytes = 0

    # --- the other frames ---------------------------------------------------------------------

    def _other(
        self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]
    ) -> None:
        match kind:
            case 8:
                _expect(False, "WINDOW_UPDATE", stream_id, payload)
            case 6:
                _expect(stream_id == 0 and len(payload) == 8, "PING", stream_id, payload)
                self._idle_frame("PING")
                if not flags & _ACK:
                    self._out.append(_frame(_PING, _ACK, 0, payload))
            case 3:
                _expect(
                    0 < stream_id <= self._last_stream_id and len(payload) == 4,
                    "RST_STREAM",
                    stream_id,
                    payload,
                )
                self._peer_reset(stream_id, events)
            case 4:
                _expect(stream_id == 0 and len(payload) % 6 == 0, "SETTINGS", stream_id, payload)
                self._idle_frame("SETTINGS")
                if not flags & _ACK:
                    self._settings(payload)
                    # In front of what they allow: gRPC's client ends a call whose data come before.
                    self._out.append(_frame(_SETTINGS, _ACK, 0, b""))
                    self._pump()
            case 9:
                self._continuation(flags, payload, events)
            case 5:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "found PUSH_PROMISE from a client")
            case _:
                # PRIORITY, GOAWAY, and unknown types, which are to be ignored.
                self._idle_frame(f"type {kind}")

    def _settings(self, payload: bytes) -> None:
        for identifier, value in _SETTING.iter_unpack(payload):
            if identifier == _INITIAL_WINDOW:
                if value > _WINDOW_MAX:
                    raise Http2Error(
                        ErrorCode.FLOW_CONTROL_ERROR, f"found INITIAL_WINDOW_SIZE {value}"
                    )
                change = value - self._peer_initial_window
                if not change:
                    continue
                self._peer_initial_window = value
                for stream in self._streams.values():
                    stream.window += change
                    if stream.window > _WINDOW_MAX:
                        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
                    if stream.window > 0 and stream.outgoing:
                        self._ready[stream.stream_id] = stream
                # A walk over all streams is worth as many frames that bring nothing.
                self._idle_frame("SETTINGS", len(self._streams) // 16)
            elif identifier == _MAX_FRAME:
                if not 16_384 <= value < 1 << 24:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"found MAX_FRAME_SIZE {value}")
                self._peer_frame_bytes = value

    def _window_update(self, stream_id: int, increment: int) -> None:
        self._idle_frame("WINDOW_UPDATE")
        if stream_id == 0:
            self._window += increment
            window = self._window
            self._pump()
        else:
            stream = self._streams.get(stream_id)
            if stream is None:
                return
            stream.window += increment
            window = stream.window
            if stream.window > 0 and stream.outgoing:
                self._ready[stream_id] = stream
                self._pump()
        if not increment or window > _WINDOW_MAX:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, f"found WINDOW_UPDATE by {increment}, to {window}"
            )

    def _peer_reset(self, stream_id: int, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            self._idle_frame("RST_STREAM")
            return
        if not stream.begun:
            self._resets_left -= 1
            if self._resets_left < 0:
                raise Http2Error(
                    ErrorCode.ENHANCE_YOUR_CALM,
                    f"found more than {RESETS_MAX} calls taken back before they were sent",
                )
        self._forget(stream)
        events.append(StreamReset(stream_id))

    def _idle_frame(self, what: str, count: int = 1) -> None:
        self._idle_frames_left -= count
        if self._idle_frames_left < 0:
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"found more than {IDLE_FRAMES_MAX} frames that bring nothing, the last a {what}",
            )

    def _earn(self) -> None:
        if self._idle_frames_left < IDLE_FRAMES_MAX:
            self._idle_frames_left += IDLE_FRAMES_PER_MESSAGE

    def forgive(self) -> None:
        """Let the peer send some more frames that bring nothing; called once a second or so."""
        self._idle_frames_left = min(
            self._idle_frames_left + IDLE_FRAMES_MAX // 10, IDLE_FRAMES_MAX
        )
        self._resets_left = min(self._resets_left + RESETS_MAX // 10, RESETS_MAX)

    # --- what there is ------------------------------------------------------------------------

    def bytes_held_by(self, stream_id: int) -> int:
        """Bytes of a stream's messages that are incomplete or unread."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.gathered + stream.unread

    def holding(self) -> Sequence[int]:
        """Streams with bytes of a message that is incomplete or unread; linear in streams."""
        return [
            stream.stream_id
            for stream in self._streams.values()
            if stream.gathered or stream.unread
        ]

    @property
    def partial_since_ns(self) -> int | None:
        """When the incomplete frame began. Returns None if no frame is incomplete, or if it is DATA."""
        return self._partial_since_ns if self._partial else None

    def is_gathering(self, stream_id: int) -> bool:
        """Whether a message of a stream has begun to come and is not complete."""
        stream = self._streams.get(stream_id)
        return stream is not None and (bool(stream.prefix) or stream.missing > 0)

    def queued_on(self, stream_id: int) -> bool:
        """Whether messages of a stream wait for the peer's window."""
        stream = self._streams.get(stream_id)
        return stream is not None and bool(stream.outgoing)

    # --- answers ------------------------------------------------------------------------------

    def hold(self, stream_id: int, num_bytes: int) -> None:
        """A message that does not count as unread has to wait: count it until `message_read`."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.unread += num_bytes + MESSAGE_COST_BYTES
            self.held_bytes += num_bytes + MESSAGE_COST_BYTES

    def message_read(self, stream_id: int, num_bytes: int) -> None:
        """A message of a stream is out of the way, so that the client may send on."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.unread -= num_bytes + MESSAGE_COST_BYTES
            self.held_bytes -= num_bytes + MESSAGE_COST_BYTES
            self._credit(stream)

    def send_message(self, stream_id: int, message: Sequence[Buffer]) -> None:
        """Send a message, which comes in parts, or queue it for the peer's window. Nothing happens on a stream that is over."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if not stream.headers_sent:
            stream.headers_sent = True
            self._out.append(_frame(_HEADERS, _END_HEADERS, stream_id, _RESPONSE_HEADERS))
        length = total_bytes(message)
        size = length + 5
        self._earn()
        room = min(stream.window, self._window, self._peer_frame_bytes)
        if size <= room and not stream.outgoing:
            stream.window -= size
            self._window -= size
            self._out.append(_FRAME.pack(size << 8, 0, stream_id) + _PREFIX.pack(0, length))
            self._out += message
            return
        if stream.outgoing is None:
            stream.outgoing = deque()
        stream.outgoing.append(memoryview(_PREFIX.pack(0, length)))
        stream.outgoing.extend(memoryview(part) for part in message if part)
        self.queued_bytes += size
        self._ready[stream_id] = stream
        self._pump()

    def answer(self, stream_id: int, message: Sequence[Buffer]) -> None:
        """End a call with one message, which comes in parts; as `send_message` and `send_end` do, at less cost."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        size = 5
        for part in message:
            size += len(part)
        if (
            stream.headers_sent
            or stream.unread
            or not stream.remote_closed
            or size > stream.window
            or size > self._window
            or size > self._peer_frame_bytes
        ):
            self.send_message(stream_id, message)
            self.send_end(stream_id, _OK)
            return
        if self._idle_frames_left < IDLE_FRAMES_MAX:
            self._idle_frames_left += IDLE_FRAMES_PER_MESSAGE
        self._window -= size
        del self._streams[stream_id]
        number = _U32.pack(stream_id)
        head = _ANSWER_HEAD.pack(
            _HEAD_FRAME, number, _RESPONSE_HEADERS, size << 8, 0, stream_id, 0, size - 5
        )
        if size <= _JOINED_BYTES_MAX:
            self._out.append(b"".join((head, *message, _TAIL_FRAME, number, _OK)))
        else:
            self._out += (head, *message, b"".join((_TAIL_FRAME, number, _OK)))

    def send_end(self, stream_id: int, trailers: bytes) -> None:
        """End a call, behind its messages; `trailers` is from `status_block`."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if not stream.headers_sent:
            stream.headers_sent = True
            trailers = _RESPONSE_HEADERS + trailers
        stream.trailers = trailers
        if not stream.outgoing:
            self._end(stream)

    def _refuse(self, stream_id: int, block: bytes) -> None:
        """End a call of which nothing was made."""
        known, head, tail = self._refusal
        if block is not known:
            tail = _RESPONSE_HEADERS + block
            head = _FRAME.pack(len(tail) << 8 | _HEADERS, _END_HEADERS | _END_STREAM, 0)[:5]
            self._refusal = block, head, tail
        self._out.append(b"".join((head, _U32.pack(stream_id), tail)))

    def ping(self) -> None:
        """Have the peer show that it is there."""
        self._out.append(_frame(_PING, 0, 0, b"lifesign"))

    def go_away(self) -> None:
        """Ask the peer to open no more calls here. Those that cross this on the way are served."""
        self._out.append(
            _frame(_GOAWAY, 0, 0, _U32.pack(_WINDOW_MAX) + _U32.pack(ErrorCode.NO_ERROR))
        )

    def close(self, code: ErrorCode, text: str) -> None:
        """Say why the connection ends; hang up behind it."""
        payload = _U32.pack(self._last_stream_id) + _U32.pack(code) + text.encode()[:1000]
        self._out.append(_frame(_GOAWAY, 0, 0, payload))

    def take_output(self) -> Sequence[Buffer]:
        """Take what there is to be sent, in order."""
        out, self._out = self._out, []
        return out

    def _pump(self) -> None:
        """Send what the windows allow, a frame of each stream in turn."""
        while self._ready and self._window > 0:
            stream_id = next(iter(self._ready))
            stream = self._ready.pop(stream_id)
            allowed = min(stream.window, self._window, self._peer_frame_bytes)
            if allowed <= 0:
                continue
            outgoing = stream.outgoing
            assert outgoing is not None
            first, most = outgoing[0], self._peer_frame_bytes
            if not self._ready and len(first) > most and allowed == most:
                # No other stream waits: send as many whole frames as the windows allow.
                size = min(stream.window, self._window, len(first) - 1) // most * most
                head = _FRAME.pack(most << 8, 0, stream_id)
                for begin in range(0, size, most):
                    self._out += (head, first[begin : begin + most])
                outgoing[0] = first[size:]
                self._sent(stream, size, size // most)
                self._ready[stream_id] = stream
                continue
            parts: list[memoryview] = []
            size = 0
            while outgoing and size < allowed:
                part = outgoing.popleft()
                if len(part) > allowed - size:
                    outgoing.appendleft(part[allowed - size :])
                    part = part[: allowed - size]
                parts.append(part)
                size += len(part)
            self._out.append(_FRAME.pack(size << 8, 0, stream_id))
            self._out.extend(parts)
            self._sent(stream, size, 1)
            if outgoing:
                self._ready[stream_id] = stream
            elif stream.trailers is not None:
                self._end(stream)

    def _sent(self, stream: _Stream, num_bytes: int, num_frames: int) -> None:
        """Count what leaves the queue of a stream."""
        stream.window -= num_bytes
        self._window -= num_bytes
        self.queued_bytes -= num_bytes
        # The peer has to make new room for it, by frames that bring nothing else.
        self._idle_frames_left += 2 * num_frames

    def _end(self, stream: _Stream) -> None:
        assert stream.trailers is not None
        self._out.append(
            _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.stream_id, stream.trailers)
        )
        if not stream.remote_closed:
            # The client may stop sending: its call is over.
            self._out.append(_frame(_RST, 0, stream.stream_id, _U32.pack(ErrorCode.NO_ERROR)))
        self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        self._drop_unread(stream)
        self.queued_bytes -= sum(len(part) for part in stream.outgoing or ())
        self._ready.pop(stream.stream_id, None)
        del self._streams[stream.stream_id]


# --- headers in, statuses out ---------------------------------------------------------------------


def read_headers(headers: Sequence[tuple[bytes, bytes]]) -> CallHeaders | int:
    """Read the headers of a call; an int is the HTTP status for what is no call of gRPC."""
    method = path = content_type = b""
    timeout_ns: int | None = None
    encoding = "identity"
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name == b":method":
            method = value
        elif name == b":path":
            path = value
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout_ns = _timeout_ns(value)
            if timeout_ns is None:
                return 400
        elif name == b"grpc-encoding":
            encoding = value.decode(errors="replace")
        elif name.endswith(b"-bin"):
            padded = value + b"=" * (-len(value) % 4)
            try:
                metadata.append((name.decode(errors="replace"), base64.b64decode(padded)))
            except binascii.Error:
                return 400
        elif not name.startswith(b":"):
            metadata.append((name.decode(errors="replace"), value.decode(errors="replace")))
    if method != b"POST":
        return 405
    if not content_type.startswith(b"application/grpc"):
        return 415
    return CallHeaders(
        unquote(path.decode(errors="replace")), timeout_ns, encoding, tuple(metadata)
    )


def status_block(
    code: int, message: str = "", metadata: Sequence[tuple[str, str | bytes]] = ()
) -> bytes:
    """Make the headers that end a call: gRPC's code, its text, and what else there is to tell."""
    if not code and not message and not metadata:
        return _OK
    block = _literal(b"grpc-status", str(code).encode())
    if message:
        if not (message.isascii() and message.isprintable() and "%" not in message):
            message = quote(message, safe=_UNQUOTED)
        block += _literal(b"grpc-message", message.encode())
    for name, value in metadata:
        if isinstance(value, str):
            block += _literal(name.encode(), value.encode())
        else:
            block += _literal(name.encode(), binascii.b2a_base64(value, newline=False).rstrip(b"="))
    return block


def _timeout_ns(value: bytes) -> int | None:
    unit = _TIMEOUT_UNITS.get(value[-1:])
    if unit is None or not value[:-1].isdigit() or len(value) > 9:
        return None
    return int(value[:-1]) * unit


def _literal(name: bytes, value: bytes) -> bytes:
    """Encode a header that goes into no table, in plain letters."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    length = len(text)
    if length < 127:
        return bytes((length,))
    rest = length - 127
    out = bytearray(b"\x7f")
    while rest >= 128:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def _is_cut(data: bytes, position: int) -> bool:
    """Whether a small frame of DATA that ends its call begins there, and is not all there."""
    if len(data) < position + 9:
        return False
    word, flags, _ = _FRAME.unpack_from(data, position)
    num_there, length = len(data) - position - 9, word >> 8
    return not word & 0xFF and flags == _END_STREAM and num_there < length <= DIRECT_BYTES_MIN


def _expect(right: bool, what: str, stream_id: int, payload: bytes) -> None:
    if not right:
        raise Http2Error(
            ErrorCode.FRAME_SIZE_ERROR if stream_id == 0 else ErrorCode.PROTOCOL_ERROR,
            f"found {what} of {len(payload)} bytes on stream {stream_id}",
        )


def _too_large(found: int, limit: int) -> str:
    # These are gRPC's own words, by which people find what to do.
    return f"Received message larger than max ({found} vs. {limit})"


_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_TIMEOUT_UNITS: Final = {
    b"H": 3600 * NS_PER_S,
    b"M": 60 * NS_PER_S,
    b"S": NS_PER_S,
    b"m": NS_PER_MS,
    b"u": NS_PER_US,
    b"n": 1,
}
_UNQUOTED: Final = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_OK: Final = _literal(b"grpc-status", b"0")
# `:status 200` stands in HPACK's static table.
_RESPONSE_HEADERS: Final = (
    b"\x88"
    + _literal(b"content-type", b"application/grpc")
    + _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
)
# The frames of an answer, but for the number of its stream.
_HEAD_FRAME: Final = _frame(_HEADERS, _END_HEADERS, 0, _RESPONSE_HEADERS)[:5]
_TAIL_FRAME: Final = _frame(_HEADERS, _END_HEADERS | _END_STREAM, 0, _OK)[:5]
_ANSWER_HEAD: Final = struct.Struct(f">5s4s{len(_RESPONSE_HEADERS)}sIBIBI")
