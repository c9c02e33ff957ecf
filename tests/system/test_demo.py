"""The demo: a short run of all of it, and the parts that judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from clockwright.units import ActionId, ModelId, WorkerId
from clockwright.v1 import control_pb2 as pb
from clockwright.wire.actions import StepTime
from controller.telemetry.rows import ActionRow
from experiments.demo import demo, models
from experiments.demo.clients import ModelLoad, RequestOutcome
from experiments.demo.models import DemoModel
from experiments.digits.images import NUM_FORMS, load
from experiments.telemetry.timeline import draw_timeline
from modelzoo.build import write_model

#: A network with the inputs of the demo's large models.
SMALL = "mobilenet0.25"


def test_digits_come_in_fourteen_forms_of_nearly_130() -> None:
    digits = load()
    lengths = np.bincount(digits.forms)
    assert len(lengths) == NUM_FORMS
    assert lengths.sum() == len(digits.labels) == 1797
    assert lengths.min() >= 122
    assert lengths.max() <= 130
    assert digits.images.shape == (1797, 64)
    # Forms begin alike: the first digits are counted up in each that lost none of them.
    first = digits.labels[digits.forms == 0][:20]
    assert [int(label) for label in first] == [*range(10), *range(10)]


def test_a_short_run_answers_rightly_evicts_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(
        small: Sequence[DemoModel], large: Sequence[DemoModel], prepared: dict[str, pb.ModelInfo]
    ) -> list[ModelLoad]:
        """Not what this machine could do: everybody is asked, and has the time to answer."""
        assert {model.name for model in (*small, *large)} == set(prepared)
        return [ModelLoad(model, 8.0, (30_000.0, 60_000.0)) for model in (*small, *large)]

    monkeypatch.setattr(demo, "plan", plan)
    # Two networks of a page in place of large ones, which take twenty seconds to compile, and room for one.
    monkeypatch.setattr(
        models, "write_model", lambda _, *file, **seed: write_model(SMALL, *file, **seed)
    )
    monkeypatch.setattr(demo, "_LARGE_PAGES", 1)
    code = demo.main(["--directory", str(tmp_path), "--large", "2", "--seconds", "1"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "answered 0;" not in out
    assert "answers that differ from onnxruntime's own: 0" in out
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    actions = (tmp_path / "telemetry" / "actions.csv").read_text()
    assert "EvictWeights" in actions


def outcome(**changes: object) -> RequestOutcome:
    good = {
        "model": "m", "slo_ms": 100.0, "late_ms": 0.0, "latency_ms": 50.0, "outcome": "OK",
        "right": True, "server_ms": 49.0,
    }  # fmt: skip
    return RequestOutcome(**{**good, **changes})  # type: ignore[arg-type]


def test_a_verdict_counts_each_kind_of_outcome() -> None:
    found = demo.judge(
        [
            outcome(),
            outcome(right=False),
            outcome(latency_ms=101.0),
            outcome(latency_ms=102.0, server_ms=101.0),
            outcome(outcome="OVERLOADED", right=False),
            outcome(outcome="LATE", right=False),
            outcome(outcome="the server is on fire", right=False),
        ]
    )
    counts = {"offered": 7, "answered": 4, "in_time": 2, "admitted": 6, "wrong": 1}
    counts |= {"late_successes": 1, "errors": 1, "refused_overloaded": 1, "refused_late": 1}
    assert counts.items() <= found.items()
    assert found["in_time_fraction"] == pytest.approx(2 / 6)


def test_it_says_how_much_longer_than_expected_models_ran() -> None:
    """Which is how a host that is slow for a while shows, if it is not counted as steal."""

    def run(exec_ms: float | None) -> ActionRow:
        took = None if exec_ms is None else StepTime(0, 0, round(exec_ms * 1e6))
        return ActionRow(
            ActionId(1), "Infer", WorkerId("w"), ModelId("m"),
            expected_duration_ns=2_000_000, exec=took, error="NONE",
        )  # fmt: skip

    found = demo.runs_over([run(None), *[run(1.0)] * 197, *[run(5.0)] * 2, run(92.0)])
    assert found == {"run_over_ms_p99": 3.0, "run_over_ms_max": 90.0}
    assert demo.busy_ns([run(None), run(1.0), run(5.0)]) == 6_000_000
    for none in ([], [run(None)], [run(1.0)]):
        assert demo.runs_over(none) == {"run_over_ms_p99": 0.0, "run_over_ms_max": 0.0}


def test_rates_use_half_of_the_time_of_the_core_that_computes() -> None:
    def model(name: str) -> DemoModel:
        return DemoModel(name, np.zeros((1, 1), np.float32), {})

    def prepared(exec_ms: int) -> pb.ModelInfo:
        return pb.ModelInfo(exec=[pb.BatchEstimate(batch_size=1, exec_ns=exec_ms * 1_000_000)])

    costs = {"small": 1, "popular": 20, "rare": 20}
    loads = demo.plan(
        [model("small")],
        [model("popular"), model("rare")],
        {name: prepared(cost) for name, cost in costs.items()},
    )
    rates = {load.model.name: load.rate for load in loads}
    used = sum(rates[name] * cost / 1000 for name, cost in costs.items())
    assert used == pytest.approx(0.5)
    assert rates["popular"] == pytest.approx(2 * rates["rare"])


def test_a_timeline_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no actions"):
        draw_timeline([], tmp_path / "timeline.png")
