"""Applications as they run: asked like models, taught by feedback. The selection layer's shell.

Everything runs in the controller's event loop thread; states are written to the store by its own. Here
are the clock, the requests and the books; what is decided is decided by the pure modules beside.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from clockwright.bulk import Buffer
from clockwright.errors import (
    BadRequestError,
    ConfigError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from controller.catalogue import Catalogue, Model, ModelState
from controller.model_folder import check_name
from controller.runtime import Runtime, now_ns
from controller.selection.application import Application
from controller.selection.asking import Cache, Ensemble
from controller.selection.cache import CacheStatistics, PredictionCache
from controller.selection.combination import Rule
from controller.selection.config import SelectionConfig
from controller.selection.contexts import GLOBAL, Contexts
from controller.selection.journal import Feedback, FeedbackStatus, Journal, Record
from controller.selection.plugins import plugin_policies
from controller.selection.policies import make_policy
from controller.selection.policy import Policy
from controller.selection.query import (
    Candidate,
    Choice,
    Combined,
    Prediction,
    Query,
    Service,
)
from controller.selection.shape import MisfitError, Reading, Shape, reading_of, shape_of
from controller.selection.store import Store

log = logging.getLogger(__name__)

LOW_CONFIDENCE = "LOW_CONFIDENCE"

CONTEXT_LENGTH_MAX = 256

# What combining, encoding and the way back may take: this, or a tenth of the SLO when that is less. As
# much as the scheduler keeps free of it (`margin_ns`), so that no member is awaited longer than planned.
_REPLY_RESERVE_NS = 5 * NS_PER_MS

# A user's state on disk is worth waiting for this part of the SLO; then the global one serves.
_LOAD_SHARE = 0.2

# A cold model is asked for once a second: a cache that cannot hold all must not spend itself on loads.
_WANT_INTERVAL_NS = NS_PER_S

# Shadows have this long at least: they are asked when nobody waits for them.
_SHADOW_SLO_NS = NS_PER_S
_SHADOWS_MAX = 256

_FLUSH_INTERVAL_S = 1.0

# Feedbacks taken in before requests get their turn.
_FEEDBACK_SLICE = 64


@dataclass(slots=True)
class Counts:
    """What became of an application's queries and feedbacks."""

    queries: int = 0
    #: Default served, by reason.
    defaults: Counter[str] = field(default_factory=Counter)
    #: Neither an answer nor a default, by reason.
    refusals: Counter[str] = field(default_factory=Counter)
    #: Chosen members without an answer in time, by model.
    missing: Counter[str] = field(default_factory=Counter)
    #: By `FeedbackStatus`.
    feedbacks: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Held:
    """A context's state, and the revision of the application that it belongs to."""

    revision: int
    state: Any


class Running:
    """One application."""

    def __init__(self, application: Application, policy: Policy[Any], revision: int) -> None:
        self.application = application
        self.policy = policy
        #: Counts changes; the version that clients see.
        self.revision = revision
        #: The global state.
        self.state: Any = policy.init(application.models)
        self.counts = Counts()
        #: Why models are left out whatever the load.
        self.misfits: dict[str, str] = {}
        self._models: tuple[ModelId | None, ...] = ()
        self._shape: Shape | None = None
        self._readings: dict[str, Reading] = {}

    @property
    def version(self) -> str:
        """As the Open Inference Protocol spells it."""
        return str(self.revision)

    def look_at(self, models: Sequence[Model | None]) -> Shape | None:
        """The shape, given the models as they are now; None while none of them is known."""
        known = tuple([m.model_id if m is not None and m.outputs else None for m in models])
        if known != self._models or self._shape is None:
            self._models = known
            self._learn_shapes(models)
        return self._shape

    def reading(self, model: str) -> Reading | None:
        """How a model's outputs are read; None: it does not fit, or is not known."""
        return self._readings.get(model)

    def _learn_shapes(self, models: Sequence[Model | None]) -> None:
        application = self.application
        self._shape, self._readings, self.misfits = None, {}, {}
        for name, model in zip(application.models, models, strict=True):
            if model is None or not model.outputs:
                continue
            try:
                if self._shape is None:
                    self._shape = shape_of(application, model.inputs, model.outputs)
                reading = reading_of(application, self._shape, model.inputs, model.outputs)
            except MisfitError as error:
                self.misfits[name] = str(error)
                continue
            self._readings[name] = reading


