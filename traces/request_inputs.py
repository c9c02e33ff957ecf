"""Inputs of requests: tensors made from a model's metadata, or read from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from clockwright.cli.inference import OPEN_SIZE, check_shape, random_array
from clockwright.client.channel import Access
from clockwright.client.client import Array
from clockwright.client.statuses import error_of
from clockwright.errors import ConfigError
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.tensors import DATATYPES
from clockwright.wire.texts import join_texts

_PREFIX = "/inference.GRPCInferenceService/"
_BYTES = "BYTES"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInputs:
    """Settings of the inputs."""

    #: Rows of a request, where a model's first dimension is open.
    rows: int = 1
    #: Inputs that no file gives are drawn at random; otherwise they are zeros.
    random: bool = False
    #: Number of different requests with random inputs, sent in turn.
    num_variants: int = 1
    seed: int = 0
    #: Arrays by input name, shape (rows, ...): requests take their rows from them in turn.
    arrays: Mapping[str, Array] = field(default_factory=dict)
    #: Shapes of inputs by name, for those with open dimensions besides the first.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """Encoded inputs of the requests to one model."""

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

    Raises ClockwrightError as `Client` does.
    """
    call = channel.unary_unary(_PREFIX + method)
    try:
        response: bytes = await call(request.SerializeToString(), metadata=access.metadata)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, address) from None
    return response


def model_inputs(metadata: pb.ModelMetadataResponse, wanted: RequestInputs) -> ModelInputs:
    """Make the inputs of the requests to a model.

    Raises ConfigError if a dimension is open and nothing says its size, or a file does not fit.
    """
    random = np.random.default_rng(wanted.seed)
    tensors: list[pb.ModelInferRequest.InferInputTensor] = []
    columns: list[list[bytes]] = []
    for spec in metadata.inputs:
        what = f"model {metadata.name}, input {spec.name!r}"
        shape = _shape(spec, wanted, what)
        if spec.datatype not in DATATYPES:
            raise ConfigError(f"{what}: found datatype {spec.datatype}, expected one that is known")
        check_shape(what, shape)
        array = wanted.arrays.get(spec.name)
        if array is not None:
            samples = _samples(array, shape, what)
        elif wanted.random:
            samples = [
                random_array(random, spec.datatype, shape) for _ in range(wanted.num_variants)
            ]
        else:
            empty = b"" if spec.datatype == _BYTES else 0
            dtype = "S1" if spec.datatype == _BYTES else DATATYPES[spec.datatype].dtype
            samples = [np.full(shape, empty, dtype)]
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
    elif wanted.rows > 1 and shape and shape[0] == 1:
        raise ConfigError(f"{what}: found --rows {wanted.rows}, expected 1 as in shape {shape}")
    array = wanted.arrays.get(spec.name)
    for position, size in enumerate(shape):
        if size != -1:
            continue
        # What no file says is as in `clockwright infer`. A file of another shape is refused later.
        if array is not None and array.ndim == len(shape):
            shape[position] = array.shape[position]
        else:
            shape[position] = OPEN_SIZE
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
        if sample.dtype.kind not in "OSU":
            raise ConfigError(f"{what}: the file has {sample.dtype.name}, expected text")
        return join_texts(sample.reshape(-1).tolist())
    dtype = np.dtype(DATATYPES[datatype].dtype)
    if sample.dtype != dtype:
        raise ConfigError(f"{what}: the file has {sample.dtype.name}, expected {datatype}")
    return np.ascontiguousarray(sample, dtype.newbyteorder("<")).tobytes()
