"""Shared by studies that compare policies: the policies, the noise, and telemetry rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import Scheduler, SchedulerConfig
from controller.core.policies import POLICIES as CORE_POLICIES
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import Telemetry
from experiments.simulator import Case, Progress, Run, production_scheduler, run
from modelzoo.profile import Noise

#: By the name that figures use: every policy of the core, and variants of `clockwork`:
#: `clockwork1ms` decides as late as a look-ahead of 1 ms allows, not the paper's 5;
#: `clockwork10ms` has the look-ahead of the source that the paper's authors released, and as there 5 ms
#: are kept free of any SLO (here 0.9 of it, where that is less).
POLICIES = {name: SchedulerConfig(policy=name) for name in CORE_POLICIES} | {
    "clockwork1ms": SchedulerConfig(policy="clockwork", lookahead_ns=NS_PER_MS),
    "clockwork10ms": SchedulerConfig(
        policy="clockwork", lookahead_ns=10 * NS_PER_MS, margin_fraction=0.9
    ),
}

#: Policies compared if the paper shows Clockwork alone: its policy, and ours.
PREDICTIVE = ("clockwork", "clockwork1ms", "edf_mh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Fields of every setting in which policies are compared."""

    policies: tuple[str, ...] = PREDICTIVE
    #: Ten times what section 2 of the paper measured: on a V100 with one model at a time, the 99.99th
    #: percentile of ResNet50 was within 0.03 % of the median.
    noise: Noise = field(default_factory=lambda: Noise(exec_sigma=0.003, load_sigma=0.003))
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in POLICIES:
                raise ConfigError(f"policy is {name!r}, expected some of {', '.join(POLICIES)}")
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"policies are {self.policies}, expected one or more, each once")


def run_rows(
    case: Case,
    take: Callable[[Sequence[RequestRow], Sequence[ActionRow]], None],
    *,
    bucket_ns: int = NS_PER_S,
    make_scheduler: Callable[[Case], Scheduler] = production_scheduler,
) -> Run:
    """Run a case and return its telemetry rows a second at a time, so that memory stays flat.

    Args:
        case: what to run.
        take: gets the rows that were completed since the last call. An action comes with all of its
            requests.
        bucket_ns: resolution of the run's summary.
        make_scheduler: makes the case's scheduler, as for `run`.
    """
    # A second of the largest figure has 50,000 requests; under overload a policy may refuse more than that
    # in one instant.
    telemetry = Telemetry(capacity=10_000_000)

    def drain(_progress: Progress) -> None:
        take(telemetry.requests, telemetry.actions)
        telemetry.clear()

    return run(
        case,
        bucket_ns=bucket_ns,
        telemetry=telemetry,
        on_progress=drain,
        make_scheduler=make_scheduler,
    )
