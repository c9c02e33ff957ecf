"""Clipper's Figure 9: large ensembles under load, with and without leaving stragglers behind.

2 to 20 small forests, each of another seed, served by a real `clockwright up` with the CPU worker, and asked over
gRPC. `mitigated`: the SLO holds, members that are predicted not to make it beside the others are not asked, and
who has not answered shortly before it is left behind. `blocking`: the same queries wait for every member.

Stragglers are real: for every core a neighbour, a process that computes in bursts at random times, takes the processor
from controller and worker alike. So an answer may be late, and a query refused because it became late:
both are counted. The client runs at real-time priority where that is allowed, and late is by its clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from clockwright import AsyncClient, RefusedError
from clockwright.operator import Operator
from clockwright.v1 import control_pb2 as pb
from experiments.digits.images import Array, Digits, load
from experiments.digits.models import Classifier, export, train
from experiments.live.local_server import LocalServer
from experiments.live.open_loop import before_others
from experiments.results_file import RESULTS, write_results
from experiments.study.report import picture, write_csv

ARMS = ("mitigated", "blocking")

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
    """Numbers of the experiment, which tests make smaller."""

    sizes: tuple[int, ...] = (2, 4, 8, 12, 16, 20)
    #: The paper's is 20 ms, on 48 cores.
    slo_ms: float = 100.0
    rate_qps: float = 40.0
    #: How long each arm is asked at each size.
    seconds: float = 5.0
    seed: int = 0
    #: Times that a neighbour sleeps and computes, on average.
    idle_s: float = 0.3
    busy_s: float = 0.05


@dataclass(frozen=True, slots=True)
class QueryOutcome:
    """One query, as its client saw it."""

    latency_ms: float
    #: "OK", or why there was no answer.
    outcome: str
    right: bool = False
    num_answered: int = 0
    num_missing: int = 0


@dataclass(frozen=True, slots=True)
class ArmPoint:
    """One arm at one size."""

    arm: str
    size: int
    answers: list[QueryOutcome]

    @property
    def ok(self) -> list[QueryOutcome]:
        """Queries that were answered."""
        return [answer for answer in self.answers if answer.outcome == "OK"]

    def latency_ms(self, percentile: float) -> float:
        """Percentile of the answers' latency; NaN without any answer."""
        latencies = [answer.latency_ms for answer in self.ok]
        return float(np.percentile(latencies, percentile)) if latencies else float("nan")

    def late(self, slo_ms: float) -> int:
        """Answers in the client's hand after the SLO."""
        return sum(answer.latency_ms > slo_ms for answer in self.ok)

    @property
    def refused_late(self) -> int:
        """Queries that were refused because they had become late."""
        return sum(answer.outcome == "LATE" for answer in self.answers)

    @property
    def missing(self) -> float:
        """Share of members that an answer does without."""
        asked = sum(answer.num_answered + answer.num_missing for answer in self.ok)
        return sum(answer.num_missing for answer in self.ok) / max(asked, 1)

    @property
    def accuracy(self) -> float:
        """Share of the answers that are right."""
        return sum(answer.right for answer in self.ok) / max(len(self.ok), 1)


def write_forests(directory: Path, num_models: int, training: Digits) -> list[str]:
    """Write small forests in Triton's layout; returns their names."""
    forests = small_forests(num_models, training)
    for name, forest in forests.items():
        path = directory / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(export(forest, training.images).SerializeToString())
        (directory / name / "config.toml").write_text("batch_sizes = [1, 4, 16]\n")
    return list(forests)


@contextmanager
def served(num_models: int) -> Iterator[tuple[LocalServer, list[str], Digits]]:
    """A live server with forests, and digits in hands that they have not seen."""
    digits = load()
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models"
        names = write_forests(models, num_models, digits.of_forms(0, _LAST_TRAINING_FORM))
        arguments = ["--models", str(models), "--cache-dir", f"{directory}/cache"]
        with LocalServer(arguments, start_limit_s=300) as server:
            yield server, names, digits.of_forms(_LAST_TRAINING_FORM + 1, _LAST_FORM)


async def load_application(
    address: str, name: str, asked: Digits, *, slo_ms: float, setting: Setting
) -> list[QueryOutcome]:
    """Send each query when it is due, whatever became of the queries before it."""
    random = np.random.default_rng(setting.seed)
    count = round(setting.rate_qps * setting.seconds)
    dues_s = np.cumsum(random.exponential(1 / setting.rate_qps, count))
    drawn = random.integers(0, len(asked.labels), count)

    async with AsyncClient(address) as client:

        async def ask(image: Array, label: int) -> QueryOutcome:
            began = time.perf_counter()
            try:
                result = await client.infer(name, {"X": image}, slo_ms=slo_ms)
            except RefusedError as error:
                latency_ms = (time.perf_counter() - began) * 1e3
                return QueryOutcome(latency_ms, error.refusal.value)
            latency_ms = (time.perf_counter() - began) * 1e3
            members = [
                sum(1 for model in str(result.explanation[key]).split(",") if model)
                for key in ("models", "missing")
            ]
            right = int(result.outputs["label"].reshape(-1)[0]) == label
            return QueryOutcome(latency_ms, "OK", right, *members)

        # The first queries find the models cold.
        for index in range(20):
            await ask(asked.images[index : index + 1], -1)
        began_s = time.perf_counter()
        tasks = []
        for due_s, index in zip(dues_s, drawn, strict=True):
            await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            image, label = asked.images[index : index + 1], int(asked.labels[index])
            tasks.append(asyncio.create_task(ask(image, label)))
        return list(await asyncio.gather(*tasks))


