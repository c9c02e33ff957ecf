"""Several versions of one model at once, in processes of their own: each answer tells which version made it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from clockwright import Client, ModelError, UnknownModelError
from clockwright.client.operator import Operator
from clockwright.v1 import inference_pb2 as pb
from experiments.live.local_server import LocalServer

SLO_MS = 600_000


def write_version(folder: Path, version: int, config: str = "") -> None:
    """A version that adds its number."""
    shape: list[str | int | None] = ["n", 4]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, shape) for name in "xy")
    number = onnx.helper.make_tensor("number", 1, [], [float(version)])
    node = onnx.helper.make_node("Add", ["x", "number"], ["y"])
    graph = onnx.helper.make_graph([node], "adds", [x], [y], [number])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    (folder / str(version)).mkdir(parents=True)
    (folder / str(version) / "model.onnx").write_bytes(model.SerializeToString())
    if config:
        (folder / "config.toml").write_text(config)


def answered(client: Client, version: str = "", context: str = "") -> int:
    """The version that answered, as the answer itself says."""
    request = pb.ModelInferRequest(model_name="adds", model_version=version)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.zeros((1, 4), np.float32).tobytes())
    request.parameters["slo_ms"].int64_param = SLO_MS
    if context:
        request.parameters["context"].string_param = context
    response = pb.ModelInferResponse.FromString(
        client._call("ModelInfer", request.SerializeToString())
    )
    value = int(np.frombuffer(response.raw_output_contents[0], np.float32)[0])
    assert response.model_version == str(value)
    return value


def rest(server: LocalServer, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.rest.rstrip('/')}/{path}", data)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@contextmanager
def serving(tmp_path: Path, cache_dir: Path, *flags: str) -> Iterator[LocalServer]:
    arguments = ["--models", str(tmp_path / "models"), "--cache-dir", str(cache_dir), *flags]
    arguments += ["--state", str(tmp_path / "state"), "--http-port", "0"]
    with LocalServer(arguments) as server:
        yield server


def write_two(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "adds"
    config = "[versions]\nserve = { latest = 3 }\n[traffic]\n1 = 1\n[aliases]\nstable = 1\n"
    write_version(folder, 1, config)
    write_version(folder, 2)
    return folder


def run(server: LocalServer, *command: str) -> str:
    """Do what an operator types."""
    done = subprocess.run(
        [sys.executable, "-m", "clockwright.cli", *command, "--server", server.address],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("--fronts", "1")], ids=["here", "apart"])
def test_a_story_of_versions(tmp_path: Path, cache_dir: Path, flags: tuple[str, ...]) -> None:
    folder = write_two(tmp_path)
    with serving(tmp_path, cache_dir, *flags) as server:
        tell_the_story(server, folder)


def test_what_was_said_of_versions_outlives_a_restart(tmp_path: Path, cache_dir: Path) -> None:
    write_two(tmp_path)
    with serving(tmp_path, cache_dir) as server:
        told = run(server, "models", "alias", "adds", "stable=2", "old=1")
        assert "2 (stable, 0%)" in told
        assert "2 (stable, 100%)" in run(server, "models", "traffic", "adds", "stable=100%")
        run(server, "models", "shadow", "adds", "1=50%")
    with serving(tmp_path, cache_dir) as server:
        with Client(server.address) as client:
            assert [answered(client, named) for named in ("", "stable", "old")] == [2, 2, 1]
        # The last change was the shadow; before that the traffic was as it is.
        assert "shadow of 50%" in run(server, "models", "list")
        assert "shadow" not in run(server, "models", "rollback", "adds")
        assert "shadow of 50%" in run(server, "models", "rollback", "adds")
        assert "y: float32 (1, 4)" in run(server, "infer", "adds", "--random", "--version", "old")


def tell_the_story(server: LocalServer, folder: Path) -> None:
    users = [f"user-{number}" for number in range(40)]
    with Client(server.address) as client, Operator(server.address) as operator:
        assert answered(client) == 1
        assert [answered(client, named) for named in ("1", "2", "stable", "latest")] == [1, 2, 1, 2]
        with pytest.raises(UnknownModelError, match="version '3', expected '1' or '2'"):
            answered(client, "3")
        operator.route_model("adds", traffic={"2": 0.3}, aliases={"canary": "2"})
        first = {user: answered(client, context=user) for user in users}
        assert Counter(first.values())[2] in range(2, 25)
        assert {user: answered(client, context=user) for user in users} == first
        # Who has the canary keeps it while it grows.
        operator.route_model("adds", traffic={"canary": 0.6})
        grown = {user: answered(client, context=user) for user in users}
        assert all(grown[user] == 2 for user in users if first[user] == 2)
        assert {answered(client) for _ in range(60)} == {1, 2}
        rows = {row.version: row for row in operator.models()}
        assert rows["2"].share == pytest.approx(0.6)
        assert list(rows["2"].aliases) == ["canary"]

        write_version(folder, 3)
        client.load_model("adds")
        assert answered(client, "latest") == 3
        assert {answered(client) for _ in range(60)} == {1, 2}
        operator.route_model("adds", traffic={"latest": 1})
        assert answered(client) == 3
        operator.roll_back_model("adds")
        assert {answered(client) for _ in range(60)} == {1, 2}
        with pytest.raises(ModelError, match="version '7', expected one of 1, 2, 3, stable"):
            operator.route_model("adds", traffic={"7": 1})
        assert rest(server, "v2/models/adds")["versions"] == ["1", "2", "3"]
        told = rest(server, "v2/models/adds/route", {"traffic": {"3": 1}})
        assert [row["share"] for row in told["models"]] == [0, 0, 1]
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0] * 4}]}
        body["parameters"] = {"slo_ms": SLO_MS}  # type: ignore[assignment]
        assert rest(server, "v2/models/adds/infer", body)["model_version"] == "3"
        path = "v2/models/adds/versions/stable/infer"
        assert rest(server, path, body)["outputs"][0]["data"] == [1, 1, 1, 1]
