"""The models of Clipper's figures, trained on real digits: native in container processes, and as ONNX.

Fitted on writing forms 0 to 8, asked about forms 9 to 13, which other people wrote (`experiments.digits.images`).
The kinds and the forest's size are the paper's; scikit-learn's digits have 64 values where its MNIST has
784, so what a row costs is not the paper's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import onnx.parser
from onnx import TensorProto

from experiments.digits.images import Array, load
from experiments.digits.models import OPSETS, Classifier, export, logistic
from experiments.live.bare_lanes import Prepared, prepared_on, processor
from experiments.study.study import chosen
from worker.containers.device import ContainerDevice
from worker.devices.device import Device
from worker.models.model_files import MODEL_FILE, Limits

KINDS = ("no_op", "linear_svm", "logistic_regression", "kernel_svm", "random_forest")
FORMS = ("native", "onnx")

_LAST_TRAINING_FORM = 8
_SEED = 20

_LIMITS = Limits(arena_bytes=64 << 20, num_pages=4, io_bytes=8 << 20)
_IO_POOL_BYTES = 64 << 20
_START_LIMIT_S = 120.0

_NO_OP = """
import numpy as np

def predict(rows):
    return np.zeros(len(rows), np.int64)
"""
# It gives one number of each row, which is as little as a graph can do.
_NO_OP_GRAPH = f"""
<ir_version: 8, opset_import: ["": {OPSETS[""]}]>
no_op (float[batch, 64] X) => (int64[batch] label)
<int64 first = {{0}}>
{{
    column = Gather <axis = 1> (X, first)
    label = Cast <to = {TensorProto.INT64}> (column)
}}
"""
_CONFIG = """
[container]
load = "{load}"
inputs = {{ X = "FP32[64]" }}
outputs = {{ label = "INT64[]" }}
time_limit_s = 60
"""


def held_out() -> tuple[Array, Array]:
    """Images, float32 (n, 64), and labels of people whose writing no model has seen."""
    asked = load().of_forms(_LAST_TRAINING_FORM + 1, 13)
    return asked.images, asked.labels


def _write_folder(folder: Path, form: str, kind: str) -> None:
    """Train a model and write it, in one form, in the layout of model folders."""
    name = "model.py" if kind == "no_op" else "model.joblib"
    target = folder / "1" / (MODEL_FILE if form == "onnx" else name)
    target.parent.mkdir(parents=True)
    if form == "native":
        (folder / "config.toml").write_text(_CONFIG.format(load=name))
    if kind == "no_op":
        graph = onnx.parser.parse_model(_NO_OP_GRAPH).SerializeToString()
        target.write_bytes(graph if form == "onnx" else _NO_OP.encode())
        return
    training = load().of_forms(0, _LAST_TRAINING_FORM)
    estimator = _estimator(kind).fit(training.images, training.labels)
    if form == "onnx":
        target.write_bytes(export(estimator, training.images).SerializeToString())
    else:
        import joblib

        joblib.dump(estimator, target)


def _estimator(kind: str) -> Classifier:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.svm import SVC, LinearSVC

    chosen("kind", [kind], KINDS)
    return {
        "linear_svm": LinearSVC(random_state=_SEED, C=0.01),
        "logistic_regression": logistic(),
        "kernel_svm": SVC(),
        "random_forest": RandomForestClassifier(50, max_depth=16, random_state=_SEED),
    }[kind]


@contextmanager
def prepared(
    form: str, kind: str, batch_sizes: Sequence[int], *, count: int = 1
) -> Iterator[list[Prepared]]:
    """Train a model and give it to devices, each with processes and memory of its own; closed afterwards.

    Args:
        form: one of `FORMS`.
        kind: one of `KINDS`.
        batch_sizes: that can be run.
        count: of devices.
    """
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as devices:
        folder, cache = Path(scratch) / kind, Path(scratch) / "cache"
        _write_folder(folder, form, kind)
        yield [
            devices.enter_context(
                prepared_on(_device(form, folder, cache), folder, cache, batch_sizes)
            )
            for _ in range(count)
        ]


def _device(form: str, folder: Path, cache: Path) -> Device[Any]:
    if form == "onnx":
        return processor(cache, _LIMITS, io_pool_bytes=_IO_POOL_BYTES)
    return ContainerDevice(
        folder, limits=_LIMITS, io_pool_bytes=_IO_POOL_BYTES, start_limit_s=_START_LIMIT_S
    )
