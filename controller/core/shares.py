"""Which share of the requests is served: in the last moments of all, in the last seconds of each model and tenant."""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_S

_RECENT_NS = 50 * NS_PER_MS
_HALF_LIFE_NS = 2 * NS_PER_S
# A model counts as having had so many more requests, served at the mean share. With fewer, one unlucky
# request of a model that is seldom asked for makes it weigh more (with 1, a zoo of 1,500 models lost 4 points).
_PRIOR = 16.0

#: Clients name tenants, so there may be any number of names: the latest ones are kept, so many.
MAX_TENANTS = 1024


class RecentDrops:
    """Share of the requests dropped in the last 50 to 100 ms."""

    __slots__ = ("_dropped", "_served", "_until_ns")

    def __init__(self) -> None:
        # Each list counts the window before, then this one.
        self._dropped = [0, 0]
        self._served = [0, 0]
        self._until_ns = 0

    def count(self, now_ns: int, *, served: int = 0, dropped: int = 0) -> None:
        """Requests went to a worker, or were refused."""
        if now_ns >= self._until_ns:
            self._turn(now_ns)
        self._served[1] += served
        self._dropped[1] += dropped

    def share(self, now_ns: int) -> float:
        """0 to 1; 0 when nothing happened."""
        if now_ns >= self._until_ns:
            self._turn(now_ns)
        dropped = sum(self._dropped)
        return dropped / (dropped + sum(self._served)) if dropped else 0.0

    def _turn(self, now_ns: int) -> None:
        missed = now_ns >= self._until_ns + _RECENT_NS
        self._dropped = [0 if missed else self._dropped[1], 0]
        self._served = [0 if missed else self._served[1], 0]
        self._until_ns = now_ns + _RECENT_NS


class ServedShare:
    """Share of the requests served; what is older counts half as much every two seconds."""

    __slots__ = ("_dropped", "_period", "_served")

    def __init__(self) -> None:
        self._served = 0.0
        self._dropped = 0.0
        self._period = 0

    def count(self, now_ns: int, *, served: int = 0, dropped: int = 0) -> None:
        """Requests went to a worker, or were refused."""
        period = now_ns // _HALF_LIFE_NS
        if period != self._period:
            fade = 0.5 ** min(period - self._period, 64)
            self._served *= fade
            self._dropped *= fade
            self._period = period
        self._served += served
        self._dropped += dropped

    def beside(self, mean: float) -> float:
        """The share, as though some more requests had been served at the mean share.

        One unlucky request of a model that is seldom asked for so says little.
        """
        return (self._served + _PRIOR * mean) / (self._served + self._dropped + _PRIOR)


class TenantShares:
    """Share of the requests served by tenant, of those seen last."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        #: In order of the last count: the tenant to forget next comes first.
        self._shares: dict[str, ServedShare] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def count(self, tenant: str, now_ns: int, *, served: int = 0, dropped: int = 0) -> None:
        """Requests of a tenant went to a worker, or were refused."""
        share = self._shares.pop(tenant, None)
        if share is None:
            share = ServedShare()
            if len(self._shares) == MAX_TENANTS:
                del self._shares[next(iter(self._shares))]
        self._shares[tenant] = share
        share.count(now_ns, served=served, dropped=dropped)

    def beside(self, tenant: str, mean: float) -> float:
        """The tenant's share, as `ServedShare.beside` gives it; a tenant that is not kept has the mean."""
        share = self._shares.get(tenant)
        return mean if share is None else share.beside(mean)
