"""Small models that stand for what exporters write, each with requests: what `tests/system/test_foreign_models.py` serves.

They are in ONNX's own text. Plain onnxruntime, asked on the same file, says what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser

from experiments.bench.open_models import draw_weights

Array = np.ndarray[Any, np.dtype[Any]]

_HEADER = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>\n'


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A model and requests to it."""

    name: str
    #: In ONNX's text, without its header.
    text: str
    #: Inputs of one request each, by name.
    requests: tuple[dict[str, Array], ...]
    #: Changes what the text cannot say.
    change: Callable[[onnx.ModelProto], None] | None = None
    #: Whether plain onnxruntime has to be asked row by row, because its answers depend on the other rows.
    by_row: bool = False
    #: The answer to all requests, where onnxruntime gives Python none; None: it does.
    answer: dict[str, Array] | None = None

    def build(self) -> onnx.ModelProto:
        """Make the model."""
        model = onnx.parser.parse_model(_HEADER + self.text)
        if self.change is not None:
            self.change(model)
        return model


def _minus_one(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        first = value.type.tensor_type.shape.dim[0]
        first.Clear()
        first.dim_value = -1


def _reverse_nodes(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))


def _maps_of_labels(model: onnx.ModelProto) -> None:
    labels = onnx.helper.make_attribute("classlabels_int64s", [7, 8, 9])
    model.graph.node[-1].attribute.append(labels)
    kind = onnx.helper.make_sequence_type_proto(
        onnx.helper.make_map_type_proto(
            onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
        )
    )
    model.graph.output[0].type.CopyFrom(kind)


def _trees_alone(model: onnx.ModelProto) -> None:
    _maps_of_labels(model)
    del model.opset_import[0]


