"""onnxruntime for a model with open dimensions: requests of many sizes in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import onnxruntime as ort

from clockwright.elements import Array, array_of, elements_of, raw_of
from clockwright.errors import ModelError
from clockwright.wire.tensors import TensorSpec
from worker.engines.onnxruntime import (
    Bytes,
    TextKernel,
    address_of,
    aligned_bytes,
    plain_words,
    release_memory,
)
from worker.models.groups import RunGroup, group_requests, run_or_each
from worker.models.model_files import BoundTensor, CompiledModel, OpenSizes

# Values may ask for an answer of gigabytes. Memory is given back after a run that failed, and after one that answered more
# than this, which is more than most batches have room for. After each run that would cost 5 % of the smallest models'
# runs, and half of one that answers 80 MB.
_KEPT_BYTES_MAX = 256 << 20

#: The outputs of a request, or why it failed.
Answer = list[Array] | str


class OpenKernel:
    """One architecture with open dimensions, bound to fixed weights. Not for two threads at once."""

    def __init__(
        self,
        session: ort.InferenceSession,
        compiled: CompiledModel,
        weights: Bytes,
        options: ort.RunOptions | None = None,
    ) -> None:
        """Bind the weights: memory that begins with their blob at every run. The graph has open sizes.

        Through `options` a run can be ended; None: none is.
        """
        assert compiled.open is not None
        self._open: OpenSizes = compiled.open
        self._session = session
        self.compiled = compiled
        self._inputs, self._outputs = compiled.inputs, compiled.outputs
        #: One more run takes as long as so many elements; known once the model is profiled.
        self.run_elements = 0
        # Rows of such models never run together.
        self._is_apart = bool(compiled.one_by_one) or any(
            tensor.spec.axis is None for tensor in (*self._inputs, *self._outputs)
        )
        self._options = options
        self._texts = None
        if compiled.has_texts:
            self._texts = TextKernel(session, compiled, weights, options)
        self._binding = session.io_binding()
        for weight in compiled.weights if self._texts is None else ():
            self._binding.bind_input(
                weight.name,
                "cpu",
                0,
                weight.element_type,
                list(weight.shape),
                address_of(weights) + weight.offset,
            )

    def run(self, requests: Sequence[Sequence[Array]], elements_max: int) -> list[Answer]:
        """Run requests, each an array per input, in as few runs as their sizes allow.

        A request that fails has words in place of its answer, and no other fails with it.
        """
        answers: list[Answer] = [""] * len(requests)
        for group in self._groups(requests, elements_max):
            found = run_or_each(
                group.requests, lambda some: self._run_group([requests[each] for each in some])
            )
            for index, answer in zip(group.requests, found, strict=True):
                answers[index] = answer
        return answers

    def _groups(self, requests: Sequence[Sequence[Array]], elements_max: int) -> list[RunGroup]:
        sizes = [self.sizes_of(request) for request in requests]
        if self._is_apart or len(requests) == 1:
            return [RunGroup(size, [index], 1) for index, size in enumerate(sizes)]
        pads = [may_pad(self._inputs, self._open, request) for request in requests]
        rows = [self._rows(request) for request in requests]
        return group_requests(
            rows, sizes, pads, elements_max=elements_max, run_elements=self.run_elements
        )

    def sizes_of(self, arrays: Sequence[Array]) -> tuple[int, ...]:
        """The sizes of a request's open dimensions."""
        return tuple(symbol_sizes(self._inputs, arrays)[symbol] for symbol in self._open.symbols)

    def _rows(self, arrays: Sequence[Array]) -> int:
        for tensor, array in zip(self._inputs, arrays, strict=True):
            if tensor.spec.axis is not None:
                return int(array.shape[tensor.spec.axis])
        return 1

    def _run_group(self, members: Sequence[Sequence[Array]]) -> Sequence[Answer]:
        rows = [self._rows(arrays) for arrays in members]
        if self._is_apart and rows[0] > 1:
            return [self._row_by_row(members[0], rows[0])]
        sizes = [symbol_sizes(self._inputs, arrays) for arrays in members]
        wide = {symbol: max(each[symbol] for each in sizes) for symbol in self._open.symbols}
        joined = [
            _join(tensor.spec, [arrays[index] for arrays in members], wide)
            for index, tensor in enumerate(self._inputs)
        ]
        found = self._launch(joined)
        if len(members) == 1:
            return [found]
        answers: list[Answer] = []
        begin = 0
        for own, number in zip(sizes, rows, strict=True):
            answers.append(
                [
                    cut_rows(tensor.spec, array, begin, begin + number, own, wide)
                    for tensor, array in zip(self._outputs, found, strict=True)
                ]
            )
            begin += number
        return answers

    def _row_by_row(self, arrays: Sequence[Array], rows: int) -> Answer:
        parts, specs = [], [tensor.spec for tensor in self._inputs]
        for row in range(rows):
            one = [
                _join(spec, [array if spec.axis is None else array.take([row], spec.axis)], {})
                for spec, array in zip(specs, arrays, strict=True)
            ]
            parts.append(self._launch(one))
        found: list[Array] = []
        for tensor, pieces in zip(self._outputs, zip(*parts, strict=True), strict=True):
            axis = tensor.spec.axis
            if len({piece.shape for piece in pieces}) > 1:
                return f"output {tensor.spec.name!r} has rows of several shapes"
            found.append(pieces[0] if axis is None else np.concatenate(pieces, axis))
        return found

    def _launch(self, inputs: Sequence[Array]) -> list[Array]:
        if self._texts is not None:
            return self._texts.run(inputs)
        binding = self._binding
        for tensor, array in zip(self._inputs, inputs, strict=True):
            binding.bind_input(
                tensor.graph_name,
                "cpu",
                0,
                tensor.element_type,
                list(array.shape),
                address_of(array),
            )
        # The shapes of outputs are the model's to say, so their memory is onnxruntime's.
        for tensor in self._outputs:
            binding.bind_output(tensor.graph_name, "cpu")
        found: list[Array] = []
        words = ""
        try:
            self._session.run_with_iobinding(binding, self._options)
            found = [
                _copied(tensor.spec, value)
                for tensor, value in zip(self._outputs, binding.get_outputs(), strict=True)
            ]
        except Exception as error:  # onnxruntime's exceptions have no common base
            words = plain_words(error)
        # Not before the exception is gone: it holds an answer that could not be copied.
        binding.clear_binding_outputs()
        if words or sum(array.nbytes for array in found) > _KEPT_BYTES_MAX:
            release_memory()
        if words:
            raise ModelError(words)
        return found


