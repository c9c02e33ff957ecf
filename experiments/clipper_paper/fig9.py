"""Clipper's Figure 9: large ensembles under load, with and without leaving stragglers behind.

2 to 20 small forests, each of another seed, served by a real `clockwright up` with the CPU worker, and asked over
gRPC. `mitigated`: the SLO holds, members that are predicted not to make it together with the others are not asked, and
who has not answered shortly before it is left behind. `blocking`: the same queries wait for every member.

Stragglers are real: for every core a neighbour, a process that computes in bursts at random times, takes the processor
from controller and worker alike. So an answer may be late, and a query refused because it became late:
both are counted. The client runs at real-time priority where that is allowed, and late is by its clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import uvloop

from clockwright import AsyncClient, RefusedError
from clockwright.client.operator import Operator
from clockwright.v1 import control_pb2 as pb
from experiments.digits.images import Digits, load
from experiments.digits.models import export
from experiments.live.asker import ask_at
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop import before_others
from experiments.study.pictures import Panel, lines, unlabelled
from experiments.study.study import ONLY_TABLE, Study, StudyRecord

ARMS = ("mitigated", "blocking")

_APPLICATION = "ensemble"

# No member ever missed this SLO, so every query waits for all members: blocking.
_BLOCKING_SLO_MS = 20_000.0

# One core's neighbour: it sleeps, then computes, each for an exponential time.
_NEIGHBOUR = """
import random, sys, time
rng, idle_s, busy_s = random.Random(int(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3])
while True:
    time.sleep(rng.expovariate(1 / idle_s))
    end_s = time.monotonic() + rng.expovariate(1 / busy_s)
    while time.monotonic() < end_s:
        pass
"""

_LAST_TRAINING_FORM = 8
_LAST_FORM = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is asked."""

    sizes: tuple[int, ...] = (2, 4, 8, 12, 16, 20)
    #: The paper's, which had 48 cores.
    slo_ms: float = 20.0
    rate_qps: float = 40.0
    #: How long each arm is asked at each size.
    seconds: float = 5.0
    seed: int = 0
    #: Times that a neighbour sleeps and computes, on average.
    idle_s: float = 0.3
    busy_s: float = 0.05


class QueryOutcome(NamedTuple):
    """One query, as its client saw it."""

    latency_ms: float
    #: "OK", or why there was no answer.
    outcome: str
    right: bool = False
    num_answered: int = 0
    num_missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPoint:
    """One arm at one size."""

    arm: str
    size: int
    queries: Annotated[int, ONLY_TABLE]
    answered: Annotated[int, ONLY_TABLE]
    #: In the client's hand after the SLO.
    answered_late: Annotated[int, ONLY_TABLE]
    #: Refused because they had become late.
    refused_late: Annotated[int, ONLY_TABLE]
    refused_otherwise: Annotated[int, ONLY_TABLE]
    #: Latency of the answers; 0 without any.
    p50_ms: float
    p99_ms: float
    #: Share of members that an answer does without.
    missing: float
    #: Share of the answers that are right.
    accuracy: float


def point_of(arm: str, size: int, outcomes: Sequence[QueryOutcome], slo_ms: float) -> ArmPoint:
    """Count the queries of one arm at one size."""
    ok = [each for each in outcomes if each.outcome == "OK"]
    refused_late = sum(each.outcome == "LATE" for each in outcomes)
    p50_ms, p99_ms = np.percentile([each.latency_ms for each in ok] or [0.0], (50, 99))
    num_missing = sum(each.num_missing for each in ok)
    asked = sum(each.num_answered for each in ok) + num_missing
    return ArmPoint(
        arm=arm,
        size=size,
        queries=len(outcomes),
        answered=len(ok),
        answered_late=sum(each.latency_ms > slo_ms for each in ok),
        refused_late=refused_late,
        refused_otherwise=len(outcomes) - len(ok) - refused_late,
        p50_ms=float(p50_ms),
        p99_ms=float(p99_ms),
        missing=num_missing / max(asked, 1),
        accuracy=sum(each.right for each in ok) / max(len(ok), 1),
    )


@contextmanager
def served(num_models: int) -> Iterator[tuple[LocalServer, list[str], Digits]]:
    """A live server with small forests, and digits in hands that they have not seen."""
    from sklearn.ensemble import RandomForestClassifier

    digits = load()
    training = digits.of_forms(0, _LAST_TRAINING_FORM)
    names = [f"forest-{seed}" for seed in range(num_models)]
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models"
        for seed, name in enumerate(names):
            forest = RandomForestClassifier(3, max_depth=6, random_state=seed)
            graph = export(forest.fit(training.images, training.labels), training.images)
            (models / name / "1").mkdir(parents=True)
            (models / name / "1" / "model.onnx").write_bytes(graph.SerializeToString())
            (models / name / "config.toml").write_text("batch_sizes = [1, 4, 16]\n")
        with LocalServer(folders(directory)) as server:
            yield server, names, digits.of_forms(_LAST_TRAINING_FORM + 1, _LAST_FORM)


