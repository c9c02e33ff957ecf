"""Text as the Open Inference Protocol has it, datatype BYTES: in and out, on every way to a model and back."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx.parser
import pytest
import requests
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from clockwright import BadRequestError, Client, Feedback, ModelError, RefusedError
from clockwright.client.operator import Operator
from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.texts import join_texts
from experiments.live.local_server import LocalServer

LONG: dict[str, Any] = {"slo_ms": 600_000}
HEADER = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>\n'
MODELS = {
    "numbers": """g (string[n,2] x) => (int64[n,2] y) {
        y = ai.onnx.ml.LabelEncoder<keys_strings=["a", "b", "ä"], values_int64s=[1, 2, 3], default_int64=-1>(x) }""",
    "labels": """g (int64[n] x) => (string[n] y) {
        y = ai.onnx.ml.LabelEncoder<keys_int64s=[1, 2], values_strings=["eins", "zwei"], default_string="">(x) }""",
    "joined": "g (string[n,1] a, string[n,1] b, float[n] z) => (string[n,1] c, float[n] w) { c = StringConcat(a, b)  w = Neg(z) }",
    # A text and a number of all rows, and an answer that is the same for all.
    "settings": """g (string[n,1] x, string[2] tail, float f) => (string[n,2] y, float[n] z, float minus) {
        y = StringConcat(x, tail)  c = Cast<to=1>(x)  axis = Constant<value_ints=[1]>()  s = Squeeze(c, axis)
        z = Mul(s, f)  minus = Neg(f) }""",
    # Fails on text that it does not know, as scikit-learn's default does.
    "strict": """g (string[n,1] x) => (float[n,1,2] y) {
        y = ai.onnx.ml.OneHotEncoder<cats_strings=["yes", "no"], zeros=0>(x) }""",
    # Reads numbers, and fails on all else.
    "sums": """g (string[n,2] x) => (string[n] y) {
        f = Cast<to=1>(x)  axis = Constant<value_ints=[1]>()  s = ReduceSum<keepdims=0>(f, axis)  i = Cast<to=7>(s)
        y = Cast<to=8>(i) }""",
    # Text with an open dimension, next to numbers that have it too.
    "tokens": """g (string[n,length] x, float[n,length] w) => (string[n,length] y, int64[n,length] ids, float[n] sums) {
        y = StringConcat(x, x)  axis = Constant<value_ints=[1]>()  sums = ReduceSum<keepdims=0>(w, axis)
        ids = ai.onnx.ml.LabelEncoder<keys_strings=["a", "b"], values_int64s=[1, 2], default_int64=-1>(x) }""",
}
# Three of a kind for an application; the last fails on what it does not know.
for _name, _values in (
    ("says_a", '"cat", "dog"'),
    ("says_b", '"cat", "hen"'),
    ("says_c", '"ox", "hen"'),
):
    MODELS[_name] = f"""g (string[n] x) => (string[n] label) {{
        label = ai.onnx.ml.LabelEncoder<keys_strings=["a", "b"], values_strings=[{_values}], default_string="?">(x) }}"""
MODELS["says_number"] = """g (string[n] x) => (string[n] label) {
    f = Cast<to=7>(x)  label = Cast<to=8>(f) }"""
CONTAINER = """
def predict(words, numbers):
    if any(word == "raise" for word in words):
        raise ValueError("asked for")
    upper = [word.upper() for word in words]
    return upper, [number + len(word) for word, number in zip(words, numbers)]
"""
CONTAINER_CONFIG = """
batch_sizes = [1, 2, 4]
[container]
load = "model.py"
inputs = { words = "BYTES[]", numbers = "INT64[]" }
outputs = { upper = "BYTES[]", sums = "INT64[]" }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("texts")
    for name, text in MODELS.items():
        (directory / "models" / name / "1").mkdir(parents=True)
        model = onnx.parser.parse_model(HEADER + text)
        (directory / "models" / name / "1" / "model.onnx").write_bytes(model.SerializeToString())
        cached = "cache = true\n" if name == "labels" else ""
        (directory / "models" / name / "config.toml").write_text(
            f"batch_sizes = [1, 2, 4]\n{cached}"
        )
    (directory / "models" / "code" / "1").mkdir(parents=True)
    (directory / "models" / "code" / "1" / "model.py").write_text(CONTAINER)
    (directory / "models" / "code" / "config.toml").write_text(CONTAINER_CONFIG)
    arguments = ["--pages", "8", "--arena-mib", "16", "--cache-dir", str(directory / "cache")]
    arguments += ["--allow-client-shm", "--http-port", "0"]
    with LocalServer(["--models", str(directory / "models"), *arguments]) as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.address) as made:
        yield made


