"""Several controllers, as their front sees them: each request goes to one that is chosen for it (`controller.front.cells`).

To each controller there is a link of its own, as if it were the only one (`remote_backend`). Here is only which of them
gets a request, and that another one gets it if that one is lost, or, once, if it refuses it and there is time. Requests are
held while no controller is there, or none that has their model, as with one controller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from clockwright.client.channel import Access
from clockwright.errors import ClockwrightError, Denial, Refusal
from clockwright.units import NO_REQUEST, NS_PER_S, RequestId
from clockwright.wire.bulk import Buffer
from controller.core.events import RequestArrived
from controller.front.cells.choice import Choices
from controller.front.cells.rows import EXPIRY_NS, HELPED_ELSEWHERE
from controller.front.oip.protocol import Servable
from controller.front.oip.statuses import ToldStatusError
from controller.front.remote.backend import DEFAULT_SLO_NS, UNKNOWN_NAME
from controller.front.remote.controller_connection import ControllerConnection
from controller.front.remote.open_requests import Waits
from controller.front.remote.remote_backend import RemoteBackend, RemoteDescription
from controller.links.slabs import Slabs
from controller.port import ANSWERS, NOT_FOUND, Answered, Ask, Failed, Refused, Stale, Told

log = logging.getLogger(__name__)

# A controller without a row and without a link is given up after this long.
_FORGOTTEN_NS = 30 * NS_PER_S
#: Controllers of one front: each has a link.
CELLS_MAX = 64
# What has to be equal for a request that was checked against one description to fit another.
_CHECKED = ("version", "inputs", "outputs", "steps", "max_steps", "generates", "has_contexts")


@dataclass(frozen=True, slots=True)
class CellDescription:
    """A model or an application that cells have."""

    servable: Servable
    #: As the client said them.
    name: str
    version: str
    #: The cell that described it.
    address: str
    #: Each cell has a number of its own for it.
    number: int = 0


class _Cell(RemoteBackend):
    """The link to one controller of several."""

    def __init__(self, cells: CellsBackend, address: str) -> None:
        super().__init__(
            address,
            cells.slabs,
            joining=cells.joining,
            knows_callers=cells.knows_callers,
            clock=cells.clock,
        )
        self.address = address
        self.seen_ns = cells.clock()
        self._cells = cells
        # It takes no front of this version.
        self._is_unfit = False

    async def keep(self) -> None:
        """Keep the controller attached, unless it takes no front of this version. Then it has nothing for this front."""
        try:
            await self.run()
        except ClockwrightError as error:
            log.error("%s", error)
            self._is_unfit = True
            self.begin_elsewhere()
            await self._sweep()  # If there is no other, what is held here still ends.

    @override
    def lacks(self, name: str, version: str) -> bool:
        return self._is_unfit or super().lacks(name, version)

    def begin_elsewhere(self) -> None:
        """Let the requests that are held here begin again: another controller takes them."""
        self._resume()

    @property
    def may_know_more(self) -> bool:
        """Whether the controller was lost, or has started again and does not know yet what its workers have."""
        return self._recovering

    @override
    def joined(self) -> None:
        self._cells.joined(self)
        super().joined()

    @override
    def left(self, *, was_joined: bool) -> None:
        others = self._cells.left(self)
        super().left(was_joined=was_joined)
        if others:
            self.begin_elsewhere()

    @override
    def _is_held_back(self, told: Refused) -> bool:
        return super()._is_held_back(told) and self._cells.is_alone(self)


@dataclass(slots=True, eq=False)
class _Waiting:
    """What waits as long as a client does."""

    _sink: Waits
    _cells: CellsBackend

    @property
    def due_ns(self) -> int:
        """When the next of several answers is due."""
        return self._sink.due_ns

    def done(self) -> bool:
        """Whether the request is answered or withdrawn."""
        return self._sink.done()


@dataclass(slots=True, eq=False)
class _Describing(_Waiting):
    """A request that waits for a cell's description. If the cell lacks the model, another one is looked for."""

    _name: str
    _version: str

    def is_step(self) -> bool:
        """It was not asked yet."""
        return False

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Pass on what the cell said, unless the directory was out of date."""
        if isinstance(told, Failed) and told.code == NOT_FOUND:
            other = self._cells.cell_for(self._name, self._version)
            if not other.lacks(self._name, self._version):
                told = Stale()
            else:
                told = self._cells.why_lacking(self._name, self._version) or told
        self._sink.told(request_id, told, outputs)


@dataclass(slots=True, eq=False)
class _Attempt(_Waiting):
    """A request at one of the controllers: the sink of what that one says."""

    _described: CellDescription
    _ask: Ask
    _inputs: Sequence[Buffer]
    #: What the front calls it.
    number: RequestId
    #: The controller that has it, and what that link calls it.
    cell: _Cell | None = None
    at: RequestId = NO_REQUEST
    #: No other controller gets it any more: one has, or answers were given.
    _is_last: bool = False
    #: The refusal after which another is about to get it, which describes the model first.
    _next: _Cell | None = None
    _refused: Refused | None = None

    def is_step(self) -> bool:
        """Whether it was asked as a step of a sequence."""
        return self._sink.is_step()

    def send(self, cell: _Cell, found: RemoteDescription) -> None:
        """Ask a controller. Raises ToldStatusError if it would refuse the request."""
        # The link writes into the record where the tensors are.
        ask = msgspec.structs.replace(self._ask, target=found.number)
        self.cell = cell
        self.at = cell.ask(found, ask, self._inputs, self)

    def told(self, _: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Pass an answer on, and ask another controller after a refusal."""
        if (following := self._next) is not None:
            self._next = None
            assert self._refused is not None
            if isinstance(told, Stale) and self._send_to(following):
                return
            told = self._refused
        elif isinstance(told, Answered) and told.more:
            self._is_last = True
            self._sink.told(self.number, told, outputs)
            return
        elif isinstance(told, Refused) and self._may_ask_again(told) and self._again(told):
            return
        self._cells.over(self)
        self._sink.told(self.number, told, outputs)

    def _may_ask_again(self, told: Refused) -> bool:
        is_last, self._is_last = self._is_last, True
        return (
            not is_last
            and told.refusal in HELPED_ELSEWHERE
            and ANSWERS not in told.figures
            and self._ask.step is None
            and not self._sink.done()
        )

    def _again(self, refused: Refused) -> bool:
        """Ask another controller, if that can help."""
        assert self.cell is not None
        other = self._cells.instead(self._described, self._ask, self.cell, refused.refusal)
        if other is None:
            return False
        if self._send_to(other):
            return True
        if other.known(self._described.name, self._described.version) is not None:
            return False  # It serves another version, or would refuse it.
        self._next, self._refused = other, refused
        due_ns = self._ask.arrival_ns + self._ask.slo_ns
        name, version = self._described.name, self._described.version
        other.describe(self, name, version, lambda: due_ns)
        return True

    def _send_to(self, other: _Cell) -> bool:
        found = other.known(self._described.name, self._described.version)
        if found is None or not _alike(found.servable, self._described.servable, self._ask.rows):
            return False
        try:
            self.send(other, found)
        except ToldStatusError:
            return False
        return True


