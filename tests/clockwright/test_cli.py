"""The `clockwright` command as people type it: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from typing_extensions import override

from clockwright.cli.flags import JoinFlags, LogFlags
from clockwright.cli.inference import print_result
from clockwright.cli.local_workers import LocalWorkers
from clockwright.cli.main import app, main
from clockwright.cli.show import print_models
from clockwright.cli.worker_settings import WorkerSettings
from clockwright.client.channel import Access
from clockwright.client.client import InferResult
from clockwright.client.operator import Operator
from clockwright.settings import Flags, spell
from clockwright.v1 import control_pb2 as pb
from controller.process.config import FrontConfig
from controller.process.up import show_preparation
from experiments.live.local_server import LocalServer
from tests.kit.processes import PATIENCE_S, until, worker, write_models
from worker import gpu_workers
from worker.config import WorkerConfig

COMMANDS = (
    *("up", "controller", "worker", "infer", "status", "drain", "simulate"),
    *("models", "app", "keys", "quotas", "trace", "front", "load", "doctor", "top"),
    *("completion", "policies", "explain"),
)

#: Exit code, standard output, standard error.
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("cli")
    models = write_models(directory / "models", dense="mlp-16-32-4", pair="two_by_two")
    arguments = ["--device", "modelled:1ms", "--cache-dir", str(cache_dir)]
    with LocalServer(["--models", str(models), *arguments]) as server:
        yield server


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    # The user's own may not be writable, and is none of our business.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clockwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        if isinstance(code, str):
            # What the interpreter does with it.
            return 1, captured.out, captured.err + code
        return int(code or 0), captured.out, captured.err

    return run_command


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    listed = [line.split()[1] for line in out.partition("Commands")[2].splitlines() if "│" in line]
    ours = [name for name in listed if name.isalpha() and name.islower()]
    assert set(COMMANDS) <= set(ours)
    # What a newcomer types first.
    assert ours[0] == "up"


def test_help_of_a_command_whose_name_has_a_flag_is_its_own(run: Run) -> None:
    for arguments in (("up", "--ray", "--help"), ("up", "--help", "--ray", "head:6379")):
        code, out, _ = run(*arguments)
        assert code == 0
        assert "--kinds" in out


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package that is installed here and brings commands, of which one works."""
    information = tmp_path / "others-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[clockwright.commands]\n"
        "greet = others_of_a_test:greet\n"
        "lost = no_such_floor.cli:lost\n"
        "nameless = others_of_a_test:nobody\n"
        "number = others_of_a_test:SEVEN\n"
        "leaver = others_that_leave:leave\n"
        "up = others_of_a_test:greet\n"
    )
    (tmp_path / "others_of_a_test.py").write_text(
        "SEVEN = 7\ndef greet(name: str) -> None:\n    print('hello', name)\n"
    )
    (tmp_path / "others_that_leave.py").write_text("raise SystemExit\n")
    # Behind ours, or in the same folder behind it: what is found later is not to replace `up`.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


