"""All applications, and their learning from feedback: the entry point of the selection layer.

Everything runs in the controller's event loop thread. The policies and the pure modules in `core` decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from clockwright.errors import (
    BadRequestError,
    ConfigError,
    ModelError,
    NoRoomError,
    StoreError,
    UnknownModelError,
)
from clockwright.units import NS_PER_S
from controller.models.catalogue import Catalogue
from controller.models.entry import ModelState
from controller.models.model_folder import check_name
from controller.models.state_file import StateFile
from controller.runtime import Runtime
from controller.selection.config import SelectionConfig
from controller.selection.context_states import ContextStates, migrated
from controller.selection.core.application import Application
from controller.selection.core.cache import CacheStatistics
from controller.selection.core.combination import Rule
from controller.selection.core.contexts import GLOBAL
from controller.selection.core.journal import AnsweredQuery, FeedbackItem, FeedbackStatus, Journal
from controller.selection.core.shape import Shape
from controller.selection.guarded import PolicyError
from controller.selection.live_application import LiveApplication, none_answers
from controller.selection.plugins import plugin_policies
from controller.selection.policies import make_policy
from controller.selection.queries import Queries, row_id
from controller.selection.stores import Store

log = logging.getLogger(__name__)

# Feedbacks processed before requests are served.
_FEEDBACK_SLICE = 64


@dataclass(slots=True)
class FeedbackResult:
    """The outcome of one feedback."""

    query_id: str
    status: FeedbackStatus
    #: Loss of each model about which the feedback says something.
    losses: Mapping[str, float] = field(default_factory=dict)
    #: Weights in the context's state afterwards; empty when nothing has changed.
    weights: Mapping[str, float] = field(default_factory=dict)
    #: Why learning from it failed, or why it taught nothing; may be empty.
    message: str = ""


#: Each has caches of its own, and is listed with all the others.
APPLICATIONS_MAX = 1000


class Applications:
    """All applications of a controller."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        config: SelectionConfig | None = None,
        state: StateFile | None = None,
    ) -> None:
        """Start empty; `restore` brings back the applications in the store.

        Raises ConfigError if that cannot be opened. They are kept in the state file, unless the settings name another
        store.
        """
        config = config or SelectionConfig()
        self._catalogue = catalogue
        self._clock = runtime.clock
        self._store = Store(config.store or state, contexts_max=config.contexts_max)
        self._states = ContextStates(self._store, capacity=config.contexts_max)
        self._journal = Journal(
            capacity=config.feedback_max, ttl_ns=round(config.feedback_ttl_s * NS_PER_S)
        )
        #: The stage of the port that answers them, and models.
        self.queries = Queries(runtime, catalogue, config, self._states, self._journal)
        self._plugins = plugin_policies()
        self._running: dict[str, LiveApplication] = {}

    async def restore(self) -> None:
        """Bring back the applications of the store, and write changes to it from now on.

        Raises ConfigError if the store cannot be reached or read.
        """
        try:
            await self._store.open()
            for settings in await self._store.applications():
                await self._restore(settings)
        except StoreError as error:
            raise ConfigError(str(error)) from error
        self._states.start(self._refill)

    async def _refill(self) -> None:
        """Write all applications and global states again after the store lost them."""
        async with self._states.changing:
            for running in self.all:
                await self._store.save_application(
                    running.application.name, _record(running), forget=False
                )
                self._states.set(running, GLOBAL, running.state)

    async def _restore(self, settings: Mapping[str, Any]) -> None:
        try:
            application = Application.load(settings["application"])
            if self._catalogue.holds(application.name):
                raise ModelError(
                    f"application {application.name}: there is a model of that name, which is served; give it"
                    " another, and the application is back at the next start"
                )
            running = self._make(application, int(settings["revision"]))
        except (ConfigError, ModelError, KeyError, TypeError, ValueError) as error:
            log.error("an application of the store is not restored: %s", error)
            return
        await self._states.restore(running)
        self._running[application.name] = running
        self._catalogue.reserve(application.name)
        self._catalogue.renew()

    async def close(self) -> None:
        """Write all changes that are not written yet, and close the store."""
        self.queries.close()
        await self._states.close()
        await self._store.close()

    # --- coming, changing, going --------------------------------------------------------------

    async def put(self, application: Application, *, replace: bool = False) -> LiveApplication:
        """Add an application, or change one. It keeps what it has learned unless its policy changes.

        Raises ModelError if the name is taken, or a model does not exist or does not fit; NoRoomError if there are too
        many applications; ConfigError if the policy or its options are wrong; StoreError if it cannot be written;
        nothing has changed.
        """
        name = application.name
        check_name(name)
        async with self._states.changing:
            old = self._running.get(name)
            if self._catalogue.holds(name):
                raise ModelError(f"application {name}: there is a model of that name")
            if old is not None and not replace:
                raise ModelError(f"there is an application {name} already")
            if old is None and len(self._running) >= APPLICATIONS_MAX:
                raise NoRoomError(
                    f"found {len(self._running)} applications, expected {APPLICATIONS_MAX} at most"
                )
            running = self._make(application, old.revision + 1 if old else 1)
            self._check_models(running)
            keeps = old is not None and old.application.policy == application.policy
            self._catalogue.reserve(name)  # No model may take the name while the store writes.
            try:
                await self._store.save_application(name, _record(running), forget=not keeps)
            except BaseException:
                if old is None:
                    self._catalogue.release(name)
                raise
            self._running[name] = running
            self._catalogue.renew()
            if old is not None:
                if keeps:
                    running.state = migrated(running, old.state)
                self._retire(old, keep_states=keeps)
            self._states.set(running, GLOBAL, running.state)
        return running

    async def remove(self, name: str) -> None:
        """Remove an application with all it has learned.

        Raises UnknownModelError if no application has that name; StoreError if it cannot be erased; nothing has
        changed.
        """
        async with self._states.changing:
            running = self._known(name)
            await self._store.remove_application(name)
            del self._running[name]
            self._catalogue.release(name)
            self._catalogue.renew()
            self._retire(running, keep_states=False)

    async def erase(self, name: str, context: str) -> bool:
        """Forget a context: its state, in memory and in the store, and its queries without feedback.

        The global state keeps what the context's feedback has taught it. Returns whether the context had a state.
        Raises UnknownModelError if the application does not exist; BadRequestError if the context is empty; the global
        state goes with its application; StoreError if it cannot be erased; nothing has changed.
        """
        self._known(name)
        if not context:
            raise BadRequestError("context: found none, expected the one to erase")
        async with self._states.changing:
            stored = await self._store.erase(name, context)
            self._journal.forget(name, context)
            return self._states.forget(name, context) or stored

    def _known(self, name: str) -> LiveApplication:
        running = self._running.get(name)
        if running is None:
            raise UnknownModelError(f"there is no application {name}")
        return running

    def _make(self, application: Application, revision: int) -> LiveApplication:
        policy = make_policy(application.policy, application.options, others=self._plugins)
        try:
            running = LiveApplication(application, policy, revision)
        except PolicyError as error:
            raise ConfigError(str(error)) from None
        if application.combination is Rule.ONE and not running.policy.chooses_one:
            raise ConfigError(
                f"application {application.name}: combination one: found policy {application.policy}, expected"
                " one that chooses one model"
            )
        return running

    def _check_models(self, running: LiveApplication) -> None:
        application = running.application
        models = [self._catalogue.member(model) for model in application.models]
        for name, model in zip(application.models, models, strict=True):
            if model is None:
                raise ModelError(f"application {application.name}: there is no model {name}")
        if running.look_at(models) is None and not running.misfits:
            raise ModelError(
                f"application {application.name}: no worker has prepared its models yet"
            )
        for name, reason in running.misfits.items():
            raise ModelError(f"application {application.name}: model {name} does not fit: {reason}")

    def _retire(self, running: LiveApplication, *, keep_states: bool) -> None:
        running.retired = True
        name = running.application.name
        # Queries to the old revision cannot teach the new one.
        self._journal.forget(name)
        if not keep_states:
            self._states.forget(name)

    # --- looking and asking -------------------------------------------------------------------

    def find(self, name: str) -> LiveApplication | None:
        """Find the application of a name."""
        return self._running.get(name)

    @property
    def all(self) -> list[LiveApplication]:
        """All applications, sorted by name."""
        return [self._running[name] for name in sorted(self._running)]

    def shape(self, running: LiveApplication) -> Shape | None:
        """Inputs and outputs of an application; None while no worker has described any of its models."""
        return running.look_at([self._catalogue.member(m) for m in running.application.models])

    def max_rows(self, running: LiveApplication) -> int:
        """Most rows that a query may have."""
        return running.max_rows([self._catalogue.member(m) for m in running.application.models])

    def state(self, running: LiveApplication) -> ModelState:
        """State of an application: READY when one of its models is, and LOADING while one of them may become so."""
        models = filter(None, map(self._catalogue.member, running.application.models))
        states = {self._catalogue.state(model) for model in models}
        if ModelState.READY in states and self.shape(running) is not None:
            return ModelState.READY
        return ModelState.LOADING if ModelState.LOADING in states else ModelState.UNAVAILABLE

    def lacks(self, running: LiveApplication) -> str:
        """Say why an application that is not READY is not; empty: it is."""
        ready = self.state(running) is ModelState.READY
        return "" if ready else none_answers(self._catalogue, running)

    async def weights(self, running: LiveApplication, context: str) -> tuple[dict[str, float], str]:
        """Weights and remark of a context's state, or of the global one where it has none.

        Raises StoreError if the state is not in memory, and the store cannot be read.
        """
        return _weights(running, await self._states.read(running, context))

    def weights_at_hand(
        self, running: LiveApplication, context: str
    ) -> tuple[dict[str, float], str]:
        """As `weights`, without waiting for the store.

        Raises StoreError if the state is not in memory; a later call may find it there.
        """
        return _weights(running, self._states.at_hand(running, context))

    def num_contexts(self, name: str) -> int:
        """Number of an application's contexts in memory."""
        return self._states.num_contexts(name)

    def cache_statistics(self) -> CacheStatistics:
        """Statistics of the prediction cache, which all applications share, and the models that ask for it."""
        return self.queries.cache.statistics()

    # --- feedback -----------------------------------------------------------------------------

    async def feedback(
        self, items: Sequence[FeedbackItem], *, asker: str = ""
    ) -> list[FeedbackResult]:
        """Learn from feedback, in order. An item that fails leaves the others alone.

        Queries of other callers than `asker` do not exist for it. Raises BadRequestError if an item is malformed:
        nothing has been learned from any.
        """
        for index, item in enumerate(items):
            _check_feedback(index, item)
        results = []
        for index, item in enumerate(items):
            if index % _FEEDBACK_SLICE == _FEEDBACK_SLICE - 1:
                await asyncio.sleep(0)
            results.append(await self._take_in(item, asker))
        return results

    async def _take_in(self, item: FeedbackItem, asker: str) -> FeedbackResult:
        record = self._find(item.query_id, asker)
        running = self._running.get(record.application) if record else None
        if record is None or running is None:
            rows = self._find(row_id(item.query_id, 0, 2), asker)
            message = "it has several rows, expected the id of one: ID/0, ID/1, ..." if rows else ""
            return FeedbackResult(item.query_id, FeedbackStatus.UNKNOWN, message=message)
        policy, counts = running.policy, running.counts.feedbacks
        of_context = bool(record.context) and policy.per_context
        try:
            # This is awaited before anything is changed, so no other task runs between reading and writing
            # a state.
            state = (
                running.state if record.closed else await self._states.read(running, record.context)
            )
        except StoreError as error:
            counts[FeedbackStatus.FAILED.value] += 1
            return FeedbackResult(item.query_id, FeedbackStatus.FAILED, message=str(error))
        # The query may have been forgotten meanwhile; then this does not find it any more.
        joined = self._journal.join(item, now_ns=self._clock())
        if joined.observation is None:
            counts[joined.status.value] += 1
            return FeedbackResult(item.query_id, joined.status)
        try:
            everybody = policy.observe(running.state, joined.observation)
            learned = policy.observe(state, joined.observation) if of_context else everybody
            weights = policy.weights(learned)
        except PolicyError as error:
            record.closed = False  # The policy's next version may do better.
            counts[FeedbackStatus.FAILED.value] += 1
            return FeedbackResult(item.query_id, FeedbackStatus.FAILED, message=str(error))
        if everybody is running.state and learned is state:
            counts[FeedbackStatus.UNINFORMATIVE.value] += 1
            message = f"policy {running.application.policy} learns nothing from it"
            return FeedbackResult(item.query_id, FeedbackStatus.UNINFORMATIVE, message=message)
        if of_context:
            self._states.set(running, record.context, learned)
        running.state = everybody
        self._states.set(running, GLOBAL, everybody)
        counts[joined.status.value] += 1
        return FeedbackResult(item.query_id, joined.status, joined.losses, weights)

    def _find(self, query_id: str, asker: str) -> AnsweredQuery | None:
        record = self._journal.find(query_id, now_ns=self._clock())
        return record if record is not None and record.asker == asker else None


def _record(running: LiveApplication) -> dict[str, Any]:
    return {"application": running.application.dump(), "revision": running.revision}


def _weights(running: LiveApplication, state: Any) -> tuple[dict[str, float], str]:  # noqa: ANN401
    weights: dict[str, float] = {}
    remarks = []
    # The message names it if the policy fails here.
    with suppress(PolicyError):
        weights = running.policy.weights(state)
        remarks.append(running.policy.remark(state))
    return weights, "; ".join(filter(None, [*remarks, running.policy.complaint]))


def _check_feedback(index: int, item: FeedbackItem) -> None:
    where = f"feedback {index}"
    if not item.query_id:
        raise BadRequestError(f"{where}: query_id: found none, expected the id of an answer")
    if (item.label is None) == (item.reward is None):
        found = "neither" if item.label is None else "both"
        raise BadRequestError(f"{where}: found {found}, expected either label or reward")
    # The comparison is false for NaN.
    if item.reward is not None and not 0 <= item.reward <= 1:
        raise BadRequestError(f"{where}: reward: found {item.reward:g}, expected 0 to 1")
