"""No answer that is late by the client's clock is a success, whatever keeps the controller from its work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton

from clockwright.units import NS_PER_MS
from clockwright.v1 import inference_pb2 as pb
from experiments.local_server import LocalServer
from tests.kit.processes import write_models
from tests.kit.raw_http2 import End, RawClient

SLO_MS = 100
#: Codes of an answer, a refusal for load, one for lateness.
OURS = {0, 4, 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    models = write_models(
        tmp_path_factory.mktemp("models"), config="batch_sizes = [1]\n", tiny="tiny_conv"
    )
    with LocalServer(["--models", str(models), "--device", "modelled:10ms"]) as server:
        yield server


def question(address: str) -> bytes:
    with triton.InferenceServerClient(address) as client:
        [described] = client.get_model_metadata("tiny").inputs
    shape = [1, *described.shape[1:]]
    request = pb.ModelInferRequest(model_name="tiny")
    request.parameters["slo_ms"].int64_param = SLO_MS
    request.inputs.add(name=described.name, datatype=described.datatype, shape=shape)
    request.raw_input_contents.append(np.zeros(shape, np.float32).tobytes())
    return request.SerializeToString()


def ask(client: RawClient, content: bytes, *, rate: float, seconds: float) -> list[tuple[int, End]]:
    """Ask at a steady rate; returns when each was sent, and its end."""
    began_s = time.monotonic()
    sent_ns: dict[int, int] = {}
    while (past_s := time.monotonic() - began_s) < seconds:
        # A client that was kept waiting sends what is due now, and counts from then.
        if len(sent_ns) < rate * past_s:
            now_ns = time.monotonic_ns()
            sent_ns[client.infer(content)] = now_ns
            client.take()
        else:
            client.take(0.001)
    ends = client.wait(list(sent_ns))
    return list(zip(sent_ns.values(), ends, strict=True))


def late(asked: list[tuple[int, End]]) -> list[float]:
    """Latencies, in ms, of successes that came after the SLO."""
    latencies_ns = [end.time_ns - sent_ns for sent_ns, end in asked if end.status == 0]
    return [ns / NS_PER_MS for ns in latencies_ns if ns > SLO_MS * NS_PER_MS]


def test_a_stopped_controller_gives_no_late_answers_as_successes(server: LocalServer) -> None:
    content = question(server.address)
    pid = server.process.pid
    stop = threading.Timer(1.0, os.kill, (pid, signal.SIGSTOP))
    go_on = threading.Timer(4.0, os.kill, (pid, signal.SIGCONT))
    with RawClient(server.address) as client:
        stop.start()
        go_on.start()
        try:
            asked = ask(client, content, rate=150, seconds=5)
        finally:
            go_on.join()
    assert late(asked) == []
    statuses = Counter(end.status for _, end in asked)
    assert set(statuses) <= OURS, statuses
    # What lay before the stopped process was refused, and not run in vain.
    assert statuses[4] > 100


def test_at_twenty_times_the_load_every_end_is_ours_and_no_success_is_late(
    server: LocalServer,
) -> None:
    content = question(server.address)
    with RawClient(server.address) as client:
        asked = ask(client, content, rate=2000, seconds=4)
    assert late(asked) == []
    statuses = Counter(end.status for _, end in asked)
    assert set(statuses) <= OURS, statuses
    assert all("grpc-status-details-bin" in end.headers for _, end in asked if end.status)
