"""A model like those that find speech in a stream: a window of sound and a recurrent state in, a probability and the state out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

#: 32 ms at 16 kHz, and the context that such models take before it.
SAMPLES = 576
#: As silero-vad has it: two layers of 128.
WIDTH = 128

_TEXT = f"""
voice (float[n,{SAMPLES}] input, float[2,n,{WIDTH}] state, int64 sr) => (float[n,1] output, float[2,n,{WIDTH}] stateN)
<float[{SAMPLES},256] first, float[256,{WIDTH}] second, float[{WIDTH},512] w0, float[{WIDTH},512] u0, float[{WIDTH},1] last,
 int64[1] front, int64[1] back, int64[1] end> {{
    EXTRA
    a = MatMul (input, first)
    b = Relu (a)
    c = MatMul (b, second)
    x = Relu (c)
    h0 = Slice (state, front, back, front)
    c0 = Slice (state, back, end, front)
    h = Squeeze (h0, front)
    cell = Squeeze (c0, front)
    wx = MatMul (x, w0)
    uh = MatMul (h, u0)
    gates = Add (wx, uh)
    i, f, g, o = Split <axis = 1, num_outputs = 4> (gates)
    is = Sigmoid (i)
    fs = Sigmoid (f)
    gt = Tanh (g)
    os = Sigmoid (o)
    kept = Mul (fs, cell)
    new = Mul (is, gt)
    cn = Add (kept, new)
    ct = Tanh (cn)
    hn = Mul (os, ct)
    hu = Unsqueeze (hn, front)
    cu = Unsqueeze (cn, front)
    stateN = Concat <axis = 0> (hu, cu)
    rate = Cast <to = 1> (sr)
    none = Sub (rate, rate)
    y = MatMul (hn, last)
    z = Add (y, none)
    output = Sigmoid (z)
}}"""


def write_voice(folder: Path, config: str, weight: int = 0) -> None:
    """Write the folder of such a model, which multiplies its window by so many further matrices."""
    more, last = "", "input"
    for number in range(weight):
        more += f"m{number} = MatMul ({last}, wide)\n t{number} = Tanh (m{number})\n"
        last = f"t{number}"
    text = _TEXT.replace("EXTRA", more).replace("MatMul (input, first)", f"MatMul ({last}, first)")
    if weight:
        text = text.replace("<float", f"<float[{SAMPLES},{SAMPLES}] wide, float", 1)
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{text}')
    random = np.random.default_rng(0)
    constants = {"front": 0, "back": 1, "end": 2}
    for value in model.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name in constants:
            tensor = np.array([constants[value.name]], np.int64)
        else:
            tensor = (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(tensor, value.name))
    del model.graph.value_info[:]
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.toml").write_text(config)


def write_keeper(folder: Path, num_floats: int) -> None:
    """Write a model that hardly computes, with a state of so many numbers: what it costs is that its state travels."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        keeper (float[n,1] input, float[n,{num_floats}] state) => (float[n,1] output, float[n,{num_floats}] stateN) {{
            stateN = Add (state, input)
            output = Identity (input)
        }}""")
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.toml").write_text("batch_sizes = [1, 4]\n")
