"""The prediction cache: Clipper's function cache for `Predict(model, x) -> y` (section 4.2).

It has two calls that never wait, as in the paper: `request` says whether the value is there, on its way,
or to be computed by the caller; `fetch` gives the value if it is there. Selection sits above the cache, so
no change of a policy invalidates an entry.

Keys are exact: the model's id, which is another one for each version, and all bytes of the input, compared
and not only hashed. Eviction is CLOCK: entries stand in a queue, and the one at the front is evicted unless
it was used since it last stood there. No I/O, and time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
F = TypeVar("F")

# Overhead of an entry in addition to its input and its value: key, entry and their places in two tables.
ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class Key:
    """One question to one model."""

    #: Id of one version: a model that replaces another has another id.
    model_id: str
    #: Bytes of each input tensor, in the model's order.
    inputs: tuple[bytes, ...]
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Python keeps the hash of each input but computes that of their tuple at each look-up.
        object.__setattr__(self, "_hash", hash((self.model_id, self.inputs)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_bytes(self) -> int:
        """Size of the inputs."""
        return sum(map(len, self.inputs))


@dataclass(slots=True)
class _CacheEntry(Generic[V]):
    value: V
    num_bytes: int
    expires_ns: int
    used: bool = False


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Totals since the start."""

    hits: int
    #: Look-ups that found the computation in progress for an earlier query.
    joins: int
    misses: int
    evictions: int
    num_bytes: int


class PredictionCache(Generic[V, F]):
    """Values (of type V), and computations in progress (of type F)."""

    def __init__(self, *, capacity_bytes: int, ttl_ns: int) -> None:
        """Start empty. The size is of inputs, values and bookkeeping; 0 switches it off, single flight included.

        A value is forgotten `ttl_ns` after it was computed.
        """
        self._capacity_bytes = capacity_bytes
        self._ttl_ns = ttl_ns
        self._entries: OrderedDict[Key, _CacheEntry[V]] = OrderedDict()
        #: Computations on their way, each with the time by which it was promised.
        self._flights: dict[Key, tuple[F, int]] = {}
        self._num_bytes = 0
        self._hits = self._joins = self._misses = self._evictions = 0

    @property
    def on(self) -> bool:
        """Whether the cache keeps anything at all."""
        return self._capacity_bytes > 0

    def fetch(self, key: Key, *, now_ns: int) -> V | None:
        """Find the value, if it is there and not too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_ns <= now_ns:
            self._drop(key)
            return None
        entry.used = True
        return entry.value

    def request(self, key: Key, *, deadline_ns: int, now_ns: int) -> V | F | None:
        """Look a prediction up.

        Returns the value; or the computation on its way that was promised by `deadline_ns`; or None, when the caller is
        to compute the value, and to announce that with `begin`.
        """
        if not self.on:
            return None
        value = self.fetch(key, now_ns=now_ns)
        if value is not None:
            self._hits += 1
            return value
        flight = self._flights.get(key)
        # A computation with a later deadline may end too late for this caller.
        if flight is not None and flight[1] <= deadline_ns:
            self._joins += 1
            return flight[0]
        self._misses += 1
        return None

    def begin(self, key: Key, flight: F, *, deadline_ns: int) -> None:
        """Announce a computation; others may join it until `end`."""
        if self.on:
            self._flights[key] = (flight, deadline_ns)

    def end(self, key: Key, flight: F) -> None:
        """Note that a computation has ended, with a value or without."""
        present = self._flights.get(key)
        if present is not None and present[0] is flight:
            del self._flights[key]

    def put(self, key: Key, value: V, num_bytes: int, *, now_ns: int) -> None:
        """Keep a value of `num_bytes`, and evict others to make room.

        A value that is larger than the whole cache is not kept.
        """
        size = key.num_bytes + num_bytes + ENTRY_BYTES
        if size > self._capacity_bytes:
            return
        if key in self._entries:
            self._drop(key)
        while self._num_bytes + size > self._capacity_bytes:
            self._evict(now_ns)
        self._entries[key] = _CacheEntry(value, size, now_ns + self._ttl_ns)
        self._num_bytes += size

    def forget_model(self, model_id: str) -> None:
        """Drop all values of a model. This takes time linear in the cache."""
        for key in [k for k in self._entries if k.model_id == model_id]:
            self._drop(key)

    def statistics(self) -> CacheStatistics:
        """Totals since the start."""
        return CacheStatistics(
            hits=self._hits,
            joins=self._joins,
            misses=self._misses,
            evictions=self._evictions,
            num_bytes=self._num_bytes,
        )

    def _evict(self, now_ns: int) -> None:
        while True:
            key, entry = next(iter(self._entries.items()))
            if not entry.used or entry.expires_ns <= now_ns:
                self._drop(key)
                self._evictions += 1
                return
            entry.used = False
            self._entries.move_to_end(key)

    def _drop(self, key: Key) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
