"""In which order a worker prepares what it is offered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from clockwright.errors import ModelError
from clockwright.wire.worker_messages import FileOffer, FromWorker, ModelOffer, ModelRefused
from worker.models.file_store import FileStore
from worker.offers import Offers


class RefusingDevice:
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
