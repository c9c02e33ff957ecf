"""The actions of one worker, and their tensors: what is sent, what lies in shared memory, and what comes back.

Times are translated between the controller's clock and the worker's here and in the worker's link, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clockwright.errors import ProtocolError
from clockwright.foreign import printable
from clockwright.units import ActionId, ModelId, WorkerId
from clockwright.wire import worker_messages as messages
from clockwright.wire.actions import Action, ActionError, Infer, Result
from clockwright.wire.bulk import Buffer
from clockwright.wire.clock_sync import ClockSync
from clockwright.wire.frame_headers import APART, OWN_OUTPUTS, PLACE_BITS, WORDS_CHARS_MAX
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import (
    DIRECT_BYTES,
    LENGTH_BYTES,
    PLAIN_HEADER_BYTES,
    Frame,
    decode_result,
    encode_action,
    encode_inputs,
    encode_withdrawal,
)
from clockwright.wire.tensors import TensorSpec, total_bytes
from clockwright.wire.worker_messages import ForgetMemory, FurtherMemory, MemoryOffer
from controller.links.held_tensors import HeldInput, Holder, SentOutput, has_held
from controller.links.slabs import SLAB_BYTES_MIN, Arena, MappedMemory, Slabs


@dataclass(slots=True)
class _SentInfer:
    """What is kept of an Infer until it is over."""

    #: The rows of each request, and what a model makes of them: sizes that outputs must have.
    rows: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    #: Slabs that the worker may read and write until its result comes, even when the request is over.
    inputs: Sequence[Buffer]
    outputs: memoryview | None
    #: By number, the requests of fronts whose tensors go past the controller.
    holders: Mapping[int, Holder]


class WorkerActions:
    """Sends a worker its actions, and reads its results."""

    def __init__(
        self,
        worker_id: WorkerId,
        number: int,
        data: FrameSocket,
        clock: ClockSync,
        slabs: Slabs,
        *,
        generation: int,
        finished: Callable[[WorkerId, Result, Sequence[Buffer]], object],
        shared: Callable[[], object],
        unshared: Callable[[Arena], object],
    ) -> None:
        """Offer a worker of this host the memory that it shares with the controller.

        Args:
            worker_id: the worker's.
            number: what fronts call the worker.
            data: its connection.
            clock: knows the worker's clock.
            slabs: where large tensors lie for workers of this host.
            generation: the controller's, which orders carry; 0: they carry none.
            finished: is called with each result and its outputs.
            shared: is called when the worker has mapped its memory.
            unshared: is called with the memory of the worker's outputs when the worker is gone.
        """
        self.worker_id = worker_id
        self._number = number
        self._data = data
        self._clock = clock
        self.slabs = slabs
        self._generation = generation
        self._finished = finished
        self._shared = shared
        self._unshared = unshared
        self._header_bytes_max = PLAIN_HEADER_BYTES
        self._infers: dict[ActionId, _SentInfer] = {}
        #: Infers among them whose results are lost.
        self._lost: list[ActionId] = []
        #: Shared memory for outputs, which the worker was offered; None: not shared.
        self._outputs: Arena | None = None
        #: The worker has mapped that and the inputs'.
        self._mapped = False
        #: Fronts' memory that the worker was handed, by number, and those numbers that it has mapped.
        self._further: dict[int, MappedMemory] = {}
        self._further_mapped: dict[int, MappedMemory] = {}
        #: The outputs of each model that the worker has ready.
        self._model_outputs: dict[ModelId, tuple[TensorSpec, ...]] = {}
        self._offer_memory()

    def know(self, model_id: ModelId, outputs: tuple[TensorSpec, ...]) -> None:
        """Take Infers of a model with these outputs."""
        self._model_outputs[model_id] = outputs

    def forget(self, model_id: ModelId) -> None:
        """Take no more Infers of a model."""
        self._model_outputs.pop(model_id, None)

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Send an action, its window translated to the worker's clock, at the next `flush`."""
        offset_ns, data = self._clock.offset_ns, self._data
        assert offset_ns is not None, f"worker {self.worker_id} got an action before its clock"
        places: Sequence[int] = ()
        room: tuple[int, int] | None = None
        fronts: Sequence[int] = ()
        if isinstance(action, Infer):
            specs = self._model_outputs[action.model_id]
            payload_bytes = total_bytes(specs, sum(action.rows))
            slab: memoryview | None = None
            holders: dict[int, Holder] = {}
            inputs = payload
            if has_held(payload):
                payload, places, holders = self._without_held(action, payload)
            elif self._mapped:
                places = self._places(payload)
            if self._mapped and not holders:
                slab = self._take_outputs(payload_bytes)
                if slab is not None:
                    assert self._outputs is not None
                    room = self._outputs.find(slab), len(slab)
            sent = _SentInfer(action.rows, specs, inputs, slab, holders)
            self._infers[action.action_id] = sent
            if holders:
                fronts = [
                    holders[index].number if index in holders else 0
                    for index in range(len(action.rows))
                ]
            # No result is longer than the longest that an Infer has asked for.
            reader = data.reader
            if payload_bytes > reader.payload_bytes_max:
                reader.payload_bytes_max = payload_bytes
            header_bytes = PLAIN_HEADER_BYTES + LENGTH_BYTES * len(action.rows) * len(specs)
            if header_bytes > self._header_bytes_max:
                self._header_bytes_max = header_bytes
        data.hold(
            encode_action(
                action,
                payload,
                places=places,
                room=room,
                fronts=fronts,
                shift_ns=offset_ns,
                generation=self._generation,
            )
        )

    def flush(self, *, now: bool) -> None:
        """Send the actions that wait for it."""
        if now:
            self._data.flush()
        else:
            self._data.send(())

    def _without_held(
        self, action: Infer, payload: Sequence[Buffer]
    ) -> tuple[Sequence[Buffer], Sequence[int], dict[int, Holder]]:
        """Have fronts send what they hold of an Infer.

        Returns what stands in the message for each input, where each lies, and whose tensors go past this link.
        """
        num_inputs = len(payload) // len(action.rows)
        tensors: list[Any] = list(payload)
        places, holders = [-1] * len(payload), dict[int, Holder]()
        for number, tensor in enumerate(tensors):
            if type(tensor) is HeldInput:
                index, holder = number // num_inputs, tensor.holder
                content = tensor.content
                if not (holder.is_local and self.is_local):
                    if index not in holders:
                        holders[index] = holder
                        holder.feed(tensor.ask_id, self._number, action.action_id, index)
                    if len(tensor) >= DIRECT_BYTES:
                        places[number] = APART
                        continue
                assert content is not None
                tensors[number] = tensor = content
            if self._mapped and len(tensor) >= SLAB_BYTES_MIN:
                places[number] = self._place(tensor)
        return tensors, places, holders

    @property
    def is_local(self) -> bool:
        """Whether the worker shares memory with the fronts of this host."""
        return self.slabs.inputs is not None and self._data.hands_over

    def hand_on(
        self, front: int, action_id: int, index: int, tensors: Sequence[Buffer] | None
    ) -> None:
        """Pass on inputs of a front that cannot reach the worker; None: the request is withdrawn."""
        sent = self._infers.get(ActionId(action_id))
        if sent is None:
            return  # It is over.
        holder = sent.holders.get(index)
        if holder is None or holder.number != front:
            raise ProtocolError(
                f"action {action_id}: inputs to request {index}, which is another's"
            )
        self._data.send(encode_inputs(action_id, index, tensors))

    def _places(self, payload: Sequence[Buffer]) -> Sequence[int]:
        """Find the tensors that lie in memory shared with the worker. Returns () if all are small."""
        if not any([len(tensor) >= SLAB_BYTES_MIN for tensor in payload]):
            return ()
        return [self._place(tensor) if len(tensor) >= SLAB_BYTES_MIN else -1 for tensor in payload]

    def _place(self, tensor: Buffer) -> int:
        inputs = self.slabs.inputs
        if inputs is not None and (begin := inputs.find(tensor)) >= 0:
            return begin
        for number, memory in self._further_mapped.items():
            if (begin := memory.find(tensor)) >= 0:
                return number << PLACE_BITS | begin
        # What one stage of a pipeline gave is the next one's input: it stays where it is.
        if self._outputs is not None and (begin := self._outputs.find(tensor)) >= 0:
            return OWN_OUTPUTS << PLACE_BITS | begin
        return -1

    def _take_outputs(self, num_bytes: int) -> memoryview | None:
        """Take room for the outputs of an Infer. Returns None if they come with its result."""
        if num_bytes < SLAB_BYTES_MIN or self._outputs is None:
            return None
        return self._outputs.take(num_bytes)

    def withdraw_action(self, action_id: ActionId) -> None:
        """Tell the worker to drop an action that it has not begun."""
        self._data.send(encode_withdrawal(action_id, generation=self._generation))

    def write_off(self, action_id: ActionId) -> int:
        """Take in that the result of an action is lost, which may come after all.

        The worker may still read and write for it: its memory is not used again before the result, or the end of the
        link. Returns for how many Infers memory is held so.
        """
        self._lost = [lost for lost in (*self._lost, action_id) if lost in self._infers]
        return len(self._lost)

    def hang_up(self) -> None:
        """The worker is gone."""
        # The worker may still read and write for these actions. Its results are dropped, and the memory
        # that it writes to is never used again.
        self._infers.clear()
        if self._outputs is not None:
            self._outputs.close()
            self._unshared(self._outputs)
            self._outputs = None
        self._mapped = False
        self._further.clear()
        self._further_mapped.clear()

    def _offer_memory(self) -> None:
        """Hand the shared memory over, if the worker is on this host."""
        inputs, data = self.slabs.inputs, self._data
        if inputs is None or not data.hands_over:
            return
        outputs = self.slabs.for_outputs()
        if outputs is None:
            return
        message = b"".join(messages.frame(MemoryOffer(inputs.num_bytes, outputs.num_bytes)))
        if data.hand_over(message, (inputs.fd, outputs.fd)):
            self._outputs = outputs
        else:
            outputs.close()

    @property
    def outputs(self) -> Arena | None:
        """The memory of its outputs, whose file is open. Returns None if the worker has not mapped it."""
        return self._outputs if self._mapped else None

    def share(self, memory: MappedMemory, file: int) -> None:
        """Offer the worker a front's memory, given its file, so that inputs need not be copied."""
        if not self._mapped:
            return
        message = messages.frame(FurtherMemory(memory.number, memory.num_bytes))
        if self._data.hand_over(b"".join(message), (file,)):
            self._further[memory.number] = memory

    def unshare(self, memory: MappedMemory) -> None:
        """Have the worker forget a front's memory."""
        self._further_mapped.pop(memory.number, None)
        if self._further.pop(memory.number, None) is not None:
            self._data.send(messages.frame(ForgetMemory(memory.number)))

    def take_mapped(self, number: int) -> None:
        """Take in that the worker has mapped some memory."""
        if number:
            if number in self._further:
                self._further_mapped[number] = self._further[number]
        elif self._outputs is not None:
            self._mapped = True
            self._shared()

    def take_result(self, frame: Frame) -> None:
        """Take a result in. Raises ProtocolError if the protocol does not allow it."""
        if len(frame[0]) > self._header_bytes_max:
            raise ProtocolError(
                f"a result with a header of {len(frame[0])} bytes,"
                f" expected {self._header_bytes_max} at most"
            )
        offset_ns = self._clock.offset_ns
        if offset_ns is None:
            raise ProtocolError("a result before any heartbeat")
        result, outputs, numbers = decode_result(frame, shift_ns=-offset_ns)
        if result.message:
            result.message = printable(result.message, WORDS_CHARS_MAX)
        sent = self._infers.pop(result.action_id, None)
        if sent is not None and result.error is ActionError.NONE:
            if numbers:
                outputs = self._with_sent(result.action_id, sent, outputs, numbers)
            elif not outputs and sent.outputs is not None:
                outputs = _cut_outputs(sent, sent.outputs)
            _check_outputs(result.action_id, sent, outputs)
            result.failed = _failures(sent, outputs)
        self._finished(self.worker_id, result, outputs)

    def _with_sent(
        self,
        action_id: ActionId,
        sent: _SentInfer,
        outputs: Sequence[Buffer],
        numbers: Sequence[int],
    ) -> list[Buffer]:
        """Put handles where outputs went to their fronts."""
        if not set(numbers) <= sent.holders.keys():
            raise ProtocolError(f"action {action_id}: outputs sent to no front")
        rest = iter(outputs)
        found: list[Any] = []
        for index, rows in enumerate(sent.rows):
            for spec in sent.specs:
                if index in numbers:
                    # What carries its size says so where it arrives.
                    num_bytes = 0 if spec.vary else spec.batch_bytes(rows)
                    found.append(SentOutput(self._number, action_id, index, num_bytes))
                else:
                    found.append(next(rest, b""))
        return [*found, *rest]


