"""Containers in any language: programs that keep to the protocol and programs that do not, other servers, and bounds."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException
from typing_extensions import override

from clockwright import Client, RefusedError
from clockwright.containers import ContainerSpec
from clockwright.errors import ModelError, ProtocolError
from clockwright.v1 import inference_pb2 as pb
from experiments.live.local_server import LocalServer
from tests.kit.container_bench import ContainerBench, bench, write_container
from tests.kit.foreign_server import foreign_server
from tests.kit.pages import blocks_of
from tests.kit.processes import PATIENCE_S, lives, until
from worker.containers.bounds import Bounds
from worker.containers.container import ContainerAwayError, SharedMemory
from worker.containers.device import Backoff
from worker.containers.frames import join_tensors, split_tensors
from worker.containers.program import ProgramContainer

SLO_MS = 30_000
ROOT = Path(__file__).parents[2]

# A program that knows nothing of ours. What the first value of a row says happens to its batch.
(
    PLAIN,
    RAISE,
    CRASH,
    HANG,
    TOO_LONG,
    OLD_VERSION,
    SHORT_TENSOR,
    OTHER_TYPE,
    OTHER_ROWS,
    OTHER_KIND,
    CLOSE,
    NO_ANSWER,
    TWICE,
    TWICE_LATER,
) = map(float, range(14))
ODD = """
import os, signal, socket, struct, sys, threading, time

number, late = 0, b""

def frame(kind, body=b"", version=1, length=None):
    return struct.pack("<IIQQ", version, kind, len(body) if length is None else length, number) + body

