"""Models of all kinds, of which some mix the rows of a batch: what `experiments.bench.mixing` serves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from experiments.digits.models import export
from modelzoo.build import build_model

Array = np.ndarray[Any, np.dtype[Any]]
#: One row of each input, by name, with the batch as first dimension.
Row = dict[str, Array]

_SEED = 11
_OPSET = 17
_VOCABULARY, _LENGTH, _WIDTH = 30_000, 12, 64


@dataclass(frozen=True, slots=True)
class MixingModel:
    """A model with what is known of it by construction."""

    name: str
    model: onnx.ModelProto
    #: Whether the answer to a row is the same whatever lies beside it.
    row_by_row: bool
    #: How far an answer in a batch may be from the answer alone, as a part of its largest number.
    tolerance: float = 1e-3
    #: Whether the same row asked twice is answered twice the same.
    repeats: bool = True

    def rows(self, generator: np.random.Generator, count: int, scale: float = 1.0) -> list[Row]:
        """Draw rows that the model takes; floats are scaled, integers are within what it takes."""
        return [
            {
                value.name: _draw(value, generator, scale, _MOST.get(value.name, 100))
                for value in self.model.graph.input
            }
            for _ in range(count)
        ]


#: Integers of inputs of these names are below this.
_MOST = {"ids": _VOCABULARY, "mask": 2, "last": _LENGTH, "pixels": 256, "input": 1000, "segment": 2}


def _draw(
    value: onnx.ValueInfoProto, generator: np.random.Generator, scale: float, most: int
) -> Array:
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    shape = (1, *(each.dim_value for each in value.type.tensor_type.shape.dim[1:]))
    if dtype.kind == "f":
        return (generator.standard_normal(shape) * scale).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(np.bool_)
    # Strangers' integers are at the upper end.
    low = most - 1 - most // 10 if scale > 1 and most > 2 else 0
    return generator.integers(low, most, shape).astype(dtype)


def all_models() -> Iterator[MixingModel]:
    """Build them all; the same at each call."""
    yield from _plain()
    yield from _sequences()
    yield from _eight_bits()
    yield from _estimators()
    yield from _mixing()


# --- building blocks -------------------------------------------------------------------------------

_node = helper.make_node


def _weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    generator = np.random.default_rng(_SEED)
    return {
        name: (generator.standard_normal(shape) / np.sqrt(max(shape[0], 1))).astype(np.float32)
        for name, shape in shapes.items()
    }


def _ints(**values: object) -> dict[str, Array]:
    return {name: np.array(value, dtype=np.int64) for name, value in values.items()}


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[int]]],
    outputs: Mapping[str, tuple[int, Sequence[int]]],
    weights: Mapping[str, Array] | None = None,
) -> onnx.ModelProto:
    """A model whose tensors are given by their rows."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, t, ["batch", *s]) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, ["batch", *s]) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    return model


_FLOAT, _INT64 = TensorProto.FLOAT, TensorProto.INT64
_X4 = {"x": (_FLOAT, (4,))}
_Y4 = {"y": (_FLOAT, (4,))}


def _four(*nodes: onnx.NodeProto, weights: Mapping[str, Array] | None = None) -> onnx.ModelProto:
    """A model from four floats to four floats."""
    return _model(nodes, _X4, _Y4, weights)


# --- rows stay apart -------------------------------------------------------------------------------


