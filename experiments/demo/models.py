"""The demo's models: small digit classifiers that are trained here, and many large image classifiers.

The digit classifiers learn from forms 0 to 8 and are asked about forms 9 to 13, which other people
wrote. What a model should answer is computed by plain onnxruntime on the very file that is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from experiments.digits.images import Array, Digits, load
from experiments.digits.models import Classifier, export, five_kinds
from modelzoo.build import write_model

_LAST_TRAINING_FORM = 8
_SEED = 20

# Rows of one size only are asked for, and every larger batch costs time to profile.
_LARGE_BATCH_SIZES = (1, 2, 4)


@dataclass(frozen=True, slots=True, eq=False)
class DemoModel:
    """A model, what to ask it and what it should answer."""

    name: str
    #: One row per question, shape (n, ...).
    questions: Array
    #: Answers by output name; row i belongs to question i.
    answers: dict[str, Array]
    #: True labels of the questions, shape (n,), of which one is an answer, `label`; None: it was never trained.
    labels: Array | None = None


def taught_and_asked() -> tuple[Digits, Digits]:
    """The digits that classifiers learn, and those that they are asked about, which other people wrote."""
    digits = load()
    return digits.of_forms(0, _LAST_TRAINING_FORM), digits.of_forms(_LAST_TRAINING_FORM + 1, 13)


def write_digit_model(
    folder: Path, classifier: Classifier, taught: Digits, asked: Digits
) -> DemoModel:
    """Train a classifier and write it in Triton's layout, named as its folder."""
    from threadpoolctl import threadpool_limits

    path = folder / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Threads that wait for each other on busy cores made two seconds of training half a minute.
    with threadpool_limits(1):
        classifier.fit(taught.images, taught.labels)
    path.write_bytes(export(classifier, taught.images).SerializeToString())
    return DemoModel(folder.name, asked.images, run_alone(path, asked.images), asked.labels)


def write_digit_models(directory: Path) -> list[DemoModel]:
    """Write four digit classifiers."""
    digits = taught_and_asked()
    kinds = _classifiers().items()
    return [write_digit_model(directory / name, kind, *digits) for name, kind in kinds]


def write_large_models(directory: Path, num_models: int, *, num_questions: int) -> list[DemoModel]:
    """Write image classifiers of one architecture, each with random weights of its own."""
    photographs = crops(num_questions)
    models = []
    for index in range(num_models):
        name = f"resnet18-{index}"
        path = directory / name / "1" / "model.onnx"
        if not path.exists():
            write_model("resnet18_v1", path, seed=index)
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


def _classifiers() -> dict[str, Classifier]:
    """Untrained models, by name."""
    from sklearn.neural_network import MLPClassifier

    kinds = five_kinds(_SEED)
    return {
        "digits-logistic": kinds["logistic"],
        "digits-perceptron": MLPClassifier((128,), random_state=_SEED, max_iter=500),
        "digits-forest": kinds["forest"],
        "digits-tree": kinds["tree"],
    }
