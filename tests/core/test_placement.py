"""Where weights lie and batches run: which copies go first, and which kind of worker a model is left to."""

from __future__ import annotations

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S, ArchitectureId, GpuKind, ModelId, WorkerId
from controller.core import EdfMhConfig, SchedulerConfig
from controller.core.estimator import Estimates
from controller.core.link import LinkPlan
from controller.core.lost import Lost
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.eviction import NextUse
from controller.core.policies.suits import Suits
from controller.core.state import MANY_COPIES, Copy, Model, Readiness, WorkerState

MS = NS_PER_MS
CARD, PROCESSOR = GpuKind("card"), GpuKind("processor")


def worker(kind: GpuKind = CARD, *, number: int = 0, num_pages: int = 3) -> WorkerState:
    link = LinkPlan(least_ns=0, tolerance_ns=0)
    name = WorkerId(f"w{number}")
    return WorkerState(name, kind, num_pages, num_pages, number, link)


def model(number: int, **exec_ms: float) -> Model:
    """A model that a worker of each kind is ready for; by kind its time alone, twice that for a batch of four."""
    found = Model(ModelId(f"m{number}"), number)
    for place, (kind, ms) in enumerate(exec_ms.items()):
        estimates = Estimates(load_ns=8 * MS, exec_ns={1: int(ms * MS), 4: int(2 * ms * MS)})
        readiness = Readiness(1, ArchitectureId("a"), estimates)
        found.ready_on(worker(GpuKind(kind), number=place), readiness)
    return found


def full(names: int) -> tuple[WorkerState, list[Copy]]:
    """A worker whose pages are full of models, in order of use."""
    one = worker(num_pages=names)
    copies = []
    for number in range(names):
        here = Model(ModelId(f"m{number}"), number)
        estimates = Estimates(load_ns=8 * MS, exec_ns={1: 3 * MS})
        here.ready_on(one, Readiness(1, ArchitectureId("a"), estimates))
        copy = Copy(here, one, 1, estimates, resident=True)
        one.copies[here] = here.copies[one] = copy
        one.num_free_pages -= 1
        copies.append(copy)
    return one, copies


def ask(uses: NextUse, copy: Copy, *times_ms: int) -> None:
    for time_ms in times_ms:
        uses.asked(copy.model, time_ms * MS)
        copy.worker.touch(copy.model)


# --- what goes first ------------------------------------------------------------------------------


def test_the_timer_that_is_asked_next_the_latest_goes_first() -> None:
    uses = NextUse()
    one, copies = full(3)
    for number, copy in enumerate(copies):
        ask(uses, copy, 100 + 10 * number, 1100 + 10 * number)
    # They are asked again at 2,100, 2,110 and 2,120 ms: the first of them is also the least recently used.
    assert uses.victims(one, 1, 1200 * MS) == [copies[2]]
    assert uses.victims(one, 2, 1200 * MS) == [copies[2], copies[1]]
    assert NextUse(enabled=False).victims(worker(), 1, 0) == []


@pytest.mark.parametrize("timers", [False, True])
def test_a_copy_whose_model_has_another_goes_before_those_that_are_alone(timers: bool) -> None:
    uses = NextUse(enabled=timers)
    one, copies = full(4)
    for number, copy in enumerate(copies):
        ask(uses, copy, 100 + 10 * number, 1100 + 10 * number)
    spare = copies[1].model
    spare.copies[worker(number=1)] = Copy(spare, worker(number=1), 1, copies[1].estimates)
    assert uses.victims(one, 1, 1200 * MS) == [copies[1]]
    # It alone is too little, so all go as they do otherwise.
    farthest_first = [copies[3], copies[2]]
    assert uses.victims(one, 2, 1200 * MS) == (farthest_first if timers else copies[:2])
    copies[1].num_pins = 1
    assert uses.victims(one, 1, 1200 * MS) != [copies[1]]