def _sum_of_lengths(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "total":
                dimension.dim_param = "past + seq"


def _floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _int64(values: Any) -> Array:  # noqa: ANN401
    return np.array(values, np.int64)


_X = ({"x": _floats(1, 3)}, {"x": _floats(3, 3, seed=1)})

MODELS = (
    ForeignModel(
        "fixed_batch",
        "g (float[4,3] x) => (float[4,3] y) { y = Softmax<axis=0>(x) }",
        ({"x": _floats(4, 3)},),
    ),
    ForeignModel(
        "vector_and_scalar",
        "g (float[3] x, float t) => (float[3] y) { y = Div(x, t) }",
        ({"x": _floats(3), "t": _floats()},),
    ),
    ForeignModel(
        "scalar_answer",
        "g (float[1,4] x) => (float y) { y = ReduceMean<keepdims=0>(x) }",
        ({"x": _floats(1, 4)},),
    ),
    ForeignModel(
        "time_first_answer",
        "g (float[1,4,2] x) => (float[4,1,2] y) { y = Transpose<perm=[1,0,2]>(x) }",
        ({"x": _floats(1, 4, 2)},),
    ),
    ForeignModel(
        "more_rows_out",
        "g (float[b,4,3] x) => (float[c,3] y) <int64[2] s = {-1,3}> { y = Reshape(x, s) }",
        ({"x": _floats(1, 4, 3)},),
    ),
    ForeignModel(
        "state_and_setting",
        """g (float[batch,2] x, float[2,batch,2] h, int64 sr) => (float[batch,2] y, float[2,batch,2] hn)
        <int64[1] ax = {0}, float one = {1}> {
            s = ReduceSum<keepdims=0>(h, ax)  xs = Add(x, s)  f = Cast<to=1>(sr)  y = Mul(xs, f)  hn = Add(h, one)
        }""",
        (
            {"x": _floats(1, 2), "h": _floats(2, 1, 2), "sr": _int64(2)},
            {"x": _floats(3, 2), "h": _floats(2, 3, 2), "sr": _int64(3)},
        ),
    ),
    ForeignModel(
        "a_symbol_for_each",
        "g (float[x_0,2] x, float[2,h_1,2] h) => (float[y_0,2] y) <int64[1] ax = {0}> { s = ReduceSum<keepdims=0>(h, ax)  y = Add(x, s) }",
        ({"x": _floats(1, 2), "h": _floats(2, 1, 2)}, {"x": _floats(3, 2), "h": _floats(2, 3, 2)}),
    ),
    ForeignModel(
        "rows_in_the_middle",
        "g (float[2,batch,3] x) => (float[2,batch,3] y) { y = Softmax<axis=2>(x) }",
        ({"x": _floats(2, 1, 3)}, {"x": _floats(2, 5, 3)}),
    ),
    ForeignModel(
        "one_scale",
        "g (float[b,3] x) => (float[b,3] y) { m = ReduceMax<keepdims=0>(x)  y = Div(x, m) }",
        _X,
        by_row=True,
    ),
    ForeignModel(
        "constant_output",
        "g (float[b,3] x) => (float[b,3] y, float[2] c) <float[2] k = {1,2}> { y = Relu(x)  c = Identity(k) }",
        _X,
    ),
    ForeignModel(
        "output_is_input", "g (float[b,3] x) => (float[b,3] x, float[b,3] y) { y = Relu(x) }", _X
    ),
    ForeignModel(
        "unsorted",
        "g (float[b,3] x) => (float[b,3] y) { h = Relu(x)  y = Neg(h) }",
        _X,
        _reverse_nodes,
    ),
    ForeignModel("minus_one", "g (float[b,3] x) => (float[b,3] y) { y = Relu(x) }", _X, _minus_one),
    ForeignModel(
        "empty",
        "g (float[0,3] x, float[2,3] z) => (float[2,3] y) { y = Concat<axis=0>(x, z) }",
        ({"x": _floats(0, 3), "z": _floats(2, 3)},),
    ),
    ForeignModel(
        "empty_rows", "g (float[b,0] x) => (float[b,0] y) { y = Relu(x) }", ({"x": _floats(2, 0)},)
    ),
    ForeignModel(
        "divides_by_an_input",
        "g (int64[b,1] total, int64[b,1] count) => (int64[b,1] mean) { mean = Div(total, count) }",
        ({"total": _int64([[12], [9]]), "count": _int64([[4], [3]])},),
    ),
    ForeignModel(
        "maps",
        "g (float[b,3] x) => (float[b,3] p) { s = Softmax<axis=1>(x)  p = ai.onnx.ml.ZipMap(s) }",
        _X,
        _maps_of_labels,
    ),
    ForeignModel(
        "maps_of_trees_alone",
        "g (float[b,3] x) => (float[b,3] p) { s = ai.onnx.ml.Scaler<offset=[1.0], scale=[2.0]>(x)  p = ai.onnx.ml.ZipMap(s) }",
        _X,
        _trees_alone,
    ),
    ForeignModel(
        "kept_by_value",
        """g (float[n,3] x) => (float[k,3] y) <int64[1] ax = {1}, float zero = {0}> {
            s = ReduceSum<keepdims=0>(x, ax)  c = Greater(s, zero)  y = Compress<axis=0>(x, c)
        }""",
        (*_X, {"x": _floats(9, 3, seed=2)}),
    ),
    ForeignModel(
        "heard_by_value",
        """g (float[n,2] x) => (float[k,1,1,2] y, float[1,k,2] h)
        <float[1,8,2] w, float[1,8,2] r, float[1,6,2] gw, float[1,6,2] gr, int64[1] ax = {1}, float zero = {0}> {
            s = ReduceSum<keepdims=0>(x, ax)  c = Greater(s, zero)  kept = Compress<axis=0>(x, c)
            steps = Unsqueeze(kept, ax)  y, hidden = GRU<hidden_size=2>(steps, gw, gr)
            rows = Transpose<perm=[1,0,2]>(steps)  all, h = LSTM<hidden_size=2>(rows, w, r)
        }""",
        ({"x": np.ones((1, 2), np.float32)}, {"x": np.ones((3, 2), np.float32)}),
        lambda model: draw_weights(model.graph),
    ),
    ForeignModel(
        "shaped_as_asked",
        "g (float[2,3] x, int64[2] s) => (float[c,d] y) { y = Reshape(x, s) }",
        ({"x": _floats(2, 3), "s": _int64([3, 2])}, {"x": _floats(2, 3), "s": _int64([-1, 6])}),
    ),
    ForeignModel(
        "flat_as_asked",
        "g (float[2,3] x, int64[1] s) => (float[c] y) { y = Reshape(x, s) }",
        ({"x": _floats(2, 3), "s": _int64([6])}, {"x": _floats(2, 3), "s": _int64([-1])}),
    ),
    ForeignModel(
        "cut_as_asked",
        """g (float[4,3] x, int64[2] start, int64[2] end, int64[2] ax, int64[2] step) => (float[c,d] y) {
            y = Slice(x, start, end, ax, step)
        }""",
        (
            {
                "x": _floats(4, 3),
                "start": _int64([3, 0]),
                "end": _int64([0, 2]),
                "ax": _int64([0, 1]),
                "step": _int64([-2, 1]),
            },
        ),
    ),
    ForeignModel(
        "squeezed",
        "g (float[b,3] x) => (float[c] y) <int64[1] ax = {1}> { z = ReduceMax(x, ax)  y = Squeeze(z) }",
        _X,
    ),
    ForeignModel(
        "as_many_as_asked",
        "g (int64 n) => (int64[k] y) <int64 zero = {0}, int64 one = {1}> { y = Range(zero, n, one) }",
        ({"n": _int64(7)}, {"n": _int64(0)}, {"n": _int64(99)}),
    ),
    ForeignModel(
        "decoder_with_past",
        """g (int64[batch,seq] ids, int64[batch,total] mask, float[batch,past,2] key)
            => (float[batch,seq,2] y, float[batch,total,2] present)
        <float[3,2] table = {1,2,3,4,5,6}, int64[1] one = {1}> {
            e = Gather(table, ids)  present = Concat<axis=1>(key, e)  k = Transpose<perm=[0,2,1]>(present)
            s = MatMul(e, k)  f = Cast<to=1>(mask)  m = Unsqueeze(f, one)  p = Mul(s, m)  y = MatMul(p, present)
        }""",
        tuple(
            {
                "ids": _int64([[seq % 3] * seq] * rows),
                "mask": _int64([[0] + [1] * (past + seq - 1)] * rows),
                "key": np.ones((rows, past, 2), np.float32),
            }
            for rows, seq, past in ((1, 4, 0), (1, 1, 4), (3, 2, 5))
        ),
        _sum_of_lengths,
    ),
    ForeignModel(
        "every_row_with_every_other",
        "g (float[n,2] x, float[n,n] near) => (float[n,2] y) { y = MatMul(near, x) }",
        ({"x": _floats(3, 2), "near": _floats(3, 3)}, {"x": _floats(1, 2), "near": _floats(1, 1)}),
    ),
    ForeignModel(
        "unequal_rows",
        "g (float[m,2] x, float[n,2] z) => (float[k,2] y) { y = Concat<axis=0>(x, z) }",
        ({"x": _floats(3, 2), "z": _floats(1, 2)}, {"x": _floats(2, 2), "z": _floats(5, 2)}),
    ),
    ForeignModel(
        "rows_by_rows",
        "g (float[b,3] x) => (float[b,c] y) { t = Transpose(x)  y = MatMul(x, t) }",
        _X,
    ),
    ForeignModel(
        "sequence",
        "g (float[2,3] x) => (seq(float[1,3]) y) <int64 one = {1}> { y = SplitToSequence<axis=0>(x, one) }",
        ({"x": _floats(2, 3)},),
    ),
    ForeignModel(
        "text_to_numbers",
        """g (string[b,2] x) => (int64[b,2] y) {
            y = ai.onnx.ml.LabelEncoder<keys_strings=["a", "b", "ä"], values_int64s=[1, 2, 3], default_int64=-1>(x)
        }""",
        (
            {"x": np.array([["a", "ä"]], np.object_)},
            {"x": np.array([["b", ""], ["ab", "a"], ["a", "b"]], np.object_)},
        ),
    ),
    ForeignModel(
        "labels_of_text",
        """g (float[b,3] x) => (string[b] y, float[b,3] p) {
            y, p = ai.onnx.ml.LinearClassifier<classlabels_strings=["eins", "zwei", "drei"], coefficients=[
                1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], intercepts=[0.0, 0.0, 0.0]>(x)
        }""",
        _X,
    ),
    ForeignModel(
        "text_in_and_out",
        "g (string[b,1] x, string[b,1] z) => (string[b,1] y) { y = StringConcat(x, z) }",
        (
            {
                "x": np.array([["naïve "], ["x"]], np.object_),
                "z": np.array([["€"], [""]], np.object_),
            },
        ),
    ),
    ForeignModel(
        "words_of_text",
        'g (string[b] x) => (string[b,c] y, int64[b] n) { y, n = StringSplit<delimiter=" ">(x) }',
        (
            {"x": np.array(["the cat sat", "on"], np.object_)},
            {"x": np.array(["", "a b c d e"], np.object_)},
        ),
    ),
    ForeignModel(
        "text_without_some",
        """g (string[4] x) => (string[c] y) {
            y = StringNormalizer<is_case_sensitive=1, stopwords=["monday"], case_change_action="NONE">(x)
        }""",
        (
            {"x": np.array(["monday", "tuesday", "monday", "friday"], np.object_)},
            {"x": np.array(["a", "b", "c", "d"], np.object_)},
        ),
    ),
    ForeignModel(
        "one_category_unknown_fails",
        """g (string[b,1] x) => (float[b,1,2] y) {
            y = ai.onnx.ml.OneHotEncoder<cats_strings=["yes", "no"], zeros=0>(x)
        }""",
        ({"x": np.array([["no"], ["yes"], ["no"]], np.object_)},),
    ),
    ForeignModel("wrongly_declared", "g (float[b,3] x) => (float[1,3] y) { y = Relu(x) }", _X),
    ForeignModel(
        "half",
        "g (float16[b,3] x) => (float16[b,3] y) { y = Relu(x) }",
        tuple({"x": each["x"].astype(np.float16)} for each in _X),
    ),
    ForeignModel(
        "float8_inside",
        "g (float[b,3] x) => (float[b,3] y) <float s = {0.5}, float8e4m3fn z = {0}> { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }",
        _X,
    ),
    ForeignModel(
        "int4_answer",
        "g (float[4] x) => (int4[4] y) { y = Cast<to=22>(x) }",
        ({"x": np.array([-8, 7, 0, 3], np.float32)},),
        answer={"y": np.array([-8, 7, 0, 3], np.int8)},
    ),
)