def _plain() -> Iterator[MixingModel]:
    for name in ("mlp-16-64-8", "tiny_conv", "resnet18_v1", "two_by_two", "squeezenet1.1"):
        yield MixingModel(name.replace(".", "-"), build_model(name, seed=_SEED), True)
    yield MixingModel("images", _images(), True)
    yield MixingModel("half", _half(), True, tolerance=1e-2)
    yield MixingModel(
        "double",
        _model(
            [_node("Softmax", ["x"], ["y"], axis=-1)],
            {"x": (TensorProto.DOUBLE, (6,))},
            {"y": (TensorProto.DOUBLE, (6,))},
        ),
        True,
    )
    yield MixingModel("labels", _labels(), True)
    yield MixingModel("one-label", _one_label(), True)
    yield MixingModel(
        "where",
        _model(
            [_node("Where", ["keep", "x", "zero"], ["m"]), _node("Tanh", ["m"], ["y"])],
            {**_X4, "keep": (TensorProto.BOOL, (4,))},
            _Y4,
            {"zero": np.zeros(1, dtype=np.float32)},
        ),
        True,
    )
    yield MixingModel(
        "row-sums", _four(_node("CumSum", ["x", "axis"], ["y"]), weights=_ints(axis=1)), True
    )
    yield MixingModel(
        "normalised",
        _model(
            [
                _node("LayerNormalization", ["x", "g", "b"], ["n"], axis=-1),
                _node("Erf", ["n"], ["e"]),
                _node("Mul", ["n", "e"], ["y"]),
            ],
            {"x": (_FLOAT, (8,))},
            {"y": (_FLOAT, (8,))},
            {"g": np.ones(8, dtype=np.float32), "b": np.zeros(8, dtype=np.float32)},
        ),
        True,
    )
    yield MixingModel(
        "instances",
        _model(
            [_node("InstanceNormalization", ["x", "g", "b"], ["y"])],
            {"x": (_FLOAT, (3, 6, 6))},
            {"y": (_FLOAT, (3, 6, 6))},
            {"g": np.ones(3, dtype=np.float32), "b": np.zeros(3, dtype=np.float32)},
        ),
        True,
    )


def _images() -> onnx.ModelProto:
    return _model(
        [
            _node("Cast", ["pixels"], ["f"], to=_FLOAT),
            _node("Mul", ["f", "scale"], ["s"]),
            _node("Conv", ["s", "w"], ["c"], pads=[1, 1, 1, 1]),
            _node("Relu", ["c"], ["r"]),
            _node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            _node("Flatten", ["p"], ["l"]),
            _node("Gemm", ["l", "o"], ["y"]),
        ],
        {"pixels": (TensorProto.UINT8, (3, 16, 16))},
        {"y": (_FLOAT, (5,))},
        _weights({"w": (8, 3, 3, 3), "o": (512, 5)}) | {"scale": np.array(1 / 255, np.float32)},
    )


def _half() -> onnx.ModelProto:
    weights = {name: w.astype(np.float16) for name, w in _weights({"w": (16, 8)}).items()}
    return _model(
        [_node("MatMul", ["x", "w"], ["m"]), _node("Tanh", ["m"], ["y"])],
        {"x": (TensorProto.FLOAT16, (16,))},
        {"y": (TensorProto.FLOAT16, (8,))},
        weights,
    )


def _labels() -> onnx.ModelProto:
    return _model(
        [
            _node("Gemm", ["x", "w"], ["scores"]),
            _node("ArgMax", ["scores"], ["label"], axis=1, keepdims=0),
            _node("TopK", ["scores", "k"], ["best", "which"], axis=1),
        ],
        {"x": (_FLOAT, (16,))},
        {"label": (_INT64, ()), "best": (_FLOAT, (3,)), "which": (_INT64, (3,))},
        _weights({"w": (16, 9)}) | _ints(k=[3]),
    )


def _one_label() -> onnx.ModelProto:
    """A classifier that declares a label for one row, as converters of tree ensembles do."""
    model = _labels()
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    return model


def _sequences() -> Iterator[MixingModel]:
    yield MixingModel("encoder", encoder(), True)
    yield MixingModel("table", _table(), True)
    for cell, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        yield MixingModel(cell.lower(), _recurrent(cell, gates), True)
    yield MixingModel("folded", _folded(), True)
    yield MixingModel("last-step", _last_step(), True)
    yield MixingModel("turns", _turns(), True)
    yield MixingModel("scanned", _scanned(), True)


