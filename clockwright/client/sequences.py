"""Sequences of steps from Python: the server keeps the state between them."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from clockwright.client.arguments import check_flag, number
from clockwright.errors import BadRequestError, ClockwrightError
from clockwright.v1 import inference_pb2 as pb

R = TypeVar("R")

# The last step that ends a sequence without a run has no inputs.
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Which step of which sequence a request is."""

    #: What tells it from the caller's other sequences to the model: a number above 0 or a text.
    sequence: int | str
    #: It is the first, or the last. The last one may come without inputs: it ends the sequence, and nothing runs.
    start: bool = False
    end: bool = False
    #: With `start`: so many milliseconds lie between two steps. The server refuses the first step if it has no time
    #: for all of them.
    every_ms: float | None = None

    def parameters(self) -> dict[str, pb.InferParameter]:
        """What a request says of it.

        Raises:
            BadRequestError: it is none.
        """
        sequence = self.sequence
        if isinstance(sequence, bool) or not isinstance(sequence, int | str) or not sequence:
            raise BadRequestError(
                f"sequence: found {sequence!r}, expected a number above 0 or a text"
            )
        parameter = pb.InferParameter()
        try:
            if isinstance(sequence, str):
                parameter.string_param = sequence
            else:
                parameter.int64_param = sequence
        except ValueError:
            raise BadRequestError(f"sequence: found {sequence}, expected 64 bits") from None
        found = {"sequence_id": parameter}
        for name, flag in (("sequence_start", self.start), ("sequence_end", self.end)):
            check_flag(name, flag)
            if flag:
                found[name] = pb.InferParameter(bool_param=True)
        if self.every_ms is not None:
            every_ms = number("every_ms", self.every_ms, "a number of milliseconds")
            found["every_ms"] = pb.InferParameter(double_param=every_ms)
        return found


class _Steps:
    """What sequences of both clients have in common."""

    def __init__(self, model: str, every_ms: float | None, said: dict[str, Any]) -> None:
        #: What the server calls it.
        self.sequence_id = secrets.randbits(62) + 1
        self._model, self._every_ms, self._said = model, every_ms, said
        #: A step was answered since the last start, and none was the last.
        self.is_live = False

    def _next(self, inputs: object, last: bool) -> SequenceStep:
        # The only input of an array would be looked for among those of the state, too.
        if not isinstance(inputs, Mapping):
            raise BadRequestError(
                f"step: found {type(inputs).__name__}, expected arrays by input name, without the state: step({{NAME: array}})"
            )
        start = not self.is_live
        return SequenceStep(self.sequence_id, start, last, self._every_ms if start else None)


class StepSequence(_Steps, Generic[R]):
    """Steps of a model, each with the state that the one before left; `Client.sequence` makes it.

        with client.sequence("voice", slo_ms=32, every_ms=32) as voice:
            for frame in frames:
                print(voice.step({"input": frame, "sr": rate}).outputs)

    A step that is refused did not happen: the next one goes on where the last answered one stopped.
    """

    def __init__(
        self,
        infer: Callable[..., R],
        model: str,
        every_ms: float | None,
        **said: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(model, every_ms, said)
        self._infer = infer

    def step(self, inputs: Mapping[str, Any], *, last: bool = False) -> R:
        """Run the next step, with inputs of one row but for the state; raises what `Client.infer` does."""
        result = self._infer(self._model, inputs, step=self._next(inputs, last), **self._said)
        self.is_live = not last
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # If that fails, the server forgets it after a while.
        with suppress(ClockwrightError):
            if self.is_live:
                self.step(_NONE, last=True)


class AsyncStepSequence(_Steps, Generic[R]):
    """The same for asyncio; `AsyncClient.sequence` makes it."""

    def __init__(
        self,
        infer: Callable[..., Awaitable[R]],
        model: str,
        every_ms: float | None,
        **said: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(model, every_ms, said)
        self._infer = infer

    async def step(self, inputs: Mapping[str, Any], *, last: bool = False) -> R:
        """Run the next step; see `StepSequence.step`."""
        result = await self._infer(self._model, inputs, step=self._next(inputs, last), **self._said)
        self.is_live = not last
        return result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ClockwrightError):
            if self.is_live:
                await self.step(_NONE, last=True)
