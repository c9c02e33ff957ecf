from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from traces import arrivals
from traces.arrivals import (
    NS_PER_MINUTE,
    WINDOW_NS,
    Arrivals,
    Bursty,
    ClosedLoop,
    EvenReplay,
    FixedRate,
    Poisson,
    Recorded,
    Source,
    TraceReplay,
    Workload,
    merge,
)

SLO_NS = 100 * NS_PER_MS
HOUR_NS = 3600 * NS_PER_S


def counts(*rows: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.array(rows, np.int32)


def each(num: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(num)


def one(source: Source, num_models: int = 8) -> Workload:
    return Workload(models=tuple(f"m{index}" for index in range(num_models)), sources=(source,))


def times_s(source: Source) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([request.time_ns for request in one(source)]) / NS_PER_S


POISSON = Poisson(models=range(4), rate_rps=50.0, slo_ns=SLO_NS, end_ns=100 * NS_PER_S, seed=1)
SOURCES: list[Source] = [
    POISSON,
    FixedRate(
        models=(0, 1, 2), rate_rps=30, slo_ns=1, jitter_ns=50 * NS_PER_MS, end_ns=90 * NS_PER_S
    ),
    Bursty(
        models=(5,),
        rate_rps=200,
        burst_ns=2 * NS_PER_S,
        pause_ns=3 * NS_PER_S,
        slo_ns=2,
        begin_ns=7,
        end_ns=95 * NS_PER_S,
        seed=3,
    ),
    TraceReplay(counts=counts([600, 0], [5, 900], [0, 1]), models=each(3), slo_ns=3, seed=4),
    EvenReplay(counts=counts([1, 12], [60, 0]), models=each(2), slo_ns=4),
    Recorded(
        times_ns=np.array([5, 3, 90]) * NS_PER_S, models=each(3), slo_ns=5, end_ns=99 * NS_PER_S
    ),
]
EVERYTHING = Workload(
    models=tuple(f"m{index}" for index in range(8)),
    sources=tuple(SOURCES),
    closed_loops=(ClosedLoop(model=6, concurrency=3, slo_ns=9, end_ns=50 * NS_PER_S),),
)


def test_requests_come_in_order_of_time() -> None:
    times = [request.time_ns for request in EVERYTHING]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < EVERYTHING.end_ns == 120 * NS_PER_S


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_a_source_keeps_to_its_time_and_its_models(source: Source) -> None:
    requests = list(one(source))
    assert requests
    assert all(source.begin_ns <= request.time_ns < source.end_ns for request in requests)
    assert {request.model for request in requests} <= set(np.asarray(source.models).tolist())
    assert {request.slo_ns for request in requests} == {source.slo_ns}


def test_a_workload_is_repeated_exactly_by_itself_and_by_its_pickle() -> None:
    first = list(EVERYTHING)
    assert first == list(EVERYTHING)
    assert first == list(pickle.loads(pickle.dumps(EVERYTHING)))


def test_another_seed_gives_other_requests_and_gives_them_repeatably() -> None:
    anew = EVERYTHING.reseeded(1)
    assert list(anew) != list(EVERYTHING)
    assert list(anew) == list(EVERYTHING.reseeded(1))
    assert list(anew) != list(EVERYTHING.reseeded(2))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_as_many_requests_come_as_are_expected(source: Source) -> None:
    workload = one(source).scaled(3.5)
    samples = [len(list(workload.reseeded(seed))) for seed in range(12)]
    expected = workload.expected_requests()
    # Four standard errors, or what jitter and rounding cost at the end.
    assert np.mean(samples) == pytest.approx(
        expected, abs=max(6, 4 * np.std(samples) / np.sqrt(12))
    )


def test_the_gaps_of_a_poisson_process_are_exponential_across_windows() -> None:
    source = replace(POISSON, rate_rps=2.0, end_ns=20_000 * NS_PER_S)
    assert source.end_ns > 100 * WINDOW_NS
    gaps = np.diff(times_s(source))
    assert np.mean(gaps) == pytest.approx(0.5, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.5, rel=0.03)
    assert np.mean(gaps > 1.0) == pytest.approx(np.exp(-2), rel=0.05)


def test_a_poisson_source_shares_its_rate_among_its_models() -> None:
    models = [request.model for request in one(replace(POISSON, rate_rps=1000))]
    shares = np.bincount(models) / len(models)
    assert shares == pytest.approx([0.25] * 4, abs=0.01)


def test_a_fixed_rate_comes_after_one_period_and_in_turn() -> None:
    source = FixedRate(models=(0, 1), rate_rps=4.0, slo_ns=1, end_ns=NS_PER_S + 1)
    assert [(r.time_ns, r.model) for r in one(source)] == [
        (250 * NS_PER_MS, 0),
        (500 * NS_PER_MS, 1),
        (750 * NS_PER_MS, 0),
        (1000 * NS_PER_MS, 1),
    ]


def test_a_fixed_rate_does_not_drift_and_is_late_by_its_jitter_at_most() -> None:
    source = FixedRate(
        models=(0,), rate_rps=3.0, slo_ns=1, jitter_ns=20 * NS_PER_MS, end_ns=10_000 * NS_PER_S
    )
    times = times_s(source)
    late = times - np.arange(1, len(times) + 1) / 3.0
    assert late.min() >= -1e-6
    assert 0.019 < late.max() <= 0.02


def test_a_fixed_rate_of_zero_sends_nothing() -> None:
    assert list(one(FixedRate(models=(0,), rate_rps=0.0, slo_ns=1, end_ns=HOUR_NS))) == []


def test_bursts_are_burstier_than_poisson() -> None:
    source = Bursty(
        models=(0,),
        rate_rps=100,
        burst_ns=NS_PER_S,
        pause_ns=4 * NS_PER_S,
        slo_ns=1,
        end_ns=HOUR_NS,
        seed=5,
    )
    per_second = np.bincount(times_s(source).astype(int), minlength=3600)
    assert per_second.mean() == pytest.approx(20.0, rel=0.1)
    # Mean pause of 4 s: a quarter of the seconds or more lie wholly in one.
    assert np.mean(per_second == 0) > 0.5
    assert per_second.var() / per_second.mean() > 20


def test_begins_in_a_burst_as_often_as_bursts_take_of_the_time() -> None:
    def at_once(seed: int) -> bool:
        source = Bursty(
            models=(0,),
            rate_rps=1e5,
            burst_ns=NS_PER_S,
            pause_ns=3 * NS_PER_S,
            slo_ns=1,
            end_ns=NS_PER_MS,
            seed=seed,
        )
        return bool(list(one(source)))

    assert np.mean([at_once(seed) for seed in range(400)]) == pytest.approx(0.25, abs=0.07)


class TestTraceReplay:
    def test_counts_become_rates_minute_by_minute(self) -> None:
        minutes = [[0, 6000, 0, 600, 60_000], [3000, 0, 0, 0, 10]]
        source = TraceReplay(counts=counts(*minutes), models=each(2), slo_ns=1, seed=6)
        table = np.zeros((2, 5), int)
        for request in one(source):
            table[request.model, request.time_ns // NS_PER_MINUTE] += 1
        expected = np.array(minutes)
        assert np.all(np.abs(table - expected) <= 5 * np.sqrt(expected))

    def test_arrivals_are_uniform_within_a_minute(self) -> None:
        source = TraceReplay(counts=counts([60_000]), models=each(1), slo_ns=1, seed=7)
        per_second = np.bincount(times_s(source).astype(int), minlength=60)
        assert per_second.mean() == pytest.approx(1000, rel=0.02)
        assert per_second.var() == pytest.approx(1000, rel=0.6)

    def test_a_gap_goes_on_over_minutes_at_the_rate_of_each(self) -> None:
        # 0.5 expected per minute: gaps span minutes, and are exponential only if nothing is lost.
        source = TraceReplay(
            counts=np.ones((1, 15_000), np.int32), models=each(1), slo_ns=1, seed=8, scale=0.5
        )
        gaps = np.diff(times_s(source))
        assert np.mean(gaps) == pytest.approx(120, rel=0.04)
        assert np.std(gaps) == pytest.approx(120, rel=0.06)

    def test_minutes_of_zero_stretch_a_gap_but_do_not_shorten_it(self) -> None:
        # Without the silent minutes the times are those of an unbroken process of one rate.
        row = [2, 0, 0] * 5_000
        source = TraceReplay(counts=counts(row), models=each(1), slo_ns=1, seed=9)
        times = times_s(source)
        minute, second = np.divmod(times, 60)
        assert np.all(minute % 3 == 0)
        gaps = np.diff(minute // 3 * 60 + second)
        assert np.mean(gaps) == pytest.approx(30, rel=0.04)
        assert np.std(gaps) == pytest.approx(30, rel=0.06)

    def test_functions_are_independent(self) -> None:
        source = TraceReplay(
            counts=np.full((2, 2000), 5, np.int32), models=each(2), slo_ns=1, seed=10
        )
        table = np.zeros((2, 2000))
        for request in one(source):
            table[request.model, request.time_ns // NS_PER_MINUTE] += 1
        assert abs(float(np.asarray(np.corrcoef(table))[0, 1])) < 0.08

    def test_several_functions_may_share_a_model(self) -> None:
        source = TraceReplay(
            counts=counts([600], [600]), models=np.array([3, 3]), slo_ns=1, seed=11
        )
        assert {request.model for request in one(source)} == {3}

    def test_counts_and_models_must_belong_together(self) -> None:
        with pytest.raises(ValueError, match="one row for each of 3 functions"):
            TraceReplay(counts=counts([1], [2]), models=each(3), slo_ns=1, seed=0)


class TestEvenReplay:
    def test_firings_are_evenly_spaced_from_second_zero(self) -> None:
        source = EvenReplay(counts=counts([1, 0, 3]), models=each(1), slo_ns=1)
        assert times_s(source).tolist() == [0, 120, 140, 160]

    def test_scaled_down_the_share_is_kept_and_functions_do_not_round_together(self) -> None:
        source = EvenReplay(
            counts=np.ones((100, 30), np.int32), models=each(100) % 8, slo_ns=1, scale=0.1
        )
        per_minute = np.bincount((times_s(source) // 60).astype(int), minlength=30)
        assert per_minute.sum() == 300
        assert per_minute.max() < 30


class TestRecorded:
    SOURCE = Recorded(
        times_ns=np.arange(1000) * NS_PER_S, models=each(1000) % 3, slo_ns=1, end_ns=2000 * NS_PER_S
    )

    def test_times_are_those_recorded(self) -> None:
        assert times_s(self.SOURCE).tolist() == list(range(1000))

    def test_scaled_down_some_are_left_out_and_none_is_moved(self) -> None:
        times = times_s(replace(self.SOURCE, scale=0.3))
        assert len(times) == pytest.approx(300, abs=60)
        assert set(times) <= set(range(1000))

    def test_scaled_up_the_repetitions_are_spread_over_a_minute(self) -> None:
        times = times_s(replace(self.SOURCE, scale=3.0))
        assert len(times) == 3000
        assert set(range(1000)) <= set(times)
        assert times.max() < 999 + 60


def test_scaling_multiplies_rates_and_leaves_closed_loops() -> None:
    double = EVERYTHING.scaled(2.0).scaled(1.5)
    assert double.expected_requests() == pytest.approx(3 * EVERYTHING.expected_requests())
    assert double.closed_loops == EVERYTHING.closed_loops


def test_scaling_by_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="scale is -50"):
        one(POISSON).scaled(-50)


def test_a_gap_of_years_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = np.array([0, NS_PER_S, 30 * 365 * 24 * HOUR_NS])
    source = Recorded(times_ns=times_ns, models=each(3), slo_ns=1, end_ns=1 << 61)
    split, looks = arrivals._split, 0

    def counted(pending: list[Arrivals], until_ns: int) -> tuple[Arrivals, Arrivals]:
        nonlocal looks
        looks += 1
        assert looks < 5
        return split(pending, until_ns)

    monkeypatch.setattr(arrivals, "_split", counted)
    assert [request.time_ns for request in one(source)] == times_ns.tolist()


def test_merged_sources_keep_their_arrivals() -> None:
    left = Workload(models=("a", "b", "c", "d"), sources=(POISSON,))
    right = Workload(
        models=("d", "e"),
        sources=(replace(POISSON, models=(0, 1), seed=2, slo_ns=7),),
        closed_loops=(ClosedLoop(model=1, concurrency=1, slo_ns=1, end_ns=1),),
    )
    both = merge(left, right)
    assert both.models == ("a", "b", "c", "d", "e")
    assert both.closed_loops[0].model == 4
    named = [(r.time_ns, both.models[r.model], r.slo_ns) for r in both]
    apart = [(r.time_ns, w.models[r.model], r.slo_ns) for w in (left, right) for r in w]
    assert named == sorted(apart, key=lambda request: request[0])


def test_a_slice_has_the_requests_of_the_whole() -> None:
    begin_ns, end_ns = 13 * NS_PER_S + 5, 61 * NS_PER_S
    sliced = EVERYTHING.sliced(begin_ns, end_ns)
    assert list(sliced) == [
        request._replace(time_ns=request.time_ns - begin_ns)
        for request in EVERYTHING
        if begin_ns <= request.time_ns < end_ns
    ]
    assert sliced.end_ns == end_ns - begin_ns
    assert sliced.closed_loops[0].end_ns == 50 * NS_PER_S - begin_ns


def test_slices_can_be_sliced_scaled_merged_and_drawn_anew() -> None:
    inner = EVERYTHING.sliced(10 * NS_PER_S, 80 * NS_PER_S).sliced(NS_PER_S, 30 * NS_PER_S)
    assert list(inner) == list(EVERYTHING.sliced(11 * NS_PER_S, 40 * NS_PER_S))
    assert inner.scaled(2).expected_requests() == pytest.approx(2 * inner.expected_requests())
    assert list(inner.reseeded(1)) != list(inner)
    assert len(merge(inner, inner).sources) == 2 * len(inner.sources)


def test_expected_requests_of_parts_add_up() -> None:
    whole = EVERYTHING.expected_requests()
    cut_ns = 47 * NS_PER_S
    parts = EVERYTHING.expected_requests(0, cut_ns) + EVERYTHING.expected_requests(cut_ns)
    assert parts == pytest.approx(whole)


def test_a_source_that_begins_late_is_not_asked_before() -> None:
    late = replace(POISSON, begin_ns=1000 * HOUR_NS, end_ns=1000 * HOUR_NS + NS_PER_S)
    first = next(iter(one(late)))
    assert first.time_ns >= 1000 * HOUR_NS


def test_an_endless_workload_starts_at_once() -> None:
    endless = one(replace(POISSON, rate_rps=5000, end_ns=10**9 * NS_PER_S))
    assert len(list(islice(endless, 1000))) == 1000


def test_closed_loop_clients_start_within_their_jitter() -> None:
    loop = ClosedLoop(
        model=0,
        concurrency=100,
        slo_ns=1,
        begin_ns=5,
        end_ns=NS_PER_S,
        start_jitter_ns=1000,
        seed=1,
    )
    starts = loop.starts_ns()
    assert len(starts) == 100
    assert starts == sorted(starts) == loop.starts_ns()
    assert 5 <= starts[0] < starts[-1] < 1005


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="model 3: expected 0 to 1"):
        Workload(models=("a", "b"), sources=(POISSON,))


def test_rates_and_slos_must_make_sense() -> None:
    with pytest.raises(ValueError, match="rate_rps is nan"):
        replace(POISSON, rate_rps=float("nan"))
    with pytest.raises(ValueError, match="slo_ns is 0"):
        replace(POISSON, slo_ns=0)
    with pytest.raises(ValueError, match="at least one"):
        replace(POISSON, models=())
    with pytest.raises(ValueError, match="concurrency is 0"):
        ClosedLoop(model=0, concurrency=0, slo_ns=1, end_ns=1)