def encoder() -> onnx.ModelProto:
    """Two layers of a transformer, with tokens and a mask; a table of 30,000 tokens."""
    shapes: dict[str, Sequence[int]] = {"table": (_VOCABULARY, _WIDTH), "out": (_WIDTH, 4)}
    nodes = [
        _node("Gather", ["table", "ids"], ["h0"]),
        _node("Cast", ["mask"], ["maskf"], to=_FLOAT),
        _node("Sub", ["one", "maskf"], ["hidden"]),
        _node("Mul", ["hidden", "far"], ["bias2"]),
        _node("Unsqueeze", ["bias2", "axes12"], ["bias"]),
        _node("Shape", ["ids"], ["shape"]),
        _node("Gather", ["shape", "zero"], ["rows"], axis=0),
        _node("Unsqueeze", ["rows", "axes0"], ["rows1"]),
        _node("Concat", ["rows1", "split"], ["heads"], axis=0),
        _node("Concat", ["rows1", "join"], ["whole"], axis=0),
    ]
    for layer in range(2):
        h = f"h{layer}"
        for each in "qkv":
            shapes[f"w{each}{layer}"] = (_WIDTH, _WIDTH)
            nodes += [
                _node("MatMul", [h, f"w{each}{layer}"], [f"{each}{layer}"]),
                _node("Reshape", [f"{each}{layer}", "heads"], [f"{each}r{layer}"]),
                _node(
                    "Transpose",
                    [f"{each}r{layer}"],
                    [f"{each}t{layer}"],
                    perm=[0, 2, 3, 1] if each == "k" else [0, 2, 1, 3],
                ),
            ]
        shapes |= {f"wo{layer}": (_WIDTH, _WIDTH), f"wf{layer}": (_WIDTH, _WIDTH)}
        nodes += [
            _node("MatMul", [f"qt{layer}", f"kt{layer}"], [f"s{layer}"]),
            _node("Mul", [f"s{layer}", "quarter"], [f"sq{layer}"]),
            _node("Add", [f"sq{layer}", "bias"], [f"sm{layer}"]),
            _node("Softmax", [f"sm{layer}"], [f"p{layer}"], axis=-1),
            _node("MatMul", [f"p{layer}", f"vt{layer}"], [f"c{layer}"]),
            _node("Transpose", [f"c{layer}"], [f"ct{layer}"], perm=[0, 2, 1, 3]),
            _node("Reshape", [f"ct{layer}", "whole"], [f"cw{layer}"]),
            _node("MatMul", [f"cw{layer}", f"wo{layer}"], [f"o{layer}"]),
            _node("Add", [f"o{layer}", h], [f"a{layer}"]),
            _node("LayerNormalization", [f"a{layer}", "gain", "shift"], [f"n{layer}"], axis=-1),
            _node("MatMul", [f"n{layer}", f"wf{layer}"], [f"f{layer}"]),
            _node("Relu", [f"f{layer}"], [f"r{layer}"]),
            _node("Add", [f"r{layer}", f"n{layer}"], [f"h{layer + 1}"]),
        ]
    nodes += [
        _node("MatMul", ["h2", "out"], ["l"]),
        _node("ReduceMean", ["l"], ["y"], axes=[1], keepdims=0),
    ]
    scalars = {"one": 1.0, "far": -10000.0, "quarter": 0.25}
    return _model(
        nodes,
        {"ids": (_INT64, (_LENGTH,)), "mask": (_INT64, (_LENGTH,))},
        {"y": (_FLOAT, (4,))},
        _weights(shapes)
        | {name: np.array(value, dtype=np.float32) for name, value in scalars.items()}
        | {"gain": np.ones(_WIDTH, np.float32), "shift": np.zeros(_WIDTH, np.float32)}
        | _ints(axes12=[1, 2], axes0=[0], zero=0, split=[_LENGTH, 4, 16], join=[_LENGTH, _WIDTH]),
    )


def _table() -> onnx.ModelProto:
    return _model(
        [
            _node("Gather", ["table", "ids"], ["h"]),
            _node("ReduceMax", ["h"], ["y"], axes=[1], keepdims=0),
        ],
        {"ids": (_INT64, (_LENGTH,))},
        {"y": (_FLOAT, (_WIDTH,))},
        _weights({"table": (_VOCABULARY, _WIDTH)}),
    )


