"""The fuzz benchmark, short: nothing crashes, stands still or grows, and what it breaks was good before."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from clockwright import frames
from controller.front import link_frames
from controller.front.oip import parse_request
from controller.worker_link import parse as parse_from_worker
from experiments.bench.fuzz import Found, Mutator, fuzz_readers, fuzz_server, readers
from tests.kit.front_end import serving_in_thread


@pytest.mark.seeds(2)
def test_readers_of_what_comes_from_outside_survive_broken_messages(seed: int) -> None:
    found = fuzz_readers(14_000, seed)
    assert found.crashes == {}
    assert found.num_messages == 14_000
    figures = found.figures()
    assert figures["fuzz_crashes"] == 0
    assert figures["loop_stall_ms_max"] <= 100
    assert figures["rss_growth_mib"] <= 64


@pytest.mark.seeds(1)
def test_a_server_survives_broken_messages_and_somebody_else_is_answered(
    seed: int, tmp_path: Path
) -> None:
    with serving_in_thread(tmp_path) as server:
        found = fuzz_server(server.address, os.getpid(), 1000, seed)
        assert found.crashes == {}
        assert found.num_crashes == 0
        server.until(lambda front_end: front_end.runtime.num_waiting == 0)


def test_what_is_broken_was_good() -> None:
    good = {name: messages for name, (_, messages) in readers().items()}
    for message in good["request"]:
        assert parse_request(message).message.model_name == "double"
    for message in good["worker"]:
        parse_from_worker(message)
    asks, told, describe, described, beat, hand_on, there, feed = good["front"]
    for message in (asks, describe, beat, hand_on):
        link_frames.decode_from_front(message)
    for message in (told, described, there, feed):
        link_frames.decode_from_controller(message)
    reader = frames.FrameReader()
    data = b"".join(good["data"][:7])
    reader.room()[: len(data)] = data
    load, infer, result, memory, apart, inputs, outputs = reader.received(len(data))
    for frame in (load, infer, memory, apart, inputs):
        frames.decode_order(frame)
    frames.decode_inputs(inputs)
    frames.decode_outputs(outputs)
    frames.decode_result(result)


def test_a_crash_is_counted_and_its_message_is_kept() -> None:
    found = Found()
    for _ in range(3):
        found.crash("reader: ValueError: x", b"message")
    assert found.num_crashes == 3
    assert found.crashes == {"reader: ValueError: x": b"message"}


@pytest.mark.seeds(1)
def test_a_mutator_breaks_messages_differently(seed: int) -> None:
    mutator = Mutator(random.Random(seed), [bytes(100)])
    assert len({mutator.draw() for _ in range(500)}) > 100
