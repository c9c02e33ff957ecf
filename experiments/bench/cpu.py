"""The processor as a whole device, in `experiments/results/cpu.json`; four minutes on a machine with nothing else to do.

**Goodput.** A closed loop through `clockwright up`, as it divides this machine by itself, and plain onnxruntime with
its own settings (all cores) in a loop of its own process, which runs the batch size that suits it best of those
that the server may make. Both take turns; a ratio is that of the server to the mean of what came before and after
it, and every figure is the median of the rounds.

**Prediction.** The differences of EXEC from what its action predicted, under the same closed loop, with the worker's
threads bound to cores and with as many threads that are not.

**Memory.** What 20 models add to the private memory of a second worker of the same host.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort

from clockwright.cores import granted_cores, spell_cores, usable_cores
from clockwright.operator import Operator
from experiments.bench.worker import action_figures
from experiments.live.local_server import LocalServer, further_worker
from experiments.live.open_loop import ClientLoad, OpenLoop
from experiments.study.bench import Findings, bench
from experiments.telemetry.tables import read_actions
from modelzoo.build import write_model

CONCURRENCY = 16
BATCH_SIZES = (1, 2, 4, 8)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class AskedNetwork:
    """What goodput is measured of."""

    architecture: str
    shape: tuple[int, ...]
    slo_ms: int
    #: `raw` is the cheaper one, and sends what fits into a frame.
    client: str = "raw"


NETWORKS = {
    "resnet50": AskedNetwork("resnet50_v1", (1, 3, 224, 224), 5_000, "grpcio"),
    "mlp": AskedNetwork("mlp-784-128-10", (1, 784), 100),
}
# Layers of 34 MB, so that files are far larger than what belongs to a model besides.
MEMORY_NETWORK = "mlp-2048-4096-10"


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Length of each turn of the server, and of plain onnxruntime.
    seconds: float = 10.0
    plain_seconds: float = 5.0
    rounds: int = 3
    num_models: int = 20


# --- goodput --------------------------------------------------------------------------------------


def plain_rps(path: Path, batch_size: int, seconds: float) -> float:
    """Rows per second of plain onnxruntime, one batch after the other."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [tensor] = session.get_inputs()
    inputs = np.random.default_rng(0).random([batch_size, *tensor.shape[1:]], np.float32)
    session.run(None, {tensor.name: inputs})
    begin_s, runs = time.monotonic(), 0
    while (taken_s := time.monotonic() - begin_s) < seconds:
        session.run(None, {tensor.name: inputs})
        runs += 1
    return runs * batch_size / taken_s


def measure_goodput(setting: Setting) -> dict[str, float]:
    """Answers in time per second through the server, beside plain onnxruntime."""
    figures: dict[str, float] = {}
    for key, network in NETWORKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            path = _write(Path(scratch), network)
            tried = {
                each: _plain_alone(path, each, setting.plain_seconds / 2) for each in BATCH_SIZES
            }
            best = max(tried, key=tried.__getitem__)
            with LocalServer(_arguments(Path(scratch))) as server:
                plain = [_plain_alone(path, best, setting.plain_seconds)]
                served = []
                for _ in range(setting.rounds):
                    served.append(_closed_loop(server.address, network, setting.seconds))
                    plain.append(_plain_alone(path, best, setting.plain_seconds))
        beside = [(before + after) / 2 for before, after in pairwise(plain)]
        ratios = [mine / theirs for mine, theirs in zip(served, beside, strict=True)]
        figures[f"{key}_rps"] = round(statistics.median(served), 2)
        figures[f"{key}_plain_rps"] = round(statistics.median(beside), 2)
        figures[f"{key}_plain_batch"] = best
        figures[f"{key}_ratio"] = round(statistics.median(ratios), 4)
    return figures


