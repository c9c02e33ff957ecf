"""The program that starts and stops a keeper in a Ray cluster: told by a line of JSON on standard input what to do.

    {"do": "up", "address": ..., "namespace": ..., "wish": (of `kinds.spelled`)}
    {"do": "stop", "address": ..., "namespace": ...}

Runs in Ray's environment, so that it uses the standard library and Ray alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from engines.ray import keeper as keeping
from engines.ray import reconcile, supervisor
from engines.ray.keeper import LOST_S, Keeper, bundle_of, is_there, named, places_of_controllers
from engines.ray.reconcile import ENDED, PENDING, RUNNING, UNABLE, group_of
from engines.ray.supervisor import LEAVE_S, complain

# Those that do not answer for so long are not there.
_THERE_S = 3.0
_SOON_S = 0.05
# What takes longer than this to be placed is named. A keeper that is placed has answered by then.
_WAITS_S = 20.0
# That of Ray's workers, unless nodes are told otherwise.
_NICE = 15


def up(wish: Mapping[str, Any]) -> int:
    """Put a keeper in the place of the one that is there, and say what it does until all is ready.

    Returns the exit code: 0, or 1 where something can never be ready.
    """
    import ray

    group = wish["groups"]["controller"]
    places = places_of_controllers(wish).bundle_count
    if places != group["number"]:
        complain(
            f"error: found places for {places} controllers, expected {group['number']}: stop with --stop first"
        )
        return 1
    _end_keeper(wish["namespace"])
    there = dict(named(wish["namespace"]))
    for name, said in _answers(there).items():
        # It may be able to with the settings of now.
        if said["state"] == UNABLE:
            ray.kill(there[name], no_restart=True)
    keeper = wish["keeper"]
    handle = (
        ray.remote(Keeper)
        .options(
            name="keeper",
            namespace=wish["namespace"],
            lifetime="detached",
            max_restarts=-1,
            num_cpus=keeper["cpus"],
            resources=keeper["resources"],
            label_selector=keeper["labels"] or None,
        )
        .remote(wish)
    )
    return _show(handle, wish)


def _end_keeper(namespace: str) -> None:
    import ray

    while is_there("keeper", namespace):
        with suppress(ValueError):
            ray.kill(ray.get_actor("keeper", namespace=namespace), no_restart=True)
        time.sleep(_SOON_S)


def _show(keeper: Any, wish: Mapping[str, Any]) -> int:  # noqa: ANN401  Ray's
    """Print each thing that is new, until all is ready, or nothing comes nearer to that."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    limit_s = max(kind["start_limit_s"] for kind in wish["kinds"])
    told: set[str] = set()
    waits: list[str] = []
    said: dict[str, Any] = {"actors": {}, "wanted": None}
    seen = -1
    left, since_s = _steps_left(said, wish), time.monotonic()
    while time.monotonic() - since_s < limit_s:
        try:
            seen, said = ray.get(keeper.said.remote(seen), timeout=_WAITS_S)
            waiting = _waiting(said, _WAITS_S)
        except GetTimeoutError:
            waiting = {"keeper": 1}
        except RayActorError:
            time.sleep(LOST_S)
            continue
        words = list(_words(said, wish))
        for line in words:
            if line not in told:
                print(line, flush=True)
        told |= set(words)
        before, waits = waits, _waits(waiting, wish)
        for line in waits:
            if line not in before:
                print(line, flush=True)
        unable = {n: one for n, one in said["actors"].items() if one["state"] == UNABLE}
        for name, one in unable.items():
            complain("\n".join([*one["tail"], f"error: {name} cannot work with its settings"]))
        if unable:
            return 1
        if not _lacking(said, wish):
            fronts = _addresses_of(said, "front") or _addresses_of(said, "controller")
            print(f"ready: clients ask {', '.join(fronts)}", flush=True)
            return 0
        if (now_left := _steps_left(said, wish)) < left:
            left, since_s = now_left, time.monotonic()
    lacking = ", ".join(f"{number} of {group}" for group, number in _lacking(said, wish).items())
    complain(
        "\n".join(
            [
                *(_waits(_waiting(said, 0), wish) if said["actors"] else waits),
                f"error: found {lacking} not ready, and no progress for {limit_s:g} s, which is the largest "
                "start_limit_s; what has started stays, and the keeper starts the rest once Ray has room: `up` "
                "again waits for it, and --stop ends all",
            ]
        )
    )
    return 1


def _waiting(said: Mapping[str, Any], least_s: float) -> dict[str, int]:
    """How many of each group Ray has not placed for so long."""
    return Counter(
        group_of(name)
        for name, one in sorted(said["actors"].items())
        if one["state"] == PENDING and not one["starts"] and one["age_s"] >= least_s
    )


def _waits(waiting: Mapping[str, int], wish: Mapping[str, Any]) -> list[str]:
    """Say what groups wait for that Ray does not place, and what helps."""
    import ray

    if not waiting:
        return []
    total, free = ray.cluster_resources(), ray.available_resources()
    places = {**wish["groups"], "keeper": wish["keeper"]}
    lines = []
    # A kind that is not wished any more is not waited for.
    for group in (group for group in waiting if group in places):
        needs, labels = bundle_of(places[group]), places[group]["labels"]
        words = [f"{number:g} {name}" for name, number in needs.items()]
        words += [f"label {name}={value}" for name, value in labels.items()]
        lacks = [name for name, number in needs.items() if total.get(name, 0) < number]
        used = [name for name in needs if name not in lacks and free.get(name, 0) < needs[name]]
        found = [f"{total.get(name, 0):g} {name} in the cluster" for name in lacks]
        found += [f"too little {name} free" for name in used]
        own = {name: needs[name] for name in lacks if name not in ("CPU", "GPU")}
        flags = f" --resources='{json.dumps(own)}'" if own else ""
        lines.append(
            f"{group}: {waiting[group]} not placed, expected a node with {', '.join(words) or 'anything'} free"
            f"{', each a node of its own' if group == 'controller' and waiting[group] > 1 else ''}; found "
            f"{' and '.join(found) or 'enough, but not on one node, or it is about to start'}. Add a node (ray start --address=...{flags}), "
            "or ask for less in the file of --kinds"
        )
    return lines


