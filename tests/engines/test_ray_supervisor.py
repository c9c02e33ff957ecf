"""A supervisor, which starts a process in a Ray cluster, without Ray: its process is a real one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.ray import supervisor as supervisor_module
from engines.ray.reconcile import (
    ENDED,
    PENDING,
    RUNNING,
    UNABLE,
    Actor,
    KindSaid,
    KindWish,
    Known,
    Steps,
    Wish,
    next_steps,
)
from engines.ray.supervisor import Supervisor

# Ends as it is told, once it has said something.
SERVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("listening on 0.0.0.0:4711", flush=True)
print(" ".join(sys.argv[1:]), flush=True)
signal.pause()
"""
# Says that it drains where its argument is.
DRAINS = """
import pathlib, signal, sys
def drain(*_):
    pathlib.Path(sys.argv[1]).write_text("drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print("listening on h:1", flush=True)
signal.pause()
"""
# Has a supervisor start such a process, and dies.
ORPHANS = """
import asyncio, os, sys
from engines.ray.supervisor import Supervisor
async def main():
    command = [sys.executable, "-c", *sys.argv[1:]]
    supervisor = Supervisor("front-0", ("node", "h"), command, {}, ())
    seen = -1
    while True:
        seen, said = await supervisor.said(seen)
        if said["address"]:
            os._exit(1)
asyncio.run(main())
"""


def supervisor(
    name: str, program: str, *arguments: str, controllers: tuple[str, ...] = ()
) -> Supervisor:
    command = [sys.executable, "-c", program, *arguments]
    return Supervisor(name, ("node", "10.0.0.1"), command, {}, controllers)


async def until(one: Supervisor, done: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    seen = -1
    while True:
        seen, said = await one.said(seen)
        if done(said):
            return said


async def test_it_says_where_its_process_listens_as_others_reach_it() -> None:
    one = supervisor("controller-0", SERVES, "--port=0")
    said = await until(one, lambda said: said["address"])
    assert (said["state"], said["address"], said["node"]) == (RUNNING, "10.0.0.1:4711", "node")
    await one.leave(True)
    assert (await until(one, lambda said: said["state"] == ENDED))["code"] == 0


async def test_a_process_that_dies_is_started_again_where_it_was_with_another_name() -> None:
    one = supervisor("worker-a-0", SERVES, "--port=0", controllers=("h:1", "h:2"))
    first = await until(one, lambda said: said["address"])
    os.kill(first["pid"], 9)
    second = await until(one, lambda said: said["starts"] == 2 and said["state"] == RUNNING)
    assert second["worker"].startswith("a-0-")
    assert second["worker"] != first["worker"]
    assert second["code"] == -9
    assert "--port=4711" in one._command
    assert second["controllers"] == ["h:1", "h:2"]
    await one.leave(True)
    await until(one, lambda said: said["state"] == ENDED)


async def test_a_process_that_leaves_by_itself_stays_away() -> None:
    one = supervisor("worker-a-0", "")
    said = await until(one, lambda said: said["state"] == ENDED)
    assert (said["code"], said["starts"]) == (0, 1)


async def test_settings_that_cannot_work_are_tried_once_and_the_reason_is_told() -> None:
    program = (
        f"import sys; print('error: no such device', file=sys.stderr); sys.exit({os.EX_CONFIG})"
    )
    one = supervisor("worker-a-0", program)
    said = await until(one, lambda said: said["state"] == UNABLE)
    assert said["tail"] == ["error: no such device"]


async def test_a_port_that_another_has_is_told_with_what_helps() -> None:
    program = (
        "import sys; print('error: cannot listen on 0.0.0.0:8001: Address already in use'); "
        f"sys.exit({os.EX_CONFIG})"
    )
    one = supervisor("front-1", program, "--port=8001")
    said = await until(one, lambda said: said["state"] == UNABLE)
    assert said["tail"][1:] == [
        "error: cannot listen on 0.0.0.0:8001: Address already in use on node 10.0.0.1: port = 0 in [fronts] "
        "takes any free port, a fixed one needs a node for each"
    ]


async def test_it_leaves_although_it_is_told_so_while_its_process_starts() -> None:
    one = supervisor("front-0", "import signal; signal.pause()")
    await asyncio.sleep(0)
    await one.leave(True)
    assert (await until(one, lambda said: said["state"] == ENDED))["starts"] == 1


async def test_a_worker_leaves_although_its_controller_forgets_that_it_is_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a controller's restart: the worker serves again, and nothing says that it may go."""
    monkeypatch.setattr(supervisor_module, "LEAVE_S", 0)
    one = supervisor("worker-a-0", SERVES)
    said = await until(one, lambda said: said["address"])
    await one.leave(False)
    kind = KindWish("a", least=1, most=2, start_limit_s=60)
    wish = Wish(kinds=(kind,), num_fronts=0, num_controllers=0)

    def next_for(said: dict[str, Any]) -> Steps:
        leaves = Actor(said["state"], worker=said["worker"], leaving=said["leaving"])
        actors = {"worker-a-0": leaves, "worker-a-1": Actor(RUNNING, worker="a-1")}
        wanted = {"a": KindSaid(wanted=1, num_ready=2)}
        return next_steps(wish, Known(actors, wanted, controllers=()))

    found = next_for({**said, "leaving": True})
    assert (found.remove, found.release) == ((), ())
    said = await until(one, lambda said: said["state"] == ENDED)
    assert next_for(said).remove == ("worker-a-0",)


async def test_it_starts_its_process_again_to_look_for_other_controllers() -> None:
    one = supervisor("front-0", SERVES, controllers=("h:1",))
    first = await until(one, lambda said: said["address"])
    await one.start_again(("h:2",))
    second = await until(one, lambda said: said["starts"] == 2 and said["state"] == RUNNING)
    assert (second["controllers"], second["pid"] != first["pid"]) == (["h:2"], True)
    await one.leave(True)
    await until(one, lambda said: said["state"] == ENDED)


async def test_a_death_is_noticed_although_a_program_of_the_process_lives_on() -> None:
    program = (
        "import os, signal\nif not os.fork():\n    signal.alarm(60)\n    signal.pause()\nos.abort()"
    )
    one = supervisor("worker-a-0", program)
    said = await until(one, lambda said: said["code"] is not None)
    assert said["code"] == -6
    await one.leave(True)
    await until(one, lambda said: said["state"] == ENDED)
    os.killpg(said["pid"], 9)


async def test_one_that_waits_before_the_next_start_leaves_at_once() -> None:
    one = supervisor("worker-a-0", "import os; os.abort()")
    await until(one, lambda said: said["starts"] == 1 and said["state"] == PENDING)
    await one.leave(True)
    await until(one, lambda said: said["state"] == ENDED)


def test_its_process_drains_when_it_is_gone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    subprocess.run(
        [sys.executable, "-c", ORPHANS, DRAINS, str(pipe)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    # Opened when the process opens it.
    assert pipe.read_text() == "drained"
