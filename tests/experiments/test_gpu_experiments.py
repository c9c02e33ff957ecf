"""`make gpu` without a GPU: its sections run on the processor, and itself says that there is none."""

from __future__ import annotations

import asyncio
import csv
import gc
import json
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import worker.devices.cuda
from clockwright.errors import ConfigError, ModelError
from clockwright.units import DEFAULT_BATCH_SIZES
from experiments.__main__ import called
from experiments.clockwork_paper import fig6
from experiments.gpu import __main__ as everything
from experiments.gpu import probe, serve, stand_in, table1
from experiments.gpu.compile import compile_one
from experiments.gpu.hardware import (
    BareDevice,
    Room,
    compiled_for,
    open_accelerator,
)
from experiments.gpu.stand_in import MissingError
from modelzoo.profile import load_profile
from tests.kit.aims import wanted_of
from tests.kit.engine_contest import OnnxruntimeAccelerator, forget_trials, time_says
from tests.kit.processes import PATIENCE_S, lives, until
from worker.config import WorkerConfig
from worker.devices.accelerator import CapturedWork, HostAccelerator, HostStream, Piece
from worker.devices.cuda import Installation
from worker.devices.gpu import TorchModel
from worker.engines.choice import Way
from worker.engines.torch_operators import OPERATORS
from worker.engines.torch_program import Program
from worker.models.model_files import IO_SHARE
from worker.models.precision import Precision

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks that tests of this file have compiled: each once, by a process that takes seconds to begin."""
    return tmp_path_factory.mktemp("cache")


def test_the_probe_measures_copies_gathers_and_kernels(cache: Path) -> None:
    accelerator = HostAccelerator()
    figures = probe.copy(accelerator, pages=1, runs=2)
    figures |= probe.gather(accelerator, pages=1, cache_pages=4, runs=2)
    figures |= probe.gather(accelerator, pages=2, cache_pages=2, name="gather_large", runs=2)
    figures |= probe.beside(accelerator, cache, name="tiny_conv", runs=2)
    figures |= probe.execute(accelerator, cache, name="tiny_conv", runs=2)
    figures |= probe.graphs(accelerator, cache, name="tiny_conv", more=2)
    assert all(figure > 0 for figure in figures.values())
    for key in (
        *("h2d_gbps", "d2d_gbps", "gather_index_select_us_p50", "gather_captured_us_p50"),
        *("beside_load_us_p99", "graph_ms"),
    ):
        assert key in figures
    # The processor's kernels are not captured: there is no memory to count.
    assert "graph_kib" not in figures
    assert wanted_of("probe") <= figures.keys()
    for precision, other in (
        ("float32", "_channels_last"),
        ("tf32", "_channels_first"),
        ("float16", "_channels_first"),
    ):
        for variant in ("", "_apart", other):
            assert f"exec_{precision}{variant}_b16_launched_us_p50" in figures
    hurried = probe.execute(accelerator, cache, name="tiny_conv", runs=2, until_s=0.0)
    assert len(hurried) == len(Precision) * len(probe.BATCH_SIZES) * 4


def test_the_probe_measures_what_serving_takes_of_the_host() -> None:
    figures = probe.host(HostAccelerator(), num_bytes=16 << 20, runs=2)
    steps = ("input_b1", "input_b16", "output_b1", "output_b16")
    for key in (*steps, "wake_up_plain", "wake_up_tuned"):
        assert 0 <= figures[f"{key}_us_p50"] <= figures[f"{key}_us_p99"]
    assert figures["host_memory_present_ms"] > 0
    assert figures["host_memory_locked_ms"] > 0


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        (Precision.FLOAT32, torch.channels_last),
        (Precision.TF32, torch.contiguous_format),
        (Precision.FLOAT16, torch.contiguous_format),
    ],
)
def test_bare_kernels_are_also_measured_in_the_layout_that_is_not_served(
    precision: Precision,
    layout: torch.memory_format,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, compiled = compiled_for("tiny_conv", precision, cache)
    told: list[bool] = []
    run = Program.run

    def watched(program: Program, inputs: Any, weights: Any, moved: Any) -> Any:  # noqa: ANN401
        # By strides: a kernel of 1 x 1, or of one channel, is contiguous in both layouts.
        kernels = [weight for weight in weights.values() if weight.dim() == 4]
        wanted = [torch.empty(each.shape).clone(memory_format=layout) for each in kernels]
        told.append([each.stride() for each in kernels] == [each.stride() for each in wanted])
        return run(program, inputs, weights, moved)

    monkeypatch.setattr(Program, "run", watched)
    for given in (None, layout):
        probe.bare_kernel(HostAccelerator(), folder, compiled, 1, layout=given).replay(HostStream())
    # Rehearsed, then run.
    assert told == [False, False, True, True]


@pytest.mark.parametrize(
    ("free_gib", "expected"), [(None, 28), (79, fig6.Setting().num_pages), (16, 512), (0, 7)]
)
def test_the_probe_gathers_from_a_cache_like_figure_6s_where_there_is_room(
    free_gib: int | None, expected: int
) -> None:
    accelerator = HostAccelerator()
    free_bytes = None if free_gib is None else free_gib << 30
    accelerator.free_bytes = lambda: free_bytes  # type: ignore[method-assign]
    assert probe.large_cache_pages(accelerator) == expected


def test_what_the_probe_has_measured_is_kept_when_a_section_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **settings: object) -> probe.Figures:
        raise RuntimeError("out of memory")

    for section in ("copy", "host", "inputs_beside_load", "beside", "graphs"):
        monkeypatch.setattr(probe, section, lambda *_, section=section, **more: {section: 1.0})
    monkeypatch.setattr(probe, "gather", lambda *_, name="gather", **more: {name: 1.0})
    monkeypatch.setattr(probe, "execute", fails)
    words = ["probe", "--device", "torch:cpu", "--seconds", "1", "--directory", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(RuntimeError, match="out of memory"):
        probe.main()
    record = json.loads((tmp_path / "probe.json").read_text())
    kept = ["copy", "gather", "gather_large", "host", "inputs_beside_load", "beside", "graphs"]
    assert list(record["figures"]) == kept
    assert record["command"] == "python -m experiments gpu-probe --device torch:cpu --seconds 1"
    assert record["hardware"]["accelerator"] == "cpu"


def test_a_kernel_that_is_measured_bare_computes_what_the_served_one_does(cache: Path) -> None:
    accelerator = HostAccelerator()
    folder, compiled = compiled_for("tiny_conv", Precision.FLOAT32, cache)
    places = []

    def memory(num_bytes: int) -> torch.Tensor:
        places.append(HostAccelerator.device_memory(accelerator, num_bytes))
        return places[-1]

    accelerator.device_memory = memory  # type: ignore[method-assign]
    answers = []
    for joined in (True, False):
        places.clear()
        kernel = probe.bare_kernel(accelerator, folder, compiled, 2, joined=joined)
        # Weights, then the input, then the output.
        assert len(places) == 3
        places[1].view(torch.float32).copy_(torch.linspace(-1, 1, 128))
        kernel.replay(HostStream())
        answers.append(places[2].view(torch.float32).clone())
    assert torch.allclose(answers[0], answers[1], atol=1e-6)
    assert answers[0].abs().max() > 0.01


class UnjoinedAccelerator(HostAccelerator):
    """As on a GPU for which cuDNN has no joint kernels."""

    def capture(
        self, pieces: Sequence[Piece | None], *, rehearsal: Callable[[], None], tensor_cores: bool
    ) -> CapturedWork:
        def refuse(*arguments: object) -> torch.Tensor:
            raise RuntimeError("FIND was unable to find an engine to execute this computation")

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(OPERATORS, "conv_add_relu", refuse)
            return super().capture(pieces, rehearsal=rehearsal, tensor_cores=tensor_cores)


def test_where_joint_kernels_are_missing_others_are_measured_and_that_is_said(cache: Path) -> None:
    accelerator = UnjoinedAccelerator()
    figures = probe.beside(accelerator, cache, name="tiny_conv", runs=2)
    assert figures["beside_joined"] == 0
    figures = probe.execute(accelerator, cache, name="tiny_conv", runs=2)
    assert "exec_float32_apart_b1_us_p50" in figures
    assert not any("float32_b1" in key for key in figures)


class ForgetfulAccelerator(HostAccelerator):
    """As on a GPU, captured kernels know their memory by its address only."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[weakref.ref[np.ndarray]] = []

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        memory = np.zeros(num_bytes, np.uint8)
        self.taken.append(weakref.ref(memory))
        return torch.from_numpy(memory)


