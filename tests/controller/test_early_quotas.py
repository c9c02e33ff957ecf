"""What fronts refuse early because a tenant's rate is used up: only what the controller would refuse, and nearly all of that."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.wire.frames import PREFIX
from controller.core.quotas import OTHERS, OTHERS_MAX, Exceeded, Quota, Quotas, TenantUse
from controller.front.admission.early_quotas import TENANTS_MAX, EarlyQuotas
from controller.front.remote import link_frames

SLO_NS = 100 * NS_PER_MS


@dataclass
class Front:
    """A front that is so far from its controller, and what became of the requests of one tenant there."""

    way_ns: int
    spent: EarlyQuotas = field(default_factory=EarlyQuotas)
    #: When each was passed on without being answered, and when the front heard so.
    unanswered: list[tuple[int, int]] = field(default_factory=list)
    num_passed: int = 0
    num_early: int = 0
    #: When those came that were refused early, and would have been let in.
    wronged: list[int] = field(default_factory=list)


class World:
    """Fronts and a controller with one tenant's quota, on a time of their own."""

    def __init__(self, quota: Quota, ways_ns: Sequence[int]) -> None:
        self.use = TenantUse(quota)
        self.fronts = [Front(way_ns) for way_ns in ways_ns]
        #: When the controller let one in.
        self.admitted: list[int] = []
        self._now_ns = self._last = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []

    def play(self, comes: Sequence[tuple[int, int, bool]]) -> None:
        """Have requests come: when, at which front, and whether the controller has time for it."""
        for at_ns, which, has_time in comes:
            self._later(at_ns, lambda at=self.fronts[which], fits=has_time: self._come(at, fits))  # type: ignore[misc]
        while self._due:
            self._now_ns, _, step = heapq.heappop(self._due)
            step()

    def _later(self, at_ns: int, step: Callable[[], None]) -> None:
        self._last += 1
        heapq.heappush(self._due, (at_ns, self._last, step))

    def _come(self, front: Front, has_time: bool) -> None:
        came_ns = self._now_ns
        if front.spent.judge("gold", came_ns, SLO_NS) is None:
            self._last += 1
            ask_id = self._last
            front.spent.passed("gold", ask_id)
            front.num_passed += 1
            self._later(
                came_ns + front.way_ns, lambda: self._arrive(front, ask_id, came_ns, has_time)
            )
        else:
            front.num_early += 1
            self._later(came_ns + front.way_ns, lambda: self._ask_in_vain(front, came_ns, has_time))

    def _arrive(self, front: Front, ask_id: int, came_ns: int, has_time: bool) -> None:
        exceeded = self._enter(self.use) if has_time else None
        answered = has_time and exceeded is None
        if answered:
            self.admitted.append(self._now_ns)
        heard_ns = self._now_ns + front.way_ns
        if not answered:
            front.unanswered.append((came_ns, heard_ns))
        self._later(heard_ns, lambda: self._hear(front, ask_id, exceeded, answered))

    def _hear(self, front: Front, ask_id: int, exceeded: Exceeded | None, answered: bool) -> None:
        if exceeded is not None:
            assert exceeded.until_ns is not None
            front.spent.told("gold", exceeded.until_ns - 2 * front.way_ns, exceeded.expected)
        front.spent.over(ask_id, answered=answered)

    def _ask_in_vain(self, front: Front, came_ns: int, has_time: bool) -> None:
        """What the controller would have said to a request that its front has refused."""
        if has_time and self._enter(copy.copy(self.use)) is None:
            front.wronged.append(came_ns)

    def _enter(self, use: TenantUse) -> Exceeded | None:
        exceeded = use.enter(self._now_ns, 0, SLO_NS)
        if exceeded is None:
            use.leave(0)
        return exceeded


def times(gaps: Sequence[int]) -> list[int]:
    found, now_ns = [], 0
    for gap in gaps:
        now_ns += gap
        found.append(now_ns)
    return found


QUOTAS = st.builds(Quota, rate_rps=st.floats(1, 1e5), burst=st.integers(1, 20))
GAPS = st.integers(0, 5 * NS_PER_MS)
WAYS = st.integers(0, 3 * NS_PER_MS)


@given(quota=QUOTAS, way_ns=WAYS, gaps=st.lists(GAPS, max_size=150))
def test_the_only_front_refuses_nothing_that_its_controller_would_let_in(
    quota: Quota, way_ns: int, gaps: list[int]
) -> None:
    world = World(quota, [way_ns])
    world.play([(at_ns, 0, True) for at_ns in times(gaps)])
    assert world.fronts[0].wronged == []
    # So the tenant gets all that it gets where fronts know nothing.
    alone = TenantUse(quota)
    let_in = [at for at in times(gaps) if alone.enter(at + way_ns, 0, SLO_NS) is None]
    assert world.admitted == [at_ns + way_ns for at_ns in let_in]


