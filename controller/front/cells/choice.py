"""Which cell gets a request: the fullest that still makes the deadline.

A cell is predicted to end a request when its lanes are free of what is due earlier, the weights are there, and the row
is run. Rows are up to two tenths of a second old. So a reader adds what it has sent to a cell since, and counts it as
often as there are readers. A prediction that is wrong costs a second attempt (`Choices.again`), never the promise: the
cell that is chosen judges each request itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from clockwright.units import NS_PER_US
from controller.front.cells.rows import EXPIRY_NS, MODELS_MAX, CellModels, CellRow, Entry, Move

# A cell fits if a request is predicted to end in this part of its time: rows are old, and a controller that is nearly full
# has to choose whom it serves.
_SHARE_OF_SLO: Final = 0.25
# A model stays at a nearly full cell that ends its requests so much of their time later than another at most. In the
# simulator with four cells at 1.3 times their load 89 % are in time so, 83 % without.
_STAYS_FOR: Final = 0.1
# A cell without a new row is forgotten when so much later another comes.
_FORGOTTEN_NS: Final = 60 * EXPIRY_NS
# A cell that refused more than this of late counts as full, whatever it predicts.
_REFUSED_MOST: Final = 0.01


@dataclass(frozen=True, slots=True)
class Chosen:
    """A cell, and whether it is predicted to make the deadline."""

    address: str
    in_time: bool
    #: From now to the predicted end.
    end_ns: int = 0


@dataclass(slots=True)
class _Cell:
    """What a reader knows of a cell."""

    row: CellRow
    #: When that row was read.
    read_ns: int
    models: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    #: Work that was sent there and is in no row yet, in ns of its lanes.
    sent_ns: int = 0


class Choices:
    """A reader's view of the directory, and its choices."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}
        #: Lists of models whose cell has no row yet.
        self._early: dict[str, CellModels] = {}
        self._moves: dict[str, str] = {}
        #: The cell that a model's last request went to when all were nearly full.
        self._last: dict[str, str] = {}

    def take(self, entry: Entry, now_ns: int) -> None:
        """Take in an entry of the directory, as it was read now."""
        if isinstance(entry, Move):
            self._moves[entry.model] = entry.to
            return
        cell = self._cells.get(entry.address)
        if isinstance(entry, CellModels):
            if cell is None:
                self._early[entry.address] = entry
            else:
                cell.models = entry.models
        elif cell is None:
            for address, other in list(self._cells.items()):
                if now_ns - other.read_ns > _FORGOTTEN_NS:
                    del self._cells[address]
            cell = self._cells[entry.address] = _Cell(entry, now_ns)
            if (early := self._early.pop(entry.address, None)) is not None:
                cell.models = early.models
        elif entry != cell.row:
            cell.row, cell.read_ns = entry, now_ns
            # Some of it is in that row, and some was sent after it was made.
            cell.sent_ns //= 2

    def hold(self, since_ns: int, now_ns: int) -> None:
        """The directory could not be read between two times: the rows that had not expired still count."""
        for cell in self._cells.values():
            if since_ns - cell.read_ns < EXPIRY_NS:
                cell.read_ns = now_ns
                cell.sent_ns //= 2

    def forget(self, key: str) -> None:
        """An entry of the directory is gone."""
        kind, _, name = key.partition("/")
        if kind == "move":
            self._moves.pop(name, None)
        elif kind == "row":
            self._cells.pop(name, None)
        elif kind == "models":
            self._early.pop(name, None)
            if name in self._cells:
                self._cells[name].models = {}

    def live(self, now_ns: int) -> list[CellRow]:
        """The rows that have not expired, of cells that take requests."""
        return [
            cell.row
            for cell in self._cells.values()
            if cell.row.open and now_ns - cell.read_ns < EXPIRY_NS
        ]

    def addresses(self, now_ns: int) -> list[str]:
        """The cells whose rows have not expired, whether they take requests or not."""
        return [a for a, cell in self._cells.items() if now_ns - cell.read_ns < EXPIRY_NS]

    def serves(self, address: str, model: str) -> bool:
        """Whether a cell has a model, as it said last."""
        cell = self._cells.get(address)
        return cell is not None and model in cell.models

    def having(self, model: str, now_ns: int) -> Iterator[str]:
        """The cells that have a model, those first where its requests may go, then those whose row has expired."""
        first = self._candidates(model, now_ns, None, "")
        yield from first
        for address in self._cells:
            if address not in first and self.serves(address, model):
                yield address

    def lacks(self, address: str, model: str) -> None:
        """A cell has said that it does not have a model, whatever its list says; until the next list."""
        cell = self._cells.get(address)
        if cell is not None and model in cell.models:
            cell.models = {name: times for name, times in cell.models.items() if name != model}

    def forget_sent(self, address: str) -> None:
        """All that was sent to a cell is in its row."""
        self._cells[address].sent_ns = 0

    def choose(
        self,
        model: str,
        rows: int,
        left_ns: int,
        now_ns: int,
        *,
        among: Collection[str] | None = None,
        instead_of: str = "",
        key: str = "",
    ) -> Chosen | None:
        """Choose a cell for a request.

        Args:
            model: its name, or an application's.
            rows: of the request.
            left_ns: time until its deadline.
            now_ns: the present, on the clock of `take`.
            among: addresses of cells that are there for it; None: all.
            instead_of: a cell that refused it. Then the one that ends soonest is chosen, if that is in time.
            key: what has to stay together, such as a sequence: equal ones get the same cell while the cells are the same.

        Returns:
            None: no cell has the model, or none is in time instead of another.
        """
        candidates = self._candidates(model, now_ns, among, instead_of)
        if not candidates:
            return None
        if key:
            whole = f"{model}/{key}/"
            address = max(
                candidates, key=lambda a: blake2b((whole + a).encode(), digest_size=8).digest()
            )
            return Chosen(address, in_time=True)
        best: tuple[bool, int, str] | None = None
        ends_ns: dict[str, int] = {}
        for address, cell in candidates.items():
            exec_us, row_us, load_us = cell.models[model]
            row = cell.row
            sent_ns = cell.sent_ns * row.num_readers // max(row.num_workers, 1)
            busy_ns = row.wait_ns(left_ns) + sent_ns
            run_ns = max(exec_us, rows * row_us) * NS_PER_US
            ends_ns[address] = end_ns = max(busy_ns, load_us * NS_PER_US) + run_ns
            is_idle = not busy_ns and not load_us and run_ns <= left_ns
            fits = is_idle or end_ns <= left_ns * _SHARE_OF_SLO
            # Weights that are there go before weights that have to be loaded, and then the fullest.
            rank = (not load_us, busy_ns, address)
            if fits and row.refused <= _REFUSED_MOST and (best is None or rank > best):
                best = rank
        soonest = min(ends_ns, key=ends_ns.__getitem__)
        if instead_of:
            if ends_ns[soonest] > left_ns:
                return None
            address = soonest
        elif best is not None:
            address = best[2]
        else:
            # All are nearly full. A model whose requests stay together has larger batches.
            address = self._last.get(model, "")
            if address not in ends_ns or (
                ends_ns[address] > ends_ns[soonest] + left_ns * _STAYS_FOR
            ):
                address = soonest
            if len(self._last) >= MODELS_MAX:
                self._last.clear()
            self._last[model] = address
        cell = self._cells[address]
        cell.sent_ns += cell.models[model][1] * NS_PER_US * rows
        end_ns = ends_ns[address]
        return Chosen(address, best is not None or end_ns <= left_ns, end_ns)

    def _candidates(
        self, model: str, now_ns: int, among: Collection[str] | None, instead_of: str
    ) -> dict[str, _Cell]:
        found = {
            address: cell
            for address, cell in self._cells.items()
            if model in cell.models
            and cell.row.open
            and now_ns - cell.read_ns < EXPIRY_NS
            and address != instead_of
            and (among is None or address in among)
        }
        to = self._moves.get(model)
        return {to: found[to]} if to in found else found
