"""The process that compiles: `python -m worker.compiling.compiler_process PARENT MEMORY_BYTES`.

Jobs come in on standard input, progress and results go out on standard output, one JSON object per line.
`worker.compiling.compiler` is the worker's side.

The process runs at low priority and within limits (`worker.compiling.confinement`). The kernel kills it first when
memory runs out. So a large or hostile model costs the worker a refusal at most. The process dies with its worker,
even in the middle of a model that never ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockwright.errors import ModelError
from clockwright.process import end_with
from worker.compiling.confinement import allow_cpu, confine

if TYPE_CHECKING:
    from worker.compiling.compile import Target

# A lower priority than serving has; not the lowest, because people wait for the result.
_NICENESS = 10

# What onnxruntime, torch and the C++ library say when they are given no memory.
_NO_MEMORY = re.compile(r"bad_?\s?alloc|allocate memory", re.IGNORECASE)


def main() -> int:
    """Answer jobs until standard input ends."""
    end_with(int(sys.argv[1]), signal.SIGKILL)
    # Libraries print, so the protocol takes standard output and leaves them standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    os.nice(_NICENESS)
    confine(int(sys.argv[2]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

    def reply(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def progress(stage: str) -> None:
        reply(progress=stage)

    for line in sys.stdin:
        try:
            reply(done=_run(json.loads(line), progress))
        except MemoryError:
            reply(exhausted=True)
        except ModelError as error:
            reply(exhausted=True) if _NO_MEMORY.search(str(error)) else reply(refused=str(error))
        except Exception as error:  # whatever libraries raise is about this model only
            reply(refused=f"{type(error).__name__}: {error}")
    return 0


def _run(job: dict[str, Any], progress: Callable[[str], None]) -> object:
    try:
        from worker.compiling.compile import compile_model, describe_model, profile_model
        from worker.models.model_files import Limits, ModelSource
    except ImportError as error:
        raise ModelError(
            f"this worker cannot read models: {error}; install clockwright[cpu]"
        ) from None

    # What the libraries take to be loaded is not the model's fault.
    allow_cpu(job["cpu_s"])
    if job["cores"]:
        os.sched_setaffinity(0, os.sched_getaffinity(0) | set(job["cores"]))
    kind = job["kind"]
    if kind == "profile":
        return profile_model(Path(job["folder"]), job["batch_sizes"], progress)
    source = ModelSource(Path(job["source"]), job["fixed_dimensions"], tuple(job["batch_sizes"]))
    if kind == "describe":
        return describe_model(source).to_json()
    assert kind == "compile", kind
    limits = Limits(**job["limits"])
    targets = _targets(
        tuple(job["thread_counts"]), job.get("precision"), tuple(job.get("engines", ()))
    )
    return compile_model(source, Path(job["folder"]), limits, progress, *targets).to_json()


@functools.cache
def _targets(
    thread_counts: tuple[int, ...], precision: str | None, engines: tuple[str, ...]
) -> tuple[Target, ...]:
    """The targets of all jobs, the preferred one first; they remember what they have tried."""
    if precision is None:
        from worker.compiling.compile import OnnxruntimeTarget

        return (OnnxruntimeTarget(thread_counts),)
    # Imported here, because torch takes seconds.
    from worker.compiling.for_torch import OnnxruntimeOnGpuTarget, TorchTarget
    from worker.models.precision import Precision

    torch = TorchTarget(Precision(precision), max(thread_counts))
    return tuple(torch if each == "torch" else OnnxruntimeOnGpuTarget() for each in engines)


if __name__ == "__main__":
    sys.exit(main())
