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

import numpy as np
import onnx
from onnx import TensorProto, helper

from clockwright.bulk import Buffer
from experiments.digits.images import Array, Digits, load
from experiments.digits.models import OPSETS, export, logistic
from experiments.live.bare_lanes import Prepared, prepared_on, processor
from worker.containers.device import ContainerDevice
from worker.devices.device import Device
from worker.models.model_files import MODEL_FILE, Limits
from worker.models.served_model import ServedModel

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
    version = folder / "1"
    version.mkdir(parents=True)
    estimator = None if kind == "no_op" else _fitted(kind)
    if form == "onnx":
        model = _no_op_graph() if estimator is None else export(estimator, _training().images)
        (version / MODEL_FILE).write_bytes(model.SerializeToString())
        return
    name = "model.py" if estimator is None else "model.joblib"
    (folder / "config.toml").write_text(_CONFIG.format(load=name))
    if estimator is None:
        (version / name).write_text(_NO_OP)
    else:
        import joblib

        joblib.dump(estimator, version / name)


def _training() -> Digits:
    return load().of_forms(0, _LAST_TRAINING_FORM)


def _fitted(kind: str) -> Any:  # noqa: ANN401  scikit-learn is untyped
    return _estimator(kind).fit(_training().images, _training().labels)


def _estimator(kind: str) -> Any:  # noqa: ANN401  scikit-learn is untyped
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.svm import SVC, LinearSVC

    match kind:
        case "linear_svm":
            return LinearSVC(random_state=_SEED, C=0.01)
        case "logistic_regression":
            return logistic()
        case "kernel_svm":
            return SVC()
        case "random_forest":
            return RandomForestClassifier(50, max_depth=16, random_state=_SEED)
        case _:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")


def _no_op_graph() -> onnx.ModelProto:
    """Takes the rows and gives one number of each, which is as little as a graph can do."""
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["X", "first"], ["column"], axis=1),
            helper.make_node("Cast", ["column"], ["label"], to=TensorProto.INT64),
        ],
        "no_op",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"])],
        [helper.make_tensor("first", TensorProto.INT64, [], [0])],
    )
    opset = helper.make_opsetid("", OPSETS[""])
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


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
                prepared_on(
                    _native(folder)
                    if form == "native"
                    else processor(cache, _LIMITS, io_pool_bytes=_IO_POOL_BYTES),
                    folder,
                    cache,
                    batch_sizes,
                )
            )
            for _ in range(count)
        ]


def _native(folder: Path) -> Device[Any]:
    return ContainerDevice(
        folder, limits=_LIMITS, io_pool_bytes=_IO_POOL_BYTES, start_limit_s=_START_LIMIT_S
    )


def labels_of(outputs: Sequence[Buffer], model: ServedModel) -> Array:
    """The labels among the outputs of one request."""
    (index,) = [i for i, spec in enumerate(model.outputs) if spec.name == "label"]
    labels: Array = np.frombuffer(outputs[index], np.int64)
    return labels
