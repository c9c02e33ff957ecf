"""What clients notice when a new version of their model comes: `versions.json`.

`make bench NAME=bench-versions`. One `clockwright up`, and one client that asks for a model at a rate while version after
version is written into the models directory and reloaded. In part `one` each takes the place of the one before; in part
`two` the folder serves the latest two. Each answer tells which version made it, in its tensor and in its header:

* `lost`: a request that was not answered, for whatever reason.
* `torn`: an answer whose header names another version than made it, or one that an earlier version made although a later
  one has answered a request that was sent before (`back`).
* `while_p99_ms`: latency of those that were asked while a version was prepared and took over; `before_p99_ms` of the
  others. Two thirds of the time are calm.
* `p99_ratio`: of the two. `calm_p99_ratio` is that of the two halves of the calm times, in which nothing differs: what the
  machine alone makes of such a ratio.

All is done in some rounds, each with new servers. Requests and what is wrong with them are counted over all rounds; of
times and ratios the record has the median of the rounds, and of the ratios also the least and the largest.

    python -m experiments bench-versions --times 12
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from clockwright.client.client import AsyncClient
from experiments.live.asker import AskedOnce, Asker
from experiments.live.local_server import LocalServer, folders
from experiments.study.bench import bench
from experiments.study.study import chosen

_MODEL, _COLUMNS = "versioned", 784
PARTS = {"one": "", "two": "[versions]\nserve = { latest = 2 }\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is measured."""

    #: Rounds, and the replacements in each part of a round.
    rounds: int = 3
    times: int = 12
    rate: float = 200.0
    #: Calm between two replacements.
    calm_s: float = 1.0
    slo_ms: float = 1000.0
    parts: tuple[str, ...] = tuple(PARTS)

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)


@dataclass(slots=True)
class Inquired(AskedOnce):
    """One request."""

    #: The version that made the answer, and the one that its header names; 0: it was not answered.
    made_by: int = 0
    named: int = 0


def write_version(folder: Path, version: int) -> Path:
    """Write a network of 2.5 MB whose output is its version. Returns its folder, which no server sees yet."""
    rng = np.random.default_rng(version)
    weights = {
        "w": rng.standard_normal((_COLUMNS, _COLUMNS), np.float32),
        "zeros": np.zeros((_COLUMNS, 1), np.float32),
        "number": np.full(1, version, np.float32),
    }
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
        onnx.helper.make_node("MatMul", ["h", "zeros"], ["z"]),
        onnx.helper.make_node("Add", ["z", "number"], ["version"]),
    ]
    shapes: dict[str, list[str | int | None]] = {"x": ["n", _COLUMNS], "version": ["n", 1]}
    x, out = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    kept = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = onnx.helper.make_graph(nodes, _MODEL, [x], [out], kept)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    hidden = folder / f".{version}"
    hidden.mkdir(parents=True)
    (hidden / "model.onnx").write_bytes(model.SerializeToString())
    return hidden


def _asker(client: AsyncClient, setting: Setting) -> Asker[Inquired]:
    row = np.ones((1, _COLUMNS), np.float32)

    async def ask(asked: Inquired) -> None:
        result = await client.infer(_MODEL, {"x": row}, slo_ms=setting.slo_ms)
        asked.made_by = round(float(result.outputs["version"][0, 0]))
        asked.named = int(result.model_version)

    return Asker(Inquired, ask, lambda: 1 / setting.rate)


async def play(setting: Setting, part: str) -> tuple[list[Inquired], list[tuple[float, float]]]:
    """Replace a model under load. Returns the requests, and when each replacement began and ended."""
    replaced: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models" / _MODEL
        # All are written before the first request: this process asks, too.
        written = [write_version(folder, version) for version in range(1, setting.times + 2)]
        written[0].rename(folder / "1")
        (folder / "config.toml").write_text(PARTS[part])
        server = await asyncio.to_thread(LocalServer(folders(scratch)).__enter__)
        try:
            async with AsyncClient(server.address) as client, _asker(client, setting) as asker:
                for version, hidden in enumerate(written[1:], 2):
                    await asyncio.sleep(setting.calm_s)
                    began_s = time.monotonic()
                    hidden.rename(folder / str(version))
                    await client.load_model(_MODEL)
                    # What it takes over is a part of it.
                    await asyncio.sleep(setting.calm_s / 2)
                    replaced.append((began_s, time.monotonic()))
        finally:
            await asyncio.to_thread(server.stop)
    return asker.asked, replaced


def judge(asked: Sequence[Inquired], replaced: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Count the outcomes of the requests."""
    whole = [each for each in asked if each.made_by]
    latencies: dict[bool, list[float]] = {True: [], False: []}
    # In each half of the calm times.
    halves: dict[bool, list[float]] = {True: [], False: []}
    calm_s = [each.sent_s for each in asked[:1]] + [end_s for _, end_s in replaced]
    for each in whole:
        is_while = any(begin_s <= each.sent_s < end_s for begin_s, end_s in replaced)
        took_ms = 1000 * (each.done_s - each.sent_s)
        latencies[is_while].append(took_ms)
        for calm_from_s, (calm_until_s, _) in zip(calm_s, replaced, strict=False):
            if calm_from_s <= each.sent_s < calm_until_s:
                halves[each.sent_s >= (calm_from_s + calm_until_s) / 2].append(took_ms)
    backwards = latest = 0
    # In the order of their ends: one that was sent after a later version had answered gets that version.
    seen = sorted(whole, key=lambda each: each.done_s)
    first_s = {each.made_by: each.done_s for each in reversed(seen)}
    for each in whole:
        latest = max((v for v, at_s in first_s.items() if at_s < each.sent_s), default=0)
        backwards += each.made_by < latest
    before_ms, while_ms = (float(np.percentile(latencies[each], 99)) for each in (False, True))
    first_ms, second_ms = (float(np.percentile(halves[each], 99)) for each in (False, True))
    return {
        "requests": len(asked),
        "lost": len(asked) - len(whole),
        "torn": sum(each.made_by != each.named for each in whole) + backwards,
        "replacements": len(replaced),
        "versions_seen": len({each.made_by for each in whole}),
        "before_p50_ms": statistics.median(latencies[False]),
        "while_p50_ms": statistics.median(latencies[True]),
        "before_p99_ms": before_ms,
        "while_p99_ms": while_ms,
        "p99_ratio": while_ms / before_ms,
        "calm_p99_ratio": second_ms / first_ms,
        "replacement_s": statistics.median(end_s - begin_s for begin_s, end_s in replaced),
    }


def together(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Count what is counted, and take the medians of what is measured, with the spread of ratios."""
    found: dict[str, float] = {}
    for key in rounds[0]:
        values = [each[key] for each in rounds]
        is_measured = key.endswith(("_ms", "_s", "_ratio"))
        found[key] = statistics.median(values) if is_measured else sum(values)
        if key.endswith("_ratio"):
            found |= {f"{key}_min": min(values), f"{key}_max": max(values)}
    return found


def measure(setting: Setting) -> dict[str, float]:
    """Play all parts, in turns."""
    judged: dict[str, list[dict[str, float]]] = {part: [] for part in setting.parts}
    for _ in range(setting.rounds):
        for part, rounds in judged.items():
            asked, replaced = asyncio.run(play(setting, part))
            for fault in sorted({each.fault for each in asked if each.fault}):
                print(fault)
            rounds.append(judge(asked, replaced))
    return {
        f"{part}_{key}": value
        for part, rounds in judged.items()
        for key, value in together(rounds).items()
    }


STUDY = bench("bench-versions", Setting(), measure)
