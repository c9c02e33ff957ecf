"""The demo's models: small digit classifiers that are trained here, and many large image classifiers.

The digit classifiers learn from forms 0 to 8 and are asked about forms 9 to 13, which other people
wrote. What a model should answer is computed by plain onnxruntime on the very file that is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from experiments.digits.images import Array, Digits, load
from experiments.digits.models import OPSETS, export
from modelzoo.build import write_model

_LAST_TRAINING_FORM = 8
_SEED = 20

# The random convolution has this many filters: enough for the linear layer behind it to read digits.
_NUM_FILTERS = 48
_FILTER_SIZE = 5

# Rows of one size only are asked for, and every larger batch costs time to profile.
_LARGE_BATCH_SIZES = (1, 2, 4)

LARGE_ARCHITECTURE = "resnet18_v1"


@dataclass(frozen=True, slots=True, eq=False)
class DemoModel:
    """A model, what to ask it and what it should answer."""

    name: str
    #: One row per question, shape (n, ...).
    questions: Array
    #: Answers by output name; row i belongs to question i.
    answers: dict[str, Array]
    #: The output that says the label, or None: the model was never trained.
    label_output: str | None = None
    #: True labels of the questions, shape (n,); None without a `label_output`.
    labels: Array | None = None


def write_digit_models(directory: Path) -> list[DemoModel]:
    """Train the digit classifiers and write them in Triton's layout, with default SLOs."""
    from threadpoolctl import threadpool_limits

    digits = load()
    training = digits.of_forms(0, _LAST_TRAINING_FORM)
    asked = digits.of_forms(_LAST_TRAINING_FORM + 1, 13)
    models = []
    for name, train in _CLASSIFIERS.items():
        path = directory / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Threads that wait for each other on busy cores made two seconds of training half a minute.
        with threadpool_limits(1):
            model = train(training)
        path.write_bytes(model.SerializeToString())
        answers = run_alone(path, asked.images)
        models.append(DemoModel(name, asked.images, answers, "label", asked.labels))
    return models


def write_large_models(directory: Path, num_models: int, *, num_questions: int) -> list[DemoModel]:
    """Write image classifiers of one architecture, each with random weights of its own."""
    photographs = crops(num_questions)
    models = []
    for index in range(num_models):
        name = f"resnet18-{index}"
        path = directory / name / "1" / "model.onnx"
        if not path.exists():
            write_model(LARGE_ARCHITECTURE, path, seed=index)
            sizes = ", ".join(map(str, _LARGE_BATCH_SIZES))
            config = directory / name / "config.toml"
            config.write_text(f"slo_ms = 500\nbatch_sizes = [{sizes}]\n")
        models.append(DemoModel(name, photographs, run_alone(path, photographs)))
    return models


def crops(num_crops: int) -> Array:
    """Pieces of the two photographs that scikit-learn ships, float32 (n, 3, 224, 224), 0 to 1."""
    from sklearn.datasets import load_sample_images

    photographs: list[Array] = load_sample_images().images
    random = np.random.default_rng(_SEED)
    pieces = []
    for index in range(num_crops):
        photograph = photographs[index % len(photographs)]
        top, left = (int(random.integers(0, size - 224)) for size in photograph.shape[:2])
        piece = photograph[top : top + 224, left : left + 224]
        pieces.append(piece.transpose(2, 0, 1).astype(np.float32) / 255)
    return np.stack(pieces)


def run_alone(path: Path, questions: Array) -> dict[str, Array]:
    """Answers of plain onnxruntime, question by question, as a lone client would get them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    input_name = session.get_inputs()[0].name
    rows = [session.run(names, {input_name: row[np.newaxis]}) for row in questions]
    return {
        name: np.concatenate(column)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def _logistic_regression(training: Digits) -> onnx.ModelProto:
    from sklearn.linear_model import LogisticRegression

    # A tolerance of a hundredth takes a twentieth of the time and errs on the same digits.
    return _convert(LogisticRegression(max_iter=5000, C=0.01, tol=0.01), training)


def _perceptron(training: Digits) -> onnx.ModelProto:
    from sklearn.neural_network import MLPClassifier

    return _convert(MLPClassifier((128,), random_state=_SEED, max_iter=500), training)


def _forest(training: Digits) -> onnx.ModelProto:
    from sklearn.ensemble import RandomForestClassifier

    return _convert(RandomForestClassifier(50, random_state=_SEED), training)


def _convert(classifier: Any, training: Digits) -> onnx.ModelProto:  # noqa: ANN401  scikit-learn is untyped
    return export(classifier.fit(training.images, training.labels), training.images)


def _convolution(training: Digits) -> onnx.ModelProto:
    """Random filters, ReLU, pooling, and a linear layer that is trained on what they show.

    Random filters need no framework to train them and lose little on images this small.
    """
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(_SEED)
    filters = random.normal(0, 1 / _FILTER_SIZE, (_NUM_FILTERS, 1, _FILTER_SIZE, _FILTER_SIZE))
    # Digits are drawn with 0 to 16; without an offset half of the filters would see only themselves.
    offsets = random.normal(0, 0.5, _NUM_FILTERS)
    features = _run(_convolution_graph(filters, offsets, None), training.images)
    linear = LogisticRegression(max_iter=2000, C=0.1).fit(features, training.labels)
    return _convolution_graph(filters, offsets, (linear.coef_.T, linear.intercept_))


def _convolution_graph(
    filters: Array, offsets: Array, linear: tuple[Array, Array] | None
) -> onnx.ModelProto:
    weights = {
        "scale": np.array(1 / 16),
        "filters": filters,
        "offsets": offsets,
    }
    shapes = {"image": np.array([-1, 1, 8, 8]), "axis": np.array([1])}
    padding = _FILTER_SIZE // 2
    nodes = [
        helper.make_node("Reshape", ["X", "image"], ["square"]),
        helper.make_node("Mul", ["square", "scale"], ["scaled"]),
        helper.make_node("Conv", ["scaled", "filters", "offsets"], ["seen"], pads=[padding] * 4),
        helper.make_node("Relu", ["seen"], ["active"]),
        helper.make_node("MaxPool", ["active"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pooled"], ["features"]),
    ]
    outputs: list[tuple[str, int, list[str | int | None]]] = [
        ("features", TensorProto.FLOAT, ["batch", _NUM_FILTERS * 16])
    ]
    if linear is not None:
        weights |= {"coefficients": linear[0], "intercepts": linear[1]}
        nodes += [
            helper.make_node("Gemm", ["features", "coefficients", "intercepts"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
            helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
        ]
        outputs = [
            ("label", TensorProto.INT64, ["batch"]),
            ("probabilities", TensorProto.FLOAT, ["batch", 10]),
        ]
    constants = {name: array.astype(np.float32) for name, array in weights.items()} | {
        "image": shapes["image"]
    }
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info(*output) for output in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opset = helper.make_opsetid("", OPSETS[""])
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def _run(model: onnx.ModelProto, images: Array) -> Array:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    features: Array = session.run(None, {"X": images})[0]
    return features


_CLASSIFIERS: dict[str, Callable[[Digits], onnx.ModelProto]] = {
    "digits-logistic": _logistic_regression,
    "digits-perceptron": _perceptron,
    "digits-forest": _forest,
    "digits-convolution": _convolution,
}
