"""Triton's configuration of a model: what a `config.pbtxt`, or the `config` of a load, means here.

It says two kinds of things. Settings become those of `config.toml`. What it claims of the model's tensors is compared with
what a worker finds in the file (`TritonConfig.checked`). All else is ignored, by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format, text_format

from clockwright.errors import ModelError
from clockwright.units import DEFAULT_BATCH_SIZES, PARTS_MAX
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.tensors import TensorSpec
from controller.models.stepped import settings_of_triton

PBTXT = "config.pbtxt"
#: What Triton's configurations call the runtime of an ONNX model.
BACKEND, PLATFORM = "onnxruntime", "onnxruntime_onnx"
#: And several models that are asked together.
ENSEMBLE = "ensemble"
MODEL_FILE = "model.onnx"

# Keys of config.toml that `parameters` may have, as TOML writes their values.
_PARAMETERS = ("slo_ms", "batch_sizes", "profile", "cache")


@dataclass(frozen=True, slots=True)
class TensorClaim:
    """What a configuration says of an input or output."""

    name: str
    #: In the protocol's words; empty: it says none.
    datatype: str
    #: The whole shape that clients see, and the one that the model has; -1: any size.
    shape: tuple[int, ...]
    model_shape: tuple[int, ...]
    #: The order of an image's dimensions, for clients that ask; none of an output.
    format: pb.ModelInput.Format = pb.ModelInput.FORMAT_NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """What a configuration says that means something here."""

    #: By key of `config.toml`.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Sizes of dimensions by place: `INPUT[INDEX]`.
    dimensions: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[TensorClaim, ...] = ()
    outputs: tuple[TensorClaim, ...] = ()
    #: Paths of fields that are not used.
    ignored: tuple[str, ...] = ()
    #: Inputs that are not among `inputs` because the server fills them in.
    filled_in: frozenset[str] = frozenset()

    def checked(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, one_row: bool = False
    ) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Compare a model's inputs and outputs with what was claimed. Returns both as clients see them.

        With `one_row` each run has one row. Raises ModelError that names every difference.
        """
        faults: list[str] = []
        seen = (
            _checked("input", inputs, self.inputs, faults, one_row=one_row),
            _checked("output", outputs, self.outputs, faults, one_row=one_row),
        )
        said = self.filled_in | {claim.name for claim in self.inputs}
        unsaid = [spec.name for spec in inputs if spec.name not in said]
        if self.inputs and unsaid:
            faults.append(f"found no input {', '.join(unsaid)}, which the model has")
        if faults:
            raise ModelError(f"{PBTXT}: {'; '.join(faults)}")
        return seen


def read_triton_config(text: str, name: str, *, is_code: bool = False) -> TritonConfig:
    """Read a configuration, in protobuf's text format or as JSON; empty: there is no such file.

    With `is_code` the model is no ONNX file. Raises ModelError that names what cannot be.
    """
    ignored: list[str] = []
    try:
        message = _parse(text, ignored)
    except (ValueError, text_format.ParseError, json_format.ParseError, RecursionError) as error:
        raise ModelError(f"{PBTXT}: {error}") from None
    faults: list[str] = []
    is_ensemble = message.HasField("ensemble_scheduling")
    for key, found, expected in (
        ("name", message.name, name),
        ("platform", message.platform, ENSEMBLE if is_ensemble else PLATFORM),
        ("backend", message.backend, BACKEND),
        ("default_model_filename", message.default_model_filename, MODEL_FILE),
    ):
        if found and found != expected and (key == "name" or not is_code):
            faults.append(f"{key} is {found!r}, expected {expected!r} or none")
    claims = [
        [_claim(message, each, faults) for each in tensors]
        for tensors in (message.input, message.output)
    ]
    settings = _settings(message, ignored, faults)
    batching, filled_in = message.sequence_batching, frozenset[str]()
    if message.HasField("sequence_batching"):
        try:
            settings |= settings_of_triton(batching, pb.ModelSequenceBatching.Control.Kind.Name)
        except ModelError as error:
            faults.append(str(error))
        filled_in = frozenset(each.name for each in batching.control_input)
        filled_in |= {each.input_name for each in batching.state}
        has_dims = [each for each in batching.state if each.dims]
        for claimed, names in zip(claims, ("input_name", "output_name"), strict=True):
            for each in has_dims:
                tensor = pb.ModelInput(
                    name=getattr(each, names), data_type=each.data_type, dims=each.dims
                )
                claimed.append(_claim(message, tensor, faults))
    if is_ensemble:
        is_code = True
        settings["pipeline"] = _pipeline(message, faults)
        for key in settings.keys() & {"batch_sizes", "cache"}:  # they are its models' own
            del settings[key]
        if settings.pop("versions", None):
            ignored.append("version_policy (a pipeline has one version)")
    if labels := {each.name: each.label_filename for each in message.output if each.label_filename}:
        settings["labels"] = labels
    if faults:
        raise ModelError(f"{PBTXT}: {'; '.join(faults)}")
    inputs, outputs = map(tuple, claims)
    has_batch = message.max_batch_size > 0
    return TritonConfig(
        settings=settings,
        dimensions={}
        if is_code
        else {
            f"{claim.name}[{index}]": size
            for claim in inputs
            for index, size in enumerate(claim.model_shape)
            if size > 0 and (index or not has_batch)
        },
        inputs=inputs,
        outputs=outputs,
        ignored=tuple(ignored),
        filled_in=filled_in,
    )