@given(
    quota=QUOTAS,
    ways_ns=st.lists(WAYS, min_size=1, max_size=3),
    comes=st.lists(st.tuples(GAPS, st.integers(0, 2), st.booleans()), max_size=150),
)
def test_of_several_fronts_none_is_wrong_for_longer_than_its_way_there_and_back(
    quota: Quota, ways_ns: list[int], comes: list[tuple[int, int, bool]]
) -> None:
    world = World(quota, ways_ns)
    at_ns = times([gap for gap, _, _ in comes])
    world.play(
        [
            (at, which % len(ways_ns), fits)
            for at, (_, which, fits) in zip(at_ns, comes, strict=True)
        ]
    )
    for front in world.fronts:
        for came_ns in front.wronged:
            # It had passed one on, and had not heard yet that this one got nothing.
            assert any(passed <= came_ns <= heard for passed, heard in front.unanswered)


def test_a_flood_is_kept_from_the_controller_but_for_what_the_rate_gives() -> None:
    world = World(Quota(rate_rps=200, burst=10), [NS_PER_MS // 10])
    world.play([(n * 100_000, 0, True) for n in range(10_000)])  # 10,000 a second
    (front,) = world.fronts
    assert len(world.admitted) == 10 + 199
    # A burst and the rate, those that were on their way at first, and one before each token.
    assert front.num_passed <= 10 + 2 * 200 + 5
    assert front.num_early == 10_000 - front.num_passed


def test_fronts_share_a_flood_and_none_of_what_the_rate_gives_is_lost() -> None:
    world = World(Quota(rate_rps=200, burst=10), [NS_PER_MS // 10] * 3)
    world.play([(n * 33_333, n % 3, True) for n in range(30_000)])
    assert len(world.admitted) >= 10 + 198
    assert sum(front.num_passed for front in world.fronts) <= 10 + 3 * (2 * 200 + 5)


def test_what_the_controller_did_not_get_to_takes_no_token() -> None:
    spent = EarlyQuotas()
    spent.told("gold", 0, 1)
    for ask_id in range(5):
        assert spent.judge("gold", 0, SLO_NS) is None
        spent.passed("gold", ask_id)
        assert spent.judge("gold", 0, SLO_NS) == Exceeded("rate_rps", None, 1, retry_ns=NS_PER_S)
        spent.over(ask_id, answered=False)
    spent.passed("gold", 5)
    spent.over(5, answered=True)
    assert spent.judge("gold", 0, SLO_NS) is not None
    assert spent.take_refused() == {"gold": 6}
    assert spent.take_refused() == {}


def test_nobody_is_refused_of_whom_nothing_was_told_or_all_was_forgotten() -> None:
    spent = EarlyQuotas()
    spent.told("gold", NS_PER_S, 1)
    assert spent.judge("silver", 0, SLO_NS) is None
    spent.forget()
    assert spent.judge("gold", 0, SLO_NS) is None
    for number in range(TENANTS_MAX + 1):
        spent.told(f"tenant {number}", NS_PER_S, 1)
    assert spent.judge("tenant 0", 0, SLO_NS) is None
    assert spent.judge("tenant 1", 0, SLO_NS) is not None


def test_an_slo_that_a_tenant_may_not_have_is_refused_as_the_controller_does() -> None:
    use, early = TenantUse(Quota(slo_ns_min=10, slo_ns_max=20)), EarlyQuotas()
    for slo_ns in (5, 25):
        exceeded = use.enter(0, 0, slo_ns)
        assert exceeded is not None
        assert early.judge("gold", 0, slo_ns) is None
        early.told_slo("gold", round(exceeded.expected), is_least=exceeded.bound.endswith("min"))
    for slo_ns in (1, 9, 10, 15, 20, 21, 100):
        exceeded = use.enter(0, 0, slo_ns)
        assert early.judge("gold", 0, slo_ns) == exceeded
        assert early.judge("silver", 0, slo_ns) is None
    assert early.take_refused() == {"gold": 4}
    early.forget()
    assert early.judge("gold", 0, 1) is None


def test_what_was_refused_is_told_of_some_tenants_at_a_time() -> None:
    early = EarlyQuotas()
    for number in range(TENANTS_MAX + 10):
        early.told(f"tenant {number}", NS_PER_S, 1)
        early.judge(f"tenant {number}", 0, SLO_NS)
    told = [early.take_refused() for _ in range(3)]
    assert [len(each) for each in told] == [TENANTS_MAX, 10, 0]
    for each in told:
        beat = link_frames.FrontBeat(1, None, {}, {}, each, ())
        header = b"".join(link_frames.encode(beat))[PREFIX.size :]
        assert link_frames.decode_from_front(header) == beat


def test_of_a_bucket_that_several_share_nobody_says_until_when_it_is_empty() -> None:
    quotas = Quotas({OTHERS: Quota(rate_rps=1, burst=1)})
    for number in range(OTHERS_MAX):
        assert (use := quotas.find(f"tenant {number}", 0)) is not None
        assert use.enter(0, 0, SLO_NS) is None
    found = [quotas.find("late", 0), quotas.find("later", 0), quotas.find("tenant 7", 0)]
    outcomes = [use.enter(0, 0, SLO_NS) for use in found if use is not None]
    assert outcomes[0] is None
    assert [exceeded.until_ns for exceeded in outcomes if exceeded] == [None, NS_PER_S]
