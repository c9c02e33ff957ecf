"""The actor of Ray that brings what is there nearer to what is wished, by what the controllers say.

Runs in Ray's processes, so that it uses the standard library and Ray alone; Ray carries it to its nodes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from engines.ray.reconcile import (
    PENDING,
    RUNNING,
    Actor,
    KindSaid,
    KindWish,
    Known,
    Steps,
    Wish,
    group_of,
    next_steps,
)
from engines.ray.supervisor import News, Placed, complain, nothing_said, started

# Pause before the controller is asked again, where it did not answer; doubled each time.
_ASK_AGAIN_S, _ASK_AGAIN_S_MAX = 0.5, 5.0
#: An actor that Ray has lost is asked again.
LOST_S = 0.5
# Processes get older without telling.
_LOOK_S = 5.0
# A choice that the controller refused is not asked for again so soon.
_REFUSED_S = 10.0


class Keeper:
    """Brings what is there nearer to the wish, by what the controllers say.

    It remembers nothing that it cannot ask for again: after its own death it finds the supervisors by their names. No
    request passes it, and nothing that serves waits for it.
    """

    def __init__(self, wish: Mapping[str, Any]) -> None:
        """Begin with `kinds.spelled` of a file."""
        self._spec = wish
        groups = wish["groups"]
        self._wish = Wish(
            kinds=tuple(KindWish(**kind) for kind in wish["kinds"]),
            num_fronts=groups["front"]["number"],
            num_controllers=groups["controller"]["number"],
        )
        self._news = News()
        self._wake = asyncio.Event()
        self._handles: dict[str, Any] = {}
        #: What each has said, and when.
        self._said: dict[str, tuple[float, dict[str, Any]]] = {}
        self._wanted: list[dict[str, Any]] | None = None
        #: The controller's names of kinds, by ours: learned of the first worker.
        self._gpu_kinds: dict[str, str] = {}
        self._releasing: set[str] = set()
        #: Kinds of all workers that the controller knows, as of now.
        self._workers: dict[str, str] | None = None
        self._asking = False
        self._room: list[dict[str, Any]] = []
        self._watching: asyncio.subprocess.Process | None = None
        #: The controller that answered last.
        self._server = ""
        self._tasks: set[asyncio.Task[None]] = set()
        for name, handle in named(wish["namespace"]):
            self._follow(name, handle)
        self._do(self._keep())
        self._do(self._watch())

    async def said(self, seen: int) -> tuple[int, dict[str, Any]]:
        """Say how all stand, once something is another than at number `seen`, or after a while."""
        number = await self._news.after(seen)
        return number, {
            "actors": {
                name: {**said, "age_s": said["age_s"] + time.monotonic() - heard_s}
                for name, (heard_s, said) in self._said.items()
            },
            "wanted": self._wanted_by_kind(),
            "wish": self._spec,
        }

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self) -> None:
        self._wake.set()
        self._news.change()

    # --- steps ------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._take(next_steps(self._wish, self._known()))
            except Exception as error:  # of Ray's own services, which come again
                complain(repr(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    def _known(self) -> Known:
        actors = {}
        for name, (heard_s, said) in self._said.items():
            actors[name] = Actor(
                state=said["state"],
                worker=said["worker"],
                leaving=said["leaving"],
                age_s=said["age_s"] + time.monotonic() - heard_s,
                controllers=tuple(said["controllers"]),
            )
        wanted = self._wanted_by_kind()
        return Known(
            actors=actors,
            wanted=None
            if wanted is None
            else {
                name: KindSaid(said["wanted"], said["ready"], frozenset(said["may_go"]))
                for name, said in wanted.items()
            },
            controllers=tuple(self._addresses()),
            releasing=frozenset(self._releasing),
            workers=None if self._workers is None else frozenset(self._workers),
        )

    def _wanted_by_kind(self) -> dict[str, dict[str, Any]] | None:
        if self._wanted is None:
            return None
        said = {kind["gpu_kind"]: kind for kind in self._wanted}
        return {
            name: said[gpu_kind] for name, gpu_kind in self._gpu_kinds.items() if gpu_kind in said
        }

    def _addresses(self) -> list[str]:
        """Where controllers are, or were when they were last heard of."""
        return [
            said["address"]
            for name, (_, said) in sorted(self._said.items())
            if group_of(name) == "controller" and said["address"]
        ]

    def _take(self, steps: Steps) -> None:
        for name in steps.remove:
            self._remove(name)
        for name in steps.start:
            self._follow(name, self._created(name))
        for name in steps.leave:
            self._said[name][1]["leaving"] = True
            self._handles[name].leave.remote(True)
        for name in steps.again:
            said = self._said[name][1]
            said["age_s"], said["controllers"] = 0.0, self._addresses()
            self._said[name] = time.monotonic(), said
            self._handles[name].start_again.remote(self._addresses())
        for kind in steps.release:
            self._releasing.add(kind)
            self._do(self._release(kind))
        kinds = {kind["gpu_kind"] for kind in self._wanted or ()}
        # One is there whose name for the controller is not known: it may be the first of a kind of ours.
        is_unknown = len(self._gpu_kinds) < len(self._wish.kinds) and bool(
            kinds - set(self._gpu_kinds.values())
        )
        if (steps.ask or is_unknown) and not self._asking:
            self._asking = True
            self._do(self._ask())
        self._reserve(steps.room)

    def _reserve(self, room: Mapping[str, int]) -> None:
        """Ask Ray's autoscaler for nodes. What is asked for stays, so that each change is the whole list."""
        from ray.autoscaler.sdk import request_resources

        groups = self._spec["groups"]
        wanted = [
            (bundle, groups[group]["labels"])
            for group, number in sorted(room.items())
            if group in groups and (bundle := bundle_of(groups[group]))
            for _ in range(number)
        ]
        bundles = [bundle for bundle, _ in wanted]
        if bundles == self._room:
            return
        self._room = bundles
        request_resources(
            bundles=bundles, bundle_label_selectors=[labels for _, labels in wanted] or None
        )

    def _created(self, name: str) -> Any:  # noqa: ANN401  Ray's
        import ray

        group = group_of(name)
        spec = self._spec["groups"][group]
        options: dict[str, Any] = {}
        if group == "controller":
            options["scheduling_strategy"] = _apart(self._spec, int(name.rpartition("-")[2]))
        else:
            options["label_selector"] = spec["labels"] or None
            options["resources"] = spec["resources"]
        if group == "front" and not spec["labels"]:
            options["scheduling_strategy"] = "SPREAD"
        return (
            ray.remote(Placed)
            .options(
                name=name,
                namespace=self._spec["namespace"],
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=spec["cpus"],
                num_gpus=spec["gpus"],
                **options,
            )
            .remote(
                name,
                spec["command"],
                self._spec["environment"],
                [] if group == "controller" else self._addresses(),
            )
        )

    def _follow(self, name: str, handle: Any) -> None:  # noqa: ANN401  Ray's
        self._handles[name] = handle
        self._said[name] = time.monotonic(), nothing_said()
        self._do(self._hear(name, handle))
        self._changed()

    def _remove(self, name: str) -> None:
        import ray

        self._said.pop(name, None)
        ray.kill(self._handles.pop(name), no_restart=True)
        self._changed()

    def _is_here(self, name: str, handle: object) -> bool:
        """Whether a name is that actor's still."""
        return self._handles.get(name) is handle

    # --- what others say --------------------------------------------------------------------------

    async def _hear(self, name: str, handle: Any) -> None:  # noqa: ANN401  Ray's
        """Keep what an actor says of itself, until it is removed."""
        from ray.exceptions import RayError

        seen = -1
        while self._is_here(name, handle):
            try:
                number, said = await handle.said.remote(seen)
            except RayError:
                # Ray starts it again, unless it was removed.
                if not self._is_here(name, handle):
                    return
                seen = -1
                before = self._said[name][1]
                if before["state"] != PENDING:
                    # Who looks for a controller looks where it was.
                    lost = {**nothing_said(), "address": before["address"]}
                    self._said[name] = time.monotonic(), lost
                    self._changed()
                if not is_there(name, self._spec["namespace"]):
                    del self._handles[name], self._said[name]
                    self._changed()
                    return
                await asyncio.sleep(LOST_S)
                continue
            if not self._is_here(name, handle):
                return
            self._said[name] = time.monotonic(), said
            if number != seen:
                seen = number
                self._changed()
                if said["address"] == self._server and self._watching and said["state"] != RUNNING:
                    # On a host that is gone, a connection does not end by itself.
                    self._watching.terminate()

    async def _watch(self) -> None:
        """Hear of the controller that leads how many workers are wanted."""
        pause_s = _ASK_AGAIN_S
        while True:
            addresses = self._addresses()
            heard = [await self._watch_one(address) for address in addresses]
            pause_s = _ASK_AGAIN_S if any(heard) or not addresses else 2 * pause_s
            await asyncio.sleep(min(pause_s, _ASK_AGAIN_S_MAX))

    async def _watch_one(self, address: str) -> bool:
        """Hear one controller, until it ends; whether it said something."""
        words = ("workers", "wanted", "--watch", "--json")
        process = await started(self._asked(address, *words), self._spec["environment"])
        self._watching = process
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._server = address
                self._wanted = json.loads(line)
                self._changed()
            await process.wait()
        finally:
            self._watching = None
            heard, self._wanted = self._wanted is not None, None
            self._changed()
        return heard

    async def _release(self, kind: str) -> None:
        """Have the controller choose a worker and drain it."""
        words = ("workers", "release", f"--kind={self._gpu_kinds[kind]}", "--json")
        told = await self._answer(*words)
        chosen = told and next(
            (name for name, (_, said) in self._said.items() if said["worker"] == told["worker"]),
            None,
        )
        if chosen:
            print(f"{told['worker']} leaves: {told['reason']}", flush=True)
            self._said[chosen][1]["leaving"] = True
            self._handles[chosen].leave.remote(False)
        else:
            # It refused, or chose one that others have started. More would leave if it were asked at once.
            await asyncio.sleep(_REFUSED_S)
        self._releasing.discard(kind)
        self._changed()

    async def _ask(self) -> None:
        """Learn which workers the controller knows, and of what kinds they are."""
        told = await self._answer("status", "--json") or {"workers": []}
        self._workers = {worker["worker_id"]: worker["gpu_kind"] for worker in told["workers"]}
        for name, (_, said) in self._said.items():
            kind = group_of(name).removeprefix("worker-")
            gpu_kind = self._workers.get(said["worker"])
            if gpu_kind and kind not in self._gpu_kinds:
                if gpu_kind in self._gpu_kinds.values():
                    complain(
                        f"{kind} and another kind are both {gpu_kind} to the controller, expected unlike "
                        "kinds: as many workers as `min` says stay"
                    )
                    gpu_kind = ""
                self._gpu_kinds[kind] = gpu_kind
        self._changed()
        # The steps that follow from it are taken meanwhile.
        await asyncio.sleep(_LOOK_S)
        self._workers, self._asking = None, False

    async def _answer(self, *words: str) -> Any:  # noqa: ANN401  JSON
        """What the controller that was heard last says to a command; None if it is refused."""
        process = await started(self._asked(self._server, *words), self._spec["environment"])
        answer, _ = await process.communicate()
        return json.loads(answer) if process.returncode == 0 else None

    def _asked(self, address: str, *words: str) -> list[str]:
        keeper = self._spec["keeper"]
        return [*keeper["command"], *words, f"--server={address}", *keeper["arguments"]]


