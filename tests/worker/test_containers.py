"""Models that are code: what may be declared, and what becomes of code that raises, crashes or hangs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from clockwright import Client, RefusedError
from clockwright.client.operator import Operator
from clockwright.containers import ContainerSpec, parse_container
from clockwright.errors import ConfigError, ModelError, Refusal
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import ActionError
from clockwright.wire.tensors import TensorSpec
from controller.models.model_folder import read_versions
from experiments.live.local_server import LocalServer
from tests.kit.container_bench import LIMITS, ContainerBench, bench, write_container
from tests.kit.processes import PATIENCE_S, lives, until, write_models
from tests.kit.scripted_controller import Stream, drain, infer, load, play
from worker.containers.container_process import name_outputs
from worker.containers.device import Backoff, ContainerDevice
from worker.models.served_model import OfferedFile

SLO_MS = 30_000

# What the first value of a row says happens to its batch.
PLAIN, RAISE, CRASH, HANG = 0.0, 1.0, 2.0, 3.0
MOODY = """
import os, signal, threading

print("libraries print")

def predict(rows):
    mood = rows[0, 0]
    if mood == 1:
        raise ValueError("this row is not to my taste")
    if mood == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if mood == 3:
        threading.Event().wait()
    rows *= 2  # its own
    return rows.sum(axis=1)
