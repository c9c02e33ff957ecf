"""Fetches the public keys of an issuer of tokens over HTTPS."""

from __future__ import annotations

import urllib.error
import urllib.request
from urllib.parse import urlsplit

from clockwright.errors import ConfigError
from controller.access.config import is_loopback

_LIMIT_S = 10.0
_BYTES_MAX = 1 << 20


def is_url(source: str) -> bool:
    """Whether keys are to be fetched, not read from a file.

    Raises ConfigError if it is not HTTPS: an attacker on the network could replace the keys.
    """
    parts = urlsplit(source)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(f"issuer_keys: found {source}, expected https")
    return parts.scheme in ("http", "https")


def fetch_keys(url: str) -> bytes:
    """Fetch a set of keys; this may take some seconds.

    Raises ConfigError if the server does not answer, or with something else.
    """
    try:
        with urllib.request.urlopen(url, timeout=_LIMIT_S) as answer:  # `is_url` knows the scheme.
            # The answer may be a redirect.
            is_url(answer.url)
            data: bytes = answer.read(_BYTES_MAX + 1)
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise ConfigError(f"{url}: {error}") from None
    if len(data) > _BYTES_MAX:
        raise ConfigError(f"{url}: found more than {_BYTES_MAX} bytes, expected a set of keys")
    return data
