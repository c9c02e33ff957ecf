"""What operators do to a running server, under load: pin, reload, join and drain. No request is lost by it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from clockwright import Client
from clockwright.cli.main import main
from clockwright.client.client import Array
from clockwright.client.operator import Operator
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import control_pb2 as pb
from experiments.live.local_server import LocalServer
from modelzoo.build import write_model
from tests.kit.processes import until, worker, write_models
from traces.arrivals import FixedRate, Workload
from traces.client_record import ClientRecord
from traces.replay import play_async

#: Four copies, each of a page, on two pages.
COPIES = tuple(f"m-{number}" for number in range(4))
# Longer than anything here takes on the slowest machine.
SLO_NS = 60 * NS_PER_S


class Asking:
    """A load that goes on until it is told to end; 20 requests per second, to all copies in turn."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._play()))
        self.records: list[ClientRecord] = []
        self._thread.start()

    async def _play(self) -> None:
        source = FixedRate(models=range(4), rate_rps=20, slo_ns=SLO_NS, end_ns=NS_PER_S)
        while not self._over.is_set():
            workload = Workload(models=COPIES, sources=(source,))
            self.records.append(await play_async(self._address, workload))

    def end(self) -> dict[str, int]:
        """Numbers of requests by what became of them."""
        self._over.set()
        self._thread.join()
        counts: dict[str, int] = {}
        for record in self.records:
            for outcome, num in record.num_by_outcome.items():
                counts[outcome] = counts.get(outcome, 0) + num
        return counts


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run_command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clockwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        # What the interpreter makes of a message is 1.
        return int(bool(caught.value.code))

    return run_command


def model_of(operator: Operator, name: str) -> pb.ModelInfo:
    (found,) = (row for row in operator.models() if row.model_id == name)
    return found


def test_models_are_pinned_and_reloaded_and_workers_drained_while_all_are_answered(
    tmp_path: Path, cache_dir: Path, command: Callable[..., int]
) -> None:
    models = write_models(tmp_path / "models", config="copies = 4\n", m="mlp-16-32-4")
    device = ("--device", "modelled:1ms", "--pages", "2", "--cache-dir", str(cache_dir))
    with (
        LocalServer(
            ["--models", str(models), "--state", str(tmp_path / "state"), *device]
        ) as server,
        Operator(server.address) as operator,
    ):
        to = ("--server", server.address)
        asking = Asking(server.address)
        until(
            lambda: model_of(operator, "m-3").counters["cold_starts"] > 1,
            what="copies push each other out",
        )

        assert command("models", "pin", "m-0", *to) == 0
        until(lambda: model_of(operator, "m-0").resident_on, what="the pinned copy is loaded")
        cold = model_of(operator, "m-0").counters["cold_starts"]
        others = model_of(operator, "m-3").counters["cold_starts"]
        until(
            lambda: model_of(operator, "m-3").counters["cold_starts"] > others + 3,
            what="others go on",
        )
        # One request may have come before its load had ended.
        assert model_of(operator, "m-0").counters["cold_starts"] <= cold + 1
        assert model_of(operator, "m-0").pinned

        # What takes the name over is pinned too.
        assert command("models", "reload", "m", *to) == 0
        until(lambda: model_of(operator, "m-0").resident_on, what="the new copy is loaded")
        assert model_of(operator, "m-0").pinned

        # Its worker goes, and another has to load it.
        with worker(server.address, "--id", "second", *device):
            until(
                lambda: (
                    {(row.worker_id, row.state) for row in operator.workers()}
                    == {("local-0", "READY"), ("second", "READY")}
                ),
                what="the worker is ready",
            )
            assert command("drain", "second", *to) == 0
            assert [row.worker_id for row in operator.workers()] == ["local-0"]
        until(
            lambda: list(model_of(operator, "m-0").resident_on) == ["local-0"],
            what="the pinned copy is loaded on the worker that is left",
        )

        assert command("models", "unpin", "m-0", *to) == 0
        cold = model_of(operator, "m-0").counters["cold_starts"]
        until(
            lambda: model_of(operator, "m-0").counters["cold_starts"] > cold,
            what="it makes room again",
        )
        outcomes = asking.end()
    assert outcomes == {"OK": sum(outcomes.values())}
    assert len(outcomes) == 1


def test_a_new_version_takes_over_while_each_request_is_answered_by_one_or_the_other(
    tmp_path: Path, cache_dir: Path, command: Callable[..., int]
) -> None:
    models = write_models(tmp_path / "models", m="mlp-16-32-4")
    row = np.ones((1, 16), np.float32)
    answers: list[tuple[str, Array]] = []
    over = threading.Event()
    with (
        LocalServer(
            ["--models", str(models), "--pages", "4", "--cache-dir", str(cache_dir)]
        ) as server,
        Operator(server.address) as operator,
        ThreadPoolExecutor(4) as askers,
    ):

        def ask() -> None:
            with Client(server.address) as client:
                while not over.is_set():
                    result = client.infer("m", row, slo_ms=SLO_NS / NS_PER_MS)
                    (output,) = result.outputs.values()
                    answers.append((result.model_version, output))

        # Whatever fails in one of them fails the test, at its result.
        asking = [askers.submit(ask) for _ in range(4)]

        def come(num: int) -> None:
            """Wait for so many further answers, or an asker's end, which is a failure."""
            last = len(answers) + num
            until(
                lambda: len(answers) >= last or any(each.done() for each in asking),
                what=f"{num} answers",
            )

        try:
            come(20)
            # Not taken by itself: somebody may still be writing it.
            write_model("mlp-16-32-4", models / "m" / "2" / "model.onnx", seed=2)
            come(20)
            assert {version for version, _ in answers} == {"1"}
            assert command("models", "reload", "m", "--server", server.address) == 0
            assert model_of(operator, "m").version == "2"
            come(20)
        finally:
            over.set()
        for each in asking:
            each.result()
    # Those that were on their way at the reload may be anyone's; each is wholly of one version.
    assert {version for version, _ in answers[-10:]} == {"2"}
    outputs = dict(answers)
    assert outputs.keys() == {"1", "2"}
    assert not np.allclose(outputs["1"], outputs["2"], rtol=0.1)
    for version, output in answers:
        np.testing.assert_allclose(output, outputs[version], rtol=1e-3)


def test_a_pin_outlives_the_controller_and_goes_with_its_model(
    tmp_path: Path, cache_dir: Path, command: Callable[..., int]
) -> None:
    models = write_models(tmp_path / "models", m="mlp-16-32-4")
    arguments = ["--models", str(models), "--state", str(tmp_path / "state")]
    device = ["--device", "modelled:1ms", "--cache-dir", str(cache_dir)]
    with LocalServer([*arguments, *device]) as server:
        assert command("models", "pin", "m", "--server", server.address) == 0
        assert command("models", "pin", "nobody", "--server", server.address) == 1
    with LocalServer([*arguments, *device]) as server, Operator(server.address) as operator:
        until(lambda: model_of(operator, "m").resident_on, what="it is loaded unasked")
        assert model_of(operator, "m").pinned
        operator.remove_model("m")
        assert command("models", "reload", "m", "--server", server.address) == 0
        assert not model_of(operator, "m").pinned
