"""The worker's end of the stream, against a scripted controller on a real loopback stream."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx.parser
import pytest

from clockwright.elements import Array, bytes_of
from clockwright.errors import ConfigError, DeviceGoneError
from clockwright.units import NS_PER_S, ActionId
from clockwright.wire import peer
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import ActionError
from clockwright.wire.frames import PREFIX, encode_action, encode_withdrawal
from modelzoo.profile import load_profile
from tests.kit.processes import until
from tests.kit.queue_device import QueueDevice, Ticket
from tests.kit.running_lanes import running
from tests.kit.scripted_controller import (
    LIMIT_S,
    ScriptedController,
    Stream,
    drain,
    infer,
    listening,
    load,
    play,
)
from tests.kit.scripted_worker import kind_of
from tests.kit.worker_models import (
    ThreadedDevice,
    a_modelled,
    cpu_device,
    offer,
    prepared,
    relu_file,
)
from worker import process
from worker.compiling import compiler
from worker.config import WorkerConfig
from worker.core.lanes import Step
from worker.devices.cpu import CpuDevice, CpuModel
from worker.devices.device import DeviceLostError
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import ServedModel
from worker.process import run_worker


def test_a_worker_registers_takes_a_model_and_answers(tmp_path: Path) -> None:
    content = relu_file()

    async def script(stream: Stream) -> None:
        register = stream.register
        assert register.protocol_version == peer.PROTOCOL_VERSION
        assert (register.worker_id, register.device) == ("w1", "cpu")
        assert (register.num_pages, register.page_bytes) == (2, 16 << 20)
        assert (register.arena_bytes, register.pid) == (32 << 20, os.getpid())
        assert register.gpu_kind.startswith("cpu:")
        await stream.welcome()
        ready = await stream.install("relu", content)
        assert (ready.num_pages, ready.from_cache) == (1, False)
        assert [(t.name, t.datatype, list(t.row_shape)) for t in ready.inputs] == [
            ("x", "FP32", [4])
        ]
        assert [t.name for t in ready.outputs] == ["y"]
        assert [batch.batch_size for batch in ready.batches] == [1, 2]
        assert min(ready.load_ns, *(batch.exec_ns for batch in ready.batches)) > 0
        assert stream.progress[0] == "receiving files"
        assert "profiling batch 2" in stream.progress

        result, _ = await stream.act(load(1, "relu"))
        assert result.error == ActionError.NONE
        x = np.array([[1, -2, 3, -4], [-5, 6, -7, 8]], np.float32)
        result, outputs = await stream.act(
            infer(2, "relu", rows=(1, 1), batch_size=2), x[0].tobytes(), x[1].tobytes()
        )
        assert result.error == ActionError.NONE
        assert outputs == [np.maximum(row, 0).tobytes() for row in x]
        times = [step.begin_ns for step in (result.input, result.exec, result.output) if step]
        assert len(times) == 3
        assert times == sorted(times)
        result, _ = await stream.act(infer(3, "nobody"), b"")
        assert result.error == ActionError.UNKNOWN_MODEL
        await stream.send(pb.ModelDrop(model_id="relu"))
        await stream.heard()
        result, _ = await stream.act(infer(4, "relu"), bytes(16))
        assert result.error == ActionError.UNKNOWN_MODEL
        await drain(stream)

    play(tmp_path, script, device="cpu", worker_id="w1")


def test_actions_that_are_taken_back_free_their_lane(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", relu_file())
        await stream.act(load(1, "relu"))
        actions = [infer(action_id, "relu") for action_id in range(2, 103)]
        data = [encode_action(action, [bytes(16)]) for action in actions]
        # The first may run. One that is answered, or was never here, changes nothing.
        data += [encode_withdrawal(ActionId(number)) for number in (1, *range(3, 103), 999)]
        stream.write(*itertools.chain.from_iterable(data))
        results = [(await stream.result())[0] for _ in actions]
        by_error = Counter(result.error for result in results)
        assert by_error == {ActionError.WITHDRAWN: 100, ActionError.NONE: 1}
        assert not any(result.exec for result in results if result.error)
        result, _ = await stream.act(infer(200, "relu"), bytes(16))
        assert result.error == ActionError.NONE
        await drain(stream)

    play(tmp_path, script, device="modelled:1000ms")


def test_large_tensors_travel_whole(tmp_path: Path) -> None:
    values = 150_000

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", relu_file(values))
        await stream.act(load(1, "relu"))
        x = bytes(range(64)) * (values * 4 // 64)  # small positive floats
        result, outputs = await stream.act(infer(2, "relu"), x)
        assert result.error == ActionError.NONE
        assert outputs == [x]
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_a_restarted_stream_starts_empty_and_finds_its_models_in_the_cache(tmp_path: Path) -> None:
    content = relu_file()

    async def first(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", content)
        result, _ = await stream.act(load(1, "relu"))
        assert result.error == ActionError.NONE

    async def second(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("again", content)
        ready = await stream.expect("ready_model")
        assert (ready.model_id, ready.from_cache) == ("again", True)
        # Ids begin anew too.
        result, _ = await stream.act(infer(1, "relu"), bytes(16))
        assert result.error == ActionError.UNKNOWN_MODEL
        result, _ = await stream.act(infer(2, "again"), bytes(16))
        assert result.error == ActionError.NOT_RESIDENT
        await drain(stream)

    play(tmp_path, first, second, device="cpu")


def test_unfit_models_are_refused_and_the_next_is_served(tmp_path: Path) -> None:
    good, other = relu_file(), relu_file(5)

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("garbage", b"not a model")
        assert (await stream.expect("model_needed")).model_id == "garbage"
        await stream.chunk("garbage", b"not a model", slice(0, 11), last=True)
        await stream.expect("chunk_received")
        refused = await stream.expect("model_refused")
        assert (refused.model_id, "not an ONNX file" in refused.reason) == ("garbage", True)

        await stream.offer("damaged", good)
        await stream.expect("model_needed")
        sha256 = hashlib.sha256(good).hexdigest()
        await stream.chunk(
            "damaged", bytes(len(good)), slice(0, len(good)), sha256=sha256, last=True
        )
        await stream.expect("chunk_received")
        assert (
            f"expected {len(good)} with {sha256}" in (await stream.expect("model_refused")).reason
        )

        await stream.offer("gap", good)
        await stream.expect("model_needed")
        await stream.chunk("gap", good, slice(10, 20))
        await stream.expect("chunk_received")
        assert "chunk at 10, expected 0" in (await stream.expect("model_refused")).reason

        await stream.offer("unbatched", good, batch_sizes=())
        await stream.expect("model_needed")
        await stream.chunk("unbatched", good, slice(0, len(good)), last=True)
        await stream.expect("chunk_received")
        assert "no batch size" in (await stream.expect("model_refused")).reason

        # One is dropped before it is looked at: the drop travels with the offer.
        await stream.offer("first", good)
        drop = pb.ModelDrop(model_id="dropped")
        await stream.offer("dropped", other, then=[drop])
        await stream.offer("third", good, batch_sizes=(1,))
        assert (await stream.expect("ready_model")).model_id == "first"
        assert (await stream.expect("ready_model")).model_id == "third"
        await drain(stream)

    play(tmp_path, script)


@contextlib.contextmanager
def compilers_killed(number: int) -> Iterator[list[int]]:
    """Kill so many compilers, each before it has its job: a context with the ids of those killed."""
    killed: list[int] = []

    def start_and_kill(memory_bytes: int) -> subprocess.Popen[bytes]:
        process = start(memory_bytes)
        if len(killed) < number:
            process.kill()
            killed.append(process.pid)
        return process

    start = compiler._start
    with mock.patch.object(compiler, "_start", start_and_kill):
        yield killed


def test_a_killed_compiler_is_tried_again_and_others_have_their_turn_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.offers.RETRY_PAUSES_S", (LIMIT_S,))
    content, other = relu_file(), relu_file(8)

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("unlucky", content)
        await stream.expect("model_needed")
        await stream.chunk("unlucky", content, slice(0, len(content)), last=True)
        await stream.expect("chunk_received")
        assert (await stream.install("next", other)).model_id == "next"
        said = f"the compiler was killed by SIGKILL while starting; trying again in {LIMIT_S:g} s"
        assert said in stream.progress
        await drain(stream)

    with compilers_killed(1):
        play(tmp_path, script, device="cpu")


def test_a_disk_that_was_full_for_a_while_costs_a_model_time_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.offers.RETRY_PAUSES_S", (0.01, 0.01))
    add, refusals = FileStore.add, [1, 2]

    def full_at_first(self: FileStore, path: Path, sha256: str) -> None:
        if refusals:
            refusals.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, path, sha256)

    monkeypatch.setattr(FileStore, "add", full_at_first)
    content = relu_file()

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("patient", content)
        for _ in range(3):
            await stream.expect("model_needed")
            await stream.chunk("patient", content, slice(0, len(content)), last=True)
            await stream.expect("chunk_received")
        assert (await stream.expect("ready_model")).model_id == "patient"
        said = [stage for stage in stream.progress if "trying again in" in stage]
        assert said == ["[Errno 28] No space left on device; trying again in 0.01 s"] * 2
        await drain(stream)

    play(tmp_path, script)


@pytest.mark.parametrize("num_kills", [2, 3])
def test_a_model_whose_compiler_is_always_killed_is_refused_in_the_end(
    num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.offers.RETRY_PAUSES_S", (0.01, 0.02))
    content = relu_file()

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("unlucky", content)
        await stream.expect("model_needed")
        await stream.chunk("unlucky", content, slice(0, len(content)), last=True)
        await stream.expect("chunk_received")
        if num_kills == 2:
            await stream.expect("ready_model")
        else:
            refused = await stream.expect("model_refused")
            assert refused.reason == (
                "the compiler was killed by SIGKILL while starting, 3 times in a row"
            )
        pauses = [stage for stage in stream.progress if "trying again in" in stage]
        assert [stage.rpartition(" in ")[2] for stage in pauses] == ["0.01 s", "0.02 s"]
        await drain(stream)

    with compilers_killed(num_kills) as killed:
        play(tmp_path, script, device="cpu")
    assert len(killed) == num_kills


def test_every_chunk_is_acknowledged_and_thus_none_in_flight_for_ever(tmp_path: Path) -> None:
    good = relu_file()

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("gap", good)
        await stream.expect("model_needed")
        # What the controller has in flight when the first of them spoils the model.
        for begin in (10, 20, 30, 40):
            await stream.chunk("gap", good, slice(begin, begin + 10))
        kinds = sorted([kind_of(await stream.read()) for _ in range(5)])
        assert kinds == ["chunk_received"] * 4 + ["model_refused"]
        await stream.chunk("never offered", good, slice(0, 10))
        assert (await stream.expect("chunk_received")).model_id == "never offered"
        await stream.install("next", good)
        await drain(stream)

    play(tmp_path, script)


@pytest.mark.parametrize("how", ["dropped", "offered anew"])
def test_a_model_whose_files_stop_coming_holds_nobody_up(how: str, tmp_path: Path) -> None:
    good, other = relu_file(), relu_file(5)

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("m", good)
        await stream.expect("model_needed")
        await stream.chunk("m", good, slice(0, 50))
        await stream.expect("chunk_received")
        if how == "dropped":
            await stream.send(pb.ModelDrop(model_id="m"))
            await stream.install("next", other)
        else:
            await stream.install("m", other)
        await drain(stream)

    play(tmp_path, script)
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def test_heartbeats_carry_the_smallest_difference_of_the_clocks(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome()
        now = time.monotonic_ns()
        for ahead in (0, 5 * NS_PER_S, NS_PER_S):
            heartbeat = pb.Heartbeat(sent_ns=now + ahead)
            await stream.send(heartbeat)
        await stream.heard()  # whatever comes later has seen the heartbeats
        seen = len(stream.heartbeats)
        while len(stream.heartbeats) < seen + 3:
            await stream.read_heartbeat()
        last = stream.heartbeats[-1]
        assert last.min_delta_ns is not None
        assert -5 * NS_PER_S <= last.min_delta_ns < -5 * NS_PER_S + LIMIT_S * NS_PER_S
        assert now <= last.sent_ns <= time.monotonic_ns()
        await drain(stream)

    play(tmp_path, script)


def test_garbage_ends_the_stream_and_the_worker_dials_again(tmp_path: Path) -> None:
    async def no_welcome(stream: Stream) -> None:
        stream.reply(heartbeat_interval_ms=0)

    async def outside(stream: Stream) -> None:
        await stream.welcome()
        file = pb.FileOffer(name="../escape", num_bytes=1, sha256="0" * 64)
        await stream.send(pb.ModelOffer(model_id="m", files=(file,)))
        with contextlib.suppress(AssertionError, ConnectionError):
            await stream.read()

    async def unknown(stream: Stream) -> None:
        await stream.welcome()
        stream.write(PREFIX.pack(4, 0) + b"\x92\x2a\x01\x02")
        with contextlib.suppress(AssertionError, ConnectionError):
            await stream.read()

    async def last(stream: Stream) -> None:
        await stream.welcome()
        await drain(stream)

    play(tmp_path, no_welcome, outside, unknown, last)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 50,
        PREFIX.pack(1 << 27, 0),
        PREFIX.pack(3, 0) + b"\xff\xff\xff",
        PREFIX.pack(4, 0) + b"\x93\x02\x07\xc3",
        b"".join(map(bytes, encode_action(infer(1, "relu"), [b"abcd"])))[:-4] + b"x",
        None,
    ],
    ids=["lengths", "header", "text", "withdrawal", "cut off", "number"],
)
def test_garbage_among_actions_ends_the_stream_and_the_worker_dials_again(
    garbage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def first(stream: Stream) -> None:
        await stream.welcome()
        assert stream.data is not None
        if garbage is not None:
            stream.write(garbage)
            if garbage.endswith(b"x"):
                stream.data[1].write_eof()  # in the middle of a frame
        else:
            # An action whose number is taken.
            await stream.install("relu", relu_file())
            await stream.act(load(1, "relu"))
            for _ in range(2):
                stream.order(infer(2, "relu"), bytes(16))
        with contextlib.suppress(AssertionError, ConnectionError):
            while True:
                await stream.result()

    async def second(stream: Stream) -> None:
        await stream.welcome()
        result, _ = await stream.act(infer(1, "nobody"))
        assert result.error is ActionError.UNKNOWN_MODEL
        await drain(stream)

    with caplog.at_level("WARNING", logger="worker.link"):
        play(tmp_path, first, second, device="modelled:1000ms")
    told = [each.getMessage() for each in caplog.records if each.name == "worker.link"]
    # What runs of the first stream is waited for, and told of, too.
    assert [words.endswith("; trying again") for words in told].count(True) == 1


def test_nothing_of_a_stream_that_broke_off_reaches_the_next(tmp_path: Path) -> None:
    content = relu_file()

    async def breaks_off(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("relu", content)
        message = await stream.read()
        if isinstance(message, pb.ModelNeeded):
            await stream.chunk("relu", content, slice(0, len(content)), last=True)
            await stream.expect("chunk_received")
            await stream.expect("ready_model")
        await stream.act(load(1, "relu"))
        for action_id in range(2, 300):
            stream.order(infer(action_id, "relu", expected_ns=1), bytes(16))

    async def last(stream: Stream) -> None:
        await stream.welcome()
        await stream.act(infer(1000, "relu"), bytes(16))  # its own result is the first
        await drain(stream)

    play(tmp_path, *[breaks_off] * 4, last, device="modelled:0us")


def test_a_worker_that_cannot_reach_the_socket_of_actions_says_where_and_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        async def nowhere(stream: Stream) -> None:
            # The file is none of this machine's.
            stream.reply(socket_path="/nowhere/at/all", socket_port=port)

        async def back(stream: Stream) -> None:
            await stream.welcome()
            await drain(stream)

        with caplog.at_level("WARNING", logger="worker.link"):
            play(tmp_path, nowhere, back)
    (told,) = (each.getMessage() for each in caplog.records if each.name == "worker.link")
    assert f"cannot connect to 127.0.0.1:{port}: " in told


def test_results_that_the_controller_does_not_read_wait_and_hold_nothing_up(tmp_path: Path) -> None:
    values = 200_000

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", relu_file(values))
        await stream.act(load(1, "relu"))
        x = bytes(range(64)) * (values * 4 // 64)
        for action_id in range(2, 22):
            stream.order(infer(action_id, "relu"), x)
            # Before a byte of the results is read, the stream goes on.
            await stream.heard()
        for action_id in range(2, 22):
            result, outputs = await stream.result()
            assert (result.action_id, result.error) == (action_id, ActionError.NONE)
            assert outputs == [x]
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_a_controller_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def silent(stream: Stream) -> None:
        await stream.welcome(heartbeat_interval_ms=10, silence_limit_ms=50)
        with contextlib.suppress(AssertionError, ConnectionError):
            await stream.read()

    async def back(stream: Stream) -> None:
        await stream.welcome()
        await drain(stream)

    play(tmp_path, silent, back)


def test_a_worker_that_did_not_get_to_run_for_a_while_keeps_its_controller(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome(heartbeat_interval_ms=50, silence_limit_ms=1000)
        await stream.read_heartbeat()
        time.sleep(1.2)  # noqa: ASYNC251 - the whole process stands still
        while stream.heartbeats[-1].min_delta_ns is None:
            await stream.send(pb.Heartbeat(sent_ns=time.monotonic_ns()))
            await stream.read_heartbeat()
        await drain(stream)

    play(tmp_path, script)


def test_a_rejected_worker_says_why_and_does_not_try_again(tmp_path: Path) -> None:
    async def reject(stream: Stream) -> None:
        reason = "worker speaks protocol 1, this controller 7"
        stream.reject(reason)

    with pytest.raises(ConfigError, match="rejected this worker: worker speaks protocol 1"):
        play(tmp_path, reject)


def test_a_worker_process_told_to_stop_asks_to_be_drained_and_exits_with_zero(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from pathlib import Path; from worker.config import WorkerConfig;"
        "from worker.process import run_worker;"
        "sys.exit(run_worker(WorkerConfig(controller=sys.argv[1], device='modelled:1ms',"
        " cache_dir=Path(sys.argv[2]))))"
    )
    pids: list[int] = []

    async def script(stream: Stream) -> None:
        await stream.welcome()
        ready = await stream.install("relu", relu_file())
        assert ready.load_ns == 1_000_000
        await stream.act(load(1, "relu"))
        os.kill(stream.register.pid, signal.SIGTERM)
        assert (await stream.expect("drain")).reason
        # What is under way is still answered.
        result, outputs = await stream.act(infer(2, "relu"), bytes(16))
        assert (result.error, outputs) == (ActionError.NONE, [bytes(16)])
        await drain(stream)
        pids.append(stream.register.pid)

    async def scenario() -> None:
        controller = ScriptedController(script)
        async with listening(controller) as address:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, address, str(tmp_path)
            )
            try:
                async with asyncio.timeout(LIMIT_S):
                    await controller.done.wait()
                    assert not controller.failures, controller.failures
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert pids == [process.pid]

    asyncio.run(scenario())


def test_a_worker_whose_device_is_lost_says_why_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(ThreadedDevice):
        """Its second EXEC is its last."""

        on_lost: Callable[[str], object]
        num_execs = 0

        def run_exec(self, step: Step[ServedModel]) -> None:
            self.num_execs += 1
            if self.num_execs == 2:
                self.on_lost("it fell off the bus")
                raise DeviceLostError("it fell off the bus")

    def lost_device(
        config: WorkerConfig, files: FileStore, on_lost: Callable[[str], object]
    ) -> Lost:
        device = Lost(
            load_profile("0us"),
            limits=Limits(arena_bytes=1 << 24, num_pages=2, io_bytes=1 << 20),
            io_pool_bytes=1 << 22,
            files=files,
            compile_limit_s=LIMIT_S,
        )
        device.on_lost = on_lost
        return device

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", relu_file())
        await stream.act(load(1, "relu"))
        assert (await stream.act(infer(2, "relu"), bytes(16)))[0].error is ActionError.NONE
        stream.order(infer(3, "relu"), bytes(16))
        result, _ = await stream.result()
        assert (result.action_id, result.error) == (3, ActionError.DEVICE)
        assert result.message == "it fell off the bus"

    async def scenario() -> None:
        controller = ScriptedController(script)
        async with listening(controller) as address:
            config = WorkerConfig(
                controller=address,
                device="cuda:0",
                cache_dir=tmp_path / "cache",
                drain_limit_s=LIMIT_S,
            )
            async with asyncio.timeout(LIMIT_S):
                await process._run(config)

    monkeypatch.setattr(process, "make_device", lost_device)
    with pytest.raises(DeviceGoneError, match="device 'cuda:0': it fell off the bus"):
        asyncio.run(scenario())


HANGS = """
import logging, sys, threading
from pathlib import Path

