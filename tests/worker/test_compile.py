"""The compile step: what it refuses and in which words, what it makes, and what it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from clockwright.elements import bytes_of, elements_of
from clockwright.errors import ModelError
from clockwright.units import NS_PER_MS
from clockwright.wire.tensors import DATATYPES, TensorSpec
from tests.kit.processes import lives, until
from worker.compiling import compile
from worker.compiling.cache import CompileCache
from worker.compiling.compile import (
    OnnxruntimeTarget,
    compile_model,
    describe_model,
    profile_model,
    read_weights,
)
from worker.compiling.compiler import Compiler
from worker.compiling.for_torch import TorchTarget
from worker.compiling.row_probes import RowProbes
from worker.engines.onnxruntime import Bytes, open_session, private_kernel
from worker.models.file_store import FileStore, sha256_of
from worker.models.model_files import (
    GRAPH_FILE,
    WEIGHTS_FILE,
    CompiledModel,
    Limits,
    ModelSource,
    sizes_to_write,
)
from worker.models.precision import Precision

LIMITS = Limits(arena_bytes=64 << 20, num_pages=8, io_bytes=1 << 20)

Shape = Sequence[int | str | None]


def make_model(
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Sequence[tuple[str, int, Shape | None]] = (("x", TensorProto.FLOAT, ["n", 4]),),
    outputs: Sequence[tuple[str, int, Shape | None]] = (("y", TensorProto.FLOAT, ["n", 3]),),
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def dense(*, seed: int = 0, x: str = "x", y: str = "y", rows: int = 4) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    return make_model(
        [
            helper.make_node("MatMul", [x, f"{x}w"], ["h"]),
            helper.make_node("Add", ["h", f"{y}b"], ["s"]),
            helper.make_node("Relu", ["s"], [y]),
        ],
        inputs=[(x, TensorProto.FLOAT, ["n", rows])],
        outputs=[(y, TensorProto.FLOAT, ["n", 3])],
        weights={
            f"{y}b": rng.standard_normal(3).astype(np.float32),
            f"{x}w": rng.standard_normal((rows, 3)).astype(np.float32),
        },
    )


def convolutional(*, seed: int) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.random(shape, dtype=np.float32) + np.float32(0.1)

    return make_model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["d"]),
            helper.make_node("Relu", ["d"], ["e"]),
            helper.make_node("GlobalAveragePool", ["e"], ["f"]),
            helper.make_node("Flatten", ["f"], ["h"]),
            helper.make_node("MatMul", ["h", "o"], ["y"]),
        ],
        inputs=[("x", TensorProto.FLOAT, ["n", 8, 6, 6])],
        outputs=[("y", TensorProto.FLOAT, ["n", 3])],
        weights={
            "w": draw(16, 8, 3, 3),
            **{name: draw(16) for name in "gbmv"},
            "o": draw(16, 3),
        },
    )


def write(model: onnx.ModelProto, folder: Path) -> ModelSource:
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return ModelSource(folder)


def silent(stage: str) -> None:
    pass


def compiled(source: ModelSource, folder: Path, limits: Limits = LIMITS) -> CompiledModel:
    folder.mkdir(parents=True)
    return compile_model(source, folder, limits, silent)


def run_compiled(folder: Path, model: CompiledModel, arrays: Sequence[np.ndarray]) -> list[bytes]:
    session = open_session(str(folder / GRAPH_FILE))
    batch_size = len(arrays[0])
    weights = read_weights(folder, model)
    kernel, inputs, outputs = private_kernel(session, model, batch_size, weights)
    for memory, array in zip(inputs, arrays, strict=True):
        memory[:] = np.frombuffer(array.tobytes(), np.uint8)
    kernel.launch()
    return [memory.tobytes() for memory in outputs]


@pytest.mark.parametrize("make", [dense, convolutional])
def test_a_compiled_model_answers_as_the_original_does(
    make: Callable[..., onnx.ModelProto], tmp_path: Path
) -> None:
    source = write(make(seed=3), tmp_path / "source")
    model = compiled(source, tmp_path / "out")
    session = ort.InferenceSession(source.folder / "model.onnx", providers=["CPUExecutionProvider"])
    shape = model.inputs[0].spec.row_shape
    for batch_size in (1, 2, 5):
        x = np.random.default_rng(1).random((batch_size, *shape), dtype=np.float32)
        (found,) = run_compiled(tmp_path / "out", model, [x])
        (expected,) = session.run(None, {"x": x})
        np.testing.assert_allclose(
            np.frombuffer(found, np.float32).reshape(expected.shape), expected, rtol=1e-4
        )


def test_the_description_says_what_clients_and_pages_need(tmp_path: Path) -> None:
    model = compiled(write(dense(), tmp_path / "source"), tmp_path / "out")
    assert [tensor.spec for tensor in model.inputs] == [TensorSpec("x", "FP32", (4,))]
    assert [tensor.spec for tensor in model.outputs] == [TensorSpec("y", "FP32", (3,))]
    assert sorted(weight.num_bytes for weight in model.weights) == [12, 48]
    assert all(weight.offset % 64 == 0 for weight in model.weights)
    assert (model.weights_bytes, model.num_pages) == (128, 1)
    assert (tmp_path / "out" / WEIGHTS_FILE).stat().st_size == 128
    assert CompiledModel.from_json(model.to_json()) == model


@pytest.mark.parametrize("make", [dense, convolutional])
def test_instances_of_one_network_share_an_architecture(
    make: Callable[..., onnx.ModelProto], tmp_path: Path
) -> None:
    models = [
        compiled(write(make(seed=seed), tmp_path / f"s{seed}"), tmp_path / f"o{seed}")
        for seed in (1, 2)
    ]
    assert models[0].architecture_id == models[1].architecture_id
    assert models[0].weights == models[1].weights
    assert models[0].weights_sha256 != models[1].weights_sha256


def test_names_make_no_architecture_but_shapes_do(tmp_path: Path) -> None:
    plain = compiled(write(dense(), tmp_path / "a"), tmp_path / "oa")
    renamed = compiled(write(dense(x="zebra", y="apple"), tmp_path / "b"), tmp_path / "ob")
    wider = compiled(write(dense(rows=5), tmp_path / "c"), tmp_path / "oc")
    assert renamed.architecture_id == plain.architecture_id != wider.architecture_id
    assert renamed.inputs[0].spec.name == "zebra"


@pytest.mark.parametrize("datatype", [each for each in DATATYPES if DATATYPES[each].num_bytes])
def test_every_datatype_goes_through_unchanged(datatype: str, tmp_path: Path) -> None:
    element_type = DATATYPES[datatype].onnx
    # Concat exists for every datatype.
    model = make_model(
        [helper.make_node("Concat", ["x", "x"], ["y"], axis=1)],
        inputs=[("x", element_type, ["n", 3])],
        outputs=[("y", element_type, ["n", 6])],
    )
    source = write(model, tmp_path / "source")
    description = compiled(source, tmp_path / "out")
    assert description.inputs[0].spec == TensorSpec("x", datatype, (3,))
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    x = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    (found,) = run_compiled(tmp_path / "out", description, [x])
    assert found == np.concatenate([x, x], axis=1).tobytes()


def test_a_model_without_weights_compiles_onto_one_page(tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Relu", ["x"], ["y"])], outputs=[("y", TensorProto.FLOAT, ["n", 4])]
    )
    description = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert (description.weights_bytes, description.num_pages) == (0, 1)


def test_a_graph_whose_operators_want_constants_lifts_less(tmp_path: Path) -> None:
    # Dropout's ratio and Clip's bounds are scalars; the matrix is still lifted.
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node(
                "If",
                ["cond"],
                ["y"],
                then_branch=_branch("h", "low"),
                else_branch=_branch("h", "high"),
            ),
        ],
        inputs=[("x", TensorProto.FLOAT, ["n", 64]), ("c", TensorProto.FLOAT, ["n", 1])],
        outputs=[("y", TensorProto.FLOAT, ["n", 64])],
        weights={
            "w": np.eye(64, dtype=np.float32),
            "low": np.array(-1.0, np.float32),
            "high": np.array(2.0, np.float32),
        },
    )
    decide = [
        helper.make_node("ReduceMax", ["c"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "low"], ["cond"]),
    ]
    nodes = [*decide, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    description = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    x = np.random.default_rng(0).random((2, 64), dtype=np.float32)
    for value, added in ((0.0, -1.0), (-5.0, 2.0)):
        c = np.full((2, 1), value, np.float32)
        (found,) = run_compiled(tmp_path / "out", description, [x, c])
        np.testing.assert_allclose(np.frombuffer(found, np.float32).reshape(2, 64), x + added)
    assert 64 * 64 * 4 in [weight.num_bytes for weight in description.weights]


def _branch(value: str, added: str) -> onnx.GraphProto:
    return helper.make_graph(
        [helper.make_node("Add", [value, added], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )


def test_a_quantised_table_lies_in_pages_and_a_quantised_factor_in_the_graph(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    model = make_model(
        [
            helper.make_node("Gather", ["table", "i"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale"], ["e"]),
            helper.make_node("DynamicQuantizeLinear", ["e"], ["r", "rs", "rz"]),
            helper.make_node("MatMulInteger", ["r", "factor", "rz"], ["p"]),
            helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
        ],
        inputs=[("i", TensorProto.INT64, ["n"])],
        outputs=[("y", TensorProto.FLOAT, ["n", 64])],
        weights={
            "table": random.integers(-128, 128, (100, 64)).astype(np.int8),
            "factor": random.integers(-128, 128, (64, 64)).astype(np.int8),
            "scale": np.array(0.5, np.float32),
        },
    )
    source = write(model, tmp_path / "source")
    found = compiled(source, tmp_path / "out")
    kinds = [weight.element_type for weight in found.weights if weight.num_bytes >= 1024]
    assert kinds == [TensorProto.INT8]
    assert found.weights_bytes < 2 * 100 * 64
    (raw,) = run_compiled(tmp_path / "out", found, [np.array([99], np.int64)])
    session = ort.InferenceSession(str(source.folder / "model.onnx"))
    (wanted,) = session.run(None, {"i": np.array([99], np.int64)})
    assert raw == wanted.tobytes()


def test_a_fixed_batch_of_one_is_served_one_by_one(tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Relu", ["x"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, [1, 4])],
        outputs=[("y", TensorProto.FLOAT, [1, 4])],
    )
    description = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert description.fixed_batch
    tensors = [TensorSpec("x", "FP32", (4,))]
    assert LIMITS.usable_batch_sizes(tensors, [1, 2, 4], fixed_batch=True) == (1,)
    with pytest.raises(ModelError, match=r"fixed to 1, but batch sizes \[2, 4\]"):
        LIMITS.usable_batch_sizes(tensors, [2, 4], fixed_batch=True)


def test_batches_too_large_for_the_io_memory_are_left_out() -> None:
    tensors = [TensorSpec("x", "UINT8", (300_000,))]
    assert LIMITS.usable_batch_sizes(tensors, [1, 2, 4], fixed_batch=False) == (1, 2)
    with pytest.raises(ModelError, match="batch of 4 have 1200000 bytes, more than"):
        LIMITS.usable_batch_sizes(tensors, [4], fixed_batch=False)


def test_open_dimensions_can_be_fixed(tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Relu", ["x"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, ["n", "height", 2])],
        outputs=[("y", TensorProto.FLOAT, ["n", "height", 2])],
    )
    folder = write(model, tmp_path / "source").folder
    source = ModelSource(folder, {"height": 7})
    assert compiled(source, tmp_path / "out").outputs[0].spec.row_shape == (7, 2)
    assert describe_model(source).outputs[0].spec.row_shape == (7, 2)
    for sizes, words in (
        ({"width": 7}, "'width': no input has it; found 'height'"),
        ({"n": 7}, "'n' is the batch dimension"),
        ({"height": 0}, "'height': found size 0"),
        (
            {},
            r"besides the batch: 'height'; write .* in config.toml: dimensions = { height = SIZE }",
        ),
    ):
        with pytest.raises(ModelError, match=words):
            describe_model(ModelSource(folder, sizes))


def test_open_dimensions_can_be_fixed_by_their_place(tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Add", ["x", "z"], ["y"])],
        inputs=[
            ("x", TensorProto.FLOAT, ["n", "height", None, 2]),
            ("z", TensorProto.FLOAT, ["n", "height", 1, 1]),
        ],
        outputs=[("y", TensorProto.FLOAT, ["n", "height", None, 2])],
    )
    folder = write(model, tmp_path / "source").folder
    # A size of a fixed dimension or of the batch is ignored here. The controller compares it.
    sizes = {"x[0]": 9, "x[1]": 7, "x[2]": 5, "x[3]": 4, "z[1]": 7}
    assert describe_model(ModelSource(folder, sizes)).outputs[0].spec.row_shape == (7, 5, 2)
    # A symbol's own size holds before that of a place.
    sizes["height"] = 8
    assert describe_model(ModelSource(folder, sizes)).outputs[0].spec.row_shape == (8, 5, 2)
    with pytest.raises(
        ModelError, match=r'in config.toml: dimensions = { height = SIZE, "x\[2\]" = SIZE }'
    ):
        describe_model(ModelSource(folder, {}))
    with pytest.raises(
        ModelError,
        match=r"'q\[1\]': no input has it; found 'height', 'x\[2\]' of inputs 'x', 'z'"
        r" \(config.pbtxt gives sizes by its dims\); fixed dimension 'n' is the",
    ):
        describe_model(ModelSource(folder, {"q[1]": 3, "n": 2}))


def test_all_open_dimensions_are_named_at_once_with_the_lines_to_write(tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Add", ["x", "z"], ["y"])],
        inputs=[
            ("x", TensorProto.FLOAT, ["n", "channels", "p2o.DynamicDimension.1", 2]),
            ("z", TensorProto.FLOAT, ["n", "channels", 1, "width"]),
        ],
        outputs=[("y", TensorProto.FLOAT, ["n", "channels", None, None])],
    )
    with pytest.raises(ModelError) as refused:
        describe_model(write(model, tmp_path))
    words = str(refused.value)
    assert "'channels', 'p2o.DynamicDimension.1', 'width'" in words
    line = words.partition("config.toml: ")[2].replace("SIZE", "3")
    assert tomllib.loads(line)["dimensions"] == {
        "channels": 3,
        "p2o.DynamicDimension.1": 3,
        "width": 3,
    }


def bags(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model of two inputs, whose first dimensions have symbols of their own."""
    return make_model(
        nodes,
        inputs=[("ids", TensorProto.INT64, ["n"]), ("offsets", TensorProto.INT64, ["bags"])],
        outputs=[("y", TensorProto.INT64, ["bags", 2])],
        weights={"axis": np.array([0]), "end": np.array([1]), "two": np.array([2])},
    )


