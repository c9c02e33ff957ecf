"""The declaration of a pipeline: table `[pipeline]` of `config.toml`, or what a `config.pbtxt` says of an ensemble.

    [pipeline]
    inputs = ["image"]
    outputs = { label = "classify.label", score = "detect.score" }

    [[pipeline.stages]]
    model = "detect"                       # it is called so here, unless it has a `name`
    inputs = { pixels = "image" }          # INPUT OF THE MODEL = TENSOR
    end_if = "score < 0.5"                 # one of its outputs, a comparison, a number

    [[pipeline.stages]]
    model = "classify"
    inputs = { x = "detect.crop" }

A tensor is an input of the pipeline, or `STAGE.OUTPUT`. Stages run at once as far as their inputs allow it. But a stage
that may end the pipeline holds up all that it does not need itself. What can be judged without the models is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan, nan
from typing import Final, TypeGuard

from clockwright.errors import ModelError, ModelFaults

#: More are a slip, not a pipeline.
STAGES_MAX: Final = 32
TENSORS_MAX: Final = 256
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_COMPARISON = re.compile("(<=|>=|==|!=|<|>)")
_WORDS: Final = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True, slots=True)
class EndCondition:
    """What ends a pipeline early: a comparison of all elements of one output with a number."""

    output: str
    comparison: str
    constant: float

    def __str__(self) -> str:
        return f"{self.output} {self.comparison} {self.constant:g}"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor comes from."""

    #: Index of a stage; -1: the client sends it.
    stage: int
    #: Its name there.
    tensor: str


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One model in a pipeline."""

    #: What it is called in the pipeline.
    name: str
    #: Its public name.
    model: str
    #: The version that it has to have; empty: any.
    version: str
    #: By input of the model.
    inputs: Mapping[str, TensorSource]
    end_if: EndCondition | None = None


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A pipeline as it is declared. Stages stand behind those whose outputs they take."""

    inputs: tuple[str, ...]
    #: By name.
    outputs: Mapping[str, TensorSource]
    stages: tuple[StageSpec, ...]


def parse_pipeline(table: object) -> PipelineSpec:
    """Read a declaration. Raises ModelError that names all that is wrong with it."""
    faults = ModelFaults()
    if not isinstance(table, Mapping):
        raise ModelError(f"pipeline is {table!r}, expected a table")
    for key in table.keys() - {"inputs", "outputs", "stages"}:
        faults.found.append(f"pipeline: unknown key {key!r}; known are inputs, outputs, stages")
    inputs, outputs, stages = table.get("inputs"), table.get("outputs"), table.get("stages")
    if not _are_names(inputs):
        faults.found.append(
            f'pipeline.inputs is {inputs!r}, expected the names of its inputs, as ["image"]'
        )
        inputs = ()
    if not _are_texts(outputs):
        faults.found.append(
            f'pipeline.outputs is {outputs!r}, expected a table of NAME = "STAGE.OUTPUT"'
        )
        outputs = {}
    if not isinstance(stages, Sequence) or not 1 <= len(stages) <= STAGES_MAX:
        faults.found.append(
            f"pipeline.stages: found {len(stages) if isinstance(stages, Sequence) else 'none'}, expected 1 to"
            f" {STAGES_MAX} tables [[pipeline.stages]]"
        )
        faults.check()
    assert isinstance(stages, Sequence)
    read = [_read_stage(index, stage, faults) for index, stage in enumerate(stages)]
    names = [name for name, *_ in read]
    for name in {name for name in names if names.count(name) > 1}:
        faults.found.append(
            f"pipeline.stages: found {name!r} twice; give one of the two another `name`"
        )
    numbers = {name: index for index, name in enumerate(names)}
    resolved: list[StageSpec] = []
    for name, model, version, tensors, end_if in read:
        sources: dict[str, TensorSource] = {}
        for key, text in tensors.items():
            with faults.collected():
                where = f"pipeline stage {name!r}: inputs.{key}"
                sources[key] = _source(where, text, inputs, numbers)
        resolved.append(StageSpec(name, model, version, sources, end_if))
    found: dict[str, TensorSource] = {}
    for key, text in outputs.items():
        with faults.collected():
            found[key] = _source(f"pipeline.outputs.{key}", text, inputs, numbers)
            if found[key].stage < 0:
                raise ModelError(
                    f'pipeline.outputs.{key} is {text!r}, expected "STAGE.OUTPUT", not an input'
                )
    if sum(len(stage.inputs) for stage in resolved) + len(found) > TENSORS_MAX:
        faults.found.append(
            f"pipeline: expected {TENSORS_MAX} inputs of stages and outputs at most"
        )
    # What follows would only repeat what is wrong with the names.
    faults.check()
    order = _in_order(resolved, faults)
    faults.check()
    places = {old: new for new, old in enumerate(order)}
    spec = PipelineSpec(
        tuple(inputs),
        {name: _moved(source, places) for name, source in found.items()},
        tuple(_moved_stage(resolved[index], places) for index in order),
    )
    _check_use(spec, faults)
    faults.check()
    return spec