from modelzoo.profile import load_profile
from tests.kit.queue_device import QueueDevice
from tests.kit.scripted_worker import kind_of
from tests.kit.worker_models import IO_POOL_BYTES, LIMITS
from worker import link, process
from worker.config import WorkerConfig

address, cache_dir, launched = sys.argv[1:]


class Hangs(QueueDevice):
    def launch_exec(self, step):
        ticket = super().launch_exec(step)
        Path(launched).touch()
        return ticket

    def finish_exec(self, step, ticket):
        threading.Event().wait()


def make_device(config, files, on_lost):
    return Hangs(
        load_profile("0us"),
        limits=LIMITS,
        io_pool_bytes=IO_POOL_BYTES,
        files=files,
        compile_limit_s=100,
    )


logging.basicConfig(level=logging.ERROR)
link._STEP_LIMIT_S = 0.2
process.make_device = make_device
config = WorkerConfig(controller=address, device="cuda:0", cache_dir=Path(cache_dir))
sys.exit(process.run_worker(config))
"""


@pytest.mark.parametrize("told_to_leave", [False, True])
def test_a_worker_whose_device_hangs_ends(told_to_leave: bool, tmp_path: Path) -> None:
    launched = tmp_path / "launched"

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", relu_file())
        await stream.act(load(1, "relu"))
        stream.order(infer(2, "relu"), bytes(16))
        await asyncio.to_thread(until, launched.exists, what="the EXEC is with the device")
        if told_to_leave:
            os.kill(stream.register.pid, signal.SIGTERM)
            await stream.expect("drain")
            await drain(stream)

    async def scenario() -> None:
        controller = ScriptedController(script)
        async with listening(controller) as address:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", HANGS, address, tmp_path / "cache", launched),
                cwd=Path(__file__).parents[2],  # where `tests` is found
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(LIMIT_S):
                    _, told = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert not controller.failures, controller.failures
        assert process.returncode == 1
        words = "device 'cuda:0': an action has not ended for 0.2 s"
        # Beside whatever gRPC has to say.
        assert any(line.endswith(words) for line in told.decode().splitlines())

    asyncio.run(scenario())


def test_a_worker_attaches_again_when_what_ran_has_ended(tmp_path: Path) -> None:
    tickets: list[Ticket] = []

    class Slow(QueueDevice):
        def launch_exec(self, step: Step[ServedModel]) -> Ticket:
            tickets.append(super().launch_exec(step))
            return tickets[-1]

    async def first(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("relu", relu_file())
        await stream.act(load(1, "relu"))
        stream.order(infer(2, "relu"), bytes(16))
        await asyncio.to_thread(until, lambda: tickets, what="the EXEC is with the device")
        asyncio.get_running_loop().call_later(0.5, tickets[0].ended.set)

    async def second(stream: Stream) -> None:
        assert tickets[0].ended.is_set()
        await stream.welcome()
        await drain(stream)

    play(tmp_path, first, second, make=lambda config, _: a_modelled(Slow, config.cache_dir, "0us"))


@pytest.mark.parametrize("told_to_leave", [False, True])
def test_a_run_that_would_never_end_is_ended_with_its_stream(
    told_to_leave: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        repeated (float[N] x, int64 times) => (float[N] y) {
            yes = Constant <value = bool {1}> ()
            y = Loop (times, yes, x) <body = step (int64 i, bool go, float[N] a) => (bool on, float[N] b) {
                on = Identity (go)
                b = Add (a, a)
            }>
        }""")
    begun, ended = threading.Event(), threading.Event()
    run_exec, end_exec = CpuDevice.run_exec, CpuDevice.end_exec

    def begin(device: CpuDevice, step: Step[CpuModel]) -> None:
        begun.set()
        # It begins just after it was ended for the first time.
        assert ended.wait(LIMIT_S)
        run_exec(device, step)

    def end(device: CpuDevice) -> None:
        end_exec(device)
        ended.set()

    monkeypatch.setattr(CpuDevice, "run_exec", begin)
    monkeypatch.setattr(CpuDevice, "end_exec", end)

    def repeat(times: int) -> tuple[bytes, bytes]:
        return np.ones(1, np.float32).tobytes(), np.array(times).tobytes()

    async def first(stream: Stream) -> None:
        await stream.welcome()
        await stream.install("repeated", model.SerializeToString())
        await stream.act(load(1, "repeated"))
        stream.order(infer(2, "repeated"), *repeat(10**15))
        await asyncio.to_thread(until, begun.is_set, what="the run has begun")
        if told_to_leave:
            os.kill(os.getpid(), signal.SIGTERM)
            await stream.expect("drain")
            await drain(stream)

    async def second(stream: Stream) -> None:
        await stream.welcome()
        await stream.offer("repeated", model.SerializeToString())
        await stream.expect("ready_model")
        await stream.act(load(1, "repeated"))
        result, (y,) = await stream.act(infer(2, "repeated"), *repeat(3))
        assert (result.error, y) == (ActionError.NONE, np.full(1, 8, np.float32).tobytes())
        await drain(stream)

    async def scenario() -> None:
        controller = ScriptedController(*(first, second)[: 1 if told_to_leave else 2])
        async with listening(controller) as address:
            config = WorkerConfig(
                controller=address,
                device="cpu",
                num_pages=2,
                io_bytes=8 << 20,
                cache_dir=tmp_path / "cache",
                drain_limit_s=LIMIT_S,
            )
            async with asyncio.timeout(LIMIT_S):
                await process._run(config)
        assert not controller.failures, controller.failures

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("declared", "values"),
    [("float[N,M]", np.ones((1, 2), np.float32)), ("string[N]", np.array(["a"], np.object_))],
)
def test_a_run_of_open_sizes_or_of_texts_can_be_ended_too(
    declared: str, values: Array, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        repeated ({declared} x, int64 times) => ({declared} y) {{
            yes = Constant <value = bool {{1}}> ()
            y = Loop (times, yes, x) <body = step (int64 i, bool go, {declared} a) => (bool on, {declared} b) {{
                on = Identity (go)
                b = Identity (a)
            }}>
        }}""")
    device = cpu_device(tmp_path, io_times=4)
    (served,) = prepared(device, offer(FileStore(tmp_path), "repeated", model.SerializeToString()))
    payload = []
    for spec, array in zip(served.inputs, (values, np.array(10**15)), strict=True):
        content = bytes_of(spec.datatype, array)
        payload.append(spec.header(array.shape, len(content)) + bytes(content))
    with running(device) as lanes:
        lanes.lanes.add_model(served)
        lanes.ok(lanes.load("repeated"))
        endless = lanes.infer("repeated", *payload)

        def has_ended() -> bool:
            device.end_exec()
            return not lanes.outcomes.empty()

        until(has_ended, what="the run has ended")
        (answer,) = lanes.ok(endless)
    assert "terminate flag" in str(served.outputs[0].failure(answer))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"controller": "nowhere"}, "controller: found 'nowhere', expected HOST:PORT"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"arena_bytes": 5}, "arena_bytes is 5"),
        ({"io_bytes": 5}, "io_bytes is 5"),
        ({"worker_id": ""}, "worker id: found ''"),
        ({"compile_limit_s": 0.0}, "compile_limit_s is 0.0"),
        # Whatever this machine has: torch without CUDA, no GPU, or fewer.
        ({"device": "cuda:99"}, "device 'cuda:99': found .* expected|expects"),
        ({"device": "cuda"}, "expected cpu, cuda:N, modelled:PROFILE or container:FOLDER"),
        ({"device": "torch:cpu", "host_bytes": 2**60}, "start with less host memory"),
        ({"device": "torch:cpu", "host_bytes": 5}, "host_bytes is 5"),
        ({"precision": "int3"}, "precision: found 'int3', expected one of float32, tf32"),
        ({"device": "tpu"}, "expected cpu, cuda:N, modelled:PROFILE or container:FOLDER"),
        ({"device": "modelled:"}, "expected cpu, cuda:N, modelled:PROFILE or container:FOLDER"),
        ({"device": "modelled:nothing-like-it"}, "no profile"),
        ({"device": "cpu", "num_pages": 10_000_000}, "start with fewer pages"),
    ],
)
def test_a_worker_that_cannot_start_says_what_is_wrong(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_worker(WorkerConfig(**{"controller": "127.0.0.1:1", "cache_dir": tmp_path, **settings}))


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = WorkerConfig(
        controller="127.0.0.1:1", device="modelled:1ms", cache_dir=tmp_path / "file" / "cache"
    )
    with pytest.raises(ConfigError, match=r"cache folder .*file/cache"):
        run_worker(config)


def test_what_a_worker_holds_it_tells_the_next_controller_which_says_what_to_keep(
    tmp_path: Path,
) -> None:
    ready: dict[str, pb.ReadyModel] = {}
    offers: dict[str, pb.ModelOffer] = {}

    async def first(stream: Stream) -> None:
        assert not stream.register.held
        await stream.welcome()
        for index, name in enumerate(("kept", "cold", "unwanted")):
            content = relu_file(index + 1)
            ready[name] = await stream.install(name, content)
            sha256 = hashlib.sha256(content).hexdigest()
            file = pb.FileOffer(name="model.onnx", num_bytes=len(content), sha256=sha256)
            offers[name] = pb.ModelOffer(model_id=name, files=(file,), batch_sizes=(1, 2))
        for index, name in enumerate(("kept", "unwanted")):
            await stream.act(load(index + 1, name))
        # It is on its way when the controller ends.
        stream.order(infer(3, "kept"), bytes(4))

    async def second(stream: Stream) -> None:
        held = {each.ready.model_id: each for each in stream.register.held}
        assert {name: each.ready for name, each in held.items()} == ready
        assert {name for name, each in held.items() if each.resident} == {"kept", "unwanted"}
        for name, each in held.items():
            assert each.offer_digest == pb.offer_digest(offers[name])
        await stream.welcome(keep=["kept", "cold", "never heard of"])
        result, _ = await stream.act(infer(1, "kept"), bytes(4))
        assert result.error == ActionError.NONE
        result, _ = await stream.act(infer(2, "cold"), bytes(8))
        assert result.error == ActionError.NOT_RESIDENT
        result, _ = await stream.act(load(3, "cold"))
        assert result.error == ActionError.NONE  # there is room: nothing else is kept
        result, _ = await stream.act(infer(4, "unwanted"), bytes(12))
        assert result.error == ActionError.UNKNOWN_MODEL
        await stream.send(pb.ModelDrop(model_id="kept"))
        await stream.heard()

    async def third(stream: Stream) -> None:
        assert [each.ready.model_id for each in stream.register.held] == ["cold"]
        # A controller of before knows none of this, and offers what it has.
        await stream.welcome()
        result, _ = await stream.act(infer(1, "cold"), bytes(8))
        assert result.error == ActionError.UNKNOWN_MODEL
        await drain(stream)

    play(tmp_path, first, second, third)


def test_orders_of_an_earlier_generation_end_the_stream_and_are_not_carried_out(
    tmp_path: Path,
) -> None:
    async def first(stream: Stream) -> None:
        await stream.welcome(lineage="l", generation=5)
        await stream.install("relu", relu_file())
        stream.write(*encode_action(load(1, "relu"), generation=5))
        assert (await stream.result())[0].error == ActionError.NONE
        stream.write(*encode_action(infer(2, "relu"), [bytes(16)], generation=4))
        with pytest.raises(AssertionError, match="the worker closed the connection"):
            await stream.result()

    async def followed(stream: Stream) -> None:
        # One that was stopped, and does not know yet that another leads.
        stream.reply(lineage="l", generation=4)

    async def last(stream: Stream) -> None:
        await stream.welcome(lineage="another", generation=1, keep=["relu"])
        stream.write(*encode_action(infer(2, "relu"), [bytes(16)], generation=1))
        assert (await stream.result())[0].error == ActionError.NONE
        await drain(stream)

    play(tmp_path, first, followed, last)
