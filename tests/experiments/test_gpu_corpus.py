"""Networks of the corpus compile for torch, and answer on the processor as onnxruntime does."""

from __future__ import annotations

import ast

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


def test_the_archive_holds_what_the_exporter_writes() -> None:
    table = _assigned("networks.py")["NETWORKS"]
    assert isinstance(table, ast.Dict)
    networks = [ast.literal_eval(key) for key in table.keys if key]
    lists = _assigned("export.py")
    dynamo_only, dynamo, newest, quantised = (
        ast.literal_eval(lists[name])
        for name in ("_DYNAMO_ONLY", "_DYNAMO", "_NEWEST", "_QUANTISED")
    )
    assert set(corpus.names()) == {
        *(f"{name}.script" for name in networks if name != dynamo_only),
        *(f"{name}.dynamo" for name in (*dynamo.split(), dynamo_only)),
        *(f"{name}.newest" for name in newest),
        *(f"{name}.{how}" for name, how in quantised.items()),
    }


def _assigned(file: str) -> dict[str, ast.expr]:
    """Read what a module assigns, because importing it needs packages that the tests do without."""
    module = ast.parse(corpus.ARCHIVE.with_name(file).read_text())
    pairs = [
        (each.targets[0] if isinstance(each, ast.Assign) else each.target, each.value)
        for each in module.body
        if isinstance(each, ast.Assign | ast.AnnAssign)
    ]
    return {ast.unparse(target): value for target, value in pairs if value}


def test_weights_are_the_same_whenever_they_are_drawn() -> None:
    name = "bert.script"
    assert corpus.network(name) == corpus.network(name)
    assert not any(corpus.is_empty(tensor) for tensor in corpus.tensors(corpus.network(name)))
    assert any(corpus.is_empty(tensor) for tensor in corpus.tensors(corpus.graph(name)))
