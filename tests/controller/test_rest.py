"""REST by clients that others wrote, unchanged: what they get is what gRPC's clients get."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import tritonclient.grpc
import tritonclient.http as triton
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, shared_memory

from clockwright.errors import Refusal
from controller.core.quotas import Quota
from controller.front.http import rest, rest_server
from controller.front.http.rest import HTTP_STATUSES
from controller.front.oip.json_messages import fields_of
from controller.front.oip.statuses import CODES
from tests.kit.front_end import FrontEnd, FrontEndInThread, serving_in_thread, until

SLO_MS = 600_000
LONG = {"slo_ms": SLO_MS}
ROW = np.array([[1, 2, 3]], np.float32)
MIXED = (("a", [2], "INT64"), ("b", [2, 2], "FP32"))


@pytest.fixture(scope="module", params=["here", "apart"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontEndInThread]:
    """A controller, and a front that has only a link to it."""
    folder = tmp_path_factory.mktemp("models")
    with serving_in_thread(folder, front=request.param, rest=True, client_shm=True) as running:
        yield running


@pytest.fixture
def client(server: FrontEndInThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.rest) as found:
        yield found


def tensor(values: np.ndarray[Any, Any], *, binary: bool = True, name: str = "x") -> Any:  # noqa: ANN401
    datatype = {"float32": "FP32", "int64": "INT64"}[values.dtype.name]
    found = triton.InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values, binary_data=binary)
    return found


def question(data: object = (1, 2, 3), **fields: object) -> dict[str, Any]:
    """A request to `double` in JSON."""
    inputs = [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": data}]
    return {"inputs": inputs, "parameters": LONG, **fields}


def post(server: FrontEndInThread, body: object, model: str = "double", **headers: str) -> Any:  # noqa: ANN401
    url = f"http://{server.rest}/v2/models/{model}/infer"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(url, json=body, headers=named, timeout=60)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("sent", [True, False])
def test_tritons_client_infers_with_tensors_in_binary_or_json(
    client: triton.InferenceServerClient, *, sent: bool, asked: bool
) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    wanted = [triton.InferRequestedOutput("y", binary_data=asked)]
    answer = client.infer(
        "double", [tensor(rows, binary=sent)], outputs=wanted, request_id="7", parameters=LONG
    )
    assert answer.as_numpy("y").tolist() == (2 * rows).tolist()
    assert answer.get_response()["id"] == "7"
    answer = client.infer("double", [tensor(rows, binary=sent)], model_version="1", parameters=LONG)
    assert answer.as_numpy("y").tolist() == (2 * rows).tolist()


def test_several_tensors_of_several_kinds_go_through_in_any_order(
    client: triton.InferenceServerClient,
) -> None:
    a, b = np.array([[1, 2]]), np.array([[[1, 2], [3, 4]]], np.float32)
    for first in (True, False):
        inputs = [tensor(b, name="b", binary=first), tensor(a, name="a", binary=not first)]
        wanted = [
            triton.InferRequestedOutput("b_sum", binary_data=first),
            triton.InferRequestedOutput("a_plus_1", binary_data=not first),
        ]
        answer = client.infer("mixed", inputs, outputs=wanted, parameters=LONG)
        assert answer.as_numpy("a_plus_1").tolist() == [[2, 3]]
        assert answer.as_numpy("b_sum").tolist() == [[3, 7]]


def test_a_large_tensor_comes_whole(client: triton.InferenceServerClient) -> None:
    image = np.random.default_rng(1).random((1, 3, 224, 224), np.float32)
    answer = client.infer("image", [tensor(image, name="image")], parameters=LONG)
    assert answer.as_numpy("first").tolist() == image[:, 0, 0, :2].tolist()


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("INT8", [-128, 127]),
        ("UINT8", [0, 255]),
        ("INT16", [-32768, 32767]),
        ("UINT16", [0, 65535]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("UINT32", [0, 2**32 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("FP16", [0.5, -2]),
        ("FP32", [1.5, -0.25]),
        ("FP64", [0.1, 1e300]),
    ],
)
def test_json_can_say_every_number_of_a_datatype_and_none_beyond(
    server: FrontEndInThread, datatype: str, values: list[Any]
) -> None:
    def ask(data: list[Any]) -> Any:  # noqa: ANN401
        inputs = [{"name": "x", "shape": [1, 2], "datatype": datatype, "data": data}]
        return post(server, {"inputs": inputs, "parameters": LONG}, model=f"echo-{datatype}")

    assert ask(values).json()["outputs"][0]["data"] == values
    assert ask([values]).json()["outputs"][0]["data"] == values
    wrong: list[Any] = ["1", 1.5] if "INT" in datatype else [values[0], "x"]
    for data in (wrong, [values[0]], [*values, values[0]], [], [[values[0]], values[1]]):
        answer = ask(data)
        assert answer.status_code == 400
        assert "'x'" in answer.json()["error"]
    if datatype in ("FP16", "FP32"):
        assert ask([1e39, 1]).status_code == 400
    if "INT" in datatype and "64" not in datatype:
        assert ask([values[0], values[1] + 1]).status_code == 400


@pytest.mark.parametrize("binary", [True, False])
def test_classes_are_asked_for_over_rest_and_over_grpc(
    client: triton.InferenceServerClient, server: FrontEndInThread, *, binary: bool
) -> None:
    rows = np.array([[1, 3, 2], [0.5, -1, 0.5]], np.float32)
    expected = [[b"6.000000:1", b"4.000000:2"], [b"1.000000:0", b"1.000000:2"]]
    wanted = triton.InferRequestedOutput("y", binary_data=binary, class_count=2)
    for _ in range(2):
        answer = client.infer("double", [tensor(rows)], outputs=[wanted], parameters=LONG)
        assert answer.get_output("y")["datatype"] == "BYTES"
        found = answer.as_numpy("y").tolist()
        assert found == (expected if binary else [[e.decode() for e in row] for row in expected])
    with tritonclient.grpc.InferenceServerClient(server.address) as other:
        x = tritonclient.grpc.InferInput("x", [2, 3], "FP32")
        x.set_data_from_numpy(rows)
        y = tritonclient.grpc.InferRequestedOutput("y", class_count=9)
        found = other.infer("double", [x], outputs=[y], parameters=LONG).as_numpy("y")
        # There are no more than three.
        assert found[0].tolist() == [*expected[0], b"2.000000:0"]
        # The same request but for that gets its values.
        found = other.infer("double", [x], parameters=LONG).as_numpy("y")
        assert found.tolist() == (2 * rows).tolist()


def test_tritons_client_sees_health_metadata_and_the_repository(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", "1")
    assert not client.is_model_ready("double", "2")
    assert not client.is_model_ready("none")
    with tritonclient.grpc.InferenceServerClient(server.address) as other:
        assert client.get_server_metadata() == fields_of(other.get_server_metadata())
        assert client.get_model_metadata("mixed") == fields_of(other.get_model_metadata("mixed"))
        models = other.get_model_repository_index().models
        assert client.get_model_repository_index() == [fields_of(model) for model in models]
    client.unload_model("wrong")
    assert not client.is_model_ready("wrong")
    client.load_model("wrong")
    server.run(until(lambda: client_ready(server, "wrong")))
    with pytest.raises(InferenceServerException, match="Request for unknown model: there is no"):
        client.get_model_metadata("none")


def test_tritons_clients_read_a_models_configuration(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    config = client.get_model_config("mixed", "1")
    assert (config["name"], config["platform"]) == ("mixed", "onnxruntime_onnx")
    assert config["input"] == [
        {"name": "a", "data_type": "TYPE_INT64", "format": "FORMAT_NONE", "dims": [2]},
        {"name": "b", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [2, 2]},
    ]
    assert [each["dims"] for each in config["output"]] == [[2], [2]]
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["parameters"] == {"slo_ms": {"string_value": "100"}}
    most = config["max_batch_size"]
    a, b = (triton.InferInput(name, [most + 1, *dims], kind) for name, dims, kind in MIXED)
    a.set_data_from_numpy(np.zeros((most + 1, 2), np.int64))
    b.set_data_from_numpy(np.zeros((most + 1, 2, 2), np.float32))
    with pytest.raises(InferenceServerException, match=f"expected 1 to {most}"):
        client.infer("mixed", [a, b], parameters=LONG)
    with tritonclient.grpc.InferenceServerClient(server.address) as other:
        assert other.get_model_config("mixed", as_json=True)["config"]["max_batch_size"] == most
        told = other.get_model_config("mixed").config
        assert told.input[1].data_type == model_config_pb2.TYPE_FP32
        assert list(told.dynamic_batching.preferred_batch_size) == [1, 2, 4]
        with pytest.raises(InferenceServerException, match="Request for unknown model"):
            other.get_model_config("none")


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_model_is_loaded_with_a_configuration_and_files_of_the_clients(
    kind: str, client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    grpc_client = tritonclient.grpc.InferenceServerClient(server.address)
    with grpc_client:
        by: Any = client if kind == "http" else grpc_client
        by.load_model("worse", config='{"max_batch_size": "5"}')
        assert client.get_model_config("worse")["max_batch_size"] == 5
        by.load_model("worse", files={"file:7/model.onnx": b"scripted"})
        assert client.get_model_metadata("worse")["versions"] == ["7"]
        for arguments, words in (
            ({"config": '"name": "worse"'}, "config: found .* a JSON object"),
            ({"config": '{"name": "other"}'}, "name is 'other', expected 'worse'"),
            ({"config": '{"max_batch_size": -1}'}, "max_batch_size is -1, expected 0 or more"),
            ({"files": {"file:../model.onnx": b"x"}}, "expected one inside the model's folder"),
            (
                {"files": {f"file:1/{'A' * 256}": b"x"}},
                "failed to poll from model repository: path: found a name of 256 bytes",
            ),
            ({"files": {"1/model.onnx": b"x"}}, "expected config .JSON. or file:VERSION/NAME"),
        ):
            with pytest.raises(
                InferenceServerException, match=f"failed to load 'worse': .*{words}"
            ):
                by.load_model("worse", **arguments)
        with pytest.raises(InferenceServerException, match="failed to load 'nothing'"):
            by.load_model("nothing")
        assert client.get_model_metadata("worse")["versions"] == ["7"]
        by.unload_model("worse")
        by.load_model("worse")
        assert client.get_model_metadata("worse")["versions"] == ["1"]


def test_classes_have_the_names_of_a_models_labels(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    config = json.dumps(
        {"output": [{"name": "probabilities", "dims": [-1, 4], "label_filename": "names.txt"}]}
    )
    files = {"file:1/model.onnx": b"scripted", "file:names.txt": "Katze\nbär".encode()}
    client.load_model("worse", config=config, files=files)
    assert client.get_model_config("worse")["output"][1]["label_filename"] == "names.txt"
    wanted = triton.InferRequestedOutput("probabilities", class_count=4)
    x = tensor(np.array([[0, 3, 2]], np.float32))
    found = client.infer("worse", [x], outputs=[wanted], parameters=LONG).as_numpy("probabilities")
    names = sorted(text.decode().split(":", 1)[1] for text in found[0])
    assert names == ["0:Katze", "1:bär", "2", "3"]


def test_files_of_a_load_may_have_a_mebibyte_and_more(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    with tritonclient.grpc.InferenceServerClient(server.address) as other:
        for each, size in ((other, 3 << 20), (client, 2 << 20)):
            each.load_model("worse", files={"file:3/model.onnx": bytes(size)})
            assert client.is_model_ready("worse", "3")
            each.unload_model("worse")
            each.load_model("worse")


def test_clients_clear_shared_memory_of_a_kind_that_there_is_not(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    with tritonclient.grpc.InferenceServerClient(server.address) as other:
        for each in (client, other):
            each.unregister_cuda_shared_memory()
            each.unregister_cuda_shared_memory("left")
        assert client.get_cuda_shared_memory_status() == []
        assert not other.get_cuda_shared_memory_status().regions
        for each in (client, other):
            with pytest.raises(InferenceServerException, match="system shared memory is"):
                each.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 16)


def test_statistics_count_what_became_of_requests(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    def counts(name: str) -> tuple[int, int]:
        [found] = client.get_inference_statistics(name)["model_stats"]
        told = found["inference_stats"]
        return told["success"]["count"], told["fail"]["count"]

    answered, refused = counts("double")
    client.infer("double", [tensor(ROW)], parameters=LONG)
    with pytest.raises(InferenceServerException, match="INFEASIBLE"):
        client.infer("double", [tensor(ROW)], parameters={"slo_ms": 0.01})
    assert counts("double") == (answered + 1, refused + 1)
    every = client.get_inference_statistics()
    with tritonclient.grpc.InferenceServerClient(server.address) as other:
        assert fields_of(other.get_inference_statistics()) == every
    assert {"double", "mixed"} <= {model["name"] for model in every["model_stats"]}
    with pytest.raises(InferenceServerException, match="there is no model 'none'"):
        client.get_inference_statistics("none")


def client_ready(server: FrontEndInThread, name: str) -> bool:
    entry = server.front_end.catalogue.find(name)
    return entry is not None and server.front_end.catalogue.state(entry).value == "READY"


def test_tritons_client_leaves_tensors_in_shared_memory_and_finds_them(
    client: triton.InferenceServerClient,
) -> None:
    with ExitStack() as stack:
        key = f"clockwright-rest-{id(stack)}"
        region = shared_memory.create_shared_memory_region("rows", key, 24, create_only=True)
        stack.callback(shared_memory.destroy_shared_memory_region, region)
        shared_memory.set_shared_memory_region(region, [ROW])
        client.register_system_shared_memory("rows", key, 24)
        stack.callback(client.unregister_system_shared_memory)
        status = client.get_system_shared_memory_status()
        assert status == [{"name": "rows", "key": key, "offset": 0, "byte_size": 24}]
        assert client.get_system_shared_memory_status("rows") == status
        x = triton.InferInput("x", [1, 3], "FP32")
        x.set_shared_memory("rows", 12)
        y = triton.InferRequestedOutput("y")
        y.set_shared_memory("rows", 12, offset=12)
        answer = client.infer("double", [x], outputs=[y], parameters=LONG)
        assert answer.get_output("y")["parameters"]["shared_memory_region"] == "rows"
        found = shared_memory.get_contents_as_numpy(region, np.float32, [1, 3], 12)
        assert found.tolist() == (2 * ROW).tolist()
        client.unregister_system_shared_memory("rows")
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="there is no region 'rows'"):
            client.infer("double", [x], outputs=[y], parameters=LONG)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_tritons_client_packs_its_requests(
    client: triton.InferenceServerClient, algorithm: str
) -> None:
    answer = client.infer(
        "double", [tensor(ROW)], parameters=LONG, request_compression_algorithm=algorithm
    )
    assert answer.as_numpy("y").tolist() == (2 * ROW).tolist()


def test_curl_asks_and_is_told(server: FrontEndInThread, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = tmp_path / "body"
    body.write_text(json.dumps(question()))
    url = f"http://{server.rest}/v2/models/double/infer"
    command = ["curl", "-sS", "-i", "--data-binary", f"@{body}", url, "--max-time", "60"]
    for more in (
        [],
        ["-H", "Expect: 100-continue"],
        ["-H", "Transfer-Encoding: chunked"],
        ["--http2"],
    ):
        output = subprocess.run(
            [*command, *more], check=True, capture_output=True, text=True
        ).stdout
        assert "200 OK" in output
        assert json.loads(output.splitlines()[-1])["outputs"][0]["data"] == [2, 4, 6]


def test_many_requests_of_httpx_are_open_together_on_connections_that_are_kept(
    server: FrontEndInThread,
) -> None:
    async def ask() -> set[tuple[float, ...]]:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(
            base_url=f"http://{server.rest}", limits=limits, timeout=60
        ) as http:
            asks = [http.post("/v2/models/double/infer", json=question()) for _ in range(40)]
            answers = await asyncio.gather(*asks)
        return {tuple(answer.json()["outputs"][0]["data"]) for answer in answers}

    assert asyncio.run(ask()) == {(2.0, 4.0, 6.0)}


@pytest.fixture(scope="session")
def kserve() -> Iterator[subprocess.Popen[str]]:
    """KServe's clients, which take seconds to be imported, and register what they log and measure with their process."""
    folder = Path(sys.prefix) / "kserve"
    if not folder.exists():
        pytest.skip(f"KServe's client is not installed: `make {folder.parent.name}/kserve`")
    command = [sys.executable, "-m", "tests.kit.kserve_client"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        process.kill()


def test_kserves_clients_ask_over_rest_and_over_grpc(
    server: FrontEndInThread, kserve: subprocess.Popen[str]
) -> None:
    assert kserve.stdin is not None
    assert kserve.stdout is not None
    assert kserve.stderr is not None
    print(server.rest, server.address, file=kserve.stdin, flush=True)
    assert kserve.stdout.readline() == "ok\n", kserve.stderr.read()


# --- what a request may say -----------------------------------------------------------------------


def test_the_shortest_objective_of_header_and_body_holds(server: FrontEndInThread) -> None:
    def slo_us(body: dict[str, Any], **headers: str) -> int:
        answer = post(
            server, {**body, "parameters": body["parameters"] | {"explain": True}}, **headers
        )
        found: int = answer.json()["parameters"]["slo_us"]
        return found

    assert slo_us(question()) == SLO_MS * 1000
    assert slo_us(question(), x_clockwright_slo_ms="60000") == 60_000_000
    assert (
        slo_us(question(parameters={"slo_ms": 40_000}), x_clockwright_slo_ms="60000") == 40_000_000
    )
    assert (
        slo_us(question(parameters={"timeout": 30_000_000}), x_clockwright_slo_ms="60000.5")
        == 30_000_000
    )
    assert (
        slo_us(question(parameters={"slo_ms": "50000"}), x_clockwright_slo_ms="6e4") == 50_000_000
    )
    for header in ("0", "-1", "nan", "inf", "soon", "86400001", ""):
        answer = post(server, question(), x_clockwright_slo_ms=header)
        assert answer.status_code == 400
        assert "x-clockwright-slo-ms" in answer.json()["error"]


def test_a_header_or_the_body_says_how_soon_a_request_is_to_be_decided(
    server: FrontEndInThread,
) -> None:
    def explained(body: dict[str, Any], **headers: str) -> dict[str, Any]:
        parameters = {**body["parameters"], "explain": True}
        found: dict[str, Any] = post(server, {**body, "parameters": parameters}, **headers).json()
        return found

    header = "x_clockwright_decide_within_ms"
    asking = question(parameters={**LONG, "decide_within_ms": 40_000})
    for answer in (explained(asking), explained(question(), **{header: "40000"})):
        assert 0 < answer["parameters"]["decided_us"] < 40_000_000
    assert "decided_us" not in explained(question())["parameters"]
    both = explained(asking, **{header: str(2 * SLO_MS)})
    assert "decided_us" in both["parameters"], "the body holds"
    assert "expected less than the SLO" in explained(question(), **{header: str(SLO_MS)})["error"]
    answer = post(server, question(), **{header: "soon"})
    assert answer.status_code == 400
    assert "header x-clockwright-decide-within-ms: found 'soon'" in answer.json()["error"]


def test_a_refusal_says_its_reason_and_whether_a_retry_can_help(server: FrontEndInThread) -> None:
    answer = post(server, question(parameters={"slo_ms": 0.01}))
    assert answer.status_code == 429
    assert answer.headers["x-clockwright-refused"] == answer.json()["reason"] == "INFEASIBLE"
    assert answer.json()["error"].startswith("INFEASIBLE: model double cannot be that fast")
    assert answer.json()["figures"]["slo_ns"] == 10_000
    # However often it is asked, it cannot be that fast.
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("front", ["here", "apart"])
def test_each_bad_request_is_counted_once_and_a_refused_one_is_not(
    tmp_path: Path, front: str
) -> None:
    with serving_in_thread(tmp_path, front=front, rest=True) as server:
        assert post(server, question(data=[1, 2])).status_code == 400
        assert post(server, question(inputs=[])).status_code == 400
        assert post(server, question(), model="unknown").status_code == 404
        assert (
            requests.post(f"http://{server.rest}/v2/models/double/infer", b"{").status_code == 400
        )
        assert post(server, question(), content_encoding="br").status_code == 415
        with (
            tritonclient.grpc.InferenceServerClient(server.address) as client,
            pytest.raises(InferenceServerException),
        ):
            client.infer("double", [])
        assert post(server, question(parameters={"slo_ms": 0.01})).status_code == 429
        assert post(server, question()).status_code == 200
        # A front that is a process of its own tells them with its next beat.
        server.until(lambda front_end: front_end.runtime.telemetry.bad_requests == 6)


def test_a_model_of_one_row_says_so_in_its_metadata_and_why_in_its_refusal(tmp_path: Path) -> None:
    def leave_one_row(front_end: FrontEnd) -> None:
        model = front_end.catalogue.find("double")
        assert model is not None
        model.ready_on = dict.fromkeys(model.ready_on, (1,))
        model.one_by_one = "ReduceMax makes one result of all rows of a batch"
        front_end.catalogue.renew()

    with serving_in_thread(tmp_path, rest=True) as server:
        url = f"http://{server.rest}/v2/models/double"
        assert httpx.get(url, timeout=60).json()["inputs"][0]["shape"] == [-1, 3]
        server.do(leave_one_row)
        described = httpx.get(url, timeout=60).json()
        assert [each["shape"] for each in described["inputs"] + described["outputs"]] == [
            [-1, 3]
        ] * 2
        tensor = {"name": "x", "shape": [17, 3], "datatype": "FP32", "data": [1] * 51}
        told = httpx.post(f"{url}/infer", json=question(inputs=[tensor]), timeout=60).json()[
            "error"
        ]
    assert told == (
        "input 'x': found 17 rows (shape[0]), expected 1 to 16; it runs its rows one by one: ReduceMax makes one"
        " result of all rows of a batch"
    )


def test_a_model_that_is_being_prepared_says_when_to_come_again_and_an_unfit_one_does_not(
    tmp_path: Path,
) -> None:
    for name, num_bytes in (("preparing-large", 9), ("preparing-small", 3), ("unfit", 1)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(b"x" * num_bytes)
    with serving_in_thread(tmp_path, rest=True) as server:
        answer = httpx.post(
            f"http://{server.rest}/v2/models/preparing-large/infer", json=question(), timeout=60
        )
        told = answer.json()
        assert (answer.status_code, told["reason"]) == (503, "LOADING")
        assert "preparing-large is being prepared (1 model before it); try again" in told["error"]
        assert told["figures"]["models_before"] == 1
        assert int(answer.headers["retry-after"]) >= 1
        index = httpx.post(f"http://{server.rest}/v2/repository/index", json={}, timeout=60).json()
        found = {each["name"]: (each["state"], each["reason"]) for each in index}
        state, reason = found["preparing-small"]
        assert state == "LOADING"
        assert re.fullmatch(r"in about \d+ s: 0 models before it", reason)
        answer = httpx.post(
            f"http://{server.rest}/v2/models/unfit/infer", json=question(), timeout=60
        )
        assert (answer.status_code, answer.json()["reason"]) == (400, "UNFIT")
        assert "retry-after" not in answer.headers
        counted = server.do(lambda front_end: dict(front_end.runtime.telemetry.at_door))
        assert counted == {"LOADING": 1, "UNFIT": 1}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"inputs": []}, 400, "input 'x' is missing"),
        ({"inputs": [{"name": "x"}]}, 400, "missing required field"),
        ({"inputs": 1}, 400, "Expected `array`, got `int`"),
        ({"id": 7}, 400, "Expected `str | null`, got `int`"),
        ({"id": "x" * 257}, 400, "id: found 257 characters"),
        ({"parameters": {"slo": 1}}, 400, "did you mean slo_ms?"),
        ({"parameters": {"slo_ms": []}}, 400, "expected a truth value, a number or a string"),
        ({"parameters": {"slo_ms": "soon"}}, 400, "slo_ms"),
        ({"parameters": {"priority": 1 << 70}}, 400, "priority"),
        ({"outputs": [{"name": "z"}]}, 400, "output 'z': found no such output"),
        (
            {"outputs": [{"name": "y", "parameters": {"clasification": 1}}]},
            400,
            "did you mean classification?",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    server: FrontEndInThread, change: dict[str, Any], status: int, words: str
) -> None:
    answer = post(server, question() | change)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert words in answer.json()["error"]
    assert post(server, question()).status_code == 200


