"""Case files, and `clockwright simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clockwright.cli.main import app
from clockwright.errors import ClockwrightError, ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.bounds.simulated import Bounded, bound_of_case
from experiments.simulator import Case, LostWorker, WorkerClock, WrongProfile
from experiments.simulator.case_file import read_case
from traces.arrivals import Bursty, FixedRate, Poisson
from traces.arrivals_file import read_workload

CASES = Path(__file__).parents[2] / "experiments/simulator/cases"

SMALL = """
seconds = 0.5

[[models]]
row = "resnet50_v1b"
copies = 2

[[clients]]
kind = "poisson"
rate_rps = 200
slo_ms = 100
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "case.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted(CASES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_cases_that_come_along_can_be_read(path: Path) -> None:
    assert read_case(path).duration_ns > 0


def test_everything_in_a_file_reaches_the_case(tmp_path: Path) -> None:
    text = (
        "refusal_pause_ns = 5\n"
        + SMALL
        + """
[[clients]]
kind = "closed"
concurrency = 4
slo_ms = 2.5
start_jitter_ms = 10
row = "resnet50_v1b"

[[clients]]
kind = "fixed"
rate_rps = 10
slo_ms = 50
jitter_ms = 1
begin_s = 0.1
end_s = 0.2

[[clients]]
kind = "bursty"
rate_rps = 10
slo_ms = 50
burst_s = 0.1
pause_s = 0.2

[cluster]
num_workers = 2
noise = { exec_sigma = 0.01 }

[[cluster.kinds]]
name = "card"

[[cluster.kinds]]
name = "slower"
exec_factor = 2.5
num_pages = 9

[network]
delay_ns = 1_000
bytes_per_s = 1_000_000_000

[scheduler]
policy = "clipper"
batching = "quantile"
batch_delay_ns = 3_000_000
lookahead_ns = 2_000_000

[faults]
slow_probability = 0.5
clocks = [{ offset_ns = 5 }, { drift_ppb = -7 }]

[[faults.lost_workers]]
worker = 1
at_ns = 100

[[faults.wrong_profiles]]
exec_factor = 6
sizes = [8, 16]
"""
    )
    case = read_case(write(tmp_path, text), seconds=3, seed=9)
    assert (case.duration_ns, case.seed, case.refusal_pause_ns) == (3 * NS_PER_S, 9, 5)
    assert case.cluster.num_workers == 2
    card, slower = case.cluster.kinds
    row = case.cluster.models[0].row
    assert (card.name, card.row_of(row), case.cluster.pages_of_worker(0)) == ("card", row, 1376)
    scaled = slower.row_of(row)
    assert scaled is not None
    assert scaled.exec_ns == {size: round(2.5 * ns) for size, ns in row.exec_ns.items()}
    assert (scaled.load_ns, case.cluster.pages_of_worker(1)) == (row.load_ns, 9)
    assert (case.cluster.noise.exec_sigma, case.cluster.noise.load_sigma) == (0.01, 0.0)
    assert case.network.bytes_per_s == NS_PER_S
    assert (case.scheduler.policy, case.scheduler.lookahead_ns) == ("clipper", 2 * NS_PER_MS)
    assert (case.scheduler.batching, case.scheduler.batch_delay_ns) == ("quantile", 3 * NS_PER_MS)
    assert case.faults.lost_workers == (LostWorker(worker=1, at_ns=100),)
    assert case.faults.wrong_profiles == (WrongProfile(exec_factor=6, sizes=(8, 16)),)
    assert case.faults.clocks == (WorkerClock(offset_ns=5), WorkerClock(drift_ppb=-7))
    poisson, fixed, bursty = case.workload.sources
    assert isinstance(poisson, Poisson)
    assert (poisson.rate_rps, poisson.end_ns) == (200, 3 * NS_PER_S)
    assert isinstance(fixed, FixedRate)
    assert (fixed.begin_ns, fixed.end_ns) == (NS_PER_S // 10, NS_PER_S // 5)
    assert isinstance(bursty, Bursty)
    assert bursty.pause_ns == NS_PER_S // 5
    assert [loop.model for loop in case.workload.closed_loops] == [0, 1]
    assert len({loop.seed for loop in case.workload.closed_loops}) == 2
    assert case.workload.closed_loops[0].slo_ns == 2_500_000


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("seconds = 0.5", "", "found no `seconds`, expected how long"),
        ("seconds = 0.5", "seconds = -1", "Expected `float` >= 0.0 - at `$.seconds`"),
        ("seconds = 0.5", "seconds = 0", "duration_ns is 0, expected more than 0"),
        ("seconds = 0.5", "seconds = 0.5 0.5", "line 2"),
        ("resnet50_v1b", "resnet50_vx", "models[0]: row is 'resnet50_vx', expected one of"),
        ('row = "resnet50_v1b"', "", "models[0]: expected either `row` or `first`"),
        ('row = "resnet50_v1b"', "first = 99", "models[0]: first is 99, expected 1 to 64"),
        ("copies = 2", "copies = 0", "Expected `int` >= 1 - at `$.models[0].copies`"),
        ("poisson", "posson", "Invalid value 'posson' - at `$.clients[0].kind`"),
        ("rate_rps = 200", "rate_rps = -1", "clients[0]: rate_rps is -1"),
        (
            "rate_rps = 200",
            "rate_rps = '1'",
            "Expected `float`, got `str` - at `$.clients[0].rate_rps`",
        ),
        ("slo_ms = 100", "slo_ms = 0", "clients[0]: slo_ns is 0"),
        (
            "slo_ms = 100",
            "slo_ms = 100\njitter_ms = 1",
            "found 'jitter_ms' at `$.clients[0]`, expected one of",
        ),
    ],
)
def test_a_bad_case_is_refused_with_its_place(
    tmp_path: Path, before: str, after: str, problem: str
) -> None:
    assert SMALL.count(before) >= 1
    path = write(tmp_path, SMALL.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        read_case(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ("[cluster]\nmodels = 1", "found 'models' at `$.cluster`, expected one of"),
        (
            "[[cluster.kinds]]\nname = 'x'\nexec_factor = 0",
            "exec_factor is 0.0, expected 0.01 to 100",
        ),
        (
            "[[cluster.kinds]]\nname = 'x'\nworkers = -1",
            "Expected `int` >= 0 - at `$.cluster.kinds[0].workers`",
        ),
        (
            "[cluster]\nnum_workers = 3\n[[cluster.kinds]]\nname = 'x'",
            "found kinds of 1 workers, expected one for each of 3 workers",
        ),
        (
            "[faults]\nlost_workers = [{ worker = 0 }]",
            "missing required field `at_ns` - at `$.faults.lost_workers[0]`",
        ),
        ("[scheduler]\npolicy = 'best'", "policy is 'best', expected one of"),
        ("seed = -1", "Expected `int` >= 0 - at `$.seed`"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(tmp_path: Path, tables: str, problem: str) -> None:
    path = write(tmp_path, SMALL.replace("[[models]]", f"{tables}\n[[models]]"))
    with pytest.raises(ConfigError) as caught:
        read_case(path)
    assert problem in str(caught.value)


def test_a_missing_case_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: .*No such file"):
        read_case(tmp_path / "nowhere.toml")


def test_simulate_says_what_became_of_each_tenants_requests(tmp_path: Path) -> None:
    flood = SMALL.partition("[[clients]]")[2].replace("rate_rps = 200", "rate_rps = 2000")
    text = f'{SMALL}tenant = "ann"\n\n[[clients]]{flood}tenant = "flood"\n'
    path = str(write(tmp_path, text))
    found = json.loads(CliRunner().invoke(app, ["simulate", path, "--json"]).stdout)
    tenants = found["tenants"]
    assert list(tenants) == ["ann", "flood"]
    for key in ("requests", "answered"):
        assert sum(row[key] for row in tenants.values()) == found[key]
    assert sum(row["refused"] for row in tenants.values()) == sum(found["refused"].values())
    assert tenants["ann"]["answered"] > 0.8 * tenants["ann"]["requests"]
    assert tenants["flood"]["answered"] < 0.8 * tenants["flood"]["requests"]
    words = CliRunner().invoke(app, ["simulate", path]).stdout
    assert "tenant" in words
    assert "flood" in words


def test_simulate_prints_figures_and_writes_rows(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    arguments = ["simulate", str(path), "--json", "--seed=5", f"--telemetry={tmp_path / 'rows'}"]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    assert figures["seed"] == 5
    assert figures["requests"] == figures["answered"] + sum(figures["refused"].values()) > 50
    assert 0 < figures["latency_p50_ms"] <= figures["latency_p99_ms"] <= figures["latency_max_ms"]
    requests = (tmp_path / "rows" / "requests.csv").read_text().splitlines()
    assert len(requests) == figures["requests"] + 1
    actions = (tmp_path / "rows" / "actions.csv").read_text().splitlines()
    assert sum(",Infer," in line for line in actions) == sum(figures["batches"].values())
    # `clockwright load --trace` sends them again.
    played = read_workload(tmp_path / "rows" / "requests.csv", (), slo_ns=1)
    assert len(list(played)) == figures["requests"]
    assert figures["answered"] <= figures["bound"] <= figures["requests"]
    assert figures["bound_share"] == pytest.approx(figures["answered"] / figures["bound"])
    assert figures["bound_by"] == "GPU time"


def test_the_bound_that_is_printed_counts_what_takes_seconds(tmp_path: Path) -> None:
    def bounded(text: str) -> Bounded:
        return bound_of_case(read_case(write(tmp_path, text)))

    tight = SMALL.replace("slo_ms = 100", "slo_ms = 12").replace("copies = 2", "copies = 20")
    cold = tight + "[cluster]\nnum_pages = 7\n"
    assert bounded(cold).words == "GPU time, pages and loads"
    assert bounded(cold).answers < bounded(tight).answers  # type: ignore[operator]
    long = cold.replace("seconds = 0.5", "seconds = 30")
    assert bounded(long).words.startswith("GPU time; pages")
    assert bounded(SMALL.replace("seconds = 0.5", "seconds = 5000")) == Bounded(
        None, "more than 300,000 requests"
    )
    closed = SMALL.replace("poisson", "closed").replace("rate_rps = 200", "concurrency = 4")
    assert bounded(closed).words == "GPU time, in the densest batches"
    assert bounded(closed.replace("slo_ms = 100", "slo_ms = 3600000")).answers is None


def test_a_run_of_a_nanosecond_counts_what_it_began(tmp_path: Path) -> None:
    # Closed-loop clients ask at time 0, and their answers come later than a run so short.
    closed = SMALL.replace("poisson", "closed").replace("rate_rps = 200", "concurrency = 4")
    path = write(tmp_path, closed)
    outcome = CliRunner().invoke(app, ["simulate", str(path), "--json", "--seconds=1e-9"])
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    assert figures["requests"] == figures["answered"] + sum(figures["refused"].values())


def test_simulate_prints_a_table_for_people(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["simulate", str(write(tmp_path, SMALL)), "--seconds=0.2"])
    assert outcome.exit_code == 0, outcome.output
    for word in ("goodput rps", "latency p99 ms", "gpu utilisation", "edf_mh"):
        assert word in outcome.stdout


def test_another_process_gives_the_same_rows(tmp_path: Path) -> None:
    text = SMALL + "\n[cluster]\nnum_workers = 3\nnum_pages = 7\nnoise = { exec_sigma = 0.1 }\n"
    path = write(tmp_path, text.replace("copies = 2", "copies = 5").replace("200", "900"))
    rows = []
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-m", "clockwright.cli", "simulate", path, "--telemetry", folder],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=300,
        )
        rows.append([(folder / name).read_bytes() for name in ("requests.csv", "actions.csv")])
    assert rows[0] == rows[1]
    assert len(rows[0][0].splitlines()) > 300


# --- traces ---------------------------------------------------------------------------------------

TRACE_CASE = """
seconds = 120

[[models]]
row = "resnet50_v1b"
copies = 2

[[models]]
row = "resnet18_v1"

[[clients]]
slo_ms = 100
"""


def write_traces(folder: Path) -> None:
    (folder / "minutes.csv").write_text(
        "HashOwner,HashApp,HashFunction,Trigger,11,12,13\n"
        "o,a,f,http,600,1200,0\n"
        "o,a,g,timer,60,60,60\n"
        "o,b,h,queue,0,6,6\n"
    )
    rows = [f"a,f{number % 3},{number + 0.5},0.5\n" for number in range(200)]
    (folder / "single.csv").write_text("app,func,end_timestamp,duration\n" + "".join(rows))


def trace_case(folder: Path, clients: str) -> Case:
    write_traces(folder)
    return read_case(write(folder, TRACE_CASE + clients))


def times_by_model(case: Case) -> dict[str, list[int]]:
    times: dict[str, list[int]] = {name: [] for name in case.workload.models}
    for request in case.workload:
        assert request.slo_ns == 100 * NS_PER_MS
        times[case.workload.models[request.model]].append(request.time_ns)
    return times


def test_minutes_of_a_trace_are_replayed_from_a_minute_of_the_day_on(tmp_path: Path) -> None:
    clients = """
kind = "azure2019"
path = "minutes.csv"
begin_minute = 11
scale = 0.5
timers = "even"
"""
    case = trace_case(tmp_path, clients)
    times = times_by_model(case)
    # Three functions and three models; the most popular goes first.
    busy, timer, rare = times.values()
    assert 520 < len(busy) < 680  # 1,200 a minute in the first minute, nothing in the second
    assert max(busy) < 60 * NS_PER_S
    assert len(timer) == 60
    assert {after - before for before, after in pairwise(timer)} == {2 * NS_PER_S}
    assert 0 < len(rare) < 20
    assert case.workload.end_ns == 120 * NS_PER_S
    assert times_by_model(case) == times


def test_requests_carry_the_tenant_of_their_clients_or_the_owner_of_their_function(
    tmp_path: Path,
) -> None:
    clients = 'kind = "azure2019"\npath = "minutes.csv"\nbegin_minute = 11\n'
    named = trace_case(tmp_path, clients + 'tenant = "ann"').workload
    assert {named.tenants[request.tenant] for request in named} == {"ann"}
    owned = trace_case(tmp_path, clients + 'tenants = "owner"').workload
    asking = {owned.tenants[request.tenant] for request in owned}
    assert asking
    assert "" not in asking
    assert [request.time_ns for request in owned] == [request.time_ns for request in named]


def test_a_trace_is_scaled_to_a_rate_and_mapped_to_some_models(tmp_path: Path) -> None:
    clients = """
kind = "azure2019"
path = "minutes.csv"
rate_rps = 30
row = "resnet50_v1b"
assignment = "striped"
"""
    times = times_by_model(trace_case(tmp_path, clients))
    assert 3300 < sum(map(len, times.values())) < 3900
    assert not times["resnet18_v1-0"]
    assert all(times[f"resnet50_v1b-{index}"] for index in range(2))


def test_single_invocations_are_replayed_when_they_were(tmp_path: Path) -> None:
    clients = 'kind = "azure2021"\npath = "single.csv"\n'
    times = times_by_model(trace_case(tmp_path, clients))
    # The case ends before the trace does.
    assert sorted(chain(*times.values())) == [second * NS_PER_S for second in range(120)]
    assert [len(of_model) for of_model in times.values()] == [40, 40, 40]


def test_a_synthetic_trace_is_drawn_from_the_seed(tmp_path: Path) -> None:
    clients = 'kind = "synthetic"\nnum_functions = 300\nrate_rps = 40\nbegin_minute = 600\n'
    path = write(tmp_path, TRACE_CASE + clients)
    first, again, other = (times_by_model(read_case(path, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert 4300 < sum(map(len, first.values())) < 5300


@pytest.mark.parametrize(
    ("clients", "problem"),
    [
        ('kind = "azure2019"\npath = "none.csv"', "none.csv: No such file"),
        ('kind = "azure2019"\npath = "single.csv"', "single.csv:1: expected the first columns"),
        ('kind = "azure2021"\npath = "minutes.csv"', "minutes.csv:1: found columns"),
        (
            'kind = "azure2019"\npath = "minutes.csv"\nbegin_minute = 13',
            "begin_minute is 13, expected 10 to 12",
        ),
        (
            'kind = "azure2019"\npath = "minutes.csv"\nbegin_minute = 12',
            "the trace ends after 60 s, before the case does after 120 s",
        ),
        (
            'kind = "azure2019"\npath = "minutes.csv"\nscale = 1\nrate_rps = 1',
            "expected `scale` or `rate_rps`, not both",
        ),
        (
            'kind = "azure2019"\npath = "minutes.csv"\nscale = 0',
            "Expected `float` > 0.0 - at `$.clients[0].scale`",
        ),
        (
            'kind = "azure2019"\npath = "minutes.csv"\nassignment = "stripped"',
            "Invalid enum value 'stripped' - at `$.clients[0].assignment`",
        ),
        (
            'kind = "azure2021"\npath = "single.csv"\ntimers = "even"',
            "found 'timers' at `$.clients[0]`",
        ),
        (
            'kind = "synthetic"\nnum_functions = 0',
            "Expected `int` >= 1 - at `$.clients[0].num_functions`",
        ),
        (
            'kind = "synthetic"\nnum_functions = 9\nbegin_minute = 1440',
            "begin_minute is 1440, expected 0 to 1439",
        ),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(tmp_path: Path, clients: str, problem: str) -> None:
    with pytest.raises(ClockwrightError) as caught:
        trace_case(tmp_path, clients)
    assert problem in str(caught.value)


def test_simulate_says_what_is_wrong_with_a_trace(tmp_path: Path) -> None:
    (tmp_path / "minutes.csv").write_text(
        "HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,5,-5\n"
    )
    path = write(tmp_path, TRACE_CASE + 'kind = "azure2019"\npath = "minutes.csv"\n')
    done = subprocess.run(
        [sys.executable, "-m", "clockwright.cli", "simulate", path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "minutes.csv:2: column 2 is '-5'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_trace_of_a_simulated_run_shows_lanes_predictions_and_windows(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    target = tmp_path / "trace.json"
    path = write(tmp_path, SMALL + "\n[cluster]\nnum_workers = 2\nnum_pages = 7\n")
    for arguments in (
        ["simulate", str(path), f"--telemetry={rows}"],
        ["trace", "export", str(rows), str(target)],
    ):
        outcome = CliRunner().invoke(app, arguments)
        assert outcome.exit_code == 0, outcome.output
    events = json.loads(target.read_text(encoding="utf-8"))["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    workers = {
        event["args"]["name"]: event["pid"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert {"requests", "worker gpu0", "worker gpu1"} <= set(workers)
    for worker in ("worker gpu0", "worker gpu1"):
        shown = {
            threads[event["pid"], event["tid"]]
            for event in events
            if event["ph"] == "X" and event["pid"] == workers[worker]
        }
        assert {
            *("LOAD", "INPUT", "EXEC", "OUTPUT"),
            *("LOAD predicted", "EXEC predicted", "LOAD window", "EXEC window"),
        } <= shown


RECORDED = """
seconds = 3

[[models]]
row = "resnest101"
copies = 2

[[clients]]
kind = "poisson"
rate_rps = 100
slo_ms = 50
"""


def test_recorded_clients_stand_beside_others_in_a_case(tmp_path: Path) -> None:
    (tmp_path / "asked.csv").write_text(
        "time_s,model_id,slo_ms,tenant\n5,resnest101-1,30,ann\n6,resnest101-0,,\n",
        encoding="utf-8",
    )
    text = RECORDED + '[[clients]]\nkind = "recorded"\npath = "asked.csv"\n'
    path = tmp_path / "case.toml"
    path.write_text(text, encoding="utf-8")
    case = read_case(path)
    asked = [request for request in case.workload if request.slo_ns != 50 * NS_PER_MS]
    assert [(r.time_ns, case.workload.models[r.model], r.slo_ns) for r in asked] == [
        (0, "resnest101-1", 30 * NS_PER_MS),
        (NS_PER_S, "resnest101-0", 100 * NS_PER_MS),
    ]
    assert case.workload.tenants[asked[0].tenant] == "ann"
    alone = '[[clients]]\nkind = "recorded"\npath = "asked.csv"\n'
    path.write_text(alone, encoding="utf-8")
    case = read_case(path)
    assert case.duration_ns == NS_PER_S + 1
    assert [model.model_id for model in case.cluster.models] == ["resnest101-1", "resnest101-0"]
    for broken, problem in (
        (alone + 'tenant = "bob"\n', "expected no `row` and no `tenant`"),
        (RECORDED.replace("seconds = 3", ""), "found no `seconds`"),
        (alone + "[[clients]]\nkind = 'poisson'\nrate_rps = 1\nslo_ms = 9\n", "found no `models`"),
        (RECORDED.replace("resnest101", "googlenet") + alone, "asks for model 'resnest101-1'"),
    ):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(ConfigError, match=problem):
            read_case(path)