def test_what_was_not_asked_for_longer_than_a_timer_will_not_be_goes_before_it() -> None:
    uses = NextUse()
    one, (timer, old, other) = full(3)
    ask(uses, old, 50, 90, 300)
    ask(uses, timer, 1000, 2000)
    ask(uses, other, 2100, 2110, 2400)
    assert uses.victims(one, 1, 2500 * MS) == [old]
    # When it was asked a moment ago, the timer is farther away.
    ask(uses, old, 2450)
    ask(uses, other, 2480)
    assert uses.victims(one, 1, 2500 * MS) == [timer]


def test_a_timer_that_does_not_come_is_none_any_more() -> None:
    uses = NextUse()
    one, (stopped, timer, other) = full(3)
    ask(uses, stopped, 1000, 2000)
    ask(uses, timer, 3800, 4800)
    ask(uses, other, 4900)
    assert uses.victims(one, 1, 4950 * MS) == [stopped]
    assert stopped.model.expected_ns == 3000 * MS
    ask(uses, stopped, 4960)
    assert stopped.model.expected_ns == 0


@pytest.mark.parametrize("reason", ["pinned", "loading"])
def test_a_copy_in_use_stays_however_far_away_its_next_use_is(reason: str) -> None:
    uses = NextUse()
    one, (timer, other) = full(2)
    ask(uses, other, 10)
    ask(uses, timer, 1000, 2000)
    if reason == "pinned":
        timer.num_pins = 1
    else:
        timer.resident = False
    assert uses.victims(one, 1, 2010 * MS) == [other]
    assert uses.victims(one, 2, 2010 * MS) is None
    timer.num_pins, timer.resident = 0, True
    found = uses.victims(one, 2, 2010 * MS)
    assert found is not None
    assert set(found) == {timer, other}


def test_the_heap_of_timers_stays_as_small_as_what_is_resident() -> None:
    uses = NextUse()
    one, copies = full(4)
    for cycle in range(1, 1000):
        for copy in copies:
            ask(uses, copy, 100 * cycle)
    assert len(one.timers) <= 64 + 4 * 4 + 1


def test_a_timer_is_loaded_ahead_where_all_that_it_displaces_is_farther_away() -> None:
    uses = NextUse()
    one, copies = full(2)
    late = Model(ModelId("late"), 9)
    late.ready_on(one, Readiness(1, ArchitectureId("a"), copies[0].estimates))
    for copy in copies:
        ask(uses, copy, 900, 1900)
    uses.asked(late, 1000 * MS)
    uses.asked(late, 2000 * MS)
    # It is expected at 3,000 ms, the others at 2,900.
    assert uses.expected(one, 2100 * MS, 2100 * MS) is None
    for copy in copies:
        ask(uses, copy, 2900)
    assert uses.expected(one, 2910 * MS, 2910 * MS) is late
    assert NextUse(prefetches=False).expected(one, 2910 * MS, 2910 * MS) is None


def test_a_timer_is_loaded_ahead_on_a_worker_that_has_it_whoever_looks_first() -> None:
    uses = NextUse()
    without, _ = full(2)
    having, (resident, _) = full(2)
    timer = Model(ModelId("timer"), 9)
    timer.ready_on(having, Readiness(1, ArchitectureId("a"), resident.estimates))
    uses.asked(timer, 1000 * MS)
    uses.asked(timer, 2000 * MS)
    assert uses.expected(without, 2950 * MS, 2950 * MS) is None
    assert uses.expected(having, 2950 * MS, 2950 * MS) is timer


def test_expected_uses_that_nobody_looks_at_do_not_pile_up() -> None:
    uses = NextUse()
    timer = Model(ModelId("timer"), 0)
    for number in range(10_000):
        uses.asked(timer, (number + 1) * MS)
    assert uses.num_expected <= 1025


def test_a_model_with_many_copies_is_no_timer_on_each_of_their_workers() -> None:
    uses = NextUse()
    _, (copy,) = full(1)
    workers = [worker(number=number) for number in range(MANY_COPIES)]
    for other in workers:
        copy.model.copies[other] = Copy(copy.model, other, 1, copy.estimates, resident=True)
    ask(uses, copy, 1000, 2000)
    assert not any(other.timers for other in workers)


