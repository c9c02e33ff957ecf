"""Prepares the models that the controller offers, several at once if the device can.

Files come in chunks. Another thread writes and hashes each chunk, which is then acknowledged. So the
controller can keep a few chunks in flight, and actions never queue behind a file. Chunks of withdrawn offers are
acknowledged too: the controller counts them as in flight, and would otherwise send no other file.

Small models come first, so that most are ready soon. A model whose files are another's that is under way waits for
that one: most of its work is done then.

An offer whose compiler was killed, whose files could not be written or whose server is away is tried again after a
pause. Other offers go first meanwhile. After some tries it is refused, so that no client waits for it. What a machine
lacked may come all the same, so the worker goes on trying while the controller wants the model; a killed compiler is
not started again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, Generic

from clockwright.errors import ModelError, OtherWorkersError, ProtocolError
from clockwright.units import ModelId
from clockwright.wire.bulk import Buffer
from clockwright.wire.worker_messages import (
    BatchProfile,
    ChunkReceived,
    FromWorker,
    ModelChunk,
    ModelNeeded,
    ModelOffer,
    ModelProgress,
    ModelRefused,
    ReadyModel,
    offer_digest,
)
from worker.compiling.compiler import CompilerKilledError
from worker.devices.device import Device, M
from worker.models.file_store import FileStore
from worker.models.served_model import Offer, OfferedFile, ServedModel

logger = logging.getLogger(__name__)

# Before each further try of an offer that failed by what may have passed: a killed compiler, a full disk. After the last
# the offer is refused.
RETRY_PAUSES_S = (1.0, 10.0, 60.0)

_SHA256 = re.compile(r"[0-9a-f]{64}")

Chunk = tuple[ModelChunk, Buffer]
Contents = tuple[object, ...]


@dataclass(eq=False)
class Offers(Generic[M]):
    """The offers of one link."""

    #: Judges and prepares models.
    device: Device[M]
    #: The store that received files go to.
    files: FileStore
    #: Sends a message to the controller, in order.
    send: Callable[[FromWorker], None]
    #: Called with a prepared model and a digest of its offer, before the controller is told. From then on actions
    #: for the model must be accepted.
    ready: Callable[[M, bytes], None]

    def __post_init__(self) -> None:
        #: Digests of the offers that are open.
        self._digests: dict[ModelId, bytes] = {}
        #: Offers, and how often each has failed by what may have passed; the smallest first.
        self._queue: asyncio.PriorityQueue[tuple[int, int, Offer, int]] = asyncio.PriorityQueue()
        #: Offers of one size keep their order.
        self._num_queued = 0
        #: Offers that are neither answered nor withdrawn, and refused ones that are still tried.
        self._open: dict[ModelId, Offer] = {}
        #: What answers offers, by the id of each offer object that is being answered.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: By what they are made of, the offers that wait for one that is being answered.
        self._alike: dict[Contents, list[tuple[Offer, int]]] = {}
        #: Chunks that have come, by the model whose files are on their way.
        self._chunks: dict[ModelId, asyncio.Queue[Chunk]] = {}

    def offer(self, message: ModelOffer) -> None:
        """Queue an offer; replaces an unanswered one of the same model.

        Raises ProtocolError if no controller would send such an offer.
        """
        offer = _decode(message)
        self.withdraw(offer.model_id)
        self._open[offer.model_id] = offer
        self._digests[offer.model_id] = offer_digest(message)
        self._put(offer, 0)

    def _put(self, offer: Offer, num_tries: int) -> None:
        self._num_queued += 1
        num_bytes = sum(file.num_bytes for file in offer.files)
        self._queue.put_nowait((num_bytes, self._num_queued, offer, num_tries))

    def withdraw(self, model_id: ModelId) -> None:
        """Forget an offer that is not answered yet.

        Its preparation is cancelled: its files may never come, and other offers wait.
        """
        offer = self._open.pop(model_id, None)
        self._digests.pop(model_id, None)
        if offer is not None and id(offer) in self._tasks:
            self._tasks[id(offer)].cancel()

    def chunk(self, message: ModelChunk, payload: Buffer) -> None:
        """Take a chunk of a file. A chunk of a withdrawn offer is dropped."""
        if (chunks := self._chunks.get(ModelId(message.model_id))) is not None:
            chunks.put_nowait((message, payload))
        else:
            self._acknowledge(message)

    async def run(self) -> None:
        """Answer offers until cancelled."""
        places = [asyncio.create_task(self._run_one()) for _ in range(self.device.at_once)]
        try:
            done, _ = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in places:
                each.cancel()
            await asyncio.wait(places)

    async def _run_one(self) -> None:
        """Answer one offer after the other until cancelled."""
        while True:
            *_, offer, num_tries = await self._queue.get()
            if self._open.get(offer.model_id) is not offer:
                continue
            contents = _contents(offer)
            if contents in self._alike:
                self._alike[contents].append((offer, num_tries))
                continue
            self._alike[contents] = []
            task = self._tasks[id(offer)] = asyncio.create_task(self._answer(offer, num_tries))
            try:
                await asyncio.wait([task])
            finally:
                del self._tasks[id(offer)]
                task.cancel()
                await asyncio.wait([task])
                for each in self._alike.pop(contents):
                    self._put(*each)
            if not task.cancelled():
                task.result()

    async def _answer(self, offer: Offer, num_tries: int) -> None:
        def progress(stage: str) -> None:
            logger.info("model %s: %s", offer.model_id, stage)
            self.send(ModelProgress(offer.model_id, stage))

        async def fetch(files: Sequence[OfferedFile]) -> None:
            if files:
                progress("receiving files")
                await self._fetch(offer.model_id, files)

        reason: str | None = None
        for_others = again = False
        model: M | None = None
        try:
            model = await self.device.prepare(offer, fetch, progress)
        except (CompilerKilledError, OSError) as error:
            again, num_left = isinstance(error, OSError), len(RETRY_PAUSES_S) - num_tries
            pause_s = RETRY_PAUSES_S[-max(num_left, 1)]
            if again or num_left > 0:
                loop = asyncio.get_running_loop()
                loop.call_later(pause_s, self._put, offer, num_tries + 1)
            if num_left > 0:
                progress(f"{error}; trying again in {pause_s:g} s")
            if num_left:
                return
            reason = f"{error}, {num_tries + 1} times in a row"
            if again:
                reason += f"; it is tried again every {pause_s:g} s"
        except ModelError as error:
            reason, for_others = str(error), isinstance(error, OtherWorkersError)
        except Exception as error:  # whatever it is, it is about this model, not about the worker
            logger.exception("model %s: cannot be prepared", offer.model_id)
            reason = f"{type(error).__name__}: {error}"
        if self._open.get(offer.model_id) is not offer:
            return  # Withdrawn meanwhile.
        if not again:
            del self._open[offer.model_id]
            digest = self._digests.pop(offer.model_id)
        if model is None:
            level = logging.INFO if for_others else logging.WARNING
            logger.log(level, "model %s: refused: %s", offer.model_id, reason)
            self.send(ModelRefused(offer.model_id, reason or "", for_others))
            return
        self.ready(model, digest)
        logger.info("model %s: ready, %d pages", offer.model_id, model.num_pages)
        if model.one_by_one:
            logger.warning("model %s: rows run one by one: %s", offer.model_id, model.one_by_one)
        self.send(describe(model))

    async def _fetch(self, model_id: ModelId, files: Sequence[OfferedFile]) -> None:
        """Receive files into the store. Raises ModelError if a file is not the one that was offered."""
        wanted = {file.sha256: file for file in files}
        incoming: dict[str, _Incoming] = {}
        chunks = self._chunks[model_id] = asyncio.Queue()
        self.send(ModelNeeded(model_id, tuple(wanted)))
        try:
            while wanted:
                message, payload = await chunks.get()
                sha256, num_bytes = message.sha256, 0
                try:
                    if sha256 not in wanted:
                        continue
                    if sha256 not in incoming:
                        incoming[sha256] = _Incoming(self.files, wanted[sha256])
                    file = incoming[sha256]
                    await asyncio.to_thread(file.add, message.offset, payload)
                    num_bytes = file.num_bytes
                finally:
                    self._acknowledge(message, num_bytes)
                if message.last:
                    await asyncio.to_thread(file.finish)
                    del wanted[sha256]
        finally:
            # An offer of the same model may have begun meanwhile.
            if self._chunks.get(model_id) is chunks:
                del self._chunks[model_id]
            while not chunks.empty():
                self._acknowledge(chunks.get_nowait()[0])
            for file in incoming.values():
                file.close()

    def _acknowledge(self, message: ModelChunk, num_bytes: int = 0) -> None:
        self.send(ChunkReceived(message.model_id, message.sha256, num_bytes))


class _Incoming:
    """A file that is being received."""

    def __init__(self, files: FileStore, expected: OfferedFile) -> None:
        self._files = files
        self._expected = expected
        self._hash = hashlib.sha256()
        self._path = files.new_file()
        self._file: BinaryIO = self._path.open("wb")
        self.num_bytes = 0

    def add(self, offset: int, piece: Buffer) -> None:
        name = self._expected.name
        if offset != self.num_bytes:
            raise ModelError(f"file {name!r}: chunk at {offset}, expected {self.num_bytes}")
        self._hash.update(piece)
        self._file.write(piece)
        self.num_bytes += len(piece)
        if self.num_bytes > self._expected.num_bytes:
            raise ModelError(
                f"file {name!r}: {self.num_bytes} bytes came, expected {self._expected.num_bytes}"
            )

    def finish(self) -> None:
        self._file.close()
        expected, digest = self._expected, self._hash.hexdigest()
        if (self.num_bytes, digest) != (expected.num_bytes, expected.sha256):
            raise ModelError(
                f"file {expected.name!r}: {self.num_bytes} bytes with sha256 {digest} came, "
                f"expected {expected.num_bytes} with {expected.sha256}"
            )
        self._files.add(self._path, digest)

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _decode(message: ModelOffer) -> Offer:
    where = f"offer of model {message.model_id!r}"
    if not message.model_id:
        raise ProtocolError("an offer names no model")
    files = []
    for file in message.files:
        path = PurePosixPath(file.name)
        if not path.name or path.is_absolute() or ".." in path.parts or "\\" in file.name:
            raise ProtocolError(f"{where}: file name {file.name!r} leads outside its folder")
        if not _SHA256.fullmatch(file.sha256):
            raise ProtocolError(f"{where}: file {file.name!r} has sha256 {file.sha256!r}")
        files.append(OfferedFile(str(path), file.num_bytes, file.sha256))
    return Offer(
        model_id=ModelId(message.model_id),
        files=tuple(files),
        batch_sizes=message.batch_sizes,
        fixed_dimensions=message.fixed_dimensions,
        profile=message.profile,
    )


def _contents(offer: Offer) -> Contents:
    """What decides the work that an offer needs."""
    return (
        tuple(sorted(offer.contents.items())),
        tuple(sorted(offer.fixed_dimensions.items())),
        offer.batch_sizes,
    )


def describe(model: ServedModel) -> ReadyModel:
    """Describe a model to the controller."""
    return ReadyModel(
        model_id=model.model_id,
        architecture_id=model.architecture_id,
        num_pages=model.num_pages,
        weights_bytes=model.weights_bytes,
        inputs=model.inputs,
        outputs=model.outputs,
        load_ns=model.load_ns,
        batches=tuple(BatchProfile(*each) for each in sorted(model.exec_ns.items())),
        from_cache=model.from_cache,
        clock_mhz=model.clock_mhz,
        one_by_one=model.one_by_one,
    )