def _words(said: Mapping[str, Any], wish: Mapping[str, Any]) -> Iterator[str]:
    for name, one in sorted(said["actors"].items()):
        if one["address"]:
            yield f"{name} on {one['host']} listens on {one['address']}"
        if one["code"] and one["tail"]:
            yield f"{name} ended with {one['code']}: {one['tail'][-1]}"
        if one["nice"] >= _NICE:
            yield (
                f"{name} runs at niceness {one['nice']}, behind all else on its node: start Ray's nodes with "
                "RAY_worker_niceness=0"
            )
    for kind in wish["kinds"]:
        ready = (said["wanted"] or {}).get(kind["name"], {}).get("ready", 0)
        yield f"{kind['name']}: {ready} ready, {kind['least']} to {kind['most']} expected"


def _wished(wish: Mapping[str, Any]) -> dict[str, int]:
    """How many of each group `up` waits for."""
    wished = {group: wish["groups"][group]["number"] for group in ("controller", "front")}
    return wished | {f"worker-{kind['name']}": kind["least"] for kind in wish["kinds"]}


def _lacking(said: Mapping[str, Any], wish: Mapping[str, Any]) -> dict[str, int]:
    wanted = said["wanted"] or {}
    ready = {group: len(_addresses_of(said, group)) for group in ("controller", "front")}
    ready |= {f"worker-{name}": kind["ready"] for name, kind in wanted.items()}
    lacking = {group: number - ready.get(group, 0) for group, number in _wished(wish).items()}
    return {group: number for group, number in lacking.items() if number > 0}


def _steps_left(said: Mapping[str, Any], wish: Mapping[str, Any]) -> int:
    """How many processes have to be placed, and how many to get ready."""
    placed = Counter(group_of(name) for name, one in said["actors"].items() if one["starts"])
    unplaced = [max(number - placed[group], 0) for group, number in _wished(wish).items()]
    return sum(unplaced) + sum(_lacking(said, wish).values())


def _addresses_of(said: Mapping[str, Any], group: str) -> list[str]:
    return [
        one["address"]
        for name, one in sorted(said["actors"].items())
        if group_of(name) == group and one["address"] and one["state"] == RUNNING
    ]


def stop(namespace: str) -> int:
    """End all: the keeper, which would start it again; what takes requests, and then what answers them."""
    import ray
    from ray.autoscaler.sdk import request_resources
    from ray.util import get_placement_group, remove_placement_group

    _end_keeper(namespace)
    found = named(namespace)
    for role in ("front", "worker", "controller"):
        handles = {name: handle for name, handle in found if name.startswith(f"{role}-")}
        left = _left(handles)
        for name, handle in handles.items():
            ray.kill(handle, no_restart=True)
            print(f"{name} {'has left' if name in left else 'was killed'}", flush=True)
    with suppress(ValueError):
        remove_placement_group(get_placement_group(f"{namespace}-controllers"))
    request_resources(bundles=[])
    print("stopped" if found else f"found nothing in namespace {namespace}", flush=True)
    return 0


def _answers(handles: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What those say that answer soon."""
    import ray
    from ray.exceptions import RayError

    if not handles:
        return {}
    asked = {handle.said.remote(-1): name for name, handle in handles.items()}
    there, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_THERE_S)
    answers = {}
    for reference in there:
        with suppress(RayError):
            answers[asked[reference]] = ray.get(reference)[1]
    return answers


def _left(handles: Mapping[str, Any]) -> set[str]:
    """Tell processes to leave, and wait until they have."""
    import ray
    from ray.exceptions import RayError

    waiting = {}
    # Those that Ray has not placed have no process.
    for name in _answers(handles):
        handles[name].leave.remote(True)
        waiting[handles[name].said.remote(-1)] = name
    left: set[str] = set()
    until_s = time.monotonic() + LEAVE_S
    while waiting and (rest_s := until_s - time.monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=rest_s)
        for reference in ready:
            name = waiting.pop(reference)
            # One that is gone need not be waited for.
            with suppress(RayError):
                number, said = ray.get(reference)
                if said["state"] in (ENDED, UNABLE):
                    left.add(name)
                else:
                    waiting[handles[name].said.remote(number)] = name
    return left


def main() -> int:
    """Do what standard input says."""
    import ray
    from ray import cloudpickle

    order = json.loads(sys.stdin.readline())
    # Where Ray runs an actor, these files are not.
    for module in (keeping, reconcile, supervisor):
        cloudpickle.register_pickle_by_value(module)
    try:
        ray.init(
            address=order["address"],
            # Groups of places are found by name in it only.
            namespace=order["namespace"],
            log_to_driver=False,
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        complain(f"error: no Ray cluster at {order['address']}: {error}")
        return 1
    return up(order["wish"]) if order["do"] == "up" else stop(order["namespace"])


if __name__ == "__main__":
    sys.exit(main())
