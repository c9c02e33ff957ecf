"""The JSON form of the Open Inference Protocol: requests in, and answers back to JSON. No I/O here.

A body is JSON, and behind it may stand tensors as they are (Triton's binary tensor extension). It is parsed
to the same object as a gRPC client's message, and `protocol` checks both against their model. An answer is written
from the outputs. Neither is ever serialised as protobuf.

JSON is for small tensors: to read and write it takes a hundred times as long as raw bytes, and blocks the event loop
for all clients. So it has bounds of its own. Long data is read in slices, between which other requests run.
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
from numpy.typing import NDArray

from clockwright.elements import elements_of
from clockwright.errors import BadRequestError
from clockwright.foreign import check_name_length, quote
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import ENTRIES_MAX, HEADER_BYTES_MAX, Buffer, total_bytes
from clockwright.wire.tensors import DATATYPES
from clockwright.wire.texts import cut_texts, join_texts
from controller.front.oip.json_messages import PARAMETER_KINDS, Parameter, set_parameters
from controller.front.oip.protocol import (
    KNOWN_PARAMETERS,
    CheckedRequest,
    ParsedRequest,
    PeekedRequest,
    Servable,
    stated_slo_ns,
)

#: A request's JSON, without the tensors behind it: an image of 600 kB takes 3 MiB, with all digits.
JSON_BYTES_MAX: Final = 4 << 20
#: Elements of an answer's outputs that are written as JSON, together.
JSON_ELEMENTS_MAX: Final = 1 << 20
#: Lists in each other.
DIMENSIONS_MAX: Final = 32

# A tensor's text is read in slices of so many bytes. The slowest numbers, those next to zero, take a microsecond a byte.
_SLICE_BYTES: Final = 16 << 10

# Requests with longer parameters, or more tensors, are checked each time.
_KEY_BYTES_MAX: Final = 2048
_KEY_ENTRIES_MAX: Final = 64

_BINARY, _BINARY_SIZE, _BINARY_OUTPUT = "binary_data", "binary_data_size", "binary_data_output"
_REGION: Final = "shared_memory_region"
_DECIDE: Final = "decide_within_ms"

# What `json.dumps` makes of such numbers, which no parser of JSON has to take. What stands before them is looked at last:
# a pattern that begins with it would begin at every comma of millions, which takes the loop eight times as long.
_NO_NUMBERS: Final = re.compile(
    rb"(?:NaN(?:(?<=[\[,:\s]NaN)|(?<=[\[,:\s]-NaN))"
    rb"|Infinity(?:(?<=[\[,:\s]Infinity)|(?<=[\[,:\s]-Infinity)))\b"
)

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


@dataclass(slots=True)
class JsonRequest:
    """A request for inference, and then what is needed to write its answer."""

    #: What a gRPC client would have sent, but for raw tensors.
    message: pb.ModelInferRequest
    #: Raw tensors, one for each input that lies in no region.
    raw: list[Buffer]
    form: AnswerForm
    #: All but its id and the elements of its tensors: requests of one key are checked once (`services.templates`).
    #: None: it is too long.
    key: tuple[object, ...] | None = None
    #: The one raw tensor is a row of the model's only input, which is described later.
    is_row: bool = False
    #: The request, its servable, the outputs, and the parameters of the answer; None: it is not answered.
    answer: tuple[CheckedRequest, Servable, Sequence[Buffer], Mapping[str, Parameter]] | None = None

    def __len__(self) -> int:
        """Bytes that it takes up."""
        return self.message.ByteSize() + total_bytes(self.raw)

    def parsed(self, servable: Servable | None = None) -> ParsedRequest:
        """Say what `parse_request` says of a message; in full where the servable is given.

        Raises BadRequestError if a name is too long, or a row has no input of its own.
        """
        message = self.message
        if servable is None:
            check_name_length("model_name", message.model_name)
            check_name_length("model_version", message.model_version)
        elif self.is_row:
            if len(servable.inputs) != 1:
                names = ", ".join(spec.name for spec in servable.inputs)
                raise BadRequestError(
                    f"a raw binary request is one input: found model {servable.name} with {names}, expected one"
                    " input; say in JSON which bytes are whose (Inference-Header-Content-Length)"
                )
            (spec,) = servable.inputs
            del message.inputs[:]
            shape = spec.shape(1)
            if spec.datatype == "BYTES" and math.prod(shape) == 1:
                self.raw = [join_texts(map(bytes, self.raw))]  # As Triton: all of it is the text.
            message.inputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
        return ParsedRequest(message, self.raw)

    def peek(self) -> PeekedRequest:
        """Say what `peek_request` says of a message."""
        try:
            stated = stated_slo_ns(self.message)
        except BadRequestError:
            stated = None
        slo_ns = None if stated is None else stated[0]
        return PeekedRequest(self.message.model_name, self.message.id, slo_ns)

    def write_answer(self) -> tuple[bytes, Sequence[Buffer]]:
        """Write the answer's JSON, and the tensors that stand behind it.

        Raises BadRequestError if there is more than JSON is for.
        """
        assert self.answer is not None
        return write_answer(*self.answer, form=self.form)


async def read_request(
    body: Buffer,
    json_bytes: int | None,
    *,
    model: str,
    version: str,
    pause: Callable[[], Awaitable[None]],
    slo_ms: float | None = None,
    decide_within_ms: float | None = None,
    tenant: str = "",
) -> JsonRequest:
    """Read a request.

    Args:
        body: all of it.
        json_bytes: of which so many are JSON, and the rest are tensors; None: all are.
        model: which the path names.
        version: likewise; may be empty.
        pause: lets others have their turn, before each slice of what is long.
        slo_ms: an objective in addition to those in the body: the shortest holds.
        decide_within_ms: the time for a decision; holds where the body names none, and so does the next.
        tenant: for fairness.

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
        message.parameters["slo_ms"].double_param = min(slo_ms, stated_ms(parameters))
    if decide_within_ms is not None and _DECIDE not in parameters:
        message.parameters[_DECIDE].double_param = decide_within_ms
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
    key: tuple[object, ...] | None = None
    if num_bytes <= _KEY_BYTES_MAX and len(request.inputs) + len(outputs) <= _KEY_ENTRIES_MAX:
        key = (
            *(model, version, bytes(request.parameters), slo_ms, decide_within_ms, tenant),
            *(
                (each.name, *each.shape, each.datatype, bytes(each.parameters))
                for each in request.inputs
            ),
            *((each.name, bytes(each.parameters)) for each in outputs),
        )
    return JsonRequest(message, raw, form, key)


