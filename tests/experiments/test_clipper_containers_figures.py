"""Clipper's figures, quick variants: that they measure what they say and leave it complete; never how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clipper_paper import fig3 as clipper_fig3
from experiments.clipper_paper import fig4 as clipper_fig4
from experiments.clipper_paper import fig5 as clipper_fig5
from experiments.clipper_paper import fig6 as clipper_fig6
from experiments.clipper_paper.bench import Offered, Saturating, answer, bench
from experiments.clipper_paper.models import (
    FORMS,
    Prepared,
    held_out,
    labels_of,
    prepared,
    write_folders,
)

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    # The cheapest to train and to start, and one that knows digits.
    write_folders(directory, ("no_op", "linear_svm"))
    return directory


@pytest.fixture(scope="module")
def no_op(folders: Path) -> Iterator[list[Prepared]]:
    with prepared(folders, "native", "no_op", SIZES) as ready:
        yield ready


def figures(directory: Path, name: str) -> dict[str, Any]:
    for suffix in ("csv", "png"):
        assert (directory / f"{name}.{suffix}").stat().st_size > 0
    record: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    assert record["command"].startswith(f"python -m experiments {name}")
    found: dict[str, Any] = record["figures"]
    return found


def test_both_forms_of_a_model_give_the_same_labels(folders: Path) -> None:
    images, labels = held_out()
    answers = []
    for form in FORMS:
        with prepared(folders, form, "linear_svm", (64,)) as (ready,):
            answers.append(labels_of(answer(ready, images[:64]), ready.model))
    assert answers[0].tolist() == answers[1].tolist()
    assert (answers[0] == labels[:64]).mean() > 0.8


def test_a_saturated_container_always_has_a_full_batch(no_op: list[Prepared]) -> None:
    images, _ = held_out()
    with bench(no_op, SchedulerConfig(policy="clipper"), images) as served:
        measured = served.run(
            Saturating(outstanding=16), slo_ns=60 * NS_PER_S, warmup_s=0.3, measured_s=0.2
        )
    assert measured.num_late == 0
    # Compiled sizes only, and with nothing late the largest from the third batch on.
    assert set(measured.batch_rows.tolist()) <= set(SIZES)
    # What is answered came back in batches; those at the edges of the time counted may differ.
    assert sum(measured.rows_of.values()) == measured.batch_rows.sum()
    assert abs(len(measured.latency_ns) - measured.batch_rows.sum()) <= 2 * SIZES[-1]


def test_offered_requests_are_all_answered_and_a_delay_makes_them_wait(
    no_op: list[Prepared],
) -> None:
    images, _ = held_out()
    delay_ns = 30 * NS_PER_MS
    config = SchedulerConfig(policy="clipper", batch_delay_ns=delay_ns)
    with bench(no_op, config, images) as served:
        measured = served.run(
            Offered(rate_rps=20, seed=1), slo_ns=60 * NS_PER_S, warmup_s=0, measured_s=1.0
        )
    assert len(measured.latency_ns) == measured.batch_rows.sum()
    # The first batch is full with one row; of the others, some have nobody to share it with in time.
    assert max(measured.latency_ns[1:], default=delay_ns) >= delay_ns


def test_profile_finds_where_the_p99_crosses_the_slo() -> None:
    def profile(p99_ms: tuple[float, ...]) -> clipper_fig3.KindProfile:
        return clipper_fig3.KindProfile(
            form="native",
            kind="no_op",
            batch_sizes=(1, 2, 4),
            p50_ms=tuple(2.0 + size for size in (1, 2, 4)),
            p99_ms=p99_ms,
            num_runs=(3, 3, 3),
            accuracy=0.0,
        )

    crossing = profile((5.0, 10.0, 30.0))
    assert (crossing.max_batch, crossing.extrapolated) == (3.0, False)
    beyond = profile((3.0, 4.0, 6.0))
    assert beyond.max_batch == pytest.approx(18.0)
    assert beyond.extrapolated
    assert beyond.r_squared == pytest.approx(1.0)
    assert profile((21.0, 22.0, 23.0)).max_batch == 1.0


def test_figure_3_profiles_both_forms(tmp_path: Path) -> None:
    setting = clipper_fig3.Setting(kinds=("no_op",), batch_sizes=SIZES, runs=4, budget_s=0.01)
    profiles = clipper_fig3.produce(setting, tmp_path)
    assert [(p.kind, p.form) for p in profiles] == [
        (kind, form) for kind in setting.kinds for form in FORMS
    ]
    found = figures(tmp_path, "clipper_fig3")
    for p in profiles:
        assert min(p.num_runs) >= 3
        assert found[f"{p.form}_{p.kind}_b{SIZES[-1]}_p50_ms"] > 0
        assert found[f"{p.form}_{p.kind}_max_batch_slo20"] >= 1


def test_figure_4_compares_three_strategies(tmp_path: Path) -> None:
    setting = clipper_fig4.Setting(
        kinds=("no_op",),
        batch_sizes=SIZES,
        outstanding=8,
        warmup_s=0.05,
        measured_s=0.1,
        # Longer than any machine takes: what adapts is tested elsewhere.
        slo_ms=60_000,
    )
    points = clipper_fig4.produce(setting, tmp_path)
    assert [(p.form, p.strategy) for p in points] == [
        (form, strategy) for form in FORMS for strategy in clipper_fig4.STRATEGIES
    ]
    found = figures(tmp_path, "clipper_fig4")
    for p in points:
        key = f"{p.form}_no_op_{p.strategy}"
        assert found[f"{key}_rps"] == p.throughput_rps
        assert found[f"{key}_batches_late_pct"] == 0
        if p.strategy == "none":
            assert p.mean_batch in (0.0, 1.0)


def test_figure_5_offers_every_load_with_every_delay(tmp_path: Path) -> None:
    setting = clipper_fig5.Setting(
        containers=(("native", "no_op"),),
        delays_ms=(0, 2),
        loads=(0.2, 0.5),
        slo_ms=60_000,
        batch_sizes=SIZES,
        outstanding=8,
        rounds=2,
        adapt_s=0.05,
        warmup_s=0.05,
        measured_s=0.1,
    )
    points = clipper_fig5.produce(setting, tmp_path)
    assert [(p.load, p.delay_ms) for p in points] == [(0.2, 0), (0.2, 2), (0.5, 0), (0.5, 2)]
    found = figures(tmp_path, "clipper_fig5")
    for p in points:
        key = f"native_no_op_load{100 * p.load:.0f}_delay{p.delay_ms:g}"
        assert found[f"{key}_rps"] == p.throughput_rps


def test_figure_6_scales_to_the_port_that_replicas_share(tmp_path: Path) -> None:
    setting = clipper_fig6.Setting(
        real_replicas=(1,),
        kind="no_op",
        slo_ms=60_000,
        batch_sizes=SIZES,
        warmup_s=0.05,
        measured_s=0.1,
        # A 64th of the rows, each 64 times as large: every handle of the scheduler is audited here.
        batch=8,
        row_bytes=64 * 3072,
        replicas=(1, 4),
        simulated_warmup_ns=NS_PER_S // 4,
        simulated_ns=NS_PER_S // 2,
    )
    clipper_fig6.produce(setting, tmp_path)
    found = figures(tmp_path, "clipper_fig6")
    assert "real_r1_rps" in found
    # What the devices can do: a batch in 26 ms; and what a port can carry, one batch each more or less.
    most_rps = setting.batch / 0.026
    slack_rps = 4 * setting.batch / (setting.simulated_ns / NS_PER_S)
    for policy in clipper_fig6.POLICIES:
        for network, bits_per_s in clipper_fig6.NETWORKS.items():
            for replicas in setting.replicas:
                rps = found[f"{policy}_{network}_r{replicas}_rps"]
                assert 0 < rps <= replicas * most_rps + slack_rps
            if bits_per_s is not None:
                carried = found[f"{policy}_{network}_r4_port_gbps"] * 1e9
                assert carried <= bits_per_s + slack_rps * setting.row_bytes * 8
    assert found["clipper_1gbps_r4_rps"] < found["clipper_10gbps_r4_rps"]
