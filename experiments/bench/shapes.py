"""`make bench NAME=bench-shapes`: a transformer asked with texts of many lengths, served with open dimensions and without.

The same requests go to the same network in three forms, in turns: as shipped; with a fixed length, which clients pad to;
and with a fixed batch of 1, so that each request is a run of its own. Arrivals are Poisson, twice as many as single runs
could answer, so all forms are saturated. Lengths are those of a service, and SLOs are mixed. Goodput counts answers in
time by the client's clock, `late_success` answers that are late by the server's.

`runtime_gain` is what running requests together gains without a server: plain onnxruntime runs batches of equal lengths,
and each length alone. A server gains more than that, because what a run costs it is shared, too.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

from clockwright.client.client import AsyncClient
from clockwright.errors import RefusedError
from experiments.bench.open_models import Array, encoder
from experiments.live.asker import ask_at
from experiments.live.local_server import LocalServer, folders
from experiments.study.bench import Findings, bench, need_cores
from worker.engines.onnxruntime import open_session

# The tokens that requests had generated, from the least to the most in steps of 2 %: 8,819 requests of a service for code,
# 2023 (AzurePublicDataset, AzureLLMInferenceTrace_code). The longest are cut to what the network takes.
_LENGTHS = (
    *(6, 6, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 9, 9, 9, 9, 10, 10, 10, 11, 11, 12, 12, 12, 13),
    *(13, 13, 14, 14, 15, 16, 16, 17, 18, 19, 20, 21, 23, 25, 27, 29, 32, 37, 42, 48, 55),
    *(65, 79, 105, 170, 1899),
)
# The gain takes the lengths in the middle of so many equal parts of the requests.
_PARTS = 20
# Single runs in each turn: they are short.
_SINGLE_RUNS = 4
# A batch of this length and more gains nothing by company on any processor tried.
_LONG = 128


@dataclass(frozen=True, slots=True)
class Setting:
    """The network, and what is asked of it."""

    #: Those of BERT-Mini.
    layers: int = 4
    hidden: int = 256
    #: The largest length.
    positions: int = 256
    #: Requests per second, as a multiple of what single runs could answer.
    load: float = 2.0
    #: Each form is asked so many times, so long.
    turns: int = 4
    seconds: float = 8.0
    #: Each request has one of them.
    slos_ms: tuple[float, ...] = (100.0, 250.0, 500.0)
    #: Runs of each batch that the gain is measured by; the shortest counts.
    gain_runs: int = 5
    #: Batches that the gain tries.
    gain_batches: tuple[int, ...] = (4, 8, 16)
    seed: int = 1


@dataclass(slots=True)
class FormOutcome:
    """What clients saw of one form."""

    asked: int = 0
    in_time: int = 0
    #: Answers that took longer than the SLO by the client's clock, and by the server's.
    late: int = 0
    late_by_server: int = 0
    refused: int = 0
    #: How far the predicted run was off, as a part of the run.
    errors: list[float] = field(default_factory=list)


#: The forms, with what is in their `config.toml`.
FORMS = {
    "open": "",
    "padded": "[dimensions]\nsequence = {positions}\n",
    "alone": "",
}


def network(setting: Setting) -> onnx.ModelProto:
    """Make the network as an exporter does."""
    return encoder(
        layers=setting.layers,
        hidden=setting.hidden,
        positions=setting.positions,
    )


def write_forms(folder: Path, setting: Setting) -> None:
    """Write the network in each form as a server reads it."""
    for name, config in FORMS.items():
        model = network(setting)
        if name == "alone":
            for value in (*model.graph.input, *model.graph.output):
                value.type.tensor_type.shape.dim[0].dim_value = 1
        (folder / name / "1").mkdir(parents=True)
        onnx.save(model, folder / name / "1" / "model.onnx")
        text = "batch_sizes = [1, 2, 4, 8]\n" + config.format(positions=setting.positions)
        (folder / name / "config.toml").write_text(text)


def draw_lengths(setting: Setting, random: np.random.Generator, number: int) -> list[int]:
    """Draw lengths as the service has them."""
    return [length_at(setting, share) for share in random.random(number)]


def length_at(setting: Setting, share: float) -> int:
    """The length that this share of the requests does not exceed."""
    length = np.interp(share * (len(_LENGTHS) - 1), range(len(_LENGTHS)), _LENGTHS)
    return int(min(length, setting.positions))


def tokens_of(random: np.random.Generator, rows: int, length: int) -> dict[str, Array]:
    """Make rows of one length."""
    return {
        "input_ids": random.integers(0, 1000, (rows, length)),
        "attention_mask": np.ones((rows, length), np.int64),
    }


def measure_gain(setting: Setting) -> tuple[float, float]:
    """Measure what batches of equal lengths gain over single runs.

    Returns:
        Seconds of a single run, on average over the lengths; and how many times as many requests the best batches answer.
    """
    random = np.random.default_rng(setting.seed)
    session = open_session(network(setting).SerializeToString())
    lengths = [length_at(setting, (part + 0.5) / _PARTS) for part in range(_PARTS)]
    alone_s: dict[int, float] = {}
    best_s: dict[int, float] = {}
    for length in sorted(set(lengths)):
        sizes = (1, *setting.gain_batches) if length < _LONG else (1,)
        taken: dict[int, list[float]] = {size: [] for size in sizes}
        batches = {size: tokens_of(random, size, length) for size in sizes}
        # In turns, so that other load on the machine meets all of them. The first runs allocate.
        for _ in range(setting.gain_runs + 1):
            for size, batch in batches.items():
                for _ in range(_SINGLE_RUNS if size == 1 else 1):
                    begin_s = time.perf_counter()
                    session.run(None, batch)
                    taken[size].append((time.perf_counter() - begin_s) / size)
        each_s = {size: min(found[1:]) for size, found in taken.items()}
        alone_s[length], best_s[length] = each_s[1], min(each_s.values())
    total_s = sum(alone_s[length] for length in lengths)
    return total_s / len(lengths), total_s / sum(best_s[length] for length in lengths)


Request = tuple[float, float, dict[str, Array]]


def make_requests(setting: Setting, rate_rps: float, seed: int) -> list[Request]:
    """Draw requests: when each is sent, its SLO, and its inputs."""
    random = np.random.default_rng(seed)
    number = max(int(rate_rps * setting.seconds), 1)
    at_s = np.cumsum(random.exponential(1 / rate_rps, number))
    return [
        (float(due_s), float(random.choice(setting.slos_ms)), tokens_of(random, 1, length))
        for due_s, length in zip(at_s, draw_lengths(setting, random, number), strict=True)
    ]


async def ask(
    address: str, name: str, setting: Setting, requests: Sequence[Request], outcome: FormOutcome
) -> None:
    """Send requests to one form when they are due, and add to what clients saw of it."""
    outcome.asked += len(requests)
    async with AsyncClient(address) as client:

        async def send(slo_ms: float, tokens: dict[str, Array]) -> None:
            if name == "padded":
                room = setting.positions - tokens["input_ids"].shape[1]
                tokens = {
                    each: np.pad(array, ((0, 0), (0, room))) for each, array in tokens.items()
                }
            begin_s = time.monotonic()
            try:
                result = await client.infer(name, tokens, slo_ms=slo_ms, explain=True)
            except RefusedError:
                outcome.refused += 1
                return
            if time.monotonic() - begin_s > slo_ms / 1000:
                outcome.late += 1
            else:
                outcome.in_time += 1
            said = result.explanation
            outcome.late_by_server += int(said["measured_us"]) > slo_ms * 1000
            outcome.errors.append(_error(said))

        await ask_at((due_s for due_s, *_ in requests), lambda n: send(*requests[n][1:]))


async def ask_unseen(address: str, setting: Setting) -> list[float]:
    """Ask sizes that were never run, one at a time. Returns how far each prediction was off, as a part of the run."""
    random = np.random.default_rng(setting.seed)
    errors: dict[int, float] = {}
    async with AsyncClient(address) as client:
        # Each length is longer than the one before, and the first of its rows of work counts. The shortest loads the weights.
        length = 1.0
        while length < setting.positions:
            tokens = tokens_of(random, 1, int(length))
            said = (await client.infer("open", tokens, slo_ms=60_000, explain=True)).explanation
            errors.setdefault(int(said["batch_size"]), _error(said))
            length *= 1.18
    return list(errors.values())[1:]


def _error(said: Mapping[str, Any]) -> float:
    """How far a prediction was off, as a part of the run."""
    return float(abs(said["predicted_exec_us"] - said["exec_us"]) / said["exec_us"])


def measure(setting: Setting) -> Findings:
    """Measure the gain; then serve all forms, and ask them in turns."""
    need_cores(2)
    alone_s, gain = measure_gain(setting)
    rate_rps = setting.load / alone_s
    figures = {"rate_rps": rate_rps, "alone_ms": alone_s * 1000, "runtime_gain": gain}
    outcomes = {name: FormOutcome() for name in FORMS}
    with tempfile.TemporaryDirectory() as scratch:
        write_forms(Path(scratch) / "models", setting)
        # The other cores are for the controller and for the clients.
        with LocalServer([*folders(scratch), "--threads", "1"]) as server:
            unseen = asyncio.run(ask_unseen(server.address, setting))
            # The first round warms up.
            for turn in range(setting.turns + 1):
                requests = make_requests(setting, rate_rps, setting.seed + turn)
                for name in FORMS:
                    found = outcomes[name] if turn else FormOutcome()
                    asyncio.run(ask(server.address, name, setting, requests, found))
    for name, outcome in outcomes.items():
        figures[f"{name}_goodput_rps"] = outcome.in_time / (setting.turns * setting.seconds)
        figures[f"{name}_refused_share"] = outcome.refused / max(outcome.asked, 1)
        figures[f"{name}_late_by_client"] = outcome.late
        figures[f"{name}_prediction_error"] = median(outcome.errors or [0.0])
    best = figures["open_goodput_rps"]
    figures["unseen_prediction_error"] = median(unseen)
    figures["unseen_prediction_error_max"] = max(unseen)
    figures["late_success"] = sum(each.late_by_server for each in outcomes.values())
    figures["open_to_padded"] = best / max(figures["padded_goodput_rps"], 0.1)
    figures["open_to_alone"] = best / max(figures["alone_goodput_rps"], 0.1)
    return Findings(figures)


STUDY = bench("bench-shapes", Setting(), measure)
