"""Compiles what the parts of `make gpu` run into the user's cache, several models at a time; no GPU is needed.

What is compiled for torch does not depend on the card. The models that most parts need come first.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from clockwright.cli.worker_settings import default_cache_dir
from experiments.gpu.hardware import compiled_for
from experiments.gpu.table1 import MAIN, order_of_interest
from worker.models.precision import Precision

# Networks of gpu-serve, then those with which Table 1 begins.
_NETWORKS = tuple(dict.fromkeys([MAIN, "resnet18_v1", "mobilenet0.25", *order_of_interest()[:4]]))
MODELS = tuple((name, Precision.FLOAT32) for name in _NETWORKS)
# The precisions that gpu-probe measures too.
MODELS += tuple((MAIN, precision) for precision in Precision if precision.tensor_cores)


def compile_one(name: str, precision: Precision) -> None:
    """Compile a model, unless it is there, and say how long that took."""
    begin_s = time.monotonic()
    compiled_for(name, precision, default_cache_dir())
    print(f"compiled {name} in {precision.value}: {time.monotonic() - begin_s:.0f} s", flush=True)


def main() -> None:
    """Compile all models, or those of the networks that the command line names, on half of the cores."""
    named = sys.argv[1:]
    models = [(name, precision) for name in named for precision in Precision] or MODELS
    # A model's compiler is a process with one busy thread.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for done in [pool.submit(compile_one, *model) for model in models]:
            done.result()


if __name__ == "__main__":
    main()
