"""Models as exporters write them, served as they are: each answer is plain onnxruntime's on the same file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

from clockwright import BadRequestError, Client, RefusedError
from clockwright.client.operator import Operator
from experiments.bench.foreign_models import MODELS, ForeignModel
from experiments.bench.models import is_right, judge, operator_cases, write_models
from experiments.live.local_server import LocalServer

TRITON = """
max_batch_size: 0
input [
  { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ -1, 2, 3 ] },
  { name: "n" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } }
]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 2, 3 ] label_filename: "labels.txt" } ]
"""


ONE_ROW = """
input { name: "x" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ 2, 3 ] reshape { shape: [ 1, 2, 3 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 1, 6, 1 ] } }
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("foreign")
    write_models(directory / "models")
    triton = directory / "models" / "triton"
    (triton / "3").mkdir(parents=True)
    text = "g (float[b,h,w] x, int64 n) => (float[b,h,w] y) { f = Cast<to=1>(n)  y = Mul(x, f) }"
    model = ForeignModel("triton", text, ()).build()
    (triton / "3" / "model.onnx").write_bytes(model.SerializeToString())
    (triton / "config.pbtxt").write_text(TRITON)
    (triton / "labels.txt").write_text("\n".join(["cat", "dog", "hen", "ox: a", "bär"]))
    one_row = directory / "models" / "one_row"
    (one_row / "1").mkdir(parents=True)
    model = ForeignModel(
        "one_row",
        "g (float[1,2,3] x) => (float[1,6,1] y) { s = Constant<value_ints=[1,6,1]>()  y = Reshape(x, s) }",
        (),
    ).build()
    (one_row / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (one_row / "config.pbtxt").write_text(ONE_ROW)
    arguments = ["--pages", "32", "--arena-mib", "16", "--cache-dir", str(directory / "cache")]
    arguments += ["--server-name", "triton"]
    with LocalServer(["--models", str(directory / "models"), *arguments]) as server:
        yield server.address


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_model_is_served_as_its_exporter_wrote_it(model: ForeignModel, address: str) -> None:
    with Client(address) as client:
        assert is_right(client, model)


def test_a_request_that_gives_recurrent_layers_nothing_fails_and_no_worker_with_it(
    address: str,
) -> None:
    (model,) = [each for each in MODELS if each.name == "heard_by_value"]
    with Client(address) as client, Operator(address) as operator:
        before = [worker.worker_id for worker in operator.workers()]
        for rows in (1, 3):
            with pytest.raises(RefusedError, match="the engine failed on this request"):
                client.infer(model.name, -np.ones((rows, 2), np.float32), slo_ms=600_000)
        assert is_right(client, model)
        assert [worker.worker_id for worker in operator.workers()] == before


def test_a_sum_of_sizes_is_the_sum_of_those_that_a_request_has(address: str) -> None:
    (model,) = [each for each in MODELS if each.name == "decoder_with_past"]
    inputs = model.requests[-1]
    with (
        Client(address) as client,
        pytest.raises(BadRequestError, match=r"'mask': found past \+ seq 6, expected 7 in this"),
    ):
        client.infer(model.name, inputs | {"mask": inputs["mask"][:, 1:]}, slo_ms=600_000)


def test_metadata_and_refusals_name_the_same_most_rows(address: str) -> None:
    with Client(address) as client, Operator(address) as operator:
        shapes = {
            name: [list(spec.shape(-1)) for spec in client.metadata(name).inputs]
            for name in ("minus_one", "one_scale", "state_and_setting", "fixed_batch")
        }
        assert shapes == {
            "minus_one": [[-1, 3]],
            "one_scale": [[-1, 3]],
            "state_and_setting": [[-1, 2], [2, -1, 2], []],
            "fixed_batch": [[4, 3]],
        }
        for name, most in (("minus_one", 64), ("one_scale", 16)):
            rows = MODELS[0].requests[0]["x"].repeat(17, axis=0)
            assert len(client.infer(name, rows[:most], slo_ms=600_000).outputs["y"]) == most
            with pytest.raises(BadRequestError, match=f"expected 1 to {most}"):
                client.infer(name, rows[: most + 1])
        reasons = {each.model_id: each.one_by_one for each in operator.models()}
    assert "ReduceMax makes one result" in reasons["one_scale"]
    assert "has its rows in dimension 1" in reasons["state_and_setting"]
    assert not reasons["minus_one"]


def test_operator_tests_of_onnx_are_answered_as_onnxruntime_answers() -> None:
    wanted = {
        "test_add_bcast",
        "test_cast_FLOAT_to_FLOAT8E5M2",
        "test_castlike_UINT4_to_FLOAT",
        "test_dynamicquantizelinear",
        "test_identity_sequence",
        "test_lstm_defaults",
        "test_pow_bcast_scalar",
        "test_size",
        "test_ai_onnx_ml_label_encoder_string_int",
        "test_string_concat_utf8",
        "test_strnormalizer_nostopwords_nochangecase",
    }
    told = {case.name: judge(case) for case in operator_cases() if case.name in wanted}
    assert told.pop("test_identity_sequence") == "out of scope: sequences as inputs"
    assert set(told.values()) == {"equal"}, told


def test_a_model_of_tritons_is_served_as_its_configuration_says(address: str) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    x, n = InferInput("x", [2, 2, 3], "FP32"), InferInput("n", [1], "INT64")
    x.set_data_from_numpy(rows)
    n.set_data_from_numpy(np.array([5], np.int64))
    with InferenceServerClient(address) as client:
        answer = client.infer("triton", [x, n], parameters={"slo_ms": 600_000})
        assert np.array_equal(answer.as_numpy("y"), rows * 5)
        wanted = [InferRequestedOutput("y", class_count=3)]
        answer = client.infer("triton", [x, n], outputs=wanted, parameters={"slo_ms": 600_000})
        # There are five labels, and six elements.
        texts = [
            f"{value:f}:{label}" for value, label in ((25, "5"), (20, "4:bär"), (15, "3:ox: a"))
        ]
        assert answer.as_numpy("y")[0].tolist() == [text.encode() for text in texts]
        config = client.get_model_config("triton", as_json=True)["config"]
        assert [each["dims"] for each in config["input"]] == [["-1", "2", "3"], ["1"]]
        assert config["input"][0]["format"] == "FORMAT_NCHW"
        assert config["output"][0]["label_filename"] == "labels.txt"
        assert "max_batch_size" not in config
        assert client.get_model_metadata("triton").inputs[0].shape == [-1, 2, 3]
        scale = client.get_model_config("one_scale").config
        assert scale.max_batch_size == 16
        assert "ReduceMax" in scale.parameters["one_by_one"].string_value


def test_a_model_of_one_row_is_served_without_its_batch(address: str) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = InferInput("x", [2, 3], "FP32")
    x.set_data_from_numpy(rows)
    with InferenceServerClient(address) as client:
        assert client.get_server_metadata().name == "triton"
        config = client.get_model_config("one_row", as_json=True)["config"]
        assert (config["input"][0]["dims"], config["output"][0]["dims"]) == (["2", "3"], ["6"])
        assert "max_batch_size" not in config
        asked = [client.infer("one_row", [x], parameters={"slo_ms": 600_000}) for _ in range(3)]
        assert [each.as_numpy("y").tolist() for each in asked] == 3 * [list(range(6))]
        wanted = [InferRequestedOutput("y", class_count=1)]
        answer = client.infer("one_row", [x], outputs=wanted, parameters={"slo_ms": 600_000})
        assert answer.as_numpy("y").tolist() == [b"5.000000:5"]
