"""Sequences as a stage of the port: it puts state and controls into a step, and takes state out of its answer."""

from __future__ import annotations

import asyncio
import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from clockwright.errors import BadRequestError, Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId, format_ns
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from clockwright.wire.texts import join_texts
from controller.core.admission import way_back_of
from controller.models.entry import Entry
from controller.models.stepped import IDLE_NS, Control, first_state, one_row, pack_number
from controller.port import (
    INTERNAL,
    STEP,
    Answered,
    Ask,
    AskedStep,
    Failed,
    PortStage,
    Refused,
    Sink,
    Told,
)
from controller.runtime import Runtime
from controller.stages.sequences.beats import LOAD_MOST, Capacity, StreamBeat, load_with
from controller.stages.sequences.book import Book, SequenceKey, SteppedModel, Turn
from controller.stages.sequences.limits import SequenceConfig

S = TypeVar("S")

# gRPC's status INVALID_ARGUMENT.
_INVALID: Final = 3


@dataclass(frozen=True, slots=True)
class _Form:
    """How steps of a model become requests to it. It holds as long as the model's tensors are these."""

    inputs: tuple[TensorSpec, ...]
    model: SteppedModel
    #: Places of the inputs that clients send, and of the outputs that they get.
    sent: tuple[int, ...]
    got: tuple[int, ...]
    #: Per state pair.
    state_inputs: tuple[int, ...]
    state_outputs: tuple[int, ...]
    state_specs: tuple[TensorSpec, ...]
    #: How the state of one row begins, where tensors carry their sizes.
    state_heads: tuple[bytes, ...]
    controls: tuple[Control, ...]


@dataclass(slots=True, eq=False)
class _Asked:
    """A step."""

    request_id: RequestId
    entry: Entry
    form: _Form
    ask: Ask
    inputs: Sequence[Buffer]
    sink: Sink
    #: Its number where it runs; None: it does not.
    inner_id: RequestId | None = None


class Models(Protocol):
    """The catalogue."""

    def watch(self, renewed: Callable[[], object]) -> None:
        """Have something called whenever models may have changed."""

    def find(self, name: str, version: str) -> Entry | None:
        """Find a version of the model that serves a public name."""