SUM_OF_ALL = (
    helper.make_node("ReduceSum", ["ids", "axis"], ["sum"], keepdims=1),
    helper.make_node("Shape", ["offsets"], ["num"]),
    helper.make_node("Concat", ["num", "two"], ["shape"], axis=0),
)


def test_where_first_dimensions_need_not_be_equal_a_request_is_one_run(tmp_path: Path) -> None:
    model = bags(*SUM_OF_ALL, helper.make_node("Expand", ["sum", "shape"], ["y"]))
    done = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert done.open is not None
    assert done.open.symbols == ("n", "bags")
    assert {tensor.spec.axis for tensor in (*done.inputs, *done.outputs)} == {None}


def test_a_batch_with_a_symbol_in_each_input_is_served_row_by_row_where_rows_meet(
    tmp_path: Path,
) -> None:
    model = bags(
        *SUM_OF_ALL,
        helper.make_node("Add", ["ids", "offsets"], ["both"]),
        helper.make_node("Add", ["both", "sum"], ["z"]),
        helper.make_node("Unsqueeze", ["z", "end"], ["column"]),
        helper.make_node("Expand", ["column", "shape"], ["y"]),
    )
    done = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert "ReduceSum" in done.one_by_one


def relu(
    shape: Shape | None, out: Shape | None = None, element_type: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    return make_model(
        [helper.make_node("Relu", ["x"], ["y"])],
        inputs=[("x", element_type, shape)],
        outputs=[("y", element_type, out or shape)],
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            make_model(
                [helper.make_node("Identity", ["x"], ["y"])],
                inputs=[("x", TensorProto.COMPLEX64, ["n", 1])],
                outputs=[("y", TensorProto.COMPLEX64, ["n", 1])],
            ),
            "input 'x' has datatype COMPLEX64, expected one of BOOL",
        ),
        (
            make_model(
                [helper.make_node("Constant", [], ["y"], value_float=1.0)],
                inputs=[],
                outputs=[("y", TensorProto.FLOAT, [])],
            ),
            "no input",
        ),
        (
            make_model([helper.make_node("Frobnicate", ["x"], ["y"])]),
            "not valid ONNX: .*Frobnicate",
        ),
        (
            make_model(
                [
                    helper.make_node(
                        "BatchNormalization",
                        ["x", "g", "b", "m", "v"],
                        ["y", "mean", "var"],
                        training_mode=1,
                    )
                ],
                weights={name: np.ones(4, dtype=np.float32) for name in "gbmv"},
            ),
            r"makes 'y' is in training mode.*model\.eval\(\)",
        ),
        (make_model([helper.make_node("Relu", ["nobody"], ["y"])]), "not valid ONNX: .*nobody"),
        (
            onnx.parser.parse_model(
                """<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] a, float[n,3] b) => (seq(float[n,k]) y) {
                y = SequenceConstruct(a, b) }"""
            ),
            "^a batch of 1 failed: an output is a sequence of tensors of unlike shapes.*an output for each",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_unfit_model_is_refused_with_the_reason(
    model: onnx.ModelProto, words: str, tmp_path: Path
) -> None:
    source = write(model, tmp_path / "source")
    with pytest.raises(ModelError, match=words):
        compiled(source, tmp_path / "out")


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("CumSum", ["x", "axis"], ["y"])],
        [
            helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["x", "m"], ["y"]),
        ],
    ],
    ids=["later rows add up", "every row is centred"],
)
def test_rows_that_depend_on_each_other_are_run_one_by_one(
    nodes: list[onnx.NodeProto], tmp_path: Path
) -> None:
    model = make_model(
        nodes,
        outputs=[("y", TensorProto.FLOAT, ["n", 4])],
        weights={"axis": np.array(0, dtype=np.int64)},
    )
    found = compiled(write(model, tmp_path / "model"), tmp_path / "out")
    assert "of a row in a batch of 2" in found.one_by_one or "rows of a batch" in found.one_by_one


