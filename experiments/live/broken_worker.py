"""A worker process whose device breaks: the real link and lanes, and steps that fail, hang or crawl.

    python -m experiments broken_worker --controller HOST:PORT --id w --fault hang --profile FILE --cache-dir DIR

It prints a line per model that it has prepared. It is well until SIGUSR1, or broken from the start with
`--broken`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from typing_extensions import override

from clockwright.units import NS_PER_US
from modelzoo.profile import load_profile
from worker.config import WorkerConfig
from worker.core.lanes import Step
from worker.devices.modelled import ModelledDevice
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import Fetch, Offer, ServedModel
from worker.timing import sleep_until, tune_process

# A step that fails does so this soon.
_FAIL_NS = 200 * NS_PER_US

#: `silent` is nothing that a device does: whoever started the process stops it.
FAULTS = ("fast_fail", "hang", "slow", "bad_load", "silent")


class BrokenDevice(ModelledDevice):
    """Modelled, and broken in one way from some time on."""

    def __init__(self, fault: str, **arguments: Any) -> None:  # noqa: ANN401
        super().__init__(**arguments)
        self._fault = fault
        self.broken = False

    @override
    async def prepare(
        self, offer: Offer, fetch: Fetch, progress: Callable[[str], None]
    ) -> ServedModel:
        model = await super().prepare(offer, fetch, progress)
        print(f"prepared {model.model_id}", flush=True)
        return model

    @override
    def exec_duration_ns(self, model: ServedModel, batch_size: int) -> int:
        times = 10 if self.broken and self._fault == "slow" else 1
        return times * super().exec_duration_ns(model, batch_size)

    @override
    def run_load(self, step: Step[ServedModel]) -> None:
        if self.broken and self._fault == "bad_load":
            _fail("the weights cannot be copied")
        super().run_load(step)

    @override
    def run_exec(self, step: Step[ServedModel]) -> None:
        if self.broken and self._fault == "fast_fail":
            _fail("an illegal memory access was encountered")
        if self.broken and self._fault == "hang":
            threading.Event().wait()
        super().run_exec(step)


def _fail(words: str) -> None:
    sleep_until(time.monotonic_ns() + _FAIL_NS)
    raise RuntimeError(words)


async def serve(config: WorkerConfig, device: BrokenDevice, files: FileStore) -> None:
    """Serve as a worker does until the controller is gone."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, setattr, device, "broken", True)
    await ControllerLink(config, device, files).run()


def main() -> None:
    """Command line; whoever starts it kills it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--controller", required=True, help="HOST:PORT")
    parser.add_argument("--id", required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--broken", action="store_true", help="from the start")
    parser.add_argument("--profile", required=True, help="as of a modelled device")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--cache-dir", type=Path, required=True)
    arguments = parser.parse_args()
    config = WorkerConfig(
        controller=arguments.controller,
        device=f"modelled:{arguments.profile}",
        worker_id=arguments.id,
        num_pages=arguments.pages,
        cache_dir=arguments.cache_dir,
    )
    files = FileStore(config.cache_dir)
    device = BrokenDevice(
        arguments.fault,
        profile=load_profile(arguments.profile),
        limits=Limits(
            arena_bytes=config.usable_arena_bytes,
            num_pages=arguments.pages,
            io_bytes=config.io_bytes,
        ),
        io_pool_bytes=config.io_bytes,
        files=files,
        compile_limit_s=config.compile_limit_s,
    )
    device.broken = arguments.broken
    tune_process()
    uvloop.run(serve(config, device, files))


if __name__ == "__main__":
    main()