def small_forests(num_models: int, training: Digits) -> dict[str, Classifier]:
    """Train forests of three trees, which differ in their seed."""
    from sklearn.ensemble import RandomForestClassifier

    forests = {
        f"forest-{seed}": RandomForestClassifier(3, max_depth=6, random_state=seed)
        for seed in range(num_models)
    }
    train(forests, training)
    return forests


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


def run(setting: Setting, *, say: Callable[[str], None] = lambda _: None) -> list[ArmPoint]:
    """Load every arm at every size."""
    points: list[ArmPoint] = []
    with (
        served(max(setting.sizes)) as (server, names, asked),
        Operator(server.address) as operator,
        neighbours(setting),
    ):
        for size in setting.sizes:
            # The cache would answer what was asked before; here every query is to be computed.
            application = pb.Application(name="ensemble", models=names[:size], no_cache=True)
            operator.put_application(application, replace=bool(points))
            for arm in ARMS:
                slo_ms = setting.slo_ms if arm == "mitigated" else _BLOCKING_SLO_MS
                with before_others():
                    answers = uvloop.run(
                        load_application(
                            server.address, "ensemble", asked, slo_ms=slo_ms, setting=setting
                        )
                    )
                point = ArmPoint(arm, size, answers)
                points.append(point)
                _say(point, setting, say)
    return points


def _say(point: ArmPoint, setting: Setting, say: Callable[[str], None]) -> None:
    say(
        f"{point.arm} {point.size}: P50 {point.latency_ms(50):.1f} ms, P99 {point.latency_ms(99):.1f} ms,"
        f" late {point.late(setting.slo_ms)} of {len(point.ok)}, missing {point.missing:.3f},"
        f" accuracy {point.accuracy:.3f}, {_outcomes(point)}"
    )


def _outcomes(point: ArmPoint) -> dict[str, int]:
    return dict(sorted(Counter(answer.outcome for answer in point.answers).items()))


def figures_of(points: list[ArmPoint], setting: Setting) -> dict[str, float]:
    """The numbers that are quoted."""
    figures: dict[str, float] = {}
    for arm in ARMS:
        chosen = [point for point in points if point.arm == arm]
        figures[f"{arm}_late_answers"] = sum(point.late(setting.slo_ms) for point in chosen)
        figures[f"{arm}_answers"] = sum(len(point.ok) for point in chosen)
        figures[f"{arm}_refused_late"] = sum(point.refused_late for point in chosen)
        figures[f"{arm}_queries"] = sum(len(point.answers) for point in chosen)
        for point in chosen:
            for percentile in (50, 99):
                if point.ok:
                    figures[f"{arm}_{point.size}_p{percentile}_ms"] = point.latency_ms(percentile)
            figures[f"{arm}_{point.size}_missing"] = point.missing
            figures[f"{arm}_{point.size}_accuracy"] = point.accuracy
    return figures


def produce(
    setting: Setting | None = None,
    directory: Path = RESULTS,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[ArmPoint]:
    """Run, and leave `clipper_fig9.json`, a table and a picture."""
    setting = setting or Setting()
    points = run(setting, say=say)
    write_csv(
        directory / "clipper_fig9.csv",
        (
            *(
                "arm",
                "size",
                "queries",
                "answered",
                "answered late",
                "refused LATE",
                "refused otherwise",
            ),
            *("P50 ms", "P99 ms", "missing", "accuracy"),
        ),
        [
            (
                point.arm,
                point.size,
                len(point.answers),
                len(point.ok),
                point.late(setting.slo_ms),
                point.refused_late,
                len(point.answers) - len(point.ok) - point.refused_late,
                point.latency_ms(50),
                point.latency_ms(99),
                point.missing,
                point.accuracy,
            )
            for point in points
        ],
    )
    _draw(points, setting, directory / "clipper_fig9.png")
    write_results(
        "clipper_fig9",
        figures_of(points, setting),
        command=f"python -m experiments clipper_fig9 --seconds {setting.seconds:g}",
        seeds=[setting.seed],
        extra={
            "data": "scikit-learn digits, 8 x 8, split by form; not the paper's MNIST",
            "slo_ms": setting.slo_ms,
            "rate_qps": setting.rate_qps,
            "workers": "the CPU worker, live",
            "neighbours": f"{os.cpu_count()}, idle {setting.idle_s:g} s, busy {setting.busy_s:g} s",
            "outcomes": {f"{point.arm} {point.size}": _outcomes(point) for point in points},
            "paper": "blocking P99 far over 20 ms, with the deadline at it; few missing cost little accuracy",
        },
        directory=directory,
    )
    return points


def _draw(points: list[ArmPoint], setting: Setting, target: Path) -> None:
    with picture(target, 1, 3, size=(11, 3.5)) as grid:
        latency, missing, accuracy = grid[0]
        panels: list[tuple[Any, str, Callable[[ArmPoint], float]]] = [
            (latency, "latency P99 (ms)", lambda point: point.latency_ms(99)),
            (missing, "members missing", lambda point: point.missing),
            (accuracy, "accuracy", lambda point: point.accuracy),
        ]
        for axes, title, value in panels:
            for arm in ARMS:
                chosen = [point for point in points if point.arm == arm]
                sizes, values = [p.size for p in chosen], [value(p) for p in chosen]
                axes.plot(sizes, values, marker="o", label=arm)
            axes.set_xlabel("models in the ensemble")
            axes.set_title(title, fontsize="medium")
        latency.axhline(setting.slo_ms, color="grey", ls=":", label="SLO")
        latency.set_yscale("log")
        latency.legend(fontsize="x-small")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=Setting().seconds, help="of each point")
    setting = Setting(seconds=parser.parse_args().seconds)
    produce(setting, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
