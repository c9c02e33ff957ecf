"""Writes a controller's row into the directory of cells, ten times a second, and its models when they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from clockwright.errors import StoreError
from controller.core import ModelTimes
from controller.front.cells.rows import (
    HELPED_ELSEWHERE,
    ROW_INTERVAL_NS,
    SLO_CLASSES_NS,
    CellModels,
    CellRow,
    Entry,
    encode,
    key_of,
    make_models,
    make_row,
)
from controller.front.remote.front_link import FrontLinks
from controller.models.catalogue import Catalogue
from controller.models.entry import ModelState, Pipeline
from controller.process.lease.stores import DirectoryStore
from controller.runtime import Runtime
from controller.selection.applications import Applications

log = logging.getLogger(__name__)

_INTERVAL_S: Final = ROW_INTERVAL_NS / 1e9
#: The share that was refused is of so many rows' time: a second.
_ROWS_BACK: Final = 10
#: Times of models and whether their weights are resident are told this often, models that come or go at once.
_ROWS_PER_LIST: Final = 10
#: Others' entries are looked at this often, and removed if their row has not changed at so many looks: in an hour.
_ROWS_PER_LOOK: Final = 600
_LOOKS: Final = 60
_HELPED: Final = tuple(refusal.value for refusal in HELPED_ELSEWHERE)


@dataclass(eq=False)
class CellPublisher:
    """What one controller tells of itself."""

    store: DirectoryStore
    #: HOST:PORT at which fronts and clients reach this controller.
    address: str
    runtime: Runtime
    catalogue: Catalogue
    applications: Applications
    #: Each of them may send requests of one row.
    fronts: FrontLinks

    def __post_init__(self) -> None:
        self._serial = 0
        #: Requests that were over, and those that another cell might have served, in the last second, the oldest first.
        self._counts: list[tuple[int, int]] = [(0, 0)] * _ROWS_BACK
        self._listed = CellModels(address=self.address)
        self._listed_at = -1
        self._is_failing = False
        #: Looks since the row of each other controller changed.
        self._unchanged: dict[str, int] = {}
        self._over = asyncio.Event()

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Tell, until the block ends; then the entries are removed."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._over.set()
            await task
            await asyncio.to_thread(self._leave)

    def row(self) -> CellRow:
        """Make the row of now."""
        total = self.runtime.telemetry.total
        helped = sum([total.unanswered[name] for name in _HELPED])
        over, before = self._counts.pop(0)
        self._counts.append((total.requests, helped))
        self._serial += 1
        return make_row(
            self.address,
            self.runtime.outlook(SLO_CLASSES_NS),
            serial=self._serial,
            is_open=not self.runtime.draining,
            refused=min((helped - before) / max(total.requests - over, 1), 1.0),
            num_readers=self.fronts.num_fronts,
        )

    def models(self) -> CellModels:
        """List what can be asked for now."""
        times = self.runtime.model_times()
        found: dict[str, ModelTimes] = {}
        pipelines: list[Pipeline] = []
        for model in self.catalogue.served:
            if isinstance(model, Pipeline):
                pipelines.append(model)
            elif model.ready_on and (own := times.get(model.model_id)) is not None:
                found[model.name] = own
        for pipeline in pipelines:
            if self.catalogue.state(pipeline) is ModelState.READY:
                found[pipeline.name] = _together([found.get(name) for name, _ in pipeline.members])
        for running in self.applications.all:
            if self.applications.shape(running) is not None:
                # Its models run at the same time, so they take no longer than the longest.
                known = [found[name] for name in running.application.models if name in found]
                found[running.application.name] = max(known, default=(0, 0.0, 0))
        return make_models(self.address, found)

    async def _run(self) -> None:
        while not self._over.is_set():
            try:
                await asyncio.to_thread(self._put, self._entries())
            except Exception:
                # This is our bug. Without a row no front would ask this controller any more.
                log.exception("the row of this controller cannot be made")
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S):
                    await self._over.wait()

    def _entries(self) -> list[Entry]:
        """Make the row of now, and the list of models if it may have changed."""
        entries: list[Entry] = [self.row()]
        generation = self.catalogue.generation
        if generation != self._listed_at or self._serial % _ROWS_PER_LIST == 0:
            if (models := self.models()) != self._listed or self._listed_at < 0:
                entries.append(models)
            self._listed, self._listed_at = models, generation
        return entries

    def _put(self, entries: list[Entry]) -> None:
        try:
            for entry in reversed(entries):  # the models first
                self.store.put(key_of(entry), encode(entry))
            if self._serial % _ROWS_PER_LOOK == 0:
                self.tidy()
        except StoreError as error:
            self._listed_at = -1
            if not self._is_failing:
                log.warning("%s; trying again", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def tidy(self) -> None:
        """Remove what is left of controllers that are gone: they would have removed it if they had ended in order.

        Raises StoreError if the store cannot be reached.
        """
        changed, gone = self.store.changes()
        for key in (*changed, *gone):
            kind, _, address = key.partition("/")
            if kind == "row":
                self._unchanged.pop(address, None)
                if key in changed and address != self.address:
                    self._unchanged[address] = -1
        for address in list(self._unchanged):
            self._unchanged[address] += 1
            if self._unchanged[address] >= _LOOKS:
                del self._unchanged[address]
                self._remove(address)

    def _remove(self, address: str) -> None:
        for kind in ("row", "models"):
            self.store.remove(f"{kind}/{address}")

    def _leave(self) -> None:
        """Remove what was told. If that fails, it expires."""
        try:
            self._remove(self.address)
        except StoreError as error:
            log.warning("%s; its entries expire", error)
        finally:
            self.store.close()


def _together(times: list[ModelTimes | None]) -> ModelTimes:
    """What a pipeline takes whose models take so long; unknown ones take nothing."""
    known = [each for each in times if each is not None]
    return (
        sum([exec_ns for exec_ns, _, _ in known]),
        sum([row_ns for _, row_ns, _ in known]),
        max([load_ns for _, _, load_ns in known], default=0),
    )
