"""Requests and answers as plain JSON, without tensors around them: Triton's `generate` and `generate_stream`.

    {"text_input": "hello", "max_steps": 8}     to     {"model_name": "m", "model_version": "1", "text_output": "world"}

A key is an input of the model by that name, or else a parameter. Of an answer, an output of one element is that element,
and any other is the list of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
from typing_extensions import override

from clockwright.errors import BadRequestError
from clockwright.foreign import check_name_length, quote
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec
from clockwright.wire.texts import join_texts
from controller.front.oip.json_form import (
    DIMENSIONS_MAX,
    AnswerForm,
    JsonRequest,
    check_elements,
    numbers_of,
    read_json,
    read_object,
    stated_ms,
    write_data,
)
from controller.front.oip.json_messages import PARAMETER_KINDS, set_parameters
from controller.front.oip.protocol import ParsedRequest, Servable

#: A request is read in one piece, in a few milliseconds at most: the form is for prompts, not for images.
PLAIN_BYTES_MAX: Final = 64 << 10


@dataclass(slots=True)
class GenerateRequest(JsonRequest):
    """A request for inference as plain JSON."""

    #: Inputs and parameters by name; the model says which is which.
    fields: Mapping[str, Any] = field(default_factory=dict)

    @override
    def parsed(self, servable: Servable | None = None) -> ParsedRequest:
        message = self.message
        if servable is None:
            check_name_length("model_name", message.model_name)
            check_name_length("model_version", message.model_version)
            return ParsedRequest(message, self.raw)
        del message.inputs[:]
        message.parameters.clear()
        self.raw = []
        specs = {spec.name: spec for spec in servable.inputs}
        for name, value in self.fields.items():
            if (spec := specs.get(name)) is not None:
                self.raw.append(_read_tensor(message, spec, value))
            elif type(value) in PARAMETER_KINDS:
                set_parameters(message.parameters, {name: value}, where="")
            else:
                names = ", ".join(map(quote, specs))
                raise BadRequestError(
                    f"{quote(name)}: found a list or an object, expected one of the inputs ({names}), or a parameter's"
                    " plain value"
                )
        # The end of the response says it.
        message.parameters.pop("triton_enable_empty_final_response", None)
        return ParsedRequest(message, self.raw)

    def plain_answer(self) -> dict[str, list[Any]]:
        """Give the answer's outputs, by name the elements of each.

        Raises BadRequestError if there is more than JSON is for.
        """
        assert self.answer is not None
        asked, servable, outputs, _ = self.answer
        specs = asked.sized_outputs or [servable.outputs[index] for index in asked.outputs]
        told, number = {}, 0
        for index, spec in zip(asked.outputs, specs, strict=True):
            number += math.prod(spec.shape(asked.rows))
            check_elements(spec.name, number)
            told[spec.name] = write_data(spec.name, spec.datatype, outputs[index])
        return told

    def head(self) -> dict[str, Any]:
        """Give what stands before the outputs."""
        assert self.answer is not None
        asked, servable, _, parameters = self.answer
        told: dict[str, Any] = {"id": asked.request_id} if asked.request_id else {}
        told |= {"model_name": servable.name, "model_version": servable.version}
        return told | {"parameters": parameters} if parameters else told


def read_generate(
    body: Buffer,
    *,
    model: str,
    version: str,
    slo_ms: float | None = None,
    decide_within_ms: float | None = None,
    tenant: str = "",
) -> GenerateRequest:
    """Read a request whose tensors are plain JSON; the arguments are those of `json_form.read_request`.

    Raises BadRequestError if it is no object, or too large.
    """
    if len(body) > PLAIN_BYTES_MAX:
        raise BadRequestError(
            f"found {len(body)} bytes of JSON, expected {PLAIN_BYTES_MAX} at most; send large tensors over gRPC"
        )
    fields: dict[str, Any] = read_json(body, read_object)
    request_id, parameters = fields.pop("id", ""), fields.pop("parameters", {})
    if not isinstance(request_id, str) or not isinstance(parameters, dict):
        raise BadRequestError("id and parameters: expected a string and an object")
    fields = parameters | fields
    for name in ("slo_ms", "timeout"):
        if name in fields and type(fields[name]) not in PARAMETER_KINDS:
            raise BadRequestError(f"{name}: found {quote(str(fields[name]))}, expected a number")
    if slo_ms is not None:
        fields["slo_ms"] = min(slo_ms, stated_ms(fields))
    for name, value in (("decide_within_ms", decide_within_ms), ("tenant", tenant)):
        if value:
            fields.setdefault(name, value)
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    # What is looked at before the model is described.
    for name in ("slo_ms", "timeout"):
        if name in fields:
            set_parameters(message.parameters, {name: fields[name]}, where="")
    return GenerateRequest(message, [body], AnswerForm(), fields=fields)


def joined(answers: list[dict[str, list[Any]]]) -> dict[str, Any]:
    """Put the outputs of several answers one behind the other; an output of one element in all is that element."""
    told: dict[str, Any] = {}
    for name in answers[0]:
        values = list(chain.from_iterable(answer[name] for answer in answers))
        told[name] = values[0] if len(values) == 1 else values
    return told


def _read_tensor(message: pb.ModelInferRequest, spec: TensorSpec, value: object) -> Buffer:
    """Add an input to a message; returns its bytes. Raises BadRequestError if the value does not fit it."""
    where = f"input {quote(spec.name)}: "
    values: list[Any] = [value]
    # The sizes of a list of lists.
    sizes: list[int] = []
    while values and all(isinstance(each, list) for each in values):
        sizes.append(len(values[0]))
        if len(sizes) > DIMENSIONS_MAX or len(set(map(len, values))) > 1:
            raise BadRequestError(f"{where}found lists of several lengths, or in too many others")
        values = list(chain.from_iterable(values))
    shape = list(spec.shape(1))
    if len(sizes) == len(shape):
        shape = sizes
    elif shape.count(-1) == 1:
        shape[shape.index(-1)] = len(values) // max(-math.prod(shape), 1)
    if len(values) != math.prod(shape):
        raise BadRequestError(
            f"{where}found {len(values)} values, expected {math.prod(shape)} for shape {shape}"
        )
    datatype = DATATYPES[spec.datatype]
    dtype = np.dtype(datatype.dtype).newbyteorder("<")
    kinds = {"b": (bool,), "f": (int, float), "O": (str,)}.get(dtype.kind, (int,))
    if any(type(each) not in kinds for each in values):
        raise BadRequestError(f"{where}found a value that is none of {spec.datatype}")
    message.inputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
    if kinds == (str,):
        return join_texts(values)
    return numbers_of(values, dtype, spec.datatype, where).tobytes()
