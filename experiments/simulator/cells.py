"""Several controllers with their workers on one virtual clock, and a front that chooses among them (`controller.front.cells`).

The choice is the one of fronts and pickers, with the age of their rows: each controller writes one every 100 ms, at a phase
of its own, and the front reads all every 100 ms. A request that is refused goes to another controller once, as live.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from controller.core import Scheduler
from controller.core.events import RefuseRequest, RequestArrived
from controller.front.cells.choice import Choices
from controller.front.cells.rows import (
    HELPED_ELSEWHERE,
    ROW_INTERVAL_NS,
    SLO_CLASSES_NS,
    CellRow,
    make_models,
    make_row,
)
from controller.process.schedulers import make_scheduler
from experiments.simulator.case import Case
from experiments.simulator.clients import Arrival, Clients
from experiments.simulator.loop import Loop
from experiments.simulator.run import Simulation
from traces.arrivals import Workload

#: What a front knows: the directory; the controllers themselves at the very moment; or nothing, in turn.
Knows = Literal["directory", "moment", "nothing"]

# A row is read so long after it was written, besides the wait for the reader's next look.
_STORE_NS: Final = 5 * NS_PER_MS
_PATIENCE_NS: Final = 60 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsRun:
    """How the requests ended."""

    arrived: int
    in_time: int
    #: Those that were refused by one controller and given to another, and those of them that were in time.
    tried_twice: int
    helped: int
    #: Requests that each controller got.
    asked: tuple[int, ...]


@dataclass(slots=True)
class _Sent:
    """A request under way."""

    model: ModelId
    due_ns: int
    tenant: str
    is_second: bool = False


class _Cell:
    """One controller; the watch of its requests."""

    def __init__(self, front: _Front, index: int, case: Case, num_workers: int, loop: Loop) -> None:
        self.address = f"cell{index}:1"
        self.asked = 0
        self._front = front
        self._sending: _Sent | None = None
        self._sent: dict[RequestId, _Sent] = {}
        self._schedulers: list[Scheduler] = []
        #: Requests that were over, and those that another cell might have served, in tenths of a second.
        self._counts: list[list[int]] = [[0, 0]]
        own = replace(
            case,
            seed=case.seed + 1000 * index,
            cluster=replace(case.cluster, num_workers=num_workers),
            workload=Workload(models=case.workload.models),
        )
        self.simulation = Simulation(
            own, NS_PER_S, {}, None, False, self._made, self, (), loop=loop
        )

    def _made(self, case: Case) -> Scheduler:
        self._schedulers.append(make_scheduler(case.scheduler))
        return self._schedulers[-1]

    @property
    def scheduler(self) -> Scheduler:
        """Decides."""
        return self._schedulers[0]

    def row(self, serial: int, now_ns: int, num_readers: int) -> CellRow:
        """What it would write now."""
        over, helped = (sum(counts) for counts in zip(*self._counts, strict=True))
        self._counts = [*self._counts[-9:], [0, 0]]
        return make_row(
            self.address,
            self.scheduler.outlook(SLO_CLASSES_NS, now_ns),
            serial=serial,
            refused=helped / max(over, 1),
            num_readers=num_readers,
        )

    def send(self, sent: _Sent, now_ns: int) -> None:
        """Ask it."""
        self.asked += 1
        self._sending = sent
        self.simulation.controller.submit([(sent.model, sent.due_ns - now_ns, sent.tenant, None)])

    # --- what it says -----------------------------------------------------------------------------

    def arrived(self, request: RequestArrived, /) -> None:
        """It opens a request."""
        assert self._sending is not None
        self._sent[request.request_id], self._sending = self._sending, None

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler, /) -> None:
        """Nothing is asked of the scheduler."""

    def over(self, request: RequestArrived, refusal: Refusal | None, /) -> None:
        """A request is answered in time, or not."""
        self._counts[-1][0] += 1
        self._counts[-1][1] += refusal in HELPED_ELSEWHERE
        self._front.over(self, self._sent.pop(request.request_id), refusal)


class _Front:
    """Chooses."""

    def __init__(
        self, case: Case, num_workers: Sequence[int], knows: Knows, num_readers: int
    ) -> None:
        self.loop = Loop()
        self.in_time = self.arrived = self.tried_twice = self.helped = self.num_open = 0
        self._knows = knows
        self._turn = 0
        self._serial = 0
        self._random = random.Random(case.seed)
        self._readers = [Choices() for _ in range(num_readers)]
        made = [_Cell(self, n, case, size, self.loop) for n, size in enumerate(num_workers)]
        self.cells = {cell.address: cell for cell in made}
        if knows == "directory":
            for cell in self.cells.values():
                self.loop.at(self._random.randrange(ROW_INTERVAL_NS), self._write, cell)
        self._written: dict[str, CellRow] = {}
        for reader in self._readers:
            self._models(reader)
            for cell in self.cells.values():
                reader.take(cell.row(0, 0, num_readers), 0)
            if knows != "nothing":
                self.loop.at(self._random.randrange(ROW_INTERVAL_NS), self._read, reader)
        self._until_ns = case.duration_ns + _PATIENCE_NS
        Clients(
            case.workload,
            self.loop,
            random.Random(f"clients {case.seed}"),
            until_ns=case.duration_ns,
            round_trip_ns=1,
            jitter_ns=0,
            refusal_pause_ns=1,
            submit=self._submit,
        )

    def _write(self, cell: _Cell) -> None:
        now_ns = self.loop.now_ns
        self._serial += 1
        row = cell.row(self._serial, now_ns, len(self._readers))
        self.loop.at(now_ns + _STORE_NS, self._store, row)
        if now_ns < self._until_ns:
            self.loop.at(now_ns + ROW_INTERVAL_NS, self._write, cell)

    def _store(self, row: CellRow) -> None:
        self._written[row.address] = row

    def _models(self, reader: Choices) -> None:
        for cell in self.cells.values():
            times = {str(name): each for name, each in cell.scheduler.model_times().items()}
            reader.take(make_models(cell.address, times), self.loop.now_ns)

    def _read(self, reader: Choices) -> None:
        now_ns = self.loop.now_ns
        for row in self._written.values():
            reader.take(row, now_ns)
        self._models(reader)
        if now_ns < self._until_ns:
            self.loop.at(now_ns + ROW_INTERVAL_NS, self._read, reader)

    def _submit(self, arrivals: list[Arrival]) -> None:
        for model, slo_ns, tenant, _ in arrivals:
            self.arrived += 1
            self.num_open += 1
            sent = _Sent(model, self.loop.now_ns + slo_ns, tenant)
            self._choose(sent, "").send(sent, self.loop.now_ns)

    def _choose(self, sent: _Sent, instead_of: str) -> _Cell:
        found = self._find(sent, instead_of)
        if found is not None:
            return found
        self._turn += 1
        return list(self.cells.values())[self._turn % len(self.cells)]

    def _find(self, sent: _Sent, instead_of: str) -> _Cell | None:
        now_ns = self.loop.now_ns
        left_ns = sent.due_ns - now_ns
        if self._knows == "nothing":
            return None
        reader = self._readers[self._random.randrange(len(self._readers))]
        if self._knows == "moment":
            self._serial += 1
            for cell in self.cells.values():
                outlook = cell.scheduler.outlook((left_ns,), now_ns)
                outlook = replace(outlook, waits_ns=outlook.waits_ns * len(SLO_CLASSES_NS))
                reader.take(make_row(cell.address, outlook, serial=self._serial), now_ns)
                # What was sent is in that row.
                reader.forget_sent(cell.address)
        chosen = reader.choose(sent.model, 1, left_ns, now_ns, instead_of=instead_of)
        return None if chosen is None else self.cells[chosen.address]

    def over(self, cell: _Cell, sent: _Sent, refusal: Refusal | None) -> None:
        """A controller is done with a request."""
        if refusal in HELPED_ELSEWHERE and not sent.is_second:
            other = self._find(sent, cell.address)
            if other is not None:
                sent.is_second = True
                self.tried_twice += 1
                # Not within the event that refused it.
                self.loop.at(self.loop.now_ns, self._send_again, (other, sent))
                return
        self.num_open -= 1
        self.in_time += refusal is None
        self.helped += refusal is None and sent.is_second

    def _send_again(self, what: tuple[_Cell, _Sent]) -> None:
        other, sent = what
        other.send(sent, self.loop.now_ns)


def run_cells(
    case: Case,
    num_workers: Sequence[int],
    *,
    knows: Knows = "directory",
    num_readers: int = 1,
) -> CellsRun:
    """Run a case with several controllers.

    Args:
        case: its workload is of all cells together, open-loop.
        num_workers: of each controller; the case's cluster says all else of them.
        knows: what the front chooses by.
        num_readers: fronts, among which the requests are shared out.
    """
    front = _Front(case, num_workers, knows, num_readers)
    loop, end_ns = front.loop, case.duration_ns
    while loop.now_ns < end_ns or (front.num_open and loop.now_ns < end_ns + _PATIENCE_NS):
        loop.run(loop.now_ns + NS_PER_S // 10)
    return CellsRun(
        arrived=front.arrived,
        in_time=front.in_time,
        tried_twice=front.tried_twice,
        helped=front.helped,
        asked=tuple([cell.asked for cell in front.cells.values()]),
    )


__all__ = ["CellsRun", "Knows", "run_cells"]
