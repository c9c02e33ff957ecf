"""Three models behind each other: a pipeline of the server, compared with three calls by its client, in `pipeline.json`.

Live, on a modelled device behind a real server, by the same client over gRPC:

* `alone_...`: latency with nothing else under way, of the pipeline, of three calls, and of three calls that say what is
  ahead (`work_ahead_ms`).
* `load_N_...`: Poisson arrivals at so many times what the device can do in whole batches: what was answered in time as a
  whole, per second; time from arrival to refusal; and the answers of first stages per whole answer, 1 where nothing is
  in vain.
* `cold_...`: latency where no stage's weights are on the device. The pipeline loads them while earlier stages run.

In virtual time, without a client's limits: `simulated_CASE_...`, three ResNet50s of the paper's Table 1 behind each other,
with one or five pipelines, asked the same three ways; whole answers per second.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnx.parser
import uvloop

from clockwright import AsyncClient, RefusedError
from clockwright.client.operator import Operator
from clockwright.units import NS_PER_MS, NS_PER_S, PAGE_BYTES, ModelId
from controller.core import SchedulerConfig
from controller.telemetry.tables import OK, Telemetry
from experiments.clockwork_paper import cases
from experiments.live.asker import ask_at
from experiments.live.local_server import LocalServer, folders
from experiments.simulator import Case, HostedModel, run
from experiments.study.bench import Findings, bench
from modelzoo.profile import Noise, Profile, ProfileRow, load_profile, save_profile
from traces.arrivals import Poisson

#: As ResNet50 of Table 1, eight times as slow, so that a client in Python keeps pace.
EXEC_MS = {1: 20.0, 2: 28.0, 4: 44.0, 8: 72.0, 16: 114.0}
LOAD_MS = 66.0
_PAGES = 7
_SLO_MS = 1000.0
_STAGES = ("a", "b", "c")
#: Pipelines with models of their own: two fit on the device.
_CROWD = 4
_GRAPH = (
    '<ir_version: 10, opset_import: ["" : 17]> g (float[n,16] x) => (float[n,16] y) { y = Relu(x) }'
)

_SIMULATED_S = 4
CASCADES: Mapping[str, Mapping[str, int]] = {
    "one": {"pipelines": 1, "rate_rps": 500, "slo_ms": 200, "gpus": 1},
    "five": {"pipelines": 5, "rate_rps": 500, "slo_ms": 200, "gpus": 1},
    "fits": {"pipelines": 1, "rate_rps": 250, "slo_ms": 100, "gpus": 1},
    "gpus": {"pipelines": 5, "rate_rps": 1800, "slo_ms": 120, "gpus": 4},
}

Ask = Callable[[AsyncClient, int, float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    alone: int = 60
    cold: int = 20
    seconds: float = 15.0
    loads: tuple[float, ...] = (0.7, 1.0, 1.5)
    seed: int = 1


@dataclass(slots=True)
class LoadTally:
    """What came of the requests of one load."""

    answered: int = 0
    refused_ms: list[float] = field(default_factory=list)


def write_models(directory: Path) -> None:
    """Write the models and the pipelines of them."""
    for number in range(_CROWD):
        for stage in _STAGES:
            folder = directory / f"{stage}{number}" / "1"
            folder.mkdir(parents=True)
            onnx.save(onnx.parser.parse_model(_GRAPH), folder / "model.onnx")
            (folder.parent / "config.toml").write_text(f"batch_sizes = {list(EXEC_MS)}\n")
        lines = ["[pipeline]", 'inputs = ["x"]', 'outputs = { y = "c.y" }']
        before = "x"
        for stage in _STAGES:
            lines += ["[[pipeline.stages]]", f'name = "{stage}"', f'model = "{stage}{number}"']
            lines.append(f'inputs = {{ x = "{before}" }}')
            before = f"{stage}.y"
        (directory / f"pipeline{number}").mkdir()
        (directory / f"pipeline{number}" / "config.toml").write_text("\n".join(lines))


_ROW = np.ones((1, 16), np.float32)


async def ask_pipeline(client: AsyncClient, number: int, slo_ms: float) -> None:
    """One request."""
    await client.infer(f"pipeline{number}", {"x": _ROW}, slo_ms=slo_ms)


async def ask_models(client: AsyncClient, number: int, slo_ms: float, *, tells: bool) -> None:
    """Three requests, each with what is left; `tells`: they say what is ahead."""
    due_s, row = time.perf_counter() + slo_ms / 1000, _ROW
    for index, stage in enumerate(_STAGES):
        left_ms = max((due_s - time.perf_counter()) * 1000, 0.1)
        ahead_ms = EXEC_MS[1] * (len(_STAGES) - 1 - index) if tells else 0.0
        if ahead_ms >= left_ms:
            raise _OUT_OF_TIME
        answer = await client.infer(
            f"{stage}{number}", {"x": row}, slo_ms=left_ms, work_ahead_ms=ahead_ms or None
        )
        row = answer.outputs["y"]


class OutOfTimeError(Exception):
    """The client sees itself that the next model cannot be in time."""


_OUT_OF_TIME = OutOfTimeError()


async def ask_calls(client: AsyncClient, number: int, slo_ms: float) -> None:
    """Three requests that say nothing of each other."""
    await ask_models(client, number, slo_ms, tells=False)


async def ask_telling(client: AsyncClient, number: int, slo_ms: float) -> None:
    """Three requests that say what is ahead."""
    await ask_models(client, number, slo_ms, tells=True)


WAYS: Mapping[str, Ask] = {"pipeline": ask_pipeline, "calls": ask_calls, "told": ask_telling}


async def latencies_ms(address: str, ask: Ask, numbers: Sequence[int]) -> list[float]:
    """Ask one after the other."""
    found = []
    async with AsyncClient(address) as client:
        for number in numbers:
            began = time.perf_counter()
            await ask(client, number, 10 * _SLO_MS)
            found.append((time.perf_counter() - began) * 1000)
    return found


async def offer(address: str, ask: Ask, rate: float, seconds: float, seed: int) -> LoadTally:
    """Ask at random times, whatever comes of those before."""
    tally, random = LoadTally(), Random(seed)
    async with AsyncClient(address) as client:

        async def one(_: int) -> None:
            began = time.perf_counter()
            try:
                await ask(client, 0, _SLO_MS)
            except (RefusedError, OutOfTimeError):
                tally.refused_ms.append((time.perf_counter() - began) * 1000)
            else:
                tally.answered += time.perf_counter() - began <= _SLO_MS / 1000

        def times_s() -> Iterator[float]:
            due_s = 0.0
            while (due_s := due_s + random.expovariate(rate)) < seconds:
                yield due_s

        await ask_at(times_s(), one)
    return tally


def first_answers(operator: Operator) -> int:
    """Answers of the first stage so far."""
    return next(each.answered for each in operator.models() if each.model_id == "a0")


def measure_live(setting: Setting) -> dict[str, float]:
    """Ask a server whose device holds the models of two pipelines."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch) / "models")
        row = ProfileRow(
            name="*",
            weights_bytes=_PAGES * PAGE_BYTES,
            load_ns=round(LOAD_MS * NS_PER_MS),
            exec_ns={size: round(ms * NS_PER_MS) for size, ms in EXEC_MS.items()},
        )
        save_profile(Profile("pipeline", {"*": row}), Path(scratch) / "profile.json")
        device = ("--device", f"modelled:{scratch}/profile.json")
        arguments = [*folders(scratch), *device, "--pages", str(2 * len(_STAGES) * _PAGES)]
        with LocalServer(arguments) as server, Operator(server.address) as operator:
            for name, ask in WAYS.items():
                found = uvloop.run(latencies_ms(server.address, ask, [0] * (setting.alone + 5)))
                figures[f"alone_{name}_p50_ms"] = statistics.median(found[5:])
            for name, ask in WAYS.items():
                # Each pipeline's weights have gone by the time that it is asked again.
                numbers = [number % _CROWD for number in range(setting.cold + _CROWD)]
                found = uvloop.run(latencies_ms(server.address, ask, numbers))
                figures[f"cold_{name}_p50_ms"] = statistics.median(found[_CROWD:])
            most_rps = max(size / ms for size, ms in EXEC_MS.items()) * 1000 / len(_STAGES)
            for load in setting.loads:
                for name, ask in WAYS.items():
                    before = first_answers(operator)
                    tally = uvloop.run(
                        offer(server.address, ask, load * most_rps, setting.seconds, setting.seed)
                    )
                    begun = first_answers(operator) - before
                    key = f"load_{load:g}_{name}"
                    figures[f"{key}_goodput_rps"] = tally.answered / setting.seconds
                    figures[f"{key}_first_stages_per_answer"] = begun / max(tally.answered, 1)
                    if len(refused := sorted(tally.refused_ms)) > 1:
                        figures[f"{key}_refused_p50_ms"] = statistics.median(refused)
                        figures[f"{key}_refused_p99_ms"] = refused[int(0.99 * len(refused))]
    return figures