@pytest.mark.parametrize("kept", ["x", "weight"])
def test_narrow_numbers_that_no_node_makes_are_an_output(kept: str, tmp_path: Path) -> None:
    shape: Shape = ["n", 4] if kept == "x" else [3]
    model = make_model(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        inputs=[("x", TensorProto.INT4, ["n", 4])],
        outputs=[("y", TensorProto.FLOAT, ["n", 4]), (kept, TensorProto.INT4, shape)],
        opset=21,
    )
    model.ir_version = 10
    model.graph.initializer.append(helper.make_tensor("weight", TensorProto.INT4, [3], [1, 2, 3]))
    found = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert [tensor.spec.datatype for tensor in found.outputs] == ["FP32", "INT8"]


@pytest.mark.parametrize("most", [2, 16])
def test_an_output_of_some_rows_of_a_batch_belongs_to_a_request(most: int, tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Slice", ["x", "start", "end", "start"], ["y"])],
        outputs=[("y", TensorProto.FLOAT, None)],
        weights={"start": np.array([0]), "end": np.array([most])},
    )
    source = replace(
        write(model, tmp_path / "source"), batch_sizes=(1, 2, 4, 8, 16)[: most // 2 + 1]
    )
    found = compiled(source, tmp_path / "out")
    assert found.open is not None
    assert found.open.symbols == ("n",)
    assert [tensor.spec.shape(-1) for tensor in (*found.inputs, *found.outputs)] == [(-1, 4)] * 2


@pytest.mark.parametrize(
    ("nodes", "constants", "inputs", "shape"),
    [
        (
            [
                helper.make_node("Greater", ["x", "half"], ["c"]),
                helper.make_node("Compress", ["x", "c"], ["z"]),
                helper.make_node("Unsqueeze", ["z", "axis"], ["y"]),
            ],
            {"half": np.array(0.5, np.float32), "axis": np.array([0])},
            [("x", TensorProto.FLOAT, ["n"])],
            (1, -1),
        ),
        (
            [helper.make_node("Expand", ["x", "s"], ["y"])],
            {},
            [("x", TensorProto.FLOAT, [1, 4]), ("s", TensorProto.INT64, [3])],
            (-1, -1, 4),
        ),
        (
            [helper.make_node("Relu", ["x"], ["y"])],
            {},
            [("x", TensorProto.FLOAT, ["n", "n"])],
            (-1, -1),
        ),
    ],
    ids=["chosen", "asked for", "square"],
)
def test_an_output_whose_shape_follows_from_values_has_open_dimensions(
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    inputs: list[tuple[str, int, Shape]],
    shape: tuple[int, ...],
    tmp_path: Path,
) -> None:
    model = make_model(
        nodes, inputs=inputs, outputs=[("y", TensorProto.FLOAT, None)], weights=constants
    )
    found = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert found.open is not None
    assert found.outputs[0].spec.shape(1) == shape


def test_an_output_whose_rank_follows_from_a_size_has_any(tmp_path: Path) -> None:
    model = make_model(
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, [6]), ("s", TensorProto.INT64, ["k"])],
        outputs=[("y", TensorProto.FLOAT, ["a", "b", "c"])],
    )
    found = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    spec = found.outputs[0].spec
    assert all(spec.allows(shape) for shape in ((6,), (2, 3), (1, 2, 3)))
    most = spec.vary.most if spec.vary else ()
    assert len(spec.shape(1)) == len(most) == 8


