"""The model zoo: sizes as in Table 1, and graphs that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from clockwright.errors import ConfigError
from modelzoo.bert import LENGTH, VOCABULARY
from modelzoo.build import ARCHITECTURES, build_model, weights_bytes, write_model
from modelzoo.profile import load_profile

TABLE1 = load_profile("table1").rows

# The smallest graph of each kind.
RUN = {
    "cifar_resnet20_v1": (10,),
    "densenet121": (1000,),
    "dla34": (1000,),
    "googlenet": (1000,),
    "inceptionv3": (1000,),
    "mlp-64-32-10": (10,),
    "mobile_pose_mobilenet1.0": (17, 64, 48),
    "mobile_pose_mobilenetv3": (17, 64, 48),
    "mobilenet0.25": (1000,),
    "resnest14": (1000,),
    "resnet18_v1": (1000,),
    "resnet18_v1d": (1000,),
    "resnet18_v1s": (1000,),
    "resnet50_v1b": (1000,),
    "se_resnext50_32x4d": (1000,),
    "simple_pose_resnet18_v1b": (17, 64, 48),
    "squeezenet1.0": (1000,),
    "squeezenet1.1": (1000,),
    "tiny_conv": (10,),
    "tsn_resnet18_v1b_kinetics400": (400,),
    "winograd_resnet18_v2": (1000,),
    "xception": (1000,),
}


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def random_rows(run: onnxruntime.InferenceSession, rows: int) -> npt.NDArray[np.float32]:
    shape = run.get_inputs()[0].shape[1:]
    return np.random.default_rng(1).standard_normal((rows, *shape), dtype=np.float32)


#: Kinds that take seconds each: a long run has them. What onnx infers of them is compared there, too.
LARGE = {
    "densenet121",
    "dla34",
    "inceptionv3",
    "resnet18_v1s",
    "resnet50_v1b",
    "se_resnext50_32x4d",
    "simple_pose_resnet18_v1b",
    "winograd_resnet18_v2",
    "xception",
}


def some(names: Iterable[str], few: Callable[[str], bool]) -> list[Any]:
    """All of these names; those that are not among the few are for a long run."""
    return [pytest.param(name, marks=() if few(name) else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", sorted(TABLE1))
def test_weights_are_as_large_as_table_1_says(name: str) -> None:
    assert weights_bytes(name) == pytest.approx(TABLE1[name].weights_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("name", "width", "published_parameters"),
    [("bert_tiny", 128, 4_385_920), ("bert_base", 768, 109_482_240)],
)
def test_an_encoder_has_the_published_parameters_but_for_the_positions_beyond_its_rows(
    name: str, width: int, published_parameters: int
) -> None:
    unused_positions = 512 - LENGTH
    assert weights_bytes(name) == 4 * (published_parameters - unused_positions * width)


def test_an_encoder_runs_and_each_row_is_answered_alone() -> None:
    run = session(build_model("bert_tiny"))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, (3, LENGTH))
    segments = rng.integers(0, 2, (3, LENGTH))
    (three,) = run.run(["output"], {"input": tokens, "segment": segments})
    assert three.shape == (3, 128)
    assert 0.05 < three.std() < 1
    for row in range(3):
        alone = {"input": tokens[row : row + 1], "segment": segments[row : row + 1]}
        (one,) = run.run(["output"], alone)
        np.testing.assert_allclose(one[0], three[row], rtol=1e-4, atol=1e-4)
    tokens[0, -1] = (tokens[0, -1] + 1) % VOCABULARY
    (changed,) = run.run(["output"], {"input": tokens, "segment": segments})
    # The pooled first token has seen the last one.
    assert not np.allclose(changed[0], three[0], atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18_v1", "densenet121", "tiny_conv"])
def test_weights_counted_without_drawing_are_the_weights_drawn(name: str) -> None:
    drawn = sum(len(weight.raw_data) for weight in build_model(name).graph.initializer)
    assert drawn == weights_bytes(name)


@pytest.mark.parametrize("name", some(RUN, lambda name: name not in LARGE))
def test_a_model_runs_and_each_row_is_answered_alone(name: str) -> None:
    run = session(build_model(name))
    assert run.get_inputs()[0].shape[0] == run.get_outputs()[0].shape[0] == "batch"
    rows = random_rows(run, 2)
    (both,) = run.run(["output"], {"input": rows})
    assert both.shape == (2, *RUN[name])
    assert np.isfinite(both).all()
    # Half precision ends at 65,504.
    assert 0.01 < both.std() < 100
    assert not np.array_equal(both[0], both[1])
    for row in range(2):
        (one,) = run.run(["output"], {"input": rows[row : row + 1]})
        np.testing.assert_allclose(one[0], both[row], rtol=1e-4, atol=1e-4)


def test_the_deepest_network_gives_finite_answers() -> None:
    run = session(build_model("cifar_resnet110_v1"))
    (answers,) = run.run(["output"], {"input": random_rows(run, 2)})
    assert 0.01 < answers.std() < 100


# Networks for which Table 1 has 60 MB or more are more of the same.
@pytest.mark.parametrize(
    "name",
    some(
        [name for name in ARCHITECTURES if name not in TABLE1 or TABLE1[name].weights_bytes < 60e6],
        lambda name: name in RUN and name not in LARGE,
    ),
)
def test_the_declared_output_is_what_onnx_infers(name: str) -> None:
    declared = build_model(name)
    bare = onnx.ModelProto()
    bare.CopyFrom(declared)
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    for found, expected in zip(inferred.graph.output, declared.graph.output, strict=True):
        # At some nodes onnx loses the symbolic batch dimension, and then does not name it.
        sizes = [dim.dim_value for dim in found.type.tensor_type.shape.dim]
        assert sizes == [dim.dim_value for dim in expected.type.tensor_type.shape.dim]


@pytest.mark.parametrize("name", ["resnet18_v2", "mlp-64-32-10", "echo-8"])
def test_the_same_name_and_seed_give_the_same_file(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "a" / "model.onnx", seed=3)
    write_model(name, tmp_path / "b" / "model.onnx", seed=3)
    first = (tmp_path / "a" / "model.onnx").read_bytes()
    assert first == (tmp_path / "b" / "model.onnx").read_bytes()
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["model.onnx"]
    onnx.checker.check_model(onnx.load_from_string(first))


def test_seeds_differ_in_every_drawn_weight_and_in_nothing_else() -> None:
    first, second = build_model("tiny_conv", seed=0), build_model("tiny_conv", seed=1)
    for one, other in zip(first.graph.initializer, second.graph.initializer, strict=True):
        assert one.raw_data != other.raw_data
    del first.graph.initializer[:], second.graph.initializer[:]
    assert first == second


def test_weights_of_one_shape_are_not_the_same_numbers() -> None:
    drawn = [weight.raw_data for weight in build_model("mlp-32-32-32-32").graph.initializer]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("size", [1, 16, 150_528])
def test_an_echo_gives_its_input_back_bit_for_bit(size: int) -> None:
    rows = np.random.default_rng(0).standard_normal((3, size), dtype=np.float32)
    rows[0, 0], rows[1, 0], rows[2, 0] = -0.0, np.inf, np.nan
    (answer,) = session(build_model(f"echo-{size}")).run(["output"], {"input": rows})
    assert answer.tobytes() == rows.tobytes()


def test_two_by_two_adds_and_doubles() -> None:
    a = np.array([[1.5, 2.0, -3.0], [0.0, 0.25, 8.0]], dtype=np.float32)
    b = np.array([[1, 2], [-4, 2**40]], dtype=np.int64)
    run = session(build_model("two_by_two", seed=9))
    total, doubled = run.run(["sum", "doubled"], {"a": a, "b": b})
    np.testing.assert_array_equal(total, a + b.sum(axis=1, keepdims=True).astype(np.float32))
    np.testing.assert_array_equal(doubled, 2 * b)
    assert total.dtype == np.float32
    assert doubled.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("resnet51_v1", r"no architecture 'resnet51_v1' \(nearest: resnet"),
        ("", r"no architecture '': expected one of"),
        ("mlp-64", "no architecture"),
        ("mlp-64-0-10", "no architecture"),
        ("echo-", "no architecture"),
        ("mlp-999999-999999-10", "bytes of weights, expected at most"),
    ],
)
def test_an_unknown_architecture_is_refused_by_name(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_model(name)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="found seed -1"):
        build_model("tiny_conv", seed=-1)
