"""The settings of a worker that are flags: of `clockwright worker`, and of commands that start workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from clockwright.cores import parse_cores
from clockwright.devices import DEVICE_HELP
from clockwright.errors import ConfigError
from clockwright.settings import MIB, setting

_MIB = 1 << 20


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/clockwright`, or `~/.cache/clockwright`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clockwright"


def _pages(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--pages is {text!r}, expected auto or a number of pages from 1 on"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker runs models, and in how much memory."""

    device: str = setting("cpu", help=f"{DEVICE_HELP}.")
    num_devices: int = setting(
        1,
        flag="devices",
        least=1,
        help="Devices of the process, each a worker of its own that adds its number to the name; more than "
        "one only of modelled:PROFILE.",
    )
    #: Too few pages: models evict each other all the time. Too many: the machine swaps, or the worker does not start.
    #: 64 hold ten ResNet-50.
    num_pages: int | None = setting(
        None,
        flag="pages",
        least=1,
        metavar="N|auto",
        parser=_pages,
        help="Size of the weights cache, in pages of 16 MiB. auto or unset: on a GPU as much as its free "
        "memory allows, otherwise 64.",
    )
    #: Room for the weights of the model that runs; no model may be larger. Never more than the weights
    #: cache. 512 MiB is the paper's workspace.
    arena_bytes: int = setting(
        512 * _MIB, unit=MIB, least=_MIB, help="Largest size of a model's weights."
    )
    #: Too little: batches wait for one another. A quarter caps batch sizes; 32 MiB is 53 images of 602 kB.
    io_bytes: int = setting(
        128 * _MIB,
        unit=MIB,
        least=_MIB,
        help="Memory for inputs and outputs of batches in hand; one batch may use a quarter.",
    )
    precision: str = setting("float32", help="Precision on a GPU: float32, tf32 or float16.")
    engine: str = setting("auto", help="Engine on a GPU: auto (the faster), torch or onnxruntime.")
    #: Too little: large models are refused. Too much: it is missing elsewhere.
    workspace_bytes: int | None = setting(
        None,
        unit=MIB,
        least=_MIB,
        help="On a GPU: workspace of kernels; by default a sixteenth of its memory, at least 2048.",
    )
    cudnn_search: bool = setting(
        False,
        help="On a GPU: cuDNN tries its algorithms for each model at each start; otherwise it guesses.",
    )
    #: Locked at start. Too little: models are refused. Too much: the host has none left, or locking takes long
    #: (seconds per 10 GiB).
    host_bytes: int = setting(
        4096 * _MIB,
        unit=MIB,
        least=_MIB,
        help="On a GPU: host memory for the weights of all models; all GPUs of --device cuda share one "
        "copy.",
    )
    #: A file in memory of `host_bytes`, where several workers of a host keep one copy of each model's weights.
    host_file: Path | None = setting(None, help="")
    #: Several workers may share the folder.
    cache_dir: Path = setting(
        default_factory=default_cache_dir,
        help="Folder of compiled models; by default in the user's cache folder.",
    )
    #: A model that takes more is refused. Too little: large models are; too much: a hostile one takes it from others.
    compile_bytes: int | None = setting(
        None,
        flag="compile_memory_mib",
        unit=MIB,
        # onnxruntime and torch are loaded in less.
        least=512 * _MIB,
        help="Memory limit for compiling a model; by default six times the arena plus 2048 for "
        "activations. As many models are compiled at once as cores and free memory allow.",
    )
    #: For each thread that a model may have.
    compile_cpu_s: float = setting(
        300.0, above=0, help="CPU time limit for compiling a model, in seconds."
    )
    threads: int | None = setting(
        None,
        least=1,
        help="On the CPU: upper limit; each model uses as many threads as help it. By default one per core"
        " of --cores. On a GPU: threads that check models while compiling; by default this worker's "
        "share of the cores, at most 8.",
    )
    payload_host: str = setting(
        "",
        help="Address to which fronts without shared memory send inputs; by default the one from which it "
        "reaches the controller.",
    )
    payload_port: int = setting(
        0,
        least=0,
        most=65535,
        help="Port for fronts' inputs; each further GPU or device uses the next one. 0: any free port.",
    )
    #: The cores that EXEC computes on, on the processor; with any other device, those of the whole process.
    cores: tuple[int, ...] = setting(
        default_factory=tuple,
        kind=str,
        read=parse_cores,
        help="Cores to compute on, such as 2-9,12; by default any.",
    )
