"""What operators have added is there after a restart, what they removed is not, and nothing is ever half there."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typing_extensions import override

from clockwright.client.client import AsyncClient
from clockwright.client.operator import control_stub
from clockwright.errors import ConfigError, StoreError
from clockwright.v1 import control_pb2 as pb
from clockwright.wire.tensors import TensorSpec
from controller.core import SchedulerConfig
from controller.links import worker_link
from controller.models.entry import ModelState
from controller.models.state_file import StateFile
from controller.models.uploads import Uploads
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig, default_state_dir
from tests.kit.scripted_worker import LoopbackWorker

S = 10**9


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is told to leave hears of it, also when the machine stands still meanwhile."""
    monkeypatch.setattr(worker_link, "LEAVE_LIMIT_S", 60.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100))


@asynccontextmanager
async def controller_of(directory: Path, **changes: Any) -> AsyncIterator[tuple[Controller, Any]]:  # noqa: ANN401
    """A controller, which keeps its state below `directory`, and its operators' end."""
    config = ControllerConfig(
        port=0,
        state_dir=directory / "state",
        # A worker that a test holds back does not hang, however slow the machine is.
        scheduler=SchedulerConfig(action_timeout_ns=1000 * S),
        **changes,
    )
    aio: Any = grpc.aio
    async with (
        running(config) as controller,
        aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        yield controller, control_stub(channel)


@asynccontextmanager
async def cluster(
    directory: Path,
    worker: type[LoopbackWorker] = LoopbackWorker,
    **changes: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[Controller, Any]]:
    """The same with a worker that takes all models, and has judged those that are there."""
    async with (
        controller_of(directory, **changes) as (controller, control),
        worker(controller.port),
    ):
        links, catalogue = controller.links, controller.catalogue
        while not (any(link.joined for link in links.links) and catalogue.ready):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        yield controller, control


def upload(name: str, data: bytes = b"graph", config: str = "") -> list[pb.AddModelRequest]:
    """A model with a file beside its graph, which replaces another of its name."""
    return [
        pb.AddModelRequest(model_id=name, replace=True, path="1/model.onnx", content=data),
        pb.AddModelRequest(path="1/data/w.bin", content=b"weights"),
        pb.AddModelRequest(path="config.toml", content=config.encode()),
    ]


async def add(control: Any, *arguments: Any) -> None:  # noqa: ANN401
    await control.AddModel(upload(*arguments))


async def remove(control: Any, name: str) -> None:  # noqa: ANN401
    await control.RemoveModel(pb.RemoveModelRequest(model_id=name))


async def failure_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    return error.code(), error.details() or ""


def states(controller: Controller) -> dict[str, str]:
    catalogue = controller.catalogue
    return {model.name: catalogue.state(model).value for model in catalogue.models}


def contents(controller: Controller, name: str) -> dict[str, bytes]:
    model = controller.catalogue.find(name)
    assert model is not None
    assert model.folder is not None
    return {file.name: file.path.read_bytes() for file in model.folder.files}


def files_below(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


# --- models ---------------------------------------------------------------------------------------


async def test_added_models_are_back_after_a_restart_and_removed_ones_are_not(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (_, control):
        await add(control, "stays", b"first", "slo_ms = 7")
        await add(control, "changes", b"first")
        await add(control, "changes", b"second")
        await add(control, "goes")
        await remove(control, "goes")
    async with cluster(tmp_path) as (controller, control):
        assert states(controller) == {"changes": "READY", "stays": "READY"}
        assert contents(controller, "stays") == {
            "model.onnx": b"first",
            "data/w.bin": b"weights",
        }
        assert contents(controller, "changes")["model.onnx"] == b"second"
        stays = controller.catalogue.find("stays")
        assert stays is not None
        assert stays.slo_ns == 7_000_000
        await remove(control, "stays")
        await remove(control, "changes")
    async with cluster(tmp_path) as (controller, _):
        assert states(controller) == {}
    assert files_below(tmp_path / "state" / "uploads") == []


async def test_a_model_that_replaced_another_has_its_id_after_a_restart(tmp_path: Path) -> None:
    # Workers that waited have its weights by that id.
    ids: list[str] = []
    for _ in range(3):
        async with cluster(tmp_path) as (controller, control):
            if not ids:
                await add(control, "m", b"first")
                await add(control, "m", b"second")
            found = controller.catalogue.find("m")
            assert found is not None
            ids.append(found.model_id)
    assert ids == ["m@2"] * 3
    async with cluster(tmp_path) as (controller, control):
        await add(control, "m", b"third")
        found = controller.catalogue.find("m")
        assert found is not None
        assert found.model_id == "m@3"


@pytest.mark.parametrize("number", [2, 3])
async def test_a_model_of_the_directory_that_was_reloaded_has_its_id_after_a_restart(
    tmp_path: Path, number: int
) -> None:
    model = tmp_path / "models" / "m" / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"graph")
    changes: dict[str, Any] = {"models_dir": tmp_path / "models"}
    async with cluster(tmp_path, **changes) as (controller, _):
        for _ in range(1, number):
            await controller.catalogue.reload("m")
    async with cluster(tmp_path, **changes) as (controller, control):
        found = controller.catalogue.find("m")
        assert found is not None
        assert found.model_id == f"m@{number}"
        # Others that go take nothing of it along.
        await add(control, "other")
        await remove(control, "other")
    async with cluster(tmp_path, **changes) as (controller, _):
        found = controller.catalogue.find("m")
        assert found is not None
        assert found.model_id == f"m@{number}"


async def test_one_copy_of_several_that_was_removed_stays_away(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, control):
        await add(control, "m", b"graph", "copies = 3")
        await remove(control, "m-1")
    async with cluster(tmp_path) as (controller, control):
        assert states(controller) == {"m-0": "READY", "m-2": "READY"}
        await remove(control, "m")
    async with cluster(tmp_path) as (controller, _):
        assert states(controller) == {}
    assert files_below(tmp_path / "state" / "uploads") == []


async def test_an_upload_that_replaced_a_model_of_the_directory_does_so_after_a_restart(
    tmp_path: Path,
) -> None:
    model = tmp_path / "models" / "m" / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"of the directory")
    changes: dict[str, Any] = {"models_dir": tmp_path / "models"}
    async with cluster(tmp_path, **changes) as (_, control):
        await add(control, "m", b"uploaded")
    async with cluster(tmp_path, **changes) as (controller, _):
        assert contents(controller, "m")["model.onnx"] == b"uploaded"
        # Whoever loads it from the directory again has that one from then on.
        await controller.catalogue.reload("m")
    async with cluster(tmp_path, **changes) as (controller, _):
        assert contents(controller, "m")["model.onnx"] == b"of the directory"
        assert files_below(tmp_path / "state" / "uploads") == []


async def test_a_restart_reads_no_files_and_a_worker_notices_one_that_has_changed(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (controller, control):
        await add(control, "m", b"graph of m")
        await add(control, "short", b"graph")
        await add(control, "sound", b"graph")
        paths = {}
        for name in ("m", "short"):
            model = controller.catalogue.find(name)
            assert model is not None
            assert model.folder is not None
            paths[name] = model.folder.files[1].path
    paths["m"].write_bytes(b"grape of m")
    paths["short"].write_bytes(b"gra")
    async with cluster(tmp_path) as (controller, control):
        (short,) = [model for model in controller.catalogue.models if model.name == "short"]
        assert controller.catalogue.state(short) is ModelState.UNAVAILABLE
        reason = controller.catalogue.reason(short)
        assert reason == "1/model.onnx: found 3 bytes, expected 5 as they came"
        assert states(controller) == {
            "m": "UNAVAILABLE",
            "short": "UNAVAILABLE",
            "sound": "READY",
        }
        # The worker has compared what it was sent.
        (m,) = [model for model in controller.catalogue.models if model.name == "m"]
        assert controller.catalogue.reason(m) == "sha256 differs"
        await remove(control, "short")
        await add(control, "short", b"graph")
        assert states(controller)["short"] == "READY"


async def test_what_a_killed_controller_left_half_done_is_cleared_away(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (controller, control):
        await add(control, "whole")
        await add(control, "without_files")
        model = controller.catalogue.find("without_files")
        assert model is not None
        assert model.upload is not None
        removed = model.upload.folder
    uploads = tmp_path / "state" / "uploads"
    # Killed after the folder was renamed, before the row was deleted; and before the row was written.
    removed.rename(removed.with_name(removed.name + ".gone"))
    (uploads / "17" / "half" / "1").mkdir(parents=True)
    (uploads / "17" / "half" / "1" / "model.onnx").write_bytes(b"gra")
    for _ in range(2):
        async with cluster(tmp_path) as (controller, control):
            assert states(controller) == {"whole": "READY"}
            assert files_below(uploads) == ["config.toml", "model.onnx", "w.bin"]
    async with cluster(tmp_path) as (controller, control):
        await add(control, "half")
    async with cluster(tmp_path) as (controller, control):
        assert states(controller) == {"half": "READY", "whole": "READY"}


async def test_uploads_of_earlier_runs_count_towards_the_limit(tmp_path: Path) -> None:
    async with cluster(tmp_path, upload_limit_bytes=100_000) as (_, control):
        await add(control, "m", bytes(60_000))
    async with cluster(tmp_path, upload_limit_bytes=100_000) as (_, control):
        code, text = await failure_of(add(control, "n", bytes(60_000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--upload-limit-mib" in text
        await remove(control, "m")
        await add(control, "n", bytes(60_000))


# --- a disk that is full or damaged, and others who want it ---------------------------------------


async def test_a_full_disk_refuses_what_is_new_serves_on_and_takes_it_when_there_is_room(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (controller, control):
        await add(control, "old", b"first")
        await add(control, "other")
        state = controller.state
        (pages,) = await state.run(lambda c: c.execute("PRAGMA page_count").fetchone())
        await state.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())
        # Rows of long configurations need pages that there are not.
        long = "#" * 60_000
        for name in ("new", "old"):
            code, text = await failure_of(add(control, name, b"second", long))
            assert code is grpc.StatusCode.ABORTED
            assert "full" in text
        assert states(controller) == {"old": "READY", "other": "READY"}
        assert contents(controller, "old")["model.onnx"] == b"first"
        await state.run(lambda c: c.execute("PRAGMA max_page_count = 100000").fetchone())
        await add(control, "new", b"second", long)
    async with cluster(tmp_path) as (controller, _):
        assert states(controller) == {"new": "READY", "old": "READY", "other": "READY"}
        assert contents(controller, "old")["model.onnx"] == b"first"


async def test_a_model_is_removed_for_good_although_the_disk_takes_no_row(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (controller, control):
        await add(control, "m")
        await add(control, "pair", b"graph", "copies = 2")
        await controller.state.run(lambda c: c.execute("PRAGMA query_only = ON").fetchone())
        await remove(control, "m")
        # Half of a folder cannot be renamed: whoever removed it hears that it would come back.
        code, text = await failure_of(remove(control, "pair-0"))
        assert code is grpc.StatusCode.ABORTED
        assert "readonly" in text
    async with cluster(tmp_path) as (controller, _):
        assert states(controller) == {"pair-0": "READY", "pair-1": "READY"}


@pytest.mark.parametrize("damage", ["header", "cut", "text", "table", "folder", "empty", "missing"])
async def test_a_damaged_state_is_said_in_a_sentence_and_left_as_it_is(
    tmp_path: Path, damage: str
) -> None:
    async with cluster(tmp_path) as (_, control):
        for number in range(4):
            await add(control, f"m{number}", b"graph", "#" * 3000)
    path = tmp_path / "state" / "state.sqlite"
    data = path.read_bytes()
    assert not path.with_name("state.sqlite-wal").exists()
    match damage:
        case "header":
            path.write_bytes(bytes(100) + data[100:])
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "text":
            path.write_text("hello")
        case "table":
            path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
        case "folder":
            path.unlink()
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError) as caught:
        async with controller_of(tmp_path):
            pass
    assert str(caught.value).startswith(f"state {path}: ")
    assert "\n" not in str(caught.value)
    assert before is None or path.read_bytes() == before
    assert len(list((tmp_path / "state" / "uploads").iterdir())) == 4


async def test_models_whose_files_are_all_gone_are_not_forgotten(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, control):
        await add(control, "m")
    uploads, elsewhere = tmp_path / "state" / "uploads", tmp_path / "elsewhere"
    uploads.rename(elsewhere)
    with pytest.raises(ConfigError, match=f"^state .*: {uploads} is missing, expected "):
        async with controller_of(tmp_path):
            pass
    elsewhere.rename(uploads)
    async with cluster(tmp_path) as (controller, _):
        assert states(controller) == {"m": "READY"}


async def test_a_second_controller_is_told_who_has_the_state(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, control):
        await add(control, "m")
        with pytest.raises(ConfigError) as caught:
            async with controller_of(tmp_path):
                pass
        assert str(caught.value) == (
            f"state {tmp_path / 'state' / 'state.sqlite'}: process {os.getpid()} uses it, expected one"
            " controller at a time"
        )
        await add(control, "n")
    async with cluster(tmp_path) as (controller, _):
        assert states(controller) == {"m": "READY", "n": "READY"}


async def test_a_killed_holder_leaves_the_state_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    holding = (
        "import sys, time; from pathlib import Path; from controller.models.state_file import StateFile;"
        "file = StateFile(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(  # noqa: ASYNC220  it says when it holds the file
        [sys.executable, "-c", holding, path], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} uses it"):
            StateFile(path)
        holder.kill()
        holder.wait()
    await StateFile(path).close()


def test_a_controller_starts_on_a_full_disk_with_all_it_knows(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (_, control):
            await add(control, "m")

    run(test)
    # No file may be made longer: the nearest thing to a full disk that needs no mount.
    starting = (
        "import asyncio, resource, sys; from pathlib import Path;"
        "from controller.models.state_file import StateFile; from controller.models.uploads import Uploads;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); folder = Path(sys.argv[1]);"
        "state = StateFile(folder / 'state.sqlite');"
        "uploads = Uploads(folder / 'uploads', state, bytes_max=1 << 30);"
        "sys.exit(str([tuple(kept.names) for kept in asyncio.run(uploads.restore())]))"
    )
    command = [sys.executable, "-c", starting, str(tmp_path / "state")]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert told == "[('m',)]\n"


def test_a_folder_that_cannot_be_made_or_looked_at_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: File exists"):
        StateFile(tmp_path / "file" / "state.sqlite")
    with pytest.raises(ConfigError, match="xx: File name too long"):
        StateFile(tmp_path / "state.sqlite", tmp_path / ("x" * 300))


async def test_a_fresh_volume_has_a_folder_that_stays_as_it_is(tmp_path: Path) -> None:
    theirs = tmp_path / "state" / "uploads" / "lost+found"
    theirs.mkdir(parents=True)
    async with controller_of(tmp_path):
        pass
    assert theirs.is_dir()


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="found layout 7, expected 1"):
        StateFile(path)


async def test_work_that_fails_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    uploads = Uploads(tmp_path / "uploads", state, bytes_max=1 << 20)

    def half(connection: sqlite3.Connection) -> None:
        with connection:
            connection.execute("INSERT INTO model VALUES ('m', 1)")
            connection.execute("INSERT INTO model VALUES ('m', 2)")

    with pytest.raises(StoreError, match="UNIQUE"):
        await state.run(half)
    assert await uploads.restore() == []
    rows = await state.run(lambda c: c.execute("SELECT * FROM model").fetchall())
    assert rows == []
    await state.close()


def test_the_entries_of_all_folders_that_were_made_outlive_a_loss_of_power(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    folder = tmp_path / "new" / "state"

    async def test() -> None:
        state = StateFile(folder / "state.sqlite")
        await Uploads(folder / "uploads", state, bytes_max=1 << 20).restore()
        await state.close()

    run(test)
    assert {tmp_path, tmp_path / "new", folder} <= {*synced}
    # One that is there may have been made by a process that came no further.
    synced.clear()
    run(test)
    assert {tmp_path / "new", folder} <= {*synced}


def test_the_state_folder_of_a_user_follows_the_xdg_convention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "clockwright"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_state_dir() == Path.home() / ".local" / "state" / "clockwright"


# --- what the scheduler has learned ---------------------------------------------------------------


def predicted(controller: Controller) -> dict[int, int]:
    """Durations of the only model's EXECs, in ns by batch size."""
    (model,) = controller.runtime.statistics().models
    return dict(model.exec_ns)


@pytest.mark.parametrize("drained", [True, False], ids=["drained", "killed"])
async def test_after_a_restart_a_controller_predicts_as_the_one_before(
    tmp_path: Path, drained: bool
) -> None:
    async with cluster(tmp_path) as (controller, control):
        await add(control, "m")
        profile = predicted(controller)
        async with AsyncClient(f"127.0.0.1:{controller.port}") as client:
            for _ in range(12):
                await client.infer("m", np.ones((1, 4), np.float32), slo_ms=60_000)
        before = predicted(controller)
        assert before != profile
        if drained:
            await controller.drain(60, notice_s=0)
        else:
            await controller.learned.write()
    for _ in range(2):
        async with cluster(tmp_path) as (controller, _):
            assert predicted(controller) == before
            await controller.drain(60, notice_s=0)


# --- applications ---------------------------------------------------------------------------------


class Labeller(LoopbackWorker):
    """Its models say a label."""

    @override
    async def ready(self, model_id: str, **changes: object) -> None:
        label = TensorSpec("label", "INT64", ())
        await super().ready(model_id, outputs=(label,), **changes)


async def test_applications_lie_in_the_same_file_and_are_back_with_their_models(
    tmp_path: Path,
) -> None:
    application = pb.Application(name="app", models=["a", "b"])
    async with cluster(tmp_path, Labeller) as (controller, control):
        await add(control, "a")
        await add(control, "b")
        await control.PutApplication(pb.PutApplicationRequest(application=application))
        names = await controller.state.run(
            lambda c: c.execute("SELECT name FROM application").fetchall()
        )
        assert names == [("app",)]
    async with cluster(tmp_path, Labeller) as (controller, control):
        assert states(controller) == {"a": "READY", "b": "READY"}
        (running,) = controller.applications.all
        assert running.application.models == ("a", "b")
