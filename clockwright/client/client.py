"""Send requests to a Clockwright server from Python: numpy in, numpy out, and exceptions with a reason.

Any KServe or Triton gRPC client works as well; this one knows the SLO, the reasons of refusals and
the explanation, and needs no protobuf from its user.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from typing_extensions import Unpack

from clockwright.client.arguments import check, check_flag, check_text, number, whole_number
from clockwright.client.channel import Access, check_dialled
from clockwright.client.sequences import AsyncStepSequence, SequenceStep, StepSequence
from clockwright.client.statuses import error_in_stream, error_of
from clockwright.elements import array_of
from clockwright.errors import BadRequestError, ConfigError, ProtocolError
from clockwright.foreign import printable
from clockwright.units import NS_PER_MS, SLO_NS_MAX
from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import Buffer, join_bulk, split_bulk
from clockwright.wire.tensors import DATATYPES, TensorSpec
from clockwright.wire.texts import join_texts

_PREFIX = "/inference.GRPCInferenceService/"
_STREAM, _STREAM_RESPONSE_FIELD = "ModelStreamInfer", 2
_FEEDBACK = "/clockwright.v1.ControlService/Feedback"

# An answer or a refusal arrives by the end of the SLO. The server is assumed dead this much later.
_GRACE_S = 10.0

_DATATYPES = {each.numpy_name: each.name for each in DATATYPES.values()}

Array = np.ndarray[Any, np.dtype[Any]]
Inputs = Mapping[str, Array] | Array


@dataclass(frozen=True, slots=True, eq=False)
class InferResult:
    """A model's answer, or an application's."""

    model_name: str
    model_version: str
    #: Arrays by output name; shape (rows, ...), read-only. Texts (datatype BYTES) are `str` objects.
    outputs: dict[str, Array]
    #: A model says here how long each step took, in microseconds, if `explain` asks for it. An application
    #: always says: `query_id`, `confidence` and `weight_mass` (of several rows, one for each), the `models`
    #: that answered, those `missing`, whether the answer is the `default`, and then the `default_reason`
    #: and, if only some of several rows are, the `default_rows`. A pipeline says which stage it was `ended_by`, if one
    #: has ended it early, and with `explain` when each began and where its time went. Values are bool, int, float,
    #: str or, for one number per row, a tuple of floats.
    explanation: dict[str, Any]

    @property
    def query_id(self) -> str:
        """Id by which feedback is given; empty: a model answered, not an application."""
        return str(self.explanation.get("query_id", ""))


class StreamOptions(TypedDict, total=False):
    """What a request with several answers says besides its inputs; what is missing is as for `Client.infer`."""

    #: Each answer comes so many milliseconds after the one before, or is refused; None: the model's default.
    slo_ms: float | None
    #: The same of the first answer alone, and of each next one.
    ttft_ms: float | None
    tpot_ms: float | None
    #: Most answers; None: as many as the model allows.
    max_steps: int | None
    #: How tokens are chosen, where the model gives them: 0 or None: the most likely one follows.
    temperature: float | None
    #: The same choice with the same seed; None: another each time.
    seed: int | None
    tenant: str
    context: str
    version: str
    weight: float | None
    priority: int | None
    attempt: int | None


@dataclass(frozen=True, slots=True)
class Feedback:
    """A verdict on an application's answer: either the true label, or how good the answer was.

    Of an answer with several rows, each row has an id: `f"{result.query_id}/{row}"`.
    """

    query_id: str
    label: int | str | None = None
    #: How good the answer was, from 0 to 1.
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    """The outcome of one feedback."""

    query_id: str
    #: APPLIED; UNINFORMATIVE: it says nothing about any model; DUPLICATE: it was given before;
    #: UNKNOWN: no such answer, or too long ago; FAILED: it may be given again. Only the first has changed
    #: anything.
    status: str
    #: Loss, 0 to 1, of each model about which the feedback says something.
    losses: dict[str, float]
    #: Weights of the application's models afterwards, for the query's context.
    weights: dict[str, float]
    #: Why it has FAILED; empty otherwise.
    message: str = ""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One line of the server's list of models."""

    name: str
    version: str
    #: LOADING, READY or UNAVAILABLE.
    state: str
    #: Why it is not READY.
    reason: str


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's version, inputs and outputs."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Client:
    """A connection to one server, for threads.

    All methods raise ConfigError when the server cannot be reached, DeniedError when it does not let the
    caller do that, and BadRequestError when an argument is invalid, before anything is sent.
    """

    def __init__(self, address: str, access: Access | None = None) -> None:
        """Connect to `address` (HOST:PORT) when first needed, with the credentials and TLS of `access`."""
        check_dialled(address, access)
        self._address = address
        self._access = access or Access()
        self._channel = self._access.channel(address)
        self._input_names: dict[str, str] = {}

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        slo_ms: float | None = None,
        decide_within_ms: float | None = None,
        weight: float | None = None,
        work_ahead_ms: float | None = None,
        explain: bool = False,
        context: str = "",
        tenant: str = "",
        version: str = "",
        priority: int | None = None,
        attempt: int | None = None,
        step: SequenceStep | None = None,
    ) -> InferResult:
        """Run a model on one request of one or more rows.

        Args:
            model: its name.
            inputs: arrays of shape (rows, ...) by input name, or the array of the only input. Text is an array of
                `str` or `bytes`.
            slo_ms: answer within this many milliseconds, or refuse; None: the model's default.
            decide_within_ms: refuse or promise within this many milliseconds, at a price in answers; None: decide
                when it is certain.
            weight: what an answer is worth, where that to a usual request is worth 1; more than the tenant's quota
                allows is refused.
            work_ahead_ms: what the pipeline of this request needs after its answer: the answer comes so much
                earlier than `slo_ms` says, or is refused, and requests with less work ahead go first.
            explain: also say where the time went.
            context: the user, session or tenant whose choice of models an application learns.
            tenant: the tenant whose share of the GPUs the request uses when they are short. With keys it must
                be the key's tenant.
            version: a version or alias; empty: the server chooses one.
            priority: the level of priority, if the model has levels: 1 is the highest, 0 the default.
            attempt: how often the request was tried before: a retry is refused before a first attempt.
            step: the request is a step of a sequence (`sequence` is simpler): its inputs lack the state, which the
                server keeps. One row.

        Raises:
            RefusedError: there is no answer in time; carries the reason.
            UnknownModelError: the server has no such model.
            BadRequestError: the request does not fit the model.
        """
        check_text("model", model)
        slo_ms = _slo_ms(slo_ms)
        if isinstance(inputs, np.ndarray):
            inputs = {self._only_input(model): inputs}
        request = _encode_request(
            model,
            inputs,
            slo_ms=slo_ms,
            decide_within_ms=decide_within_ms,
            weight=weight,
            work_ahead_ms=work_ahead_ms,
            explain=explain,
            context=context,
            tenant=tenant,
            version=version,
            priority=priority,
            attempt=attempt,
            step=step,
        )
        return _decode_response(self._call("ModelInfer", request, timeout_s=_timeout_s(slo_ms)))

    def sequence(
        self,
        model: str,
        *,
        every_ms: float | None = None,
        **said: Any,  # noqa: ANN401
    ) -> StepSequence[InferResult]:
        """Begin a sequence of steps with the first `step`.

        Args:
            model: a model with state.
            every_ms: so much time lies between two steps: the first one is refused if the server has no time for all.
            said: of each step, as `infer` takes it: `slo_ms`, `tenant`, ...
        """
        return StepSequence(self.infer, model, every_ms, **said)

    def stream(
        self, model: str, inputs: Inputs, **said: Unpack[StreamOptions]
    ) -> Generator[InferResult, None, None]:
        """Run a model that answers several times, and give each answer as it comes.

        Leaving the loop, or closing the iterator, cancels the rest at the server.

        Args:
            model: its name.
            inputs: as `infer`.
            said: see `StreamOptions`.

        Raises:
            RefusedError: an answer is not in time, and none follows; carries the reason.
            BadRequestError, UnknownModelError: as `infer`.
        """
        if isinstance(inputs, np.ndarray):
            inputs = {self._only_input(model): inputs}
        request = _stream_request(model, inputs, **said)
        call = self._channel.stream_stream(_PREFIX + _STREAM)(
            iter((request,)), metadata=self._access.metadata
        )
        try:
            for message in call:
                yield _decode_streamed(message)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        finally:
            call.cancel()

    def is_ready(self) -> bool:
        """Whether the server answers and every model is ready or refused."""
        try:
            return _ready(self._call("ServerReady", b""))
        except ConfigError:
            return False

    def server_name(self) -> str:
        """Ask what the server calls itself: "clockwright", or another of the protocol's."""
        return _server_name(self._call("ServerMetadata", b""))

    def models(self) -> list[ModelStatus]:
        """List all models, by name."""
        return _model_list(self._call("RepositoryIndex", b""))

    def load_model(self, model: str) -> None:
        """Load or reload a model of the server's models directory. Returns once it is ready.

        Raises:
            UnknownModelError: the directory has no such model.
            ModelError: it cannot be served; nothing has changed.
        """
        self._call("RepositoryModelLoad", _load_request(model))

    def metadata(self, model: str) -> ModelMetadata:
        """Describe a model's inputs and outputs.

        Raises:
            UnknownModelError: the server has no such model.
            RefusedError: no worker has prepared it yet.
        """
        return _metadata(self._call("ModelMetadata", _metadata_request(model)))

    def feedback(self, *items: Feedback) -> list[FeedbackOutcome]:
        """Send feedback on answers to applications, in order.

        Raises:
            BadRequestError: an item has neither a label nor a reward, or both; nothing has changed.
        """
        return _outcomes(self._call(_FEEDBACK, _feedback_request(items)))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _only_input(self, model: str) -> str:
        if model not in self._input_names:
            self._input_names[model] = _only_input(self.metadata(model))
        return self._input_names[model]

    def _call(self, method: str, request: bytes, *, timeout_s: float | None = None) -> bytes:
        try:
            response: bytes = self._channel.unary_unary(
                method if method.startswith("/") else _PREFIX + method
            )(request, timeout=timeout_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        return response

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """A connection to one server, for asyncio; the methods are those of `Client`.

    A call whose task is cancelled is withdrawn at the server.
    """

    def __init__(self, address: str, access: Access | None = None) -> None:
        """Do what `Client` does; this needs a running event loop."""
        check_dialled(address, access)
        self._address = address
        self._access = access or Access()
        self._channel = self._access.async_channel(address)
        self._input_names: dict[str, str] = {}

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        slo_ms: float | None = None,
        decide_within_ms: float | None = None,
        weight: float | None = None,
        work_ahead_ms: float | None = None,
        explain: bool = False,
        context: str = "",
        tenant: str = "",
        version: str = "",
        priority: int | None = None,
        attempt: int | None = None,
        step: SequenceStep | None = None,
    ) -> InferResult:
        """Run a model on one request; see `Client.infer`."""
        check_text("model", model)
        slo_ms = _slo_ms(slo_ms)
        if isinstance(inputs, np.ndarray):
            inputs = {await self._only_input(model): inputs}
        request = _encode_request(
            model,
            inputs,
            slo_ms=slo_ms,
            decide_within_ms=decide_within_ms,
            weight=weight,
            work_ahead_ms=work_ahead_ms,
            explain=explain,
            context=context,
            tenant=tenant,
            version=version,
            priority=priority,
            attempt=attempt,
            step=step,
        )
        return _decode_response(
            await self._call("ModelInfer", request, timeout_s=_timeout_s(slo_ms))
        )

    def sequence(
        self,
        model: str,
        *,
        every_ms: float | None = None,
        **said: Any,  # noqa: ANN401
    ) -> AsyncStepSequence[InferResult]:
        """Begin a sequence of steps; see `Client.sequence`."""
        return AsyncStepSequence(self.infer, model, every_ms, **said)

    async def stream(
        self, model: str, inputs: Inputs, **said: Unpack[StreamOptions]
    ) -> AsyncGenerator[InferResult, None]:
        """Run a model that answers several times; the arguments are those of `Client.stream`."""
        if isinstance(inputs, np.ndarray):
            inputs = {await self._only_input(model): inputs}
        request = _stream_request(model, inputs, **said)
        call = self._channel.stream_stream(_PREFIX + _STREAM)(
            iter((request,)), metadata=self._access.metadata
        )
        try:
            async for message in call:
                yield _decode_streamed(message)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        finally:
            call.cancel()

    async def is_ready(self) -> bool:
        """Whether the server answers and every model is ready or refused."""
        try:
            return _ready(await self._call("ServerReady", b""))
        except ConfigError:
            return False

    async def server_name(self) -> str:
        """Ask what the server calls itself; see `Client.server_name`."""
        return _server_name(await self._call("ServerMetadata", b""))

    async def models(self) -> list[ModelStatus]:
        """List all models, by name."""
        return _model_list(await self._call("RepositoryIndex", b""))

    async def load_model(self, model: str) -> None:
        """Load or reload a model; see `Client.load_model`."""
        await self._call("RepositoryModelLoad", _load_request(model))

    async def metadata(self, model: str) -> ModelMetadata:
        """Describe a model's inputs and outputs; see `Client.metadata`."""
        return _metadata(await self._call("ModelMetadata", _metadata_request(model)))

    async def feedback(self, *items: Feedback) -> list[FeedbackOutcome]:
        """Send feedback on answers to applications; see `Client.feedback`."""
        return _outcomes(await self._call(_FEEDBACK, _feedback_request(items)))

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _only_input(self, model: str) -> str:
        if model not in self._input_names:
            self._input_names[model] = _only_input(await self.metadata(model))
        return self._input_names[model]

    async def _call(self, method: str, request: bytes, *, timeout_s: float | None = None) -> bytes:
        try:
            response: bytes = await self._channel.unary_unary(
                method if method.startswith("/") else _PREFIX + method
            )(request, timeout=timeout_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        return response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _slo_ms(slo_ms: object) -> float | None:
    return None if slo_ms is None else number("slo_ms", slo_ms, "a number of milliseconds")


def _timeout_s(slo_ms: float | None) -> float | None:
    # Without an SLO there is no RPC deadline either: the server would take it for an SLO. An SLO that is too
    # long, or no number, is left to the server, which says so: gRPC takes a deadline that it cannot count for over.
    if slo_ms is None or not slo_ms <= SLO_NS_MAX / NS_PER_MS:
        return None
    return max(slo_ms, 0.0) / 1000 + _GRACE_S


def _encode_request(
    model: str,
    inputs: Mapping[str, Array],
    *,
    slo_ms: float | None,
    decide_within_ms: float | None = None,
    weight: float | None = None,
    work_ahead_ms: float | None = None,
    explain: bool = False,
    context: str = "",
    tenant: str = "",
    version: str = "",
    priority: int | None = None,
    attempt: int | None = None,
    step: SequenceStep | None = None,
    several: Mapping[str, pb.InferParameter] | None = None,
) -> bytes:
    parameters: dict[str, pb.InferParameter] = {**(several or {})}
    if slo_ms is not None:
        parameters["slo_ms"] = pb.InferParameter(double_param=slo_ms)
    for name, value, unit in (
        ("decide_within_ms", decide_within_ms, "a number of milliseconds"),
        ("weight", weight, "a number"),
        ("work_ahead_ms", work_ahead_ms, "a number of milliseconds"),
    ):
        if value is not None:
            parameters[name] = pb.InferParameter(double_param=number(name, value, unit))
    for name, count in (("priority", priority), ("attempt", attempt)):
        if count is not None:
            whole = whole_number(name, count, "a whole number, 0 or more")
            parameters[name] = pb.InferParameter(int64_param=whole)
    check_text("version", version)
    check_flag("explain", explain)
    if explain:
        parameters["explain"] = pb.InferParameter(bool_param=True)
    for name, text in (("context", context), ("tenant", tenant)):
        check_text(name, text)
        if text:
            parameters[name] = pb.InferParameter(string_param=text)
    if step is not None:
        check("step", step, SequenceStep, "a SequenceStep")
        parameters |= step.parameters()
    tensors: list[pb.ModelInferRequest.InferInputTensor] = []
    buffers: list[Buffer] = []
    if not isinstance(inputs, Mapping):
        raise BadRequestError(
            f"inputs: found {type(inputs).__name__}, expected an array, or arrays by input name"
        )
    for name, found in inputs.items():
        check_text("name of an input", name)
        try:
            array = np.asarray(found)
        except (TypeError, ValueError) as error:
            raise BadRequestError(f"input {name!r}: found no array: {error}") from None
        is_text = array.dtype.kind in "OSU"
        datatype = "BYTES" if is_text else _DATATYPES.get(array.dtype.name)
        if datatype is None:
            raise BadRequestError(
                f"input {name!r}: found dtype {array.dtype}, expected text or one of {', '.join(_DATATYPES)}"
            )
        tensors.append(
            pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=array.shape)
        )
        if is_text:
            buffers.append(_encode_texts(name, array))
            continue
        # This copies only an array that is not little-endian and row-major already, as the wire wants it.
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
        buffers.append(flat.view(np.uint8).data)
    header = pb.ModelInferRequest(
        model_name=model, model_version=version, inputs=tensors, parameters=parameters
    )
    return join_bulk(header.SerializeToString(), 7, buffers)


