"""Parts of the benchmarks of the live path: bare servers and processor time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from clockwright.v1 import inference_pb2 as oip
from experiments.bench.live import INFER, PAYLOADS, bare_server, infer_request
from experiments.live.processor_time import cpu_ns, family


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_a_bare_server_answers_with_as_many_bytes_as_the_model(kind: str) -> None:
    with bare_server(kind) as (address, _), grpc.insecure_channel(address) as channel:
        ask: Any = channel.unary_unary(
            INFER, bytes, response_deserializer=oip.ModelInferResponse.FromString
        )
        for name, payload in PAYLOADS.items():
            answer = ask(infer_request(name, payload.shape), timeout=60)
            assert answer.model_name == name
            assert [len(raw) for raw in answer.raw_output_contents] == [payload.answer_bytes]


def test_processor_time_of_a_process_is_what_its_threads_used() -> None:
    def work() -> int:
        begin_ns = time.thread_time_ns()
        while time.thread_time_ns() - begin_ns < 20_000_000:
            pass
        return time.thread_time_ns() - begin_ns

    pid = os.getpid()
    with ThreadPoolExecutor(2) as threads:
        before_ns = cpu_ns([pid])
        used_ns = sum(threads.map(lambda _: work(), range(2)))
        assert cpu_ns([pid]) - before_ns >= used_ns


def test_a_family_is_a_process_and_all_that_it_has_started() -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        tree = family(parent.pid)
        assert tree == [parent.pid, child]
        parent.stdin.close()
