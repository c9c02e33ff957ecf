"""A controller in a process of its own, killed at any moment, knows afterwards what it has confirmed."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from clockwright import Client, ClockwrightError
from clockwright.client.operator import Operator
from tests.kit.processes import controller, until, worker, write_models

ROW = np.arange(4, dtype=np.float32)[None]
SLO_MS = 60_000
KILLS = 3


class Changes(threading.Thread):
    """An operator who adds and removes models until the controller is gone."""

    def __init__(self, address: str, folder: Path, known: dict[str, bool], seed: int) -> None:
        super().__init__()
        self._address = address
        self._folder = folder
        self._random = random.Random(seed)
        #: By name, whether the model is there, as the controller has confirmed it.
        self.known = known
        #: The change that nobody has confirmed when the controller went.
        self.open = ""
        self.num_confirmed = 0

    def wait_for(self, num_confirmed: int) -> None:
        until(lambda: self.num_confirmed >= num_confirmed, what="some changes are confirmed")

    def run(self) -> None:
        with Operator(self._address) as operator, suppress(ClockwrightError):
            while True:
                name = f"m{self._random.randrange(6)}"
                self.open = name
                if self.known.get(name):
                    operator.remove_model(name)
                else:
                    operator.add_model(self._folder, name=name, replace=True)
                self.known[name] = not self.known.get(name, False)
                self.num_confirmed += 1


def until_serving(address: str) -> None:
    with Operator(address) as operator:
        until(
            lambda: (status := operator.status()).num_workers and status.ready,
            what="all models are ready",
        )


def test_a_controller_that_is_killed_at_any_moment_has_all_that_it_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The user's state folder is the default.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = write_models(tmp_path / "models", echo="echo-4") / "echo"
    known: dict[str, bool] = {}
    with controller("--port", "0") as first, ExitStack() as stack:
        assert first.stdout is not None
        address = first.stdout.readline().removeprefix("listening on ").strip()
        port = address.rpartition(":")[2]
        arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path / "cache"))
        stack.enter_context(worker(address, "--id", "w", *arguments))
        process = first
        for seed in range(KILLS):
            until_serving(address)
            changes = Changes(address, folder, known, seed)
            changes.start()
            changes.wait_for(random.Random(seed).randrange(1, 12))
            process.kill()
            process.wait()
            changes.join()
            process = stack.enter_context(controller("--port", port))
            assert process.stdout is not None
            assert process.stdout.readline() == f"listening on {address}\n"
            until_serving(address)
            with Operator(address) as operator, Client(address) as client:
                found = {model.model_id for model in operator.models()}
                expected = {name for name, there in known.items() if there}
                # The change that nobody has confirmed may be there or not.
                assert found - {changes.open} == expected - {changes.open}
                known = dict.fromkeys(found, True)
                for name in found:
                    result = client.infer(name, {"input": ROW}, slo_ms=SLO_MS)
                    np.testing.assert_array_equal(
                        next(iter(result.outputs.values())).shape, ROW.shape
                    )
        uploads = tmp_path / "state" / "clockwright" / "uploads"
        assert len(list(uploads.iterdir())) == len(known)
