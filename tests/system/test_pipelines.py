"""Pipelines of ONNX files and Python code in `clockwright up`, beside the same steps by hand in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import tritonclient.grpc as triton
from onnx import numpy_helper

from clockwright import Client
from experiments.live.local_server import LocalServer

# As in `test_end_to_end`: nothing here depends on speed.
SLO_MS = 600_000

Array = np.ndarray[Any, np.dtype[Any]]

_HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
#: By name: the graph, and shapes of its weights.
MODELS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "encode": (
        "g (float[n,16] pixels) => (float[n,8] code) { m = MatMul(pixels, w) code = Tanh(m) }",
        {"w": (16, 8)},
    ),
    "classify": (
        "g (float[n,8] x) => (float[n,3] scores) { m = MatMul(x, w) scores = Softmax(m) }",
        {"w": (8, 3)},
    ),
    "blend": (
        "g (float[n,3] a, float[n,3] b) => (float[n,3] y) { s = Add(a, b) y = Mul(s, h) }",
        {"h": ()},
    ),
    # Whether it is worth going on: the mean of the pixels.
    "gate": (
        "g (float[n,16] pixels) => (float[n,1] mean) { mean = ReduceMean<keepdims=1>(pixels, axes) }",
        {},
    ),
}
#: Image to pixels, as code.
PREPARE = """
def predict(raw):
    return raw.astype("float32") / 255
"""
PREPARE_CONFIG = """
[container]
load = "model.py"
inputs = { raw = "UINT8[16]" }
outputs = { pixels = "FP32[16]" }
"""
#: Text to pixels, and numbers to text.
READ = """
import numpy as np


def predict(text):
    return np.array([[len(each) + index for index in range(16)] for each in text], "float32")
"""
READ_CONFIG = """
[container]
load = "model.py"
inputs = { text = "BYTES[]" }
outputs = { pixels = "FP32[16]" }
"""
SAY = """
def predict(scores):
    return [f"class {each.argmax()}" for each in scores]
"""
SAY_CONFIG = """
[container]
load = "model.py"
inputs = { scores = "FP32[3]" }
outputs = { words = "BYTES[]" }
"""
TEXTS = """
[pipeline]
inputs = ["text"]
outputs = { words = "say.words", code = "encode.code" }
[[pipeline.stages]]
model = "read"
inputs = { text = "text" }
[[pipeline.stages]]
model = "encode"
inputs = { pixels = "read.pixels" }
[[pipeline.stages]]
model = "classify"
inputs = { x = "encode.code" }
[[pipeline.stages]]
model = "say"
inputs = { scores = "classify.scores" }
"""
#: As Triton's examples have it: preprocess, then classify.
ENSEMBLE = """
name: "ensemble"
platform: "ensemble"
max_batch_size: 8
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 16 ] } ]
output [ { name: "SCORES" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "CODE" data_type: TYPE_FP32 dims: [ 8 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "prepare"
      model_version: -1
      input_map { key: "raw" value: "IMAGE" }
      output_map { key: "pixels" value: "preprocessed_image" }
    },
    {
      model_name: "classify"
      model_version: 1
      input_map { key: "x" value: "CODE" }
      output_map { key: "scores" value: "SCORES" }
    },
    {
      model_name: "encode"
      model_version: -1
      input_map { key: "pixels" value: "preprocessed_image" }
      output_map { key: "code" value: "CODE" }
    }
  ]
}
"""
BRANCHES = """
[pipeline]
inputs = ["image"]
outputs = { y = "join.y", mean = "gate.mean" }

[[pipeline.stages]]
name = "join"
model = "blend"
inputs = { a = "left.scores", b = "right.scores" }

[[pipeline.stages]]
model = "prepare"
inputs = { raw = "image" }

[[pipeline.stages]]
model = "gate"
inputs = { pixels = "prepare.pixels" }
end_if = "mean < 0.1"

[[pipeline.stages]]
model = "encode"
inputs = { pixels = "prepare.pixels" }

[[pipeline.stages]]
name = "left"
model = "classify"
inputs = { x = "encode.code" }

