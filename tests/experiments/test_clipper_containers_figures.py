"""What Clipper's figures are measured with: containers behind the scheduler, without gRPC; never how fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clipper_paper import fig3 as clipper_fig3
from experiments.clipper_paper import fig6 as clipper_fig6
from experiments.clipper_paper.bench import Bench, Serving
from experiments.clipper_paper.models import FORMS, held_out, prepared
from experiments.live.bare_lanes import Prepared, loaded

SIZES = (1, 2, 4)
SERVING = Serving(slo_ms=60_000, batch_sizes=SIZES, warmup_s=0.3, measured_s=0.2)
# A 64th of the rows, each 64 times as large: every handle of the scheduler is audited here.
QUICK6 = clipper_fig6.Setting(
    batch=8, row_bytes=64 * 3072, simulated_warmup_ns=NS_PER_S // 4, simulated_ns=NS_PER_S // 2
)


@pytest.fixture(scope="module")
def no_op() -> Iterator[list[Prepared]]:
    with prepared("native", "no_op", SIZES) as ready:
        yield ready


def test_both_forms_of_a_model_give_the_same_labels() -> None:
    images, labels = held_out()
    answers = []
    for form in FORMS:
        with prepared(form, "linear_svm", (64,)) as (ready,), loaded(ready) as run:
            (index,) = (i for i, spec in enumerate(ready.model.outputs) if spec.name == "label")
            answers.append(np.frombuffer(run(images[:64])[1][index], np.int64))
    assert answers[0].tolist() == answers[1].tolist()
    assert (answers[0] == labels[:64]).mean() > 0.8


def test_a_saturated_container_always_has_a_full_batch(no_op: list[Prepared]) -> None:
    with closing(Bench(no_op, SchedulerConfig(policy="clipper"))) as served:
        measured = served.run(SERVING, outstanding=16)
    assert measured.num_late == 0
    # Compiled sizes only, and with nothing late the largest from the third batch on.
    assert set(measured.batch_rows) <= set(SIZES)
    # What is answered came back in batches; those at the edges of the time counted may differ.
    assert abs(len(measured.latency_ns) - sum(measured.batch_rows)) <= 2 * SIZES[-1]


def test_offered_requests_are_all_answered_and_a_delay_makes_them_wait(
    no_op: list[Prepared],
) -> None:
    delay_ns = 30 * NS_PER_MS
    config = SchedulerConfig(policy="clipper", batch_delay_ns=delay_ns)
    with closing(Bench(no_op, config)) as served:
        measured = served.run(replace(SERVING, warmup_s=0, measured_s=1.0), rate_rps=20, seed=1)
    assert len(measured.latency_ns) == sum(measured.batch_rows)
    # The first batch is full with one row; of the others, some have nobody to share it with in time.
    assert max(measured.latency_ns[1:], default=delay_ns) >= delay_ns


@pytest.mark.parametrize(
    ("p99_ms", "max_batch"),
    [((5.0, 10.0, 30.0), 3.0), ((3.0, 4.0, 6.0), 18.0), ((21.0, 22.0, 23.0), 1.0)],
    ids=["between two sizes", "beyond the largest", "below the smallest"],
)
def test_profile_finds_where_the_p99_crosses_the_slo(
    p99_ms: tuple[float, ...], max_batch: float
) -> None:
    points = [
        clipper_fig3.BatchPoint(
            form="native",
            kind="no_op",
            batch_size=size,
            p50_ms=2.0 + size,
            p99_ms=late_ms,
            runs=3,
            extrapolated=p99_ms[-1] <= clipper_fig3.SLO_MS,
        )
        for size, late_ms in zip(SIZES, p99_ms, strict=True)
    ]
    figures = clipper_fig3.profile(points)
    assert figures["max_batch_slo20"] == pytest.approx(max_batch)
    assert figures["linear_r2"] == pytest.approx(1.0)


def test_throughput_scales_to_the_port_that_replicas_share() -> None:
    setting = QUICK6
    most_rps = setting.batch / 0.026
    # One batch each more or less.
    slack_rps = 4 * setting.batch / (setting.simulated_ns / NS_PER_S)
    for policy, network in product(clipper_fig6.POLICIES, clipper_fig6.NETWORKS):
        point = clipper_fig6.simulate(setting, policy, network, 4)
        assert 0 < point.throughput_rps <= 4 * most_rps + slack_rps
        if (bits_per_s := clipper_fig6.NETWORKS[network]) is not None:
            carried = point.port_gbps * 1e9
            assert carried <= bits_per_s + slack_rps * setting.row_bytes * 8
    ten, one = (clipper_fig6.simulate(setting, "clipper", n, 4) for n in ("10gbps", "1gbps"))
    assert one.throughput_rps < ten.throughput_rps