async def load_application(
    address: str, asked: Digits, *, slo_ms: float, setting: Setting
) -> list[QueryOutcome]:
    """Send each query when it is due, whatever happened to the queries before it."""
    random = np.random.default_rng(setting.seed)
    count = round(setting.rate_qps * setting.seconds)
    dues_s = np.cumsum(random.exponential(1 / setting.rate_qps, count))
    drawn = random.integers(0, len(asked.labels), count)

    async with AsyncClient(address) as client:

        async def ask(index: int) -> QueryOutcome:
            began = time.perf_counter()
            image = asked.images[index : index + 1]
            try:
                result = await client.infer(_APPLICATION, {"X": image}, slo_ms=slo_ms)
                outcome = "OK"
            except RefusedError as error:
                result, outcome = None, error.refusal.value
            latency_ms = (time.perf_counter() - began) * 1e3
            if result is None:
                return QueryOutcome(latency_ms, outcome)
            members = [
                len([model for model in str(result.explanation[key]).split(",") if model])
                for key in ("models", "missing")
            ]
            right = int(result.outputs["label"].reshape(-1)[0]) == int(asked.labels[index])
            return QueryOutcome(latency_ms, outcome, right, *members)

        # The first queries find the models cold.
        for index in range(20):
            await ask(index)
        return await ask_at(dues_s, lambda number: ask(drawn[number]))


@contextmanager
def neighbours(setting: Setting) -> Iterator[None]:
    """Have others compute on this machine, in bursts."""
    times = (str(setting.idle_s), str(setting.busy_s))
    processes = [
        subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(setting.seed + core), *times])
        for core in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(setting: Setting) -> Iterator[ArmPoint]:
    """Load every arm at every size."""
    with (
        served(max(setting.sizes)) as (server, names, asked),
        Operator(server.address) as operator,
        neighbours(setting),
    ):
        for number, size in enumerate(setting.sizes):
            # The cache would answer what was asked before; here every query is to be computed.
            application = pb.Application(name=_APPLICATION, models=names[:size], no_cache=True)
            operator.put_application(application, replace=number > 0)
            for arm, slo_ms in (("mitigated", setting.slo_ms), ("blocking", _BLOCKING_SLO_MS)):
                asking = load_application(server.address, asked, slo_ms=slo_ms, setting=setting)
                with before_others():
                    outcomes = uvloop.run(asking)
                yield point_of(arm, size, outcomes, setting.slo_ms)


def totals(_setting: Setting, points: Sequence[ArmPoint]) -> dict[str, float]:
    """Counts over all sizes, by arm."""
    names = {
        "late_answers": "answered_late",
        "answers": "answered",
        "refused_late": "refused_late",
        "queries": "queries",
    }
    return {
        f"{arm}_{key}": sum(getattr(point, name) for point in points if point.arm == arm)
        for arm in ARMS
        for key, name in names.items()
    }


def panels(setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """What leaving stragglers behind saves, and what it costs."""

    def panel(title: str, y: str, of: str, factor: int = 100, **others: Any) -> Panel:  # noqa: ANN401
        def value(row: Mapping[str, Any]) -> float:
            return factor * recorded.figures[f"{row['arm']}_{row['size']}_{of}"]

        curves = lines(recorded.rows, "size", value, by="arm")
        # Labels of the row are read at its end.
        curves = curves if of == "accuracy" else unlabelled(curves)
        return Panel(title=title, x="number of models", y=y, curves=curves, **others)

    shares: dict[str, Any] = {"y_range": (0, 100)}
    slo = {setting.slo_ms: "SLO"}
    return [
        [
            panel("How long the slowest answers take", "P99, ms", "p99_ms", 1, levels=slo),
            panel("Members that were left behind", "members missing, %", "missing", **shares),
            panel("Answers that are right", "right answers, %", "accuracy", **shares),
        ]
    ]


STUDY = Study(
    name="clipper_fig9",
    setting=Setting(),
    ask=measure,
    key="{arm}_{size}",
    figures=totals,
    title="Waiting for every model of an ensemble takes far longer than its SLO; leaving stragglers behind does not.",
    panels=panels,
    extra=lambda setting, _: {
        "data": "scikit-learn digits, 8 x 8, split by form; not the paper's MNIST",
        "slo_ms": setting.slo_ms,
        "neighbours": f"{os.cpu_count()}, idle {setting.idle_s:g} s, busy {setting.busy_s:g} s",
        "paper": "blocking P99 far over 20 ms, with the deadline at it; few missing cost little accuracy",
    },
)
