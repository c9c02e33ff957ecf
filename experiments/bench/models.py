"""`make bench NAME=bench-models`: are models served as their exporters wrote them?

Two lists. Each of `experiments.bench.foreign_models` is asked over a local server and compared with plain onnxruntime on
the same file. Each operator test of the `onnx` package is compiled as a worker does it, run on the test's inputs and
compared with onnxruntime, or with the test's own outputs where Python has no numbers for onnxruntime's.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from clockwright.client.client import Client
from clockwright.elements import bytes_of, elements_of
from clockwright.errors import ClockwrightError, ModelError
from clockwright.wire.tensors import DATATYPES, TensorSpec
from experiments.bench.foreign_models import MODELS, Array, ForeignModel
from experiments.live.local_server import LocalServer
from experiments.study.bench import Findings, bench
from worker.compiling.compile import OnnxruntimeTarget, compile_model, read_weights
from worker.compiling.lift_weights import LiftedGraph
from worker.models.model_files import GRAPH_FILE, MODEL_FILE, CompiledModel, Limits, ModelSource

_LIMITS = Limits(arena_bytes=64 << 20, num_pages=8, io_bytes=64 << 20)
_SLO_MS = 600_000.0
# An operator may add in another order when the graph around it is optimised.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is asked."""

    #: Every so many operator tests one is run.
    every: int = 1


def run_alone(model: ForeignModel, inputs: dict[str, Array]) -> dict[str, Array]:
    """What plain onnxruntime answers; row by row where rows influence each other."""
    if model.answer is not None:
        return model.answer
    session = _plain_session(model.build())
    names = [each.name for each in session.get_outputs()]
    if not model.by_row:
        return dict(zip(names, map(_as_array, session.run(None, inputs)), strict=True))
    [(name, rows)] = inputs.items()
    parts = zip(*[session.run(None, {name: row[np.newaxis]}) for row in rows], strict=True)
    return {each: np.concatenate(part) for each, part in zip(names, parts, strict=True)}


def write_models(folder: Path) -> None:
    """Write all foreign models as a server reads them."""
    for model in MODELS:
        (folder / model.name / "1").mkdir(parents=True)
        (folder / model.name / "1" / MODEL_FILE).write_bytes(model.build().SerializeToString())
        (folder / model.name / "config.toml").write_text("batch_sizes = [1, 2, 4]\n")


def is_right(client: Client, model: ForeignModel) -> bool:
    """Ask a server all requests to a model. Returns whether all answers are onnxruntime's, bit for bit.

    Raises:
        ClockwrightError: the server refuses one.
    """
    for inputs in model.requests:
        found = client.infer(model.name, inputs, slo_ms=_SLO_MS).outputs
        wanted = run_alone(model, inputs)
        if list(found) != list(wanted):
            return False
        for name, array in wanted.items():
            if found[name].dtype != array.dtype or not np.array_equal(found[name], array):
                return False
    return True


def ask_foreign_models() -> dict[str, str]:
    """Serve the foreign models. Returns by name "equal", "different", or the words of a refusal."""
    told = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch) / "models")
        arguments = ["--models", f"{scratch}/models", "--cache-dir", f"{scratch}/cache"]
        with LocalServer(arguments) as server, Client(server.address) as client:
            for model in MODELS:
                try:
                    told[model.name] = "equal" if is_right(client, model) else "different"
                except ClockwrightError as error:
                    told[model.name] = str(error)
    return told


def operator_cases(every: int = 1) -> Sequence[Any]:
    """The operator tests of the `onnx` package, in its order."""
    with warnings.catch_warnings():
        # They are computed with overflows that numpy warns of.
        warnings.simplefilter("ignore")
        return list(collect_testcases(None))[::every]


