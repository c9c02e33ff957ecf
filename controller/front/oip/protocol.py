"""Open Inference Protocol messages in, validated requests out, and answers back to bytes. No gRPC here.

A request comes by twice: `parse_request` finds out which model it names, `read_request` checks it against
that model, which only the caller can look up. Its answer leaves through `encode_response`.

Tensor bytes are opaque: a big message is cut at its top level and its tensors stay views into it; only
typed contents, which no client uses for anything large, are converted. Whatever does not fit the model
is a `BadRequestError` that names the field, what was found and what is expected.
"""

from __future__ import annotations

import difflib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec
from google.protobuf.message import DecodeError

from clockwright.errors import BadRequestError, ProtocolError
from clockwright.foreign import check_name_length, quote
from clockwright.units import (
    NS_PER_MS,
    NS_PER_S,
    NS_PER_US,
    SLO_NS_MAX,
    WEIGHT_MAX,
    WEIGHT_MIN,
    format_ns,
)
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import (
    ENTRIES_MAX,
    SMALL_MESSAGE_BYTES,
    Buffer,
    add_bulk,
    encode_varint,
    split_bulk,
    total_bytes,
)
from clockwright.wire.open_sizes import Sizes, check_sizes, rows_of_work
from clockwright.wire.tensors import DATATYPES, TensorSpec
from clockwright.wire.texts import count_texts, join_texts, skip_texts
from controller.front.oip.classes import Levels, worth_of
from controller.front.oip.classification import CLASSES_MAX, Classes
from controller.port import AskedStep, Streaming

RAW_INPUT_FIELD = 7
RAW_OUTPUT_FIELD = 6
# Tag of `infer_response` in a ModelStreamInferResponse.
_STREAM_RESPONSE_TAG = b"\x12"

# gRPC's core rounds a timeout up before it sends it: to 1 ms below a second, 10 ms below ten, and so on
# (measured: 20 s arrive as 20.0999 s). The client gives up at the exact time all the same.
RPC_DEADLINE_ROUNDING_S = 0.001
RPC_DEADLINE_ROUNDING = 0.01

# What a request with several answers may say of them.
_OF_STREAMS = ("max_steps", "ttft_ms", "tpot_ms")
# What a request may say to us, most used first.
PARAMETERS = (
    "slo_ms",
    "timeout",
    "explain",
    "context",
    "tenant",
    "decide_within_ms",
    "weight",
    "work_ahead_ms",
    "priority",
    "attempt",
    *_OF_STREAMS,
    "sequence_id",
)
# What a step of a sequence may say besides; the first two are Triton's.
_OF_STEPS = ("sequence_start", "sequence_end", "every_ms")
# What a request for tokens may say of them; other models ignore it, as they ignore unknown names.
_OF_TOKENS = ("temperature", "seed")
_TEMPERATURE_MAX = 1000

# What clients of other makes send as a matter of course, and what changes no answer here: how
# Triton's streams end, KServe's hints on how JSON carries tensors, MLServer's on how it
# decodes them.
_HINTS = ("binary_data", "binary_data_output", "binary_data_size", "content_type")
_EMPTY_FINAL = "triton_enable_empty_final_response"
_OF_REQUESTS = frozenset((*PARAMETERS, *_OF_TOKENS, *_HINTS, _EMPTY_FINAL))
# What an answer of several says of itself: whether it is the last.
_FINAL = "triton_final_response"
# Where a tensor lies that does not come with its request, or is not to go with its answer.
_REGION, _REGION_BYTES, _REGION_OFFSET = (
    "shared_memory_region",
    "shared_memory_byte_size",
    "shared_memory_offset",
)
_TENSOR_PARAMETERS = (*_HINTS, _REGION, _REGION_BYTES, _REGION_OFFSET)
_OF_TENSORS = frozenset(_TENSOR_PARAMETERS)
# A name that has so much in common with one of ours is a misspelt one. `tenant_id` and `context_id` have more, `text`,
# `request_id` and `lora_weights`, which clients of language models send, have less.
_ALIKE = 0.75
# Unlike in letters, but meant.
_MEANT = {
    "sequence_begin": "sequence_start",
    "sequence_first": "sequence_start",
    "sequence_last": "sequence_end",
    "sequence_stop": "sequence_end",
}
# To compare a name takes some 30 us.
_WITH_UNKNOWN_MAX = 64
# How many texts are wanted of each row of an output, in place of its values.
_CLASSES = "classification"
_OUTPUT_PARAMETERS = (*_TENSOR_PARAMETERS, _CLASSES)
#: All that a request or one of its tensors may say to us.
KNOWN_PARAMETERS = _OF_REQUESTS | _OF_TENSORS | {*_OF_STEPS, _CLASSES}
_REGION_BYTES_MAX = (1 << 63) - 1


# Fields that are looked at before a message is parsed: model_name, model_version, id, parameters. Their
# tags, and how entries of the parameters' map begin that hold an objective: key, and tag of the value.
_PEEKED_TAGS = frozenset((0x0A, 0x12, 0x1A, 0x22))
_PEEKED_PARAMETERS = ((b"\x0a\x06slo_ms\x12", NS_PER_MS), (b"\x0a\x07timeout\x12", NS_PER_US))
_PEEKED_FIELDS_MAX = 16


