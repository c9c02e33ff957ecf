"""The books of a front and of a worker that send each other tensors, under every order in which their links deliver.

A front, a controller and a worker, each with its real books, and queues for links between them. A link keeps the order
of its own messages only. The one between front and worker breaks, and swallows what is on it; clients leave; inputs
come too late. Whatever happens, a request is answered once, with what was made of its own inputs, and in the end
nobody keeps anything.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from clockwright.units import ActionId, ModelId
from clockwright.wire.actions import FromFronts, Infer
from controller.front.remote.fed_requests import FedRequests, Feeding
from worker.core.front_inputs import FrontInputs, WholeInfer

FRONT, WORKER = 7, 3
NUM_REQUESTS = 12
NUM_EVENTS = 150


INPUT_BYTES = 8


def inputs_of(number: int) -> bytes:
    return number.to_bytes(INPUT_BYTES, "big")


def made_of(inputs: bytes) -> bytes:
    return inputs[::-1]


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ns = 0
        self.links: dict[str, deque[Callable[[], None]]] = {
            name: deque() for name in ("c2w", "c2f", "w2c", "f2c", "f2w", "w2f")
        }
        self.is_connected = True
        # The front.
        self.fed = FedRequests()
        self.inputs: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self.withdrawn: set[int] = set()
        self.told_asks: set[int] = set()
        self.last_ask = 0
        #: What a client asked, by the ask that is under way.
        self.question: dict[int, int] = {}
        # The controller.
        self.pending: list[int] = []
        self.actions: dict[int, list[int]] = {}
        self.last_action = 0
        # The worker.
        self.books = FrontInputs()
        self.whole: list[WholeInfer] = []

    def post(self, link: str, deliver: Callable[[], None]) -> None:
        self.links[link].append(deliver)

    # --- clients and the front ----------------------------------------------------------------

    def ask(self, number: int) -> None:
        self.last_ask = ask_id = self.last_ask + 1
        self.question[ask_id] = number
        self.inputs[ask_id] = inputs_of(number)
        self.post("f2c", lambda: self.pending.append(ask_id))

    def withdraw(self) -> None:
        if self.question:
            ask_id = self.rng.choice(list(self.question))
            self.withdrawn.add(self.question[ask_id])
            self.let_go(ask_id)
            self.post("f2c", lambda: self.take_withdrawal(ask_id))

    def let_go(self, ask_id: int) -> int:
        del self.inputs[ask_id]
        self.fed.forget(ask_id)
        return self.question.pop(ask_id)

    def feed(self, ask_id: int, feeding: Feeding) -> None:
        if ask_id not in self.question:
            self.send_inputs(feeding, None)
            return
        self.fed.feed(ask_id, feeding)
        self.send_inputs(feeding, [self.inputs[ask_id]])

    def send_inputs(self, feeding: Feeding, tensors: list[bytes] | None) -> None:
        _, action_id, index = feeding
        if self.is_connected:
            self.post("f2w", lambda: self.take_inputs(FRONT, action_id, index, tensors))
        else:
            self.post("f2c", lambda: self.hand_on(action_id, index, tensors))

    def told(self, ask_id: int, feeding: Feeding) -> None:
        if ask_id not in self.question:
            return
        if not self.fed.told(ask_id, feeding):
            self.ask(self.let_go(ask_id))
            return
        self.told_asks.add(ask_id)
        if (outputs := self.fed.outputs(ask_id)) is not None:
            self.answer(ask_id, bytes(outputs[0]))

    def outputs_came(self, feeding: Feeding, outputs: bytes) -> None:
        if (ask_id := self.fed.outputs_came(feeding, [outputs])) is not None:
            assert ask_id in self.told_asks, "an answer of which the controller has not told"
            self.answer(ask_id, outputs)

    def answer(self, ask_id: int, outputs: bytes) -> None:
        number = self.let_go(ask_id)
        assert number not in self.answers, "an answer twice"
        assert outputs == made_of(inputs_of(number)), "an answer that is another's"
        self.answers[number] = outputs

    def disconnect(self) -> None:
        if not self.is_connected:
            return
        self.is_connected = False
        self.links["f2w"].clear()
        self.links["w2f"].clear()
        fed, lost = self.fed.broke(WORKER)
        for ask_id, feeding in fed:
            self.send_inputs(feeding, [self.inputs[ask_id]])
        for ask_id in lost:
            self.ask(self.let_go(ask_id))

    # --- the controller -----------------------------------------------------------------------

    def take_withdrawal(self, ask_id: int) -> None:
        if ask_id in self.pending:
            self.pending.remove(ask_id)

    def act(self) -> None:
        if not self.pending:
            return
        count = self.rng.randint(1, min(3, len(self.pending)))
        asks, self.pending = self.pending[:count], self.pending[count:]
        self.last_action = action_id = self.last_action + 1
        self.actions[action_id] = asks
        action = Infer(
            action_id=ActionId(action_id),
            model_id=ModelId("m"),
            batch_size=4,
            rows=(1,) * count,
            earliest_ns=0,
            latest_ns=self.now_ns + 10,
            expected_duration_ns=1,
        )
        lengths = dict.fromkeys(range(count), INPUT_BYTES)
        fronts = FromFronts((FRONT,) * count, lengths)
        self.post("c2w", lambda: self.take_action(action, fronts))
        for index, ask_id in enumerate(asks):
            self.post("c2f", lambda a=ask_id, i=index: self.feed(a, (WORKER, action_id, i)))  # type: ignore[misc]

    def hand_on(self, action_id: int, index: int, tensors: list[bytes] | None) -> None:
        if action_id in self.actions:
            self.post("c2w", lambda: self.take_inputs(None, action_id, index, tensors))

    def take_result(self, action_id: int, outputs: list[bytes | None] | None) -> None:
        asks = self.actions.pop(action_id)
        if outputs is None:  # It was refused, and its requests wait again.
            self.pending += asks
            return
        for index, ask_id in enumerate(asks):
            own = outputs[index]
            feeding = WORKER, action_id, index
            if own is None:
                self.post("c2f", lambda a=ask_id, f=feeding: self.told(a, f))  # type: ignore[misc]
            else:
                self.post("c2f", lambda a=ask_id, o=own: self.told_inline(a, o))  # type: ignore[misc]

    def told_inline(self, ask_id: int, outputs: bytes) -> None:
        if ask_id in self.question:
            self.answer(ask_id, outputs)

    # --- the worker ---------------------------------------------------------------------------

    def take_action(self, action: Infer, fronts: FromFronts) -> None:
        self.run_when(self.books.take_action(action, [b""] * len(action.rows), fronts))

    def take_inputs(
        self, front: int | None, action_id: int, index: int, tensors: list[bytes] | None
    ) -> None:
        self.run_when(self.books.take_inputs(front, action_id, index, tensors))

    def run_when(self, whole: WholeInfer | None) -> None:
        if whole is not None:
            self.whole.append(whole)

    def finish(self) -> None:
        if not self.whole:
            return
        whole = self.whole.pop(self.rng.randrange(len(self.whole)))
        action_id = whole.action.action_id
        outputs: list[bytes | None] = []
        for index, inputs in enumerate(whole.payload):
            made = made_of(bytes(inputs))
            if self.is_connected:
                feeding = WORKER, action_id, index
                self.post("w2f", lambda f=feeding, m=made: self.outputs_came(f, m))  # type: ignore[misc]
                outputs.append(None)
            else:
                outputs.append(made)
        self.post("w2c", lambda: self.take_result(action_id, outputs))

    def pass_time(self) -> None:
        self.now_ns += 4
        for action in self.books.overdue(self.now_ns):
            self.post("w2c", lambda a=action.action_id: self.take_result(a, None))  # type: ignore[misc]

    # --- events -------------------------------------------------------------------------------

    def deliver(self) -> None:
        waiting = [queue for queue in self.links.values() if queue]
        if waiting:
            self.rng.choice(waiting).popleft()()

    def connect(self) -> None:
        self.is_connected = True


@given(st.integers(0, 1 << 32))
def test_each_request_is_answered_once_and_rightly_in_whatever_order_messages_come(
    seed: int,
) -> None:
    world = World(rng := random.Random(seed))
    numbers = iter(range(NUM_REQUESTS))
    events = [
        *[world.deliver] * 8,
        *[world.act, world.finish] * 2,
        *(world.withdraw, world.disconnect, world.connect, world.pass_time),
    ]
    for _ in range(NUM_EVENTS):
        if rng.random() < 0.15 and (number := next(numbers, None)) is not None:
            world.ask(number)
        rng.choice(events)()
    for number in numbers:
        world.ask(number)
    world.connect()
    for _ in range(100):
        if not (world.question or world.actions or any(world.links.values())):
            break
        # The word that nobody waits may have been swallowed: then the window's end ends the wait.
        for event in ([world.deliver] * 100, [world.act], [world.finish] * 10, [world.pass_time]):
            for each in event:
                each()
    assert not world.question
    assert not world.actions
    assert world.answers.keys() | world.withdrawn == set(range(NUM_REQUESTS))
    assert not world.inputs
    assert not world.fed.fed
    assert not world.fed.awaited
    assert world.books.num_waiting == 0
    assert world.books.early_bytes(FRONT) == 0