@pytest.mark.parametrize(
    ("shape", "data", "words"),
    [
        ([2, 3], [[1, 2, 3, 4], [5, 6]], "not of shape [2, 3] (the first has 4 values)"),
        ([2, 3], [[1, 2], [3, 4], [5, 6]], "not of shape [2, 3] (the first has 2 values)"),
        ([2, 3], [[1, 2, 3], [4, 5], [6]], "not of shape [2, 3] (the first has 3 values)"),
        ([2, 3], [[1, 2, 3, 4, 5, 6]], "not of shape [2, 3] (the first has 6 values)"),
        ([2, 3], [[[1, 2, 3], [4, 5, 6]]], "not of shape [2, 3] (the first has 3 values)"),
        ([2, 3], [[1, 2, 3], [], [4, 5, 6]], "not of shape [2, 3] (the first has 3 values)"),
        ([6, *[1] * 31], [[1, 2, 3, 4, 5, 6]], "not of shape [6, 1,"),
        ([1, 3], "1,2,3", "found data that is no list, expected a list of values"),
        ([1, 3], {"b64": ""}, "found data that is no list, expected a list of values"),
    ],
)
def test_lists_of_another_shape_are_refused_though_they_hold_as_many_values(
    server: FrontEndInThread, shape: list[int], data: object, words: str
) -> None:
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": data}
    answer = post(server, question(inputs=[tensor]))
    assert answer.status_code == 400
    assert words in answer.json()["error"]


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]])
def test_one_list_and_lists_of_the_shape_are_the_same_rows(
    server: FrontEndInThread, data: list[Any]
) -> None:
    tensor = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": data}
    answer = post(server, question(inputs=[tensor]))
    assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8, 10, 12]