# --- Ray ------------------------------------------------------------------------------------------


def named(namespace: str) -> list[tuple[str, Any]]:
    """The supervisors that are there, by name."""
    import ray

    found = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == namespace and group_of(named["name"]):
            # It may have gone meanwhile.
            with suppress(ValueError):
                handle = ray.get_actor(named["name"], namespace=namespace)
                found.append((named["name"], handle))
    return sorted(found, key=lambda pair: pair[0])


def is_there(name: str, namespace: str) -> bool:
    """Whether an actor has this name."""
    import ray

    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def bundle_of(group: Mapping[str, Any]) -> dict[str, float]:
    """What an actor of a group needs of a node."""
    needs = {"CPU": group["cpus"], "GPU": group["gpus"], **group["resources"]}
    return {name: number for name, number in needs.items() if number}


def places_of_controllers(spec: Mapping[str, Any]) -> Any:  # noqa: ANN401  Ray's
    """The places of controllers, each on a node of its own; made when it is first needed."""
    from ray.util import get_placement_group, placement_group

    name, group = f"{spec['namespace']}-controllers", spec["groups"]["controller"]
    try:
        return get_placement_group(name)
    except ValueError:
        return placement_group(
            [bundle_of(group)] * group["number"],
            strategy="STRICT_SPREAD",
            name=name,
            lifetime="detached",
            bundle_label_selector=[group["labels"]] * group["number"] if group["labels"] else None,
        )


def _apart(spec: Mapping[str, Any], index: int) -> Any:  # noqa: ANN401  Ray's
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(
        places_of_controllers(spec), placement_group_bundle_index=index
    )
