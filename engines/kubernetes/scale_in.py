"""Ends Pods of workers that are no longer wanted: reads the cluster and the controller, takes a step, and reads again.

Nothing is kept here between two steps. Every change of a Deployment names the version that was read, so that neither KEDA
nor another process like this one is overruled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import grpc.aio

from clockwright.kubernetes import ApiError, KubernetesApi
from clockwright.v1 import control_pb2 as pb
from engines.kubernetes.steps import Act, NextStep, Pod, WorkLeft, next_step
from engines.kubernetes.wanted import Heard, WantedFeed, pod_of

log = logging.getLogger(__name__)

#: The annotation of a Deployment from which workers are taken away: how many stay.
LEAST: Final = "clockwright/min-workers"

#: A controller that leads for less than this does not know all its workers yet, nor its load.
SETTLE_S: Final = 60.0

_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
_LOWEST: Final = "-1000"
_TEMPLATE: Final = "pod-template-hash"

# How often the cluster is looked at while a step is carried out.
_LOOK_S: Final = 1.0


class ScaleIn:
    """Takes away the workers of one namespace that are no longer wanted."""

    def __init__(
        self,
        wanted: WantedFeed,
        api: KubernetesApi,
        namespace: str,
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        """Do nothing yet. A controller has to lead for `settle_s` before it is followed."""
        self._wanted, self._api = wanted, api
        self._settle_s = settle_s
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._calling: asyncio.Future[dict[str, Any]] | None = None
        #: What was in the way at the last look.
        self._problems: list[str] = []

    async def keep(self) -> None:
        """Follow the number for ever."""
        try:
            while True:
                news = self._wanted.news
                moves = await self._look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S if moves else None):
                        await news.wait()
        finally:
            if self._calling is not None:
                await asyncio.wait((self._calling,))
            self._api.close()

    async def _look(self) -> bool:
        """Take one step per Deployment. Returns whether any has more replicas than are wanted."""
        heard = self._wanted.heard
        if heard is None or asyncio.get_running_loop().time() < heard.since_s + self._settle_s:
            return False
        problems: list[str] = []
        moves = False
        with _collected(problems):
            listed = await self._call("GET", self._deployments)
            answer = await heard.ask("ListWorkers", pb.ListWorkersRequest())
            workers = {pod_of(each.worker_id): each for each in answer.workers}
            for deployment in listed["items"]:
                if LEAST in (deployment["metadata"].get("annotations") or {}):
                    # One that is wrong does not stop the others.
                    with _collected(problems):
                        moves |= await self._step(heard, deployment, workers)
        # The next look may be in 10 s, when the server has hung up.
        self._api.close()
        if problems != self._problems:
            for problem in problems:
                log.warning("no worker is taken away: %s", problem)
        self._problems = problems
        return moves

    async def _step(
        self, heard: Heard, deployment: Mapping[str, Any], workers: Mapping[str, pb.WorkerInfo]
    ) -> bool:
        """Take a Deployment's next step; `workers` are those connected, by their Pods."""
        metadata, replicas = deployment["metadata"], deployment["spec"]["replicas"]
        name = metadata["name"]
        found = (await self._call("GET", self._pods + _selector(deployment)))["items"]
        names = {pod["metadata"]["name"] for pod in found}
        kinds = {workers[pod].gpu_kind for pod in names & workers.keys()} & heard.kinds.keys()
        for pod, worker in workers.items():
            if worker.gpu_kind in kinds and pod not in names:
                raise ValueError(
                    f"worker {worker.worker_id} is in no Pod of Deployment {name}, which has others of kind "
                    f"{worker.gpu_kind}; expected all of a kind in one Deployment, started with --id $(POD_NAME)"
                )
        if not kinds:
            # The kind of its workers is not known.
            return False
        wanted = max(_least(metadata), sum([heard.kinds[kind].wanted for kind in kinds]))
        pods = [_pod(pod, workers) for pod in found if _counts(pod)]
        step = next_step(pods, replicas=replicas, wanted=wanted)
        if step is None:
            return bool(replicas > wanted)
        log.info(
            "Deployment %s, %d replicas, %d wanted: %s %s",
            *(name, replicas, wanted, step.act.value, step.pod),
        )
        try:
            await self._take(heard, step, deployment, workers, kinds)
        except ApiError as error:
            # Others change objects, too.
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise
            log.info("Deployment %s: %s", name, error)
        return True

    async def _take(
        self,
        heard: Heard,
        step: NextStep,
        deployment: Mapping[str, Any],
        workers: Mapping[str, pb.WorkerInfo],
        kinds: AbstractSet[str],
    ) -> None:
        metadata = deployment["metadata"]
        match step:
            case NextStep(Act.RELEASE, pod):
                await self._release(heard, workers[pod].gpu_kind, workers[pod].worker_id)
            case NextStep(Act.RELEASE_CHEAPEST):
                # A Deployment on nodes of several kinds has several kinds of workers.
                kind = max(
                    (heard.kinds[kind] for kind in kinds), key=lambda each: each.ready - each.wanted
                )
                await self._release(heard, kind.gpu_kind, "")
            case NextStep(Act.MARK | Act.UNMARK as act, pod):
                cost = {_COST: _LOWEST if act is Act.MARK else None}
                await self._call(
                    "PATCH", f"{self._pods}/{pod}", {"metadata": {"annotations": cost}}
                )
            case NextStep(Act.LOWER):
                version = {"resourceVersion": metadata["resourceVersion"]}
                body = {
                    "metadata": version,
                    "spec": {"replicas": deployment["spec"]["replicas"] - 1},
                }
                await self._call("PATCH", f"{self._deployments}/{metadata['name']}/scale", body)

    async def _release(self, heard: Heard, kind: str, worker_id: str) -> None:
        request = pb.ReleaseWorkerRequest(gpu_kind=kind, worker=worker_id)
        released = await heard.ask("ReleaseWorker", request)
        log.info("worker %s drains: %s", released.worker, released.reason)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        # A call that has been sent cannot be taken back.
        self._calling = asyncio.ensure_future(asyncio.to_thread(self._api.call, method, path, body))
        return await asyncio.shield(self._calling)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Add the problem that ends the block."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        problems.append(f"the controller: {error.details() or error.code().name}")
    except (OSError, ValueError) as error:
        problems.append(str(error))