def texts(*rows: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
    return np.array(rows, np.object_)


# --- Clockwright's own client -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [object, "U", "S"])
def test_texts_of_each_kind_of_array_go_in(client: Client, kind: Any) -> None:  # noqa: ANN401
    rows = np.array([["a", "b"], ["zz", ""]]).astype(kind)
    assert client.infer("numbers", rows, **LONG).outputs["y"].tolist() == [[1, 2], [-1, -1]]


def test_texts_come_out_as_texts_and_numbers_next_to_them(client: Client) -> None:
    found = client.infer("labels", np.array([2, 7, 1]), explain=True, **LONG)
    assert found.outputs["y"].tolist() == ["zwei", "", "eins"]
    assert found.outputs["y"].flags.writeable is False
    assert "exec_us" in found.explanation
    inputs = {
        "a": texts(["naïve "], [b"\xe2\x82\xac"]),
        "b": texts(["\U0001f600"], ["\0"]),
        "z": np.array([1, 2], np.float32),
    }
    found = client.infer("joined", inputs, **LONG)
    assert found.outputs["c"].tolist() == [["naïve \U0001f600"], ["€\0"]]
    assert found.outputs["w"].tolist() == [-1, -2]


def test_a_request_is_answered_from_the_cache(client: Client) -> None:
    for _ in range(3):
        assert client.infer("labels", np.array([1]), **LONG).outputs["y"].tolist() == ["eins"]


def test_more_rows_than_a_batch_are_cut_and_joined(client: Client) -> None:
    numbers = np.arange(11) % 3
    names = ["", "eins", "zwei"]
    found = client.infer("labels", numbers, **LONG).outputs["y"].tolist()
    assert found == [names[number] for number in numbers]
    words = texts(*(f"w{'x' * number}" for number in range(11)))
    found = client.infer("code", {"words": words, "numbers": np.arange(11)}, **LONG).outputs
    assert found["upper"].tolist() == [word.upper() for word in words]
    assert found["sums"].tolist() == [number + 1 + number for number in range(11)]


def test_what_belongs_to_all_rows_goes_to_each(client: Client) -> None:
    inputs = {
        "x": texts(["1"], ["22"], ["3"]),
        "tail": texts("a", "bc"),
        "f": np.array(2, np.float32),
    }
    found = client.infer("settings", inputs, **LONG).outputs
    assert found["y"].tolist() == [["1a", "1bc"], ["22a", "22bc"], ["3a", "3bc"]]
    assert found["z"].tolist() == [2, 44, 6]
    assert found["minus"].tolist() == -2
    with pytest.raises(
        BadRequestError, match=r"'tail': found 12000\d\d bytes of text, .* in 1 rows"
    ):
        client.infer("settings", {**inputs, "tail": texts("b" * 600_000, "c" * 600_000)}, **LONG)


def test_metadata_says_what_is_text(client: Client) -> None:
    metadata = client.metadata("joined")
    assert [(each.datatype, each.shape(-1)) for each in metadata.inputs] == [
        ("BYTES", (-1, 1)),
        ("BYTES", (-1, 1)),
        ("FP32", (-1,)),
    ]
    assert [each.datatype for each in metadata.outputs] == ["BYTES", "FP32"]


# --- Triton's clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_http_client_sends_and_gets_texts(server: LocalServer, *, binary: bool) -> None:
    with tritonclient.http.InferenceServerClient(server.rest.removeprefix("http://")) as client:
        tensors = []
        for name, rows in (("a", texts(["x,]"], ['"\\'])), ("b", texts(["ü"], [""]))):
            tensors.append(tritonclient.http.InferInput(name, [2, 1], "BYTES"))
            tensors[-1].set_data_from_numpy(rows, binary_data=binary)
        tensors.append(tritonclient.http.InferInput("z", [2], "FP32"))
        tensors[-1].set_data_from_numpy(np.zeros(2, np.float32))
        wanted = tritonclient.http.InferRequestedOutput("c", binary_data=binary)
        found = client.infer("joined", tensors, outputs=[wanted], parameters=LONG).as_numpy("c")
        decoded = [[e.decode() if binary else e for e in row] for row in found.tolist()]
        assert decoded == [["x,]ü"], ['"\\']]


def test_tritons_grpc_client_sends_and_gets_texts_on_calls_and_streams(server: LocalServer) -> None:
    with tritonclient.grpc.InferenceServerClient(server.address) as client:
        tensor = tritonclient.grpc.InferInput("x", [1, 2], "BYTES")
        tensor.set_data_from_numpy(texts(["ä", "b"]))
        found = client.infer("numbers", [tensor], parameters=LONG).as_numpy("y")
        assert found.tolist() == [[3, 2]]
        number = tritonclient.grpc.InferInput("x", [2], "INT64")
        number.set_data_from_numpy(np.array([1, 2]))
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: answers.put(error or result))
        for _ in range(2):
            client.async_stream_infer("labels", [number], parameters=LONG)
        for _ in range(2):
            assert answers.get(timeout=60).as_numpy("y").tolist() == [b"eins", b"zwei"]


