"""The place of a lease's record that a setting names."""

from __future__ import annotations

from pathlib import Path

from clockwright.errors import ConfigError
from controller.lease.etcd import LeaseKey
from controller.lease.file import LeaseFile
from controller.lease.stores import EXPECTED, LeaseStore


def open_store(setting: str) -> LeaseStore:
    """Make the store that a setting names, without reaching for it.

    Raises:
        ConfigError: it names none.
    """
    kind, _, rest = setting.partition(":")
    if kind == "file" and rest:
        return LeaseFile(Path(rest))
    if kind == "etcd" and rest.startswith("//"):
        endpoints, _, key = rest[2:].partition("/")
        return LeaseKey(endpoints.split(","), key or "clockwright/lease")
    raise ConfigError(f"lease is {setting!r}, expected {EXPECTED}")
