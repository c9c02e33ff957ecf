"""`python -m experiments bench-models --zoo FOLDER`: are models served as their exporters wrote them?

Three lists. Each of `experiments.bench.foreign_models`, and each file of `experiments.bench.zoo` that plain onnxruntime
runs, is asked over a local server and compared with plain onnxruntime on the same file. Nothing is configured. Answers of
the zoo are asked again while six other clients send outliers of other sizes. Each operator test of the `onnx` package is compiled as a worker does it, run on the test's inputs and
compared with onnxruntime, or with the test's own outputs where Python has no numbers for onnxruntime's.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from clockwright.client.client import Client
from clockwright.client.operator import Operator
from clockwright.elements import array_of, bytes_of, elements_of, raw_of
from clockwright.errors import ClockwrightError, ModelError
from clockwright.wire.tensors import DATATYPES, TensorSpec
from experiments.bench.foreign_models import MODELS, Array, ForeignModel
from experiments.bench.zoo import (
    PlainAnswer,
    PlainModel,
    as_array,
    is_equal,
    plain_models,
    strange,
    zoo_folder,
)
from experiments.live.local_server import LocalServer, folders
from experiments.study.bench import Findings, bench
from worker.compiling.compile import OnnxruntimeTarget, compile_model, read_weights
from worker.compiling.lift_weights import LiftedGraph
from worker.engines.onnxruntime import open_session
from worker.engines.open_kernel import OpenKernel
from worker.models.model_files import GRAPH_FILE, MODEL_FILE, CompiledModel, Limits, ModelSource

_LIMITS = Limits(arena_bytes=64 << 20, num_pages=8, io_bytes=64 << 20)
_SLO_MS = 600_000.0
# An operator may add in another order when the graph around it is optimised.
_TOLERANCE = 1e-5
# Clients that disturb, and how often each request is asked at the same time.
_OTHERS, _ROUNDS = 6, 3
_START_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is asked."""

    #: Every so many operator tests one is run.
    every: int = 1
    #: The folder of the zoo, which is made there if it is empty; empty: a temporary one.
    zoo: str = ""


def run_alone(model: ForeignModel, inputs: dict[str, Array]) -> dict[str, Array]:
    """What plain onnxruntime answers; row by row where rows influence each other."""
    if model.answer is not None:
        return model.answer
    session = _plain_session(model.build())
    names = [each.name for each in session.get_outputs()]
    if not model.by_row:
        return dict(zip(names, map(as_array, session.run(None, inputs)), strict=True))
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
        with LocalServer(folders(scratch)) as server, Client(server.address) as client:
            for model in MODELS:
                try:
                    told[model.name] = "equal" if is_right(client, model) else "different"
                except ClockwrightError as error:
                    told[model.name] = str(error)
    return told


@dataclass(slots=True)
class ZooAnswers:
    """What a server did with one model of the zoo."""

    #: Why it is not served; empty: it is.
    refusal: str = ""
    equal: int = 0
    #: Answers that are not onnxruntime's; of models whose answers are not drawn by chance.
    different: int = 0
    #: Answers that other clients' requests changed.
    mixed: int = 0
    #: Why rows run one by one.
    one_by_one: str = ""

    @property
    def words(self) -> str:
        """The outcome."""
        if self.refusal:
            return self.refusal
        if self.different or self.mixed:
            return f"{self.different} different, {self.mixed} mixed of {_ROUNDS * self.equal}"
        return "equal" if self.equal else "by chance"


def ask_zoo(folder: Path) -> tuple[dict[str, ZooAnswers], dict[str, float]]:
    """Serve the zoo. Returns the outcome for each model, and other figures."""
    models = zoo_folder(folder)
    plain = plain_models(models)
    with tempfile.TemporaryDirectory() as scratch:
        for name in plain:
            shutil.copytree(models / name, Path(scratch) / "models" / name)
        begin_s = time.monotonic()
        server = LocalServer(folders(scratch), start_limit_s=_START_LIMIT_S)
        with _CompilerMemory(server.process.pid) as memory, server:
            ready_s = time.monotonic() - begin_s
            with Client(server.address) as client, Operator(server.address) as operator:
                told = {each.model_id: each for each in operator.models()}
                answers = {}
                for name, (model, asked) in plain.items():
                    found = answers[name] = ZooAnswers(one_by_one=told[name].one_by_one)
                    if told[name].state != "READY":
                        found.refusal = told[name].reason
                    else:
                        _ask(client, server.address, name, model, asked, found)
                    print(f"{name:45} {found.words}", flush=True)
    return answers, {
        "zoo_files": len(list(models.iterdir())),
        "ready_s": ready_s,
        "ready_s_per_model": ready_s / len(plain),
        "compiler_peak_mib": memory.peak_bytes / (1 << 20),
    }