def test_a_refused_model_takes_pages_of_copies_that_served_much_less_than_it_lost() -> None:
    policy = EdfMhPolicy(SchedulerConfig())
    one, (least_used, _) = full(2)
    hot = Model(ModelId("hot"), 9)
    for _ in range(4):
        hot.lost.count(NS_PER_S)
    # The victim was asked a second ago: a quarter of four lost is no more than that.
    assert policy.victims_of_refused(hot, one, 1, NS_PER_S) is None
    hot.lost.count(NS_PER_S)
    assert policy.victims_of_refused(hot, one, 1, NS_PER_S) == [least_used]
    hot.lost.count(NS_PER_S)
    assert policy.victims_of_refused(hot, one, 1, NS_PER_S + MS) is None, "asked a moment ago"
    least_used.num_pins = 1
    assert policy.victims_of_refused(hot, one, 2, 2 * NS_PER_S) is None
    without = EdfMhPolicy(SchedulerConfig(edf_mh=EdfMhConfig(take_pages=False)))
    least_used.num_pins = 0
    assert without.victims_of_refused(hot, one, 1, 3 * NS_PER_S) is None


def test_what_was_lost_fades() -> None:
    lost = Lost()
    for _ in range(8):
        lost.count(0)
    assert lost.of_late(NS_PER_S - 1) == 8
    assert lost.of_late(2 * NS_PER_S) == 2
    lost.count(NS_PER_S)
    assert lost.of_late(NS_PER_S) == 5


# --- which kind suits a model ---------------------------------------------------------------------


def known(*models: Model) -> Suits:
    """Suits that have seen each model, each once."""
    suits = Suits()
    for each in models:
        suits.better(each, CARD, 1, 0)
    return suits


def test_between_kinds_that_differ_by_one_factor_no_model_is_better_off() -> None:
    models = [model(number, card=ms, processor=2.5 * ms) for number, ms in enumerate((3, 5, 20))]
    suits = known(*models)
    for each in models:
        for kind in (CARD, PROCESSOR):
            for count in (1, 3, 4):
                assert suits.better(each, kind, count, NS_PER_S) == ()


def test_a_model_is_better_off_where_it_loses_least_beside_the_others() -> None:
    # Both are slower on the processor; the small one is by much less.
    small, large = model(0, card=4, processor=8), model(1, card=4, processor=80)
    suits = known(small, large)
    assert suits.better(small, CARD, 1, NS_PER_S) == (PROCESSOR,)
    assert suits.better(small, PROCESSOR, 1, NS_PER_S) == ()
    assert suits.better(large, PROCESSOR, 1, NS_PER_S) == (CARD,)


def test_others_leave_a_model_the_kind_that_it_needs() -> None:
    anywhere, needs_card = model(0, card=4, processor=8), model(1, card=10)
    suits = known(anywhere, needs_card)
    assert suits.better(anywhere, CARD, 1, NS_PER_S) == (PROCESSOR,)
    assert suits.better(needs_card, CARD, 1, NS_PER_S) == ()


def test_what_is_measured_changes_where_a_model_is_better_off() -> None:
    one, other = model(0, card=4, processor=8), model(1, card=4, processor=80)
    suits = known(one, other)
    assert suits.better(one, CARD, 1, NS_PER_S) == (PROCESSOR,)
    for estimates in one.kinds.values():
        if estimates.exec_ns[0] == 8 * MS:
            for _ in range(10):
                estimates.measured_exec(1, 80 * MS)
                estimates.measured_exec(4, 160 * MS)
    assert suits.better(one, CARD, 1, 2 * NS_PER_S) == ()


def test_a_removed_model_counts_no_more_for_the_others() -> None:
    small, large = model(0, card=4, processor=8), model(1, card=4, processor=80)
    suits = known(small, large)
    assert suits.better(large, PROCESSOR, 1, NS_PER_S) == (CARD,)
    small.removed = True
    for seconds in range(2, 5):  # each look at one model also looks at another
        found = suits.better(large, PROCESSOR, 1, seconds * NS_PER_S)
    assert found == ()
