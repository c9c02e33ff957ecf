"""The torch engine on the processor: operators, whole networks and precisions against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from clockwright.errors import ConfigError, ModelError
from modelzoo.build import ARCHITECTURES, build_model, operators, write_model
from worker.compiling.compile import compile_model
from worker.compiling.for_torch import OnnxruntimeOnGpuTarget, TensorCoreProducts, TorchTarget
from worker.compiling.lift_weights import lift_weights
from worker.engines.torch_operators import OPERATORS, Attribute
from worker.engines.torch_program import Program, fuse
from worker.engines.torch_tensors import weight_views
from worker.models.model_files import CompiledModel, Limits, ModelSource
from worker.models.precision import Precision, parse_precision

LIMITS = Limits(arena_bytes=1 << 30, num_pages=64, io_bytes=64 << 20)
CPU = torch.device("cpu")


def node(op_type: str, inputs: str, outputs: str = "y", **attributes: Attribute) -> onnx.NodeProto:
    return helper.make_node(
        op_type,
        ["" if name == "_" else name for name in inputs.split()],
        ["" if name == "_" else name for name in outputs.split()],
        **attributes,
    )


def model_of(
    nodes: Sequence[onnx.NodeProto],
    arrays: dict[str, np.ndarray],
    constants: dict[str, np.ndarray] | None = None,
    *,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
) -> onnx.ModelProto:
    """A model whose outputs' types are whatever they are."""
    values = {
        name: helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in arrays.items()
    }
    graph = helper.make_graph(
        list(nodes),
        "g",
        list(values.values()),
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def by_onnxruntime(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, arrays))


