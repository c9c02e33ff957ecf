"""Models that answer a request several times: what `[stream]` says of them, and what is asked from step to step.

Each answer is a step: the model is run once more, with the state that the step before left (`controller.models.stepped`),
and with inputs whose values are outputs of that step (`feed`). All other inputs are those of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clockwright.errors import ModelError
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import DATATYPES, TensorSpec, Variable
from controller.models.stepped import StatePair

#: Answers of a request, where a model does not say how many. Each is a run of the model, and a slip would run for ever.
MAX_STEPS: Final = 1024
_MAX_STEPS_MAX: Final = 1_000_000
_KEYS: Final = ("final", "feed", "max_steps", "max_open", "generate")
_MAX_PROMPT_MAX: Final = 65_536
_NEVER: Final = np.zeros(1, np.bool_)
#: What clients of a model that generates get instead of logits.
TOKEN: Final = "token"


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """What `[stream.generate]` says (an experiment): outputs are logits, of which a token is chosen for the next step."""

    #: The input that takes one token, and the output that has a number for each.
    tokens: str
    logits: str
    #: The token behind which nothing follows; None: `max_steps` ends it.
    end: int | None = None
    #: Most tokens of a prompt, which are run one by one.
    max_prompt: int = 32


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What `[stream]` says."""

    #: An output of integers or truth values: the step is the last when each was another than 0 in it or before. Empty:
    #: `max_steps` ends it.
    final: str = ""
    #: By input, the output of the step before that is its value.
    feed: Mapping[str, str] = field(default_factory=dict)
    #: Most answers of a request.
    max_steps: int = MAX_STEPS
    #: Most requests that are being answered at a time; None: only the server's bound holds.
    max_open: int | None = None
    generate: GenerateSettings | None = None


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """How a model's logits become its next token. Places are those among the model's inputs or outputs."""

    tokens: int
    logits: int
    end: int | None


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How a model answers a request several times. Places are those among the model's inputs or outputs."""

    #: What clients send and get, and the places of these.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    given: tuple[int, ...]
    shown: tuple[int, ...]
    state: tuple[StatePair, ...]
    #: The place of an input, and that of the output that is its value in the next step: state, too.
    feeds: tuple[tuple[int, int], ...]
    #: The place of the output that says whether a step is the last; None: none does.
    final: int | None
    max_steps: int
    max_open: int | None
    generate: GeneratePlan | None = None

    def done(self, specs: Sequence[TensorSpec], outputs: Sequence[Buffer]) -> NDArray[np.bool_]:
        """Which elements of a step's outputs say that it was the last."""
        if self.final is None:
            return _NEVER
        spec, raw = specs[self.final], outputs[self.final]
        content = raw if spec.vary is None else spec.unpack(raw)[1]
        return np.frombuffer(content, DATATYPES[spec.datatype].dtype).astype(np.bool_)


def read_stream(value: object) -> StreamSettings:
    """Read the table `[stream]`. Raises ModelError if it is something else."""
    if not isinstance(value, dict) or value.keys() - set(_KEYS):
        raise ModelError(f"stream is {value!r}, expected a table with some of {', '.join(_KEYS)}")
    found = dict(value)
    if not isinstance(found.get("final", ""), str):
        raise ModelError(f"stream.final is {found['final']!r}, expected the name of an output")
    feed = found.get("feed", {})
    if not isinstance(feed, dict) or not all(isinstance(each, str) for each in feed.values()):
        raise ModelError(f'stream.feed is {feed!r}, expected a table of INPUT = "OUTPUT"')
    for key in ("max_steps", "max_open"):
        number = found.get(key, 1)
        if type(number) is not int or not 1 <= number <= _MAX_STEPS_MAX:
            raise ModelError(
                f"stream.{key} is {number!r}, expected a whole number from 1 to {_MAX_STEPS_MAX}"
            )
    if "generate" in found:
        found["generate"] = _read_generate(found["generate"])
    return StreamSettings(**found)


def _read_generate(value: object) -> GenerateSettings:
    expected = "a table with tokens = INPUT, logits = OUTPUT, and perhaps end and max_prompt"
    known = {"tokens": str, "logits": str, "end": int, "max_prompt": int}
    if (
        not isinstance(value, dict)
        or value.keys() - known.keys()
        or not {"tokens", "logits"} <= value.keys()
        or any(type(found) is not known[key] for key, found in value.items())
    ):
        raise ModelError(f"stream.generate is {value!r}, expected {expected}")
    settings = GenerateSettings(**value)
    if not 1 <= settings.max_prompt <= _MAX_PROMPT_MAX:
        raise ModelError(
            f"stream.generate.max_prompt is {settings.max_prompt}, expected 1 to {_MAX_PROMPT_MAX}"
        )
    return settings


