"""Hears from a controller how many workers of each kind are wanted, for as long as it leads."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc.aio

from clockwright.client.channel import Access
from clockwright.client.operator import control_stub
from clockwright.errors import ConfigError
from clockwright.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

# The controller says something every 10 s. One that is silent for this long hangs.
_SILENCE_S: Final = 25.0
# Until a controller that did not answer, or stands by, is asked again.
_PAUSE_S: Final = 1.0
# How long a call may take that does not stream.
_CALL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What a controller that leads said last."""

    #: By kind of worker.
    kinds: dict[str, pb.KindWanted]
    #: The kind of each worker that is connected, by its name.
    workers: Mapping[str, str]
    #: Callables of its ControlService, and what is shown to it.
    control: Any
    access: Access
    #: Since when it is heard without a break, by the loop's clock.
    since_s: float

    async def ask(self, method: str, request: Any) -> Any:  # noqa: ANN401  grpc's
        """Call a method of its ControlService."""
        call = getattr(self.control, method)
        return await call(request, metadata=self.access.metadata, timeout=_CALL_S)

    def of_deployment(self, name: str) -> list[pb.KindWanted]:
        """What is wanted of the kinds of worker that a Deployment's Pods have; empty: none is connected."""
        pods = re.compile(rf"{re.escape(name)}-[a-z0-9]+-[a-z0-9]+")
        kinds = {kind for worker, kind in self.workers.items() if pods.fullmatch(pod_of(worker))}
        return [self.kinds[kind] for kind in sorted(kinds & self.kinds.keys())]


def pod_of(worker_id: str) -> str:
    """The Pod of a worker. One that takes all GPUs of its Pod, of which there is one, adds its number."""
    return worker_id.removesuffix("-gpu0")


class WantedFeed:
    """The latest that was heard."""

    def __init__(self, address: str, access: Access) -> None:
        """Hear nothing yet; `access` has a key that may operate the controller."""
        self._address, self._access = address, access
        #: None: the controller does not lead, or does not answer; `problem` says which.
        self.heard: Heard | None = None
        self.problem = "the controller has not answered yet"
        #: Set when the next thing is heard, were it the same again; then another takes its place.
        self.news = asyncio.Event()

    async def follow(self) -> None:
        """Listen for ever."""
        while True:
            try:
                # Certificates are replaced while processes run.
                async with self._access.async_channel(self._address) as channel:
                    await self._hear(control_stub(channel))
                problem = "it stops"
            except grpc.aio.AioRpcError as error:
                problem = error.details() or error.code().name
            except TimeoutError:
                problem = f"it was silent for {_SILENCE_S:g} s"
            except ConfigError as error:
                problem = str(error)
            problem = f"controller {self._address}: {problem}"
            if problem != self.problem:
                log.warning("%s", problem)
            self.problem = problem
            self._tell(None)
            await asyncio.sleep(_PAUSE_S)

    async def _hear(self, control: Any) -> None:  # noqa: ANN401  grpc's
        shown = self._access.metadata
        call = control.WatchWorkersWanted(pb.WatchWorkersWantedRequest(), metadata=shown)
        since_s = asyncio.get_running_loop().time()
        heard = Heard({}, {}, control, self._access, since_s)
        counted: object = None
        try:
            while True:
                told = await asyncio.wait_for(call.read(), _SILENCE_S)
                if told is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                heard = replace(heard, kinds={kind.gpu_kind: kind for kind in told.kinds})
                count = [(each.ready, each.joining, each.draining) for each in told.kinds]
                if count != counted:
                    listed = await heard.ask("ListWorkers", pb.ListWorkersRequest())
                    workers = {each.worker_id: each.gpu_kind for each in listed.workers}
                    heard, counted = replace(heard, workers=workers), count
                self._tell(heard)
        finally:
            call.cancel()

    def _tell(self, heard: Heard | None) -> None:
        self.heard = heard
        news, self.news = self.news, asyncio.Event()
        news.set()
