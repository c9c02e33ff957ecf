"""Those with whom the runtime deals: who waits for an answer, and the way to a worker.

Apart from it, because protocols that mypyc compiles (`make native`) would take nothing but what is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from clockwright.actions import Action
from clockwright.bulk import Buffer
from clockwright.units import ActionId, ModelId


class Waiter(Protocol):
    """Whoever waits for an answer; `asyncio.Future` is one. Neither setter may raise or take long."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, result: Any, /) -> None:  # noqa: ANN401  it is an Answer
        """Take the answer, a `controller.runtime.Answer`, which is in time now."""

    def set_exception(self, exception: Any, /) -> None:  # noqa: ANN401  it is a NoAnswerError
        """Hear, as a `controller.runtime.NoAnswerError`, why there is no answer in time."""


class Link(Protocol):
    """The way to one worker. None of these blocks or raises."""

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Send an action at the next `flush`; `payload` is per request, per input tensor."""

    def flush(self, *, now: bool) -> None:
        """Have the actions leave: now, or with whatever else is sent in this turn of the event loop."""

    def withdraw_action(self, action_id: ActionId) -> None:
        """Tell the worker to drop an action that it has not begun."""

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""

    def close(self, reason: str) -> None:
        """Tell the worker to leave, and close."""
