"""Fairness: what a batch is worth, which is more where its model or tenants were served less than others.

A request weighs (mean served share / its model's) to the power `fairness`; for a request that carries a tenant
the tenant's served share takes the model's place, times the tenant's configured weight.
"""

from __future__ import annotations

from controller.core.config import EdfMhConfig
from controller.core.policy import Batch
from controller.core.shares import ServedShare, TenantShares
from controller.core.state import Model, Request

# However badly a model was served, its batches weigh no more than this.
_MAX_WEIGHT = 8.0
# A model below its floor weighs so much that no batch of it is struck out.
_NEVER_STRUCK = 1e9


class Fairness:
    """The served shares of all, and of each model and tenant; what follows for a batch's worth."""

    def __init__(self, config: EdfMhConfig) -> None:
        self._config = config
        self._served = ServedShare()
        self._tenants = TenantShares()

    def count_served(self, batch: Batch, now_ns: int) -> None:
        """A batch goes to a worker."""
        model, first, count = batch.copy.model, batch.first, batch.count
        model.served.count(now_ns, served=count)
        self._served.count(now_ns, served=count)
        for request in model.queue[first : first + count]:
            if request.tenant:
                self._tenants.count(request.tenant, now_ns, served=1)

    def count_dropped(self, request: Request, now_ns: int) -> None:
        """A request is refused for want of time, on whatever lane."""
        if request.tenant:
            self._tenants.count(request.tenant, now_ns, dropped=1)

    def count_dropped_though_resident(self, model: Model, now_ns: int) -> None:
        """It was one of a model that is resident: only those count against the model."""
        model.served.count(now_ns, dropped=1)
        self._served.count(now_ns, dropped=1)

    def worths(self, batches: list[Batch]) -> list[float]:
        """What each batch is worth: its number of requests, weighed."""
        mean = self._served.beside(1.0)
        floor = mean * self._config.served_floor
        worths = []
        for batch in batches:
            share = batch.copy.model.served.beside(mean)
            weight = self._weight(share, mean) if share >= floor else _NEVER_STRUCK
            if self._tenants and weight < _NEVER_STRUCK:
                worths.append(self._worth_to_tenants(batch, weight, mean))
            else:
                worths.append(weight * batch.count)
        return worths

    def _weight(self, share: float, mean: float) -> float:
        return min(float((mean / share) ** self._config.fairness), _MAX_WEIGHT)

    def _worth_to_tenants(self, batch: Batch, weight: float, mean: float) -> float:
        """Sum over the batch's requests; a request without a tenant has the model's weight."""
        weights, tenants = self._config.tenant_weights, self._tenants
        return sum(
            weights.get(request.tenant, 1.0)
            * self._weight(tenants.beside(request.tenant, mean), mean)
            if request.tenant
            else weight
            for request in batch.copy.model.queue[batch.first : batch.first + batch.count]
        )
