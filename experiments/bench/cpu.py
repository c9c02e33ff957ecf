"""The processor as a whole device, in `experiments/results/cpu.json`; three minutes on a machine with nothing else to do.

**Goodput.** A closed loop through `clockwright up`, as it divides this machine by itself, and plain onnxruntime with
its own settings (all cores) in a loop of its own process, which runs the batch size that suits it best of those
that the server may make. Both take turns; a ratio is that of the server to the mean of what came before and after
it, and every figure is the median of the rounds.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort

from clockwright.cores import spell_cores, usable_cores
from experiments.live.local_server import LocalServer, folders
from experiments.live.open_loop import ClientLoad, OpenLoop
from experiments.study.bench import Findings, bench
from modelzoo.build import write_model

CONCURRENCY = 16
BATCH_SIZES = (1, 2, 4, 8)


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


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Length of each turn of the server, and of plain onnxruntime.
    seconds: float = 10.0
    plain_seconds: float = 5.0
    rounds: int = 3


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
    """Answers in time per second through the server, compared with plain onnxruntime."""
    figures: dict[str, float] = {}
    for key, network in NETWORKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            path = _write(Path(scratch), network)
            tried = {
                each: _plain_alone(path, each, setting.plain_seconds / 2) for each in BATCH_SIZES
            }
            best = max(tried, key=tried.__getitem__)
            with LocalServer(folders(scratch)) as server:
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


def _write(scratch: Path, network: AskedNetwork) -> Path:
    path = scratch / "models" / "m" / "1" / "model.onnx"
    write_model(network.architecture, path)
    (path.parents[1] / "config.toml").write_text(f"batch_sizes = {list(BATCH_SIZES)}\n")
    return path


def measure(setting: Setting) -> Findings:
    """Measure goodput."""
    cores = spell_cores(usable_cores())
    return Findings(measure_goodput(setting), {"concurrency": CONCURRENCY, "cores": cores})


STUDY = bench("bench-cpu", Setting(), measure)