def behind(stages: Sequence[StageSpec]) -> list[frozenset[int]]:
    """For each stage, in order: those that have to be over before it begins.

    They are those that it takes something from, and the last before it that may end the pipeline.
    """
    found: list[frozenset[int]] = []
    gate: set[int] = set()
    for index, stage in enumerate(stages):
        sources = {source.stage for source in stage.inputs.values() if source.stage >= 0}
        found.append(frozenset(sources | gate))
        if stage.end_if is not None:
            gate = {index}
    return found


def _read_stage(
    index: int, table: object, faults: ModelFaults
) -> tuple[str, str, str, Mapping[str, str], EndCondition | None]:
    where = f"pipeline.stages[{index}]"
    if not isinstance(table, Mapping):
        faults.found.append(f"{where} is {table!r}, expected a table")
        return where, "", "", {}, None
    known = ("name", "model", "version", "inputs", "end_if")
    for key in table.keys() - set(known):
        faults.found.append(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
    model = table.get("model")
    if not isinstance(model, str) or not model:
        faults.found.append(f"{where}.model is {model!r}, expected the name of a model")
        model = ""
    name = table.get("name", model)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 64 of A-Z a-z 0-9 _ -"
        faults.found.append(
            f"{where}.model is {name!r}, whose name has other characters than a stage's; add a `name` of {expected}"
            if name == model and model
            else f"{where}.name is {name!r}, expected {expected}"
        )
        name = where
    version = table.get("version", "")
    if isinstance(version, bool) or (not str(version).isdecimal() and version != ""):
        faults.found.append(f"{where}.version is {version!r}, expected a whole number")
    inputs = table.get("inputs")
    if not _are_texts(inputs):
        faults.found.append(
            f"{where}.inputs is {inputs!r}, expected a table of INPUT = TENSOR, where a tensor is an input of the"
            ' pipeline or "STAGE.OUTPUT"'
        )
        inputs = {}
    condition = None
    if "end_if" in table:
        with faults.collected():
            condition = _condition(f"{where}.end_if", table["end_if"])
    return name, model, str(version), inputs, condition


def _condition(key: str, value: object) -> EndCondition:
    parts = _COMPARISON.split(value) if isinstance(value, str) else []
    output, constant = "".join(parts[:-2]).strip(), nan
    if output:
        word = parts[-1].strip()
        with suppress(ValueError):
            constant = _WORDS[word] if word in _WORDS else float(word)
    if isnan(constant):
        raise ModelError(
            f"{key} is {value!r}, expected one output of the stage, a comparison (<, <=, >, >=, ==, !=) and a number,"
            ' as "score < 0.5"'
        )
    return EndCondition(output, parts[-2], constant)


def _source(
    where: str, text: str, inputs: Sequence[str], numbers: Mapping[str, int]
) -> TensorSource:
    if text in inputs:
        return TensorSource(-1, text)
    stage, dot, tensor = text.partition(".")
    if dot and tensor and stage in numbers:
        return TensorSource(numbers[stage], tensor)
    known = [*inputs, *(f"{name}.OUTPUT" for name in numbers)]
    raise ModelError(f"{where} is {text!r}, expected one of {', '.join(known)}")


def _in_order(stages: Sequence[StageSpec], faults: ModelFaults) -> list[int]:
    """Sort stages: each behind those whose outputs it takes, and first those that may end the pipeline with theirs."""
    order: list[int] = []

    def visit(index: int, path: tuple[int, ...]) -> None:
        if index in path:
            circle = [stages[each].name for each in (*path[path.index(index) :], index)]
            faults.found.append(
                f"pipeline: found a circle of stages: {' takes from '.join(circle)}"
            )
        elif index not in order:
            for source in stages[index].inputs.values():
                if source.stage >= 0 and not faults.found:
                    visit(source.stage, (*path, index))
            order.append(index)

    for index in sorted(range(len(stages)), key=lambda each: stages[each].end_if is None):
        visit(index, ())
    return order


def _moved(source: TensorSource, places: Mapping[int, int]) -> TensorSource:
    return source if source.stage < 0 else TensorSource(places[source.stage], source.tensor)


def _moved_stage(stage: StageSpec, places: Mapping[int, int]) -> StageSpec:
    inputs = {name: _moved(source, places) for name, source in stage.inputs.items()}
    return StageSpec(stage.name, stage.model, stage.version, inputs, stage.end_if)


def _check_use(spec: PipelineSpec, faults: ModelFaults) -> None:
    """Find what is declared in vain."""
    asked = [source for stage in spec.stages for source in stage.inputs.values()]
    sent = {source.tensor for source in asked if source.stage < 0}
    for name in spec.inputs:
        if name not in sent:
            faults.found.append(f"pipeline.inputs: no stage takes {name!r}")
    used = {source.stage for source in (*asked, *spec.outputs.values())}
    for index, stage in enumerate(spec.stages):
        if index not in used and stage.end_if is None:
            faults.found.append(
                f"pipeline stage {stage.name!r}: nothing takes its outputs; leave it out"
            )


def _are_names(value: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(each, str) and each for each in value)
        and 0 < len(set(value)) == len(value)
    )


def _are_texts(value: object) -> TypeGuard[Mapping[str, str]]:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(each, str) and each for each in (*value.keys(), *value.values()))
    )
