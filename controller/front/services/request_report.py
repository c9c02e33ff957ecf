"""Explains the outcome of one request: what it waited for, what delayed or stopped it, what would have helped.

Everything is looked up on demand: in telemetry's last rows, among the refusals that
`controller.telemetry.past_requests` keeps, and among the requests that are still open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from clockwright.errors import Refusal, UnknownRequestError
from clockwright.foreign import check_name_length, quote
from clockwright.units import ActionId, RequestId, format_ns
from clockwright.v1 import control_pb2 as pb
from controller.core.events import RequestArrived
from controller.models.catalogue import name_of
from controller.runtime import Runtime
from controller.telemetry.journey import Journey, where_it_went
from controller.telemetry.past_requests import OPEN, QueryMade, RefusedRequest
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CANCELLED, OK

# Parts of a latency, in the order of `where_it_went`.
_PARTS = {
    "queue": "the queue",
    "load": "the load of its model",
    "input": "its input",
    "exec": "the run",
    "output": "its output",
    "network": "the ways between controller and worker",
}


def explain_request(
    runtime: Runtime, asked: str, may_see: Callable[[str], bool]
) -> pb.ExplainResponse:
    """Explain a request of the last moments, by its client's name for it or the server's number.

    `may_see` says of a tenant whether its requests may be seen. Raises BadRequestError if no request has such a name;
    UnknownRequestError if none has that name or number, it is too long ago, or is another tenant's.
    """
    check_name_length("request_id", asked)
    for found in runtime.past.find_named(asked, may_see):
        if isinstance(found, RefusedRequest):
            return _refused(runtime, found, asked)
        if (response := _of_number(runtime, found, asked, may_see)) is not None:
            return response
    if asked.isascii() and asked.isdigit() and len(asked) < 20:
        number = RequestId(int(asked))
        if (response := _of_number(runtime, number, "", may_see)) is not None:
            return response
    raise UnknownRequestError(
        f"no request {quote(asked)} is known: answered ones are kept for the last moments only, and of those that"
        " the limits on admission refused, few or none"
    )


def _of_number(
    runtime: Runtime, request_id: RequestId, name: str, may_see: Callable[[str], bool]
) -> pb.ExplainResponse | None:
    refused = runtime.past.find_refused(request_id)
    if refused is not None:
        return _refused(runtime, refused, name or refused.name) if may_see(refused.tenant) else None
    query = runtime.past.find_query(request_id)
    if query is not None:
        return _query(runtime, query, name or query.name) if may_see(query.tenant) else None
    row = runtime.telemetry.find_request(request_id)
    if row is not None:
        return _over(runtime, row, name) if may_see(row.tenant) else None
    found = runtime.find_open(request_id)
    if found is not None and may_see(found[0].tenant):
        return _open(runtime, *found, name)
    return None


#: Fields that the record of a refused request has by the same names, and those of a lane, in its order.
_OF_REFUSED: Final = (
    *(
        "outcome",
        "detail",
        "load_ns",
        "exec_ns",
        "queue_ns",
        "margin_ns",
        "num_waiting",
        "num_open",
    ),
    *("num_pages", "dropped_share", "enough_slo_ns", "more_workers", "pinning"),
)
_OF_LANE: Final = (
    *("worker_id", "resident", "loading", "exec_busy_ns", "load_busy_ns", "num_free_pages"),
    "num_pages",
)


def _begun(
    runtime: Runtime,
    found: RequestArrived | QueryMade | RequestRow | RefusedRequest,
    name: str,
    model_id: str,
    latency_ns: int,
    *fields: str,
) -> pb.ExplainResponse:
    """Begin with what is known of every request, and with these fields of what was found."""
    same = ("request_id", "tenant", "rows", "slo_ns", *fields)
    return pb.ExplainResponse(
        client_request_id=name,
        model_id=model_id,
        age_ns=runtime.clock() - found.arrival_ns,
        latency_ns=latency_ns,
        **{field: getattr(found, field) for field in same},
    )


def _open(
    runtime: Runtime, request: RequestArrived, action_id: ActionId | None, name: str
) -> pb.ExplainResponse:
    age_ns = runtime.clock() - request.arrival_ns
    response = _begun(runtime, request, name, name_of(request.model_id), age_ns)
    response.outcome = OPEN
    where = "waits" if action_id is None else f"is with a worker, in action {action_id}"
    left_ns = request.slo_ns - age_ns
    response.words.append(
        f"It {where}, {format_ns(age_ns)} after it came;"
        f" its SLO of {format_ns(request.slo_ns)} is over in {format_ns(left_ns)}."
    )
    return response


def _query(runtime: Runtime, found: QueryMade, name: str) -> pb.ExplainResponse:
    """Explain a query to an application: which models it asked, and with what outcome."""
    until_ns = runtime.clock() if found.outcome == OPEN else found.at_ns
    latency_ns = until_ns - found.arrival_ns
    response = _begun(runtime, found, name, found.application, latency_ns, "outcome", "detail")
    became = {OK: "was answered", OPEN: "is open", CANCELLED: "was given up"}.get(
        found.outcome, f"was refused as {found.outcome}"
    )
    words = response.words
    asked = "application" if found.stages is None else "pipeline"
    words.append(
        f"It asked {asked} {found.application}, and {became} after"
        f" {format_ns(response.latency_ns)}, of an SLO of {format_ns(found.slo_ns)}."
    )
    if found.detail:
        words.append(f"The reason in words: {found.detail}.")
    for (stage, begin_ns, end_ns), (model, number, outcome) in zip(
        found.stages or (), found.members, strict=False
    ):
        response.members.add(model=model, request_id=number, outcome=outcome)
        over = f"{outcome} after {format_ns(end_ns)}" if end_ns > begin_ns else outcome
        words.append(
            f"Stage {stage}, model {model}, began after {format_ns(begin_ns)}, with request {number}: {over}."
        )
    if found.stages is not None:
        return response
    if not found.members:
        words.append("None of the application's models was asked.")
    for model, request_id, outcome in found.members:
        response.members.add(model=model, request_id=request_id, outcome=outcome)
        if request_id:
            words.append(f"Model {model} was asked by request {request_id}: {outcome}.")
        elif outcome == OK:
            words.append(f"The answer of model {model} was in the prediction cache.")
        else:
            words.append(f"Model {model} was left out: it would not have fitted with the others.")
    return response


def _over(runtime: Runtime, row: RequestRow, name: str) -> pb.ExplainResponse:
    latency_ns = row.departure_ns - row.arrival_ns
    response = _begun(runtime, row, name, name_of(row.model_id), latency_ns, "outcome", "cold")
    words = response.words
    slo = format_ns(row.slo_ns)
    if row.outcome == CANCELLED:
        words.append(f"Its client gave it up after {format_ns(latency_ns)}, of an SLO of {slo}.")
        return response
    if row.outcome not in (OK, Refusal.LATE.value):
        words.append(
            f"It was refused as {row.outcome} {format_ns(latency_ns)} after it came, with an SLO of {slo}. So many"
            " were refused since that what stood in its way is not known any more."
        )
        return response
    how = "in time" if row.outcome == OK else "too late"
    words.append(f"It was answered {how}: after {format_ns(latency_ns)}, of an SLO of {slo}.")
    response.expected_latency_ns = row.expected_departure_ns - row.arrival_ns
    run = None if row.action_id is None else runtime.telemetry.find_action(row.action_id)
    if run is None:
        return response
    _fill_action(response.run, run, row.arrival_ns)
    load = None
    if row.cold:
        load = runtime.telemetry.find_load(row.model_id, run.worker_id, run.result_ns)
        if load is not None:
            _fill_action(response.load, load, row.arrival_ns)
    parts_ns = where_it_went(
        Journey(
            arrival_ns=row.arrival_ns,
            sent_ns=run.sent_ns,
            received_ns=run.received_ns,
            result_ns=run.result_ns,
            departure_ns=row.departure_ns,
            load=None if load is None else load.load,
            input=run.input,
            exec=run.exec,
            output=run.output,
        )
    )
    for name, part_ns in zip(_PARTS, parts_ns, strict=True):
        setattr(response, f"spent_{name}_ns", part_ns)
    parts = zip(_PARTS.values(), parts_ns, strict=True)
    took = ", ".join(f"{name} {format_ns(part_ns)}" for name, part_ns in parts if part_ns)
    words.append(f"Its time went into {took}.")
    words.extend(_run_words(response, run))
    if row.outcome != OK:
        beyond_ns = latency_ns - response.expected_latency_ns
        words.append(
            f"An answer after {format_ns(response.expected_latency_ns)} was predicted when its batch was"
            f" sent; it came {format_ns(beyond_ns)} later than that."
        )
    return response


def _refused(runtime: Runtime, found: RefusedRequest, name: str) -> pb.ExplainResponse:
    waited_ns = found.departure_ns - found.arrival_ns
    response = _begun(runtime, found, name, name_of(found.model_id), waited_ns, *_OF_REFUSED)
    for values in found.lanes:
        response.lanes.add(**dict(zip(_OF_LANE, values, strict=True)))
    words = response.words
    slo = format_ns(found.slo_ns)
    words.append(
        f"It was refused as {found.outcome} {format_ns(waited_ns)} after it came, with an SLO of {slo}."
    )
    if found.by_front:
        words.append("Its front refused it by itself, for a quota that the controller had told it.")
    if found.detail:
        words.append(f"The reason in words: {found.detail}.")
    if found.exec_ns:
        needed_ns = found.load_ns + found.exec_ns + found.queue_ns
        load = f"a load of {format_ns(found.load_ns)}, " if found.load_ns else ""
        words.append(
            f"It would have taken {format_ns(needed_ns)} at the least: {load}a run of"
            f" {format_ns(found.exec_ns)}, a wait of {format_ns(max(found.queue_ns, 0))};"
            f" {format_ns(found.margin_ns)} were reserved for the response path."
        )
    if found.action_id is not None:
        run = runtime.telemetry.find_action(found.action_id)
        if run is None:
            words.append(f"It was with a worker, in action {found.action_id}, which is not over.")
        else:
            _fill_action(response.run, run, found.arrival_ns)
            words.extend(_run_words(response, run))
    words.extend(_obstacle_words(response))
    words.append(_remedy_words(response, found.remedy))
    return response


#: Why an action was not run, by the name of its error.
_NOT_RUN = {
    "TOO_LATE": "the worker could not begin it within that window",
    "WITHDRAWN": "the controller took it back, because it could not be in time any more, or no client waited for it",
    "WORKER_LOST": "the worker was lost",
}


def _run_words(response: pb.ExplainResponse, run: ActionRow) -> list[str]:
    told = response.run
    action = f"ction {told.action_id} on worker {told.worker_id}"
    was_run = run.exec is not None
    words = [
        (f"A{action} ran it" if was_run else f"It was in a{action},")
        + f" in a batch of {told.batch_size} with {_times(told.num_requests, 'request')}."
        f" The action was sent after {format_ns(told.sent_ns)} and might begin"
        f" from {format_ns(told.earliest_ns)} to {format_ns(told.latest_ns)} after the request came;"
        f" {format_ns(told.expected_duration_ns)} were predicted"
        + (f", and {format_ns(told.duration_ns)} were measured." if was_run else ".")
    ]
    if not was_run:
        words.append(f"It was not run: {_NOT_RUN.get(run.error, run.error)}.")
    elif run.error != "NONE":
        words.append(f"It failed: {run.error}.")
    if response.HasField("load"):
        load = response.load
        words.append(
            "The model's weights were not resident when it came: they were loaded from"
            f" {format_ns(load.begin_ns)} to {format_ns(load.end_ns)} after that."
        )
    elif response.cold:
        words.append("The model's weights were not resident when it came.")
    elif response.outcome == OK:
        words.append("No load was needed: the model's weights were resident.")
    return words


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _obstacle_words(response: pb.ExplainResponse) -> list[str]:
    words = []
    if response.num_open:
        words.append(
            f"{_times(response.num_waiting, 'request')} of its model {_were(response.num_waiting)} waiting, and"
            f" {response.num_open} of all models had no answer yet."
        )
    if response.dropped_share:
        words.append(
            f"Of the requests for such workers {response.dropped_share:.1%} were refused lately."
        )
    for lane in response.lanes:
        where = "resident" if lane.resident else "on their way" if lane.loading else "not there"
        words.append(
            f"Worker {lane.worker_id}: its weights ({_times(response.num_pages, 'page')}) were {where};"
            f" EXEC was planned for {format_ns(lane.exec_busy_ns)} more, LOAD for"
            f" {format_ns(lane.load_busy_ns)}; {lane.num_free_pages} of {lane.num_pages} pages were free."
        )
    return words


def _remedy_words(response: pb.ExplainResponse, remedy: str) -> str:
    parts = []
    if response.enough_slo_ns:
        more_ns = response.enough_slo_ns - response.slo_ns
        parts.append(f"an SLO of {format_ns(response.enough_slo_ns)} ({format_ns(more_ns)} longer)")
    if response.more_workers:
        more = "worker" if response.more_workers == 1 else "workers"
        parts.append(f"{response.more_workers} more {more}")
    ways = [" and ".join(parts)] if parts else []
    if response.pinning:
        ways.append(f"model {response.model_id} pinned (`clockwright models pin`)")
    if remedy:
        ways.append(remedy)
    if not ways:
        return "Nothing is known that would have let it succeed."
    return f"What would have let it succeed: {', or '.join(ways)}."


def _fill_action(told: pb.ExplainedAction, row: ActionRow, arrival_ns: int) -> None:
    told.action_id, told.worker_id = row.action_id, row.worker_id
    told.batch_size, told.num_requests = row.batch_size, row.num_requests
    told.sent_ns = row.sent_ns - arrival_ns
    if row.earliest_ns is not None and row.latest_ns is not None:
        told.earliest_ns, told.latest_ns = row.earliest_ns - arrival_ns, row.latest_ns - arrival_ns
    told.expected_begin_ns = row.expected_begin_ns - arrival_ns
    told.expected_duration_ns = row.expected_duration_ns
    step = row.exec if row.type == "Infer" else row.load
    if step is not None:
        told.begin_ns, told.end_ns = step.begin_ns - arrival_ns, step.end_ns - arrival_ns
        told.duration_ns = step.duration_ns
    told.error = row.error