def test_sizes_are_told_in_what_the_client_sent(server: FrontEndInThread) -> None:
    def told(**fields: object) -> str:
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", **fields}
        answer = post(server, question(inputs=[tensor]))
        assert answer.status_code == 400
        error: str = answer.json()["error"]
        return error

    assert told(data=[1, 2]) == "input 'x': found 2 values as data, expected 3 for shape [1, 3]"
    assert told(data=[[1, 2], [3, 4]], shape=[2, 3]).endswith(
        "found 4 values as data, expected 6 for shape [2, 3]"
    )
    assert told(data=[], shape=[1, 1 << 62]).endswith(
        "found 0 values as data, expected 4611686018427387904 for shape [1, 4611686018427387904]"
    )
    assert "found shape [1, 2], expected [-1, 3]" in told(data=[1, 2], shape=[1, 2])
    assert "found shape [-1, 3]" in told(data=[1, 2, 3], shape=[-1, 3]) or "found -1 rows" in told(
        data=[1, 2, 3], shape=[-1, 3]
    )
    assert (
        told()
        == "input 'x': found no data, expected data, or parameter binary_data_size or shared_memory_region"
    )
    for parameters in (
        {"binary_data_size": 0},
        {"shared_memory_region": "r", "shared_memory_byte_size": 12},
    ):
        words = f"found data as well as parameter {next(iter(parameters))}, expected one of them"
        assert told(data=[1, 2, 3], parameters=parameters) == f"input 'x': {words}"


