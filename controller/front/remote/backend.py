"""What a front needs of a controller, and the form that it has in the controller's own process: calls.

The other form, of a front that is a process of its own, is in `remote_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

from clockwright.errors import BadRequestError, Denial, Refusal, RefusedError, UnknownModelError
from clockwright.foreign import quote
from clockwright.units import NO_REQUEST, NS_PER_MS, RequestId
from clockwright.wire.bulk import Buffer
from controller.access.quota_stage import QuotaStage, over_quota, quota_remedy
from controller.core.events import RequestArrived
from controller.core.quotas import Exceeded, Quotas
from controller.front.oip.classes import Levels
from controller.front.oip.protocol import Servable
from controller.front.remote.link_frames import RefusedEarly
from controller.front.remote.open_requests import Waits
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry, Pipeline
from controller.port import Ask, PortStage, Sink
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.selection.live_application import LiveApplication, none_answers
from controller.selection.parts import PartStage, most_rows
from controller.selection.shadows import Shadows
from controller.stages.pipelines.stage import REQUEST_BYTES_MAX, PipelineStage
from controller.stages.sequences.driven import DrivenStage
from controller.stages.sequences.limits import SequenceConfig
from controller.stages.sequences.stage import SequenceStage, places_of_clients

DEFAULT_SLO_NS = 100 * NS_PER_MS
#: How a refusal begins where no model has the name in any version; Triton's clients look for these words.
UNKNOWN_NAME: Final = "Request for unknown model"


class Askable(Protocol):
    """What a client names."""

    @property
    def number(self) -> int:
        """The number that requests name it by (`Ask.target`)."""

    @property
    def servable(self) -> Servable:
        """Its inputs and outputs."""


D = TypeVar("D", bound=Askable)


@dataclass(frozen=True, slots=True)
class LocalDescription:
    """A model or an application of this process."""

    servable: Servable
    subject: Entry | LiveApplication
    #: What takes its requests, but for steps of sequences.
    stages: PortStage[Any]
    number: int = 0
    #: The version that gets copies of its requests, and of which part of them; None: none does.
    shadow: tuple[Entry, float] | None = None

    def keeps_inputs(self, rows: int) -> bool:
        """Whether the controller itself needs the inputs of a request of so many rows."""
        subject = self.subject
        return (
            isinstance(subject, LiveApplication | Pipeline)
            or subject.is_cached
            or subject.stream is not None
            or self.shadow is not None
            or rows > self.servable.largest_batch
        )


class Backend(Protocol[D]):
    """A controller as a front sees it."""

    @property
    def clock(self) -> Callable[[], int]:
        """The front's clock, in ns."""

    @property
    def generation(self) -> int:
        """Changes whenever a description may have changed."""

    @property
    def default_slo_ns(self) -> int:
        """SLO of requests that name no SLO, to servables that have none."""

    def describe(self, sink: Waits, name: str, version: str, until: Callable[[], int]) -> D | None:
        """Find what a client names.

        Args:
            sink: told when a description that is awaited has come.
            name: of a model or an application.
            version: as the client named it, or an alias; may be empty.
            until: gives the time, on the front's clock, after which it is useless to wait for a description.

        Returns:
            None if it is not known yet: the sink is then told `Stale`, to begin again, or an error.

        Raises:
            RefusedError: no worker has described it yet.
            UnknownModelError: no such model or version.
            BadRequestError: no name is given.
        """

    def ask(self, described: D, ask: Ask, inputs: Sequence[Buffer], sink: Waits) -> RequestId:
        """Ask for an answer inside the SLO; as `PortStage.ask`. Raises ToldStatusError if it would be refused."""

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request, as `PortStage.withdraw` does."""

    def in_vain(
        self, described: D, rows: int, arrival_ns: int, slo_ns: int, num_bytes: int
    ) -> RequestArrived | None:
        """Find whether a request that arrived now would be refused as `OVERLOADED`. Else it is to be asked.

        Args:
            described: what it asks, for no tenant, and without anything that `Ask` has besides these.
            rows: its rows.
            arrival_ns: when it came.
            slo_ns: its SLO.
            num_bytes: of its inputs.

        Returns:
            What `turned_away` takes; None: it may be answered, or that is not known here.
        """

    def turned_away(self, request: RequestArrived, number: int) -> None:
        """So many requests that are in vain like this one were refused."""

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state no SLO. Returns None if it is not known."""

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count refusals that do not reach the scheduler."""

    def denied(self, denial: Denial) -> None:
        """Count a call that its client has no right to make."""

    def bad_request(self) -> None:
        """Count a request that is malformed, or does not fit what it names."""


class LocalBackend:
    """The controller of this process."""

    def __init__(
        self,
        runtime: Runtime,
        catalogue: Catalogue,
        applications: Applications,
        *,
        default_slo_ns: int = DEFAULT_SLO_NS,
        quotas: Quotas | None = None,
        sequences: SequenceConfig = SequenceConfig(),  # noqa: B008  it is frozen
    ) -> None:
        """Call the parts of the controller directly. A change of quotas needs a new generation of the catalogue.

        The SLO is of requests that name none, to models that have none. Without quotas no tenant has a bound.
        """
        self.clock = runtime.clock
        self._quotas = quotas if quotas is not None else Quotas()
        self.default_slo_ns = default_slo_ns
        self._runtime = runtime
        self._catalogue = catalogue
        self._applications = applications
        # A request passes quotas, is cut into batches, then passes applications, then the prediction cache. A step of a
        # sequence waits for its turn behind the quotas, one with several answers is asked step after step there, and each
        # stage of a pipeline passes the rest.
        parts = PartStage(applications.queries)
        self._stages: QuotaStage[Any] = QuotaStage(parts, self._quotas, runtime)
        #: Sequences of steps, and requests with several answers.
        self.sequences = SequenceStage[Any](parts, runtime, catalogue, sequences)
        self.streams: DrivenStage[Any] = DrivenStage(parts, runtime, self.sequences)
        self._pipelines = PipelineStage(parts, runtime, catalogue)
        # An application may have pipelines as members, and asks them behind the quotas, which it has passed.
        applications.queries.members.pipelines = self._pipelines
        self._step_stages = self._stages.before(self.sequences)
        self._stream_stages = self._stages.before(self.streams)
        self._pipelined = self._stages.before(self._pipelines)
        self._shadows = Shadows(runtime)

    @property
    def generation(self) -> int:
        """Changes whenever a description may have changed."""
        return self._catalogue.generation

    def describe(
        self, sink: Sink, name: str, version: str, until: Callable[[], int]
    ) -> LocalDescription:
        """Find what a client names, which is known at once."""
        try:
            return self.find(name, version)
        except RefusedError as error:
            self.refused_at_door(error.refusal)
            raise

    def ask(
        self, described: LocalDescription, ask: Ask, inputs: Sequence[Buffer], sink: Sink
    ) -> RequestId:
        """Ask for an answer inside the SLO. Each client's request comes here once, from a front of any kind."""
        if ask.step is None and described.shadow is None:
            return described.stages.ask(described.subject, ask, inputs, sink)
        stages = described.stages if ask.step is None else self._step_stages
        if ask.step is None and described.shadow is not None:
            sink = self._shadows.follow(*described.shadow, ask, inputs, sink)
        return stages.ask(described.subject, ask, inputs, sink)

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request: its sink is not called any more."""
        if self._pipelines.holds(request_id):
            self._pipelined.withdraw(request_id)
        else:
            is_stream = self.streams.holds(request_id)
            # Steps' stage passes on what is none.
            (self._stream_stages if is_stream else self._step_stages).withdraw(request_id)

    def in_vain(
        self,
        described: LocalDescription,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        num_bytes: int,
    ) -> RequestArrived | None:
        """Find whether a request that arrived now would be refused as `OVERLOADED`."""
        if self._quotas or described.keeps_inputs(rows):
            return None
        assert isinstance(described.subject, Entry)
        request = RequestArrived(
            request_id=NO_REQUEST, model_id=described.subject.model_id, rows=rows,
            arrival_ns=arrival_ns, slo_ns=slo_ns, num_bytes=num_bytes,
        )  # fmt: skip
        return request if self._runtime.is_in_vain(request) else None

    def turned_away(self, request: RequestArrived, number: int) -> None:
        """So many requests that are in vain like this one were refused."""
        self._runtime.turned_away(request, number)

    def find(self, name: str, version: str) -> LocalDescription:
        """Do what `describe` does, with its errors."""
        if running := self.application(name, version):
            shape = self._applications.shape(running)
            if shape is None:
                raise self._no_models(running)
            servable = Servable(
                name=running.application.name,
                version=running.version,
                inputs=shape.inputs,
                outputs=shape.outputs,
                max_rows=self._applications.max_rows(running),
                slo_ns=running.application.slo_ns,
                has_contexts=True,
            )
            return LocalDescription(servable, running, self._stages)
        model = self.model(name, version)
        if (refused := self._catalogue.refusal(model)) is not None:
            raise refused
        assert model.folder is not None
        if isinstance(model, Pipeline):
            return self._pipeline(model)
        # Before a worker has the model, the configured sizes stand in: the scheduler then refuses the
        # request in its own words.
        largest_batch = model.largest_batch or model.folder.settings.batch_sizes[-1]
        servable = Servable(
            model.name,
            model.version,
            model.inputs,
            model.outputs,
            most_rows(model, largest_batch),
            model.slo_ns,
            one_by_one=model.one_by_one if largest_batch == 1 else "",
            largest_batch=largest_batch,
            labels=model.folder.labels,
            levels=Levels(*levels) if (levels := model.folder.settings.priority) else None,
        )
        stages = self._stages
        if model.stream is not None:
            stages = self._stream_stages
            servable.inputs, servable.outputs = model.stream.inputs, model.stream.outputs
            servable.max_steps = model.stream.max_steps
            servable.generates = model.stream.generate is not None
            if servable.generates:
                servable.max_rows = servable.largest_batch = 1
        elif model.is_stepped:
            sent, got = places_of_clients(model)
            servable.steps = replace(
                servable,
                inputs=tuple(model.inputs[place] for place in sent),
                outputs=tuple(model.outputs[place] for place in got),
                max_rows=1,
            )
        shadow = None
        if self._catalogue.has_versions(name):
            shadow = self._catalogue.shadow(name)
            if shadow is not None and (
                model.stream is not None or shadow[0] is model or shadow[0].inputs != model.inputs
            ):
                shadow = None
            if not version and len(shares := self._catalogue.shares(name)) > 1:
                servable.traffic = shares
        return LocalDescription(servable, model, stages, shadow=shadow)

    def _pipeline(self, model: Pipeline) -> LocalDescription:
        models, folder, graph = self._catalogue.look_at(model), model.folder, model.graph
        if graph is None or folder is None:
            words = f"pipeline {model.name}: no worker has looked at all of its models yet"
            raise RefusedError(Refusal.NO_WORKER, words)
        # Each stage has to take the rows, and what lies between them to fit.
        bounds = [REQUEST_BYTES_MAX // max(graph.held_bytes(1), 1), folder.settings.max_rows]
        for each in filter(None, models):
            bounds.append(most_rows(each, each.largest_batch))
            if any(spec.vary for spec in (*each.inputs, *each.outputs)):
                # Text that fits into a batch need not fit into its parts.
                bounds.append(each.largest_batch)
        servable = Servable(
            model.name,
            model.version,
            model.inputs,
            model.outputs,
            1 if graph.one_row else max(min(filter(None, bounds), default=1), 1),
            model.slo_ns,
            labels=folder.labels,
            is_pipeline=True,
        )
        return LocalDescription(servable, model, self._pipelined)

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state no SLO."""
        if running := self._applications.find(name):
            return running.application.slo_ns or self.default_slo_ns
        model = self._catalogue.find(name)
        slo_ns = model.slo_ns if model is not None else None
        return slo_ns if slo_ns is not None else self.default_slo_ns

    def keep_early(self, told: RefusedEarly, offset_ns: int) -> None:
        """Record a request that a front refused because of a quota, so that `clockwright explain` finds it.

        The front's clock is ahead of this one by `offset_ns`.
        """
        ask = told.ask
        ask.arrival_ns -= offset_ns
        found = None if told.bound == "rate_rps" else ask.slo_ns
        exceeded = Exceeded(told.bound, found, told.expected, retry_ns=told.retry_ns)
        self._runtime.past.refused_at_door(
            ask,
            told.name,
            told.departure_ns - offset_ns,
            over_quota(ask.tenant, exceeded),
            quota_remedy(exceeded),
            by_front=True,
        )

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count refusals that do not reach the scheduler."""
        self._runtime.telemetry.refused_at_door(refusal, number)

    def refused_early(self, tenant: str, number: int) -> None:
        """Count refusals by fronts because a tenant's rate was used up."""
        self.refused_at_door(Refusal.QUOTA, number)
        if (use := self._quotas.find(tenant, self.clock())) is not None:
            use.num_refused += number

    def denied(self, denial: Denial, number: int = 1) -> None:
        """Count calls that their clients have no right to make."""
        self._runtime.telemetry.denied(denial, number)

    def bad_request(self, number: int = 1) -> None:
        """Count requests that are malformed, or do not fit what they name."""
        self._runtime.telemetry.bad_requests += number

    def application(self, name: str, version: str) -> LiveApplication | None:
        """Find the application that a client names. Returns None if no application has the name.

        Raises UnknownModelError if it has another version.
        """
        running = self._applications.find(name)
        if running is not None and version and version != running.version:
            raise UnknownModelError(
                f"application {name}: found version {quote(version)}, expected"
                f" {quote(running.version)}, which is served, or none"
            )
        return running

    def model(self, name: str, version: str) -> Entry:
        """Find the model that a client names.

        Raises UnknownModelError if there is no such model or version; BadRequestError if no name is given.
        """
        if not name:
            raise BadRequestError("model_name: found none, expected the name of a model")
        model = self._catalogue.find(name, version)
        if model is not None:
            return model
        versions = self._catalogue.versions(name)
        if not versions:
            copies = self._catalogue.find(f"{name}-0")
            hint = f"; its copies are called {name}-0, {name}-1, ..." if copies else ""
            raise UnknownModelError(f"{UNKNOWN_NAME}: there is no model {quote(name)}{hint}")
        what = f"model {name}: "
        if not version.isdecimal():
            # As above.
            what += f"failed to get model version from specified version string {quote(version)}: "
        served = " or ".join(quote(each.version) for each in versions)
        aliases = "".join(f", alias {each}" for each in self._catalogue.routing(name).aliases)
        raise UnknownModelError(
            f"{what}found version {quote(version)}, expected {served}, which is served{aliases}, or none"
        )

    def _no_models(self, running: LiveApplication) -> RefusedError:
        """Say why an application has no model that could answer; when to come again, as its first model says."""
        words = none_answers(self._catalogue, running)
        models = map(self._catalogue.find, running.application.models)
        refused = [self._catalogue.refusal(model) for model in models if model is not None]
        loading = [each for each in refused if each and each.refusal is Refusal.LOADING]
        if loading:
            first = min(loading, key=lambda each: each.figures["retry_ns"])
            return RefusedError(Refusal.LOADING, words, figures=first.figures)
        return RefusedError(Refusal.NO_WORKER, words)
