"""Requests that are in vain, refused where they are read; and the same refused the long way."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clockwright.units import NS_PER_MS, RequestId
from clockwright.v1 import inference_pb2 as pb
from controller.front.admission.entrance import Entrance
from controller.front.services.early_refusals import EarlyRefusals, WordsKept
from controller.front.services.inference import InferenceService
from controller.telemetry.tables import Counts
from tests.kit.front_end import FrontEnd, FrontEndInThread, serving_in_thread
from tests.kit.raw_http2 import End, RawClient

OVERLOADED = 8
# Runs for 2 s at any batch size, so that an SLO of 3 s leaves time for one batch.
MODEL, SLO_MS = "long-1", 3000
LIKE = "which was like this one"


def question(slo_ms: int = SLO_MS, request_id: str = "", **terms: str | float) -> bytes:
    request = pb.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, value in terms.items():
        kind = "string_param" if isinstance(value, str) else "double_param"
        setattr(request.parameters[name], kind, value)
    request.parameters["slo_ms"].int64_param = slo_ms
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(struct.pack("<3f", 1, 2, 3))
    return request.SerializeToString()


class Overloaded:
    """A server whose one lane is taken, on a clock that stands still between steps."""

    def __init__(self, server: FrontEndInThread, client: RawClient, clock: list[int]) -> None:
        self.server, self.client, self._clock = server, client, clock

    def ask(self, *questions: bytes) -> list[End]:
        """Ask all at once."""
        return self.client.wait([self.client.infer(each) for each in questions])

    def wait_ms(self, duration_ms: int) -> None:
        self._clock[0] += duration_ms * NS_PER_MS

    def counts(self) -> Counts:
        """Outcomes of the model's requests."""

        def find(front: FrontEnd) -> Counts:
            entry = front.catalogue.find(MODEL)
            assert entry is not None
            return front.runtime.telemetry.by_model[entry.model_id]

        return self.server.do(find)


@contextmanager
def overloaded(tmp_path: Path) -> Iterator[Overloaded]:
    clock = [time.monotonic_ns()]
    with (
        serving_in_thread(tmp_path, clock=lambda: clock[0]) as server,
        RawClient(server.address) as client,
    ):
        server.do(lambda front: front.worker.slow.add(MODEL))
        runs = client.infer(question())
        server.until(lambda front: bool(front.worker.held))
        case = Overloaded(server, client, clock)
        [first] = case.ask(question())
        assert first.status == OVERLOADED
        assert LIKE not in first.text
        yield case
        server.do(lambda front: front.worker.release())
        client.wait([runs])


def test_requests_in_vain_are_refused_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with overloaded(tmp_path) as case:
        with monkeypatch.context() as patched:
            patched.setattr(InferenceService, "infer", None)
            ends = case.ask(*[question()] * 100)
        assert {end.status for end in ends} == {OVERLOADED}
        assert {LIKE in end.text for end in ends} == {True}
        # Each counts for its model; and what is named in the words can be explained.
        assert case.counts().unanswered == {"OVERLOADED": 101}
        number = RequestId(int(ends[0].text.split("found for request ")[1].split(",")[0]))
        found = case.server.do(lambda front: front.runtime.past.find_refused(number))
        assert found is not None
        assert (found.outcome, found.slo_ns) == ("OVERLOADED", SLO_MS * NS_PER_MS)


def test_the_words_are_made_anew_by_the_next_request_some_time_later(tmp_path: Path) -> None:
    with overloaded(tmp_path) as case:
        case.wait_ms(11)
        ends = case.ask(question(), question(), question())
        assert [LIKE in end.text for end in ends].count(False) == 1
        assert {end.status for end in ends} == {OVERLOADED}


def test_those_refused_the_long_way_share_words_that_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with overloaded(tmp_path) as case:
        monkeypatch.setattr(EarlyRefusals, "find", lambda *_: None)
        first, *_, last = case.ask(*[question()] * 10)
        assert (first.status, first.text) == (last.status, last.text)
        case.wait_ms(11)
        ends = case.ask(*[question()] * 10)
        assert {end.status for end in ends} == {OVERLOADED}
        assert ends[0].text != first.text
        # Each has a number, and can be explained.
        assert case.counts().unanswered == {"OVERLOADED": 21}


def test_a_busy_loop_looks_at_few_of_those_that_it_lets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    look: Callable[..., WordsKept | None] = EarlyRefusals.find

    def find(*asked: object) -> WordsKept | None:
        words = look(*asked)
        found.append(words is not None)
        return words

    with overloaded(tmp_path) as case:
        monkeypatch.setattr(EarlyRefusals, "find", find)
        monkeypatch.setattr(Entrance, "has_time", lambda *_, judged=False: judged)
        monkeypatch.setattr(Entrance, "may_enter", lambda *_: True)
        case.ask(*[question()] * 20)
        assert True in found
        assert False not in found
        found.clear()
        runs = [case.client.infer(question(slo_ms=600_000)) for _ in range(100)]
        case.server.do(lambda front: front.worker.release())
        assert {end.status for end in case.client.wait(runs)} == {0}
        assert 0 < len(found) < 30
        assert True not in found


def test_who_has_more_time_is_served(tmp_path: Path) -> None:
    with overloaded(tmp_path) as case:
        runs = case.client.infer(question(slo_ms=9000))
        assert LIKE in case.ask(question())[0].text
        case.server.do(lambda front: front.worker.release())
        assert case.client.wait([runs])[0].status == 0


def test_who_comes_when_there_is_time_again_is_served(tmp_path: Path) -> None:
    with overloaded(tmp_path) as case:
        case.server.do(lambda front: front.worker.release())
        assert case.ask(question())[0].status == 0


@pytest.mark.parametrize(
    "asked",
    [
        question(request_id="mine"),
        question(tenant="gold"),
        question(weight=2.0),
        question(decide_within_ms=500.0),
    ],
    ids=["name", "tenant", "weight", "certainty"],
)
def test_a_request_that_says_more_of_itself_takes_the_long_way(
    asked: bytes, tmp_path: Path
) -> None:
    with overloaded(tmp_path) as case:
        ends = [case.ask(asked)[0] for _ in range(2)]
        assert {end.status for end in ends} == {OVERLOADED}
        assert not any(LIKE in end.text for end in ends)
