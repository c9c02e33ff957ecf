"""Decides the contest between the ways to run a graph on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker.devices.accelerator import HostAccelerator
from worker.devices.exec_queue import ExecQueue
from worker.engines.choice import Way
from worker.engines.onnxruntime import PROCESSOR, Place


def time_says(monkeypatch: pytest.MonkeyPatch, exec_ns: dict[Way, int]) -> None:
    """Have EXECs run when they are measured, and take what the test wants."""
    measure = ExecQueue.measure

    def measured(execs: ExecQueue, kernel: Any, num_pages: int) -> int:  # noqa: ANN401
        measure(execs, kernel, num_pages)
        return exec_ns[kernel.way]

    monkeypatch.setattr(ExecQueue, "measure", measured)


def forget_trials(cache_dir: Path) -> None:
    """Have the next contest decided anew, where one in this cache of compiled models has been recorded."""
    for record in (cache_dir / "profiles").glob("*"):
        record.unlink()


class OnnxruntimeAccelerator(HostAccelerator):
    """As on a GPU with onnxruntime-gpu: it computes where torch does."""

    def onnxruntime_place(self) -> Place:
        return PROCESSOR