#: A text or a comment, which stays as it is; or a name, and the list directly behind it if there is one. What was looked
#: at is part of what is found, so that none of it is looked at again.
_TOKEN = re.compile(
    r"""(?:"(?:\\.|[^"\\\n])*+"?|'(?:\\.|[^'\\\n])*+'?|#[^\n]*)|([A-Za-z_]\w*+)(\s*+\[)?"""
)


def data_type(datatype: str) -> int:
    """A datatype of the protocol as configurations name it."""
    return pb.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")


def _parse(text: str, ignored: list[str]) -> pb.ModelConfig:
    message = pb.ModelConfig()
    if text.lstrip().startswith("{"):
        fields = _known(json.loads(text), message.DESCRIPTOR, "", ignored)
        json_format.ParseDict(fields, message)
    else:
        # protobuf skips a list of messages that it does not know only behind a colon, which people leave out.
        text = _TOKEN.sub(lambda found: f"{found[1]}:{found[2]}" if found[2] else found[0], text)
        text_format.Parse(text, message, allow_unknown_field=True)
        ignored.extend(_unknown(text))
    return message


def _known(
    fields: Mapping[str, Any],
    kind: Any,  # noqa: ANN401  one of two classes of descriptors
    path: str,
    ignored: list[str],
) -> dict[str, Any]:
    """Leave out what a message does not have, in messages inside it too."""
    kept = {}
    for name, value in fields.items():
        found = kind.fields_by_name.get(name)
        if found is None:
            ignored.append(path + name)
            continue
        inner = found.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            inside = f"{path}{name}."
            if isinstance(value, dict):
                value = _known(value, inner, inside, ignored)
            elif isinstance(value, list):
                value = [
                    _known(each, inner, inside, ignored) if isinstance(each, dict) else each
                    for each in value
                ]
        kept[name] = value
    return kept


def _unknown(text: str) -> list[str]:
    """Paths of the outermost fields in a text that the messages do not have, each once. The text has been parsed."""
    found: dict[str, None] = {}
    # Messages around the token: kind, None if it is unknown; path; and the field that its text is at.
    around: list[tuple[Any, str]] = [(pb.ModelConfig.DESCRIPTOR, "")]
    names: list[Any] = [None]
    tokens = text_format.Tokenizer(text.splitlines())
    while not tokens.AtEnd():
        token = tokens.token
        tokens.NextToken()
        kind, path = around[-1]
        if token in ("{", "<"):
            known = names[-1]
            around.append((known.message_type, f"{path}{known.name}.") if known else (None, ""))
            names.append(None)
        elif token in ("}", ">"):
            around.pop()
            names.pop()
        elif token.isidentifier() and tokens.token in (":", "{", "<", "["):
            names[-1] = kind.fields_by_name.get(token) if kind is not None else None
            if kind is not None and names[-1] is None:
                found[path + token] = None
    return list(found)


