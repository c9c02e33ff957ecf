"""No answer that is late by the client's clock is a success, whatever keeps the controller from its work.

What nobody could know is left out: between its last look at the clock and the end of its write the controller may
wait for a processor. The kernel counts that, and lateness up to what it counted there is the machine's.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import tritonclient.grpc as triton

from clockwright.units import NS_PER_MS
from clockwright.v1 import inference_pb2 as pb
from experiments.live.local_server import LocalServer
from tests.kit.processes import write_models
from tests.kit.raw_http2 import End, RawClient

SLO_MS = 100
#: Codes of an answer, a refusal for load, one for lateness.
OURS = {0, 4, 8}
CONNECTIONS_MAX = 500


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


class OpenLoop:
    """Asks at a steady rate, over connections that each carry one call at a time.

    The kernel's stamp of what a connection brings is that of its one answer, so neither the client's nor
    the machine's pauses are taken for the server's.
    """

    def __init__(self, server: LocalServer) -> None:
        self._address = server.address
        #: The second number is how long the thread with the controller's loop waited for a processor, in ns.
        self._statistics = Path(f"/proc/{server.process.pid}/schedstat")
        #: When that was read, and the number.
        self._read_ns: list[int] = []
        self._waited_ns: list[int] = []
        self._free: list[RawClient] = []
        self._asking: dict[RawClient, tuple[int, int]] = {}
        self._selector = selectors.DefaultSelector()
        #: When each was sent, and its end.
        self.asked: list[tuple[int, End]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in [*self._free, *self._asking]:
            client.socket.close()
        self._selector.close()

    def run(self, content: bytes, *, rate: float, seconds: float) -> list[tuple[int, End]]:
        began_s, number = time.monotonic(), 0
        while (past_s := time.monotonic() - began_s) < seconds:
            if number < rate * past_s:
                number += 1
                self._ask(content)
            self._take(0 if number < rate * past_s else 0.001)
        deadline_s = time.monotonic() + 60
        while self._asking:
            assert time.monotonic() < deadline_s, f"{len(self._asking)} calls have no end"
            self._take(0.1)
        self._look()
        return self.asked

    def _ask(self, content: bytes) -> None:
        if self._free:
            client = self._free.pop()
        elif len(self._asking) == CONNECTIONS_MAX:
            return  # This machine cannot even ask so fast.
        else:
            client = RawClient(self._address)
            self._selector.register(client.socket, selectors.EVENT_READ, client)
        stream_id = client.infer(content)
        # It is with the kernel by now. Before, this process may have stood still itself.
        self._asking[client] = (stream_id, time.monotonic_ns())

    def late(self) -> list[float]:
        """Latencies, in ms, of successes that came after the SLO by more than the controller waited for a processor.

        What it waited is taken from the last reading before the deadline to the first one behind the answer.
        """
        found = []
        for sent_ns, end in self.asked:
            late_ns = end.time_ns - sent_ns - SLO_MS * NS_PER_MS
            if end.status != 0 or late_ns <= 0:
                continue
            first = bisect_left(self._read_ns, end.time_ns - late_ns) - 1
            last = min(bisect_right(self._read_ns, end.time_ns), len(self._read_ns) - 1)
            if late_ns > self._waited_ns[last] - self._waited_ns[max(first, 0)]:
                found.append(late_ns / NS_PER_MS + SLO_MS)
        return found

    def _look(self) -> None:
        self._read_ns.append(time.monotonic_ns())
        self._waited_ns.append(int(self._statistics.read_bytes().split()[1]))

    def _take(self, timeout_s: float) -> None:
        self._look()
        for key, _ in self._selector.select(timeout_s):
            client: RawClient = key.data
            client.take()
            stream_id, sent_ns = self._asking.get(client, (0, 0))
            if stream_id in client.ended:
                self.asked.append((sent_ns, client.ended[stream_id]))
                del self._asking[client]
                self._free.append(client)


def test_a_stopped_controller_gives_no_late_answers_as_successes(server: LocalServer) -> None:
    content = question(server.address)
    pid = server.process.pid
    stop = threading.Timer(1.0, os.kill, (pid, signal.SIGSTOP))
    go_on = threading.Timer(4.0, os.kill, (pid, signal.SIGCONT))
    with OpenLoop(server) as clients:
        stop.start()
        go_on.start()
        try:
            asked = clients.run(content, rate=150, seconds=5)
        finally:
            go_on.join()
    assert clients.late() == []
    statuses = Counter(end.status for _, end in asked)
    assert set(statuses) <= OURS, statuses
    # What lay before the stopped process was refused, and not run in vain.
    assert statuses[4] > 0


def test_at_twenty_times_the_load_every_end_is_ours_and_no_success_is_late(
    server: LocalServer,
) -> None:
    content = question(server.address)
    with OpenLoop(server) as clients:
        asked = clients.run(content, rate=2000, seconds=4)
    assert clients.late() == []
    statuses = Counter(end.status for _, end in asked)
    assert set(statuses) <= OURS, statuses
    assert all("grpc-status-details-bin" in end.headers for _, end in asked if end.status)
