"""Sequences end to end: over gRPC and REST, in the controller and in a front apart, with the real runtime."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clockwright import AsyncClient, BadRequestError, ClockwrightError, Refusal, RefusedError
from clockwright.client.client import InferResult
from clockwright.client.sequences import SequenceStep
from tests.kit.front_end import FrontEnd, serving, until
from tests.kit.scripted_worker import write_stepped
from tests.kit.stepped_models import history

SLO_MS = 600_000


class Asked:
    """Asks `history` and knows what it must answer."""

    def __init__(self, front_end: FrontEnd, client: AsyncClient) -> None:
        self.front_end = front_end
        self.client = client

    async def infer(
        self,
        number: int,
        step: SequenceStep | None = None,
        **said: Any,  # noqa: ANN401
    ) -> InferResult:
        inputs = {"x": np.array([[number]], np.int64)}
        return await self.client.infer("history", inputs, step=step, slo_ms=SLO_MS, **said)

    async def step(self, number: int, step: SequenceStep) -> tuple[int, int]:
        """The answer, and how many steps have counted."""
        result = await self.infer(number, step)
        assert set(result.outputs) == {"y"}
        return int(result.outputs["y"][0, 0]), int(result.explanation["sequence_step"])


@asynccontextmanager
async def asked(
    directory: Path,
    front: str = "here",
    config: str = "",
    **more: Any,  # noqa: ANN401
) -> AsyncIterator[Asked]:
    write_stepped(directory, config)
    async with (
        serving(directory, front=front, **more) as front_end,
        AsyncClient(front_end.address) as client,
    ):
        await until(lambda: front_end.catalogue.ready)
        yield Asked(front_end, client)


def told(*numbers: int) -> int:
    """The state after these inputs."""
    state = 0
    for number in numbers:
        state = history(state, number)
    return state


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 100))


@pytest.fixture(params=["here", "apart"])
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_step_takes_the_state_that_the_one_before_left(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            assert await ask.step(5, SequenceStep(7, start=True)) == (told(5), 1)
            assert await ask.step(9, SequenceStep("7", start=True)) == (told(9), 1)
            assert await ask.step(6, SequenceStep(7)) == (told(5, 6), 2)
            # Several at once take their turns in order.
            steps = [ask.step(number, SequenceStep(7)) for number in range(20)]
            answers = await asyncio.gather(*steps)
            assert sorted(number for _, number in answers) == list(range(3, 23))
            assert await ask.step(1, SequenceStep("7", end=True)) == (told(9, 1), 2)
            with pytest.raises(
                BadRequestError, match="for sequence 7 to model 'history' must specify the START"
            ):
                await ask.step(1, SequenceStep("7"))
            assert await ask.step(1, SequenceStep(7, start=True, end=True)) == (told(1), 1)

    run(test())


def test_sequences_of_two_tenants_have_nothing_in_common(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            for tenant, number in (("a", 1), ("b", 2), ("", 3)):
                await ask.infer(number, SequenceStep(7, start=True), tenant=tenant)
            for tenant, number in (("a", 1), ("b", 2), ("", 3)):
                result = await ask.infer(9, SequenceStep(7), tenant=tenant)
                assert int(result.outputs["y"][0, 0]) == told(number, 9)

    run(test())


def test_a_step_whose_turn_does_not_come_is_refused_in_time(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            worker = ask.front_end.worker
            worker.slow = {"history"}
            first = asyncio.create_task(ask.step(5, SequenceStep(7, start=True)))
            await until(lambda: bool(worker.held))
            inputs = {"x": np.array([[6]], np.int64)}
            with pytest.raises(
                RefusedError, match="the turn of the step did not come within"
            ) as caught:
                await ask.client.infer("history", inputs, step=SequenceStep(7), slo_ms=50)
            assert caught.value.refusal is Refusal.OVERLOADED
            assert caught.value.figures["sequence_step"] == 0
            worker.release()
            assert await first == (told(5), 1)
            assert await ask.step(8, SequenceStep(7)) == (told(5, 8), 2)

    run(test())


def test_a_request_without_a_sequence_carries_its_state(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            inputs = {name: np.array([[3]], np.int64) for name in "xh"}
            result = await ask.client.infer("history", inputs, slo_ms=SLO_MS)
            assert int(result.outputs["hn"][0, 0]) == history(3, 3)
            assert "sequence_step" not in result.explanation
            with pytest.raises(BadRequestError, match=r"is missing: .*; only a step, which has"):
                await ask.infer(3)
            with pytest.raises(BadRequestError, match="inputs: found 'h' too many, expected 'x'"):
                await ask.client.infer(
                    "history", inputs, step=SequenceStep(1, start=True), slo_ms=SLO_MS
                )
            two = {"x": np.zeros((2, 1), np.int64)}
            with pytest.raises(BadRequestError, match="found 2 rows"):
                await ask.client.infer(
                    "history", two, step=SequenceStep(1, start=True), slo_ms=SLO_MS
                )
            row = {"x": np.zeros((1, 3), np.float32)}
            with pytest.raises(BadRequestError, match="'double' has no state and no controls"):
                await ask.client.infer(
                    "double", row, step=SequenceStep(1, start=True), slo_ms=SLO_MS
                )

    run(test())


def test_a_client_keeps_a_sequence_in_a_block(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            book = ask.front_end.sequences.book
            async with ask.client.sequence("history", slo_ms=SLO_MS, explain=True) as steps:
                for count in range(1, 4):
                    result = await steps.step({"x": np.array([[count]], np.int64)})
                assert int(result.outputs["y"][0, 0]) == told(1, 2, 3)
                assert result.explanation["batch_size"] == 1
                assert result.explanation["sequence_step"] == 3
                assert len(book) == 1
            # The block has ended it, and nothing has run for that.
            assert len(book) == 0
            assert len(ask.front_end.worker.infers) == 3
            assert book.ended == {"end": 1}

    run(test())


def test_rest_says_the_same_in_json(tmp_path: Path, front: str) -> None:
    def post(url: str, number: int, **parameters: object) -> dict[str, Any]:
        tensor = {"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [number]}
        body = json.dumps({"inputs": [tensor], "parameters": {"slo_ms": SLO_MS, **parameters}})
        request = urllib.request.Request(f"http://{url}/v2/models/history/infer", body.encode())
        with urllib.request.urlopen(request) as response:
            return dict(json.load(response))

    async def test() -> None:
        async with asked(tmp_path, front, rest=True) as ask:
            url = ask.front_end.rest
            answer = await asyncio.to_thread(post, url, 5, sequence_id="a", sequence_start=True)
            assert [each["name"] for each in answer["outputs"]] == ["y"]
            answer = await asyncio.to_thread(post, url, 6, sequence_id="a", sequence_end=True)
            assert answer["outputs"][0]["data"] == [told(5, 6)]
            assert answer["parameters"]["sequence_step"] == 2
            with pytest.raises(urllib.error.HTTPError, match="400"):
                await asyncio.to_thread(post, url, 6, sequence_id="a")

    run(test())


def test_a_refused_step_did_not_happen_and_a_worker_that_dies_costs_no_state(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with asked(tmp_path) as ask:
            worker = ask.front_end.worker
            await ask.step(5, SequenceStep(7, start=True))
            worker.failing = {"history"}
            with pytest.raises(RefusedError) as caught:
                await ask.step(6, SequenceStep(7))
            assert caught.value.refusal is Refusal.FAILED
            assert caught.value.figures["sequence_step"] == 1
            worker.leave()
            worker.failing = set()
            worker.join()
            await until(lambda: ask.front_end.catalogue.ready)
            assert await ask.step(8, SequenceStep(7)) == (told(5, 8), 2)

    run(test())


def test_a_step_that_its_client_gives_up_did_not_happen(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            worker = ask.front_end.worker
            worker.has_begun = True
            await ask.step(5, SequenceStep(7, start=True))
            worker.slow = {"history"}
            given_up = asyncio.create_task(ask.step(6, SequenceStep(7)))
            await until(lambda: bool(worker.held))
            given_up.cancel()
            book = ask.front_end.sequences.book
            key = next(iter(book._sequences))
            await until(lambda: book._sequences[key].running is None)
            worker.release()
            assert await ask.step(8, SequenceStep(7)) == (told(5, 8), 2)

    run(test())


def test_a_step_is_not_asked_twice_when_a_fronts_link_breaks(tmp_path: Path) -> None:
    async def test() -> None:
        async with asked(tmp_path, "apart") as ask:
            front_end, worker = ask.front_end, ask.front_end.worker
            await ask.step(5, SequenceStep(7, start=True))
            worker.slow = {"history"}
            lost = asyncio.create_task(ask.step(6, SequenceStep(7)))
            await until(lambda: bool(worker.held))
            assert front_end.fronts is not None
            front_end.fronts.links[0].lost("a cable is pulled")
            with pytest.raises(
                ClockwrightError,
                match=r"ABORTED: .* it may have counted; `sequence_step` of the next",
            ):
                await lost
            worker.release()
            assert await ask.step(8, SequenceStep(7)) == (told(5, 8), 2)
            assert len(worker.infers) == 3

    run(test())


def test_a_model_that_is_replaced_ends_its_sequences(tmp_path: Path, front: str) -> None:
    async def test() -> None:
        async with asked(tmp_path, front) as ask:
            await ask.step(5, SequenceStep(7, start=True))
            await ask.client.load_model("history")
            with pytest.raises(BadRequestError, match="it ended because its model was replaced"):
                await ask.step(6, SequenceStep(7))
            assert await ask.step(6, SequenceStep(7, start=True)) == (told(6), 1)

    run(test())


def test_steps_are_asked_of_the_version_that_began_their_sequence(
    tmp_path: Path, front: str
) -> None:
    async def test() -> None:
        two = "[versions]\nserve = 'all'\n[traffic]\n1 = 0.5\n2 = 0.5\n"
        write_stepped(tmp_path, two)
        folder = tmp_path / "history"
        shutil.copytree(folder / "1", folder / "2")
        async with (
            serving(tmp_path, front=front) as front_end,
            AsyncClient(front_end.address) as client,
        ):
            await until(lambda: front_end.catalogue.ready)
            ask = Asked(front_end, client)
            for sequence in range(1, 17):
                await ask.step(sequence, SequenceStep(sequence, start=True))
            front_end.catalogue.renew()
            for sequence in range(1, 17):
                answer = await ask.step(5, SequenceStep(sequence))
                assert answer == (told(sequence, 5), 2)
            versions = front_end.catalogue.versions("history")
            assert [front_end.sequences.book.number_of(each.model_id) > 0 for each in versions] == [
                True,
                True,
            ]

    run(test())


def test_a_stream_that_nobody_has_time_for_is_refused_at_its_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with asked(tmp_path) as ask:
            assert (await ask.step(5, SequenceStep(1, start=True, every_ms=1000)))[1] == 1
            with pytest.raises(RefusedError, match="no batch is fast enough") as caught:
                await ask.step(5, SequenceStep(2, start=True, every_ms=0.001))
            assert caught.value.refusal is Refusal.OVERLOADED
            assert caught.value.figures["streams"] == 1
            with pytest.raises(BadRequestError, match="every_ms: found without sequence_start"):
                await ask.step(5, SequenceStep(1, every_ms=1000))

    run(test())
