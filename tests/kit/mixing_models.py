"""Models of all kinds, of which some mix the rows of a batch.

Small ones stand here in ONNX's own text. There `Cast <to = 1>` is to floats and `<to = 7>` to integers of 64 bits, and a
weight that is declared without a value is drawn.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

from experiments.digits.models import export
from modelzoo.build import build_model

Array = np.ndarray[Any, np.dtype[Any]]
#: One row of each input, by name, with the batch as first dimension.
Row = dict[str, Array]

_SEED = 11


@dataclass(frozen=True, slots=True)
class MixingModel:
    """A model with what is known of it by construction."""

    name: str
    model: onnx.ModelProto
    #: Whether the answer to a row is the same whatever lies next to it.
    row_by_row: bool
    #: How far an answer in a batch may be from the answer alone, as a part of its largest number.
    tolerance: float = 1e-3
    #: Whether the same row asked twice is answered twice the same.
    repeats: bool = True

    def rows(self, generator: np.random.Generator, count: int, scale: float = 1.0) -> list[Row]:
        """Draw rows that the model takes; floats are scaled, integers are within what it takes."""
        return [
            {value.name: _draw(value, generator, scale) for value in self.model.graph.input}
            for _ in range(count)
        ]


#: Integers of inputs of these names are below this; of others, below 100.
_MOST = {"ids": 30_000, "mask": 2, "last": 12, "pixels": 256}


def _draw(value: onnx.ValueInfoProto, generator: np.random.Generator, scale: float) -> Array:
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    shape = (1, *(each.dim_value for each in value.type.tensor_type.shape.dim[1:]))
    if dtype.kind == "f":
        return (generator.standard_normal(shape) * scale).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(np.bool_)
    # The integers of other clients are at the upper end.
    most = _MOST.get(value.name, 100)
    low = most - 1 - most // 10 if scale > 1 and most > 2 else 0
    return generator.integers(low, most, shape).astype(dtype)


def _parsed(graph: str) -> onnx.ModelProto:
    """Make a model of a graph's text."""
    header = '<ir_version: 8, opset_import: ["": 17]> g '
    model: onnx.ModelProto = onnx.parser.parse_model(header + graph)
    generator = np.random.default_rng(_SEED)
    for value in model.graph.value_info:
        kind = value.type.tensor_type
        shape = [each.dim_value for each in kind.shape.dim]
        drawn = (generator.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        model.graph.initializer.append(numpy_helper.from_array(drawn.astype(dtype), value.name))
    del model.graph.value_info[:]
    onnx.checker.check_model(model)
    return model


# --- rows stay apart -------------------------------------------------------------------------------

_FOUR = "(float[batch,4] x) => (float[batch,4] y)"

_LABELS = """
    (float[batch,16] x) => (int64[batch] label, float[batch,3] best, int64[batch,3] which)
    <float[16,9] w, int64[1] k = {3}> {
        scores = Gemm (x, w)
        label = ArgMax <axis = 1, keepdims = 0> (scores)
        best, which = TopK <axis = 1> (scores, k)
    }"""

_PLAIN = {
    "images": """
        (uint8[batch,3,16,16] pixels) => (float[batch,5] y)
        <float[8,3,3,3] w, float[512,5] o, float scale = {0.003921569}> {
            f = Cast <to = 1> (pixels)
            s = Mul (f, scale)
            c = Conv <pads = [1, 1, 1, 1]> (s, w)
            r = Relu (c)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            l = Flatten (p)
            y = Gemm (l, o)
        }""",
    "half": """
        (float16[batch,16] x) => (float16[batch,8] y) <float16[16,8] w> {
            m = MatMul (x, w)
            y = Tanh (m)
        }""",
    "double": "(double[batch,6] x) => (double[batch,6] y) { y = Softmax <axis = -1> (x) }",
    "labels": _LABELS,
    # Converters of tree ensembles declare a label for one row.
    "one-label": _LABELS.replace("int64[batch] label", "int64[1] label"),
    "where": """
        (float[batch,4] x, bool[batch,4] keep) => (float[batch,4] y) <float[1] zero = {0}> {
            m = Where (keep, x, zero)
            y = Tanh (m)
        }""",
    "row-sums": f"{_FOUR} <int64 axis = {{1}}> {{ y = CumSum (x, axis) }}",
    "normalised": """
        (float[batch,8] x) => (float[batch,8] y)
        <float[8] g = {1, 1, 1, 1, 1, 1, 1, 1}, float[8] b = {0, 0, 0, 0, 0, 0, 0, 0}> {
            n = LayerNormalization <axis = -1> (x, g, b)
            e = Erf (n)
            y = Mul (n, e)
        }""",
    "instances": """
        (float[batch,3,6,6] x) => (float[batch,3,6,6] y)
        <float[3] g = {1, 1, 1}, float[3] b = {0, 0, 0}> { y = InstanceNormalization (x, g, b) }""",
}


def _layer(n: int) -> str:
    return f"""
        q{n} = MatMul (h{n}, wq{n})
        qr{n} = Reshape (q{n}, heads)
        qt{n} = Transpose <perm = [0, 2, 1, 3]> (qr{n})
        k{n} = MatMul (h{n}, wk{n})
        kr{n} = Reshape (k{n}, heads)
        kt{n} = Transpose <perm = [0, 2, 3, 1]> (kr{n})
        v{n} = MatMul (h{n}, wv{n})
        vr{n} = Reshape (v{n}, heads)
        vt{n} = Transpose <perm = [0, 2, 1, 3]> (vr{n})
        s{n} = MatMul (qt{n}, kt{n})
        sq{n} = Mul (s{n}, quarter)
        sm{n} = Add (sq{n}, bias)
        p{n} = Softmax <axis = -1> (sm{n})
        c{n} = MatMul (p{n}, vt{n})
        ct{n} = Transpose <perm = [0, 2, 1, 3]> (c{n})
        cw{n} = Reshape (ct{n}, whole)
        o{n} = MatMul (cw{n}, wo{n})
        a{n} = Add (o{n}, h{n})
        n{n} = LayerNormalization <axis = -1> (a{n}, gain, shift)
        f{n} = MatMul (n{n}, wf{n})
        r{n} = Relu (f{n})
        h{n + 1} = Add (r{n}, n{n})"""


_LAYER_WEIGHTS = ", ".join(f"float[64,64] w{each}{n}" for n in range(2) for each in "qkvof")

#: Two layers of a transformer, with tokens and a mask; a table of 30,000 tokens.
_ENCODER = f"""
    (int64[batch,12] ids, int64[batch,12] mask) => (float[batch,4] y)
    <float[30000,64] table, float[64,4] out, {_LAYER_WEIGHTS},
     float one = {{1}}, float far = {{-10000}}, float quarter = {{0.25}},
     float[64] gain = {{{", ".join("1" * 64)}}}, float[64] shift = {{{", ".join("0" * 64)}}},
     int64[2] axes12 = {{1, 2}}, int64[1] axes0 = {{0}}, int64 zero = {{0}},
     int64[3] split = {{12, 4, 16}}, int64[2] join = {{12, 64}}> {{
        h0 = Gather (table, ids)
        maskf = Cast <to = 1> (mask)
        hidden = Sub (one, maskf)
        bias2 = Mul (hidden, far)
        bias = Unsqueeze (bias2, axes12)
        shape = Shape (ids)
        rows = Gather <axis = 0> (shape, zero)
        rows1 = Unsqueeze (rows, axes0)
        heads = Concat <axis = 0> (rows1, split)
        whole = Concat <axis = 0> (rows1, join)
        {_layer(0)}
        {_layer(1)}
        l = MatMul (h2, out)
        y = ReduceMean <axes = [1], keepdims = 0> (l)
    }}"""


def _recurrent(cell: str, gates: int) -> str:
    """The batch is the second dimension inside."""
    return f"""
        (float[batch,12,6] x) => (float[batch,8] y)
        <float[1,{gates * 8},6] w, float[1,{gates * 8},8] r, int64[1] axes = {{0}}> {{
            t = Transpose <perm = [1, 0, 2]> (x)
            , last = {cell} <hidden_size = 8> (t, w, r)
            y = Squeeze (last, axes)
        }}"""


def _turn(of: str) -> str:
    """What a loop does in each turn with `v_in`."""
    return f"""body = turns (int64 turn, bool go_in, float[] v_in) => (bool go_out, float[] v_out) {{
            v_out = {of}
            go_out = Identity (go_in)
        }}"""


_SEQUENCES = {
    "encoder": _ENCODER,
    "table": """
        (int64[batch,12] ids) => (float[batch,64] y) <float[30000,64] table> {
            h = Gather (table, ids)
            y = ReduceMax <axes = [1], keepdims = 0> (h)
        }""",
    "lstm": _recurrent("LSTM", 4),
    "gru": _recurrent("GRU", 3),
    "rnn": _recurrent("RNN", 1),
    "folded": """
        (float[batch,12,6] x) => (float[batch,12,5] y)
        <float[6,5] w, int64[2] flat = {-1, 6}, int64[3] back = {-1, 12, 5}> {
            f = Reshape (x, flat)
            m = MatMul (f, w)
            s = Softmax <axis = -1> (m)
            y = Reshape (s, back)
        }""",
    # Takes from each row the step that the row names: `x[arange(rows), last]`.
    "last-step": """
        (float[batch,12,3] x, int64[batch,1] last) => (float[batch,3] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] axes1 = {1}> {
            shape = Shape (x)
            rows = Gather <axis = 0> (shape, zero)
            place = Range (zero, rows, one)
            p = Unsqueeze (place, axes1)
            which = Concat <axis = 1> (p, last)
            y = GatherND (x, which)
        }""",
    "turns": f"""
        {_FOUR} <int64 three = {{3}}> {{ y = Loop <{_turn("Sin (v_in)")}> (three, , x) }}""",
    "scanned": """
        (float[batch,12,3] x) => (float[batch,3] y, float[batch,12,3] steps) {
            begin = ReduceMin <axes = [1], keepdims = 0> (x)
            y, steps = Scan <
                body = add (float[b,3] total, float[b,3] step) => (float[b,3] next, float[b,3] seen) {
                    next = Add (total, step)
                    seen = Tanh (next)
                },
                num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1]
            > (begin, x)
        }""",
}


def _estimators() -> Iterator[MixingModel]:
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer, StandardScaler
    from sklearn.svm import SVC

    x, labels = load_digits(return_X_y=True)
    x, labels = x[:300].astype(np.float32), labels[:300]
    for name, estimator in {
        "logistic": LogisticRegression(max_iter=2000),
        "svc": SVC(),
        "forest": RandomForestClassifier(20, random_state=_SEED),
        "pipeline": make_pipeline(StandardScaler(), Normalizer(), LogisticRegression()),
    }.items():
        yield MixingModel(name, export(estimator.fit(x, labels), x), True)


# --- eight bits ------------------------------------------------------------------------------------


def quantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """What `quantize_dynamic` makes of a model: weights of eight bits, and a scale per batch."""
    from onnxruntime.quantization import quantize_dynamic

    return _converted(model, quantize_dynamic)


def _calibrated(model: MixingModel) -> onnx.ModelProto:
    """What `quantize_static` makes of a model: eight bits with scales that never change."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    rows = iter(model.rows(np.random.default_rng(_SEED), 16))

    class Rows(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
        def get_next(self) -> Row | None:
            return next(rows, None)

    return _converted(model.model, lambda source, target: quantize_static(source, target, Rows()))


def _converted(model: onnx.ModelProto, convert: Callable[[str, str], object]) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "source.onnx", Path(name) / "target.onnx"
        onnx.save(model, source)
        convert(str(source), str(target))
        return onnx.load(target)


# --- rows meet -------------------------------------------------------------------------------------

_MEETING = {
    # Integers less the mean of their batch.
    "int-mix": """
        (int64[batch,4] x) => (float[batch,4] y) {
            f = Cast <to = 1> (x)
            m = ReduceMean <axes = [0], keepdims = 1> (f)
            y = Sub (f, m)
        }""",
    # One branch for the whole batch, by the sign of its sum.
    "control-if": f"""
        {_FOUR} <float zero = {{0}}> {{
            s = ReduceSum <keepdims = 0> (x)
            c = Greater (s, zero)
            y = If <
                then_branch = a () => (float[] a) {{ a = Sin (x) }},
                else_branch = b () => (float[] b) {{ b = Neg (x) }}
            > (c)
        }}""",
    "loop": f"""
        {_FOUR} <float low = {{1}}, float high = {{9}}> {{
            m = ReduceMax <keepdims = 0> (x)
            c = Clip (m, low, high)
            trips = Cast <to = 7> (c)
            y = Loop <{_turn("Add (v_in, v_in)")}> (trips, , x)
        }}""",
    "batch-softmax": _FOUR + "{ y = Softmax <axis = 0> (x) }",
    "running-sum": _FOUR + "<int64 axis = {0}> { y = CumSum (x, axis) }",
    "sorted": f"""
        {_FOUR} <int64[1] begin = {{0}}> {{
            s = Shape (x)
            k = Gather <axis = 0> (s, begin)
            y, i = TopK <axis = 0> (x, k)
        }}""",
    "largest": f"""
        {_FOUR} {{
            m = ReduceMax <axes = [0], keepdims = 1> (x)
            y = Div (x, m)
        }}""",
    "beside-each-other": f"""
        {_FOUR} {{
            t = Transpose <perm = [1, 0]> (x)
            s = MatMul (x, t)
            p = Softmax <axis = -1> (s)
            y = MatMul (p, x)
        }}""",
    "reversed": f"""
        {_FOUR}
        <int64[1] begin = {{-1}}, int64[1] end = {{{-(2**40)}}}, int64[1] axes = {{0}}, int64[1] step = {{-1}}> {{
            y = Slice (x, begin, end, axes, step)
        }}""",
    "counted": f"""
        {_FOUR} <int64 axis = {{0}}> {{
            s = Shape (x)
            n = Gather <axis = 0> (s, axis)
            f = Cast <to = 1> (n)
            y = Div (x, f)
        }}""",
    "batch-normalised": _FOUR + "{ y = LpNormalization <axis = 0> (x) }",
}

#: What is drawn by chance, is drawn for a batch.
_BY_CHANCE = {
    "noise": f"""
        {_FOUR} {{
            r = RandomNormalLike (x)
            y = Add (x, r)
        }}""",
    "coin": f"""
        {_FOUR} {{
            p = Sigmoid (x)
            y = Bernoulli (p)
        }}""",
}


@functools.cache
def models() -> dict[str, MixingModel]:
    """All, by name; made when first asked for, because they take sklearn, and seconds."""
    return {each.name: each for each in _all_models()}


def _all_models() -> Iterator[MixingModel]:
    for name in ("mlp-16-64-8", "tiny_conv", "resnet18_v1", "two_by_two", "squeezenet1.1"):
        yield MixingModel(name.replace(".", "-"), build_model(name, seed=_SEED), True)
    for name, text in (_PLAIN | _SEQUENCES).items():
        tolerance = 1e-2 if name == "half" else 1e-3
        yield MixingModel(name, _parsed(text), True, tolerance)
    for name in ("mlp-16-64-8", "tiny_conv"):
        whole = MixingModel(name, build_model(name, seed=_SEED), True)
        yield MixingModel(f"{name}-qdq", _calibrated(whole), True, tolerance=5e-2)
        yield MixingModel(f"{name}-int8", quantised(whole.model), False)
    yield MixingModel("encoder-int8", quantised(_parsed(_ENCODER)), False)
    yield from _estimators()
    for name, text in _MEETING.items():
        yield MixingModel(name, _parsed(text), False)
    for name, text in _BY_CHANCE.items():
        yield MixingModel(name, _parsed(text), False, repeats=False)
