"""States and applications in one database of a Redis server.

    clockwright:layout           the number below
    clockwright:applications     hash: name to settings
    clockwright:states:NAME      hash: context to record

A server that does not answer costs one attempt now and then and not one per call; everything between fails at
once, so that what waits for a state is served without it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from clockwright.errors import ConfigError
from controller.selection.core.contexts import Address

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError:
    raise ConfigError(
        "selection store: found the URL of a Redis, expected package redis to be there:"
        " pip install 'clockwright[redis]'"
    ) from None

T = TypeVar("T")

# Another layout gets another number, and a database of one that is not known here is refused.
_LAYOUT = "1"

_PREFIX = "clockwright:"
_LAYOUT_KEY = _PREFIX + "layout"
_APPLICATIONS_KEY = _PREFIX + "applications"

# Of one attempt; the URL's `socket_timeout` and `socket_connect_timeout` go before it.
_TIMEOUT_S = 2.0

# After an attempt that failed, before the next one.
_PAUSE_S = 1.0


class RedisDatabase:
    """See `Database`."""

    faults: tuple[type[Exception], ...] = (redis.RedisError, OSError, UnicodeError)

    def __init__(self, url: str) -> None:
        """Connect.

        Raises:
            ConfigError: the URL is none, or no Redis answers there, or one of another layout.
        """
        self.name = _without_password(url)
        self._away_until_s = -1.0
        self._fault = ""
        try:
            parts = urlsplit(url)
            database = parts.path[1:]
            # What is no number, the client takes for 0.
            if parts.scheme != "unix" and database and not database.isdigit():
                raise ValueError(f"found database {database!r}, expected a number")
            self._client = redis.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                # Whoever writes tries again, and whoever reads does not wait.
                retry=Retry(NoBackoff(), 0),
            )
            self._client.setnx(_LAYOUT_KEY, _LAYOUT)
            layout: Any = self._client.get(_LAYOUT_KEY)
        except (redis.RedisError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"selection store {self.name}: {error}; expected a Redis server that answers"
            ) from None
        if layout != _LAYOUT:
            raise ConfigError(
                f"selection store {self.name}: found layout {layout}, expected {_LAYOUT}; it is of another version"
            )

    def load(self, address: Address) -> str | None:
        """See `Database`."""
        application, context = address
        record: str | None = self._ask(lambda: self._client.hget(_states_key(application), context))
        return record

    def save(self, records: Mapping[Address, str]) -> None:
        """See `Database`."""
        by_application: dict[str, dict[Any, Any]] = defaultdict(dict)
        for (application, context), record in records.items():
            by_application[application][context] = record
        if not records:
            return
        with self._client.pipeline(transaction=True) as pipeline:
            for application, states in by_application.items():
                pipeline.hset(_states_key(application), mapping=states)
            self._ask(pipeline.execute)

    def erase(self, application: str, context: str) -> bool:
        """See `Database`."""
        return bool(self._ask(lambda: self._client.hdel(_states_key(application), context)))

    def applications(self) -> dict[str, str]:
        """See `Database`."""
        found: dict[str, str] = self._ask(lambda: self._client.hgetall(_APPLICATIONS_KEY))
        return dict(sorted(found.items()))

    def save_application(self, name: str, settings: str, *, forget: bool) -> None:
        """See `Database`."""
        with self._client.pipeline(transaction=True) as pipeline:
            if forget:
                pipeline.unlink(_states_key(name))
            pipeline.hset(_APPLICATIONS_KEY, name, settings)
            self._ask(pipeline.execute)

    def remove_application(self, name: str) -> None:
        """See `Database`."""
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hdel(_APPLICATIONS_KEY, name)
            pipeline.unlink(_states_key(name))
            self._ask(pipeline.execute)

    def close(self) -> None:
        """See `Database`."""
        self._client.close()

    def _ask(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401  what redis says of its answers
        if time.monotonic() < self._away_until_s:
            raise redis.ConnectionError(self._fault)
        try:
            return work()
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            self._away_until_s = time.monotonic() + _PAUSE_S
            self._fault = f"{error}; expected a Redis server that answers"
            raise redis.ConnectionError(self._fault) from error


def _states_key(application: str) -> str:
    return f"{_PREFIX}states:{application}"


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "URL"
    # Also of a socket's URL, where it is a parameter.
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, query="", fragment=""))