def test_an_output_that_counts_rows_belongs_to_a_request(tmp_path: Path) -> None:
    model = make_model(
        [
            helper.make_node("Shape", ["x"], ["s"], start=0, end=1),
            helper.make_node("Sub", ["s", "two"], ["less"]),
            helper.make_node("Max", ["less", "zero"], ["k"]),
            helper.make_node("Relu", ["x"], ["y"]),
        ],
        outputs=[("y", TensorProto.FLOAT, ["n", 4]), ("k", TensorProto.INT64, [1])],
        weights={"two": np.array([2]), "zero": np.array([0])},
    )
    found = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert [tensor.spec.axis for tensor in (*found.inputs, *found.outputs)] == [None] * 3


def test_an_operator_of_another_domain_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model([helper.make_node("Magic", ["x"], ["y"], domain="com.example")])
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(
        ModelError, match=r"onnxruntime does not have the operators com\.example\.Magic;"
    ):
        compiled(write(model, tmp_path / "source"), tmp_path / "out")


def test_all_that_is_wrong_is_said_at_once_with_what_to_write(tmp_path: Path) -> None:
    normalised = [
        helper.make_node(
            "BatchNormalization",
            [before, "g", "b", "m", "v"],
            [after, f"mean_{after}", f"var_{after}"],
            training_mode=1,
        )
        for before, after in (("x", "h"), ("h", "i"))
    ]
    foreign = [
        helper.make_node("Magic", ["i"], ["j"], domain="com.example"),
        helper.make_node("Trick", ["j"], ["y"], domain="com.example"),
    ]
    model = make_model(
        [*normalised, *foreign],
        inputs=[("x", TensorProto.FLOAT, ["n", 300_000, "height", "width"])],
        outputs=[("y", TensorProto.FLOAT, None)],
        weights={name: np.ones(300_000, np.float32) for name in "gbmv"},
    )
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    source = replace(write(model, tmp_path / "source"), fixed_dimensions={"depth": 3, "height": -9})
    with pytest.raises(ModelError) as caught:
        describe_model(source)
    assert str(caught.value).split("; ") == [
        "onnxruntime does not have the operators com.example.Magic, com.example.Trick",
        "export the model with ONNX's own operators, or serve it with its runtime in a container",
        "BatchNormalization that makes 'h', 'i' is in training mode, expected training_mode = 0",
        "export the model in evaluation mode (in PyTorch: model.eval())",
        "fixed dimension 'depth': no input has it",
        "found 'height', 'width'",
        "found open dimensions besides the batch: 'height', 'width'",
        "write their sizes in config.toml: dimensions = { height = SIZE, width = SIZE }",
    ]
    source = replace(source, fixed_dimensions={"height": 2, "width": 2})
    limits = Limits(arena_bytes=1 << 20, num_pages=8, io_bytes=1 << 20)
    with pytest.raises(ModelError) as caught:
        compiled(source, tmp_path / "out", limits)
    assert str(caught.value).split("; ")[-4:] == [
        "the weights have 4800000 bytes, more than the weight arena's 1048576",
        "start the worker with --arena-mib 5",
        "inputs and outputs of a batch of 1 have 4800000 bytes, more than an action's 1048576",
        "start the worker with --io-mib 19",
    ]


