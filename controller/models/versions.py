"""Which of a model's versions answers a request: aliases, shares of the traffic, and a shadow. No I/O.

A request may name a version or an alias. Where it names none, its version is drawn by the shares of the traffic, or it is the
highest version that is ready. A share whose version is not there, or not ready, goes to the version with the largest share. So
a version that is still being prepared takes nothing, and none stands in for the one that most requests are for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from clockwright.errors import ModelError

#: Versions of one name that are served at once.
VERSIONS_MAX = 32
#: Aliases of one name.
ALIASES_MAX = 64
#: In place of a version: the highest that is ready. No alias has this name.
LATEST = "latest"

# A number is a version.
_ALIAS = re.compile(r"(?!\d+$)[A-Za-z0-9_.-]{1,128}")
# Shares are given in decimals, which rarely add up to 1 to the last bit.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """Which version folders are served."""

    #: So many of the highest.
    latest: int = VERSIONS_MAX
    #: Only these; empty: any.
    listed: tuple[int, ...] = ()

    def choose(self, found: Sequence[str]) -> list[str]:
        """Choose among the version folders that were found. Returns them in ascending order.

        Raises ModelError if none of those that are listed is there, or there are too many.
        """
        numbers = {int(version): version for version in found}
        chosen = sorted(number for number in numbers if not self.listed or number in self.listed)
        if not chosen:
            listed, names = ", ".join(map(str, self.listed)), ", ".join(sorted(found, key=int))
            raise ModelError(
                f"versions: expected one of the versions {listed}, found {names} and none of them"
            )
        if self.latest == VERSIONS_MAX < len(chosen):
            raise ModelError(
                f"versions: found {len(chosen)}, expected {VERSIONS_MAX} at most to be served at once"
            )
        return [numbers[number] for number in chosen[-self.latest :]]


def read_served(table: object) -> ServedVersions:
    """Read the table `[versions]`. Raises ModelError if it says something else."""
    serve = table.get("serve") if isinstance(table, dict) and len(table) == 1 else None
    if serve == "all":
        return ServedVersions()
    numbers = serve if isinstance(serve, list) else []
    if isinstance(serve, dict) and list(serve) == ["latest"]:
        numbers = [serve["latest"]]
    if numbers and all(type(each) is int and each > 0 for each in numbers):
        if isinstance(serve, list) and len(serve) <= VERSIONS_MAX:
            return ServedVersions(listed=tuple(sorted(set(serve))))
        if isinstance(serve, dict) and numbers[0] <= VERSIONS_MAX:
            return ServedVersions(latest=numbers[0])
    raise ModelError(
        f'versions is {table!r}, expected serve = [1, 2], "all" or {{ latest = 2 }}, {VERSIONS_MAX} versions at most'
    )


@dataclass(frozen=True, slots=True)
class Routing:
    """What operators say about the versions of a name."""

    #: The version that each stands for.
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Shares of the requests that name no version, by version or alias; they add up to 1. Empty: the latest has all.
    traffic: Mapping[str, float] = field(default_factory=dict)
    #: The part of the requests of which a version, or alias, gets a copy; at most one.
    shadow: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def read(aliases: object, traffic: object, shadow: object) -> Routing:
        """Check what a configuration says. Raises ModelError that names what cannot be."""
        named = _table("aliases", aliases, "ALIAS = VERSION")
        if len(named) > ALIASES_MAX:
            raise ModelError(f"aliases: found {len(named)}, expected {ALIASES_MAX} at most")
        for alias, version in named.items():
            if not _ALIAS.fullmatch(alias) or alias == LATEST:
                raise ModelError(
                    f"alias {alias[:200]!r}: expected 1 to 128 of A-Z a-z 0-9 _ . -, neither a number nor {LATEST}"
                )
            if isinstance(version, bool) or not re.fullmatch("[0-9]{1,18}", str(version)):
                raise ModelError(f"alias {alias}: found {version!r}, expected a version")
        shares = _shares("traffic", traffic)
        if shares and abs(sum(shares.values()) - 1) > _ROUNDING:
            raise ModelError(
                f"traffic: found shares of {sum(shares.values()):g} together, expected 1"
            )
        shadows = _shares("shadow", shadow)
        if len(shadows) > 1:
            raise ModelError(f"shadow: found {', '.join(shadows)}, expected one version")
        return Routing({alias: str(each) for alias, each in named.items()}, shares, shadows)

    def version(self, named: str) -> str:
        """The version that a version or alias stands for; `LATEST` stands for itself."""
        return self.aliases.get(named, named)

    def changed(
        self,
        *,
        aliases: Mapping[str, str],
        traffic: Mapping[str, float],
        shadow: Mapping[str, float],
        present: Mapping[str, float],
    ) -> Routing:
        """What it is after a change.

        Args:
            aliases: new or moved; an empty version removes one.
            traffic: new shares. The rest goes to the other versions in the proportion that they have now, or to the
                highest of them.
            shadow: the new shadow, with its share; 0: none.
            present: by version that is served, ascending, its share now.

        Raises:
            ModelError: it cannot be, or names a version that is not served.
        """
        named = {**self.aliases, **aliases}
        kept = {alias: version for alias, version in named.items() if version}
        if gone := aliases.keys() - kept.keys() - self.aliases.keys():
            raise ModelError(f"there is no alias {min(gone)}")
        routing = Routing.read(kept, self.traffic, self.shadow)
        for alias in aliases.keys() & kept.keys():
            routing._check(kept[alias], present)
        for each in (*traffic, *shadow):
            routing._check(each, present)
        for alias in self.aliases.keys() - kept.keys():
            if alias in (*self.traffic, *self.shadow) and not traffic:
                raise ModelError(f"alias {alias} has traffic: give its share to another first")
        if traffic:
            routing = replace(routing, traffic=_spread(routing, traffic, present))
        if shadow:
            if len(present) == 1 and any(shadow.values()):
                raise ModelError(
                    f"version {min(present)} is the only one that is served: there are no requests to others to copy"
                )
            wanted = {each: share for each, share in shadow.items() if share}
            routing = replace(routing, shadow=wanted)
        return Routing.read(routing.aliases, routing.traffic, routing.shadow)

    def _check(self, named: str, present: Collection[str]) -> None:
        version = self.version(named)
        if version != LATEST and version not in present:
            expected = ", ".join((*present, *self.aliases, LATEST))
            raise ModelError(f"found version {named[:200]!r}, expected one of {expected}")

    def to_json(self) -> str:
        """Write it down, for `from_json`."""
        return json.dumps([dict(self.aliases), dict(self.traffic), dict(self.shadow)])

    @staticmethod
    def from_json(text: str) -> Routing:
        """Read what `to_json` wrote. Raises ModelError if it is something else."""
        try:
            aliases, traffic, shadow = json.loads(text)
        except ValueError as error:
            raise ModelError(f"a record of traffic is damaged: {error}") from None
        return Routing.read(aliases, traffic, shadow)


def _table(key: str, value: object, expected: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{key} is {value!r}, expected a table of {expected}")
    return dict(value)


def _shares(key: str, value: object) -> dict[str, float]:
    shares = _table(key, value, "VERSION = SHARE")
    for named, share in shares.items():
        # The comparison is false for NaN too.
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ModelError(f"{key}.{named} is {share!r}, expected a share from 0 to 1")
    if len(shares) > VERSIONS_MAX:
        raise ModelError(f"{key}: found {len(shares)} versions, expected {VERSIONS_MAX} at most")
    return {named: float(share) for named, share in shares.items() if share}


def _spread(
    routing: Routing, traffic: Mapping[str, float], present: Mapping[str, float]
) -> dict[str, float]:
    """Give the named versions their shares, and the others the rest."""
    shares = _shares("traffic", traffic)
    rest = 1 - sum(shares.values())
    if rest < -_ROUNDING:
        raise ModelError(f"traffic: found shares of {1 - rest:g} together, expected 1 at most")
    if rest <= _ROUNDING:
        return shares
    named = {routing.version(each) for each in traffic}
    if LATEST in named:
        raise ModelError(f"traffic: found {LATEST} with a part of the requests, expected 1")
    # Those that have traffic by an alias keep it by the alias.
    others = {
        each: share
        for each, share in routing.traffic.items()
        if routing.version(each) not in named and routing.version(each) != LATEST
    } or {version: share for version, share in present.items() if version not in named and share}
    if not others:
        highest = [version for version in present if version not in named]
        if not highest:
            raise ModelError(
                f"traffic: found shares of {1 - rest:g} together and no other version that is served, expected 1"
            )
        others = {highest[-1]: 1.0}
    total = sum(others.values())
    return shares | {each: rest * share / total for each, share in others.items()}


class Versioned(Protocol):
    """A version that is served."""

    @property
    def version(self) -> str:
        """Its number."""


E = TypeVar("E", bound=Versioned)


class Versions(Generic[E]):
    """The versions of a name that are served, and what operators say about them."""

    def __init__(self) -> None:
        self._served: dict[str, E] = {}
        self.routing = Routing()
        #: What held before the last change; None: nothing did.
        self.before: Routing | None = None

    def put(self, model: E) -> None:
        """Serve a version, in place of the one with its number."""
        self._served[model.version] = model
        self._served = {each: self._served[each] for each in sorted(self._served, key=int)}

    def drop(self, model: E) -> None:
        """Serve a version no more."""
        if self._served.get(model.version) is model:
            del self._served[model.version]

    @property
    def served(self) -> list[E]:
        """All versions in ascending order."""
        return list(self._served.values())

    def find(self, named: str, ready: Collection[str]) -> E | None:
        """Find what a version or alias stands for; empty: what most requests without one are for.

        None: it is not served. `ready` are the versions that can answer.
        """
        if not named:
            shares = self.shares(ready)
            named = max(shares, key=shares.__getitem__)
        version = self.routing.version(named)
        if version == LATEST:
            version = next((each for each in reversed(self._served) if each in ready), "")
            version = version or next(reversed(self._served), "")
        return self._served.get(version)

    def shares(self, ready: Collection[str]) -> dict[str, float]:
        """Shares of the requests that name no version: of versions, in ascending order. They add up to 1."""
        shares: dict[str, float] = {}
        for named, share in (self.routing.traffic or {LATEST: 1.0}).items():
            if (model := self.find(named, ready)) is not None:
                shares[model.version] = shares.get(model.version, 0.0) + share
        if not shares and (model := self.find(LATEST, ready)) is not None:
            shares[model.version] = 1.0
        largest = max(shares, key=shares.__getitem__)
        others = {
            each: share for each, share in shares.items() if each in ready and each != largest
        }
        others[largest] = 1 - sum(others.values())
        return {each: others[each] for each in self._served if each in others}

    def shadow(self, ready: Collection[str]) -> tuple[E, float] | None:
        """The version that gets copies, and of which part of the requests. None: none does."""
        for named, share in self.routing.shadow.items():
            model = self.find(named, ready)
            if model is not None and model.version in ready:
                return model, share
        return None
