"""What the selection layer costs, and what its prediction cache gains: `selection.json`.

* `select_combine_us_4models`: one `select` and one `combine` of the costliest built-in policy, four models.
* `contexts_mib_100k`: what 100,000 users' states of four models take in the controller's memory.
* `cache_feedback_speedup`: observations per second with the prediction cache over without it. An
  observation is a feedback for an input, as Clipper's own are (section 4.2): its predictions have to be
  had again. Four digit classifiers behind a live server, inputs asked a moment ago. `feedback_by_id_per_s`
  is this server's own way, by query id, which needs no prediction at all.
* `fig8_...`, `mitigated_late_answers`: from the last runs of Figures 8 and 9; `--collect` copies them anew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from clockwright import AsyncClient, Feedback
from clockwright.operator import Operator
from clockwright.v1 import control_pb2 as pb
from controller.selection.combination import Rule
from controller.selection.contexts import Contexts
from controller.selection.policies import BUILT_IN, make_policy
from controller.selection.query import Candidate, Choice, Observation, Prediction, Query
from experiments.demo_models import write_digit_models
from experiments.digits import Array
from experiments.local_server import LocalServer
from experiments.results_file import RESULTS, write_results

MODELS = ("a", "b", "c", "d")
NUM_CONTEXTS = 100_000
_SEED = 0

_OPTIONS: dict[str, dict[str, Any]] = {"canary": {"stable": "a", "canary": "b"}}

#: File, key here, key there.
COLLECTED = (
    ("clipper_fig8", "fig8_cumulative_error", "cumulative_error"),
    ("clipper_fig8", "fig8_returns_to_best", "returns_to_best"),
    ("clipper_fig9", "mitigated_late_answers", "mitigated_late_answers"),
)

# Asked at once, which is what makes batches.
_CONCURRENCY = 32
_SLO_MS = 10_000.0


def select_combine_us(name: str, *, calls: int, repeats: int) -> float:
    """Time one select and one combine by averaging, the slower rule.

    Args:
        name: of a built-in policy.
        calls: per repeat.
        repeats: of which the fastest counts: caches, and others on the core, can only make it slower.

    Returns:
        Microseconds per call of both.
    """
    policy = make_policy(name, _OPTIONS.get(name, {}))
    state = policy.init(MODELS)
    rng = Random(_SEED)
    candidates = tuple(Candidate(model) for model in MODELS)
    chances = tuple([0.1] * 10)
    predictions = {model: Prediction(n % 3, chances) for n, model in enumerate(MODELS)}
    best = float("inf")
    for _ in range(repeats):
        # Of this thread's own time: what else the machine does is none of it.
        began = time.thread_time()
        for _ in range(calls):
            query = Query(candidates, "user", rng)
            choice = policy.select(state, query)
            said = {member: predictions[member] for member in choice.members}
            policy.combine(state, query, choice, said, Rule.AVERAGE)
        best = min(best, (time.thread_time() - began) / calls)
    return best * 1e6


def contexts_mib(num_contexts: int = NUM_CONTEXTS) -> float:
    """Memory that states of so many users take, each of which has given feedback once."""
    policy = make_policy("exp4-full", {})
    contexts = Contexts(capacity=num_contexts)
    gc.collect()
    before = _resident_bytes()
    rng = Random(_SEED)
    choice = Choice(MODELS, (1.0,) * len(MODELS))
    for number in range(num_contexts):
        losses = {model: float(rng.random() < 0.2) for model in MODELS}
        observation = Observation(choice, {}, losses, None, None)
        contexts.set("app", f"user {number}", policy.observe(policy.init(MODELS), observation))
    contexts.written(contexts.take_changes())
    gc.collect()
    assert len(contexts) == num_contexts
    return (_resident_bytes() - before) / 2**20


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _all(work: Sequence[Callable[[], Awaitable[None]]]) -> float:
    """Do all, some at once; returns how many per second."""
    waiting = iter(work)

    async def one_after_another() -> None:
        for item in waiting:
            await item()

    began = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(_CONCURRENCY)))
    return len(work) / (time.perf_counter() - began)


async def feedback_rates(address: str, images: Array, labels: Array) -> dict[str, float]:
    """Observations per second: cached, not cached, and by query id."""
    rates: dict[str, float] = {}
    async with AsyncClient(address) as client:
        for application in ("cached", "uncached"):
            ids: list[str] = []

            async def ask(index: int, application: str = application) -> str:
                result = await client.infer(
                    application, {"X": images[index : index + 1]}, slo_ms=_SLO_MS
                )
                return result.query_id

            async def asked(
                index: int,
                ids: list[str] = ids,
                ask: Callable[[int], Awaitable[str]] = ask,
            ) -> None:
                ids.append(await ask(index))

            async def observe(index: int, ask: Callable[[int], Awaitable[str]] = ask) -> None:
                query_id = await ask(index)
                await client.feedback(Feedback(query_id, label=int(labels[index])))

            indices = range(len(images))
            await _all([lambda i=i, f=asked: f(i) for i in indices])  # type: ignore[misc]
            rates[application] = await _all(
                [lambda i=i, f=observe: f(i) for i in indices]  # type: ignore[misc]
            )

        async def by_id(query_id: str) -> None:
            await client.feedback(Feedback(query_id, label=0))

        rates["by_id"] = await _all([lambda q=q: by_id(q) for q in ids])  # type: ignore[misc]
    return rates


def measure_feedback(*, num_inputs: int, repeats: int) -> list[dict[str, float]]:
    """Serve four digit classifiers and measure; one row per repeat."""
    with tempfile.TemporaryDirectory() as directory:
        models = write_digit_models(Path(directory) / "models")
        asked = models[0]
        assert asked.labels is not None
        arguments = ["--models", f"{directory}/models", "--cache-dir", f"{directory}/cache"]
        with LocalServer(arguments) as server, Operator(server.address) as operator:
            rows = []
            for repeat in range(repeats):
                for name, no_cache in (("cached", False), ("uncached", True)):
                    application = pb.Application(
                        name=name, models=[model.name for model in models], no_cache=no_cache
                    )
                    operator.put_application(application, replace=repeat > 0)
                rows.append(
                    uvloop.run(
                        feedback_rates(
                            server.address, asked.questions[:num_inputs], asked.labels[:num_inputs]
                        )
                    )
                )
    return rows


def produce(
    *,
    calls: int = 4_000,
    repeats: int = 5,
    num_contexts: int = NUM_CONTEXTS,
    num_inputs: int = 300,
    directory: Path = RESULTS,
) -> dict[str, float]:
    """Measure, and write `selection.json`."""
    costs = {
        name: select_combine_us(name, calls=calls, repeats=repeats) for name in sorted(BUILT_IN)
    }
    figures = {"select_combine_us_4models": max(costs.values())}
    for name, cost in costs.items():
        figures[f"select_combine_us_{name.replace('-', '_')}"] = cost
    figures["contexts_mib_100k"] = contexts_mib(num_contexts)
    rows = measure_feedback(num_inputs=num_inputs, repeats=repeats)
    speedups = sorted(row["cached"] / row["uncached"] for row in rows)
    figures["cache_feedback_speedup"] = speedups[len(speedups) // 2]
    figures["cache_feedback_speedup_min"] = speedups[0]
    for name in ("cached", "uncached", "by_id"):
        values = sorted(row[name] for row in rows)
        figures[f"feedback_{name}_per_s"] = values[len(values) // 2]
    write_results(
        "selection",
        figures,
        command="python -m experiments.bench_selection",
        seeds=[_SEED],
        extra={
            "contexts": num_contexts,
            "inputs": num_inputs,
            "feedback_runs": rows,
        },
        directory=directory,
    )
    return collect(directory)


def collect(directory: Path = RESULTS) -> dict[str, float]:
    """Put the numbers of Figures 8 and 9, as last recorded, beside the measured ones; returns all."""
    target = directory / "selection.json"
    record = json.loads(target.read_text())
    record["from"] = {}
    for name, key, source in COLLECTED:
        path = directory / f"{name}.json"
        record["figures"].pop(key, None)
        if path.is_file():
            other = json.loads(path.read_text())
            record["figures"][key] = other["figures"][source]
            record["from"][key] = f"{name}.json, commit {other['commit']}"
    target.write_text(json.dumps(record, indent=1) + "\n")
    figures: dict[str, float] = record["figures"]
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--collect", action="store_true", help="measure nothing, only copy from Figures 8 and 9"
    )
    for key, figure in (collect() if parser.parse_args().collect else produce()).items():
        print(f"{key}: {figure:.4g}")