@dataclass(slots=True)
class Answered:
    """What a query gets."""

    outputs: Sequence[Buffer]
    #: `query_id`, `confidence` and so on, for the response.
    parameters: dict[str, bool | int | str]


@dataclass(slots=True)
class FeedbackResult:
    """What a feedback has changed."""

    query_id: str
    status: FeedbackStatus
    losses: Mapping[str, float]
    #: Of the context's state afterwards; empty when nothing has changed.
    weights: Mapping[str, float]


class Applications:
    """All applications of a controller."""

    def __init__(
        self, runtime: Runtime, catalogue: Catalogue, config: SelectionConfig | None = None
    ) -> None:
        """Start empty; `restore` brings back what the store has.

        Raises:
            ConfigError: the store cannot be opened.
        """
        config = config or SelectionConfig()
        self._runtime = runtime
        self._catalogue = catalogue
        self._store = Store(config.store)
        self._running: dict[str, Running] = {}
        self._contexts = Contexts(capacity=config.contexts_max)
        self._journal = Journal(
            capacity=config.feedback_max, ttl_ns=round(config.feedback_ttl_s * NS_PER_S)
        )
        self._cache: Cache = PredictionCache(
            capacity_bytes=config.cache_bytes, ttl_ns=round(config.cache_ttl_s * NS_PER_S)
        )
        self._rng = Random(config.seed)
        self._plugins = plugin_policies()
        # Ids of another run of the server are never taken for this one's.
        self._id_prefix = secrets.token_hex(4)
        self._num_queries = 0
        self._wanted_ns: dict[ModelId, int] = {}
        self._shadowing: set[asyncio.Task[None]] = set()
        self._flushing: asyncio.Task[None] | None = None
        catalogue.reserve(self._holds)

    # --- applications -------------------------------------------------------------------------

    async def restore(self) -> None:
        """Bring back the applications of the store, and write changes to it from now on."""
        for settings in await self._store.applications():
            try:
                application = Application.load(settings["application"])
                running = self._make(application, int(settings["revision"]))
            except (ConfigError, KeyError, TypeError, ValueError) as error:
                log.error("an application of the store cannot be restored: %s", error)
                continue
            record = await self._store.load((application.name, GLOBAL))
            running.state = self._restored(running, record) or running.state
            self._running[application.name] = running
        self._flushing = asyncio.create_task(self._keep_flushing())

    async def close(self) -> None:
        """Write what is not written, and close the store."""
        for task in (*self._shadowing, *([self._flushing] if self._flushing else [])):
            task.cancel()
        await self._flush()
        await self._store.close()

    def find(self, name: str) -> Running | None:
        """The application of a name."""
        return self._running.get(name)

    @property
    def all(self) -> list[Running]:
        """All, by name."""
        return [self._running[name] for name in sorted(self._running)]

    async def put(self, application: Application, *, replace: bool = False) -> Running:
        """Add an application, or change one, which keeps what it has learned unless its policy changes.

        Raises:
            ModelError: the name is taken, or a model is not there or does not fit.
            ConfigError: the policy or its options are wrong.
        """
        name = application.name
        check_name(name)
        old = self._running.get(name)
        if self._catalogue.find(name) is not None:
            raise ModelError(f"application {name}: there is a model of that name")
        if old is not None and not replace:
            raise ModelError(f"there is an application {name} already")
        running = self._make(application, old.revision + 1 if old else 1)
        models = [self._catalogue.find(model) for model in application.models]
        for model_name, model in zip(application.models, models, strict=True):
            if model is None:
                raise ModelError(f"application {name}: there is no model {model_name}")
        if running.look_at(models) is None and not running.misfits:
            raise ModelError(f"application {name}: no worker has looked at its models yet")
        if running.misfits:
            model_name, reason = next(iter(running.misfits.items()))
            raise ModelError(f"application {name}: model {model_name} does not fit: {reason}")
        self._running[name] = running
        if old is not None:
            if old.application.policy == application.policy:
                running.state = self._migrated(running, old.state)
            else:
                self._contexts.erase(name)
            # What was asked of the old one cannot teach the new one.
            self._journal.forget(name)
        await self._store.save_application(
            name, {"application": application.dump(), "revision": running.revision}
        )
        if old is not None and old.application.policy != application.policy:
            await self._store.erase(name)
        self._contexts.set(name, GLOBAL, _Held(running.revision, running.state))
        return running

    async def remove(self, name: str) -> None:
        """Remove an application with all it has learned.

        Raises:
            UnknownModelError: there is none of that name.
        """
        if self._running.pop(name, None) is None:
            raise UnknownModelError(f"there is no application {name}")
        self._contexts.erase(name)
        self._journal.forget(name)
        await self._store.remove_application(name)

    async def erase(self, name: str, context: str) -> bool:
        """Forget a context: its state, in memory and in the store, and its queries without feedback.

        What its feedback has taught the application's global state stays.

        Returns:
            Whether there was a state of it.

        Raises:
            UnknownModelError: there is no such application.
            BadRequestError: the context is empty; the global state goes with its application.
        """
        if name not in self._running:
            raise UnknownModelError(f"there is no application {name}")
        if not context:
            raise BadRequestError("context: found none, expected the one to erase")
        held = self._contexts.find(name, context) is not None
        self._contexts.erase(name, context)
        self._journal.forget(name, context)
        return await self._store.erase(name, context) > 0 or held

    def _make(self, application: Application, revision: int) -> Running:
        policy = make_policy(application.policy, application.options, others=self._plugins)
        if application.combination is Rule.ONE and not policy.chooses_one:
            raise ConfigError(
                f"application {application.name}: combination one: found policy {application.policy}, expected"
                " one that chooses one model"
            )
        return Running(application, policy, revision)

    def _holds(self, name: str) -> bool:
        return name in self._running

    # --- looking ------------------------------------------------------------------------------

    def shape(self, running: Running) -> Shape | None:
        """Inputs and outputs; None while no worker has looked at any model."""
        return running.look_at([self._catalogue.find(m) for m in running.application.models])

    def state(self, running: Running) -> ModelState:
        """READY when one of its models is."""
        if self.shape(running) is None:
            return ModelState.LOADING
        models = [self._catalogue.find(name) for name in running.application.models]
        ready = any(m is not None and self._catalogue.state(m) is ModelState.READY for m in models)
        return ModelState.READY if ready else ModelState.UNAVAILABLE

    async def weights(self, running: Running, context: str) -> tuple[dict[str, float], str]:
        """Weights and remark of a context's state, or of the global one where it has none."""
        state = await self._state(running, context, limit_s=None)
        return running.policy.weights(state), running.policy.remark(state)

    def num_contexts(self, name: str) -> int:
        """Contexts of an application in memory; linear."""
        return sum(bool(context) for context in self._contexts.of_application(name))

    def cache_statistics(self) -> CacheStatistics:
        """Of the prediction cache, which all share."""
        return self._cache.statistics()

    # --- queries ------------------------------------------------------------------------------

    async def answer(
        self,
        running: Running,
        inputs: Sequence[Buffer],
        *,
        arrival_ns: int,
        slo_ns: int,
        context: str,
        tenant: str = "",
    ) -> Answered:
        """Answer a query of one row, which fits the application's shape, inside its SLO.

        Raises:
            RefusedError: there is neither an answer in time nor a default.
        """
        running.counts.queries += 1
        state = await self._state(running, context, limit_s=slo_ns * _LOAD_SHARE / NS_PER_S)
        models = [self._catalogue.find(model) for model in running.application.models]
        running.look_at(models)
        query = Query(self._candidates(running, models, arrival_ns, slo_ns), context, self._rng)
        choice = running.policy.select(state, query)
        ids = {model.name: model.model_id for model in models if model is not None}
        asked = self._ask(running, choice, ids, inputs, arrival_ns, slo_ns, tenant)
        reserve_ns = min(_REPLY_RESERVE_NS, slo_ns // 10)
        await asked.wait(arrival_ns + slo_ns - reserve_ns)
        predictions = self._read(running, choice, asked)
        if running.policy.watches_service:
            sent_missing = frozenset(asked.missing)
            service = Service(choice, frozenset(predictions), sent_missing)
            served = running.policy.served(running.state, service)
            name = running.application.name
            if served is not running.state and self._running.get(name) is running:
                # Kept over a restart: a rollback is final.
                self._contexts.set(name, GLOBAL, _Held(running.revision, served))
            running.state = served
        reason = "" if predictions else _worst(query, choice, asked)
        combined = None
        if predictions:
            combined = running.policy.combine(
                state, query, choice, predictions, running.application.combination
            )
            if combined.confidence < running.application.confidence_threshold:
                reason = LOW_CONFIDENCE
        return self._reply(
            running, context, choice, asked, predictions, combined, reason, slo_ns, ids, inputs
        )

    def _candidates(
        self, running: Running, models: Sequence[Model | None], arrival_ns: int, slo_ns: int
    ) -> tuple[Candidate, ...]:
        fit = [m for m in models if m is not None and running.reading(m.name) is not None]
        forecasts = self._runtime.forecast(
            [model.model_id for model in fit],
            arrival_ns=arrival_ns,
            slo_ns=slo_ns,
            together=False,
        )
        waited_ns = now_ns() - arrival_ns
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
        at_ns = now_ns()
        if at_ns - self._wanted_ns.get(model_id, -_WANT_INTERVAL_NS) >= _WANT_INTERVAL_NS:
            if len(self._wanted_ns) > 10_000:  # models that are gone
                self._wanted_ns.clear()
            self._wanted_ns[model_id] = at_ns
            self._runtime.want(model_id)

    def _ask(
        self,
        running: Running,
        choice: Choice,
        ids: Mapping[str, ModelId],
        inputs: Sequence[Buffer],
        arrival_ns: int,
        slo_ns: int,
        tenant: str,
    ) -> Ensemble:
        """Ask the members that fit into the SLO together; the least important are left out first."""
        cache = self._cache if running.application.cache else None
        asked = Ensemble(
            self._runtime, cache, inputs, arrival_ns=arrival_ns, slo_ns=slo_ns, tenant=tenant
        )
        forecasts = []
        if len(choice.members) > 1:
            forecasts = self._runtime.forecast(
                [ids[member] for member in choice.members],
                arrival_ns=arrival_ns,
                slo_ns=slo_ns,
                together=True,
            )
        for index, member in enumerate(choice.members):
            if forecasts and forecasts[index].refusal is not None:
                continue
            asked.ask(member, ids[member])
        return asked

    def _read(self, running: Running, choice: Choice, asked: Ensemble) -> dict[str, Prediction]:
        predictions: dict[str, Prediction] = {}
        for member in choice.members:
            if member in asked.answers:
                reading = running.reading(member)
                prediction = reading.read(asked.answers[member]) if reading is not None else None
                if prediction is not None:
                    predictions[member] = prediction
                    continue
                asked.missing[member] = Refusal.FAILED
            running.counts.missing[member] += 1
        return predictions

    def _reply(
        self,
        running: Running,
        context: str,
        choice: Choice,
        asked: Ensemble,
        predictions: Mapping[str, Prediction],
        combined: Combined | None,
        reason: str,
        slo_ns: int,
        ids: Mapping[str, ModelId],
        inputs: Sequence[Buffer],
    ) -> Answered:
        application = running.application
        shape = self.shape(running)
        if shape is None:
            raise RefusedError(Refusal.NO_WORKER, f"application {application.name} has no models")
        is_default = bool(reason)
        if is_default and application.default_label is None:
            running.counts.refusals[reason] += 1
            raise _refused(application, reason, combined, slo_ns)
        if is_default:
            running.counts.defaults[reason] += 1
        query_id = self._enter(running, context, choice, predictions, combined, is_default)
        self._shadow(running, query_id, choice, ids, inputs, slo_ns)
        outputs: Sequence[Buffer]
        if application.combination is Rule.ONE:
            outputs = asked.answers[next(m for m in choice.members if m in predictions)]
        elif is_default or combined is None:
            assert application.default_label is not None
            outputs = shape.encode(Combined(application.default_label, 0.0))
        else:
            outputs = shape.encode(combined)
        answered = [member for member in choice.members if member in predictions]
        parameters: dict[str, bool | int | str] = {
            "query_id": query_id,
            "confidence": f"{combined.confidence if combined else 0.0:.4f}",
            "weight_mass": f"{combined.weight_mass if combined else 0.0:.4f}",
            "models": ",".join(answered),
            "missing": ",".join(m for m in choice.members if m not in predictions),
            "default": is_default,
        }
        if is_default:
            parameters["default_reason"] = reason
        return Answered(outputs, parameters)

    def _enter(
        self,
        running: Running,
        context: str,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        combined: Combined | None,
        is_default: bool,
    ) -> str:
        """Enter a query into the journal; returns its id."""
        self._num_queries += 1
        query_id = f"{self._id_prefix}-{self._num_queries:x}"
        record = Record(
            application=running.application.name,
            context=context,
            choice=choice,
            votes={member: prediction.label for member, prediction in predictions.items()},
            combined=None if combined is None else combined.label,
            propensity=1.0 if combined is None else combined.propensity,
            is_default=is_default,
            at_ns=now_ns(),
        )
        # What was asked before the application was changed cannot teach it as it is now.
        if self._running.get(running.application.name) is running:
            self._journal.add(query_id, record)
        return query_id

    def _shadow(
        self,
        running: Running,
        query_id: str,
        choice: Choice,
        ids: Mapping[str, ModelId],
        inputs: Sequence[Buffer],
        slo_ns: int,
    ) -> None:
        """Ask shadows now that the answer is made, with time enough that they go behind everybody."""
        shadows = [name for name in choice.shadows if running.reading(name) is not None]
        if not shadows or len(self._shadowing) >= _SHADOWS_MAX:
            return
        long_ns = max(_SHADOW_SLO_NS, 10 * slo_ns)
        at_ns = now_ns()
        cache = self._cache if running.application.cache else None
        asked = Ensemble(self._runtime, cache, inputs, arrival_ns=at_ns, slo_ns=long_ns)

        async def ask() -> None:
            for name in shadows:
                asked.ask(name, ids[name])
            await asked.wait(at_ns + long_ns)
            for name, outputs in asked.answers.items():
                reading = running.reading(name)
                prediction = reading.read(outputs) if reading is not None else None
                if prediction is not None:
                    self._journal.add_vote(query_id, name, prediction.label)

        task = asyncio.create_task(ask())
        self._shadowing.add(task)
        task.add_done_callback(self._shadowing.discard)

    # --- feedback -----------------------------------------------------------------------------

    async def feedback(self, items: Sequence[Feedback]) -> list[FeedbackResult]:
        """Learn from feedback, in order.

        Raises:
            BadRequestError: an item is no feedback; nothing has been learned from any.
        """
        for index, item in enumerate(items):
            _check_feedback(index, item)
        results = []
        for index, item in enumerate(items):
            if index % _FEEDBACK_SLICE == _FEEDBACK_SLICE - 1:
                await asyncio.sleep(0)
            results.append(await self._take_in(item))
        return results

    async def _take_in(self, item: Feedback) -> FeedbackResult:
        joined = self._journal.join(item, now_ns=now_ns())
        record = joined.record
        running = self._running.get(record.application) if record else None
        if record is None or running is None:
            return FeedbackResult(item.query_id, FeedbackStatus.UNKNOWN, {}, {})
        running.counts.feedbacks[joined.status.value] += 1
        if joined.observation is None:
            return FeedbackResult(item.query_id, joined.status, {}, {})
        name, policy = running.application.name, running.policy
        state = None
        if record.context and policy.per_context:
            # Awaited before anything is changed: nobody comes between reading and writing a state.
            state = await self._state(running, record.context, limit_s=None)
            if self._running.get(name) is not running:
                return FeedbackResult(item.query_id, FeedbackStatus.UNKNOWN, {}, {})
            held = self._contexts.find(name, record.context)
            if isinstance(held, _Held) and held.revision == running.revision:
                state = held.state
            state = policy.observe(state, joined.observation)
            self._contexts.set(name, record.context, _Held(running.revision, state))
        running.state = policy.observe(running.state, joined.observation)
        self._contexts.set(name, GLOBAL, _Held(running.revision, running.state))
        weights = policy.weights(running.state if state is None else state)
        return FeedbackResult(item.query_id, joined.status, joined.losses, weights)

    # --- states -------------------------------------------------------------------------------

    async def _state(self, running: Running, context: str, *, limit_s: float | None) -> Any:  # noqa: ANN401
        """The state of a context; the global one where it has none, or none that is here in time."""
        if not context or not running.policy.per_context:
            return running.state
        name = running.application.name
        held = self._contexts.find(name, context)
        if isinstance(held, _Held):
            if held.revision != running.revision:
                held = _Held(running.revision, self._migrated(running, held.state))
                self._contexts.loaded(name, context, held)
            return held.state
        if not self._store.persistent:
            # What is not in memory of a store in memory was evicted: it is still there, and near.
            limit_s = None
        try:
            record = await asyncio.wait_for(self._store.load((name, context)), limit_s)
        except TimeoutError:
            return running.state
        state = self._restored(running, record)
        if state is None:
            return running.state
        self._contexts.loaded(name, context, _Held(running.revision, state))
        return state

    def _restored(self, running: Running, record: Mapping[str, Any] | None) -> Any | None:  # noqa: ANN401
        """The state in a record; None: none is there, or none of this policy."""
        if record is None:
            return None
        name, policy = running.application.policy, running.policy
        if (record.get("policy"), record.get("version")) != (name, policy.version):
            return None
        try:
            return policy.resize(policy.load(record["state"]), running.application.models)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            log.warning("application %s: a state is dropped: %s", running.application.name, error)
            return None

    def _migrated(self, running: Running, state: Any) -> Any:  # noqa: ANN401
        """A state of an earlier revision with the same policy, for this one's models."""
        policy = running.policy
        try:
            return policy.resize(policy.load(policy.dump(state)), running.application.models)
        except (ConfigError, KeyError, TypeError, ValueError):
            return policy.init(running.application.models)

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_INTERVAL_S)
            await self._flush()

    async def _flush(self) -> None:
        changes = self._contexts.take_changes()
        if not changes:
            return
        records: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {}
        for (name, context), held in changes.items():
            running = self._running.get(name)
            if running is not None:
                records[name, context] = partial(_record, running, held.state)
        try:
            await self._store.save(records)
        except Exception as error:  # a full disk must not end what serves
            log.error("selection states are not written: %s", error)
            return
        self._contexts.written(changes)


