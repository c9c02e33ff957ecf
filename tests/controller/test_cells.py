"""Several controllers of one directory: the choice by its properties, the directory in each store, and fronts that choose."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ConfigError, StoreError
from clockwright.v1 import inference_pb2 as pb
from controller.core import Outlook
from controller.core.events import ModelAdded, ModelWanted
from controller.front.cells.choice import Choices
from controller.front.cells.rows import (
    EXPIRY_NS,
    SLO_CLASSES_NS,
    CellModels,
    CellRow,
    Entry,
    Move,
    decoded,
    encode,
    key_of,
    make_models,
)
from controller.front.remote import cells_backend
from controller.front.remote.remote_backend import RemoteBackend
from controller.process import front_process
from controller.process.cells.publisher import CellPublisher
from controller.process.cells.reader import CellReader
from controller.process.cells_cli import list_cells
from controller.process.config import ControllerConfig, FrontConfig
from controller.process.lease.places import open_directory
from experiments.live.local_server import free_ports
from tests.kit.core_bench import GPU, GPU2, MS, A, B, CoreBench, sends
from tests.kit.double import INFER, first, request
from tests.kit.etcd_server import etcd_server
from tests.kit.front_end import FrontEnd, serving, until

# The type stubs want arguments that are optional.
_aio: Any = grpc.aio

#: A model of 5 ms whose weights are there, and one whose weights take 20 ms.
WARM, COLD = (5_000, 5_000, 0), (5_000, 5_000, 20_000)


def row(address: str, wait_ms: float = 0, **more: Any) -> CellRow:  # noqa: ANN401
    waits = (round(wait_ms * 1000),) * len(SLO_CLASSES_NS)
    return CellRow(address=address, waits_us=waits, num_workers=1, **more)


def knowing(*entries: Entry, now_ns: int = 0) -> Choices:
    choices = Choices()
    for entry in entries:
        choices.take(entry, now_ns)
    return choices


def cell(address: str, wait_ms: float = 0, times: Any = WARM, **more: Any) -> tuple[Entry, Entry]:  # noqa: ANN401
    return row(address, wait_ms, **more), CellModels(address=address, models={"m": times})


def chosen(choices: Choices, slo_ms: int = 100, now_ns: int = 0, **more: Any) -> str | None:  # noqa: ANN401
    found = choices.choose("m", 1, slo_ms * MS, now_ns, **more)
    return None if found is None else found.address


# --- the choice ---------------------------------------------------------------------------------


def test_the_fullest_cell_gets_a_request_that_it_makes_in_time() -> None:
    entries = (*cell("a", 1), *cell("b", 12), *cell("c", 80))
    assert chosen(knowing(*entries)) == "b"
    # To a longer SLO the third is not full.
    assert chosen(knowing(*entries), slo_ms=1000) == "c"


def test_weights_that_are_there_go_before_a_fuller_cell() -> None:
    assert chosen(knowing(*cell("a", 1), *cell("b", 12, COLD)), slo_ms=1000) == "a"


def test_a_cell_that_refused_others_of_late_counts_as_full() -> None:
    entries = (*cell("a", 1), *cell("b", 12, refused=0.2))
    assert chosen(knowing(*entries)) == "a"
    # Where no other is, it is asked all the same: it has the last word.
    assert chosen(knowing(*entries), among=("b",)) == "b"


def test_if_none_is_in_time_the_one_that_ends_soonest_is_named_as_late() -> None:
    found = knowing(*cell("a", 300), *cell("b", 200)).choose("m", 1, 100 * MS, 0)
    assert found is not None
    assert (found.address, found.in_time, found.end_ns) == ("b", False, 205 * MS)


def test_where_all_are_nearly_full_a_model_stays_until_another_cell_ends_much_sooner() -> None:
    choices = knowing(*cell("a", 60), *cell("b", 62))
    assert [chosen(choices) for _ in range(2)] == ["a", "a"]
    # Two were sent there since: the other one is the soonest now, but not by a tenth of the SLO.
    assert chosen(choices, among=("a", "b")) == "a"
    choices.take(row("a", 95, serial=1), 1)
    assert chosen(choices) == "b"


def test_instead_of_one_that_refused_the_soonest_is_chosen_and_none_that_is_late() -> None:
    entries = (*cell("a", 1), *cell("b", 12), *cell("c", 40))
    assert chosen(knowing(*entries), instead_of="b") == "a"
    assert chosen(knowing(*entries), slo_ms=5, instead_of="a") is None


def test_what_was_sent_to_a_cell_counts_until_it_is_in_its_row() -> None:
    choices = knowing(*cell("a"), *cell("b"))
    asked = [chosen(choices) for _ in range(20)]
    # Twice 5 ms fit into a quarter of the SLO behind what was sent before; then the other one has its turn.
    assert set(asked) == {"a", "b"}
    sent_once = knowing(*cell("a"), *cell("b"))
    first_one = chosen(sent_once)
    assert chosen(sent_once) == first_one  # it is the fuller one now


def test_a_row_that_does_not_change_expires_and_one_that_does_serves_on() -> None:
    choices = knowing(*cell("a", serial=1), *cell("b", serial=1))
    choices.take(row("b", serial=2), EXPIRY_NS // 2)
    choices.take(row("a", serial=1), EXPIRY_NS // 2)
    assert chosen(choices, now_ns=EXPIRY_NS) == "b"
    assert choices.addresses(EXPIRY_NS) == ["b"]
    assert chosen(choices, now_ns=2 * EXPIRY_NS) is None


def test_while_the_directory_cannot_be_read_the_last_rows_hold() -> None:
    choices = knowing(*cell("a", serial=1), *cell("b", serial=1))
    choices.take(row("b", serial=2), EXPIRY_NS)  # the other one has expired by then
    for second in range(1, 100):
        choices.hold(second * EXPIRY_NS, second * EXPIRY_NS + EXPIRY_NS)
        # What is sent meanwhile does not add up for ever.
        found = choices.choose("m", 1, 100 * MS, second * EXPIRY_NS + EXPIRY_NS)
        assert found is not None
        assert (found.address, found.in_time) == ("b", True)


def test_a_cell_that_takes_no_requests_is_not_chosen() -> None:
    assert chosen(knowing(*cell("a", open=False), *cell("b"))) == "b"
    assert [each.address for each in knowing(*cell("a", open=False), *cell("b")).live(0)] == ["b"]


def test_a_model_that_moves_is_asked_where_it_goes_as_long_as_that_cell_is_there() -> None:
    choices = knowing(*cell("a", 1), *cell("b", 12), Move(model="m", to="a"))
    assert chosen(choices) == "a"
    assert [*choices.having("m", 0)] == ["a", "b"]
    assert chosen(choices, among=("b",)) == "b"
    choices.forget("move/m")
    assert chosen(choices) == "b"


def test_a_cell_that_says_it_lacks_a_model_is_not_asked_until_it_lists_it_again() -> None:
    choices = knowing(*cell("a"))
    choices.lacks("a", "m")
    assert not choices.serves("a", "m")
    assert chosen(choices) is None
    choices.take(CellModels(address="a", models={"m": WARM}), 0)
    assert chosen(choices) == "a"


def test_a_list_of_models_that_is_gone_holds_for_no_row_that_comes_or_is_there() -> None:
    there, listed = cell("a")
    for entries in ((listed,), (there, listed)):
        choices = knowing(*entries)
        choices.forget("models/a")
        choices.take(row("a", serial=1), 0)
        assert chosen(choices) is None


@pytest.mark.parametrize("address", ["host", "host:", "a:1,b:2", "host:http"])
def test_an_address_of_a_cell_that_nobody_could_reach_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"^cell_address is '{address}', expected HOST:PORT"):
        ControllerConfig(cell_address=address)


def test_steps_of_a_sequence_stay_together_and_sequences_are_spread() -> None:
    choices = knowing(*cell("a"), *cell("b", 5), *cell("c", 10))
    found = {key: {chosen(choices, key=key) for _ in range(3)} for key in map(str, range(60))}
    assert all(len(cells) == 1 for cells in found.values())
    assert {next(iter(cells)) for cells in found.values()} == {"a", "b", "c"}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 400), st.booleans(), st.booleans(), st.floats(0, 1), st.booleans()
        ),
        max_size=6,
    ),
    st.integers(1, 2000),
    st.booleans(),
)
def test_a_choice_has_the_model_is_there_and_is_in_time_if_any_cell_is(
    drawn: list[tuple[int, bool, bool, float, bool]], slo_ms: int, again: bool
) -> None:
    choices, usable = Choices(), {}
    for index, (wait_ms, is_open, has, refused, cold) in enumerate(drawn):
        entries = cell(str(index), wait_ms, COLD if cold else WARM, open=is_open, refused=refused)
        for entry in entries if has else entries[:1]:
            choices.take(entry, 0)
        if is_open and has:
            usable[str(index)] = max(wait_ms, 20 if cold else 0) + 5
    instead_of = "0" if again else ""
    usable.pop(instead_of, None)
    found = choices.choose("m", 1, slo_ms * MS, 0, instead_of=instead_of)
    if found is None:
        assert not usable or (again and min(usable.values()) > slo_ms)
        return
    assert found.address in usable
    if min(usable.values()) <= slo_ms:
        assert found.in_time
        assert usable[found.address] <= slo_ms


# --- rows ---------------------------------------------------------------------------------------


def test_entries_come_back_as_they_were_and_bad_ones_are_named() -> None:
    entries: list[Entry] = [*cell("a:1", 5, serial=3), Move(model="m", to="a:1")]
    data = {key_of(entry): encode(entry) for entry in entries}
    assert decoded(data) == (entries, [])
    deep = b'{"address": "a:1", "more": ' + b"[" * 100_000
    for bad in (
        b"{",
        b"[]",
        b'{"address": ""}',
        b'{"address": "\xff"}',
        deep,
        encode(row("b:1")),
    ):
        found, faults = decoded({**data, "row/a:1": bad})
        assert len(found) == 2
        assert bool(faults) == (
            bad != encode(row("b:1"))
        )  # under another's key it is only left out
    # A later version may have further kinds and fields.
    assert decoded({"later/x": b"?"}) == ([], [])
    more = msgspec.json.encode({**msgspec.to_builtins(row("a:1")), "more": 1})
    assert decoded({"row/a:1": more}) == ([row("a:1")], [])


def test_times_are_rounded_so_that_the_list_changes_seldom_and_never_down() -> None:
    made = make_models("a", {"m": (5_210_000, 1_300_500.0, 0), "n": (1, 1.0, 17)}).models
    assert made["m"][0] in range(5_210, 5_540)
    assert made["m"][2] == 0
    assert made["n"] == (1, 1, 1)


def test_an_outlook_counts_what_is_sent_and_what_is_due_earlier_on_the_lanes_there_are() -> None:
    bench = CoreBench()
    for worker in (GPU, GPU2):
        bench.join(worker)
    for model in (A, B):
        bench.tell(ModelAdded(model_id=model))
        for worker in (GPU, GPU2):
            bench.ready(model, worker, pages=1, load_ms=4, exec_ms={1: 10})
    outlook = bench.scheduler.outlook((50 * MS, 500 * MS), bench.now_ns)
    assert outlook == Outlook(waits_ns=(0, 0), num_workers=2, num_free_pages=outlook.num_free_pages)
    (load,) = sends(bench.tell(ModelWanted(model_id=A)))
    bench.finish(load)
    assert bench.scheduler.model_times()[A] == (10 * MS, 10 * MS, 0)
    assert bench.scheduler.model_times()[B] == (10 * MS, 10 * MS, 4 * MS)
    for _ in range(20):
        bench.request(A, slo_ms=400)
    short, long = bench.scheduler.outlook((50 * MS, 500 * MS), bench.now_ns).waits_ns
    # 20 runs of 10 ms on two lanes; those that wait are due after 50 ms.
    assert short < long
    assert 80 * MS <= long <= 110 * MS


# --- the directory ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with etcd_server() as address:
        yield address


@pytest.fixture(params=["file", "etcd"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file:{tmp_path}/cells"
    return f"etcd://{request.getfixturevalue('etcd')}/{tmp_path.name}"


def test_a_directory_gives_what_was_written_since_and_what_is_gone(setting: str) -> None:
    writer, reader, late = (open_directory(setting) for _ in range(3))
    assert reader.changes() == ({}, frozenset())
    writer.put("row/a:1", b"1")
    writer.put("models/[::1]:1", b"2")
    assert reader.changes() == ({"row/a:1": b"1", "models/[::1]:1": b"2"}, frozenset())
    assert reader.changes() == ({}, frozenset())
    writer.put("row/a:1", b"")
    assert reader.changes() == ({"row/a:1": b""}, frozenset())
    writer.remove("models/[::1]:1")
    writer.remove("models/none")
    writer.put("move/m", b"4")
    assert reader.changes() == ({"move/m": b"4"}, frozenset({"models/[::1]:1"}))
    assert late.changes() == ({"row/a:1": b"", "move/m": b"4"}, frozenset())
    for store in (writer, reader, late):
        store.close()


async def test_who_reads_a_directory_without_a_controller_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = f"file:{tmp_path}/none"
    async with CellReader(open_directory(setting), Choices()).reading():
        await asyncio.sleep(0)
    (said,) = caplog.messages
    assert said.startswith("found no controller in the directory of cells, expected one that was")
    await asyncio.to_thread(list_cells, setting)
    assert capsys.readouterr().out == f"no controller tells of itself in {setting}\n"


async def test_what_is_left_of_controllers_that_are_gone_counts_nowhere_and_is_removed(
    tmp_path: Path,
) -> None:
    setting = f"file:{tmp_path}/cells"
    gone = open_directory(setting)
    for entry in (row("gone:1"), CellModels(address="gone:1", models={"m": (1, 1, 0)})):
        gone.put(key_of(entry), encode(entry))
    choices = Choices()
    async with (
        serving(tmp_path) as front_end,
        CellReader(open_directory(setting), choices).reading(),
    ):
        live = publisher(setting, front_end)
        async with live.publishing():
            await until(lambda: [each.address for each in choices.live(time.monotonic_ns())] != [])
            found = {each.address for each in choices.live(time.monotonic_ns())}
            assert found <= {front_end.controller}
        # A controller that still writes is not taken for one that is gone.
        live = publisher(setting, front_end)
        for serial in range(70):
            changing = row("there:1", serial=serial)
            gone.put(key_of(changing), encode(changing))
            live.tidy()
        assert set(gone.changes()[0]) == {"row/there:1"}


def test_what_is_no_file_in_a_folder_keeps_nobody_from_reading_the_others(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    os.mkfifo(tmp_path / "row%2Fpipe")
    store = open_directory(f"file:{tmp_path}")
    store.put("row/a:1", b"1")
    assert store.changes() == ({"row/a:1": b"1"}, frozenset())


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (f"file:{tmp_path}/file", "etcd://127.0.0.1:1/x"):
        with pytest.raises(StoreError, match="directory"):
            open_directory(place).put("row/a", b"")
    for bad in ("", "file:", "redis://x", "etcd://nowhere", "etcds://a:1"):
        with pytest.raises(ConfigError, match=r"cells|lease"):
            open_directory(bad)


# --- fronts that choose -------------------------------------------------------------------------


@asynccontextmanager
async def two_cells(
    directory: Path, *, tells: bool = True
) -> AsyncIterator[tuple[FrontEnd, FrontEnd, Any]]:
    """Two controllers that tell of themselves, and a channel to a front that chooses between them."""
    setting = f"file:{directory}/cells"
    async with AsyncExitStack() as stack:
        made = []
        for name in ("one", "two"):
            front_end = await stack.enter_async_context(serving(directory / name))
            assert front_end.fronts is not None
            made.append(front_end)
            if tells:
                await stack.enter_async_context(publisher(setting, front_end).publishing())
        config = FrontConfig(controller="", cells=setting, port=0)
        front = await stack.enter_async_context(front_process.serving(config))
        channel = await stack.enter_async_context(_aio.insecure_channel(f"127.0.0.1:{front.port}"))
        await until(lambda: all(each.fronts and each.fronts.num_fronts for each in made))
        yield made[0], made[1], channel


def publisher(setting: str, front_end: FrontEnd) -> CellPublisher:
    assert front_end.fronts is not None
    return CellPublisher(
        open_directory(setting),
        front_end.controller,
        front_end.runtime,
        front_end.catalogue,
        front_end.applications,
        front_end.fronts,
    )


async def answered(channel: Any, number: int) -> float:  # noqa: ANN401
    return first(await channel.unary_unary(INFER)(request(number)))


def num_asked(front_end: FrontEnd) -> int:
    return front_end.runtime.telemetry.total.requests


async def test_a_request_that_one_controller_refuses_is_answered_by_the_other(
    tmp_path: Path,
) -> None:
    async with two_cells(tmp_path) as (one, two, channel):
        assert await answered(channel, 3) == 6
        one.runtime.close_admission()
        assert [await answered(channel, n) for n in range(20)] == [2 * n for n in range(20)]
        two.runtime.close_admission()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await answered(channel, 1)


async def test_what_a_lost_controller_had_is_answered_by_the_other(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (one, two, channel):
        for each in (one, two):
            each.worker.slow.add("double")
        asked = [asyncio.ensure_future(answered(channel, n)) for n in range(30)]
        await until(lambda: one.runtime.num_waiting + two.runtime.num_waiting == 30)
        gone, left = (one, two) if one.runtime.num_waiting else (two, one)
        await gone.hang_up()
        await until(lambda: left.runtime.num_waiting == 30)
        left.worker.release()
        assert await asyncio.gather(*asked) == [2 * n for n in range(30)]


async def test_a_model_that_is_removed_from_one_is_answered_by_the_other(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (one, two, channel):
        await answered(channel, 1)
        one.worker.slow.add("double")
        two.worker.slow.add("double")
        asked = [asyncio.ensure_future(answered(channel, n)) for n in range(10)]
        await until(lambda: one.runtime.num_waiting + two.runtime.num_waiting == 10)
        await one.catalogue.remove("double")
        await until(lambda: two.runtime.num_waiting + one.runtime.num_waiting == 10)
        one.worker.release()
        two.worker.release()
        assert await asyncio.gather(*asked) == [2 * n for n in range(10)]
        # Its list may still have the model: it says that there is none, and the other one is asked.
        assert [await answered(channel, n) for n in range(10)] == [2 * n for n in range(10)]


async def test_calls_that_name_a_model_go_to_a_controller_that_has_it(tmp_path: Path) -> None:
    async with two_cells(tmp_path) as (one, two, channel):
        ready = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        name = b"\x0a\x06double"
        assert await ready(name) == b"\x08\x01"
        await one.catalogue.remove("double")
        await two.catalogue.remove("right")
        limit_s = time.monotonic() + 60
        while await ready(name) != b"\x08\x01" or await ready(b"\x0a\x05right") != b"\x08\x01":
            assert time.monotonic() < limit_s


async def test_a_version_that_no_controller_has_keeps_nobody_from_asking_for_others(
    tmp_path: Path,
) -> None:
    async with two_cells(tmp_path) as (one, two, channel):
        await answered(channel, 1)
        await one.catalogue.remove("double")
        asked = pb.ModelInferRequest.FromString(request(1))
        asked.model_version = "99"
        # Whichever controller is asked last, the client hears of the one that has other versions.
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError, match=r"double.*99"):
                await channel.unary_unary(INFER)(asked.SerializeToString())
        # Whatever has been described is described again, and one of them lacks the model.
        await one.catalogue.remove("right")
        assert [await answered(channel, n) for n in range(10)] == [2 * n for n in range(10)]
        # Another controller may have such a version later.
        await two.catalogue.remove("right")
        with pytest.raises(grpc.aio.AioRpcError, match=r"double.*99"):
            await channel.unary_unary(INFER)(asked.SerializeToString())


@asynccontextmanager
async def with_an_absent_cell(
    directory: Path, port: int = 0
) -> AsyncIterator[tuple[int, asyncio.Task[None], Any]]:
    """A controller without the model `double`, and the rows of another one that has it and is not there.

    Gives the port where that one is expected, the task that writes its rows, and a channel to a front.
    """
    setting = f"file:{directory}/cells"
    port = port or free_ports(1)[0]
    store = open_directory(setting)

    async def tell() -> None:
        for serial in count():
            for entry in (
                CellModels(address=f"127.0.0.1:{port}", models={"double": WARM}),
                row(f"127.0.0.1:{port}", serial=serial),
            ):
                store.put(key_of(entry), encode(entry))
            await asyncio.sleep(0.05)

    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(serving(directory / "other"))
        await other.catalogue.remove("double")
        await stack.enter_async_context(publisher(setting, other).publishing())
        telling = asyncio.create_task(tell())
        stack.callback(telling.cancel)
        config = FrontConfig(controller="", cells=setting, port=0)
        front = await stack.enter_async_context(front_process.serving(config))
        channel = await stack.enter_async_context(_aio.insecure_channel(f"127.0.0.1:{front.port}"))
        backend, absent = front.backend, f"127.0.0.1:{port}"
        assert isinstance(backend, cells_backend.CellsBackend)
        # A row counts with the second one, however late it is read.
        await until(lambda: absent in backend._cells and backend._choices.serves(absent, "double"))
        yield port, telling, channel


async def test_a_request_waits_while_the_only_controller_that_has_its_model_is_away(
    tmp_path: Path,
) -> None:
    async with with_an_absent_cell(tmp_path) as (port, _, channel):
        asked = asyncio.ensure_future(answered(channel, 3))
        await channel.unary_unary(INFER)(request(1, model="right"))
        async with serving(tmp_path / "one", port=port):
            assert await asked == 6


async def test_what_waits_for_a_controller_that_is_given_up_is_told_that_there_is_no_such_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_an_absent_cell(tmp_path) as (_, telling, channel):
        asked = asyncio.ensure_future(answered(channel, 3))
        await channel.unary_unary(INFER)(request(1, model="right"))
        assert not asked.done()
        telling.cancel()
        monkeypatch.setattr(cells_backend, "_FORGOTTEN_NS", 0)
        with pytest.raises(grpc.aio.AioRpcError, match="double"):
            await asked


async def test_a_controller_that_takes_no_such_front_keeps_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    usual = RemoteBackend.run

    async def run(backend: RemoteBackend) -> None:
        if isinstance(backend, cells_backend._Cell) and backend.address.endswith(f":{port}"):
            raise ConfigError("found version 2 of the protocol, expected version 1")
        await usual(backend)

    monkeypatch.setattr(RemoteBackend, "run", run)
    async with with_an_absent_cell(tmp_path, port) as (_, _, channel):
        # It writes its rows and lists the model all the same.
        with pytest.raises(grpc.aio.AioRpcError, match="double"):
            await answered(channel, 3)


async def test_a_front_is_ready_when_all_controllers_are_there_that_have_not_gone(
    tmp_path: Path,
) -> None:
    setting = f"file:{tmp_path}/cells"
    config = FrontConfig(controller="", cells=setting, port=0)
    async with (
        serving(tmp_path / "one") as one,
        serving(tmp_path / "two") as two,
        publisher(setting, two).publishing(),
        AsyncExitStack() as stack,
    ):
        store = open_directory(setting)
        store.put(f"row/{one.controller}", encode(row(one.controller)))
        # A clock that is slow, so that no row expires on a busy machine.
        starting = asyncio.ensure_future(
            stack.enter_async_context(
                front_process.serving(config, clock=lambda: time.monotonic_ns() // 100)
            )
        )
        await until(lambda: two.fronts is not None and two.fronts.num_fronts == 1)
        assert not starting.done()
        async with publisher(setting, one).publishing():
            await starting
            assert one.fronts is not None
            assert one.fronts.num_fronts == 1


async def test_a_controller_tells_that_it_is_about_to_go_and_takes_its_entries_along(
    tmp_path: Path,
) -> None:
    setting = f"file:{tmp_path}/cells"
    store = open_directory(setting)
    async with serving(tmp_path) as front_end:
        async with publisher(setting, front_end).publishing():
            entries: list[Entry] = []

            def told() -> list[Entry]:
                entries.extend(decoded(store.changes()[0])[0])
                return entries

            await until(lambda: len(told()) >= 2)
            listed = next(entry for entry in entries if isinstance(entry, CellModels))
            assert "double" in listed.models
            front_end.runtime.draining = True
            await until(
                lambda: any(isinstance(entry, CellRow) and not entry.open for entry in told())
            )
        _, gone = store.changes()
        assert gone == {f"row/{front_end.controller}", f"models/{front_end.controller}"}
