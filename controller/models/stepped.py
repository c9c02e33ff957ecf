"""Models that run in steps: which inputs are the state that the step before left, and which the server fills in itself.

A model has *state pairs*: an input whose value is an output of the step before. They are declared (`[state]` in
`config.toml`, `sequence_batching` in Triton's `config.pbtxt`), or recognised by the usual pairs of names. *Controls* are
inputs that say where in its sequence a step is; they are declared only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Final, Literal, get_args

from clockwright.errors import ModelError
from clockwright.units import NS_PER_S
from clockwright.wire.tensors import DATATYPES, TensorSpec

#: What a control says: the step is its sequence's first, or last; the row is a step (always so here); the sequence's id.
ControlKind = Literal["start", "end", "ready", "id"]
CONTROLS: Final = get_args(ControlKind)
#: A sequence is forgotten this long after its last step, unless its model says otherwise: Triton's is a second, which
#: a client that a person speaks to often exceeds.
IDLE_NS: Final = 60 * NS_PER_S
_IDLE_S_MAX = 86_400
_SEQUENCES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class StatePair:
    """An input whose value is an output of the step before. Both have one datatype and shape."""

    input: str
    output: str
    #: Their places among the model's inputs and outputs.
    input_index: int
    output_index: int
    #: The bytes of one row before the first step, without a header; empty: zeros, or empty texts.
    initial: bytes = b""


@dataclass(frozen=True, slots=True)
class Control:
    """An input that says where in its sequence a step is. The server fills it in."""

    kind: ControlKind
    input: str
    #: Its place among the model's inputs.
    index: int
    #: What stands for no and yes; unused by `id`.
    values: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class StateSetting:
    """What `[state]` says of an input."""

    output: str
    #: A file next to `config.toml`: the bytes of one row before the first step; empty: zeros.
    initial: str = ""


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """What `[sequence]` says."""

    #: A sequence is forgotten this long after its last step.
    idle_ns: int = IDLE_NS
    #: The most live sequences of the model; None: only the server's bound holds.
    most: int | None = None
    #: By control: the input, and what stands for no and yes.
    controls: Mapping[ControlKind, tuple[str, tuple[float, float]]] = field(default_factory=dict)


# --- what is declared ---------------------------------------------------------------------------


def read_state(value: object) -> dict[str, StateSetting]:
    """Read the table `[state]`: INPUT = "OUTPUT", or { output = "OUTPUT", initial = "FILE" }.

    Raises ModelError if it is something else.
    """
    expected = 'a table of INPUT = "OUTPUT" or INPUT = { output = "OUTPUT", initial = "FILE" }'
    if not isinstance(value, dict):
        raise ModelError(f"state is {value!r}, expected {expected}")
    found = {}
    for name, said in value.items():
        table = {"output": said} if isinstance(said, str) else said
        if (
            not isinstance(table, dict)
            or not table.get("output")
            or table.keys() - {"output", "initial"}
            or not all(isinstance(each, str) and each.isprintable() for each in table.values())
        ):
            raise ModelError(f"state.{name} is {said!r}, expected {expected}")
        found[name] = StateSetting(**table)
    return found


def read_sequence(value: object) -> SequenceSettings:
    """Read the table `[sequence]`: `idle_s`, `max`, and inputs by control.

    Raises ModelError if it is something else.
    """
    known = ("idle_s", "max", *CONTROLS)
    if not isinstance(value, dict) or value.keys() - set(known):
        raise ModelError(f"sequence is {value!r}, expected a table with {', '.join(known)}")
    idle_s = value.get("idle_s", IDLE_NS / NS_PER_S)
    if (
        isinstance(idle_s, bool)
        or not isinstance(idle_s, int | float)
        or not 0 < idle_s <= _IDLE_S_MAX
    ):
        raise ModelError(
            f"sequence.idle_s is {idle_s!r}, expected a positive number of seconds, {_IDLE_S_MAX} at most"
        )
    most = value.get("max")
    if most is not None and (type(most) is not int or not 1 <= most <= _SEQUENCES_MAX):
        raise ModelError(
            f"sequence.max is {most!r}, expected a whole number from 1 to {_SEQUENCES_MAX}"
        )
    controls: dict[ControlKind, tuple[str, tuple[float, float]]] = {}
    for kind in CONTROLS:
        if (said := value.get(kind)) is None:
            continue
        table = {"input": said} if isinstance(said, str) else said
        numbers = table.get("values", [0, 1]) if isinstance(table, dict) else None
        if (
            not isinstance(table, dict)
            or table.keys() - {"input", "values"}
            or not isinstance(table.get("input"), str)
            or not isinstance(numbers, list)
            or len(numbers) != 2
            or not all(isinstance(each, int | float) for each in numbers)
        ):
            raise ModelError(
                f"sequence.{kind} is {said!r}, expected the name of an input, or {{ input = NAME, values = [NO, YES] }}"
            )
        controls[kind] = table["input"], (numbers[0], numbers[1])
    return SequenceSettings(round(idle_s * NS_PER_S), most, controls)


# --- what a model has ---------------------------------------------------------------------------


def find_state(
    declared: Mapping[str, StateSetting],
    sequence: SequenceSettings | None,
    initial: Mapping[str, bytes],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> tuple[tuple[StatePair, ...], tuple[Control, ...]]:
    """Find the state pairs and controls of a model: the declared ones, or if none is, the usual ones.

    `declared` and `initial`, the bytes of files, are by input. Raises ModelError that names all that does not fit the
    model.
    """
    faults: list[str] = []
    ins = {spec.name: index for index, spec in enumerate(inputs)}
    outs = {spec.name: index for index, spec in enumerate(outputs)}
    pairs: list[StatePair] = []
    for name, said in declared.items():
        lacking = _lacking("state", "input", name, ins) + _lacking(
            "state", "output", said.output, outs
        )
        if lacking:
            faults += lacking
            continue
        into, out = inputs[ins[name]], outputs[outs[said.output]]
        words = f"state {name!r}: "
        if why := _unlike(into, out):
            faults.append(words + why)
        data, num_bytes = initial.get(name, b""), _row_bytes(into)
        if data and (into.datatype == "BYTES" or len(data) != num_bytes):
            expected = "none for BYTES" if into.datatype == "BYTES" else f"{num_bytes} for one row"
            faults.append(f"{words}found {len(data)} bytes in {said.initial}, expected {expected}")
        pairs.append(StatePair(name, said.output, ins[name], outs[said.output], data))
    twice = {each.output for each in pairs if [p.output for p in pairs].count(each.output) > 1}
    faults += [f"state: found output {name!r} twice, expected once" for name in sorted(twice)]
    controls: list[Control] = []
    for kind, (name, values) in (sequence.controls if sequence is not None else {}).items():
        if lacking := _lacking(f"sequence.{kind}", "input", name, ins):
            faults += lacking
            continue
        spec, taken = inputs[ins[name]], {*declared, *(each.input for each in controls)}
        if name in taken:
            faults.append(f"sequence.{kind}: found input {name!r}, which has another use already")
        plain = DATATYPES[spec.datatype].letter or (kind == "id" and spec.datatype == "BYTES")
        if _open(spec) or not plain:
            faults.append(
                f"sequence.{kind}: found input {name!r} of {spec.datatype} {list(spec.shape(-1))}, expected numbers of"
                " one size"
            )
        elif kind != "id" and not all(map(partial(_has, spec.datatype), values)):
            faults.append(
                f"sequence.{kind}: found values {list(values)}, expected two that {spec.datatype} has, which input {name!r} is"
            )
        controls.append(Control(kind, name, ins[name], values))
    if faults:
        raise ModelError("; ".join(faults))
    if not declared:
        pairs = _recognised(inputs, outputs, {each.input for each in controls})
    return tuple(pairs), tuple(controls)


def pack_number(datatype: str, value: float, count: int = 1) -> bytes:
    """Make the bytes of a number, several times; integers leave out what is behind the point.

    Raises ValueError or OverflowError or struct.error if the datatype has no such number.
    """
    letter = DATATYPES[datatype].letter
    return struct.pack(f"<{count}{letter}", *[value if letter in "efd" else int(value)] * count)


def _has(datatype: str, value: float) -> bool:
    try:
        pack_number(datatype, value)
    except (ValueError, OverflowError, struct.error):
        return False
    return True


def _lacking(where: str, role: str, name: str, known: Mapping[str, int]) -> list[str]:
    if name in known:
        return []
    return [f"{where}: found {role} {name!r}, expected one of the model's: {', '.join(known)}"]


def _row_bytes(spec: TensorSpec) -> int:
    """The bytes of one row, without a header; 0 for BYTES."""
    return DATATYPES[spec.datatype].num_bytes * prod(one_row(spec))


def one_row(spec: TensorSpec) -> tuple[int, ...]:
    """The whole shape of a state of one row. Sizes that are open without a name are 1, because they are a batch."""
    return tuple(1 if size < 0 else size for size in spec.shape(1))


def first_state(spec: TensorSpec, row: bytes, rows: int = 1) -> bytes:
    """Make the state of so many rows before the first step, from that of one row; empty: zeros, or empty texts."""
    num_rows = rows if spec.axis is not None else 1
    shape = [1 if size < 0 else size for size in spec.shape(num_rows)]
    if not row:
        content = bytes(prod(shape) * (DATATYPES[spec.datatype].num_bytes or 4))
    elif num_rows == 1:
        content = row
    else:
        outer = prod(shape[: spec.axis])
        step = len(row) // outer
        content = b"".join(row[at : at + step] * rows for at in range(0, outer * step, step))
    return spec.header(shape, len(content)) + content if spec.vary else content


def _is_batch(spec: TensorSpec, symbol: str) -> bool:
    """Whether an open dimension is one of rows, by its name: exporters that give none leave the place."""
    return symbol.startswith(f"{spec.name}[") or symbol.lower().startswith("batch")


def _open(spec: TensorSpec) -> bool:
    return min(spec.row_shape, default=0) < 0


def _unlike(into: TensorSpec, out: TensorSpec) -> str:
    """Say why one tensor cannot be the other of the next step; empty: it can."""
    one, other = into.shape(-1), out.shape(-1)
    # Where tensors carry their sizes, an output may be of any; it is looked at after each step.
    wild = (-1,) if into.vary and out.vary else ()
    if (
        into.datatype != out.datatype
        or len(one) != len(other)
        or not all(found in (size, *wild) for size, found in zip(one, other, strict=True))
    ):
        return (
            f"found {into.datatype} {list(one)} as input and {out.datatype} {list(other)} as output {out.name!r},"
            " expected the same"
        )
    symbols = into.vary.symbols if into.vary else ()
    if not all(_is_batch(into, symbol) for symbol in symbols):
        return (
            f"found shape {list(one)}, expected sizes but for the batch; fix them in [dimensions]"
        )
    return ""


# --- the usual names ----------------------------------------------------------------------------

# Names that nothing but a state has. An input such as `audio_in` may well be paired with an answer, `audio_out`.
_STATE_WORDS = (
    r"(?:past|prev|init|initial)?[._]?(?:h|c|hx|cx|hid|hidden|cell|state|states|mem|memory|cache|caches|rnn|lstm|gru|conv_cache"
    r"|attn_cache|context|ctx|buf|buffer|key_values|kv|hidden_state|cell_state)[._]?\d*(?:[._]\w+)?"
)
_STEM = re.compile(rf"(?:\w+[._])?{_STATE_WORDS}", re.IGNORECASE)
# Longer names are not looked at: a hostile file may have one of a megabyte.
_NAME_CHARS_MAX = 200
# How an input is called, how its output may be, and whether what they share has to be a name of state.
_USUAL: Final = tuple(
    (re.compile(pattern), templates, needs_stem)
    for pattern, templates, needs_stem in (
        (r"past_key_values([._].+)", (r"present\1", r"present_key_values\1"), False),
        (r"past([._].+)", (r"present\1",), False),
        (r"r(\d+)i", (r"r\1o",), False),
        (r"(.+)([._]?)in", (r"\1\2out",), True),
        (r"in([._])(.+)", (r"out\1\2",), True),
        (r"(.+?)_?0", (r"\1n", r"\1_n"), True),
        (
            r"(.+)",
            (r"\1N", r"\1n", r"\1_n", r"\1_out", r"\1.out", r"\1Out", r"\1_new", r"\1_next", r"new_\1", r"next_\1", r"out_\1", r"\1o"),
            True,
        ),
    )
)  # fmt: skip


def _recognised(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], controls: set[str]
) -> list[StatePair]:
    """Find pairs by their names, datatypes and shapes. None if any is ambiguous, or nothing would be left to ask for."""
    outs = {spec.name: index for index, spec in enumerate(outputs)}
    pairs: list[StatePair] = []
    for index, spec in enumerate(inputs):
        if spec.name in controls:
            continue
        names = _outputs_of(spec.name) & outs.keys()
        fits = [name for name in sorted(names) if not _unlike(spec, outputs[outs[name]])]
        if len(fits) > 1:
            return []
        pairs += [StatePair(spec.name, name, index, outs[name]) for name in fits]
    is_once = len({pair.output for pair in pairs}) == len(pairs)
    is_rest = len(pairs) + len(controls) < len(inputs) and len(pairs) < len(outputs)
    return pairs if is_once and is_rest else []


def _outputs_of(name: str) -> set[str]:
    """What the output may be called whose value an input of this name takes."""
    found: set[str] = set()
    if len(name) > _NAME_CHARS_MAX:
        return found
    for pattern, templates, needs_stem in _USUAL:
        fit = pattern.fullmatch(name)
        stem = max(fit.groups(), key=len) if fit else ""
        if fit and (not needs_stem or _STEM.fullmatch(stem.strip("._"))):
            found |= {fit.expand(template) for template in templates}
    return found


# --- Triton's words -----------------------------------------------------------------------------

#: Triton's names of controls.
CONTROL_KINDS: Final[Mapping[ControlKind, str]] = {
    "start": "CONTROL_SEQUENCE_START",
    "end": "CONTROL_SEQUENCE_END",
    "ready": "CONTROL_SEQUENCE_READY",
    "id": "CONTROL_SEQUENCE_CORRID",
}


def settings_of_triton(batching: Any, kind_name: Any) -> dict[str, Any]:  # noqa: ANN401  messages and enums of protobuf
    """Make the settings `state` and `sequence` of Triton's `sequence_batching`.

    `kind_name` gives a control's kind its name. Raises ModelError if it has what cannot be.
    """
    state, faults = dict[str, Any](), list[str]()
    for pair in batching.state:
        table = state[pair.input_name] = {"output": pair.output_name}
        files = [each.data_file for each in pair.initial_state if each.data_file]
        if len(files) > 1:
            faults.append(f"sequence_batching: state {pair.input_name!r}: found {len(files)} files")
        elif files:
            # Triton looks for them in this folder.
            table["initial"] = f"initial_state/{files[0]}"
    sequence: dict[str, Any] = {}
    if idle_us := batching.max_sequence_idle_microseconds:
        sequence["idle_s"] = idle_us / 1e6
    for entry in batching.control_input:
        for control in entry.control:
            name = kind_name(control.kind)
            kind = next(kind for kind, triton in CONTROL_KINDS.items() if triton == name)
            values = [*control.int32_false_true, *control.fp32_false_true, *control.bool_false_true]
            if kind == "id":
                values = [0, 1]
            if len(values) != 2:
                faults.append(
                    f"sequence_batching: control {entry.name!r}: found {len(values)} values, expected 2: false and true"
                )
            sequence[kind] = {"input": entry.name, "values": [*map(float, values)]}
    if faults:
        raise ModelError("; ".join(faults))
    return {"sequence": sequence, **({"state": state} if state else {})}