@pytest.mark.parametrize(
    ("datatype", "data", "words"),
    [
        ("FP32", "[NaN, 1]", "NaN and Infinity are no JSON"),
        ("FP32", "[1,-Infinity]", "NaN and Infinity are no JSON"),
        ("FP32", "[Infinity, -NaN]", "NaN and Infinity are no JSON"),
        ("FP32", "[1e39, 1]", "found data from 1.0 to 1e+39, expected FP32, which goes from -3.4"),
        (
            "FP16",
            "[1, -70000]",
            "found data from -70000.0 to 1.0, expected FP16, which goes from -65504.0 to 65504",
        ),
        ("UINT8", "[-1, 5]", "found data from -1 to 5, expected UINT8, which goes from 0 to 255"),
        (
            "INT64",
            f"[0, {1 << 63}]",
            "found data from 0 to 9223372036854775808, expected INT64, which goes",
        ),
        ("INT64", "[0, 1" + "0" * 4000 + "]", "expected INT64"),
        (
            "BF16",
            "[1, 2]",
            "others stand behind the JSON (binary_data_size)",
        ),
        ("float32", "[1, 2]", "found data of datatype 'float32', expected one of BOOL, UINT8"),
    ],
)
def test_numbers_that_a_datatype_has_not_are_told_in_its_range(
    server: FrontEndInThread, datatype: str, data: str, words: str
) -> None:
    body = f'{{"inputs": [{{"name": "x", "shape": [1, 2], "datatype": "{datatype}", "data": {data}}}]}}'
    url = f"http://{server.rest}/v2/models/double/infer"
    answer = requests.post(url, data=body, timeout=60)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_an_empty_body_is_told_as_such(server: FrontEndInThread) -> None:
    answer = requests.post(f"http://{server.rest}/v2/models/double/infer", data=b"", timeout=60)
    assert answer.json() == {"error": "found an empty body, expected JSON"}


