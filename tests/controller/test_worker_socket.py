"""Workers' connections: who gets in, who is let go, and what a turn costs."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from clockwright.errors import ConfigError, Refusal, RefusedError
from clockwright.wire import frame_headers, frame_socket, frames
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_socket import FrameSocket, SocketListener
from clockwright.wire.tensors import TensorSpec
from controller.core import SchedulerConfig
from controller.links import joining
from controller.port import Ask
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig
from tests.kit.asking import submit
from tests.kit.scripted_worker import LoopbackWorker

S = 1_000_000_000
ROW = b"0123456789abcdef"


def config(directory: Path, **changes: Any) -> ControllerConfig:  # noqa: ANN401
    (directory / "m" / "1").mkdir(parents=True)
    (directory / "m" / "1" / "model.onnx").write_bytes(b"onnx")
    values: dict[str, Any] = {
        "port": 0,
        "models_dir": directory,
        "heartbeat_interval_ms": 20,
        # A worker that a test holds back does not hang, however slow the machine is.
        "scheduler": SchedulerConfig(action_timeout_ns=1000 * S),
    }
    return ControllerConfig(**{**values, **changes})


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - any condition, not one that signals
        await asyncio.sleep(0.005)


async def ask(
    controller: Controller, data: bytes = ROW, *, slo_ns: int = 30 * S
) -> Sequence[Buffer]:
    await until(lambda: controller.catalogue.models[0].ready_on)
    runtime, model = controller.runtime, controller.catalogue.models[0]
    answer = await submit(runtime, model.model_id, [data], Ask(0, 1, runtime.clock(), slo_ns))
    return answer.outputs


@pytest.mark.parametrize("over_tcp", [False, True])
async def test_actions_go_by_a_file_of_this_host_or_by_tcp(over_tcp: bool, tmp_path: Path) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port, over_tcp=over_tcp) as worker,
    ):
        assert [bytes(output) for output in await ask(controller)] == [ROW]
        assert worker.welcome.socket_port != controller.port
        assert len(worker.welcome.token) == frame_headers.TOKEN_BYTES


async def test_workers_of_other_machines_find_the_port_that_was_chosen_for_them(
    tmp_path: Path,
) -> None:
    async with running(config(tmp_path / "a")) as first:
        async with LoopbackWorker(first.port, over_tcp=True) as worker:
            await worker.wait_for("welcome")
        taken = worker.welcome.socket_port
        with pytest.raises(ConfigError, match=rf"port {taken} of 127.0.0.1 for workers: Address"):
            async with running(config(tmp_path / "b", worker_port=taken)):
                pass
    async with (
        running(config(tmp_path / "c", worker_port=taken)) as second,
        LoopbackWorker(second.port, over_tcp=True) as worker,
    ):
        await worker.wait_for("welcome")
        assert worker.welcome.socket_port == taken


@pytest.mark.parametrize(
    "greeting",
    [
        frames.greeting(bytes(frame_headers.TOKEN_BYTES)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20),
        b"\x00" * 1000,
        b"",
    ],
    ids=["token", "http", "zeros", "nothing"],
)
async def test_a_stranger_is_hung_up_on(greeting: bytes, tmp_path: Path) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        await worker.wait_for("model_offer")
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.welcome.socket_port)
        writer.write(greeting)
        writer.write_eof()
        with suppress(ConnectionError):  # what it sent was not read to the end
            assert await reader.read() == b""
        writer.close()
        assert [bytes(output) for output in await ask(controller)] == [ROW]


async def test_a_token_is_good_for_one_connection(tmp_path: Path) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        await until(lambda: controller.links.links and controller.links.links[0].joined)
        reader, writer = await asyncio.open_unix_connection(worker.welcome.socket_path)
        writer.write(frames.greeting(worker.welcome.token))
        assert await reader.read() == b""
        writer.close()
        assert [bytes(output) for output in await ask(controller)] == [ROW]
    # When a worker asks again, the first token is invalid.
    async with (
        running(config(tmp_path / "again")) as controller,
        LoopbackWorker(controller.port, dials=False) as worker,
    ):
        await worker.wait_for("welcome")
        async with LoopbackWorker(controller.port, dials=False) as again:
            await again.wait_for("welcome")
        reader, writer = await asyncio.open_unix_connection(worker.welcome.socket_path)
        writer.write(frames.greeting(worker.welcome.token))
        assert await reader.read() == b""
        writer.close()


async def test_strangers_that_say_nothing_keep_no_worker_out(tmp_path: Path) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        await worker.wait_for("welcome")
        strangers = [
            await asyncio.open_unix_connection(worker.welcome.socket_path) for _ in range(200)
        ]
        async with LoopbackWorker(controller.port, "late") as late:
            await late.wait_for("model_offer")
        # The first have made room.
        assert await strangers[0][0].read() == b""
        for _, writer in strangers:
            writer.close()


async def test_a_stranger_that_says_nothing_is_hung_up_on_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_socket, "_GREETING_LIMIT_S", 0.05)
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port, dials=False) as worker,
    ):
        await worker.wait_for("welcome")
        reader, writer = await asyncio.open_unix_connection(worker.welcome.socket_path)
        writer.write(frames.greeting(worker.welcome.token)[:-1])
        assert await reader.read() == b""
        writer.close()


async def test_a_worker_that_never_connects_gets_no_models_and_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "DIAL_LIMIT_S", 0.05)
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port, dials=False) as worker,
    ):
        await until(lambda: "worker w0 has not connected for 0.05 s" in caplog.text)
        assert not controller.links.links
        reader, writer = await asyncio.open_unix_connection(worker.welcome.socket_path)
        writer.write(frames.greeting(worker.welcome.token))
        assert await reader.read() == b""
        writer.close()


async def test_a_worker_that_takes_no_more_actions_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = TensorSpec("x", "UINT8", (4 << 20,))

    class Deaf(LoopbackWorker):
        @override
        async def ready(self, model_id: str, **_: object) -> None:
            await super().ready(model_id, inputs=(image,), outputs=(image,))

    settings = config(tmp_path, silence_limit_ms=1000)
    async with running(settings) as controller, Deaf(controller.port) as worker:
        await ask(controller, bytes(4 << 20))
        worker.reads = False
        asks = [asyncio.create_task(ask(controller, bytes(4 << 20))) for _ in range(8)]
        await until(lambda: "worker w0 left: it takes no more actions for 10" in caplog.text)
        for outcome in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(outcome, RefusedError)
            assert outcome.refusal in (Refusal.WORKER_LOST, Refusal.NO_WORKER)


async def test_a_worker_whose_socket_breaks_is_lost_and_what_it_had_is_served_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port, "breaks", hold=True) as breaks,
    ):
        asking = asyncio.create_task(ask(controller))
        await breaks.wait_for("load_weights")
        async with LoopbackWorker(controller.port, "good"):
            await until(lambda: len(controller.catalogue.models[0].ready_on) == 2)
            assert breaks.data is not None
            breaks.data.close()
            assert [bytes(output) for output in await asking] == [ROW]
            # What was on its way to it when it closed its connection comes back as a reset.
            words = r"worker breaks left: (the worker closed its connection|its connection broke)"
            await until(lambda: re.search(words, caplog.text))


async def test_results_before_the_end_of_the_socket_count(tmp_path: Path) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port, hold=True) as worker,
    ):
        asking = asyncio.create_task(ask(controller))
        await worker.wait_for("load_weights")
        worker.keeps = lambda action: "Infer" in str(action)  # type: ignore[method-assign]
        for action, payload in worker.take_held():
            await worker.answer(action, payload)
        await worker.wait_for("infer")
        for action, payload in worker.take_held():
            await worker.answer(action, payload)
        assert worker.data is not None
        worker.data.write_eof()
        assert [bytes(output) for output in await asking] == [ROW]
        await worker.ended.wait()


class Counting(socket.socket):
    """Counts the system calls that write."""

    num_writes = 0

    @override
    def send(self, *arguments: Any) -> int:
        self.num_writes += 1
        return super().send(*arguments)

    @override
    def sendmsg(self, *arguments: Any) -> int:
        self.num_writes += 1
        return super().sendmsg(*arguments)


async def test_what_is_sent_in_a_turn_of_the_loop_leaves_in_one_call() -> None:
    ours, theirs = socket.socketpair()
    sock = Counting(fileno=ours.detach())
    sock.setblocking(False)
    theirs.setblocking(False)
    ended: list[str] = []
    link = FrameSocket(sock, lambda _: None, ended.append)
    loop = asyncio.get_running_loop()
    for number in range(100):
        link.send([b"%d," % number, b"and "])
    data = await loop.sock_recv(theirs, 1 << 16)
    assert data == b"".join(b"%d,and " % number for number in range(100))
    assert sock.num_writes == 1
    # More than the socket holds waits until there is room, in order.
    blocks = [bytes([number]) * 100_000 for number in range(50)]
    for block in blocks:
        link.send([block])
    received = bytearray()
    while len(received) < 5_000_000:
        received += await loop.sock_recv(theirs, 1 << 20)
    assert received == b"".join(blocks)
    link.send([b"last"])
    assert await loop.sock_recv(theirs, 100) == b"last"
    theirs.close()
    await until(lambda: ended)
    assert ended == ["the worker closed its connection"]
    link.send([b"to nobody"])
    await asyncio.sleep(0)
    assert len(ended) == 1


async def test_a_worker_that_leaves_too_much_unread_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_socket, "_UNSENT_BYTES_MAX", 1 << 20)
    sock, theirs = socket.socketpair()
    sock.setblocking(False)
    ended: list[str] = []
    link = FrameSocket(sock, lambda _: None, ended.append)
    for _ in range(100):
        link.send([bytes(1 << 20)])
    await until(lambda: ended)
    assert "bytes wait unread" in ended[0]
    theirs.close()


async def test_where_there_can_be_no_file_workers_of_this_host_take_tcp(tmp_path: Path) -> None:
    listener = SocketListener(silence_limit_ms=1000)
    listener.listen("127.0.0.1", 0, tmp_path / ("x" * 200))
    assert listener.path == ""
    assert listener.port
    listener.close()


async def test_where_no_file_handle_is_left_workers_wait_for_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(config(tmp_path, silence_limit_ms=1_000_000)) as controller,
        LoopbackWorker(controller.port, dials=False) as worker,
    ):
        await worker.wait_for("welcome")
        sock = socket.socket(socket.AF_UNIX)
        num_open = max(map(int, os.listdir("/proc/self/fd")))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 1, limits[1]))
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            sock.connect(worker.welcome.socket_path)
            await until(lambda: "cannot accept connections of workers" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for number in taken:
                os.close(number)
        sock.send(frames.greeting(worker.welcome.token))
        sock.shutdown(socket.SHUT_WR)
        # The link ends because its connection does: so the connection had become the link's.
        await until(lambda: "worker w0 left: the worker closed its connection" in caplog.text)
        sock.close()
        assert caplog.text.count("cannot accept") < 100
