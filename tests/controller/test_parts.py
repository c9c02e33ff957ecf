"""Requests of more rows than a batch has, cut and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from typing_extensions import override

from clockwright.errors import Refusal
from clockwright.units import ModelId, RequestId, WorkerId
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec, Variable
from controller.models.entry import Entry
from controller.models.model_folder import ModelFolder, ModelSettings
from controller.port import Answered, Ask, Refused, Sink, Told
from controller.selection.live_application import LiveApplication
from controller.selection.parts import PartStage, most_rows

X = TensorSpec("x", "INT64", (2, 3), 1)
SETTING = TensorSpec("setting", "INT64", (), None)


class Asked:
    """The next stage, and the sink of a client: keeps what it is asked and told."""

    def __init__(self) -> None:
        self.asked: dict[RequestId, tuple[Ask, Sequence[Buffer], Sink]] = {}
        self.withdrawn: list[RequestId] = []
        self.heard: list[tuple[RequestId, Told, Sequence[Buffer]]] = []

    def ask(
        self, subject: Entry | LiveApplication, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> RequestId:
        request_id = RequestId(len(self.asked) + 1)
        self.asked[request_id] = ask, inputs, sink
        return request_id

    def withdraw(self, request_id: RequestId) -> None:
        self.withdrawn.append(request_id)

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        self.heard.append((request_id, told, outputs))


def model(most: int = 2) -> Entry:
    entry = Entry(ModelId("m"), "m", None, inputs=(X, SETTING), outputs=(X, SETTING))
    entry.ready_on[WorkerId("w")] = (1, most)
    return entry


def test_rows_are_cut_along_their_dimension_and_joined_in_their_order() -> None:
    stage = Asked()
    parts = PartStage(stage)
    x = np.arange(30, dtype=np.int64).reshape(2, 5, 3)
    inputs = x.tobytes(), np.int64(7).tobytes()
    number = parts.ask(model(), Ask(0, 5, 0, 10, name="mine"), inputs, stage)
    assert [(ask.rows, ask.name) for ask, _, _ in stage.asked.values()] == [
        (2, "mine"),
        (2, ""),
        (1, ""),
    ]
    assert stage.asked[RequestId(2)][1] == [x[:, 2:4].tobytes(), inputs[1]]
    for request_id in (3, 1, 2):
        _, cut, sink = stage.asked[RequestId(request_id)]
        assert not stage.heard
        sink.told(RequestId(request_id), Answered(request_id), cut)
    [(heard, told, outputs)] = stage.heard
    assert heard == number
    assert isinstance(told, Answered)
    assert told.expected_departure_ns == 3
    assert list(outputs) == list(inputs)
    parts.withdraw(number)
    assert stage.withdrawn == [number], "what is over is the next stage's to know"


@pytest.mark.parametrize("by_client", [False, True], ids=["refused", "withdrawn"])
def test_a_request_that_ends_early_withdraws_its_other_parts(by_client: bool) -> None:
    stage = Asked()
    parts = PartStage(stage)
    number = parts.ask(model(), Ask(0, 6, 0, 10), (bytes(288), bytes(8)), stage)
    stage.asked[RequestId(1)][2].told(RequestId(1), Answered(1), (bytes(96), bytes(8)))
    if by_client:
        parts.withdraw(number)
        assert (stage.withdrawn, stage.heard) == ([2, 3], [])
        return
    refused = Refused(Refusal.INFEASIBLE, {})
    stage.asked[RequestId(2)][2].told(RequestId(2), refused, ())
    # The same event may still tell of the third part.
    stage.asked[RequestId(3)][2].told(RequestId(3), refused, ())
    assert (stage.withdrawn, stage.heard) == ([3], [(number, refused, ())])


class Failing(Asked):
    """Takes one request, and fails at the second."""

    @override
    def ask(
        self, subject: Entry | LiveApplication, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> RequestId:
        if self.asked:
            raise MemoryError
        return super().ask(subject, ask, inputs, sink)


def test_a_part_that_cannot_be_asked_withdraws_those_before_it() -> None:
    stage = Failing()
    parts = PartStage(stage)
    with pytest.raises(MemoryError):
        parts.ask(model(), Ask(0, 6, 0, 10), (bytes(288), bytes(8)), stage)
    assert stage.withdrawn == [1]
    _, cut, sink = stage.asked[RequestId(1)]
    sink.told(RequestId(1), Answered(1), cut)
    assert not stage.heard


def test_what_fits_into_a_batch_passes_as_it_is() -> None:
    stage = Asked()
    parts = PartStage(stage)
    ask, inputs = Ask(0, 2, 0, 10), (bytes(96), bytes(8))
    number = parts.ask(model(), ask, inputs, stage)
    assert stage.asked[number] == (ask, inputs, stage)
    parts.withdraw(number)
    assert stage.withdrawn == [number]


def test_the_most_rows_are_sixteen_batches_if_the_answer_is_not_too_large() -> None:
    entry = model()
    assert most_rows(entry, 2) == 32
    assert most_rows(entry, 1) == 1, "the file has one row"
    entry.one_by_one = "rows meet"
    assert most_rows(entry, 1) == 16
    text = TensorSpec("text", "BYTES", (2,), vary=Variable(64))
    entry.inputs = (text, SETTING)
    assert most_rows(entry, 1) == 16
    entry.inputs = (SETTING, replace(text, axis=1))
    assert most_rows(entry, 1) == 1, "texts are cut in the first dimension only"
    entry.outputs = (TensorSpec("y", "UINT8", (10 << 20,)),)
    entry.inputs = (X, SETTING)
    assert most_rows(entry, 2) == 6
    settings = ModelSettings(max_rows=5)
    entry.folder = ModelFolder(name="m", version="1", files=(), settings=settings)
    assert most_rows(entry, 2) == 5
    assert most_rows(entry, 1) == 5