@pytest.mark.parametrize("name", ["gzip", "GZIP", "x-gzip", "Deflate", "Identity"])
def test_packings_are_known_in_every_spelling(server: FrontEndInThread, name: str) -> None:
    body = json.dumps(question()).encode()
    packings: dict[str, Any] = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}
    packed = packings[name.strip().lower().removeprefix("x-")](body)
    url = f"http://{server.rest}/v2/models/double/infer"
    answer = requests.post(url, data=packed, headers={"Content-Encoding": name}, timeout=60)
    assert answer.json()["outputs"][0]["data"] == [2, 4, 6]


def test_head_is_answered_as_get_without_the_body(server: FrontEndInThread) -> None:
    with requests.Session() as session:
        for path in ("/v2/health/ready", "/v2/models/double", "/v2/models/none"):
            got = session.get(f"http://{server.rest}{path}", timeout=60)
            head = session.head(f"http://{server.rest}{path}", timeout=60)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-length"] == got.headers["content-length"]
    answer = requests.delete(f"http://{server.rest}/v2/models/double", timeout=60)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_tensors_behind_the_json_have_to_be_as_long_as_it_says(server: FrontEndInThread) -> None:
    def ask(size: object, body: bytes, json_bytes: str | None = None) -> Any:  # noqa: ANN401
        parameters = {"binary_data_size": size}
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": parameters}
        text = json.dumps({"inputs": [tensor], "parameters": LONG}).encode()
        header = str(len(text)) if json_bytes is None else json_bytes
        return requests.post(
            f"http://{server.rest}/v2/models/double/infer",
            data=text + body,
            headers={"Inference-Header-Content-Length": header},
            timeout=60,
        )

    row = struct.pack("<3f", 1, 2, 3)
    assert ask(12, row).json()["outputs"][0]["data"] == [2, 4, 6]
    for size, body in (
        (12, row[:8]),
        (8, row),
        (12, row * 2),
        (-1, row),
        (1 << 62, row),
        ("12", row),
    ):
        assert ask(size, body).status_code == 400
    for header in ("-1", "1e3", "99999", "9" * 30, "", "abc"):
        assert ask(12, row, header).status_code == 400


