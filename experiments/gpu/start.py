"""How long a server with one worker takes from its start until a model is ready: from nothing, and from the cache.

What counts is what a user waits for: processes, imports, memory, compiling, kernels. On `torch:cpu` compiling is what it
is on a GPU, and kernels are measured on the processor, which takes them longer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from experiments.live.local_server import LocalServer, folders
from modelzoo.build import write_model

#: Room for a BERT of base size, and no more than a small machine has: its memory is where pages are.
_ROOM = ("--device=torch:cpu", "--pages=32", "--arena-mib=512", "--host-mib=512")


def seconds_to_ready(name: str) -> dict[str, float]:
    """Start a server with a model of the zoo with an empty cache (`cold_s`), and then with a full one (`cached_s`)."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(name, Path(scratch) / "models" / name / "1" / "model.onnx")
        for kind in ("cold", "cached"):
            begin_s = time.monotonic()
            with LocalServer([*folders(scratch), *_ROOM]):
                figures[f"{kind}_s"] = time.monotonic() - begin_s
    return figures


def medians(name: str, times: int) -> dict[str, float]:
    """The medians of several measurements, each figure by itself."""
    found = [seconds_to_ready(name) for _ in range(times)]
    return {key: statistics.median(each[key] for each in found) for key in found[0]}