[[pipeline.stages]]
name = "right"
model = "classify"
inputs = { x = "encode.code" }
"""


def write_models(directory: Path) -> None:
    random = np.random.default_rng(0)
    for name, (text, weights) in MODELS.items():
        model = onnx.parser.parse_model(_HEADER + text)
        for each, shape in weights.items():
            values = np.asarray(random.standard_normal(shape), np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, each))
        if name == "gate":
            model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
        (directory / name / "1").mkdir(parents=True)
        onnx.save(model, directory / name / "1" / "model.onnx")
    for name, code, config in (
        ("prepare", PREPARE, PREPARE_CONFIG),
        ("read", READ, READ_CONFIG),
        ("say", SAY, SAY_CONFIG),
    ):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "model.py").write_text(code)
        (directory / name / "config.toml").write_text(config)
    (directory / "texts").mkdir()
    (directory / "texts" / "config.toml").write_text(TEXTS)
    # Triton wants a version folder of an ensemble, too, and git keeps none that is empty.
    (directory / "ensemble" / "1").mkdir(parents=True)
    (directory / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    (directory / "branches").mkdir()
    (directory / "branches" / "config.toml").write_text(BRANCHES)


class ByHand:
    """The same models in onnxruntime."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, model: str, **inputs: Array) -> Array:
        session = onnxruntime.InferenceSession(self._directory / model / "1" / "model.onnx")
        (found,) = session.run(None, inputs)
        return np.asarray(found)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> Iterator[tuple[LocalServer, ByHand]]:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    arguments = ["--models", str(directory), "--cache-dir", str(cache_dir)]
    with LocalServer(arguments) as server:
        yield server, ByHand(directory)


def images(rows: int, largest: int = 255) -> Array:
    return np.random.default_rng(rows).integers(0, largest, (rows, 16)).astype(np.uint8)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_an_ensemble_of_triton_answers_as_its_models_by_hand(
    served: tuple[LocalServer, ByHand], rows: int
) -> None:
    server, by_hand = served
    raw = images(rows)
    tensor = triton.InferInput("IMAGE", list(raw.shape), "UINT8")
    tensor.set_data_from_numpy(raw)
    with triton.InferenceServerClient(server.address) as client:
        config = client.get_model_config("ensemble", as_json=True)["config"]
        assert config["platform"] == "ensemble"
        assert config["max_batch_size"] == 8
        found = client.infer("ensemble", [tensor], parameters={"slo_ms": SLO_MS})
    code = by_hand.run("encode", pixels=raw.astype(np.float32) / 255)
    np.testing.assert_allclose(found.as_numpy("CODE"), code, rtol=1e-5, atol=1e-6)
    scores = by_hand.run("classify", x=code)
    np.testing.assert_allclose(found.as_numpy("SCORES"), scores, rtol=1e-5, atol=1e-6)


def test_branches_join_and_a_gate_ends_what_is_not_worth_it(
    served: tuple[LocalServer, ByHand],
) -> None:
    server, by_hand = served
    with Client(server.address) as client:
        raw = images(2)
        found = client.infer("branches", raw, slo_ms=SLO_MS)
        scores = by_hand.run(
            "classify", x=by_hand.run("encode", pixels=raw.astype(np.float32) / 255)
        )
        expected = by_hand.run("blend", a=scores, b=scores)
        np.testing.assert_allclose(found.outputs["y"], expected, rtol=1e-5, atol=1e-6)
        assert not found.explanation
        dark = images(2, largest=10)
        ended = client.infer("branches", dark, slo_ms=SLO_MS)
        assert ended.explanation == {"ended_by": "gate"}
        np.testing.assert_allclose(
            ended.outputs["mean"][:, 0], (dark / 255).mean(axis=1), rtol=1e-5
        )
        assert not ended.outputs["y"].any()


def test_text_passes_to_code_and_numbers_come_back_as_text(
    served: tuple[LocalServer, ByHand],
) -> None:
    server, by_hand = served
    texts = np.array(["a", "", "a longer text"], object)
    pixels = np.array([[len(t) + n for n in range(16)] for t in texts], np.float32)
    code = by_hand.run("encode", pixels=pixels)
    labels = by_hand.run("classify", x=code).argmax(axis=1)
    with Client(server.address) as client:
        found = client.infer("texts", texts, slo_ms=SLO_MS).outputs
    assert found["words"].tolist() == [f"class {label}" for label in labels]
    np.testing.assert_allclose(found["code"], code, rtol=1e-5, atol=1e-6)
