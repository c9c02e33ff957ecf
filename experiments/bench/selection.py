"""What the selection layer costs, and what its prediction cache gains: `selection.json`.

* `whole_path_...`: an application compared with a model that is asked directly, in the same run, one query after the
  other: latency at the client, and processor time of the controller. `application_1` asks that same model and no
  other, so what it costs more is selection's whole path; `application_4` asks four, and `application_4_cached` finds their
  predictions in the cache. Every query comes for another user, whose state is read. All take turns; differences and
  ratios are those of one turn's neighbours, and the figure is their median.
* `select_combine_us_4models`: of that path only two calls, one `select` and one `combine` of the costliest
  built-in policy, four models.
* `contexts_mib_100k`: what 100,000 users' states of four models take in the controller's memory.
* `cache_feedback_speedup`: observations per second with the prediction cache over without it. An
  observation is a feedback for an input, as Clipper's own are (section 4.2): its predictions have to be
  had again. Four digit classifiers behind a live server, inputs asked a moment ago. Both take turns, a second each,
  and the figure is the median of the ratios of neighbours: the machine changes by the second.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import uvloop

from clockwright import AsyncClient, Feedback
from clockwright.client.operator import Operator
from clockwright.units import NS_PER_US
from clockwright.v1 import control_pb2 as pb
from controller.selection.core.combination import Rule
from controller.selection.core.contexts import Contexts
from controller.selection.core.query import Candidate, Choice, Observation, Prediction, Query
from controller.selection.policies import BUILT_IN, make_policy
from experiments.demo.models import write_digit_models
from experiments.digits.images import Array
from experiments.live.local_server import LocalServer, folders
from experiments.live.processor_time import cpu_ns, rss_bytes
from experiments.study.bench import Findings, bench

MODELS = ("a", "b", "c", "d")
_SEED = 0
# Queries asked at once, so that they form batches.
_CONCURRENCY = 32
_SLO_MS = 10_000.0

#: Whom a query of `path_round` asks, by the name of its figures.
MODELS_ASKED = {
    "model": "digits-logistic",
    "application_1": "one",
    "application_4": "uncached",
    "application_4_cached": "cached",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Calls of each policy, in each repeat.
    calls: int = 4_000
    repeats: int = 5
    contexts: int = 100_000
    inputs: int = 300
    rounds: int = 9


def select_combine_us(name: str, *, calls: int, repeats: int) -> float:
    """Time one select and one combine by averaging, the slower rule.

    Args:
        name: the name of a built-in policy.
        calls: calls per repeat.
        repeats: repeats, of which the fastest counts: caches and other work on the core can only slow it.

    Returns:
        Microseconds per call of both.
    """
    policy = make_policy(name, {"stable": "a", "canary": "b"} if name == "canary" else {})
    state = policy.init(MODELS)
    rng = Random(_SEED)
    candidates = tuple(Candidate(model) for model in MODELS)
    chances = tuple([0.1] * 10)
    predictions = {model: Prediction(n % 3, chances) for n, model in enumerate(MODELS)}
    best = float("inf")
    for _ in range(repeats):
        # This thread's own CPU time, so that other work on the machine does not count.
        began = time.thread_time()
        for _ in range(calls):
            query = Query(candidates, "user", rng)
            choice = policy.select(state, query)
            said = {member: predictions[member] for member in choice.members}
            policy.combine(state, query, choice, said, Rule.AVERAGE)
        best = min(best, (time.thread_time() - began) / calls)
    return best * 1e6


def contexts_mib(num_contexts: int) -> float:
    """Memory that states of so many users take, each of which has given feedback once."""
    policy = make_policy("exp4-full", {})
    contexts = Contexts(capacity=num_contexts)
    gc.collect()
    before = rss_bytes("self")
    rng = Random(_SEED)
    choice = Choice(MODELS, (1.0,) * len(MODELS))
    for number in range(num_contexts):
        losses = {model: float(rng.random() < 0.2) for model in MODELS}
        observation = Observation(choice, {}, losses, None, None)
        contexts.set("app", f"user {number}", policy.observe(policy.init(MODELS), observation))
    contexts.written(contexts.changes(num_contexts))
    gc.collect()
    assert len(contexts) == num_contexts
    return (rss_bytes("self") - before) / 2**20


async def _all(work: Callable[[int], Awaitable[object]], count: int) -> float:
    """Do `work` for 0 to `count` - 1, some at once; returns how many per second."""
    waiting = iter(range(count))

    async def one_after_another() -> None:
        for index in waiting:
            await work(index)

    began = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(_CONCURRENCY)))
    return count / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class ServedApplications:
    """Applications on a server, and what they are asked."""

    address: str
    #: The controller's process.
    pid: int
    images: Array
    labels: Array

    async def feedback_round(self, order: Sequence[str]) -> dict[str, float]:
        """One turn of each of the applications `cached` and `uncached`: their observations per second."""
        row: dict[str, float] = {}
        async with AsyncClient(self.address) as client:

            async def ask(application: str, index: int) -> str:
                inputs = {"X": self.images[index : index + 1]}
                return (await client.infer(application, inputs, slo_ms=_SLO_MS)).query_id

            async def observe(application: str, index: int) -> None:
                query_id = await ask(application, index)
                await client.feedback(Feedback(query_id, label=int(self.labels[index])))

            for application in order:
                # The observed inputs were asked a moment ago.
                await _all(partial(ask, application), len(self.images))
                row[application] = await _all(partial(observe, application), len(self.images))
        return row

    async def path_round(self, order: Sequence[str], turn: int) -> dict[str, float]:
        """Ask each of some models and applications a hundred images, one after the other.

        Args:
            order: of the asked.
            turn: number of this round; users of two rounds have nothing in common.

        Returns:
            By name, with endings `_p50_us` (latency at the client) and `_controller_cpu_us` (per query).
        """
        row: dict[str, float] = {}
        images = self.images[:100, None]
        async with AsyncClient(self.address) as client:
            for name in order:
                asked = MODELS_ASKED[name]
                # The first queries of all find connections, code and weights cold.
                for image in images[:5]:
                    await client.infer(asked, {"X": image}, slo_ms=_SLO_MS)
                times_us = []
                before_ns = cpu_ns([self.pid])
                for number, image in enumerate(images):
                    user = f"user {turn} {number}" if name != "model" else ""
                    began = time.perf_counter()
                    await client.infer(asked, {"X": image}, slo_ms=_SLO_MS, context=user)
                    times_us.append((time.perf_counter() - began) * 1e6)
                used_us = (cpu_ns([self.pid]) - before_ns) / NS_PER_US
                row[f"{name}_p50_us"] = statistics.median(times_us)
                row[f"{name}_controller_cpu_us"] = used_us / len(images)
        return row


def path_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over the rounds; comparisons are made inside a round."""
    figures = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    for name in MODELS_ASKED:
        if name != "model":
            for kind in ("p50", "controller_cpu"):
                figures[f"{name}_more_{kind}_us"] = statistics.median(
                    row[f"{name}_{kind}_us"] - row[f"model_{kind}_us"] for row in rows
                )
            figures[f"{name}_p50_ratio"] = statistics.median(
                row[f"{name}_p50_us"] / row["model_p50_us"] for row in rows
            )
    return {f"whole_path_{name}": figure for name, figure in figures.items()}


