"""`make gpu`: tests, probe, benchmarks and figures on a GPU, within nine minutes.

Each part is a process of its own with a time limit, so that one which fails or hangs hides no other. All
write to `experiments/results/gpu`; without a GPU nothing is run or written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NoReturn

from clockwright.errors import ConfigError
from experiments.study.aims import judged, show, write

#: Parts in their order: name, command, seconds that it is told (None: it takes no such option), seconds
#: until it is ended.
PARTS: tuple[tuple[str, tuple[str, ...], float | None, float], ...] = (
    # A pytest that is ended never says why a test failed, so it stops by itself first, at a test's end.
    (
        "tests",
        ("pytest", "-v", "--session-timeout=140", "-m", "gpu", "tests/worker/test_gpu.py"),
        None,
        165.0,
    ),
    ("probe", ("experiments", "gpu-probe"), 25.0, 55.0),
    ("table1", ("experiments", "gpu-table1"), 50.0, 85.0),
    ("serve", ("experiments", "gpu-serve"), 20.0, 70.0),
    ("fig2", ("experiments", "gpu-fig2"), 12.0, 30.0),
    ("fig5", ("experiments", "gpu-fig5"), 26.0, 65.0),
    ("fig6", ("experiments", "gpu-fig6"), 30.0, 65.0),
)


def run_parts(
    parts: Sequence[tuple[str, tuple[str, ...], float | None, float]], device: str
) -> dict[str, str]:
    """Run each part; returns by name what became of it, in words."""
    outcomes = {}
    for name, module, seconds, limit_s in parts:
        command = [sys.executable, "-m", *module]
        if seconds is not None:
            command += ["--device", device, "--seconds", str(seconds)]
        print(f"--- {name}: at most {limit_s:g} s", flush=True)
        begin_s = time.monotonic()
        # Each part has a session of its own, so that its children can be ended with it: a server that is
        # left behind would keep the GPU's memory from the parts that follow.
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(limit_s)
            outcomes[name] = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            outcomes[name] = f"not done within {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        outcomes[name] += f" after {time.monotonic() - begin_s:.0f} s"
    return outcomes


def _end(number: int, _: object) -> NoReturn:
    """End by an exception, so that the running part is ended too: its session hears no signal of ours."""
    # The signal may come twice: `make` passes it on, beside the sender's own to the whole group.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    """Check that there is a GPU, run everything, and say what became of it.

    Returns:
        The exit code: 0 when every part is done.
    """
    try:
        # Imported here, because these modules need torch.
        from experiments.gpu.hardware import GPU_RESULTS
        from worker.devices.cuda import check_installation, installation
    except ImportError as error:
        print(f"make gpu: {error}; install clockwright[gpu]", file=sys.stderr)
        return 1
    try:
        check_installation(installation(), 0)
    except ConfigError as error:
        print(f"make gpu: nothing was run: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    begin = datetime.now(UTC)
    outcomes = run_parts(PARTS, "cuda:0")
    print("---")
    for name, words in outcomes.items():
        print(f"{name:10} {words}")
    print("---")
    rows = list(judged(GPU_RESULTS, room="gpu", since=begin))
    show(rows)
    write(rows, GPU_RESULTS / "aims.csv")
    return 0 if all(words.startswith("done") for words in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
