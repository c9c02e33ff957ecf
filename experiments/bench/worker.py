"""The worker's promises on this machine's processor: starting on time, predicted durations, paging.

**Lateness and prediction.** A real `clockwright up` on the CPU device: six ResNet-18s in a cache for
three, and an MLP, under Poisson load. From the telemetry's action rows: how long after the moment it
could have begun (its window open, its input staged, its lane free, its weights there) each EXEC and LOAD
began, and by how much EXEC and LOAD durations differed from the predictions their actions carried.

**Paging.** EXEC through the weights cache (gather of the pages, input and output copies, kernel) against
a plain onnxruntime session of the same file with the same threads, run in turns in one process; the
ratio of medians, batch 1.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort

from clockwright.wire.actions import StepTime
from controller.telemetry.rows import ActionRow
from experiments.live.bare_lanes import loaded, prepared_on, processor
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop import ClientLoad, OpenLoop
from experiments.telemetry.tables import read_actions
from modelzoo.build import write_model
from worker.models.model_files import Limits

COPIES = 6
PAGES = 11  # three ResNet-18s of three pages, the MLP, one to spare
SECONDS = 20.0
LARGE_RATE = 3.0  # of each ResNet-18
SMALL_RATE = 40.0
PAGING_MODELS = ("resnet18_v1", "resnet50_v1")
PAGING_ROUNDS = 60


def measure_lateness() -> dict[str, float]:
    """Serve under load, and read the action rows."""
    with tempfile.TemporaryDirectory() as scratch:
        models, telemetry = Path(scratch) / "models", Path(scratch) / "telemetry"
        write_model("resnet18_v1", models / "large" / "1" / "model.onnx")
        (models / "large" / "config.toml").write_text(
            f"copies = {COPIES}\nbatch_sizes = [1, 2, 4]\n"
        )
        write_model("mlp-784-128-10", models / "small" / "1" / "model.onnx")
        more = ("--telemetry", str(telemetry), "--pages", str(PAGES))
        with LocalServer([*folders(scratch), *more]) as server:
            _load(server.address)
        return action_figures(read_actions(telemetry))


def action_figures(actions: Iterable[ActionRow]) -> dict[str, float]:
    """How late actions began, and by how much their durations differed from the predicted ones."""
    rows = [row for row in actions if row.error == "NONE"]
    loads = [(row.load, row) for row in rows if row.load is not None]
    execs = [(row.exec, row) for row in rows if row.exec is not None]
    loaded: dict[str, list[int]] = {}
    for step, row in loads:
        loaded.setdefault(row.model_id, []).append(step.end_ns)
    for ends in loaded.values():
        ends.sort()
    late = sorted(_lateness(execs, loaded) + _lateness(loads, {}))
    figures = {
        "start_late_us_p50": _quantile(late, 0.5),
        "start_late_us_p99": _quantile(late, 0.99),
        "num_exec": float(len(execs)),
        "num_load": float(len(loads)),
    }
    if pauses := sorted(_pauses(execs, loaded)):
        # Without a queued EXEC there is no figure, which would look like no pause.
        figures["exec_pause_us_p50"] = _quantile(pauses, 0.5)
        figures["exec_pause_us_p99"] = _quantile(pauses, 0.99)
    for name, lane in (("exec", execs), ("load", loads)):
        errors = sorted(
            abs(step.duration_ns - row.expected_duration_ns) / 1000 for step, row in lane
        )
        figures[f"{name}_error_us_p50"] = _quantile(errors, 0.5)
        figures[f"{name}_error_us_p99"] = _quantile(errors, 0.99)
        completion = sorted(
            abs(step.end_ns - row.expected_begin_ns - row.expected_duration_ns) / 1000
            for step, row in lane
        )
        figures[f"{name}_completion_error_us_p99"] = _quantile(completion, 0.99)
    return figures


def _load(address: str) -> None:
    large = ClientLoad(
        address=address, models=tuple(f"large-{copy}" for copy in range(COPIES)), slo_ms=500,
        seconds=SECONDS, rate=COPIES * LARGE_RATE, shape=(1, 3, 224, 224), client="grpcio",
    )  # fmt: skip
    small = ClientLoad(
        address=address, models=("small",), slo_ms=250, seconds=SECONDS, rate=SMALL_RATE, seed=1
    )
    with OpenLoop(large) as first, OpenLoop(small) as second:
        for account in (first.account(), second.account()):
            if not account.num_ok:
                raise RuntimeError(f"no answers, but {account.refusals + account.others}")


def _lateness(
    lane: Sequence[tuple[StepTime, ActionRow]], loaded: dict[str, list[int]]
) -> list[float]:
    """Microseconds between the moment a lane's steps could begin and the moment they did.

    Args:
        lane: the lane's steps, with their actions.
        loaded: for EXEC, the times at which each model's weights were there, in order.
    """
    lane_free_ns = 0
    late = []
    for step, row in sorted(lane, key=lambda each: each[0].begin_ns):
        able_ns = max(lane_free_ns, _ready_ns(step, row, loaded))
        late.append((step.begin_ns - able_ns) / 1000)
        lane_free_ns = step.end_ns
    return late


def _pauses(
    execs: Sequence[tuple[StepTime, ActionRow]], loaded: dict[str, list[int]]
) -> list[float]:
    """Microseconds between two EXEC in which the device did nothing though the second was ready.

    By the device's own durations: an EXEC in its queue begins, by the host's clock, when the one before
    ends, whatever the device did meanwhile, and is never late.
    """
    ordered = sorted(execs, key=lambda each: each[0].begin_ns)
    return [
        max(step.end_ns - before.end_ns - step.duration_ns, 0) / 1000
        for (before, _), (step, row) in pairwise(ordered)
        if _ready_ns(step, row, loaded) <= before.end_ns
    ]


def _ready_ns(step: StepTime, row: ActionRow, loaded: dict[str, list[int]]) -> int:
    """Time at which a step had all that it needs except its lane."""
    ready_ns = max(row.earliest_ns or 0, row.received_ns)
    if row.input is not None:
        ready_ns = max(ready_ns, row.input.end_ns)
    ends = loaded.get(row.model_id, [])
    if index := bisect_right(ends, step.begin_ns):
        ready_ns = max(ready_ns, ends[index - 1])
    return ready_ns


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1)


# --- paging -----------------------------------------------------------------------------------------


def measure_paging() -> dict[str, float]:
    """EXEC through the cache against a plain session, in turns."""
    figures = {}
    for name in PAGING_MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            paged, plain = _paging(name, Path(scratch))
        figures[f"paging_ratio_{name}"] = round(
            statistics.median(paged) / statistics.median(plain), 4
        )
        figures[f"paging_ratio_{name}_min"] = round(min(paged) / min(plain), 4)
        figures[f"paging_plain_ms_{name}"] = round(statistics.median(plain) / 1e6, 3)
        figures[f"paging_exec_ms_{name}"] = round(statistics.median(paged) / 1e6, 3)
    figures["paging_ratio"] = max(figures[f"paging_ratio_{name}"] for name in PAGING_MODELS)
    return figures


def _paging(name: str, scratch: Path) -> tuple[list[int], list[int]]:
    """EXEC's time and the plain session's, in ns by round."""
    path = scratch / name / "1" / "model.onnx"
    write_model(name, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(1).random((1, 3, 224, 224), dtype=np.float32)
    limits = Limits(arena_bytes=256 << 20, num_pages=16, io_bytes=8 << 20)
    device = processor(scratch, limits, io_pool_bytes=32 << 20)
    paged, plain = [], []
    with prepared_on(device, scratch / name, scratch, (1,)) as ready, loaded(ready) as run:
        for _ in range(PAGING_ROUNDS):
            begin_ns = time.perf_counter_ns()
            (expected,) = session.run(None, {"input": image})
            plain.append(time.perf_counter_ns() - begin_ns)
            result, outputs = run(image)
            assert result.exec is not None, result
            found = np.frombuffer(outputs[0], np.float32)
            assert np.allclose(found, expected.ravel(), rtol=1e-3, atol=1e-4)
            paged.append(result.exec.duration_ns)
    return paged[5:], plain[5:]
