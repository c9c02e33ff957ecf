"""A worker process, from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from clockwright.cores import spell_cores
from clockwright.devices import DEVICE_KINDS
from clockwright.errors import ConfigError, DeviceGoneError
from clockwright.process import freeze_garbage, keep_big_blocks, use_huge_pages
from clockwright.units import PAGE_BYTES
from modelzoo.profile import load_profile
from worker.action_thread import ActionThread
from worker.config import WorkerConfig, compile_threads
from worker.devices.device import Device, TimedDevice
from worker.devices.gpu_health import GpuMonitor, open_gpu, stay_near
from worker.devices.host_memory import available_bytes, granted_bytes
from worker.devices.modelled import ModelledDevice
from worker.engines.choice import parse_engine
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.model_files import IO_SHARE, Limits
from worker.models.precision import parse_precision
from worker.timing import tune_process

logger = logging.getLogger(__name__)


def run_worker(config: WorkerConfig) -> int:
    """Serve until drained, or told to stop by SIGTERM or SIGINT.

    When the device hangs, the process ends at once with code 1. Returns the exit code: 0. Raises ConfigError if the
    device, the profile or the cache folder is unusable, there is not enough memory, or the controller rejected this
    worker; DeviceGoneError if the device was lost while it served.
    """
    keep_big_blocks()
    tune_process(num_devices=config.num_devices)
    uvloop.run(_run(config))
    return 0


async def _run(config: WorkerConfig) -> None:
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[str] = loop.create_future()

    def lost(reason: str) -> None:
        if not gone.done():
            gone.set_result(reason)

    try:
        files = FileStore(config.cache_dir)
        device = make_device(
            config, files, on_lost=lambda reason: loop.call_soon_threadsafe(lost, reason)
        )
    except OSError as error:
        raise ConfigError(f"cache folder {config.cache_dir}: {error}") from None
    devices = [device]
    while len(devices) < config.num_devices:
        assert isinstance(device, ModelledDevice)
        devices.append(device.twin())
    try:
        with closing(ActionThread(waits=isinstance(device, TimedDevice))) as actions:
            links = [
                ControllerLink(own, each, files, actions)
                for own, each in zip(config.each_device, devices, strict=True)
            ]

            def leave() -> None:
                for link in links:
                    link.leave()

            gone.add_done_callback(lambda _: leave())
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, leave)
            freeze_garbage()
            use_huge_pages()
            await _serve_all(links)
    except DeviceGoneError as error:
        _end_at_once(f"device {config.device!r}: {error}")
    finally:
        await device.close()
    if gone.done():
        raise DeviceGoneError(f"device {config.device!r}: {gone.result()}")


async def _serve_all(links: Sequence[ControllerLink[Any]]) -> None:
    """Serve until all have left. Raises the first problem of those that failed."""

    async def serve(link: ControllerLink[Any]) -> None:
        try:
            await link.run()
        except Exception as error:
            if len(links) > 1:
                logger.error("%s; the other devices go on", error)
            raise

    ends = await asyncio.gather(*map(serve, links), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


def _end_at_once(reason: str) -> NoReturn:
    """Exit without joining threads, because they wait for a device that does not answer."""
    logger.critical("%s", reason)
    logging.shutdown()
    os._exit(1)


def make_device(
    config: WorkerConfig,
    files: FileStore,
    on_lost: Callable[[str], object] = logger.error,
) -> Device[Any]:
    """Make the device that a configuration names.

    `on_lost` is called, from any thread, with the reason why this process cannot use the device any more. Raises
    ConfigError if it is unknown or missing, or its memory does not suffice; OSError if the cache folder cannot be used.
    """
    limits = Limits(
        arena_bytes=config.usable_arena_bytes,
        num_pages=config.known_pages,
        io_bytes=config.io_bytes // IO_SHARE,
        compile_bytes=config.usable_compile_bytes,
        compile_cpu_s=config.compile_cpu_s,
    )
    kind, _, argument = config.device.partition(":")
    known = DEVICE_KINDS.get(kind)
    if known is None or not re.fullmatch(known.argument, argument):
        *first, last = [each.usage for each in DEVICE_KINDS.values() if each.usage]
        raise ConfigError(f"device {config.device!r}: expected {', '.join(first)} or {last}")
    if config.cores:
        check_cores(config.cores)
        if kind != "cpu":  # which gives each of its threads some of them
            os.sched_setaffinity(0, config.cores)
    return _MAKERS[kind](config, limits, files, on_lost)


def _modelled_device(
    config: WorkerConfig, limits: Limits, files: FileStore, _: Callable[[str], object]
) -> Device[Any]:
    return ModelledDevice(
        load_profile(config.device.partition(":")[2]),
        limits=limits,
        io_pool_bytes=config.io_bytes,
        files=files,
        compile_limit_s=config.compile_limit_s,
    )


def _container_device(
    config: WorkerConfig, limits: Limits, _: FileStore, __: Callable[[str], object]
) -> Device[Any]:
    # Imported here, because only this device needs it.
    from worker.containers.device import ContainerDevice

    return ContainerDevice(
        Path(config.device.partition(":")[2]),
        limits=limits,
        io_pool_bytes=config.io_bytes,
        start_limit_s=config.compile_limit_s,
    )


def _torch_device(
    config: WorkerConfig, limits: Limits, files: FileStore, on_lost: Callable[[str], object]
) -> Device[Any]:
    kind, _, argument = config.device.partition(":")
    check_packages(_installed)
    if kind == "torch":
        # The kernel promises more than there is, and ends the process when it is used.
        pages = limits.num_pages * PAGE_BYTES + limits.arena_bytes + config.io_bytes
        _check_memory(available_bytes(), pages, "pages and IO memory", "fewer pages")
    try:
        # Imported here, because torch takes seconds and other devices do without.
        from worker.devices.accelerator import Accelerator, HostAccelerator
        from worker.devices.gpu import TorchDevice
        from worker.devices.gpu_memory import pages_that_fit, workspace_limit
        from worker.engines.onnxruntime import plain_words

        accelerator: Accelerator
        monitor: GpuMonitor | None = None
        if kind == "cuda":
            from worker.devices.cuda import CudaAccelerator

            # Clockwork forbids the driver to compile and to cache kernels (CUDA_DISABLE_PTX_JIT,
            # CUDA_CACHE_DISABLE). Here every kernel has run before it is captured, so none is new while
            # serving; and an engine of cuDNN may hand the driver some kernels as PTX.
            accelerator = CudaAccelerator(int(argument), search=config.cudnn_search)
            gpu = open_gpu(accelerator.uuid)
            if gpu is not None:
                monitor = GpuMonitor(gpu)
                # Move before the host's memory is taken, so that the memory lies near too.
                stay_near(monitor.facts)
            if config.num_pages is None:
                pages = pages_that_fit(
                    accelerator,
                    arena_bytes=limits.arena_bytes,
                    io_bytes=config.io_bytes + limits.io_bytes,
                    workspace_bytes=workspace_limit(accelerator, config.workspace_bytes),
                )
                limits = replace(limits, num_pages=pages)
        else:
            accelerator = HostAccelerator()
        return TorchDevice(
            accelerator,
            limits=limits,
            io_pool_bytes=config.io_bytes,
            host_bytes=config.host_bytes,
            host_file=config.host_file,
            precision=parse_precision(config.precision),
            engine=parse_engine(config.engine),
            files=files,
            cache_dir=config.cache_dir,
            compile_limit_s=config.compile_limit_s,
            workspace_bytes=config.workspace_bytes,
            compile_threads=config.threads or compile_threads(1),
            on_lost=on_lost,
            monitor=monitor,
        )
    except ImportError as error:
        raise ConfigError(f"device {config.device!r}: {error}; install clockwright[gpu]") from None
    except RuntimeError as error:  # torch raises it when the GPU is taken, full or broken
        raise ConfigError(
            f"device {config.device!r}: it cannot be used: {plain_words(error)}"
        ) from None


def _cpu_device(
    config: WorkerConfig, limits: Limits, files: FileStore, _: Callable[[str], object]
) -> Device[Any]:
    try:
        # Imported here, because a modelled device needs no engine.
        from worker.devices.cpu import CpuDevice
        from worker.devices.paged_arena import can_move_pages
    except ImportError as error:
        raise ConfigError(f"device 'cpu': {error}; install clockwright[cpu]") from None
    wanted = limits.num_pages * PAGE_BYTES + config.io_bytes + limits.io_bytes
    if not can_move_pages():
        wanted += limits.arena_bytes
    _check_memory(
        available_bytes(), wanted, f"{limits.num_pages} pages and IO memory", "fewer pages"
    )
    return CpuDevice(
        thread_counts=config.thread_counts,
        cores=config.cores,
        limits=limits,
        io_pool_bytes=config.io_bytes,
        files=files,
        cache_dir=config.cache_dir,
        compile_limit_s=config.compile_limit_s,
    )


#: What makes a device, by its kind.
_MAKERS: Mapping[
    str, Callable[[WorkerConfig, Limits, FileStore, Callable[[str], object]], Device[Any]]
] = {
    "cpu": _cpu_device,
    "cuda": _torch_device,
    "modelled": _modelled_device,
    "container": _container_device,
    "torch": _torch_device,
}


def check_cores(cores: Sequence[int]) -> None:
    """Refuse cores that this process may not use, or that do not exist. Raises ConfigError that names them."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
        found = os.sched_getaffinity(0)
    except OSError:
        found = set()
    finally:
        os.sched_setaffinity(0, before)
    if missing := sorted(set(cores) - found):
        raise ConfigError(f"cores: found {spell_cores(tuple(missing))}, which are not there")


