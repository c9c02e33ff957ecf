"""What the requests of a client carry: tensors made from a model's metadata, or read from files."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from clockwright.channel import Access
from clockwright.cli.inference import check_shape, random_array
from clockwright.client import DTYPES, Array
from clockwright.errors import ConfigError
from clockwright.statuses import error_of
from clockwright.v1 import inference_pb2 as pb

_PREFIX = "/inference.GRPCInferenceService/"
_BYTES = "BYTES"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInputs:
    """What requests are to carry."""

    #: Rows of a request, where a model's first dimension is open.
    rows: int = 1
    #: Inputs that no file gives are drawn at random; otherwise they are zeros.
    random: bool = False
    #: How many different requests of random inputs there are, asked in turn.
    num_variants: int = 1
    seed: int = 0
    #: Arrays by input name, shape (rows, ...): requests take their rows from them in turn.
    arrays: Mapping[str, Array] = field(default_factory=dict)
    #: Shapes of inputs by name, for those with open dimensions besides the first.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """What the requests to one model carry, ready to be sent."""

    #: Name, datatype and shape of each input.
    tensors: Sequence[pb.ModelInferRequest.InferInputTensor]
    #: Bytes of each input, for each of several requests.
    variants: Sequence[Sequence[bytes]]


async def ask_server(
    channel: Any,  # noqa: ANN401
    address: str,
    access: Access,
    method: str,
    request: Any,  # noqa: ANN401  any message of the protocol
) -> bytes:
    """Call a method of `GRPCInferenceService`; returns the response's bytes.

    Raises:
        ClockwrightError: as `Client` does.
    """
    call = channel.unary_unary(_PREFIX + method)
    try:
        response: bytes = await call(request.SerializeToString(), metadata=access.metadata)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, address) from None
    return response


def model_inputs(metadata: pb.ModelMetadataResponse, wanted: RequestInputs) -> ModelInputs:
    """Make what the requests to a model carry.

    Raises:
        ConfigError: a dimension is open and nothing says its size, or a file does not fit.
    """
    random = np.random.default_rng(wanted.seed)
    tensors: list[pb.ModelInferRequest.InferInputTensor] = []
    columns: list[list[bytes]] = []
    for spec in metadata.inputs:
        what = f"model {metadata.name}, input {spec.name!r}"
        shape = _shape(spec, wanted, what)
        if spec.datatype != _BYTES and spec.datatype not in DTYPES:
            raise ConfigError(f"{what}: found datatype {spec.datatype}, expected one that is known")
        check_shape(what, shape)
        array = wanted.arrays.get(spec.name)
        if array is not None:
            samples = _samples(array, shape, what)
        elif wanted.random and spec.datatype in DTYPES:
            samples = [
                random_array(random, spec.datatype, shape) for _ in range(wanted.num_variants)
            ]
        else:
            empty = b"" if spec.datatype == _BYTES else 0
            samples = [np.full(shape, empty, DTYPES.get(spec.datatype, "S1"))]
        tensors.append(
            pb.ModelInferRequest.InferInputTensor(
                name=spec.name, datatype=spec.datatype, shape=samples[0].shape
            )
        )
        columns.append([_encode(sample, spec.datatype, what) for sample in samples])
    num_variants = max((len(column) for column in columns), default=1)
    variants = [
        tuple(column[index % len(column)] for column in columns) for index in range(num_variants)
    ]
    return ModelInputs(tensors=tensors, variants=variants)


def _shape(
    spec: pb.ModelMetadataResponse.TensorMetadata, wanted: RequestInputs, what: str
) -> tuple[int, ...]:
    if (said := wanted.shapes.get(spec.name)) is not None:
        return said
    shape = list(spec.shape)
    if shape and shape[0] < 0:
        shape[0] = wanted.rows
    array = wanted.arrays.get(spec.name)
    for position, size in enumerate(shape):
        if size >= 0:
            continue
        if array is None or array.ndim != len(shape):
            raise ConfigError(
                f"{what}: dimension {position} is open, expected --shape {spec.name}=... or a file"
            )
        shape[position] = array.shape[position]
    return tuple(shape)


def _samples(array: Array, shape: tuple[int, ...], what: str) -> list[Array]:
    """Cut an array into requests of one shape."""
    if array.ndim == len(shape) + 1 and array.shape[1:] == shape:
        return list(array)
    rows = shape[0] if shape else 1
    if array.ndim != len(shape) or array.shape[1:] != shape[1:] or len(array) < rows:
        raise ConfigError(f"{what}: the file has shape {array.shape}, expected rows of {shape}")
    return [array[begin : begin + rows] for begin in range(0, len(array) - rows + 1, rows)]


def _encode(sample: Array, datatype: str, what: str) -> bytes:
    if datatype == _BYTES:
        texts = (
            item.encode() if isinstance(item, str) else bytes(item)
            for item in sample.reshape(-1).tolist()
        )
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    dtype = np.dtype(DTYPES[datatype])
    if sample.dtype != dtype:
        raise ConfigError(f"{what}: the file has {sample.dtype.name}, expected {datatype}")
    return np.ascontiguousarray(sample, dtype.newbyteorder("<")).tobytes()