def test_a_line_of_sizes_is_read_as_it_is_said() -> None:
    given = {"height": 7, "length": -20}
    line = sizes_to_write(["x[2]", "width"], given)
    assert line == 'dimensions = { height = 7, length = { max = 20 }, "x[2]" = SIZE, width = SIZE }'
    sizes = tomllib.loads(line.replace("SIZE", "3"))["dimensions"]
    assert sizes == {"height": 7, "length": {"max": 20}, "x[2]": 3, "width": 3}


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"not a model", None])
def test_what_is_not_onnx_is_refused(content: bytes | None, tmp_path: Path) -> None:
    whole = dense().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ModelError, match="is not an ONNX file"):
        compiled(ModelSource(tmp_path), tmp_path / "out")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model\.onnx"):
        compiled(ModelSource(tmp_path), tmp_path / "out")


def external(tmp_path: Path, location: str) -> ModelSource:
    model = dense()
    folder = tmp_path / "source"
    folder.mkdir()
    for tensor in model.graph.initializer:
        data = numpy_helper.to_array(tensor).tobytes()
        (folder / tensor.name).write_bytes(data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location.format(name=tensor.name))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return ModelSource(folder)


def test_external_data_inside_the_folder_is_read(tmp_path: Path) -> None:
    inside = compiled(external(tmp_path, "{name}"), tmp_path / "out")
    plain = compiled(write(dense(), tmp_path / "plain"), tmp_path / "plain-out")
    assert inside.weights_sha256 == plain.weights_sha256