def _cut_outputs(sent: _SentInfer, slab: memoryview) -> list[memoryview]:
    """Cut the slab of a batch into outputs, per request and per output."""
    outputs, begin = [], 0
    for rows in sent.rows:
        for spec in sent.specs:
            end = spec.end(slab, begin, rows)
            outputs.append(slab[begin:end])
            begin = end
    return outputs


def _failures(sent: _SentInfer, payload: Sequence[Buffer]) -> dict[int, str] | None:
    """Read which requests failed while others of their batch did not, and why."""
    if not sent.specs or sent.specs[0].vary is None:
        return None
    firsts: Sequence[Any] = payload[:: len(sent.specs)]
    words = [
        # What goes straight to a front is longer than any words.
        "" if isinstance(first, SentOutput) else sent.specs[0].failure(first)
        for first in firsts
    ]
    return {index: printable(why, WORDS_CHARS_MAX) for index, why in enumerate(words) if why}


def _check_outputs(action_id: ActionId, sent: _SentInfer, payload: Sequence[Buffer]) -> None:
    found = [len(tensor) for tensor in payload]
    wanted = [(spec, rows) for rows in sent.rows for spec in sent.specs]
    if len(found) != len(wanted) or not all(
        [spec.fits(size, rows) for size, (spec, rows) in zip(found, wanted, strict=True)]
    ):
        expected = [spec.batch_bytes(rows) for spec, rows in wanted]
        raise ProtocolError(f"action {action_id}: outputs of {found} bytes, expected {expected}")
