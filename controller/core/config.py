"""The scheduler's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, format_ns

#: How a container of the policy `clipper` may set its batch size (policies/batching.py).
BATCHINGS = ("aimd", "quantile", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdfMhConfig:
    """The pieces of `edf_mh`. Each can be turned off, which is how its worth is measured."""

    #: Each exec lane's look-ahead, and the margin, follow what is measured, with `lookahead_ns` and
    #: `margin_ns` as upper bounds. Else they are equal to those.
    adaptive_lookahead: bool = True
    adaptive_margin: bool = True
    #: Under overload, strike out batches (loads) with few requests per GPU (PCIe) time. Else the most
    #: urgent one is always next, and under overload every one is late in turn.
    prune_infers: bool = True
    prune_loads: bool = True
    #: Waiting work counts (1 + this * share of requests dropped) times (policies/pressure.py). Too small:
    #: time goes to sparse batches while denser ones gather. Too large: requests that could be served are
    #: not.
    pressure_gain: float = 6.0
    #: A model's batches weigh (mean served share / its own) to this power. 0: none is favoured. Too
    #: large: goodput goes to the models that cost most.
    fairness: float = 1.0
    #: A model whose served share is less than this part of the mean is not struck out, so that none is
    #: served less while there is time for all to have that much. 0: no floor.
    served_floor: float = 0.5
    #: Tenant -> weight: one request of the tenant counts as so many; of tenants not named, as one. For requests
    #: that carry a tenant, `fairness` looks at the tenant's served share, not at the model's. Weights decide
    #: between batches: within a model's queue the deadline does.
    tenant_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: Where many GPUs share few models and requests were dropped of late, a batch waits while it can grow and
    #: be in time. Else it runs as soon as a GPU is idle.
    deferral: bool = True
    #: Batch clients' work runs on a limited number of GPUs at once. Else on every lane that is idle.
    limit_batch: bool = True
    #: Under overload, this share of all requests dropped is refused at arrival (gate.py); the others when
    #: their slack is gone. The larger, the sooner clients know, and the less is served: batches are densest
    #: where all wait and the sparse are dropped in the end. 0: whatever may be served waits.
    at_once: float = 0.57

    def __post_init__(self) -> None:
        for name in ("pressure_gain", "fairness"):
            if not 0 <= getattr(self, name) <= 100:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 to 100")
        for name in ("served_floor", "at_once"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 to 1")
        for tenant, weight in self.tenant_weights.items():
            # The comparison is false for NaN too.
            if not isinstance(weight, (int, float)) or not 0 < weight <= 100:
                raise ConfigError(
                    f"tenant_weights: found {weight!r} for {tenant!r}, expected more than 0, at most 100"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What may be tuned, and what goes wrong at the extremes."""

    #: `edf_mh` and `clockwork`, which is the paper's, predict; `clipper` and `infaas` react (reactive.py), for
    #: comparison. Another package may bring others, so the name is looked up where the policy is made
    #: (policies/__init__.py).
    policy: str = "edf_mh"
    #: Work is sent to a lane while its predicted backlog is below this. Too small: lanes run dry
    #: between a result and the next action. Too large: decisions are made too early; every
    #: millisecond costs goodput under overload. The paper's 5 ms.
    lookahead_ns: int = 5 * NS_PER_MS
    #: Infers under way to one worker at most. The look-ahead bounds their time, this bounds their number:
    #: 5 ms of 10 us executions are 500 actions, whose inputs would queue on the link and miss their
    #: windows. Where even these are too many for the link, two (delivery.py). Too small: a lane waits
    #: for the round trip.
    max_outstanding: int = 8
    #: How long after its predicted begin an action may still start. Too small: jitter turns into
    #: refused actions. Too large: late work delays what was planned behind it. The paper's 5 ms.
    window_ns: int = 5 * NS_PER_MS
    #: An action sent now begins no earlier than this, or than what is measured to be usual
    #: (delivery.py). Measured on loopback: 0.3-0.5 ms.
    dispatch_delay_ns: int = 500 * NS_PER_US
    #: Kept free between the predicted end of the EXEC and the deadline, for the output's way back:
    #: this, or `margin_fraction` of the SLO when that is less. Clockwork keeps 5 ms always, which
    #: leaves nothing of an SLO below 10 ms.
    margin_ns: int = 5 * NS_PER_MS
    margin_fraction: float = 0.1
    #: Appendix B's capacity: the work one GPU is credited with when load priorities are computed.
    #: Clockwork's source reuses the default SLO for it, so that changing one moves the other.
    capacity_ns: int = 100 * NS_PER_MS
    #: Copy a model that has to wait to an idle worker with free pages, beyond Appendix B's demand.
    fill_free_pages: bool = True
    #: `clipper` only: how a container sets its batch size, one of `BATCHINGS`.
    batching: str = "aimd"
    #: `clipper` only: a batch that is not full waits until its oldest request has waited this long.
    #: It pays where a batch has a high fixed cost and load is moderate or comes in bursts.
    batch_delay_ns: int = 0
    #: `edf_mh`: requests with an SLO this long or longer come from batch clients. They run in time left
    #: over, on as many GPUs at once as leaves the others' requests in time.
    batch_slo_ns: int = 10 * NS_PER_S
    edf_mh: EdfMhConfig = field(default_factory=EdfMhConfig)
    #: An action this long past its predicted end means that the worker hangs: its link is closed.
    action_timeout_ns: int = 5 * NS_PER_S

    def __post_init__(self) -> None:
        if self.batching not in BATCHINGS:
            raise ConfigError(
                f"batching is {self.batching!r}, expected one of {', '.join(BATCHINGS)}"
            )
        for name in (
            "lookahead_ns",
            "max_outstanding",
            "window_ns",
            "capacity_ns",
            "batch_slo_ns",
            "action_timeout_ns",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name in ("dispatch_delay_ns", "margin_ns", "batch_delay_ns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.margin_fraction < 1:
            raise ConfigError(f"margin_fraction is {self.margin_fraction}, expected 0 <= x < 1")
        if self.action_timeout_ns < self.window_ns:
            raise ConfigError(
                f"action_timeout_ns ({format_ns(self.action_timeout_ns)}) is below window_ns "
                f"({format_ns(self.window_ns)}): every action would time out inside its window"
            )
