"""Text from elsewhere: bounded, and made fit for a log and a terminal, where it comes in.

A worker's name for its device, the words of a refusal, the operators of somebody's model: all of it ends
in a log line or on an operator's screen, where an escape sequence is a command and a line break the
beginning of a line that nobody logged.
"""

from __future__ import annotations

from clockwright.errors import BadRequestError
from clockwright.units import NAME_CHARS_MAX

#: What a line of a table or of a log has room for.
TEXT_CHARS_MAX = 200


def printable(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Escape what is not printable as Python does, and keep the beginning."""
    text = text[: chars_max + 1]
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def check_name_length(what: str, name: str) -> None:
    """Look whether a client's name for something is short enough to be kept.

    Raises:
        BadRequestError: it is longer than `NAME_CHARS_MAX`; `what` says which it is.
    """
    if len(name) > NAME_CHARS_MAX:
        raise BadRequestError(
            f"{what}: found {len(name)} characters, expected {NAME_CHARS_MAX} at most"
        )