def _stream_request(
    model: str,
    inputs: Mapping[str, Array],
    *,
    slo_ms: float | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    max_steps: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    **said: Any,  # noqa: ANN401  as `infer` has it
) -> bytes:
    check_text("model", model)
    several = {
        name: pb.InferParameter(double_param=number(name, value, "a number"))
        for name, value in (
            ("ttft_ms", ttft_ms),
            ("tpot_ms", tpot_ms),
            ("temperature", temperature),
        )
        if value is not None
    }
    for name, whole in (("max_steps", max_steps), ("seed", seed)):
        if whole is not None:
            found = whole_number(name, whole, "a whole number")
            several[name] = pb.InferParameter(int64_param=found)
    slo_ms = _slo_ms(slo_ms)
    return _encode_request(model, inputs, slo_ms=slo_ms, several=several, **said)


def _encode_texts(name: str, array: Array) -> bytes:
    elements = array.reshape(-1).tolist()
    for element in elements:
        if not isinstance(element, str | bytes):
            raise BadRequestError(
                f"input {name!r}: found an element of type {type(element).__name__}, expected str or bytes"
            )
    try:
        return join_texts(elements)
    except UnicodeEncodeError as error:
        raise BadRequestError(f"input {name!r}: found text that is no UTF-8: {error}") from None