def _recurrent(cell: str, gates: int) -> onnx.ModelProto:
    """The batch is the second dimension inside."""
    return _model(
        [
            _node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            _node(cell, ["t", "w", "r"], ["", "last"], hidden_size=8),
            _node("Squeeze", ["last", "axes"], ["y"]),
        ],
        {"x": (_FLOAT, (_LENGTH, 6))},
        {"y": (_FLOAT, (8,))},
        _weights({"w": (1, gates * 8, 6), "r": (1, gates * 8, 8)}) | _ints(axes=[0]),
    )


def _folded() -> onnx.ModelProto:
    return _model(
        [
            _node("Reshape", ["x", "flat"], ["f"]),
            _node("MatMul", ["f", "w"], ["m"]),
            _node("Softmax", ["m"], ["s"], axis=-1),
            _node("Reshape", ["s", "back"], ["y"]),
        ],
        {"x": (_FLOAT, (_LENGTH, 6))},
        {"y": (_FLOAT, (_LENGTH, 5))},
        _weights({"w": (6, 5)}) | _ints(flat=[-1, 6], back=[-1, _LENGTH, 5]),
    )


def _last_step() -> onnx.ModelProto:
    """Takes from each row the step that the row names: `x[arange(rows), last]`."""
    return _model(
        [
            _node("Shape", ["x"], ["shape"]),
            _node("Gather", ["shape", "zero"], ["rows"], axis=0),
            _node("Range", ["zero", "rows", "one"], ["place"]),
            _node("Unsqueeze", ["place", "axes1"], ["p"]),
            _node("Concat", ["p", "last"], ["which"], axis=1),
            _node("GatherND", ["x", "which"], ["y"]),
        ],
        {"x": (_FLOAT, (_LENGTH, 3)), "last": (_INT64, (1,))},
        {"y": (_FLOAT, (3,))},
        _ints(zero=0, one=1, axes1=[1]),
    )


