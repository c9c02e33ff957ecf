"""Classifiers of handwritten digits, and what each says of digits in hands it has never seen.

scikit-learn's digits, 8 x 8, split by the form they were written on: not MNIST, not CIFAR. Shapes and
rankings can be compared with the paper's, numbers cannot.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx

from experiments.digits.images import Array, Digits

# The largest value of a pixel, against which images are inverted.
INK_MAX = 16.0

#: Opsets of every graph that this module exports.
OPSETS = {"": 17, "ai.onnx.ml": 3}

Classifier = Any


def logistic() -> Classifier:
    """An untrained logistic regression."""
    from sklearn.linear_model import LogisticRegression

    # A tolerance of a hundredth takes a twentieth of the time and errs on the same digits.
    return LogisticRegression(max_iter=5000, C=0.01, tol=0.01)


def five_kinds(seed: int) -> dict[str, Classifier]:
    """Untrained models of five kinds, from weak to strong."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.svm import SVC
    from sklearn.tree import DecisionTreeClassifier

    return {
        "naive Bayes": GaussianNB(),
        "tree": DecisionTreeClassifier(random_state=seed),
        "logistic": logistic(),
        "forest": RandomForestClassifier(20, random_state=seed),
        "SVM": SVC(),
    }


def train(models: dict[str, Classifier], digits: Digits) -> None:
    """Fit each to the same digits."""
    for model in models.values():
        model.fit(digits.images, digits.labels)


def predict(models: dict[str, Classifier], images: Array) -> Array:
    """Label that each model gives, int64, shape (model, image)."""
    return np.stack([model.predict(images).astype(np.int64) for model in models.values()])


def export(classifier: Classifier, images: Array) -> onnx.ModelProto:
    """Give a fitted classifier as a graph from `X` to `label` and, where it has them, `probabilities`.

    Args:
        classifier: a fitted one of scikit-learn.
        images: some images that it was fitted to, for their shape.
    """
    from skl2onnx import to_onnx
    from sklearn.svm import LinearSVC

    # A linear SVM has no probabilities that could come in another form.
    options = {} if isinstance(classifier, LinearSVC) else {"zipmap": False}
    with warnings.catch_warnings():
        # skl2onnx still asks an SVC for an attribute that scikit-learn is about to remove.
        warnings.simplefilter("ignore", FutureWarning)
        model: onnx.ModelProto = to_onnx(
            classifier, images[:1], target_opset=OPSETS, options=options
        )
    return model