def judge(case: Any) -> str:  # noqa: ANN401
    """Compile and run an operator test.

    Returns:
        "equal" or "different"; "out of scope: ..." for what plain onnxruntime does not run here and for sequences as
        inputs; otherwise the words of the refusal.
    """
    inputs, outputs = (list(map(_to_array, side)) for side in case.data_sets[0])
    if not all(isinstance(each, np.ndarray) for each in inputs):
        return "out of scope: sequences as inputs"
    names = [value.name for value in case.model.graph.input]
    try:
        session = _plain_session(case.model)
        if all(each.dtype.kind in "fiubO" for each in inputs):
            outputs = session.run(None, dict(zip(names, inputs, strict=False)))
    except Exception as error:  # onnxruntime's exceptions have no common base
        if "Numpy type" not in str(error):
            return "out of scope: onnxruntime does not run it"
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        source.mkdir()
        out.mkdir()
        (source / MODEL_FILE).write_bytes(case.model.SerializeToString())
        try:
            compiled = compile_model(ModelSource(source), out, _LIMITS, lambda _: None)
            found = _run(out, compiled, dict(zip(names, inputs, strict=False)))
        except Exception as error:  # onnxruntime's exceptions have no common base
            return str(error) or repr(error)
    return "equal" if all(map(_is_same, found, map(_as_array, outputs))) else "different"


def _run(folder: Path, compiled: CompiledModel, inputs: dict[str, Array]) -> list[Array]:
    specs = [tensor.spec for tensor in compiled.inputs]
    rows = max(
        (inputs[spec.name].shape[spec.axis] for spec in specs if spec.axis is not None), default=1
    )
    raw = [_raw(spec, inputs[spec.name]) for spec in specs]
    for spec, each in zip(specs, raw, strict=True):
        if spec.datatype != "BYTES" and not spec.fits(each.nbytes, rows):
            wanted = spec.batch_bytes(rows)
            raise ModelError(f"input {spec.name!r} has {each.nbytes} bytes, expected {wanted}")
    graph = (folder / GRAPH_FILE).read_bytes()
    lifted = LiftedGraph(graph, compiled.weights, read_weights(folder, compiled))
    found = OnnxruntimeTarget().open(lifted, compiled)(rows, raw)
    return [
        elements_of(tensor.spec.datatype, each).reshape(tensor.spec.shape(rows))
        for tensor, each in zip(compiled.outputs, found, strict=True)
    ]


def _raw(spec: TensorSpec, array: Array) -> Array:
    datatype = DATATYPES[spec.datatype]
    if spec.datatype == "BYTES":
        return bytes_of(spec.datatype, array)
    numbers = (
        bytes_of(spec.datatype, array.astype(np.float64))
        if datatype.is_float and array.dtype.name != datatype.numpy_name
        else array.astype(datatype.numpy_name)
        if not datatype.is_float
        else array
    )
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def _is_same(found: Array, wanted: Array) -> bool:
    if found.shape != wanted.shape:
        return False
    if found.dtype.kind in "iubO" and wanted.dtype.kind in "iubO":
        return bool(np.array_equal(found, wanted))
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    return np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _plain_session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _to_array(value: Any) -> Any:  # noqa: ANN401
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _as_array(answer: Any) -> Array:  # noqa: ANN401
    """What clients get in place of a sequence: of maps a row each, of tensors one tensor."""
    if not isinstance(answer, list):
        return np.asarray(answer)
    if answer and isinstance(answer[0], dict):
        return np.array([list(each.values()) for each in answer], np.float32)
    return np.stack(answer)


def measure(setting: Setting) -> Findings:
    """Ask all models, and count."""
    foreign = ask_foreign_models()
    cases = {case.name: judge(case) for case in operator_cases(setting.every)}
    in_scope = [told for told in cases.values() if not told.startswith("out of scope")]
    by_value = [told for told in in_scope if "the values of the inputs" in told]
    served = [told for told in foreign.values() if told in ("equal", "different")]
    figures = {
        "models": len(foreign),
        "served_as_shipped_share": len(served) / len(foreign),
        "equal_share": served.count("equal") / max(len(served), 1),
        "onnx_cases": len(in_scope),
        "onnx_cases_share": in_scope.count("equal") / max(len(in_scope), 1),
        "onnx_cases_different": in_scope.count("different"),
        "onnx_cases_shape_by_value": len(by_value),
        "onnx_cases_out_of_scope": len(cases) - len(in_scope),
    }
    told = Counter(each for each in cases.values() if each != "equal")
    return Findings(figures, {"models": foreign, "onnx_cases": dict(told.most_common())})


STUDY = bench("bench-models", Setting(), measure)
