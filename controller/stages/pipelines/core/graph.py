"""How a pipeline's stages fit together, given the tensors of their models. Pure.

The rows of a request are the same in all stages, and a tensor passes from one stage to the next as it is: datatype and
shape of a row have to be equal. Shapes that are equal only as a whole fit as well, but then a request has one row.
A tensor with text, and all others of a model with text, carries its size (`clockwright.wire.tensors`), and so do those of a
model with open dimensions: such a header is put before the tensors, or taken off, where the next stage needs it. What
open dimensions come to in rows of work each stage counts for itself, when its inputs are there.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Protocol

from clockwright.errors import ModelError, ModelFaults
from clockwright.wire.bulk import Buffer
from clockwright.wire.open_sizes import in_rows, largest_work, work_of
from clockwright.wire.tensors import PLAIN_DATATYPES, TensorSpec, Variable, describe, total_bytes
from controller.stages.pipelines.core.declaration import (
    EndCondition,
    PipelineSpec,
    StageSpec,
    TensorSource,
    behind,
)

#: A condition looks at so many numbers of a row at most.
CONDITION_NUMBERS_MAX: Final = 1024

_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class DescribedModel(Protocol):
    """A model as far as its tensors go."""

    @property
    def version(self) -> str:
        """The one that is served."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Empty as long as no worker has described it."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Likewise."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A tensor on its way to an input of a stage, or to the client."""

    #: Index of the stage that it comes from; -1: from the client.
    stage: int
    #: Which of that stage's outputs, or of the pipeline's inputs.
    index: int
    source: TensorSpec
    target: TensorSpec

    def take(self, tensor: Buffer, rows: int) -> Buffer:
        """Give the tensor the form that is expected, without a copy where no header is put before it.

        Raises RefusedError if it stands for a request that failed; ValueError if it is larger than what is expected, or
        not what its header says.
        """
        source, target = self.source, self.target
        if not source.vary:
            if not target.vary:
                return tensor
            tensor = target.header(source.shape(rows), len(tensor)) + bytes(tensor)
        else:
            sized, content = source.unpack(tensor)
            # What comes is one size of the source, and what is fixed in either has to be so.
            expected = target.shape(rows) if -1 in source.row_shape else source.shape(rows)
            if not _fit_each_other(sized.row_shape, expected):
                raise ValueError(
                    f"tensor {source.name!r} has shape {list(sized.row_shape)}, expected"
                    f" {list(expected)} for {rows} rows"
                )
            tensor = tensor if target.vary else content
        if not (target.vary and target.vary.unit) and not target.fits(len(tensor), rows):
            raise ValueError(
                f"tensor {source.name!r} has {len(tensor)} bytes, of which {target.name!r} takes"
                f" {target.batch_bytes(rows)} at most"
            )
        return tensor


@dataclass(frozen=True, slots=True)
class Ending:
    """The condition of a stage, on one of its outputs."""

    condition: EndCondition
    #: Which output.
    index: int
    spec: TensorSpec

    def holds(self, tensor: Buffer) -> bool:
        """Whether it is so for every number of the output, in every row.

        Raises RefusedError or ValueError as `Passage.take`.
        """
        content = self.spec.unpack(tensor)[1] if self.spec.vary else memoryview(tensor).cast("B")
        compare = _COMPARISONS[self.condition.comparison]
        constant = self.condition.constant
        numbers = struct.iter_unpack("<" + PLAIN_DATATYPES[self.spec.datatype].letter, content)
        return all(compare(number, constant) for (number,) in numbers)


@dataclass(frozen=True, slots=True)
class FittedStage:
    """A stage whose model is known."""

    name: str
    #: The model's public name, and the version that it has to have; empty: any.
    model: str
    version: str
    #: What it takes, in the model's order.
    inputs: tuple[Passage, ...]
    #: The model's tensors.
    takes: tuple[TensorSpec, ...]
    gives: tuple[TensorSpec, ...]
    #: The stages that have to be over before it begins.
    behind: frozenset[int]
    ending: Ending | None
    #: The rows of work of a row at the largest sizes.
    most_work: int

    def work(self, inputs: Sequence[Buffer], rows: int, largest_batch: int) -> int:
        """Find what the rows of a request come to: as many rows of work, if dimensions of the model are open.

        Raises BadRequestError if its sizes do not fit each other or the model, or are too large for a batch;
        RefusedError or ValueError as `Passage.take`.
        """
        return work_of(self.takes, inputs, rows, largest_batch)


