"""Where the controller is: in a flag, or in a file that the flag names, where orchestrators move a controller."""

from __future__ import annotations

from pathlib import Path

from clockwright.errors import ConfigError
from clockwright.wire.leadership import parse_addresses

#: Begins the name of a file with the addresses.
FILE = "file:"


def read_addresses(controller: str) -> tuple[str, ...]:
    """Find the addresses of one controller or several now.

    It is HOST:PORT, or several with commas between; or `file:PATH` of a file with such a line. Raises ConfigError if
    one of them is malformed, or the file cannot be read.
    """
    if not controller.startswith(FILE):
        return parse_addresses(controller)
    path = Path(controller.removeprefix(FILE))
    try:
        return parse_addresses(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise ConfigError(f"controller: {path}: {error.strerror}") from None
    except (UnicodeDecodeError, ConfigError):
        raise ConfigError(f"controller: {path}: expected one line, HOST:PORT") from None