@pytest.mark.parametrize("location", ["../source/{name}", "/etc/hostname", "missing", ""])
def test_external_data_outside_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"initializer 'yb': external data in"):
        compiled(external(tmp_path, location), tmp_path / "out")


def test_weights_larger_than_the_arena_or_the_cache_are_refused(tmp_path: Path) -> None:
    source = write(dense(rows=1000), tmp_path / "source")
    with pytest.raises(ModelError, match=r"12012 bytes, more than the weight arena's 100"):
        compiled(source, tmp_path / "a", Limits(arena_bytes=100, num_pages=8, io_bytes=1 << 20))
    with pytest.raises(ModelError, match="more than the weights cache's 0 pages"):
        compiled(source, tmp_path / "b", Limits(arena_bytes=1 << 20, num_pages=0, io_bytes=1 << 20))


def test_inputs_too_large_for_the_io_memory_are_refused_before_any_is_made(tmp_path: Path) -> None:
    row = 1 << 34
    model = make_model(
        [helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=1)],
        inputs=[("x", TensorProto.FLOAT, ["n", row])],
        outputs=[("y", TensorProto.FLOAT, ["n", 1])],
    )
    with pytest.raises(ModelError, match=rf"a batch of 1 have {4 * row} bytes, more than"):
        compiled(write(model, tmp_path / "source"), tmp_path / "out")


def test_a_profile_has_a_duration_for_each_batch_size(tmp_path: Path) -> None:
    compiled(write(dense(), tmp_path / "source"), tmp_path / "out")
    profile = profile_model(tmp_path / "out", [1, 4], silent)
    assert list(profile) == [1, 4]
    assert min(profile.values()) > 0