def by_torch(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    program = Program(model.SerializeToString(), CPU)
    tensors = [torch.from_numpy(array) for array in arrays.values()]
    # Twice, as it is captured after it has been tried.
    moved: dict[str, torch.Tensor] = {}
    program.run(tensors, {}, moved)
    return [tensor.numpy() for tensor in program.run(tensors, {}, moved)]


#: A node, its inputs, its constants and the version of the operator set.
Case: TypeAlias = tuple[onnx.NodeProto, dict[str, np.ndarray], dict[str, np.ndarray], int]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


X = draw(2, 6, 9, 8)
KERNEL = draw(4, 6, 3, 3, seed=1)
BIAS = draw(4, seed=2)
TABLE = draw(5, 3)


def recurrent(op_type: str, gates: int, extra: str, outputs: str, **settings: Attribute) -> Case:
    """Two directions of three hidden numbers over five steps of two rows."""
    weights = {
        "w": draw(2, gates * 3, 4),
        "r": draw(2, gates * 3, 3, seed=1),
        "b": draw(2, gates * 6, seed=2),
        "h": draw(2, 2, 3, seed=3),
        "c": draw(2, 2, 3, seed=4),
        "lens": np.array([5, 2], np.int32),
    }
    one = node(op_type, f"x w r b {extra}", outputs, hidden_size=3, **settings)
    given = {name: weights[name] for name in one.input if name in weights}
    if settings["direction"] != "bidirectional":
        given = {name: each if name == "lens" else each[:1] for name, each in given.items()}
    return one, {"x": draw(5, 2, 4)}, given, 17


# Node, inputs, constants, operator set: what onnx's own cases (`test_torch_operators`) leave out.
CASES: list[Case] = [
    (node("Conv", "x w", group=2), {"x": X}, {"w": draw(4, 3, 1, 1)}, 17),
    (node("Conv", "x w b"), {"x": draw(2, 6, 9)}, {"w": draw(4, 6, 3), "b": BIAS}, 17),
    (node("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2]), {"x": X}, {"w": KERNEL}, 17),
    (node("Conv", "x w", auto_pad="SAME_LOWER", strides=[2, 3]), {"x": X}, {"w": KERNEL}, 17),
    (node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), {"x": X}, {}, 17),
    (node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1), {"x": X}, {}, 17),
    (node("MaxPool", "x", kernel_shape=[2, 2], pads=[0, 0, 1, 1]), {"x": X - 9}, {}, 17),
    (node("MaxPool", "x", kernel_shape=[3, 3], pads=[2] * 4), {"x": X - 9}, {}, 17),
    (node("MaxPool", "x", kernel_shape=[2, 2], dilations=[2, 3]), {"x": X}, {}, 17),
    (node("MaxPool", "x", kernel_shape=[2], auto_pad="SAME_LOWER"), {"x": draw(1, 3, 8)}, {}, 17),
    (node("AveragePool", "x", kernel_shape=[3, 3], pads=[1] * 4), {"x": X}, {}, 17),
    (node("AveragePool", "x", kernel_shape=[3, 3], pads=[2] * 4), {"x": X}, {}, 17),
    (node("AveragePool", "x", kernel_shape=[2, 3], auto_pad="SAME_UPPER"), {"x": X}, {}, 17),
    (
        node("AveragePool", "x", kernel_shape=[2, 3], pads=[0, 0, 1, 1], count_include_pad=1),
        {"x": X},
        {},
        17,
    ),
    (
        node("AveragePool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, ceil_mode=1),
        {"x": X},
        {},
        17,
    ),
    (node("Softmax", "x"), {"x": X}, {}, 11),
    (node("LogSoftmax", "x", axis=2), {"x": X}, {}, 11),
    (node("Clip", "x lo"), {"x": X}, {"lo": np.array(-0.5, np.float32)}, 17),
    (node("Clip", "x", min=-0.1, max=0.2), {"x": X}, {}, 10),
    (node("Cast", "x", to=TensorProto.INT32), {"x": 9 * X}, {}, 17),
    (node("Split", "x", "y z", axis=1, split=[1, 5]), {"x": X}, {}, 11),
    (node("Slice", "x", starts=[1], ends=[-1], axes=[3]), {"x": X}, {}, 9),
    # From the furthest place there is.
    (node("Slice", "x", starts=[-(2**63)], ends=[2**63 - 1], axes=[3]), {"x": X}, {}, 9),
    (node("Gather", "x i", axis=1), {"x": X}, {"i": np.array(0)}, 17),
    (node("Squeeze", "x"), {"x": X[:, :1, :, :1]}, {}, 11),
    (node("Unsqueeze", "x", axes=[1, 2]), {"x": X}, {}, 11),
    (node("ReduceMean", "x", axes=[1, -1], keepdims=0), {"x": X}, {}, 17),
    (node("Pad", "x", pads=[0, 0, 1, 2, 0, 0, 3, 0], value=0.5), {"x": X}, {}, 10),
    (node("Pad", "x p", mode="reflect"), {"x": X}, {"p": ints(1, 0, 8, 0, 0, 5, 0, 3)}, 17),
    (node("DynamicQuantizeLinear", "x", "y z s"), {"x": 0 * X}, {}, 11),
    (node("TopK", "x k", "y z", axis=1), {"x": X}, {"k": ints(2)}, 10),
    (node("Upsample", "x s"), {"x": X}, {"s": np.array([1, 1, 2, 3], np.float32)}, 9),
    (
        node("Resize", "x s", mode="linear"),
        {"x": X},
        {"s": np.array([1, 1, 1.5, 0.5], np.float32)},
        10,
    ),
    # By torch's own function, and step by step where that means something else.
    recurrent("LSTM", 4, "_ h c", "y z s", direction="bidirectional"),
    recurrent("LSTM", 4, "lens h c", "y z s", direction="bidirectional"),
    recurrent("LSTM", 4, "lens", "y z s", direction="reverse", clip=0.3),
    recurrent("LSTM", 4, "_ h", "_ z", direction="forward", activations=["Relu", "Tanh", "Tanh"]),
    recurrent("GRU", 3, "_ h", "y z", direction="bidirectional", linear_before_reset=1),
    recurrent("GRU", 3, "lens h", "y z", direction="bidirectional", linear_before_reset=1),
    recurrent("GRU", 3, "_ h", "y z", direction="reverse"),
    recurrent("RNN", 1, "_ h", "y z", direction="bidirectional"),
    recurrent("RNN", 1, "lens", "y z", direction="reverse", activations=["Relu"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].op_type}-{case[3]}")
def test_an_operator_answers_as_onnxruntime_does(case: Case) -> None:
    one, arrays, constants, opset = case
    outputs = [name for name in one.output if name]
    model = model_of([one], arrays, constants, outputs=outputs, opset=opset)
    for found, wanted in zip(by_torch(model, arrays), by_onnxruntime(model, arrays), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_shapes_that_are_computed_from_the_batch_are_known_before_the_device_computes() -> None:
    # How other frameworks write "flatten all but the first dimension", and a mask of that size.
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows"),
        node("Unsqueeze", "rows first", "rows1"),
        node("Concat", "rows1 rest", "flat", axis=0),
        node("Reshape", "x flat", "r"),
        node("ConstantOfShape", "flat", "ones"),
        node("Cast", "rows", "count", to=TensorProto.FLOAT),
        node("Mul", "r count", "scaled"),
        node("Expand", "half flat", "halves"),
        node("Add", "scaled halves", "s"),
        node("Add", "s ones", "y"),
    ]
    nodes[5].attribute.append(
        helper.make_attribute("value", numpy_helper.from_array(np.array([1.0], np.float32)))
    )
    constants = {
        "zero": np.array(0),
        "first": ints(0),
        "rest": ints(8),
        "half": np.array([0.5], np.float32),
    }
    arrays = {"x": draw(3, 2, 4)}
    model = model_of(nodes, arrays, constants)
    (found,), (wanted,) = by_torch(model, arrays), by_onnxruntime(model, arrays)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_shape_that_depends_on_an_input_is_refused() -> None:
    arrays = {"x": draw(2, 3), "s": ints(3, 2)}
    model = helper.make_model(
        helper.make_graph(
            [node("Reshape", "x s")],
            "g",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]),
                helper.make_tensor_value_info("s", TensorProto.INT64, [2]),
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 2])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    with pytest.raises(ModelError, match="Reshape: input 1 is computed from the model's inputs"):
        by_torch(model, arrays)


@pytest.mark.parametrize("index", [5, 10**12, -6, -(10**12)])
@pytest.mark.parametrize("op_type", ["Gather", "GatherElements", "GatherND"])
def test_an_index_outside_its_table_counts_as_the_nearest_inside(op_type: str, index: int) -> None:
    # On a GPU a kernel that faults takes the whole process along; onnxruntime raises.
    indices = np.full((1, 1), index)
    model = model_of([node(op_type, "t i")], {"i": indices}, {"t": TABLE})
    (found,) = by_torch(model, {"i": indices})
    assert found.reshape(-1)[0] == TABLE[4 if index > 0 else 0, 0]


@pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
def test_an_update_outside_its_table_goes_to_the_nearest_place_inside(op_type: str) -> None:
    arrays = {"i": ints(10**12)} if op_type == "ScatterElements" else {"i": ints(10**12)[:, None]}
    model = model_of(
        [node(op_type, "t i u")], arrays, {"t": TABLE[:, 0], "u": np.array([7], np.float32)}
    )
    (found,) = by_torch(model, arrays)
    assert found[4] == 7


def test_all_operators_without_a_torch_form_are_named_at_once_with_what_helps() -> None:
    nodes = [node("NonMaxSuppression", "x x", "a"), node("If", "c", "y"), node("Neg", "x", "b")]
    inner = helper.make_graph(
        [node("Gelu", "x", "i", domain="com.microsoft"), node("Loop", "i", "o")], "g", [], []
    )
    nodes[1].attribute.append(helper.make_attribute("then_branch", inner))
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    with pytest.raises(
        ModelError,
        match=r"no operator Loop, NonMaxSuppression, com.microsoft.Gelu; onnxruntime-gpu .* may run it",
    ):
        Program(model.SerializeToString(), CPU)


def branch(*nodes: onnx.NodeProto, output: str) -> onnx.GraphProto:
    value = helper.make_empty_tensor_value_info(output)
    return helper.make_graph(nodes, "branch", [], [value])


def model_with_branches(condition: str, x: np.ndarray) -> onnx.ModelProto:
    """A model that doubles 2 rows of `-x`, and squares any other number; nothing else reads `-x`."""
    nodes = [
        node("Neg", "x", "n"),
        node("Shape", "x", "rows", end=1),
        node("Equal", "rows two", "is_two"),
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Cast", "sum", "is_nonzero", to=TensorProto.BOOL),
        node(
            "If",
            condition,
            then_branch=branch(node("Add", "n n", "d"), output="d"),
            else_branch=branch(node("Mul", "n n", "m"), output="m"),
        ),
    ]
    return model_of(nodes, {"x": x}, {"two": ints(2)})


def test_a_branch_is_chosen_by_the_batch_size_and_reads_what_lies_around_it() -> None:
    for rows in (2, 3):
        arrays = {"x": draw(rows, 3)}
        model = model_with_branches("is_two", arrays["x"])
        (found,), (wanted,) = by_torch(model, arrays), by_onnxruntime(model, arrays)
        np.testing.assert_array_equal(found, wanted)


def test_a_branch_that_depends_on_an_input_is_refused() -> None:
    with pytest.raises(ModelError, match="If: the condition is computed from the model's inputs"):
        by_torch(model_with_branches("is_nonzero", TABLE), {"x": TABLE})


# --- fusion ---------------------------------------------------------------------------------------


def fused_types(model: onnx.ModelProto) -> list[str]:
    return [each.op_type for each in Program(model.SerializeToString(), CPU).nodes]


WEIGHTS = {"w": draw(6, 6, 1, 1), "b": draw(6), "v": draw(6, 6, 1, 1, seed=3)}
CHAIN = [
    node("Conv", "x w b", "c"),
    node("Conv", "x v b", "d"),
    node("Add", "c d", "s"),
    node("Relu", "s", "y"),
]
CHAINS: list[tuple[list[onnx.NodeProto], list[str], list[str]]] = [
    ([node("Conv", "x w b", "c"), node("Relu", "c", "y")], ["y"], ["conv_add_relu"]),
    (CHAIN, ["y"], ["Conv", "conv_add_relu"]),
    # Somebody else reads the sum, or the convolution.
    (CHAIN, ["y", "s"], ["Conv", "Conv", "Add", "Relu"]),
    (CHAIN, ["y", "c"], ["Conv", "conv_add_relu"]),
    (CHAIN, ["y", "c", "d"], ["Conv", "Conv", "Add", "Relu"]),
    ([node("Conv", "x w b", "c"), node("Relu", "c", "y")], ["y", "c"], ["Conv", "Relu"]),
    # Without a bias cuDNN has no such kernel.
    ([node("Conv", "x w", "c"), node("Relu", "c", "y")], ["y"], ["Conv", "Relu"]),
    # A convolution that is added to itself.
    (
        [node("Conv", "x w b", "c"), node("Add", "c c", "s"), node("Relu", "s", "y")],
        ["y"],
        ["Conv", "Add", "Relu"],
    ),
    # The other operand has one pixel, or more rows of pixels than the convolution.
    (
        [
            node("GlobalAveragePool", "x", "g"),
            node("Conv", "x w b", "c"),
            node("Add", "g c", "s"),
            node("Relu", "s", "y"),
        ],
        ["y"],
        ["GlobalAveragePool", "conv_add_relu"],
    ),
    (
        [
            node("GlobalAveragePool", "x", "g"),
            node("Conv", "g w b", "c"),
            node("Add", "c x", "s"),
            node("Relu", "s", "y"),
        ],
        ["y"],
        ["GlobalAveragePool", "conv_add_relu"],
    ),
]


@pytest.mark.parametrize(("nodes", "outputs", "types"), CHAINS)
def test_convolutions_are_joined_with_what_follows_and_answer_the_same(
    nodes: list[onnx.NodeProto], outputs: list[str], types: list[str]
) -> None:
    model = model_of(nodes, {"x": X}, WEIGHTS, outputs=outputs)
    assert fused_types(model) == types
    # The input is read twice in some: nothing may be done in its place.
    given = X.copy()
    for found, wanted in zip(
        by_torch(model, {"x": given}), by_onnxruntime(model, {"x": X}), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(given, X)


def test_all_convolutions_of_a_residual_network_take_their_relus_along() -> None:
    types = fused_types(build_model("resnet18_v1"))
    assert "Add" not in types
    assert "Relu" not in types
    # Three stages begin with a 1x1 shortcut, which is added and has no ReLU of its own.
    assert (types.count("conv_add_relu"), types.count("Conv")) == (17, 3)


def any_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with a first dimension of any size."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]
    return model


@pytest.mark.parametrize("precision", list(Precision))
def test_normalisations_go_into_their_convolutions_whose_weights_stay_outside_the_graph(
    precision: Precision, tmp_path: Path
) -> None:
    # The end of a residual block, its shortcut with a convolution of its own.
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c gain bias mean variance", "d"),
        node("Relu", "d", "e"),
        node("Conv", "e v", "f"),
        node("BatchNormalization", "f gain bias mean variance", "g"),
        node("Conv", "x u", "h"),
        node("BatchNormalization", "h gain bias mean variance", "i"),
        node("Add", "g i", "j"),
        node("Relu", "j", "y"),
    ]
    weights = {"w": draw(8, 6, 3, 3), "v": draw(8, 8, 1, 1, seed=1), "u": draw(8, 6, 1, 1, seed=2)}
    for seed, name in enumerate(("gain", "bias", "mean", "variance"), start=3):
        weights[name] = np.abs(draw(8, seed=seed)) + np.float32(0.5)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    onnx.save(any_batch(model_of(nodes, {"x": draw(1, 6, 9, 8)}, weights)), source / "model.onnx")
    # Which also compares the answers.
    found = compile_model(
        ModelSource(source), target, LIMITS, lambda stage: None, TorchTarget(precision)
    )
    graph = (target / "graph.onnx").read_bytes()
    types = [each.op_type for each in Program(graph, CPU).nodes]
    assert sorted(types) == ["Conv", "conv_add_relu", "conv_add_relu"]
    assert not onnx.load_from_string(graph).graph.initializer
    # Three kernels, and a bias that comes out the same for all of them.
    assert sorted(len(weight.shape) for weight in found.weights) == [1, 4, 4, 4]


def test_floats_that_decide_shapes_stay_in_the_graph_and_weights_of_any_size_do_not(
    tmp_path: Path,
) -> None:
    nodes = [node("Conv", "x w b", "c"), node("Resize", "c _ s", mode="linear")]
    weights = {"w": draw(2, 3, 1, 1), "b": draw(2), "s": np.array([1, 1, 2, 2], np.float32)}
    (tmp_path / "source").mkdir()
    onnx.save(
        any_batch(model_of(nodes, {"x": draw(1, 3, 4, 4)}, weights)),
        tmp_path / "source" / "model.onnx",
    )
    found = compile_model(
        ModelSource(tmp_path / "source"),
        tmp_path,
        LIMITS,
        lambda stage: None,
        TorchTarget(Precision.FLOAT32),
    )
    assert sorted(weight.shape for weight in found.weights) == [(2,), (2, 3, 1, 1)]


def test_nothing_to_fuse_leaves_everything_as_it_is() -> None:
    assert fuse([], []) == []


# --- networks and precisions ----------------------------------------------------------------------


def compiled(name: str, precision: Precision, folder: Path) -> CompiledModel:
    """Compile; which compares the outputs with onnxruntime's, at the precision's tolerance."""
    write_model(name, folder / "source" / "model.onnx")
    target = folder / precision.value
    target.mkdir()
    return compile_model(
        ModelSource(folder / "source"), target, LIMITS, lambda stage: None, TorchTarget(precision)
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_operators_that_torch_can_run(name: str) -> None:
    assert operators(name) <= {*OPERATORS, "Constant"}


@pytest.mark.parametrize(
    "name",
    [
        "bert_tiny",
        "cifar_resnet20_v1",
        "echo-8",
        "mlp-64-32-10",
        "mobilenet0.25",
        "mobile_pose_mobilenetv3",
        "squeezenet1.1",
        "two_by_two",
    ],
)
def test_a_network_on_torch_answers_as_on_onnxruntime(name: str, tmp_path: Path) -> None:
    assert compiled(name, Precision.FLOAT32, tmp_path).weights_bytes > 0


@pytest.mark.long
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    "name",
    [
        *("bert_mini", "cifar_wideresnet16_10", "densenet121", "dla34", "googlenet", "inceptionv3"),
        *("mobile_pose_resnet18_v1", "mobilenet1.0", "resnest14", "resnet18_v1", "resnet18_v2"),
        *("resnet50_tuned_1.8x", "resnext50_32x4d", "se_resnext50_32x4d", "squeezenet1.0"),
        *("simple_pose_resnet18_v1b", "tsn_resnet18_v1b_kinetics400", "winograd_resnet18_v2"),
        "xception",
    ],
)
def test_a_network_of_each_family_answers_in_each_precision_as_on_onnxruntime(
    name: str, precision: Precision, tmp_path: Path
) -> None:
    assert compiled(name, precision, tmp_path).weights_bytes > 0


@pytest.mark.parametrize("name", ["tiny_conv", "bert_tiny", "cifar_resnet20_v1", "mobilenet0.25"])
def test_a_network_in_half_precision_takes_half_the_weights(name: str, tmp_path: Path) -> None:
    whole = compiled(name, Precision.FLOAT32, tmp_path)
    half = compiled(name, Precision.FLOAT16, tmp_path)
    assert half.weights_bytes == pytest.approx(whole.weights_bytes / 2, abs=64 * len(half.weights))
    assert half.architecture_id != whole.architecture_id
    # What the client sends and gets does not change.
    assert (half.inputs, half.outputs) == (whole.inputs, whole.outputs)


def test_tensor_cores_get_their_weights_channels_last_and_the_answers_stay(tmp_path: Path) -> None:
    plain = compiled("cifar_resnet20_v1", Precision.FLOAT32, tmp_path)
    tf32 = compiled("cifar_resnet20_v1", Precision.TF32, tmp_path)
    assert not any(weight.channels_last for weight in plain.weights)
    kernels = [weight for weight in tf32.weights if len(weight.shape) == 4]
    assert kernels
    assert all(weight.channels_last for weight in kernels)
    blob = torch.from_numpy(np.fromfile(tmp_path / "tf32" / "weights.bin", np.uint8))
    views = weight_views(blob, tf32.weights)
    layout = torch.channels_last
    assert all(views[weight.name].is_contiguous(memory_format=layout) for weight in kernels)
    before = weight_views(
        torch.from_numpy(np.fromfile(tmp_path / "float32" / "weights.bin", np.uint8)), plain.weights
    )
    for weight in kernels:
        assert torch.equal(views[weight.name], before[weight.name])


def test_a_mask_of_the_least_number_is_no_nonsense_in_half_precision(tmp_path: Path) -> None:
    # How frameworks hide tokens; the same in half precision would be infinite, and times zero no number.
    nodes = [node("Relu", "x", "m"), node("Mul", "m least", "n"), node("Softmax", "n")]
    model = any_batch(model_of(nodes, {"x": draw(1, 4)}, {"least": np.array(-3.4e38, np.float32)}))
    (tmp_path / "source").mkdir()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    target = TorchTarget(Precision.FLOAT16)
    compile_model(ModelSource(tmp_path / "source"), tmp_path, LIMITS, lambda stage: None, target)


def test_weights_beyond_half_precision_are_refused_instead_of_answering_nonsense(
    tmp_path: Path,
) -> None:
    model = build_model("mlp-8-4-2")
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor) * np.float32(1e5)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    (tmp_path / "source").mkdir()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    for precision in (Precision.FLOAT32, Precision.FLOAT16):
        target = tmp_path / precision.value
        target.mkdir()
        arguments = (ModelSource(tmp_path / "source"), target, LIMITS, lambda stage: None)
        if precision is Precision.FLOAT32:
            compile_model(*arguments, TorchTarget(precision))
        else:
            with pytest.raises(ModelError, match="differs from the original's"):
                compile_model(*arguments, TorchTarget(precision))