def test_texts_lie_in_regions_of_clients(server: LocalServer) -> None:
    region = shared_memory.create_shared_memory_region("r", "/clockwright-texts", 256)
    try:
        with tritonclient.grpc.InferenceServerClient(server.address) as client:
            client.register_system_shared_memory("r", "/clockwright-texts", 256)
            raw = serialize_byte_tensor(texts("hello", "")).item()
            shared_memory.set_shared_memory_region(region, [np.frombuffer(raw, np.uint8)])
            words = tritonclient.grpc.InferInput("words", [2], "BYTES")
            words.set_shared_memory("r", len(raw))
            numbers = tritonclient.grpc.InferInput("numbers", [2], "INT64")
            numbers.set_data_from_numpy(np.zeros(2, np.int64))
            upper = tritonclient.grpc.InferRequestedOutput("upper")
            upper.set_shared_memory("r", 64, 128)
            found = client.infer("code", [words, numbers], outputs=[upper], parameters=LONG)
            output = found.get_output("upper")
            assert output.parameters["shared_memory_byte_size"].int64_param == 13
            inside = shared_memory.get_contents_as_numpy(region, np.object_, [2], 128)
            assert inside.tolist() == [b"HELLO", b""]
            # Triton's client in C++ looks for these entries, and for a size over REST.
            assert list(found.get_response().raw_output_contents) == [b""]
            there = {
                "shared_memory_region": "r",
                "shared_memory_byte_size": 64,
                "shared_memory_offset": 192,
            }
            [told] = post(
                server,
                "code",
                {"name": "words", "datatype": "BYTES", "shape": [1], "data": ["a"]},
                {"name": "numbers", "datatype": "INT64", "shape": [1], "data": [1]},
                outputs=[{"name": "upper", "parameters": there}],
            )["outputs"]
            assert told["parameters"]["binary_data_size"] == 0
            upper.set_shared_memory("r", 12, 128)
            with pytest.raises(
                InferenceServerException, match="found shared_memory_byte_size 12, expected 13"
            ):
                client.infer("code", [words, numbers], outputs=[upper], parameters=LONG)
            words.set_shared_memory("r", 8)
            with pytest.raises(InferenceServerException, match="element 0 has length 5"):
                client.infer("code", [words, numbers], parameters=LONG)
            client.unregister_system_shared_memory("r")
    finally:
        shared_memory.destroy_shared_memory_region(region)


# --- the protocol itself ----------------------------------------------------------------------------


def ask(
    server: LocalServer, raw: bytes | None, *, rows: int = 1, typed: tuple[bytes, ...] = ()
) -> Any:  # noqa: ANN401
    request = pb.ModelInferRequest(model_name="numbers")
    request.parameters["slo_ms"].int64_param = LONG["slo_ms"]
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[rows, 2])
    if raw is not None:
        request.raw_input_contents.append(raw)
    tensor.contents.bytes_contents.extend(typed)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        return pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=60))


