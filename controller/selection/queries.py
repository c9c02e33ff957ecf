"""Answers a query: choose members, ask them, combine the answers in time, and record all for feedback.

This shell reads the clock and makes the requests. The policy and the pure modules in `core` decide.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from clockwright.wire.bulk import Buffer
from controller.core.admission import margin_of
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry
from controller.port import INTERNAL, Answered, Ask, Failed, Refused, Sink, Told
from controller.runtime import Runtime
from controller.selection.config import SelectionConfig
from controller.selection.context_states import ContextStates
from controller.selection.core.cache import PredictionCache
from controller.selection.core.combination import Rule
from controller.selection.core.contexts import GLOBAL
from controller.selection.core.journal import AnsweredQuery, Journal
from controller.selection.core.query import Candidate, Choice, Combined, Prediction, Query, Service
from controller.selection.core.shape import Shape
from controller.selection.ensemble import Cache, Ensemble, Outputs
from controller.selection.guarded import PolicyError
from controller.selection.live_application import LiveApplication, lacks, none_answers
from controller.selection.members import Members
from controller.selection.predictions import Predictions
from controller.telemetry.past_requests import OPEN, QueryMade
from controller.telemetry.tables import CANCELLED, OK

log = logging.getLogger(__name__)

LOW_CONFIDENCE = Refusal.LOW_CONFIDENCE.value

# Time reserved for combining, encoding and sending the answer, by the scheduler's rule and its default numbers, so
# that no member is awaited longer than planned. A weakness: a margin that is configured, or measured to be
# shorter, is not used here.
_REPLY_RESERVE_NS = 5 * NS_PER_MS
_REPLY_RESERVE_SHARE = 0.1

# A query waits this part of its SLO for its user's state in the store. Then the global state serves it.
_LOAD_SHARE = 0.2

# The scheduler is told once a second that a cold model is wanted. If it were told at every query, a weights cache
# that cannot hold all models would load all the time.
_WANT_INTERVAL_NS = NS_PER_S

# Random bytes in a query id.
QUERY_ID_BYTES = 16

# Least SLO of a shadow: no query waits for it.
_SHADOW_SLO_NS = NS_PER_S
# Limit on queries with shadows in flight; others run without shadows.
_SHADOWS_MAX = 256


@dataclass(slots=True)
class _Open:
    """A query that has no answer yet."""

    running: LiveApplication
    ask: Ask
    inputs: Sequence[Buffer]
    sink: Sink
    #: Among those of requests.
    request_id: RequestId
    #: Reads its user's state; None: that was at hand.
    reading: asyncio.Task[None] | None = None
    # What follows is known when its models are asked.
    state: Any = None
    shape: Shape | None = None
    query: Query | None = None
    #: Each model of the application that is there, by public name.
    members: Mapping[str, Entry] = field(default_factory=dict)
    asked: Ensemble | None = None
    choice: Choice = field(default_factory=lambda: Choice(()))
    #: Answers that came in time and could be read, by member; a prediction per row.
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)
    #: The combined answer of each row; empty: no answer.
    combined: list[Combined] = field(default_factory=list)
    #: The same as tensor bytes, unless they are one model's outputs as they are.
    encoded: list[list[bytes]] = field(default_factory=list)
    #: Why a row gets the default, or the query is refused; empty: it is answered.
    reason: str = ""
    #: The policy's failure; empty: it did not fail.
    fault: str = ""

    def is_unsure(self, row: int) -> bool:
        """Whether the answer to a row is missing, or is withheld for its confidence."""
        # The comparison is false for NaN.
        threshold = self.running.application.confidence_threshold
        return not self.combined or not self.combined[row].confidence >= threshold

    def failed(self, error: PolicyError) -> None:
        """Note that the policy has failed."""
        self.reason, self.fault = Refusal.FAILED.value, str(error)


class Queries:
    """Answers queries to all applications: a stage of the port."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        config: SelectionConfig,
        states: ContextStates,
        journal: Journal,
    ) -> None:
        """Use a runtime, choose by the `states`, and record every answer in the `journal`."""
        self._runtime = runtime
        self._catalogue = catalogue
        self._states = states
        self._journal = journal
        self.cache: Cache = PredictionCache(
            capacity_bytes=config.cache_bytes, ttl_ns=round(config.cache_ttl_s * NS_PER_S)
        )
        self._models = Predictions(runtime, self.cache)
        #: Asks the models and pipelines of applications.
        self.members = Members(runtime)
        self._rng = Random(config.seed)
        self._wanted_ns: dict[ModelId, int] = {}
        self._open: dict[RequestId, _Open] = {}
        self._shadowing: set[Ensemble] = set()
        runtime.past.find_open.append(self._find_open)

    def close(self) -> None:
        """Give up all queries and shadows that are under way."""
        for request_id in list(self._open):
            self.withdraw(request_id)
        for shadows in self._shadowing:
            shadows.leave()

    def ask(
        self, subject: Entry | LiveApplication, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> RequestId:
        """Do what `PortStage` says: answer a query, and pass on what is asked of a model.

        Each row is combined on its own. With several, feedback is given by row: to `ID/0`, `ID/1` and so on.
        """
        if isinstance(subject, Entry):
            return self._models.ask(subject, ask, inputs, sink)
        running = subject
        running.counts.queries += 1
        request_id = self._runtime.number(ask)
        asking = self._open[request_id] = _Open(running, ask, inputs, sink, request_id)
        if self._states.is_at_hand(running, ask.context):
            self._start(asking, self._states.in_memory(running, ask.context))
        else:
            asking.reading = asyncio.create_task(self._read_state(asking))
        return request_id

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a query or a request."""
        asking = self._open.pop(request_id, None)
        if asking is None:
            self._models.withdraw(request_id)
        else:
            if asking.reading is not None:
                asking.reading.cancel()
            if asking.asked is not None:
                asking.asked.leave()
                self._note(asking, CANCELLED)

    async def _read_state(self, asking: _Open) -> None:
        limit_s = asking.ask.slo_ns * _LOAD_SHARE / NS_PER_S
        try:
            state = await self._states.read_in_time(asking.running, asking.ask.context, limit_s)
        except Exception as error:
            self._fail(asking, error)
            return
        asking.reading = None
        self._start(asking, state)

    def _start(self, asking: _Open, state: Any) -> None:  # noqa: ANN401
        try:
            self._begin(asking, state)
        except Exception as error:
            # Later, because the stages before this one do not know the query yet.
            asyncio.get_running_loop().call_soon(self._fail, asking, error)

    def _begin(self, asking: _Open, state: Any) -> None:  # noqa: ANN401
        running, ask, policy = asking.running, asking.ask, asking.running.policy
        models = [self._catalogue.member(model) for model in running.application.models]
        asking.state, asking.shape = state, running.look_at(models)
        asking.members = {model.name: model for model in models if model is not None}
        asked = asking.asked = self._ensemble(asking, ask, partial(self._end, asking))
        if asking.shape is not None:
            query = asking.query = Query(self._candidates(asking, models), ask.context, self._rng)
            try:
                asking.choice = policy.select(state, query)
            except PolicyError as error:
                asking.failed(error)
            self._ask_members(asking, asked)
        reserve_ns = margin_of(ask.slo_ns, _REPLY_RESERVE_NS, _REPLY_RESERVE_SHARE)
        asked.wait(ask.arrival_ns + ask.slo_ns - reserve_ns)

    def _end(self, asking: _Open) -> None:
        """Tell what came of a query: its members have answered, or its time is up."""
        if self._open.pop(asking.request_id, None) is None:
            return
        try:
            told, outputs = self._answer(asking)
        except Exception as error:
            told, outputs = _bug(asking, error), ()
        # Else the two would keep each other until the garbage collector comes by.
        asking.asked = None
        asking.sink.told(asking.request_id, told, outputs)

    def _fail(self, asking: _Open, error: Exception) -> None:
        if self._open.pop(asking.request_id, None) is None:
            return
        if asking.asked is not None:
            asking.asked.leave()
        asking.sink.told(asking.request_id, _bug(asking, error), ())

    def _answer(self, asking: _Open) -> tuple[Told, Sequence[Buffer]]:
        application, asked = asking.running.application, asking.asked
        assert asked is not None
        if asking.shape is None:
            refusal = Refusal.NO_WORKER
            asking.running.counts.refusals[refusal.value] += 1
            words = none_answers(self._catalogue, asking.running)
            self._note(asking, refusal.value, words)
            return Refused(refusal, {}, message=words), ()
        self._read(asking, asked)
        self._watch(asking, asked)
        if asking.predictions:
            self._combine(asking)
        elif not asking.reason:
            asking.reason = _worst(asking, asked)
        has_default = application.default_label is not None
        detail = asking.fault
        if asking.reason and has_default:
            detail = detail or f"some row has the default: {asking.reason}"
        self._note(asking, OK if has_default else asking.reason or OK, detail)
        if asking.reason and not has_default:
            asking.running.counts.refusals[asking.reason] += 1
            return _refused(asking, lacks(self._catalogue, asking.running)), ()
        return self._reply(asking, asked)

    def _candidates(self, asking: _Open, models: Sequence[Entry | None]) -> tuple[Candidate, ...]:
        running = asking.running
        fit = [m for m in models if m is not None and running.reading(m.name) is not None]
        forecasts = self.members.forecast(fit, asking.ask, asking.inputs, together=False)
        waited_ns = self._runtime.clock() - asking.ask.arrival_ns
        known: dict[str, Candidate] = {}
        for model, predicted in zip(fit, forecasts, strict=True):
            refusal, latency_ns = predicted.refusal, waited_ns + predicted.wait_ns
            if refusal is Refusal.COLD:
                self._want(model)
            reason = "" if refusal is None else refusal.value
            known[model.name] = Candidate(
                model.name, refusal is None, latency_ns, predicted.exec_ns, reason
            )
        if len(known) == len(models):
            return tuple(known.values())
        missing = Refusal.NO_WORKER.value
        return tuple(
            [
                known.get(name) or Candidate(name, False, reason=missing)
                for name in running.application.models
            ]
        )

    def _want(self, member: Entry) -> None:
        at_ns, model_id = self._runtime.clock(), member.model_id
        if at_ns - self._wanted_ns.get(model_id, -_WANT_INTERVAL_NS) >= _WANT_INTERVAL_NS:
            if len(self._wanted_ns) > 10_000:  # Most are ids of models that are gone.
                self._wanted_ns.clear()
            self._wanted_ns[model_id] = at_ns
            self.members.want(member)

    def _ask_members(self, asking: _Open, asked: Ensemble) -> None:
        """Ask the members that fit into the SLO together, leaving out the least important first."""
        members, forecasts = [asking.members[name] for name in asking.choice.members], []
        if len(members) > 1:
            forecasts = self.members.forecast(members, asking.ask, asking.inputs, together=True)
        for index, member in enumerate(members):
            if not forecasts or forecasts[index].refusal is None:
                asked.ask(member)

    def _ensemble(self, asking: _Open, ask: Ask, over: Callable[[], object]) -> Ensemble:
        """Prepare requests to an application's models; they have no names of their own."""
        cache = self.cache if asking.running.application.cache else None
        own = Ask(0, ask.rows, ask.arrival_ns, ask.slo_ns, ask.tenant)
        own.weight, own.work_ahead_ns = ask.weight, ask.work_ahead_ns
        return Ensemble(self.members, cache, own, asking.inputs, over)

    def _read(self, asking: _Open, asked: Ensemble) -> None:
        running = asking.running
        for member in asking.choice.members:
            if member in asked.answers:
                reading = running.reading(member)
                rows = reading.read(asked.answers[member], asking.ask.rows) if reading else None
                if rows is not None:
                    asking.predictions[member] = rows
                    continue
                asked.missing[member] = Refusal.FAILED
            running.counts.missing[member] += 1

    def _combine(self, asking: _Open) -> None:
        application, policy = asking.running.application, asking.running.policy
        shape, query = asking.shape, asking.query
        assert shape is not None
        assert query is not None
        combined, encoded = [], []
        try:
            for row in range(asking.ask.rows):
                said = {member: rows[row] for member, rows in asking.predictions.items()}
                combined.append(
                    policy.combine(
                        asking.state, query, asking.choice, said, application.combination
                    )
                )
                if application.combination is not Rule.ONE:
                    try:
                        encoded.append(shape.encode(combined[-1]))
                    except (struct.error, OverflowError, ValueError) as error:
                        raise policy.failed("combine", repr(error)) from None
        except PolicyError as error:
            asking.failed(error)
            return
        asking.combined, asking.encoded = combined, encoded
        if any(asking.is_unsure(row) for row in range(asking.ask.rows)):
            asking.reason = LOW_CONFIDENCE

    def _find_open(self, request_id: RequestId) -> QueryMade | None:
        """Tell `explain` of a query whose models have been asked; None: it is not open."""
        asking = self._open.get(request_id)
        return None if asking is None or asking.asked is None else self._made(asking, OPEN, "")

    def _note(self, asking: _Open, outcome: str, detail: str = "") -> None:
        self._runtime.past.queried(self._made(asking, outcome, detail))

    def _made(self, asking: _Open, outcome: str, detail: str) -> QueryMade:
        members, asked, ask = [], asking.asked, asking.ask
        assert asked is not None
        for member in asking.choice.members:
            number = asked.numbers.get(member, 0)
            if member in asked.missing:
                became = asked.missing[member].value
            elif member in asked.answers:
                became = OK
            else:
                became = OPEN if number else Refusal.OVERLOADED.value
            members.append((member, number, became))
        return QueryMade(
            ask.name,
            asking.request_id,
            asking.running.application.name,
            ask.tenant,
            ask.rows,
            ask.arrival_ns,
            ask.slo_ns,
            self._runtime.clock(),
            outcome,
            detail,
            tuple(members),
        )

    def _watch(self, asking: _Open, asked: Ensemble) -> None:
        """Let the policy see how the members fared."""
        running = asking.running
        if not running.policy.watches_service:
            return
        service = Service(asking.choice, frozenset(asking.predictions), frozenset(asked.missing))
        try:
            served = running.policy.served(running.state, service)
        except PolicyError:
            return
        if served is not running.state and not running.retired:
            # Written to the store, so that a rollback stays final over a restart.
            self._states.set(running, GLOBAL, served)
        running.state = served

    def _reply(self, asking: _Open, asked: Ensemble) -> tuple[Answered, Sequence[Buffer]]:
        application, shape, choice = asking.running.application, asking.shape, asking.choice
        assert shape is not None
        reason, rows = asking.reason, range(asking.ask.rows)
        if reason:
            asking.running.counts.defaults[reason] += 1
        query_id = self._enter(asking)
        self._runtime.past.named(query_id, asking.request_id, asking.ask.tenant)
        asked.late = partial(self._vote_late, asking.running, query_id, asking.ask.rows)
        self._shadow(asking, query_id)
        outputs: Sequence[Buffer]
        if application.combination is Rule.ONE:
            # There is an answer: with this rule there is no default.
            outputs = asked.answers[next(m for m in choice.members if m in asking.predictions)]
        else:
            encoded = asking.encoded
            if reason:
                assert application.default_label is not None
                default = shape.encode(Combined(application.default_label, 0.0))
                encoded = [default if asking.is_unsure(row) else encoded[row] for row in rows]
            outputs = shape.join(encoded)
        combined = asking.combined or [Combined(0, 0.0, weight_mass=0.0)] * asking.ask.rows
        parameters: dict[str, bool | int | str] = {
            "query_id": query_id,
            "confidence": ",".join(f"{answer.confidence:.4f}" for answer in combined),
            "weight_mass": ",".join(f"{answer.weight_mass:.4f}" for answer in combined),
            "models": ",".join(m for m in choice.members if m in asking.predictions),
            "missing": ",".join(m for m in choice.members if m not in asking.predictions),
            "default": bool(reason),
        }
        if reason:
            parameters["default_reason"] = reason
            unsure = [row for row in rows if asking.is_unsure(row)]
            if len(unsure) < asking.ask.rows:
                parameters["default_rows"] = ",".join(map(str, unsure))
        due_ns = asking.ask.arrival_ns + asking.ask.slo_ns
        return Answered(due_ns, parameters), outputs

    def _enter(self, asking: _Open) -> str:
        # An id allows feedback, so it must not be possible to guess another query's id from it.
        query_id = secrets.token_hex(QUERY_ID_BYTES)
        running, choice, at_ns = asking.running, asking.choice, self._runtime.clock()
        labelled = asking.shape is not None and asking.shape.labelled
        # A query to an earlier revision of the application cannot teach the present one.
        if running.retired:
            return query_id
        for row in range(asking.ask.rows):
            combined = asking.combined[row] if asking.combined else None
            record = AnsweredQuery(
                application=running.application.name,
                context=asking.ask.context,
                choice=choice,
                votes={member: said[row].label for member, said in asking.predictions.items()},
                combined=None if combined is None else combined.label,
                propensity=1.0 if combined is None else combined.propensity,
                is_default=bool(asking.reason) and asking.is_unsure(row),
                at_ns=at_ns,
                asker=asking.ask.owner,
                labelled=labelled,
            )
            self._journal.add(row_id(query_id, row, asking.ask.rows), record)
        return query_id

    def _shadow(self, asking: _Open, query_id: str) -> None:
        """Send requests to shadows after the answer, with an SLO so long that all other requests go first."""
        running = asking.running
        shadows = [name for name in asking.choice.shadows if running.reading(name) is not None]
        if not shadows or len(self._shadowing) >= _SHADOWS_MAX:
            return
        long_ns = max(_SHADOW_SLO_NS, 10 * asking.ask.slo_ns)
        at_ns = self._runtime.clock()
        patient = Ask(0, asking.ask.rows, at_ns, long_ns)
        asked = self._ensemble(
            asking, patient, lambda: self._shadowed(running, query_id, patient.rows, asked)
        )
        for name in shadows:
            asked.ask(asking.members[name])
        self._shadowing.add(asked)
        asked.wait(at_ns + long_ns)

    def _shadowed(
        self, running: LiveApplication, query_id: str, rows: int, asked: Ensemble
    ) -> None:
        self._shadowing.discard(asked)
        for name, outputs in asked.answers.items():
            self._vote_late(running, query_id, rows, name, outputs)

    def _vote_late(
        self, running: LiveApplication, query_id: str, rows: int, model: str, outputs: Outputs
    ) -> None:
        """Record a model's answer after the query was answered; later feedback counts it."""
        reading = running.reading(model)
        said = reading.read(outputs, rows) if reading is not None else None
        for row, prediction in enumerate(said or ()):
            self._journal.add_vote(row_id(query_id, row, rows), model, prediction.label)


def _bug(asking: _Open, error: Exception) -> Failed:
    """Log an error that is ours, or a store's or policy's of another package, and say so to the client."""
    name = asking.running.application.name
    log.error("application %s: a query failed", name, exc_info=error)
    return Failed(INTERNAL, f"internal error: {type(error).__name__}")


def row_id(query_id: str, row: int, rows: int) -> str:
    """Make the id by which a row's feedback is given: the query's own if it has one row, else `ID/ROW`."""
    return query_id if rows == 1 else f"{query_id}/{row}"


def _worst(asking: _Open, asked: Ensemble) -> str:
    """Find the commonest reason why no model answered: of those asked, or else of those left out."""
    reasons = [refusal.value for refusal in asked.missing.values()]
    if not reasons and asking.choice.members:
        return Refusal.OVERLOADED.value
    if not reasons and asking.query is not None:
        reasons = [c.reason for c in asking.query.candidates if c.reason]
    counted = Counter(reasons)
    return max(counted, key=counted.__getitem__) if counted else Refusal.NO_WORKER.value


def _refused(asking: _Open, lacking: str) -> Refused:
    application, combined = asking.running.application, asking.combined
    refusal = Refusal(asking.reason)
    if combined:
        refusal = Refusal.LOW_CONFIDENCE
        why = (
            f"confidence {min(c.confidence for c in combined):.2f} is below"
            f" {application.confidence_threshold:g}"
        )
    else:
        in_time = "" if refusal is Refusal.FAILED else " in time"
        why = asking.fault or f"no model answered{in_time}" + (lacking and f" ({lacking})")
    figures = {"slo_ns": asking.ask.slo_ns, "request_id": asking.request_id}
    words = f"application {application.name}: {why}, and it has no default"
    return Refused(refusal, figures, message=words)
