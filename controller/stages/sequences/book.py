"""Which sequences are live, whose turn it is, and what is refused. Pure: time is an argument.

The contract. The steps of a sequence run one at a time, in the order in which they came. A step counts when it is answered,
and only then: a step that is refused, late, failed or given up by its client did not happen, and the next one takes the
state that the last answered step left. The first step (`start`) is the exception, because its client means a new sequence:
it ends what was live under the id when its turn comes, whatever becomes of it. If it does not count, no sequence is
live, and the steps behind it are refused.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from clockwright.errors import BadRequestError, Refusal, RefusedError
from clockwright.units import ModelId, format_ns
from controller.stages.sequences.beats import StreamBeat
from controller.stages.sequences.limits import WAITING_MAX, SequenceConfig

T = TypeVar("T")

#: How sequences end.
ENDED, RESTARTED, IDLE, REPLACED = "end", "restart", "idle", "model"
REASONS: Final = (ENDED, RESTARTED, IDLE, REPLACED)
# Sequences that are over of which it is known why.
_GONE_MAX: Final = 10_000
# With more timers, those of what is over are dropped.
_TIMERS_LEAST: Final = 1000


class SequenceKey(NamedTuple):
    """What tells sequences apart: nothing crosses between callers, tenants, or generations of a model."""

    owner: str
    tenant: str
    model_id: ModelId
    sequence_id: int | str


@dataclass(frozen=True, slots=True)
class SteppedModel:
    """What all sequences of a model have in common."""

    model_id: ModelId
    name: str
    #: The state before the first step, per state pair.
    initial: tuple[bytes, ...]
    idle_ns: int
    #: The most live sequences; None: the server's bound alone holds.
    most: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return sum(map(len, self.initial))


@dataclass(slots=True, eq=False)
class Sequence(Generic[T]):
    """The steps of one key."""

    key: SequenceKey
    model: SteppedModel
    #: The state that the last answered step left; None: no sequence is live, its first step is still to come.
    state: tuple[bytes, ...] | None = None
    #: Steps that were answered.
    num_steps: int = 0
    running: Turn[T] | None = None
    #: Steps that came after the one that runs; those of them that are over are first steps, see `withdraw`. No deque,
    #: because an empty one takes 700 bytes.
    queue: list[Turn[T]] = field(default_factory=list)
    used_ns: int = 0
    beat: StreamBeat | None = None
    #: It is not in the book any more.
    is_gone: bool = False
    #: Bytes that it counts for: its state, which may be text that grows, and no less than at first.
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Turn(Generic[T]):
    """A step that waits for its turn, or runs."""

    #: The book does not look at it; None: that of a first step that was refused as it came.
    request: T | None
    sequence: Sequence[T]
    start: bool
    end: bool
    #: If it has not begun by then, it cannot be answered in time.
    latest_ns: int
    is_over: bool = False


class Book(Generic[T]):
    """All sequences."""

    def __init__(self, config: SequenceConfig) -> None:
        self._config = config
        self._sequences: dict[SequenceKey, Sequence[T]] = {}
        self._by_model: dict[ModelId, dict[SequenceKey, Sequence[T]]] = {}
        # Why sequences ended, the latest last; by the model's public name, which its successor has too.
        self._gone: OrderedDict[tuple[str, ...], str] = OrderedDict()
        # When to look at what: waiting steps, and sequences that may be idle, each of which is here once.
        self._timers: list[tuple[int, int, Turn[T] | Sequence[T]]] = []
        self._timers_max = _TIMERS_LEAST
        self._numbers = count()
        #: Bytes of the state of all.
        self.num_bytes = 0
        #: Streams of each beat.
        self.beats: Counter[StreamBeat] = Counter()
        #: How many ended, by reason.
        self.ended: Counter[str] = Counter()

    def __len__(self) -> int:
        """Live sequences, and those whose first step waits."""
        return len(self._sequences)

    def number_of(self, model_id: ModelId) -> int:
        """Sequences of a model."""
        return len(self._by_model.get(model_id, ()))

    def find(self, key: SequenceKey) -> Sequence[T] | None:
        """Find a sequence."""
        return self._sequences.get(key)

    # --- steps --------------------------------------------------------------------------------

    def arrive(
        self,
        key: SequenceKey,
        model: SteppedModel,
        request: T,
        *,
        start: bool = False,
        end: bool = False,
        latest_ns: int,
        beat: StreamBeat | None = None,
        refused: RefusedError | None = None,
        now_ns: int,
    ) -> Turn[T]:
        """Let a step of a sequence wait for its turn, which `next` gives it with the request.

        Until `latest_ns` at most. The first one may say when steps come, or why there is no time for that. Raises
        BadRequestError if no such sequence is live, and this is no first step; RefusedError if there are too many, too
        many steps wait, or there is no time.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            if not start:
                raise self.must_start(key, model.name)
            if refused is not None:
                raise refused
            self._check_room(model)
            sequence = self._add(key, model, now_ns)
        elif refused is not None or len(sequence.queue) >= WAITING_MAX:
            if start:
                self._cut(sequence, now_ns)
            raise refused or RefusedError(
                Refusal.OVERLOADED,
                f"sequence {key.sequence_id} to model '{model.name}': found {WAITING_MAX} steps that wait for their turn,"
                " expected fewer; send a step when the one before is answered, or leave steps out",
                figures={"steps_waiting": WAITING_MAX},
            )
        if start:
            self._set_beat(sequence, beat)
        turn = Turn(request, sequence, start, end, latest_ns)
        sequence.queue.append(turn)
        sequence.used_ns = now_ns
        if sequence.running is not None:
            self._look_at(latest_ns, turn)
        return turn

    def _cut(self, sequence: Sequence[T], now_ns: int) -> None:
        """A first step is refused as it comes: what was live ends behind the steps that wait, as if its turn came."""
        if not sequence.queue or not (sequence.queue[-1].start and sequence.queue[-1].is_over):
            sequence.queue.append(
                Turn(None, sequence, start=True, end=False, latest_ns=0, is_over=True)
            )
        self.next(sequence, now_ns)

    def next(self, sequence: Sequence[T], now_ns: int) -> tuple[Turn[T] | None, list[Turn[T]]]:
        """Begin the next step of a sequence if it has one and none runs.

        Returns the step, and those before it that are refused because no sequence is live (`must_start`).
        """
        refused: list[Turn[T]] = []
        while sequence.running is None and sequence.queue:
            turn = sequence.queue.pop(0)
            if turn.start:
                self._end(sequence, RESTARTED)
                sequence.state, sequence.num_steps = sequence.model.initial, 0
                self._hold(sequence, 0)
            if turn.is_over:
                sequence.state = None
                self._gone_for(sequence, "its first step was refused or given up")
            elif sequence.state is None:
                turn.is_over = True
                refused.append(turn)
            else:
                sequence.running = turn
        if sequence.state is None and sequence.running is None:
            self._remove(sequence)
        sequence.used_ns = now_ns
        return sequence.running, refused

    def answered(self, turn: Turn[T], state: tuple[bytes, ...]) -> int:
        """The step that runs is answered, and left a state; `next` is to follow. Returns how many steps have counted."""
        sequence = turn.sequence
        self._over(turn)
        sequence.num_steps += 1
        if not sequence.is_gone:
            sequence.state = state
            self._hold(sequence, sum(map(len, state)))
            if turn.end:
                self._end(sequence, ENDED)
        return sequence.num_steps

    def lacks_room(self, turn: Turn[T], state: tuple[bytes, ...]) -> RefusedError | None:
        """Say why the state that the step that runs has left cannot be kept; None: it can. Only text can grow."""
        more, most = sum(map(len, state)) - turn.sequence.num_bytes, self._config.sequence_bytes
        found = self.num_bytes + more
        if more <= 0 or found <= most or turn.sequence.is_gone:
            return None
        return RefusedError(
            Refusal.OVERLOADED,
            f"found {found} bytes of state of all sequences, {more} of them by which this one would grow, expected {most} at"
            " most; end those that are done (sequence_end), or raise --sequence-mib",
            figures={"state_bytes": found, "state_bytes_max": most},
        )

    def left(self, turn: Turn[T]) -> None:
        """The step that runs only ends its sequence; `next` is to follow."""
        self._over(turn)
        self._end(turn.sequence, ENDED)

    def withdraw(self, turn: Turn[T]) -> None:
        """A step does not count: it failed, was refused, or its client gave it up. `next` is to follow.

        A first step that waits keeps its place, so that the steps behind it are not those of the sequence before.
        """
        if turn.is_over:
            return
        sequence = turn.sequence
        if sequence.running is turn:
            if turn.start and not sequence.is_gone:
                sequence.state = None
                self._gone_for(sequence, "its first step was refused or given up")
        elif not turn.start:
            sequence.queue.remove(turn)
        self._over(turn)

    def _over(self, turn: Turn[T]) -> None:
        turn.is_over = True
        if turn.sequence.running is turn:
            turn.sequence.running = None

    # --- time ---------------------------------------------------------------------------------

    @property
    def wakeup_ns(self) -> int | None:
        """When `expire` has something to do, perhaps; None: never, as it is."""
        return self._timers[0][0] if self._timers else None

    def expire(self, now_ns: int) -> list[Turn[T]]:
        """Forget idle sequences. Returns steps whose turn did not come in time; their sequences go on."""
        late: list[Turn[T]] = []
        while self._timers and self._timers[0][0] <= now_ns:
            _, _, found = heapq.heappop(self._timers)
            if isinstance(found, Turn):
                if not found.is_over and found.sequence.running is not found:
                    self.withdraw(found)
                    late.append(found)
            elif not found.is_gone:
                idle_ns = found.used_ns + found.model.idle_ns
                if found.running is not None or found.queue:
                    idle_ns = now_ns + found.model.idle_ns
                if idle_ns > now_ns:
                    self._look_at(idle_ns, found)
                else:
                    self._end(found, IDLE)
                    self._remove(found)
        return late

    def _look_at(self, time_ns: int, found: Turn[T] | Sequence[T]) -> None:
        heapq.heappush(self._timers, (time_ns, next(self._numbers), found))
        if len(self._timers) > self._timers_max:
            self._timers = [each for each in self._timers if not _is_over(each[2])]
            heapq.heapify(self._timers)
            self._timers_max = 2 * len(self._timers) + _TIMERS_LEAST

    # --- what comes and goes ------------------------------------------------------------------

    def drop_model(self, model_id: ModelId) -> list[Turn[T]]:
        """Forget all sequences of a model. Returns the steps that wait; those that run may end."""
        waiting: list[Turn[T]] = []
        for sequence in list(self._by_model.get(model_id, {}).values()):
            self._end(sequence, REPLACED)
            waiting += [turn for turn in sequence.queue if not turn.is_over]
            sequence.queue.clear()
            self._remove(sequence)
        for turn in waiting:
            turn.is_over = True
        return waiting

    def must_start(self, key: SequenceKey, name: str) -> BadRequestError:
        """Make the error of a step whose sequence is not live."""
        # Triton's clients look for these words.
        words = (
            f"inference request for sequence {key.sequence_id} to model '{name}' must specify the START flag on the first"
            " request of the sequence"
        )
        reason = self._gone.get(_public(key, name))
        return BadRequestError(f"{words} ({reason})" if reason else words)

    def _check_room(self, model: SteppedModel) -> None:
        config, num_bytes = self._config, model.num_bytes
        for words, figure, found, most, flag in (
            (
                "sequences of all models",
                "sequences",
                len(self),
                config.sequences_max,
                "--sequences",
            ),
            (
                f"sequences of model {model.name}",
                "sequences",
                self.number_of(model.model_id),
                config.sequences_max if model.most is None else model.most,
                "sequence.max in its config.toml",
            ),
            (
                f"bytes of state of all sequences, {num_bytes} of them of the new one",
                "state_bytes",
                self.num_bytes + num_bytes,
                config.sequence_bytes + 1,
                "--sequence-mib",
            ),
        ):
            if found >= most:
                raise RefusedError(
                    Refusal.OVERLOADED,
                    f"found {found} {words}, expected fewer than {most}; end those that are done (sequence_end), or"
                    f" raise {flag}",
                    figures={figure: found, f"{figure}_max": most - 1},
                )

    def _add(self, key: SequenceKey, model: SteppedModel, now_ns: int) -> Sequence[T]:
        sequence: Sequence[T] = Sequence(key, model, used_ns=now_ns)
        self._sequences[key] = sequence
        self._by_model.setdefault(model.model_id, {})[key] = sequence
        self._hold(sequence, 0)
        self._look_at(now_ns + model.idle_ns, sequence)
        return sequence

    def _end(self, sequence: Sequence[T], reason: str) -> None:
        """A sequence is not live any more, if it was."""
        if sequence.state is not None:
            self.ended[reason] += 1
            self._gone_for(sequence, _WORDS[reason].format(idle=format_ns(sequence.model.idle_ns)))
        sequence.state = None

    def _gone_for(self, sequence: Sequence[T], words: str) -> None:
        key = _public(sequence.key, sequence.model.name)
        self._gone[key] = words
        self._gone.move_to_end(key)
        if len(self._gone) > _GONE_MAX:
            self._gone.popitem(last=False)

    def _remove(self, sequence: Sequence[T]) -> None:
        if sequence.is_gone:
            return
        key = sequence.key
        sequence.is_gone = True
        del self._sequences[key]
        of_model = self._by_model[key.model_id]
        del of_model[key]
        if not of_model:
            del self._by_model[key.model_id]
        self.num_bytes -= sequence.num_bytes
        self._set_beat(sequence, None)

    def _hold(self, sequence: Sequence[T], num_bytes: int) -> None:
        before, sequence.num_bytes = sequence.num_bytes, max(num_bytes, sequence.model.num_bytes)
        self.num_bytes += sequence.num_bytes - before

    def _set_beat(self, sequence: Sequence[T], beat: StreamBeat | None) -> None:
        if sequence.beat is not None:
            self.beats[sequence.beat] -= 1
            if not self.beats[sequence.beat]:
                del self.beats[sequence.beat]
        sequence.beat = beat
        if beat is not None:
            self.beats[beat] += 1

    def check(self) -> Iterator[str]:
        """Say what does not add up, for tests."""
        if self.num_bytes != sum(each.num_bytes for each in self._sequences.values()):
            yield "bytes"
        if sum(self.beats.values()) != sum(
            each.beat is not None for each in self._sequences.values()
        ):
            yield "beats"
        for each in self._sequences.values():
            if each.running is None and (each.queue or each.state is None):
                yield f"{each.key} stands still"


_WORDS: Final = {
    ENDED: "it has ended",
    RESTARTED: "it began again",
    IDLE: "it was forgotten after {idle} without a step",
    REPLACED: "it ended because its model was replaced or removed",
}


def _public(key: SequenceKey, name: str) -> tuple[str, ...]:
    sequence_id = key.sequence_id
    return key.owner, key.tenant, name, f"{type(sequence_id).__name__} {sequence_id}"


def _is_over(found: Turn[T] | Sequence[T]) -> bool:
    return found.is_over if isinstance(found, Turn) else found.is_gone
