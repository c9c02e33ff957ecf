"""Quotas of tenants, without a clock: token buckets, what is open at once, bounds of SLOs, and who is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import EdfMhConfig, SchedulerConfig
from controller.core.quotas import NAMED_MAX, OTHERS, OTHERS_MAX, Quota, Quotas, TenantUse

SLO_NS = 100 * NS_PER_MS


def admitted(use: TenantUse, times_ns: list[int], num_bytes: int = 0) -> list[int]:
    """At which of some times a request is let in, each over at once."""
    entered = []
    for now_ns in times_ns:
        if use.enter(now_ns, num_bytes, SLO_NS) is None:
            use.leave(num_bytes)
            entered.append(now_ns)
    return entered


def test_a_burst_is_let_in_and_then_the_rate() -> None:
    use = TenantUse(Quota(rate_rps=10, burst=3))
    each_ms = [ms * NS_PER_MS for ms in range(1000)]
    found = admitted(use, each_ms)
    assert found[:3] == each_ms[:3]
    assert len(found) == 3 + 9
    assert found[3:] == [ms * NS_PER_MS for ms in range(100, 1000, 100)]


def test_a_refusal_says_when_a_retry_helps_and_it_does() -> None:
    use = TenantUse(Quota(rate_rps=4, burst=1))
    assert use.enter(0, 0, SLO_NS) is None
    exceeded = use.enter(NS_PER_MS, 0, SLO_NS)
    assert exceeded is not None
    assert (exceeded.bound, exceeded.expected, exceeded.retry_ns) == (
        "rate_rps",
        4,
        249 * NS_PER_MS,
    )
    assert exceeded.retry_ns is not None
    assert use.enter(NS_PER_MS + exceeded.retry_ns - 1, 0, SLO_NS) is not None
    assert use.enter(NS_PER_MS + exceeded.retry_ns, 0, SLO_NS) is None


@given(
    rate=st.floats(0.01, 1e6),
    burst=st.integers(1, 1000),
    gaps=st.lists(st.integers(0, NS_PER_S), max_size=200),
)
def test_no_more_than_burst_and_rate_get_in_whatever_comes(
    rate: float, burst: int, gaps: list[int]
) -> None:
    use = TenantUse(Quota(rate_rps=rate, burst=burst))
    now_ns, times = 0, []
    for gap in gaps:
        now_ns += gap
        times.append(now_ns)
    found = admitted(use, times)
    for first in range(0, len(found), 7):
        for last in range(first, len(found), 5):
            over_ns = found[last] - found[first]
            # Each interval is rounded to a nanosecond.
            assert last - first + 1 <= burst + over_ns * rate / NS_PER_S * 1.001 + 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=100))
def test_what_is_open_is_never_more_than_its_bounds(steps: list[tuple[bool, int]]) -> None:
    use = TenantUse(Quota(open_requests=3, open_bytes=150))
    inside: list[int] = []
    for comes, num_bytes in steps:
        if comes:
            exceeded = use.enter(0, num_bytes, SLO_NS)
            fits = len(inside) < 3 and sum(inside) + num_bytes <= 150
            assert (exceeded is None) is fits
            if fits:
                inside.append(num_bytes)
        elif inside:
            use.leave(inside.pop())
        assert (use.num_open, use.num_bytes) == (len(inside), sum(inside))


@pytest.mark.parametrize(
    ("slo_ms", "bound"), [(9, "slo_ns_min"), (10, None), (500, None), (501, "slo_ns_max")]
)
def test_an_slo_outside_its_bounds_is_refused_with_their_name(
    slo_ms: int, bound: str | None
) -> None:
    use = TenantUse(Quota(slo_ns_min=10 * NS_PER_MS, slo_ns_max=500 * NS_PER_MS))
    exceeded = use.enter(0, 0, slo_ms * NS_PER_MS)
    assert (exceeded and exceeded.bound) == bound
    assert exceeded is None or (exceeded.found, exceeded.retry_ns) == (slo_ms * NS_PER_MS, None)


def test_a_refused_request_takes_nothing_of_the_quota() -> None:
    use = TenantUse(Quota(rate_rps=1, burst=2, open_bytes=10))
    for _ in range(50):
        assert use.enter(0, 11, SLO_NS) is not None
    assert len(admitted(use, [0, 0, 0])) == 2
    assert (use.num_admitted, use.num_refused) == (2, 51)


def test_one_tenants_use_is_nothing_to_another() -> None:
    quotas = Quotas({"gold": Quota(rate_rps=1, burst=5), OTHERS: Quota(rate_rps=1, burst=1)})

    def ask(name: str) -> bool:
        use = quotas.find(name, 0)
        assert use is not None
        return use.enter(0, 0, SLO_NS) is None

    assert [ask("flood") for _ in range(3)] == [True, False, False]
    assert [ask("gold") for _ in range(6)] == [True] * 5 + [False]
    assert ask("small")


def test_without_a_quota_for_others_they_have_none() -> None:
    quotas = Quotas({"gold": Quota(rate_rps=1)})
    assert quotas.find("silver", 0) is None
    assert quotas.num_kept == 0
    assert not Quotas()


def test_invented_names_are_bounded_and_do_not_multiply_a_quota_for_ever() -> None:
    quotas = Quotas({OTHERS: Quota(rate_rps=1, burst=1)})
    entered = 0
    for number in range(20 * OTHERS_MAX):
        use = quotas.find(f"name-{number}", 0)
        assert use is not None
        entered += use.enter(0, 0, SLO_NS) is None
        use.leave(0)
    assert quotas.num_kept == OTHERS_MAX
    assert entered == OTHERS_MAX + 1  # Whoever is too many shares one bucket.


def test_tenants_that_are_idle_are_forgotten_for_newcomers() -> None:
    quotas = Quotas({OTHERS: Quota(rate_rps=1, burst=1, open_requests=1)})
    for number in range(OTHERS_MAX):
        use = quotas.find(f"name-{number}", 0)
        assert use is not None
        assert use.enter(0, 0, SLO_NS) is None
        if number:
            use.leave(0)
    # The first still has a request open, so nobody can be forgotten before it.
    shared = quotas.find("newcomer", 2 * NS_PER_S)
    first = quotas.find("name-0", 2 * NS_PER_S)
    assert first is not None
    first.leave(0)
    own = quotas.find("newcomer", 2 * NS_PER_S)
    assert own is not shared
    assert [name for name, _ in quotas.uses()].count("newcomer") == 1
    assert quotas.num_kept == OTHERS_MAX


def test_other_quotas_hold_from_the_next_request_and_what_is_open_counts() -> None:
    quotas = Quotas({"gold": Quota(open_requests=5)})
    use = quotas.find("gold", 0)
    assert use is not None
    assert all(use.enter(0, 0, SLO_NS) is None for _ in range(5))
    quotas.bind({"gold": Quota(open_requests=3)})
    again = quotas.find("gold", 0)
    assert again is use
    exceeded = use.enter(0, 0, SLO_NS)
    assert exceeded is not None
    assert (exceeded.found, exceeded.expected) == (6, 3)
    for _ in range(3):
        use.leave(0)
    assert use.enter(0, 0, SLO_NS) is None
    quotas.bind({})
    assert quotas.find("gold", 0) is None


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"rate_rps": 0}, "rate_rps: found 0, expected 1e-06 to 1000000000"),
        ({"rate_rps": float("nan")}, "rate_rps: found nan"),
        ({"open_requests": -1}, "open_requests: found -1"),
        ({"weight": 101}, "weight: found 101, expected 0.01 to 100"),
        ({"rate_rps": 1e-310}, "rate_rps: found 1e-310, expected 1e-06"),
        ({"weight": 1e-310}, "weight: found 1e-310, expected 0.01"),
        ({"burst": 5}, "burst: found without rate_rps"),
        ({"slo_ns_min": 5, "slo_ns_max": 4}, "slo_ns_min: found 5, expected 4 at most"),
        ({"open_bytes": True}, "open_bytes: found True"),
    ],
)
def test_a_quota_that_cannot_be_is_refused_by_name(bounds: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Quota(**bounds)


def test_more_tenants_than_may_be_named_change_nothing() -> None:
    quotas = Quotas({"gold": Quota(rate_rps=1)})
    too_many = {f"tenant-{number}": Quota(rate_rps=1) for number in range(NAMED_MAX + 1)}
    with pytest.raises(ConfigError, match=f"found {NAMED_MAX + 1} tenants, expected {NAMED_MAX}"):
        quotas.bind(too_many)
    assert list(quotas.quotas) == ["gold"]


def test_the_weights_of_quotas_are_those_of_the_settings_otherwise() -> None:
    quotas = Quotas(
        {"gold": Quota(weight=4), "silver": Quota(rate_rps=5), OTHERS: Quota(rate_rps=2)}
    )
    assert quotas.weights == {"gold": 4}
    with pytest.raises(ConfigError, match="weight"):
        quotas.bind({OTHERS: Quota(weight=2)})
    SchedulerConfig(edf_mh=EdfMhConfig(tenant_weights=quotas.weights))
