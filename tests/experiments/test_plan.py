"""`clockwright plan`: which size it finds, with how few simulations, what limits, and what it says where nothing helps."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from clockwright.cli.main import app
from clockwright.errors import ClockwrightError, ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES, ModelId
from experiments.bench.plan import STUDY, Setting, ask, figures
from experiments.plan import question_of as question_wanted
from experiments.plan_flags import Wanted
from experiments.planning import Question, Size, busiest, plan
from experiments.planning.limits import EXEC
from experiments.planning.search import Search
from experiments.planning.trials import Score, Trial, Tries
from experiments.simulator import (
    Case,
    Cluster,
    CpuCosts,
    HostedModel,
    Network,
    WorkerKind,
    slower_kind,
)
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import ClosedLoop, Poisson, Recorded, Workload

NET = ProfileRow(
    name="net",
    weights_bytes=PAGE_BYTES,
    load_ns=100 * NS_PER_MS,
    exec_ns={1: 50 * NS_PER_MS, 4: 100 * NS_PER_MS},
    input_bytes=600_000,
)


def case_of(
    *,
    rate_rps: float = 40.0,
    slo_ms: float = 500.0,
    models: int = 1,
    seconds: float = 8.0,
    kinds: tuple[WorkerKind, ...] = (),
    num_pages: int = 1376,
    **fields: Any,  # noqa: ANN401
) -> Case:
    """A model or more of 50 ms, or 100 ms for four requests, that are asked at random."""
    hosted = tuple(HostedModel(ModelId(f"net-{number}"), NET) for number in range(models))
    source = Poisson(
        models=range(models),
        rate_rps=rate_rps,
        slo_ns=round(slo_ms * NS_PER_MS),
        end_ns=round(seconds * NS_PER_S),
        seed=3,
    )
    return Case(
        workload=Workload(models=tuple(model.model_id for model in hosted), sources=(source,)),
        cluster=Cluster(
            models=hosted,
            num_workers=len(kinds) or 1,
            kinds=kinds,
            num_pages=num_pages,
            noise=Noise(0.01, 0.01),
        ),
        duration_ns=round(seconds * NS_PER_S),
        **fields,
    )


def question_of(target: float = 0.95, **fields: Any) -> Question:  # noqa: ANN401
    return Question(case=case_of(**fields), target=target, warmup_ns=NS_PER_S, most_runs=8)


class Pretended(Tries):
    """Says of each size what a rule says, and remembers which it was asked."""

    def __init__(self, rule: Callable[[Size], bool]) -> None:
        super().__init__()
        self.rule = rule
        self.asked: list[Size] = []

    def trial(self, question: Question, size: Size) -> Trial:
        self.asked.append(size)
        missed = 0 if self.rule(size) else 9000 // (1 + sum(size))
        score = Score(asked={1: 10_000}, missed={1: missed})
        return Trial(size, question.target, 1000, [score] * 5)


def searched(question: Question, rule: Callable[[Size], bool]) -> tuple[Size | None, list[Size]]:
    tries = Pretended(rule)
    return Search(question=question, tries=tries).cheapest(), tries.asked


def closed(kinds: tuple[WorkerKind, ...], **fields: Any) -> Question:  # noqa: ANN401
    """Closed-loop clients, of which no bound is known."""
    loop = ClosedLoop(model=0, concurrency=1, slo_ns=NS_PER_S, end_ns=NS_PER_S)
    case = case_of(kinds=kinds)
    case = replace(case, workload=replace(case.workload, sources=(), closed_loops=(loop,)))
    return Question(case=case, **fields)


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 17, 40, 64])
def test_the_fewest_workers_of_one_kind_are_found_in_few_trials(needed: int) -> None:
    size, asked = searched(closed(()), lambda size: size[0] >= needed)
    assert size == (needed,)
    assert len(asked) <= 2 * needed.bit_length() + 1
    assert len(set(asked)) == len(asked)


def test_the_search_ends_where_more_workers_do_not_help() -> None:
    size, asked = searched(closed((), most_workers=40), lambda size: size[0] > 40)
    assert size is None
    assert max(asked) <= (40,)
    tries = Pretended(lambda _: False)
    tries.trial = lambda question, size: Trial(  # type: ignore[method-assign]
        size, question.target, 1, [Score(asked={1: 100}, missed={1: 50})] * 2
    )
    search = Search(question=closed(()), tries=tries)
    assert search.cheapest() is None
    # Twice the workers missed as much.
    assert max(search.trials) == (2,)


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_mixture_is_found_wherever_the_border_lies(seed: int) -> None:
    draw = random.Random(seed)
    kinds = tuple(
        WorkerKind(name=f"kind{number}", price=draw.choice((0.3, 1.0, 2.5)))
        for number in range(draw.choice((2, 3)))
    )
    have = {"kind0": draw.randrange(3)}
    # Not linear, so that mixtures may be worth more than their parts.
    power, worth = draw.uniform(0.7, 1.3), [draw.uniform(0.5, 3.0) for _ in kinds]

    def rule(size: Size) -> bool:
        return bool(
            sum((count * one) ** power for count, one in zip(size, worth, strict=True)) >= 6.0
        )

    question = closed(kinds, have=have)
    found, asked = searched(question, rule)
    every = product(range(have["kind0"], 14), *(range(14) for _ in kinds[1:]))
    best = min(filter(rule, every), key=lambda size: (question.price(size), sum(size)))
    assert found is not None
    assert (question.price(found), sum(found)) == (question.price(best), sum(best))
    assert len(set(asked)) == len(asked)


def test_sizes_that_no_schedule_could_do_with_are_not_simulated() -> None:
    # 150 requests per second are 3.75 workers in batches of four, and 5 % may be missed.
    size, asked = searched(question_of(rate_rps=150), lambda size: size[0] >= 5)
    assert size == (5,)
    assert min(asked) == (4,)


def trial_of(*missed: int, asked: int = 1000, target: float = 0.99, cut: bool = False) -> Trial:
    scores = [Score(asked={1: asked}, missed={1: number}, cut=cut) for number in missed]
    return Trial((1,), target, 300, scores)


def test_a_trial_goes_on_until_its_interval_leaves_the_target_out() -> None:
    assert trial_of(0).meets is None
    assert trial_of(0, 0, 0, 0).meets is None
    assert trial_of(0, 0, 0, 0, 0).meets
    assert trial_of(0, 9, 9).meets is None
    assert trial_of(50, 52).meets is False
    assert trial_of(300, cut=True).meets is False
    # Too few to show it, whatever they say.
    assert trial_of(0, 0, 0, 0, 0, asked=50).meets is None
    low, high = trial_of(5, 7, 6).interval
    assert low < 0.994 < high
    # Student's t of two degrees of freedom, of 1 / sqrt(3) requests in a thousand.
    assert high - 0.994 == pytest.approx(4.303 / 3**0.5 / 1000, rel=1e-3)


def test_a_plan_meets_its_target_and_one_worker_fewer_does_not() -> None:
    question = question_of(rate_rps=60, slo_ms=400)
    told: list[str] = []
    found = plan(question, tell=told.append)
    assert any(re.fullmatch(r"2 workers: run 1, .*", words) for words in told), told
    assert found.planned.meets
    assert found.planned.interval[0] >= 0.95
    (fewer,), (more,) = found.fewer.values(), found.more.values()
    assert fewer.size[0] + 1 == found.size[0] == more.size[0] - 1
    assert fewer.meets is False
    assert more.attainment >= found.planned.attainment
    assert found.limits is not None
    assert found.limits.name == EXEC
    (cost,) = found.slos
    assert cost.half is None or cost.half >= found.size
    assert cost.double is not None
    assert cost.double <= found.size
    again = plan(question)
    assert (again.size, again.planned, again.slos) == (found.size, found.planned, found.slos)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        # 40 models at random where 12 fit: seven requests of ten wait for a load of 100 ms.
        ({"models": 40, "num_pages": 12, "rate_rps": 13, "slo_ms": 400}, "loads"),
        # The page of a model that runs is taken, so that quick loads have no place to go.
        ({"models": 8, "num_pages": 2, "rate_rps": 30, "slo_ms": 300}, "pages"),
        # 600 kB take 60 ms of a link.
        ({"network": Network(bytes_per_s=10_000_000), "rate_rps": 25}, "links"),
        # What waits for the controller has less time to wait for a batch.
        (
            {"costs": CpuCosts(request_ns=35 * NS_PER_MS), "rate_rps": 15, "slo_ms": 300},
            "controller",
        ),
    ],
)
def test_what_limits_is_what_fewer_workers_would_do_without(
    fields: dict[str, Any], limit: str
) -> None:
    found = plan(question_of(**fields), slo_costs=False)
    assert found.limits is not None
    assert found.limits.name == limit
    assert found.limits.relieved[found.limits.name] > found.fewer["simulated"].attainment


def test_where_the_controller_is_the_limit_no_number_of_workers_helps_and_the_error_says_so() -> (
    None
):
    costs = CpuCosts(request_ns=30 * NS_PER_MS)
    with pytest.raises(ConfigError, match=r"meets 95 %.*a second controller"):
        plan(question_of(costs=costs, rate_rps=50))


def test_an_slo_that_is_shorter_than_a_run_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"model net-0 has 39\.8 ms.*takes [0-9.]+ ms.*longer SLO"
    ):
        plan(question_of(slo_ms=40))


def test_of_two_kinds_the_cheaper_mixture_is_planned() -> None:
    kinds = (
        WorkerKind(name="card", price=5.0),
        replace(slower_kind("slower", [NET], 2.0), price=1.0),
    )
    cheap = plan(question_of(kinds=kinds, slo_ms=800), slo_costs=False, why=False)
    assert cheap.size[0] == 0 < cheap.size[1]
    kinds = (replace(kinds[0], price=1.0), kinds[1])
    equal = plan(question_of(kinds=kinds, slo_ms=800), slo_costs=False, why=False)
    assert sum(equal.size) < cheap.size[1]
    # Those that are there cost nothing.
    question = replace(question_of(kinds=kinds, slo_ms=800), have={"slower": cheap.size[1]})
    assert question.price(plan(question, slo_costs=False, why=False).size) == 0


def test_the_busiest_stretch_is_the_one_with_the_most_work() -> None:
    times = [NS_PER_S * second for second in range(10)] + [
        7 * NS_PER_S + ms * NS_PER_MS for ms in range(500)
    ]
    source = Recorded(
        times_ns=np.array(times),
        models=np.zeros(len(times), np.int64),
        slo_ns=NS_PER_S,
        end_ns=10 * NS_PER_S,
    )
    case = case_of(seconds=10)
    case = replace(case, workload=replace(case.workload, sources=(source,)))
    part = busiest(case, NS_PER_S, 2 * NS_PER_S)
    assert part.duration_ns == 3 * NS_PER_S
    assert part.workload.expected_requests(2 * NS_PER_S, 3 * NS_PER_S) == 501
    assert busiest(case, 10 * NS_PER_S, 0) is case


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"target": 1.0}, "target is 100 %, expected more than 0 and less than 100"),
        ({"warmup_ns": 9 * NS_PER_S}, "warm-up is 9 s, expected less than the case's 5 s"),
        ({"have": {"a100": 1}}, "found kind 'a100', expected one of simulated"),
        ({"target": 0.99999}, "found about 3,200 requests in 16 runs, expected 300,000"),
        ({"most_runs": 4}, "expected 5 runs or more"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Question(case=case_of(seconds=5), **fields)


CASE = """
seconds = 3

