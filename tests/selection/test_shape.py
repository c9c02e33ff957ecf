"""Tensors of applications whose models have text: what members say is read behind sizes, and answers get theirs."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from clockwright.wire.tensors import TensorSpec, Variable
from clockwright.wire.texts import cut_texts, join_texts
from controller.selection.core.application import Application
from controller.selection.core.combination import Rule
from controller.selection.core.query import Combined, Prediction
from controller.selection.core.shape import LABEL_BYTES_MAX, MisfitError, reading_of, shape_of


def carrying(name: str, datatype: str, *row_shape: int, room: int = 600) -> TensorSpec:
    return TensorSpec(name, datatype, row_shape, vary=Variable(room))


INPUTS = (carrying("x", "BYTES", 1),)
SCORES = carrying("probabilities", "FP32", 2)
LABEL = carrying("label", "BYTES")


def application(rule: Rule) -> Application:
    return Application(name="app", models=("m",), policy="exp4", combination=rule)


def tensor(spec: TensorSpec, rows: int, content: bytes) -> bytes:
    return spec.header(spec.shape(rows), len(content)) + content


@pytest.mark.parametrize("rule", [Rule.AVERAGE, Rule.MEAN])
def test_numbers_are_read_and_answered_with_sizes(rule: Rule) -> None:
    shape = shape_of(application(rule), INPUTS, (SCORES,))
    reading = reading_of(application(rule), shape, INPUTS, (SCORES,))
    said = reading.read([tensor(SCORES, 2, struct.pack("<4f", 0.25, 0.75, 1, 0))], 2)
    assert said is not None
    assert [each.probabilities for each in said] == [(0.25, 0.75), (1, 0)]
    rows = [
        shape.encode(Combined(each.label, 1.0, probabilities=each.probabilities)) for each in said
    ]
    unpacked = [spec.unpack(raw) for spec, raw in zip(shape.outputs, shape.join(rows), strict=True)]
    assert [spec.row_shape for spec, _ in unpacked] == [(2,), (2, 2)][-len(unpacked) :]
    assert struct.unpack("<4f", unpacked[-1][1]) == (0.25, 0.75, 1, 0)


def test_labels_that_are_texts_are_read_and_answered() -> None:
    shape = shape_of(application(Rule.VOTE), INPUTS, (LABEL, SCORES))
    reading = reading_of(application(Rule.VOTE), shape, INPUTS, (LABEL, SCORES))
    scores = tensor(SCORES, 2, bytes(16))
    said = reading.read([tensor(LABEL, 2, join_texts(["cat", "bär"])), scores], 2)
    assert said == [Prediction("cat"), Prediction("bär")]
    [joined] = shape.join([shape.encode(Combined(each.label, 1.0)) for each in said])
    assert cut_texts(shape.outputs[0].unpack(joined)[1]) == [b"cat", "bär".encode()]
    # Bytes that JSON cannot say win no vote.
    assert reading.read([tensor(LABEL, 2, join_texts(["cat", b"\xff"])), scores], 2) is None
    # The answer of a policy that thinks of numbers does not fit.
    for odd, words in (
        (3, "label: found 3, expected a text"),
        ("\ud800", "surrogates not allowed"),
        ("x" * 257, "label: found 257 bytes, expected 256 at most"),
    ):
        with pytest.raises(ValueError, match=words):
            shape.encode(Combined(odd, 1.0))
    assert reading.read([LABEL.failed("no such category"), scores], 2) is None
    long = "x" * (LABEL_BYTES_MAX + 1)
    assert reading.read([tensor(LABEL, 2, join_texts(["a", long])), scores], 2) is None


def test_models_with_other_rooms_for_text_do_not_fit_together() -> None:
    rule = application(Rule.ONE)
    shape = shape_of(rule, INPUTS, (LABEL,))
    usual = replace(LABEL, vary=Variable(600, usual_bytes=40))
    assert reading_of(rule, shape, INPUTS, (usual,)).label == (0, None)
    other = (carrying("x", "BYTES", 1, room=700),)
    with pytest.raises(MisfitError, match=r"found room for \[700\] bytes .* the same batch_sizes"):
        reading_of(rule, shape, other, (LABEL,))


def test_tensors_of_open_sizes_are_described_by_rows_and_what_is_combined_is_fixed() -> None:
    opened = replace(LABEL, row_shape=(-1,), vary=Variable(600, ("n",), (9,), 3))
    inputs = tuple(replace(each, vary=Variable(600, unit=3)) for each in INPUTS)
    shape = shape_of(application(Rule.ONE), (opened,), (opened,))
    # The largest row is three rows of work.
    assert shape.inputs[0].vary == Variable(1800, ("n",), (9,))
    assert shape.outputs[0].vary == Variable(1800, ("n",), (9,))
    with pytest.raises(MisfitError, match=r"found output label BYTES \[-1\].*, expected one"):
        shape_of(application(Rule.VOTE), inputs, (opened,))
    numbers = replace(SCORES, row_shape=(-1,), vary=Variable(600, ("n",), (9,), 3))
    with pytest.raises(MisfitError, match="expected numbers of"):
        shape_of(application(Rule.MEAN), inputs, (numbers,))