def read(worker, n):
    data = b""
    while len(data) < n:
        piece = worker.recv(n - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data

def tensor(code, shape, data, length=None):
    head = struct.pack("<IIQ", code, len(shape), len(data) if length is None else length)
    return head + struct.pack(f"<{len(shape)}q", *shape) + data + bytes(-len(data) % 8)

def answer(mood, rows, sums):
    floats = struct.pack(f"<{rows}f", *sums)
    if mood == 12:
        return answer(1, rows, sums) + answer(0, rows, sums)
    done = lambda *tensors: frame(3, struct.pack("<Q", len(tensors)) + b"".join(tensors))
    return {
        1: frame(4, b"this row is not to my taste"),
        4: frame(3, b"", length=1 << 40),
        5: frame(3, b"", version=2),
        6: done(tensor(1, [rows], floats, length=1000)),
        7: done(tensor(11, [rows], floats * 2)),
        8: done(tensor(1, [rows + 1], floats + bytes(4))),
        9: frame(77),
        11: frame(1),
    }.get(mood) or done(tensor(1, [rows], floats))

def serve(worker):
    global number, late
    number = 0
    worker.sendall(frame(1))
    while True:
        version, kind, size, number = struct.unpack("<IIQQ", read(worker, 24))
        worker.sendall(late)
        late = b""
        assert (version, kind) == (1, 2), (version, kind)
        body = read(worker, size)
        count, code, rank, length, rows, width = struct.unpack_from("<QIIQqq", body)
        assert (count, code, rank, length) == (1, 1, 2, 4 * rows * width)
        values = struct.unpack_from(f"<{rows * width}f", body, 40)
        assert len(body) == 40 + length + -length % 8
        mood = int(values[0])
        if mood == 2:
            worker.sendall(frame(3, b"half of it", length=32)[:20])
            os.kill(os.getpid(), signal.SIGKILL)
        if mood == 3:
            threading.Event().wait()
        if mood == 10:
            worker.shutdown(socket.SHUT_RDWR)
            threading.Event().wait()
        if mood == 13:
            late = answer(0, rows, [0] * rows)
        worker.sendall(answer(mood, rows, [sum(values[i * width : (i + 1) * width]) for i in range(rows)]))

if sys.argv[1] == "listen":
    server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    print(server.getsockname()[1], flush=True)
    while True:
        try:
            serve(server.accept()[0])
        except (EOFError, ConnectionError):
            pass
print("programs print")
worker = socket.socket(socket.AF_UNIX)
worker.connect(os.environ["CLOCKWRIGHT_SOCKET"])
match sys.argv[1]:
    case "refuse":
        worker.sendall(frame(4, b"there is no licence"))
    case "old":
        worker.sendall(frame(1, version=7))
    case "hasty":
        worker.sendall(frame(3, struct.pack("<Q", 0)))
    case "serve":
        try:
            serve(worker)
        except EOFError:
            pass
"""


def odd_table(*arguments: str, width: int = 3) -> str:
    command = [sys.executable, "odd.py", *arguments]
    return f"""
[container]
command = {command}
inputs = {{ rows = "FP32[{width}]" }}
outputs = {{ sums = "FP32[]" }}
time_limit_s = 60
"""


def row(mood: float) -> np.ndarray:
    return np.array([[mood, 5, 6]], np.float32)


def sums_of(outputs: object) -> list[float]:
    return [each for out in outputs for each in np.frombuffer(out, np.float32).tolist()]  # type: ignore[attr-defined]


@contextlib.contextmanager
def shared_memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(1 << 12)
    try:
        yield memory
    finally:
        memory.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "FORGET_S", 0.0)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerBench]:
    folder = write_container(tmp_path_factory.mktemp("m"), "odd", odd_table("serve"), odd=ODD)
    with bench(folder) as made:
        made.prepare()
        yield made


# --- programs -----------------------------------------------------------------------------------


def test_a_program_gets_the_rows_that_were_sent_and_its_answers_come_back(
    odd: ContainerBench,
) -> None:
    first, second = np.full((2, 3), 20, np.float32), np.full((1, 3), 40, np.float32)
    outputs = odd.infer(first, second, rows=(2, 1))
    assert [np.frombuffer(o, np.float32).tolist() for o in outputs] == [[60, 60], [120]]
    assert sums_of(odd.infer(row(PLAIN))) == [11]
    assert "profiling batch 4" in odd.progress


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        (RAISE, "this row is not to my taste"),
        (OTHER_TYPE, r"output 'sums' is FP64 \[1\], expected FP32 \[1\]"),
        (OTHER_ROWS, r"output 'sums' is FP32 \[2\], expected FP32 \[1\]"),
    ],
)
def test_a_batch_that_a_program_cannot_run_fails_alone(
    odd: ContainerBench, mood: float, words: str
) -> None:
    model = odd.prepare()
    pid = model.container.pid
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(odd.failure(row(mood)))
    assert sums_of(odd.infer(row(PLAIN))) == [11]
    assert odd.lost.empty()
    assert model.container.pid == pid


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        (CRASH, "the container was killed by SIGKILL while running a batch of 1"),
        (TOO_LONG, "broke the protocol while running a batch of 1: found a frame DONE of 1099511"),
        (OLD_VERSION, "found version 2 of the protocol in a frame, expected 1"),
        (SHORT_TENSOR, "found 1000 bytes of datatype 1, of which 8 are there"),
        (OTHER_KIND, r"found a frame of kind 77, expected 1 \(READY\), 2 \(RUN\)"),
        (NO_ANSWER, "found a frame READY, expected DONE or ERROR"),
        (HANG, "the container hung: running a batch of 1 took more than 0.05 s"),
    ],
)
def test_a_program_that_breaks_the_protocol_costs_its_batch_and_starts_again(
    odd: ContainerBench, mood: float, words: str
) -> None:
    model = odd.prepare()
    pid = model.container.pid
    assert pid is not None
    if mood == HANG:
        # Not declared so short: on a slow machine starting might count as a hang.
        model.container._spec = dataclasses.replace(model.container._spec, time_limit_s=0.05)
    message = odd.failure(row(mood))
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(message)
    assert odd.lost.get(timeout=PATIENCE_S) == message
    until(lambda: not lives(pid), what="the program's process is gone")
    odd.prepare()
    assert sums_of(odd.infer(row(PLAIN))) == [11]


@pytest.mark.parametrize("mood", [TWICE, TWICE_LATER])
def test_a_second_answer_is_not_taken_for_that_of_the_next_batch(
    odd: ContainerBench, mood: float
) -> None:
    odd.prepare()
    if mood == TWICE:
        assert "this row is not to my taste" in odd.failure(row(mood))
    else:
        assert sums_of(odd.infer(row(mood))) == [24]
    message = odd.failure(row(PLAIN))
    assert "running a batch of 1: found a frame DONE of number" in message
    assert odd.lost.get(timeout=PATIENCE_S) == message
    odd.prepare()
    assert sums_of(odd.infer(row(PLAIN))) == [11]


def test_a_program_that_only_closes_its_connection_is_ended(
    odd: ContainerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.containers.program._LEAVE_LIMIT_S", 0.01)
    pid = odd.prepare().container.pid
    assert pid is not None
    message = odd.failure(row(CLOSE))
    assert "the container closed the connection while running a batch of 1" in message
    assert odd.lost.get(timeout=PATIENCE_S) == message
    until(lambda: not lives(pid), what="the program's process is gone")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (odd_table("refuse"), "there is no licence"),
        (odd_table("old"), "starting .*: found version 7 of the protocol in a frame, expected 1"),
        (odd_table("hasty"), "found a frame DONE of 8 bytes, expected 0 at most"),
        (odd_table("leave"), "the container has left while starting"),
        (
            odd_table("serve").replace(repr(sys.executable), "'no-such-program'"),
            "no-such-program cannot be started: No such file or directory",
        ),
        (odd_table("serve", width=2).replace("FP32[]", "FP64[]"), "expected FP64"),
    ],
)
def test_a_program_that_cannot_serve_is_refused_with_its_words(
    tmp_path: Path, table: str, words: str
) -> None:
    folder = write_container(tmp_path, "odd", table, odd=ODD)
    with bench(folder) as made, pytest.raises(ModelError, match=words):
        made.prepare()


def test_inputs_that_no_socket_buffers_at_once_arrive(tmp_path: Path) -> None:
    width = 60_000
    folder = write_container(tmp_path, "odd", odd_table("serve", width=width), odd=ODD)
    rows = np.ones((4, width), np.float32)
    rows[:, 0] = [0, 10, 20, 30]
    with bench(folder) as made:
        made.prepare()
        assert sums_of(made.infer(rows, rows=(4,))) == [width - 1 + k for k in (0, 10, 20, 30)]


def test_a_program_at_an_address_goes_away_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "FORGET_S", math.inf)  # however slow the machine is
    script = tmp_path / "odd.py"
    script.write_text(ODD)

    @contextlib.contextmanager
    def listening(port: int) -> Iterator[int]:
        command = [sys.executable, str(script), "listen", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()
            process.communicate()

    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening(0))
        table = odd_table().replace(
            odd_table().splitlines()[2], f'address = "tcp://127.0.0.1:{port}"'
        )
        folder = write_container(tmp_path, "odd", table, odd="")
        made = stack.enter_context(bench(folder))
        made.prepare()
        assert sums_of(made.infer(row(PLAIN))) == [11]
        message = made.failure(row(CRASH))
        assert "the container closed the connection while running a batch of 1" in message
        assert made.lost.get(timeout=PATIENCE_S) == message

        class Progress(list[str]):
            """Has the program come back once its absence was noticed."""

            @override
            def append(self, stage: str) -> None:
                if "refused" in stage and not self:
                    stack.enter_context(listening(port))
                    super().append(stage)

        made.progress = Progress()
        made.prepare()
        assert f"tcp://127.0.0.1:{port}: [Errno 111] Connection refused" in made.progress[0]
        assert sums_of(made.infer(row(PLAIN))) == [11]


def test_a_program_that_never_was_at_its_address_is_tried_again_later(tmp_path: Path) -> None:
    table = odd_table().replace(odd_table().splitlines()[2], 'address = "unix:///no/such/socket"')
    folder = write_container(tmp_path, "odd", table, odd="")
    with bench(folder) as made, pytest.raises(ContainerAwayError, match="No such file or dir"):
        made.prepare()


def test_an_address_that_is_no_name_is_told_with_it(tmp_path: Path) -> None:
    table = odd_table().replace(odd_table().splitlines()[2], 'address = "tcp://a..b:1"')
    folder = write_container(tmp_path, "odd", table, odd="")
    with (
        bench(folder) as made,
        pytest.raises(ContainerAwayError, match=r"tcp://a\.\.b:1: encoding"),
    ):
        made.prepare()


def test_a_container_that_is_stopped_while_it_connects_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    connect = socket.create_connection

    def dial(place: tuple[str, int], limit_s: float) -> socket.socket:
        begun.set()
        assert go.wait(PATIENCE_S), "stop waits for an address that does not answer"
        return connect(place, limit_s)

    monkeypatch.setattr(socket, "create_connection", dial)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        shared_memory() as memory,
        ThreadPoolExecutor(1) as pool,
    ):
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        spec = ContainerSpec(address=address, inputs=(), outputs=())
        container = ProgramContainer(spec, tmp_path, memory, Bounds("late"))
        ready = pool.submit(container.wait_ready, PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        container.stop()
        go.set()
        with pytest.raises(ModelError, match="the container closed the connection"):
            ready.result(PATIENCE_S)
        server.settimeout(PATIENCE_S)
        with server.accept()[0] as accepted:
            accepted.settimeout(PATIENCE_S)
            assert accepted.recv(1) == b""


def test_a_program_that_the_system_does_not_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_container(tmp_path / "m", "odd", odd_table("serve"), odd=ODD)
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))

    def popen(*_: object, **__: object) -> None:
        raise BlockingIOError("too many processes")

    with bench(folder) as made:
        monkeypatch.setattr(subprocess, "Popen", popen)
        # The exception keeps what it passed through, so nothing goes by itself.
        with pytest.raises(OSError, match="too many") as caught:
            made.prepare()
        assert list((tmp_path / "t").iterdir()) == [], caught


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body[:-1], "of which the tensors take"),
        (lambda body: body[:20], "that are no tensors"),
        (lambda body: b"\xff" * 8 + body[8:], "that are no tensors"),
        (
            lambda body: body[:8] + b"\x63" + body[9:],
            "4 bytes of datatype 99, of which 4 are there",
        ),
        (lambda body: body[:12] + b"\xff" * 4 + body[16:], "that are no tensors"),
    ],
)
def test_a_body_whose_lengths_do_not_add_up_is_refused(
    change: Callable[[bytes], bytes], words: str
) -> None:
    body = b"".join(join_tensors([("FP32", (1,), bytes(4))]))
    assert [(d, s, bytes(e)) for d, s, e in split_tensors(body)] == [("FP32", (1,), bytes(4))]
    with pytest.raises(ProtocolError, match=words):
        split_tensors(change(body))


# --- the examples of the documentation, other servers ------------------------------------------


def write_examples(models: Path) -> None:
    """The programs of the page, built."""
    if shutil.which("g++") is None or shutil.which("node") is None:
        pytest.skip("g++ and node build and run the examples; one of them is not installed")
    for block in blocks_of("docs/containers.md", (ROOT / "docs/containers.md").read_text()):
        if block.title.startswith("models/"):
            path = models / block.title.removeprefix("models/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    flags = ["-Wall", "-Wextra", "-Werror", "-std=c++17", "-o", "deviation", "deviation.cpp"]
    subprocess.run(["g++", *flags], cwd=models / "deviation" / "1", check=True)


def test_servers_run_programs_and_models_of_other_servers(tmp_path: Path) -> None:
    write_examples(tmp_path / "models")
    upper = """
        [container]
        load = "model.py"
        inputs = { text = "BYTES[]", numbers = "FP32[100]" }
        outputs = { upper = "BYTES[]", sums = "FP64[]" }
        time_limit_s = 60
    """
    code = "def predict(text, numbers): return [t.upper() for t in text], numbers.sum(axis=1)"
    inner_models = write_container(tmp_path / "inner", "shout", upper, model=code).parent
    arguments = ["--workers", "0", "--slo-ms", "30000", "--cache-dir", str(tmp_path / "cache")]
    with contextlib.ExitStack() as stack:
        inner = LocalServer(["--models", str(inner_models), *arguments])
        stack.callback(inner.stop)
        inner.wait_for("ready: ")
        address = f'address = "grpc://{inner.address}"\nmodel = "shout"'
        table = upper.replace('load = "model.py"', address)
        write_container(tmp_path / "models", "remote", table)
        write_container(tmp_path / "models", "odd", odd_table("serve"), odd=ODD)
        models = ["--models", str(tmp_path / "models")]
        server = stack.enter_context(LocalServer([*models, *arguments]))
        client = stack.enter_context(Client(server.address))

        rows = np.random.default_rng(1).random((100, 64), np.float32)
        found = client.infer("deviation", rows, slo_ms=SLO_MS).outputs["deviation"]
        np.testing.assert_allclose(found, rows.std(axis=1), rtol=1e-5)
        rows[7, 3] = np.nan
        with pytest.raises(RefusedError, match="row 7 is not finite"):
            client.infer("deviation", rows[:8], slo_ms=SLO_MS)
        words = np.array(["", "ein Wort", "naïve \n three words"] * 30, object)
        outputs = client.infer("words", words, slo_ms=SLO_MS).outputs
        assert outputs["upper"].tolist() == [word.upper() for word in words]
        assert outputs["words"].tolist() == [0, 2, 3] * 30
        long = np.array(["wort " * 10_000], object)
        assert client.infer("words", long, slo_ms=SLO_MS).outputs["words"].tolist() == [10_000]

        with pytest.raises(RefusedError, match="was killed by SIGKILL while running a batch of 1"):
            client.infer("odd", row(CRASH), slo_ms=SLO_MS)

        inputs = {"text": words[:50], "numbers": np.ones((50, 100), np.float32)}

        def shouts() -> bool:
            try:
                outputs = client.infer("remote", inputs, slo_ms=SLO_MS).outputs
            except RefusedError as refusal:
                refused.append(str(refusal))
                return False
            assert outputs["upper"].tolist() == [word.upper() for word in words[:50]]
            return bool(outputs["sums"].tolist() == [100] * 50)

        def serves_odd() -> bool:
            with contextlib.suppress(RefusedError):
                return bool(client.infer("odd", row(PLAIN), slo_ms=SLO_MS).outputs["sums"] == 11)
            return False

        refused: list[str] = []
        assert shouts()
        until(serves_odd, what="the program is back")
        inner.stop()
        assert not shouts()
        inner = LocalServer(
            ["--models", str(inner_models), *arguments, "--port", inner.address.split(":")[1]]
        )
        stack.callback(inner.stop)
        until(shouts, what="the other server is back")
        assert any("went away while running a batch" in words for words in refused), refused
        client.infer("deviation", rows[:1], slo_ms=SLO_MS)


def test_what_a_client_declares_starts_nothing_and_connects_nowhere(tmp_path: Path) -> None:
    write_container(tmp_path / "models", "odd", odd_table("serve"), odd=ODD)
    flags = ["--workers", "0", "--slo-ms", "30000", "--cache-dir", str(tmp_path / "cache")]
    started = tmp_path / "started"
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        server = stack.enter_context(LocalServer(["--models", str(tmp_path / "models"), *flags]))
        loader = stack.enter_context(tritonclient.grpc.InferenceServerClient(server.address))
        client = stack.enter_context(Client(server.address))
        place = odd_table("serve").splitlines()[2]
        for kind in (f"command = ['touch', '{started}']", f'address = "tcp://127.0.0.1:{port}"'):
            table = odd_table("serve").replace(place, kind)
            files = {"file:config.toml": table.encode(), "file:1/odd.py": ODD.encode()}
            with pytest.raises(InferenceServerException, match="that of another model"):
                loader.load_model("another", files=files)
            # With the operator's files the operator's declaration runs,
            loader.load_model("odd", files=files)
            assert client.infer("odd", row(PLAIN), slo_ms=SLO_MS).outputs["sums"] == 11
            # and other files do not.
            with pytest.raises(InferenceServerException, match="is not what this worker has"):
                loader.load_model("odd", files=files | {"file:1/odd.py": b"print()"})
            assert client.infer("odd", row(PLAIN), slo_ms=SLO_MS).outputs["sums"] == 11
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
        assert not started.exists()


OTHER_TABLE = """
[container]
address = "grpc://ADDRESS"
inputs = { x = "FP32[3]" }
outputs = { sums = "FP32[]" }
time_limit_s = 60
"""


def test_a_model_of_another_server_is_the_one_that_was_declared(tmp_path: Path) -> None:
    with foreign_server() as other:
        table = OTHER_TABLE.replace("ADDRESS", other.address)
        other.inputs = [("x", "FP64", [-1, 3]), ("y", "FP32", [-1])]
        other.outputs = [("sums", "FP32", [-1]), ("more", "FP32", [-1])]
        folder = write_container(tmp_path, "sums", table)
        with bench(folder) as made, pytest.raises(ModelError) as caught:
            made.prepare()
        assert str(caught.value).split(" is not what [container] declares: ")[1] == (
            "x: found FP64 [-1, 3] with the batch; y: not declared. Of the server: inputs = "
            '{ x = "FP64[3]", y = "FP32[]" }, outputs = { sums = "FP32[]", more = "FP32[]" }'
        )


def test_an_answer_of_another_server_is_bounded(tmp_path: Path) -> None:
    with foreign_server() as other:
        other.outputs = [("sums", "FP32", [-1])]
        other.compute = lambda _, response: response.raw_output_contents.append(bytes(16 << 20))
        table = OTHER_TABLE.replace("ADDRESS", other.address)
        folder = write_container(tmp_path, "sums", table)
        with bench(folder) as made, pytest.raises(ModelError, match="larger than max"):
            made.prepare()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, "the server went away while running a batch of 1: busy"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "the server said: LATE"),
    ],
)
def test_another_server_that_is_busy_at_the_start_is_tried_again_later(
    tmp_path: Path, status: grpc.StatusCode, words: str
) -> None:
    with foreign_server() as other:
        other.outputs = [("sums", "FP32", [-1])]
        other.refusal = status
        table = OTHER_TABLE.replace("ADDRESS", other.address)
        folder = write_container(tmp_path, "sums", table)
        with (
            bench(folder) as made,
            pytest.raises(ContainerAwayError, match=f"grpc://.*: a batch of 1 zeros: {words}"),
        ):
            made.prepare()


def test_another_server_that_hangs_costs_its_batch_and_is_asked_again(tmp_path: Path) -> None:
    def compute(request: pb.ModelInferRequest, response: pb.ModelInferResponse) -> None:
        (raw,) = request.raw_input_contents
        rows = np.frombuffer(raw, np.float32).reshape(tuple(request.inputs[0].shape))
        if rows[0, 0] == OTHER_TYPE:
            return
        assert [tensor.name for tensor in request.outputs] == ["sums"]
        response.outputs.add(name="sums", datatype="FP32", shape=[len(rows)])
        response.raw_output_contents.append(rows.sum(axis=1).tobytes())

    with foreign_server() as other:
        other.compute = compute
        other.outputs = [("sums", "FP32", [-1])]
        table = OTHER_TABLE.replace("ADDRESS", other.address)
        with bench(write_container(tmp_path, "sums", table)) as made:
            model = made.prepare()
            rows = np.arange(12, dtype=np.float32).reshape(4, 3)
            assert sums_of(made.infer(rows, rows=(4,))) == [3, 12, 21, 30]
            assert "found outputs [] with raw contents, expected 'sums'" in made.failure(
                row(OTHER_TYPE)
            )
            other.go.clear()
            model.container._spec = dataclasses.replace(model.container._spec, time_limit_s=0.05)
            message = made.failure(row(PLAIN))
            assert "the server hung: running a batch of 1 took more than its time limit" in message
            assert made.lost.get(timeout=PATIENCE_S) == message
            other.go.set()
            made.prepare()
            assert sums_of(made.infer(row(PLAIN))) == [11]


# --- bounds -------------------------------------------------------------------------------------


def a_machine(root: Path, *, controllers: str = "cpu memory pids", path: str = "/a/worker") -> Path:
    """The files of a machine with cgroup v2. Returns the parent of the worker's group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{path}\n")
    (root / "proc/self/mountinfo").write_text("1 2 0:3 / /sys/cg rw - cgroup2 cgroup2 rw\n")
    parent = root / f"sys/cg{path}".rstrip("/")
    if path != "/":
        parent = parent.parent
    parent.mkdir(parents=True)
    (parent / "cgroup.controllers").write_text(f"{controllers}\n")
    (parent / "cgroup.subtree_control").write_text("\n")
    return parent


SPEC = ContainerSpec(
    command=("./a",), inputs=(), outputs=(), memory_mib=64, cpus=0.5, time_limit_s=60
)


@pytest.mark.parametrize("path", ["/a/worker", "/"])
def test_a_group_with_the_bounds_is_made_next_to_the_workers_own(tmp_path: Path, path: str) -> None:
    parent = a_machine(tmp_path, path=path)
    bounds = Bounds("m", tmp_path)
    free = bounds.open(dataclasses.replace(SPEC, memory_mib=None, cpus=None))
    assert free is not None
    assert list(free.folder.iterdir()) == []
    assert (parent / "cgroup.subtree_control").read_text() == "\n"
    (free.folder / "cgroup.kill").write_text("0")
    (free.folder / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    free.close()
    assert (free.folder / "cgroup.kill").read_text() == "1"
    made = bounds.open(SPEC)
    assert made is not None
    group = made.folder
    assert group.parent == parent
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (group / "memory.max").read_text() == str(64 << 20)
    assert (group / "memory.swap.max").read_text() == "0"
    assert (group / "cpu.max").read_text() == "50000 100000"
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 0\n")
    assert made.verdict() == ""
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    # A container that is about to replace this one has a group of its own.
    other = bounds.open(SPEC)
    assert other is not None
    assert other.folder != group
    assert other.verdict() == ""
    assert made.verdict() == ", because it took more than memory_mib = 64,"
    for file in group.iterdir():
        file.unlink()  # as the kernel does
    made.close()
    assert not group.exists()
    assert other.folder.exists()


def test_bounds_that_cannot_be_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_machine(tmp_path, controllers="pids")
    bounds = Bounds("slim", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert bounds.open(SPEC) is bounds.open(SPEC) is None
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("container slim: memory_mib and cpus do not hold: ")
    assert "found controllers ['pids'], but no cpu and no memory; expected a cgroup v2" in told
    assert Bounds("none", tmp_path / "without").open(SPEC) is None


def test_a_program_joins_its_group_or_says_that_it_cannot(tmp_path: Path) -> None:
    for group in (tmp_path, tmp_path / "gone"):
        command = [sys.executable, "-m", "worker.containers.launch", str(os.getpid()), str(group)]
        done = subprocess.run(
            [*command, str(tmp_path), "echo", "started"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        assert done.stdout == "started\n"
        assert ("do not hold" in done.stderr) == (group != tmp_path), done.stderr
    assert (tmp_path / "cgroup.procs").read_text() == "0"


def test_what_a_program_started_in_another_session_ends_with_it(tmp_path: Path) -> None:
    fleeing = """
        import subprocess

        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)

        def predict(rows):
            return [child.pid] * len(rows)
    """
    table = """
        [container]
        load = "model.py"
        inputs = { rows = "FP32[1]" }
        outputs = { pid = "INT64[]" }
    """
    folder = write_container(tmp_path, "fleeing", table, model=textwrap.dedent(fleeing))
    with bench(folder) as made:
        container = made.prepare().container
        assert isinstance(container, ProgramContainer)
        (raw,) = made.infer(np.zeros((1, 1), np.float32))
        (pid,) = np.frombuffer(raw, np.int64).tolist()
        group = container._group
        if group is None or not (group.folder / "cgroup.kill").exists():
            os.kill(pid, signal.SIGKILL)
            pytest.skip("this process may make no cgroup v2, or Linux is older than 5.14")
        assert lives(pid)
        container.stop()
        until(lambda: not lives(pid), what="the child is gone")
        assert not group.folder.exists()


def test_a_program_that_takes_more_memory_than_it_may_is_ended(tmp_path: Path) -> None:
    greedy = """
        def predict(rows):
            taken = b"x" * (int(rows[0, 0]) << 20)
            return rows[:, 0]
    """
    table = """
        [container]
        load = "model.py"
        inputs = { rows = "FP32[1]" }
        outputs = { same = "FP32[]" }
        memory_mib = 256
        cpus = 1.5
    """
    folder = write_container(tmp_path, "greedy", table, model=textwrap.dedent(greedy))
    with bench(folder) as made:
        container = made.prepare().container
        assert isinstance(container, ProgramContainer)
        if container._group is None:
            pytest.skip("this process may make no cgroup v2 with bounds of memory and processor")
        made.infer(np.array([[1]], np.float32))
        message = made.failure(np.array([[4096]], np.float32))
        assert "SIGKILL, because it took more than memory_mib = 256, while running" in message
