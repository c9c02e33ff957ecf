"""States and applications in one database of a Redis server.

    clockwright:layout           the number below
    clockwright:applications     hash: name to settings
    clockwright:states:NAME      hash: context to record

A server without persistence comes back empty; its missing layout key shows that.

While the server does not answer, one attempt is made periodically. All calls in between fail immediately, so queries
do not wait for states that cannot arrive.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from typing_extensions import override

from clockwright.errors import ConfigError
from controller.selection.core.contexts import Address
from controller.selection.stores.database import Database

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

# Number of the keys' layout. A database with another number is refused.
_LAYOUT = "1"

_PREFIX = "clockwright:"
_LAYOUT_KEY = _PREFIX + "layout"
_APPLICATIONS_KEY = _PREFIX + "applications"

# An attempt may take this long, unless the URL sets `socket_timeout` and `socket_connect_timeout`.
_TIMEOUT_S = 2.0

# Time between an attempt that failed and the next one.
_PAUSE_S = 1.0


class RedisDatabase(Database):
    """One database of a Redis server."""

    faults: tuple[type[Exception], ...] = (redis.RedisError, OSError, UnicodeError)

    def __init__(self, url: str) -> None:
        """Read a URL, without connecting. Raises ConfigError if it is malformed."""
        self.name = _without_password(url)
        self._away_until_s = -1.0
        self._fault = ""
        self._is_empty = False
        try:
            parts = urlsplit(url)
            database = parts.path[1:]
            # The client would take a path that is no number for database 0.
            if parts.scheme != "unix" and database and not database.isdigit():
                raise ValueError(f"found database {database!r}, expected a number")
            self._client = redis.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                # No retries: the caller tries a write again later, and a read must not take longer.
                retry=Retry(NoBackoff(), 0),
            )
        except (redis.RedisError, TypeError, ValueError) as error:
            raise ConfigError(f"selection store {self.name}: {error}; expected a Redis") from None

    @override
    def open(self) -> None:
        try:
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

    @override
    def load(self, address: Address) -> str | None:
        application, context = address
        record: str | None = self._ask(lambda: self._client.hget(_states_key(application), context))
        return record

    @override
    def save(self, records: Mapping[Address, str]) -> None:
        by_application: dict[str, dict[Any, Any]] = defaultdict(dict)
        for (application, context), record in records.items():
            by_application[application][context] = record
        if not records:
            return
        with self._client.pipeline(transaction=True) as pipeline:
            for application, states in by_application.items():
                pipeline.hset(_states_key(application), mapping=states)
            self._ask(pipeline.execute)

    @override
    def erase(self, application: str, context: str) -> bool:
        return bool(self._ask(lambda: self._client.hdel(_states_key(application), context)))

    @override
    def applications(self) -> dict[str, str]:
        found: dict[str, str] = self._ask(lambda: self._client.hgetall(_APPLICATIONS_KEY))
        return dict(sorted(found.items()))

    @override
    def save_application(self, name: str, settings: str, *, forget: bool) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            if forget:
                pipeline.unlink(_states_key(name))
            pipeline.hset(_APPLICATIONS_KEY, name, settings)
            self._ask(pipeline.execute)

    @override
    def remove_application(self, name: str) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hdel(_APPLICATIONS_KEY, name)
            pipeline.unlink(_states_key(name))
            self._ask(pipeline.execute)

    @override
    def has_lost_everything(self) -> bool:
        # The layout was written when the store was opened, and nothing of ours removes it. That it is missing is noted
        # before it is written again: whether that was done may be lost on the way.
        if self._ask(lambda: self._client.get(_LAYOUT_KEY)) is None:
            self._is_empty = True
        if self._ask(lambda: self._client.setnx(_LAYOUT_KEY, _LAYOUT)):
            self._is_empty = True
        was_empty, self._is_empty = self._is_empty, False
        return was_empty

    @override
    def close(self) -> None:
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
    # The query goes too: in the URL of a socket, the password is a parameter.
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, query="", fragment=""))
