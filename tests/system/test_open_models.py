"""Models with open dimensions, served as shipped: each answer is plain onnxruntime's on the same request alone."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton

from clockwright import BadRequestError, Client, Refusal, RefusedError, UnknownModelError
from clockwright.client.operator import Operator
from clockwright.errors import ModelError
from clockwright.v1 import control_pb2 as pb
from experiments.bench.open_models import Array, build, encoder
from experiments.live.local_server import LocalServer
from tests.kit.processes import listening, until

SLO_MS = 600_000.0
POSITIONS = 48

MODELS = {
    name: build(name)
    for name in (
        "wide",
        "two_symbols",
        "same_symbol",
        "one_scale",
        "one_row",
        "halves",
        "table",
        "nameless",
    )
}
MODELS["encoder"] = encoder(positions=POSITIONS)
MODELS["other"] = encoder(positions=POSITIONS, seed=1)
MODELS["bounded"] = MODELS["encoder"]
MODELS["beyond"] = MODELS["encoder"]
MODELS["fixed"] = MODELS["encoder"]
#: The mean of the states of all tokens that are not padded.
MODELS["mean"] = onnx.parser.parse_model(
    """
    <ir_version: 8, opset_import: ["" : 18]>
    mean (float[rows, tokens, 32] states, int64[rows, tokens] mask) => (float[rows, 32] mean) {
        axis = Constant<value_ints = [1]>()
        last = Constant<value_ints = [2]>()
        kept = Cast<to = 1>(mask)
        wide = Unsqueeze(kept, last)
        of_kept = Mul(states, wide)
        total = ReduceSum<keepdims = 0>(of_kept, axis)
        count = ReduceSum<keepdims = 0>(kept, axis)
        divisor = Unsqueeze(count, axis)
        mean = Div(total, divisor)
    }
    """
)
PIPELINE = """
[pipeline]
inputs = ["input_ids", "mask"]
outputs = { mean = "mean.mean", states = "encoder.states", label = "encoder.label" }
[[pipeline.stages]]
model = "encoder"
inputs = { input_ids = "input_ids", attention_mask = "mask" }
[[pipeline.stages]]
model = "mean"
inputs = { states = "encoder.states", mask = "mask" }
"""
#: Words become numbers; short rows end in zeros.
TOKENIZE = """
import numpy as np

def predict(text):
    rows = [[len(word) for word in each.split()] for each in text]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, numbers in zip(ids, rows):
        row[: len(numbers)] = numbers
    return ids, (ids > 0).astype(np.int64)