# KServe's parameters have no type for these numbers, so they travel as texts.
_FRACTIONS = {"confidence", "weight_mass"}


def _decode_response(data: Buffer) -> InferResult:
    """Read an answer.

    Raises:
        ProtocolError: the answer is malformed.
    """
    try:
        return _read_response(data)
    except (AttributeError, DecodeError, KeyError, TypeError, ValueError) as error:
        what = printable(f"{type(error).__name__}: {error}")
        raise ProtocolError(f"found an answer that violates the protocol: {what}") from None


def _read_response(data: Buffer) -> InferResult:
    header, raw = split_bulk(data, 6)
    response = pb.ModelInferResponse.FromString(header)
    outputs: dict[str, Array] = {}
    for tensor, buffer in zip(response.outputs, raw, strict=True):
        array = array_of(tensor.datatype, buffer, tensor.shape)
        array.flags.writeable = False
        outputs[tensor.name] = array
    explanation: dict[str, Any] = {}
    for name in sorted(response.parameters):
        parameter = response.parameters[name]
        explanation[name] = getattr(parameter, parameter.WhichOneof("parameter_choice") or "")
    for name in _FRACTIONS & explanation.keys():
        numbers = tuple(map(float, str(explanation[name]).split(",")))
        explanation[name] = numbers[0] if len(numbers) == 1 else numbers
    return InferResult(response.model_name, response.model_version, outputs, explanation)