def read_row(
    body: Buffer,
    *,
    model: str,
    version: str,
    slo_ms: float | None = None,
    decide_within_ms: float | None = None,
    tenant: str = "",
) -> JsonRequest:
    """Do what `read_request` does for a body that is one row of a model's only input, and nothing else."""
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    if slo_ms is not None:
        message.parameters["slo_ms"].double_param = slo_ms
    if decide_within_ms is not None:
        message.parameters[_DECIDE].double_param = decide_within_ms
    if tenant:
        message.parameters["tenant"].string_param = tenant
    key = ("row", model, version, slo_ms, decide_within_ms, tenant)
    return JsonRequest(message, [body], AnswerForm(others=True), key, is_row=True)


def write_answer(
    asked: CheckedRequest,
    servable: Servable,
    outputs: Sequence[Buffer],
    parameters: Mapping[str, Parameter],
    *,
    form: AnswerForm,
) -> tuple[bytes, Sequence[Buffer]]:
    """Write an answer's JSON, and the tensors that stand behind it, as `form` says.

    Raises BadRequestError if there is more than JSON is for.
    """
    written: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    num_elements = 0
    shared = asked.shared_outputs or (None,) * len(asked.outputs)
    classes = asked.classes or (None,) * len(asked.outputs)
    specs = asked.sized_outputs or [servable.outputs[index] for index in asked.outputs]
    for index, spec, part, wanted in zip(asked.outputs, specs, shared, classes, strict=True):
        raw = outputs[index]
        name, datatype, shape = spec.name, spec.datatype, list(spec.shape(asked.rows))
        if wanted is not None:
            datatype, shape = "BYTES", list(wanted.texts.shape(asked.rows))
            raw = wanted.classify(raw, asked.rows)
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if part is not None:
            # Triton's client in C++ needs a size wherever there are parameters.
            there = part.parameters(spec.batch_bytes(asked.rows))
            output["parameters"] = {**there, _BINARY_SIZE: 0}
        elif form.is_binary(name):
            output["parameters"] = {_BINARY_SIZE: len(raw)}
            binary.append(raw)
        else:
            num_elements += math.prod(shape)
            check_elements(name, num_elements)
            output["data"] = write_data(name, datatype, raw)
        written.append(output)
    answer: dict[str, Any] = {"model_name": servable.name, "model_version": servable.version}
    if asked.request_id:
        answer["id"] = asked.request_id
    if parameters:
        answer["parameters"] = parameters
    answer["outputs"] = written
    return write_json(answer), binary


