"""`make gpu`: quick tests, then benchmarks and figures on a GPU by their worth, then all tests, within nine minutes.

Each part is a process of its own with a time limit, so that one which fails or hangs hides no other. Models are compiled first,
next to the quick tests, so that no part's limit pays for it. When time is short the last parts are
left out. All write to one folder, by default `experiments/results/gpu`; without a GPU nothing is run or written.

`--rehearse` needs no GPU: all parts run on a small network and the stand-in for CUDA's runtime (`experiments.gpu.stand_in`), most of
whose kernels do nothing then. It shows that each part starts and ends; its figures say nothing, and tests that compare answers fail.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from clockwright.errors import ConfigError
from experiments.gpu import stand_in
from experiments.results_file import RESULTS
from experiments.study.aims import judged, show, write

#: Name, module and its arguments, seconds that they are told, seconds until the part is ended.
Part = tuple[str, tuple[str, ...], float, float]

_FILE = "tests/worker/test_gpu.py"
# Each kind of test once, on the networks that compile fastest.
_QUICK = (
    "joint or fault or more_memory or unlike_lengths or FLOAT32-resnet18_v1 or FLOAT32-bert_tiny"
    " or (float32 and (paging or overwritten))"
)
# A pytest that is ended never says why a test failed, so it stops by itself first, at a test's end. Plugins that the
# host's Python happens to have are not loaded: one that warns would be an error.
_PYTEST = ("pytest", "-p", "pytest_timeout", "-v", "--session-timeout={seconds:g}", "-m", "gpu")
_TOLD = ("--device", "{device}", "--seconds", "{seconds:g}", "--directory", "{directory}")

COMPILE = ("experiments", "gpu-compile")
# After the quick tests. What is not ready then, its part compiles itself.
_COMPILE_S = 90.0
#: What runs while models are compiled, and the rest in the order of its worth.
QUICK: Part = ("quick tests", (*_PYTEST, "-k", _QUICK, _FILE), 60.0, 75.0)
PARTS: tuple[Part, ...] = (
    ("table1", ("experiments", "gpu-table1", *_TOLD), 40.0, 75.0),
    ("serve", ("experiments", "gpu-serve", *_TOLD), 20.0, 70.0),
    ("fig6", ("experiments", "gpu-fig6", *_TOLD), 30.0, 65.0),
    ("fig5", ("experiments", "gpu-fig5", *_TOLD), 26.0, 65.0),
    ("probe", ("experiments", "gpu-probe", *_TOLD), 25.0, 55.0),
    ("fig2", ("experiments", "gpu-fig2", *_TOLD), 12.0, 30.0),
    ("tests", (*_PYTEST, "-k", f"not ({_QUICK})", _FILE), 140.0, 165.0),
)
# What the parts are told besides in a rehearsal.
_SMALL = ("--architecture", "cifar_resnet20_v1")
_FEW = (*_SMALL, "--pages", "16", "--num-models", "20", "--host-mib", "64")
_REHEARSED = {
    QUICK[0]: ("-k", "joint or more_memory"),
    "table1": _SMALL,
    "serve": _FEW,
    "fig6": _FEW,
    "fig5": _FEW,
    "probe": _SMALL,
    "fig2": (*_SMALL, "--concurrencies", "1", "4"),
    "tests": ("-k", "FLOAT32-bert_tiny"),
}
# A part that has less than these shows nothing: it only starts.
_LEAST_S = 20.0


def run_parts(
    parts: Sequence[Part], device: str, directory: Path, *, until_s: float = float("inf")
) -> Iterator[tuple[str, str]]:
    """Run each part; yields its name and what happened to it, in words.

    Args:
        parts: in their order.
        device: what they measure.
        directory: where they leave their results.
        until_s: the time on the monotonic clock by which all have ended; the last are cut short or left out.
    """
    for name, module, seconds, limit_s in parts:
        left_s = min(limit_s, until_s - time.monotonic())
        if left_s < min(limit_s, _LEAST_S):
            yield name, "left out: no time"
            continue
        seconds *= left_s / limit_s
        told = [word.format(device=device, seconds=seconds, directory=directory) for word in module]
        print(f"--- {name}: at most {left_s:.3g} s", flush=True)
        begin_s = time.monotonic()
        outcome = _wait(_start(told), left_s)
        yield name, f"{outcome} after {time.monotonic() - begin_s:.0f} s"


def _start(module: Sequence[str]) -> subprocess.Popen[bytes]:
    # Each has a session of its own, so that its children can be ended with it: a server that is left
    # behind would keep the GPU's memory from the parts that follow.
    return subprocess.Popen([sys.executable, "-m", *module], start_new_session=True)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        code = process.wait(limit_s)
        return "done" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.3g} s"
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end(number: int, _: object) -> NoReturn:
    """End by an exception, so that the running part is ended too: its session hears no signal of ours."""
    # The signal may come twice: `make` passes it on, in addition to the sender's own to the whole group.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main(words: Sequence[str] | None = None) -> int:
    """Check that there is a GPU, run everything, and say what happened to it.

    Returns:
        The exit code: 0 when every part is done.
    """
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(prog="make gpu GPU=...", description=__doc__.splitlines()[0])
    parser.add_argument("--total-s", type=float, default=540.0, help="end within these seconds")
    parser.add_argument("--directory", type=Path, help="where all files go")
    names = [part[0] for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="of the parts after compiling")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU: does each part start and end?"
    )
    options = parser.parse_args(words)
    if options.rehearse and "STAND_IN_IDLE" not in os.environ:
        return _again_on_the_stand_in(words)
    directory = options.directory or RESULTS / "gpu"
    if options.rehearse and not options.directory:
        directory = Path(tempfile.mkdtemp(prefix="clockwright-gpu-"))
    try:
        # Imported here, because it needs torch.
        from worker.devices.cuda import check_installation, installation
    except ImportError as error:
        print(f"make gpu: {error}; install clockwright[gpu,measure]", file=sys.stderr)
        return 1
    try:
        check_installation(installation(), 0)
    except ConfigError as error:
        print(f"make gpu: nothing was run: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    begin, until_s = datetime.now(UTC), time.monotonic() + options.total_s
    outcomes = {}

    def run(parts: Sequence[Part]) -> None:
        if options.rehearse:
            # Half of the time: a processor takes longer to come to each part's end.
            parts = [
                (name, (*module, *_REHEARSED[name]), seconds / 2, limit_s)
                for name, module, seconds, limit_s in parts
            ]
        for name, outcome in run_parts(parts, "cuda:0", directory, until_s=until_s):
            outcomes[name] = outcome
            # After every part, because a run that is ended early has what was measured until then.
            rows = list(judged(directory, room="gpu", since=begin))
            write(rows, directory / "aims.csv")

    compiling = _start((*COMPILE, *_SMALL[1:]) if options.rehearse else COMPILE)
    try:
        run([QUICK])
        limit_s = min(_COMPILE_S, until_s - time.monotonic())
        outcomes["compile"] = _wait(compiling, limit_s)
    finally:
        _kill(compiling)
    run([part for part in PARTS if part[0] in (options.only or [part[0]])])
    print("---")
    for name, outcome in outcomes.items():
        print(f"{name:12} {outcome}")
    print("---")
    show(list(judged(directory, room="gpu", since=begin)))
    if options.rehearse and outcomes.get("tests", "").startswith("failed with 1 "):
        print("tests: wrong answers, as expected of kernels that do nothing")
        del outcomes["tests"]
    return 0 if all(outcome.startswith("done") for outcome in outcomes.values()) else 1


def _again_on_the_stand_in(words: Sequence[str]) -> int:
    """Replace this process by one whose torch runs on the stand-in; returns only where there can be none."""
    try:
        added = stand_in.idle_environment(Path(sys.executable))
    except stand_in.MissingError as error:
        print(f"make gpu: nothing was rehearsed: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "experiments.gpu", *words]
    os.execve(sys.executable, command, os.environ | added)


if __name__ == "__main__":
    sys.exit(main())
