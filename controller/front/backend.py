"""What a front needs of a controller, and the form that it has in the controller's own process: calls.

The other form, of a front that is a process of its own, is in `remote`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from typing_extensions import override

from clockwright.bulk import Buffer, total_bytes
from clockwright.errors import BadRequestError, Denial, Refusal, RefusedError, UnknownModelError
from clockwright.units import NS_PER_MS, format_ns
from controller.catalogue import Catalogue, Entry
from controller.core.quotas import Exceeded, Quotas, TenantUse
from controller.front.link_frames import RefusedEarly
from controller.front.oip import Servable, quote
from controller.runtime import Answer, Runtime
from controller.selection.applications import Applications
from controller.selection.live_application import LiveApplication
from controller.selection.queries import Answered

DEFAULT_SLO_NS = 100 * NS_PER_MS


class ToldAnswer:
    """An answer of a controller elsewhere."""

    __slots__ = ("expected_departure_ns", "outputs", "parameters")

    def __init__(
        self,
        outputs: Sequence[Buffer],
        expected_departure_ns: int,
        parameters: dict[str, bool | int | str] | None,
    ) -> None:
        #: Tensor bytes per output, in the servable's order.
        self.outputs = outputs
        #: On the front's clock.
        self.expected_departure_ns = expected_departure_ns
        #: What the response says beside its tensors; None: nothing.
        self.parameters = parameters


class Asker(Protocol):
    """A request that waits at a front. None of its methods raises or takes long."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, result: Answer | Answered | ToldAnswer, /) -> None:
        """Take the answer."""

    def set_exception(self, exception: Exception, /) -> None:
        """Hear why there is no answer."""

    def begin(self) -> None:
        """Begin afresh: what the client names is described now, or otherwise than before."""


class Question(Protocol):
    """What is asked, but for its inputs."""

    @property
    def rows(self) -> int:
        """Rows of each input."""

    @property
    def slo_ns(self) -> int:
        """The answer is due this long after the arrival."""

    @property
    def tenant(self) -> str:
        """Whose it is; may be empty."""

    @property
    def context(self) -> str:
        """User or session, for an application; may be empty."""

    @property
    def owner(self) -> str:
        """Who asks an application, and may say what became of the answer; may be empty."""

    @property
    def explain(self) -> bool:
        """The answer is to say where its time went."""

    @property
    def traced(self) -> bool:
        """It is good to know where its time went, but no answer of the prediction cache is forgone for that."""

    @property
    def request_id(self) -> str:
        """What the client calls it; may be empty."""


class Answerer(Protocol):
    """What a client names, and how to ask it."""

    @property
    def servable(self) -> Servable:
        """What it takes and gives."""

    def ask(
        self, asker: Asker, question: Question, inputs: Sequence[Buffer], arrival_ns: int
    ) -> Callable[[], object]:
        """Ask for an answer inside the SLO.

        Args:
            asker: is told, in a later turn of the event loop.
            question: fits `servable`.
            inputs: tensor bytes per input, in the servable's order.
            arrival_ns: when the request came, on the front's clock.

        Returns:
            What withdraws the request; its asker hears nothing more then.
        """


