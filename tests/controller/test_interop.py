"""Tools that speak HTTP/2 and know nothing of gRPC, without TLS and with it: nghttp2's and curl."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clockwright.v1 import inference_pb2 as pb
from controller.front.http.tls import server_context
from tests.kit.certificates import self_signed
from tests.kit.front_end import FrontEndInThread, serving_in_thread
from tests.kit.raw_http2 import MODEL_INFER, message

HEADERS = ["-H", "content-type: application/grpc", "-H", "te: trailers"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["plain", "behind tls"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FrontEndInThread]:
    sealed = request.param == "behind tls"
    tls = server_context(*request.getfixturevalue("files")) if sealed else None
    with serving_in_thread(tmp_path / "models", tls=tls) as running:
        yield running


@pytest.fixture
def url(server: FrontEndInThread, request: pytest.FixtureRequest) -> str:
    scheme = "https" if "tls" in request.node.callspec.params["server"] else "http"
    return f"{scheme}://{server.address}{MODEL_INFER}"


@pytest.fixture(params=["small", "large"])
def body(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with a request as gRPC frames it."""
    inference = pb.ModelInferRequest(model_name="double")
    inference.parameters["slo_ms"].int64_param = 600_000
    inference.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    inference.raw_input_contents.append(struct.pack("<3f", 1, 2, 3))
    if request.param == "large":
        inference.model_name = "image"
        inference.inputs[0].name = "image"
        inference.inputs[0].shape[:] = (1, 3, 224, 224)
        inference.raw_input_contents[:] = [bytes(4 * 3 * 224 * 224)]
    path = tmp_path / "body"
    path.write_bytes(message(inference.SerializeToString()))
    return path


def run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=120
    ).stdout


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (3, 100)])
def test_h2load_gets_an_answer_to_every_request(
    server: FrontEndInThread, url: str, body: Path, connections: int, streams: int
) -> None:
    output = run(
        "h2load", "-n", "300", "-c", str(connections), "-m", str(streams), *HEADERS,
        "-d", str(body), url,
    )  # fmt: skip
    assert "300 done, 300 succeeded, 0 failed, 0 errored, 0 timeout" in output
    found = re.search(r"\((\d+)\) data", output)
    assert found is not None
    assert int(found[1]) % 300 == 0
    assert int(found[1]) > 300 * 5
    assert server.do(lambda front: front.runtime.telemetry.total.answered) == 300


def test_nghttp_sees_headers_a_message_and_trailers(url: str, body: Path) -> None:
    output = run("nghttp", "-v", "-H:method: POST", *HEADERS, "-d", str(body), url)
    assert re.search(r"content-type: ?application/grpc", output)
    assert re.search(r"grpc-status: ?0", output)
    assert "RST_STREAM" not in output


def test_curl_gets_the_answer_whole(url: str, body: Path, tmp_path: Path) -> None:
    if "HTTP2" not in run("curl", "--version"):
        pytest.skip("curl was built without HTTP/2")
    answer = tmp_path / "answer"
    asks_for_http2 = "--http2" if url.startswith("https") else "--http2-prior-knowledge"
    output = run(
        "curl", "-sS", "--insecure", asks_for_http2, *HEADERS, "--data-binary", f"@{body}",
        "-D", "-", "-o", str(answer), url,
    )  # fmt: skip
    assert "HTTP/2 200" in output
    assert "grpc-status: 0" in output
    flag, length = struct.unpack_from(">BI", answer.read_bytes())
    assert (flag, length) == (0, answer.stat().st_size - 5)
    pb.ModelInferResponse.FromString(answer.read_bytes()[5:])
