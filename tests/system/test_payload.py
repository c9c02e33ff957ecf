"""Large tensors through real sockets, a real link and shared memory: every answer is checked byte for byte."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from controller.process import front_process
from controller.process.app import Controller, running
from controller.process.config import FrontConfig
from tests.kit.echo_serving import (
    SHARED_BYTES,
    Clients,
    config,
    end,
    ready,
    until,
    worker,
    worker_process,
)
from tests.kit.slow_echo import SlowEcho


def front(
    controller: Controller,
    **changes: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[front_process.Front]:
    values = {"shared_memory_bytes": SHARED_BYTES, **changes}
    settings = FrontConfig(controller=f"127.0.0.1:{controller.port}", port=0, **values)
    return front_process.serving(settings)


def outputs_in_use(controller: Controller) -> int:
    gc.collect()
    arenas = [link.actions.outputs for link in controller.links.links]
    return sum(arena.used_bytes for arena in arenas if arena is not None)


def inputs_in_use(front: front_process.Front) -> int:
    gc.collect()
    assert front.slabs.inputs is not None
    return front.slabs.inputs.used_bytes


async def all_free(controller: Controller) -> None:
    """What nobody uses comes back; a cycle that the collector has to find may keep some for a while."""

    def free() -> bool:
        gc.collect()
        inputs = controller.slabs.inputs
        return inputs is None or inputs.used_bytes == 0

    await until(free)


async def test_answers_are_right_when_clients_leave_while_slow_actions_run(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(controller.port)
        await clients.crowd(60)
        await all_free(controller)
        await clients.channel.close()
        await end(serving)
    assert clients.refused == []
    assert clients.answered + clients.given_up == 60
    assert clients.answered
    assert clients.given_up
    assert device.shared_inputs
    assert device.shared_outputs
    await device.close()


async def test_an_input_outlives_its_client_until_the_action_has_read_it(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(controller.port)
        await clients.ask(0)
        device.go.clear()
        await clients.give_up(1, when=lambda: device.shared_inputs + device.own_inputs > 1)
        # The client has gone, and its request; the action runs, and has its slab.
        await until(lambda: controller.runtime.num_waiting == 0)
        assert controller.slabs.inputs is not None
        assert controller.slabs.inputs.used_bytes > 0
        device.go.set()
        await all_free(controller)
        await clients.channel.close()
        await end(serving)
    await device.close()


async def test_answers_are_right_when_a_worker_is_killed_under_way(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller:
        with worker_process(controller, tmp_path / "killed") as pid:
            await ready(controller)
            stays = worker(controller, tmp_path, device, "stays")
            await ready(controller, 2)
            clients = Clients(controller.port)
            crowd = asyncio.create_task(clients.crowd(40))
            await until(lambda: clients.answered > 10)
            os.kill(pid, signal.SIGKILL)
            await crowd
        await all_free(controller)
        await clients.channel.close()
        await end(stays)
    assert not clients.unexpected_refusals, clients.unexpected_refusals
    assert clients.answered > 15
    await device.close()


async def test_a_worker_that_was_given_up_and_writes_on_spoils_no_answer(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    settings = config(tmp_path, silence_limit_ms=4000)
    written = tmp_path / "zombie" / "written"
    async with running(settings) as controller:
        with worker_process(controller, tmp_path / "zombie", "--stall") as pid:
            await ready(controller)
            clients = Clients(controller.port)

            async def ask_on() -> None:
                while not written.exists():
                    await clients.ask(0)

            asking = asyncio.create_task(ask_on())
            await until(written.exists)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: not controller.catalogue.models[0].ready_on)
            stays = worker(controller, tmp_path, device, "stays")
            await ready(controller)
            before = written.read_text()
            os.kill(pid, signal.SIGCONT)
            await until(lambda: written.read_text() not in ("", before))
            await asking
            # One at a time: each has the first slab that there is.
            await clients.crowd(20, at_once=1)
            after = written.read_text()
            await until(lambda: written.read_text() not in ("", after))
        await all_free(controller)
        await clients.channel.close()
        await end(stays)
    assert not clients.unexpected_refusals, clients.unexpected_refusals
    assert clients.answered > 5
    assert device.shared_outputs
    await device.close()


async def test_outputs_that_find_no_room_travel_with_their_results(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    # An eighth of the half that is not for inputs is smaller than a row.
    async with running(config(tmp_path, shared_memory_bytes=2 << 20)) as controller:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(controller.port)
        await clients.crowd(15)
        await all_free(controller)
        await clients.channel.close()
        await end(serving)
    assert clients.refused == []
    assert clients.answered
    assert (device.shared_inputs > 0, device.shared_outputs) == (True, 0)
    await device.close()


@pytest.mark.parametrize("missing", ["limit", "memfd", "mapping", "unix socket"])
async def test_without_shared_memory_tensors_travel_beside_their_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    changes: dict[str, Any] = {}
    if missing == "limit":
        changes["shared_memory_bytes"] = 0
    elif missing == "unix socket":
        # Its path would be longer than one may be, so that this worker comes by TCP.
        folder = tmp_path / ("long" * 40)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
    else:

        def refuse(*_: object, **__: object) -> int:
            raise OSError(12, "Cannot allocate memory")

        where = {"memfd": "os.memfd_create", "mapping": "worker.controller_socket.map_shared"}
        monkeypatch.setattr(where[missing], refuse)
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path, **changes)) as controller:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(controller.port)
        await clients.crowd(15)
        await clients.channel.close()
        await end(serving)
    assert clients.refused == []
    assert clients.answered
    assert (device.shared_inputs, device.own_inputs > 0) == (0, True)
    assert (device.shared_outputs, device.own_outputs > 0) == (0, True)
    await device.close()


async def test_fronts_apart_workers_and_clients_that_leave_share_memory_and_answers_are_right(
    tmp_path: Path,
) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with (
        running(config(tmp_path)) as controller,
        front(controller) as one,
        front(controller) as two,
    ):
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(one.port), Clients(two.port)
        await asyncio.gather(*(each.crowd(40) for each in clients))
        assert [each.refused for each in clients] == [[], []]
        assert all(each.answered and each.given_up for each in clients)
        await until(lambda: inputs_in_use(one) == inputs_in_use(two) == 0)
        await until(lambda: outputs_in_use(controller) == 0)
        for each in clients:
            await each.channel.close()
        await end(serving)
    assert device.shared_inputs
    assert device.shared_outputs
    await device.close()


async def test_an_input_in_a_fronts_memory_outlives_its_client_until_the_action_has_read_it(
    tmp_path: Path,
) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller, front(controller) as apart:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(apart.port)
        await clients.ask(0)
        device.go.clear()
        begun = device.shared_inputs + device.own_inputs
        await clients.give_up(1, when=lambda: device.shared_inputs + device.own_inputs > begun)
        await until(lambda: controller.runtime.num_waiting == 0)
        # The client has gone, its request too, and the front knows; the action runs, and has its slab.
        assert inputs_in_use(apart) > 0
        device.go.set()
        await until(lambda: inputs_in_use(apart) == 0)
        await clients.channel.close()
        await end(serving)
    await device.close()


async def test_a_front_that_goes_under_way_leaves_others_their_memory(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller, front(controller) as stays:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        mine = Clients(stays.port)
        whole = asyncio.create_task(mine.crowd(60))
        async with front(controller) as goes:
            theirs = Clients(goes.port)
            broken = asyncio.create_task(theirs.crowd(1000))
            await until(lambda: theirs.answered > 5)
        broken.cancel()
        await asyncio.wait([broken])
        await theirs.channel.close()
        await whole
        assert mine.refused == []
        await until(lambda: inputs_in_use(stays) == 0)
        await mine.channel.close()
        await end(serving)
    await device.close()
