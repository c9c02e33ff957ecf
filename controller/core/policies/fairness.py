"""Fairness: whose requests go first when not all can be served.

Every tenant, and every model asked without one, is entitled to a fair share of the lanes' time (`shares`). While
it used less than the part `isolation` of that, its batches are not struck out in favour of those that used more, and
go before them if they cannot wait (`moore_hodgson`). So a flood takes what others leave, and all of that.

A model without a tenant floods if it asks for more than its share and for a quarter of all there is, and if the others
would fit without it. A popular model does not flood where the others are too many by themselves: to hold shares
against it would answer 30 instead of 69 of 100 requests to 400 functions of which one has 30 % of the requests.
While no model floods, models weigh a little by what part of their requests was served, the less the more.

Deadlines alone order a model's queue. Where tenants share a model, a tenant that used up its share may therefore
fill only half of the queue. After a request of a tenant with some share left was dropped, it may fill none of it for
a while: its requests are refused when they arrive.

A name is a tenant of its own once it was seen some times. Until then its requests count as their model's, so
that a client which invents a name for each request is one client. One that uses a thousand names in turn is a
thousand tenants; only the front can know better.
"""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.config import EdfMhConfig
from controller.core.shares import MAX_TENANTS, STEP_NS, FairShare, RecentDrops, ServedShare, Usage
from controller.core.state import Batch, Model, Request

# A request whose tenant or model has some of its share left weighs so much that no other is preferred.
_NEVER_STRUCK = 1e9

# Without a flood, a model's requests weigh by the mean share over its own, to this power, up to a bound and down to
# one over it. A larger bound evens out more, at a price in answers: clients who think, with 40 models of unlike
# popularity, lose 2 in 100 requests with 1.25 and 5 with 2.
_EVENNESS = 1.5
_MOST = 1.1
# What a load is worth where requests have weights, so many of the most urgent ones say.
_MOST_WEIGHED = 32

# A tenant is known after so many requests.
_KNOWN_AFTER = 4


