"""A worker process with several modelled devices: each is a worker of its own, and what fails concerns it alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from clockwright import AsyncClient, Client
from clockwright.client.operator import Operator
from clockwright.errors import ConfigError
from controller.links.worker_link import WorkerLink
from controller.process.app import running
from controller.process.config import ControllerConfig
from experiments.live.local_server import LocalServer
from tests.kit.processes import PATIENCE_S, listening, lives, until, worker, write_models
from worker.config import WorkerConfig

SLO_MS = 600_000
ROW = np.zeros((1, 4), np.float32)


def pids_of(operator: Operator) -> dict[str, int]:
    return {row.worker_id: row.pid for row in operator.workers()}


def infer(client: Client) -> None:
    # One device may have the model before the others have it.
    until(lambda: client.models()[0].state == "READY", what="a device has the model")
    result = client.infer("echo", {"input": ROW}, slo_ms=SLO_MS)
    assert not result.outputs["output"].any()


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[LocalServer]:
    models = write_models(tmp_path / "models", echo="echo-4")
    common = ["--models", str(models), "--cache-dir", str(tmp_path / "cache")]
    with LocalServer([*common, "--device", "modelled:1ms", *arguments]) as server:
        yield server


def test_devices_of_one_process_leave_one_by_one_and_the_last_ends_it(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--devices", "3") as server,
        Operator(server.address) as operator,
        Client(server.address) as client,
    ):
        pids = pids_of(operator)
        assert sorted(pids) == ["local-0-0", "local-0-1", "local-0-2"]
        (pid,) = set(pids.values())
        infer(client)
        operator.drain("local-0-1")
        assert sorted(pids_of(operator)) == ["local-0-0", "local-0-2"]
        infer(client)
        operator.drain("local-0-0")
        infer(client)
        assert lives(pid)
        operator.drain("local-0-2")
        until(lambda: not lives(pid), what="the process has ended")


def test_a_process_that_is_killed_comes_back_with_the_same_names(tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--devices", "2")
    with (
        serving(tmp_path, *arguments) as server,
        Operator(server.address) as operator,
        Client(server.address) as client,
    ):
        before = pids_of(operator)
        assert sorted(before) == ["local-0-0", "local-0-1", "local-1-0", "local-1-1"]
        os.kill(before["local-1-0"], signal.SIGKILL)
        until(lambda: before["local-1-0"] not in pids_of(operator).values(), what="it is gone")
        infer(client)
        until(lambda: len(pids_of(operator)) == 4, what="its devices are back")
        after = pids_of(operator)
        assert sorted(after) == sorted(before)
        assert after["local-1-0"] == after["local-1-1"] != before["local-1-0"]
        assert after["local-0-0"] == before["local-0-0"]
        infer(client)


def test_devices_join_a_controller_that_was_started_again_under_their_names(
    tmp_path: Path,
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    common = ("--models", str(models), "--state", str(tmp_path / "state"))
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path / "cache"))
    with listening("controller", "--port", "0", *common) as (first, address), ExitStack() as stack:
        process = stack.enter_context(worker(address, "--id", "w", "--devices", "2", *arguments))
        expected = {"w-0": process.pid, "w-1": process.pid}
        with Operator(address) as operator:
            until(lambda: pids_of(operator) == expected, what="both have joined")
        first.kill()
        first.wait(PATIENCE_S)
        port = address.rpartition(":")[2]
        stack.enter_context(listening("controller", "--port", port, *common))
        with Operator(address) as operator, Client(address) as client:
            until(lambda: pids_of(operator) == expected, what="both have joined again")
            infer(client)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_device_whose_connection_breaks_joins_again_and_the_others_notice_nothing(
    tmp_path: Path,
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path / "cache"))

    async def scenario() -> None:
        async with running(ControllerConfig(port=0, models_dir=models)) as controller:
            address, links = f"127.0.0.1:{controller.port}", controller.links

            async def joined() -> dict[str, WorkerLink]:
                while True:
                    found = {link.worker_id: link for link in links.links if link.joined}
                    if len(found) == 2:
                        return {str(name): link for name, link in found.items()}
                    await asyncio.sleep(0.01)

            async def infer(client: AsyncClient) -> None:
                while not controller.catalogue.ready:  # noqa: ASYNC110  it sends no event
                    await asyncio.sleep(0.01)
                await client.infer("echo", {"input": ROW}, slo_ms=SLO_MS)

            with worker(address, "--id", "w", "--devices", "2", *arguments) as process:
                async with asyncio.timeout(PATIENCE_S), AsyncClient(address) as client:
                    before = await joined()
                    before["w-1"].cut("a test")
                    await before["w-1"].left.wait()
                    await infer(client)
                    after = await joined()
                    assert after["w-0"] is before["w-0"]
                    assert after["w-1"] is not before["w-1"]
                    assert after["w-1"].register.pid == process.pid
                    await infer(client)

    asyncio.run(scenario())


def test_a_device_that_is_rejected_leaves_the_others_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path / "cache"))
    with (
        listening("controller", "--port", "0", "--models", str(models)) as (_, address),
        Operator(address) as operator,
        Client(address) as client,
        worker(address, "--id", "w-1", *arguments) as other,
    ):
        until(lambda: "w-1" in pids_of(operator), what="the other worker has the name")
        with worker(address, "--id", "w", "--devices", "3", *arguments) as several:
            expected = {"w-0": several.pid, "w-1": other.pid, "w-2": several.pid}
            until(lambda: pids_of(operator) == expected, what="two of three have joined")
            operator.drain("w-1")
            infer(client)
            operator.drain("w-0")
            operator.drain("w-2")
            assert several.wait(PATIENCE_S) == os.EX_CONFIG
    told = capfd.readouterr().err
    assert "there is a worker w-1 already" in told
    assert "the other devices go on" in told


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "container:somewhere"])
def test_a_device_that_cannot_share_its_process_says_so(device: str, tmp_path: Path) -> None:
    expected = f"--devices is 2 with device '{device}', expected modelled:PROFILE"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        WorkerConfig(controller="there:1", device=device, num_devices=2)


def test_each_device_has_a_name_and_a_port_for_fronts_of_its_own() -> None:
    config = WorkerConfig(
        controller="there:1",
        device="modelled:1ms",
        num_devices=2,
        worker_id="w",
        payload_port=7000,
    )
    assert [(each.name, each.payload_port) for each in config.each_device] == [
        ("w-0", 7000),
        ("w-1", 7001),
    ]
    alone = WorkerConfig(controller="there:1", device="modelled:1ms", worker_id="w")
    assert [each.name for each in alone.each_device] == ["w"]
