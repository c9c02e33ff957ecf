"""Fairness: whose requests go first when not all can be served.

Every tenant, and every model asked without one, is entitled to a fair share of the lanes' time (`shares`). While
it used less than the part `isolation` of that, its batches are not struck out in favour of those that used more.
So a flood takes what others leave, and no more.

A model without a tenant floods if it asks for more than its share and for a quarter of all there is. While none
does, models weigh by what part of their requests was served, the less the more, because to even out lane time
among hundreds of models that are asked now and then, each alone in its batch, costs answers and isolates nobody:
11 in 100 in a zoo of 600.

Deadlines order a model's queue, whoever asks. Where tenants share a model, a tenant that used up its share
therefore finds only half of the queue open to it, and none of it for a while after a request of somebody who has
some share left was dropped: what is too much is refused when it arrives.

A name is a tenant of its own once it was seen some times. Until then its requests count as their model's, so
that a client which invents a name for each request is one client. One that uses a thousand names in turn is a
thousand tenants; only the front can know better.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat

from controller.core.config import EdfMhConfig
from controller.core.shares import MAX_TENANTS, STEP_NS, FairShare, ServedShare, Usage
from controller.core.state import Batch, Model, Request

# A request of whoever has some of its share left weighs so much that no other is preferred.
_NEVER_STRUCK = 1e9

# While nobody floods, a model's requests weigh by the mean share over its own, to this power, and no less than the
# least. The power 1 left the worst-served twentieth of 196 models 0.82 of what all could have at once, 1.25 leaves
# it 0.85, this 0.86, for a quarter of a point of all answers. With a least weight of 1, whoever happens to be
# ahead stays ahead of half of the models.
_EVENNESS = 1.5
_MIN_WEIGHT = 0.5
# A model that was served less than this part of the mean share is never struck out.
_SERVED_FLOOR = 0.5

# A tenant is known after so many requests.
_KNOWN_AFTER = 4


class Tenant:
    """What one tenant used of the exec lanes and of the load lanes."""

    __slots__ = ("exec_usage", "load_usage", "num_seen", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.num_seen = 0
        self.exec_usage = Usage()
        self.load_usage = Usage()


class Fairness:
    """What each tenant and model used; what follows for a batch's worth."""

    def __init__(self, config: EdfMhConfig) -> None:
        self._isolation = config.isolation
        self._configured = config.tenant_weights
        self._weights = config.tenant_weights
        self._exec = FairShare()
        self._load = FairShare()
        self._served = ServedShare()
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
            if weight is not None:  # whoever configured a weight knows that there is such a tenant
                tenant.num_seen = _KNOWN_AFTER
            if len(tenants) == MAX_TENANTS:
                del tenants[next(iter(tenants))]
        tenants[name] = tenant
        tenant.num_seen += 1
        if not self._isolation or self._has_left(request, now_ns):
            return 0.0
        return 1.0 if now_ns < request.model.crowded_until_ns else 0.5

    @property
    def num_tenants(self) -> int:
        """How many tenants are kept, known or not."""
        return len(self._tenants)

    def knows(self, name: str) -> bool:
        """Whether a name is a tenant of its own."""
        return self._known(name) is not None

    def _known(self, name: str) -> Tenant | None:
        """The tenant of that name; None: there is none, or its requests count as their model's still."""
        tenant = self._tenants.get(name)
        return tenant if tenant is not None and tenant.num_seen >= _KNOWN_AFTER else None

    def _has_left(self, request: Request, now_ns: int) -> bool:
        """Whether whoever asks has some of its share of the exec lanes left."""
        step = now_ns // STEP_NS
        tenant = self._known(request.tenant)
        if tenant is None:
            return self._exec.has_left(request.model.usage, 1.0, self._isolation, step)
        return self._exec.has_left(tenant.exec_usage, tenant.weight, self._isolation, step)

    # --- exec lanes -----------------------------------------------------------------------------

    def count_served(self, batch: Batch, now_ns: int) -> None:
        """A batch goes to a worker."""
        model, step = batch.copy.model, now_ns // STEP_NS
        exec_ns = batch.copy.estimates.exec_ns[batch.size_index]
        model.served.count(now_ns, served=batch.count)
        self._served.count(now_ns, served=batch.count)
        if not self._tenants:
            self._exec.served(model.usage, 1.0, exec_ns, step)
            return
        each_ns = exec_ns / batch.count
        for request in model.queue[batch.first : batch.first + batch.count]:
            tenant = self._known(request.tenant)
            if tenant is None:
                self._exec.served(model.usage, 1.0, each_ns, step)
            else:
                self._exec.served(tenant.exec_usage, tenant.weight, each_ns, step)

    def count_dropped(self, request: Request, now_ns: int) -> None:
        """A request of a resident model is refused for want of time."""
        model = request.model
        if model.fastest is None:
            return
        if request.tenant and self._has_left(request, now_ns):
            model.crowded_until_ns = now_ns + request.slo_ns
        model.served.count(now_ns, dropped=1)
        self._served.count(now_ns, dropped=1)
        cost_ns = model.fastest.ns_per_row * request.rows
        step = now_ns // STEP_NS
        tenant = self._known(request.tenant) if self._tenants else None
        if tenant is None:
            self._exec.dropped(model.usage, 1.0, cost_ns, step)
        else:
            self._exec.dropped(tenant.exec_usage, tenant.weight, cost_ns, step)

    def worths(self, batches: list[Batch], now_ns: int) -> list[float]:
        """What each batch is worth: its number of requests, weighed."""
        isolation, step = self._isolation, now_ns // STEP_NS
        if not isolation:
            return [float(batch.count) for batch in batches]
        if self._exec.flooded(step):
            usages = [batch.copy.model.usage for batch in batches]
            have_left = self._exec.have_left(usages, isolation, step)
            weights = [_NEVER_STRUCK if left else 1.0 for left in have_left]
        else:
            mean = self._served.beside(1.0)
            weights = [self._weight(batch.copy.model, mean) for batch in batches]
        if self._tenants:
            return list(map(self._worth_to_tenants, batches, weights, repeat(step)))
        return [weight * batch.count for weight, batch in zip(weights, batches, strict=True)]

    def _weight(self, model: Model, mean: float) -> float:
        """What a request counts without a known tenant while nobody floods: by the part of its model's served."""
        share = model.served.beside(mean)
        if share < mean * _SERVED_FLOOR:
            return _NEVER_STRUCK
        return max(float((mean / share) ** _EVENNESS), _MIN_WEIGHT)

    def _worth_to_tenants(self, batch: Batch, weight: float, step: int) -> float:
        """Sum over the batch's requests; one of no known tenant has the model's weight."""
        total, isolation = 0.0, self._isolation
        for request in batch.copy.model.queue[batch.first : batch.first + batch.count]:
            tenant = self._known(request.tenant)
            if tenant is None:
                total += weight
            elif self._exec.has_left(tenant.exec_usage, tenant.weight, isolation, step):
                total += _NEVER_STRUCK * tenant.weight
            else:
                total += tenant.weight
        return total

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
        count = len(queue) - first
        tenant = self._known(queue[first].tenant) if self._isolation else None
        if tenant is None:
            return count
        step = now_ns // STEP_NS
        has_left = self._load.has_left(tenant.load_usage, tenant.weight, self._isolation, step)
        return tenant.weight * count * (_NEVER_STRUCK if has_left else 1.0)
