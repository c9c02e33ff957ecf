"""Models that answer several times, served whole: Triton's example of them, and code that gives its state back."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

from clockwright import Client
from experiments.live.local_server import LocalServer
from tests.kit.stepped_models import write

REPEAT = """(int32[n] IN, uint32[n] DELAY, uint32[1] WAIT, int64[1] at) => (int32[1] OUT, int64[1] next, bool[1] done) {
    one = Constant <value_ints = [1]> ()
    OUT = Gather <axis = 0> (IN, at)
    next = Add (at, one)
    size = Shape (IN)
    done = GreaterOrEqual (next, size)
}"""

COUNTDOWN = """
[container]
load = "model.py"
inputs = { start = "INT64[]", at = "INT64[]" }
outputs = { number = "INT64[]", next = "INT64[]", done = "BOOL[]" }
[state]
at = "next"
[stream]
final = "done"
"""


@pytest.fixture(scope="module", params=[0, 1], ids=["no fronts", "a front"])
def address(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("streamed")
    toml = 'state = { at = "next" }\n[stream]\nfinal = "done"\n'
    write(directory / "models", "repeat_int32", REPEAT, toml=toml)
    version = directory / "models" / "countdown" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.toml").write_text(COUNTDOWN)
    code = "def predict(start, at):\n    return start - at, at + 1, start - at == 0\n"
    (version / "model.py").write_text(code)
    flags = ["--pages", "32", "--arena-mib", "16", "--cache-dir", str(directory / "cache")]
    if request.param:
        flags += ["--fronts", "1"]
    with LocalServer(["--models", str(directory / "models"), *flags]) as server:
        yield server.address


def test_tritons_example_of_decoupled_models_gets_an_answer_per_element(address: str) -> None:
    # What simple_grpc_custom_repeat.py does, with an SLO for slow machines.
    told: queue.Queue[object] = queue.Queue()
    tensors = {
        "IN": np.arange(100, 110, dtype=np.int32),
        "DELAY": np.full(10, 1000, np.uint32),
        "WAIT": np.array([1000], np.uint32),
    }
    inputs = []
    for name, array in tensors.items():
        inputs.append(InferInput(name, [*array.shape], array.dtype.name.upper()))
        inputs[-1].set_data_from_numpy(array)
    with InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: told.put(error or result.as_numpy("OUT")))
        client.async_stream_infer(
            "repeat_int32",
            inputs,
            outputs=[InferRequestedOutput("OUT")],
            parameters={"slo_ms": 600_000},
        )
        answers = [told.get(timeout=100) for _ in range(10)]
    assert [np.asarray(each).tolist() for each in answers] == [[n] for n in range(100, 110)]


def test_code_answers_several_times_by_giving_its_state_back(address: str) -> None:
    with Client(address) as client:
        streams = [
            client.stream("countdown", {"start": np.array([start])}, slo_ms=600_000)
            for start in (3, 5, 2)
        ]
        # In turns, so that steps of one come between those of the others.
        told = [[next(each).outputs["number"].item()] for each in streams]
        for stream, numbers in zip(streams, told, strict=True):
            numbers += [each.outputs["number"].item() for each in stream]
    assert told == [[3, 2, 1, 0], [5, 4, 3, 2, 1, 0], [2, 1, 0]]


def test_rows_of_a_request_go_on_together_until_each_is_done(address: str) -> None:
    with Client(address) as client:
        stream = client.stream("countdown", {"start": np.array([1, 2])}, slo_ms=600_000)
        numbers = [each.outputs["number"].tolist() for each in stream]
    # The first row is done before the second: what it says then is the model's matter.
    assert numbers == [[1, 2], [0, 1], [-1, 0]]
