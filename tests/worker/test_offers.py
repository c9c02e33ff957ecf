"""In which order a worker prepares what it is offered."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clockwright.errors import ModelError
from clockwright.units import ModelId
from clockwright.wire.worker_messages import (
    FileOffer,
    FromWorker,
    ModelChunk,
    ModelOffer,
    ModelRefused,
)
from worker.models.file_store import FileStore
from worker.models.served_model import Fetch, Offer
from worker.offers import Offers


class RefusingDevice:
    at_once = 1

    async def prepare(self, *_: object) -> Any:  # noqa: ANN401  no model comes of it
        raise ModelError("no")


def test_small_models_are_prepared_first_and_those_of_one_size_as_they_came(tmp_path: Path) -> None:
    async def test() -> list[str]:
        refused: asyncio.Queue[str] = asyncio.Queue()

        def take(message: FromWorker) -> None:
            assert isinstance(message, ModelRefused)
            refused.put_nowait(message.model_id)

        device: Any = RefusingDevice()
        offers: Offers[Any] = Offers(device, FileStore(tmp_path), take, lambda *_: None)
        for name, num_bytes in (("large", 900), ("small", 5), ("middle", 70), ("small-2", 5)):
            files = (FileOffer("model.onnx", num_bytes, "0" * 64),)
            offers.offer(ModelOffer(name, files, batch_sizes=(1,)))
        running = asyncio.create_task(offers.run())
        order = [await refused.get() for _ in range(4)]
        running.cancel()
        return order

    order = asyncio.run(asyncio.wait_for(test(), 60))
    assert order == ["small", "small-2", "middle", "large"]


class HeldDevice:
    """Models are refused when the test says so."""

    at_once = 2

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.held: dict[str, asyncio.Event] = {}

    async def prepare(self, offer: Offer, fetch: Fetch, _: object) -> Any:  # noqa: ANN401
        self.held[offer.model_id] = asyncio.Event()
        self.begun.put_nowait(offer.model_id)
        if offer.model_id.startswith("fetched"):
            await fetch(offer.files)
        await self.held[offer.model_id].wait()
        raise ModelError("no")


@contextlib.asynccontextmanager
async def holding(
    tmp_path: Path,
) -> AsyncIterator[tuple[HeldDevice, Offers[Any], list[FromWorker]]]:
    said: list[FromWorker] = []
    device: Any = HeldDevice()
    offers: Offers[Any] = Offers(device, FileStore(tmp_path), said.append, lambda *_: None)
    running = asyncio.create_task(offers.run())
    try:
        yield device, offers, said
    finally:
        running.cancel()
        await asyncio.wait([running])


def offered(name: str, content: bytes) -> ModelOffer:
    file = FileOffer("model.onnx", len(content), hashlib.sha256(content).hexdigest())
    return ModelOffer(name, (file,), batch_sizes=(1,))


async def test_a_slow_model_holds_nobody_up_and_its_copies_take_no_place(tmp_path: Path) -> None:
    slow = b"slow"
    async with holding(tmp_path) as (device, offers, _):
        for name in ("slow", "slow-1", "slow-2"):
            offers.offer(offered(name, slow))
        offers.offer(offered("quick", b"quick"))
        assert {await device.begun.get(), await device.begun.get()} == {"slow", "quick"}
        offers.offer(offered("other", b"other"))
        device.held["quick"].set()
        assert await device.begun.get() == "other"
        device.held["slow"].set()
        assert await device.begun.get() == "slow-1"
        offers.withdraw(ModelId("slow-1"))
        assert await device.begun.get() == "slow-2"


async def test_files_of_two_models_come_at_once(tmp_path: Path) -> None:
    contents = {"fetched": b"one of them", "fetched-2": b"the other of them"}
    async with holding(tmp_path) as (device, offers, said):
        for name, content in contents.items():
            offers.offer(offered(name, content))
            await device.begun.get()
        for at in range(2):
            for name, content in contents.items():
                piece = content[6 * at :][: 6 if not at else None]
                digest = hashlib.sha256(content).hexdigest()
                offers.chunk(ModelChunk(name, digest, 6 * at, bool(at)), piece)
        for name in contents:
            device.held[name].set()
        while sum(isinstance(each, ModelRefused) for each in said) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    refused = [(each.model_id, each.reason) for each in said if isinstance(each, ModelRefused)]
    assert sorted(refused) == [("fetched", "no"), ("fetched-2", "no")]


class AwayDevice:
    """What its models need is not there at first."""

    at_once = 1

    def __init__(self, num_tries: int) -> None:
        self.num_left = num_tries

    async def prepare(self, offer: Offer, *_: object) -> Any:  # noqa: ANN401
        self.num_left -= 1
        if self.num_left >= 0:
            raise ConnectionRefusedError("tcp://a:1: refused")
        return FakeModel(offer.model_id)


class FakeModel:
    num_pages, one_by_one = 1, ""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id


@pytest.mark.virtual_time
async def test_what_a_model_needs_is_waited_for_after_the_refusal_while_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[FromWorker] = []
    ready: asyncio.Queue[str] = asyncio.Queue()
    described: Any = object()
    monkeypatch.setattr("worker.offers.describe", lambda _: described)
    device: Any = AwayDevice(100)
    offers: Offers[Any] = Offers(
        device, FileStore(tmp_path), said.append, lambda model, _: ready.put_nowait(model.model_id)
    )
    offers.offer(offered("a", b"a"))
    running = asyncio.create_task(offers.run())
    try:
        assert await ready.get() == "a"
        (refusal,) = [each for each in said if isinstance(each, ModelRefused)]
        assert refusal.reason == (
            "tcp://a:1: refused, 4 times in a row; it is tried again every 60 s"
        )
        assert said[-1] is described
        device.num_left = 100
        offers.offer(offered("b", b"b"))
        await asyncio.sleep(500)
        offers.withdraw(ModelId("b"))
        num_left = device.num_left
        await asyncio.sleep(500)
        assert device.num_left == num_left
    finally:
        running.cancel()
        await asyncio.wait([running])