def test_a_body_may_be_the_only_input_as_it_is(server: FrontEndInThread) -> None:
    def ask(body: bytes, *, model: str = "double", slo_ms: float = SLO_MS) -> Any:  # noqa: ANN401
        headers = {
            "Inference-Header-Content-Length": "0",
            "Content-Type": "application/octet-stream",
            "x-clockwright-slo-ms": str(slo_ms),
        }
        url = f"http://{server.rest}/v2/models/{model}/infer"
        return requests.post(url, data=body, headers=headers, timeout=60)

    row = struct.pack("<3f", 1, 2, 3)
    for model in ("double", "double/versions/1"):
        answer = ask(row, model=model)
        length = int(answer.headers["inference-header-content-length"])
        (output,) = json.loads(answer.content[:length])["outputs"]
        assert (output["name"], output["shape"]) == ("y", [1, 3])
        assert struct.unpack("<3f", answer.content[length:]) == (2, 4, 6)
    assert ask(row, slo_ms=0.001).json()["reason"] == "INFEASIBLE"
    # One row, of a model with one input, that there is.
    for body, model, words in (
        (row * 2, "double", "12"),
        (row[:-1], "double", "12"),
        (b"", "double", "12"),
        (row, "mixed", "a, b"),
    ):
        answer = ask(body, model=model)
        assert answer.status_code == 400
        assert words in answer.json()["error"]
    assert ask(row, model="none").status_code == 404


