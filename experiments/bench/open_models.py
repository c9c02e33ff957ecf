"""Small models with open dimensions: what `tests/system/test_open_models.py` and `experiments.bench.shapes` serve."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]

_HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'

#: By name, in ONNX's text.
TEXTS = {
    # Rows end where the picture does, so padding shows.
    "wide": """g (float[n,2,8,width] x) => (float[n,3,8,width] y, float[n,3] mean)
        <float[3,2,3,3] w, float[3] b> {
            c = Conv<pads=[1,1,1,1]>(x, w, b)
            y = Relu(c)
            mean = ReduceMean<keepdims=0>(y, axes)
        }""",
    "two_symbols": """g (float[n,rows,4] a, float[n,columns,4] b) => (float[n,rows,columns] y) {
            t = Transpose<perm=[0,2,1]>(b)
            y = MatMul(a, t)
        }""",
    "same_symbol": """g (float[n,length] a, float[n,length] b) => (float[n,length] y) { y = Add(a, b) }""",
    # One scale for all rows of a batch: they run one by one.
    "one_scale": """g (float[n,length] x) => (float[n,length] y) {
            most = ReduceMax<keepdims=0>(x)
            y = Div(x, most)
        }""",
    "one_row": """g (float[1,length] x) => (float[1,length] y) { y = CumSum(x, one) }""",
    "halves": """g (float[n,length] x) => (float[n,half] y) { y = Slice(x, zero, end, one, two) }""",
    # A value beyond the table fails, and that request alone.
    "table": """g (int64[n,length] x) => (float[n,length] y) <float[10] t> { y = Gather(t, x) }""",
    # The GRU gets one step less, so of one step none.
    "changes": """g (float[n,2,time] x) => (float[n,3] y) <float[1,9,2] w, float[1,9,3] r> {
            later = Slice(x, one, end, two)
            steps = Transpose<perm=[2,0,1]>(later)
            all, last = GRU<hidden_size=3>(steps, w, r)
            y = Squeeze(last, zero)
        }""",
    "nameless": """g (float[n,?] x) => (float[n,?] y) { y = Relu(x) }""",
}


def build(name: str) -> onnx.ModelProto:
    """Make one of `TEXTS`."""
    text = TEXTS[name]
    model = onnx.parser.parse_model(_HEADER + text)
    graph = model.graph
    draw_weights(graph)
    constants = {
        "axes": [2, 3],
        "zero": [0],
        "one": [1],
        "two": [2],
        "end": [1 << 30],
    }
    used = {each for node in graph.node for each in node.input}
    for each, values in constants.items():
        if each in used:
            graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), each))
    if name == "halves":
        graph.node[0].input[3], graph.node[0].input[4] = "one", "two"
    return model


def draw_weights(graph: onnx.GraphProto) -> None:
    """Draw what a graph's text declares without values."""
    random = np.random.default_rng(0)
    for value in graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        graph.initializer.append(
            numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), value.name)
        )
    del graph.value_info[:]


def encoder(
    *, layers: int = 2, hidden: int = 32, heads: int = 4, positions: int = 48, seed: int = 0
) -> onnx.ModelProto:
    """Make a transformer as BERT is: token ids and a mask in; the states of all tokens and three classes out."""
    random = np.random.default_rng(seed)
    weights: dict[str, Array] = {}

    def weight(name: str, *shape: int) -> str:
        scale = 1.0 if len(shape) == 1 else shape[0] ** -0.5
        weights[name] = (random.standard_normal(shape) * scale).astype(np.float32)
        return name

    def constant(name: str, values: Any) -> str:  # noqa: ANN401
        weights[name] = np.array(values)
        return name

    weight("words", 1000, hidden)
    weight("places", positions, hidden)
    weight("classes", hidden, 3)
    constant("zero", np.array([0], np.int64))
    constant("first", np.array([1], np.int64))
    constant("second", np.array([1, 2], np.int64))
    constant("split", np.array([0, 0, heads, hidden // heads], np.int64))
    constant("join", np.array([0, 0, hidden], np.int64))
    constant("one", np.float32(1))
    constant("far", np.float32(-10000))
    constant("root", np.float32((hidden // heads) ** -0.5))
    constant("last", np.array([-1], np.int64))
    lines = [
        "e = Gather(words, input_ids)",
        "shape = Shape(input_ids)",
        "length = Gather(shape, first)",
        "p = Slice(places, zero, length)",
        "h0 = Add(e, p)",
        "m = Cast<to=1>(attention_mask)",
        "m4 = Unsqueeze(m, second)",
        "off = Sub(one, m4)",
        "bias = Mul(off, far)",
    ]
    for n in range(layers):
        for each in "qkv":
            weight(f"w{each}{n}", hidden, hidden)
            lines += [
                f"{each}a{n} = MatMul(h{n}, w{each}{n})",
                f"{each}b{n} = Reshape({each}a{n}, split)",
                f"{each}{n} = Transpose<perm={'[0,2,3,1]' if each == 'k' else '[0,2,1,3]'}>({each}b{n})",
            ]
        weight(f"wo{n}", hidden, hidden)
        weight(f"wi{n}", hidden, 4 * hidden)
        weight(f"wd{n}", 4 * hidden, hidden)
        for each in ("s", "t"):
            weights[f"{each}{n}"] = np.ones(hidden, np.float32)
        lines += [
            f"sa{n} = MatMul(q{n}, k{n})",
            f"sb{n} = Mul(sa{n}, root)",
            f"sc{n} = Add(sb{n}, bias)",
            f"sd{n} = Softmax(sc{n})",
            f"ca{n} = MatMul(sd{n}, v{n})",
            f"cb{n} = Transpose<perm=[0,2,1,3]>(ca{n})",
            f"cc{n} = Reshape(cb{n}, join)",
            f"cd{n} = MatMul(cc{n}, wo{n})",
            f"ce{n} = Add(h{n}, cd{n})",
            f"g{n} = LayerNormalization(ce{n}, s{n})",
            f"fa{n} = MatMul(g{n}, wi{n})",
            f"fb{n} = Relu(fa{n})",
            f"fc{n} = MatMul(fb{n}, wd{n})",
            f"fd{n} = Add(g{n}, fc{n})",
            f"h{n + 1} = LayerNormalization(fd{n}, t{n})",
        ]
    lines += [
        f"states = Identity(h{layers})",
        "m3 = Unsqueeze(m, last)",
        f"masked = Mul(h{layers}, m3)",
        "total = ReduceSum<keepdims=0>(masked, first)",
        "number = ReduceSum<keepdims=1>(m, first)",
        "mean = Div(total, number)",
        "label = MatMul(mean, classes)",
    ]
    text = "\n".join(lines)
    model = onnx.parser.parse_model(
        f"{_HEADER}g (int64[batch,sequence] input_ids, int64[batch,sequence] attention_mask)"
        f" => (float[batch,sequence,{hidden}] states, float[batch,3] label) {{\n{text}\n}}"
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in weights.items()
    )
    return model
