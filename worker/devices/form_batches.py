"""Batches of a model with an open dimension on a GPU: rows padded to forms (`worker.models.forms`), answers cut back.

The parts of an IO slot are those of the kernels that run, one after the other, each laid out as its kernel wants it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from clockwright.elements import Array
from clockwright.errors import ModelError
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec
from worker.compiling.open_sizes import at_form
from worker.core.lanes import Step
from worker.devices.exec_queue import CapturedKernel
from worker.devices.sized_io import Bytes, sized_tensors, unpacked
from worker.engines.open_kernel import cut_rows, may_pad, symbol_sizes
from worker.models.forms import FormRun, FormTimes
from worker.models.model_files import CompiledModel
from worker.models.served_model import IoLayout


@dataclass(frozen=True, slots=True)
class Part:
    """One run, and the part of the slot that is its."""

    run: FormRun
    #: Its kernel's.
    layout: IoLayout
    #: Where it begins in the pool.
    offset: int
    #: The requests in it, each with its first row there, and those of its rows that are.
    pieces: list[tuple[int, int, slice]]


@dataclass(slots=True)
class FormBatch:
    """A batch in its slot. It may stay when the batch was dropped, so it holds neither tensors nor kernels."""

    parts: list[Part] = field(default_factory=list)
    #: By request, why it failed.
    failed: dict[int, str] = field(default_factory=dict)
    #: By request, the size of its rows.
    sizes: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> list[slice]:
        """What the device needs of the pool before it runs."""
        return [slice(at.offset, at.offset + at.layout.outputs_begin) for at in self.parts]

    @property
    def outputs(self) -> list[slice]:
        """What the device has changed of the pool when it has run."""
        return [
            slice(at.offset + at.layout.outputs_begin, at.offset + at.layout.num_bytes)
            for at in self.parts
        ]


class FormKernels:
    """All kernels of a model with an open dimension."""

    def __init__(
        self,
        compiled: CompiledModel,
        kernels: Mapping[int, Mapping[int, CapturedKernel]],
        batch_sizes: Sequence[int],
    ) -> None:
        """Take a model's kernels, by form and by rows, both ascending; batches are in rows of work."""
        assert compiled.open is not None
        self._compiled = compiled
        self._sizes = compiled.open
        (self._symbol,) = compiled.open.symbols
        self._kernels = kernels
        self._at = {form: at_form(compiled, form) for form in kernels}
        every = [kernel for each in kernels.values() for kernel in each.values()]
        gathers_ns = sorted(kernel.gather_ns for kernel in every)
        exec_ns = {
            form: {rows: max(each.exec_ns - each.gather_ns, 1) for rows, each in by_rows.items()}
            for form, by_rows in kernels.items()
        }
        # What else the device does only adds, so none takes longer than a larger one.
        larger: Mapping[int, int] = {}
        for by_rows in reversed(exec_ns.values()):
            least_ns = max(by_rows.values())
            for rows in reversed(by_rows):
                least_ns = by_rows[rows] = min(least_ns, by_rows[rows], larger.get(rows, least_ns))
            larger = by_rows
        #: How long they take.
        self.times = FormTimes(
            exec_ns, gathers_ns[len(gathers_ns) // 2], compiled.open.least_elements
        )
        self.exec_ns = self.times.estimates(compiled.open.unit, batch_sizes)
        #: The highest clock that any of them was measured at.
        self.clock_mhz = max(kernel.clock_mhz for kernel in every)

    def kernels_of(self, batch: FormBatch) -> list[tuple[CapturedKernel, int]]:
        """Those to run, each with where its part begins."""
        return [(self._kernels[part.run.form][part.run.rows], part.offset) for part in batch.parts]

    def write(self, pool: Bytes, step: Step[Any], payload: Sequence[Buffer]) -> FormBatch:
        """Copy a batch's inputs, per request and per input, into its slot, as the kernels take them."""
        inputs = self._compiled.inputs
        count = len(inputs)
        requests = [
            [
                unpacked(tensor.spec, entry)
                for tensor, entry in zip(inputs, payload[at : at + count], strict=True)
            ]
            for at in range(0, len(payload), count)
        ]
        batch = FormBatch()
        # Those that may not be padded run with their equals alone.
        together: dict[int, list[int]] = {}
        for index, arrays in enumerate(requests):
            sizes = [
                symbol_sizes([each], [array]) for each, array in zip(inputs, arrays, strict=True)
            ]
            size = next(found[self._symbol] for found in sizes if found)
            batch.sizes.append(size)
            rows = len(arrays[0])
            is_whole = all(found in ({}, {self._symbol: size}) for found in sizes)
            if not is_whole or any(len(array) != rows for array in arrays):
                batch.failed[index] = f"inputs differ in their rows or in {self._symbol!r}"
            elif (form := self.times.form_of(size)) is None or not rows:
                batch.failed[index] = self._refusal(size, "is served")
            elif may_pad(inputs, self._sizes, arrays):
                together.setdefault(0, []).append(index)
            elif form == size:
                together.setdefault(size, []).append(index)
            else:
                batch.failed[index] = self._refusal(
                    size, "of negative numbers, or of none of 1 or more, can be padded"
                )
        end = step.io_offset
        for members in together.values():
            end = self._place(batch, requests, members, end)
        assert isinstance(step.action, Infer)
        room = step.model.io_bytes[step.action.batch_size]
        if end - step.io_offset > room:
            raise ModelError(
                f"padded rows have {end - step.io_offset} bytes, expected {room} at most"
            )
        for part in batch.parts:
            self._fill(pool, part, requests)
        return batch

    def read(
        self, pool: Bytes, step: Step[Any], batch: FormBatch, room: memoryview | None
    ) -> list[Buffer]:
        """Copy a batch's outputs out of its slot, per request and per output: into `room`, or into new memory."""
        assert isinstance(step.action, Infer)
        outputs = self._compiled.outputs
        pieces: list[list[list[Array]]] = [[[] for _ in outputs] for _ in batch.sizes]
        for part in batch.parts:
            offsets = part.layout.output_offsets
            for index, (tensor, at) in enumerate(
                zip(self._at[part.run.form].outputs, offsets, strict=True)
            ):
                array = _view(pool, part.offset + at, tensor.spec, part.run.rows)
                for request, begin, rows in part.pieces:
                    end = begin + rows.stop - rows.start
                    own, wide = (
                        {self._symbol: size} for size in (batch.sizes[request], part.run.form)
                    )
                    found = cut_rows(outputs[index].spec, array, begin, end, own, wide)
                    pieces[request][index].append(found)
        specs = [tensor.spec for tensor in outputs]
        payload: list[Buffer] = []
        position = 0
        for request, work in enumerate(step.action.rows):
            answer = batch.failed.get(request) or [
                each[0] if len(each) == 1 else np.concatenate(each) for each in pieces[request]
            ]
            for raw in sized_tensors(specs, work, answer):
                if room is None:
                    payload.append(raw)
                else:
                    place = room[position : position + len(raw)]
                    place[:] = raw
                    payload.append(place)
                    position += len(raw)
        return payload

    def _refusal(self, size: int, why: str) -> str:
        forms = ", ".join(map(str, self._kernels))
        return f"no row of {self._symbol} {size} {why} on this GPU, which runs {forms}"

    def _place(
        self, batch: FormBatch, requests: Sequence[Sequence[Array]], members: list[int], begin: int
    ) -> int:
        """Plan the runs of requests that may share them, and give each its part of the slot; returns their end."""
        members.sort(key=lambda index: -batch.sizes[index])
        rows = [len(requests[index][0]) for index in members]
        ends = list(accumulate(rows))
        sizes = [
            batch.sizes[index]
            for index, number in zip(members, rows, strict=True)
            for _ in range(number)
        ]
        for run in self.times.plan(sizes)[1]:
            pieces = []
            for index, number, stop in zip(members, rows, ends, strict=True):
                start = stop - number
                low, high = max(start, run.begin), min(stop, run.end)
                if low < high:
                    pieces.append((index, low - run.begin, slice(low - start, high - start)))
            layout = self._kernels[run.form][run.rows].layout
            batch.parts.append(Part(run, layout, begin, pieces))
            begin += layout.num_bytes
        return begin

    def _fill(self, pool: Bytes, part: Part, requests: Sequence[Sequence[Array]]) -> None:
        layout = part.layout
        pool[part.offset : part.offset + layout.outputs_begin] = 0
        for index, (tensor, at) in enumerate(
            zip(self._at[part.run.form].inputs, layout.input_offsets, strict=True)
        ):
            place = _view(pool, part.offset + at, tensor.spec, part.run.rows)
            for request, begin, rows in part.pieces:
                array = requests[request][index][rows]
                place[(slice(begin, begin + len(array)), *map(slice, array.shape[1:]))] = array


def _view(pool: Bytes, begin: int, spec: TensorSpec, rows: int) -> Array:
    """A tensor in the pool, which can be written to."""
    raw = pool[begin : begin + spec.batch_bytes(rows)]
    kind = np.dtype(DATATYPES[spec.datatype].dtype).newbyteorder("<")
    return raw.view(kind).reshape(spec.shape(rows))
