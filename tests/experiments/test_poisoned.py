"""A live application while a model of it goes bad: a quick variant of `make poisoned`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from controller.selection.core.query import Candidate, Query
from controller.selection.policies import make_policy
from experiments.demo.poisoned import PHASES, STUDY, PoisonedRun, Setting
from experiments.digits.stream import ask
from experiments.study.report import write_csv
from experiments.study.study import read_table

# Nobody misses this SLO, so numbers of queries alone say what happens.
QUICK = Setting(
    kinds=("naive Bayes", "tree", "logistic"),
    num_queries=(60, 60, 60),
    look_every=60,
    slo_ms=200_000,
    options=("share=0.05",),
)


def learned_alone(run: PoisonedRun) -> tuple[list[int], list[tuple[float, ...]]]:
    """What the policy, without any server, answers and learns from what the models say."""
    policy = make_policy("exp4-full", {"share": 0.05})
    state = policy.init(run.models)
    query = Query(tuple(Candidate(model) for model in run.models), "", Random(0))
    answers, weights = [], []
    for step in run.steps:
        said = dict(zip(run.models, step.alone, strict=True))
        combined, observation = ask(policy, state, query, said, step.label)
        answers.append(combined.label)
        state = policy.observe(state, observation)
        weights.append(tuple(policy.weights(state)[model] for model in run.models))
    return answers, weights


@pytest.mark.long
def test_a_poisoned_model_loses_its_weight_and_gets_it_back(tmp_path: Path) -> None:
    (run,) = STUDY.produce(QUICK, tmp_path)
    assert [len(run.of(phase)) for phase in PHASES] == list(QUICK.num_queries)
    assert [step.num_missing for step in run.steps] == [0] * len(run.steps)

    # Over gRPC, through scheduler and worker, it answers and learns as the policy by itself does.
    answers, weights = learned_alone(run)
    assert [step.answer for step in run.steps] == answers
    for step, expected in zip(run.steps, weights, strict=True):
        assert step.weights == pytest.approx(expected)

    before, during, after = (run.of(phase)[-1].weights[run.poisoned] for phase in PHASES)
    assert during < before / 1.5
    assert after > during * 1.5
    bad = [step.alone[run.poisoned] == step.label for step in run.of("poisoned")]
    assert sum(bad) < len(bad) / 4

    # The command line printed those weights.
    transcript = (tmp_path / "poisoned.txt").read_text()
    looks = transcript.split("$ clockwright app show")[1:]
    assert len(looks) == len(run.steps) // QUICK.look_every
    width = max(map(len, run.models))
    for number, look in enumerate(looks, 1):
        step = run.steps[number * QUICK.look_every - 1]
        for model, weight in zip(run.models, step.weights, strict=True):
            assert f"  {model:{width}} {weight:6.3f}" in look
    name = run.models[run.poisoned]
    for version in ("bad", "good"):
        assert f"$ clockwright models add {version}/{name} --replace" in transcript

    found = json.loads((tmp_path / "poisoned.json").read_text())
    assert found["poisoned"] == name
    assert found["figures"]["poisoned_poisoned_model_weight"] == during
    assert found["figures"]["repaired_queries_to_turn"] >= 1
    rows = read_table(tmp_path / "poisoned.csv")
    assert sum(row["right"] for row in rows) == sum(step.right for step in run.steps)
    assert (tmp_path / "poisoned.png").stat().st_size > 5_000


def test_a_last_row_of_fewer_queries_is_no_loss_of_accuracy(tmp_path: Path) -> None:
    ends = [20, 40, 60, 80, 100, 110]
    rows = [(end, "before", 20 if end < 110 else 10, 1.0) for end in ends]
    write_csv(tmp_path / "poisoned.csv", ("queries", "phase", "right", "weight of a"), rows)
    (tmp_path / "poisoned.json").write_text(json.dumps({"poisoned": "a"}))
    _, (answers,) = STUDY.drawn(tmp_path)
    (curve,) = answers.curves
    assert list(curve.x) == [100, 110]
    assert list(curve.y) == [100, 100]
