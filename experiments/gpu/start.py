"""How long a server with one worker takes from its start until a model is ready: from nothing, and from the cache.

What counts is what a user waits for: processes, imports, memory, compiling, kernels. On `torch:cpu` compiling is what it
is on a GPU, and kernels are measured on the processor, which takes them longer.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from pathlib import Path

from experiments.live.local_server import LocalServer, folders
from modelzoo.build import write_model

#: Room for a BERT of base size, and no more than a small machine has.
_ROOM = ("--arena-mib=512", "--host-mib=512")
#: On a processor pages are the machine's memory.
_HOST_PAGES = ("--pages=32",)


def seconds_to_ready(name: str, device: str) -> dict[str, float]:
    """Start a server with a model of the zoo twice, with an empty cache and then with a full one.

    Args:
        name: the model.
        device: of its one worker.

    Returns:
        `cold_s` and `cached_s`, and the processor time of all processes meanwhile, `cold_cpu_s` and `cached_cpu_s`.
    """
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(name, Path(scratch) / "models" / name / "1" / "model.onnx")
        arguments = [*folders(scratch), f"--device={device}", *_ROOM]
        if not device.startswith("cuda"):
            arguments += _HOST_PAGES
        for kind in ("cold", "cached"):
            used_s, begin_s = _used_s(), time.monotonic()
            with LocalServer(arguments):
                figures[f"{kind}_s"] = time.monotonic() - begin_s
            # A child's time is known once it has ended.
            figures[f"{kind}_cpu_s"] = _used_s() - used_s
    return figures


def medians(name: str, device: str, times: int = 3) -> dict[str, float]:
    """The medians of several measurements, each figure by itself."""
    found = [seconds_to_ready(name, device) for _ in range(times)]
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