def find_stream(
    settings: StreamSettings | None,
    state: Sequence[StatePair],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> StreamPlan | None:
    """Find how a model answers several times. Returns None if it answers once, as one without settings does.

    Raises ModelError that names all that does not fit the model.
    """
    if settings is None:
        return None
    faults: list[str] = []
    ins = {spec.name: index for index, spec in enumerate(inputs)}
    outs = {spec.name: index for index, spec in enumerate(outputs)}
    feeds = [(pair.input_index, pair.output_index) for pair in state]
    hidden = {pair.input for pair in state}
    for into, out in settings.feed.items():
        if into not in ins or out not in outs:
            faults.append(
                f"stream.feed: found {into} = {out!r}, expected an input of {', '.join(ins)} and an output of"
                f" {', '.join(outs)}"
            )
            continue
        one, other = inputs[ins[into]], outputs[outs[out]]
        if (one.datatype, one.shape(-1)) != (other.datatype, other.shape(-1)):
            faults.append(
                f"stream.feed {into}: found {one.datatype} {list(one.shape(-1))} as input and {other.datatype}"
                f" {list(other.shape(-1))} as output {out}, expected the same"
            )
        if into in hidden:
            faults.append(f"stream.feed: found input {into}, which is a state already")
        feeds.append((ins[into], outs[out]))
    final = outs.get(settings.final)
    if settings.final:
        kind = "" if final is None else np.dtype(DATATYPES[outputs[final].datatype].dtype).kind
        if kind not in ("b", "i", "u"):
            faults.append(
                f"stream.final: found {settings.final!r}, expected an output of BOOL or of integers, of"
                f" {', '.join(outs)}"
            )
    generate = settings.generate
    if generate is not None:
        faults += _generate_faults(generate, inputs, outputs, hidden | settings.feed.keys())
    if not feeds and generate is None:
        faults.append(
            "stream: found no state and no feed, expected one of them, because all steps would be the same"
        )
    if faults:
        raise ModelError("; ".join(faults))
    given = [index for index, spec in enumerate(inputs) if spec.name not in hidden]
    kept = {pair.output for pair in state}
    shown = [index for index, spec in enumerate(outputs) if spec.name not in kept]
    seen = {index: inputs[index] for index in given}
    got = [outputs[index] for index in shown]
    plan: GeneratePlan | None = None
    if generate is not None:
        plan = GeneratePlan(ins[generate.tokens], outs[generate.logits], generate.end)
        spec = seen[plan.tokens]
        # The prompt comes first: only its size varies.
        given = [plan.tokens, *(index for index in given if index != plan.tokens)]
        seen[plan.tokens] = _varying(
            spec.name, spec.datatype, ("prompt",), (generate.max_prompt,), generate.max_prompt
        )
        shown, got = [], [_varying(TOKEN, spec.datatype, (), (), generate.max_prompt)]
    return StreamPlan(
        inputs=tuple(seen[index] for index in given),
        outputs=tuple(got),
        given=tuple(given),
        shown=tuple(shown),
        state=tuple(state),
        feeds=tuple(feeds),
        final=final,
        max_steps=settings.max_steps,
        max_open=settings.max_open,
        generate=plan,
    )


def _generate_faults(
    said: GenerateSettings,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    taken: Set[str],
) -> list[str]:
    """Say what a model lacks of which tokens are chosen."""
    token = next((spec for spec in inputs if spec.name == said.tokens), None)
    logits = next((spec for spec in outputs if spec.name == said.logits), None)
    faults = []
    if (
        token is None
        or token.name in taken
        or token.vary is not None
        or token.datatype not in ("INT32", "INT64")
        or prod(token.row_shape) != 1
    ):
        faults.append(
            f"stream.generate.tokens: found {said.tokens!r}, expected an input of INT32 or INT64 that takes one token"
            " at a time, and is no state and no feed"
        )
    if (
        logits is None
        or logits.vary is not None
        or logits.datatype not in ("FP16", "FP32", "FP64")
        or prod(logits.row_shape) != max(logits.row_shape, default=0)
    ):
        faults.append(
            f"stream.generate.logits: found {said.logits!r}, expected an output of floats, one for each token"
        )
    return faults


def _varying(
    name: str, datatype: str, symbols: tuple[str, ...], most: tuple[int, ...], unit: int
) -> TensorSpec:
    """A tensor of one row of work, whose rows have as many elements as there are, up to the most."""
    room = 8 * (2 + len(symbols)) + prod(most) * DATATYPES[datatype].num_bytes
    vary = Variable(room, symbols, most, unit)
    return TensorSpec(name, datatype, (-1,) * len(symbols), vary=vary)
