"""Recent requests, for `clockwright explain`.

For an answered request only its client's name for it is kept, if any, because telemetry has its row. For a refused
request the state of the scheduler at that moment is kept, because it changes at once. So refused requests are kept
for longer than answered ones. Queries to applications are kept with any outcome, because no other table says which
models they asked.

Everything is in records of plain values, which the garbage collector does not track.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from clockwright.units import NO_REQUEST, ActionId, ModelId, RequestId
from controller.core.events import RefuseRequest, RequestArrived
from controller.core.remedies import Lane, Obstacles
from controller.port import Ask, Refused

#: Refused requests, and names that clients gave their requests.
NUM_REFUSED: Final = 10_000
NUM_NAMED: Final = 20_000
#: Queries to applications.
NUM_QUERIES: Final = 10_000

#: The outcome of a request that has none yet.
OPEN: Final = "OPEN"


class RefusedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that was refused, and what was true then."""

    #: Its client's name for it; may be empty.
    name: str
    #: 0: it was refused before it got one.
    request_id: RequestId
    model_id: ModelId
    tenant: str
    rows: int
    arrival_ns: int
    slo_ns: int
    departure_ns: int
    #: The name of a `Refusal`.
    outcome: str
    #: What the figures do not say.
    detail: str
    #: What would have let it succeed, in words, where no figure says it.
    remedy: str
    #: Its front has refused it by itself.
    by_front: bool
    #: What was predicted, as in `RefuseRequest`.
    load_ns: int = 0
    exec_ns: int = 0
    queue_ns: int = 0
    margin_ns: int = 0
    #: The batch that it was in; None: no batch was sent, or it ended long ago.
    action_id: ActionId | None = None
    #: What stood in its way, as in `Obstacles`.
    num_waiting: int = 0
    num_pages: int = 0
    num_open: int = 0
    dropped_share: float = 0.0
    lanes: tuple[Lane, ...] = ()
    #: What would have let it succeed, as in `Remedy`.
    enough_slo_ns: int = 0
    more_workers: int = 0
    pinning: bool = False


class QueryMade(msgspec.Struct, frozen=True, gc=False):
    """A query to an application, as it stands or as it ended."""

    #: Its client's name for it; may be empty.
    name: str
    request_id: RequestId
    application: str
    tenant: str
    rows: int
    arrival_ns: int
    slo_ns: int
    #: When it stood so.
    at_ns: int
    #: "OK", "OPEN", "CANCELLED", or why it was refused.
    outcome: str
    #: What else there is to say: what its policy raised, or why it got the default.
    detail: str
    #: Per chosen model: its name, the number of the request to it (0: not sent), and the outcome of that request.
    members: tuple[tuple[str, int, str], ...]
    #: For a pipeline, whose stages the members are: of each its name, its begin and its end since the arrival; an end
    #: before the begin: it is open. None: it is no pipeline.
    stages: tuple[tuple[str, int, int], ...] | None = None


class PastRequests:
    """Refused requests, queries to applications, and the names of all."""

    def __init__(
        self,
        *,
        num_refused: int = NUM_REFUSED,
    ) -> None:
        self._refused: deque[RefusedRequest] = deque(maxlen=num_refused)
        self._named: deque[tuple[str, RequestId, str]] = deque(maxlen=NUM_NAMED)
        self._queries: deque[QueryMade] = deque(maxlen=NUM_QUERIES)
        #: Each tells of a query that is open; None: it is not.
        self.find_open: list[Callable[[RequestId], QueryMade | None]] = []

    def named(self, name: str, request_id: RequestId, tenant: str) -> None:
        """Record a request that its client has named."""
        self._named.append((name, request_id, tenant))

    def refused(
        self,
        name: str,
        request: RequestArrived,
        command: RefuseRequest,
        obstacles: Obstacles,
        action_id: ActionId | None,
        departure_ns: int,
    ) -> None:
        """The scheduler refused a request."""
        remedy = obstacles.remedy
        self._refused.append(
            RefusedRequest(
                name,
                request.request_id,
                request.model_id,
                request.tenant,
                request.rows,
                request.arrival_ns,
                request.slo_ns,
                departure_ns,
                command.refusal.value,
                command.detail,
                "",
                False,
                command.load_ns,
                command.exec_ns,
                command.queue_ns,
                command.margin_ns,
                action_id,
                obstacles.num_waiting,
                obstacles.num_pages,
                obstacles.num_open,
                obstacles.dropped_share,
                obstacles.lanes,
                remedy.slo_ns,
                remedy.more_workers,
                obstacles.pinning,
            )
        )

    def refused_at_door(
        self,
        ask: Ask,
        model_name: str,
        departure_ns: int,
        told: Refused,
        remedy: str,
        *,
        by_front: bool = False,
    ) -> None:
        """Record a refusal that does not reach the scheduler, with what would have let the request succeed, in words.

        `by_front`: its front has refused it by itself, for what it was told before.
        """
        self._refused.append(
            RefusedRequest(
                ask.name,
                NO_REQUEST,
                ModelId(model_name),
                ask.tenant,
                ask.rows,
                ask.arrival_ns,
                ask.slo_ns,
                departure_ns,
                told.refusal.value,
                told.message,
                remedy,
                by_front,
            )
        )

    def queried(self, query: QueryMade) -> None:
        """A query to an application is over."""
        self._queries.append(query)

    def find_query(self, request_id: RequestId) -> QueryMade | None:
        """Find a query to an application, as it stands or as it ended."""
        for find in self.find_open:
            if (found := find(request_id)) is not None:
                return found
        return next((q for q in reversed(self._queries) if q.request_id == request_id), None)

    def find_refused(self, request_id: RequestId) -> RefusedRequest | None:
        """Find a request that the scheduler refused."""
        return next((row for row in reversed(self._refused) if row.request_id == request_id), None)

    def find_named(
        self, name: str, may_see: Callable[[str], bool]
    ) -> Iterator[RequestId | RefusedRequest]:
        """Find the requests of a name: first their numbers, then the records of those refused, each the latest first.

        `may_see` says of a tenant whether its requests may be seen.
        """
        for named, request_id, tenant in reversed(self._named):
            if named == name and may_see(tenant):
                yield request_id
        for row in reversed(self._refused):
            if row.name == name and may_see(row.tenant):
                yield row
