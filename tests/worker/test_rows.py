"""Rows of several clients share a batch: which models bear that, as the graph says and as probes find out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from clockwright.elements import elements_of
from clockwright.errors import ModelError
from clockwright.wire.tensors import TensorSpec
from tests.kit.mixing_models import MixingModel, models
from tests.kit.worker_models import cpu_device, offer, prepared
from worker.compiling.compile import compile_model
from worker.compiling.for_torch import TorchTarget
from worker.compiling.onnx_model import model_inputs, tensor_spec
from worker.compiling.row_flow import follow_rows
from worker.compiling.row_probes import RowProbes
from worker.devices.cpu import CpuDevice
from worker.engines.onnxruntime import Bytes, aligned_bytes
from worker.models.file_store import FileStore
from worker.models.model_files import Limits, ModelSource
from worker.models.precision import Precision

LIMITS = Limits(arena_bytes=256 << 20, num_pages=16, io_bytes=64 << 20)
SIZES = (1, 2, 4, 8)


def small_models() -> list[MixingModel]:
    """Large networks cost seconds here; tests/system/test_mixing.py serves all of them with `--long`."""
    return [each for each in models().values() if each.name not in ("resnet18_v1", "squeezenet1-1")]


def compiled_one_by_one(
    model: onnx.ModelProto, folder: Path, batch_sizes: tuple[int, ...] = SIZES
) -> str:
    source, target = folder / "source", folder / "target"
    source.mkdir(parents=True)
    target.mkdir()
    onnx.save(model, source / "model.onnx")
    found = compile_model(ModelSource(source, {}, batch_sizes), target, LIMITS, lambda stage: None)
    return found.one_by_one


def original(model: onnx.ModelProto) -> tuple[list[TensorSpec], Callable[..., list[Bytes]]]:
    """Plain onnxruntime, as probes want it."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    specs = [tensor_spec(value, "input") for value in model_inputs(model.graph)]

    def run(batch_size: int, arrays: list[Bytes]) -> list[Bytes]:
        feeds = {
            spec.name: elements_of(spec.datatype, array).reshape(batch_size, *spec.row_shape)
            for spec, array in zip(specs, arrays, strict=True)
        }
        try:
            found = session.run(None, feeds)
        except Exception as error:
            raise ModelError(str(error)) from None
        return [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in found]

    return specs, run


def output_specs(model: onnx.ModelProto, run: Callable[..., list[Bytes]]) -> list[TensorSpec]:
    numbers: dict[int, str] = {
        TensorProto.FLOAT: "FP32",
        TensorProto.FLOAT16: "FP16",
        TensorProto.DOUBLE: "FP64",
        TensorProto.INT64: "INT64",
    }
    zeros = [
        aligned_bytes(tensor_spec(v, "input").batch_bytes(1)) for v in model_inputs(model.graph)
    ]
    specs = []
    for value, array in zip(model.graph.output, run(1, zeros), strict=True):
        datatype = numbers[value.type.tensor_type.elem_type]
        count = len(elements_of(datatype, array))
        specs.append(TensorSpec(value.name, datatype, (count,)))
    return specs


def test_rows_share_a_batch_when_they_may_and_only_then(tmp_path: Path) -> None:
    for model in small_models():
        reason = compiled_one_by_one(model.model, tmp_path / model.name)
        assert (not reason) == model.row_by_row, (model.name, reason)
        assert model.repeats or "answers by chance" in reason, (model.name, reason)


def test_the_probes_find_out_without_the_graph() -> None:
    for model in small_models():
        if model.repeats:
            specs, run = original(model.model)
            probes = RowProbes(run, specs)
            outputs = output_specs(model.model, run)
            coarse = follow_rows(model.model).coarse
            reasons = [probes.why_mixed(run, outputs, size, coarse=coarse) for size in SIZES[1:]]
            assert (not any(reasons)) == model.row_by_row, (model.name, reasons)