"""
CONTAINER = """
batch_sizes = [1, 2, 4]
[container]
load = "model.py"
inputs = { text = "BYTES[]" }
outputs = { ids = "INT64[<=20]", mask = "INT64[<=20]" }
"""
OF_TEXT = """
[pipeline]
inputs = ["text"]
outputs = { mean = "mean.mean", ids = "tokenize.ids" }
[[pipeline.stages]]
model = "tokenize"
inputs = { text = "text" }
[[pipeline.stages]]
model = "encoder"
inputs = { input_ids = "tokenize.ids", attention_mask = "tokenize.mask" }
[[pipeline.stages]]
model = "mean"
inputs = { states = "encoder.states", mask = "tokenize.mask" }
"""
CONFIGS = {
    "nameless": "cache = true\n",
    "bounded": "[dimensions]\nsequence = { max = 20 }\n",
    "beyond": "[dimensions]\nsequence = { max = 4096 }\n",
    "fixed": "[dimensions]\nsequence = 20\n",
}


#: Those that take any size that works.
SERVED = [name for name in MODELS if "dimensions" not in CONFIGS.get(name, "")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("open")
    for name, model in MODELS.items():
        folder = directory / "models" / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
        config = "batch_sizes = [1, 2, 4]\n" + CONFIGS.get(name, "")
        (folder / "config.toml").write_text(config)
    (directory / "models" / "tokenize" / "1").mkdir(parents=True)
    (directory / "models" / "tokenize" / "1" / "model.py").write_text(TOKENIZE)
    for name, config in (("embed", PIPELINE), ("search", OF_TEXT), ("tokenize", CONTAINER)):
        (directory / "models" / name).mkdir(exist_ok=True)
        (directory / "models" / name / "config.toml").write_text(config)
    arguments = ["--pages", "32", "--arena-mib", "16", "--cache-dir", str(directory / "cache")]
    arguments += ["--http-port", "0", "--metrics-port", "0"]
    with LocalServer(["--models", str(directory / "models"), *arguments]) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.address) as made:
        yield made


def alone(model: onnx.ModelProto, inputs: dict[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def check(client: Client, name: str, inputs: dict[str, Array]) -> None:
    found = client.infer(name, inputs, slo_ms=SLO_MS).outputs
    if name == "one_scale":
        rows = [alone(MODELS[name], {"x": row[np.newaxis]}) for row in inputs["x"]]
        wanted = {"y": np.concatenate([row["y"] for row in rows])}
    else:
        wanted = alone(MODELS[name], inputs)
    assert list(found) == list(wanted)
    for each, array in wanted.items():
        assert found[each].shape == array.shape
        np.testing.assert_allclose(found[each], array, rtol=1e-4, atol=1e-5)


def tokens(random: np.random.Generator, rows: int, length: int) -> dict[str, Array]:
    mask = np.ones((rows, length), np.int64)
    for row in mask:
        row[random.integers(1, length + 1) :] = 0
    return {"input_ids": random.integers(0, 1000, (rows, length)), "attention_mask": mask}


def request(name: str, random: np.random.Generator) -> dict[str, Array]:
    """A request of any size."""
    rows, length = int(random.integers(1, 4)), int(random.integers(1, 40))

    def floats(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    match name:
        case "encoder" | "other":
            return tokens(random, rows, length)
        case "wide":
            return {"x": floats(rows, 2, 8, length)}
        case "two_symbols":
            return {"a": floats(rows, length, 4), "b": floats(rows, int(random.integers(1, 9)), 4)}
        case "same_symbol":
            return {"a": floats(rows, length), "b": floats(rows, length)}
        case "one_row":
            return {"x": floats(1, length)}
        case "mean":
            mask = tokens(random, rows, length)["attention_mask"]
            return {"states": floats(rows, length, 32), "mask": mask}
        case "table":
            return {"x": random.integers(0, 10, (rows, length))}
        case _:
            return {"x": floats(rows, length)}


@pytest.mark.parametrize("name", SERVED)
def test_a_request_carries_its_own_sizes(name: str, client: Client) -> None:
    random = np.random.default_rng(1)
    for _ in range(6):
        check(client, name, request(name, random))


def test_clients_of_other_sizes_at_once_get_their_own_answers(client: Client) -> None:
    names = SERVED
    begin = threading.Barrier(8)

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        begin.wait()
        for _ in range(25):
            # Mostly the encoder, so that its batches have several requests.
            name = "encoder" if random.random() < 0.6 else str(random.choice(names))
            check(client, name, request(name, random))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


def embedded(inputs: dict[str, Array]) -> dict[str, Array]:
    """What the pipeline answers, each stage alone."""
    first = alone(MODELS["encoder"], inputs)
    mask = inputs["attention_mask"]
    return alone(MODELS["mean"], {"states": first["states"], "mask": mask}) | first


def check_embedded(client: Client, inputs: dict[str, Array]) -> None:
    sent = {"input_ids": inputs["input_ids"], "mask": inputs["attention_mask"]}
    found = client.infer("embed", sent, slo_ms=SLO_MS).outputs
    for name, array in embedded(inputs).items():
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_a_pipeline_of_open_models_takes_each_requests_own_sizes(
    server: LocalServer, client: Client
) -> None:
    with triton.InferenceServerClient(server.address) as other:
        described = other.get_model_metadata("embed")
    assert [list(each.shape) for each in described.inputs] == [[-1, -1], [-1, -1]]
    assert [list(each.shape) for each in described.outputs] == [[-1, 32], [-1, -1, 32], [-1, 3]]
    random = np.random.default_rng(2)
    for rows, length in ((1, 1), (3, 17), (2, POSITIONS), (4, 5)):
        check_embedded(client, tokens(random, rows, length))
    begin = threading.Barrier(4)

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        begin.wait()
        for _ in range(10):
            check_embedded(
                client, tokens(random, int(random.integers(1, 4)), int(random.integers(1, 40)))
            )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))


def test_text_of_any_length_passes_a_container_and_open_models(client: Client) -> None:
    """What a text becomes does not depend on those that are asked with it in a batch."""
    texts = ["a bb ccc", "dddd", "a a a a a a a", " ".join(["word"] * 20)]
    begin = threading.Barrier(4)

    def ask(text: str) -> None:
        begin.wait()
        numbers = np.array([[len(word) for word in text.split()]])
        wanted = embedded({"input_ids": numbers, "attention_mask": np.ones_like(numbers)})
        for _ in range(5):
            found = client.infer("search", np.array([text], object), slo_ms=SLO_MS).outputs
            np.testing.assert_array_equal(found["ids"], numbers)
            np.testing.assert_allclose(found["mean"], wanted["mean"], rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, texts))
    # Rows of one request are the code's to pad.
    found = client.infer("search", np.array(texts[:2], object), slo_ms=SLO_MS).outputs["ids"]
    assert found.tolist() == [[1, 2, 3], [4, 0, 0]]


def test_what_a_container_gives_beyond_its_largest_size_is_refused(client: Client) -> None:
    with pytest.raises(
        RefusedError, match=r"'ids' has shape \[1, 21\], expected \[1, <=20\]"
    ) as caught:
        client.infer("search", np.array([" ".join(["word"] * 21)], object), slo_ms=SLO_MS)
    assert caught.value.refusal is Refusal.FAILED
    with pytest.raises(BadRequestError, match=r"found 9 rows .* expected 1 to 4"):
        client.infer("tokenize", np.array(["a"] * 9, object), slo_ms=SLO_MS)


def test_an_application_combines_answers_of_each_requests_own_sizes(
    server: LocalServer, client: Client
) -> None:
    average = pb.Application(
        name="both",
        models=["encoder", "other"],
        combination="average",
        label_output="best",
        probability_output="label",
    )
    with Operator(server.address) as operator:
        operator.put_application(average)
    random = np.random.default_rng(3)
    for rows, length in ((1, 1), (3, 17), (2, POSITIONS), (4, 5)):
        inputs = tokens(random, rows, length)
        found = client.infer("both", inputs, slo_ms=SLO_MS)
        assert found.explanation["models"] == "encoder,other"
        wanted = [alone(MODELS[name], inputs)["label"] for name in ("encoder", "other")]
        mean = np.mean(wanted, axis=0)
        np.testing.assert_allclose(found.outputs["label"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found.outputs["best"], mean.argmax(axis=1))
    with pytest.raises(BadRequestError, match=f"expected 1 to {POSITIONS}, the largest size"):
        client.infer("both", tokens(random, 1, POSITIONS + 1), slo_ms=SLO_MS)


def test_models_of_other_largest_sizes_do_not_fit_an_application(server: LocalServer) -> None:
    unlike = pb.Application(
        name="unlike",
        models=["encoder", "bounded"],
        combination="average",
        probability_output="label",
    )
    with (
        Operator(server.address) as operator,
        pytest.raises(ModelError, match="same largest sizes"),
    ):
        operator.put_application(unlike)


def test_sizes_that_do_not_fit_a_pipeline_are_named(client: Client) -> None:
    random = np.random.default_rng(2)
    inputs = tokens(random, 1, 8)
    longer = tokens(random, 1, 9)["attention_mask"]
    sent = {"input_ids": inputs["input_ids"], "mask": longer}
    with pytest.raises(
        BadRequestError, match=r"input 'mask': found .* 9 .* expected 8 as in input"
    ):
        client.infer("embed", sent, slo_ms=SLO_MS)
    long = tokens(random, 1, POSITIONS + 1)
    sent = {"input_ids": long["input_ids"], "mask": long["attention_mask"]}
    with pytest.raises(BadRequestError, match=f"expected 1 to {POSITIONS}, the largest size"):
        client.infer("embed", sent, slo_ms=SLO_MS)


@pytest.mark.parametrize("memory", ["64", "0"])
def test_fronts_near_and_far_carry_sizes(memory: str, server: LocalServer) -> None:
    """Small tensors in frames; large ones in shared memory, or straight between front and worker."""
    flags = ("--controller", server.address, "--port", "0", "--shared-memory-mib", memory)
    random = np.random.default_rng(3)
    with listening("front", *flags) as (_, address), Client(address) as far:
        until(far.is_ready, what="the front is ready")
        for width in (3, 1500, 4000, 7, 4096):
            x = random.standard_normal((1, 2, 8, width)).astype(np.float32)
            check(far, "wide", {"x": x})
            check(far, "encoder", tokens(random, 2, 1 + width % POSITIONS))
            check_embedded(far, tokens(random, 2, 1 + width % POSITIONS))
        with pytest.raises(RefusedError, match="out of data bounds"):
            far.infer("table", {"x": np.array([[99]])}, slo_ms=SLO_MS)


def test_the_cache_tells_shapes_of_equal_bytes_apart(client: Client) -> None:
    numbers = np.arange(12, dtype=np.float32) - 5
    for _ in range(2):
        for shape in ((1, 12), (12, 1), (3, 4), (4, 3)):
            check(client, "nameless", {"x": numbers.reshape(shape)})


def test_a_model_is_replaced_by_one_of_other_sizes_and_removed(
    server: LocalServer, client: Client, tmp_path: Path
) -> None:
    random = np.random.default_rng(4)
    (tmp_path / "added" / "1").mkdir(parents=True)
    content = MODELS["encoder"].SerializeToString()
    (tmp_path / "added" / "1" / "model.onnx").write_bytes(content)
    MODELS["added"] = MODELS["encoder"]
    with Operator(server.address) as operator:
        for sizes, largest in (("{ max = 20 }", 20), ("9", 9), ("{ max = 30 }", 30)):
            config = f"batch_sizes = [1, 2]\ndimensions = {{ sequence = {sizes} }}\n"
            (tmp_path / "added" / "config.toml").write_text(config)
            operator.add_model(tmp_path / "added", name="added", replace=True)
            check(client, "added", tokens(random, 2, largest))
            with pytest.raises(BadRequestError):
                client.infer("added", tokens(random, 1, largest + 1), slo_ms=SLO_MS)
        operator.remove_model("added")
    with pytest.raises(UnknownModelError):
        client.infer("added", tokens(random, 1, 3), slo_ms=SLO_MS)


def test_a_request_of_its_own_size_is_explained(server: LocalServer, client: Client) -> None:
    answer = client.infer(
        "encoder", tokens(np.random.default_rng(5), 1, 31), slo_ms=SLO_MS, explain=True
    )
    said = answer.explanation
    # 31 of 48 tokens, of which a row of work has 2.
    assert said["batch_size"] == 16
    assert 0 < said["exec_us"] <= said["measured_us"]
    assert said["predicted_exec_us"] > 0
    with Operator(server.address) as operator:
        explained = operator.explain(str(said["request_id"]))
    assert (explained.model_id, explained.outcome, explained.rows) == ("encoder", "OK", 16)


def test_the_largest_size_is_found_and_named(client: Client) -> None:
    random = np.random.default_rng(0)
    check(client, "encoder", tokens(random, 1, POSITIONS))
    with pytest.raises(
        BadRequestError, match=rf"found sequence {POSITIONS + 1} .*1 to {POSITIONS}"
    ):
        client.infer("encoder", tokens(random, 1, POSITIONS + 1), slo_ms=SLO_MS)


def test_declared_sizes_hold(server: LocalServer, client: Client) -> None:
    random = np.random.default_rng(0)
    assert client.infer("bounded", tokens(random, 2, 20), slo_ms=SLO_MS)
    with pytest.raises(BadRequestError, match=r"found sequence 21 .*1 to 20"):
        client.infer("bounded", tokens(random, 1, 21), slo_ms=SLO_MS)
    assert client.infer("fixed", tokens(random, 2, 20), slo_ms=SLO_MS)
    with pytest.raises(BadRequestError, match=r"found shape \[1, 19\], expected \[-1, 20\]"):
        client.infer("fixed", tokens(random, 1, 19), slo_ms=SLO_MS)
    with pytest.raises(RefusedError, match=r"says that 'sequence' goes up to 4096, but 48 is"):
        client.infer("beyond", tokens(random, 1, 1), slo_ms=SLO_MS)


def test_sizes_of_one_symbol_must_be_equal(client: Client) -> None:
    inputs = {"a": np.zeros((1, 3), np.float32), "b": np.zeros((1, 4), np.float32)}
    with pytest.raises(BadRequestError, match=r"input 'b': found length 4 .* expected 3 as in"):
        client.infer("same_symbol", inputs, slo_ms=SLO_MS)


def test_too_many_rows_are_refused_in_a_clients_words(client: Client) -> None:
    inputs = tokens(np.random.default_rng(0), 60, POSITIONS)
    with pytest.raises(
        BadRequestError, match=r"found rows x sequence = 2880, expected \d+ at most"
    ):
        client.infer("encoder", inputs, slo_ms=SLO_MS)


def test_a_request_fails_alone(server: LocalServer, client: Client) -> None:
    bad = {"x": np.array([[3, 99]])}
    begin = threading.Barrier(4)

    def ask(number: int) -> str:
        begin.wait()
        for length in range(1, 20):
            check(client, "table", {"x": np.full((1, length), number)})
        return ""

    def fail() -> str:
        begin.wait()
        words = ""
        for _ in range(10):
            with pytest.raises(RefusedError) as found:
                client.infer("table", bad, slo_ms=SLO_MS)
            words = str(found.value)
        return words

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, number) for number in range(3)]
        words = pool.submit(fail).result()
        assert [each.result() for each in others] == [""] * 3
    assert "FAILED" in words
    assert "indices element out of data bounds" in words
    # Whoever counts answers does not count what was none.
    with urllib.request.urlopen(server.metrics) as answer:
        lines = [line for line in answer.read().decode().splitlines() if 'model="table"' in line]
    (failed,) = [line for line in lines if 'reason="FAILED"' in line]
    assert float(failed.split()[-1]) >= 10


def test_metadata_has_minus_one_for_open_sizes(server: LocalServer, client: Client) -> None:
    shapes = {
        name: [list(spec.shape(-1)) for spec in client.metadata(name).inputs]
        for name in ("encoder", "wide", "fixed")
    }
    assert shapes == {
        "encoder": [[-1, -1], [-1, -1]],
        "wide": [[-1, 2, 8, -1]],
        "fixed": [[-1, 20], [-1, 20]],
    }
    outputs = [list(spec.shape(-1)) for spec in client.metadata("encoder").outputs]
    assert outputs == [[-1, -1, 32], [-1, 3]]
    with Operator(server.address) as operator:
        reasons = {each.model_id: each.one_by_one for each in operator.models()}
    assert "ReduceMax" in reasons["one_scale"]
    assert not reasons["encoder"]


def test_rest_says_the_shapes_of_answers(server: LocalServer) -> None:
    def post(name: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{server.rest}/v2/models/{name}/infer"
        data = json.dumps(body | {"parameters": {"slo_ms": SLO_MS}}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data)) as answer:
            return dict(json.loads(answer.read()))

    for length in (2, 5):
        body = {
            "inputs": [
                {
                    "name": "x",
                    "shape": [2, length],
                    "datatype": "FP32",
                    "data": [[1.5] * length] * 2,
                }
            ]
        }
        (output,) = post("halves", body)["outputs"]
        assert output["shape"] == [2, -(-length // 2)]
        assert output["data"] == [1.5] * (2 * -(-length // 2))
