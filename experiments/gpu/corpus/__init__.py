"""Graphs of common networks, exported by torch's both exporters, with the operators of full size and small weights.

`graphs.tar.xz` holds them without their weights, which are drawn again from a seed: no trained weights are here. It was
written by torch 2.14.1, torchvision 0.29.1, transformers 5.24.0, onnxscript 0.7.2, onnx 1.23.2 and onnxruntime 1.32.0;
`git log -- experiments/gpu/corpus/export.py` finds the program that did it.

The batch is open and all other sizes are fixed. An input of integers takes any below 64, but for masks, which
take 0 and 1.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

ARCHIVE = Path(__file__).with_name("graphs.tar.xz")
# What inputs of integers may be: numbers of letters, words or categories.
_IDS = 64

Array = np.ndarray[Any, np.dtype[Any]]


@cache
def _graphs() -> dict[str, bytes]:
    """Unpack all of the archive, because a part of it cannot be reached without what is before."""
    with lzma.open(ARCHIVE) as file, tarfile.open(fileobj=file) as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name.removesuffix(".onnx"): part.read() for name, part in found.items() if part}


def names() -> Sequence[str]:
    """List the networks, each as what it is and how it was exported: `bert.script`, `bert.dynamo`."""
    return sorted(_graphs())


def graph(name: str) -> onnx.ModelProto:
    """Read a network without its weights.

    Raises:
        KeyError: there is no such network.
    """
    return onnx.ModelProto.FromString(_graphs()[name])


def network(name: str) -> onnx.ModelProto:
    """Read a network and draw its weights, the same in every call.

    Raises:
        KeyError: there is no such network.
    """
    model = graph(name)
    for number, tensor in enumerate(tensors(model)):
        if is_empty(tensor):
            _fill(tensor, number)
    return model


def tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """All constants of a model: of its graph, of graphs inside that, and of its functions."""

    def of_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[TensorProto]:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                for graph in (
                    *([attribute.g] if attribute.HasField("g") else []),
                    *attribute.graphs,
                ):
                    yield from of_graph(graph)

    def of_graph(graph: onnx.GraphProto) -> Iterator[TensorProto]:
        yield from graph.initializer
        yield from of_nodes(graph.node)

    yield from of_graph(model.graph)
    for function in model.functions:
        yield from of_nodes(function.node)


def is_empty(tensor: TensorProto) -> bool:
    """Whether the archive lacks its numbers; a note of their mean and deviation is there instead."""
    return bool(tensor.doc_string)


def _fill(tensor: TensorProto, number: int) -> None:
    # Evenly around the mean: what has to be positive, as variances have, stays so.
    mean, deviation = map(float, tensor.doc_string.split())
    half = 3**0.5 * deviation
    drawn = np.random.default_rng(number).uniform(mean - half, mean + half, tuple(tensor.dims))
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        drawn = np.clip(np.rint(drawn), limits.min, limits.max)
    tensor.raw_data = drawn.astype(kind).tobytes()
    tensor.ClearField("doc_string")


def rows(model: onnx.ModelProto, count: int) -> dict[str, Array]:
    """Draw so many rows of each input, the same first rows whatever the count."""
    drawn = {}
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [dimension.dim_value for dimension in value.type.tensor_type.shape.dim[1:]]
        random = np.random.default_rng(zlib.crc32(value.name.encode()))
        if "mask" in value.name:
            # A sentence that is shorter than the others of its batch; no row is empty.
            lengths = random.integers(1, shape[-1] + 1, count)
            numbers: Array = np.arange(shape[-1]) < lengths[:, None]
        elif kind.kind == "f":
            numbers = random.standard_normal((count, *shape))
        else:
            numbers = random.integers(0, _IDS, (count, *shape))
        drawn[value.name] = numbers.astype(kind)
    return drawn