def test_raw_and_typed_contents_are_the_same(server: LocalServer) -> None:
    for answer in (
        ask(server, join_texts(["a", "ä"])),
        ask(server, None, typed=(b"a", "ä".encode())),
    ):
        assert np.frombuffer(answer.raw_output_contents[0], np.int64).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\5\0\0\0a", "element 0 has length 5, but 1 bytes are left"),
        (b"\1\0\0\0a\1\0", "element 1 has no length of 4 bytes"),
        (b"\xff\xff\xff\xff", "element 0 has length 4294967295, but 0 bytes are left"),
        (join_texts(["a"]), r"found 1 elements in 5 bytes, expected 2 for shape \[1, 2\]"),
        (join_texts(["a"] * 4), "found 3 or more elements in 20 bytes, expected 2"),
        (b"", "found 0 elements in 0 bytes, expected 2"),
    ],
)
def test_lengths_that_do_not_add_up_are_named(server: LocalServer, raw: bytes, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=f"input 'x': {words}"):
        ask(server, raw)


def test_typed_contents_of_another_number_are_named(server: LocalServer) -> None:
    with pytest.raises(grpc.RpcError, match="found 3 elements in contents"):
        ask(server, None, typed=(b"a", b"b", b"c"))


def post(server: LocalServer, model: str, *inputs: dict[str, Any], **more: Any) -> Any:  # noqa: ANN401
    body = {"inputs": list(inputs), "parameters": LONG, **more}
    return requests.post(f"{server.rest}/v2/models/{model}/infer", json=body, timeout=60).json()


def test_json_holds_texts(server: LocalServer) -> None:
    x = {"name": "x", "datatype": "BYTES", "shape": [2, 2]}
    for data in ([["a", "b"], ["[,", "ä"]], ["a", "b", "[,", "ä"]):
        answer = post(server, "numbers", {**x, "data": data})
        assert answer["outputs"][0]["data"] == [1, 2, -1, 3]
    number = {"name": "x", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]}
    assert post(server, "labels", number)["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [3], "data": ["eins", "zwei", ""]}
    ]
    wrong = post(server, "numbers", {**x, "data": [["a"], ["b", "c", "d"]]})
    assert "the first has 1 values" in wrong["error"]
    assert (
        "Expected `str`, got `int`" in post(server, "numbers", {**x, "data": [1, 2, 3, 4]})["error"]
    )
    assert (
        "found 1 values as data, expected 4"
        in post(server, "numbers", {**x, "data": ["a"]})["error"]
    )


def test_a_raw_body_is_the_only_text(server: LocalServer) -> None:
    answer = requests.post(
        f"{server.rest}/v2/models/strict/infer",
        data=b"no",
        headers={"Inference-Header-Content-Length": "0", "x-clockwright-slo-ms": "600000"},
        timeout=60,
    )
    assert answer.content.endswith(np.array([0, 1], np.float32).tobytes())


def test_long_json_is_cut_between_texts(server: LocalServer) -> None:
    # Longer than a slice, with all that could be taken for a place to cut.
    words = [f'{"long, " * 300}"[{number}],\\' for number in range(40)]
    names = {"words": (words, "BYTES"), "numbers": ([0] * 40, "INT64")}
    inputs = [
        {"name": name, "datatype": datatype, "shape": [40], "data": data}
        for name, (data, datatype) in names.items()
    ]
    answer = post(server, "code", *inputs)
    assert answer["outputs"][0]["data"] == [word.upper() for word in words]


def test_bytes_that_are_no_text_pass_in_binary_only(server: LocalServer, client: Client) -> None:
    inputs = {"words": texts(b"a\xff"), "numbers": np.zeros(1, np.int64)}
    [found] = client.infer("code", inputs, **LONG).outputs["upper"]
    assert found.encode(errors="surrogateescape") == b"A\xff"
    raw = join_texts([b"a\xff"])
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "words",
                    "datatype": "BYTES",
                    "shape": [1],
                    "parameters": {"binary_data_size": 6},
                },
                {"name": "numbers", "datatype": "INT64", "shape": [1], "data": [0]},
            ],
            "parameters": LONG,
        }
    ).encode()
    answer = requests.post(
        f"{server.rest}/v2/models/code/infer",
        data=header + raw,
        headers={"Inference-Header-Content-Length": str(len(header))},
        timeout=60,
    )
    assert answer.status_code == 400
    assert "output 'upper': found bytes that are not UTF-8" in answer.json()["error"]
    with pytest.raises(RefusedError, match=r"FAILED: .*\(found text that is not UTF-8"):
        client.infer("numbers", texts([b"\xff", "a"]), **LONG)


