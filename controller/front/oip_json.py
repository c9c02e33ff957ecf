"""The JSON form of the Open Inference Protocol: requests to messages, and answers of messages to JSON. No I/O here.

A body is JSON, and behind it may stand tensors as they are (Triton's binary tensor extension). What comes of it is
the message that a gRPC client would have sent: whether it fits its model, `oip` says for both alike.

JSON is for small tensors: to read and write it takes a hundred times as long as raw bytes, in the event loop, where
everybody waits for it. So it has bounds of its own, and long data is read in slices between which others have their turn.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from clockwright.bulk import ENTRIES_MAX, HEADER_BYTES_MAX, Buffer, add_bulk, split_bulk
from clockwright.errors import BadRequestError
from clockwright.v1 import inference_pb2 as pb
from controller.front.classification import DTYPES, elements_of
from controller.front.oip import RAW_INPUT_FIELD, RAW_OUTPUT_FIELD, quote

#: A request's JSON, without the tensors behind it: an image of 600 kB takes 3 MiB, with all digits.
JSON_BYTES_MAX: Final = 4 << 20
#: Elements of an answer's outputs that are written as JSON, together.
JSON_ELEMENTS_MAX: Final = 1 << 20
#: Lists in each other.
DIMENSIONS_MAX: Final = 32

# A tensor's text is read in slices of so many bytes. The slowest numbers, those next to zero, take a microsecond a byte.
_SLICE_BYTES: Final = 16 << 10

_BINARY, _BINARY_SIZE, _BINARY_OUTPUT = "binary_data", "binary_data_size", "binary_data_output"
_REGION: Final = "shared_memory_region"

# What `json.dumps` makes of such numbers, which no parser of JSON has to take. What stands before them is looked at last:
# a pattern that begins with it would begin at every comma of millions, which takes the loop eight times as long.
_NO_NUMBERS: Final = re.compile(
    rb"(?:NaN(?:(?<=[\[,:\s]NaN)|(?<=[\[,:\s]-NaN))"
    rb"|Infinity(?:(?<=[\[,:\s]Infinity)|(?<=[\[,:\s]-Infinity)))\b"
)

_Parameter = bool | int | float | str
_Dimension = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Tensor(msgspec.Struct, gc=False):
    name: str
    shape: list[_Dimension]
    datatype: str
    parameters: msgspec.Raw = msgspec.Raw()
    #: Read when it is known of what kind its elements are.
    data: msgspec.Raw = msgspec.Raw()


class _Wanted(msgspec.Struct, gc=False):
    name: str
    parameters: msgspec.Raw = msgspec.Raw()


class _Request(msgspec.Struct):
    inputs: list[_Tensor]
    id: str | None = None
    outputs: list[_Wanted] | None = None
    #: Read when it is known that there are not too many bytes of this kind.
    parameters: msgspec.Raw = msgspec.Raw()


_read_request = msgspec.json.Decoder(_Request).decode


def _read_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadRequestError(f"found number {quote(text)}, expected one that 64 bits can hold")
    return value


#: Reads an object of whatever there may be. The decoder's own way with numbers next to zero takes twenty times as long.
read_object = msgspec.json.Decoder(dict[str, Any], float_hook=_read_float).decode
write_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class AnswerForm:
    """Which outputs of an answer are to stand behind its JSON."""

    #: Those of which nothing is said.
    others: bool = False
    by_name: dict[str, bool] = field(default_factory=dict)

    def is_binary(self, name: str) -> bool:
        """Whether an output is to stand behind the JSON."""
        return self.by_name.get(name, self.others)


async def read_request(
    body: Buffer,
    json_bytes: int | None,
    *,
    model: str,
    version: str,
    pause: Callable[[], Awaitable[None]],
    slo_ms: float | None = None,
    tenant: str = "",
) -> tuple[Sequence[Buffer], AnswerForm]:
    """Turn a request into a serialised ModelInferRequest.

    Args:
        body: all of it.
        json_bytes: of which so many are JSON, and the rest are tensors; None: all are.
        model: which the path names.
        version: likewise; may be empty.
        pause: lets others have their turn, before each slice of what is long.
        slo_ms: an objective beside those in the body: the shortest holds.
        tenant: holds where the body names none.

    Returns:
        The message in parts, of which raw tensors are some, as they are; and how its answer is to be written.

    Raises:
        BadRequestError: that is no request of the protocol, or too large for JSON.
    """
    text = body if json_bytes is None else memoryview(body)[:json_bytes]
    if len(text) > JSON_BYTES_MAX:
        raise BadRequestError(
            f"found {len(text)} bytes of JSON, expected {JSON_BYTES_MAX} at most; send tensors behind it"
            f" ({_BINARY_SIZE}, Inference-Header-Content-Length)"
        )
    request: _Request = read_json(text, _read_request)
    outputs = request.outputs or ()
    for what, number in (("inputs", len(request.inputs)), ("outputs", len(outputs))):
        if number > ENTRIES_MAX:
            raise BadRequestError(f"{what}: found {number}, expected {ENTRIES_MAX} at most")
    num_bytes = sum(len(bytes(each.parameters)) for each in (request, *request.inputs, *outputs))
    if num_bytes > HEADER_BYTES_MAX:
        raise BadRequestError(
            f"found {num_bytes} bytes of parameters, expected {HEADER_BYTES_MAX} at most"
        )
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request.id or "")
    parameters = _read_parameters(request.parameters, "")
    form = AnswerForm(others=parameters.get(_BINARY_OUTPUT) is True)
    set_parameters(message.parameters, parameters, where="")
    if slo_ms is not None:
        message.parameters["slo_ms"].double_param = min(slo_ms, _stated_ms(parameters))
    if tenant and "tenant" not in parameters:
        message.parameters["tenant"].string_param = tenant
    for wanted in outputs:
        where = f"output {quote(wanted.name)}: "
        parameters = _read_parameters(wanted.parameters, where)
        binary = parameters.get(_BINARY)
        if binary is not None:
            form.by_name[wanted.name] = binary is True
        output = message.outputs.add(name=wanted.name)
        set_parameters(output.parameters, parameters, where=where)
    raw: list[Buffer] = []
    position = len(text)
    for tensor in request.inputs:
        where = f"input {quote(tensor.name)}: "
        shape = tensor.shape
        entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        parameters = _read_parameters(tensor.parameters, where)
        set_parameters(entry.parameters, parameters, where=where)
        elsewhere = next((each for each in (_BINARY_SIZE, _REGION) if each in parameters), None)
        if bytes(tensor.data) not in (b"", b"null"):
            if elsewhere is not None:
                raise BadRequestError(
                    f"{where}found data as well as parameter {elsewhere}, expected one of them"
                )
            raw.append(await _read_data(tensor, where, pause))
            continue
        if elsewhere is None:
            raise BadRequestError(
                f"{where}found no data, expected data, or parameter {_BINARY_SIZE} or {_REGION}"
            )
        if elsewhere == _REGION:
            continue
        size = parameters[_BINARY_SIZE]
        if not isinstance(size, int) or not 0 <= size <= len(body) - position:
            raise BadRequestError(
                f"{where}parameter {_BINARY_SIZE}: found {quote(str(size))}, expected a number of the"
                f" {len(body) - position} bytes that are left behind the JSON"
            )
        raw.append(memoryview(body)[position : position + size])
        position += size
    if position != len(body):
        raise BadRequestError(
            f"found {len(body) - position} bytes behind the JSON that are no input's, expected"
            f" {_BINARY_SIZE} to say whose they are"
        )
    # Equal requests are equal bytes then, and checked once (`templates`).
    header = message.SerializeToString(deterministic=True)
    return add_bulk(header, RAW_INPUT_FIELD, raw), form


def read_raw_request(
    body: Buffer,
    described: pb.ModelMetadataResponse,
    *,
    slo_ms: float | None = None,
    tenant: str = "",
) -> tuple[Sequence[Buffer], AnswerForm]:
    """Do what `read_request` does for a body that is one row of a model's only input, and nothing else.

    Raises:
        BadRequestError: the model has several inputs.
    """
    if len(described.inputs) != 1:
        names = ", ".join(tensor.name for tensor in described.inputs)
        raise BadRequestError(
            f"a raw binary request is one input: found model {described.name} with {names}, expected one input;"
            " say in JSON which bytes are whose (Inference-Header-Content-Length)"
        )
    (tensor,) = described.inputs
    message = pb.ModelInferRequest(model_name=described.name, model_version=described.versions[0])
    shape = [1, *tensor.shape[1:]]
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    if slo_ms is not None:
        message.parameters["slo_ms"].double_param = slo_ms
    if tenant:
        message.parameters["tenant"].string_param = tenant
    header = message.SerializeToString(deterministic=True)
    return add_bulk(header, RAW_INPUT_FIELD, [body]), AnswerForm(others=True)


def write_answer(message: Buffer, form: AnswerForm) -> tuple[bytes, Sequence[Buffer]]:
    """Turn a serialised ModelInferResponse into JSON, and the tensors that stand behind it.

    Raises:
        BadRequestError: there is more than JSON is for.
    """
    header, raw = split_bulk(message, RAW_OUTPUT_FIELD, entries_max=None)
    response = pb.ModelInferResponse.FromString(header)
    outputs: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    num_elements = 0
    for index, tensor in enumerate(response.outputs):
        parameters = {name: _value(each) for name, each in tensor.parameters.items()}
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if _REGION in parameters:
            pass
        elif form.is_binary(tensor.name):
            parameters[_BINARY_SIZE] = len(raw[index])
            binary.append(raw[index])
        else:
            num_elements += math.prod(tensor.shape)
            if num_elements > JSON_ELEMENTS_MAX:
                raise BadRequestError(
                    f"output {quote(tensor.name)}: found {num_elements} elements to write, expected"
                    f" {JSON_ELEMENTS_MAX} at most as JSON; ask for them with {_BINARY} or {_BINARY_OUTPUT}"
                )
            output["data"] = _write_data(tensor.datatype, raw[index])
        if parameters:
            output["parameters"] = parameters
        outputs.append(output)
    answer: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        answer["id"] = response.id
    if response.parameters:
        answer["parameters"] = {name: _value(each) for name, each in response.parameters.items()}
    answer["outputs"] = outputs
    return write_json(answer), binary


def read_json(text: Buffer, decode: Any) -> Any:  # noqa: ANN401  what the decoder makes
    """Decode JSON.

    Raises:
        BadRequestError: it is none, or another than is expected.
    """
    if not text:
        raise BadRequestError("found an empty body, expected JSON")
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"the body is not what is expected: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Python writes them, as if they were.
        why = "; NaN and Infinity are no JSON" if _NO_NUMBERS.search(text) else ""
        raise BadRequestError(f"the body is not what is expected: {error}{why}") from None
    except RecursionError:
        raise BadRequestError("the body has lists or objects too deep in each other") from None


def set_parameters(
    message: Any,  # noqa: ANN401  the map of one of several kinds of messages
    parameters: Mapping[str, _Parameter] | None,
    *,
    where: str,
) -> None:
    """Put parameters into a message's map.

    Raises:
        BadRequestError: there are too many, or one cannot be said in a message.
    """
    if not parameters:
        return
    if len(parameters) > ENTRIES_MAX:
        raise BadRequestError(
            f"{where}found {len(parameters)} parameters, expected {ENTRIES_MAX} at most"
        )
    for name, value in parameters.items():
        kind = _KINDS[type(value)]
        try:
            setattr(message[name], kind, value)
        except (ValueError, AttributeError):
            raise BadRequestError(
                f"{where}parameter {quote(name)}: found {quote(str(value))}, expected a value that {kind} can hold"
            ) from None


_KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def fields_of(message: Message) -> dict[str, Any]:
    """Turn a message into what JSON can say, with all of its fields: numbers stay numbers, whatever their size."""
    found: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.message_type is None:
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


def _stated_ms(parameters: Mapping[str, _Parameter]) -> float:
    """Find the objective that a body states; infinite: none. What is no number, `oip` refuses."""
    for name, unit_ms in (("slo_ms", 1.0), ("timeout", 1e-3)):
        if name in parameters:
            try:
                value = float(parameters[name]) * unit_ms
            except ValueError as error:
                raise BadRequestError(f"parameter {name}: {error}") from None
            # Neither is any; the comparison is false for NaN, too.
            if not value > 0:
                raise BadRequestError(f"parameter {name}: found {value:.12g}, expected more than 0")
            return value
    return float("inf")


def _read_parameters(text: msgspec.Raw, where: str) -> dict[str, _Parameter]:
    """Read parameters, if there are any.

    Raises:
        BadRequestError: they are no object of plain values.
    """
    if bytes(text) in (b"", b"null"):
        return {}
    parameters: dict[str, _Parameter] = read_json(text, read_object)
    for name, value in parameters.items():
        if type(value) not in _KINDS:
            raise BadRequestError(
                f"{where}parameter {quote(name)}: expected a truth value, a number or a string"
            )
    return parameters


_OPENED: Final = re.compile(rb"[\s\[]*")


async def _read_data(tensor: _Tensor, where: str, pause: Callable[[], Awaitable[None]]) -> Buffer:
    """Read a tensor's elements, in a list or in lists in each other, row by row."""
    dtype = DTYPES.get(tensor.datatype)
    if dtype is None:
        raise BadRequestError(
            f"{where}found data of datatype {quote(tensor.datatype)}, expected one of {', '.join(DTYPES)}; BF16"
            f" stands behind the JSON ({_BINARY_SIZE}), and BYTES is not served"
        )
    text = bytes(tensor.data)
    opened = _OPENED.match(text)
    depth = 0 if opened is None else opened[0].count(b"[")
    if not 1 <= depth <= DIMENSIONS_MAX:
        raise BadRequestError(
            f"{where}found {depth} lists in each other as data, expected 1 to {DIMENSIONS_MAX}"
        )
    kind = bool if dtype == "?" else float if "f" in dtype else int
    decoder = _data_decoder(kind, depth)
    parts: list[NDArray[Any]] = []
    for part in _slices(text):
        if len(text) > _SLICE_BYTES:
            await pause()
        parts.append(_read_slice(part, decoder, depth, np.dtype(dtype), tensor.datatype, where))
    # Bytes, of which `oip` speaks, this client has not sent. A shape that no tensor has is for `oip` to refuse.
    shape, found = tensor.shape, sum(len(part) for part in parts)
    if len(shape) <= DIMENSIONS_MAX and min(shape, default=0) >= 0:
        expected = math.prod(shape)
        if found != expected:
            raise BadRequestError(
                f"{where}found {found} values as data, expected {expected} for shape {shape}"
            )
    return b"".join(part.tobytes() for part in parts)


