"""Settings of the selection layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clockwright.errors import ConfigError
from clockwright.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Everything about the selection layer that can be tuned, and what goes wrong at the extremes."""

    #: None: the controller's state folder, or where it has none, nothing.
    store: str | Path | None = setting(
        None,
        flag="selection_store",
        kind=str,
        metavar="FILE|URL",
        help="Store for applications and what they learn, instead of the state folder: a file, or "
        "redis://HOST:PORT/DB.",
    )
    #: States of contexts kept in memory. Too few: users wait for the store.
    contexts_max: int = 100_000
    #: Size of the prediction cache, inputs and outputs together; 0 switches it off.
    cache_bytes: int = 32 * 1024 * 1024
    #: A prediction is forgotten this long after it was computed.
    cache_ttl_s: float = 300.0
    #: Answered queries that may wait for feedback. Too few: under load, feedback finds its query gone.
    feedback_max: int = 200_000
    #: Feedback this long after the answer is no longer taken.
    feedback_ttl_s: float = 3600.0
    #: Seed of every draw that a policy makes.
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("contexts_max", "cache_ttl_s", "feedback_max", "feedback_ttl_s"):
            # The comparison is false for NaN too.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.cache_bytes < 0:
            raise ConfigError(f"cache_bytes is {self.cache_bytes}, expected 0 or more")
