"""A loop so late that it finds every request past its SLO has to be told so: it takes in less, then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from clockwright.bulk import Buffer
from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_MS
from clockwright.v1 import inference_pb2 as pb
from controller.access.caller import ANYBODY
from controller.front.backend import LocalBackend
from controller.front.calls import Late
from controller.front.door import Door
from controller.front.server import InferenceService
from tests.kit.front_end import controlling


class Heard:
    """A call that keeps what it hears."""

    timeout_ns: int | None = None
    caller = ANYBODY

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.when_gone: Callable[[], object] | None = None
        self.num_missed = 0
        self.errors: list[Exception] = []

    def answer(self, message: Sequence[Buffer], latest_ns: int, late: Late) -> None:
        raise AssertionError("nothing is answered here")

    def fail(self, error: Exception) -> None:
        self.errors.append(error)

    def header(self, name: str) -> str:
        return ""

    def served(self, *, slow: bool) -> None:
        raise AssertionError("nothing is served here")

    def missed(self) -> None:
        self.num_missed += 1


def asked(directory: Path, *, waited_ns: int, model: str) -> Heard:
    """Have a service take a request with an SLO of 100 ms that has waited for so long."""
    request = pb.ModelInferRequest(model_name=model)
    request.parameters["slo_ms"].int64_param = 100

    async def ask() -> Heard:
        async with controlling(directory) as front_end:
            runtime = front_end.runtime
            door = Door(max_requests=1, max_bytes=1 << 20)
            service = InferenceService(LocalBackend(runtime, front_end.catalogue), door=door)
            call = Heard(runtime.clock() - waited_ns)
            service.infer(call, request.SerializeToString())
            assert door.num_requests == 0
            return call

    return asyncio.run(ask())


def test_a_request_that_the_loop_looked_at_too_late_was_missed(tmp_path: Path) -> None:
    call = asked(tmp_path, waited_ns=150 * NS_PER_MS, model="echo")
    (error,) = call.errors
    assert isinstance(error, RefusedError)
    assert error.refusal is Refusal.LATE
    assert call.num_missed == 1


def test_a_request_that_is_wrong_says_nothing_of_the_loop(tmp_path: Path) -> None:
    call = asked(tmp_path, waited_ns=0, model="nobody")
    assert len(call.errors) == 1
    assert call.num_missed == 0
