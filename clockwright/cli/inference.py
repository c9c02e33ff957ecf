"""Inputs and outputs of `clockwright infer`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from clockwright.cli.show import print_json
from clockwright.client.client import Array, InferResult, ModelMetadata
from clockwright.elements import draw_texts
from clockwright.errors import ConfigError
from clockwright.foreign import printable
from clockwright.units import NS_PER_US, format_ns
from clockwright.wire.tensors import DATATYPES

_VALUES_SHOWN = 8
# Longer texts are cut.
_CHARS_SHOWN = 200
# Parts of an application's explanation that its user needs for feedback, or to judge the answer.
_ALWAYS_SAID = ("query_id", "default_reason")
# Limits on the inputs that are made from a server's description.
_VALUES_MAX = 1 << 28
_DIMENSIONS_MAX = 32
#: The size of an open dimension behind the rows of which nothing is said.
OPEN_SIZE: Final = 16


def read_inputs(arguments: Sequence[str]) -> dict[str, Array]:
    """Read NAME=FILE.npy arguments. Raises ConfigError if an argument has another form, or its file cannot be read."""
    arrays: dict[str, Array] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--input: found {argument!r}, expected NAME=FILE.npy")
        try:
            loaded = np.load(Path(path), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"--input {name}: {path}: {error}") from None
        if not isinstance(loaded, np.ndarray):
            raise ConfigError(f"--input {name}: {path}: expected one array (.npy)")
        arrays[name] = loaded
    return arrays


def read_shapes(arguments: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read NAME=1,3,224,224 arguments. Raises ConfigError if an argument has another form."""
    shapes: dict[str, tuple[int, ...]] = {}
    for argument in arguments:
        name, equals, sizes = argument.partition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            shape = ()
        if not equals or not name or not shape or min(shape) < 1:
            raise ConfigError(f"--shape: found {argument!r}, expected NAME=1,3,224,224")
        shapes[name] = shape
    return shapes


def random_inputs(
    metadata: ModelMetadata, *, rows: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Draw inputs that fit a model, as `random_array`.

    `shapes` are those of some inputs; in others open dimensions behind the rows have `OPEN_SIZE`.
    """
    check_names("--shape", shapes, {spec.name for spec in metadata.inputs})
    random = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for spec in metadata.inputs:
        what = f"model {metadata.name}, input {spec.name!r}"
        described = tuple(OPEN_SIZE if size == -1 else size for size in spec.shape(rows))
        shape = shapes.get(spec.name, described)
        if spec.datatype not in DATATYPES:
            raise ConfigError(f"{what}: found datatype {spec.datatype}, expected one that is known")
        check_shape(what, shape)
        arrays[spec.name] = random_array(random, spec.datatype, shape)
    return arrays


def check_names(flag: str, said: Iterable[str], known: Collection[str]) -> None:
    """Check that a flag speaks of inputs that there are.

    Raises:
        ConfigError: it names another one.
    """
    for name in said:
        if name not in known:
            raise ConfigError(
                f"{flag}: found {name!r}, expected an input: {', '.join(sorted(known))}"
            )


def check_shape(what: str, shape: tuple[int, ...]) -> None:
    """Check that a client can make an input of the shape that the server describes.

    Raises ConfigError if it is not; `what` says which it is.
    """
    if len(shape) > _DIMENSIONS_MAX:
        raise ConfigError(
            f"{what}: found {len(shape)} dimensions, expected {_DIMENSIONS_MAX} at most"
        )
    if any(size < 0 for size in shape) or math.prod(shape) > _VALUES_MAX:
        raise ConfigError(f"{what}: found shape {shape}, expected {_VALUES_MAX} values at most")


def random_array(random: np.random.Generator, datatype: str, shape: tuple[int, ...]) -> Array:
    """Draw normal floats, integers and booleans of 0 and 1, or short texts."""
    if datatype == "BYTES":
        return draw_texts(random, math.prod(shape)).reshape(shape)
    dtype = np.dtype(DATATYPES[datatype].dtype)
    drawn = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
    return drawn.astype(dtype)


def print_result(result: InferResult, *, explain: bool, json: bool) -> None:
    """Print the outputs and, on request, the explanation. JSON has everything that the server sent."""
    if json:
        print_json(
            {
                "model": result.model_name,
                "version": result.model_version,
                "outputs": {name: array.tolist() for name, array in result.outputs.items()},
                "explanation": result.explanation,
            }
        )
        return
    for name, array in result.outputs.items():
        shape = ", ".join(str(size) for size in array.shape)
        is_text = array.dtype.kind == "O"
        values = " ".join(
            f"'{printable(value, _CHARS_SHOWN)}'" if is_text else f"{value:g}"
            for value in array.reshape(-1)[:_VALUES_SHOWN]
        )
        more = " ..." if array.size > _VALUES_SHOWN else ""
        print(f"{name}: {'text' if is_text else array.dtype.name} ({shape}): {values}{more}")
    for name, value in result.explanation.items():
        if not explain and name not in _ALWAYS_SAID:
            continue
        if name.endswith("_us") and isinstance(value, int):
            print(f"  {name.removesuffix('_us')}: {format_ns(value * NS_PER_US)}")
        else:
            print(f"  {name}: {value}")