class Tenant:
    """Usage of the exec lanes and of the load lanes by one tenant."""

    __slots__ = ("exec_usage", "load_usage", "num_seen", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.num_seen = 0
        self.exec_usage = Usage()
        self.load_usage = Usage()


class Fairness:
    """Counts what each tenant and model uses, and weighs batches by it."""

    def __init__(self, config: EdfMhConfig) -> None:
        self._isolation = config.isolation
        self._configured = config.tenant_weights
        self._weights = config.tenant_weights
        self._exec = FairShare()
        self._load = FairShare()
        self._served = ServedShare()
        self._gain = config.pressure_gain
        # Requests of models and tenants within their shares.
        self._held_drops = RecentDrops()
        #: In order of the last request: the tenant to forget next comes first.
        self._tenants: dict[str, Tenant] = {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Let tenants' shares be other ones from now on; those that are not named have the configured."""
        self._weights = {**self._configured, **weights}
        for name, tenant in self._tenants.items():
            tenant.weight = self._weights.get(name, 1.0)

    # --- who asks -------------------------------------------------------------------------------

    def leaves_room(self, request: Request, now_ns: int) -> float:
        """The part of its slack that a request with a tenant has to leave to others, as it arrives."""
        name = request.tenant
        tenants = self._tenants
        tenant = tenants.pop(name, None)
        if tenant is None:
            weight = self._weights.get(name)
            tenant = Tenant(1.0 if weight is None else weight)
            if weight is not None:  # a configured tenant exists
                tenant.num_seen = _KNOWN_AFTER
            if len(tenants) == MAX_TENANTS:
                del tenants[next(iter(tenants))]
        tenants[name] = tenant
        tenant.num_seen += 1
        if not self._isolation:
            return 0.0
        usage, weight = self._exec_share(request)
        if self._exec.has_left(usage, weight, self._isolation, now_ns // STEP_NS):
            return 0.0
        return 1.0 if now_ns < request.model.crowded_until_ns else 0.5

    @property
    def num_tenants(self) -> int:
        """Number of tenants that are kept, known or not."""
        return len(self._tenants)

    def knows(self, name: str) -> bool:
        """Whether a name is a tenant of its own."""
        return self._known(name) is not None

    def _known(self, name: str) -> Tenant | None:
        """The tenant of that name. Returns None if it is unknown: then its requests count as their model's."""
        tenant = self._tenants.get(name)
        return tenant if tenant is not None and tenant.num_seen >= _KNOWN_AFTER else None

    def _exec_share(self, request: Request) -> tuple[Usage, float]:
        """Use of the exec lanes by the request's tenant or model, and the weight of its share."""
        tenant = self._known(request.tenant) if self._tenants else None
        return (request.model.usage, 1.0) if tenant is None else (tenant.exec_usage, tenant.weight)

    # --- exec lanes -----------------------------------------------------------------------------

    def count_served(self, batch: Batch, now_ns: int) -> None:
        """A batch goes to a worker."""
        model, step = batch.copy.model, now_ns // STEP_NS
        exec_ns = batch.copy.estimates.exec_ns[batch.size_index]
        model.served.count(now_ns, served=batch.count)
        self._served.count(now_ns, served=batch.count)
        usage, weight = self._exec_share(model.queue[batch.first])
        if self._exec.has_left(usage, weight, self._isolation, step):
            self._held_drops.count(now_ns, served=batch.count)
        if not self._tenants:
            self._exec.served(usage, weight, exec_ns, step)
            return
        each_ns = exec_ns / batch.count
        for request in model.queue[batch.first : batch.first + batch.count]:
            usage, weight = self._exec_share(request)
            self._exec.served(usage, weight, each_ns, step)

    def count_dropped(self, request: Request, now_ns: int) -> None:
        """A request of a resident model is refused for want of time."""
        model, step = request.model, now_ns // STEP_NS
        if model.fastest is None:
            return
        usage, weight = self._exec_share(request)
        if self._exec.has_left(usage, weight, self._isolation, step):
            self._held_drops.count(now_ns, dropped=1)
            if request.tenant:
                model.crowded_until_ns = now_ns + request.slo_ns
        model.served.count(now_ns, dropped=1)
        self._served.count(now_ns, dropped=1)
        self._exec.dropped(usage, weight, model.fastest.ns_per_row * request.rows, step)

    def worths(self, batches: list[Batch], now_ns: int) -> list[tuple[float, bool]]:
        """The worth of each batch, weighed, and whether it is within its fair share.

        Its worth is its number of requests, or what unlike ones are worth together.
        """
        isolation, step = self._isolation, now_ns // STEP_NS
        if not isolation:
            return [(batch.worth or float(batch.count), False) for batch in batches]
        if flood := self._exec.flood(step):
            usages = [batch.copy.model.usage for batch in batches]
            weights = [1.0] * len(batches)
            held = self._exec.have_left(usages, isolation * flood, step)
        else:
            mean, weigh = self._served.smoothed(1.0), self._weight
            if not self._tenants:
                return [((b.worth or b.count) * weigh(b.copy.model, mean), False) for b in batches]
            weights = [weigh(batch.copy.model, mean) for batch in batches]
            held = [False] * len(batches)
        if self._tenants:
            return [
                self._worth_to_tenants(batch, weight, left, step)
                for batch, weight, left in zip(batches, weights, held, strict=True)
            ]
        return [
            ((batch.worth or batch.count) * (_NEVER_STRUCK if left else weight), left)
            for batch, weight, left in zip(batches, weights, held, strict=True)
        ]

    def pressure(self, now_ns: int) -> float:
        """How much the waiting work of those within their shares counts against one beyond its own.

        By what of theirs is dropped: of all that is dropped the most is the flood's, and no such work is yet to come.
        """
        return 1.0 + self._gain * self._held_drops.share(now_ns)

    def _weight(self, model: Model, mean: float) -> float:
        """The weight of a request without a known tenant while there is no flood."""
        ratio = mean / model.served.smoothed(mean)
        return float(min(max(ratio**_EVENNESS, 1.0 / _MOST), _MOST) ** self._isolation)

    def _worth_to_tenants(
        self, batch: Batch, weight: float, left: bool, step: int
    ) -> tuple[float, bool]:
        """Sum over the batch's requests; one of no known tenant has the model's weight."""
        total, held, queue = 0.0, False, batch.copy.model.queue
        for request in batch.picked or queue[batch.first : batch.first + batch.count]:
            tenant = self._known(request.tenant)
            if tenant is None:
                held = held or left
                total += _NEVER_STRUCK if left else weight
            elif self._exec.has_left(tenant.exec_usage, tenant.weight, self._isolation, step):
                held = True
                total += tenant.weight * _NEVER_STRUCK
            else:
                total += tenant.weight
        return (total * batch.worth / batch.count if batch.worth else total), held

    # --- load lanes -----------------------------------------------------------------------------

    def count_loaded(self, request: Request, load_ns: int, now_ns: int) -> None:
        """A model is loaded for a request, the first that the load helps."""
        tenant = self._known(request.tenant)
        if tenant is not None:
            self._load.served(tenant.load_usage, tenant.weight, load_ns, now_ns // STEP_NS)

    def count_dropped_cold(self, request: Request, now_ns: int) -> None:
        """A request is refused because no load of its model would be in time."""
        tenant = self._known(request.tenant)
        if tenant is not None and request.model.fastest is not None:
            load_ns = request.model.fastest.load_ns
            self._load.dropped(tenant.load_usage, tenant.weight, load_ns, now_ns // STEP_NS)

    def load_worth(self, model: Model, first: int, now_ns: int) -> float:
        """What a load is worth that helps the model's waiting requests from `first` on.

        Whose load it is, the first of them says. Loads for requests without a known tenant are all alike:
        to a model that is seldom asked, its load is always more than its share.
        """
        queue = model.queue
        count = float(len(queue) - first)
        if model.num_unlike:
            extra_rows = model.extra_rows
            count += extra_rows.total - extra_rows.before(queue[first].due_ns)
            if model.num_weighed:
                urgent = queue[first : first + _MOST_WEIGHED]
                rows = sum([request.rows for request in urgent])
                count *= sum([request.rows * request.row_worth for request in urgent]) / rows
        tenant = self._known(queue[first].tenant) if self._isolation else None
        if tenant is None:
            return count
        step = now_ns // STEP_NS
        has_left = self._load.has_left(tenant.load_usage, tenant.weight, self._isolation, step)
        return tenant.weight * count * (_NEVER_STRUCK if has_left else 1.0)
