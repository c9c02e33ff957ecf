"""A model that is to take requests from another runs once before, so that its first request finds its weights loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from clockwright.units import WEIGHT_MIN, RequestId
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.core.config import BATCH_SLO_NS
from controller.models.entry import Entry
from controller.port import Ask, Refused, Sink, Told
from controller.runtime import Runtime

log = logging.getLogger(__name__)

# It waits until nothing else does. Where that never comes, it is asked once more as others are; a run of it then costs
# them as much as one of their requests.
_SLOS_NS = (BATCH_SLO_NS, BATCH_SLO_NS // 2)


class _Awaited(Sink):
    def __init__(self) -> None:
        self.answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        if not self.answer.done():
            self.answer.set_result(told)


async def warm(runtime: Runtime, model: Entry) -> None:
    """Have a model that is ready run once, on zeros. A model that fails on them, or has no time, is left as it is."""
    inputs = list(map(_zeros, model.inputs))
    for slo_ns in _SLOS_NS:
        awaited = _Awaited()
        ask = Ask(0, 1, runtime.clock(), slo_ns, weight=WEIGHT_MIN)
        request_id = runtime.ask(model.model_id, ask, inputs, awaited)
        try:
            told = await awaited.answer
        except BaseException:
            runtime.withdraw(request_id)
            raise
        if not isinstance(told, Refused):
            return
        log.info("model %s did not run before it serves: %s", model.model_id, told.refusal.value)


def _zeros(spec: TensorSpec) -> bytes:
    if spec.vary is None:
        return bytes(spec.batch_bytes(1))
    return replace(spec, row_shape=tuple([max(size, 1) for size in spec.row_shape])).nothing(1)
