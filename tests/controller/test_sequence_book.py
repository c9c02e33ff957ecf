"""The book of sequences, without a clock and without I/O: whose turn it is, what counts, what is refused and forgotten."""

from __future__ import annotations

import pytest

from clockwright.errors import BadRequestError, Refusal, RefusedError
from clockwright.units import ModelId, WorkerId
from controller.stages.sequences.beats import Capacity, StreamBeat, load_with, step_cost
from controller.stages.sequences.book import Book, SequenceKey, SteppedModel, Turn
from controller.stages.sequences.limits import WAITING_MAX, SequenceConfig

MS = 1_000_000
S = 1000 * MS
MODEL = SteppedModel(ModelId("m"), "m", (b"\0" * 8,), 60 * S)


def key(
    sequence_id: int | str = 7, owner: str = "", tenant: str = "", model: str = "m"
) -> SequenceKey:
    return SequenceKey(owner, tenant, ModelId(model), sequence_id)


class Desk:
    """A book, and what came of each step."""

    def __init__(self, **limits: int) -> None:
        self.book: Book[str] = Book(SequenceConfig(**limits))
        self.now_ns = 0
        self.refused: list[str] = []

    def arrive(
        self,
        name: str,
        *,
        start: bool = False,
        end: bool = False,
        to: SequenceKey | None = None,
        model: SteppedModel = MODEL,
        latest_ns: int = 10 * S,
        beat: StreamBeat | None = None,
        refused: RefusedError | None = None,
    ) -> Turn[str]:
        to = to or key()
        turn = self.book.arrive(
            to, model, name, start=start, end=end, latest_ns=latest_ns, beat=beat, refused=refused,
            now_ns=self.now_ns,
        )  # fmt: skip
        self.go_on(turn)
        return turn

    def go_on(self, turn: Turn[str]) -> str | None:
        begun, refused = self.book.next(turn.sequence, self.now_ns)
        self.refused += [str(each.request) for each in refused]
        assert list(self.book.check()) == []
        return None if begun is None else begun.request

    def answer(self, turn: Turn[str], state: bytes) -> int:
        number = self.book.answered(turn, (state,))
        self.go_on(turn)
        return number

    def lose(self, turn: Turn[str]) -> None:
        self.book.withdraw(turn)
        self.go_on(turn)


def test_steps_run_one_at_a_time_in_order_of_arrival() -> None:
    desk = Desk()
    first, second, third = (
        desk.arrive("a", start=True),
        desk.arrive("b"),
        desk.arrive("c", end=True),
    )
    assert first.sequence.running is first
    assert first.sequence.state == (b"\0" * 8,)
    assert desk.answer(first, b"1") == 1
    assert second.sequence.running is second
    assert second.sequence.state == (b"1",)
    desk.lose(second)
    # It did not happen.
    assert third.sequence.state == (b"1",)
    assert desk.answer(third, b"3") == 2
    assert len(desk.book) == desk.book.num_bytes == 0
    with pytest.raises(BadRequestError, match=r"must specify the START flag .* \(it has ended\)"):
        desk.arrive("d")


def test_a_step_behind_the_last_one_is_refused() -> None:
    desk = Desk()
    first = desk.arrive("a", start=True, end=True)
    desk.arrive("b")
    again = desk.arrive("c", start=True)
    desk.answer(first, b"1")
    assert desk.refused == ["b"]
    assert again.sequence.running is again
    assert again.sequence.state == MODEL.initial


@pytest.mark.parametrize("how", ["while it runs", "while it waits", "as it comes"])
def test_steps_behind_a_first_step_that_does_not_count_are_not_the_old_sequences(how: str) -> None:
    desk = Desk()
    old = desk.arrive("old", start=True)
    if how == "as it comes":
        with pytest.raises(RefusedError, match="no time"):
            desk.arrive("new", start=True, refused=RefusedError(Refusal.OVERLOADED, "no time"))
        new = None
    else:
        new = desk.arrive("new", start=True)
    desk.arrive("next")
    if how == "while it waits":
        assert new is not None
        desk.lose(new)
    assert desk.answer(old, b"1") == 1
    if how == "while it runs":
        assert new is not None
        desk.lose(new)
    assert desk.refused == ["next"]
    assert len(desk.book) == 0
    with pytest.raises(BadRequestError, match="its first step was refused or given up"):
        desk.arrive("later")


