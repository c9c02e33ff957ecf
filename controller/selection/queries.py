"""Answers a query: choose members, ask them, combine the answers in time, and note all for feedback.

This shell reads the clock and makes the requests. The policy and the pure modules in `core` decide.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from clockwright.bulk import Buffer
from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from controller.catalogue import Catalogue, Entry
from controller.core.admission import margin_of
from controller.past_requests import OPEN
from controller.runtime import Runtime
from controller.selection.config import SelectionConfig
from controller.selection.context_states import ContextStates
from controller.selection.core.cache import CacheStatistics, Key, PredictionCache
from controller.selection.core.combination import Rule
from controller.selection.core.contexts import GLOBAL
from controller.selection.core.journal import AnsweredQuery, Journal
from controller.selection.core.query import Candidate, Choice, Combined, Prediction, Query, Service
from controller.selection.core.shape import Shape
from controller.selection.ensemble import Cache, Ensemble, Outputs
from controller.selection.guarded import PolicyError
from controller.selection.live_application import LiveApplication
from controller.telemetry import CANCELLED, OK

LOW_CONFIDENCE = Refusal.LOW_CONFIDENCE.value

# Time kept free for combining, encoding and the way back, by the scheduler's rule and its default numbers: so
# no member is awaited longer than planned. A weak spot: a margin that is configured, or measured to be less,
# does not reach this far.
_REPLY_RESERVE_NS = 5 * NS_PER_MS
_REPLY_RESERVE_SHARE = 0.1

# A query waits this part of its SLO for its user's state in the store. Then the global state serves it.
_LOAD_SHARE = 0.2

# The scheduler is told once a second that a cold model is wanted. If told at every query, a weights cache
# that cannot hold all models would do nothing but load.
_WANT_INTERVAL_NS = NS_PER_S

# Random bytes in a query id.
QUERY_ID_BYTES = 16

# Least SLO of a shadow: no query waits for it.
_SHADOW_SLO_NS = NS_PER_S
# Queries whose shadows may be under way at a time; those of others are not asked.
_SHADOWS_MAX = 256


@dataclass(slots=True)
class Answered:
    """The answer to a query, or that of a model which the cache may have known."""

    #: Tensor bytes per output.
    outputs: Sequence[Buffer]
    #: Parameters of the response: `query_id`, `confidence` and so on; none of a model's.
    parameters: dict[str, bool | int | str]


@dataclass(slots=True)
class _Open:
    """A query that has no answer yet."""

    running: LiveApplication
    context: str
    inputs: Sequence[Buffer]
    rows: int
    arrival_ns: int
    slo_ns: int
    asker: str
    shape: Shape
    #: Id of each model of the application that is there, by public name.
    ids: Mapping[str, ModelId]
    #: Whose it is, and what its client calls it; both may be empty.
    tenant: str
    name: str
    #: Among those of requests.
    request_id: RequestId
    choice: Choice = field(default_factory=lambda: Choice(()))
    #: Answers that came in time and could be read, by member; a prediction per row.
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)
    #: The combined answer to each row; empty: there is none.
    combined: list[Combined] = field(default_factory=list)
    #: The same as tensor bytes, unless they are one model's outputs as they are.
    encoded: list[list[bytes]] = field(default_factory=list)
    #: Why the default is served for some row, or the query refused; empty: there is an answer.
    reason: str = ""
    #: What the policy has raised; empty: nothing.
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
    """Answers queries to all applications."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        config: SelectionConfig,
        states: ContextStates,
        journal: Journal,
    ) -> None:
        """Ask through a runtime, choose by the `states`, and note every answer in the `journal`."""
        self._runtime = runtime
        self._catalogue = catalogue
        self._states = states
        self._journal = journal
        self._cache: Cache = PredictionCache(
            capacity_bytes=config.cache_bytes, ttl_ns=round(config.cache_ttl_s * NS_PER_S)
        )
        self._rng = Random(config.seed)
        self._wanted_ns: dict[ModelId, int] = {}
        self._shadowing: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Give up all shadows that are under way."""
        for task in self._shadowing:
            task.cancel()

    def cache_statistics(self) -> CacheStatistics:
        """Statistics of the prediction cache, which all applications share, and the models that ask for it."""
        return self._cache.statistics()

    async def predict(
        self,
        model_id: ModelId,
        inputs: Sequence[Buffer],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        tenant: str,
        name: str,
    ) -> Answered:
        """Ask one model, unless the cache has its answer.

        Raises:
            RefusedError: there is no answer in time.
        """
        cache, clock = self._cache, self._runtime.clock
        key = Key(model_id, tuple(map(bytes, inputs)))
        # No computation under way was promised by such a deadline. Whoever joined one that is refused would
        # have to ask again, and would then hear of it later than anybody else.
        found = cache.request(key, deadline_ns=0, now_ns=clock())
        if isinstance(found, tuple):
            return Answered(found, {})

        def keep(views: Sequence[Buffer]) -> None:
            outputs = tuple(map(bytes, views))
            cache.put(key, outputs, sum(map(len, outputs)), now_ns=clock())

        answer = await self._runtime.submit(
            model_id,
            inputs,
            rows=rows,
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            tenant=tenant,
            late=keep if cache.on else None,
            name=name,
        )
        return Answered(answer.outputs, {})

    async def answer(
        self,
        running: LiveApplication,
        inputs: Sequence[Buffer],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        context: str,
        tenant: str,
        asker: str,
        name: str,
    ) -> Answered:
        """Answer a query inside its SLO. The query fits the application's shape.

        Raises:
            RefusedError: there is neither an answer in time nor a default.
        """
        application, policy = running.application, running.policy
        running.counts.queries += 1
        request_id = self._runtime.number_query()
        if name:
            self._runtime.past.named(name, request_id, tenant)
        state = await self._states.read_in_time(running, context, slo_ns * _LOAD_SHARE / NS_PER_S)
        models = [self._catalogue.find(model) for model in application.models]
        shape = running.look_at(models)
        if shape is None:
            refusal = Refusal.NO_WORKER
            running.counts.refusals[refusal.value] += 1
            error = RefusedError(refusal, f"application {application.name} has no models")
            self._runtime.past.queried(
                *(name, request_id, application.name, tenant, rows, arrival_ns, slo_ns),
                *(self._runtime.clock(), refusal.value, error.message, ()),
            )
            raise error
        ids = {model.name: model.model_id for model in models if model is not None}
        asking = _Open(
            *(running, context, inputs, rows, arrival_ns, slo_ns, asker, shape, ids),
            *(tenant, name, request_id),
        )
        query = Query(self._candidates(asking, models), context, self._rng)
        try:
            asking.choice = policy.select(state, query)
        except PolicyError as error:
            asking.failed(error)
        asked = self._ask(asking)
        self._note(asking, asked, OPEN)
        reserve_ns = margin_of(slo_ns, _REPLY_RESERVE_NS, _REPLY_RESERVE_SHARE)
        try:
            await asked.wait(arrival_ns + slo_ns - reserve_ns)
        except asyncio.CancelledError:
            self._note(asking, asked, CANCELLED)
            raise
        self._read(asking, asked)
        self._watch(asking, asked)
        if asking.predictions:
            self._combine(asking, state, query)
        elif not asking.reason:
            asking.reason = _worst(query, asking.choice, asked)
        has_default = application.default_label is not None
        detail = asking.fault
        if asking.reason and has_default:
            detail = detail or f"some row has the default: {asking.reason}"
        self._note(asking, asked, OK if has_default else asking.reason or OK, detail)
        return self._reply(asking, asked)

    def _candidates(self, asking: _Open, models: Sequence[Entry | None]) -> tuple[Candidate, ...]:
        running = asking.running
        fit = [m for m in models if m is not None and running.reading(m.name) is not None]
        forecasts = self._runtime.forecast(
            [model.model_id for model in fit],
            rows=asking.rows,
            arrival_ns=asking.arrival_ns,
            slo_ns=asking.slo_ns,
            together=False,
            num_bytes=sum(map(len, asking.inputs)),
        )
        waited_ns = self._runtime.clock() - asking.arrival_ns
        known: dict[str, Candidate] = {}
        for model, predicted in zip(fit, forecasts, strict=True):
            refusal = predicted.refusal
            if refusal is Refusal.COLD:
                self._want(model.model_id)
            known[model.name] = Candidate(
                model.name,
                refusal is None,
                waited_ns + predicted.wait_ns,
                predicted.exec_ns,
                refusal.value if refusal else "",
            )
        missing = Refusal.NO_WORKER.value
        return tuple(
            known.get(name) or Candidate(name, False, reason=missing)
            for name in running.application.models
        )

    def _want(self, model_id: ModelId) -> None:
        at_ns = self._runtime.clock()
        if at_ns - self._wanted_ns.get(model_id, -_WANT_INTERVAL_NS) >= _WANT_INTERVAL_NS:
            if len(self._wanted_ns) > 10_000:  # Most are ids of models that are gone.
                self._wanted_ns.clear()
            self._wanted_ns[model_id] = at_ns
            self._runtime.want(model_id)

    def _ask(self, asking: _Open) -> Ensemble:
        """Ask the members that fit into the SLO together, leaving out the least important first."""
        ids, members = asking.ids, asking.choice.members
        asked = self._ensemble(asking, asking.arrival_ns, asking.slo_ns, asking.tenant)
        forecasts = []
        if len(members) > 1:
            forecasts = self._runtime.forecast(
                [ids[member] for member in members],
                rows=asking.rows,
                arrival_ns=asking.arrival_ns,
                slo_ns=asking.slo_ns,
                together=True,
                num_bytes=sum(map(len, asking.inputs)),
            )
        for index, member in enumerate(members):
            if forecasts and forecasts[index].refusal is not None:
                continue
            asked.ask(member, ids[member])
        return asked

    def _ensemble(self, asking: _Open, arrival_ns: int, slo_ns: int, tenant: str = "") -> Ensemble:
        cache = self._cache if asking.running.application.cache else None
        return Ensemble(
            self._runtime,
            cache,
            asking.inputs,
            rows=asking.rows,
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            tenant=tenant,
        )

    def _read(self, asking: _Open, asked: Ensemble) -> None:
        running = asking.running
        for member in asking.choice.members:
            if member in asked.answers:
                reading = running.reading(member)
                rows = reading.read(asked.answers[member], asking.rows) if reading else None
                if rows is not None:
                    asking.predictions[member] = rows
                    continue
                asked.missing[member] = Refusal.FAILED
            running.counts.missing[member] += 1

    def _combine(self, asking: _Open, state: Any, query: Query) -> None:  # noqa: ANN401
        application, policy = asking.running.application, asking.running.policy
        combined, encoded = [], []
        try:
            for row in range(asking.rows):
                said = {member: rows[row] for member, rows in asking.predictions.items()}
                combined.append(
                    policy.combine(state, query, asking.choice, said, application.combination)
                )
                if application.combination is not Rule.ONE:
                    try:
                        encoded.append(asking.shape.encode(combined[-1]))
                    except (struct.error, OverflowError) as error:  # It does not fit the datatype.
                        raise policy.failed("combine", repr(error)) from None
        except PolicyError as error:
            asking.failed(error)
            return
        asking.combined, asking.encoded = combined, encoded
        if any(asking.is_unsure(row) for row in range(asking.rows)):
            asking.reason = LOW_CONFIDENCE

    def _note(self, asking: _Open, asked: Ensemble, outcome: str, detail: str = "") -> None:
        """Keep for whoever asks about it how a query is going, or went."""
        members = []
        for member in asking.choice.members:
            number = asked.numbers.get(member, 0)
            if member in asked.missing:
                became = asked.missing[member].value
            elif member in asked.answers:
                became = OK
            else:
                became = OPEN if number else Refusal.OVERLOADED.value
            members.append((member, number, became))
        self._runtime.past.queried(
            *(asking.name, asking.request_id, asking.running.application.name, asking.tenant),
            *(asking.rows, asking.arrival_ns, asking.slo_ns, self._runtime.clock()),
            *(outcome, detail, tuple(members)),
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

    def _reply(self, asking: _Open, asked: Ensemble) -> Answered:
        application, counts = asking.running.application, asking.running.counts
        choice, reason, rows = asking.choice, asking.reason, range(asking.rows)
        if reason and application.default_label is None:
            counts.refusals[reason] += 1
            raise _refused(asking)
        if reason:
            counts.defaults[reason] += 1
        query_id = self._enter(asking)
        self._runtime.past.named(query_id, asking.request_id, asking.tenant)
        asked.late = partial(self._vote_late, asking.running, query_id, asking.rows)
        self._shadow(asking, query_id)
        outputs: Sequence[Buffer]
        if application.combination is Rule.ONE:
            # There is an answer: with this rule there is no default.
            outputs = asked.answers[next(m for m in choice.members if m in asking.predictions)]
        else:
            encoded = asking.encoded
            if reason:
                assert application.default_label is not None
                default = asking.shape.encode(Combined(application.default_label, 0.0))
                encoded = [default if asking.is_unsure(row) else encoded[row] for row in rows]
            outputs = [b"".join(parts) for parts in zip(*encoded, strict=True)]
        combined = asking.combined or [Combined(0, 0.0, weight_mass=0.0)] * asking.rows
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
            if len(unsure) < asking.rows:
                parameters["default_rows"] = ",".join(map(str, unsure))
        return Answered(outputs, parameters)

    def _enter(self, asking: _Open) -> str:
        """Enter the query into the journal; returns its id."""
        # Whoever has an id can give the feedback, so nobody may guess another one's from his own.
        query_id = secrets.token_hex(QUERY_ID_BYTES)
        running, choice, at_ns = asking.running, asking.choice, self._runtime.clock()
        # A query to an earlier revision of the application cannot teach the present one.
        if running.retired:
            return query_id
        for row in range(asking.rows):
            combined = asking.combined[row] if asking.combined else None
            record = AnsweredQuery(
                application=running.application.name,
                context=asking.context,
                choice=choice,
                votes={member: said[row].label for member, said in asking.predictions.items()},
                combined=None if combined is None else combined.label,
                propensity=1.0 if combined is None else combined.propensity,
                is_default=bool(asking.reason) and asking.is_unsure(row),
                at_ns=at_ns,
                asker=asking.asker,
                labelled=asking.shape.labelled,
            )
            self._journal.add(row_id(query_id, row, asking.rows), record)
        return query_id

    def _shadow(self, asking: _Open, query_id: str) -> None:
        """Ask shadows now that the answer is made, with so long an SLO that all other requests go first."""
        running = asking.running
        shadows = [name for name in asking.choice.shadows if running.reading(name) is not None]
        if not shadows or len(self._shadowing) >= _SHADOWS_MAX:
            return
        long_ns = max(_SHADOW_SLO_NS, 10 * asking.slo_ns)
        at_ns = self._runtime.clock()
        asked = self._ensemble(asking, at_ns, long_ns)

        async def ask() -> None:
            for name in shadows:
                asked.ask(name, asking.ids[name])
            await asked.wait(at_ns + long_ns)
            for name, outputs in asked.answers.items():
                self._vote_late(running, query_id, asking.rows, name, outputs)

        task = asyncio.create_task(ask())
        self._shadowing.add(task)
        task.add_done_callback(self._shadowing.discard)

    def _vote_late(
        self, running: LiveApplication, query_id: str, rows: int, model: str, outputs: Outputs
    ) -> None:
        """Enter what a model said after the query was answered; feedback to come counts it."""
        reading = running.reading(model)
        said = reading.read(outputs, rows) if reading is not None else None
        for row, prediction in enumerate(said or ()):
            self._journal.add_vote(row_id(query_id, row, rows), model, prediction.label)


def row_id(query_id: str, row: int, rows: int) -> str:
    """Make the id by which a row's feedback is given: the query's own if it has one row, else `ID/ROW`."""
    return query_id if rows == 1 else f"{query_id}/{row}"


def _worst(query: Query, choice: Choice, asked: Ensemble) -> str:
    """Find the commonest reason why no model answered: of those asked, or else of those left out."""
    reasons = [refusal.value for refusal in asked.missing.values()]
    if not reasons and choice.members:
        return Refusal.OVERLOADED.value
    reasons = reasons or [c.reason for c in query.candidates if c.reason]
    counted = Counter(reasons)
    return max(counted, key=counted.__getitem__) if counted else Refusal.NO_WORKER.value


def _refused(asking: _Open) -> RefusedError:
    application, combined = asking.running.application, asking.combined
    figures = {"slo_ns": asking.slo_ns, "request_id": asking.request_id}
    if combined:
        text = (
            f"application {application.name}: confidence {min(c.confidence for c in combined):.2f} is below"
            f" {application.confidence_threshold:g}, and it has no default"
        )
        return RefusedError(Refusal.LOW_CONFIDENCE, text, figures=figures)
    what = asking.fault or "no model answered in time"
    text = f"application {application.name}: {what}, and it has no default"
    return RefusedError(Refusal(asking.reason), text, figures=figures)