def _settings(message: pb.ModelConfig, ignored: list[str], faults: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if message.max_batch_size < 0:
        faults.append(f"max_batch_size is {message.max_batch_size}, expected 0 or more")
    batching = message.dynamic_batching
    if most := max(message.max_batch_size, 0):
        settings["max_rows"] = most
        preferred = list(batching.preferred_batch_size)
        if wrong := [size for size in preferred if not 1 <= size <= most]:
            faults.append(f"preferred_batch_size has {wrong[0]}, expected 1 to {most}")
        settings["batch_sizes"] = _batch_sizes(most, preferred)
    elif batching.preferred_batch_size:
        ignored.append("dynamic_batching.preferred_batch_size (without max_batch_size)")
    if timeout_us := batching.default_queue_policy.default_timeout_microseconds:
        settings["slo_ms"] = timeout_us / 1000
    if batching.priority_levels:
        settings["priority"] = {
            "levels": batching.priority_levels,
            "default": batching.default_priority_level,
        }
    if message.response_cache.enable:
        settings["cache"] = True
    policy = message.version_policy
    if policy.HasField("all"):
        settings["versions"] = {"serve": "all"}
    elif policy.specific.versions:
        settings["versions"] = {"serve": list(policy.specific.versions)}
    elif policy.latest.num_versions > 1:
        settings["versions"] = {"serve": {"latest": policy.latest.num_versions}}
    if message.model_transaction_policy.decoupled:
        ignored.append("model_transaction_policy.decoupled ([stream] in config.toml says it)")
    if any(group.count > 1 for group in message.instance_group):
        ignored.append("instance_group.count (the scheduler loads as many copies as help)")
    for key, value in message.parameters.items():
        if key not in _PARAMETERS:
            ignored.append(f"parameters.{key}")
            continue
        try:
            settings[key] = tomllib.loads(f"value = {value.string_value}")["value"]
        except ValueError:
            faults.append(
                f"parameter {key} is {value.string_value!r}, expected a value as config.toml has it"
            )
    return settings


def _pipeline(message: pb.ModelConfig, faults: list[str]) -> dict[str, Any]:
    """Read an ensemble as table `[pipeline]` of config.toml has it. There tensors are named by who gives them."""
    steps = message.ensemble_scheduling.step
    names: list[str] = []
    for step in steps:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", step.model_name) or "step"
        names.append(f"{name}-{len(names)}" if name in names else name)
    given = {each.name: each.name for each in message.input}
    for name, step in zip(names, steps, strict=True):
        for output, tensor in sorted(step.output_map.items()):
            if tensor in given:
                faults.append(
                    f"ensemble_scheduling: tensor {tensor!r} comes from {given[tensor]} and from {name}.{output},"
                    " expected it from one"
                )
            given[tensor] = f"{name}.{output}"

    def source(of: str, tensor: str) -> str:
        if tensor not in given:
            faults.append(
                f"ensemble_scheduling: {of} is tensor {tensor!r}, expected one of {', '.join(given)}"
            )
        return given.get(tensor, tensor)

    return {
        "inputs": [each.name for each in message.input],
        "outputs": {each.name: source(f"output {each.name}", each.name) for each in message.output},
        "stages": [
            {
                "name": name,
                "model": step.model_name,
                "version": "" if step.model_version <= 0 else str(step.model_version),
                "inputs": {
                    key: source(f"input {key} of {name}", tensor)
                    for key, tensor in sorted(step.input_map.items())
                },
            }
            for name, step in zip(names, steps, strict=True)
        ],
    }


def _batch_sizes(most: int, preferred: Sequence[int]) -> list[int]:
    """Sizes of batches, of which a few make a request of `most` rows."""
    usual = [*filter(lambda size: size <= most, DEFAULT_BATCH_SIZES)]
    sizes = {1, *(preferred or (*usual, min(most, DEFAULT_BATCH_SIZES[-1])))}
    while (largest := max(sizes)) * PARTS_MAX < most:
        sizes.add(2 * largest)
    return sorted(sizes)


def _claim(
    message: pb.ModelConfig, tensor: pb.ModelInput | pb.ModelOutput, faults: list[str]
) -> TensorClaim:
    rows = (-1,) if message.max_batch_size > 0 else ()
    shape = model_shape = tuple(tensor.dims)
    if tensor.HasField("reshape"):
        model_shape = tuple(tensor.reshape.shape)
        if min((*shape, *model_shape), default=0) < 0 or math.prod(shape) != math.prod(model_shape):
            faults.append(
                f"{tensor.name}: dims are {list(shape)} and reshape is {list(model_shape)}, expected sizes with as"
                " many elements in both"
            )
    datatype = "BYTES" if tensor.data_type == pb.TYPE_STRING else ""
    if tensor.data_type != pb.TYPE_INVALID:
        datatype = datatype or pb.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return TensorClaim(
        tensor.name,
        datatype,
        (*rows, *shape),
        (*rows, *model_shape),
        tensor.format if isinstance(tensor, pb.ModelInput) else pb.ModelInput.FORMAT_NONE,
    )


def _checked(
    role: str,
    specs: Sequence[TensorSpec],
    claims: Sequence[TensorClaim],
    faults: list[str],
    *,
    one_row: bool,
) -> tuple[TensorSpec, ...]:
    found = {spec.name: spec for spec in specs}
    for claim in claims:
        spec = found.get(claim.name)
        if spec is None:
            names = ", ".join(each.name for each in specs)
            faults.append(f"found {role} {claim.name!r}, expected one of the model's: {names}")
            continue
        if claim.datatype and claim.datatype != spec.datatype:
            faults.append(
                f"{role} {claim.name!r}: found data_type {claim.datatype}, expected the model's {spec.datatype}"
            )
        shape = spec.shape(-1)
        if len(shape) != len(claim.model_shape) or not all(
            min(one, other) < 0 or one == other
            for one, other in zip(shape, claim.model_shape, strict=True)
        ):
            faults.append(
                f"{role} {claim.name!r}: found shape {list(claim.model_shape)} (dims, behind -1 for the batch if"
                f" max_batch_size is not 0), expected the model's {list(shape)}"
            )
        elif claim.shape != claim.model_shape and spec.axis is None:
            found[claim.name] = dataclasses.replace(spec, row_shape=claim.shape)
        elif claim.shape != claim.model_shape and spec.axis == 0 and claim.shape[0] < 0:
            found[claim.name] = dataclasses.replace(spec, row_shape=claim.shape[1:])
        elif claim.shape != claim.model_shape and spec.axis == 0 and one_row and spec.vary is None:
            found[claim.name] = dataclasses.replace(spec, row_shape=claim.shape, axis=None)
    return tuple(found[spec.name] for spec in specs)
