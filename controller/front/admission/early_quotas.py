"""Whose quota forbids what, as a front knows: it refuses early what its controller would refuse. No I/O, no clock.

The controller keeps the one book (`core.quotas`). When it refuses a request for its tenant's rate, it tells the
front until when that tenant's bucket stays empty whatever comes, and the front refuses the tenant by itself until
then. After that it passes on as many as the rate gives, which is one per token's time, and refuses the others: the
controller's bucket, from which all fronts take, cannot hold more. A tenant of which nothing was told is always
passed on.

An SLO that a tenant may not have it may not have until its quota changes, so one refusal tells that for good.

A request that was passed on and not answered may have taken no token, and gives its own back here. So what is
refused here the controller would have refused too, but for what comes within one way there and back after it
refused what was passed on: until its word is here, the front counts a token that another front has taken.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from clockwright.units import NS_PER_S, SLO_NS_MAX
from controller.core.quotas import Exceeded, interval_ns

#: Tenants that are remembered; nothing is known of one that is forgotten, and it is passed on.
TENANTS_MAX: Final = 1024

# A tenant that stays so far below its rate is forgotten.
_FORGOTTEN_NS = NS_PER_S


class _Spent:
    """What is known of one tenant's rate."""

    __slots__ = ("interval_ns", "next_ns", "rate_rps", "told_ns")

    def __init__(self, told_ns: int, rate_rps: float) -> None:
        #: Until then its bucket is empty, as the controller has said.
        self.told_ns = told_ns
        #: From then on one is passed on.
        self.next_ns = told_ns
        self.rate_rps = rate_rps
        self.interval_ns = interval_ns(rate_rps)


class EarlyQuotas:
    """What the controller has said of tenants' quotas. Times are on the front's clock."""

    def __init__(self) -> None:
        """Begin with nothing told."""
        self._spent: dict[str, _Spent] = {}
        #: The smallest and the largest SLO, as far as told.
        self._slos_ns: dict[str, tuple[int, int]] = {}
        #: Requests of theirs that were passed on and are not over, by id.
        self._passed: dict[int, _Spent] = {}
        self._refused: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether anything is known of any tenant."""
        return bool(self._spent or self._slos_ns)

    def told(self, tenant: str, until_ns: int, rate_rps: float) -> None:
        """The controller says that the tenant's bucket is empty until then."""
        self._spent.pop(tenant, None)
        if len(self._spent) >= TENANTS_MAX:
            del self._spent[next(iter(self._spent))]
        self._spent[tenant] = _Spent(until_ns, rate_rps)

    def told_slo(self, tenant: str, slo_ns: int, *, is_least: bool) -> None:
        """The controller says that this is the least, or the largest, SLO that the tenant may have."""
        least_ns, most_ns = self._slos_ns.pop(tenant, (0, SLO_NS_MAX))
        if len(self._slos_ns) >= TENANTS_MAX:
            del self._slos_ns[next(iter(self._slos_ns))]
        self._slos_ns[tenant] = (slo_ns, most_ns) if is_least else (least_ns, slo_ns)

    def judge(self, tenant: str, now_ns: int, slo_ns: int) -> Exceeded | None:
        """Find whether the controller would refuse a request of a tenant. Returns None if unknown."""
        exceeded = self._judge(tenant, now_ns, slo_ns)
        if exceeded is not None:
            self._refused[tenant] = self._refused.get(tenant, 0) + 1
        return exceeded

    def _judge(self, tenant: str, now_ns: int, slo_ns: int) -> Exceeded | None:
        least_ns, most_ns = self._slos_ns.get(tenant, (0, SLO_NS_MAX))
        if slo_ns < least_ns:
            return Exceeded("slo_ns_min", slo_ns, least_ns)
        if slo_ns > most_ns:
            return Exceeded("slo_ns_max", slo_ns, most_ns)
        spent = self._spent.get(tenant)
        if spent is None:
            return None
        wait_ns = spent.next_ns - now_ns
        if wait_ns > 0:
            return Exceeded("rate_rps", None, spent.rate_rps, retry_ns=wait_ns)
        if wait_ns < -_FORGOTTEN_NS:
            del self._spent[tenant]
        return None

    def passed(self, tenant: str, ask_id: int) -> None:
        """A request is passed on."""
        if (spent := self._spent.get(tenant)) is not None:
            spent.next_ns += spent.interval_ns
            self._passed[ask_id] = spent

    def over(self, ask_id: int, *, answered: bool) -> None:
        """A request that was passed on is over; unless it was answered, it may have taken no token."""
        spent = self._passed.pop(ask_id, None)
        if spent is not None and not answered:
            spent.next_ns = max(spent.next_ns - spent.interval_ns, spent.told_ns)

    def forget(self) -> None:
        """Whatever was told may hold no more."""
        self._spent.clear()
        self._slos_ns.clear()
        self._passed.clear()

    def take_refused(self) -> dict[str, int]:
        """Take how many were refused here, of some tenants at a time."""
        names = list(islice(self._refused, TENANTS_MAX))
        return {name: self._refused.pop(name) for name in names}
