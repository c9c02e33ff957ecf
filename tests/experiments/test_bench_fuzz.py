"""The fuzz benchmark, short: nothing crashes, stands still or grows, and what it breaks was good before."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from clockwright.wire import frames
from clockwright.wire.worker_messages import decode_from_worker
from controller.front.oip.protocol import parse_request
from controller.front.remote import link_frames
from experiments.bench import fuzz
from experiments.bench.fuzz import (
    Found,
    Mutator,
    fuzz_readers,
    fuzz_server,
    good_messages,
    mutators,
    read_batch,
    readers,
    send_http,
    steps_of,
)
from experiments.bench.fuzz_http import read_json_body, with_lengths
from tests.kit.front_end import serving_in_thread


def test_growth_is_counted_from_the_first_round_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Found()
    monkeypatch.setattr(fuzz, "rss_bytes", lambda _process: 1000 + found.num_messages)
    for _ in found.rounds(30, "self"):
        found.num_messages += 10
    assert found.rss_growth_bytes == 20


@pytest.mark.seeds(1)
def test_readers_of_what_comes_from_outside_survive_broken_messages(seed: int) -> None:
    found = Found()
    fuzz_readers(found, 20_000, seed)
    assert found.crashes == {}
    assert (found.num_messages, found.num_crashes) == (20_000, 0)
    # How long a reader takes is measured by bench-fuzz, in a process without the garbage of other tests.
    assert found.stall_ns_max > 0
    assert found.rss_growth_bytes <= 64 << 20


@pytest.mark.seeds(1)
def test_a_server_survives_broken_messages_and_somebody_else_is_answered(
    seed: int, tmp_path: Path
) -> None:
    with serving_in_thread(tmp_path, rest=True) as server:
        found = Found()
        fuzz_server(found, server.address, os.getpid(), 1000, seed, {"rest": server.rest})
        assert found.crashes == {}
        assert found.num_crashes == 0
        server.until(lambda front_end: front_end.runtime.num_waiting == 0)


def test_what_is_broken_was_good() -> None:
    good = good_messages()
    for message in good["request"]:
        assert parse_request(message).message.model_name == "double"
    for message in good["worker"]:
        decode_from_worker((message, b""))
    asks, told, describe, described, beat, hand_on, there, feed = good["front"]
    for message in (asks, describe, beat, hand_on):
        link_frames.decode_from_front(message)
    for message in (told, described, there, feed):
        link_frames.decode_from_controller(message)
    reader = frames.FrameReader()
    data = b"".join(good["data"][:6])
    reader.room()[: len(data)] = data
    load, infer, result, apart, inputs, outputs = reader.received(len(data))
    for frame in (load, infer, apart, inputs):
        frames.decode_order(frame)
    frames.decode_inputs(inputs)
    frames.decode_outputs(outputs)
    frames.decode_result(result)
    with readers() as found:
        for name in found:
            for message in good[name]:
                list(steps_of(found[name], message))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("json", "controller.front.oip.json_form._read_slice"),
        ("rest", "controller.front.http.rest.parse_qs"),
        ("rest", "controller.front.http.rest_server._without_upgrade"),
        ("metrics", "controller.dashboard.site.parse_qs"),
        ("metrics", "controller.metrics.app.credentials_of"),
    ],
)
def test_a_fault_in_what_reads_is_found(
    name: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, _break)
    found = Found()
    with readers() as kinds:
        read_batch(found, name, kinds[name], mutators(1)[name], 300)
    assert found.num_messages == 300
    assert 0 < found.num_crashes < 300
    assert all(what.startswith(f"{name}: ") for what in found.crashes)


def test_a_fault_that_a_server_admits_to_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.front.http.rest.parse_qs", _break)
    found = Found()
    with serving_in_thread(tmp_path, rest=True) as server:
        send_http(found, "rest", server.rest, mutators(1)["rest"])
    assert found.num_crashes > 0


def _break(*_: object, **__: object) -> None:
    raise IndexError("planted")


def test_what_is_long_in_json_is_read_in_steps() -> None:
    steps = [len(list(steps_of(read_json_body, message))) for message in good_messages()["json"]]
    assert max(steps) > 1
    assert min(steps) == 0


def test_a_head_says_again_how_long_its_body_is() -> None:
    message = next(each for each in good_messages()["rest"] if b"Inference-Header" in each)
    head, _, body = message.partition(b"\r\n\r\n")
    longer = with_lengths(message + b" " * 10)
    assert longer.endswith(body + b" " * 10)
    assert b"\r\nContent-Length: %d\r\n" % (len(body) + 10) in longer
    assert with_lengths(longer[:-10]) == head + b"\r\n\r\n" + body


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