@dataclass(frozen=True, slots=True)
class PipelineGraph:
    """A pipeline whose stages fit together, each behind those that it takes something from."""

    stages: tuple[FittedStage, ...]
    #: What clients send and get.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Where each output comes from.
    results: tuple[Passage, ...]
    #: Requests have one row.
    one_row: bool

    def held_bytes(self, rows: int) -> int:
        """The most bytes that lie between the stages of a request."""
        return sum([total_bytes(stage.gives, rows * stage.most_work) for stage in self.stages])


def fit(spec: PipelineSpec, models: Sequence[DescribedModel]) -> PipelineGraph:
    """Fit the stages together; `models` are theirs, and described. Raises ModelError that names all that does not fit."""
    faults, one_row = ModelFaults(), False
    for stage, model in zip(spec.stages, models, strict=True):
        where = f"stage {stage.name!r}"
        if stage.version and stage.version != model.version:
            faults.found.append(
                f"{where}: found version {model.version} of model {stage.model}, expected {stage.version}"
            )
        takes = [each.name for each in model.inputs]
        for name in stage.inputs:
            if name not in takes:
                faults.found.append(
                    f"{where}: inputs has {name!r}, expected the inputs of model {stage.model}: {describe(model.inputs)}"
                )
        if lacking := [each for each in model.inputs if each.name not in stage.inputs]:
            faults.found.append(
                f"{where}: inputs lacks {describe(lacking)} of model {stage.model}; add a line INPUT = TENSOR for each"
            )
        one_row |= all(each.axis is None for each in model.inputs)
    faults.check()
    sent = _sent(spec, models)
    given: dict[str, TensorSpec] = {}
    passages: list[tuple[Passage, ...]] = []
    for stage, model in zip(spec.stages, models, strict=True):
        found: list[Passage] = []
        for target in model.inputs:
            source = stage.inputs[target.name]
            where = f"stage {stage.name!r}: input {target.name!r}"
            with faults.collected():
                passage = _passage(spec, models, source, target, sent, where)
                one_row |= not _is_same(passage.source, target)
                found.append(passage)
        passages.append(tuple(found))
    results: list[Passage] = []
    for name, source in spec.outputs.items():
        with faults.collected():
            index, spec_there = _named(spec, models, source, f"pipeline.outputs.{name}")
            from_ = spec.stages[source.stage].name
            most = largest_work(models[source.stage].inputs)
            given[name] = in_rows(replace(spec_there, name=name), most, f"{from_}.")
            results.append(Passage(source.stage, index, spec_there, given[name]))
    endings = [
        _ending(stage, model, faults) for stage, model in zip(spec.stages, models, strict=True)
    ]
    faults.check()
    inputs, outputs = [sent[name] for name in spec.inputs], list(given.values())
    if any(each.vary for each in (*inputs, *outputs)):
        # If one tensor that clients see carries its size, all do.
        inputs, outputs = list(map(_carrying, inputs)), list(map(_carrying, outputs))
        clients = dict(zip(spec.inputs, inputs, strict=True))
        passages = [
            tuple(
                replace(each, source=clients[spec.inputs[each.index]]) if each.stage < 0 else each
                for each in of_stage
            )
            for of_stage in passages
        ]
        results = [replace(r, target=to) for r, to in zip(results, outputs, strict=True)]
    waits = behind(spec.stages)
    stages = tuple(
        FittedStage(
            stage.name,
            stage.model,
            stage.version,
            passages[index],
            model.inputs,
            model.outputs,
            waits[index],
            endings[index],
            largest_work(model.inputs),
        )
        for index, (stage, model) in enumerate(zip(spec.stages, models, strict=True))
    )
    return PipelineGraph(stages, tuple(inputs), tuple(outputs), tuple(results), one_row)