@pytest.mark.parametrize(
    ("product", "dimensions"),
    [
        *((function, 3) for function in (F.conv1d, F.conv_transpose1d)),
        *((function, 4) for function in (F.conv2d, F.conv_transpose2d)),
        *((function, 5) for function in (F.conv3d, F.conv_transpose3d)),
        (torch.matmul, 2),
        (lambda x, w: x @ w, 2),
        (lambda x, w: torch.einsum("ij, jk -> ik", x, w), 2),
        (lambda x, w: torch.addmm(torch.zeros(1), x, w), 2),
    ],
)
@pytest.mark.parametrize(
    ("factor", "rounded"),
    [
        (1 + 2**-11, 1.0),  # a tie: to the even one
        (1 + 3 * 2**-11, 1 + 2**-9),
        (-1 - 2**-11 - 2**-20, -1 - 2**-10),
        (1 + 2**-10, 1 + 2**-10),
        (float("inf"), float("inf")),
    ],
)
def test_products_in_tf32_round_both_factors_to_ten_bits(
    product: Callable[..., torch.Tensor], dimensions: int, factor: float, rounded: float
) -> None:
    shape = (1,) * dimensions
    found, one = torch.full(shape, factor), torch.ones(shape)
    assert product(found, one).item() == factor
    with TensorCoreProducts():
        assert product(found, one).item() == product(one, found).item() == rounded


