"""An application's inputs and outputs as tensors, and whether a model fits them. Pure.

An application takes the inputs that its models take; they have to agree. Its outputs follow from its
combination. `vote`: the label. `average`: the label of the class with the largest mean probability, and the
mean probabilities. `mean`: all outputs, which are numbers. `one`: all outputs of the chosen model as they are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from clockwright.errors import RefusedError
from clockwright.wire.bulk import Buffer
from clockwright.wire.open_sizes import in_rows, largest_work
from clockwright.wire.tensors import DATATYPES, PLAIN_DATATYPES, TensorSpec, Variable, describe
from clockwright.wire.texts import cut_texts, join_texts
from controller.selection.core.application import Application
from controller.selection.core.combination import Rule
from controller.selection.core.query import Combined, Label, Prediction

#: Votes are kept until their feedback comes, so a label that is a text is short.
LABEL_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Reading:
    """How one model's outputs are read."""

    #: Index and form of the output that is the label, no form: it is text; None: the model has no label.
    label: tuple[int, struct.Struct | None] | None
    #: Index and form of each output that is combined as numbers: probabilities, or all with `mean`.
    numbers: tuple[tuple[int, struct.Struct], ...] = ()
    #: The label is the class with the largest number.
    takes_largest: bool = False
    #: The model's outputs if they carry their sizes, as all do of a model with texts.
    carrying: tuple[TensorSpec, ...] = ()

    def read(self, outputs: Sequence[Buffer], rows: int) -> list[Prediction] | None:
        """Read all rows. Returns None if no answer can be made of them.

        A number is not finite, a text is no short label in UTF-8, or the model failed on the query.
        """
        labels: list[Label] = [0] * rows
        if self.carrying:
            specs = zip(self.carrying, outputs, strict=True)
            try:
                outputs = [spec.unpack(raw)[1] for spec, raw in specs]
            except RefusedError:
                return None
        if self.label is not None:
            index, form = self.label
            if form is None:
                texts = cut_texts(outputs[index])
                if max(map(len, texts), default=0) > LABEL_BYTES_MAX:
                    return None
                try:
                    labels = [text.decode() for text in texts]
                except UnicodeDecodeError:
                    return None
            else:
                labels = [int(label) for (label,) in form.iter_unpack(outputs[index])]
        columns = [form.iter_unpack(outputs[index]) for index, form in self.numbers]
        numbers = [sum(parts, ()) for parts in zip(*columns, strict=True)] or [()] * rows
        if not all(math.isfinite(number) for row in numbers for number in row):
            return None
        if self.takes_largest:
            labels = [max(range(len(row)), key=row.__getitem__) for row in numbers]
        return [Prediction(*row) for row in zip(labels, numbers, strict=True)]


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs and outputs of an application."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Feedback may give the true label.
    labelled: bool
    #: The outputs are means of numbers.
    numeric: bool = False

    def encode(self, combined: Combined) -> list[bytes]:
        """Encode one row of a combined answer. Not used with `one`, whose outputs are a model's.

        Raises:
            ValueError, OverflowError, struct.error: it does not fit the datatype, or is a text that is too long.
        """
        if self.numeric:
            return self._encode_numbers(combined)
        label = combined.label
        if self.outputs[0].datatype == "BYTES":
            if not isinstance(label, str):
                raise ValueError(f"label: found {label!r}, expected a text")
            text = label.encode()
            if len(text) > LABEL_BYTES_MAX:
                raise ValueError(
                    f"label: found {len(text)} bytes, expected {LABEL_BYTES_MAX} at most"
                )
            row = [join_texts([text])]
        else:
            row = [struct.pack("<" + DATATYPES[self.outputs[0].datatype].letter, label)]
        if len(self.outputs) > 1:
            spec = self.outputs[1]
            values = combined.probabilities or _even(math.prod(spec.row_shape))
            row.append(struct.pack(f"<{len(values)}{DATATYPES[spec.datatype].letter}", *values))
        return row

    def join(self, rows: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Join encoded rows to tensors."""
        tensors = []
        for spec, parts in zip(self.outputs, zip(*rows, strict=True), strict=True):
            content = b"".join(parts)
            header = spec.header(spec.shape(len(parts)), len(content)) if spec.vary else b""
            tensors.append(header + content)
        return tensors

    def _encode_numbers(self, combined: Combined) -> list[bytes]:
        forms = [_numbers_of(spec) for spec in self.outputs]
        sizes = [math.prod(spec.row_shape) for spec in self.outputs]
        # A default label is the number to give everywhere.
        left = iter(combined.probabilities or [float(combined.label)] * sum(sizes))
        return [form.pack(*islice(left, n)) for form, n in zip(forms, sizes, strict=True)]


class MisfitError(Exception):
    """A model does not fit an application; the message says what was found and what is expected."""


def shape_of(
    application: Application, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> Shape:
    """Derive an application's shape from the tensors of its first model.

    Raises MisfitError if that model cannot serve such an application.
    """
    if odd := [spec for spec in (*inputs, *outputs) if spec.axis != 0]:
        raise MisfitError(
            f"found {describe(odd)} without rows, expected rows in the first dimension"
        )
    inputs, outputs = _in_rows(inputs, outputs)
    reading = _reading(application, outputs)
    label = TensorSpec(application.label_output, "INT64", ())
    if any(spec.vary for spec in inputs):
        label = replace(label, vary=Variable(label.header_bytes + label.batch_bytes(1)))
    match application.combination:
        case Rule.VOTE:
            given: tuple[TensorSpec, ...] = (_named(outputs, application.label_output),)
        case Rule.AVERAGE:
            given = (label, _named(outputs, application.probability_output))
        case Rule.MEAN | Rule.ONE:
            given = outputs
    if application.combination is not Rule.MEAN and application.default_label is not None:
        if given[0].datatype == "BYTES":
            raise MisfitError(
                f"default_label: found {application.default_label}, expected none, because the label is text"
            )
        form = struct.Struct("<" + DATATYPES[given[0].datatype].letter)
        try:
            form.pack(application.default_label)
        except struct.error as error:
            raise MisfitError(
                f"default_label: found {application.default_label}, expected one of {given[0].datatype}: {error}"
            ) from None
    labelled = reading.label is not None or application.combination is Rule.AVERAGE
    return Shape(inputs, given, labelled, application.combination is Rule.MEAN)


def reading_of(
    application: Application,
    shape: Shape,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
) -> Reading:
    """Find out how a model's outputs are read.

    Raises MisfitError if the model's inputs are not the application's, or an output that is combined is missing.
    """
    inputs, outputs = _in_rows(inputs, outputs)
    _compare("inputs", inputs, shape.inputs)
    if application.combination in (Rule.MEAN, Rule.ONE):
        _compare("outputs", outputs, shape.outputs)
    reading = _reading(application, outputs)
    if application.combination is Rule.VOTE:
        # The answer has one datatype. A label of another datatype might not fit into it.
        found, expected = _named(outputs, application.label_output), shape.outputs[0]
        if found.datatype != expected.datatype:
            raise MisfitError(f"found output {describe([found])}, expected {describe([expected])}")
    if application.combination is Rule.AVERAGE:
        found, expected = _named(outputs, application.probability_output), shape.outputs[1]
        if found.row_shape != expected.row_shape:
            raise MisfitError(f"found output {describe([found])}, expected {describe([expected])}")
    return replace(reading, carrying=outputs) if any(s.vary for s in outputs) else reading


def _compare(what: str, found: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> None:
    if [replace(each, vary=None) for each in found] != [
        replace(each, vary=None) for each in expected
    ]:
        raise MisfitError(f"found {what} {describe(found)}, expected {describe(expected)}")
    rooms = [[spec.batch_bytes(1) for spec in specs] for specs in (found, expected)]
    if rooms[0] != rooms[1]:
        raise MisfitError(
            f"found room for {rooms[0]} bytes in a row of {what}, expected {rooms[1]}; give models with text the same"
            " batch_sizes, and models with open dimensions the same largest sizes under [dimensions]"
        )


def _in_rows(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The tensors of a model by rows, where its dimensions are open."""
    work = largest_work(inputs)
    return (
        tuple(in_rows(spec, largest_work([spec])) for spec in inputs),
        tuple(in_rows(spec, work) for spec in outputs),
    )


def _reading(application: Application, outputs: Sequence[TensorSpec]) -> Reading:
    names = [spec.name for spec in outputs]
    label: tuple[int, struct.Struct | None] | None = None
    if application.combination is Rule.MEAN:
        return Reading(None, tuple(enumerate(map(_numbers_of, outputs))))
    if application.combination is Rule.AVERAGE:
        spec = _named(outputs, application.probability_output)
        return Reading(None, ((names.index(spec.name), _numbers_of(spec)),), takes_largest=True)
    if application.label_output in names:
        spec = _named(outputs, application.label_output)
        datatype = DATATYPES[spec.datatype]
        is_one = math.prod(spec.row_shape) == 1
        if is_one and datatype.letter and not datatype.is_float:
            label = names.index(spec.name), struct.Struct("<" + datatype.letter)
        elif is_one and not datatype.num_bytes:
            label = names.index(spec.name), None
        elif application.combination is Rule.VOTE:
            raise MisfitError(
                f"found output {describe([spec])}, expected one integer or text per row"
            )
    elif application.combination is Rule.VOTE:
        _named(outputs, application.label_output)
    return Reading(label)


def _numbers_of(spec: TensorSpec) -> struct.Struct:
    size = math.prod(spec.row_shape)
    datatype = PLAIN_DATATYPES.get(spec.datatype)
    if datatype is None or not datatype.is_float or size <= 0:
        kinds = ", ".join(name for name, each in PLAIN_DATATYPES.items() if each.is_float)
        raise MisfitError(f"found output {describe([spec])}, expected numbers of {kinds}")
    return struct.Struct(f"<{size}{datatype.letter}")


def _named(outputs: Sequence[TensorSpec], name: str) -> TensorSpec:
    for spec in outputs:
        if spec.name == name:
            return spec
    raise MisfitError(f"found outputs {describe(outputs)}, expected one named {name!r}")


def _even(size: int) -> list[float]:
    """Probabilities with a default label: all classes are equally likely."""
    return [1 / size] * size
