"""Triton's configurations: what of them holds here, what is named as not used, and what contradicts the model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from clockwright.errors import ModelError
from clockwright.wire.tensors import TensorSpec
from controller.models.model_folder import (
    ModelFolder,
    ModelSettings,
    read_versions,
)
from controller.models.triton_config import TritonConfig, read_triton_config
from controller.models.versions import ServedVersions

# As people write them: comments, lists of messages with commas and without, and much that means nothing here.
WHOLE = """
name: "m"
backend: "onnxruntime"  # the runtime
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, -1 ] },
  { name: "n" data_type: TYPE_INT64 dims: 1 reshape { shape: [] } }
]
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "{ x: [" }
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 2500 max_queue_size: 9 }
}
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1 ] } ]
optimization { graph { level: 1 } execution_accelerators { gpu_execution_accelerator: [ { name: "trt" } ] } }
response_cache { enable: true }
parameters { key: "profile" value { string_value: "\\"resnet\\"" } }
parameters: { key: "custom" value: { string_value: "1" } }
version_policy: { specific { versions: [ 1, 3 ] } }
"""

X = TensorSpec("x", "FP32", (3, 5))
N = TensorSpec("n", "INT64", ())
Y = TensorSpec("y", "FP32", (2,))


def folder(tmp_path: Path, *versions: str, pbtxt: str = "", toml: str = "") -> Path:
    path = tmp_path / "m"
    for version in versions or ("1",):
        (path / version).mkdir(parents=True)
        (path / version / "model.onnx").write_bytes(b"model")
    if pbtxt:
        (path / "config.pbtxt").write_text(pbtxt)
        (path / "{ x: [").write_text("cat\n\ndog: a\n")
    if toml:
        (path / "config.toml").write_text(toml)
    return path


def test_what_a_configuration_says_becomes_settings_and_the_rest_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read = read_versions(folder(tmp_path, "1", "3", "4", pbtxt=WHOLE))[-1]
    assert read.version == "3"
    assert read.settings == ModelSettings(
        slo_ns=2_500_000,
        batch_sizes=(1, 4, 8),
        max_rows=8,
        dimensions={"x[1]": 3},
        profile="resnet",
        cache=True,
        labels={"y": "{ x: ["},
        versions=ServedVersions(listed=(1, 3)),
    )
    assert read.labels == {"y": ("cat", "", "dog: a")}
    [record] = caplog.records
    assert record.getMessage() == (
        "model m: config.pbtxt: not used: dynamic_batching.max_queue_delay_microseconds,"
        " dynamic_batching.default_queue_policy.timeout_action,"
        " dynamic_batching.default_queue_policy.max_queue_size, instance_group.kind, instance_group.gpus,"
        " optimization, parameters.custom"
    )
    assert ModelFolder.from_json(read.to_json(), tmp_path) == read
    (tmp_path / "m" / "{ x: [").unlink()
    (tmp_path / "m" / "{ x: [").mkdir()
    with pytest.raises(ModelError, match="Is a directory"):
        ModelFolder.from_json(read.to_json(), tmp_path)


def test_json_says_the_same(tmp_path: Path) -> None:
    json = (
        '{"max_batch_size": "8", "input": [{"name": "x", "dims": ["3", -1], "format": "FORMAT_NCHW"}],'
        ' "dynamic_batching": {"preferred_batch_size": [4], "preserve_ordering": true}}'
    )
    read = read_triton_config(json, "m")
    assert read.settings == {"max_rows": 8, "batch_sizes": [1, 4]}
    assert read.dimensions == {"x[1]": 3}
    assert read.ignored == ("dynamic_batching.preserve_ordering",)


def test_config_toml_holds_where_both_say_something_and_what_a_client_sends_before_it(
    tmp_path: Path,
) -> None:
    toml = 'slo_ms = 50\n[dimensions]\n"x[1]" = 7\nseq = 9\n'
    path = folder(tmp_path, pbtxt=WHOLE.replace("1, 3", "1"), toml=toml)
    read = read_versions(path)[-1]
    assert read.settings.slo_ns == 50_000_000
    assert read.settings.dimensions == {"x[1]": 7, "seq": 9}
    assert read.settings.max_rows == 8
    sent = '{"parameters": {"slo_ms": {"string_value": "20.5"}}}'
    read = read_versions(path, triton_json=sent)[-1]
    assert read.settings == ModelSettings(slo_ns=20_500_000, dimensions={"x[1]": 7, "seq": 9})
    assert ModelFolder.from_json(read.to_json(), tmp_path) == read


@pytest.mark.parametrize(
    ("most", "preferred", "sizes"),
    [
        (1, "", [1]),
        (8, "", [1, 2, 4, 8]),
        (12, "", [1, 2, 4, 8, 12]),
        (128, "", [1, 2, 4, 8, 16]),
        (1024, "", [1, 2, 4, 8, 16, 32, 64]),
        (64, "4", [1, 4]),
        (128, "4", [1, 4, 8]),
    ],
)
def test_batches_have_sizes_of_which_sixteen_hold_the_most_rows(
    most: int, preferred: str, sizes: list[int]
) -> None:
    batching = f"dynamic_batching {{ preferred_batch_size: [ {preferred} ] }}"
    read = read_triton_config(f"max_batch_size: {most} {batching}", "m")
    assert read.settings == {"max_rows": most, "batch_sizes": sizes}


@pytest.mark.parametrize(
    ("pbtxt", "words"),
    [
        ('name: "other"', "config.pbtxt: name is 'other', expected 'm' or none"),
        (
            'backend: "tensorflow" platform: "x"',
            "platform is 'x', expected 'onnxruntime_onnx' or none; backend is",
        ),
        ('default_model_filename: "net.onnx"', "is 'net.onnx', expected 'model.onnx' or none"),
        (
            'sequence_batching { control_input { name: "c" control { int32_false_true: 1 } } }',
            "control 'c': found 1 values, expected 2: false and true",
        ),
        (
            'sequence_batching { state { input_name: "s" initial_state { data_file: "no" } } }',
            "state.s is {'output': '', 'initial': 'initial_state/no'}, expected a table",
        ),
        ('platform: "ensemble" ensemble_scheduling { }', "pipeline.stages: found 0, expected 1"),
        ("max_batch_size: none", "config.pbtxt: .*Couldn't parse integer: none"),
        ("name: ", "config.pbtxt: "),
        ("max_batch_size: 100000", "config.pbtxt: max_rows is 100000, expected"),
        (
            "max_batch_size: 2 dynamic_batching { preferred_batch_size: 4 }",
            "preferred_batch_size has 4, expected 1 to 2",
        ),
        (
            'parameters { key: "slo_ms" value { string_value: "fast" } }',
            "parameter slo_ms is 'fast'",
        ),
        ('parameters { key: "slo_ms" value { string_value: "-1" } }', "config.pbtxt: slo_ms is -1"),
        ("version_policy { specific { versions: 2 } }", "one of the versions 2, found 1"),
        (
            'input { name: "x" dims: [ 3 ] reshape { shape: [ 2 ] } }',
            r"x: dims are \[3\] and reshape is \[2\], expected sizes with as many elements",
        ),
        ("{" * 3000, "config.pbtxt: "),
        ("a{" * 3000, "config.pbtxt: "),
        # Had these been scanned again from each character, it would have taken a minute.
        ('"' + '\\"' * 30_000, "config.pbtxt: "),
        ("a" * 60_000, "config.pbtxt: "),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, pbtxt: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_versions(folder(tmp_path, pbtxt=pbtxt))[-1]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ('model_warmup [ { name: "a [" inputs [ { key: "x" } ] }, { name: "b" } ]', "model_warmup"),
        ("batch_input\n[\n{ kind: A # one [\n} ]", "batch_input"),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator [ { name: "t" } ] } }',
            "optimization",
        ),
        ("metric_tags [ { key: 'a [' value: 'b' } ]", "metric_tags"),
    ],
)
def test_lists_of_messages_that_mean_nothing_here_need_no_colon(said: str, named: str) -> None:
    config = claims(f"max_batch_size: 4 {said} response_cache {{ enable: true }}")
    assert config.ignored == (named,)
    assert config.settings["cache"] is True


def claims(text: str) -> TritonConfig:
    return read_triton_config(text, "m")


def test_a_model_is_shown_in_the_shapes_that_its_configuration_has() -> None:
    inputs, outputs = claims(WHOLE).checked((X, N), (Y,))
    assert inputs == (X, TensorSpec("n", "INT64", (1,)))
    assert outputs == (Y,)
    whole = claims('input { name: "x" dims: [ 2, 5 ] reshape { shape: [ 10 ] } }')
    spec = TensorSpec("x", "FP32", (10,), None)
    assert whole.checked((spec,), ())[0][0].row_shape == (2, 5)


def test_a_model_of_one_row_is_shown_without_its_batch() -> None:
    text = 'input { name: "x" dims: [ 3, 5 ] reshape { shape: [ 1, 3, 5 ] } } output { name: "y" dims: [ 1, 2 ] }'
    inputs, outputs = claims(text).checked((X,), (Y,), one_row=True)
    assert inputs == (TensorSpec("x", "FP32", (3, 5), None),)
    assert outputs == (Y,)
    assert claims(text).checked((X,), (Y,)) == ((X,), (Y,))


def test_without_a_batch_dims_are_whole_shapes() -> None:
    for dims in ("-1, 3, 5", "4, 3, 5", "-1, -1, -1"):
        assert claims(f'input {{ name: "x" dims: [ {dims} ] }}').checked((X,), (Y,)) == ((X,), (Y,))
    with pytest.raises(
        ModelError, match=r"found shape \[3, 5\] .*, expected the model's \[-1, 3, 5\]"
    ):
        claims('input { name: "x" dims: [ 3, 5 ] }').checked((X,), (Y,))


def test_all_that_contradicts_the_model_is_named_at_once() -> None:
    text = """max_batch_size: 4
    input { name: "x" data_type: TYPE_FP16 dims: [ 3, 6 ] }
    output { name: "y" data_type: TYPE_STRING dims: 2 }
    output { name: "z" }"""
    with pytest.raises(ModelError) as raised:
        claims(text).checked((X, N), (Y,))
    assert str(raised.value) == (
        "config.pbtxt: input 'x': found data_type FP16, expected the model's FP32; input 'x': found shape [-1, 3, 6]"
        " (dims, behind -1 for the batch if max_batch_size is not 0), expected the model's [-1, 3, 5]; output 'y':"
        " found data_type BYTES, expected the model's FP32; found output 'z', expected one of the model's: y; found"
        " no input n, which the model has"
    )


ENSEMBLE = """
name: "m" platform: "ensemble" max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [
  { model_name: "net.v2" model_version: -1
    input_map { key: "x" value: "IN" } output_map { key: "y" value: "between" } },
  { model_name: "net.v2" model_version: 3
    input_map { key: "x" value: "between" } output_map { key: "y" value: "OUT" } }
] }
"""


def test_an_ensemble_is_a_pipeline_whose_tensors_are_named_by_their_stages() -> None:
    read = read_triton_config(ENSEMBLE, "m")
    assert read.settings == {
        "max_rows": 4,
        "pipeline": {
            "inputs": ["IN"],
            "outputs": {"OUT": "net_v2-1.y"},
            "stages": [
                {"name": "net_v2", "model": "net.v2", "version": "", "inputs": {"x": "IN"}},
                {
                    "name": "net_v2-1",
                    "model": "net.v2",
                    "version": "3",
                    "inputs": {"x": "net_v2.y"},
                },
            ],
        },
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('value: "OUT"', 'value: "between"'), "'between' comes from net_v2.y and from net_v2-1.y"),
        (
            ('value: "IN"', 'value: "IMAGE"'),
            "input x of net_v2 is tensor 'IMAGE', expected one of IN",
        ),
        (
            ('"ensemble"', '"onnxruntime_onnx"'),
            "platform is 'onnxruntime_onnx', expected 'ensemble'",
        ),
    ],
)
def test_an_ensemble_whose_tensors_do_not_meet_is_refused(
    change: tuple[str, str], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        read_triton_config(ENSEMBLE.replace(*change), "m")


@pytest.mark.parametrize(
    "setting",
    [
        "batch_sizes = [1]",
        "aliases = { stable = 1 }",
        "priority = { levels = 3, default = 2 }",
        'state = { a = "b" }',
        "stream = {}",
    ],
)
def test_a_pipeline_has_no_settings_of_models(tmp_path: Path, setting: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(ENSEMBLE)
    assert read_versions(folder)[-1].version == "1"
    (folder / "config.toml").write_text(f"cache = true\n{setting}\n")
    with pytest.raises(ModelError) as caught:
        read_versions(folder)[-1]
    found = setting.partition(" ")[0]
    assert f"{found} is a setting of models, expected it without [pipeline]" in str(caught.value)


def test_an_ensemble_has_one_version_whatever_its_policy(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(ENSEMBLE + "version_policy: { all {} }")
    read = read_versions(folder)[-1]
    assert read.settings.versions is None
    assert "version_policy (a pipeline has one version)" in read.triton.ignored