def test_texts_have_open_dimensions(client: Client) -> None:
    assert client.metadata("tokens").inputs[0].shape(-1) == (-1, -1)

    def asked(number: int) -> bool:
        rows, length = 1 + number % 3, 1 + number % 5
        words = np.array(["a", "ä", "", f"{number}"] * 20, np.object_)[: rows * length]
        words, weights = words.reshape(rows, length), np.full((rows, length), number, np.float32)
        found = client.infer("tokens", {"x": words, "w": weights}, **LONG).outputs
        ids = np.where(words == "a", 1, -1)
        told: list[Any] = [found[name].tolist() for name in ("y", "ids", "sums")]
        return told == [(words + words).tolist(), ids.tolist(), [number * length] * rows]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(asked, range(120)))
    # One long text in a short row.
    long = texts(["x" * 2000])
    found = client.infer("tokens", {"x": long, "w": np.ones((1, 1), np.float32)}, **LONG).outputs
    assert found["y"].tolist() == [["x" * 4000]]
    with pytest.raises(BadRequestError, match=r"found length 2 .*, expected 1 as in input 'x'"):
        client.infer("tokens", {"x": long, "w": np.ones((1, 2), np.float32)}, **LONG)
    with pytest.raises(BadRequestError, match="at most for a request of such sizes; send shorter"):
        client.infer(
            "tokens", {"x": texts(["x" * 2**20]), "w": np.ones((1, 1), np.float32)}, **LONG
        )
    with pytest.raises(RefusedError, match=r"FAILED: .*UTF-8"):
        client.infer("tokens", {"x": texts([b"\xff"]), "w": np.ones((1, 1), np.float32)}, **LONG)


def test_a_model_that_reads_numbers_in_texts_is_served(client: Client) -> None:
    found = client.infer("sums", texts(["1", "2"], ["30", "-4"]), **LONG).outputs["y"]
    assert found.tolist() == ["3", "26"]
    with pytest.raises(RefusedError, match="FAILED: "):
        client.infer("sums", texts(["1", "two"]), **LONG)


def test_classes_of_texts_are_refused(server: LocalServer) -> None:
    wanted = [{"name": "y", "parameters": {"classification": 1}}]
    number = {"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}
    answer = post(server, "labels", number, outputs=wanted)
    assert "found for an output of BYTES, expected numbers" in answer["error"]


# --- bounds, and requests that share a batch ----------------------------------------------------------


def test_a_text_that_is_too_long_is_refused_with_the_bound(client: Client) -> None:
    with pytest.raises(
        BadRequestError,
        match="found 300033 bytes of text, expected 262168 at most in 1 rows",
    ):
        client.infer("numbers", texts(["a" * 300_000, "b"]), **LONG)
    inputs = {
        "a": texts(["a" * 200_000]),
        "b": texts(["b" * 200_000]),
        "z": np.zeros(1, np.float32),
    }
    with pytest.raises(
        RefusedError,
        match=r"output 'c' has .* bytes for shape .*, expected .* at most; smaller batch_sizes",
    ):
        client.infer("joined", inputs, **LONG)


def test_requests_of_many_clients_are_never_mixed(client: Client) -> None:
    def asked(number: int) -> bool:
        word = f"{number}-" * (number % 7)
        inputs = {
            "a": texts([word]),
            "b": texts([str(number)]),
            "z": np.array([number], np.float32),
        }
        found = client.infer("joined", inputs, **LONG).outputs
        told: list[Any] = [found["c"].tolist(), found["w"].tolist()]
        return told == [[[f"{word}{number}"]], [-number]]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(asked, range(300)))


def test_a_request_that_fails_fails_alone(client: Client) -> None:
    def asked(number: int) -> bool:
        word = ("yes", "no", "unknown")[number % 3]
        try:
            found: Any = client.infer("strict", texts([word]), **LONG).outputs["y"].tolist()
        except RefusedError as error:
            return word == "unknown" and error.refusal.value == "FAILED"
        return bool(found == [[[1.0, 0.0] if word == "yes" else [0.0, 1.0]]])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(asked, range(90)))