class CellsBackend:
    """The controllers of a directory; a `Backend`."""

    def __init__(
        self,
        choices: Choices,
        slabs: Slabs,
        *,
        joining: Access | None = None,
        knows_callers: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin without a controller; `follow` connects to those of the directory.

        The arguments are as `RemoteBackend`'s.
        """
        self.clock = clock
        self.slabs = slabs
        self.joining = joining
        self.knows_callers = knows_callers
        self._choices = choices
        self._cells: dict[str, _Cell] = {}
        #: Those of them whose controllers are there.
        self._there: dict[str, _Cell] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._open: dict[RequestId, _Attempt] = {}
        self._last_number = 0
        #: Generations of links that are gone.
        self._gone = 0
        #: Set when those controllers are there that the directory had at first, or one of them a second later.
        self.attached = asyncio.Event()
        self._awaited: set[str] = set()
        self._began_ns = -1

    # --- which controllers there are ------------------------------------------------------------

    def follow(self, named: Collection[str]) -> None:
        """Connect to the controllers that the directory has, and give up those that are gone.

        `named`: all that it has, also those that may be gone.
        """
        now_ns = self.clock()
        if self._began_ns < 0 and named:
            self._began_ns, self._awaited = now_ns, set(named)
        self._look_for_awaited(now_ns)
        for address in self._choices.addresses(now_ns):
            cell = self._cells.get(address)
            if cell is not None:
                cell.seen_ns = now_ns
            elif len(self._cells) < CELLS_MAX:
                self._cells[address] = cell = _Cell(self, address)
                self._runs[address] = asyncio.create_task(cell.keep())
        for address, cell in list(self._cells.items()):
            is_gone = address not in self._there and now_ns - cell.seen_ns > _FORGOTTEN_NS
            # Requests are held at the last one.
            if is_gone and len(self._cells) > 1:
                self._gone += cell.generation + 1
                del self._cells[address]
                self._runs.pop(address).cancel()
                cell.begin_elsewhere()

    async def run(self) -> None:
        """Keep the controllers attached, until this is cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            for run in self._runs.values():
                run.cancel()
            if self._runs:
                await asyncio.wait(self._runs.values())

    def joined(self, cell: _Cell) -> None:
        """A controller is there: what is held for those that are not goes on."""
        self._there[cell.address] = cell
        self._look_for_awaited(self.clock())
        for other in self._cells.values():
            if other.address not in self._there:
                other.begin_elsewhere()

    def _look_for_awaited(self, now_ns: int) -> None:
        is_over = now_ns - self._began_ns >= EXPIRY_NS
        if self._there and (is_over or self._awaited <= self._there.keys()):
            self.attached.set()

    def left(self, cell: _Cell) -> bool:
        """A controller is lost. Returns whether there are others."""
        self._there.pop(cell.address, None)
        return bool(self._there)

    def is_alone(self, cell: _Cell) -> bool:
        """Whether no other controller is there."""
        return not self._there.keys() - {cell.address}

    @property
    def message_bytes_max(self) -> int:
        """Bytes of the largest request that all controllers take."""
        sizes = [cell.link.message_bytes_max for cell in self._cells.values()]
        return min(filter(None, sizes))  # Others have not been reached yet.

    @property
    def num_held(self) -> int:
        """Requests whose inputs are kept for workers, or whose outputs are awaited from there."""
        return sum([cell.num_held for cell in self._cells.values()])

    @property
    def num_workers_reached(self) -> int:
        """Workers without memory in common that can be reached."""
        return sum([cell.num_workers_reached for cell in self._cells.values()])

    async def find_link(
        self, limit_s: float, model: Callable[[], str] = str
    ) -> ControllerConnection | None:
        """The link for calls that a controller answers itself: one that has a model, where one is named.

        Returns None if it was not connected in time.
        """
        cell = self._listed(model(), "") or next(self._any())
        return await cell.find_link(limit_s)

    # --- what the service asks ------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Changes whenever a description may have changed."""
        return self._gone + sum([cell.generation + 1 for cell in self._cells.values()])

    @property
    def default_slo_ns(self) -> int:
        """SLO of requests that name no SLO, to servables that have none: the shortest of the controllers'."""
        known = [cell.default_slo_ns for cell in self._cells.values()]
        return min(filter(None, known), default=DEFAULT_SLO_NS)

    def describe(
        self, sink: Waits, name: str, version: str, until: Callable[[], int]
    ) -> CellDescription | None:
        """Find what a client names, as a cell describes it that has it."""
        cell = self.cell_for(name, version)
        found = cell.known(name, version)
        if found is None:
            self._await(cell, sink, name, version, until)
            return None
        return CellDescription(found.servable, name, version, cell.address)

    def ask(
        self, described: CellDescription, ask: Ask, inputs: Sequence[Buffer], sink: Waits
    ) -> RequestId:
        """Ask the controller that is chosen for a request; as `PortStage.ask`.

        Raises ToldStatusError if it would be refused.
        """
        cell = self._choose(described, ask)
        name, version = described.name, described.version
        found = cell.known(name, version)
        if (
            cell.lacks(name, version)
            if found is None
            else not _alike(found.servable, described.servable, ask.rows)
        ):
            # It was checked against another cell's.
            cell = self._cells.get(described.address, cell)
            found = cell.known(name, version)
        if found is None:
            self._await(cell, sink, name, version, lambda: ask.arrival_ns + ask.slo_ns)
            return NO_REQUEST
        self._last_number += 1
        attempt = _Attempt(sink, self, described, ask, inputs, RequestId(self._last_number))
        self._open[attempt.number] = attempt
        try:
            attempt.send(cell, found)
        except BaseException:
            self.over(attempt)
            raise
        return attempt.number

    def instead(
        self, described: CellDescription, ask: Ask, cell: _Cell, refusal: Refusal
    ) -> _Cell | None:
        """Find another controller for a request that one refused. Returns None if none is known to help."""
        now_ns, name = self.clock(), described.name
        if refusal is Refusal.MODEL_REMOVED:
            self._choices.lacks(cell.address, name)
        left_ns = ask.arrival_ns + ask.slo_ns - now_ns
        chosen = self._choices.choose(
            name, ask.rows, left_ns, now_ns, among=self._there, instead_of=cell.address
        )
        return None if chosen is None else self._there[chosen.address]

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request."""
        attempt = self._open.pop(request_id, None)
        if attempt is not None and attempt.cell is not None:
            attempt.cell.withdraw(attempt.at)

    def over(self, attempt: _Attempt) -> None:
        """A request is answered, or begins again."""
        self._open.pop(attempt.number, None)

    def in_vain(self, *_: object) -> None:
        """Only the controllers know."""

    def turned_away(self, request: RequestArrived, number: int) -> None:
        """Nothing is found to be in vain here."""

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state no SLO. Returns None if it is not known."""
        for cell in self._cells.values():
            if (slo_ns := cell.slo_ns(name)) is not None:
                return slo_ns
        return None

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count refusals, and report them to one of the controllers."""
        next(self._any()).refused_at_door(refusal, number)

    def denied(self, denial: Denial) -> None:
        """Count a call that its client has no right to make, and report it to one of the controllers."""
        next(self._any()).denied(denial)

    def bad_request(self) -> None:
        """Count a request that is malformed or does not fit, and report it to one of the controllers."""
        next(self._any()).bad_request()

    # --- the choice -----------------------------------------------------------------------------

    def _choose(self, described: CellDescription, ask: Ask) -> _Cell:
        now_ns, step = self.clock(), ask.step
        chosen = self._choices.choose(
            described.name,
            ask.rows,
            ask.arrival_ns + ask.slo_ns - now_ns,
            now_ns,
            among=self._there,
            key="" if step is None else f"{ask.owner}/{step.sequence}",
        )
        if chosen is not None:
            return self._there[chosen.address]
        # The directory may be out of date: the cell that described the model says what is true.
        return self._there.get(described.address) or self.cell_for(
            described.name, described.version
        )

    def cell_for(self, name: str, version: str) -> _Cell:
        """A cell that has a model: the same as long as that is so. If none is known, one that may; else any."""
        if (listed := self._listed(name, version)) is not None:
            return listed
        for cell in self._there.values():
            if not cell.lacks(name, version):
                return cell
        for cell in self._cells.values():
            if cell.may_know_more and not cell.lacks(name, version):
                return cell
        return next(self._any())

    def why_lacking(self, name: str, version: str) -> Failed | None:
        """What a cell said that has the name, but not the version. Returns None if no cell has the name."""
        said = [cell.why_lacking(name, version) for cell in self._cells.values()]
        known = [each for each in said if each and not each.text.startswith(UNKNOWN_NAME)]
        # Each request that waits for it writes its number into it.
        return msgspec.structs.replace(known[0]) if known else None

    def _listed(self, name: str, version: str) -> _Cell | None:
        """A cell that lists a model, one that is there if possible."""
        now_ns = self.clock()
        for cells in (self._there, self._cells) if name else ():
            for address in self._choices.having(name, now_ns):
                if address in cells and not cells[address].lacks(name, version):
                    return cells[address]
        return None

    def _any(self) -> Iterator[_Cell]:
        """All cells, those that are there first."""
        yield from self._there.values()
        yield from self._cells.values()

    def _await(
        self, cell: _Cell, sink: Waits, name: str, version: str, until: Callable[[], int]
    ) -> None:
        """Let a request wait for a cell's description; then it begins again."""
        cell.describe(_Describing(sink, self, name, version), name, version, until)


def _alike(found: Servable, expected: Servable, rows: int) -> bool:
    """Whether a request that was checked against one description fits another."""
    return found is expected or (
        rows <= found.max_work
        and all([getattr(found, name) == getattr(expected, name) for name in _CHECKED])
    )