def measure_live(
    *, num_inputs: int, rounds: int
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Serve four digit classifiers and measure; one row per round, whose first is not counted.

    Returns:
        Rows of `path_round` and of `feedback_round`.
    """
    with tempfile.TemporaryDirectory() as directory:
        models = write_digit_models(Path(directory) / "models")
        asked = models[0]
        assert asked.labels is not None
        with LocalServer(folders(directory)) as server, Operator(server.address) as operator:
            model_names = [model.name for model in models]
            for name, members, no_cache in (
                ("one", model_names[:1], True),
                ("uncached", model_names, True),
                ("cached", model_names, False),
            ):
                application = pb.Application(name=name, models=members, no_cache=no_cache)
                operator.put_application(application)
            assert MODELS_ASKED["model"] == model_names[0]
            served = ServedApplications(
                server.address,
                server.process.pid,
                asked.questions[:num_inputs],
                asked.labels[:num_inputs],
            )
            paths, feedbacks = [], []
            for turn in range(rounds + 1):
                # Alternating order: a machine that slows down or speeds up in between favours neither.
                step = 1 if turn % 2 else -1
                paths.append(uvloop.run(served.path_round(list(MODELS_ASKED)[::step], turn)))
                feedbacks.append(uvloop.run(served.feedback_round(("cached", "uncached")[::step])))
    return paths[1:], feedbacks[1:]


def feedback_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over the rounds; a speed-up is that of one round, whose turns follow on each other."""
    figures = {
        f"feedback_{name}_per_s": statistics.median(row[name] for row in rows) for name in rows[0]
    }
    speedup = statistics.median(row["cached"] / row["uncached"] for row in rows)
    return figures | {"cache_feedback_speedup": speedup}


def measure(setting: Setting) -> Findings:
    """Time the policies' own calls, weigh the contexts, and ask live."""
    costs = {
        name: select_combine_us(name, calls=setting.calls, repeats=setting.repeats)
        for name in sorted(BUILT_IN)
    }
    figures = {"select_combine_us_4models": max(costs.values())}
    figures |= {f"select_combine_us_{name.replace('-', '_')}": us for name, us in costs.items()}
    figures["contexts_mib_100k"] = contexts_mib(setting.contexts)
    paths, feedbacks = measure_live(num_inputs=setting.inputs, rounds=setting.rounds)
    figures |= path_figures(paths) | feedback_figures(feedbacks)
    return Findings(figures, {"path_runs": paths, "feedback_runs": feedbacks})


STUDY = bench("bench-selection", Setting(), measure)
