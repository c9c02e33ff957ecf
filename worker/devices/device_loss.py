"""Tells an action that failed from a GPU that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.devices.accelerator import Accelerator
from worker.devices.device import DeviceLostError
from worker.engines.onnxruntime import plain_words


class DeviceLoss:
    """Asks the accelerator after every error. A lost GPU stays lost."""

    def __init__(self, accelerator: Accelerator, on_lost: Callable[[str], object]) -> None:
        self._accelerator = accelerator
        self._on_lost = on_lost
        #: Why nothing can run any more; None while the device works.
        self.reason: str | None = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run a part of serving as a context, and tell its failure from the loss of the GPU.

        Raises DeviceLostError if nothing can run any more, not only this part.
        """
        if self.reason is not None:
            raise DeviceLostError(self.reason)
        try:
            yield
        except Exception as error:
            self.judge(error)
            if self.reason is not None:
                raise DeviceLostError(self.reason) from error
            raise

    def judge(self, error: Exception) -> None:
        """Find out whether the device survived an error, and tell `on_lost` once if it did not."""
        if self.reason is None and (fault := self._accelerator.fault()):
            self.reason = f"{plain_words(error)} ({fault})"
            self._on_lost(self.reason)
