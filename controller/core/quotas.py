"""Quotas of tenants: a rate, a number and size of open requests, bounds of SLOs. No I/O; time is an argument.

A rate is a token bucket, which holds tokens for some requests and is filled at an even pace. What is kept of it
is one number, the time at which it will be full: a request puts that off by one token's time, and the bucket is
empty where it would be put off too far (the cell rate algorithm of ATM, ITU-T I.371). So a bucket costs
nothing while no request comes.

A tenant that no quota names has that of `OTHERS`, each for itself. Without authentication, clients choose
their names, so the number of those that are remembered is bounded: one that is idle and whose bucket is full is
like one that was never seen, and is forgotten first. Where none is, newcomers share one bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clockwright.errors import ConfigError
from clockwright.units import NAME_CHARS_MAX, NS_PER_S, SLO_NS_MAX, WEIGHT_MAX

#: In place of a tenant's name: each tenant that has no quota of its own.
OTHERS = "*"

#: Tenants with a quota of their own.
NAMED_MAX = 10_000
#: Tenants without one that are told apart at a time.
OTHERS_MAX = 1024

#: Names of the bounds.
BOUNDS = (
    "rate_rps",
    "burst",
    "open_requests",
    "open_bytes",
    "slo_ns_min",
    "slo_ns_max",
    "weight",
    "request_weight_max",
)

# Beyond these, times between requests and shares are no numbers any more. One in 11 days is the least rate.
_RANGES = {
    "rate_rps": (1e-6, 1e9),
    "weight": (0.01, 100.0),
    "request_weight_max": (0.01, WEIGHT_MAX),
}
_NUMBER_MAX = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The bounds of one tenant; None: unbounded."""

    #: Requests per second, on average.
    rate_rps: float | None = None
    #: Requests that may arrive at once; None: one second's worth of the rate.
    burst: int | None = None
    #: Open requests.
    open_requests: int | None = None
    #: Input bytes of open requests.
    open_bytes: int | None = None
    #: Smallest and largest SLO of a request.
    slo_ns_min: int | None = None
    slo_ns_max: int | None = None
    #: Weight of its fair share when GPU time is short; other tenants have 1. Only with policy edf_mh.
    weight: float = 1.0
    #: Largest weight of a request, which says what its answer is worth. Tenants without a quota have 1.
    request_weight_max: float = 1.0

    def __post_init__(self) -> None:
        """Look whether such bounds can be. Raises ConfigError that names the bound."""
        for name in BOUNDS:
            value = getattr(self, name)
            if value is None:
                continue
            least, most = _RANGES.get(name, (1, _NUMBER_MAX))
            # The comparison is false for NaN too.
            if isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name}: found {value!r}, expected {least:g} to {most:.15g}")
        if self.burst is not None and self.rate_rps is None:
            raise ConfigError("burst: found without rate_rps, expected both")
        least_ns, most_ns = self.slo_ns_min or 0, self.slo_ns_max or SLO_NS_MAX
        if least_ns > most_ns:
            raise ConfigError(
                f"slo_ns_min: found {least_ns}, expected {most_ns} at most, which is slo_ns_max"
            )


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Why a request is refused that its tenant may not have."""

    #: Name of the bound, as in `Quota`.
    bound: str
    #: What was found: of the request, or of the tenant with it. None if the bound is a rate.
    found: float | None
    expected: float
    #: After this time it would be admitted if nothing else came. None if never, or unknown.
    retry_ns: int | None = None
    #: Until then every request of the tenant is refused, unless its quota changes. None if unknown.
    until_ns: int | None = None


def interval_ns(rate_rps: float) -> int:
    """The time in which a rate gives one token."""
    return max(round(NS_PER_S / rate_rps), 1)


class TenantUse:
    """The use that one tenant makes of its quota."""

    __slots__ = (
        "_burst_ns",
        "_full_ns",
        "_interval_ns",
        "_is_shared",
        "num_admitted",
        "num_bytes",
        "num_open",
        "num_refused",
        "quota",
    )

    def __init__(self, quota: Quota, *, is_shared: bool = False) -> None:
        self.num_open = 0
        # Several have it, each of whom may get one of its own.
        self._is_shared = is_shared
        self.num_bytes = 0
        self.num_admitted = 0
        self.num_refused = 0
        # When the bucket will be full.
        self._full_ns = 0
        self.bind(quota)

    def bind(self, quota: Quota) -> None:
        """Give other bounds; what is open stays open and counts."""
        self.quota = quota
        rate = quota.rate_rps
        self._interval_ns = 0 if rate is None else interval_ns(rate)
        burst = quota.burst if quota.burst is not None else max(int(rate or 0), 1)
        # What the bucket holds, less the token of the request that comes.
        self._burst_ns = (burst - 1) * self._interval_ns

    def is_fresh(self, now_ns: int) -> bool:
        """Whether nothing is open and the bucket is full."""
        return not self.num_open and self._full_ns <= now_ns

    def enter(self, now_ns: int, num_bytes: int, slo_ns: int) -> Exceeded | None:
        """Let a request in, which is to `leave`. Returns None if it is let in; else it takes nothing of the quota."""
        exceeded = self._find_exceeded(now_ns, num_bytes, slo_ns)
        if exceeded is not None:
            self.num_refused += 1
            return exceeded
        if self._interval_ns:
            self._full_ns = max(self._full_ns, now_ns) + self._interval_ns
        self.num_admitted += 1
        self.num_open += 1
        self.num_bytes += num_bytes
        return None

    def owe(self, now_ns: int) -> None:
        """A request that is in takes one more token of the rate. If none is left, later requests wait longer for theirs."""
        if self._interval_ns:
            self._full_ns = max(self._full_ns, now_ns) + self._interval_ns

    def leave(self, num_bytes: int) -> None:
        """A request is over."""
        self.num_open -= 1
        self.num_bytes -= num_bytes

    def _find_exceeded(self, now_ns: int, num_bytes: int, slo_ns: int) -> Exceeded | None:
        quota = self.quota
        if quota.slo_ns_min is not None and slo_ns < quota.slo_ns_min:
            return Exceeded("slo_ns_min", slo_ns, quota.slo_ns_min)
        if quota.slo_ns_max is not None and slo_ns > quota.slo_ns_max:
            return Exceeded("slo_ns_max", slo_ns, quota.slo_ns_max)
        if quota.open_requests is not None and self.num_open >= quota.open_requests:
            return Exceeded("open_requests", self.num_open + 1, quota.open_requests)
        if quota.open_bytes is not None and self.num_bytes + num_bytes > quota.open_bytes:
            return Exceeded("open_bytes", self.num_bytes + num_bytes, quota.open_bytes)
        if self._interval_ns and (wait_ns := self._full_ns - self._burst_ns - now_ns) > 0:
            until_ns = None if self._is_shared else now_ns + wait_ns
            return Exceeded("rate_rps", None, quota.rate_rps or 0.0, wait_ns, until_ns)
        return None


class Quotas:
    """The quotas of all tenants, and what each has of its own."""

    def __init__(self, quotas: Mapping[str, Quota] | None = None) -> None:
        """Begin with nothing open; `OTHERS` stands for each tenant that is not named. None means no quotas."""
        self.quotas: Mapping[str, Quota] = {}
        self._named: dict[str, TenantUse] = {}
        #: In order of the last request.
        self._others: dict[str, TenantUse] = {}
        self._shared: TenantUse | None = None
        self.bind(quotas or {})

    def bind(self, quotas: Mapping[str, Quota]) -> None:
        """Take other quotas from now on; what is open stays open, and counts for those that still have one.

        Raises ConfigError if there are too many; nothing has changed.
        """
        check_quotas(quotas)
        self.quotas = dict(quotas)
        named: dict[str, TenantUse] = {}
        for name, quota in quotas.items():
            if name != OTHERS:
                use = self._named.get(name) or self._others.pop(name, None) or TenantUse(quota)
                use.bind(quota)
                named[name] = use
        others = quotas.get(OTHERS)
        if others is None:
            self._others, self._shared = {}, None
        else:
            for name in self._named.keys() - named.keys():
                if len(self._others) < OTHERS_MAX:
                    self._others[name] = self._named[name]
            for use in self._others.values():
                use.bind(others)
            if self._shared is not None:
                self._shared.bind(others)
        self._named = named

    def __bool__(self) -> bool:
        """Whether any tenant has a quota."""
        return bool(self.quotas)

    @property
    def weights(self) -> dict[str, float]:
        """By tenant: how large its share of the GPUs is."""
        return {
            name: quota.weight
            for name, quota in self.quotas.items()
            if name != OTHERS and quota.weight != 1.0
        }

    @property
    def num_kept(self) -> int:
        """Tenants without a quota of their own that are remembered."""
        return len(self._others)

    def uses(self) -> list[tuple[str, TenantUse]]:
        """The present use by all named tenants, and by the others that are remembered."""
        return [*sorted(self._named.items()), *self._others.items()]

    def excess_weight(self, name: str, weight: float) -> Exceeded | None:
        """Find whether a request weighs more than its tenant's may. Returns None if not."""
        quota = self.quotas.get(name) or self.quotas.get(OTHERS)
        most = 1.0 if quota is None else quota.request_weight_max
        return Exceeded("request_weight_max", weight, most) if weight > most else None

    def find(self, name: str, now_ns: int) -> TenantUse | None:
        """Find what a tenant has of its quota; Returns None if it has no quota. Takes O(1)."""
        use = self._named.get(name)
        if use is not None:
            return use
        quota = self.quotas.get(OTHERS)
        if quota is None:
            return None
        others = self._others
        use = others.pop(name, None)
        if use is None:
            if len(others) >= OTHERS_MAX:
                oldest = next(iter(others))
                if not others[oldest].is_fresh(now_ns):
                    self._shared = self._shared or TenantUse(quota, is_shared=True)
                    return self._shared
                del others[oldest]
            use = TenantUse(quota)
        others[name] = use
        return use


def check_quotas(quotas: Mapping[str, Quota]) -> None:
    """Look whether all these tenants may have a quota.

    Raises ConfigError if a name is too long or unprintable, there are too many, or those without a quota of their own
    are to have a weight.
    """
    if len(quotas) > NAMED_MAX:
        raise ConfigError(f"quotas: found {len(quotas)} tenants, expected {NAMED_MAX} at most")
    if (others := quotas.get(OTHERS)) is not None and others.weight != 1.0:
        raise ConfigError(
            f"quotas: found weight {others.weight:g} of {OTHERS}, who are alike, expected none"
        )
    for name in quotas:
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise ConfigError(
                f"quotas: found tenant {name[:80]!a}, expected {NAME_CHARS_MAX} printable characters at most"
            )
