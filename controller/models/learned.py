"""What the scheduler has learned, kept in the state file: durations, links to workers, their starts, and the hour's course.

Without it a controller that starts again plans with workers' profiles, and is late, or refuses requests in vain, where
those are wrong. With it the first minute is predicted as the last one was. Like a profile it counts as unconfirmed
until something is measured.

It is written at a bounded rate and when the controller has drained, so a controller that is killed loses a few
seconds of it. A record that cannot be read is left out.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from clockwright.errors import StoreError
from clockwright.foreign import TEXT_CHARS_MAX
from clockwright.units import DURATION_NS_MAX
from controller.core.capacity import MOST_FACTOR, SLOTS, START_NS_MAX, STARTS_MAX, CapacityConfig
from controller.core.estimator import WINDOW_SIZE
from controller.core.events import LearnedLink, LearnedStart, LearnedTimes, Recalled
from controller.models.state_file import StateFile
from controller.runtime import Runtime

log = logging.getLogger(__name__)

# Number of the record's layout. A record with another number is left out.
_LAYOUT: Final = 1

_INTERVAL_S = 10.0

# What no worker has brought after so many intervals is forgotten: its model, or its kind of worker, is gone.
_UNUSED_INTERVALS = 60

#: Rows of durations, and of links, that are kept at most.
TIMES_MAX: Final = 1000
LINKS_MAX: Final = 1024
#: Kinds of workers whose starts are kept.
KINDS_MAX: Final = 64

# More workers than a controller takes, and more than one of them does.
_WANTED_MAX, _FULLNESS_MAX = 10_000, 100

# More batch sizes than any model has.
_SIZES_MAX = 1000

# Rows that are looked at before requests get their turn.
_SLICE = 64

_Text = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARS_MAX)]
_Durations = Annotated[
    list[Annotated[int, Meta(ge=0, le=DURATION_NS_MAX)]],
    Meta(min_length=1, max_length=WINDOW_SIZE),
]
_Length = Annotated[int, Meta(ge=0, le=DURATION_NS_MAX)]
_PerByte = Annotated[float, Meta(ge=0, le=DURATION_NS_MAX)]
_Size = Annotated[int, Meta(ge=1)]


# Their fields are those of `LearnedTimes`, `LearnedLink` and `LearnedStart`, by the same names.
class _Times(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    gpu_kind: _Text
    clock_mhz: Annotated[int, Meta(ge=0)]
    architecture_id: _Text
    load_ns: _Durations
    exec_ns: Annotated[dict[_Size, _Durations], Meta(min_length=1, max_length=_SIZES_MAX)]


class _Link(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    worker_id: _Text
    out_length_ns: _Length
    out_ns_per_byte: _PerByte
    back_length_ns: _Length
    back_ns_per_byte: _PerByte


class _Start(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    gpu_kind: _Text
    wanted: Annotated[int, Meta(ge=0, le=_WANTED_MAX)]
    fullness: Annotated[float, Meta(ge=0, le=_FULLNESS_MAX)]
    starts_ns: Annotated[
        list[Annotated[int, Meta(ge=0, le=START_NS_MAX)]], Meta(max_length=STARTS_MAX)
    ]
    #: By minutes of the world's clock: a controller's begins with its machine.
    season: Annotated[
        list[Annotated[float, Meta(ge=1 / MOST_FACTOR, le=MOST_FACTOR)]],
        Meta(max_length=SLOTS),
    ] = []


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    layout: Literal[1]
    times: Annotated[list[_Times], Meta(max_length=TIMES_MAX)]
    links: Annotated[list[_Link], Meta(max_length=LINKS_MAX)]
    starts: Annotated[list[_Start], Meta(max_length=KINDS_MAX)] = []


class Learned:
    """Keeps what a runtime's scheduler has learned, and brings it back."""

    def __init__(self, runtime: Runtime, state: StateFile) -> None:
        """Keep nothing yet."""
        self._runtime = runtime
        self._state = state
        self._writing: asyncio.Task[None] | None = None
        #: What the file has; only its thread uses this.
        self._written = b""
        #: The disk did not take it, and the log says so.
        self._fails = False

    async def recall(self) -> None:
        """Tell the scheduler what an earlier controller has kept; call it before workers come."""
        try:
            found = await self._state.run(_read)
            if found is not None:
                self._runtime.tell(_decode(found, self._slots_late()))
        except (StoreError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            log.warning(
                "state %s: what was learned of durations and links is damaged, or of another version: %s;"
                " starting without it",
                self._state.name,
                error,
            )

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Write what is learned, again and again."""
        self._writing = asyncio.create_task(self._keep_writing())
        try:
            yield
        finally:
            self._writing.cancel()

    async def finish(self) -> None:
        """Write what was learned, for the last time: workers that leave take what is known of their links along."""
        if self._writing is not None:
            self._writing.cancel()
        await self.write()

    async def write(self) -> None:
        """Write what is learned by now, unless the file has it already; what fails is tried again next time."""
        if self._state.path is None:
            return
        times: list[LearnedTimes] = []
        for number, row in enumerate(self._runtime.learned_times()):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            if row is not None:
                times.append(row)
            if len(times) == TIMES_MAX:
                break
        links = self._runtime.learned_links()[:LINKS_MAX]
        starts = self._runtime.learned_starts()[:KINDS_MAX]
        try:
            await self._state.run(partial(self._write, times, links, starts))
            self._fails = False
        except StoreError as error:
            if not self._fails:
                log.warning("%s; what is learned of durations and links is not kept", error)
            self._fails = True

    async def _keep_writing(self) -> None:
        for interval in count(1):
            await asyncio.sleep(_INTERVAL_S)
            if interval == _UNUSED_INTERVALS:
                self._runtime.tell(Recalled())
            await self.write()

    def _slots_late(self) -> int:
        """By how many slots of the season the runtime's clock is behind the world's."""
        slot_ns = CapacityConfig().period_ns // SLOTS
        return round((time.time_ns() - self._runtime.clock()) / slot_ns)

    def _write(
        self,
        times: Sequence[LearnedTimes],
        links: Sequence[LearnedLink],
        starts: Sequence[LearnedStart],
        connection: sqlite3.Connection,
    ) -> None:
        record = _encode(times, links, starts, self._slots_late())
        if record == self._written:
            return
        with connection:
            connection.execute("DELETE FROM learned")
            connection.execute("INSERT INTO learned VALUES (?)", (record,))
        self._written = record


def _read(connection: sqlite3.Connection) -> bytes | None:
    found = connection.execute("SELECT CAST(record AS BLOB) FROM learned").fetchone()
    return None if found is None else bytes(found[0])


def _encode(
    times: Sequence[LearnedTimes],
    links: Sequence[LearnedLink],
    starts: Sequence[LearnedStart],
    slots_late: int,
) -> bytes:
    return msgspec.json.encode(
        _Record(
            _LAYOUT,
            [_Times(*map(partial(getattr, each), _Times.__struct_fields__)) for each in times],
            [_Link(*map(partial(getattr, each), _Link.__struct_fields__)) for each in links],
            [
                _Start(
                    each.gpu_kind,
                    min(each.wanted, _WANTED_MAX),
                    each.fullness,
                    list(each.starts_ns),
                    _turned([round(factor, 3) for factor in each.season], slots_late),
                )
                for each in starts
            ],
        )
    )


def _turned(season: list[float], by: int) -> list[float]:
    place = -by % SLOTS
    return season[place:] + season[:place]


def _decode(data: bytes, slots_late: int) -> Recalled:
    """Read a record. Raises UnicodeDecodeError, msgspec.MsgspecError if it is not one that `_encode` has made."""
    record = msgspec.json.decode(data, type=_Record)
    for each in record.times:
        each.exec_ns = dict(sorted(each.exec_ns.items()))
    for start in record.starts:
        start.season = _turned(start.season, -slots_late)
    return Recalled(
        times=[LearnedTimes(**msgspec.structs.asdict(each)) for each in record.times],
        links=[LearnedLink(**msgspec.structs.asdict(each)) for each in record.links],
        starts=[LearnedStart(**msgspec.structs.asdict(each)) for each in record.starts],
    )