def test_kernels_that_may_still_run_keep_their_memory(cache: Path) -> None:
    accelerator = ForgetfulAccelerator()
    folder, compiled = compiled_for("tiny_conv", Precision.FLOAT32, cache)
    replay = probe.bare_kernel(accelerator, folder, compiled, 1).replay
    gc.collect()
    assert len(accelerator.taken) == 3
    assert all(memory() is not None for memory in accelerator.taken)
    del replay
    gc.collect()
    assert not any(memory() is not None for memory in accelerator.taken)


def small_table_1(
    accelerator: HostAccelerator,
    cache_dir: Path,
    *,
    names: tuple[str, ...] = ("tiny_conv", "never_reached"),
    until_s: float = 0.0,
    grace_s: float = 0.0,
) -> tuple[dict[str, float], list[str]]:
    setting = table1.Setting(
        names=names,
        batch_sizes=(1, 2),
        room=Room(num_pages=3, arena_bytes=16 << 20, io_bytes=1 << 20, host_bytes=16 << 20),
        runs=3,
        tail_runs=20,
        tail_grace_s=grace_s,
        main="tiny_conv",
    )
    # Unless told otherwise, time is up from the start: one network, and one run of each kind but those of the tail.
    told: list[tuple[dict[str, float], list[str]]] = []
    asyncio.run(
        table1.measure(
            accelerator,
            setting,
            until_s=until_s,
            measured=lambda *found: told.append(found),
            cache_dir=cache_dir,
        )
    )
    (found,) = told
    return found