def _decode_streamed(data: bytes) -> InferResult:
    """Read a message of a stream.

    Raises:
        ProtocolError: it is malformed.
        ClockwrightError: it says why there is no answer.
    """
    try:
        header, raw = split_bulk(data, _STREAM_RESPONSE_FIELD)
        told = pb.ModelStreamInferResponse.FromString(header)
    except (DecodeError, ProtocolError) as error:
        raise ProtocolError(f"found an answer that violates the protocol: {error}") from None
    if told.error_message:
        response = pb.ModelInferResponse.FromString(bytes(raw[0]) if raw else b"")
        raise error_in_stream(told.error_message, response.parameters["status"].string_param)
    return _decode_response(raw[0] if raw else b"")


def _only_input(metadata: ModelMetadata) -> str:
    if len(metadata.inputs) != 1:
        names = ", ".join(repr(spec.name) for spec in metadata.inputs)
        raise BadRequestError(
            f"model {metadata.name}: found one array, expected arrays by name: {names}"
        )
    return metadata.inputs[0].name


def _ready(data: bytes) -> bool:
    return pb.ServerReadyResponse.FromString(data).ready


def _server_name(data: bytes) -> str:
    return pb.ServerMetadataResponse.FromString(data).name


def _model_list(data: bytes) -> list[ModelStatus]:
    return [
        ModelStatus(model.name, model.version, model.state, model.reason)
        for model in pb.RepositoryIndexResponse.FromString(data).models
    ]