def _plain_alone(path: Path, batch_size: int, seconds: float) -> float:
    """The same in a process of its own, without what this one has loaded."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(plain_rps, path, batch_size, seconds).result()


def _closed_loop(address: str, network: AskedNetwork, seconds: float) -> float:
    load = ClientLoad(
        address=address, models=("m",), slo_ms=network.slo_ms, seconds=seconds,
        concurrency=CONCURRENCY, shape=network.shape, client=network.client,
    )  # fmt: skip
    with OpenLoop(load) as loop:
        account = loop.account()
    if not account.num_ok:
        raise RuntimeError(f"no answers, but {account.refusals + account.others}")
    # What was under way at the end of the time was answered after it.
    taken_s = max(seconds, float(account.done_ns.max()) / 1e9)
    return (account.num_ok - account.num_late) / taken_s


# --- prediction -----------------------------------------------------------------------------------


def measure_prediction(setting: Setting) -> dict[str, float]:
    """How far EXEC is from its prediction, with bound threads and with others."""
    network = NETWORKS["resnet50"]
    ways = {
        "pinned": ["--cores", spell_cores(usable_cores())],
        "unpinned": ["--threads", str(granted_cores())],
    }
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _write(scratch, network)
        for way, arguments in ways.items():
            telemetry = scratch / way
            with _server_and_worker(scratch, telemetry, arguments) as address:
                _closed_loop(address, network, setting.seconds)
            found = action_figures(read_actions(telemetry))
            for quantile in ("p50", "p99"):
                figures[f"exec_error_us_{quantile}_{way}"] = found[f"exec_error_us_{quantile}"]
    figures["exec_error_us_p99"] = figures["exec_error_us_p99_pinned"]
    return figures


@contextmanager
def _server_and_worker(scratch: Path, telemetry: Path, arguments: list[str]) -> Iterator[str]:
    """A controller, and a worker with these arguments, which has prepared the model."""
    folders = ["--models", f"{scratch}/models", "--telemetry", str(telemetry)]
    server = LocalServer([*folders, "--state", f"{scratch}/state"], command="controller")
    with ExitStack() as stack:
        stack.callback(server.stop)
        server.wait_for("listening on ")
        cache = f"{scratch}/cache"
        stack.enter_context(further_worker(server.address, "--cache-dir", cache, *arguments))
        with server:
            yield server.address


# --- memory ---------------------------------------------------------------------------------------


def measure_memory(setting: Setting) -> dict[str, float]:
    """What models add to the private memory of a second worker."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for count in (1, setting.num_models):
            for seed in range(count):
                path = scratch / "models" / f"m{seed}" / "1" / "model.onnx"
                if not path.exists():
                    write_model(MEMORY_NETWORK, path, seed=seed)
            arguments = [*_arguments(scratch), "--workers", "2", "--pages", "8"]
            with LocalServer(arguments) as server, Operator(server.address) as operator:
                _, second = sorted(operator.workers(), key=lambda row: row.worker_id)
                found[count] = _private_bytes(second.pid)
        weights = [path.stat().st_size for path in scratch.glob("cache/compiled/*/weights.bin")]
    return {
        "second_worker_mib": round((found[setting.num_models] - found[1]) / _MIB, 1),
        "second_worker_private_mib": round(found[setting.num_models] / _MIB, 1),
        "weights_mib": round(sum(weights) / _MIB, 1),
    }


def _write(scratch: Path, network: AskedNetwork) -> Path:
    path = scratch / "models" / "m" / "1" / "model.onnx"
    write_model(network.architecture, path)
    (path.parents[1] / "config.toml").write_text(f"batch_sizes = {list(BATCH_SIZES)}\n")
    return path


def _arguments(scratch: Path) -> list[str]:
    return ["--models", str(scratch / "models"), "--cache-dir", str(scratch / "cache")]


def _private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    # Weights that a single process has mapped so far are clean pages of a file, which any other shares.
    return 1024 * sum(map(int, re.findall(r"^Private_Dirty:\s+(\d+) kB$", text, re.MULTILINE)))


def measure(setting: Setting) -> Findings:
    """Measure everything."""
    figures = measure_goodput(setting) | measure_prediction(setting) | measure_memory(setting)
    cores = spell_cores(usable_cores())
    extra = {"concurrency": CONCURRENCY, "num_models": setting.num_models, "cores": cores}
    return Findings(figures, extra)


STUDY = bench("bench-cpu", Setting(), measure)