def _selector(deployment: Mapping[str, Any]) -> str:
    """The query for the Pods of a Deployment."""
    selector = deployment["spec"]["selector"]
    labels = selector.get("matchLabels")
    if not labels or selector.get("matchExpressions"):
        raise ValueError(
            f"Deployment {deployment['metadata']['name']}: found the selector {selector}, expected matchLabels only"
        )
    return "?labelSelector=" + quote(",".join(f"{key}={value}" for key, value in labels.items()))


def _least(metadata: Mapping[str, Any]) -> int:
    text = metadata["annotations"][LEAST]
    if not text.isdecimal():
        raise ValueError(
            f"Deployment {metadata['name']}: {LEAST} is {text!r}, expected a number of workers"
        )
    return int(text)


def _counts(pod: Mapping[str, Any]) -> bool:
    """Whether a ReplicaSet counts a Pod among its replicas."""
    is_over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not is_over and "deletionTimestamp" not in pod["metadata"]


def _pod(pod: Mapping[str, Any], workers: Mapping[str, pb.WorkerInfo]) -> Pod:
    metadata = pod["metadata"]
    conditions = pod.get("status", {}).get("conditions") or ()
    worker = workers.get(metadata["name"])
    left = WorkLeft.NOTHING if worker is None else WorkLeft.ALL
    if worker is not None and worker.state == "DRAINING":
        left = WorkLeft.REST
    return Pod(
        name=metadata["name"],
        ready=any(each["type"] == "Ready" and each["status"] == "True" for each in conditions),
        marked=(metadata.get("annotations") or {}).get(_COST) == _LOWEST,
        template=(metadata.get("labels") or {}).get(_TEMPLATE, ""),
        left=left,
    )