def check_elements(name: str, number: int) -> None:
    """Raise BadRequestError if so many elements, up to an output of that name, are more than JSON is for."""
    if number > JSON_ELEMENTS_MAX:
        raise BadRequestError(
            f"output {quote(name)}: found {number} elements to write, expected"
            f" {JSON_ELEMENTS_MAX} at most as JSON; ask for them with {_BINARY} or {_BINARY_OUTPUT}"
        )


def read_json(text: Buffer, decode: Any) -> Any:  # noqa: ANN401  what the decoder makes
    """Decode JSON. Raises BadRequestError if it is none, or another than is expected."""
    if not text:
        raise BadRequestError("found an empty body, expected JSON")
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"the body is not what is expected: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Python writes them, as if they were.
        why = ""
        if "trailing characters" in str(error):
            why = "; if they are tensors, send header Inference-Header-Content-Length"
        elif _NO_NUMBERS.search(text):
            why = "; NaN and Infinity are no JSON"
        raise BadRequestError(f"the body is not what is expected: {error}{why}") from None
    except RecursionError:
        raise BadRequestError("the body has lists or objects too deep in each other") from None


def stated_ms(parameters: Mapping[str, Parameter]) -> float:
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


def _read_parameters(text: msgspec.Raw, where: str) -> dict[str, Parameter]:
    """Read parameters, if there are any.

    Raises BadRequestError if they are no object, or one of those known here is no plain value.
    """
    if bytes(text) in (b"", b"null"):
        return {}
    parameters: dict[str, Parameter] = read_json(text, read_object)
    plain = {name: each for name, each in parameters.items() if type(each) in PARAMETER_KINDS}
    for name in parameters.keys() - plain.keys():
        if name in KNOWN_PARAMETERS:
            raise BadRequestError(
                f"{where}parameter {quote(name)}: expected a truth value, a number or a string"
            )
    return plain


_OPENED: Final = re.compile(rb"[\s\[]*")
_NOT_LISTS: Final = bytes(set(range(256)) - set(b"[],"))


