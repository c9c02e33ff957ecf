"""Clipper's Figure 9: large ensembles under load, with and without leaving stragglers behind.

2 to 20 small forests, each of another seed. `mitigated`: the SLO holds, members that are predicted not to
make it beside the others are not asked, and who has not answered shortly before it is left behind.
`blocking`: the same queries wait for every member.

The real controller (scheduler, runtime, applications) on virtual time, before four of the simulator's
workers, whose steps straggle at random, as labelled in the result; what a forest answers is what it says of
the digit.
`--live` does the same over gRPC with the CPU worker: there late is by the client's clock, and whatever
else the machine does is part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop

from clockwright import AsyncClient, RefusedError
from clockwright.bulk import Buffer
from clockwright.operator import Operator
from clockwright.tensors import TensorSpec
from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES, ModelId
from clockwright.v1 import control_pb2 as pb
from controller.catalogue import Catalogue
from controller.core import Scheduler
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.selection.core.application import Application
from controller.telemetry import Telemetry
from experiments.digits import Array, Digits, load
from experiments.figures.report import picture, write_csv
from experiments.local_server import LocalServer
from experiments.results_file import RESULTS, write_results
from experiments.selection import virtual_time
from experiments.selection.digit_models import Classifier, export, predict, train
from experiments.simulator import Case, Cluster, HostedModel, Network
from experiments.simulator.case import Faults
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Workload

ARMS = ("mitigated", "blocking")

# No member ever missed this SLO, so every query waits for all members: blocking.
_BLOCKING_SLO_MS = 20_000.0

# What a forest costs on every worker.
_LOAD_NS = 2 * NS_PER_MS
_EXEC_NS = {1: NS_PER_MS, 4: 2 * NS_PER_MS, 16: 5 * NS_PER_MS}

_LAST_TRAINING_FORM = 8
_LAST_FORM = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    sizes: tuple[int, ...] = (2, 4, 8, 12, 16, 20)
    #: The paper's SLO.
    slo_ms: float = 20.0
    rate_qps: float = 150.0
    seconds: float = 8.0
    seed: int = 0
    num_workers: int = 4
    noise: Noise = field(default_factory=lambda: Noise(exec_sigma=0.02))
    #: A share of LOADs and EXECs takes so many times as long, which nobody can predict.
    faults: Faults = field(default_factory=lambda: Faults(slow_probability=0.01, slow_factor=30.0))


LIVE = Setting(slo_ms=100.0, rate_qps=40.0, seconds=10.0)


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


def run(setting: Setting, *, say: Callable[[str], None] = lambda _: None) -> list[ArmPoint]:
    """Load every arm at every size, on virtual time."""
    digits = load()
    asked = digits.of_forms(_LAST_TRAINING_FORM + 1, _LAST_FORM)
    forests = small_forests(max(setting.sizes), digits.of_forms(0, _LAST_TRAINING_FORM))
    votes = predict(forests, asked.images)
    points = []
    for size in setting.sizes:
        for arm in ARMS:
            slo_ms = setting.slo_ms if arm == "mitigated" else _BLOCKING_SLO_MS
            names = list(forests)[:size]
            answers = virtual_time.run(
                partial(_load, names, votes[:size], asked.labels, slo_ms, setting)
            )
            point = ArmPoint(arm, size, answers)
            points.append(point)
            _say(point, setting, say)
    return points


def small_forests(num_models: int, training: Digits) -> dict[str, Classifier]:
    """Train forests of three trees, which differ in their seed."""
    from sklearn.ensemble import RandomForestClassifier

    forests = {
        f"forest-{seed}": RandomForestClassifier(3, max_depth=6, random_state=seed)
        for seed in range(num_models)
    }
    train(forests, training)
    return forests


def _case_of(names: list[str], setting: Setting) -> Case:
    """What the workers are; who asks is no part of it."""
    # Forests of different trees are graphs of their own: they share no measurements.
    rows = [
        ProfileRow(name=name, weights_bytes=PAGE_BYTES, load_ns=_LOAD_NS, exec_ns=_EXEC_NS)
        for name in names
    ]
    return Case(
        workload=Workload(models=(), sources=()),
        cluster=Cluster(
            models=tuple(HostedModel(ModelId(row.name), row) for row in rows),
            num_workers=setting.num_workers,
            noise=setting.noise,
        ),
        duration_ns=round(setting.seconds * NS_PER_S),
        network=Network(delay_ns=0),
        faults=setting.faults,
        seed=setting.seed,
    )


async def _load(
    names: list[str], votes: Array, labels: Array, slo_ms: float, setting: Setting
) -> list[QueryOutcome]:
    """Send each query when it is due, whatever became of the queries before it."""
    image = (TensorSpec("image", "INT64", (1,)),)
    label = (TensorSpec("label", "INT64", ()),)
    rows = {name: row for name, row in zip(names, votes.tolist(), strict=True)}

    def answer(model: ModelId, question: Buffer) -> list[Buffer]:
        (index,) = struct.unpack("<q", question)
        return [struct.pack("<q", rows[model][index])]

    rng = Random(setting.seed)
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            version = Path(directory) / name / "1"
            version.mkdir(parents=True)
            (version / "model.onnx").write_bytes(b"modelled")
        runtime = Runtime(Scheduler(), Telemetry(), clock=virtual_time.now_ns)
        catalogue = Catalogue(runtime, Path(directory))
        case = _case_of(names, setting)
        workers = [
            virtual_time.VirtualWorker(
                runtime, catalogue, case, index, answer, inputs=image, outputs=label
            )
            for index in range(setting.num_workers)
        ]
        for worker in workers:
            worker.join()
        await catalogue.scan()
        applications = Applications(runtime, catalogue)
        await applications.restore()
        # The cache would answer what was asked before; here every query is to be computed.
        settings = Application(name="ensemble", models=tuple(names), cache=False)
        running = await applications.put(settings)
        slo_ns = round(slo_ms * NS_PER_MS)

        async def ask(index: int) -> QueryOutcome:
            arrival_ns = virtual_time.now_ns()
            question = struct.pack("<q", index)
            try:
                answered = await applications.answer(
                    running, [question], arrival_ns=arrival_ns, slo_ns=slo_ns, context=""
                )
            except RefusedError as error:
                return QueryOutcome(
                    (virtual_time.now_ns() - arrival_ns) / NS_PER_MS, error.refusal.value
                )
            latency_ms = (virtual_time.now_ns() - arrival_ns) / NS_PER_MS
            members = [
                sum(1 for model in str(answered.parameters[key]).split(",") if model)
                for key in ("models", "missing")
            ]
            (said,) = struct.unpack("<q", answered.outputs[0])
            return QueryOutcome(latency_ms, "OK", said == labels[index], *members)

        loop = asyncio.get_running_loop()
        dues_ns = virtual_time.poisson_ns(setting.rate_qps, setting.seconds, rng)
        # The first queries find the models cold.
        for index in range(20):
            await ask(index)
        began_s, tasks = loop.time(), []
        for due_ns in dues_ns:
            await asyncio.sleep(max(began_s + due_ns / NS_PER_S - loop.time(), 0.0))
            tasks.append(asyncio.create_task(ask(rng.randrange(len(labels)))))
        answers = await asyncio.gather(*tasks)
        await applications.close()
        return list(answers)


def run_live(setting: Setting, *, say: Callable[[str], None] = lambda _: None) -> list[ArmPoint]:
    """Serve with the CPU worker, and load every arm at every size over gRPC."""
    points: list[ArmPoint] = []
    with served(max(setting.sizes)) as (server, names, asked), Operator(server.address) as operator:
        for size in setting.sizes:
            # The cache would answer what was asked before; here every query is to be computed.
            application = pb.Application(name="ensemble", models=names[:size], no_cache=True)
            operator.put_application(application, replace=bool(points))
            for arm in ARMS:
                slo_ms = setting.slo_ms if arm == "mitigated" else _BLOCKING_SLO_MS
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
        figures[f"{arm}_refused_late"] = sum(_outcomes(point).get("LATE", 0) for point in chosen)
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
    live: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[ArmPoint]:
    """Run, and leave `clipper_fig9.json` (or `clipper_fig9_live.json`), a table and a picture."""
    setting = setting or (LIVE if live else Setting())
    points = run_live(setting, say=say) if live else run(setting, say=say)
    name = "clipper_fig9_live" if live else "clipper_fig9"
    write_csv(
        directory / f"{name}.csv",
        ("arm", "size", "queries", "answered", "late", "P50 ms", "P99 ms", "missing", "accuracy"),
        [
            (
                point.arm,
                point.size,
                len(point.answers),
                len(point.ok),
                point.late(setting.slo_ms),
                point.latency_ms(50),
                point.latency_ms(99),
                point.missing,
                point.accuracy,
            )
            for point in points
        ],
    )
    _draw(points, setting, directory / f"{name}.png")
    write_results(
        name,
        figures_of(points, setting),
        command="python -m experiments.figures.clipper_fig9" + (" --live" if live else ""),
        seeds=[setting.seed],
        extra={
            "data": "scikit-learn digits, 8 x 8, split by form; not the paper's MNIST",
            "slo_ms": setting.slo_ms,
            "rate_qps": setting.rate_qps,
            "workers": "CPU worker, live"
            if live
            else f"{setting.num_workers} simulated: {setting.noise}, slow "
            f"{setting.faults.slow_probability:g} x {setting.faults.slow_factor:g}, "
            f"load {_LOAD_NS} ns, exec {_EXEC_NS} ns",
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", action="store_true", help="over gRPC, with the CPU worker")
    live: bool = parser.parse_args().live
    produce(live=live, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
