"""Cut tensor bytes out of a protobuf message, and put them in, without parsing or copying them.

Parsing a message with a 600 kB tensor through protobuf copies the tensor twice (into the arena, then
into a Python object). Tensors always sit in one top-level `repeated bytes` field, so it is enough to
walk the top-level tags: the tensors become memoryviews into the message, and the rest, a few hundred
bytes, goes to protobuf.

Source: wire format as in protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clockwright.errors import ProtocolError

Buffer = bytes | bytearray | memoryview

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5

# Below this size protobuf's own parser is faster than walking tags in Python.
SMALL_MESSAGE_BYTES = 16 * 1024


def split_bulk(message: bytes, field: int) -> tuple[bytes, list[memoryview]]:
    """Separate the entries of one top-level `bytes` field from the rest of a message.

    Args:
        message: a serialised message.
        field: number of the field to take out.

    Returns:
        The message without the field, and the entries in order, as views into `message`.

    Raises:
        ProtocolError: `message` is not well-formed protobuf at its top level.
    """
    view = memoryview(message)
    entries: list[memoryview] = []
    rest: list[memoryview] = []
    wanted = field << 3 | _LEN
    position, kept_from, end = 0, 0, len(message)
    try:
        while position < end:
            start = position
            tag, position = _varint(message, position)
            kind = tag & 7
            if kind == _LEN:
                length, position = _varint(message, position)
                if position + length > end:
                    raise ProtocolError(
                        f"field {tag >> 3} claims {length} bytes, {end - position} are left"
                    )
                if tag == wanted:
                    entries.append(view[position : position + length])
                    if kept_from < start:
                        rest.append(view[kept_from:start])
                    kept_from = position + length
                position += length
            elif kind == _VARINT:
                _, position = _varint(message, position)
            elif kind == _I64:
                position += 8
            elif kind == _I32:
                position += 4
            else:
                raise ProtocolError(f"field {tag >> 3} has wire type {kind}, which does not exist")
    except IndexError:
        raise ProtocolError("message ends inside a tag or length") from None
    if kept_from < end:
        rest.append(view[kept_from:end])
    return b"".join(rest), entries


def join_bulk(header: bytes, field: int, entries: Sequence[Buffer]) -> bytes:
    """Put entries of one top-level `bytes` field behind a serialised message; copies each once."""
    if not entries:
        return header
    tag = _encode_varint(field << 3 | _LEN)
    parts: list[Buffer] = [header]
    for entry in entries:
        parts.append(tag + _encode_varint(len(entry)))
        parts.append(entry)
    return b"".join(parts)


def total_bytes(entries: Iterable[Buffer]) -> int:
    """Sum of the entries' lengths."""
    return sum(len(entry) for entry in entries)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    byte = message[position]
    position += 1
    if byte < 0x80:
        return byte, position
    value, shift = byte & 0x7F, 7
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ProtocolError("varint longer than ten bytes")


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