def test_what_tritons_clients_can_ask_and_is_not_supported_is_named(
    client: triton.InferenceServerClient,
) -> None:
    for ask, words in (
        (client.get_trace_settings, "--trace-share"),
        (lambda: client.get_trace_settings("double"), "--trace-share"),
        (lambda: client.update_trace_settings(settings={"trace_rate": "1"}), "--trace-share"),
        (client.get_log_settings, "--log-format"),
        (lambda: client.update_log_settings({"log_info": True}), "--log-format"),
    ):
        with pytest.raises(triton.InferenceServerException, match=words) as raised:
            ask()
        assert raised.value.status() == "501"


def test_what_is_not_supported_is_named_over_grpc_as_well(server: FrontEndInThread) -> None:
    with tritonclient.grpc.InferenceServerClient(server.address) as client:
        for ask, words in (
            (client.get_trace_settings, "--trace-share"),
            (client.get_log_settings, "--log-format"),
        ):
            with pytest.raises(InferenceServerException, match="Method not found") as raised:
                ask()
            assert "UNIMPLEMENTED" in str(raised.value.status())
            assert words in str(raised.value)


def test_unknown_paths_and_verbs_are_said_to_be_so(server: FrontEndInThread) -> None:
    def ask(verb: str, path: str) -> Any:  # noqa: ANN401
        return requests.request(verb, f"http://{server.rest}{path}", timeout=60)

    for path in ("/", "/v1/models/double:predict", "/v2/models/double/infer/x", "/v2//", "/v2/x"):
        answer = ask("GET", path)
        assert answer.status_code == 404
        assert "there is no" in answer.json()["error"]
    answer = ask("GET", "/v2/models/double/infer")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    # A slash that is quoted is a part of a name, and a name is no path.
    answer = ask("GET", "/v2/models/..%2F..%2Fetc%2Fpasswd")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        "Request for unknown model: there is no model '../../etc/passwd'",
    )
    assert ask("GET", "/v2/models/%00").status_code == 404
    assert ask("GET", "/v2/models/" + "x" * 300).status_code in (400, 404)
    answer = ask("GET", "/v2/applications?context=ann&limit=1")
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "query: found 'limit', expected name or context",
    )