def test_the_graph_suspects_no_model_that_keeps_rows_apart() -> None:
    for model in small_models():
        flow = follow_rows(model.model)
        assert not model.row_by_row or flow.mixed == "", model.name
        assert model.repeats or flow.chance, model.name


@pytest.mark.parametrize(
    "name", ["mlp-16-64-8-int8", "tiny_conv-int8", "encoder-int8", "int-mix", "control-if"]
)
def test_a_device_serves_what_mixes_at_batch_one_and_says_why(name: str, tmp_path: Path) -> None:
    device = CpuDevice(
        limits=LIMITS,
        io_pool_bytes=64 << 20,
        files=FileStore(tmp_path),
        cache_dir=tmp_path,
        compile_limit_s=120,
    )
    content = models()[name].model.SerializeToString()
    files = FileStore(tmp_path)
    many, alone, only_four = prepared(
        device,
        offer(files, "many", content, SIZES),
        offer(files, "alone", content, (1,)),
        offer(files, "only-four", content, (4,)),
    )
    assert list(many.exec_ns) == list(alone.exec_ns) == list(only_four.exec_ns) == [1]
    assert "of a batch" in many.one_by_one
    # Who asks for single rows has no need to be told.
    assert alone.one_by_one == ""
    assert only_four.one_by_one == many.one_by_one


def test_a_size_that_nobody_looked_at_is_not_served_from_the_cache(tmp_path: Path) -> None:
    files = FileStore(tmp_path)
    content = models()["int-mix"].model.SerializeToString()
    first, second = prepared(
        cpu_device(tmp_path), offer(files, "a", content, (1,)), offer(files, "b", content, (1, 2))
    )
    assert (first.one_by_one, list(first.exec_ns)) == ("", [1])
    assert "of a batch" in second.one_by_one
    assert list(second.exec_ns) == [1]


