"""JSON of REST to messages and back, for all that is not inference. No I/O here."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

from clockwright.errors import BadRequestError
from clockwright.foreign import quote
from clockwright.v1 import control_pb2 as control
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import ENTRIES_MAX

#: What a parameter in JSON may be, and where a message keeps it.
Parameter = bool | int | float | str
PARAMETER_KINDS = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}

#: Most feedback in a message.
FEEDBACK_ITEMS_MAX = 10_000


@dataclass(slots=True)
class RestRequest:
    """What a path and a body say."""

    #: What the placeholders in the path's pattern stand for.
    names: dict[str, str]
    #: What the query says: the first value of each name.
    query: dict[str, str]
    #: What the body's JSON says; empty for a request without a body.
    fields: dict[str, Any]


# --- requests -------------------------------------------------------------------------------------


def fill(message: Message, asked: RestRequest) -> None:
    """Fill in a message from the body's fields, and then the path's.

    Raises BadRequestError if the message has no such fields, as of the next ones.
    """
    try:
        json_format.ParseDict(asked.fields, message)
    except (json_format.ParseError, RecursionError) as error:
        raise BadRequestError(f"the body is not what is expected: {error}") from None
    for name, text in asked.names.items():
        setattr(message, name, text)


def fill_parameters(message: Message, asked: RestRequest) -> None:
    """Fill in what loads or unloads a model, whose parameters are plain values in JSON."""
    fields = dict(asked.fields)
    parameters = fields.pop("parameters", None) or {}
    fill(message, RestRequest(asked.names, asked.query, fields))
    if not isinstance(parameters, dict) or not all(
        isinstance(value, bool | int | str) for value in parameters.values()
    ):
        raise BadRequestError("parameters: expected an object of truth values, numbers or strings")
    told = getattr(message, "parameters")  # noqa: B009
    set_parameters(told, parameters, where="")
    for name, value in parameters.items():
        if name.startswith("file:") and isinstance(value, str):
            try:
                told[name].bytes_param = base64.b64decode(value, validate=True)
            except binascii.Error as error:
                raise BadRequestError(
                    f"parameter {quote(name)}: expected a file in base64: {error}"
                ) from None


def fill_put(message: Message, asked: RestRequest) -> None:
    """Fill in an application, which replaces the one of its name."""
    assert isinstance(message, control.PutApplicationRequest)
    fill(message.application, asked)
    message.replace = True


class _FeedbackItem(msgspec.Struct, forbid_unknown_fields=True):
    query_id: str
    label: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    reward: float | None = None


def fill_feedback(message: Message, asked: RestRequest) -> None:
    """Fill in feedback: there may be thousands of items, for which `json_format` takes too long."""
    assert isinstance(message, control.FeedbackRequest)
    try:
        items = msgspec.convert(asked.fields.get("items", []), list[_FeedbackItem])
    except msgspec.ValidationError as error:
        raise BadRequestError(f"items: {error}") from None
    if len(items) > FEEDBACK_ITEMS_MAX:
        raise BadRequestError(
            f"found more than {FEEDBACK_ITEMS_MAX} fields, expected {FEEDBACK_ITEMS_MAX} at most"
        )
    for item in items:
        message.items.add(query_id=item.query_id, label=item.label, reward=item.reward)


def fill_query(message: Message, asked: RestRequest) -> None:
    """Fill in a message from the query, and then the path's names."""
    known = message.DESCRIPTOR.fields_by_name
    for name in asked.query:
        if name not in known:
            raise BadRequestError(f"query: found {quote(name)}, expected {' or '.join(known)}")
    fill(message, RestRequest(asked.query | asked.names, {}, {}))


def set_parameters(
    message: Any,  # noqa: ANN401  the map of one of several kinds of messages
    parameters: Mapping[str, Parameter] | None,
    *,
    where: str,
) -> None:
    """Put parameters into a message's map.

    Raises BadRequestError if there are too many, or one cannot be said in a message.
    """
    if not parameters:
        return
    if len(parameters) > ENTRIES_MAX:
        raise BadRequestError(
            f"{where}found {len(parameters)} parameters, expected {ENTRIES_MAX} at most"
        )
    for name, value in parameters.items():
        kind = PARAMETER_KINDS[type(value)]
        try:
            setattr(message[name], kind, value)
        except (ValueError, AttributeError):
            raise BadRequestError(
                f"{where}parameter {quote(name)}: found {quote(str(value))}, expected a value that {kind} can hold"
            ) from None


# --- answers: what JSON can say, and the HTTP status ----------------------------------------------


def tell(response: Message, _: RestRequest) -> tuple[Any, int]:
    """Say all fields of a message."""
    return fields_of(response), 200


def tell_ready(response: Message, asked: RestRequest) -> tuple[Any, int]:
    """Say whether something is ready, in words and by the status: load balancers look at nothing else."""
    told = asked.names | fields_of(response)
    return told, 200 if any(value is True for value in told.values()) else 400


def tell_list(response: pb.RepositoryIndexResponse, _: RestRequest) -> tuple[Any, int]:
    """List models."""
    return [fields_of(model) for model in response.models], 200


def tell_config(response: pb.ModelConfigResponse, _: RestRequest) -> tuple[Any, int]:
    """Describe a model."""
    return fields_of(response.config), 200


def tell_no_regions(_: Message, _asked: RestRequest) -> tuple[Any, int]:
    """List regions of a kind that there is not."""
    return [], 200


def tell_regions(response: pb.SystemSharedMemoryStatusResponse, _: RestRequest) -> tuple[Any, int]:
    """List regions of shared memory by name."""
    return [fields_of(response.regions[name]) for name in sorted(response.regions)], 200


def fields_of(message: Message) -> dict[str, Any]:
    """Turn a message into what JSON can say, with all of its fields: numbers stay numbers, whatever their size."""
    found: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.enum_type is not None:
            found[descriptor.name] = descriptor.enum_type.values_by_number[value].name
        elif descriptor.message_type is None:
            found[descriptor.name] = list(value) if descriptor.is_repeated else value
        elif descriptor.message_type.GetOptions().map_entry:
            found[descriptor.name] = {
                key: fields_of(value[key]) if isinstance(value[key], Message) else value[key]
                for key in value
            }
        elif descriptor.is_repeated:
            found[descriptor.name] = [fields_of(each) for each in value]
        elif message.HasField(descriptor.name):
            found[descriptor.name] = fields_of(value)
    return found
