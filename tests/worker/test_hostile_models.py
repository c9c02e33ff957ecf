"""Models that want all memory, all time or other people's files cost their owners a refusal, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from clockwright.errors import ModelError
from tests.kit.hostile_models import FLOAT, bomb, endless, honest, model_of
from worker.compiling.cache import CompileCache
from worker.compiling.compile import compile_model
from worker.compiling.compiler import Compiler, CompilerKilledError, jobs_at_once
from worker.models.model_files import Limits, ModelSource

LIMITS = Limits(arena_bytes=64 << 20, num_pages=8, io_bytes=1 << 20)


def silent(stage: str) -> None:
    pass


def write(model: onnx.ModelProto, folder: Path) -> ModelSource:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return ModelSource(folder)


@contextlib.asynccontextmanager
async def compiler_with(**limits: Any) -> AsyncIterator[Compiler]:  # noqa: ANN401
    compiler = Compiler(time_limit_s=300, **limits)
    try:
        yield compiler
    finally:
        await compiler.close()


async def refusal_of(compiler: Compiler, model: onnx.ModelProto, folder: Path) -> str:
    (folder / "out").mkdir(parents=True)
    with pytest.raises(ModelError) as caught:
        await compiler.compile(write(model, folder / "in"), folder / "out", LIMITS, silent)
    return str(caught.value)


async def check_serves(compiler: Compiler, folder: Path) -> None:
    (folder / "out").mkdir(parents=True)
    await compiler.compile(write(honest(), folder / "in"), folder / "out", LIMITS, silent)


def read(path: str) -> str:
    return Path(path).read_text()


# --- limits ---------------------------------------------------------------------------------------


async def test_a_model_that_wants_too_much_memory_is_refused_with_the_limits_name(
    tmp_path: Path,
) -> None:
    async with compiler_with(memory_bytes=1 << 30) as compiler:
        text = await refusal_of(compiler, bomb(3 << 30), tmp_path / "bomb")
        assert text == (
            "it took more than 1024 MiB of memory to compile, the limit (--compile-memory-mib)"
        )
        await check_serves(compiler, tmp_path / "honest")


async def test_a_model_that_wants_too_much_processor_time_is_refused_with_the_limits_name(
    tmp_path: Path,
) -> None:
    async with compiler_with(cpu_limit_s=2) as compiler:
        text = await refusal_of(compiler, endless(), tmp_path / "endless")
        assert text == (
            "it took more than 2 s of processor time to compile, the limit (--compile-cpu-s)"
        )
        await check_serves(compiler, tmp_path / "honest")


async def test_a_model_that_never_ends_lets_others_pass(tmp_path: Path) -> None:
    async with compiler_with(long_s=0.1) as compiler:
        (tmp_path / "out").mkdir()
        source = write(endless(), tmp_path / "in")
        hangs = asyncio.create_task(compiler.compile(source, tmp_path / "out", LIMITS, silent))
        await asyncio.sleep(0)  # It has its turn first.
        for number in range(3):
            await check_serves(compiler, tmp_path / f"honest{number}")
        assert not hangs.done()
        hangs.cancel()
        await asyncio.wait([hangs])
        # A job that was aside leaves its place to the next that takes long.
        await check_serves(compiler, tmp_path / "last")


async def test_several_are_compiled_at_once_and_those_that_never_end_leave_room_for_others(
    tmp_path: Path,
) -> None:
    async with compiler_with(at_once=2, long_s=0.1) as compiler:
        hang = []
        for name in ("one", "two"):
            (tmp_path / name / "out").mkdir(parents=True)
            source = write(endless(), tmp_path / name / "in")
            compiling = compiler.compile(source, tmp_path / name / "out", LIMITS, silent)
            hang.append(asyncio.create_task(compiling))
            await asyncio.sleep(0)
        await asyncio.gather(*(check_serves(compiler, tmp_path / f"honest{n}") for n in range(4)))
        assert not any(each.done() for each in hang)
        # Two hang, and two are kept for what comes.
        assert len(compiler.pids) == 4
        for each in hang:
            each.cancel()
        await asyncio.wait(hang)
        await check_serves(compiler, tmp_path / "last")
    assert compiler.pids == []


async def test_two_are_not_measured_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    may_end = asyncio.Event()

    async def exchange(_: object, job: dict[str, Any], __: object) -> dict[str, Any]:
        name = Path(job.get("folder", "described")).name
        events.append(f"{name} begins")
        if job["kind"] == "profile":
            await may_end.wait()
        events.append(f"{name} ends")
        return {"done": {} if job["kind"] == "profile" else "{}"}

    async with compiler_with(at_once=2) as compiler:
        monkeypatch.setattr(compiler, "_ask_at", exchange)
        measured = [
            asyncio.create_task(compiler.profile(tmp_path / name, (1,), silent))
            for name in ("first", "second")
        ]
        with pytest.raises(Exception, match="missing required field"):
            await compiler.describe(ModelSource(tmp_path))
        may_end.set()
        await asyncio.gather(*measured)
    # The first has begun, or begins, while the other job runs; the second waits.
    assert events.index("described ends") < events.index("first ends")
    ordered = [each for each in events if not each.startswith("described")]
    assert ordered == ["first begins", "first ends", "second begins", "second ends"]


@pytest.mark.parametrize(
    ("cores", "free_gib", "expected"),
    [(1, 64, 1), (2, 64, 2), (64, 1024, 4), (8, 30, 3), (8, 3, 1), (0, 64, 1), (3, None, 3)],
)
def test_as_many_are_compiled_at_once_as_cores_and_memory_allow(
    cores: int, free_gib: int | None, expected: int
) -> None:
    free = None if free_gib is None else free_gib << 30
    assert jobs_at_once(cores, free, 5 << 30) == expected


async def test_the_compiler_has_limits_and_neither_the_network_nor_others_memory(
    tmp_path: Path,
) -> None:
    kinds = ("net", "ipc")
    # What this system allows at all; root needs no user namespace.
    how = "-ni" if os.geteuid() == 0 else "-Uni"
    unshare = subprocess.run(["unshare", how, "true"], check=False)  # noqa: ASYNC221  nothing else runs
    allowed = unshare.returncode == 0
    async with compiler_with(memory_bytes=3 << 30) as compiler:
        await check_serves(compiler, tmp_path)
        (pid,) = compiler.pids
        text, status = (read(f"/proc/{pid}/{name}") for name in ("limits", "status"))
        for name, value in (
            ("data size", 3 << 30),
            ("file size", 3 << 30),
            ("core file size", 0),
        ):
            assert re.search(rf"^Max {name} +{value} +{value} ", text, re.MULTILINE), text
        assert "NoNewPrivs:\t1\n" in status
        apart = [
            os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
            for kind in kinds
        ]
        assert apart == [allowed] * len(kinds)


def test_what_libraries_print_is_logged_and_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Python then prints what it was doing when it crashed.
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")

    async def scenario() -> None:
        async with compiler_with() as compiler:
            source = write(honest(), tmp_path)
            await compiler.describe(source)
            (pid,) = compiler.pids
            os.kill(pid, signal.SIGABRT)
            with pytest.raises(CompilerKilledError, match="SIGABRT"):
                await compiler.describe(source)
            while "the compiler: Fatal Python error: Aborted" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert capfd.readouterr().err == ""


# --- files outside --------------------------------------------------------------------------------


def outside(*locations: str) -> TensorProto:
    """Four numbers that lie in some file."""
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for location in locations:
        tensor.external_data.add(key="location", value=location)
    return tensor


def in_an_initializer(tensor: TensorProto) -> onnx.ModelProto:
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], {})
    model.graph.initializer.append(tensor)
    return model


def in_a_function(tensor: TensorProto) -> onnx.ModelProto:
    function = helper.make_function(
        "here",
        "Secret",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["w"], value=tensor),
            helper.make_node("Add", ["a", "w"], ["b"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    return model_of(
        [helper.make_node("Secret", ["x"], ["y"], domain="here")], {}, functions=[function]
    )


def in_a_sparse_initializer(tensor: TensorProto) -> onnx.ModelProto:
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], {})
    indices = numpy_helper.from_array(np.arange(4, dtype=np.int64), "w_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [4]))
    return model


def in_a_sparse_constant(tensor: TensorProto) -> onnx.ModelProto:
    indices = numpy_helper.from_array(np.arange(4, dtype=np.int64), "w_indices")
    sparse = helper.make_sparse_tensor(tensor, indices, [4])
    return model_of(
        [
            helper.make_node("Constant", [], ["w"], sparse_value=sparse),
            helper.make_node("Add", ["x", "w"], ["y"]),
        ],
        {},
    )


@pytest.mark.parametrize(
    "place", [in_an_initializer, in_a_function, in_a_sparse_initializer, in_a_sparse_constant]
)
@pytest.mark.parametrize(
    "locations", [("/etc/hostname",), ("w.bin", "../secret"), ("../secret", "w.bin"), ("link",)]
)
def test_no_tensor_anywhere_is_read_from_outside_the_folder(
    tmp_path: Path, place: Callable[[TensorProto], onnx.ModelProto], locations: tuple[str, ...]
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    source = write(place(outside(*locations)), tmp_path / "in")
    (source.folder / "w.bin").write_bytes(bytes(16))
    (source.folder / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="initializer 'w': external data in"):
        compile_model(source, tmp_path / "out", LIMITS, silent)


# --- what lies in the cache -----------------------------------------------------------------------


def offset_moved(table: dict[str, Any]) -> None:
    table["weights"][0]["offset"] += 4


def offset_far_away(table: dict[str, Any]) -> None:
    table["weights"][0]["offset"] = 1 << 40


def offset_negative(table: dict[str, Any]) -> None:
    table["weights"][0]["offset"] = -4


def no_weights(table: dict[str, Any]) -> None:
    table["weights_bytes"] = 0


def weight_too_short(table: dict[str, Any]) -> None:
    table["weights"][0]["num_bytes"] -= 4


def other_rows(table: dict[str, Any]) -> None:
    table["inputs"][0]["spec"]["row_shape"] = [8]


def other_type(table: dict[str, Any]) -> None:
    table["outputs"][0]["element_type"] = TensorProto.DOUBLE


LIES = (offset_moved, offset_far_away, offset_negative, no_weights, weight_too_short, other_type)


@pytest.fixture
def entry(tmp_path: Path) -> tuple[CompileCache, str, Path]:
    """A cache, the key of its one model, and its folder."""
    cache = CompileCache(tmp_path / "cache", target="here")
    key = cache.key({}, {})
    with cache.new_folder() as folder:
        compile_model(write(honest(), tmp_path / "in"), folder, LIMITS, silent)
        published = cache.publish(folder, key)
    assert cache.find(key) is not None
    return cache, key, published


@pytest.mark.parametrize("change", [*LIES, other_rows])
def test_a_model_whose_description_has_changed_is_made_anew(
    entry: tuple[CompileCache, str, Path], change: Callable[[dict[str, Any]], None]
) -> None:
    cache, key, folder = entry
    table = json.loads((folder / "model.json").read_text())
    change(table)
    (folder / "model.json").write_text(json.dumps(table))
    assert cache.find(key) is None
    assert not folder.exists()


@pytest.mark.parametrize("change", LIES)
def test_a_description_that_leads_outside_the_weights_is_not_believed_whoever_sealed_it(
    entry: tuple[CompileCache, str, Path], change: Callable[[dict[str, Any]], None]
) -> None:
    cache, key, folder = entry
    table = json.loads((folder / "model.json").read_text())
    change(table)
    text = json.dumps(table).encode()
    (folder / "model.json").write_bytes(text)
    (folder / "seal").write_text(hashlib.sha256(text).hexdigest())
    assert cache.find(key) is None


@pytest.mark.parametrize("exec_ns", [0, -1, 10**30, 3_600_000_000_001])
def test_an_impossible_profile_is_measured_anew(tmp_path: Path, exec_ns: int) -> None:
    cache = CompileCache(tmp_path, target="here")
    cache.write_profile("a", {1: 1000, 2: exec_ns})
    assert cache.read_profile("a") == {}
    cache.write_trials("a", "gpu", {1: {"torch": exec_ns, "other": None}}, clock_mhz=1)
    assert cache.read_trials("a", "gpu") == {}


def test_a_profile_of_which_a_digit_has_changed_is_measured_anew(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, target="here")
    cache.write_profile("a", {1: 1000})
    cache.write_trials("b", "gpu", {1: {"torch": 1000, "other": None}}, clock_mhz=1)
    assert cache.read_profile("a") == {1: 1000}
    assert cache.read_trials("b", "gpu") == {1: {"torch": 1000, "other": None}}
    for path in (tmp_path / "profiles").iterdir():
        path.write_text(path.read_text().replace("1000", "9000"))
    assert cache.read_profile("a") == {}
    assert cache.read_trials("b", "gpu") == {}