def _ask(
    client: Client,
    address: str,
    name: str,
    model: PlainModel,
    asked: Sequence[PlainAnswer],
    found: ZooAnswers,
) -> None:
    """Ask all requests to a model alone, and again while other clients ask."""
    if not is_equal(model.run(asked[0].inputs), asked[0].answer):  # by chance
        try:
            client.infer(name, asked[0].inputs, slo_ms=_SLO_MS)
        except ClockwrightError as error:
            found.refusal = str(error)
        return
    right: list[PlainAnswer] = []
    for each in asked:
        try:
            outputs = client.infer(name, each.inputs, slo_ms=_SLO_MS).outputs
        except ClockwrightError as error:
            found.refusal = str(error)
            return
        if is_equal(outputs, each.answer):
            right.append(each)
        elif found.one_by_one and is_equal(outputs, rows := model.run_rows(each.inputs)):
            right.append(PlainAnswer(each.inputs, rows))
        else:
            found.different += 1
    found.equal = len(right)
    stop = threading.Event()

    def disturb(seed: int) -> None:
        random = np.random.default_rng(seed)
        with Client(address) as other:
            while not stop.is_set():
                inputs = strange(asked[int(random.integers(len(asked)))].inputs, random)
                with suppress(ClockwrightError):  # a model may fail on these
                    other.infer(name, inputs, slo_ms=_SLO_MS)

    with ThreadPoolExecutor(_OTHERS) as pool:
        others = [pool.submit(disturb, seed) for seed in range(_OTHERS)]
        try:
            for each in right * _ROUNDS:
                outputs = client.infer(name, each.inputs, slo_ms=_SLO_MS).outputs
                found.mixed += not is_equal(outputs, each.answer)
        except ClockwrightError as error:
            found.refusal = f"while other clients ask: {error}"
        finally:
            stop.set()
        for other in others:
            other.result()


class _CompilerMemory:
    """Watches the memory of the compilers among the processes below one."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    if b"worker.compiling.compiler_process" not in path.read_bytes():
                        continue
                    if self._pid not in _parents(int(path.parent.name)):
                        continue
                    for line in (path.parent / "status").read_text(encoding="ascii").splitlines():
                        if line.startswith("VmHWM:"):
                            self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) << 10)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _parents(pid: int) -> Iterator[int]:
    while pid > 1:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        pid = int(text.rpartition(")")[2].split()[1])
        yield pid


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
            plain = list(map(as_array, session.run(None, dict(zip(names, inputs, strict=False)))))
            # onnxruntime gives the bits of some types that numpy lacks.
            if [each.dtype for each in plain] == [as_array(each).dtype for each in outputs]:
                outputs = plain
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
    return "equal" if all(map(_is_same, found, map(as_array, outputs))) else "different"


def _run(folder: Path, compiled: CompiledModel, inputs: dict[str, Array]) -> list[Array]:
    specs = [tensor.spec for tensor in compiled.inputs]
    raw = [_raw(spec, inputs[spec.name]) for spec in specs]
    graph = (folder / GRAPH_FILE).read_bytes()
    weights = read_weights(folder, compiled)
    if compiled.open is not None:
        session = open_session(graph)
        kernel = OpenKernel(session, compiled, weights)
        arrays = [
            array_of(spec.datatype, each, inputs[spec.name].shape)
            for spec, each in zip(specs, raw, strict=True)
        ]
        [answer] = kernel.run([arrays], 1)
        if isinstance(answer, str):
            raise ModelError(answer)
        for tensor, array in zip(compiled.outputs, answer, strict=True):
            if not tensor.spec.allows(array.shape):
                raise ModelError(f"found shape {array.shape}, expected {tensor.spec.shape(-1)}")
        return [
            elements_of(tensor.spec.datatype, raw_of(each)).reshape(each.shape)
            for tensor, each in zip(compiled.outputs, answer, strict=True)
        ]
    rows = max(
        (inputs[spec.name].shape[spec.axis] for spec in specs if spec.axis is not None), default=1
    )
    for spec, each in zip(specs, raw, strict=True):
        if spec.datatype != "BYTES" and not spec.fits(each.nbytes, rows):
            wanted = spec.batch_bytes(rows)
            raise ModelError(f"input {spec.name!r} has {each.nbytes} bytes, expected {wanted}")
    lifted = LiftedGraph(graph, compiled.weights, weights)
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
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def measure(setting: Setting) -> Findings:
    """Ask all models, and count."""
    kinds = ask_foreign_models()
    with tempfile.TemporaryDirectory() as scratch:
        zoo, figures = ask_zoo(Path(setting.zoo or scratch))
    cases = {case.name: judge(case) for case in operator_cases(setting.every)}
    in_scope = [told for told in cases.values() if not told.startswith("out of scope")]
    served = [found for found in zoo.values() if not found.refusal]
    judged = [found for found in served if found.words != "by chance"]
    figures |= {
        "kinds": len(kinds),
        "kinds_equal": list(kinds.values()).count("equal"),
        "models": len(zoo),
        "served_as_shipped_share": len(served) / len(zoo),
        "equal_share": [found.words for found in judged].count("equal") / max(len(judged), 1),
        "mixed_answers": sum(found.mixed for found in zoo.values()),
        "one_by_one": sum(bool(found.one_by_one) for found in served),
        "onnx_cases": len(in_scope),
        "onnx_cases_share": in_scope.count("equal") / max(len(in_scope), 1),
        "onnx_cases_different": in_scope.count("different"),
        "onnx_cases_out_of_scope": len(cases) - len(in_scope),
    }
    told = Counter(each for each in cases.values() if each != "equal")
    others = {name: found.words for name, found in zoo.items() if found.words != "equal"}
    extra = {
        "kinds_not_equal": {name: words for name, words in kinds.items() if words != "equal"},
        "zoo_equal": sorted(zoo.keys() - others.keys()),
        "zoo_others": others,
        "onnx_cases": dict(told.most_common()),
    }
    return Findings(figures, extra)


STUDY = bench("bench-models", Setting(), measure)
