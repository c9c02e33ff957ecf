"""How many workers of each kind there should be, for orchestrators that start and end them, and which one leaves.

The core says both; here it is asked every second, for those who watch. An orchestrator is Ray, Kubernetes or Slurm, or a
person with a shell.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from clockwright.errors import ModelError, UnknownWorkerError
from clockwright.units import NS_PER_S, GpuKind, WorkerId
from clockwright.v1 import control_pb2 as pb
from controller.core import KindStatistics
from controller.links.worker_link import WorkerLinks
from controller.runtime import Runtime

#: The number follows the load as often as that.
_INTERVAL_S: Final = 1.0


class WorkersWanted:
    """Asks the core again and again, and tells who watches of each change."""

    def __init__(self, runtime: Runtime, links: WorkerLinks) -> None:
        self._runtime = runtime
        self._links = links
        #: As of the last look.
        self.told = pb.WorkersWanted()
        #: The controller stops: who watches is let go.
        self.is_over = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look every second."""
        task = asyncio.create_task(self._look_again_and_again())
        try:
            yield
        finally:
            task.cancel()
            self.leave()

    def leave(self) -> None:
        """The controller stops: let those go who watch."""
        self.is_over = True
        self._tell()

    async def changed(self) -> None:
        """Wait until `told` is another than now."""
        await self._changed.wait()

    def look(self) -> None:
        """Ask the core now."""
        load = self._runtime.cluster_load()
        kinds = sorted(load.kinds, key=lambda kind: kind.gpu_kind)
        told = pb.WorkersWanted(kinds=map(self._wanted, kinds))
        if told != self.told:
            self.told = told
            self._tell()

    def release(self, gpu_kind: GpuKind, worker_id: WorkerId | None) -> tuple[WorkerId, str]:
        """Drain a worker of a kind: the one that is cheapest to lose, unless one is named.

        Returns its name, and why it is this one. Raises UnknownWorkerError if none of the kind has this name, or the
        kind has none; ModelError if none may leave unless it is named.
        """
        links = {
            link.worker_id: link
            for link in self._links.links
            if link.register.gpu_kind == gpu_kind and not link.draining
        }
        if worker_id is None:
            if not links:
                serving = {
                    link.register.gpu_kind for link in self._links.links if not link.draining
                }
                known = ", ".join(sorted(serving)[:10]) or "none"
                raise UnknownWorkerError(
                    f"no worker of kind {gpu_kind[:200]!r} serves; kinds that do: {known}"
                )
            leaving = self._runtime.cheapest_to_lose(gpu_kind)
            worker_id, words = leaving.worker_id, leaving.words
            if worker_id is None:
                raise ModelError(f"{words}; to drain it all the same, name it")
        else:
            words = "it was named"
        link = links.get(worker_id)
        if link is None:
            known = ", ".join(sorted(links)[:10]) or "none"
            raise UnknownWorkerError(
                f"no worker {worker_id[:200]!r} of kind {gpu_kind} serves; those that do: {known}"
            )
        link.drain()
        self.look()
        return worker_id, words

    async def _look_again_and_again(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_INTERVAL_S)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _wanted(self, row: KindStatistics) -> pb.KindWanted:
        links = [link for link in self._links.links if link.register.gpu_kind == row.gpu_kind]
        num_draining = sum([link.draining for link in links])
        num_joining = row.num_joining + sum([not (link.joined or link.draining) for link in links])
        return pb.KindWanted(
            gpu_kind=row.gpu_kind,
            wanted=row.wanted,
            ready=len(links) - num_joining - num_draining,
            joining=num_joining,
            draining=num_draining,
            start_s=row.start_ns / NS_PER_S,
            limit=row.limit,
            may_go=self._links.may_go(row.gpu_kind),
        )