async def _read_data(tensor: _Tensor, where: str, pause: Callable[[], Awaitable[None]]) -> Buffer:
    """Read a tensor's elements, in a list or in lists in each other, row by row."""
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or datatype.dtype != datatype.numpy_name:
        kinds = [name for name, each in DATATYPES.items() if each.dtype == each.numpy_name]
        raise BadRequestError(
            f"{where}found data of datatype {quote(tensor.datatype)}, expected one of {', '.join(kinds)}; others"
            f" stand behind the JSON ({_BINARY_SIZE})"
        )
    text = bytes(tensor.data)
    opened = _OPENED.match(text)
    depth = 0 if opened is None else opened[0].count(b"[")
    if not depth:
        raise BadRequestError(f"{where}found data that is no list, expected a list of values")
    if depth > DIMENSIONS_MAX:
        raise BadRequestError(
            f"{where}found {depth} lists in each other as data, expected 1 to {DIMENSIONS_MAX}"
        )
    dtype = np.dtype(datatype.dtype).newbyteorder("<")
    kind = {"b": bool, "f": float, "O": str}.get(dtype.kind, int)
    decoder = _data_decoder(kind, depth)
    parts: list[bytes] = []
    around: list[bytes] = []
    found = 0
    for part, lists in _slices(text):
        if len(text) > _SLICE_BYTES:
            await pause()
        elements = _read_slice(part, decoder, depth, where)
        found += len(elements)
        around.append(lists)
        parts.append(
            join_texts(elements)
            if kind is str
            else numbers_of(elements, dtype, tensor.datatype, where).tobytes()
        )
    # Bytes, of which `oip` speaks, this client has not sent. A shape that no tensor has is for `oip` to refuse.
    shape = tensor.shape
    if len(shape) <= DIMENSIONS_MAX and min(shape, default=0) >= 0:
        expected = math.prod(shape)
        if found != expected:
            raise BadRequestError(
                f"{where}found {found} values as data, expected {expected} for shape {shape}"
            )
    # Lists of another shape hold other rows than their client thinks, although as many values.
    if depth > 1 and found:
        brackets = b"".join(around)
        if not _has_shape(brackets, shape):
            end = brackets.index(b"]")
            raise BadRequestError(
                f"{where}found lists as data that are not of shape {shape} (the first has"
                f" {end - brackets.rindex(b'[', 0, end)} values), expected that shape, or one list of all values"
            )
    return b"".join(parts)


def _has_shape(lists: bytes, shape: Sequence[int]) -> bool:
    """Whether lists in each other, of which only brackets and commas are left, are as long as a shape says."""
    expected = b""
    for size in reversed(shape):
        if len(expected) * size > len(lists):
            return False
        expected = b"[" + (expected + b",") * (size - 1) + expected + b"]"
    return lists == expected


def _read_slice(
    text: bytes, decoder: msgspec.json.Decoder[Any], depth: int, where: str
) -> list[Any]:
    try:
        elements: Any = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{where}data: {error}") from None
    for _ in range(depth - 1):
        elements = chain.from_iterable(elements)
    return list(elements)


def numbers_of(numbers: list[Any], dtype: np.dtype[Any], datatype: str, where: str) -> NDArray[Any]:
    """Make an array of numbers. Raises BadRequestError if one is out of the datatype's range."""
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
    # Python refuses to write a number of thousands of digits, which is unreadable anyway.
    if isinstance(number, int) and number.bit_length() > 80:
        return f"a number of {number.bit_length()} bits"
    return f"{number}"


def _slices(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Cut lists of lists of numbers or strings at commas between them.

    Returns each slice with the brackets that stand open around it, and the brackets and commas of its own.
    """
    has_strings = b'"' in text
    # The same number of bytes, in which each quotation mark begins or ends a string.
    marked = text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if has_strings else text
    begin = depth = 0
    while begin < len(text):
        least = begin + _SLICE_BYTES
        if has_strings and (mark := marked.find(b'"', least)) >= 0:
            begins = marked.count(b'"', begin, mark) % 2 == 0
            least = max(marked.find(b'"', mark + 1), mark) if begins else mark
        end = marked.find(b",", least)
        if end < 0:
            end = len(text)
        lists = b"".join(marked[begin : end + 1].split(b'"')[::2]).translate(None, _NOT_LISTS)
        depth_behind = depth + lists.count(b"[") - lists.count(b"]")
        yield b"[" * depth + text[begin:end] + b"]" * depth_behind, lists
        begin, depth = end + 1, depth_behind


@functools.cache
def _data_decoder(kind: type, depth: int) -> msgspec.json.Decoder[Any]:
    for _ in range(depth):
        kind = list[kind]  # type: ignore[valid-type]
    return msgspec.json.Decoder(kind)


def write_data(name: str, datatype: str, raw: Buffer) -> list[Any]:
    """Give a tensor's elements as JSON has them. Raises BadRequestError if they are bytes that are not UTF-8."""
    if datatype != "BYTES":
        return elements_of(datatype, raw).tolist()  # type: ignore[no-any-return]
    try:
        return [text.decode() for text in cut_texts(raw)]
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"output {quote(name)}: found bytes that are not UTF-8 ({error.reason}), which JSON cannot have; ask for"
            f" them with {_BINARY}"
        ) from None
