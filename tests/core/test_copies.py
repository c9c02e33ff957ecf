"""When a model gets another copy: each reason, and what keeps it from being one."""

from __future__ import annotations

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from controller.core import EdfMhConfig, SchedulerConfig
from controller.core.copies import Reason, reason_for_copy
from controller.core.estimator import Estimates
from controller.core.lag import Lag
from controller.core.link import LinkPlan
from controller.core.policies import POLICIES
from controller.core.policy import Policy, Traits
from controller.core.state import Copy, Model, Readiness, Request, WorkerState

MS = NS_PER_MS
EAGER = Traits(predicts=True, eager_copies=True)


def worker(number: int) -> WorkerState:
    link = LinkPlan(least_ns=0, tolerance_ns=0)
    return WorkerState(WorkerId(f"gpu{number}"), GpuKind("x"), 10, 10, number, link)


def model(*, copies: int, waiting: int = 0) -> Model:
    """A model that two workers are ready for, some of which hold it; its requests are due in 100 ms."""
    found = Model(ModelId("m"), 0)
    estimates = Estimates(load_ns=8 * MS, exec_ns={1: 5 * MS})
    for number in range(2):
        one = worker(number)
        found.ready_on(one, Readiness(1, ArchitectureId("a"), estimates))
        if number < copies:
            found.copies[one] = Copy(found, one, 1, estimates, resident=True)
    for number in range(waiting):
        due_ns = 100 * MS
        found.queue.append(
            Request(RequestId(number), found, 1, 0, due_ns, due_ns, due_ns, False, 5 * MS)
        )
    return found


def policy(name: str = "edf_mh") -> Policy:
    return POLICIES[name].make(SchedulerConfig())


def test_requests_that_wait_for_a_model_without_a_copy_are_demand() -> None:
    for name in ("clockwork", "edf_mh", "clipper"):
        found = reason_for_copy(
            model(copies=0, waiting=1), SchedulerConfig(), EAGER, policy(name), lag=Lag(), now_ns=0
        )
        assert found is Reason.DEMAND, name


@pytest.mark.parametrize(
    ("any_idle", "fill", "expected"),
    [(True, True, Reason.IDLE_PAGES), (False, True, None), (True, False, None)],
)
def test_requests_that_a_copy_will_serve_get_another_only_from_a_worker_with_nothing_to_do(
    any_idle: bool, fill: bool, expected: Reason | None
) -> None:
    config = SchedulerConfig(fill_free_pages=fill)
    served = model(copies=1, waiting=1)
    found = reason_for_copy(served, config, EAGER, policy(), any_idle=any_idle, lag=Lag(), now_ns=0)
    assert found is expected


@pytest.mark.parametrize(
    ("waiting", "before_refusals", "expected"),
    [(5, True, None), (6, True, Reason.DEMAND), (6, False, None)],
)
def test_a_crowd_that_fills_a_quarter_of_its_lanes_is_demand_before_any_of_it_is_refused(
    waiting: int, before_refusals: bool, expected: Reason | None
) -> None:
    """Each takes 5 ms, and all are due in 100 ms."""
    config = SchedulerConfig(edf_mh=EdfMhConfig(before_refusals=before_refusals))
    chooser = POLICIES["edf_mh"].make(config)
    assert (
        reason_for_copy(
            model(copies=1, waiting=waiting), config, EAGER, chooser, lag=Lag(), now_ns=0
        )
        is expected
    )


@pytest.mark.parametrize(
    ("eager", "fill", "refusal", "expected"),
    [
        (True, True, Refusal.OVERLOADED, Reason.REFUSED_FULL),
        (False, True, Refusal.OVERLOADED, None),
        (True, False, Refusal.OVERLOADED, None),
        (True, True, Refusal.INFEASIBLE, None),
    ],
)
def test_a_request_refused_for_want_of_time_gets_its_model_another_copy_where_the_policy_is_eager(
    eager: bool, fill: bool, refusal: Refusal, expected: Reason | None
) -> None:
    config, traits = (
        SchedulerConfig(fill_free_pages=fill),
        Traits(predicts=True, eager_copies=eager),
    )
    found = reason_for_copy(
        model(copies=1),
        config,
        traits,
        policy(),
        refusal=refusal,
        any_idle=True,
        lag=Lag(),
        now_ns=0,
    )
    assert found is expected


@pytest.mark.parametrize("wanted", [False, True])
def test_a_cold_model_is_loaded_for_nobody_unless_another_is_wanted_more(wanted: bool) -> None:
    refusal = None if wanted else Refusal.COLD
    reason = Reason.WANTED if wanted else Reason.REFUSED_COLD

    def ask(asked: Model, chooser: Policy) -> Reason | None:
        config = SchedulerConfig()
        return reason_for_copy(
            asked, config, EAGER, chooser, refusal=refusal, wanted=wanted, lag=Lag(), now_ns=0
        )

    assert ask(model(copies=0), policy()) is reason
    assert ask(model(copies=1), policy()) is None
    busy = policy()
    assert busy.want_load(model(copies=0, waiting=1), 0)
    assert ask(model(copies=0), busy) is None