class SequenceStage(Generic[S]):
    """Runs the steps of each sequence one after the other."""

    def __init__(
        self,
        inner: PortStage[S],
        runtime: Runtime,
        catalogue: Models,
        config: SequenceConfig = SequenceConfig(),  # noqa: B008  it is frozen
    ) -> None:
        """Begin with no sequences. The runtime keeps what is refused; the catalogue says when a model is another."""
        self._inner = inner
        self._runtime = runtime
        self._catalogue = catalogue
        #: What is live.
        self.book: Book[_Asked] = Book(config)
        #: Beats of streams that are no sequences, each with how many there are.
        self.others: Counter[StreamBeat] = Counter()
        self._forms: dict[ModelId, tuple[Entry, _Form]] = {}
        # Steps that are open, by their number, None: about to be refused; and those that run, by their number there.
        self._turns: dict[RequestId, Turn[_Asked] | None] = {}
        self._running: dict[RequestId, Turn[_Asked]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        catalogue.watch(self._renewed)

    def ask(self, subject: S, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Do what `PortStage` says of a step, whose inputs are the model's without state and controls.

        What is no step goes to the next stage directly.
        """
        assert isinstance(subject, Entry)
        assert ask.step is not None
        form, request_id = self._form(subject), self._runtime.new_number()
        asked = _Asked(request_id, subject, form, ask, inputs, sink)
        step = ask.step
        key = SequenceKey(ask.owner, ask.tenant, form.model.model_id, step.sequence)
        now_ns = self._runtime.clock()
        # A refusal takes time to get to the client, and the timer may be a millisecond late.
        latest_ns = ask.arrival_ns + ask.slo_ns - way_back_of(ask.slo_ns) - NS_PER_MS
        beat = None
        if step.start and step.every_ns:
            beat = StreamBeat(form.model.model_id, step.every_ns, ask.slo_ns)
        try:
            _check_id(form, step)
            refused = None if beat is None else self.too_busy(beat, form.model.name, key)
            turn = self.book.arrive(
                key,
                form.model,
                asked,
                start=step.start,
                end=step.end,
                latest_ns=latest_ns,
                beat=beat,
                refused=refused,
                now_ns=now_ns,
            )
        except (RefusedError, BadRequestError) as error:
            # Later, because the stages before this one do not know it yet.
            self._turns[request_id] = None
            asyncio.get_running_loop().call_soon(self._refuse, asked, error)
            return request_id
        self._turns[request_id] = turn
        if turn.sequence.running is None:
            self._go_on(turn)
        self._arm()
        return request_id

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a step, which then did not happen, even if a worker has it; or what was asked of the next stage directly."""
        if request_id not in self._turns:
            self._inner.withdraw(request_id)
            return
        if (turn := self._turns.pop(request_id)) is None:
            return
        asked = _asked(turn)
        if asked.inner_id is not None:
            del self._running[asked.inner_id]
            self._inner.withdraw(asked.inner_id)
        self.book.withdraw(turn)
        self._go_on(turn)

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Take what came of a step, and begin the next of its sequence."""
        turn = self._running.pop(request_id, None)
        if turn is None:
            return
        asked = _asked(turn)
        del self._turns[asked.request_id]
        form, sequence = asked.form, turn.sequence
        state: tuple[bytes, ...] | None = None
        if isinstance(told, Answered):
            # Copies: what comes from a worker lies in its memory, and is to be given back.
            state = tuple([bytes(outputs[place]) for place in form.state_outputs])
            if any(map(TensorSpec.failure, form.state_specs, state)):
                state = None
            elif not all(map(bytes.startswith, state, form.state_heads)):
                told, outputs, state = Failed(INTERNAL, _misfit(form, state)), (), None
            elif (error := self.book.lacks_room(turn, state)) is not None:
                told = Refused(error.refusal, error.figures, message=error.message)
                outputs, state = (), None
        if state is None:
            self.book.withdraw(turn)
            if isinstance(told, Refused):
                told.figures[STEP] = sequence.num_steps
        else:
            assert isinstance(told, Answered)
            number = self.book.answered(turn, state)
            told.parameters = {**(told.parameters or {}), STEP: number}
        if outputs and not (asked.ask.step and asked.ask.step.wants_state):
            outputs = [outputs[place] for place in form.got]
        try:
            asked.sink.told(asked.request_id, told, outputs)
        finally:
            self._go_on(turn)

    # --- turns --------------------------------------------------------------------------------

    def _go_on(self, turn: Turn[_Asked]) -> None:
        """Begin the next step of a sequence."""
        begun, refused = self.book.next(turn.sequence, self._runtime.clock())
        for each in refused:
            self._refuse_turn(
                each, self.book.must_start(turn.sequence.key, turn.sequence.model.name)
            )
        if begun is not None and _asked(begun).inner_id is None:
            self._run(begun)

    def _run(self, turn: Turn[_Asked]) -> None:
        asked, state = _asked(turn), turn.sequence.state
        form, ask = asked.form, asked.ask
        assert state is not None
        assert ask.step is not None
        if ask.step.leaves(len(asked.inputs), len(form.sent)):
            self.book.left(turn)
            asyncio.get_running_loop().call_soon(self._left, asked, turn.sequence.num_steps)
            self._go_on(turn)
            return
        inputs: list[Any] = [b""] * len(form.inputs)
        for place, tensor in zip(form.sent, asked.inputs, strict=True):
            inputs[place] = tensor
        for place, tensor in zip(form.state_inputs, state, strict=True):
            inputs[place] = tensor
        for control in form.controls:
            inputs[control.index] = _filled_in(form.inputs[control.index], control, ask.step)
        asked.inputs = ()
        # What is passed on is a request like any other.
        passed = msgspec.structs.replace(ask, step=None, owner="", lengths=(), places=())
        asked.inner_id = request_id = self._inner.ask(asked.entry, passed, inputs, self)  # type: ignore[arg-type]
        self._running[request_id] = turn

    def _left(self, asked: _Asked, num_steps: int) -> None:
        """Answer a step that has only ended its sequence."""
        if asked.request_id in self._turns:
            del self._turns[asked.request_id]
            told = Answered(self._runtime.clock(), {STEP: num_steps})
            asked.sink.told(asked.request_id, told, ())

    def _refuse_turn(self, turn: Turn[_Asked], error: RefusedError | BadRequestError) -> None:
        self._refuse(_asked(turn), error, turn.sequence.num_steps)

    def _refuse(
        self, asked: _Asked, error: RefusedError | BadRequestError, num_steps: int = 0
    ) -> None:
        if asked.request_id not in self._turns:
            return  # Its client has given it up.
        del self._turns[asked.request_id]
        told: Refused | Failed = Failed(_INVALID, str(error))
        if isinstance(error, RefusedError):
            told = Refused(error.refusal, {**error.figures, STEP: num_steps}, message=error.message)
            self._runtime.refused_at_door(asked.ask, asked.form.model.name, told, _REMEDY)
        asked.sink.told(asked.request_id, told, ())

    # --- time ---------------------------------------------------------------------------------

    def _arm(self) -> None:
        wakeup_ns = self.book.wakeup_ns
        if wakeup_ns is None or (self._timer is not None and self._timer_ns <= wakeup_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = wakeup_ns
        # Loops keep time in milliseconds.
        delay_ms = max(1, math.ceil((wakeup_ns - self._runtime.clock()) * 1000 / NS_PER_S))
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        for turn in self.book.expire(self._runtime.clock()):
            ask = _asked(turn).ask
            slo = format_ns(ask.slo_ns)
            error = RefusedError(
                Refusal.OVERLOADED,
                f"sequence {turn.sequence.key.sequence_id} to model '{turn.sequence.model.name}': the turn of the step did"
                f" not come within SLO {slo}, because the steps before it took too long",
                figures={"slo_ns": ask.slo_ns, "load_ns": 0, "exec_ns": 0, "margin_ns": 0, "queue_ns": ask.slo_ns},
            )  # fmt: skip
            self._refuse_turn(turn, error)
        self._arm()

    def too_busy(
        self, beat: StreamBeat, name: str, key: SequenceKey | None = None
    ) -> RefusedError | None:
        """Say why there is no time for one more stream, in place of the sequence of a key; None: there is."""
        live = self.book.beats + self.others
        known = None if key is None else self.book.find(key)
        if known is not None and known.beat is not None:
            live[known.beat] -= 1
        capacities = {}
        for each in {beat.model, *(other.model for other in live)}:
            found = self._runtime.model_statistics(each)
            if found is not None:
                capacities[each] = Capacity(found.exec_ns, found.ready_on)
        load = load_with(beat, live, capacities)
        if load.share <= LOAD_MOST:
            return None
        figures = {
            "every_ns": beat.every_ns,
            "streams": sum(live.values()),
            "step_ns": load.step_ns,
            "load_permille_max": round(1000 * LOAD_MOST),
        }
        words = f"model '{name}': a step every {format_ns(beat.every_ns)} within {format_ns(beat.slo_ns)}"
        if math.isinf(load.share):
            why = f"{words}: no batch is fast enough: two of them, one after the other, have to fit"
        else:
            figures["load_permille"] = round(1000 * load.share)
            why = (
                f"{words}: with {sum(live.values())} live streams its workers would be busy for {100 * load.share:.0f} % of"
                f" the time, expected {100 * LOAD_MOST:.0f} % at most; end streams, or add workers"
            )
        return RefusedError(Refusal.OVERLOADED, why, figures=figures)

    # --- models -------------------------------------------------------------------------------

    def _form(self, entry: Entry) -> _Form:
        known = self._forms.get(entry.model_id)
        if known is not None and known[0] is entry and known[1].inputs is entry.inputs:
            return known[1]
        if known is not None:
            self._forget(entry.model_id)
        form = _form_of(entry)
        self._forms[entry.model_id] = entry, form
        return form

    def _renewed(self) -> None:
        """Models may have changed: forget the sequences of those that have."""
        for model_id, (entry, form) in list(self._forms.items()):
            found = self._catalogue.find(entry.name, entry.version)
            if found is entry and entry.inputs is form.inputs:
                continue
            self._forget(model_id)

    def _forget(self, model_id: ModelId) -> None:
        _, form = self._forms.pop(model_id)
        for turn in self.book.drop_model(model_id):
            error = self.book.must_start(turn.sequence.key, form.model.name)
            asyncio.get_running_loop().call_soon(self._refuse_turn, turn, error)


def places_of_clients(entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which inputs of a model the steps of clients have, and which outputs they get, unless they ask for state."""
    filled = {pair.input_index for pair in entry.state} | {each.index for each in entry.controls}
    kept = {pair.output_index for pair in entry.state}
    return (
        tuple(place for place in range(len(entry.inputs)) if place not in filled),
        tuple(place for place in range(len(entry.outputs)) if place not in kept),
    )


def _form_of(entry: Entry) -> _Form:
    inputs, outputs = entry.inputs, entry.outputs
    settings = entry.folder.settings.sequence if entry.folder else None
    state_inputs = tuple(pair.input_index for pair in entry.state)
    state_outputs = tuple(pair.output_index for pair in entry.state)
    initial = tuple(first_state(inputs[pair.input_index], pair.initial) for pair in entry.state)
    return _Form(
        inputs,
        SteppedModel(
            entry.model_id,
            entry.name,
            initial,
            settings.idle_ns if settings is not None else IDLE_NS,
            settings.most if settings is not None else None,
        ),
        *places_of_clients(entry),
        state_inputs,
        state_outputs,
        tuple(outputs[place] for place in state_outputs),
        tuple(
            b"" if spec.vary is None or spec.datatype == "BYTES" else row[: spec.header_bytes]
            for spec, row in zip([inputs[place] for place in state_inputs], initial, strict=True)
        ),
        entry.controls,
    )


def _misfit(form: _Form, state: Sequence[bytes]) -> str:
    """Say that a step left a state of another size than the next one takes."""
    for spec, place, head, found in zip(
        form.state_specs, form.state_inputs, form.state_heads, state, strict=True
    ):
        if not found.startswith(head):
            sized, _ = spec.unpack(found)
            return (
                f"model '{form.model.name}': output {spec.name!r} is the state of the next step: found shape"
                f" {list(sized.row_shape)}, expected {list(one_row(form.inputs[place]))}"
            )
    return ""


def _filled_in(spec: TensorSpec, control: Control, step: AskedStep) -> bytes:
    """Make the row of a control."""
    number = math.prod(spec.shape(1))
    if spec.datatype == "BYTES":
        return first_state(spec, join_texts([str(step.sequence)] * number))
    if control.kind == "id":
        value: float = int(step.sequence)
    else:
        value = control.values[control.kind == "ready" or getattr(step, control.kind)]
    return first_state(spec, pack_number(spec.datatype, value, number))


def _check_id(form: _Form, step: AskedStep) -> None:
    """Raise BadRequestError if the model cannot be told the sequence's id."""
    for control in form.controls:
        spec = form.inputs[control.index]
        if control.kind != "id" or spec.datatype == "BYTES":
            continue
        try:
            pack_number(spec.datatype, int(step.sequence))
        except (ValueError, OverflowError, struct.error):
            raise BadRequestError(
                f"parameter sequence_id: found {str(step.sequence)[:80]!r}, expected a number of {spec.datatype}: model"
                f" '{form.model.name}' takes it as input {control.input!r}"
            ) from None


def _asked(turn: Turn[_Asked]) -> _Asked:
    assert turn.request is not None
    return turn.request


_REMEDY: Final = "fewer sequences at a time, or steps that wait for the answer before"