def _read_slice(
    text: bytes,
    decoder: msgspec.json.Decoder[Any],
    depth: int,
    dtype: np.dtype[Any],
    datatype: str,
    where: str,
) -> NDArray[Any]:
    try:
        elements: Any = decoder.decode(text)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"{where}data: {error}") from None
    for _ in range(depth - 1):
        elements = chain.from_iterable(elements)
    numbers = list(elements)
    try:
        with np.errstate(over="raise"):
            return np.array(numbers, dtype=dtype)
    except (OverflowError, FloatingPointError):
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        raise BadRequestError(
            f"{where}found data from {_shown(min(numbers))} to {_shown(max(numbers))}, expected {datatype},"
            f" which goes from {limits.min} to {limits.max}"
        ) from None


def _shown(number: float) -> str:
    # Python refuses to write a number of thousands of digits, and nobody would read it.
    if isinstance(number, int) and number.bit_length() > 80:
        return f"a number of {number.bit_length()} bits"
    return f"{number}"


def _slices(text: bytes) -> Iterator[bytes]:
    """Cut lists of lists of numbers at commas; each slice has the brackets that stand open around it."""
    begin = depth = 0
    while begin < len(text):
        end = text.find(b",", begin + _SLICE_BYTES)
        if end < 0:
            end = len(text)
        part = text[begin:end]
        depth_behind = depth + part.count(b"[") - part.count(b"]")
        yield b"[" * depth + part + b"]" * depth_behind
        begin, depth = end + 1, depth_behind


@functools.cache
def _data_decoder(kind: type, depth: int) -> msgspec.json.Decoder[Any]:
    for _ in range(depth):
        kind = list[kind]  # type: ignore[valid-type]
    return msgspec.json.Decoder(kind)


def _write_data(datatype: str, raw: Buffer) -> list[Any]:
    if datatype == "BYTES":
        return _read_bytes(raw)
    return elements_of(datatype, raw).tolist()  # type: ignore[no-any-return]


def _read_bytes(raw: Buffer) -> list[str]:
    """Read elements that stand behind their lengths, as the protocol has datatype BYTES."""
    texts, position = [], 0
    while position < len(raw):
        begin = position + 4
        position = begin + int.from_bytes(raw[position:begin], "little")
        texts.append(bytes(raw[begin:position]).decode(errors="replace"))
    return texts


def _value(parameter: pb.InferParameter) -> _Parameter:
    kind = parameter.WhichOneof("parameter_choice")
    value: _Parameter = getattr(parameter, kind) if kind else ""
    return value
