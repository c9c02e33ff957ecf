"""A front's books of open requests: each is told once, and none is forgotten, whatever becomes of controllers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from clockwright.units import RequestId
from clockwright.wire.bulk import Buffer
from controller.front.remote.open_requests import OpenRequests
from controller.port import Told

GRACE_NS = 5


@dataclass(eq=False)
class Request:
    """A client's request, with what it has heard."""

    due_ns: int
    is_over: bool = False
    num_told: int = 0
    #: It must not run twice.
    step: bool = False
    num_sent: int = 0

    def is_step(self) -> bool:
        return self.step

    def done(self) -> bool:
        return self.is_over

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        raise AssertionError("the books of open requests tell nothing but the end")

    def tell(self) -> None:
        self.num_told += 1
        self.is_over = True


class Story(RuleBasedStateMachine):
    """Clients come and go, controllers answer, die and come back, and time goes by."""

    @initialize()
    def begin(self) -> None:
        self.books: OpenRequests[Request] = OpenRequests(grace_ns=GRACE_NS)
        self.now_ns = 0
        self.is_there = False
        self.requests: list[Request] = []
        #: What the controller that is there has to answer.
        self.with_controller: dict[int, Request] = {}
        #: Ids of controllers that are gone, whose answers would be of no account.
        self.before: list[int] = []

    def go_on(self, request: Request) -> None:
        if self.is_there:
            ask_id = self.books.send(request, request.due_ns, "model")
            assert ask_id not in self.with_controller
            assert ask_id not in self.before
            self.with_controller[ask_id] = request
            request.num_sent += 1
        else:
            self.books.hold(request, request.due_ns)

    @rule(slo_ns=st.integers(1, 30), step=st.booleans())
    def come(self, slo_ns: int, step: bool) -> None:
        request = Request(self.now_ns + slo_ns, step=step)
        self.requests.append(request)
        self.go_on(request)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.with_controller:
            ask_id = data.draw(st.sampled_from(sorted(self.with_controller)))
            del self.with_controller[ask_id]
            if (sent := self.books.take(ask_id)) is not None:
                sent[0].tell()

    @rule(data=st.data())
    def answer_of_one_that_is_gone(self, data: st.DataObject) -> None:
        if self.before:
            assert self.books.take(data.draw(st.sampled_from(self.before))) is None

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """The controller takes nothing new."""
        if self.with_controller:
            ask_id = data.draw(st.sampled_from(sorted(self.with_controller)))
            self.with_controller.pop(ask_id).num_sent -= 1
            self.books.put_back(ask_id)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes."""
        waiting = [i for i, request in enumerate(self.requests) if not request.is_over]
        if waiting:
            request = self.requests[data.draw(st.sampled_from(waiting))]
            request.is_over = True
            for ask_id, sent in list(self.with_controller.items()):
                if sent is request:
                    self.books.take(ask_id)

    @rule()
    def die(self) -> None:
        self.is_there = False
        self.before += self.with_controller
        self.with_controller.clear()
        for request in self.books.interrupt():
            if not request.is_over:
                request.tell()

    @rule()
    def be_back(self) -> None:
        self.is_there = True
        for request in self.books.resume():
            self.go_on(request)

    @rule(ns=st.integers(1, 12))
    def wait(self, ns: int) -> None:
        self.now_ns += ns
        for request in self.books.overdue(self.now_ns):
            assert request.due_ns < self.now_ns
            request.tell()

    @invariant()
    def each_is_told_once_at_most(self) -> None:
        assert not Counter(request.num_told > 1 for request in self.requests)[True]

    @invariant()
    def a_step_runs_once_at_most(self) -> None:
        assert all(request.num_sent <= 1 for request in self.requests if request.step)

    @invariant()
    def whoever_waits_is_in_the_books(self) -> None:
        waiting = sum(not request.is_over for request in self.requests)
        assert waiting <= self.books.num_sent + self.books.num_held

    @invariant()
    def nobody_waits_long_beyond_its_time(self) -> None:
        for request in self.requests:
            assert request.is_over or request.due_ns + GRACE_NS + 12 >= self.now_ns

    def teardown(self) -> None:
        self.now_ns += 1000
        for request in self.books.overdue(self.now_ns):
            request.tell()
        assert all(request.is_over for request in self.requests)
        assert self.books.num_sent == self.books.num_held == 0


Story.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStory = Story.TestCase
