"""Asks a stage of the port and awaits the answer, as a future."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from clockwright.units import RequestId
from clockwright.wire.bulk import Buffer
from controller.front.oip.refusals import error_of
from controller.front.oip.statuses import told_error
from controller.port import Answered, Ask, Parameters, PortStage, Refused, Stale, Told

S = TypeVar("S")


@dataclass
class Reply:
    """An answer, with its outputs."""

    told: Answered
    outputs: Sequence[Buffer]

    @property
    def parameters(self) -> Parameters:
        assert self.told.parameters is not None
        return self.told.parameters


class FutureSink:
    """Resolves a future with what is told of a request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        assert not isinstance(told, Stale)
        if isinstance(told, Answered):
            self.future.set_result(Reply(told, outputs))
        elif isinstance(told, Refused):
            self.future.set_exception(error_of(told, self.name))
        else:
            self.future.set_exception(told_error(told))


def submit(
    stage: PortStage[S], subject: S, inputs: Sequence[Buffer], ask: Ask
) -> asyncio.Future[Reply]:
    """Ask; to cancel the future withdraws the request. A refusal is a `NoAnswerError` or a `RefusedError`."""
    sink = FutureSink(str(subject))
    request_id = stage.ask(subject, ask, inputs, sink)

    def over(future: asyncio.Future[Reply]) -> None:
        if future.cancelled():
            stage.withdraw(request_id)

    sink.future.add_done_callback(over)
    return sink.future