def _loop_body(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(
        [*nodes, _node("Identity", ["go_in"], ["go_out"])],
        "body",
        [
            helper.make_tensor_value_info("turn", _INT64, []),
            helper.make_tensor_value_info("go_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v_in", _FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v_out", _FLOAT, None),
        ],
    )


def _turns() -> onnx.ModelProto:
    body = _loop_body(_node("Sin", ["v_in"], ["v_out"]))
    return _four(_node("Loop", ["three", "", "x"], ["y"], body=body), weights=_ints(three=3))


def _scanned() -> onnx.ModelProto:
    body = helper.make_graph(
        [_node("Add", ["total", "step"], ["next"]), _node("Tanh", ["next"], ["seen"])],
        "body",
        [
            helper.make_tensor_value_info("total", _FLOAT, ["b", 3]),
            helper.make_tensor_value_info("step", _FLOAT, ["b", 3]),
        ],
        [
            helper.make_tensor_value_info("next", _FLOAT, ["b", 3]),
            helper.make_tensor_value_info("seen", _FLOAT, ["b", 3]),
        ],
    )
    return _model(
        [
            _node("ReduceMin", ["x"], ["begin"], axes=[1], keepdims=0),
            _node(
                "Scan",
                ["begin", "x"],
                ["y", "steps"],
                body=body,
                num_scan_inputs=1,
                scan_input_axes=[1],
                scan_output_axes=[1],
            ),
        ],
        {"x": (_FLOAT, (_LENGTH, 3))},
        {"y": (_FLOAT, (3,)), "steps": (_FLOAT, (_LENGTH, 3))},
    )


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

    return _converted(model, lambda source, target: quantize_dynamic(source, target))


def calibrated(model: MixingModel) -> onnx.ModelProto:
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


def _eight_bits() -> Iterator[MixingModel]:
    for name in ("mlp-16-64-8", "tiny_conv"):
        whole = MixingModel(name, build_model(name, seed=_SEED), True)
        yield MixingModel(f"{name}-qdq", calibrated(whole), True, tolerance=5e-2)
        yield MixingModel(f"{name}-int8", quantised(whole.model), False)
    yield MixingModel("encoder-int8", quantised(encoder()), False)


# --- rows meet -------------------------------------------------------------------------------------


def int_mix() -> onnx.ModelProto:
    """Integers less the mean of their batch."""
    return _model(
        [
            _node("Cast", ["x"], ["f"], to=_FLOAT),
            _node("ReduceMean", ["f"], ["m"], axes=[0], keepdims=1),
            _node("Sub", ["f", "m"], ["y"]),
        ],
        {"x": (_INT64, (4,))},
        _Y4,
    )


def control_if() -> onnx.ModelProto:
    """One branch for the whole batch, by the sign of its sum."""
    branches = [
        helper.make_graph(
            [_node(operator, ["x"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, _FLOAT, None)],
        )
        for operator, name in (("Sin", "a"), ("Neg", "b"))
    ]
    return _four(
        _node("ReduceSum", ["x"], ["s"], keepdims=0),
        _node("Greater", ["s", "zero"], ["c"]),
        _node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        weights={"zero": np.array(0, np.float32)},
    )


def _mixing() -> Iterator[MixingModel]:
    zero = _ints(axis=0)
    body = _loop_body(_node("Add", ["v_in", "v_in"], ["v_out"]))
    for name, model in {
        "int-mix": int_mix(),
        "control-if": control_if(),
        "loop": _four(
            _node("ReduceMax", ["x"], ["m"], keepdims=0),
            _node("Clip", ["m", "low", "high"], ["c"]),
            _node("Cast", ["c"], ["trips"], to=_INT64),
            _node("Loop", ["trips", "", "x"], ["y"], body=body),
            weights={"low": np.array(1, np.float32), "high": np.array(9, np.float32)},
        ),
        "batch-softmax": _four(_node("Softmax", ["x"], ["y"], axis=0)),
        "running-sum": _four(_node("CumSum", ["x", "axis"], ["y"]), weights=zero),
        "sorted": _four(
            _node("Shape", ["x"], ["s"]),
            _node("Gather", ["s", "begin"], ["k"], axis=0),
            _node("TopK", ["x", "k"], ["y", "i"], axis=0),
            weights=_ints(begin=[0]),
        ),
        "largest": _four(
            _node("ReduceMax", ["x"], ["m"], axes=[0], keepdims=1),
            _node("Div", ["x", "m"], ["y"]),
        ),
        "beside-each-other": _four(
            _node("Transpose", ["x"], ["t"], perm=[1, 0]),
            _node("MatMul", ["x", "t"], ["s"]),
            _node("Softmax", ["s"], ["p"], axis=-1),
            _node("MatMul", ["p", "x"], ["y"]),
        ),
        "reversed": _four(
            _node("Slice", ["x", "begin", "end", "axes", "step"], ["y"]),
            weights=_ints(begin=[-1], end=[-(2**40)], axes=[0], step=[-1]),
        ),
        "counted": _four(
            _node("Shape", ["x"], ["s"]),
            _node("Gather", ["s", "axis"], ["n"], axis=0),
            _node("Cast", ["n"], ["f"], to=_FLOAT),
            _node("Div", ["x", "f"], ["y"]),
            weights=zero,
        ),
        "batch-normalised": _four(_node("LpNormalization", ["x"], ["y"], axis=0)),
    }.items():
        yield MixingModel(name, model, False)
    for name, nodes in {
        "noise": [
            _node("RandomNormalLike", ["x"], ["r"]),
            _node("Add", ["x", "r"], ["y"]),
        ],
        "coin": [_node("Sigmoid", ["x"], ["p"]), _node("Bernoulli", ["p"], ["y"])],
    }.items():
        yield MixingModel(name, _four(*nodes), False, repeats=False)
