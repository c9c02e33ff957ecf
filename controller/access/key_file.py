"""The key file: reading, and atomic writing."""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from clockwright.errors import ConfigError
from controller.access.grants import (
    KEY_ID_BYTES,
    SECRET_BYTES,
    Grant,
    check_grant,
    digest,
    id_of,
    make_key,
    name_list,
    read_grants,
    write_grants,
)
from controller.access.roles import Role

_FILE_BYTES_MAX = 64 << 20


def read_key_file(path: Path) -> tuple[Grant, ...]:
    """Read all grants of a file. Raises ConfigError if it cannot be read, is malformed, or is writable by all users."""
    return read_grants(read_text(path), where=str(path))


def read_text(path: Path) -> str:
    """Read a file of secrets or of their holders.

    Raises ConfigError if it cannot be read, is too large, or is writable by all users.
    """
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & stat.S_IWOTH:
                raise ConfigError(f"{path}: all users may write it, expected `chmod o-w`")
            if found.st_size > _FILE_BYTES_MAX:
                raise ConfigError(f"{path}: found {found.st_size} bytes, expected fewer")
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected text in UTF-8") from None


def add_key(
    path: Path,
    name: str,
    roles: frozenset[Role],
    *,
    tenant: str = "",
    expires_s: float = math.inf,
    certificate: str = "",
) -> str:
    """Add a key or, with `certificate`, the name of a certificate to a file; create the file if it is missing.

    Returns the key, which is not stored anywhere; empty for a certificate. Raises ConfigError if the name is taken or
    malformed, or the file cannot be written.
    """
    key = ""
    if not certificate:
        secret = secrets.token_urlsafe(SECRET_BYTES)
        key = make_key(secrets.token_bytes(KEY_ID_BYTES), secret)
    grant = Grant(
        name,
        roles,
        tenant,
        expires_s,
        key_id=id_of(key),
        key_sha256=digest(key) if key else b"",
        certificate=certificate,
    )
    check_grant(grant, where=name)

    def add(grants: Sequence[Grant]) -> Sequence[Grant]:
        if any(other.name == name for other in grants):
            raise ConfigError(f"{path}: key {name} exists already")
        return [*grants, grant]

    _change(path, add)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove a key, or the name of a certificate, from a file.

    Raises ConfigError if it has no such name, or the file cannot be written.
    """

    def revoke(grants: Sequence[Grant]) -> Sequence[Grant]:
        left = [grant for grant in grants if grant.name != name]
        if len(left) == len(grants):
            raise ConfigError(f"{path}: no key {name}, found {name_list(grants)}")
        return left

    _change(path, revoke)


def _change(path: Path, change: Callable[[Sequence[Grant]], Sequence[Grant]]) -> None:
    """Replace a file atomically. Concurrent writers take turns; readers see the old or the new file."""
    try:
        with path.with_name(f".{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            grants = read_key_file(path) if path.exists() else ()
            text = write_grants(change(grants))
            # A written grant must be readable at the next start.
            read_grants(text, where=str(path))
            replace_text(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def replace_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file in one step; `mode` counts if it is new. Raises OSError if it cannot be written."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode) if path.exists() else mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