def _sent(spec: PipelineSpec, models: Sequence[DescribedModel]) -> dict[str, TensorSpec]:
    """What clients send: of each input the form that the first stage takes, and the least room of all."""
    sent: dict[str, TensorSpec] = {}
    for stage, model in zip(spec.stages, models, strict=True):
        for target in model.inputs:
            source = stage.inputs[target.name]
            if source.stage >= 0:
                continue
            of_client = replace(target, name=source.tensor)
            own = in_rows(of_client, largest_work([target]), f"{stage.name}.")
            known = sent.get(source.tensor)
            sent[source.tensor] = own if known is None else _tighter(known, own)
    return sent


def _passage(
    spec: PipelineSpec,
    models: Sequence[DescribedModel],
    source: TensorSource,
    target: TensorSpec,
    sent: Mapping[str, TensorSpec],
    where: str,
) -> Passage:
    if source.stage < 0:
        index, found = spec.inputs.index(source.tensor), sent[source.tensor]
        what = f"the pipeline's {source.tensor!r}"
    else:
        index, found = _named(spec, models, source, where)
        what = f"{spec.stages[source.stage].name}.{source.tensor}"
    if not _is_same(found, target) and (
        found.datatype != target.datatype or not _fit_each_other(found.shape(1), target.shape(1))
    ):
        raise ModelError(
            f"{where} takes {target.datatype} {list(target.shape(-1))}, and {what} is {found.datatype}"
            f" {list(found.shape(-1))}; put a stage between them that makes one of the other, or take another tensor"
        )
    return Passage(source.stage, index, found, target)


def _named(
    spec: PipelineSpec, models: Sequence[DescribedModel], source: TensorSource, where: str
) -> tuple[int, TensorSpec]:
    """Find an output of a stage."""
    outputs = models[source.stage].outputs
    for index, found in enumerate(outputs):
        if found.name == source.tensor:
            return index, found
    stage = spec.stages[source.stage]
    raise ModelError(
        f"{where}: found '{stage.name}.{source.tensor}', expected an output of model {stage.model}: {describe(outputs)}"
    )


def _ending(stage: StageSpec, model: DescribedModel, faults: ModelFaults) -> Ending | None:
    condition = stage.end_if
    if condition is None:
        return None
    for index, found in enumerate(model.outputs):
        if found.name == condition.output:
            known = PLAIN_DATATYPES.get(found.datatype)
            if known is None or not 1 <= prod(found.row_shape) <= CONDITION_NUMBERS_MAX:
                faults.found.append(
                    f"stage {stage.name!r}: end_if looks at {describe([found])}, expected an output of 1 to"
                    f" {CONDITION_NUMBERS_MAX} numbers in a row"
                )
                return None
            return Ending(condition, index, found)
    faults.found.append(
        f"stage {stage.name!r}: end_if looks at {condition.output!r}, expected an output of model {stage.model}:"
        f" {describe(model.outputs)}"
    )
    return None


def _is_same(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether any number of rows of the one are the same bytes as of the other, but for a header, and for open sizes."""
    return (one.datatype, one.axis) == (other.datatype, other.axis) and _fit_each_other(
        one.row_shape, other.row_shape
    )


def _fit_each_other(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are the same where neither is open."""
    return len(one) == len(other) and all(
        here == there or -1 in (here, there) for here, there in zip(one, other, strict=True)
    )


def _tighter(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    """What fits both of two stages that take the same input of a client."""
    if one.row_shape != other.row_shape:
        return other if -1 in one.row_shape and -1 not in other.row_shape else one
    if one.vary is None or other.vary is None:
        return replace(one, vary=one.vary or other.vary)
    room = replace(
        one.vary,
        unit_bytes=min(one.vary.unit_bytes, other.vary.unit_bytes),
        most=tuple(map(min, one.vary.most, other.vary.most)),
    )
    return replace(one, vary=room)


def _carrying(spec: TensorSpec) -> TensorSpec:
    """The same tensor with its size before it."""
    if spec.vary:
        return spec
    with_header = replace(spec, vary=Variable(1))
    return replace(spec, vary=Variable(with_header.header_bytes + spec.batch_bytes(1)))
