"""The scheduler's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, format_ns

#: How a container of the policy `clipper` may set its batch size (policies/batching.py).
BATCHINGS = ("aimd", "quantile", "none")

#: Requests with an SLO this long or longer come from batch clients (policies/batch_clients.py).
BATCH_SLO_NS = 10 * NS_PER_S


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
    #: The part of its fair share of GPU time that a tenant, or a model asked without one, can count on
    #: whatever others ask for (policies/fairness.py). 0: time goes to whatever answers most, and a flood takes
    #: all of it. 1: the whole share. Isolation costs answers where those who ask for little cannot fill large
    #: batches, and only while a flood is what pushes them out: `isolation_curve` in experiments/results/unseen.json
    #: has five settings. Where all share a model it costs nothing.
    isolation: float = 1.0
    #: Tenant -> weight: its fair share is so many times that of one that is not named, and its requests weigh
    #: as much more where there is time for a part only.
    tenant_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: A batch is as large as is densest: the least time per request of the sizes that its queue fills in time.
    #: Else it is the largest of them, which costs goodput where EXECs grow faster than batches.
    densest: bool = True
    #: Weights whose next use is farthest away make room, where models are asked at even gaps. Else the least
    #: recently used ones do.
    next_use: bool = True
    #: Models that are asked at even gaps are loaded before they are asked, where the load lane has nothing else
    #: to do.
    prefetch: bool = True
    #: A model that is refused though it has a copy takes pages of copies that served much less than it lost of
    #: late. Else it gets another copy only where pages are free, or where a load saves requests that wait.
    take_pages: bool = True
    #: A model that a crowd waits for gets another copy before any of it is refused. Else only after: an SLO and a
    #: load later.
    before_refusals: bool = True
    #: Where workers are of unlike kinds, a model is left to those that suit it (policies/suits.py). Else any
    #: idle worker takes any batch.
    suits: bool = True
    #: Where many GPUs share few models and requests were dropped of late, a batch waits while it can grow and
    #: be in time. Else it runs as soon as a GPU is idle.
    deferral: bool = True
    #: Batch clients' work runs on a limited number of GPUs at once. Else on every lane that is idle.
    limit_batch: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.pressure_gain <= 100:
            raise ConfigError(f"pressure_gain is {self.pressure_gain}, expected 0 to 100")
        if not 0 <= self.isolation <= 1:
            raise ConfigError(f"isolation is {self.isolation}, expected 0 to 1")
        for tenant, weight in self.tenant_weights.items():
            # The comparison is false for NaN too.
            if not isinstance(weight, (int, float)) or not 0.01 <= weight <= 100:
                raise ConfigError(
                    f"tenant_weights: found {weight!r} for {tenant!r}, expected 0.01 to 100"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings, each with what goes wrong at its extremes."""

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
    #: windows. A long link has more, by its length; a thin one fewer, by what it carries (link.py). Too small: a lane waits
    #: for the round trip.
    max_outstanding: int = 8
    #: How long after its predicted begin an action may still start. Too small: jitter turns into
    #: refused actions. Too large: late work delays what was planned behind it. The paper's 5 ms.
    window_ns: int = 5 * NS_PER_MS
    #: An action sent now begins no earlier than this, or than what is measured to be usual
    #: (link.py). Measured on loopback: 0.3-0.5 ms.
    dispatch_delay_ns: int = 500 * NS_PER_US
    #: Kept free between the predicted end of the EXEC and the deadline, for the output's way back:
    #: this, or `margin_fraction` of the SLO when that is less. Clockwork keeps 5 ms always, which
    #: leaves nothing of an SLO below 10 ms.
    margin_ns: int = 5 * NS_PER_MS
    margin_fraction: float = 0.1
    #: The most that the front reserves for an answer's way to the client (`admission.way_back_of`): kept free
    #: in addition to the policy's margin, as far as the two bounds above allow both, and alone in any case. 0: nothing
    #: is charged, as in the simulator.
    way_back_ns: int = 0
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
    batch_slo_ns: int = BATCH_SLO_NS
    edf_mh: EdfMhConfig = field(default_factory=EdfMhConfig)
    #: An action this long past its predicted end, or as long as it should take, means that the worker hangs: its link
    #: is closed.
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
        for name in ("dispatch_delay_ns", "margin_ns", "way_back_ns", "batch_delay_ns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.margin_fraction < 1:
            raise ConfigError(f"margin_fraction is {self.margin_fraction}, expected 0 <= x < 1")
        if self.action_timeout_ns < self.window_ns:
            raise ConfigError(
                f"action_timeout_ns ({format_ns(self.action_timeout_ns)}) is below window_ns "
                f"({format_ns(self.window_ns)}): every action would time out inside its window"
            )
