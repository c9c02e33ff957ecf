"""The simulator: repeats bit for bit, agrees with arithmetic, survives faults, decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES, ModelId
from controller.core import SchedulerConfig
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import OK, Telemetry
from experiments.simulator import (
    Case,
    Cluster,
    Faults,
    HostedModel,
    LostWorker,
    Network,
    Run,
    WorkerClock,
    WorkerKind,
    WrongProfile,
    copies_of,
    run,
    slower_kind,
)
from experiments.simulator.summary import Bucket, latency_class
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import ClosedLoop, Poisson, Recorded, Workload

MS = NS_PER_MS
US = NS_PER_US

ROW = ProfileRow(
    name="net",
    weights_bytes=PAGE_BYTES,
    load_ns=8 * MS,
    exec_ns={1: 2 * MS, 2: 3 * MS, 4: 5 * MS},
    input_bytes=1_000_000,
    output_bytes=500_000,
)
#: Nothing but what the profile says takes time, and nothing is kept free.
EXACT = SchedulerConfig(policy="clockwork", dispatch_delay_ns=0, margin_ns=0)
NO_DELAY = Network(delay_ns=0, client_delay_ns=0)
#: Copies take no time worth counting.
FAST_COPIES = 10**18


def requests_at(*times_ns: int, models: int = 1, slo_ns: int = 100 * MS) -> Workload:
    """Requests to the models in turn."""
    return Workload(
        models=tuple(f"net-{number}" for number in range(models)),
        sources=(
            Recorded(
                times_ns=np.array(times_ns, np.int64),
                models=np.arange(len(times_ns)) % models,
                slo_ns=slo_ns,
                end_ns=NS_PER_S,
            ),
        ),
    )


def busy(models: int = 3, rate_rps: float = 500, seed: int = 3) -> Workload:
    """More than one GPU can do, less than two can."""
    return Workload(
        models=tuple(f"net-{number}" for number in range(models)),
        sources=(
            Poisson(
                models=range(models), rate_rps=rate_rps, slo_ns=30 * MS, end_ns=NS_PER_S, seed=seed
            ),
        ),
        closed_loops=(ClosedLoop(model=0, concurrency=3, slo_ns=50 * MS, end_ns=NS_PER_S),),
    )


def case(workload: Workload, **changes: object) -> Case:
    cluster = Cluster(
        models=copies_of(ROW, len(workload.models)), num_pages=2, copy_bytes_per_s=FAST_COPIES
    )
    base = Case(workload=workload, cluster=cluster, duration_ns=NS_PER_S)
    return replace(base, **changes)  # type: ignore[arg-type]


def rows_of(given: Case) -> tuple[Run, list[RequestRow], list[ActionRow]]:
    telemetry = Telemetry()
    done = run(given, telemetry=telemetry, check=True)
    return done, list(telemetry.requests), list(telemetry.actions)


def noisy(given: Case) -> Case:
    """Everything random at once."""
    return replace(
        given,
        cluster=replace(given.cluster, noise=Noise(exec_sigma=0.05, load_sigma=0.1)),
        network=Network(jitter_ns=50 * US, client_jitter_ns=30 * US),
        faults=Faults(slow_probability=0.02, delay_probability=0.01, delay_ns=10 * MS),
    )


# --- repeatable -----------------------------------------------------------------------------------


def test_a_case_gives_the_same_rows_twice_and_others_with_another_seed() -> None:
    given = noisy(case(busy()))
    first, second = rows_of(given), rows_of(given)
    assert first == second
    # Without rows the summary is the same.
    assert run(given).summary == first[0].summary
    other = rows_of(replace(given, seed=1))
    assert other[2] != first[2]


def test_the_summary_is_what_the_rows_come_to() -> None:
    done, requests, actions = rows_of(noisy(case(busy())))
    total = done.summary.total()
    answers = [row for row in requests if row.outcome == OK]
    latencies = [row.departure_ns - row.arrival_ns for row in answers]
    done_well = [row for row in actions if row.error == "NONE"]
    assert total == Bucket(
        arrived=len(requests),
        answered=len(answers),
        refused=Counter(row.outcome for row in requests if row.outcome != OK),
        refusal_times=Counter(
            latency_class(row.departure_ns - row.arrival_ns)
            for row in requests
            if row.outcome != OK
        ),
        refusal_ns_max=max(
            row.departure_ns - row.arrival_ns for row in requests if row.outcome != OK
        ),
        cold_answered=sum(row.cold for row in answers),
        cold_models={row.model_id for row in answers if row.cold},
        batches=Counter(row.batch_size for row in done_well if row.type == "Infer"),
        loads=sum(row.type == "LoadWeights" for row in done_well),
        action_errors=Counter(row.error for row in actions if row.error != "NONE"),
        exec_ns=sum(row.exec.duration_ns for row in actions if row.exec),
        load_ns=sum(row.load.duration_ns for row in actions if row.load),
        latencies=Counter(map(latency_class, latencies)),
        latency_ns_max=max(latencies),
    )
    assert total.num_refused > 10
    assert total.answered > 100
    assert len(done.summary.buckets) > 1
    for number, bucket in enumerate(done.summary.buckets):
        begin_ns, end_ns = number * NS_PER_S, (number + 1) * NS_PER_S
        assert bucket.answered == sum(begin_ns <= row.departure_ns < end_ns for row in answers)
        assert bucket.exec_ns == sum(
            max(0, min(row.exec.end_ns, end_ns) - max(row.exec.begin_ns, begin_ns))
            for row in actions
            if row.exec
        )


# --- arithmetic -----------------------------------------------------------------------------------


def test_one_request_takes_its_load_its_execution_and_the_way() -> None:
    given = case(requests_at(MS, 50 * MS), scheduler=EXACT)
    done, requests, _ = rows_of(given)
    # There 0.1, load 8, execute 2, back 0.1; the second finds its model resident.
    assert [row.departure_ns - row.arrival_ns for row in requests] == [10_200 * US, 2_200 * US]
    assert [row.cold for row in requests] == [True, False]
    total = done.summary.total()
    assert (total.exec_ns, total.load_ns, total.loads) == (4 * MS, 8 * MS, 1)
    assert total.latency_ns(100) == 10_200 * US


def test_inputs_and_outputs_are_copied() -> None:
    cluster = Cluster(models=copies_of(ROW, 1), copy_bytes_per_s=10**9, copy_overhead_ns=10 * US)
    given = case(requests_at(0, 50 * MS), cluster=cluster, scheduler=EXACT, network=NO_DELAY)
    _, requests, actions = rows_of(given)
    # Input 1 ms + 10 us, execution 2 ms, output 0.5 ms + 10 us.
    assert requests[1].departure_ns - requests[1].arrival_ns == 3_520 * US
    infer = actions[-1]
    assert infer.input is not None
    assert infer.output is not None
    assert (infer.input.duration_ns, infer.output.duration_ns) == (1_010 * US, 510 * US)


def test_every_load_and_exec_begins_late_by_the_start_delay() -> None:
    cluster = Cluster(
        models=copies_of(ROW, 1), copy_bytes_per_s=FAST_COPIES, start_delay_ns=60 * US
    )
    given = case(requests_at(0, 0), cluster=cluster, network=NO_DELAY, scheduler=EXACT)
    _, requests, actions = rows_of(given)
    load, infer = actions
    assert load.load is not None
    assert infer.exec is not None
    assert (load.load.begin_ns, load.load.end_ns) == (60 * US, 60 * US + 8 * MS)
    assert infer.exec.begin_ns == load.load.end_ns + 60 * US
    assert infer.exec.duration_ns == 3 * MS
    assert {row.departure_ns for row in requests} == {infer.exec.end_ns}


def test_unlike_gpus_take_their_factors_and_are_predicted_to() -> None:
    factors = {"gpu0": 1.0, "gpu1": 2.5}
    given = case(busy(models=2), scheduler=EXACT)
    kinds = (WorkerKind(), slower_kind("slower", [ROW], 2.5))
    cluster = replace(given.cluster, num_workers=2, kinds=kinds)
    _, _, actions = rows_of(replace(given, cluster=cluster))
    infers = [row for row in actions if row.exec is not None]
    assert {row.worker_id for row in infers} == factors.keys()
    for row in infers:
        duration_ns = ROW.exec_ns[row.batch_size] * factors[row.worker_id]
        assert row.exec is not None
        assert row.exec.duration_ns == row.expected_duration_ns == duration_ns


def test_a_wrong_profile_is_announced_and_the_device_takes_what_it_takes() -> None:
    wrong = (WrongProfile(exec_factor=2, sizes=(1,)), WrongProfile(load_factor=0.5))
    given = case(requests_at(0), scheduler=EXACT, network=NO_DELAY)
    _, _, actions = rows_of(replace(given, faults=Faults(wrong_profiles=wrong)))
    load, infer = actions
    assert load.load is not None
    assert (load.expected_duration_ns, load.load.duration_ns) == (4 * MS, 8 * MS)
    assert infer.exec is not None
    assert (infer.expected_duration_ns, infer.exec.duration_ns) == (4 * MS, 2 * MS)
    assert wrong[0].of(ROW).exec_ns == {1: 4 * MS, 2: 3 * MS, 4: 5 * MS}
    other = Faults(wrong_profiles=(WrongProfile(exec_factor=2, worker=1),))
    assert other.announced(ROW, 0) == ROW != other.announced(ROW, 1)


def test_each_kind_of_worker_has_costs_of_its_own_and_may_lack_a_model() -> None:
    quick, slow, heavy = (replace(ROW, name=name) for name in ("quick", "slow", "heavy"))
    models = tuple(HostedModel(ModelId(row.name), row) for row in (quick, slow, heavy))
    here = replace(slow, exec_ns={size: 7 * ns for size, ns in slow.exec_ns.items()})
    kinds = (
        WorkerKind(name="card"),
        WorkerKind(name="processor", rows={"slow": here, "heavy": None}, num_pages=50),
    )
    cluster = Cluster(models=models, num_workers=2, kinds=kinds, copy_bytes_per_s=FAST_COPIES)
    source = Poisson(models=range(3), rate_rps=600, slo_ns=100 * MS, end_ns=NS_PER_S, seed=1)
    workload = Workload(models=tuple(m.model_id for m in models), sources=(source,))
    given = Case(workload=workload, cluster=cluster, duration_ns=NS_PER_S, scheduler=EXACT)
    _, _, actions = rows_of(given)
    infers = [row for row in actions if row.exec is not None]
    ran = {(row.worker_id, row.model_id) for row in infers}
    assert ("gpu1", "slow") in ran
    assert ("gpu1", "heavy") not in ran
    for row in infers:
        factor = 7 if (row.worker_id, row.model_id) == ("gpu1", "slow") else 1
        assert row.exec is not None
        assert row.exec.duration_ns == factor * ROW.exec_ns[row.batch_size]
    assert cluster.least_row(models[1]) == slow
    assert cluster.pages_of_worker(1) == 50


def test_tensors_wait_for_each_other_on_a_link() -> None:
    network = Network(delay_ns=0, client_delay_ns=0, bytes_per_s=10**9)
    workload = requests_at(0, 0, 50 * MS, 50 * MS, models=2)
    _, _, actions = rows_of(case(workload, scheduler=EXACT, network=network))
    first, second = [row for row in actions if row.type == "Infer" and row.sent_ns == 50 * MS]
    assert first.received_ns == 51 * MS
    assert second.received_ns == 52 * MS
    assert first.exec is not None
    assert first.result_ns - first.exec.end_ns == 500 * US


@pytest.mark.parametrize("clients", [8, 32])
def test_a_busy_link_slows_requests_down_and_nothing_else(clients: int) -> None:
    """Windows shorter than the way there had every action refused, sent again and refused again."""
    exec_ns = dict.fromkeys((1, 2, 4, 8, 16), 10 * US)
    row = replace(ROW, exec_ns=exec_ns, input_bytes=600_000, output_bytes=4000)
    # 800 inputs per second.
    given = case(
        Workload(
            models=("net-0",),
            closed_loops=(
                ClosedLoop(model=0, concurrency=clients, slo_ns=10 * NS_PER_S, end_ns=NS_PER_S),
            ),
        ),
        cluster=Cluster(models=copies_of(row, 1), copy_bytes_per_s=FAST_COPIES),
        network=Network(bytes_per_s=480_000_000, jitter_ns=100 * US),
    )
    done, _, actions = rows_of(given)
    total = done.summary.total()
    assert total.num_refused == 0
    assert total.answered >= 0.9 * 800
    late = sum(row.error == "TOO_LATE" for row in actions)
    assert late < 0.1 * len(actions)


def test_measured_delays_are_added_each_way_and_between_answer_and_request() -> None:
    loop = ClosedLoop(model=0, concurrency=1, slo_ns=100 * MS, end_ns=NS_PER_S // 2)
    network = Network(
        delay_ns=0,
        client_delay_ns=0,
        down_samples_ns=(200 * US, 400 * US),
        up_samples_ns=(300 * US,),
        client_samples_ns=(7 * US, 9 * US),
    )
    given = case(
        Workload(models=("net-0",), closed_loops=(loop,)), network=network, scheduler=EXACT
    )
    _, requests, actions = rows_of(given)
    infers = [action for action in actions if action.exec is not None]
    assert {row.received_ns - row.sent_ns for row in infers} == {200 * US, 400 * US}
    assert {row.result_ns - row.exec.end_ns for row in infers if row.exec} == {300 * US}
    turns = {after.arrival_ns - before.departure_ns for before, after in pairwise(requests)}
    assert turns == {7 * US, 9 * US}


def test_a_request_that_cannot_be_in_time_is_refused_at_once() -> None:
    given = case(requests_at(MS, slo_ns=5 * MS), scheduler=EXACT)
    done, requests, actions = rows_of(given)
    assert [(row.outcome, row.departure_ns) for row in requests] == [("COLD", MS)]
    assert done.summary.total().refused == {"COLD": 1}
    assert [row.type for row in actions if row.type == "Infer"] == []


def test_requests_of_one_instant_run_together() -> None:
    given = case(requests_at(*[MS] * 4), scheduler=EXACT, network=NO_DELAY)
    done, requests, _ = rows_of(given)
    assert {row.batch_size for row in requests} == {4}
    assert {row.departure_ns for row in requests} == {14 * MS}
    assert done.summary.total().batches == {4: 1}


def test_a_closed_loop_client_asks_again_a_round_trip_after_its_answer() -> None:
    workload = Workload(
        models=("net-0",),
        closed_loops=(ClosedLoop(model=0, concurrency=1, slo_ns=100 * MS, end_ns=30 * MS),),
    )
    _, requests, _ = rows_of(case(workload, scheduler=EXACT))
    assert requests[0].arrival_ns == 0
    gaps = [b.arrival_ns - a.departure_ns for a, b in pairwise(requests)]
    assert set(gaps) == {200 * US}
    assert max(row.arrival_ns for row in requests) < 30 * MS


def test_a_refused_client_asks_again_after_the_deadline_unless_told_otherwise() -> None:
    workload = Workload(
        models=("net-0",),
        closed_loops=(ClosedLoop(model=0, concurrency=1, slo_ns=MS, end_ns=20 * MS),),
    )
    _, requests, _ = rows_of(case(workload))
    assert {row.outcome for row in requests} == {"INFEASIBLE"}
    assert {b.arrival_ns - a.arrival_ns for a, b in pairwise(requests)} == {1_200 * US}
    _, requests, _ = rows_of(case(workload, refusal_pause_ns=0))
    assert {b.arrival_ns - a.arrival_ns for a, b in pairwise(requests)} == {200 * US}


def test_requests_are_counted_by_group_too() -> None:
    given = case(requests_at(0, 0, 0, models=2))
    done = run(given, groups={model.model_id: model.model_id for model in given.cluster.models})
    assert {name: group.total().answered for name, group in done.groups.items()} == {
        "net-0": 2,
        "net-1": 1,
    }


# --- windows and clocks ---------------------------------------------------------------------------


def test_no_step_begins_outside_its_window() -> None:
    done, _, actions = rows_of(noisy(case(busy())))
    assert done.summary.total().action_errors["TOO_LATE"] > 0
    for row in actions:
        for step in (row.load, row.exec):
            if step is not None:
                assert row.earliest_ns is not None
                assert row.latest_ns is not None
                assert row.earliest_ns <= step.begin_ns <= row.latest_ns


def test_execs_of_one_gpu_never_overlap() -> None:
    _, _, actions = rows_of(noisy(case(busy())))
    steps = sorted((row.exec.begin_ns, row.exec.end_ns) for row in actions if row.exec)
    assert all(a[1] <= b[0] for a, b in pairwise(steps))


def test_clock_offsets_change_nothing() -> None:
    given = case(busy())
    with_clocks = [
        replace(given, faults=Faults(clocks=(WorkerClock(offset_ns=offset_ns),)))
        for offset_ns in (7 * NS_PER_S, -3 * NS_PER_S)
    ]
    expected = rows_of(given)[1:]
    for other in with_clocks:
        assert rows_of(other)[1:] == expected


def test_drifting_clocks_are_followed() -> None:
    fast = WorkerClock(offset_ns=NS_PER_S, drift_ppb=50_000)
    given = case(busy(), faults=Faults(clocks=(fast,)))
    done, requests, _ = rows_of(given)
    plain = run(case(busy())).summary.total().answered
    # Not equal: in this overload a microsecond decides which batch is next.
    assert done.summary.total().answered == pytest.approx(plain, rel=0.05)
    assert {row.outcome for row in requests} <= {"OK", "COLD", "OVERLOADED", "LATE"}


# --- faults ---------------------------------------------------------------------------------------


def two_workers(workload: Workload, faults: Faults) -> Case:
    cluster = Cluster(
        models=copies_of(ROW, len(workload.models)),
        num_workers=2,
        num_pages=2,
        noise=Noise(exec_sigma=0.02),
    )
    return case(workload, cluster=cluster, faults=faults)


def each_has_one_response(requests: list[RequestRow], done: Run) -> None:
    assert done.num_unanswered == 0
    ids = [row.request_id for row in requests]
    assert sorted(ids) == list(range(1, len(ids) + 1))
    assert len(ids) == done.num_requests


def test_a_lost_worker_leaves_no_request_without_a_response() -> None:
    lost = LostWorker(worker=0, at_ns=300 * MS)
    done, requests, actions = rows_of(two_workers(busy(), Faults(lost_workers=(lost,))))
    each_has_one_response(requests, done)
    assert any(row.error == "WORKER_LOST" for row in actions)
    late = [row for row in requests if row.arrival_ns > 400 * MS and row.outcome == "OK"]
    assert {row.worker_id for row in late} == {"gpu1"}


def test_a_worker_that_comes_back_serves_again() -> None:
    lost = LostWorker(worker=0, at_ns=300 * MS, back_ns=500 * MS)
    done, requests, _ = rows_of(two_workers(busy(), Faults(lost_workers=(lost,))))
    each_has_one_response(requests, done)
    late = [row for row in requests if row.arrival_ns > 700 * MS and row.outcome == "OK"]
    assert {row.worker_id for row in late} == {"gpu0", "gpu1"}


def test_a_worker_may_be_back_before_its_loss_is_noticed() -> None:
    lost = LostWorker(worker=0, at_ns=300 * MS, back_ns=310 * MS)
    faults = Faults(lost_workers=(lost,), detection_ns=50 * MS)
    done, requests, _ = rows_of(two_workers(busy(), faults))
    each_has_one_response(requests, done)


def test_when_all_workers_are_gone_requests_are_refused() -> None:
    lost = tuple(LostWorker(worker=index, at_ns=300 * MS) for index in range(2))
    done, requests, _ = rows_of(two_workers(busy(), Faults(lost_workers=lost)))
    each_has_one_response(requests, done)
    assert {row.outcome for row in requests if row.arrival_ns > 400 * MS} == {"NO_WORKER"}


def test_lost_messages_cost_the_worker_its_registration_and_nobody_an_answer() -> None:
    faults = Faults(loss_probability=0.01, rejoin_ns=10 * MS)
    config = SchedulerConfig(action_timeout_ns=20 * MS)
    given = replace(two_workers(busy(), faults), scheduler=config)
    done, requests, actions = rows_of(given)
    each_has_one_response(requests, done)
    assert any(row.error == "WORKER_LOST" for row in actions)
    assert done.summary.total().answered > 0


def test_delayed_messages_delay_those_behind_them() -> None:
    faults = Faults(delay_probability=0.05, delay_ns=8 * MS)
    done, requests, actions = rows_of(two_workers(busy(), faults))
    each_has_one_response(requests, done)
    for worker in ("gpu0", "gpu1"):
        sent = sorted(
            (row.action_id, row.received_ns)
            for row in actions
            if row.worker_id == worker and row.error != "WORKER_LOST"
        )
        assert all(a[1] <= b[1] for a, b in pairwise(sent))


def test_slow_actions_are_slow() -> None:
    faults = Faults(slow_probability=1.0, slow_factor=3.0)
    _, _, actions = rows_of(case(requests_at(MS, slo_ns=500 * MS), faults=faults, scheduler=EXACT))
    durations = [step.duration_ns for row in actions if (step := row.exec or row.load)]
    assert durations == [24 * MS, 6 * MS]


@pytest.mark.parametrize("policy", ["clipper", "infaas"])
def test_the_policies_that_it_is_compared_with_run_too(policy: str) -> None:
    given = two_workers(busy(), Faults())
    done, requests, _ = rows_of(replace(given, scheduler=SchedulerConfig(policy=policy)))
    each_has_one_response(requests, done)
    assert done.summary.total().answered > 0


# --- what it is made of ---------------------------------------------------------------------------


def test_latency_classes_are_narrow_and_in_order() -> None:
    latencies = sorted({*range(2000), *(int(1.001**n) for n in range(20_000))})
    latencies = [latency for latency in latencies if latency < 1 << 50]
    classes = [latency_class(latency) for latency in latencies]
    assert all(a <= b for a, b in pairwise(classes))
    for latency in latencies:
        alone = Bucket(latencies=Counter([latency_class(latency)]), latency_ns_max=1 << 60)
        assert alone.latency_ns(50) == pytest.approx(latency, rel=0.004, abs=1)


def test_progress_is_told() -> None:
    told: list[int] = []
    run(case(busy()), on_progress=lambda p: told.append(p.simulated_ns), progress_ns=250 * MS)
    assert told[:4] == [250 * MS, 500 * MS, 750 * MS, 1000 * MS]


def test_cases_that_cannot_be_are_refused() -> None:
    workload = requests_at(0)
    with pytest.raises(ConfigError, match=r"asks for model 'net-0', which no worker has"):
        Case(
            workload=workload,
            cluster=Cluster(models=copies_of(replace(ROW, name="other"), 1)),
            duration_ns=1,
        )
    with pytest.raises(ConfigError, match=r"no models"):
        Cluster(models=())
    with pytest.raises(ConfigError, match=r"kinds of 1 workers, expected one for each of 2"):
        Cluster(models=copies_of(ROW, 1), num_workers=2, kinds=(WorkerKind(),))
    with pytest.raises(ConfigError, match=r"two different kinds have the same name"):
        Cluster(
            models=copies_of(ROW, 1), num_workers=2, kinds=(WorkerKind(), WorkerKind(num_pages=1))
        )
    with pytest.raises(ConfigError, match=r"exec_factor is nan, expected 0.01 to 100"):
        slower_kind("odd", [ROW], float("nan"))
    with pytest.raises(ConfigError, match=r"2 clocks for 1 workers"):
        case(workload, faults=Faults(clocks=(WorkerClock(), WorkerClock())))
    with pytest.raises(ConfigError, match=r"lost worker 1: there are 1"):
        case(workload, faults=Faults(lost_workers=(LostWorker(worker=1, at_ns=0),)))
    with pytest.raises(ConfigError, match=r"up_samples_ns has -3, expected 0 or more"):
        Network(up_samples_ns=(5, -3))
    with pytest.raises(ConfigError, match=r"slow_probability is 2, expected 0 to 1"):
        Faults(slow_probability=2)