def _copied(spec: TensorSpec, value: ort.OrtValue) -> Array:
    raw = ctypes.string_at(value.data_ptr(), int(value.tensor_size_in_bytes()))
    return array_of(spec.datatype, raw, value.shape())


def may_pad(inputs: Sequence[BoundTensor], sizes: OpenSizes, arrays: Sequence[Array]) -> bool:
    """Whether zeros behind the rows of a request change no answer."""
    if not sizes.pads:
        return False
    for tensor, array, guarded in zip(inputs, arrays, sizes.guarded, strict=True):
        if guarded:
            numbers = elements_of(tensor.spec.datatype, raw_of(array))
            rows = numbers.reshape(len(array), -1)
            if not (rows >= 0).all() or not (rows >= 1).any(axis=1).all():
                return False
    return True


def symbol_sizes(inputs: Sequence[BoundTensor], arrays: Sequence[Array]) -> dict[str, int]:
    """The sizes of the open dimensions of a request."""
    sizes: dict[str, int] = {}
    for tensor, array in zip(inputs, arrays, strict=True):
        for symbol, place in open_places(tensor.spec):
            sizes[symbol] = array.shape[place]
    return sizes


def open_places(spec: TensorSpec) -> Iterator[tuple[str, int]]:
    """The symbols of a spec's open dimensions, with their places in the whole shape."""
    if spec.vary is not None:
        places = [place for place, size in enumerate(spec.shape(1)) if size < 0]
        yield from zip(spec.vary.symbols, places, strict=True)


def _join(spec: TensorSpec, arrays: Sequence[Array], wide: dict[str, int]) -> Array:
    """Copy requests' tensors one after another to a place that onnxruntime takes, each padded to some sizes."""
    shape, dtype = list(arrays[0].shape), arrays[0].dtype
    if len(arrays) > 1:  # Rows are first: others run apart.
        shape[0] = sum(len(array) for array in arrays)
        for symbol, place in open_places(spec):
            # Sums have one size where rows run together.
            shape[place] = wide.get(symbol, shape[place])
    if dtype.hasobject:
        joined = np.full(shape, "", dtype)
    else:
        joined = aligned_bytes(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    if len(arrays) == 1:
        joined[...] = arrays[0]
        return joined
    begin = 0
    for array in arrays:
        end = begin + len(array)
        joined[(slice(begin, end), *map(slice, array.shape[1:]))] = array
        begin = end
    return joined


def cut_rows(
    spec: TensorSpec,
    array: Array,
    begin: int,
    end: int,
    own: dict[str, int],
    wide: dict[str, int],
) -> Array:
    """Take a request's rows of an output, without what is there for its padding."""
    places: list[slice] = [slice(begin, end), *[slice(None)] * (array.ndim - 1)]
    for symbol, place in open_places(spec):
        if own.get(symbol, 0) != wide.get(symbol, 0):
            places[place] = slice(own[symbol])
    return array[tuple(places)]


#: Runs requests, each an array per input; the second argument is `OpenKernel.run`'s.
RunOpen = Callable[[Sequence[Sequence[Array]], int], list[Answer]]