@pytest.mark.usefixtures("others")
def test_another_packages_command_is_one_of_ours(run: Run) -> None:
    assert run("greet", "ann") == (0, "hello ann\n", "")


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("lost", "no_such_floor.cli:lost", "No module named 'no_such_floor'"),
        ("nameless", "others_of_a_test:nobody", "no attribute 'nobody'"),
        ("number", "others_of_a_test:SEVEN", "7"),
        ("leaver", "others_that_leave:leave", "SystemExit"),
    ],
)
@pytest.mark.parametrize("arguments", [(), ("--help",), ("--some", "flag", "word")])
def test_a_broken_command_is_one_line_that_names_it(
    run: Run, arguments: tuple[str, ...], name: str, value: str, why: str
) -> None:
    code, out, err = run(name, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: command {name} ({value}) cannot be loaded: ")
    assert why in err
    assert "\n" not in err


@pytest.mark.usefixtures("others")
def test_a_broken_command_breaks_no_other(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in (*COMMANDS, "greet", "lost", "nameless", "number", "leaver"):
        assert name in out
    assert out.count("cannot be loaded") == 4


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("content", [b"no section\n", b"[clockwright.commands]\nx\n", b"\xff\xfe"])
def test_another_packages_malformed_entry_points_break_nothing(
    run: Run, tmp_path: Path, content: bytes
) -> None:
    broken = tmp_path / "aaa_broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_bytes(content)
    assert run("greet", "ann") == (0, "hello ann\n", "")
    assert run("--version")[0] == 0


@pytest.mark.usefixtures("others")
def test_our_commands_are_ours_whoever_else_has_one_of_the_name(run: Run) -> None:
    code, out, _ = run("up", "--help")
    assert code == 0
    assert "Serve models on this machine" in out


def test_a_stale_installation_is_told_to_install_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clockwright.cli.main.distributions", lambda: ())
    code, out, _ = run("--help")
    assert code == 0
    assert "No command is registered: install clockwright" in out


def test_a_setting_that_counts_as_false_is_passed_on_to_the_workers() -> None:
    arguments = Flags(WorkerSettings, pages=0, cudnn_search=False, cache_dir=None).spell()
    front = Flags(FrontConfig, anonymous=["health", "metadata"]).spell()
    assert front.count("--anonymous=metadata") == 1
    assert arguments == ["--pages=0"]


def test_help_imports_neither_grpc_nor_numpy_nor_onnxruntime() -> None:
    script = (
        "import sys, typer, clockwright.cli.main as command; "
        "found = typer.main.get_command(command.app); context = typer.Context(found); "
        "all(found.get_command(context, name) for name in found.list_commands(context)); "
        "print([name for name in ('grpc', 'numpy', 'onnxruntime', 'onnx') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_metrics_that_nobody_asked_for_leave_their_port_to_the_fronts(run: Run) -> None:
    code, _, err = run("up", "--fronts", "1", "--port", "8002", "--models", "/nowhere")
    assert code
    assert "metrics are off: the fronts listen on 8002" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("up", "--port", "many"),
        ("up", "--workers", "0"),
        ("up", "--fronts", "-1"),
        ("up", "--fronts", "2", "--allow-client-shm"),
        ("up", "--fronts", "1", "--port", "9", "--controller-port", "9"),
        ("up", "--fronts", "1", "--http-port", "9", "--metrics-port", "9"),
        ("infer",),
        ("infer", "dense"),
        ("infer", "dense", "--random", "--rows", "0"),
        ("load", "--rate", "inf"),
        ("load", "--rate", "1e9"),
        ("load", "--concurrency", "9" * 18),
        ("load", "--rate", "5", "--seconds", "inf"),
        ("load", "--rate", "5", "--seconds", "nan"),
        ("load", "--rate", "5", "--warmup-s", "inf"),
        ("load", "--trace", "rows.csv", "--begin-s", "inf"),
        ("load", "--trace", "rows.csv", "--scale", "1e18"),
        ("top", "--once", "--interval-s", "inf"),
    ],
)
def test_a_mistyped_command_ends_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--models", "/no/such/folder"), "/no/such/folder is not a folder"),
        (("up", "--port", "70000"), "port is 70000, expected 0 to 65535"),
        (("controller", "--lookahead-ms", "0"), "--lookahead-ms is 0"),
        (
            ("controller", "--lookahead-ms", "1e9"),
            "is 1e+09, expected more than 0 and at most 86400000",
        ),
        (("worker", "--controller", "nowhere"), "'nowhere', expected HOST:PORT"),
        (
            ("worker", "--device", "abacus"),
            "'abacus': expected cpu, cuda:N, modelled:PROFILE or container:FOLDER",
        ),
        (("worker", "--device", "modelled:nothing"), "nothing"),
        (("worker", "--pages", "0"), "num_pages is 0, expected 1 or more"),
        (("worker", "--pages", "few"), "--pages is 'few', expected auto or a number"),
        (("worker", "--arena-mib", "0"), "--arena-mib is 0, expected 1 or more"),
        (("up", "--slo-ms", "nan"), "--slo-ms is nan, expected 0 to 8.64e+07"),
        (("up", "--slo-ms", "1e8"), "--slo-ms is 100000000.0, expected 0 to 8.64e+07"),
        (("up", "--max-open-mib", "-1"), "--max-open-mib is -1, expected more than 0"),
        (("up", "--tenant-weight", "gold"), "'gold', expected NAME=WEIGHT, such as gold=4"),
        (
            ("up", "--tenant-weight", "gold=1e-310"),
            "found 1e-310 for 'gold', expected 0.01 to 100",
        ),
        (("models", "add", "/no/such/folder"), "/no/such/folder is not a folder"),
        (
            ("app", "add", "a", "--model", "m", "--default", "9" * 23),
            "the settings do not fit into a message: ",
        ),
        (
            # Nothing listens at port 1, whatever runs on the machine.
            (
                "app",
                "add",
                "a",
                "--model",
                "m",
                "--option",
                "x=" + "[" * 100_000,
                "--server",
                "127.0.0.1:1",
            ),
            "no server answers at",
        ),
        (("status", "--server", "127.0.0.1"), "'127.0.0.1', expected HOST:PORT"),
        (("status", "--server", "127.0.0.1:70000"), "'127.0.0.1:70000', expected HOST:PORT"),
        (("status", "--server", ":8001"), "':8001', expected HOST:PORT"),
        (("infer", "dense", "--input", "x"), "found 'x', expected NAME=FILE.npy"),
        (("infer", "dense", "--input", "x=/no/such.npy"), "/no/such.npy"),
    ],
)
def test_a_wrong_setting_is_one_line(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(*arguments)
    # Who supervises a front or a worker learns that starting it again is of no use.
    assert code == (os.EX_CONFIG if arguments[0] in ("front", "worker") else 1)
    assert words in err
    assert err.strip().count("\n") == 0, err


def test_the_workers_of_all_gpus_get_the_settings_of_the_one_that_was_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, str, str, Flags[WorkerConfig], JoinFlags, LogFlags]] = []

    def run_on_each_gpu(*given: Any) -> int:  # noqa: ANN401
        asked.append(given)
        return 0

    monkeypatch.setattr(gpu_workers, "visible_gpus", lambda: 3)
    monkeypatch.setattr(gpu_workers, "run_on_each_gpu", run_on_each_gpu)
    # However little this machine has.
    monkeypatch.setattr("worker.process.granted_bytes", lambda: None)
    settings = ["--pages=7", "--arena-mib=32", "--precision=tf32", "--engine=torch"]
    settings += ["--host-mib=64", f"--cache-dir={tmp_path}", "--payload-port=0"]
    settings += ["--compile-memory-mib=900", "--compile-cpu-s=60.0", "--devices=1", "--io-mib=128"]
    token_file = tmp_path / "token"
    token_file.write_text("a token")
    who = ["--controller", "there:1", "--device", "cuda", "--id", "host"]
    who += ["--worker-token-file", str(token_file)]
    code, _, _ = run("worker", *who, *settings, "--verbose")
    assert code == 0
    ((num_gpus, name, controller, flags, join, logs),) = asked
    assert (num_gpus, name, controller) == (3, "host", "there:1")
    assert spell(vars(join)) == [f"--worker-token-file={token_file}"]
    assert sorted(flags.spell()) == sorted([*settings, "--device=cuda"])
    assert logs.spell() == ["--verbose", "--log-format=text"]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_taken_port_is_named(run: Run, taken_port: int) -> None:
    code, _, err = run("up", "--port", str(taken_port))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{taken_port}" in err


