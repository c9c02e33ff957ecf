"""`make bench NAME=bench-mixing`: models of all kinds, each asked while six other clients send outliers to it.

Every model of `experiments.bench.mixing_models` is served by one local server on this machine's processor. One
client asks a dozen rows again and again; six others send the same model rows that are scaled by 100, by -1
and by 10,000, zeros, and integers at the upper end of what it takes. Each answer is compared with plain
onnxruntime's to that row alone. Answers that are drawn by chance cannot be compared and are only counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from clockwright.client.client import AsyncClient
from clockwright.client.operator import Operator
from clockwright.errors import RefusedError
from experiments.bench.mixing_models import Array, MixingModel, Row, all_models
from experiments.live.local_server import LocalServer
from experiments.study.bench import Findings, bench

_SCALES = (100.0, -1.0, 1e4, 0.0)
# The SLO is long: a model may have to be loaded, and seven clients share it.
_SLO_MS = 20_000.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is asked."""

    #: Clients that send outliers to each model.
    strangers: int = 6
    rows: int = 12
    #: Times that each model is asked.
    questions: int = 120
    seed: int = 7


@dataclass(slots=True)
class ModelMixing:
    """What one model's client saw."""

    name: str
    row_by_row: bool
    #: Why the server runs rows one by one; empty if it does not.
    one_by_one: str
    #: Why it is not served; empty if it is.
    refused: str
    answers: int = 0
    #: Answers of which the batch had room for others' rows.
    shared_answers: int = 0
    #: Answers that were not plain onnxruntime's.
    mixed_answers: int = 0
    #: The furthest that an answer was off, as a part of its largest number.
    worst: float = 0.0


def expected_answers(model: MixingModel, rows: Iterable[Row]) -> list[dict[str, Array]]:
    """What plain onnxruntime answers to rows alone."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.model.SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    return [dict(zip(names, session.run(names, row), strict=True)) for row in rows]


def distance(found: Array, wanted: Array) -> float:
    """How far an answer is from another, as a part of the largest number; 1 for another label."""
    if found.shape != wanted.shape:
        return 1.0
    if np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f"):
        return 0.0
    if wanted.dtype.kind != "f":
        return 1.0
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    scale = max(float(np.max(np.abs(other), initial=0.0)), 1e-9)
    return float(np.max(np.abs(one - other), initial=0.0)) / scale


async def ask(address: str, model: MixingModel, outcome: ModelMixing, setting: Setting) -> None:
    """Ask a model's rows while other clients send outliers to it."""
    rows = model.rows(np.random.default_rng(setting.seed), setting.rows)
    expected = expected_answers(model, rows)
    generator = np.random.default_rng(setting.seed + 1)
    strangers = [row for scale in _SCALES for row in model.rows(generator, 2, scale)]

    async def disturb(client: AsyncClient, first: int) -> None:
        for number in itertools.count(first):
            with contextlib.suppress(RefusedError):
                await client.infer(model.name, strangers[number % len(strangers)], slo_ms=_SLO_MS)

    async with AsyncClient(address) as client, AsyncClient(address) as other:
        others = [asyncio.create_task(disturb(other, n)) for n in range(setting.strangers)]
        try:
            for number in range(setting.questions):
                place = number % len(rows)
                result = await client.infer(model.name, rows[place], slo_ms=_SLO_MS, explain=True)
                outcome.answers += 1
                outcome.shared_answers += int(result.explanation["batch_size"]) > 1
                if model.repeats:
                    wanted = expected[place]
                    off = max(distance(result.outputs[name], wanted[name]) for name in wanted)
                    outcome.worst = max(outcome.worst, off)
                    # What is not a number is wrong as well.
                    outcome.mixed_answers += not off <= model.tolerance
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def ask_all(models: Sequence[MixingModel], setting: Setting) -> list[ModelMixing]:
    """Serve the models and ask each of them in turn."""
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            path = Path(scratch) / "models" / model.name / "1" / "model.onnx"
            path.parent.mkdir(parents=True)
            onnx.save(model.model, path)
        arguments = ["--models", f"{scratch}/models", "--cache-dir", f"{scratch}/cache"]
        with LocalServer(arguments) as server, Operator(server.address) as operator:
            told = {info.model_id: info for info in operator.models()}
            for model in models:
                info = told[model.name]
                refused = "" if info.state == "READY" else info.reason or info.state
                outcome = ModelMixing(model.name, model.row_by_row, info.one_by_one, refused)
                if not refused:
                    asyncio.run(ask(server.address, model, outcome, setting))
                outcomes.append(outcome)
    return outcomes


def figures_of(outcomes: Sequence[ModelMixing]) -> dict[str, float]:
    """Count what was seen."""
    return {
        "models": len(outcomes),
        "mixing_models": sum(not each.row_by_row for each in outcomes),
        "served_share": sum(not each.refused for each in outcomes) / len(outcomes),
        "served_at_batch_1": sum(bool(each.one_by_one) for each in outcomes),
        "wrongly_batch_1": sum(each.row_by_row and bool(each.one_by_one) for each in outcomes),
        "missed_models": sum(
            not (each.refused or each.row_by_row or each.one_by_one) for each in outcomes
        ),
        "answers": sum(each.answers for each in outcomes),
        "shared_answers": sum(each.shared_answers for each in outcomes),
        "mixed_answers": sum(each.mixed_answers for each in outcomes),
    }


def measure(setting: Setting) -> Findings:
    """Ask all models, and count."""
    outcomes = ask_all(list(all_models()), setting)
    for each in outcomes:
        how = each.one_by_one or each.refused or "in batches"
        print(f"{each.name:20} {how:70} {each.worst:.1e}")
    return Findings(
        figures_of(outcomes), {"by_model": {each.name: asdict(each) for each in outcomes}}
    )


STUDY = bench("bench-mixing", Setting(), measure)
