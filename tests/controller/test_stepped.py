"""State pairs and controls of models: declared, read from Triton's configurations, recognised by name, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from clockwright.errors import ModelError
from clockwright.wire.tensors import TensorSpec, Variable
from controller.models.model_folder import ModelFolder, read_versions
from controller.models.stepped import Control, StatePair, find_state

AUDIO = TensorSpec("input", "FP32", (576,))
RATE = TensorSpec("sr", "INT64", (), None)
STATE = TensorSpec("state", "FP32", (2, 128), 1)
SPEECH = TensorSpec("output", "FP32", (1,))
NEXT = TensorSpec("stateN", "FP32", (2, 128), 1)
VOICE = (AUDIO, STATE, RATE), (SPEECH, NEXT)

TRITON = """
max_batch_size: 8
input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  direct { }
  control_input {
    name: "START"
    control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }
  }
  control_input {
    name: "CORRID"
    control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }
  }
  state {
    input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: 1
    initial_state { data_type: TYPE_INT32 dims: 1 data_file: "seven" name: "x" }
  }
}
"""


def folder(tmp_path: Path, *, toml: str = "", pbtxt: str = "", **files: bytes) -> ModelFolder:
    path = tmp_path / "m"
    (path / "1").mkdir(parents=True)
    (path / "1" / "model.onnx").write_bytes(b"model")
    for name, text in (("config.toml", toml), ("config.pbtxt", pbtxt)):
        if text:
            (path / name).write_text(text)
    for name, data in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
    return read_versions(path)[-1]


def found(
    read: ModelFolder, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> tuple[tuple[StatePair, ...], tuple[Control, ...]]:
    settings = read.settings
    return find_state(settings.state, settings.sequence, read.initial, inputs, outputs)


def test_usual_names_are_recognised_when_type_and_shape_are_the_same() -> None:
    assert find_state({}, None, {}, *VOICE) == ((StatePair("state", "stateN", 1, 1),), ())


@pytest.mark.parametrize(
    ("into", "out", "is_state"),
    [
        ("h", "hn", True),
        ("h0", "hn", True),
        ("h_in", "h_out", True),
        ("enc.state.in", "enc.state.out", True),
        ("past_key_values.3.key", "present.3.key", True),
        ("past_x", "present_x", True),
        ("conv_cache", "conv_cache_out", True),
        ("r2i", "r2o", True),
        # Denoisers give audio for audio.
        ("audio_in", "audio_out", False),
        ("x", "xn", False),
    ],
)
def test_a_pair_of_names_is_a_state_only_if_nothing_else_is_called_so(
    into: str, out: str, is_state: bool
) -> None:
    inputs = AUDIO, TensorSpec(into, "FP32", (3,))
    outputs = SPEECH, TensorSpec(out, "FP32", (3,))
    state, _ = find_state({}, None, {}, inputs, outputs)
    assert [(each.input, each.output) for each in state] == [(into, out)] * is_state


def test_what_is_ambiguous_or_does_not_fit_is_not_recognised() -> None:
    twice = (SPEECH, NEXT, TensorSpec("state_out", "FP32", (2, 128), 1))
    assert find_state({}, None, {}, VOICE[0], twice) == ((), ())
    other = (SPEECH, TensorSpec("stateN", "FP16", (2, 128), 1))
    assert find_state({}, None, {}, VOICE[0], other) == ((), ())
    # A model without anything else to ask for.
    assert find_state({}, None, {}, (STATE,), (SPEECH, NEXT)) == ((), ())
    assert find_state({}, None, {}, (AUDIO, STATE), (NEXT,)) == ((), ())


def test_config_toml_declares_pairs_their_first_value_and_controls(tmp_path: Path) -> None:
    toml = """
        [state]
        state = { output = "stateN", initial = "zero" }
        [sequence]
        idle_s = 2.5
        max = 7
        start = { input = "sr", values = [1, -1] }
    """
    read = folder(tmp_path, toml=toml, zero=b"z" * 1024)
    assert found(read, *VOICE) == (
        (StatePair("state", "stateN", 1, 1, b"z" * 1024),),
        (Control("start", "sr", 2, (1, -1)),),
    )
    sequence = read.settings.sequence
    assert sequence is not None
    assert (sequence.idle_ns, sequence.most) == (2_500_000_000, 7)
    again = ModelFolder.from_json(read.to_json(), tmp_path)
    assert again.initial == {"state": b"z" * 1024}


def test_triton_declares_the_same_in_its_words(tmp_path: Path) -> None:
    read = folder(tmp_path, pbtxt=TRITON, initial_state__seven=b"\7\0\0\0")
    inputs = tuple(TensorSpec(name, "INT32", (1,)) for name in ("INPUT", "SUM_IN", "START"))
    inputs += (TensorSpec("CORRID", "UINT64", (1,)),)
    outputs = tuple(TensorSpec(name, "INT32", (1,)) for name in ("OUTPUT", "SUM_OUT"))
    assert read.triton.checked(inputs, outputs) == (inputs, outputs)
    assert read.triton.ignored == ("sequence_batching.direct",)
    state, controls = found(read, inputs, outputs)
    assert state == (StatePair("SUM_IN", "SUM_OUT", 1, 1, b"\7\0\0\0"),)
    assert controls == (Control("start", "START", 2), Control("id", "CORRID", 3))
    assert read.settings.sequence is not None
    assert read.settings.sequence.idle_ns == 5_000_000_000
    wide = (*inputs[:1], TensorSpec("SUM_IN", "INT32", (2,)), *inputs[2:])
    with pytest.raises(ModelError, match=r"input 'SUM_IN': found shape \[-1, 1\]"):
        read.triton.checked(wide, outputs)


def test_all_that_does_not_fit_the_model_is_named_at_once(tmp_path: Path) -> None:
    toml = """
        [state]
        state = "output"
        h = "hn"
        input = { output = "stateN", initial = "short" }
        [sequence]
        start = "state"
        id = "nothing"
    """
    read = folder(tmp_path, toml=toml, short=b"abc")
    with pytest.raises(ModelError) as caught:
        found(read, *VOICE)
    assert str(caught.value).split("; ") == [
        "state 'state': found FP32 [2, -1, 128] as input and FP32 [-1, 1] as output 'output', expected the same",
        "state: found input 'h', expected one of the model's: input, state, sr",
        "state: found output 'hn', expected one of the model's: output, stateN",
        "state 'input': found FP32 [-1, 576] as input and FP32 [2, -1, 128] as output 'stateN', expected the same",
        "state 'input': found 3 bytes in short, expected 2304 for one row",
        "sequence.start: found input 'state', which has another use already",
        "sequence.id: found input 'nothing', expected one of the model's: input, state, sr",
    ]


@pytest.mark.parametrize(
    ("datatype", "values", "fits"),
    [
        ("INT8", "[-1, 127]", True),
        ("INT8", "[0, 128]", False),
        ("UINT8", "[-1, 1]", False),
        ("FP16", "[0, 70000]", False),
        ("FP32", "[0.5, 1.5]", True),
        ("INT64", "[0, inf]", False),
        ("BOOL", "[0, 1]", True),
    ],
)
def test_values_of_a_control_are_numbers_that_its_input_has(
    tmp_path: Path, datatype: str, values: str, fits: bool
) -> None:
    toml = f"[sequence]\nstart = {{ input = 'begin', values = {values} }}"
    tensors = (AUDIO, TensorSpec("begin", datatype, (1,))), (SPEECH,)
    read = folder(tmp_path, toml=toml)
    if fits:
        found(read, *tensors)
        return
    with pytest.raises(ModelError, match=rf"sequence.start: found values .* that {datatype} has"):
        found(read, *tensors)


def test_a_state_has_one_size(tmp_path: Path) -> None:
    vary = Variable(64, ("length",), (8,), 1)
    into, out = (TensorSpec(name, "FP32", (-1,), vary=vary) for name in ("h", "hn"))
    # An exporter that names no dimensions leaves the batch open, and the output's sizes.
    batch = Variable(64, ("state[1]",), (8,), 1)
    nameless = TensorSpec("state", "FP32", (2, -1, 128), None, batch)
    open_out = TensorSpec("stateN", "FP32", (-1, -1, -1), None, vary)
    assert len(find_state({}, None, {}, (AUDIO, nameless), (SPEECH, open_out))[0]) == 1
    assert not find_state({}, None, {}, (AUDIO, into), (SPEECH, out))[0]
    read = folder(tmp_path, toml='state = { h = "hn" }')
    with pytest.raises(ModelError, match=r"found shape \[-1, -1\], expected sizes but for"):
        found(read, (AUDIO, into), (SPEECH, out))
    with pytest.raises(ModelError, match="found 3 bytes in f, expected 8 for one row"):
        found(
            folder(tmp_path / "b", toml='state.h = { output = "hn", initial = "f" }', f=b"abc"),
            (AUDIO, TensorSpec("h", "FP32", (2,))),
            (SPEECH, TensorSpec("hn", "FP32", (2,))),
        )


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("state = 3", 'state is 3, expected a table of INPUT = "OUTPUT"'),
        ("state.h = 3", "state.h is 3, expected a table"),
        ('state.h = { output = "a", first = "b" }', "expected a table"),
        ('state.h = { output = "a", initial = "../../b" }', "leads outside the model's folder"),
        ('state.h = { output = "a", initial = "b" }', "first value in b, found no file"),
        ("sequence = 3", "sequence is 3, expected a table with idle_s, max, start, end, ready, id"),
        ("sequence.idle_s = 0", "sequence.idle_s is 0, expected a positive number of seconds"),
        ("sequence.max = 0", "sequence.max is 0, expected a whole number from 1 to"),
        ("sequence.end = 1", "sequence.end is 1, expected the name of an input"),
        ('sequence.end = { input = "e", values = [1] }', "expected the name of an input"),
    ],
)
def test_what_cannot_be_declared_is_refused_in_words(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ModelError, match=words.replace("[", r"\[")):
        folder(tmp_path, toml=toml)


def test_a_model_that_answers_several_times_has_no_controls(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"none is read here")
    (folder / "config.toml").write_text('[stream]\n[sequence]\nidle_s = 2\nstart = "START"\n')
    with pytest.raises(ModelError, match=r"found sequence.start and \[stream\], expected one"):
        read_versions(folder)[-1]
    (folder / "config.toml").write_text("[stream]\n[sequence]\nidle_s = 2\n")
    assert read_versions(folder)[-1].settings.stream is not None
