"""An application on a desk: asked and taught from inside the loop of a real controller, whose worker is a script."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.units import NS_PER_S
from controller.port import Ask
from controller.selection.applications import FeedbackResult
from controller.selection.config import SelectionConfig
from controller.selection.core.application import Application
from controller.selection.core.journal import FeedbackItem
from experiments.digits.images import Array
from tests.kit import virtual_time
from tests.kit.asking import Reply, submit
from tests.kit.front_end import FrontEnd, controlling, until

SLO_NS = 30 * NS_PER_S


class Desk:
    """An application, asked from inside the controller's loop."""

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.applications = front_end.applications
        self.worker = front_end.worker

    async def put(self, *models: str, replace: bool = False, **settings: Any) -> None:  # noqa: ANN401
        fields: dict[str, Any] = {"name": "app", "cache": False, **settings}
        await self.applications.put(Application(models=models, **fields), replace=replace)

    async def ask(
        self,
        number: float = 1,
        *,
        slo_ns: int = SLO_NS,
        context: str = "",
        tenant: str = "",
        name: str = "app",
    ) -> Reply:
        row = np.array([number, 0, 0], np.float32)
        return await self._ask(row, Ask(0, 1, 0, slo_ns, tenant, context=context), name)

    async def ask_rows(self, *numbers: float, slo_ns: int = SLO_NS) -> Reply:
        rows = np.array([[number, 0, 0] for number in numbers], np.float32)
        return await self._ask(rows, Ask(0, len(rows), 0, slo_ns), "app")

    async def _ask(self, rows: Array, ask: Ask, name: str) -> Reply:
        running = self.applications.find(name)
        assert running is not None
        ask.arrival_ns = self.front_end.runtime.clock()
        return await submit(self.applications.queries, running, [rows.tobytes()], ask)

    async def teach(self, answered: Reply, **verdict: Any) -> FeedbackResult:  # noqa: ANN401
        query_id = str(answered.parameters["query_id"])
        (result,) = await self.applications.feedback([FeedbackItem(query_id, **verdict)])
        return result

    async def weights(self, context: str = "", *, name: str = "app") -> dict[str, float]:
        running = self.applications.find(name)
        assert running is not None
        weights, _ = await self.applications.weights(running, context)
        return weights


def label(answered: Reply) -> int:
    return int(struct.unpack("<q", answered.outputs[0])[0])


@asynccontextmanager
async def desk(directory: Path, **selection: Any) -> AsyncIterator[Desk]:  # noqa: ANN401
    config = SelectionConfig(**selection)
    async with controlling(directory, config, clock=virtual_time.now_ns) as front_end:
        await until(lambda: front_end.catalogue.ready)
        yield Desk(front_end)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_time.run(test)


def run_on_real_time(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100))