@pytest.mark.parametrize("name", ["mlp-16-64-8", "tiny_conv", "int-mix", "batch-softmax"])
def test_the_torch_engine_is_asked_too(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    onnx.save(models()[name].model, source / "model.onnx")
    precision = TorchTarget(Precision.FLOAT32)
    found = compile_model(
        ModelSource(source, {}, SIZES), target, LIMITS, lambda stage: None, precision
    )
    assert (not found.one_by_one) == models()[name].row_by_row


def test_a_model_that_fails_in_larger_batches_is_run_one_by_one(tmp_path: Path) -> None:
    """Exporters write the batch of one that they saw into a Reshape, and leave the dimension open."""
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])],
        [numpy_helper.from_array(np.array([1, 6]), "shape")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert "a batch of 2 failed" in compiled_one_by_one(model, tmp_path)


def graph_of(*nodes: onnx.NodeProto, opset: int = 17, **constants: object) -> onnx.ModelProto:
    """A graph from `x` of four floats to `y`."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


node = helper.make_node
ROWS = (node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["rows"], axis=0))
#: Larger than any number that a probe sends.
RARE = np.float32(1e6)


def branch(name: str, operator: str) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([node(operator, ["x"], [name])], name, [], [output])


BODY = helper.make_graph(
    [node("Add", ["v", "v"], ["w"]), node("Identity", ["go"], ["on"])],
    "body",
    [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
    ],
    [
        helper.make_tensor_value_info("on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
    ],
)
MEET_RARELY = {
    "if": graph_of(
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "rare"], ["c"]),
        node("If", ["c"], ["y"], then_branch=branch("a", "Sin"), else_branch=branch("b", "Neg")),
        rare=RARE,
    ),
    "clip": graph_of(
        node("ReduceL2", ["x"], ["n"], keepdims=0),
        node("Div", ["rare", "n"], ["r"]),
        node("Min", ["r", "one"], ["f"]),
        node("Mul", ["x", "f"], ["y"]),
        rare=RARE,
        one=np.float32(1),
    ),
    "loop": graph_of(
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Div", ["m", "rare"], ["d"]),
        node("Clip", ["d", "one", ""], ["c"]),
        node("Cast", ["c"], ["n"], to=TensorProto.INT64),
        node("Loop", ["n", "", "x"], ["y"], body=BODY),
        rare=RARE,
        one=np.float32(1),
    ),
}


@pytest.mark.parametrize("model", MEET_RARELY.values(), ids=MEET_RARELY)
def test_the_graph_shows_rows_that_meet_too_rarely_for_a_probe(model: onnx.ModelProto) -> None:
    specs, run = original(model)
    outputs = [TensorSpec("y", "FP32", (4,))]
    probes = RowProbes(run, specs)
    assert not any(probes.why_mixed(run, outputs, size, coarse=False) for size in SIZES[1:])
    assert "makes one result of all rows of a batch" in follow_rows(model).mixed


@pytest.mark.parametrize(
    ("model", "mixed"),
    [
        (graph_of(node("ReduceMax", ["x"], ["m"], axes=[0]), node("Relu", ["x"], ["y"])), ""),
        (
            graph_of(
                node("ReduceMax", ["x"], ["m"], axes=[0]),
                node("Shape", ["m"], ["s"]),
                node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
                node("ReduceMax", ["f"], ["k"], keepdims=0),
                node("Add", ["x", "k"], ["y"]),
            ),
            "",
        ),
        (
            graph_of(
                node("Gather", ["x", "zero"], ["f"], axis=0), node("Sub", ["x", "f"], ["y"]), zero=0
            ),
            "Gather makes one result of all rows of a batch",
        ),
        (
            graph_of(
                node("DynamicQuantizeMatMul", ["x", "w", "scale"], ["y"], domain="com.microsoft"),
                w=np.ones((4, 4), dtype=np.int8),
                scale=np.ones(1, dtype=np.float32),
            ),
            "DynamicQuantizeMatMul takes one scale from all rows of a batch",
        ),
        (graph_of(node("FastGelu", ["x"], ["y"], domain="com.microsoft")), ""),
    ],
)
def test_what_the_graph_says(model: onnx.ModelProto, mixed: str) -> None:
    assert follow_rows(model).mixed == mixed


FLOAT_ROWS = (*ROWS, node("Cast", ["rows"], ["count"], to=TensorProto.FLOAT))
PLACES = node("Range", ["zero", "rows", "one"], ["places"])
SEES_ITS_BATCH = {
    "place": graph_of(
        *ROWS,
        PLACES,
        node("Cast", ["places"], ["f"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["f", "axis"], ["column"]),
        node("Mul", ["column", "little"], ["more"]),
        node("Add", ["x", "more"], ["y"]),
        zero=0,
        one=1,
        axis=[1],
        little=np.float32(1e-4),
    ),
    "place in a large table": graph_of(
        *ROWS,
        node("Unsqueeze", ["rows", "first"], ["end"]),
        node("Slice", ["table", "first", "end", "first"], ["more"]),
        node("Add", ["x", "more"], ["y"]),
        zero=0,
        first=[0],
        table=np.arange(8192, dtype=np.float32).reshape(2048, 4) * 1e-6,
    ),
    "number of rows": graph_of(
        *FLOAT_ROWS,
        node("Mul", ["count", "little"], ["more"]),
        node("Add", ["x", "more"], ["y"]),
        zero=0,
        little=np.float32(1e-6),
    ),
    "number of elements": graph_of(
        node("Size", ["x"], ["s"]),
        node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
        node("Div", ["x", "f"], ["y"]),
    ),
}


@pytest.mark.parametrize("model", SEES_ITS_BATCH.values(), ids=SEES_ITS_BATCH)
def test_numbers_that_tell_of_the_batch_keep_rows_apart(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    assert "the number of rows of a batch" in follow_rows(model).mixed
    assert "the number of rows of a batch" in compiled_one_by_one(model, tmp_path)


def test_a_probe_finds_a_row_that_sees_its_place() -> None:
    model = SEES_ITS_BATCH["place"]
    specs, run = original(model)
    outputs = [TensorSpec("y", "FP32", (4,))]
    for size in SIZES[1:]:
        reason = RowProbes(run, specs).why_mixed(run, outputs, size, coarse=False)
        assert "its place among them" in reason


@pytest.mark.parametrize(
    "model",
    [
        graph_of(  # an initial state, as LSTMs have it
            *ROWS,
            node("Unsqueeze", ["rows", "first"], ["n"]),
            node("Concat", ["n", "four"], ["shape"], axis=0),
            node("ConstantOfShape", ["shape"], ["state"]),
            node("Add", ["x", "state"], ["y"]),
            zero=0,
            first=[0],
            four=[4],
        ),
        graph_of(  # positions along another dimension, one set per row, flat for a while
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "one"], ["length"]),
            node("Range", ["zero", "length", "one"], ["places"]),
            node("Slice", ["s", "first", "second"], ["n"]),
            node("Tile", ["places", "n"], ["flat"]),
            node("Reshape", ["flat", "s"], ["all"]),
            node("Cast", ["all"], ["f"], to=TensorProto.FLOAT),
            node("Add", ["x", "f"], ["y"]),
            zero=0,
            one=1,
            first=[0],
            second=[1],
        ),
        graph_of(  # a large table that each row has
            *ROWS,
            node("Unsqueeze", ["rows", "first"], ["n"]),
            node("Concat", ["n", "rest"], ["shape"], axis=0),
            node("Expand", ["table", "shape"], ["tables"]),
            node("ReduceSum", ["tables", "second"], ["sums"], keepdims=0),
            node("Add", ["x", "sums"], ["y"]),
            zero=0,
            first=[0],
            second=[1],
            rest=[2048, 4],
            table=np.ones((1, 2048, 4), np.float32),
        ),
        graph_of(  # each row's element at a place that the row names
            *ROWS,
            PLACES,
            node("ArgMax", ["x"], ["best"], axis=1, keepdims=1),
            node("Unsqueeze", ["places", "second"], ["column"]),
            node("Concat", ["column", "best"], ["where"], axis=1),
            node("GatherND", ["x", "where"], ["most"]),
            node("Unsqueeze", ["most", "second"], ["most_column"]),
            node("Sub", ["x", "most_column"], ["y"]),
            zero=0,
            one=1,
            second=[1],
        ),
    ],
    ids=["state", "positions", "table", "places"],
)
def test_shapes_and_places_that_follow_the_batch_do_not_keep_rows_apart(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    assert compiled_one_by_one(model, tmp_path) == ""


def test_rows_that_meet_in_a_batch_of_one_size_alone_are_found(tmp_path: Path) -> None:
    model = graph_of(
        *ROWS,
        node("Equal", ["rows", "four"], ["is_four"]),
        node("Where", ["is_four", "zero", "one"], ["axis"]),
        node("CumSum", ["x", "axis"], ["y"]),
        zero=0,
        one=1,
        four=4,
    )
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4]))
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    onnx.save(model, source / "model.onnx")
    found = compile_model(
        ModelSource(source, {}, (1, 2, 4, 8)),
        target,
        LIMITS,
        lambda stage: None,
        TorchTarget(Precision.FLOAT32),
    )
    assert "in a batch of 4 is not what it is alone" in found.one_by_one


def test_a_function_inside_a_model_is_looked_into() -> None:
    centre = helper.make_function(
        "here",
        "Centre",
        ["a"],
        ["b"],
        [
            helper.make_node("ReduceMean", ["a"], ["m"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["a", "m"], ["b"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    graph = helper.make_graph(
        [helper.make_node("Centre", ["x"], ["y"], domain="here")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("here", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[centre], ir_version=8)
    assert follow_rows(model).mixed == "ReduceMean makes one result of all rows of a batch"