def check_host_memory(config: WorkerConfig, num_gpus: int) -> None:
    """Refuse to start a worker per GPU if the memory does not suffice for all of them.

    Each worker also checks at its start, but workers that start together all check before any of them has allocated its
    memory. Raises ConfigError if the memory does not suffice; says how much there is.
    """
    # Weights lie there once. Inputs and outputs are on their way to each GPU.
    wanted = config.host_bytes + num_gpus * 2 * config.io_bytes
    what = f"weights and IO of {num_gpus} GPUs on the host"
    _check_memory(granted_bytes(), wanted, what, "less host memory")


def check_packages(version_of: Callable[[str], str | None]) -> None:
    """Refuse to start without onnxruntime, which compiles models, or with two kinds of it.

    Two hide the CUDA provider. Raises ConfigError that names what is installed, and what to do.
    """
    plain, gpu = version_of("onnxruntime"), version_of("onnxruntime-gpu")
    if plain is not None and gpu is not None:
        raise ConfigError(
            f"found onnxruntime {plain} and onnxruntime-gpu {gpu}, which overwrite each other, expected "
            "one of them; uninstall both, then install clockwright[gpu-ort] in an environment without "
            "clockwright[cpu]"
        )
    if plain is None and gpu is None:
        raise ConfigError(
            "found no onnxruntime, which compiles models for every engine; install clockwright[cpu], or "
            "clockwright[gpu-ort], which also computes on GPUs"
        )


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _check_memory(available: int | None, wanted: int, what: str, remedy: str) -> None:
    if available is not None and wanted > available:
        raise ConfigError(
            f"{what} need {wanted >> 20} MiB, {available >> 20} MiB are available; "
            f"start with {remedy}"
        )
