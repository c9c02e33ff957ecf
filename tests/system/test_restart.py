"""A controller that ends, by whichever way, and what its successor finds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from clockwright import Client
from clockwright.operator import Operator
from tests.kit.processes import listening, until, worker, write_models

SLO_MS = 600_000
X = np.random.default_rng(0).random((1, 16), np.float32)


class Deployment:
    """A controller that can be started again, and a worker with two models."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._directory = directory
        self._models = write_models(directory / "models", mlp="mlp-16-8-4", other="mlp-16-4-4")
        self.controller, self.address = self._start(0)
        cache = str(directory / "cache")
        flags = ("--pages", "4", "--arena-mib", "16", "--cache-dir", cache)
        self.worker = stack.enter_context(worker(self.address, *flags, "--id", "w"))
        with Client(self.address) as client:
            until(client.is_ready, what="all models are ready")

    def _start(self, port: int):
        arguments = ("--models", str(self._models), "--port", str(port))
        return self._stack.enter_context(listening("controller", *arguments))

    def start_again(self) -> None:
        self.controller, _ = self._start(int(self.address.rpartition(":")[2]))

    def ask(self):
        with Client(self.address) as client:
            return client.infer("mlp", X, slo_ms=SLO_MS)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield Deployment(tmp_path, stack)


def test_x(deployment):
    r = deployment.ask()
    print(r)
    t = time.monotonic()
    deployment.controller.kill()
    deployment.start_again()
    print("listening", time.monotonic() - t)
    while 1:
        try:
            r = deployment.ask()
            break
        except Exception as e:
            print(time.monotonic() - t, repr(e))
            time.sleep(0.02)
    print("served", time.monotonic() - t, r)
    with Operator(deployment.address) as op:
        print(op.workers())
    assert 0