def test_what_is_no_factor_of_a_product_keeps_its_bits_in_tf32() -> None:
    fine, one = torch.full((1, 1), 1 + 2**-20), torch.ones(1, 1)
    half = torch.full((1, 1), 3.0, dtype=torch.float16)
    with TensorCoreProducts():
        assert (fine * fine).item() > fine.item()
        assert torch.addmm(fine, one, one).item() == 1 + fine.item()
        assert F.conv1d(one, one.view(1, 1, 1), fine[0]).item() == 1 + fine.item()
        assert (half @ half).item() == 9


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        lambda a, b: F.conv1d(a[None], b.T[None]).view(1, 1),
        lambda a, b: torch.addmm(torch.zeros(1, dtype=torch.float16), a, b),
    ],
)
def test_sums_of_float16_products_are_rounded_at_their_end_alone(
    product: Callable[..., torch.Tensor],
) -> None:
    # Added up in float16, each one would be lost beside 2,048.
    found = torch.ones(1, 65, dtype=torch.float16)
    found[0, 0] = 2048
    ones = torch.ones(65, 1, dtype=torch.float16)
    with TensorCoreProducts():
        result = product(found, ones)
    assert result.dtype is torch.float16
    assert result.item() == 2112


def test_a_model_that_tf32_is_too_coarse_for_is_refused(tmp_path: Path) -> None:
    # Two products whose weights differ by less than TF32 can tell, and what is between them.
    nodes = [
        node("MatMul", "x w", "a"),
        node("MatMul", "x v", "b"),
        node("Sub", "a b", "c"),
        node("Mul", "c k"),
    ]
    unit = np.eye(4, dtype=np.float32)
    weights = {"w": unit * np.float32(1 + 2**-12), "v": unit, "k": np.full(1, 4096, np.float32)}
    model = model_of(nodes, {"x": draw(1, 4)}, weights)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]
    (tmp_path / "source").mkdir()
    onnx.save(model, tmp_path / "source" / "model.onnx")
    arguments = (ModelSource(tmp_path / "source"), tmp_path, LIMITS, lambda stage: None)
    compile_model(*arguments, TorchTarget(Precision.FLOAT32))
    with pytest.raises(ModelError, match="differs from the original's"):
        compile_model(*arguments, TorchTarget(Precision.TF32))


