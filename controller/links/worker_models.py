"""The models of one worker: offers and answers, files on their way, and what it held before it came."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from clockwright.errors import ProtocolError
from clockwright.foreign import TEXT_CHARS_MAX, printable
from clockwright.units import ArchitectureId, ModelId, WorkerId
from clockwright.wire import worker_messages as messages
from clockwright.wire.frame_headers import WORDS_CHARS_MAX
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.tensors import TensorSpec, total_bytes, usual_row_bytes
from clockwright.wire.worker_messages import (
    ChunkReceived,
    FileOffer,
    Held,
    ModelChunk,
    ModelDrop,
    ModelNeeded,
    ModelOffer,
    ModelProgress,
    ModelRefused,
    Register,
)
from controller.core.events import ModelReady
from controller.links.worker_claims import model_fault
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry
from controller.models.model_folder import ModelFile, ModelFolder

log = logging.getLogger(__name__)

# An action may wait for the chunks in flight: 8 ms on a link of 1 Gbit/s.
CHUNK_BYTES = 256 << 10
# Chunks that are sent and not acknowledged: enough to keep a fast network busy.
CHUNKS_IN_FLIGHT = 4

# A worker that says nothing of what it was offered is not waited for. An honest one gives a model up that takes
# 600 s to compile, and says so.
OFFER_SILENCE_S = 900.0

# Files that a worker has asked for and was not sent. It asks for those of one model at a time.
_TRANSFERS_MAX = 20_000


@dataclass(slots=True)
class _Transfer:
    """A file on its way to a worker."""

    model_id: ModelId
    file: ModelFile


@dataclass(frozen=True, slots=True)
class Claims:
    """Judges what a worker says that it holds, or has made ready."""

    register: Register
    catalogue: Catalogue
    message_bytes_max: int

    def choose_held(self) -> Sequence[Held]:
        """Choose what the worker is to keep of what it holds: models in its cache first.

        Raises ProtocolError if it cannot hold all that.
        """
        wanted = [held for held in self.register.held if self.is_wanted(held)]
        keeps = sorted(wanted, key=lambda held: not held.resident)
        num_pages = sum(held.ready.num_pages for held in wanted if held.resident)
        if num_pages > self.register.num_pages or len({h.ready.model_id for h in wanted}) < len(
            wanted
        ):
            raise ProtocolError(
                f"it holds {len(wanted)} models in {num_pages} pages of {self.register.num_pages}"
            )
        return keeps

    def is_wanted(self, held: Held) -> bool:
        """Whether the worker would answer our offer of the model with just what it holds."""
        model = self.catalogue.find_id(ModelId(held.ready.model_id))
        return (
            model is not None
            and model.folder is not None
            and _offer_digest(model) == held.offer_digest
            and not self.fault_of(held.ready, model.folder)
            # Else it is refused, and keeps pages until it has heard of that.
            and (
                not model.ready_on
                or (held.ready.inputs, held.ready.outputs) == (model.inputs, model.outputs)
            )
        )

    def fault_of(self, ready: messages.ReadyModel, folder: ModelFolder) -> str:
        """Say what cannot be true in a worker's description of a model; empty if all of it can."""
        return model_fault(
            ready,
            num_pages=self.register.num_pages,
            batch_sizes=folder.settings.batch_sizes,
            message_bytes_max=self.message_bytes_max,
        )