def test_a_first_step_that_is_refused_as_it_comes_ends_what_is_idle() -> None:
    desk = Desk()
    old = desk.arrive("old", start=True)
    desk.answer(old, b"1")
    with pytest.raises(RefusedError):
        desk.arrive("new", start=True, refused=RefusedError(Refusal.OVERLOADED, "no time"))
    assert len(desk.book) == 0


def test_a_first_step_begins_anew_when_its_turn_comes() -> None:
    desk = Desk()
    old = desk.arrive("old", start=True)
    more, new = desk.arrive("more"), desk.arrive("new", start=True)
    desk.answer(old, b"1")
    assert more.sequence.state == (b"1",)
    desk.answer(more, b"2")
    assert new.sequence.state == MODEL.initial
    assert desk.answer(new, b"3") == 1
    assert desk.book.ended == {"restart": 1}


def test_nothing_crosses_between_callers_tenants_and_kinds_of_ids() -> None:
    desk = Desk()
    keys = [key(), key("7"), key(owner="a"), key(tenant="a"), key(model="m@2")]
    turns = [desk.arrive("x", start=True, to=each) for each in keys]
    for number, turn in enumerate(turns):
        desk.answer(turn, b"%d" % number)
    assert [turn.sequence.state for turn in turns] == [(b"%d" % n,) for n in range(5)]
    assert len(desk.book) == 5


def test_a_step_whose_turn_does_not_come_is_refused_and_an_idle_sequence_forgotten() -> None:
    desk = Desk()
    first = desk.arrive("a", start=True)
    late, after = desk.arrive("late", latest_ns=5 * S), desk.arrive("after", latest_ns=100 * S)
    assert desk.book.wakeup_ns == 5 * S
    assert desk.book.expire(5 * S - 1) == []
    assert desk.book.expire(5 * S) == [late]
    desk.now_ns = 70 * S
    # It is not idle while a step runs.
    assert desk.book.expire(desk.now_ns) == []
    desk.answer(first, b"1")
    assert after.sequence.running is after
    desk.answer(after, b"2")
    assert desk.book.expire(desk.now_ns + 60 * S - 1) == []
    assert len(desk.book) == 1
    desk.book.expire(desk.now_ns + 60 * S)
    assert (len(desk.book), desk.book.num_bytes) == (0, 0)
    assert desk.book.ended == {"idle": 1}
    with pytest.raises(BadRequestError, match=r"it was forgotten after 60\.00 s without a step"):
        desk.arrive("b")


def test_a_model_that_goes_ends_its_sequences_and_what_runs_may_end() -> None:
    desk = Desk()
    runs, waits = desk.arrive("a", start=True), desk.arrive("b")
    assert desk.book.drop_model(MODEL.model_id) == [waits]
    assert desk.answer(runs, b"1") == 1
    assert len(desk.book) == desk.book.num_bytes == 0
    with pytest.raises(BadRequestError, match="its model was replaced"):
        desk.arrive("c")


@pytest.mark.parametrize(
    ("limits", "most", "words"),
    [
        ({"sequences_max": 2}, None, "found 2 sequences of all models, .* or raise --sequences"),
        (
            {},
            2,
            "found 2 sequences of model m, expected fewer than 2; .* sequence.max in its config",
        ),
        ({"sequence_bytes": 23}, None, "found 24 bytes of state .* raise --sequence-mib"),
    ],
)
def test_what_has_no_room_is_refused_at_its_start(
    limits: dict[str, int], most: int | None, words: str
) -> None:
    desk = Desk(**limits)
    model = SteppedModel(ModelId("m"), "m", MODEL.initial, 60 * S, most)
    one = desk.arrive("a", start=True, to=key(1), model=model)
    desk.arrive("b", start=True, to=key(2), model=model)
    with pytest.raises(RefusedError, match=words) as caught:
        desk.arrive("c", start=True, to=key(3), model=model)
    assert caught.value.refusal is Refusal.OVERLOADED
    desk.arrive("d", start=True, to=key(2), model=model)
    desk.lose(one)
    desk.arrive("e", start=True, to=key(3), model=model)