def test_an_unknown_precision_is_refused_by_name() -> None:
    assert parse_precision("tf32") is Precision.TF32
    with pytest.raises(ConfigError, match="found 'int3', expected one of float32, tf32, float16"):
        parse_precision("int3")


def test_a_graph_that_torch_answers_wrongly_is_left_to_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATORS, "Relu", lambda node, x: x)
    write_model("mlp-8-4-2", tmp_path / "source" / "model.onnx")
    arguments = (ModelSource(tmp_path / "source"), tmp_path, LIMITS, lambda stage: None)
    torch_target = TorchTarget(Precision.FLOAT32)
    with pytest.raises(ModelError, match=r"^output 'output' differs from the original's$"):
        compile_model(*arguments, torch_target)
    compile_model(*arguments, torch_target, OnnxruntimeOnGpuTarget())
    with pytest.raises(ModelError, match="the graph was compiled for onnxruntime alone"):
        Program((tmp_path / "graph.onnx").read_bytes(), CPU)


def test_lifted_weights_may_lie_anywhere() -> None:
    lifted = lift_weights(build_model("tiny_conv"), level=(0, 1))
    lifted = TorchTarget(Precision.FLOAT32).lay_out(lifted)
    program = Program(lifted.graph, CPU)
    x = torch.from_numpy(draw(2, 1, 8, 8))
    answers = []
    for shift in (0, 4096):
        arena = torch.zeros(shift + len(lifted.blob), dtype=torch.uint8)
        arena[shift:] = torch.from_numpy(lifted.blob)
        moved = tuple(replace(weight, offset=weight.offset + shift) for weight in lifted.weights)
        answers.append(program.run([x], weight_views(arena, moved), {})[0])
    assert torch.equal(*answers)