class Backend(Protocol):
    """A controller as a front sees it."""

    @property
    def clock(self) -> Callable[[], int]:
        """The front's clock, in ns."""

    @property
    def generation(self) -> int:
        """Another number whenever something may be described otherwise than before."""

    @property
    def default_slo_ns(self) -> int:
        """SLO of requests that name no SLO, to servables that have none."""

    def describe(
        self, asker: Asker, name: str, version: str, until: Callable[[], int]
    ) -> Answerer | None:
        """Find what a client names.

        Args:
            asker: who wants to know.
            name: of a model or an application.
            version: the one that is wanted; may be empty.
            until: says when it makes no sense any more to wait for what is not known, on the front's clock.

        Returns:
            None: it is not known yet; the asker is told to begin again, or why not.

        Raises:
            RefusedError: no worker has described it yet.
            UnknownModelError: no such model or version.
            BadRequestError: no name is given.
        """

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state none; None: not known."""

    def refused_at_door(self, refusal: Refusal) -> None:
        """Count a refusal of which the scheduler does not hear."""

    def denied(self, denial: Denial) -> None:
        """Count a call that somebody may not make."""


class LocalAnswerer(Answerer, Protocol):
    """An answerer of this process."""

    @property
    def keeps_inputs(self) -> bool:
        """Whether something may be learned from inputs when their request is over."""


class LocalModel:
    """A model, asked past the prediction cache."""

    __slots__ = ("_model_id", "_runtime", "servable")
    keeps_inputs = False

    def __init__(self, runtime: Runtime, entry: Entry, servable: Servable) -> None:
        self.servable = servable
        self._model_id = entry.model_id
        self._runtime = runtime

    def ask(
        self, asker: Asker, question: Question, inputs: Sequence[Buffer], arrival_ns: int
    ) -> Callable[[], object]:
        """Do what `Answerer` says."""
        runtime = self._runtime
        request_id = runtime.ask(
            asker,
            self._model_id,
            inputs,
            rows=question.rows,
            arrival_ns=arrival_ns,
            slo_ns=question.slo_ns,
            tenant=question.tenant,
            name=question.request_id,
        )
        return functools.partial(runtime.withdraw, request_id)


class CachedModel(LocalModel):
    """A model whose answers the prediction cache may know."""

    __slots__ = ("_applications",)
    keeps_inputs = True

    def __init__(
        self, runtime: Runtime, entry: Entry, servable: Servable, applications: Applications
    ) -> None:
        super().__init__(runtime, entry, servable)
        self._applications = applications

    @override
    def ask(
        self, asker: Asker, question: Question, inputs: Sequence[Buffer], arrival_ns: int
    ) -> Callable[[], object]:
        if question.explain:
            return super().ask(asker, question, inputs, arrival_ns)
        prediction = self._applications.predict(
            self._model_id,
            inputs,
            rows=question.rows,
            arrival_ns=arrival_ns,
            slo_ns=question.slo_ns,
            tenant=question.tenant,
            name=question.request_id,
        )
        return _await(asker, prediction)


class LocalApplication:
    """An application."""

    __slots__ = ("_applications", "_running", "servable")
    keeps_inputs = True

    def __init__(
        self, applications: Applications, running: LiveApplication, servable: Servable
    ) -> None:
        self.servable = servable
        self._applications = applications
        self._running = running

    def ask(
        self, asker: Asker, question: Question, inputs: Sequence[Buffer], arrival_ns: int
    ) -> Callable[[], object]:
        """Do what `Answerer` says."""
        answer = self._applications.answer(
            self._running,
            inputs,
            rows=question.rows,
            arrival_ns=arrival_ns,
            slo_ns=question.slo_ns,
            context=question.context,
            tenant=question.tenant,
            asker=question.owner,
            name=question.request_id,
        )
        return _await(asker, answer)


class MeteredAnswerer:
    """An answerer whose askers have quotas."""

    __slots__ = ("_answerer", "_clock", "_quotas", "_refused", "keeps_inputs", "servable")

    def __init__(
        self,
        answerer: LocalAnswerer,
        quotas: Quotas,
        clock: Callable[[], int],
        refused: Callable[[str, Question, int, OverQuotaError], None],
    ) -> None:
        self.servable = answerer.servable
        self.keeps_inputs = answerer.keeps_inputs
        self._answerer = answerer
        self._quotas = quotas
        self._clock = clock
        self._refused = refused

    def ask(
        self, asker: Asker, question: Question, inputs: Sequence[Buffer], arrival_ns: int
    ) -> Callable[[], object]:
        """Do what `Answerer` says.

        Raises:
            RefusedError: the tenant may not have this now.
        """
        now_ns = self._clock()
        use = self._quotas.find(question.tenant, now_ns)
        if use is None:
            return self._answerer.ask(asker, question, inputs, arrival_ns)
        num_bytes = total_bytes(inputs)
        exceeded = use.enter(now_ns, num_bytes, question.slo_ns)
        if exceeded is not None:
            error = OverQuotaError(question.tenant, exceeded)
            self._refused(self.servable.name, question, arrival_ns, error)
            raise error
        metered = _MeteredAsker(asker, use, num_bytes)
        metered.withdraw = self._answerer.ask(metered, question, inputs, arrival_ns)
        return metered.give_up


class _MeteredAsker:
    """A request that counts against a quota until it is over."""

    __slots__ = ("_asker", "_num_bytes", "_use", "withdraw")

    def __init__(self, asker: Asker, use: TenantUse, num_bytes: int) -> None:
        self._asker = asker
        self._use: TenantUse | None = use
        self._num_bytes = num_bytes
        self.withdraw: Callable[[], object] | None = None

    def done(self) -> bool:
        """Whether nobody waits any more."""
        return self._asker.done()

    def begin(self) -> None:
        """Begin afresh, which counts anew."""
        self._leave()
        self._asker.begin()

    def set_result(self, result: Answer | Answered | ToldAnswer) -> None:
        """Hand the answer on."""
        self._leave()
        self._asker.set_result(result)

    def set_exception(self, exception: Exception) -> None:
        """Hand on why there is no answer."""
        self._leave()
        self._asker.set_exception(exception)

    def give_up(self) -> None:
        """Nobody waits any more."""
        self._leave()
        assert self.withdraw is not None
        self.withdraw()

    def _leave(self) -> None:
        if self._use is not None:
            self._use.leave(self._num_bytes)
            self._use = None


class OverQuotaError(RefusedError):
    """The refusal of what a tenant may not have."""

    def __init__(self, tenant: str, exceeded: Exceeded) -> None:
        whose = f"tenant {quote(tenant)}" if tenant else "whoever names no tenant"
        bound, expected = exceeded.bound, f"{exceeded.expected:.15g}"
        found = "all are used up" if exceeded.found is None else f"found {exceeded.found}"
        limit = "at least" if bound == "slo_ns_min" else "at most"
        words = f"{whose} may have {bound} {expected} {limit}, {found}"
        figures = {bound: round(exceeded.expected)}
        if exceeded.found is not None:
            figures["found"] = exceeded.found
        if exceeded.retry_ns is not None:
            figures["retry_ns"] = exceeded.retry_ns
            words += f"; again in {format_ns(exceeded.retry_ns)}"
        super().__init__(Refusal.QUOTA, words, figures=figures)
        self.exceeded = exceeded

    @property
    def remedy(self) -> str:
        """What would have let the request succeed."""
        bound, retry_ns = self.exceeded.bound, self.exceeded.retry_ns
        if bound in ("slo_ns_min", "slo_ns_max"):
            limit = "at least" if bound == "slo_ns_min" else "at most"
            return f"an SLO of {format_ns(round(self.exceeded.expected))} {limit}"
        again = "" if retry_ns is None else f"to come again {format_ns(retry_ns)} later, or "
        return f"{again}more {bound} for its tenant (`clockwright quotas set`)"


class LocalBackend:
    """The controller that this process is."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        applications: Applications | None = None,
        *,
        default_slo_ns: int = DEFAULT_SLO_NS,
        quotas: Quotas | None = None,
    ) -> None:
        """Look things up where they are.

        Args:
            runtime: decides and answers.
            catalogue: knows the models.
            applications: know the applications, which clients ask like models; None: there are none.
            default_slo_ns: SLO of requests that name no SLO, to models that have none.
            quotas: of tenants; a change needs a new generation of the catalogue. None: nobody has any.
        """
        self.clock = runtime.clock
        self._quotas = quotas if quotas is not None else Quotas()
        self.default_slo_ns = default_slo_ns
        self._runtime = runtime
        self._catalogue = catalogue
        self._applications = applications

    @property
    def generation(self) -> int:
        """Another number whenever something may be described otherwise than before."""
        return self._catalogue.generation

    def describe(
        self, asker: Asker, name: str, version: str, until: Callable[[], int]
    ) -> LocalAnswerer:
        """Find what a client names, which is known at once."""
        return self.find(name, version)

    def find(self, name: str, version: str) -> LocalAnswerer:
        """Do what `describe` does, with its errors."""
        answerer = self._find(name, version)
        # Where nobody has a quota no request pays for those that others have elsewhere.
        if not self._quotas:
            return answerer
        return MeteredAnswerer(answerer, self._quotas, self.clock, self._over_quota)

    def _find(self, name: str, version: str) -> LocalModel | LocalApplication:
        if running := self.application(name, version):
            assert self._applications is not None
            shape = self._applications.shape(running)
            if shape is None:
                raise _no_models(running)
            servable = Servable(
                name=running.application.name,
                version=running.version,
                inputs=shape.inputs,
                outputs=shape.outputs,
                max_rows=self._applications.max_rows(running),
                slo_ns=running.application.slo_ns,
                has_contexts=True,
            )
            return LocalApplication(self._applications, running, servable)
        model = self.model(name, version)
        if not model.outputs:
            raise RefusedError(
                Refusal.NO_WORKER,
                f"model {model.name} is {self._catalogue.state(model).value}:"
                f" {self._catalogue.reason(model)}",
            )
        assert model.folder is not None
        # While no worker has the model, the configured sizes stand in: the scheduler then refuses the
        # request in its own words.
        max_rows = model.largest_batch or model.folder.settings.batch_sizes[-1]
        servable = Servable(
            model.name, model.version, model.inputs, model.outputs, max_rows, model.slo_ns
        )
        if self._applications is not None and model.is_cached:
            return CachedModel(self._runtime, model, servable, self._applications)
        return LocalModel(self._runtime, model, servable)

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state none."""
        if self._applications is not None and (running := self._applications.find(name)):
            return running.application.slo_ns or self.default_slo_ns
        model = self._catalogue.find(name)
        slo_ns = model.slo_ns if model is not None else None
        return slo_ns if slo_ns is not None else self.default_slo_ns

    def _over_quota(
        self, name: str, question: Question, arrival_ns: int, error: OverQuotaError
    ) -> None:
        """Count a refusal for a quota, and keep it for whoever asks about it."""
        self.refused_at_door(error.refusal)
        self._runtime.past.refused_at_door(
            question.request_id,
            name,
            question.tenant,
            question.rows,
            arrival_ns,
            question.slo_ns,
            self.clock(),
            error,
            error.remedy,
        )

    def keep_early(self, told: RefusedEarly, offset_ns: int) -> None:
        """Keep what a front has refused because of a quota, for whoever asks about it.

        Args:
            told: the request, and what its tenant may have.
            offset_ns: how far the front's clock is ahead of this one.
        """
        found = None if told.bound == "rate_rps" else told.slo_ns
        exceeded = Exceeded(told.bound, found, told.expected, retry_ns=told.retry_ns)
        error = OverQuotaError(told.tenant, exceeded)
        self._runtime.past.refused_at_door(
            told.request_id,
            told.name,
            told.tenant,
            told.rows,
            told.arrival_ns - offset_ns,
            told.slo_ns,
            told.departure_ns - offset_ns,
            error,
            error.remedy,
            by_front=True,
        )

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count refusals of which the scheduler does not hear."""
        self._runtime.telemetry.refused_at_door(refusal, number)

    def refused_early(self, tenant: str, number: int) -> None:
        """Count what fronts have refused because a tenant's rate was used up."""
        self.refused_at_door(Refusal.QUOTA, number)
        if (use := self._quotas.find(tenant, self.clock())) is not None:
            use.num_refused += number

    def denied(self, denial: Denial) -> None:
        """Count a call that somebody may not make."""
        self._runtime.telemetry.denied(denial)

    def application(self, name: str, version: str) -> LiveApplication | None:
        """Find the application that a client names; None: it is none.

        Raises:
            UnknownModelError: it has another version.
        """
        running = self._applications.find(name) if self._applications is not None else None
        if running is not None and version and version != running.version:
            raise UnknownModelError(
                f"application {name}: found version {quote(version)}, expected"
                f" {quote(running.version)}, which is served, or none"
            )
        return running

    def model(self, name: str, version: str) -> Entry:
        """Find the model that a client names.

        Raises:
            UnknownModelError: no such model or version.
            BadRequestError: no name is given.
        """
        if not name:
            raise BadRequestError("model_name: found none, expected the name of a model")
        model = self._catalogue.find(name)
        if model is None:
            copies = self._catalogue.find(f"{name}-0")
            hint = f"; its copies are called {name}-0, {name}-1, ..." if copies else ""
            raise UnknownModelError(f"there is no model {quote(name)}{hint}")
        if version and version != model.version:
            raise UnknownModelError(
                f"model {name}: found version {quote(version)}, expected {quote(model.version)}, which is"
                " served, or none"
            )
        return model


def _no_models(running: LiveApplication) -> RefusedError:
    reasons = [f"{name}: {reason}" for name, reason in running.misfits.items()]
    return RefusedError(
        Refusal.NO_WORKER,
        f"application {running.application.name}: no worker has looked at a model that fits it yet"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
    )


def _await(asker: Asker, answer: Coroutine[Any, Any, Answered]) -> Callable[[], object]:
    """Tell an asker what comes of a coroutine; gives what stops it."""
    task = asyncio.create_task(answer)
    task.add_done_callback(functools.partial(_tell, asker))
    return task.cancel


def _tell(asker: Asker, task: asyncio.Task[Answered]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if asker.done():
        return  # It was withdrawn in the moment between the end of its task and this call.
    if isinstance(error, Exception):
        asker.set_exception(error)
    else:
        asker.set_result(task.result())
