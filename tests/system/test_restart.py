"""A controller that ends, by whichever way, and what its successor finds and its clients notice."""

from __future__ import annotations

import csv
import functools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest

from clockwright import Client, ClockwrightError
from clockwright.client.operator import Operator
from clockwright.v1 import control_pb2 as pb
from modelzoo.build import write_model
from tests.kit.etcd_server import etcd_server
from tests.kit.processes import PATIENCE_S, listening, standing_by, until, worker, write_models

# A pause of the machine counts as a long execution, and the next ones are predicted to take as long.
SLO_MS = 600_000
X = np.random.default_rng(0).random((1, 16), np.float32)


class Deployment:
    """Controllers, one worker with two models, and a front."""

    def __init__(self, directory: Path, cache_dir: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._directory = directory
        self._cache_dir = cache_dir
        self._models = write_models(directory / "models", mlp="mlp-16-8-4", other="mlp-16-4-4")

    def flags(self, port: int | str, name: str) -> tuple[str, ...]:
        return (
            *("--models", str(self._models), "--port", str(port)),
            *(
                "--state",
                str(self._directory / "state"),
                "--telemetry",
                str(self._directory / name),
            ),
        )

    def start(self, port: int | str, name: str) -> tuple[Popen[str], str]:
        return self._stack.enter_context(listening("controller", *self.flags(port, name)))

    def stand_by(self, lease: str, name: str, port: int | str = 0) -> tuple[Popen[str], str]:
        flags = (*self.flags(port, name), "--lease", lease)
        if not lease.startswith("file"):
            # As on different hosts, each has a state folder.
            flags = (*flags, "--state", str(self._directory / f"state-{name}"))
        return self._stack.enter_context(standing_by("controller", *flags))

    def join(self, controllers: str) -> str:
        """Start a worker and a front; gives the front's address."""
        cache = str(self._cache_dir)
        flags = ("--pages", "4", "--arena-mib", "16", "--cache-dir", cache, "--id", "w")
        self.worker = self._stack.enter_context(worker(controllers, *flags))
        front = listening("front", "--controller", controllers, "--port", "0")
        _, address = self._stack.enter_context(front)
        with Client(address) as client:
            until(client.is_ready, what="all models are ready")
        return address

    def loads(self, name: str) -> list[str]:
        """Models that a controller had loaded, as its telemetry says once it has ended."""
        with (self._directory / name / "actions.csv").open() as file:
            return [row["model_id"] for row in csv.DictReader(file) if row["type"] == "LoadWeights"]


@pytest.fixture
def deployment(tmp_path: Path, cache_dir: Path) -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield Deployment(tmp_path, cache_dir, stack)


def ask(address: str) -> None:
    """Ask what every client may, without a word of the model before."""
    with Client(address) as client:
        client.infer("mlp", {"input": X}, slo_ms=SLO_MS)


def workers(address: str) -> list[pb.WorkerInfo]:
    with Operator(address) as operator:
        return operator.workers()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_models_that_were_reloaded_or_added_keep_their_weights_over_a_restart(
    deployment: Deployment, tmp_path: Path, number: int
) -> None:
    controller, address = deployment.start(0, "first")
    front = deployment.join(address)
    with Client(address) as client, Operator(address) as operator:
        for version in ("2", "3"):
            write_model("mlp-16-8-4", tmp_path / "models" / "mlp" / version / "model.onnx")
            client.load_model("mlp")
        write_models(tmp_path / "models", added="mlp-16-8-4")
        for _ in range(2):
            client.load_model("added")
        for name in ("mlp", "added", "other"):
            client.infer(name, {"input": X}, slo_ms=SLO_MS)
        (before,) = operator.workers()
    assert sorted(before.resident) == ["added", "mlp", "other"]
    controller.send_signal(number)
    assert controller.wait(PATIENCE_S) == (0 if number == signal.SIGTERM else -number)
    again, _ = deployment.start(address.rpartition(":")[2], "second")
    ask(front)
    (found,) = workers(address)
    assert sorted(found.resident) == sorted(before.resident)
    assert deployment.worker.poll() is None
    again.send_signal(signal.SIGTERM)
    assert again.wait(PATIENCE_S) == 0
    assert deployment.loads("second") == []


def leads(address: str) -> bool:
    with Operator(address) as operator, suppress(ClockwrightError):
        operator.status()
        return True
    return False


def is_ready(address: str) -> bool:
    with Client(address) as client:
        return client.is_ready()


def test_one_controller_of_a_host_follows_the_other_and_clients_notice_nothing(
    deployment: Deployment, tmp_path: Path
) -> None:
    lease = f"file:{tmp_path}/lease"
    leader, address = deployment.stand_by(lease, "first")
    until(lambda: leads(address), what="the first leads")
    standby, other = deployment.stand_by(lease, "second")
    front = deployment.join(f"{address},{other}")
    with Client(address) as client:
        client.load_model("mlp")
    # One that was stopped is ended by its successor, which needs the state folder.
    for number, expected in (
        (signal.SIGTERM, 0),
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGSTOP, -signal.SIGKILL),
    ):
        # An operator tells all of them that keys have changed.
        for process in (leader, standby, deployment.worker):
            process.send_signal(signal.SIGHUP)
        ask(front)
        assert not is_ready(other)
        leader.send_signal(number)
        ask(front)
        assert leader.wait(PATIENCE_S) == expected
        until(functools.partial(is_ready, other), what="the standby leads")
        (found,) = workers(other)
        assert list(found.resident) == ["mlp"]
        # Where it was, and standing by.
        port = address.rpartition(":")[2]
        again, _ = deployment.stand_by(lease, f"after-{number}", port=port)
        leader, standby, address, other = standby, again, other, address
    assert deployment.worker.poll() is None


def test_a_controller_that_was_stopped_is_followed_by_etcd_and_ends_when_it_goes_on(
    deployment: Deployment,
) -> None:
    with etcd_server() as etcd:
        lease = f"etcd://{etcd}/lease"
        leader, address = deployment.stand_by(lease, "first")
        until(lambda: leads(address), what="the first leads")
        standby, other = deployment.stand_by(lease, "second")
        front = deployment.join(f"{address},{other}")
        ask(front)
        leader.send_signal(signal.SIGSTOP)
        ask(front)
        leader.send_signal(signal.SIGCONT)
        assert leader.wait(PATIENCE_S) == os.EX_TEMPFAIL
        ask(front)
        standby.send_signal(signal.SIGTERM)
        assert standby.wait(PATIENCE_S) == 0
    assert deployment.loads("second") == []


def test_readiness_falls_before_requests_are_refused(deployment: Deployment) -> None:
    notice = ("--notice-s", "600")
    with ExitStack() as stack:
        flags = (*deployment.flags(0, "first"), *notice)
        controller, address = stack.enter_context(listening("controller", *flags))
        deployment.join(address)
        flags = ("--controller", address, "--port", "0", "--no-http", *notice)
        front, at_front = stack.enter_context(listening("front", *flags))
        until(lambda: is_ready(at_front), what="it is ready")
        # The front first: it is as little ready as its controller.
        for process, served in ((front, at_front), (controller, address)):
            process.send_signal(signal.SIGTERM)
            until(lambda at=served: not is_ready(at), what="it is not ready")  # type: ignore[misc]
            ask(served)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
