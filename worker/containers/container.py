"""What runs a container's batches, as its device sees it: a program (`program`), or another server (`oip_server`)."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.containers import ContainerSpec
from clockwright.elements import Array, array_of, raw_of
from clockwright.errors import ModelError
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES
from worker.containers.batches import run_batch
from worker.containers.frames import Tensor


class ContainerDiedError(Exception):
    """It crashed, hung, went away or was ended; it will not answer any more."""


class ContainerAwayError(OSError):
    """It does not answer at its address, which may pass."""


class ContainerFailedError(ModelError):
    """It could not run a batch; it can run others."""


class ContainerBusyError(ContainerFailedError):
    """It refused a batch; it may run the same one later."""


class SharedMemory:
    """Bytes that other processes can map; the memory is freed with its last user."""

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("clockwright-io")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.ftruncate(self.fd, num_bytes)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(
            mmap.mmap(self.fd, num_bytes), np.uint8
        )

    def close(self) -> None:
        """Close the file; existing mappings stay."""
        os.close(self.fd)


class Container(ABC):
    """One of them. A long-lived thread must call `start`; the other methods take one caller at a time."""

    def __init__(self, spec: ContainerSpec, folder: Path, memory: SharedMemory) -> None:
        """Set up; starts nothing."""
        self._spec = spec
        self._folder = folder
        self._memory = memory
        #: When the batch that runs has to be done, by the monotonic clock: one limit, also where its requests are
        #: tried one by one.
        self._batch_end_s = 0.0
        #: Whether `stop` ended it, on purpose.
        self.stopped = False

    #: The process's id, if there is a process.
    pid: int | None = None

    @abstractmethod
    def start(self) -> None:
        """Start it, unless it runs already; `wait_ready` waits until it can run batches."""

    @abstractmethod
    def wait_ready(self, limit_s: float) -> None:
        """Wait until it can run batches.

        Raises ModelError if it cannot, or that took longer than `limit_s`; ContainerAwayError if it does not answer at
        its address.
        """

    def run(self, rows: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run one batch.

        Args:
            rows: the number of rows of each request.
            inputs: the offset of each input in the memory.
            outputs: the offset that each output is to get.

        Raises:
            ContainerFailedError: it could not run the batch.
            ContainerDiedError: it crashed, or hung and was ended.
        """
        self._batch_end_s = time.monotonic() + self._spec.time_limit_s
        self._run(rows, inputs, outputs)

    def _run(self, rows: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        run_batch(
            self._memory.bytes,
            list(zip(self._spec.inputs, inputs, strict=True)),
            list(zip(self._spec.outputs, outputs, strict=True)),
            rows,
            self._run_arrays,
        )

    def _run_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        rows = len(arrays[0])
        found = self._run_tensors(
            [
                (spec.datatype, array.shape, raw_of(array).data)
                for spec, array in zip(self._spec.inputs, arrays, strict=True)
            ],
            rows,
        )
        if len(found) != len(self._spec.outputs):
            raise ContainerFailedError(
                f"found {len(found)} outputs, expected {len(self._spec.outputs)}"
            )
        made = []
        for spec, (datatype, shape, elements) in zip(self._spec.outputs, found, strict=True):
            if datatype != spec.datatype or not spec.is_shape_of(shape, rows):
                raise ContainerFailedError(
                    f"output {spec.name!r} is {datatype} {list(shape)}, expected {spec.datatype} "
                    f"{spec.words(rows)}"
                )
            made.append(_array(spec.name, datatype, shape, elements))
        return made

    @abstractmethod
    def _run_tensors(self, inputs: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        """Run rows. Returns the outputs, in the order of the declaration.

        Raises ContainerFailedError if it could not run the batch; ContainerDiedError if it crashed, or hung and was
        ended.
        """

    def stop(self) -> None:
        """End it on purpose, whatever it is doing."""
        self.stopped = True
        self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End it, and wait until it writes to the memory no more."""


def _array(name: str, datatype: str, shape: Sequence[int], elements: Buffer) -> Array:
    try:
        return array_of(datatype, elements, shape)
    except ValueError as error:
        kind = DATATYPES[datatype].num_bytes or "4 or more"
        raise ContainerFailedError(
            f"output {name!r} has {len(elements)} bytes for {datatype} {list(shape)}, expected {kind} for "
            f"each element: {error}"
        ) from None