def test_a_state_that_grows_counts_as_it_is() -> None:
    desk = Desk(sequence_bytes=30)
    one = desk.arrive("a", start=True, to=key(1))
    assert desk.book.lacks_room(one, (b"s" * 30,)) is None
    desk.answer(one, b"s" * 22)
    assert desk.book.num_bytes == 22
    two = desk.arrive("b", start=True, to=key(2))
    with pytest.raises(RefusedError, match=r"found 38 bytes of state .* raise --sequence-mib"):
        desk.arrive("c", start=True, to=key(3))
    # A step that leaves too much does not count.
    refused = desk.book.lacks_room(two, (b"s" * 9,))
    assert refused is not None
    assert refused.figures == {"state_bytes": 31, "state_bytes_max": 30}
    assert desk.book.lacks_room(two, (b"s",)) is None
    desk.lose(two)
    desk.arrive("d", start=True, to=key(1))
    assert desk.book.num_bytes == 8
    desk.book.drop_model(ModelId("m"))
    assert desk.book.num_bytes == 0


def test_so_many_steps_wait_and_no_more() -> None:
    desk = Desk()
    desk.arrive("a", start=True)
    for number in range(WAITING_MAX):
        desk.arrive(str(number))
    with pytest.raises(RefusedError, match=f"found {WAITING_MAX} steps that wait for their turn"):
        desk.arrive("more")
    for _ in range(3):
        with pytest.raises(RefusedError):
            desk.arrive("new", start=True)
    assert len(desk.book.find(key()).queue) == WAITING_MAX + 1  # type: ignore[union-attr]


def test_timers_of_what_is_over_do_not_pile_up() -> None:
    desk = Desk()
    for _ in range(10_000):
        desk.answer(desk.arrive("a", start=True, end=True), b"1")
    assert len(desk.book._timers) < 3000


# --- beats --------------------------------------------------------------------------------------

V, OTHER, ELSEWHERE = map(ModelId, ("voice", "other", "elsewhere"))
W = [WorkerId(f"w{number}") for number in range(3)]
VOICE = StreamBeat(V, 32 * MS, 32 * MS)
ONE = {V: Capacity({1: 2 * MS, 4: 4 * MS, 16: 12 * MS, 32: 20 * MS}, (W[0],))}


def test_the_batch_that_takes_least_per_step_counts_if_two_of_them_fit() -> None:
    capacity = ONE[V]
    assert step_cost(capacity, VOICE, 1) == (2 * MS, 1)
    assert step_cost(capacity, VOICE, 4) == (1 * MS, 4)
    # Two of 20 ms do not fit into 32.
    assert step_cost(capacity, VOICE, 100) == (750_000, 16)
    assert step_cost(capacity, StreamBeat(V, 32 * MS, 3 * MS), 100) == (0, 0)


def test_streams_are_admitted_up_to_a_share_of_the_time() -> None:
    assert load_with(VOICE, {}, ONE).share == pytest.approx(2 / 32)
    assert load_with(VOICE, {VOICE: 31}, ONE).share == pytest.approx(32 * 0.75 / 32)
    two = {V: Capacity(ONE[V].exec_ns, (W[0], W[1]))}
    assert load_with(VOICE, {VOICE: 31}, two).share == pytest.approx(32 * 0.75 / 32 / 2)
    assert load_with(StreamBeat(V, MS, MS), {}, ONE).share == float("inf")
    assert load_with(VOICE, {}, {}).share == float("inf")


def test_streams_of_other_models_count_where_they_run() -> None:
    capacities = {
        V: Capacity({1: 2 * MS}, (W[0], W[1])),
        OTHER: Capacity({1: 8 * MS}, (W[1],)),
        ELSEWHERE: Capacity({1: 8 * MS}, (W[2],)),
    }
    live = {StreamBeat(OTHER, 16 * MS, 16 * MS): 1, StreamBeat(ELSEWHERE, 16 * MS, 16 * MS): 1}
    assert load_with(VOICE, live, capacities).share == pytest.approx((2 / 32 + 8 / 16) / 2)
