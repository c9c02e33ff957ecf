"""Makes the store of a lease's record from a setting."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from clockwright.errors import ConfigError
from controller.process.lease.etcd import EtcdTls, LeaseKey
from controller.process.lease.file import LeaseFile
from controller.process.lease.stores import EXPECTED, LeaseStore


def open_store(setting: str) -> LeaseStore:
    """Make the store of a setting, without connecting to it.

    Raises:
        ConfigError: the setting is malformed.
    """
    kind, _, rest = setting.partition(":")
    if kind == "file" and rest:
        return LeaseFile(Path(rest))
    if kind in ("etcd", "etcds") and rest.startswith("//"):
        place, _, options = rest[2:].partition("?")
        endpoints, _, key = place.partition("/")
        tls = _tls(setting, options) if kind == "etcds" else None
        if tls is not None or not options:
            return LeaseKey(endpoints.split(","), key or "clockwright/lease", tls)
    raise ConfigError(f"lease is {setting!r}, expected {EXPECTED}")


def _tls(setting: str, options: str) -> EtcdTls:
    files = {name: Path(path) for name, path in parse_qsl(options)}
    if not {"ca"} <= files.keys() <= {"ca", "cert", "key"} or ("cert" in files) != ("key" in files):
        raise ConfigError(f"lease is {setting!r}, expected {EXPECTED}")
    tls = EtcdTls(files["ca"], files.get("cert"), files.get("key"))
    try:
        tls.context()
    except OSError as error:
        raise ConfigError(f"lease {setting}: {error.strerror or error}") from error
    return tls
