"""Batches of tensors that carry their sizes: each request has its own outputs, or the words of its own failure."""

from __future__ import annotations

import re

import numpy as np
import pytest

from clockwright.elements import Array, array_of
from clockwright.errors import ModelError, RefusedError
from clockwright.wire.tensors import TensorSpec
from clockwright.wire.texts import join_texts
from worker.devices.sized_io import run_carrying, run_joined
from worker.models.model_files import carrying

TEXTS, NUMBERS = carrying([TensorSpec("t", "BYTES", ()), TensorSpec("n", "INT64", ())], 64)
OUTPUT_AT = 1 << 20


def run(*texts: str, kept: list[Array] | None = None) -> list[list[str] | str]:
    """Run a request of one text each in a batch that spoils its inputs. Returns the answers."""

    def upper(arrays: list[Array]) -> list[Array]:
        words, numbers = arrays
        if "raise" in words:
            raise ModelError(f"found raise among {len(words)}")
        numbers += 1
        if kept is not None:
            kept.append(numbers)
        made = [{"surrogate": "\ud800", "long": "x" * (1 << 20)}.get(word, word) for word in words]
        return [np.array(made, np.object_)]

    pool = np.zeros(OUTPUT_AT + (4 << 20), np.uint8)
    end = 0
    for number, spec in enumerate((TEXTS, NUMBERS)):
        begin = end = number << 18
        for text in texts:
            content = np.array([7], np.int64).tobytes() if number else join_texts([text])
            raw = spec.header((1,), len(content)) + content
            pool[end : end + len(raw)] = np.frombuffer(raw, np.uint8)
            end += len(raw)
    before = pool[begin:end].copy()
    rows = [1] * len(texts)
    places = [(TEXTS, 0), (NUMBERS, begin)]
    run_carrying(
        pool,
        places,
        [(TEXTS, OUTPUT_AT)],
        rows,
        lambda requests: run_joined(requests, [TEXTS], rows, upper),
    )
    assert np.array_equal(pool[begin:end], before)
    answers: list[list[str] | str] = []
    begin = OUTPUT_AT
    for _ in texts:
        end = TEXTS.end(pool, begin, 1)
        try:
            sized, found = TEXTS.unpack(pool[begin:end].data)
            answers.append(array_of("BYTES", found, sized.row_shape).tolist())
        except RefusedError as error:
            answers.append(str(error))
        begin = end
    return answers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", "FAILED: found raise among 1"),
        ("surrogate", "FAILED: output 't' has text that is no UTF-8: .*"),
        ("long", r"FAILED: output 't' has 1048580 bytes for shape \[1\], expected \d+ at most; .*"),
    ],
)
@pytest.mark.parametrize("others", [(), ("a", "b")])
def test_one_that_fails_says_why_and_leaves_the_others(
    text: str, words: str, others: tuple[str, ...]
) -> None:
    answers = run(*others, text, *others)
    failed = answers.pop(len(others))
    assert isinstance(failed, str)
    assert re.fullmatch(words, failed)
    assert answers == [[each] for each in others * 2]


@pytest.mark.parametrize("texts", [("a",), ("a", "b")])
def test_code_may_keep_and_change_its_arrays(texts: tuple[str, ...]) -> None:
    kept: list[Array] = []
    assert run(*texts, kept=kept) == [[text] for text in texts]
    assert kept[0].tolist() == [8] * len(texts)
