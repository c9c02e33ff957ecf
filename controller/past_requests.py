"""The requests of the last moments, for whoever asks what became of one.

Nothing is written down of a request that is answered but the name that its client gave it, if any: telemetry has its
row. Of one that is refused everything is kept that was true at that moment, because a moment later it is not true any
more. So refused requests are kept for longer than answered ones. Of a query to an application nobody else would know
which models it asked, so these are kept whatever became of them.

Everything is in tuples of plain values. The garbage collector leaves those alone, however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from clockwright.errors import RefusedError
from clockwright.units import ActionId, ModelId, RequestId
from controller.core.events import RefuseRequest, RequestArrived
from controller.core.remedies import Lane, Obstacles

#: Refused requests, and names that clients gave their requests.
NUM_REFUSED: Final = 10_000
NUM_NAMED: Final = 20_000
#: Queries to applications.
NUM_QUERIES: Final = 10_000

#: The outcome of a request that has none yet.
OPEN: Final = "OPEN"


@dataclass(frozen=True, slots=True)
class RefusedRequest:
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
    #: The batch that it was in; None: none was sent, or its result is long there.
    action_id: ActionId | None = None
    #: What stood in its way, as in `Obstacles`.
    num_waiting: int = 0
    num_pages: int = 0
    num_open: int = 0
    dropped_share: float = 0.0
    lanes: tuple[Lane, ...] = ()
    #: What would have let it succeed, as in `Remedy`.
    remedy_slo_ns: int = 0
    more_workers: int = 0
    pinning: bool = False


@dataclass(frozen=True, slots=True)
class QueryMade:
    """A query to an application, as it stood when its models had been asked, or when it was over."""

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
    #: By model that was chosen: the number of the request to it, 0 where there was none, and what became of that.
    members: tuple[tuple[str, int, str], ...]


class PastRequests:
    """Refused requests, queries to applications, and the names of all."""

    def __init__(
        self,
        *,
        num_refused: int = NUM_REFUSED,
        num_named: int = NUM_NAMED,
        num_queries: int = NUM_QUERIES,
    ) -> None:
        self._refused: deque[tuple[object, ...]] = deque(maxlen=num_refused)
        self._named: deque[tuple[str, RequestId, str]] = deque(maxlen=num_named)
        # Each twice: as it was asked and as it ended.
        self._queries: deque[tuple[object, ...]] = deque(maxlen=2 * num_queries)

    def named(self, name: str, request_id: RequestId, tenant: str) -> None:
        """A request came that its client has named."""
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
            (
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
        name: str,
        model_name: str,
        tenant: str,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        departure_ns: int,
        error: RefusedError,
        remedy: str,
        *,
        by_front: bool = False,
    ) -> None:
        """A request was refused of which the scheduler does not hear.

        Args:
            name: its client's for it.
            model_name: what was asked.
            tenant: whose it was.
            rows: of it.
            arrival_ns: when it came.
            slo_ns: its SLO.
            departure_ns: when it was refused.
            error: why.
            remedy: what would have let it succeed, in words.
            by_front: its front has refused it by itself, for what it was told before.
        """
        row = (name, RequestId(0), ModelId(model_name), tenant, rows, arrival_ns, slo_ns)
        told = (departure_ns, error.refusal.value, error.message, remedy, by_front)
        self._refused.append((*row, *told))

    def queried(
        self,
        name: str,
        request_id: RequestId,
        application: str,
        tenant: str,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        at_ns: int,
        outcome: str,
        detail: str,
        members: tuple[tuple[str, int, str], ...],
    ) -> None:
        """An application has asked its models, or has answered or refused."""
        row = (name, request_id, application, tenant, rows, arrival_ns, slo_ns)
        self._queries.append((*row, at_ns, outcome, detail, members))

    def find_query(self, request_id: RequestId) -> QueryMade | None:
        """Find a query to an application, as it stood last."""
        for row in reversed(self._queries):
            if row[1] == request_id:
                return QueryMade(*row)  # type: ignore[arg-type]
        return None

    def find_refused(self, request_id: RequestId) -> RefusedRequest | None:
        """Find a request that the scheduler refused."""
        for row in reversed(self._refused):
            if row[1] == request_id:
                return _read(row)
        return None

    def find_named(
        self, name: str, may_see: Callable[[str], bool]
    ) -> Iterator[RequestId | RefusedRequest]:
        """Find the requests of a name, the latest first, and those before that were refused at the door.

        Args:
            name: what clients called them.
            may_see: says of a tenant whether its requests may be seen.
        """
        for named, request_id, tenant in reversed(self._named):
            if named == name and may_see(tenant):
                yield request_id
        for row in reversed(self._refused):
            if row[0] == name and may_see(str(row[3])):
                yield _read(row)


def _read(row: tuple[object, ...]) -> RefusedRequest:
    return RefusedRequest(*row)  # type: ignore[arg-type]
