"""A real model on the lanes of a worker in this process: no controller, no network, one action at a time."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clockwright.units import NS_PER_S, ActionId, ModelId
from clockwright.wire.actions import ActionError, Infer, LoadWeights, Result
from clockwright.wire.bulk import Buffer
from worker.devices.cpu import CpuDevice
from worker.devices.device import Device
from worker.lane_threads import LaneThreads, Outcome
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import Offer, OfferedFile, ServedModel

_START_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model on a device, ready for `LoadWeights`."""

    device: Device[Any]
    model: ServedModel


def processor(cache: Path, limits: Limits, *, io_pool_bytes: int) -> Device[Any]:
    """The processor as a device, which keeps what it compiles."""
    return CpuDevice(
        limits=limits,
        io_pool_bytes=io_pool_bytes,
        files=FileStore(cache),
        cache_dir=cache,
        compile_limit_s=_START_LIMIT_S,
    )


@contextmanager
def prepared_on(
    device: Device[Any], folder: Path, cache: Path, batch_sizes: Sequence[int]
) -> Iterator[Prepared]:
    """Give a model to a device, which is closed afterwards.

    Args:
        device: without other users.
        folder: the model's, as in a repository.
        cache: the device's folder.
        batch_sizes: that can be run.
    """
    offered = stored(FileStore(cache), folder / "1")
    offer = Offer(ModelId(folder.name), offered, tuple(batch_sizes), {}, folder.name)
    try:
        yield Prepared(device, asyncio.run(device.prepare(offer, fetch_nothing, lambda _: None)))
    finally:
        asyncio.run(device.close())


def stored(files: FileStore, folder: Path) -> tuple[OfferedFile, ...]:
    """Give a copy of each file of a folder to a store, as if a controller had sent them; returns what to offer."""
    offered = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        copy = files.new_file()
        copy.write_bytes(content)
        files.add(copy, sha256)
        offered.append(OfferedFile(path.name, len(content), sha256))
    return tuple(offered)


async def fetch_nothing(missing: Sequence[OfferedFile]) -> None:
    """Stand in for the controller, which has nothing to send."""
    assert not missing, "every file is in the store"


@contextmanager
def loaded(ready: Prepared) -> Iterator[Callable[[NDArray[Any]], tuple[Result, Sequence[Buffer]]]]:
    """A model in its device's memory, and what runs one batch of it on the worker's lanes.

    Its caller gives rows, as many as one of the model's batch sizes, and gets the result and the outputs.

    Raises:
        RuntimeError: an action failed.
    """
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    runtime: LaneThreads[Any] = LaneThreads(ready.device, outcomes.put)
    ids = count(1)

    def done(kind: type[LoadWeights | Infer], *payload: bytes, **others: Any) -> Any:  # noqa: ANN401
        now_ns = time.monotonic_ns()
        action = kind(
            action_id=ActionId(next(ids)),
            model_id=ModelId(ready.model.model_id),
            earliest_ns=now_ns,
            latest_ns=now_ns + 60 * NS_PER_S,
            expected_duration_ns=1,
            **others,
        )
        runtime.submit(action, payload)
        result, outputs = outcomes.get()
        if result.error is not ActionError.NONE:
            raise RuntimeError(f"action {result.action_id}: {result.error.name}: {result.message}")
        return result, outputs

    runtime.add_model(ready.model)
    runtime.start()
    try:
        done(LoadWeights)
        yield lambda rows: done(Infer, rows.tobytes(), batch_size=len(rows), rows=(len(rows),))
    finally:
        runtime.stop()


def exec_ns(
    ready: Prepared, rows: NDArray[np.float32], *, runs: int, budget_s: float
) -> NDArray[np.int64]:
    """How long the EXEC of a batch takes on the worker's lanes, in ns by run.

    Args:
        ready: the model.
        rows: as many as one of its batch sizes.
        runs: number of runs at most; at least 3.
        budget_s: time after which no further run begins.
    """
    durations: list[int] = []
    with loaded(ready) as run:
        end_ns = time.monotonic_ns() + int(budget_s * NS_PER_S)
        while len(durations) < 4 or (len(durations) <= runs and time.monotonic_ns() < end_ns):
            result, _ = run(rows)
            durations.append(result.exec.duration_ns if result.exec else 0)
    return np.array(durations[1:], np.int64)  # the first touches memory
