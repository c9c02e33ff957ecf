"""Sequences of ONNX models in processes of their own, asked by Triton's clients as its examples do, and by ours."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from clockwright import Client
from experiments.bench.voice_model import SAMPLES, WIDTH, write_voice
from experiments.live.local_server import LocalServer
from tests.kit.stepped_models import history, write_history, write_triton_examples

SLO_MS = 600_000
VALUES = [11, 7, 5, 3, 2, 0, 1]


@pytest.fixture(scope="module", params=[(), ("--fronts", "1")], ids=["here", "by a front"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> Iterator[tuple[LocalServer, Path]]:
    directory = tmp_path_factory.mktemp("models")
    write_triton_examples(directory)
    write_history(directory)
    # A first value that is not zero.
    (directory / "history" / "first").write_bytes((7).to_bytes(8, "little"))
    (directory / "history" / "config.toml").write_text(
        'state.h = { output = "hn", initial = "first" }\nbatch_sizes = [1, 4]\n'
    )
    write_voice(directory / "voice", "batch_sizes = [1, 4]\n")
    arguments = ["--models", str(directory), "--cache-dir", str(cache_dir), "--http-port", "0"]
    slo = ["--slo-ms", str(SLO_MS)]
    with LocalServer([*arguments, *slo, *request.param]) as running:
        yield running, directory


def values_of(sequence: int | str) -> list[int]:
    first = {1000: 0, 1001: 100}.get(sequence if isinstance(sequence, int) else 0, 20)
    return [first, *(value if first == 0 else -value for value in VALUES)]


def expected(model: str, sequence: int | str) -> list[int]:
    """What Triton's backends answer."""
    values = values_of(sequence)
    if model == "simple_string_dyna_sequence":
        answers = [sum(values[: number + 1]) for number in range(len(values))]
    else:
        answers = [values[0] + 1, *values[1:]]
    if "dyna" in model:
        answers[-1] += int(sequence)
    return answers


SEQUENCES: list[tuple[str, int | str]] = [
    ("simple_sequence", 1000),
    ("simple_sequence", "a sequence"),
    ("simple_dyna_sequence", 1001),
    ("simple_string_dyna_sequence", "1002"),
]


def asked(kind: Any, value: int) -> list[Any]:  # noqa: ANN401  one of Triton's two modules
    tensor = kind.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return [tensor]


def test_tritons_client_streams_steps_of_several_sequences(
    server: tuple[LocalServer, Path],
) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server[0].address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for model, sequence in SEQUENCES:
            values = values_of(sequence)
            for number, value in enumerate(values):
                client.async_stream_infer(
                    model,
                    asked(triton, value),
                    request_id=f"{model}/{sequence}",
                    sequence_id=sequence,
                    sequence_start=number == 0,
                    sequence_end=number == len(values) - 1,
                )
        found: dict[str, list[int]] = {}
        for _ in range(len(SEQUENCES) * 8):
            result = answers.get()
            assert not isinstance(result, Exception), result
            response = result.get_response()
            assert [each.name for each in response.outputs] == ["OUTPUT"]
            found.setdefault(response.id, []).append(int(result.as_numpy("OUTPUT")[0, 0]))
    assert found == {
        f"{model}/{sequence}": expected(model, sequence) for model, sequence in SEQUENCES
    }


def test_tritons_client_sends_steps_over_rest(server: tuple[LocalServer, Path]) -> None:
    url = server[0].rest.removeprefix("http://").rstrip("/")
    client = triton_http.InferenceServerClient(url)
    for model, sequence in SEQUENCES:
        values, found = values_of(sequence), []
        for number, value in enumerate(values):
            result = client.infer(
                model,
                asked(triton_http, value),
                sequence_id=sequence,
                sequence_start=number == 0,
                sequence_end=number == len(values) - 1,
            )
            found.append(int(result.as_numpy("OUTPUT")[0, 0]))
        assert found == expected(model, sequence)
    batching = client.get_model_config("simple_string_dyna_sequence")["sequence_batching"]
    assert [(each["input_name"], each["output_name"]) for each in batching["state"]] == [
        ("IN", "OUT")
    ]
    kinds = {each["name"]: each["control"][0].get("kind") for each in batching["control_input"]}
    assert kinds == {"END": "CONTROL_SEQUENCE_END", "CORRID": "CONTROL_SEQUENCE_CORRID"}
    assert "sequence" in client.get_server_metadata()["extensions"]
    client.close()


def test_a_recurrent_model_gives_what_it_gives_with_its_state_in_hand(
    server: tuple[LocalServer, Path],
) -> None:
    """Its state is recognised, has its batch in the middle, and is left out of the answer unless it is wanted."""
    running, directory = server
    alone = onnxruntime.InferenceSession(str(directory / "voice" / "1" / "model.onnx"))
    random, rate = np.random.default_rng(0), np.array(16_000)
    with Client(running.address) as client:
        states = [np.zeros((2, 1, WIDTH), np.float32)] * 3
        voices = [client.sequence("voice") for _ in states]
        for _ in range(4):
            for number, voice in enumerate(voices):
                window = random.standard_normal((1, SAMPLES)).astype(np.float32)
                wanted, states[number] = alone.run(
                    None, {"input": window, "state": states[number], "sr": rate}
                )
                result = voice.step({"input": window, "sr": rate})
                assert set(result.outputs) == {"output"}
                np.testing.assert_allclose(result.outputs["output"], wanted, atol=1e-5)


def test_a_state_that_is_asked_for_comes_and_the_first_one_is_the_models(
    server: tuple[LocalServer, Path],
) -> None:
    with triton.InferenceServerClient(server[0].address) as client:
        tensor = triton.InferInput("x", [1, 1], "INT64")
        tensor.set_data_from_numpy(np.array([[5]], np.int64))
        for wanted in (["y"], ["hn"], ["hn", "y"]):
            outputs = [triton.InferRequestedOutput(name) for name in wanted]
            result = client.infer(
                "history", [tensor], outputs=outputs, sequence_id=9, sequence_start=True
            )
            assert [each.name for each in result.get_response().outputs] == wanted
            assert int(result.as_numpy(wanted[0])[0, 0]) == history(7, 5)