"""
MOODY_TABLE = """
[container]
load = "model.py"
inputs = { rows = "FP32[3]" }
outputs = { sums = "FP32[]" }
time_limit_s = 60
"""


def row(mood: float) -> np.ndarray:
    return np.array([[mood, 5, 6]], np.float32)


def gone(pid: int) -> None:
    until(lambda: not lives(pid), what="the container's process is gone")


# --- what is declared -------------------------------------------------------------------------


def test_a_table_declares_what_to_load_and_its_tensors_in_order() -> None:
    spec = parse_container(
        {
            "load": "shop.models:rank",
            "method": "score",
            "inputs": {"user": "INT64[]", "items": "FP32[3, 4]"},
            "outputs": {"scores": "FP64[3]"},
            "time_limit_s": 1,
            "replicas": 2,
        }
    )
    assert spec == ContainerSpec(
        load="shop.models:rank",
        method="score",
        inputs=(TensorSpec("user", "INT64", ()), TensorSpec("items", "FP32", (3, 4))),
        outputs=(TensorSpec("scores", "FP64", (3,)),),
        time_limit_s=1.0,
        replicas=2,
    )
    assert spec.file is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"load": None}, "container.load is None, expected a file"),
        ({"load": "../model.py"}, r"container.load is '../model.py', expected a file"),
        ({"load": "model.exe"}, "expected a file of the version folder"),
        ({"load": "os.system"}, "expected a file of the version folder"),
        ({"method": "a b"}, "container.method is 'a b', expected the name"),
        ({"inputs": {}}, "container.inputs is {}, expected a table"),
        ({"inputs": {"x": "FP32"}}, "container.inputs.x is 'FP32', expected the shape of one row"),
        ({"inputs": {"x": "BF16[2]"}}, "container.inputs.x is 'BF16"),
        ({"outputs": {"y": "FP32[0]"}}, "expected sizes of 1 or more"),
        (
            {"inputs": {"x": "FP32[-1]"}},
            r"expected sizes of 1 or more, .*\"<=512\" for one that is open up to 512",
        ),
        ({"time_limit_s": 0}, "container.time_limit_s is 0, expected seconds, from 0.001 to 3600"),
        ({"replicas": True}, "container.replicas is True, expected a whole number from 1 to 256"),
        ({"shape": 3}, "unknown key 'shape'; known are load"),
        ({"command": ["./a"]}, "found load and command of load, command and address, expected one"),
        ({"memory_mib": 0.5}, "container.memory_mib is 0.5, expected a whole number"),
        ({"cpus": -1}, "container.cpus is -1, expected processors, from 0.01 to 65536"),
        ({"cpus": 0.001}, "container.cpus is 0.001, expected processors, from 0.01 to 65536"),
        ({"model": "m"}, "container.model is not for load, expected address"),
        ({"load": ..., "command": "./a"}, "container.command is './a', expected a program and its"),
        ({"load": ..., "address": "http://a:1"}, "expected grpc://HOST:PORT, grpcs://HOST:PORT"),
        ({"load": ..., "address": "tcp://a:65536"}, "expected grpc://HOST:PORT"),
        ({"load": ..., "address": "grpc://a:0"}, "expected grpc://HOST:PORT"),
        ({"load": ..., "address": "unix:///" + "ä" * 54}, "expected unix:// and a path of 107 byt"),
        (
            {"speed": 1, "cpus": 0, "inputs": {"x": "FP32", "y": "[2]"}, "outputs": None},
            "unknown key 'speed'.*; container.cpus is 0.*; container.inputs.x is 'FP32'.*;"
            " container.inputs.y is.*; container.outputs is None",
        ),
        ({"load": ..., "address": "tcp://a:1", "cpus": 1}, "container.cpus is not for address"),
        ({"load": ..., "command": ["./a"], "method": "f"}, "container.method is not for command"),
    ],
)
def test_a_malformed_table_is_refused_with_what_was_found(
    change: dict[str, object], problem: str
) -> None:
    table: dict[str, object] = {
        "load": "model.py",
        "inputs": {"x": "FP32[2]"},
        "outputs": {"y": "FP32[]"},
    }
    with pytest.raises(ModelError, match=problem):
        parse_container({key: each for key, each in (table | change).items() if each is not ...})


def test_the_controller_judges_a_folder_of_code(tmp_path: Path) -> None:
    folder = write_container(tmp_path, "moody", MOODY_TABLE, model=MOODY)
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").write_bytes(b"news")
    read = read_versions(folder)[-1]
    assert [file.name for file in read.files] == ["model.py"]
    assert read.settings.container is not None
    for head, problem in (
        ("copies = 2", "config.toml: copies is a setting of ONNX models, expected it without"),
        ("", None),
    ):
        (folder / "config.toml").write_text(f"{head}\n{MOODY_TABLE}")
        if problem:
            with pytest.raises(ModelError, match=problem):
                read_versions(folder)[-1]
    (folder / "1" / "model.onnx").write_bytes(b"onnx")
    with pytest.raises(ModelError, match=r"found 1/model.onnx and a \[container\]"):
        read_versions(folder)[-1]
    (folder / "1" / "model.onnx").unlink()
    (folder / "1" / "model.py").rename(folder / "1" / "main.py")
    with pytest.raises(ModelError, match=r"expected 1/model.py, found main.py"):
        read_versions(folder)[-1]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0, 2.0, 3.0], "expected 2 outputs, found 3 of them"),
        (np.zeros(2), "expected 2 outputs, found ndarray"),
        ({"a": [0, 0]}, r"found outputs \['a'\], expected \['a', 'b'\]"),
        (([0, 0, 0], [[0.0], [0.0]]), r"output 'a' has shape \[3\], expected \[2\]"),
        (([0.5, 0.5], [[0.0], [0.0]]), "output 'a' is float64, expected INT64"),
        ((["x", "y"], [[0.0], [0.0]]), "output 'a' is <U1, expected INT64"),
    ],
)
def test_what_code_returns_is_checked_against_what_was_declared(
    result: object, problem: str
) -> None:
    outputs = (TensorSpec("a", "INT64", ()), TensorSpec("b", "FP32", (1,)))
    with pytest.raises(ValueError, match=problem):
        name_outputs(result, outputs, 2)


def test_texts_keep_the_zeros_at_their_end() -> None:
    outputs = (TensorSpec("a", "BYTES", ()), TensorSpec("b", "BYTES", (1,)))
    found = name_outputs((["x\0", b"\0"], [["\0"], ["yy"]]), outputs, 2)
    assert [each.tolist() for each in found] == [["x\0", b"\0"], [["\0"], ["yy"]]]
    with pytest.raises(ValueError, match="'a' has NoneType and str, expected str or bytes"):
        name_outputs((["x", None], [["y"], ["z"]]), outputs, 2)


def test_pauses_grow_while_a_container_keeps_dying_and_are_forgotten_when_it_lives() -> None:
    backoff = Backoff()
    assert backoff.pause_s == 0
    pauses = []
    for index in range(10):
        backoff.started(float(index))
        backoff.died(index + 0.5)
        pauses.append(backoff.pause_s)
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == Backoff.LIMIT_S
    backoff.started(100.0)
    backoff.died(100.0 + Backoff.FORGET_S)
    assert backoff.pause_s == 0


# --- the device -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerBench]:
    folder = write_container(tmp_path_factory.mktemp("m"), "moody", MOODY_TABLE, model=MOODY)
    with bench(folder) as made:
        made.prepare()
        yield made


def test_code_gets_the_rows_that_were_sent_and_its_answers_come_back(moody: ContainerBench) -> None:
    first, second = np.full((2, 3), 9, np.float32), np.full((1, 3), 4, np.float32)
    outputs = moody.infer(first, second, rows=(2, 1))
    assert [np.frombuffer(o, np.float32).tolist() for o in outputs] == [[54, 54], [24]]
    (alone,) = moody.infer(row(PLAIN))
    assert np.frombuffer(alone, np.float32).tolist() == [22]
    assert "profiling batch 4" in moody.progress


def test_code_that_raises_fails_its_batch_only(moody: ContainerBench) -> None:
    message = moody.failure(row(RAISE))
    assert "predict raised ValueError: this row is not to my taste" in message
    moody.infer(row(PLAIN))
    assert moody.lost.empty()


def test_a_crash_and_a_hang_cost_their_batch_and_the_container_starts_again(
    moody: ContainerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "FORGET_S", math.inf)  # however slow the machine is
    model = moody.prepare()
    pid = model.container.pid
    assert pid is not None
    message = moody.failure(row(CRASH))
    assert "the container was killed by SIGKILL while running a batch of 1" in message
    assert moody.lost.get(timeout=PATIENCE_S) == message
    gone(pid)

    model = moody.prepare()
    assert any(stage.startswith("pausing 0.1 s: the container was") for stage in moody.progress)
    moody.infer(row(PLAIN))
    # Not declared so short: on a slow machine starting might count as a hang.
    model.container._spec = dataclasses.replace(model.container._spec, time_limit_s=0.05)
    pid = model.container.pid
    assert pid is not None
    message = moody.failure(row(HANG))
    assert "the container hung: running a batch of 1 took more than 0.05 s" in message
    assert moody.lost.get(timeout=PATIENCE_S) == message
    gone(pid)
    moody.prepare()
    moody.infer(row(PLAIN))


def test_what_waits_behind_a_crash_does_not_run(moody: ContainerBench) -> None:
    moody.prepare()
    crash, behind = moody.submit(row(CRASH)), moody.submit(row(PLAIN))
    assert moody.running.result(crash).error is ActionError.DEVICE
    moody.lost.get(timeout=PATIENCE_S)
    moody.prepare()
    # Nothing was said of it: its worker is lost to the controller, which has it run elsewhere.
    moody.running.result(moody.submit(row(PLAIN)))
    assert behind not in moody.running.answers


def test_only_what_lies_here_is_run(moody: ContainerBench) -> None:
    with pytest.raises(ModelError, match="runs one container only, that of another"):
        moody.prepare(profile="other")
    foreign = OfferedFile("model.py", 4, hashlib.sha256(b"evil").hexdigest())
    with pytest.raises(ModelError, match=r"1/model.py is not what this worker has: found .* here"):
        moody.prepare(files=(foreign,))
    with pytest.raises(ModelError, match=r"no model.onnx: it is code, which this worker does not"):
        moody.offer().check_onnx()


def test_an_estimator_is_served_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = rng.random((40, 3), np.float32)
    estimator = LogisticRegression().fit(rows, rows[:, 0] > 0.5)
    table = """
        [container]
        load = "model.joblib"
        method = "predict_proba"
        inputs = { rows = "FP32[3]" }
        outputs = { probabilities = "FP32[2]" }
        time_limit_s = 60
    """
    folder = write_container(tmp_path, "estimator", table)
    joblib.dump(estimator, folder / "1" / "model.joblib")
    with bench(folder) as made:
        made.prepare()
        (output,) = made.infer(rows[:4], rows=(4,))
    found = np.frombuffer(output, np.float32).reshape(4, 2)
    np.testing.assert_allclose(found, estimator.predict_proba(rows[:4]), rtol=1e-5)


def test_an_import_path_takes_several_inputs_and_gives_several_outputs(tmp_path: Path) -> None:
    table = """
        [container]
        load = "helper:rank"
        inputs = { a = "INT64[]", b = "FP32[2]" }
        outputs = { least = "INT64[]", sums = "FP64[2]" }
        time_limit_s = 60
    """
    code = "def rank(a, b):\n    return {'sums': b + a[:, None], 'least': a - 1}\n"
    folder = write_container(tmp_path, "ranker", table, helper=code)
    with bench(folder) as made:
        made.prepare()
        least, sums = made.infer(np.array([3]), np.ones((1, 2), np.float32))
    assert np.frombuffer(least, np.int64).tolist() == [2]
    assert np.frombuffer(sums, np.float64).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def", "model.py cannot be loaded: SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named"),
        ("def guess(rows): ...", r"model.py: expected a function 'predict', found guess"),
        ("import os\nos.abort()", "the container was killed by SIGABRT while loading model.py"),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        (r"raise OSError('no \udcff')", r"cannot be loaded: OSError: no \?$"),
        ("raise OSError(100_000 * 'long ')", "cannot be loaded: OSError: long long"),
        (
            "def predict(rows): return rows",
            r"a batch of 1 zeros: predict raised ValueError: output",
        ),
    ],
)
def test_code_that_cannot_be_served_is_refused_with_its_words(
    tmp_path: Path, code: str, problem: str
) -> None:
    folder = write_container(tmp_path, "bad", MOODY_TABLE, model=code)
    with bench(folder) as made, pytest.raises(ModelError, match=problem):
        made.prepare()


def test_a_folder_without_a_container_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.toml").write_text("slo_ms = 5\n")
    for folder in (tmp_path / "m", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"container .*: config.toml: "):
            ContainerDevice(folder, limits=LIMITS, io_pool_bytes=1 << 20, start_limit_s=1.0)


# --- the worker and the server ----------------------------------------------------------------


def test_a_worker_whose_container_crashes_says_so_leaves_and_attaches_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "FORGET_S", math.inf)  # however slow the machine is
    folder = write_container(tmp_path, "moody", MOODY_TABLE, model=MOODY)
    read = read_versions(folder)[-1]

    async def offer(stream: Stream) -> None:
        await stream.welcome()
        files = tuple(pb.FileOffer(f.name, f.num_bytes, f.sha256) for f in read.files)
        offer = pb.ModelOffer("m", files, (1,), profile="moody")
        await stream.send(offer)
        await stream.expect("ready_model")
        await stream.act(load(1, "m"))

    async def crash(stream: Stream) -> None:
        await offer(stream)
        result, _ = await stream.act(infer(2, "m"), row(CRASH).tobytes())
        assert result.error is ActionError.DEVICE
        with pytest.raises(AssertionError, match="the worker closed the connection"):
            await stream.result()

    async def again(stream: Stream) -> None:
        await offer(stream)
        assert any(stage.startswith("pausing") for stage in stream.progress)
        result, outputs = await stream.act(infer(3, "m"), row(PLAIN).tobytes())
        assert result.error is ActionError.NONE
        assert np.frombuffer(outputs[0], np.float32).tolist() == [22]
        await drain(stream)

    play(tmp_path, crash, again, device=f"container:{folder}")


def test_a_server_runs_code_beside_onnx_and_a_crash_or_a_refusal_is_nobody_elses_trouble(
    tmp_path: Path, cache_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", tiny="tiny_conv")
    write_container(models, "moody", MOODY_TABLE, head="slo_ms = 30000", model=MOODY)
    write_container(models, "nameless", MOODY_TABLE, model="def forecast(rows): ...")
    truth = "model.py: expected a function 'predict', found forecast"
    arguments = ["--pages", "4", "--arena-mib", "64", "--cache-dir", str(cache_dir)]
    image = np.zeros((1, 1, 8, 8), np.float32)
    with (
        LocalServer(["--models", str(models), *arguments]) as server,
        Client(server.address) as client,
        Operator(server.address) as operator,
    ):
        refused = [line for line in server.output if line.startswith("refused: ")]
        assert refused == [f"refused: nameless: {truth}"]
        assert {model.model_id: model.reason for model in operator.models()} == {
            "moody": "",
            "nameless": truth,
            "tiny": "",
        }
        told = [list(row.models_refused) for row in operator.workers() if row.models_refused]
        assert told == [[f"nameless: {truth}"]]
        with pytest.raises(RefusedError, match=re.escape(truth)) as caught:
            client.infer("nameless", row(PLAIN), slo_ms=SLO_MS)
        assert "one container only" not in str(caught.value)
        assert {w.worker_id: w.device.split(":")[0] for w in operator.workers()} == {
            "local-0": "cpu",
            "container-0-moody": "container",
            "container-0-nameless": "container",
        }
        sums = client.infer("moody", row(PLAIN), slo_ms=SLO_MS).outputs["sums"]
        assert sums.tolist() == [22]
        with pytest.raises(RefusedError, match="was killed by SIGKILL while running a batch of 1"):
            client.infer("moody", row(CRASH), slo_ms=SLO_MS)
        client.infer("tiny", image, slo_ms=SLO_MS)

        refusals: set[Refusal] = set()

        def back() -> bool:
            try:
                sums = client.infer("moody", row(PLAIN), slo_ms=SLO_MS).outputs["sums"]
            except RefusedError as refusal:  # it is being started again
                refusals.add(refusal.refusal)
                return False
            return bool(sums.tolist() == [22])

        until(back, what="the container is back")
        assert refusals <= {Refusal.NO_WORKER, Refusal.WORKER_LOST}
        pids = [worker.pid for worker in operator.workers()]
        assert server.stop() == 0
    assert not [pid for pid in pids if lives(pid)]
    assert "refused" not in capfd.readouterr().err


def test_code_that_no_worker_is_for_says_which_worker_to_start(
    tmp_path: Path, cache_dir: Path
) -> None:
    models = write_container(tmp_path / "models", "moody", MOODY_TABLE, model=MOODY).parent
    arguments = ["--device", "modelled:1ms", "--cache-dir", str(cache_dir)]
    empty = tmp_path / "empty"
    empty.mkdir()
    with (
        LocalServer(["--models", str(empty), *arguments]) as server,
        Operator(server.address) as operator,
        pytest.raises(ModelError, match=r"it is code.*--device container:FOLDER"),
    ):
        operator.add_model(models / "moody", name="moody", replace=False)


def test_a_device_that_is_not_there_ends_the_server_although_its_containers_are_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = write_container(tmp_path / "models", "moody", MOODY_TABLE, model=MOODY).parent
    arguments = ["--models", str(models), "--device", "abacus", "--cache-dir", str(tmp_path)]
    server = LocalServer(arguments)
    with pytest.raises(RuntimeError, match="ended with 1"):
        server.wait_for("no line begins with this")
    assert server.stop() == 1
    told = capfd.readouterr().err
    assert "error: device 'abacus': expected cpu" in told
    assert "ended with 78: its settings cannot work" in told
