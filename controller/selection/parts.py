"""Requests of more rows than a batch may have, as a stage of the port: asked in parts, and answered as one.

Each part is a request of its own to those who schedule, with the deadline of the whole. If one part is refused, so is
the whole, and the other parts are withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import msgspec

from clockwright.units import NO_REQUEST, PARTS_MAX, RequestId
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec, total_bytes
from clockwright.wire.texts import skip_texts
from controller.models.entry import Entry
from controller.port import Answered, Ask, PortStage, Sink, Told
from controller.selection.live_application import LiveApplication

# So much may an answer have that is put together here.
_OUTPUT_BYTES_MAX = 64 << 20


@dataclass(slots=True, eq=False)
class _Whole:
    """A request that was asked in parts."""

    sink: Sink
    outputs: tuple[TensorSpec, ...]
    #: The number that its client withdraws: the first part's.
    request_id: RequestId
    #: The rows of each part.
    rows: list[int]
    #: The outputs of each part; None: they have not come.
    found: list[Sequence[bytes] | None]
    parts: list[RequestId]
    last: Answered | None = None


def most_rows(model: Entry, largest_batch: int) -> int:
    """The most rows that a request to a model may have.

    They are several batches, if a batch can have more rows than the file says, unless its settings say fewer.
    """
    settings = model.folder.settings if model.folder is not None else None
    wanted = settings.max_rows if settings is not None else None
    vary = model.inputs[0].vary if model.inputs else None
    tensors = (*model.inputs, *model.outputs)
    if (vary and vary.unit) or any(s.vary and (s.axis or -1 in s.row_shape) for s in tensors):
        # Not cut: a request of more rows of work is refused where it is read.
        most = largest_batch * (vary.rows_of_unit if vary else 1)
        return min(wanted or most, most)
    is_cut = largest_batch > 1 or (
        model.one_by_one and any(s.axis is not None for s in model.inputs)
    )
    fit = _OUTPUT_BYTES_MAX // max(total_bytes(model.outputs, largest_batch), 1)
    most = largest_batch * (max(1, min(PARTS_MAX, fit)) if is_cut else 1)
    return min(wanted or most, most)


class PartStage:
    """Cuts what is asked of a model into batches, and passes on the rest."""

    def __init__(self, inner: PortStage[Entry | LiveApplication]) -> None:
        """Begin with no requests; `inner` is the next stage."""
        self._inner = inner
        #: By each part's number: its request, and which part it is.
        self._open: dict[RequestId, tuple[_Whole, int]] = {}
        #: By the number that a client withdraws.
        self._wholes: dict[RequestId, _Whole] = {}

    def ask(
        self, subject: Entry | LiveApplication, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> RequestId:
        """Do what `PortStage` says."""
        if ask.rows == 1 or not isinstance(subject, Entry):
            return self._inner.ask(subject, ask, inputs, sink)
        most = subject.largest_batch
        if ask.rows <= most or not most:
            return self._inner.ask(subject, ask, inputs, sink)
        bounds = [*range(0, ask.rows, most), ask.rows]
        spans = list(pairwise(bounds))
        whole = _Whole(
            sink,
            subject.outputs,
            NO_REQUEST,
            [end - begin for begin, end in spans],
            [None] * len(spans),
            [],
        )
        try:
            for index, (begin, end) in enumerate(spans):
                part = msgspec.structs.replace(
                    ask, rows=end - begin, name="" if index else ask.name, lengths=(), places=()
                )
                cut = [
                    _cut(spec, tensor, ask.rows, begin, end)
                    for spec, tensor in zip(subject.inputs, inputs, strict=True)
                ]
                request_id = self._inner.ask(subject, part, cut, self)
                whole.parts.append(request_id)
                self._open[request_id] = whole, index
        except BaseException:
            self._withdraw(self._forget(whole))
            raise
        whole.request_id = whole.parts[0]
        self._wholes[whole.request_id] = whole
        return whole.request_id

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Take what came of a part. Does nothing when its request is over."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        whole, index = entry
        if not isinstance(told, Answered):
            self._withdraw(self._forget(whole))
            whole.sink.told(whole.request_id, told, ())
            return
        whole.found[index] = tuple(map(bytes, outputs))
        if whole.last is None or told.expected_departure_ns > whole.last.expected_departure_ns:
            whole.last = told
        found = [each for each in whole.found if each is not None]
        if len(found) == len(whole.found):
            del self._wholes[whole.request_id]
            joined = [
                _join(spec, pieces, whole.rows)
                for spec, pieces in zip(whole.outputs, zip(*found, strict=True), strict=True)
            ]
            whole.sink.told(whole.request_id, whole.last, joined)

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request."""
        whole = self._wholes.get(request_id)
        if whole is None:
            self._inner.withdraw(request_id)
        else:
            self._withdraw(self._forget(whole))

    def _forget(self, whole: _Whole) -> list[RequestId]:
        self._wholes.pop(whole.request_id, None)
        return [part for part in whole.parts if self._open.pop(part, None) is not None]

    def _withdraw(self, parts: Sequence[RequestId]) -> None:
        for part in parts:
            self._inner.withdraw(part)


def _cut(spec: TensorSpec, tensor: Buffer, rows: int, begin: int, end: int) -> Buffer:
    if spec.axis is None:
        return tensor
    if spec.vary is not None:
        sized, content = spec.unpack(tensor)
        _, *row_shape = sized.row_shape
        if spec.datatype == "BYTES":
            row = prod(row_shape)
            first = skip_texts(content, 0, begin * row)
            piece = content[first : skip_texts(content, first, (end - begin) * row)]
        else:
            step = len(content) // rows
            piece = content[begin * step : end * step]
        return spec.header((end - begin, *row_shape), len(piece)) + bytes(piece)
    view = memoryview(tensor).cast("B")
    outer = prod(spec.row_shape[: spec.axis])
    step = spec.batch_bytes(1) // max(outer, 1)
    if outer == 1:
        return view[begin * step : end * step]
    return b"".join(
        view[(number * rows + begin) * step : (number * rows + end) * step]
        for number in range(outer)
    )


def _join(spec: TensorSpec, pieces: Sequence[bytes], rows: Sequence[int]) -> bytes:
    """Put the rows of several tensors into one. What has no rows is the same in all of them."""
    if spec.axis is None:
        return pieces[0]
    if spec.vary is not None:
        contents = []
        for piece in pieces:
            sized, content = spec.unpack(piece)
            contents.append(content)
        joined = b"".join(contents)
        return spec.header((sum(rows), *sized.row_shape[1:]), len(joined)) + joined
    outer = prod(spec.row_shape[: spec.axis])
    if outer == 1:
        return b"".join(pieces)
    step = spec.batch_bytes(1) // max(outer, 1)
    return b"".join(
        piece[number * count * step : (number + 1) * count * step]
        for number in range(outer)
        for piece, count in zip(pieces, rows, strict=True)
    )
