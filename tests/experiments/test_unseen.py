"""The comparison on workloads that nobody tuned to: what it counts, and what it makes of the counts."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.policies import floors
from experiments.policies.contest import Outcome, Row, bound_of, measure
from experiments.policies.floors import FORMS
from experiments.policies.load import Load
from experiments.policies.unseen import FAMILIES, MODULES
from experiments.policies.unseen.__main__ import CONTENDERS, differences, figures_of
from experiments.simulator import Case, Cluster, copies_of
from modelzoo.profile import Noise, load_profile
from traces.arrivals import Poisson, Workload


def poisson(seed: int, rate_rps: float = 2000, num_models: int = 8) -> Case:
    models = copies_of(load_profile("table1").row_for("resnet50_v1b"), num_models)
    source = Poisson(
        models=range(num_models),
        rate_rps=rate_rps,
        slo_ns=25 * NS_PER_MS,
        end_ns=NS_PER_S,
        seed=seed,
    )
    return Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=(source,)),
        cluster=Cluster(models=models),
        duration_ns=NS_PER_S,
        seed=seed,
    )


def played(family: Load, policy: str, seed: int) -> Outcome:
    """What a policy makes of a case of a family."""
    contender = CONTENDERS[policy]
    return measure(family, contender.config, seed, make_scheduler=contender.scheduler)


def outcome(asked_by: dict[str, int], answered_by: dict[str, int]) -> Outcome:
    return Outcome(asked_by=asked_by, answered_by=answered_by, refused={}, bound=100)


def row(part: str, name: str, policy: str, answered: int, **counts: float) -> Row:
    family = Load(name, part, lambda seed: poisson(seed, num_models=15))
    found = replace(outcome({"a": 100}, {"a": answered}), **counts)  # type: ignore[arg-type]
    return Row(load=family, policy=policy, outcomes=(found,))


def test_each_family_has_a_name_of_its_own_and_no_part_is_in_two_modules() -> None:
    families = [family for module in MODULES for family in module.FAMILIES]
    assert len(FAMILIES) == len(families)
    parts = [part for module in MODULES for part in {family.group for family in module.FAMILIES}]
    assert len(parts) == len(set(parts))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_gives_the_same_requests_again_and_others_for_another_seed(name: str) -> None:
    family = FAMILIES[name]
    first, again, other = (list(family.case(seed).workload) for seed in (1, 1, 2))
    assert first == again
    case = family.case(1)
    # Bursts in one instant and even rates are the same for each seed; then what differs is the noise.
    noise_s_seeds = {family.case(seed).seed for seed in (1, 2)}
    noise = case.cluster.noise
    noisy = len(noise_s_seeds) == 2 and noise is not None and noise.exec_sigma > 0
    assert first != other or case.workload.closed_loops or noisy
    assert len(first) <= 40_000


@pytest.mark.seeds(1)
def test_no_policy_beats_a_bound_and_every_request_counts_once_whatever_the_noise_and_the_slos(
    seed: int,
) -> None:
    generator = random.Random(seed)
    models = copies_of(load_profile("table1").row_for("resnet50_v1b"), generator.randint(1, 6))
    gpus = generator.randint(1, 2)
    # Time enough for any of these SLOs; the bound with memory costs three times as much for twice as long.
    duration_ns = NS_PER_S // 2
    sources = tuple(
        Poisson(
            models=range(len(models)),
            rate_rps=generator.choice([200, 500, 900]) * gpus,
            slo_ns=generator.choice([8, 15, 30, 100, 300]) * NS_PER_MS,
            end_ns=duration_ns,
            seed=10 * seed + number,
        )
        for number in range(generator.randint(1, 3))
    )
    case = Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=sources),
        cluster=Cluster(
            models=models,
            num_workers=gpus,
            num_pages=generator.choice([14, 100]),
            noise=Noise(exec_sigma=generator.choice([0.0, 0.01, 0.2]), load_sigma=0.1),
        ),
        duration_ns=duration_ns,
        seed=seed,
    )
    families = [
        Load("random", "any", lambda _: case, bound=bound) for bound in ("density", "memory")
    ]
    by_time, with_memory = (bound_of(family, seed, padding=True) for family in families)
    assert with_memory <= by_time
    for policy in CONTENDERS:
        found = played(families[0], policy, seed)
        assert found.answered <= with_memory
        assert found.answered + sum(found.refused.values()) == found.asked


def test_plain_edf_answers_less_than_edf_mh_under_overload() -> None:
    family = Load("overload", "any", poisson)
    plain, ours = (played(family, policy, seed=1) for policy in ("edf", "edf_mh"))
    assert plain.share + 0.02 < ours.share
    assert ours.answered <= bound_of(family, seed=1, padding=True) < ours.asked


def test_who_is_asked_without_the_fault_is_compared_and_nobody_else() -> None:
    family = Load("flood_of_one", "flood", poisson, without=poisson)
    flooded = outcome({"a": 50, "b": 150}, {"a": 40, "b": 20})
    alone = outcome({"a": 50}, {"a": 50})
    flood = Row(load=family, policy="edf_mh", outcomes=(flooded,), without=(alone,))
    assert figures_of([flood])["flood_innocent_share"] == pytest.approx(0.8)


def test_where_isolation_decides_only_the_innocent_or_the_small_are_compared() -> None:
    served = {"edf_mh": (8, 10), "edf": (2, 80), "edf_mh_isolation_0": (1, 85)}
    for compared in ("innocent", "small"):
        family = Load("unequal", "flood", poisson, compared=compared)
        rows = []
        for policy, (little, much) in served.items():
            found = outcome({"innocent-1": 10, "much": 100}, {"innocent-1": little, "much": much})
            rows.append(Row(load=family, policy=policy, outcomes=(found,)))
        assert rows[0].points == pytest.approx(80)
        figures = figures_of(rows)
        assert figures["worst_vs_best_policy_points"] == pytest.approx(60)
        # All answers count without isolation, and the judged policy is not one of the others.
        all_answers = figures["worst_vs_best_policy_points_isolation_0"]
        assert all_answers == pytest.approx(100 * (86 - 82) / 110)


def test_isolation_off_answers_more_in_all_and_less_of_the_innocent() -> None:
    family = FAMILIES["refusal_flood"]
    on, off = (played(family, policy, seed=1) for policy in ("edf_mh", "edf_mh_isolation_0"))
    assert on.answered < off.answered
    assert on.share_among("small") > off.share_among("small") + 0.2


def test_a_part_is_as_good_as_its_worst_family_and_a_policy_as_its_worst_beside_the_best() -> None:
    rows = [
        row("averse", "a", "edf_mh", 97),
        row("averse", "a", "edf", 96),
        row("averse", "b", "edf_mh", 90),
        row("averse", "b", "edf", 93),
        row("averse", "b", "clipper", 10),
        row("refusals", "many", "edf_mh", 60, refusal_p50_share=0.2),
        row("refusals", "burst_of_90", "edf_mh", 64),
        row("unlike", "three_kinds", "edf_mh", 99),
    ]
    figures = figures_of(rows)
    assert figures["averse_bound_share"] == pytest.approx(0.9)
    assert figures["worst_vs_best_policy_points"] == pytest.approx(-3)
    assert differences(rows) == {"a": (1.0, "edf"), "b": (-3.0, "edf")}
    assert figures["refusal_p50_share_15"] == pytest.approx(0.2)
    assert figures["burst_wrong_refusals"] == 36
    assert figures["unlike_violated_pct"] == pytest.approx(1)


def test_the_files_have_a_line_per_run_and_the_figures(tmp_path: Path) -> None:
    FORMS["unseen"](tmp_path)
    assert floors.faults("unseen", tmp_path) == []
    with (tmp_path / "unseen.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["policy"] for line in lines] == ["edf", "edf_mh"]
    assert all(int(line["answered"]) <= int(line["asked"]) for line in lines)
    record = json.loads((tmp_path / "unseen.json").read_text(encoding="utf-8"))
    assert "worst_vs_best_policy_points" in record["figures"]
