"""ONNX models that run in steps: those that Triton's examples of sequences ask for, and one whose answers prove its history."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser

#: A prime below 2^31, so that products fit into 64 bits.
PRIME = 2_147_483_647
#: The state before the first step is 0.
FACTOR = 1_000_003


def history(state: int, number: int) -> int:
    """What the model `history` makes of its state and an input: another number for each history."""
    return (state * FACTOR + number + 1) % PRIME


def write(directory: Path, name: str, graph: str, *, pbtxt: str = "", toml: str = "") -> None:
    """Write a model's folder."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {name} {graph}')
    onnx.checker.check_model(model)
    folder = directory / name
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    for file, text in (("config.pbtxt", pbtxt), ("config.toml", toml)):
        if text:
            (folder / file).write_text(text)


def _pbtxt(batching: str) -> str:
    return f"""
max_batch_size: 8
input {{ name: "INPUT" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }}
sequence_batching {{ {batching} }}
"""


def _flag(name: str, kind: str) -> str:
    control = f"{{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }}"
    return f'control_input {{ name: "{name}" control {control} }}\n'


def _id(datatype: str) -> str:
    control = f"{{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype} }}"
    return f'control_input {{ name: "CORRID" control {control} }}\n'


def write_triton_examples(directory: Path) -> None:
    """Write what `simple_*_sequence_*_client.py` ask: an input, one more at the start, the id at the end, or a sum."""
    flags = _flag("START", "START") + _flag("READY", "READY")
    write(
        directory,
        "simple_sequence",
        """(int32[N,1] INPUT, int32[N,1] START, int32[N,1] READY) => (int32[N,1] OUTPUT) {
            one = Mul (START, READY)
            OUTPUT = Add (INPUT, one)
        }""",
        pbtxt=_pbtxt(flags),
    )
    flags += _flag("END", "END")
    write(
        directory,
        "simple_dyna_sequence",
        """(int32[N,1] INPUT, int32[N,1] START, int32[N,1] READY, int32[N,1] END, uint64[N,1] CORRID)
            => (int32[N,1] OUTPUT) {
            one = Mul (START, READY)
            id = Cast <to = 6> (CORRID)
            last = Mul (id, END)
            sum = Add (INPUT, one)
            OUTPUT = Add (sum, last)
        }""",
        pbtxt=_pbtxt(f"oldest {{ }} {flags}" + _id("UINT64")),
    )
    state = 'state { input_name: "IN" output_name: "OUT" data_type: TYPE_INT32 dims: 1 }'
    write(
        directory,
        "simple_string_dyna_sequence",
        """(int32[N,1] INPUT, int32[N,1] IN, int32[N,1] END, string[N,1] CORRID)
            => (int32[N,1] OUTPUT, int32[N,1] OUT) {
            id = Cast <to = 6> (CORRID)
            last = Mul (id, END)
            OUT = Add (INPUT, IN)
            OUTPUT = Add (OUT, last)
        }""",
        pbtxt=_pbtxt(_flag("END", "END") + _id("STRING") + state),
    )


def write_history(directory: Path, name: str = "history", *, toml: str = "") -> None:
    """Write a model whose state is a number that tells all inputs before, and whose answer is the state."""
    write(
        directory,
        name,
        f"""(int64[N,1] x, int64[N,1] h) => (int64[N,1] y, int64[N,1] hn) {{
            factor = Constant <value_int = {FACTOR}> ()
            prime = Constant <value_int = {PRIME}> ()
            one = Constant <value_int = 1> ()
            product = Mul (h, factor)
            sum = Add (product, x)
            more = Add (sum, one)
            hn = Mod (more, prime)
            y = Identity (hn)
        }}""",
        toml=toml,
    )
