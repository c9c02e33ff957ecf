"""Bounds untrusted text and makes it safe for logs and terminals, where it enters.

A worker's name for its device, the message of a refusal, the operators of a model: all of it ends up in a log
line or on an operator's screen, where an escape sequence is a command and a line break forges a log line.
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from typing import TYPE_CHECKING

from clockwright.errors import BadRequestError
from clockwright.units import NAME_CHARS_MAX

if TYPE_CHECKING:
    from google.protobuf.message import Message

#: Characters that fit into a line of a table or log.
TEXT_CHARS_MAX = 200


def quote(name: str) -> str:
    """Quote a client's text, shortened: error texts travel in HTTP headers of 8 KiB."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def escaped(text: str) -> str:
    """Escape what is not printable as Python does."""
    return text if text.isprintable() else ascii(text)[1:-1]


def printable(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Escape what is not printable as Python does, and keep the beginning."""
    text = escaped(text[: chars_max + 1])
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def escape_texts(message: Message) -> None:
    """Escape what is not printable in each text of a message."""
    for field, value in message.ListFields():
        if isinstance(value, str):
            if not value.isprintable():
                setattr(message, field.name, escaped(value))
        elif isinstance(value, MutableMapping):
            for key in [key for key in value if isinstance(key, str) and not key.isprintable()]:
                kept = value[key]
                del value[key]
                value[escaped(key)] = kept
        elif field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                escape_texts(part)
        elif isinstance(value, MutableSequence):
            value[:] = [escaped(text) if isinstance(text, str) else text for text in value]


def check_name_length(what: str, name: str) -> None:
    """Check that a name from a client is short enough to be kept.

    Raises BadRequestError if it is longer than `NAME_CHARS_MAX`; `what` says which it is.
    """
    if len(name) > NAME_CHARS_MAX:
        raise BadRequestError(
            f"{what}: found {len(name)} characters, expected {NAME_CHARS_MAX} at most"
        )
