"""What the controller costs, charged on virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES
from controller.telemetry.tables import OK, Telemetry
from experiments.bench.controller_costs import Sample, figures_of
from experiments.results_file import write_results
from experiments.simulator import Case, Cluster, CpuCosts, Network, bottleneck, copies_of, run
from experiments.simulator.case_file import read_case
from experiments.simulator.costs import measured, sources
from experiments.simulator.cpu_core import CpuCore
from experiments.simulator.loop import Loop
from experiments.study.results_page import records
from modelzoo.profile import ProfileRow
from traces.arrivals import FixedRate, Workload

ROW = ProfileRow(
    name="net", weights_bytes=PAGE_BYTES, load_ns=NS_PER_MS, exec_ns={1: 2 * NS_PER_MS}
)
CASE_FILE = """
seconds = 1

[[models]]
row = "resnet50_v1b"

[[clients]]
kind = "poisson"
rate_rps = 100
slo_ms = 100
"""


def case(rate_rps: float, costs: CpuCosts, *, workers: int = 1, slo_ms: int = 20) -> Case:
    """Regular requests for one model on workers that all have room for it."""
    models = copies_of(ROW, 1)
    arrivals = FixedRate(
        models=(0,), rate_rps=rate_rps, slo_ns=slo_ms * NS_PER_MS, end_ns=NS_PER_S, seed=1
    )
    return Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=(arrivals,)),
        cluster=Cluster(models=models, num_workers=workers),
        duration_ns=NS_PER_S,
        network=Network(delay_ns=0),
        costs=costs,
    )


def test_the_core_does_one_thing_after_the_other_with_what_it_gives_rise_to() -> None:
    loop = Loop()
    core = CpuCore(loop)
    done: list[tuple[str, int]] = []

    def finish(name: str) -> None:
        done.append((name, loop.now_ns))
        if name == "first":
            done.append(("its action", core.charge(5)))

    core.take(10, finish, "first")
    core.take(100, finish, "second")
    assert len(core) == 2
    loop.run(1000)
    assert done == [("first", 10), ("its action", 15), ("second", 115)]
    core.take(1, finish, "third")
    loop.run(2000)
    assert done[-1] == ("third", 1001)
    assert len(core) == 0


def test_costs_are_part_of_each_latency() -> None:
    telemetry = Telemetry()
    costs = CpuCosts(
        front_ns=400 * NS_PER_US,
        request_ns=30 * NS_PER_US,
        action_ns=50 * NS_PER_US,
        result_ns=40 * NS_PER_US,
    )
    run(case(100, costs), telemetry=telemetry)
    free = Telemetry()
    run(case(100, CpuCosts()), telemetry=free)
    last, beside = telemetry.requests[-1], free.requests[-1]
    assert (last.outcome, beside.outcome) == (OK, OK)
    assert last.arrival_ns == beside.arrival_ns, "the arrival is the client's"
    assert (last.departure_ns - last.arrival_ns) - (
        beside.departure_ns - beside.arrival_ns
    ) == 520_000


def test_what_waited_too_long_for_the_core_is_refused() -> None:
    telemetry = Telemetry()
    overloaded = case(2000, CpuCosts(front_ns=NS_PER_MS), workers=8)
    done = run(overloaded, telemetry=telemetry)
    total = done.summary.total()
    assert total.arrived == total.answered + total.num_refused == len(telemetry.requests)
    assert done.num_unanswered == 0
    assert all(
        row.departure_ns <= row.arrival_ns + row.slo_ns
        for row in telemetry.requests
        if row.outcome == OK
    )
    assert total.answered < 0.2 * total.arrived
    # The last of two seconds' work waited one of them.
    assert total.refusal_ns(99) > 0.9 * NS_PER_S
    assert total.refusal_ns(50) == pytest.approx(NS_PER_S / 2, rel=0.1)
    part, busy = bottleneck(done.utilisations())
    assert part == "front"
    assert busy == pytest.approx(1, abs=0.01)
    # Without the charge the same cluster answers everything.
    assert run(replace(overloaded, costs=CpuCosts())).summary.total().answered == total.arrived


def test_the_busiest_part_is_named() -> None:
    little = CpuCosts(front_ns=100 * NS_PER_US, request_ns=200 * NS_PER_US)
    busy = run(case(400, little)).utilisations()
    assert busy["front"] == pytest.approx(0.04, abs=0.001)
    assert busy["controller"] == pytest.approx(0.08, abs=0.001)
    assert busy["EXEC"] == pytest.approx(0.8, abs=0.01)
    assert bottleneck(busy) == ("EXEC", busy["EXEC"])
    core = run(case(400, replace(little, request_ns=2 * NS_PER_MS), workers=4)).utilisations()
    assert bottleneck(core) == ("controller", core["front"] + core["controller"])


def test_tensors_count_for_the_link() -> None:
    given = case(100, CpuCosts())
    row = replace(ROW, input_bytes=1_000_000, output_bytes=0)
    models = copies_of(row, 1)
    given = replace(
        given,
        cluster=replace(given.cluster, models=models),
        network=Network(delay_ns=0, bytes_per_s=1_000_000_000),
    )
    # 100 times 1 ms in a second on one of two wires.
    assert run(given).utilisations()["link"] == pytest.approx(0.05, abs=0.001)


def test_a_case_file_charges_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(CASE_FILE)
    assert read_case(path).costs == CpuCosts()
    path.write_text('costs = "measured"\n' + CASE_FILE)
    assert read_case(path).costs == measured()
    path.write_text(CASE_FILE + "\n[costs]\nfront_ns = 1000\n")
    assert read_case(path).costs == CpuCosts(front_ns=1000)
    path.write_text(CASE_FILE + "\n[costs]\nfront_us = 1\n")
    with pytest.raises(ConfigError, match="front_us"):
        read_case(path)
    path.write_text('costs = "guessed"\n' + CASE_FILE)
    with pytest.raises(ConfigError, match=r"'guessed' - at `\$\.costs`"):
        read_case(path)


def test_measured_costs_add_up_to_what_the_process_was_recorded_to_take() -> None:
    found, costs = records(), measured()
    process_us = found["costs"]["single_us"]
    more_us = found["serve"]["core_us_4026x20"] - found["serve"]["core_us_15x1"]
    assert 1e6 / costs.requests_per_s(1) == pytest.approx(process_us + more_us, rel=0.02)
    assert costs.requests_per_s(4) > costs.requests_per_s(1)
    for source in sources():
        name, _, key = source.rstrip("]").partition(".json[")
        assert found[name][key] > 0


def test_recorded_costs_of_requests_and_actions_are_what_is_charged(tmp_path: Path) -> None:
    figures = {
        "serve": {"core_us_15x1": 17.0, "core_us_4026x20": 39.0},
        "costs": {"controller_request_us": 80.0, "controller_action_us": 31.0},
    }
    for name, content in figures.items():
        write_results(name, content, command="none", directory=tmp_path)
    assert measured(tmp_path) == CpuCosts(
        front_ns=63_000, request_ns=39_000, action_ns=15_500, result_ns=15_500
    )
    assert sources()[0] == "costs.json[controller_request_us]"


def sample(model: str, num_requests: int, num_actions: int) -> Sample:
    """A run in which a request took 50 us, and an action 30 us, of the controller; 70 us of the worker."""
    return Sample(
        model=model,
        controller_us=50.0 * num_requests + 30.0 * num_actions,
        worker_us=70.0 * num_actions,
        num_requests=num_requests,
        num_actions=num_actions,
    )


def test_two_models_tell_the_cost_of_requests_and_of_actions_apart() -> None:
    figures = figures_of([sample("single", 1000, 1000), sample("batched", 8000, 1000)])
    assert figures["controller_request_us"] == pytest.approx(50)
    assert figures["controller_action_us"] == pytest.approx(30)
    assert figures["worker_action_us"] == pytest.approx(70)
    assert figures["single_us"] == 80
    with pytest.raises(ValueError, match="expected at least half as many more"):
        figures_of([sample("single", 1000, 1000), sample("batched", 1000, 900)])