def cascade(seed: int, *, pipelines: int, rate_rps: float, slo_ms: int, gpus: int) -> Case:
    """Pipelines of three ResNet50s each, asked at random."""
    row = load_profile("table1").rows[cases.ARCHITECTURE]
    models = tuple(
        HostedModel(ModelId(f"{stage}-{n}"), row) for stage in _STAGES for n in range(pipelines)
    )
    asked = Poisson(
        models=range(pipelines),
        rate_rps=rate_rps,
        slo_ns=slo_ms * NS_PER_MS,
        end_ns=_SIMULATED_S * NS_PER_S,
        seed=seed,
    )
    case = cases.case_of(
        models, [asked], seed=seed, end_ns=_SIMULATED_S * NS_PER_S, num_gpus=gpus,
        num_pages=1376, noise=Noise(0.01, 0.02),
    )  # fmt: skip
    ids = [model.model_id for model in models]
    return replace(case, pipelines=tuple(tuple(ids[n::pipelines]) for n in range(pipelines)))


def measure_simulated(seed: int) -> dict[str, float]:
    """Play the cascades in virtual time."""
    figures: dict[str, float] = {}
    for name, of in CASCADES.items():
        case = cascade(seed, **of)
        for way, played in (
            ("calls", replace(case, tells_work_ahead=False)),
            ("told", case),
            ("pipeline", replace(case, plans_pipelines=True)),
        ):
            telemetry = Telemetry()
            run(replace(played, scheduler=SchedulerConfig()), telemetry=telemetry)
            last = {stages[-1] for stages in case.pipelines}
            found = telemetry.requests
            whole = sum(row.outcome == OK and row.model_id in last for row in found)
            figures[f"simulated_{name}_{way}_rps"] = whole / _SIMULATED_S
    return figures


def measure(setting: Setting) -> Findings:
    """Play the cascades, then ask the live server."""
    return Findings(measure_simulated(setting.seed) | measure_live(setting))


STUDY = bench("bench-pipeline", Setting(), measure)
