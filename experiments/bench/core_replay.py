"""Replays a recorded stream of events into a scheduler, so that `bench_core --beside` can time two trees.

Run as a script with the tree to measure first on `PYTHONPATH`, so that it imports nothing but that
tree's core. It takes the path of a stream that `bench_core` recorded and prints JSON: where the core was
imported from, and the CPU time of the measured part in ns, or, with `--digest`, a digest of all commands.
When a tree wants to be woken is its own affair; the time that this takes counts.
"""

from __future__ import annotations

import gc
import hashlib
import json
import pickle
import sys
from pathlib import Path
from time import process_time_ns
from typing import Any

import controller.core
from clockwright.actions import ActionError
from controller.core import Scheduler, SchedulerConfig, events

# Some systems count CPU time in steps of 10 ms.
ENOUGH_NS = 2_000_000_000


def build(plain: tuple[str, dict[str, Any]]) -> events.Event:
    """Make an event of this tree from its class's name and its fields."""
    name, fields = plain
    if name == "RequestsArrived":
        fields = {"requests": tuple(build(request) for request in fields["requests"])}
    elif name == "ActionFailed":
        fields = {**fields, "error": ActionError(fields["error"])}
    event: events.Event = getattr(events, name)(**fields)
    return event


def replay(
    policy: str,
    first_measured: int,
    stream: list[tuple[tuple[str, dict[str, Any]], int]],
    digest: Any = None,  # noqa: ANN401  hashlib does not name its type
) -> int:
    """Tell a new scheduler a stream; returns the CPU ns from an event on."""
    told = [(build(plain), now_ns) for plain, now_ns in stream]
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    gc.collect()
    begin_ns = 0
    for number, (event, now_ns) in enumerate(told):
        if number == first_measured:
            begin_ns = process_time_ns()
        commands = scheduler.handle(event, now_ns=now_ns)
        scheduler.next_wakeup_ns()
        if digest is not None:
            digest.update(repr(commands).encode())
    return process_time_ns() - begin_ns


def main(path: str, *options: str) -> None:
    """Replay a stream, over and over until there is enough CPU time to measure."""
    # `bench_core` wrote the file a moment ago.
    policy, first_measured, stream = pickle.loads(Path(path).read_bytes())
    found: dict[str, Any] = {"core": controller.core.__file__}
    gc.disable()
    if "--digest" in options:
        digest = hashlib.sha256()
        replay(policy, first_measured, stream, digest)
        found["digest"] = digest.hexdigest()
    else:
        costs_ns = [replay(policy, first_measured, stream)]
        while sum(costs_ns) < ENOUGH_NS:
            costs_ns.append(replay(policy, first_measured, stream))
        found["cpu_ns"] = sum(costs_ns) / len(costs_ns)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
