"""Lines of a trace file: plain text, `.xz` or `.gz`."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from clockwright.errors import ConfigError, TraceFormatError


def lines_of(path: Path) -> Iterator[str]:
    """Read lines without their ends and without a byte order mark; a blank last line does not count.

    Raises TraceFormatError if there is an empty line, or the file is broken; ConfigError if it cannot be opened.
    """
    number = 1
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                text = line.rstrip("\r\n")
                if not text:
                    if file.readline():
                        raise format_error(path, number, "found an empty line")
                    return
                yield text
    except (UnicodeDecodeError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise format_error(path, number, f"the file cannot be read from here on: {error}") from None
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from None


def _open(path: Path) -> IO[str]:
    # Spreadsheets write a byte order mark.
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig", newline="")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def format_error(path: Path, number: int, problem: str) -> TraceFormatError:
    """Say what is wrong with a line, by its number from 1."""
    return TraceFormatError(f"{path}:{number}: {problem}")