def _record(running: Running, state: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "policy": running.application.policy,
        "version": running.policy.version,
        "state": running.policy.dump(state),
    }


def _worst(query: Query, choice: Choice, asked: Ensemble) -> str:
    """Why nobody answered: of those asked, if any were, else of those left out."""
    reasons = [refusal.value for refusal in asked.missing.values()]
    if not reasons and choice.members:
        return Refusal.OVERLOADED.value
    reasons = reasons or [c.reason for c in query.candidates if c.reason]
    counted = Counter(reasons)
    return max(counted, key=counted.__getitem__) if counted else Refusal.NO_WORKER.value


def _refused(
    application: Application, reason: str, combined: Combined | None, slo_ns: int
) -> RefusedError:
    if reason == LOW_CONFIDENCE and combined is not None:
        text = (
            f"application {application.name}: confidence {combined.confidence:.2f} is below"
            f" {application.confidence_threshold:g}, and it has no default"
        )
        return RefusedError(Refusal.LOW_CONFIDENCE, text)
    text = f"application {application.name}: no model answered in time, and it has no default"
    return RefusedError(Refusal(reason), text, figures={"slo_ns": slo_ns})


def _check_feedback(index: int, item: Feedback) -> None:
    where = f"feedback {index}"
    if not item.query_id:
        raise BadRequestError(f"{where}: query_id: found none, expected the id of an answer")
    if (item.label is None) == (item.reward is None):
        found = "neither" if item.label is None else "both"
        raise BadRequestError(f"{where}: found {found}, expected either label or reward")
    # The comparison is false for NaN.
    if item.reward is not None and not 0 <= item.reward <= 1:
        raise BadRequestError(f"{where}: reward: found {item.reward:g}, expected 0 to 1")


def check_context(context: str) -> str:
    """Check what a client calls a context.

    Raises:
        BadRequestError: it is too long.
    """
    if len(context) > CONTEXT_LENGTH_MAX:
        raise BadRequestError(
            f"parameter context: found {len(context)} characters, expected {CONTEXT_LENGTH_MAX} at most"
        )
    return context
