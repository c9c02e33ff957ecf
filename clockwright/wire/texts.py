"""Elements of datatype BYTES as they travel: each behind its length, 4 bytes, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from clockwright.wire.bulk import Buffer

_LENGTH = struct.Struct("<I")


def cut_texts(raw: Buffer) -> list[bytes]:
    """Cut elements of datatype BYTES. Raises ValueError if the lengths do not add up."""
    data, texts, begin = bytes(raw), list[bytes](), 0
    for _ in range(count_texts(data, len(data))):
        end = skip_texts(data, begin, 1)
        texts.append(data[begin + 4 : end])
        begin = end
    return texts


def count_texts(raw: Buffer, most: int) -> int:
    """Count elements of datatype BYTES, up to one more than `most`. Raises ValueError if the lengths do not add up."""
    position, count, end, length_at = 0, 0, len(raw), _LENGTH.unpack_from
    while position < end and count <= most:
        if position + 4 > end:
            raise ValueError(f"element {count} has no length of 4 bytes")
        length = length_at(raw, position)[0]
        if length > end - position - 4:
            raise ValueError(
                f"element {count} has length {length}, but {end - position - 4} bytes are left"
            )
        position += 4 + length
        count += 1
    return count


def skip_texts(raw: Buffer, begin: int, count: int) -> int:
    """Where so many elements of datatype BYTES end that begin at a place; their lengths have been checked."""
    length_at = _LENGTH.unpack_from
    for _ in range(count):
        begin += 4 + length_at(raw, begin)[0]
    return begin


def join_texts(texts: Iterable[str | bytes]) -> bytes:
    """Put each text behind its length, as datatype BYTES has them."""
    parts: list[bytes] = []
    for text in texts:
        raw = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        parts += (_LENGTH.pack(len(raw)), raw)
    return b"".join(parts)