def test_a_cached_model_is_found_again_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    source = write(dense(), tmp_path / "source")
    cache = CompileCache(tmp_path / "cache", target="here")
    contents = {"model.onnx": hashlib.sha256(b"x").hexdigest()}
    key = cache.key(contents, {})
    assert cache.find(key) is None
    for damage in (GRAPH_FILE, WEIGHTS_FILE, "model.json"):
        with cache.new_folder() as folder:
            model = compile_model(source, folder, LIMITS, silent)
            published = cache.publish(folder, key)
        assert CompileCache(tmp_path / "cache", target="here").find(key) == (published, model)
        (published / damage).write_bytes((published / damage).read_bytes()[:-10])
        assert cache.find(key) is None
        assert not published.exists()
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def test_a_thousand_copies_read_the_cache_once_and_notice_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path / "cache", target="here")
    key = cache.key({}, {})
    with cache.new_folder() as folder:
        model = compile_model(write(dense(), tmp_path / "source"), folder, LIMITS, silent)
        published = cache.publish(folder, key)
    read: list[str] = []

    def reading(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("worker.compiling.cache.sha256_of", reading)
    for _ in range(3):
        assert cache.find(key) == (published, model)
    assert sorted(read) == sorted([GRAPH_FILE, WEIGHTS_FILE])
    # As long as before, and a time that the clock's resolution cannot hide.
    weights = published / WEIGHTS_FILE
    weights.write_bytes(bytes(byte ^ 1 for byte in weights.read_bytes()))
    os.utime(weights, ns=(0, 0))
    assert cache.find(key) is None
    assert not published.exists()


def test_a_file_that_another_worker_adds_while_it_is_looked_for_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = FileStore(tmp_path), FileStore(tmp_path)
    digest = hashlib.sha256(b"x").hexdigest()

    def add_behind_our_back(path: Path) -> str:
        found = sha256_of(path)
        received = theirs.new_file()
        received.write_bytes(b"x")
        theirs.add(received, digest)
        return found

    monkeypatch.setattr("worker.models.file_store.sha256_of", add_behind_our_back)
    assert not ours.has(digest)
    monkeypatch.undo()
    assert ours.has(digest)


def test_what_a_killed_worker_left_half_done_is_thrown_away_a_day_later(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    old, recent = store.new_file(), store.new_file()
    folder = tmp_path / "scratch" / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights.bin").write_bytes(b"x")
    for path in (old, folder):
        os.utime(path, (time.time() - 100_000,) * 2)
    FileStore(tmp_path)
    assert list((tmp_path / "scratch").iterdir()) == [recent]


def test_the_cache_key_names_everything_that_matters(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, target="here")
    keys = {
        cache.key({"model.onnx": "aa"}, {}),
        cache.key({"model.onnx": "ab"}, {}),
        cache.key({"model.onnx": "aa", "data": "bb"}, {}),
        cache.key({"model.onnx": "aa"}, {"height": 1}),
        CompileCache(tmp_path, target="there").key({"model.onnx": "aa"}, {}),
    }
    assert len(keys) == 5


def test_an_entry_serves_workers_with_less_room_and_another_one_those_with_more(
    tmp_path: Path,
) -> None:
    cache = CompileCache(tmp_path / "cache", target="here")
    source = replace(write(dense(), tmp_path / "source"), batch_sizes=(1, 2, 4, 8))

    def find_or_compile(io_bytes: int) -> tuple[int, ...]:
        found = cache.find("key", lambda each: each.covers(source.batch_sizes, io_bytes))
        if found is None:
            with cache.new_folder() as folder:
                room = Limits(arena_bytes=64 << 20, num_pages=8, io_bytes=io_bytes)
                model = compile_model(source, folder, room, silent)
                found = cache.publish(folder, "key"), model
        return found[1].tried

    # A row has 28 bytes, and each of both tensors begins on a cache line.
    assert find_or_compile(128) == (1, 2, 4)
    assert find_or_compile(64) == (1, 2, 4)
    assert find_or_compile(1 << 20) == (1, 2, 4, 8)
    assert len(list((tmp_path / "cache" / "compiled").iterdir())) == 2


def test_the_same_graph_with_other_weights_is_not_probed_again(tmp_path: Path) -> None:
    """As a client with a thousand instances of one network offers them."""
    stages: list[str] = []
    for target in (TorchTarget(Precision.FLOAT32), OnnxruntimeTarget()):
        for number, model in enumerate((dense(seed=1), dense(seed=2), dense(seed=3, rows=5))):
            out = tmp_path / type(target).__name__ / str(number)
            out.mkdir(parents=True)
            source = write(model, tmp_path / f"in{number}")
            compile_model(source, out, LIMITS, stages.append, target)
        assert stages.count("probing rows of batch 2") == 2
        stages.clear()


def test_a_profile_that_takes_long_is_cut_short_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "PROFILE_LIMIT_NS", -1)
    compiled(write(dense(), tmp_path / "source"), tmp_path / "out")
    said: list[str] = []
    profile = profile_model(tmp_path / "out", [4, 1, 2], said.append)
    assert profile == {1: profile[1], 2: 2 * profile[1], 4: 4 * profile[1]}
    assert [each.partition(": ")[2] for each in said] == [
        "",
        "batch 2 is estimated from 1",
        "batch 4 is estimated from 2",
    ]


@pytest.mark.parametrize(
    ("per_row", "num_measured"),
    [
        # One row may run by itself faster than as one of two.
        ([10, 12, 9, 8, 7], 5),
        ([10, 8, 7.9, 8.2, 5], 4),
        ([10, 9.9, 9.8, 1, 1], 3),
    ],
)
def test_batches_that_gain_nothing_are_not_measured(
    per_row: list[float], num_measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1, 2, 4, 8, 16]
    measured = iter([round(size * ms * NS_PER_MS) for size, ms in zip(sizes, per_row, strict=True)])
    monkeypatch.setattr(compile, "_least_ns", lambda _: next(measured))
    compiled(write(dense(), tmp_path / "source"), tmp_path / "out")
    said: list[str] = []
    profile = profile_model(tmp_path / "out", sizes, said.append)
    last = num_measured - 1
    expected = [size * per_row[min(at, last)] for at, size in enumerate(sizes)]
    assert [each / NS_PER_MS for each in profile.values()] == pytest.approx(expected)
    assert sum("larger batches gain nothing" in each for each in said) == 5 - num_measured


def test_profiles_are_remembered_and_nonsense_is_not(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, target="here")
    assert cache.read_profile("a") == {}
    cache.write_profile("a", {1: 10, 2: 15})
    assert CompileCache(tmp_path, target="here").read_profile("a") == {1: 10, 2: 15}
    assert CompileCache(tmp_path, target="there").read_profile("a") == {}
    (written,) = (tmp_path / "profiles").iterdir()
    written.write_text("[1")
    assert cache.read_profile("a") == {}


def test_the_compiler_process_compiles_refuses_and_survives(tmp_path: Path) -> None:
    good = write(dense(), tmp_path / "good")
    bad = write(relu(["n", None]), tmp_path / "bad")
    stages: list[str] = []

    async def scenario() -> None:
        compiler = Compiler(time_limit_s=120)
        try:
            (tmp_path / "out").mkdir()
            model = await compiler.compile(good, tmp_path / "out", LIMITS, stages.append)
            assert model == CompiledModel.from_json((tmp_path / "out" / "model.json").read_text())
            with pytest.raises(
                ModelError, match=r"open dimensions besides the batch: 'x\[1\]'; write"
            ):
                await compiler.describe(bad)
            assert list(await compiler.profile(tmp_path / "out", [1], stages.append)) == [1]
        finally:
            await compiler.close()

    asyncio.run(scenario())
    assert stages == [
        "checking",
        "optimising",
        "lifting weights",
        "probing rows of batch 2",
        "profiling batch 1",
    ]


def endless() -> onnx.ModelProto:
    """A model that is valid, accepted, and never ends."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Identity", ["value"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.FLOAT, None),
        ],
    )
    return make_model(
        [helper.make_node("Loop", ["times", "start", "x"], ["y"], body=body)],
        outputs=[("y", TensorProto.FLOAT, ["n", 4])],
        weights={"times": np.array(2**62, np.int64), "start": np.array(True)},
    )


def test_a_model_that_never_ends_costs_a_refusal(tmp_path: Path) -> None:
    async def scenario() -> None:
        compiler = Compiler(time_limit_s=6)
        try:
            (tmp_path / "out").mkdir()
            with pytest.raises(ModelError, match="more than 6 s to compile"):
                await compiler.compile(
                    write(endless(), tmp_path / "bad"), tmp_path / "out", LIMITS, silent
                )
            patient = Compiler(time_limit_s=120)
            try:
                model = await patient.describe(write(dense(), tmp_path / "good"))
            finally:
                await patient.close()
            assert model.inputs[0].spec.name == "x"
        finally:
            await compiler.close()

    asyncio.run(scenario())


def test_a_compiler_that_never_ends_dies_with_its_worker(tmp_path: Path) -> None:
    """The worker is killed, so that it cannot end anything."""
    source = write(endless(), tmp_path / "bad")
    (tmp_path / "out").mkdir()
    script = (
        "import asyncio, pathlib, sys\n"
        "from worker.compiling.compiler import Compiler\n"
        "from worker.models.model_files import Limits, ModelSource\n"
        "compiler = Compiler(time_limit_s=600, long_s=600)\n"
        "def told(stage):\n"
        "    print(compiler.pids[0] if stage == 'optimising' else '', flush=True)\n"
        "source, out = ModelSource(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2])\n"
        "asyncio.run(compiler.compile(source, out, Limits(1 << 26, 8, 1 << 20), told))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(source.folder), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        pid = next(int(line) for line in worker.stdout if line.strip())
        assert lives(pid)
        worker.kill()
    try:
        until(lambda: not lives(pid), what="the compiler ends")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_compiler_that_dies_costs_a_refusal_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    async def scenario() -> None:
        # The job keeps its seat, whose process dies while it works, not between two jobs.
        compiler = Compiler(time_limit_s=600, long_s=600)

        def kill(stage: str) -> None:
            if stage == "optimising":
                (pid,) = compiler.pids
                os.kill(pid, signal.SIGKILL)

        bad = write(endless(), tmp_path / "bad")
        try:
            with pytest.raises(ModelError, match="the compiler was killed by SIGKILL while"):
                await compiler.compile(bad, tmp_path / "out", LIMITS, kill)
            await compiler.describe(write(dense(), tmp_path / "good"))
        finally:
            await compiler.close()

    asyncio.run(scenario())


# --- texts ------------------------------------------------------------------------------------------


def texts_model(*nodes: onnx.NodeProto, out: int = TensorProto.FLOAT) -> onnx.ModelProto:
    model = make_model(
        list(nodes),
        inputs=[("x", TensorProto.STRING, ["n", 2])],
        outputs=[("y", out, None)],
        opset=20,
    )
    model.ir_version = 9
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model


def encoder(column: int, *texts: str) -> list[onnx.NodeProto]:
    """Nodes as scikit-learn's converter writes them: they fail on texts of another column."""
    place = helper.make_node("Constant", [], [f"i{column}"], value_ints=[column])
    extract = helper.make_node(
        "ArrayFeatureExtractor", ["x", f"i{column}"], [f"c{column}"], domain="ai.onnx.ml"
    )
    encode = helper.make_node(
        "OneHotEncoder",
        [f"c{column}"],
        [f"y{column}"],
        domain="ai.onnx.ml",
        cats_strings=texts,
        zeros=0,
    )
    return [place, extract, encode]


def test_texts_that_a_model_knows_are_tried_in_their_columns(tmp_path: Path) -> None:
    concat = helper.make_node("Concat", ["y0", "y1"], ["y"], axis=2)
    model = texts_model(*encoder(0, "red", "blue"), *encoder(1, "S", "M", "L"), concat)
    description = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert description.texts == (("red", "blue"), ("S", "M", "L"))
    assert not description.one_by_one
    assert description.usual_bytes == (4 * 5,)


def test_a_text_of_all_rows_is_drawn_once(tmp_path: Path) -> None:
    model = make_model(
        [
            helper.make_node("Relu", ["x"], ["y"]),
            helper.make_node("Identity", ["language"], ["spoken"]),
        ],
        inputs=[("x", TensorProto.FLOAT, ["n", 2]), ("language", TensorProto.STRING, [])],
        outputs=[("y", TensorProto.FLOAT, ["n", 2]), ("spoken", TensorProto.STRING, [])],
    )
    description = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    inputs = [each.spec for each in description.inputs]
    assert [each.axis for each in inputs] == [0, None]
    _, known = compile.sample_inputs(inputs, 3, texts=[["en", "fr"]])
    assert elements_of("BYTES", known).tolist() in (["en"], ["fr"])


def test_rows_of_texts_that_mix_are_found(tmp_path: Path) -> None:
    model = texts_model(
        helper.make_node("Constant", [], ["zero"], value_ints=[0]),
        helper.make_node("Gather", ["x", "zero"], ["first"], axis=0),
        helper.make_node("StringConcat", ["x", "first"], ["y"]),
        out=TensorProto.STRING,
    )
    description = compiled(write(model, tmp_path / "source"), tmp_path / "out")
    assert "Gather makes one result of all rows" in description.one_by_one


def test_texts_of_neighbours_in_an_answer_are_found_by_trying() -> None:
    spec = TensorSpec("x", "BYTES", (1,))

    def run(rows: int, inputs: list[Bytes]) -> list[Bytes]:
        texts = elements_of("BYTES", inputs[0])
        return [bytes_of("BYTES", np.array([text + texts[0] for text in texts], np.object_))]

    def alone(rows: int, inputs: list[Bytes]) -> list[Bytes]:
        return inputs

    probes = RowProbes(alone, [spec], (("red", "blue"),))
    assert probes.why_mixed(alone, [spec], 4, coarse=False) == ""
    assert "output 'x' of a row" in probes.why_mixed(run, [spec], 4, coarse=False)


def test_a_gpu_refuses_texts_with_a_clear_line(tmp_path: Path) -> None:
    model = texts_model(helper.make_node("Identity", ["x"], ["y"]), out=TensorProto.STRING)
    folder = tmp_path / "out"
    folder.mkdir()
    source = write(model, tmp_path / "source")
    with pytest.raises(ModelError, match="datatype STRING, which a GPU does not run"):
        compile_model(source, folder, LIMITS, silent, TorchTarget(Precision.FLOAT32))
