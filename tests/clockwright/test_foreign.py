"""Text from elsewhere, on its way to a log and a terminal."""

from __future__ import annotations

import io
import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from clockwright.cli import flags
from clockwright.foreign import TEXT_CHARS_MAX, printable


@given(st.text(max_size=3 * TEXT_CHARS_MAX))
def test_any_text_becomes_a_short_printable_one(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= TEXT_CHARS_MAX


def test_a_text_that_is_harmless_stays_as_it_is() -> None:
    for text in ("", "cpu", "Übergröße 16 µs", "'quoted' \\ and \"so\"", "x" * TEXT_CHARS_MAX):
        assert printable(text) == text


def test_a_logged_message_is_one_line_and_a_traceback_stays_as_it_is() -> None:
    formatter = flags.formatter()
    record = logging.makeLogRecord(
        {"msg": "device %s", "args": ("\x1b[2J\nINFO root: all is well",)}
    )
    assert "device \\x1b[2J\\nINFO root: all is well" in formatter.format(record)
    assert "\n" not in formatter.format(record)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    try:
        raise ValueError("odd")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
        handler.emit(record)
    assert stream.getvalue().splitlines()[1] == "Traceback (most recent call last):"


def test_a_message_in_json_is_one_object_a_line_with_its_traceback() -> None:
    formatter = flags.formatter(flags.LogFormat.JSON)
    try:
        raise ValueError("odd")
    except ValueError as error:
        record = logging.makeLogRecord(
            {
                "name": "controller.process.app",
                "levelname": "ERROR",
                "created": 1_700_000_000.25,
                "process": 17,
                "msg": "device %s",
                "args": ("\x1b[2J\nINFO root: all is well",),
                "exc_info": (ValueError, error, error.__traceback__),
            }
        )
    line = formatter.format(record)
    assert line.isprintable()
    told = json.loads(line)
    assert "ValueError: odd" in told.pop("exception")
    assert told == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "ERROR",
        "logger": "controller.process.app",
        "pid": 17,
        "message": "device \x1b[2J\nINFO root: all is well",
    }
