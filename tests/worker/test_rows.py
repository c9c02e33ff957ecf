"""Rows of several clients share a batch: which models bear that, as the graph says and as probes find out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from clockwright.errors import ModelError
from clockwright.tensors import TensorSpec
from experiments.bench.mixing_models import MixingModel, all_models
from tests.kit.worker_models import cpu_device, offer, prepared
from worker.compiling.compile import compile_model
from worker.compiling.for_torch import TorchTarget
from worker.compiling.onnx_model import model_inputs, tensor_spec
from worker.compiling.row_flow import follow_rows
from worker.compiling.row_probes import RowProbes, as_numbers
from worker.devices.cpu import CpuDevice
from worker.engines.onnxruntime import Bytes, aligned_bytes
from worker.models.file_store import FileStore
from worker.models.model_files import Limits, ModelSource
from worker.models.precision import Precision

LIMITS = Limits(arena_bytes=256 << 20, num_pages=16, io_bytes=64 << 20)
SIZES = (1, 2, 4, 8)

#: Large networks cost seconds here and are the business of `make bench-mixing`.
MODELS = {
    each.name: each for each in all_models() if each.name not in ("resnet18_v1", "squeezenet1-1")
}
REPEATING = [name for name, each in MODELS.items() if each.repeats]


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
            spec.name: as_numbers(spec.datatype, array).reshape(batch_size, *spec.row_shape)
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
    zeros = [aligned_bytes(tensor_spec(v, "input").row_bytes) for v in model_inputs(model.graph)]
    specs = []
    for value, array in zip(model.graph.output, run(1, zeros), strict=True):
        datatype = numbers[value.type.tensor_type.elem_type]
        count = len(as_numbers(datatype, array))
        specs.append(TensorSpec(value.name, datatype, (count,)))
    return specs


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_rows_share_a_batch_when_they_may_and_only_then(model: MixingModel, tmp_path: Path) -> None:
    reason = compiled_one_by_one(model.model, tmp_path)
    assert (not reason) == model.row_by_row, reason
    if not model.repeats:
        assert "answers by chance" in reason


@pytest.mark.parametrize("name", REPEATING)
def test_the_probes_find_out_without_the_graph(name: str) -> None:
    model = MODELS[name].model
    specs, run = original(model)
    flow = follow_rows(model)
    probes = RowProbes(run, specs, flow.index_bounds, num_seeds=4)
    outputs = output_specs(model, run)
    reasons = [probes.why_mixed(run, outputs, size, coarse=flow.coarse) for size in SIZES[1:]]
    assert (not any(reasons)) == MODELS[name].row_by_row, reasons


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_graph_finds_out_without_probes(model: MixingModel) -> None:
    flow = follow_rows(model.model)
    assert (not flow.mixed) == model.row_by_row, flow.mixed
    assert flow.chance != model.repeats


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
    content = MODELS[name].model.SerializeToString()
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
    content = MODELS["int-mix"].model.SerializeToString()
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
    onnx.save(MODELS[name].model, source / "model.onnx")
    precision = TorchTarget(Precision.FLOAT32)
    found = compile_model(
        ModelSource(source, {}, SIZES), target, LIMITS, lambda stage: None, precision
    )
    assert (not found.one_by_one) == MODELS[name].row_by_row


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
ONES = numpy_helper.from_array(np.ones(1, dtype=np.float32))


@pytest.mark.parametrize(
    ("model", "mixed", "open_at"),
    [
        (graph_of(node("Softmax", ["x"], ["y"], axis=1), opset=11), "", ""),
        (graph_of(node("Softmax", ["x"], ["y"], axis=0), opset=11), "along the rows", ""),
        (graph_of(node("ReduceMax", ["x"], ["m"], axes=[0]), node("Relu", ["x"], ["y"])), "", ""),
        (
            graph_of(
                node("ReduceMax", ["x"], ["m"], axes=[0]),
                node("Shape", ["m"], ["s"]),
                node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
                node("ReduceMax", ["f"], ["k"], keepdims=0),
                node("Add", ["x", "k"], ["y"]),
            ),
            "",
            "",
        ),
        (
            graph_of(
                node("Concat", ["x", "x"], ["c"], axis=0),
                node("Split", ["c"], ["y", "z"], axis=0),
                opset=11,
            ),
            "",
            "",
        ),
        (
            graph_of(
                node("Reshape", ["x", "two"], ["r"]),
                node("Softmax", ["r"], ["t"], axis=0),
                node("Reshape", ["t", "four"], ["y"]),
                two=[2, -1],
                four=[-1, 4],
            ),
            "folds the rows",
            "",
        ),
        (
            graph_of(
                node("Pad", ["x", "pads"], ["p"]),
                node("Slice", ["p", "begin", "end", "begin"], ["y"]),
                pads=[1, 0, 0, 0],
                begin=[0],
                end=[-1],
            ),
            "against each other",
            "",
        ),
        (
            graph_of(
                node("Gather", ["x", "zero"], ["f"], axis=0), node("Sub", ["x", "f"], ["y"]), zero=0
            ),
            "one result of all rows",
            "",
        ),
        (
            graph_of(
                *ROWS,
                node("Unsqueeze", ["rows", "axes"], ["n"]),
                node("Concat", ["n", "n"], ["nn"], axis=0),
                node("ConstantOfShape", ["nn"], ["ones"], value=ONES),
                node("MatMul", ["ones", "x"], ["y"]),
                zero=0,
                axes=[0],
            ),
            "adds up over the rows",
            "",
        ),
        (
            graph_of(
                *ROWS,
                node("Range", ["zero", "rows", "one"], ["r"]),
                node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
                node("Unsqueeze", ["f", "axes"], ["u"]),
                node("Add", ["x", "u"], ["y"]),
                zero=0,
                one=1,
                axes=[1],
            ),
            "",
            "Add",
        ),
        (
            graph_of(
                node("DynamicQuantizeMatMul", ["x", "w", "scale"], ["y"], domain="com.microsoft"),
                w=np.ones((4, 4), dtype=np.int8),
                scale=np.ones(1, dtype=np.float32),
            ),
            "one scale",
            "",
        ),
        (
            graph_of(
                node("Dropout", ["x", "ratio", "training"], ["y"]),
                ratio=np.float32(0.5),
                training=np.bool_(True),
            ),
            "by chance",
            "",
        ),
        (graph_of(node("FastGelu", ["x"], ["y"], domain="com.microsoft")), "", "FastGelu"),
    ],
)
def test_what_the_graph_says(model: onnx.ModelProto, mixed: str, open_at: str) -> None:
    flow = follow_rows(model)
    assert mixed in flow.mixed
    assert bool(mixed) == bool(flow.mixed)
    assert flow.open_at == open_at


def test_rows_that_meet_in_a_batch_of_one_size_alone_are_found(tmp_path: Path) -> None:
    """The graph proves nothing of sizes between those that it is followed at, and where only the ends are probed."""
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
    assert follow_rows(model).chooses == "Equal"
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


def test_numbers_that_only_grow_with_a_batch_make_no_choice() -> None:
    shape = (*ROWS, node("Unsqueeze", ["rows", "zeros"], ["n"]))
    scaled = (node("Mul", ["n", "two"], ["m"]), node("Concat", ["m", "two"], ["s2"], axis=0))
    model = graph_of(
        *shape,
        *scaled,
        node("Reshape", ["x", "s2"], ["r"]),
        node("Concat", ["n", "four"], ["s4"], axis=0),
        node("Reshape", ["r", "s4"], ["y"]),
        zero=0,
        zeros=[0],
        two=[2],
        four=[4],
    )
    assert follow_rows(model).chooses == ""


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
