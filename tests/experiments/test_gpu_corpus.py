"""Networks of the corpus compile for torch, and answer on the processor as onnxruntime does."""

from __future__ import annotations

import pytest

from experiments.gpu import corpus
from experiments.gpu.corpus.share import TOLERANCE, try_network

#: Networks that need torch to have an operator that it does not.
REFUSED = {"autoencoder.int8_qoperator": "has no operator com.microsoft.QGemm"}


#: Networks of all kinds, that have most of the corpus's operators together.
SAMPLE = (
    *("bert.script", "deberta_v2.script", "gpt2.dynamo", "llama.dynamo", "denoiser.newest"),
    *("experts.dynamo", "segformer.script", "yolo.dynamo", "style.script", "table.script"),
    *("lstm_both_ways.script", "gru.dynamo", "zfnet.int8_qdq", "transformer_encoder.int8_dynamic"),
)


def _check(name: str) -> None:
    outcome = try_network(name)
    assert outcome.refusal == ""
    assert outcome.difference <= TOLERANCE


@pytest.mark.parametrize("name", SAMPLE)
def test_a_network_answers_as_onnxruntime_does(name: str) -> None:
    _check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*corpus.names()} - {*REFUSED, *SAMPLE}))
def test_every_other_network_answers_as_onnxruntime_does(name: str) -> None:
    _check(name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_network_says_which_operator_is_missing(name: str) -> None:
    assert REFUSED[name] in try_network(name).refusal


def test_weights_are_the_same_whenever_they_are_drawn() -> None:
    name = "bert.script"
    assert corpus.network(name) == corpus.network(name)
    assert not any(corpus.is_empty(tensor) for tensor in corpus.tensors(corpus.network(name)))
    assert any(corpus.is_empty(tensor) for tensor in corpus.tensors(corpus.graph(name)))