def _metadata_request(model: str) -> bytes:
    check_text("model", model)
    return pb.ModelMetadataRequest(name=model).SerializeToString()


def _load_request(model: str) -> bytes:
    check_text("model", model)
    return pb.RepositoryModelLoadRequest(model_name=model).SerializeToString()


def _metadata(data: bytes) -> ModelMetadata:
    response = pb.ModelMetadataResponse.FromString(data)
    inputs, outputs = (
        tuple(TensorSpec.of_shape(tensor.name, tensor.datatype, tensor.shape) for tensor in side)
        for side in (response.inputs, response.outputs)
    )
    return ModelMetadata(response.name, next(reversed(response.versions), ""), inputs, outputs)


def _feedback_request(items: Sequence[Feedback]) -> bytes:
    request = control_pb2.FeedbackRequest()
    for item in items:
        check("items", item, Feedback, "Feedback, each an argument of its own")
        check_text("query_id", item.query_id)
        if (item.label is None) == (item.reward is None):
            raise BadRequestError(
                f"feedback for {item.query_id!r}: found label {item.label} and reward {item.reward}, expected"
                " one of them"
            )
        if isinstance(item.label, str):
            check_text("label", item.label)
            request.items.add(query_id=item.query_id, text=item.label)
        elif item.label is not None:
            label = whole_number("label", item.label, "a text, or a whole number of 64 bits")
            request.items.add(query_id=item.query_id, label=label)
        else:
            reward = number("reward", item.reward, "a number from 0 to 1")
            request.items.add(query_id=item.query_id, reward=reward)
    return request.SerializeToString()


def _outcomes(data: bytes) -> list[FeedbackOutcome]:
    return [
        FeedbackOutcome(row.query_id, row.status, dict(row.losses), dict(row.weights), row.message)
        for row in control_pb2.FeedbackResponse.FromString(data).outcomes
    ]