@dataclass(eq=False)
class WorkerModels:
    """Offers models to one worker, sends their files, and takes its answers."""

    worker_id: WorkerId
    claims: Claims
    #: What the worker was told to keep.
    keeps: Sequence[Held]
    data: FrameSocket
    _: KW_ONLY
    #: Hears of each model that is ready and its outputs before an Infer may come.
    know: Callable[[ModelId, tuple[TensorSpec, ...]], object]
    #: Hears of each model that the worker is to forget.
    forget: Callable[[ModelId], object]

    def __post_init__(self) -> None:
        #: Models that the worker cannot serve, and why. It may say later that it can: what it lacked has come.
        self.refused: dict[ModelId, str] = {}
        #: It is to leave, so nothing is told of its models any more.
        self.draining = False
        self._catalogue = self.claims.catalogue
        #: Models that were offered to the worker, which has not answered yet.
        self._unanswered: set[ModelId] = set()
        #: Heartbeat intervals since it last said something of any of them.
        self._mute_ticks = 0
        self._transfers: asyncio.Queue[_Transfer] = asyncio.Queue()
        self._permits = asyncio.Semaphore(CHUNKS_IN_FLIGHT)
        self._num_unacknowledged = 0

    def take_over(self) -> bool:
        """Tell the catalogue of what the worker held already. Returns False if models have changed meanwhile."""
        keeps, self.keeps = self.keeps, ()
        for held in keeps:
            if not self.claims.is_wanted(held):
                return False
            self._accept(held.ready, resident=held.resident)
        return True

    def offer(self, model: Entry) -> None:
        """Offer the worker a model."""
        self._unanswered.add(model.model_id)
        self.data.send(messages.frame(_offer(model)))

    def withdraw(self, model: Entry) -> None:
        """Take an offer back unless it was accepted. The scheduler forgets models that were ready."""
        was_refused = self.refused.pop(model.model_id, None) is not None
        if model.model_id in self._unanswered or was_refused:
            self.forget_model(model.model_id)

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""
        self._unanswered.discard(model_id)
        self.forget(model_id)
        self.data.send(messages.frame(ModelDrop(model_id)))

    def take(self, message: messages.FromWorker) -> None:
        """Take what the worker says of models. Raises ProtocolError if the protocol does not allow it."""
        self._mute_ticks = 0
        match message:
            case ModelNeeded():
                self._take_needed(message)
            case ChunkReceived():
                if self._num_unacknowledged == 0:
                    raise ProtocolError("a chunk was acknowledged that was not sent")
                self._num_unacknowledged -= 1
                self._permits.release()
            case ModelProgress():
                if message.model_id in self._unanswered:
                    stage = printable(message.stage)
                    model_id = ModelId(message.model_id)
                    self._catalogue.model_progress(self.worker_id, model_id, stage)
            case messages.ReadyModel():
                self._take_ready(message)
            case ModelRefused():
                # Another was withdrawn a moment ago, or is answered already.
                if message.model_id in self._unanswered:
                    reason = printable(message.reason, WORDS_CHARS_MAX) or "no reason given"
                    self._refused(ModelId(message.model_id), reason, for_others=message.for_others)

    def tick(self, interval_ms: int) -> None:
        """Take a worker that says nothing of its offers for one that refuses them."""
        self._mute_ticks = self._mute_ticks + 1 if self._unanswered else 0
        if self._mute_ticks * interval_ms <= OFFER_SILENCE_S * 1000:
            return
        self._mute_ticks = 0
        reason = f"worker {self.worker_id} has said nothing of it for {OFFER_SILENCE_S:g} s"
        for model_id in list(self._unanswered):
            self.forget_model(model_id)
            self._refused(model_id, reason)

    async def send_files(self) -> None:
        """Send the files that the worker needs, until cancelled."""
        while True:
            transfer = await self._transfers.get()
            if self._catalogue.find_id(transfer.model_id) is None:
                continue  # The model was removed while other files were sent.
            try:
                await self._send_file(transfer)
            except OSError as error:
                reason = f"{transfer.file.name} cannot be read: {error}"
                self._refused(transfer.model_id, reason)
                self.forget_model(transfer.model_id)

    async def _send_file(self, transfer: _Transfer) -> None:
        """Send a file in chunks; the disk is waited for in a thread.

        The file may have changed since it was listed. Then the promised number of bytes is sent all the same,
        or fewer, of which the last chunk is marked: the worker finds that the sha256 differs, and says so.
        """
        file, offset, last = transfer.file, 0, False
        while not last:
            wanted = min(CHUNK_BYTES, file.num_bytes - offset)
            content = await asyncio.to_thread(_read_at, file.path, offset, wanted)
            last = offset + len(content) >= file.num_bytes or len(content) < wanted
            await self._permits.acquire()
            self._num_unacknowledged += 1
            chunk = ModelChunk(transfer.model_id, file.sha256, offset, last)
            self.data.send(messages.frame(chunk, content))
            offset += len(content)

    def _take_needed(self, needed: ModelNeeded) -> None:
        model = self._catalogue.find_id(ModelId(needed.model_id))
        if model is None or model.folder is None:
            return  # The model was removed a moment ago.
        files = {file.sha256: file for file in model.folder.files}
        if self._transfers.qsize() + len(needed.sha256) > _TRANSFERS_MAX:
            raise ProtocolError(f"it waits for more than {_TRANSFERS_MAX} files, which is the most")
        for sha256 in dict.fromkeys(needed.sha256):
            file = files.get(sha256)
            if file is None:
                raise ProtocolError(
                    f"model {model.model_id} has no file with sha256 {sha256[:TEXT_CHARS_MAX]!r}"
                )
            self._transfers.put_nowait(_Transfer(model.model_id, file))

    def _take_ready(self, ready: messages.ReadyModel) -> None:
        model_id = ModelId(ready.model_id)
        was_refused = self.refused.pop(model_id, None) is not None
        if model_id not in self._unanswered and not was_refused:
            return  # The offer was withdrawn a moment ago.
        self._unanswered.discard(model_id)
        model = self._catalogue.find_id(model_id)
        if model is None or model.folder is None:
            return  # The model was removed a moment ago.
        if fault := self.claims.fault_of(ready, model.folder):
            self._refused(model_id, fault)
            self.forget_model(model_id)
        else:
            self._accept(ready, resident=False)

    def _accept(self, ready: messages.ReadyModel, *, resident: bool) -> None:
        """The worker has a model ready, and in the cache too or not."""
        model_id = ModelId(ready.model_id)
        event = ModelReady(
            worker_id=self.worker_id,
            model_id=model_id,
            architecture_id=ArchitectureId(ready.architecture_id),
            num_pages=ready.num_pages,
            load_ns=ready.load_ns,
            # Not what no message could bring back.
            exec_ns={
                batch.batch_size: batch.exec_ns
                for batch in ready.batches
                if total_bytes(ready.outputs, batch.batch_size) <= self.claims.message_bytes_max
            },
            clock_mhz=ready.clock_mhz,
            output_row_bytes=usual_row_bytes(ready.outputs),
            resident=resident,
        )
        if self.draining:
            return
        # Before the scheduler knows: it may send an Infer at once.
        self.know(model_id, ready.outputs)
        known = self._catalogue.model_ready(
            event,
            inputs=ready.inputs,
            outputs=ready.outputs,
            weights_bytes=ready.weights_bytes,
            one_by_one=printable(ready.one_by_one, WORDS_CHARS_MAX),
        )
        if not known:
            self.forget_model(model_id)

    def _refused(self, model_id: ModelId, reason: str, *, for_others: bool = False) -> None:
        self._unanswered.discard(model_id)
        if self._catalogue.find_id(model_id) is None:
            return  # The model was removed a moment ago.
        if not for_others:
            self.refused[model_id] = reason
        if not self.draining:
            self._catalogue.model_refused(self.worker_id, model_id, reason, for_others=for_others)


def _offer(model: Entry) -> ModelOffer:
    folder = model.folder
    assert folder is not None, f"model {model.model_id} is malformed and was offered"
    return ModelOffer(
        model_id=model.model_id,
        files=tuple(FileOffer(file.name, file.num_bytes, file.sha256) for file in folder.files),
        batch_sizes=tuple(folder.settings.batch_sizes),
        fixed_dimensions=dict(folder.settings.dimensions),
        # Not the id: generations and copies of a model cost the same.
        profile=folder.settings.profile or folder.name,
    )


def _offer_digest(model: Entry) -> bytes:
    if not model.offer_digest:
        model.offer_digest = messages.offer_digest(_offer(model))
    return model.offer_digest


def _read_at(path: Path, offset: int, num_bytes: int) -> bytes:
    # Opened for each chunk: a link that ends between two of them then leaves nothing open.
    with path.open("rb") as opened:
        opened.seek(offset)
        return opened.read(num_bytes)
