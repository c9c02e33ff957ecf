"""Makes the store of a lease's record, or of the directory of cells, from a setting."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl

from clockwright.errors import ConfigError
from clockwright.kubernetes import NAME, KubernetesApi
from controller.process.lease.etcd import EtcdDirectory, EtcdTls, LeaseKey
from controller.process.lease.file import FolderDirectory, LeaseFile
from controller.process.lease.kubernetes import LIMIT_S, LeaseObject
from controller.process.lease.stores import (
    EXPECTED,
    EXPECTED_OF_CELLS,
    DirectoryStore,
    LeaseStore,
)

_MEMBER = re.compile(r".+:\d+")
_EXPECTED = {"lease": EXPECTED, "cells": EXPECTED_OF_CELLS}


def open_store(setting: str) -> LeaseStore:
    """Make the store of a lease's setting, without connecting to it. Raises ConfigError if the setting is malformed."""
    if (found := _lease_object(setting)) is not None:
        return found
    place = _place("lease", setting)
    if isinstance(place, Path):
        return LeaseFile(place)
    endpoints, key, tls = place
    return LeaseKey(endpoints, key or "clockwright/lease", tls)


def _lease_object(setting: str) -> LeaseObject | None:
    """Make the store of a Lease object of Kubernetes; None: the setting names none."""
    kind, _, rest = setting.partition("://")
    place, _, options = rest.partition("?")
    namespace, _, name = place.partition("/")
    asked = dict(parse_qsl(options))
    is_one = NAME.fullmatch(namespace) and NAME.fullmatch(name) and asked.keys() <= {"api"}
    if kind != "kubernetes" or not is_one:
        return None
    return LeaseObject(KubernetesApi(asked.get("api", ""), limit_s=LIMIT_S), namespace, name)


def open_directory(setting: str) -> DirectoryStore:
    """Make the store of a directory's setting, without connecting to it; a path is that of a folder.

    Raises ConfigError if the setting is malformed.
    """
    place = _place("cells", setting)
    if isinstance(place, Path):
        return FolderDirectory(place)
    endpoints, prefix, tls = place
    return EtcdDirectory(endpoints, prefix or "clockwright/cells", tls)


def _place(what: str, setting: str) -> Path | tuple[list[str], str, EtcdTls | None]:
    """Read a setting: a path, or members of etcd, a key that may be empty, and TLS."""
    kind, _, rest = setting.partition(":")
    if kind == "file" and rest:
        return Path(rest)
    if kind in ("etcd", "etcds") and rest.startswith("//"):
        place, _, options = rest[2:].partition("?")
        text, _, key = place.partition("/")
        endpoints = text.split(",")
        tls = _tls(what, setting, options) if kind == "etcds" else None
        if all(map(_MEMBER.fullmatch, endpoints)) and (tls is not None or not options):
            return endpoints, key, tls
    raise ConfigError(f"{what} is {setting!r}, expected {_EXPECTED[what]}")


def _tls(what: str, setting: str, options: str) -> EtcdTls:
    files = {name: Path(path) for name, path in parse_qsl(options)}
    if not {"ca"} <= files.keys() <= {"ca", "cert", "key"} or ("cert" in files) != ("key" in files):
        raise ConfigError(f"{what} is {setting!r}, expected {_EXPECTED[what]}")
    tls = EtcdTls(files["ca"], files.get("cert"), files.get("key"))
    try:
        tls.context()
    except OSError as error:
        raise ConfigError(f"{what} {setting}: {error.strerror or error}") from error
    return tls
