"""Open-loop clients: a Poisson process says when requests leave, whatever happened to earlier ones."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import uvloop

from clockwright import AsyncClient, ClockwrightError, RefusedError
from experiments.demo.models import DemoModel
from experiments.digits.images import Array
from experiments.live.asker import ask_at

# float32 sums in another order: what batching and blocked layouts change.
_RTOL, _ATOL = 1e-3, 1e-3


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The load that clients put on one model."""

    model: DemoModel
    #: Requests per second.
    rate: float
    #: SLOs, of which each request draws one.
    slos_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request, as its client saw it."""

    model: str
    slo_ms: float
    #: How late the request was sent, because the client was busy.
    late_ms: float
    #: Time from sending to the answer or refusal.
    latency_ms: float
    #: "OK", the reason of a refusal, or the words of another error.
    outcome: str
    #: The question's place among the model's.
    row: int = 0
    #: The answer equals the one known beforehand; False without an answer.
    right: bool = False
    #: The answer's label; None: it was not answered.
    label: int | None = None
    cold: bool = False
    #: Latency of the answer by the server's clock.
    server_ms: float = 0.0

    @property
    def in_time(self) -> bool:
        """Whether it was answered inside its SLO, by the client's clock."""
        return self.outcome == "OK" and self.latency_ms <= self.slo_ms


@dataclass(frozen=True, slots=True)
class _Question:
    due_s: float
    load: ModelLoad
    slo_ms: float
    row: int


def drive(
    address: str, loads: Sequence[ModelLoad], *, duration_s: float, seed: int
) -> list[RequestOutcome]:
    """Send Poisson arrivals for some time, and wait for every answer.

    Args:
        address: HOST:PORT of the server.
        loads: one per model.
        duration_s: how long requests arrive.
        seed: seed of arrivals, SLOs and questions.

    Returns:
        One outcome per request, in order of arrival.
    """
    return uvloop.run(_drive(address, _plan(loads, duration_s=duration_s, seed=seed)))


def _plan(loads: Sequence[ModelLoad], *, duration_s: float, seed: int) -> list[_Question]:
    random = np.random.default_rng(seed)
    questions = []
    for load in loads:
        count = int(random.poisson(load.rate * duration_s))
        for due_s in random.uniform(0, duration_s, count).tolist():
            slo_ms = float(random.choice(load.slos_ms))
            row = int(random.integers(len(load.model.questions)))
            questions.append(_Question(due_s, load, slo_ms, row))
    return sorted(questions, key=lambda question: question.due_s)


async def _drive(address: str, questions: Sequence[_Question]) -> list[RequestOutcome]:
    async with AsyncClient(address) as client:
        for model in {question.load.model.name for question in questions}:
            await client.metadata(model)
        gc.collect()
        gc.freeze()
        begin_s = time.monotonic()
        outcomes = await ask_at(
            (question.due_s for question in questions),
            lambda number: _ask(client, questions[number], begin_s),
        )
        gc.unfreeze()
        return outcomes


async def _ask(client: AsyncClient, question: _Question, begin_s: float) -> RequestOutcome:
    model, row = question.load.model, question.row
    sent_s = time.monotonic()
    result = None
    try:
        result = await client.infer(
            model.name, model.questions[row : row + 1], slo_ms=question.slo_ms, explain=True
        )
        outcome = "OK"
    except RefusedError as error:
        outcome = error.refusal.value
    except ClockwrightError as error:
        outcome = str(error)
    seen = RequestOutcome(
        model=model.name,
        slo_ms=question.slo_ms,
        late_ms=(sent_s - begin_s - question.due_s) * 1e3,
        latency_ms=(time.monotonic() - sent_s) * 1e3,
        outcome=outcome,
        row=row,
    )
    if result is None:
        return seen
    outputs = result.outputs
    return replace(
        seen,
        right=all(
            _same(outputs[name], all_[row : row + 1]) for name, all_ in model.answers.items()
        ),
        label=int(outputs["label"][0]) if model.labels is not None else None,
        cold=bool(result.explanation["cold"]),
        server_ms=float(result.explanation["measured_us"]) / 1e3,
    )


def _same(found: Array, expected: Array) -> bool:
    if expected.dtype.kind == "f":
        return bool(np.allclose(found, expected, rtol=_RTOL, atol=_ATOL))
    return bool(np.array_equal(found, expected))