@dataclass(slots=True)
class ParsedRequest:
    """A request that is well-formed; its model may not exist."""

    message: pb.ModelInferRequest
    #: `raw_input_contents`, one per input; views into the received bytes when those are big.
    raw: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a region of shared memory that a client has registered, as a request names it."""

    region: str
    #: Where it begins in the region.
    offset: int
    num_bytes: int

    def parameters(self, num_bytes: int) -> dict[str, int | str]:
        """Say that so many bytes of an output lie there."""
        told: dict[str, int | str] = {_REGION: self.region, _REGION_BYTES: num_bytes}
        if self.offset:
            told[_REGION_OFFSET] = self.offset
        return told


@dataclass(slots=True)
class Servable:
    """A model as `read_request` needs it, or an application, which clients ask like a model."""

    name: str
    #: The version that is served.
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Largest number of rows that a request may have.
    max_rows: int
    #: Default latency objective of the servable; None: the server's holds.
    slo_ns: int | None
    #: Parameter `context` means something to the servable. A model ignores it.
    has_contexts: bool = False
    #: Why the rows of a request are run one by one, although the model's file has an open batch; empty: they are not.
    one_by_one: str = ""
    #: Rows of the largest batch; a request of more rows is run in several batches.
    largest_batch: int = 1 << 31
    #: By output, what its classes are called.
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The servable as the steps of a sequence see it: without state and controls. None: it has no sequences.
    steps: Servable | None = None
    #: A request is answered so many times at most; 0: once, and a call with one answer does.
    max_steps: int = 0
    #: They are tokens, which are chosen by the model's logits.
    generates: bool = False
    #: It is a pipeline of models.
    is_pipeline: bool = False
    #: Its levels of priority; None: it has none.
    levels: Levels | None = None
    #: Shares of the versions of a name that a client gave without a version; empty: this version has all.
    traffic: Mapping[str, float] = field(default_factory=dict)

    @property
    def varies(self) -> bool:
        """Whether its tensors carry their sizes: those of all requests with as many rows are not the same."""
        return bool(self.inputs and self.inputs[0].vary)

    @property
    def max_work(self) -> int:
        """Largest number of rows of work that a request may have."""
        vary = self.inputs[0].vary if self.inputs else None
        return self.largest_batch if vary and vary.unit else self.max_rows

    @property
    def stated_rows(self) -> int:
        """The first dimension in its metadata: 1, or -1 if a request may have more rows."""
        return 1 if self.max_rows == 1 else -1

    def stepped(self, step: AskedStep) -> Servable:
        """The servable as a step sees it; if state is wanted, with all outputs.

        Raises BadRequestError if it has no sequences.
        """
        if self.steps is None:
            why = (
                "answers several times, and keeps the state of a request itself, expected none; leave the parameter out"
                if self.max_steps
                else "has no state and no controls, expected none; declare its state in [state] of its config.toml, or its"
                " names in [sequence], or leave the parameter out"
            )
            raise BadRequestError(f"parameter sequence_id: {quote(self.name)} {why}")
        return replace(self.steps, outputs=self.outputs) if step.wants_state else self.steps


class CheckedRequest(msgspec.Struct, gc=False):
    """A request that fits its servable."""

    #: Id that the client gave the request, to be echoed; may be empty.
    request_id: str
    #: Rows of work: its rows, or what they come to where sizes vary (`clockwright.wire.tensors.Variable`).
    rows: int
    #: Bytes of each input in the servable's order, `rows` rows each, little-endian, row-major.
    inputs: list[Buffer]
    #: Indices into the servable's outputs, in the order asked for.
    outputs: Sequence[int]
    slo_ns: int
    #: Where the SLO came from, as `request_slo_ns` names it.
    slo_source: str
    #: The client wants to know where the time went.
    explain: bool
    #: User or session that the request is for; empty when none is named.
    context: str
    #: Tenant whose share of the GPUs the request uses; empty when none is named.
    tenant: str
    #: How its answer begins, serialised; empty while the sizes of its outputs are not known (`unpack_outputs`).
    answer_header: bytes
    #: Which of `inputs` are empty here, because they lie in shared memory, and where.
    shared_inputs: Sequence[tuple[int, SharedPart]] = ()
    #: Where each of `outputs` belongs in shared memory, None: in the answer; empty: all belong there.
    shared_outputs: Sequence[SharedPart | None] = ()
    #: What classes are wanted of each of `outputs`; None: its values are. Empty: the values of all are.
    classes: Sequence[Classes | None] = ()
    #: The client wants it refused or promised this long after its arrival; 0: the client does not ask for that.
    decide_within_ns: int = 0
    #: What its answer is worth to the client, where that to a usual request is worth 1.
    weight: float = 1.0
    #: Time that the client's pipeline needs after the answer.
    work_ahead_ns: int = 0
    #: The specs of `outputs` for the sizes that came; empty: the servable's are.
    sized_outputs: Sequence[TensorSpec] = ()
    #: Which step of which sequence it is; None: none.
    step: AskedStep | None = None
    #: How its answers are to follow each other; None: it has one.
    streaming: Streaming | None = None
    #: An empty answer behind them is to say that they have ended, in place of the last.
    empty_final: bool = False


@dataclass(slots=True)
class PeekedRequest:
    """What stands at the beginning of a request, before its tensors; empty where it does not."""

    model_name: str = ""
    request_id: str = ""
    #: From parameter `slo_ms` or `timeout`, when it is a plain number; None: not found, or not one.
    slo_ns: int | None = None
    #: How many bytes of the message say all this.
    num_bytes: int = 0


def peek_request(data: Buffer) -> PeekedRequest:
    """Look at the first fields of a serialised ModelInferRequest, at the cost of some steps.

    Serialisers write fields in the order of their numbers, so name, id and parameters come before the
    tensors. What is not there, or not well-formed, is for `parse_request` to say.
    """
    peeked = PeekedRequest()
    position, end = 0, len(data)
    for _ in range(_PEEKED_FIELDS_MAX):
        peeked.num_bytes = position + 1
        if end - position < 2 or data[position] not in _PEEKED_TAGS:
            break
        field, length = data[position] >> 3, data[position + 1]
        position += 2
        if length >= 0x80:
            if position >= end or data[position] >= 0x80:
                break
            length = length & 0x7F | data[position] << 7
            position += 1
        entry = bytes(data[position : position + length])
        position += length
        peeked.num_bytes = position
        if field == 1:
            peeked.model_name = entry.decode(errors="replace")
        elif field == 3:
            peeked.request_id = entry.decode(errors="replace")
        elif field == 4:
            for key, unit_ns in _PEEKED_PARAMETERS:
                if entry.startswith(key):
                    peeked.slo_ns = _peek_number(entry[len(key) + 1 :], unit_ns)
                    if unit_ns == NS_PER_MS and peeked.slo_ns is not None:
                        return peeked
    return peeked


def _peek_number(parameter: bytes, unit_ns: int) -> int | None:
    """Read a serialised InferParameter that holds a positive number."""
    try:
        value = _number(pb.InferParameter.FromString(parameter), "slo_ms")
    except (DecodeError, BadRequestError):
        return None
    return round(value * unit_ns) if 0 < value <= SLO_NS_MAX / unit_ns else None


def parse_request(data: Buffer) -> ParsedRequest:
    """Parse a serialised ModelInferRequest; tensors of big messages are not copied.

    Raises BadRequestError if the bytes are no such message, or a name in it is too long.
    """
    try:
        raw: Sequence[Buffer]
        if len(data) <= SMALL_MESSAGE_BYTES:
            message = pb.ModelInferRequest.FromString(bytes(data))
            raw = message.raw_input_contents
        else:
            header, raw = split_bulk(data, RAW_INPUT_FIELD)
            message = pb.ModelInferRequest.FromString(header)
    except (DecodeError, ProtocolError) as error:
        raise BadRequestError(
            f"{len(data)} bytes are not a ModelInferRequest: {error}, expected inference.ModelInferRequest"
        ) from None
    # Names travel to the controller before it is known whether such a model exists.
    check_name_length("model_name", message.model_name)
    check_name_length("model_version", message.model_version)
    return ParsedRequest(message, raw)


def context_of(message: pb.ModelInferRequest) -> str:
    """Read the user or session that a request is for; empty when none is named.

    Raises BadRequestError if it is no text, or too long.
    """
    return _string(message, "context")


def read_request(
    request: ParsedRequest,
    servable: Servable,
    *,
    rpc_remaining_s: float | None,
    default_slo_ns: int,
) -> CheckedRequest:
    """Check a request against its servable, and take out all that serving it needs.

    Args:
        request: from `parse_request`.
        servable: the model or application that the request names.
        rpc_remaining_s: time to the RPC deadline; None: the call has none.
        default_slo_ns: SLO of requests that name no SLO, to servables that have none.

    Raises:
        BadRequestError: it does not fit, or a parameter is wrong.
    """
    message = request.message
    check_name_length("id", message.id)
    step: AskedStep | None = None
    if "sequence_id" in message.parameters and (step := read_step(message, servable)) is not None:
        servable = servable.stepped(step)
    rows, inputs = 1, list[Buffer]()
    outputs: Sequence[int] = ()
    shared_inputs: Sequence[tuple[int, SharedPart]] = ()
    leaves = step is not None and step.leaves(len(message.inputs), len(servable.inputs))
    if not leaves:
        rows, inputs, shared_inputs = _read_inputs(request, servable)
        outputs = _requested_outputs(message, servable.outputs)
    slo_ns, slo_source = request_slo_ns(
        message,
        rpc_remaining_s=rpc_remaining_s,
        model_slo_ns=servable.slo_ns,
        default_slo_ns=default_slo_ns,
    )
    explain = _wants_explanation(message)
    context = context_of(message) if servable.has_contexts else ""
    specs = tuple(servable.outputs[index] for index in outputs)
    shared_outputs = _shared_outputs(message, rows, specs)
    classes = _classes(message, rows, specs, servable.labels)
    header = b""
    if leaves or not servable.varies:
        header = _answer_header(servable, rows, specs, shared_outputs, classes)
    # By position, like a model's `Servable`: names would cost each request 0.5 us more.
    checked = CheckedRequest(
        message.id,
        rows,
        inputs,
        outputs,
        slo_ns,
        slo_source,
        explain,
        context,
        _string(message, "tenant"),
        header,
        shared_inputs,
        shared_outputs,
        classes,
        _time_ns(message, "decide_within_ms"),
        worth_of(message, servable.levels, _weight(message)),
        _time_ns(message, "work_ahead_ms"),
        step=step,
    )
    if servable.max_steps:
        checked.streaming = _streaming(message, checked, servable)
        if _EMPTY_FINAL in message.parameters:
            checked.empty_final = message.parameters[_EMPTY_FINAL].bool_param
    elif name := next((each for each in _OF_STREAMS if each in message.parameters), ""):
        raise BadRequestError(
            f"parameter {name}: found in a request to {quote(servable.name)}, which answers once; leave it out"
        )
    return checked


def _streaming(
    message: pb.ModelInferRequest, checked: CheckedRequest, servable: Servable
) -> Streaming:
    """Read how the answers of a request are to follow each other, which states the time of the first with `slo_ms`."""
    steps = max_steps = servable.max_steps
    parameters = message.parameters
    if "max_steps" in parameters:
        found = _number(parameters["max_steps"], "max_steps", "")
        steps = int(found) if 1 <= found <= max_steps else 0
        if steps != found:
            raise BadRequestError(
                f"parameter max_steps: found {found:.12g}, expected a whole number from 1 to {max_steps}"
            )
    next_ns = _time_ns(message, "tpot_ms") or checked.slo_ns
    checked.slo_ns = _time_ns(message, "ttft_ms") or checked.slo_ns
    temperature, seed = 0.0, None
    if "temperature" in parameters:
        temperature = float(_number(parameters["temperature"], "temperature", ""))
        # The comparison is also false for NaN.
        if not 0 <= temperature <= _TEMPERATURE_MAX:
            raise BadRequestError(
                f"parameter temperature: found {temperature:.12g}, expected 0 to {_TEMPERATURE_MAX}"
            )
    if "seed" in parameters:
        found = _number(parameters["seed"], "seed", "")
        if not 0 <= found < 1 << 63 or found != int(found):
            raise BadRequestError(f"parameter seed: found {found:.12g}, expected a whole number")
        seed = int(found)
    if not servable.generates and ("temperature" in parameters or "seed" in parameters):
        raise BadRequestError(
            f"parameters temperature and seed: found in a request to {quote(servable.name)}, which gives no tokens;"
            " leave them out"
        )
    return Streaming(next_ns, steps, temperature, seed)


def final_mark(*, is_last: bool) -> bytes:
    """Serialise what a message says behind one of several answers: whether it is the last."""
    return _parameter(_FINAL, is_last)


def encode_empty_final(asked: CheckedRequest, servable: Servable) -> bytes:
    """Serialise the empty answer behind the last of several."""
    response = pb.ModelInferResponse(
        model_name=servable.name, model_version=servable.version, id=asked.request_id
    )
    response.parameters[_FINAL].bool_param = True
    return response.SerializeToString()


def read_step(message: pb.ModelInferRequest, servable: Servable) -> AskedStep | None:
    """Read which step of which sequence a request is that has a `sequence_id`; None: it is no step, as with Triton if the id is 0 or empty.

    Raises:
        BadRequestError: a parameter is wrong.
    """
    sequence = read_sequence_id(message.parameters["sequence_id"])
    if not sequence:
        return None
    plain = {spec.name for spec in servable.steps.outputs} if servable.steps is not None else set()
    step = AskedStep(
        sequence,
        _flag(message, "sequence_start"),
        _flag(message, "sequence_end"),
        any([asked.name not in plain for asked in message.outputs]),
        _time_ns(message, "every_ms"),
    )
    if step.every_ns and not step.start:
        raise BadRequestError("parameter every_ms: found without sequence_start, expected with it")
    return step


def read_sequence_id(parameter: pb.InferParameter) -> int | str:
    """Read what a client calls its sequence; 0 and "" mean that there is no sequence.

    Raises BadRequestError if it is something else.
    """
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param", "string_param"):
        raise BadRequestError(
            f"parameter sequence_id: found {kind or 'no value'}, expected int64_param or string_param"
        )
    sequence: int | str = getattr(parameter, kind)
    if isinstance(sequence, str):
        check_name_length("parameter sequence_id", sequence)
    return sequence


def _flag(message: pb.ModelInferRequest, name: str) -> bool:
    if name not in message.parameters:
        return False
    parameter = message.parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    if kind != "bool_param":
        raise BadRequestError(f"parameter {name}: found {kind or 'no value'}, expected bool_param")
    return parameter.bool_param


def _answer_header(
    servable: Servable,
    rows: int,
    specs: tuple[TensorSpec, ...],
    shared_outputs: tuple[SharedPart | None, ...],
    classes: Sequence[Classes | None],
) -> bytes:
    if classes:
        specs = tuple(
            wanted.texts if wanted else spec for spec, wanted in zip(specs, classes, strict=True)
        )
    return _response_header(servable.name, servable.version, rows, specs, shared_outputs)


def unpack_outputs(
    asked: CheckedRequest, servable: Servable, outputs: Sequence[Buffer]
) -> Sequence[Buffer]:
    """Read the sizes of outputs that carry them, and put them into the request. Returns the outputs without them.

    Raises RefusedError if the request failed, others of its batch perhaps not; BadRequestError if an output is larger
    than its place in shared memory; ValueError if they are no outputs of the servable.
    """
    unpacked = [spec.unpack(raw) for spec, raw in zip(servable.outputs, outputs, strict=True)]
    specs = tuple(unpacked[index][0] for index in asked.outputs)
    for spec, part in zip(specs, asked.shared_outputs, strict=False):
        _check_room(spec, part, 1)
    asked.sized_outputs = specs
    if not asked.shared_outputs:
        # The header says how long an output is where it lies elsewhere only.
        specs = tuple([spec.sized(spec.row_shape) for spec in specs])
    for spec, wanted in zip(specs, asked.classes, strict=False):
        if wanted:
            asked.rows = spec.row_shape[0] if wanted.spec.axis == 0 else 1
            _check_classes(f"output {quote(spec.name)}: ", asked.rows * wanted.number)
    asked.answer_header = _answer_header(
        servable, asked.rows, specs, tuple(asked.shared_outputs), asked.classes
    )
    return [content for _, content in unpacked]


def _time_ns(message: pb.ModelInferRequest, name: str) -> int:
    """Read a parameter in milliseconds; 0: the request has none."""
    parameters = message.parameters
    if name not in parameters:
        return 0
    return _positive_ns(name, _number(parameters[name], name), NS_PER_MS, "milliseconds")


def _weight(message: pb.ModelInferRequest) -> float:
    """Read parameter `weight`; 1: the request has none."""
    if "weight" not in message.parameters:
        return 1.0
    weight = _number(message.parameters["weight"], "weight", "")
    # The comparison is also false for NaN.
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise BadRequestError(
            f"parameter weight: found {weight:.12g}, expected {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
        )
    return float(weight)


def leave_work_ahead(asked: CheckedRequest) -> None:
    """Shorten the SLO of a request by the time that its pipeline needs after the answer, if any.

    Raises BadRequestError if no time is left.
    """
    if asked.work_ahead_ns >= asked.slo_ns:
        raise BadRequestError(
            f"parameter work_ahead_ms: found {asked.work_ahead_ns / NS_PER_MS:.12g}, expected less than the"
            f" SLO, {format_ns(asked.slo_ns)}, which is for this request and the work after it"
        )
    asked.slo_ns -= asked.work_ahead_ns


def check_decision(asked: CheckedRequest, servable: Servable) -> None:
    """Check that a request can be decided within the time, if its client asks for certainty.

    Raises BadRequestError if it asks an application or a pipeline, or the answer is due by then.
    """
    if asked.decide_within_ns and (servable.has_contexts or servable.is_pipeline):
        what = "pipeline" if servable.is_pipeline else "application"
        raise BadRequestError(
            f"parameter decide_within_ms: found in a request to {what} {quote(servable.name)}, expected"
            f" in requests to models only; leave it out, or ask the {what}'s models"
        )
    if asked.decide_within_ns >= asked.slo_ns:
        raise BadRequestError(
            f"parameter decide_within_ms: found {asked.decide_within_ns / NS_PER_MS:.12g}, expected less than"
            f" the SLO, {format_ns(asked.slo_ns)}; leave it out, because the answer comes by then"
        )


def request_slo_ns(
    message: pb.ModelInferRequest,
    *,
    rpc_remaining_s: float | None,
    model_slo_ns: int | None,
    default_slo_ns: int,
) -> tuple[int, str]:
    """Find the latency objective of a request.

    In order: parameter `slo_ms` (number or numeric string); Triton's `timeout` (microseconds); what is left of the RPC
    deadline; the model's default; the server's. Returns the SLO, and which of them it came from: `slo_ms`, `timeout`,
    `rpc_deadline`, `model`, `default`. Raises BadRequestError if a parameter is of the wrong type, not a positive
    number, or beyond a day.
    """
    return stated_slo_ns(message) or unstated_slo_ns(
        rpc_remaining_s, model_slo_ns=model_slo_ns, default_slo_ns=default_slo_ns
    )


def stated_slo_ns(message: pb.ModelInferRequest) -> tuple[int, str] | None:
    """Read the objective that a request states itself, as `request_slo_ns`; None: it states none."""
    parameters = message.parameters
    if "slo_ms" in parameters:
        slo_ms = _number(parameters["slo_ms"], "slo_ms")
        return _positive_ns("slo_ms", slo_ms, NS_PER_MS, "milliseconds"), "slo_ms"
    if "timeout" in parameters:
        kind = parameters["timeout"].WhichOneof("parameter_choice")
        if kind not in ("int64_param", "uint64_param"):
            raise BadRequestError(
                f"parameter timeout: found {kind or 'no value'}, expected int64_param or uint64_param"
                " (microseconds)"
            )
        timeout_us = getattr(parameters["timeout"], kind)
        return _positive_ns("timeout", timeout_us, NS_PER_US, "microseconds"), "timeout"
    return None


def unstated_slo_ns(
    rpc_remaining_s: float | None, *, model_slo_ns: int | None, default_slo_ns: int
) -> tuple[int, str]:
    """Find the objective of a request that states none, as `request_slo_ns`."""
    if rpc_remaining_s is not None:
        remaining_s = min(max(rpc_remaining_s, 0.0), SLO_NS_MAX / NS_PER_S)
        remaining_s -= max(RPC_DEADLINE_ROUNDING_S, remaining_s * RPC_DEADLINE_ROUNDING)
        return max(int(remaining_s * NS_PER_S), 1), "rpc_deadline"
    if model_slo_ns is not None:
        return model_slo_ns, "model"
    return default_slo_ns, "default"


def encode_response(
    asked: CheckedRequest,
    outputs: Sequence[Buffer],
    *,
    parameters: Mapping[str, bool | int | str] | None = None,
) -> Sequence[Buffer]:
    """Serialise a ModelInferResponse; gives it in parts, of which outputs are some, as they are.

    `outputs` has bytes of all outputs of the servable that was asked; those asked for are sent.
    """
    header = asked.answer_header
    if asked.request_id or parameters:
        request_id = asked.request_id.encode()
        if request_id:
            header += b"\x1a" + encode_varint(len(request_id)) + request_id
        for key, value in (parameters or {}).items():
            header += _parameter(key, value)
    wanted: list[Buffer] = [outputs[index] for index in asked.outputs]
    for index, classes in enumerate(asked.classes):
        if classes is not None:
            wanted[index] = classes.classify(wanted[index], asked.rows)
    if shared := asked.shared_outputs:
        # Clients find an output by its position, so those that lie elsewhere have an empty place. Triton's client in C++
        # reads beyond the end where places are missing.
        wanted = [b"" if part else output for part, output in zip(shared, wanted, strict=True)]
    return add_bulk(header, RAW_OUTPUT_FIELD, wanted)


def wrap_for_stream(response: Sequence[Buffer]) -> Sequence[Buffer]:
    """Put a serialised ModelInferResponse into a ModelStreamInferResponse; both are in parts, and none is copied."""
    return [_STREAM_RESPONSE_TAG + encode_varint(total_bytes(response)), *response]


def encode_stream_error(message: str, status: str, *, request_id: str = "") -> bytes:
    """Serialise the ModelStreamInferResponse of a request that failed, with its id as Triton does, and its status."""
    response = pb.ModelInferResponse(id=request_id)
    response.parameters["status"].string_param = status
    return pb.ModelStreamInferResponse(
        error_message=message, infer_response=response
    ).SerializeToString()


# All answers of a model with as many rows have this part in common. Kept, it costs 1 us instead of 8.
@lru_cache(maxsize=8192)
def _response_header(
    model_name: str,
    model_version: str,
    rows: int,
    specs: tuple[TensorSpec, ...],
    shared: tuple[SharedPart | None, ...],
) -> bytes:
    tensors = [
        pb.ModelInferResponse.InferOutputTensor(
            name=spec.name, datatype=spec.datatype, shape=spec.shape(rows)
        )
        for spec in specs
    ]
    for tensor, spec, part in zip(tensors, specs, shared, strict=False):
        if part is not None:
            for name, value in part.parameters(spec.batch_bytes(rows)).items():
                if isinstance(value, str):
                    tensor.parameters[name].string_param = value
                else:
                    tensor.parameters[name].int64_param = value
    return pb.ModelInferResponse(
        model_name=model_name, model_version=model_version, outputs=tensors
    ).SerializeToString()


def _read_inputs(
    request: ParsedRequest, servable: Servable
) -> tuple[int, list[Buffer], Sequence[tuple[int, SharedPart]]]:
    """Check the inputs.

    Returns the number of rows, or of rows of work; the bytes of each input, in the servable's order; which of them lie
    in shared memory, and where: their bytes are none, or what carries their size.
    """
    tensors = request.message.inputs
    raw = request.raw
    _check_number("inputs", len(tensors))
    parts = [_shared_part("input", tensor) if tensor.parameters else None for tensor in tensors]
    num_here = parts.count(None)
    for tensor in tensors if raw else ():
        if tensor.HasField("contents") and tensor.contents.ByteSize():
            # Triton's clients look for these words.
            raise BadRequestError(
                "contents field must not be specified when using raw_input_contents for"
                f" {quote(tensor.name)} for model {quote(servable.name)}"
            )
    if raw and len(raw) != num_here:
        elsewhere = " that lie in no region" if num_here < len(parts) else ""
        raise BadRequestError(
            f"raw_input_contents: found {len(raw)} entries, expected one for each of the {num_here}"
            f" inputs{elsewhere}"
        )
    if num_here < len(parts):
        entries = iter(raw)
        raw = raw and [next(entries) if part is None else b"" for part in parts]
    positions: dict[str, int] = {}
    for position, tensor in enumerate(tensors):
        if tensor.name in positions:
            raise BadRequestError(f"input {quote(tensor.name)}: found twice, expected once")
        positions[tensor.name] = position
    _check_names(positions, servable)

    rows = 0
    buffers: list[Buffer] = []
    shared: list[tuple[int, SharedPart]] = []
    sizes: Sizes = {}
    for spec in servable.inputs:
        position = positions[spec.name]
        tensor = tensors[position]
        found_rows = _check_tensor(tensor, spec, servable)
        if found_rows != rows and spec.axis is not None:
            if rows:
                first = next(each for each in servable.inputs if each.axis is not None)
                raise BadRequestError(
                    f"input {quote(spec.name)}: found {found_rows} rows (shape[{spec.axis}]), expected {rows} as in"
                    f" input {quote(first.name)}"
                )
            rows = found_rows
        part = parts[position]
        content: Buffer = raw[position] if raw else b""
        sized = spec
        if spec.vary is not None:
            check_sizes(spec, tensor.shape, sizes)
            sized = spec.sized(tensor.shape, part.num_bytes if part else len(content))
        if part is not None:
            _check_shared(tensor, part, sized, rows)
            shared.append((len(buffers), part))
        elif raw:
            _check_raw(content, sized, rows)
        else:
            content = _typed_bytes(tensor, sized, rows)
        if spec.vary is not None:
            header = spec.header(tensor.shape, part.num_bytes if part else len(content))
            content = b"".join((header, content))
        buffers.append(content)
    # Without an input that has rows, a request is one.
    rows = rows or 1
    if sizes:
        vary = servable.inputs[0].vary
        # Where it has no unit, of a pipeline, each stage counts its own.
        if vary is not None and vary.unit:
            rows = rows_of_work(vary, rows, sizes, servable.largest_batch)
        for spec, content in zip(servable.inputs, buffers, strict=True):
            if len(content) > spec.batch_bytes(rows):
                help_ = (
                    "send shorter texts" if spec.datatype == "BYTES" else "make one of them smaller"
                )
                raise BadRequestError(
                    f"input {quote(spec.name)}: found {len(content)} bytes, expected"
                    f" {spec.batch_bytes(rows)} at most for a request of such sizes; {help_}"
                )
    if servable.varies:
        in_regions = {index for index, _ in shared}
        for index, spec in enumerate(servable.inputs):
            if spec.datatype == "BYTES" and index not in in_regions:
                check_texts(spec, buffers[index], rows, servable.largest_batch)
    return rows, buffers, tuple(shared)


def check_texts(spec: TensorSpec, tensor: Buffer, rows: int, largest_batch: int) -> None:
    """Check an input of datatype BYTES: `tensor` are its bytes behind its size.

    More rows than the largest batch are run in several, each of which has room for so much text. Raises BadRequestError
    if lengths of elements do not add up, their number is not its shape's, or there is not so much room.
    """
    where = f"input {quote(spec.name)}: "
    sized, content = spec.unpack(tensor)
    expected = math.prod(sized.row_shape)
    try:
        found = count_texts(content, expected)
    except ValueError as error:
        raise BadRequestError(
            f"{where}{error}; expected each element of BYTES behind its length (4 bytes, little-endian)"
        ) from None
    if found != expected:
        more = " or more" if found > expected else ""
        raise BadRequestError(
            f"{where}found {found}{more} elements in {len(content)} bytes, expected {expected} for shape"
            f" {list(sized.row_shape)}"
        )
    header_bytes = len(tensor) - len(content)
    end = 0
    if spec.axis is None:  # Each run has all of it.
        rows = min(rows, largest_batch)
    for first in range(0, rows, largest_batch):
        num = min(largest_batch, rows - first)
        begin, end = end, len(content)
        if first + num < rows:
            end = skip_texts(content, begin, num * expected // rows)
        if (most := spec.batch_bytes(num)) < header_bytes + end - begin:
            raise BadRequestError(
                f"{where}found {header_bytes + end - begin} bytes of text, expected {most} at most in {num} rows; send"
                " fewer rows at a time; smaller batch_sizes in the model's config.toml allow longer texts"
            )


def _shared_part(
    kind: str,
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor,
) -> SharedPart | None:
    """Read where a tensor lies in shared memory; None: it does not."""
    parameters = tensor.parameters
    where = f"{kind} {quote(tensor.name)}: "
    if _REGION not in parameters:
        for name in (_REGION_BYTES, _REGION_OFFSET):
            if name in parameters:
                raise BadRequestError(f"{where}found parameter {name} without {_REGION}")
        return None
    region = parameters[_REGION]
    if region.WhichOneof("parameter_choice") != "string_param" or not region.string_param:
        raise BadRequestError(f"{where}parameter {_REGION}: expected a name in string_param")
    check_name_length(f"{where}parameter {_REGION}", region.string_param)
    if _REGION_BYTES not in parameters:
        raise BadRequestError(f"{where}found no {_REGION_BYTES}, expected it with {_REGION}")
    numbers = []
    for name in (_REGION_BYTES, _REGION_OFFSET):
        value = 0
        if name in parameters:
            kind_found = parameters[name].WhichOneof("parameter_choice")
            if kind_found not in ("int64_param", "uint64_param"):
                raise BadRequestError(
                    f"{where}parameter {name}: found {kind_found or 'no value'}, expected int64_param"
                )
            value = getattr(parameters[name], kind_found)
        if not 0 <= value <= _REGION_BYTES_MAX:
            raise BadRequestError(f"{where}parameter {name}: found {value}, expected 0 or more")
        numbers.append(value)
    return SharedPart(region.string_param, offset=numbers[1], num_bytes=numbers[0])


def _check_shared(
    tensor: pb.ModelInferRequest.InferInputTensor, part: SharedPart, spec: TensorSpec, rows: int
) -> None:
    if tensor.HasField("contents") and tensor.contents.ByteSize():
        raise BadRequestError(
            f"input {quote(spec.name)}: found contents as well as {_REGION}, expected one of them"
        )
    if not spec.fits(part.num_bytes, rows):
        raise BadRequestError(
            f"input {quote(spec.name)}: found {_REGION_BYTES} {part.num_bytes}, expected"
            f" {spec.batch_bytes(rows)} for"
            f" {spec.datatype} {list(spec.shape(rows))}"
        )


def _shared_outputs(
    message: pb.ModelInferRequest, rows: int, specs: Sequence[TensorSpec]
) -> tuple[SharedPart | None, ...]:
    """Find out where the outputs belong that were asked for; empty: all belong into the answer."""
    if not any(asked.parameters for asked in message.outputs):
        return ()
    parts = tuple(_shared_part("output", asked) for asked in message.outputs)
    for spec, part in zip(specs, parts, strict=True):
        if spec.vary is None:
            _check_room(spec, part, rows)
    return () if not any(parts) else parts


def _check_room(spec: TensorSpec, part: SharedPart | None, rows: int) -> None:
    if part is not None and part.num_bytes < spec.batch_bytes(rows):
        raise BadRequestError(
            f"output {quote(spec.name)}: found {_REGION_BYTES} {part.num_bytes}, expected"
            f" {spec.batch_bytes(rows)} or more for {spec.datatype} {list(spec.shape(rows))}"
        )


def _classes(
    message: pb.ModelInferRequest,
    rows: int,
    specs: Sequence[TensorSpec],
    labels: Mapping[str, Sequence[str]],
) -> tuple[Classes | None, ...]:
    """Find out of which outputs texts are wanted, as `CheckedRequest.classes`."""
    if not any(_CLASSES in asked.parameters for asked in message.outputs):
        return ()
    found: list[Classes | None] = []
    for asked, spec in zip(message.outputs, specs, strict=True):
        if _CLASSES not in asked.parameters:
            found.append(None)
            continue
        where = f"output {quote(asked.name)}: parameter {_CLASSES}: "
        kind = asked.parameters[_CLASSES].WhichOneof("parameter_choice")
        if kind not in ("int64_param", "uint64_param"):
            raise BadRequestError(f"{where}found {kind or 'no value'}, expected int64_param")
        number = getattr(asked.parameters[_CLASSES], kind)
        if number < 1:
            raise BadRequestError(f"{where}found {number}, expected 1 or more")
        if _REGION in asked.parameters:
            raise BadRequestError(f"{where}found in addition to {_REGION}, expected one of them")
        if spec.datatype == "BYTES":
            raise BadRequestError(f"{where}found for an output of BYTES, expected numbers")
        if min(spec.row_shape, default=0) < 0:
            raise BadRequestError(
                f"{where}found for an output of shape {_shape_words(spec, -1)}, expected rows of one size"
            )
        # As Triton: all that there are, where more are wanted.
        number = min(number, math.prod(spec.row_shape))
        _check_classes(where, rows * number)
        found.append(Classes(spec, number, labels.get(spec.name, ())))
    return tuple(found)


def _check_classes(where: str, number: int) -> None:
    if number > CLASSES_MAX:
        raise BadRequestError(
            f"{where}found {number} classes in all rows, expected {CLASSES_MAX} at most"
        )


def _check_names(positions: Mapping[str, int], servable: Servable) -> None:
    inputs = servable.inputs
    for spec in inputs:
        if spec.name not in positions:
            words = ""
            if servable.steps is not None and spec not in servable.steps.inputs:
                words = "; only a step, which has the parameter sequence_id, leaves it out"
            raise BadRequestError(
                f"input {quote(spec.name)} is missing: found {_names(list(positions))},"
                f" expected {_names([spec.name for spec in inputs])}{words}"
            )
    if len(positions) == len(inputs):
        return
    known = {spec.name for spec in inputs}
    surplus = [name for name in positions if name not in known]
    raise BadRequestError(
        f"inputs: found {_names(surplus)} too many, expected {_names([spec.name for spec in inputs])}"
    )


def _check_tensor(
    tensor: pb.ModelInferRequest.InferInputTensor, spec: TensorSpec, servable: Servable
) -> int:
    """Check datatype and shape; return the number of rows."""
    if tensor.datatype != spec.datatype:
        why = "" if tensor.datatype in DATATYPES else " (no datatype of the protocol)"
        raise BadRequestError(
            f"input {quote(spec.name)}: found datatype {quote(tensor.datatype)}{why},"
            f" expected {spec.datatype}"
        )
    for name in tensor.parameters:
        if name not in _OF_TENSORS:
            where = f"input {quote(spec.name)}: "
            _check_unknown(name, len(tensor.parameters), _TENSOR_PARAMETERS, where)
    # As many are looked at as there may be, and one more.
    shape, max_rows = tuple(tensor.shape[: len(spec.row_shape) + 2]), servable.max_rows
    axis = spec.axis
    if axis == 0 and shape:
        rows, is_fit = shape[0], shape[1:] == spec.row_shape
    else:
        rows = shape[axis] if axis and axis < len(shape) else 1
        is_fit = shape == spec.shape(rows)
    if not is_fit and not (spec.vary and spec.allows(shape)):
        found = str(list(tensor.shape[:16])) + ("..." if len(tensor.shape) > 16 else "")
        raise BadRequestError(
            f"input {quote(spec.name)}: found shape {found}, expected {_shape_words(spec, servable.stated_rows)}"
            + (f" with 1 to {max_rows} in place of -1" if max_rows > 1 else _why_one_row(servable))
        )
    if not 1 <= rows <= max_rows:
        expected = f"1 to {max_rows}" if max_rows > 1 else "1"
        why = _why_one_row(servable)
        raise BadRequestError(
            f"input {quote(spec.name)}: found {rows} rows (shape[{axis}]), expected {expected}{why}"
        )
    return rows


def _shape_words(spec: TensorSpec, rows: int) -> str:
    """A whole shape, with the names of its open dimensions."""
    shape = spec.shape(rows)
    if spec.vary is None:
        return str(list(shape))
    names = iter(spec.vary.symbols)
    sizes = [
        str(size) if place == spec.axis or size >= 0 else next(names)
        for place, size in enumerate(shape)
    ]
    return f"[{', '.join(sizes)}]"


def _why_one_row(servable: Servable) -> str:
    return f"; it runs its rows one by one: {servable.one_by_one}" if servable.one_by_one else ""


def _check_raw(raw: Buffer, spec: TensorSpec, rows: int) -> None:
    if not spec.fits(len(raw), rows):
        raise BadRequestError(
            f"input {quote(spec.name)}: found {len(raw)} raw bytes, expected"
            f" {spec.batch_bytes(rows)} for {spec.datatype}"
            f" {list(spec.shape(rows))}"
        )


def _typed_bytes(
    tensor: pb.ModelInferRequest.InferInputTensor, spec: TensorSpec, rows: int
) -> Buffer:
    datatype = DATATYPES[spec.datatype]
    wanted = datatype.contents
    if not wanted:
        raise BadRequestError(
            f"input {quote(spec.name)}: found no raw_input_contents, expected them: {spec.datatype} has no"
            " typed contents"
        )
    for found, _ in tensor.contents.ListFields():
        if found.name != wanted:
            raise BadRequestError(
                f"input {quote(spec.name)}: found contents.{found.name}, expected contents.{wanted} for"
                f" {spec.datatype}"
            )
    elements = getattr(tensor.contents, wanted)
    expected = math.prod(spec.shape(rows))
    if len(elements) != expected:
        raise BadRequestError(
            f"input {quote(spec.name)}: found {len(elements)} elements in contents.{wanted}, expected"
            f" {expected} for shape {list(spec.shape(rows))}"
        )
    if spec.datatype == "BYTES":
        return join_texts(elements)
    try:
        # `array` has no letter for truth values, which are 0 and 1.
        return array(datatype.letter.replace("?", "B"), elements).tobytes()
    except OverflowError:
        raise BadRequestError(
            f"input {quote(spec.name)}: found an element in contents.{wanted} from {min(elements)} to"
            f" {max(elements)}, expected all in the range of {spec.datatype}"
        ) from None


def _requested_outputs(
    message: pb.ModelInferRequest, outputs: Sequence[TensorSpec]
) -> Sequence[int]:
    if not message.outputs:
        return range(len(outputs))
    _check_number("outputs", len(message.outputs))
    known = {spec.name: index for index, spec in enumerate(outputs)}
    indices: list[int] = []
    for asked in message.outputs:
        if asked.name not in known:
            raise BadRequestError(
                f"output {quote(asked.name)}: found no such output, expected some of {_names(list(known))}"
            )
        for name in asked.parameters:
            if name not in _OF_TENSORS and name != _CLASSES:
                where = f"output {quote(asked.name)}: "
                _check_unknown(name, len(asked.parameters), _OUTPUT_PARAMETERS, where)
        if known[asked.name] in indices:
            raise BadRequestError(f"output {quote(asked.name)}: found twice, expected once")
        indices.append(known[asked.name])
    return indices


def _wants_explanation(message: pb.ModelInferRequest) -> bool:
    """Read parameter `explain`, and look at those that are not known here."""
    parameters = message.parameters
    for name in parameters:
        if name not in _OF_REQUESTS and not (name in _OF_STEPS and "sequence_id" in parameters):
            if name in _OF_STEPS:
                raise BadRequestError(
                    f"parameter {name}: found without sequence_id, expected with it"
                )
            _check_unknown(name, len(parameters), PARAMETERS)
    return _flag(message, "explain")


def _check_unknown(name: str, number: int, known: tuple[str, ...], where: str = "") -> None:
    """Refuse a parameter that is unsupported, or spelt almost as one of ours; a typo must not pass for the default.

    What else clients say is for models of another make, as with Triton, and changes no answer here. `where` is what the
    request says it of.
    """
    if number > _WITH_UNKNOWN_MAX:
        raise BadRequestError(
            f"{where}found {number} parameters, expected {_WITH_UNKNOWN_MAX} at most where some are unknown"
        )
    # Names are compared letter by letter, so a long one is cut.
    if nearest := _nearest(name[:80].lower(), known):
        raise BadRequestError(
            f"{where}found parameter {quote(name)}, which is none; did you mean {nearest}?"
        )


# Clients send the same names with every request.
@lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...]) -> str:
    if name.startswith("slo") and "slo_ms" in known:
        return "slo_ms"
    if "sequence_id" in known and name in _MEANT:
        return _MEANT[name]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)), "")


def _check_number(what: str, number: int) -> None:
    if number > ENTRIES_MAX:
        raise BadRequestError(f"{what}: found {number}, expected {ENTRIES_MAX} at most")


def _string(message: pb.ModelInferRequest, name: str) -> str:
    if name not in message.parameters:
        return ""
    parameter = message.parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    if kind != "string_param":
        raise BadRequestError(
            f"parameter {name}: found {kind or 'no value'}, expected string_param"
        )
    check_name_length(f"parameter {name}", parameter.string_param)
    return parameter.string_param


def _number(parameter: pb.InferParameter, name: str, unit: str = "milliseconds") -> float:
    kind = parameter.WhichOneof("parameter_choice")
    if kind in ("int64_param", "uint64_param", "double_param"):
        value: float = getattr(parameter, kind)
        return value
    if kind == "string_param":
        try:
            return float(parameter.string_param)
        except ValueError:
            raise BadRequestError(
                f"parameter {name}: found {quote(parameter.string_param)}, expected a number"
                + (unit and f" of {unit}")
            ) from None
    raise BadRequestError(
        f"parameter {name}: found {kind or 'no value'}, expected int64_param, uint64_param, double_param or"
        " a numeric string_param" + (unit and f" ({unit})")
    )


def _positive_ns(name: str, value: float, unit_ns: int, unit: str) -> int:
    # The comparison is also false for NaN.
    if not 0 < value <= SLO_NS_MAX / unit_ns:
        raise BadRequestError(
            f"parameter {name}: found {value:.12g}, expected more than 0 and at most"
            f" {SLO_NS_MAX // unit_ns} {unit}"
        )
    return max(round(value * unit_ns), 1)


# Most parameters of an application's answers are the same each time. Typed, or True would be 1.
@lru_cache(maxsize=8192, typed=True)
def _parameter(key: str, value: bool | int | str) -> bytes:
    """Serialise an entry of a response's parameters."""
    # A double_param would get lost: KServe's own message has only bool, int64 and string, and drops
    # everything else silently.
    if isinstance(value, bool):
        choice = b"\x08\x01" if value else b"\x08\x00"
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"parameter {key} is {value}, expected an integer of 64 bits")
        choice = b"\x10" + encode_varint(value % (1 << 64))
    else:
        text = value.encode()
        choice = b"\x1a" + encode_varint(len(text)) + text
    name = key.encode()
    entry = b"\x0a%b%b\x12%b%b" % (
        encode_varint(len(name)),
        name,
        encode_varint(len(choice)),
        choice,
    )
    return b"\x22" + encode_varint(len(entry)) + entry


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(quote(name) for name in names[:8]) or "none"
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
