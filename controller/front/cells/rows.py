"""What a controller says of itself in the directory: a row, ten times a second, and its models, when they change.

Rows say nothing of the time, because no two clocks are compared: a row that has not changed for `EXPIRY_NS` of the
reader's clock has expired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from clockwright.errors import Refusal, StoreError
from clockwright.units import NAME_CHARS_MAX, NS_PER_MS, NS_PER_S, NS_PER_US
from controller.core.statistics import ModelTimes, Outlook

#: The SLO classes of a row. A request belongs to the first that is not shorter than its SLO, or to the last.
SLO_CLASSES_NS: Final = tuple(ms * NS_PER_MS for ms in (10, 25, 50, 100, 250, 500, 1000, 2500))
#: A controller writes its row this often, and readers read as often.
ROW_INTERVAL_NS: Final = 100 * NS_PER_MS
#: A row that does not change for this long of the reader's clock counts no more.
EXPIRY_NS: Final = NS_PER_S
#: Models that one controller tells of; further ones are left out.
MODELS_MAX: Final = 20_000
#: Refusals that another cell may not give: it has other workers.
HELPED_ELSEWHERE: Final = frozenset(
    (
        Refusal.OVERLOADED,
        Refusal.COLD,
        Refusal.NO_WORKER,
        Refusal.WORKER_LOST,
        Refusal.LOADING,
        Refusal.DRAINING,
        Refusal.MODEL_REMOVED,
    )
)

_Micros = Annotated[int, Meta(ge=0, lt=1 << 50)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 50)]
_Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
#: Times of one row of a model: alone, in the best batch, and of the load of its weights (0: they are resident).
_Times = tuple[_Micros, _Micros, _Micros]


class CellRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How a cell does at the moment."""

    #: HOST:PORT of its controller, which is also the row's key.
    address: Annotated[str, Meta(min_length=1, max_length=300)]
    #: Each row has one more than the row before.
    serial: _Count = 0
    #: It takes requests.
    open: bool = True
    #: By SLO class: when a lane is free of what is sent and of what is due earlier, from now.
    waits_us: Annotated[tuple[_Micros, ...], Meta(max_length=32)] = ()
    #: Share of the requests of the last second that were refused for a reason that another cell may not have.
    refused: Annotated[float, Meta(ge=0, le=1)] = 0.0
    num_workers: _Count = 0
    free_pages: _Count = 0
    #: Readers among which the cell's requests may come from: front processes, at least one.
    num_readers: Annotated[int, Meta(ge=1, lt=1 << 32)] = 1

    def wait_ns(self, slo_ns: int) -> int:
        """When a lane could begin a request with such an SLO, from now."""
        for class_ns, wait_us in zip(SLO_CLASSES_NS, self.waits_us, strict=False):
            if slo_ns <= class_ns:
                return wait_us * NS_PER_US
        return self.waits_us[-1] * NS_PER_US if self.waits_us else 0


class CellModels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The models and applications that a cell can be asked for."""

    address: Annotated[str, Meta(min_length=1, max_length=300)]
    models: Annotated[dict[_Name, _Times], Meta(max_length=MODELS_MAX)] = {}


class Move(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A model is about to be served by one cell only (`clockwright cells move`)."""

    model: _Name
    to: Annotated[str, Meta(min_length=1, max_length=300)]


def make_row(
    address: str,
    outlook: Outlook,
    *,
    serial: int = 0,
    is_open: bool = True,
    refused: float = 0.0,
    num_readers: int = 1,
) -> CellRow:
    """Make a row of what the scheduler says, in the order of `SLO_CLASSES_NS`."""
    return CellRow(
        address=address,
        serial=serial,
        open=is_open,
        waits_us=tuple([wait_ns // NS_PER_US for wait_ns in outlook.waits_ns]),
        refused=refused,
        num_workers=outlook.num_workers,
        free_pages=outlook.num_free_pages,
        num_readers=max(num_readers, 1),
    )


def make_models(address: str, times: Mapping[str, ModelTimes]) -> CellModels:
    """Make the list of models; times are rounded, so that it changes seldom."""
    kept = list(times.items())[:MODELS_MAX]
    return CellModels(
        address=address,
        models={
            name: (_rounded(exec_ns), _rounded(int(row_ns)), _rounded(load_ns))
            for name, (exec_ns, row_ns, load_ns) in kept
        },
    )


def _rounded(time_ns: int) -> int:
    """Microseconds, to a sixteenth of the time at worst."""
    time_us = -(-time_ns // NS_PER_US)
    step = 1 << max(time_us.bit_length() - 5, 0)
    return -(-time_us // step) * step


Entry = CellRow | CellModels | Move
_KINDS: Final[Mapping[str, type[Entry]]] = {"row": CellRow, "models": CellModels, "move": Move}


def key_of(entry: Entry) -> str:
    """The key of an entry in the directory: the kind, and what it is of."""
    if isinstance(entry, Move):
        return f"move/{entry.model}"
    return f"{'row' if isinstance(entry, CellRow) else 'models'}/{entry.address}"


def encode(entry: Entry) -> bytes:
    """Make an entry's bytes: JSON, which people can read."""
    return msgspec.json.encode(entry)


def decode(key: str, data: bytes) -> Entry | None:
    """Read an entry. Returns None if its kind is none that is known here: a later version's.

    Raises StoreError if the bytes are none of that kind.
    """
    kind = _KINDS.get(key.partition("/")[0])
    if kind is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    # msgspec tells of text that is no UTF-8, and of brackets in brackets, in Python's own errors.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"directory of cells, {key}: found {data[:80]!r}: {error}") from None


def decoded(entries: Mapping[str, bytes]) -> tuple[Sequence[Entry], Sequence[str]]:
    """Read several entries. Returns those that are well-formed, and what is wrong with the others."""
    found: list[Entry] = []
    faults: list[str] = []
    for key, data in entries.items():
        try:
            entry = decode(key, data)
        except StoreError as error:
            faults.append(str(error))
        else:
            if entry is not None and key_of(entry) == key:
                found.append(entry)
    return found, faults