def test_a_start_that_fails_leaves_the_log_as_it_was(run: Run, taken_port: int) -> None:
    run("up", "--port", str(taken_port))
    assert logging.getLogger("controller.models.catalogue").level == logging.NOTSET


@pytest.mark.parametrize("command", [("status",), ("models", "list"), ("infer", "x", "--random")])
def test_nobody_listening_is_told_with_the_address(run: Run, command: tuple[str, ...]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        code, _, err = run(*command, "--server", address)
    assert code == 1
    assert address in err


def test_a_server_whose_workers_cannot_start_is_not_said_to_be_ready(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = LocalWorkers(LogFlags())
    workers.plan("local-0", Flags(WorkerSettings, device="abacus", cache_dir=tmp_path))

    async def show(address: str) -> None:
        channel = Access().async_channel(address)
        await show_preparation(Console(), channel, "", address, workers)

    with LocalServer([], command="controller") as server:
        # Who stops the server is told, and takes a moment.
        told = threading.Event()
        workers.start(server.address, again=lambda _pause_s, _start: None, give_up=told.set)
        assert workers.wait() == [os.EX_CONFIG]
        assert told.is_set()
        assert workers.num_alive == 0
        asyncio.run(show(server.address))
        assert "ready" not in capsys.readouterr().out
        _, out, _ = run("status", "--server", server.address)
    assert ": no worker is connected\n" in out


def test_a_reload_says_which_version_serves(run: Run, server: LocalServer) -> None:
    code, out, _ = run("models", "reload", "dense", "--server", server.address)
    assert (code, out) == (0, "reloaded dense: version 1 serves\n")


def test_infer_draws_random_inputs_and_explains(run: Run, server: LocalServer) -> None:
    code, out, _ = run(
        *("infer", "dense", "--random", "--slo-ms", "30000", "--explain"),
        *("--server", server.address),
    )
    assert code == 0
    assert "output: float32 (1, 4): " in out
    assert "worker: local-0" in out


def test_an_application_is_explained_only_to_whom_asks(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"query_id": "q7", "models": "a,b", "confidence": 0.5, "default": False}
    result = InferResult("app", "1", {"label": np.array([4])}, said)
    print_result(result, explain=False, json=False)
    # Feedback takes the id, and is given by a command.
    assert capsys.readouterr().out.splitlines() == ["label: int64 (1): 4", "  query_id: q7"]
    print_result(result, explain=True, json=False)
    assert "  models: a,b" in capsys.readouterr().out
    result.explanation.update(default=True, default_reason="NO_ANSWER")
    print_result(result, explain=False, json=False)
    assert "  default_reason: NO_ANSWER" in capsys.readouterr().out


def test_infer_reads_arrays_and_prints_json(run: Run, server: LocalServer, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((1, 3), np.float32))
    np.save(tmp_path / "b.npy", np.ones((1, 2), np.int64))
    code, out, _ = run(
        *("infer", "pair", "--input", f"a={tmp_path}/a.npy", "--input", f"b={tmp_path}/b.npy"),
        *("--slo-ms", "30000", "--json", "--server", server.address),
    )
    assert code == 0
    # A modelled device answers zeros.
    assert json.loads(out)["outputs"] == {"sum": [[0.0, 0.0, 0.0]], "doubled": [[0, 0]]}


def test_a_shape_of_an_input_that_there_is_not_is_no_wish(run: Run, server: LocalServer) -> None:
    asked = ("infer", "dense", "--random", "--shape", "z=1,4", "--server", server.address)
    code, _, err = run(*asked)
    assert (code, "--shape: found 'z', expected an input: input" in err) == (1, True), err


def test_an_slo_that_no_clock_can_count_is_not_called_late(run: Run, server: LocalServer) -> None:
    asked = ("infer", "dense", "--random", "--slo-ms", "1e300", "--server", server.address)
    code, _, err = run(*asked)
    assert code == 1
    assert "parameter slo_ms: found 1e+300, expected more than 0 and at most 86400000" in err


def test_a_refusal_says_its_reason_and_ends_with_1(run: Run, server: LocalServer) -> None:
    code, _, err = run("infer", "dense", "--random", "--slo-ms", "0.01", "--server", server.address)
    assert code == 1
    assert "refused: INFEASIBLE: " in err


def test_a_request_is_explained_by_its_number_for_people_and_for_programs(
    run: Run, server: LocalServer
) -> None:
    at = ("--server", server.address)
    asked = ("infer", "dense", "--random", "--explain", "--slo-ms", "30000", "--json")
    code, out, err = run(*asked, *at)
    assert code == 0, err
    number = str(json.loads(out)["explanation"]["request_id"])
    code, out, err = run("explain", number, *at)
    assert code == 0, err
    assert out.startswith(f"request {number} for model dense, ")
    assert "It was answered in time" in out
    # Whole sentences, however long.
    assert all(line.endswith(".") for line in out.splitlines()[1:])
    assert "..." not in out
    told = json.loads(run("explain", number, "--json", *at)[1])
    assert (told["outcome"], told["slo_ns"]) == ("OK", 30_000_000_000)
    assert told["run"]["error"] == "NONE"
    code, _, err = run("explain", "never-sent", *at)
    assert code == 1
    assert "no request 'never-sent' is known" in err


def test_status_shows_workers_and_residency(run: Run, server: LocalServer) -> None:
    run("infer", "dense", "--random", "--slo-ms", "30000", "--server", server.address)
    code, out, _ = run("status", "--server", server.address)
    assert code == 0
    assert "models: 2 of 2 ready" in out
    assert "local-0" in out
    code, out, _ = run("status", "--json", "--server", server.address)
    status = json.loads(out)
    assert status["ready"] is True
    assert "dense" in status["workers"][0]["resident"]
    assert status["answered"] >= 1


def test_models_are_added_listed_replaced_and_removed(
    run: Run, server: LocalServer, tmp_path: Path
) -> None:
    folder = write_models(tmp_path, fresh="mlp-16-4") / "fresh"
    at = ("--server", server.address)
    assert run("models", "add", str(folder), *at)[0] == 0
    code, _, err = run("models", "add", str(folder), *at)
    assert (code, "--replace" in err) == (1, True)
    assert run("models", "add", str(folder), "--replace", *at)[0] == 0
    code, out, _ = run("models", "list", "--json", *at)
    states = {model["model_id"]: model["state"] for model in json.loads(out)}
    assert states == {"dense": "READY", "fresh": "READY", "pair": "READY"}
    # The second model of a name is called by it like the first.
    code, _, err = run("infer", "fresh", "--random", "--slo-ms", "0.01", *at)
    assert (code, "model fresh cannot be that fast" in err) == (1, True), err
    assert run("infer", "fresh", "--random", "--slo-ms", "30000", *at)[0] == 0
    assert "fresh" in json.loads(run("status", "--json", *at)[1])["workers"][0]["resident"]
    assert run("models", "remove", "fresh", *at)[0] == 0
    code, out, _ = run("models", "list", *at)
    assert "fresh" not in out
    code, _, err = run("models", "remove", "fresh", *at)
    assert (code, "fresh" in err) == (1, True)


def test_a_file_of_a_model_that_cannot_be_read_is_named(
    run: Run, server: LocalServer, tmp_path: Path
) -> None:
    file = tmp_path / "fresh" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    # Whoever runs the test, reading its first bytes fails.
    file.symlink_to("/proc/self/mem")
    code, _, err = run("models", "add", str(tmp_path / "fresh"), "--server", server.address)
    assert (code, err.splitlines()[-1]) == (1, f"error: {file}: Input/output error")


def test_quotas_are_set_listed_and_removed(run: Run, server: LocalServer) -> None:
    at = ("--server", server.address)
    ask = ("infer", "dense", "--random", "--slo-ms", "30000", "--tenant", "gold", *at)
    limits = ("--rate-rps", "0.000001", "--burst", "1", "--open-mib", "2", "--slo-ms-max", "60000")
    code, out, err = run("quotas", "set", "gold", *limits, *at)
    assert (code, err) == (0, "")
    assert out == "gold: 1e-06 requests/s, 1 at once; 2 MiB open; SLO 60.00 s at most\n"
    assert run(*ask)[0] == 0
    code, _, err = run(*ask)
    assert (code, err.startswith("refused: QUOTA: tenant 'gold'")) == (1, True), err
    (info,) = json.loads(run("quotas", "list", "--json", *at)[1])
    assert (info["tenant"], info["admitted"], info["refused"]) == ("gold", 1, 1)
    assert "gold" in run("quotas", "list", *at)[1]
    code, _, err = run("quotas", "set", "gold", "--weight", "101", *at)
    assert (code, "weight: found 101" in err) == (1, True), err
    assert run("quotas", "remove", "gold", *at)[:2] == (0, "removed the quota of gold\n")
    assert run("quotas", "list", *at)[1] == "no quotas\n"
    assert run(*ask)[0] == 0


def test_an_unfit_model_is_told_of_once_and_leaves_the_list_readable(
    tmp_path: Path, cache_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", dense="mlp-16-32-4")
    (models / "empty").mkdir()
    (models / "text" / "1").mkdir(parents=True)
    (models / "text" / "1" / "model.onnx").write_text("no model")
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(cache_dir))
    with LocalServer(["--models", str(models), *arguments]) as server:
        with Operator(server.address) as operator:
            print_models(operator.models())
        listed = capfd.readouterr()
    for start in ("refused: empty: ", "refused: text: "):
        assert sum(line.startswith(start) for line in server.output) == 1, server.output
    assert "ready: 1 of 3 models" in server.output[-2]
    assert server.output[-1] == "stopped"
    assert "\ntext: UNAVAILABLE: model.onnx is not an ONNX file" in listed.out
    assert (listed.err, capfd.readouterr().err) == ("", "")


def test_a_worker_says_that_it_has_found_its_controller_and_that_it_leaves(
    server: LocalServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path))
    with worker(server.address, "--id", "visitor", *arguments) as visitor:
        with Operator(server.address) as operator:
            until(
                lambda: "visitor" in [row.worker_id for row in operator.workers()],
                what="the worker joins",
            )
            operator.drain("visitor")
        assert visitor.wait(PATIENCE_S) == 0
    told = capfd.readouterr().err
    assert f"attached to controller {server.address} as visitor" in told
    assert "drained: leaving" in told


def test_a_drained_worker_leaves_with_0(run: Run, server: LocalServer, tmp_path: Path) -> None:
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path))
    with worker(server.address, "--id", "guest", *arguments) as guest:
        with Operator(server.address) as operator:
            until(
                lambda: "guest" in [row.worker_id for row in operator.workers()],
                what="the worker joins",
            )
        code, out, _ = run("drain", "guest", "--server", server.address)
        assert (code, out) == (0, "worker guest has left\n")
        assert guest.wait(PATIENCE_S) == 0
    code, _, err = run("drain", "guest", "--server", server.address)
    assert (code, "local-0" in err) == (1, True)