@pytest.mark.parametrize("way", Way)
def test_table_1_compares_an_exec_with_the_bare_kernels_of_the_way_that_was_taken(
    way: Way, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_trials(cache)
    accelerator = OnnxruntimeAccelerator()
    accelerator.on_host = False  # so that all ways are tried
    time_says(monkeypatch, {each: 1000 if each is way else 2000 for each in Way})
    kernels: list[probe.BareKernel] = []

    def bare_kernel(*arguments: Any, **settings: Any) -> probe.BareKernel:  # noqa: ANN401
        kernels.append(probe.bare_kernel(*arguments, **settings))
        return kernels[-1]

    monkeypatch.setattr(table1, "bare_kernel", bare_kernel)
    figures, _ = small_table_1(accelerator, cache)
    assert figures["tiny_conv_bare_us_p50"] > 0
    (kernel,) = kernels
    assert kernel.joined is (way is not Way.TORCH_APART)
    assert ("tiny_conv_paged_to_bare_ratio" in figures) is (way is not Way.ONNXRUNTIME)


@pytest.mark.parametrize(("grace_s", "tail_runs"), [(0.0, 1), (float("inf"), 20)])
def test_table_1_is_measured_with_the_workers_own_steps(
    grace_s: float, tail_runs: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = BareDevice.execute
    measured_as: list[tuple[bool, bool]] = []

    def watched(bench: BareDevice, *arguments: Any, **settings: Any) -> list[int]:  # noqa: ANN401
        measured_as.append((gc.get_freeze_count() > frozen, sys.getswitchinterval() < 2e-4))
        return execute(bench, *arguments, **settings)

    monkeypatch.setattr(BareDevice, "execute", watched)
    usual, frozen = (gc.get_threshold(), sys.getswitchinterval()), gc.get_freeze_count()
    figures, left_out = small_table_1(HostAccelerator(), cache, grace_s=grace_s)
    # The collector and the turns of threads are a worker's, and afterwards what they were.
    assert set(measured_as) == {(True, True)}
    assert (gc.get_threshold(), sys.getswitchinterval()) == usual
    assert left_out == ["never_reached"]
    assert figures["tiny_conv_memory_taken_while_running"] == 0
    assert figures["tiny_conv_b1_runs"] == tail_runs
    assert figures["tiny_conv_b1_us_p9999"] >= figures["tiny_conv_b1_us_p50"] > 0
    assert figures["tiny_conv_bare_tail_ratio"] >= 1
    assert figures["tiny_conv_load_gbps"] > 0
    of_tiny_conv = {name.replace(table1.MAIN, "tiny_conv") for name in wanted_of("table1")}
    assert of_tiny_conv <= figures.keys()


def test_all_sections_compile_a_network_for_the_same_batches(tmp_path: Path) -> None:
    usual = WorkerConfig(controller="here:1").io_bytes
    assert usual == table1.ROOM.io_bytes == serve.Setting().room.io_bytes
    room = Room(num_pages=1, arena_bytes=1 << 20, io_bytes=8 << 20, host_bytes=16 << 20)
    bench = BareDevice(HostAccelerator(), room, cache_dir=tmp_path)
    assert bench.device.limits.io_bytes == room.io_bytes // IO_SHARE
    assert table1.BATCH_SIZES == DEFAULT_BATCH_SIZES


def test_a_network_that_is_refused_does_not_end_table_1(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = BareDevice.model

    async def refuses(bench: BareDevice, name: str, batch_sizes: Sequence[int]) -> TorchModel:
        if name == "greedy":
            raise ModelError("its kernels want too much")
        return await model(bench, name, batch_sizes)

    monkeypatch.setattr(BareDevice, "model", refuses)
    figures, left_out = small_table_1(
        HostAccelerator(), cache, names=("greedy", "tiny_conv"), until_s=float("inf")
    )
    assert figures["tiny_conv_b1_us_p50"] > 0
    assert left_out == ["greedy"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split(maxsplit=1) == ["greedy", "refused: its kernels want too much"]


def test_table_1_is_written_after_each_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = table1.order_of_interest()

    async def measure(
        accelerator: object,
        setting: table1.Setting,
        *,
        until_s: float,
        measured: Callable[[dict[str, float], list[str]], None],
    ) -> None:
        figures = {}
        for index, name in enumerate(setting.names[:2]):
            figures[f"{name}_b1_us_p50"] = 5.0 + index
            measured(figures, list(setting.names[index + 1 :]))
            record = json.loads((tmp_path / "table1.json").read_text())
            assert (record["figures"], len(record["left_out"])) == (figures, len(names) - index - 1)

    monkeypatch.setattr(table1, "measure", measure)
    words = ["table1", "--device", "torch:cpu", "--seconds", "1", "--directory", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    table1.main()
    assert f"left out: {len(names) - 2} of {len(names)}: {names[2]}," in capsys.readouterr().out
    with (tmp_path / "table1.csv").open(newline="") as file:
        rows = [(line["model"], line["quantity"], line["ours"]) for line in csv.DictReader(file)]
    assert rows == [(names[0], "EXEC 1", "5"), (names[1], "EXEC 1", "6")]


def test_the_papers_numbers_stand_beside_ours() -> None:
    names = table1.order_of_interest()
    assert names[0] == table1.MAIN
    assert sorted(names) == sorted(load_profile("table1").rows)
    figures = {"resnet50_v1_weights_mb": 102.04, "dla34_load_us_p50": 1.0, "dla34_load_us_p99": 2.0}
    figures |= {f"resnet50_v1_b1_us_{quantile}": 3.0 for quantile in ("p50", "p99", "p9999")}
    rows = table1.beside_the_paper(names, figures)
    paper = load_profile("table1").rows
    resnet50, dla34 = paper["resnet50_v1"], paper["dla34"]
    assert rows == [
        ("resnet50_v1", "weights", "MB", 102.0, None, None, resnet50.weights_bytes / 1e6),
        ("resnet50_v1", "EXEC 1", "us", 3.0, 3.0, 3.0, resnet50.exec_ns[1] / 1e3),
        ("dla34", "LOAD", "us", 1.0, 2.0, None, dla34.load_ns / 1e3),
    ]


def test_without_a_gpu_nothing_is_run_and_one_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        worker.devices.cuda, "installation", lambda: Installation("2.13.0", "13.0", 0)
    )
    monkeypatch.setattr(everything, "run_parts", None)
    assert everything.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "nothing was run: device 'cuda:0': found no usable GPU" in captured.err


def test_every_part_is_rehearsed_and_without_torch_for_cuda_one_sentence_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name, *_ in (everything.QUICK, *everything.PARTS)]
    assert list(everything._REHEARSED) == names

    def missing(_: Path) -> dict[str, str]:
        raise MissingError("no torch for CUDA 13")

    monkeypatch.setattr(stand_in, "environment", missing)
    assert everything.main(["--rehearse"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "make gpu: nothing was rehearsed: no torch for CUDA 13\n"


def test_without_torch_one_sentence_says_what_to_install() -> None:
    program = (
        "import runpy, sys; sys.modules['torch'] = None; "
        "runpy.run_module('experiments.gpu', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu: ")
    assert line.endswith("; install clockwright[gpu,measure]")


def test_a_part_that_fails_or_hangs_hides_no_other(tmp_path: Path) -> None:
    hangs = ("timeit", "-n1", "-r1", "import time; time.sleep(600)")
    parts = (
        ("hangs", hangs, 1.0, 0.3),
        ("fails", ("no_such_module_here",), 1.0, 60.0),
        ("works", ("timeit", "-n1", "-r1"), 1.0, 60.0),
    )
    outcomes = dict(everything.run_parts(parts, "cuda:0", tmp_path))
    assert outcomes["hangs"].startswith("not done within 0.3 s")
    assert outcomes["fails"].startswith("failed with 1")
    assert outcomes["works"].startswith("done")


def test_a_part_that_hangs_leaves_no_server_behind(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys, time; "
        "server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"new = pathlib.Path({str(tmp_path / 'new')!r}); "
        f"new.write_text(str(server.pid)); new.rename({str(told)!r}); time.sleep(600)"
    )
    for limit_s in (1.0, 10.0, 100.0):
        parts = (("hangs", ("timeit", "-n1", "-r1", program), 1.0, limit_s),)
        ((_, outcome),) = everything.run_parts(parts, "cuda:0", tmp_path)
        assert outcome.startswith(f"not done within {limit_s:g} s")
        if told.exists():
            break  # else a busy machine had not yet started the server
    server = int(told.read_text())
    until(lambda: not lives(server), what="the server of a part that was ended is gone")


def test_parts_share_the_time_that_is_left_and_the_last_are_left_out(tmp_path: Path) -> None:
    said = ("timeit", "-n1", "-r1", "open('{directory}/{device}', 'w').write('{seconds:g}')")
    parts = (("cut", said, 50.0, 1e6), ("short", said, 1.0, 10.0), ("long", said, 1.0, 1e4))
    left_s = 1000.0
    outcomes = dict(
        everything.run_parts(parts[:1], "cuda:7", tmp_path, until_s=time.monotonic() + left_s)
    )
    assert outcomes["cut"].startswith("done")
    # Its seconds are cut as its limit is.
    assert 0 < float((tmp_path / "cuda:7").read_text()) <= 50 * left_s / 1e6
    outcomes = dict(everything.run_parts(parts[1:], "cuda:7", tmp_path, until_s=time.monotonic()))
    assert outcomes == {"short": "left out: no time", "long": "left out: no time"}


def test_what_is_compiled_before_all_parts_is_what_they_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_one("tiny_conv", Precision.FLOAT32)
    # A worker's IO memory by default.
    room = Room(num_pages=1, arena_bytes=16 << 20, io_bytes=128 << 20, host_bytes=16 << 20)
    bench = BareDevice(HostAccelerator(), room)
    asyncio.run(bench.model("tiny_conv", DEFAULT_BATCH_SIZES))
    asyncio.run(bench.close())
    assert len(list((tmp_path / "clockwright" / "compiled").iterdir())) == 1


ALL_PARTS = """
import sys
import worker.devices.cuda
from experiments.gpu import __main__ as everything

program = f"import os, time; open({sys.argv[1]!r}, 'a').write(str(os.getpid()) + ' '); time.sleep(600)"
worker.devices.cuda.installation = lambda: None
worker.devices.cuda.check_installation = lambda found, index: None
everything.COMPILE = ("timeit", "-n1", "-r1", program)
everything.QUICK = ("hangs", ("timeit", "-n1", "-r1", program), 600.0, 600.0)
sys.exit(everything.main(["--total-s", "600", "--directory", sys.argv[2]]))
"""


def test_when_make_gpu_is_ended_so_are_the_part_and_the_compiler_that_run(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    command = [sys.executable, "-c", ALL_PARTS, str(told), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        until(
            lambda: told.exists() and told.read_text().count(" ") == 2,
            what="compiler and part run",
        )
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    for child in told.read_text().split():
        until(lambda child=int(child): not lives(child), what="the part is gone")  # type: ignore[misc]


def test_all_parts_of_worth_fit_into_nine_minutes_and_each_is_a_study() -> None:
    *of_worth, (last, *_) = everything.PARTS
    assert last == "tests"
    assert sum(limit_s for *_, limit_s in (everything.QUICK, *of_worth)) < 9 * 60
    # Each stops by itself first.
    assert all(
        seconds < limit_s for _, _, seconds, limit_s in (everything.QUICK, *everything.PARTS)
    )
    # Each is called by its name, as by hand.
    names = [everything.COMPILE[1], *(words[1] for _, words, _, _ in of_worth)]
    assert [called(name) for name in names] == names


def test_make_gpu_runs_every_test_that_needs_a_gpu_once() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"^ *@?pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    ]
    quick, rest = (words for _, words, _, _ in (everything.QUICK, everything.PARTS[-1]))
    assert marked == [quick[-1]] == [rest[-1]]
    assert rest[rest.index("-k") + 1] == f"not ({quick[quick.index('-k') + 1]})"


def test_gpu_tests_that_take_too_long_still_say_which_failed_and_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tests = tmp_path / "test_two.py"
    tests.write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_first(): assert False, 'what went wrong'\n"
        "def test_second(): raise SystemExit('was run though time was up')\n"
    )
    name, words, _, _ = everything.PARTS[-1]
    here = (*words[:-1], "-p", "no:cacheprovider", str(tests))
    # Time is up when the first test has ended.
    parts = ((name, here, 1e-6, PATIENCE_S),)
    outcomes = dict(everything.run_parts(parts, "cuda:0", tmp_path))
    assert outcomes["tests"].startswith("failed with 1")
    printed, _ = capfd.readouterr()
    assert "test_first FAILED" in printed
    assert "AssertionError: what went wrong" in printed
    assert "test_second" not in printed


def test_a_device_that_is_no_accelerator_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cpu': expected cuda:N or torch:cpu"):
        open_accelerator("cpu")