def test_every_status_and_refusal_is_on_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "rest.md"
    rows = dict(re.findall(r"^\| (\d{3}) \| (.*) \|$", page.read_text(), re.MULTILINE))
    source = "".join(Path(module.__file__ or "").read_text() for module in (rest, rest_server))
    raised = set(re.findall(r"HttpError\(\s*(\d{3})|_refuse\(\s*b\"(\d{3})", source))
    known = {"".join(each) for each in raised} | {str(each) for each in HTTP_STATUSES.values()}
    assert rows.keys() == known | {"500"}
    for refusal in Refusal:
        assert f"`{refusal.value}`" in rows[str(HTTP_STATUSES.get(CODES[refusal], 500))]


def test_a_request_is_explained_to_operators_and_to_tenants_their_own(
    server: FrontEndInThread,
) -> None:
    url = f"http://{server.rest}/v2/requests"
    assert post(server, question(id="why")).status_code == 200
    told = requests.get(f"{url}/why", timeout=60).json()
    assert (told["outcome"], told["client_request_id"], told["model_id"]) == ("OK", "why", "double")
    assert (told["run"]["error"], told["slo_ns"]) == ("NONE", SLO_MS * 10**6)
    assert told["words"]
    server.run(server.front_end.quotas.set("brass", Quota(slo_ns_max=10**9)))
    refused = post(server, question(id="greedy"), x_clockwright_tenant="brass").json()
    told = requests.get(f"{url}/greedy", timeout=60).json()
    assert told["outcome"] == refused["reason"] == "QUOTA"
    # Nobody's tenant has requests of its own.
    for unknown, words in (
        ("why/own", "no request is known to be the caller's own: who has no tenant"),
        ("never", "no request 'never' is known"),
    ):
        answer = requests.get(f"{url}/{unknown}", timeout=60)
        assert answer.status_code == 404
        assert words in answer.json()["error"]


def test_applications_are_made_asked_taught_and_removed(server: FrontEndInThread) -> None:
    url = f"http://{server.rest}/v2"
    application = {"models": ["right", "wrong"], "slo_ns": 60_000_000_000}
    made = requests.put(f"{url}/applications/app", json=application, timeout=60)
    assert made.status_code == 200, made.text
    assert made.json()["application"]["application"]["models"] == ["right", "wrong"]
    answer = post(server, question(), model="app")
    assert answer.status_code == 200, answer.text
    query_id = answer.json()["parameters"]["query_id"]
    # Who has no name for a request has the query's id.
    told = requests.get(f"{url}/requests/{query_id}", timeout=60).json()
    assert (told["model_id"], told["outcome"]) == ("app", "OK")
    assert [each["model"] for each in told["members"]] == ["right", "wrong"]
    items = {"items": [{"query_id": query_id, "label": 1}]}
    taught = requests.post(f"{url}/feedback", json=items, timeout=60).json()
    assert taught["outcomes"][0]["query_id"] == query_id
    listed = requests.get(f"{url}/applications/app", params={"context": "ann"}, timeout=60).json()
    assert [each["application"]["name"] for each in listed["applications"]] == ["app"]
    erased = requests.delete(f"{url}/applications/app/contexts/ann", timeout=60)
    assert erased.json() == {"erased": False}
    assert requests.delete(f"{url}/applications/app", timeout=60).status_code == 200
    assert requests.get(f"{url}/applications/app", timeout=60).status_code == 404
    bad = requests.put(f"{url}/applications/app", json={"modles": []}, timeout=60)
    assert bad.status_code == 400
    assert "modles" in bad.json()["error"]