class _Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_the_last_worker_is_drained_only_by_who_is_asked_or_says_yes(
    run: Run, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("--server", server.address)
    last = "worker local-0 is the last one"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run("drain", "local-0", *to) == (1, "", f"error: {last}; --yes drains it all the same")
    monkeypatch.setattr(sys, "stdin", _Terminal("n\n"))
    code, out, _ = run("drain", "local-0", *to)
    assert (code, out.startswith(f"{last}. Drain it all the same? [y/N]")) == (1, True)
    with Operator(server.address) as operator:
        assert [row.worker_id for row in operator.workers()] == ["local-0"]


def test_a_load_is_put_on_all_models_and_its_numbers_add_up(
    run: Run, server: LocalServer, tmp_path: Path
) -> None:
    picture, rows = tmp_path / "load.svg", tmp_path / "requests.csv"
    asked = ("load", "--server", server.address, "--seconds", "1", "--slo-ms", "5000")
    files = ("--picture", str(picture), "--requests", str(rows))
    code, out, err = run(*asked, "--rate", "40", "--slo-ms", "9000", *files, "--json")
    assert code == 0, err
    report = json.loads(out)
    total = report["total"]
    parts = (total[f"num_{what}"] for what in ("in_time", "late", "refused", "failed"))
    assert sum(parts) == total["num_requests"] > 0
    assert {"dense", "pair"} <= set(report["by_model"])
    assert set(report["by_slo_ms"]) <= {"5000", "9000"}
    assert picture.read_text().startswith("<?xml")
    assert len(rows.read_text().splitlines()) == total["num_requests"] + 1
    # What was recorded is a trace.
    code, out, _ = run("load", "--server", server.address, "--trace", str(rows), "--csv")
    assert code == 0
    assert int(out.splitlines()[1].split(",")[2]) == total["num_requests"]


def test_a_load_that_is_not_good_enough_ends_with_1(run: Run, server: LocalServer) -> None:
    asked = ("load", "dense", "--server", server.address, "--rate", "50", "--seconds", "0.5")
    code, out, err = run(*asked, "--slo-ms", "0.01", "--good", "0.5")
    assert code == 1
    assert "INFEASIBLE" in out
    assert max(map(len, out.splitlines()[:4])) <= 80
    assert "error: 0.0000 of the requests were answered in time, expected 0.5" in err


def test_a_load_whose_requests_fail_quotes_what_the_server_says(
    run: Run, server: LocalServer
) -> None:
    asked = ("load", "dense", "--server", server.address, "--rate", "50", "--seconds", "0.5")
    code, out, _ = run(*asked, "--slo-ms", "100", "--decide-within-ms", "200")
    assert code == 0
    assert "INVALID_ARGUMENT: parameter decide_within_ms: found 200" in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--rate", "5", "--concurrency", "5"), "found both --rate and --concurrency"),
        (("--rate", "5", "--arrivals", "fast"), "expected poisson or uniform"),
        (("--rate", "5", "--shape", "x=0"), "expected NAME=1,3,224,224"),
        (("--rate", "5", "--shape", "z=1,4"), "--shape: found 'z', expected an input: a, b, input"),
        (
            ("--rate", "5", "--input", "z=FILE"),
            "--input: found 'z', expected an input: a, b, input",
        ),
        (("--rate", "5", "--seconds", "0"), "expected more than 0"),
        (("--rate", "5", "--slo-as", "header"), "--slo-as"),
        (("--trace", "nowhere.csv", "--rate", "5"), "--trace"),
        (("nobody", "--rate", "5"), "nobody"),
    ],
)
def test_a_load_that_cannot_be_is_one_line(
    run: Run, server: LocalServer, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    file = tmp_path / "row.npy"
    np.save(file, np.zeros((1, 4), np.float32))
    told = [flag.replace("FILE", str(file)) for flag in flags]
    code, out, err = run("load", "--server", server.address, *told)
    assert (code, out) == (1, "")
    assert why in err
    assert "\n" not in err.strip()


def test_top_prints_once_for_scripts_and_says_whether_all_is_well(
    run: Run, server: LocalServer
) -> None:
    once = ("top", "--server", server.address, "--interval-s", "0.1")
    code, out, _ = run(*once, "--once")
    first = out.splitlines()[0]
    # Whatever other tests left behind: the exit code says what the first line says.
    assert code == (0 if first.startswith(("WELL", "IDLE", "PREPARING")) else 1)
    assert "local-0" in out
    assert "dense" in out
    code, out, _ = run(*once, "--json")
    shown = json.loads(out)
    assert code == any(not row["past"] for row in shown["findings"])
    assert shown["recent"]["over_ns"] > 0
    assert {row["model_id"] for row in shown["models"]} >= {"dense", "pair"}


def parameters() -> Iterator[tuple[str, Any]]:
    """Every parameter of every command of ours, by the words before it."""
    found: Any = typer.main.get_command(app)
    context: Any = typer.Context(found)
    groups: list[tuple[tuple[str, ...], Any]] = [
        ((name,), found.get_command(context, name)) for name in COMMANDS
    ]
    for words, command in groups:
        groups += [
            ((*words, name), each) for name, each in getattr(command, "commands", {}).items()
        ]
        yield from ((" ".join(words), parameter) for parameter in command.params)


def test_help_is_whole_sentences_about_every_argument_and_flag() -> None:
    assert len(list(parameters())) > 100
    for command, parameter in parameters():
        if getattr(parameter, "hidden", False):
            continue
        words = parameter.help or ""
        # A sentence that leans on the flag's name is none: "Of the models."
        assert words.endswith("."), (command, parameter.name, words)
        assert not re.match(r"(Of|For|By default|Instead of)\b", words), (command, parameter.name)


def test_paragraphs_of_help_are_broken_by_the_terminal_alone(run: Run) -> None:
    for command in ("load", "up", "doctor"):
        _, out, _ = run(command, "--help")
        before = out.partition("╭")[0]
        paragraphs = re.split(r"\n\s*\n", before)[1:]
        for paragraph in filter(str.strip, paragraphs):
            lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
            for line, after in itertools.pairwise(lines):
                assert len(line) + 1 + len(after.split()[0]) > 76, (command, line)


def test_load_says_what_to_give_before_it_looks_for_a_server(run: Run) -> None:
    nobody = ("--server", "127.0.0.1:1")
    for arguments, words in (
        ((), "found nothing, expected --rate 100 "),
        (("--rate", "5", "--concurrency", "2"), "found both --rate and --concurrency, expected"),
    ):
        code, _, error = run("load", *arguments, *nobody)
        assert code == 1
        assert words in error
        assert "--concurrency 4" in error
        assert "--trace FILE" in error


def test_a_list_of_models_says_the_share_of_each_version_unless_it_is_the_only_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def model(model_id: str, version: str, share: float) -> pb.ModelInfo:
        return pb.ModelInfo(model_id=model_id, version=version, state="READY", share=share)

    print_models([model("m:1", "1", 1), model("m:2", "2", 0), model("alone", "1", 1)])
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line for line in lines if line.split()}
    assert shown["m:1"].split()[1:3] == ["1", "(100%)"]
    assert shown["m:2"].split()[1:3] == ["2", "(0%)"]
    assert "%" not in shown["alone"]
