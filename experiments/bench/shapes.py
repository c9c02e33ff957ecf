"""`make bench NAME=bench-shapes`: a transformer asked with texts of many lengths, served with open dimensions and without.

The same requests go to the same network in three forms, one after the other: as shipped; with a fixed length, which
clients pad to; and with a fixed batch of 1, so that each request is a run of its own. Arrivals are Poisson, lengths are
log-normal, and SLOs are mixed. Goodput counts answers in time by the client's clock.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from clockwright.client.client import AsyncClient
from clockwright.errors import RefusedError
from experiments.bench.open_models import Array, encoder
from experiments.live.local_server import LocalServer
from experiments.study.bench import Findings, bench


@dataclass(frozen=True, slots=True)
class Setting:
    """The network, and what is asked of it."""

    layers: int = 4
    hidden: int = 128
    #: The largest length.
    positions: int = 256
    #: The lengths have this median, and their logarithm this deviation.
    length: float = 24.0
    spread: float = 0.8
    #: Requests per second, more than any form can answer.
    rate: float = 600.0
    seconds: float = 20.0
    #: Each request has one of them.
    slos_ms: tuple[float, ...] = (50.0, 100.0, 250.0)
    seed: int = 1


@dataclass(slots=True)
class FormOutcome:
    """What clients saw of one form."""

    in_time: int = 0
    late: int = 0
    refused: int = 0
    #: How far the predicted run was off, as a part of the run.
    errors: list[float] = field(default_factory=list)


#: The forms, with what is in their `config.toml`.
FORMS = {
    "open": "",
    "padded": "[dimensions]\nsequence = {positions}\n",
    "alone": "",
}


def write_forms(folder: Path, setting: Setting) -> None:
    """Write the network in each form as a server reads it."""
    for name, config in FORMS.items():
        model = encoder(layers=setting.layers, hidden=setting.hidden, positions=setting.positions)
        if name == "alone":
            for value in (*model.graph.input, *model.graph.output):
                value.type.tensor_type.shape.dim[0].dim_value = 1
        (folder / name / "1").mkdir(parents=True)
        onnx.save(model, folder / name / "1" / "model.onnx")
        text = "batch_sizes = [1, 2, 4, 8]\n" + config.format(positions=setting.positions)
        (folder / name / "config.toml").write_text(text)


def make_requests(setting: Setting) -> list[tuple[float, float, dict[str, Array]]]:
    """Draw requests: when each is sent, its SLO, and its inputs."""
    random = np.random.default_rng(setting.seed)
    number = int(setting.rate * setting.seconds)
    at_s = np.cumsum(random.exponential(1 / setting.rate, number))
    lengths = random.lognormal(np.log(setting.length), setting.spread, number)
    requests = []
    for due_s, length in zip(at_s, lengths, strict=True):
        shape = (1, int(np.clip(length, 1, setting.positions)))
        tokens = {
            "input_ids": random.integers(0, 1000, shape),
            "attention_mask": np.ones(shape, np.int64),
        }
        requests.append((float(due_s), float(random.choice(setting.slos_ms)), tokens))
    return requests


async def ask(address: str, name: str, setting: Setting) -> FormOutcome:
    """Send all requests to one form when they are due."""
    outcome = FormOutcome()
    async with AsyncClient(address) as client:

        async def send(number: int, slo_ms: float, tokens: dict[str, Array]) -> None:
            if name == "padded":
                room = setting.positions - tokens["input_ids"].shape[1]
                tokens = {
                    each: np.pad(array, ((0, 0), (0, room))) for each, array in tokens.items()
                }
            begin_s = time.monotonic()
            try:
                result = await client.infer(name, tokens, slo_ms=slo_ms, explain=not number % 8)
            except RefusedError:
                outcome.refused += 1
                return
            if time.monotonic() - begin_s > slo_ms / 1000:
                outcome.late += 1
            else:
                outcome.in_time += 1
            if run_us := int(result.explanation.get("exec_us", 0)):
                predicted_us = int(result.explanation["predicted_exec_us"])
                outcome.errors.append(abs(predicted_us - run_us) / run_us)

        begin_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, (due_s, slo_ms, tokens) in enumerate(make_requests(setting)):
                await asyncio.sleep(max(begin_s + due_s - time.monotonic(), 0))
                tasks.create_task(send(number, slo_ms, tokens))
    return outcome


def measure(setting: Setting) -> Findings:
    """Serve all forms, and ask one after the other."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_forms(Path(scratch) / "models", setting)
        arguments = ["--models", f"{scratch}/models", "--cache-dir", f"{scratch}/cache"]
        with LocalServer(arguments) as server:
            for name in FORMS:
                outcome = asyncio.run(ask(server.address, name, setting))
                figures[f"{name}_goodput_rps"] = outcome.in_time / setting.seconds
                figures[f"{name}_late"] = outcome.late
                figures[f"{name}_refused"] = outcome.refused
                figures[f"{name}_prediction_error"] = median(outcome.errors or [0.0])
    best = figures["open_goodput_rps"]
    figures["open_to_padded"] = best / max(figures["padded_goodput_rps"], 1.0)
    figures["open_to_alone"] = best / max(figures["alone_goodput_rps"], 1.0)
    return Findings(figures)


STUDY = bench("bench-shapes", Setting(), measure)