def test_code_that_raises_on_a_request_answers_the_others(client: Client) -> None:
    def asked(number: int) -> bool:
        word = "raise" if number % 5 == 0 else f"w{number}"
        inputs = {"words": texts(word), "numbers": np.array([number])}
        try:
            found = client.infer("code", inputs, **LONG).outputs
        except RefusedError as error:
            return word == "raise" and "predict raised ValueError: asked for" in str(error)
        told: list[Any] = [found["upper"].tolist(), found["sums"].tolist()]
        return told == [[word.upper()], [number + len(word)]]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(asked, range(60)))


# --- applications -----------------------------------------------------------------------------------


def test_an_application_votes_on_texts_and_learns_from_texts(
    server: LocalServer, client: Client
) -> None:
    application = control_pb2.Application(
        name="votes",
        models=["says_a", "says_b", "says_c"],
        policy="exp4-full",
        slo_ns=60_000_000_000,
    )
    with Operator(server.address) as operator:
        operator.put_application(application)
        assert client.metadata("votes").outputs[0].datatype == "BYTES"
        found = client.infer("votes", texts("a", "b", "c"), **LONG)
        assert found.outputs["label"].tolist() == ["cat", "hen", "?"]
        assert found.explanation["confidence"] == (0.6667, 0.6667, 1.0)
        (outcome,) = client.feedback(Feedback(f"{found.query_id}/0", label="ox"))
        assert (outcome.status, outcome.losses) == (
            "APPLIED",
            {"says_a": 1, "says_b": 1, "says_c": 0},
        )
        assert outcome.weights["says_c"] > outcome.weights["says_a"]
        with tritonclient.grpc.InferenceServerClient(server.address) as triton:
            tensor = tritonclient.grpc.InferInput("x", [1], "BYTES")
            tensor.set_data_from_numpy(texts("a"))
            assert triton.infer("votes", [tensor], parameters=LONG).as_numpy("label").tolist() == [
                b"cat"
            ]
        operator.remove_application("votes")


def test_a_member_that_fails_on_a_text_has_no_vote(server: LocalServer, client: Client) -> None:
    application = control_pb2.Application(
        name="numbers_too", models=["says_number", "says_a"], slo_ns=60_000_000_000
    )
    with Operator(server.address) as operator:
        operator.put_application(application)
        found = client.infer("numbers_too", texts("a"), **LONG)
        assert found.outputs["label"].tolist() == ["cat"]
        assert (found.explanation["models"], found.explanation["missing"]) == (
            "says_a",
            "says_number",
        )
        found = client.infer("numbers_too", texts("7"), **LONG)
        assert found.explanation["missing"] == ""
        operator.remove_application("numbers_too")
        for changes, words in (
            (
                {"default_label": 3},
                "default_label: found 3, expected none, because the label is text",
            ),
            ({"models": ["tokens"]}, "expected one named 'label'"),
        ):
            settings: dict[str, Any] = {"name": "odd", "models": ["says_a"], **changes}
            with pytest.raises(ModelError, match=words):
                operator.put_application(control_pb2.Application(**settings))


# --- commands ---------------------------------------------------------------------------------------


def command(server: LocalServer, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "clockwright.cli", *arguments, "--server", server.address],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


def test_commands_send_and_show_texts(server: LocalServer, tmp_path: Path) -> None:
    words = tmp_path / "words.npy"
    np.save(words, np.array([["a", "ä"]]))
    found = command(server, "infer", "numbers", "--input", f"x={words}", "--slo-ms", "600000")
    assert "y: int64 (1, 2): 1 3" in found
    numbers = tmp_path / "numbers.npy"
    np.save(numbers, np.array([2, 5]))
    asked = ("infer", "labels", "--input", f"x={numbers}", "--slo-ms", "600000")
    assert "y: text (2): 'zwei' ''" in command(server, *asked)
    assert json.loads(command(server, *asked, "--json"))["outputs"] == {"y": ["zwei", ""]}
    assert "c: text (2, 1): " in command(
        server, "infer", "joined", "--random", "--rows", "2", "--slo-ms", "600000"
    )
    for more in ([], ["--input", f"x={words}"]):
        found = command(
            server,
            "load",
            "numbers",
            "--concurrency",
            "2",
            "--seconds",
            "0.5",
            "--slo-ms",
            "60000",
            *more,
        )
        assert "in time" in found