[[models]]
row = "resnest101"
copies = 2

[[clients]]
kind = "poisson"
rate_rps = 100
slo_ms = 50
"""


def said(*arguments: str) -> Any:  # noqa: ANN401
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_a_plan_for_people_and_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(CASE, encoding="utf-8")
    picture = tmp_path / "plan.png"
    # What other SLOs would cost is shown by docs/simulate.md, whose blocks are run.
    text = said(str(path), "--target", "95", "--picture", str(picture), "--no-slo-costs")
    assert "inside their SLO" in text
    assert "what limits one worker fewer: the time that runs take" in text
    assert picture.stat().st_size > 10_000
    found = json.loads(said(str(path), "--target", "95", "--json", "--no-slo-costs"))
    (workers,) = found["workers"].values()
    assert found["planned"]["attainment_pct"] >= 95
    assert found["one_fewer"]["simulated"]["workers"] == {"simulated": workers - 1}
    assert found["limit"] == EXEC


def test_a_load_may_be_planned_for_as_it_will_be_and_where_it_is_busiest(tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(CASE, encoding="utf-8")
    question = question_wanted(Wanted(load=path, target=95, scale=4))
    assert question.warmup_ns == 0.3 * NS_PER_S
    assert question.expected_requests == pytest.approx(2.7 * 400)
    question = question_wanted(
        Wanted(load=path, target=95, stretch_s=1, warmup_s=0.5, have=["simulated=2"])
    )
    assert question.case.duration_ns == 1.5 * NS_PER_S
    assert question.least == (2,)
    # Longer than what is simulated by default.
    path.write_text(CASE.replace("rate_rps = 100", "rate_rps = 20_000"), encoding="utf-8")
    question = question_wanted(Wanted(load=path, target=95))
    assert question.expected_requests == pytest.approx(20_000, rel=0.01)
    for wanted, problem in (
        (Wanted(load=path, target=95, hours=3), "--hours: expected none with a case"),
        (Wanted(load=path, target=95, scale=0), "--scale is 0, expected more than 0"),
        (Wanted(load=path, target=95, have=["two"]), "--have: found 'two', expected KIND=N"),
    ):
        with pytest.raises(ConfigError, match=problem):
            question_wanted(wanted)


def test_what_a_server_was_asked_is_planned_for_with_what_it_predicts(tmp_path: Path) -> None:
    """The folder of a server's telemetry, which the simulator writes too, and the list of its models."""
    path = tmp_path / "case.toml"
    path.write_text(CASE, encoding="utf-8")
    CliRunner().invoke(app, ["simulate", str(path), "--telemetry", str(tmp_path / "rows")])
    models = [
        {
            "model_id": f"resnest101-{number}",
            "state": "READY",
            "weights_bytes": 102_000_000,
            "load_ns": 0,
            "exec": [
                {"batch_size": 1, "exec_ns": 12_000_000},
                {"batch_size": 4, "exec_ns": 26_000_000},
            ],
        }
        for number in range(2)
    ] + [{"model_id": "other", "state": "LOADING", "weights_bytes": 0, "load_ns": 0, "exec": []}]
    profile = tmp_path / "models.json"
    profile.write_text(json.dumps(models), encoding="utf-8")
    asked = (str(tmp_path / "rows"), "--target", "95", "--json", "--no-slo-costs")
    found = json.loads(said(*asked, "--profile", str(profile)))
    assert found["workers"]["simulated"] >= 2
    assert found["seconds"] == pytest.approx(3, abs=0.1)
    assert found["slos"][0]["slo_ms"] == 50
    last = json.loads(said(*asked, "--profile", str(profile), "--hours", str(2 / 3600)))
    assert last["seconds"] == pytest.approx(2, abs=0.01)
    with pytest.raises(ClockwrightError, match=r"profile '10ms.json'"):
        said(*asked, "--profile", "10ms.json")


