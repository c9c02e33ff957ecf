"""`make bench-cpu`: the processor as a whole device, in `experiments/results/cpu.json`.

**Goodput.** A closed loop through `clockwright up`, as it divides this machine by itself, beside plain
onnxruntime with its own settings (all cores) in a loop of its own process: before, after, and the better
of a batch of one and the batches that the server may make. Ratios are of one run.

**Prediction.** The differences of EXEC from what its action predicted, with the worker's threads bound to cores
and with as many threads that are not.

**Memory.** What 20 models add to the private memory of a second worker of the same host.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnxruntime as ort

from clockwright.cores import granted_cores
from clockwright.operator import Operator
from experiments.bench_worker import action_figures
from experiments.local_server import LocalServer
from experiments.open_loop import ClientLoad, OpenLoop
from experiments.results_file import write_results
from experiments.telemetry_tables import read_actions
from modelzoo.build import write_model

SECONDS = 20.0
REPEATS = 3
CONCURRENCY = 16
BATCH_SIZES = (1, 2, 4, 8)
NETWORKS = {
    "resnet50": ("resnet50_v1", (3, 224, 224), 5_000),
    "mlp": ("mlp-784-128-10", (784,), 100),
}
NUM_MODELS = 20
_MIB = 1 << 20


def plain_rps(path: Path, seconds: float) -> float:
    """Rows per second of plain onnxruntime, the best batch size's."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [tensor] = session.get_inputs()
    best = 0.0
    for size in BATCH_SIZES:
        shape = [size, *tensor.shape[1:]]
        x = np.random.default_rng(0).random(shape, np.float32)
        session.run(None, {tensor.name: x})
        begin_s, runs = time.monotonic(), 0
        while (taken_s := time.monotonic() - begin_s) < seconds / len(BATCH_SIZES):
            session.run(None, {tensor.name: x})
            runs += 1
        best = max(best, runs * size / taken_s)
    return best


def measure_goodput(seconds: float = SECONDS, repeats: int = REPEATS) -> dict[str, float]:
    """Answers in time per second through the server, beside plain onnxruntime."""
    figures: dict[str, float] = {}
    for key, (network, shape, slo_ms) in NETWORKS.items():
        ratios, served, alone = [], [], []
        with tempfile.TemporaryDirectory() as scratch:
            path = _model(Path(scratch), network)
            for _ in range(repeats):
                before = _plain_alone(path, seconds / 2)
                with LocalServer(_arguments(Path(scratch))) as server:
                    served.append(_closed_loop(server.address, shape, slo_ms, seconds))
                alone.append((before + _plain_alone(path, seconds / 2)) / 2)
                ratios.append(served[-1] / alone[-1])
        figures[f"{key}_rps"] = round(statistics.median(served), 2)
        figures[f"{key}_plain_rps"] = round(statistics.median(alone), 2)
        figures[f"{key}_ratio"] = round(statistics.median(ratios), 4)
    return figures


def measure_prediction(seconds: float = SECONDS) -> dict[str, float]:
    """How far EXEC is from its prediction, with bound threads and with others."""
    network, shape, slo_ms = NETWORKS["resnet50"]
    threads = str(granted_cores())
    figures: dict[str, float] = {}
    for key, bound in (("pinned", True), ("unpinned", False)):
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            scratch = Path(name)
            _model(scratch, network)
            telemetry = ["--telemetry", f"{scratch}/telemetry"]
            if bound:
                server = LocalServer([*_arguments(scratch), *telemetry])
            else:
                server = LocalServer(
                    ["--models", f"{scratch}/models", *telemetry], command="controller"
                )
                server.wait_for("listening on ")
                stack.callback(_start_worker(server.address, scratch, threads).wait)
            with server:
                _closed_loop(server.address, shape, slo_ms, seconds)
            found = action_figures(read_actions(scratch / "telemetry"))
        for quantile in ("p50", "p99"):
            figures[f"exec_error_us_{quantile}_{key}"] = found[f"exec_error_us_{quantile}"]
    figures["exec_error_us_p99"] = figures["exec_error_us_p99_pinned"]
    return figures


def measure_memory() -> dict[str, float]:
    """What models add to the private memory of a second worker."""
    found = {}
    for count in (1, NUM_MODELS):
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            for seed in range(count):
                write_model("resnet18_v1", _path(scratch, f"m{seed}"), seed=seed)
                (scratch / "models" / f"m{seed}" / "config.toml").write_text("batch_sizes = [1]\n")
            arguments = [*_arguments(scratch), "--workers", "2", "--pages", "8"]
            with LocalServer(arguments) as server, Operator(server.address) as operator:
                _, second = sorted(operator.workers(), key=lambda row: row.worker_id)
                found[count] = _private_bytes(second.pid)
                weights = sum(
                    path.stat().st_size for path in scratch.glob("cache/compiled/*/weights.bin")
                )
    return {
        "second_worker_mib": round((found[NUM_MODELS] - found[1]) / _MIB, 1),
        "second_worker_private_mib": round(found[NUM_MODELS] / _MIB, 1),
        "weights_mib": round(weights / _MIB, 1),
    }


def _path(scratch: Path, name: str) -> Path:
    return scratch / "models" / name / "1" / "model.onnx"


def _model(scratch: Path, network: str) -> Path:
    path = _path(scratch, "m")
    write_model(network, path)
    (scratch / "models" / "m" / "config.toml").write_text(f"batch_sizes = {list(BATCH_SIZES)}\n")
    return path


def _arguments(scratch: Path) -> list[str]:
    return ["--models", str(scratch / "models"), "--cache-dir", str(scratch / "cache")]


def _plain_alone(path: Path, seconds: float) -> float:
    command = [sys.executable, "-m", "experiments.bench_cpu", str(path), str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _closed_loop(address: str, shape: tuple[int, ...], slo_ms: int, seconds: float) -> float:
    load = ClientLoad(
        address=address, models=("m",), slo_ms=slo_ms, seconds=seconds, concurrency=CONCURRENCY,
        shape=(1, *shape),
    )  # fmt: skip
    with OpenLoop(load) as loop:
        account = loop.account()
    if not account.num_ok:
        raise RuntimeError(f"no answers, but {account.refusals + account.others}")
    return (account.num_ok - account.num_late) / seconds


def _start_worker(address: str, scratch: Path, threads: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "clockwright.cli", "worker", "--controller", address),
            *("--threads", threads, "--cache-dir", str(scratch / "cache")),
            *("--parent-pid", str(os.getpid())),
        ]
    )


def _private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    # Weights that a single process has mapped so far are clean pages of a file, which any other shares.
    return 1024 * sum(map(int, re.findall(r"^Private_Dirty:\s+(\d+) kB$", text, re.MULTILINE)))


def main() -> None:
    """Measure everything and write the figures; with a path and seconds, plain onnxruntime alone."""
    if len(sys.argv) == 3:
        print(plain_rps(Path(sys.argv[1]), float(sys.argv[2])))
        return
    figures = measure_goodput() | measure_prediction() | measure_memory()
    path = write_results(
        "cpu", figures, command="make bench-cpu", extra={"concurrency": CONCURRENCY}
    )
    for key, figure in sorted(figures.items()):
        print(f"{key:40} {figure:12.3f}")
    print(path)


if __name__ == "__main__":
    main()
