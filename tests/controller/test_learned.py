"""What the scheduler has learned is in the state file, bounded and checked, and the next controller begins with it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from clockwright.units import ArchitectureId, GpuKind, WorkerId
from controller.core import Scheduler
from controller.core.events import LearnedLink, LearnedStart, LearnedTimes, Recalled
from controller.models import learned as learned_module
from controller.models.learned import LINKS_MAX, TIMES_MAX, Learned
from controller.models.state_file import StateFile
from controller.runtime import Runtime
from controller.telemetry.tables import Telemetry

TIMES = ["k", 0, "a", [7], {"1": [5, 6], "2": [8]}]
LINK = ["w", 3_000_000, 8.0, 0, 0.5]


def runtime() -> Runtime:
    return Runtime(Scheduler(), Telemetry())


def times(number: int = 0) -> LearnedTimes:
    return LearnedTimes(
        gpu_kind=GpuKind("k"),
        clock_mhz=0,
        architecture_id=ArchitectureId(f"a{number}"),
        load_ns=[7, 8],
        exec_ns={1: [5], 16: [9, 10]},
    )


def link(number: int = 0) -> LearnedLink:
    return LearnedLink(
        worker_id=WorkerId(f"w{number}"),
        out_length_ns=3,
        out_ns_per_byte=8.5,
        back_length_ns=4,
        back_ns_per_byte=0.0,
    )


def has(runtime: Runtime) -> Recalled:
    return Recalled(
        times=list(filter(None, runtime.learned_times())),
        links=runtime.learned_links(),
        starts=runtime.learned_starts(),
    )


async def put(state: StateFile, record: object) -> None:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()

    def write(connection: Any) -> None:  # noqa: ANN401
        with connection:
            connection.execute("INSERT INTO learned VALUES (?)", (data,))

    await state.run(write)


async def rows(state: StateFile) -> dict[str, list[Any]]:
    found = await state.run(lambda c: c.execute("SELECT record FROM learned").fetchone())
    record: dict[str, list[Any]] = json.loads(found[0])
    return record


async def test_starts_and_the_number_of_workers_wanted_come_back(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    one, other = runtime(), runtime()
    starts = [
        LearnedStart(
            gpu_kind=GpuKind("k"),
            wanted=3,
            fullness=1.25,
            starts_ns=[10**9, 30 * 10**9],
            season=[1.5, 0.25, *[1.0] * 58],
        )
    ]
    one.tell(Recalled(starts=starts))
    await Learned(one, state).write()
    await Learned(other, state).recall()
    assert has(other).starts == starts
    (kind,) = other.cluster_load().kinds
    assert (kind.wanted, kind.start_ns, kind.num_workers) == (3, 30 * 10**9, 0)
    # What is recalled later of durations changes nothing of it.
    other.tell(Recalled(times=[times()]))
    assert has(other).starts == starts
    await state.close()


async def test_a_minute_of_the_hour_stays_that_of_the_world_on_another_machine(
    tmp_path: Path,
) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    one = runtime()
    season = [5.0, 0.2, *[1.0] * 58]
    start = LearnedStart(gpu_kind=GpuKind("k"), wanted=1, fullness=1.0, season=season)
    one.tell(Recalled(starts=[start]))
    await Learned(one, state).write()
    # Its clock began 58 minutes earlier.
    minutes_ns = 58 * 60 * 10**9
    other = Runtime(Scheduler(), Telemetry(), clock=lambda: time.monotonic_ns() + minutes_ns)
    await Learned(other, state).recall()
    (found,) = has(other).starts
    assert found.season == [*[1.0] * 58, 5.0, 0.2]
    await state.close()


@pytest.mark.parametrize("season", [[], [2.0] * 59])
async def test_a_start_without_a_whole_season_is_of_use_without_it(
    tmp_path: Path, season: list[float]
) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    started: list[object] = ["k", 3, 1.25, []]
    rest = [season] if season else []
    await put(state, {"layout": 1, "times": [], "links": [], "starts": [[*started, *rest]]})
    served = runtime()
    await Learned(served, state).recall()
    (found,) = has(served).starts
    assert (found.wanted, found.season) == (3, [1.0] * 60)
    await state.close()


async def test_durations_and_links_come_back_as_they_were(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    one, other = runtime(), runtime()
    one.tell(Recalled(times=[times(1), times(2)], links=[link(1)]))
    await Learned(one, state).write()
    await Learned(other, state).recall()
    assert has(other) == Recalled(times=[times(1), times(2)], links=[link(1)], starts=[])
    await state.close()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\xfe",
        b'{"layout": 1, "times": [["k", 0, "a", 7, {"1": 5',
        b'{"layout": 1, "times": [["\xff", 0, "a", [7], {"1": [5]}]], "links": []}',
        {},
        {"layout": 2, "times": [TIMES], "links": []},
        {"layout": 1, "times": [TIMES], "links": [], "more": 1},
        {"layout": 1, "times": [TIMES] * (TIMES_MAX + 1), "links": []},
        {"layout": 1, "times": [], "links": [LINK] * (LINKS_MAX + 1)},
        *(
            {
                "layout": 1,
                "times": [TIMES, [*TIMES[:place], value, *TIMES[place + 1 :]]],
                "links": [],
            }
            for place, value in (
                (0, ""),
                (0, "k" * 10_000),
                (0, 1),
                (1, -1),
                (3, 7),
                (3, []),
                (3, [-1]),
                (3, [1 << 62]),
                (3, [1.5]),
                (3, [1] * 11),
                (4, {}),
                (4, {"0": [5]}),
                (4, {"1": [5, None]}),
                (4, {"one": [5]}),
                (4, {str(size): [5] for size in range(1, 10_000)}),
            )
        ),
        *(
            {"layout": 1, "times": [], "links": [[*LINK[:place], value, *LINK[place + 1 :]]]}
            for place, value in ((0, ""), (1, -1), (1, 1 << 62), (2, -0.5), (4, 1e300), (4, "8"))
        ),
        *(
            {"layout": 1, "times": [], "links": [], "starts": [start]}
            for start in (
                ["", 1, 1, []],
                ["k", -1, 1, []],
                ["k", 1, -1, []],
                ["k", 1, 1, [-1]],
                ["k", 1, 1, [1] * 21],
                ["k", 1, 1],
                ["k", 1, 1, [], [1.0] * 61],
                ["k", 1, 1, [], [0.1] * 60],
                ["k", 1, 1, [], [5.1] * 60],
                ["k", 1, 1, [], [None] * 60],
                ["k", 1, 1, [], "1"],
            )
        ),
    ],
)
async def test_a_record_that_is_damaged_or_old_is_said_and_left_out(
    tmp_path: Path, record: object, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    await put(state, record)
    served = runtime()
    learned = Learned(served, state)
    await learned.recall()
    assert has(served) == Recalled(times=[], links=[], starts=[])
    (warning,) = caplog.messages
    assert warning.startswith(f"state {state.name}: what was learned of durations and links is ")
    assert warning.endswith("; starting without it")
    # The next one is in its place.
    served.tell(Recalled(times=[times()]))
    await learned.write()
    again = runtime()
    await Learned(again, state).recall()
    assert has(again).times == [times()]
    await state.close()


async def test_a_disk_that_does_not_take_it_is_said_once_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    served = runtime()
    served.tell(Recalled(times=[times()]))
    learned = Learned(served, state)
    await state.run(lambda c: c.execute("PRAGMA query_only = ON").fetchone())
    for _ in range(3):
        await learned.write()
    (warning,) = caplog.messages
    assert "is not kept" in warning
    await state.run(lambda c: c.execute("PRAGMA query_only = OFF").fetchone())
    await learned.write()
    assert len((await rows(state))["times"]) == 1
    await state.close()


async def test_a_table_that_cannot_be_read_keeps_no_controller_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    await state.run(lambda c: c.execute("DROP TABLE learned"))
    learned = Learned(runtime(), state)
    await learned.recall()
    await learned.write()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    await state.close()


async def test_a_bounded_number_of_rows_is_kept_and_others_get_their_turn_meanwhile(
    tmp_path: Path,
) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    served = runtime()
    served.tell(
        Recalled(
            times=[times(number) for number in range(3 * TIMES_MAX)],
            links=[link(number) for number in range(3 * LINKS_MAX)],
        )
    )
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await Learned(served, state).write()
    counting.cancel()
    assert turns >= 10
    found = await rows(state)
    assert (len(found["times"]), len(found["links"])) == (TIMES_MAX, LINKS_MAX)
    await state.close()


async def test_what_the_file_has_already_is_not_written_again(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.sqlite")
    served = runtime()
    served.tell(Recalled(times=[times()]))
    learned = Learned(served, state)
    for _ in range(3):
        await learned.write()
    assert await state.run(lambda c: c.total_changes) == 1
    served.tell(Recalled(times=[times(), times(1)]))
    await learned.write()
    assert await state.run(lambda c: c.total_changes) == 3
    await state.close()


async def test_models_and_kinds_that_no_worker_brings_are_forgotten_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_module, "_INTERVAL_S", 0)
    monkeypatch.setattr(learned_module, "_UNUSED_INTERVALS", 3)
    state = StateFile(tmp_path / "state.sqlite")
    served = runtime()
    served.tell(Recalled(times=[times()], links=[link()]))
    learned = Learned(served, state)
    await learned.write()
    async with learned.keeping():
        while (found := await rows(state))["times"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert found["links"] == []
    await state.close()
