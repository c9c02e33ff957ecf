"""Tells an action that failed from a GPU that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.devices.accelerator import Accelerator
from worker.devices.device import DeviceLostError


class DeviceLoss:
    """Asks the accelerator after every error; a GPU that is lost once stays lost."""

    def __init__(self, accelerator: Accelerator, on_lost: Callable[[str], object]) -> None:
        self._accelerator = accelerator
        self._on_lost = on_lost
        #: Why nothing can run any more; None while the device works.
        self.reason: str | None = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Surround a piece of serving.

        Raises:
            DeviceLostError: nothing can run any more, not only this piece.
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
            self.reason = f"{first_line(error)} ({fault})"
            self._on_lost(self.reason)


def first_line(error: Exception) -> str:
    """The first line of an error's words that says anything; torch appends pages of advice."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
