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

# A message is parsed in the event loop, which delays all other requests, so its cost is bounded by more than
# its size: a field takes two bytes on the wire, a hundred in memory, and a microsecond.
# No message has more top-level fields than a small one could have, and models have some tens of inputs.
FIELDS_MAX = SMALL_MESSAGE_BYTES // 2
ENTRIES_MAX = 1024

# What is left of a message without its tensors goes to protobuf, which takes 50 ns for a field that is
# nested in others. Typed contents of an image of 602 kB fit in; larger tensors travel raw.
HEADER_BYTES_MAX = 1 << 20


def split_bulk(
    message: Buffer, field: int, *, entries_max: int | None = ENTRIES_MAX
) -> tuple[bytes, list[memoryview]]:
    """Separate the entries of one top-level `bytes` field from the rest of a message.

    Args:
        message: a serialised message.
        field: number of the field to take out.
        entries_max: how many entries it may have; None: the sender is trusted, and nothing is bounded.

    Returns:
        The message without the field, and the entries in order, as views into `message`.

    Raises:
        ProtocolError: `message` is not well-formed protobuf at its top level, or has more entries, other
            fields or other bytes than any message needs. At most `entries_max + FIELDS_MAX` fields are
            looked at.
    """
    view = memoryview(message)
    entries: list[memoryview] = []
    rest: list[memoryview] = []
    wanted = field << 3 | _LEN
    position, kept_from, end = 0, 0, len(message)
    num_fields = num_kept = 0
    while position < end:
        start = position
        tag, begin, position = _field(message, position, end)
        if tag != wanted:
            num_fields += 1
            if num_fields > FIELDS_MAX and entries_max is not None:
                raise _too_many("fields", FIELDS_MAX)
            continue
        if len(entries) == entries_max:
            raise _too_many(f"entries of field {field}", entries_max)
        entries.append(view[begin:position])
        if kept_from < start:
            num_kept += start - kept_from
            rest.append(view[kept_from:start])
        kept_from = position
    if kept_from < end:
        num_kept += end - kept_from
        rest.append(view[kept_from:end])
    if entries_max is not None:
        _check_header_bytes(num_kept)
    return b"".join(rest), entries


def check_fields(
    data: bytes, *, fields_max: int = FIELDS_MAX, bytes_max: int = HEADER_BYTES_MAX
) -> None:
    """Check that a message without bulk may be parsed.

    Raises ProtocolError if it is larger, or has more top-level fields, than any message of its kind.
    """
    _check_header_bytes(len(data), bytes_max)
    if len(data) > 2 * fields_max:  # Shorter ones cannot have as many fields.
        position, num_fields = 0, 0
        while position < len(data):
            _, _, position = _field(data, position, len(data))
            num_fields += 1
            if num_fields > fields_max:
                raise _too_many("fields", fields_max)


def add_bulk(header: bytes, field: int, entries: Sequence[Buffer]) -> Sequence[Buffer]:
    """Append entries of one top-level `bytes` field to a serialised message. Returns its parts, without copies."""
    if not entries:
        return (header,)
    tag = encode_varint(field << 3 | _LEN)
    parts: list[Buffer] = []
    for entry in entries:
        parts.append(header + tag + encode_varint(len(entry)))
        parts.append(entry)
        header = b""
    return parts


def join_bulk(header: bytes, field: int, entries: Sequence[Buffer]) -> bytes:
    """Do what `add_bulk` does, in one piece; copies each entry once."""
    return b"".join(add_bulk(header, field, entries))


def total_bytes(entries: Iterable[Buffer]) -> int:
    """Sum of the entries' lengths."""
    return sum(map(len, entries))


def _too_many(what: str, most: int) -> ProtocolError:
    return ProtocolError(f"found more than {most} {what}, expected {most} at most")


def _check_header_bytes(num_bytes: int, most: int = HEADER_BYTES_MAX) -> None:
    if num_bytes > most:
        raise ProtocolError(f"found {num_bytes} bytes besides raw tensors, expected {most} at most")


def _field(message: Buffer, position: int, end: int) -> tuple[int, int, int]:
    """Read a field's tag; returns it, and where the field's content begins and ends."""
    try:
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == _LEN:
            length, position = _varint(message, position)
            if position + length > end:
                raise ProtocolError(
                    f"field {tag >> 3} claims {length} bytes, {end - position} are left"
                )
            return tag, position, position + length
        if kind == _VARINT:
            return tag, position, _varint(message, position)[1]
    except IndexError:
        raise ProtocolError("message ends inside a tag or length") from None
    if kind == _I64:
        return tag, position, position + 8
    if kind == _I32:
        return tag, position, position + 4
    raise ProtocolError(f"field {tag >> 3} has wire type {kind}, which does not exist")


def _varint(message: Buffer, position: int) -> tuple[int, int]:
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


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]


def encode_varint(value: int) -> bytes:
    """Encode a number as protobuf does a length or tag."""
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