def test_versions_and_pipelines_of_a_server_are_planned_for(tmp_path: Path) -> None:
    """Each version costs its own, one that is gone the last one's; a pipeline costs what its models do."""
    path = tmp_path / "case.toml"
    path.write_text(CASE, encoding="utf-8")
    rows = tmp_path / "rows"
    CliRunner().invoke(app, ["simulate", str(path), "--telemetry", str(rows)])
    lines = (rows / "requests.csv").read_text(encoding="utf-8").splitlines()
    place = lines[0].split(",").index("model_id")
    names = ("a:1", "a:2@3", "a:3", "b@2", "both")
    for index in range(1, len(lines)):
        cells = lines[index].split(",")
        cells[place] = names[index % len(names)]
        lines[index] = ",".join(cells)
    (rows / "requests.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    models = [
        {
            "model_id": name,
            "version": str(version),
            "state": "READY",
            "weights_bytes": 1000,
            "load_ns": 1,
            "exec": [{"batch_size": 1, "exec_ns": ns}] if ns else [],
        }
        for name, version, ns in (("a", 2, 2000), ("a", 3, 3000), ("b", 1, 7000), ("both", 1, 0))
    ]
    profile = tmp_path / "models.json"
    profile.write_text(json.dumps(models), encoding="utf-8")
    question = question_wanted(Wanted(load=rows, target=90, profile=str(profile)))
    costs = {model.model_id: model.row.exec_ns[1] for model in question.case.cluster.models}
    assert costs == {"a:1": 3000, "a:2": 2000, "a:3": 3000, "b": 7000}


def test_functions_of_azures_traces_are_mapped_to_the_profiles_models(tmp_path: Path) -> None:
    path = tmp_path / "minutes.csv"
    path.write_text(
        "HashOwner,HashApp,HashFunction,Trigger,11,12\no,a,f,http,60,6000\no,a,g,timer,60,60\n",
        encoding="utf-8",
    )
    question = question_wanted(Wanted(load=path, target=95, slo_ms=80, stretch_s=10, warmup_s=1))
    assert len(question.case.workload.models) == 64
    assert set(question.slos_ns()) == {80 * NS_PER_MS}
    # The second minute is the busier one.
    assert question.expected_requests == pytest.approx(1010)


def test_the_study_tries_planned_sizes_with_other_seeds() -> None:
    points = list(ask(Setting(workloads=2, requests=800, others=5, limits=False)))
    found = figures(Setting(), points)
    assert found["plan_workloads"] == 2
    assert found["plan_meets_share"] == 1
    assert found["plan_tight_share"] == sum(point.tight for point in points) / 2
    assert all(point.fewer_pct < point.target_pct for point in points if point.tight)
    assert [point.workload for point in points] == ["w00", "w01"]
    assert STUDY.figures_of(Setting(), points)["w00_others_pct"] == points[0].others_pct
