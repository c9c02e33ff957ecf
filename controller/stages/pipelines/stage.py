"""Pipelines as a stage of the port: each of their models is asked like any other, and all have one deadline.

When a request comes, all of it is predicted (`core.run.plan`). What cannot end in time is refused at once. Otherwise each
model is asked when its inputs are there: its answer is due so early that the models behind it have their time, and a
part of the slack (`core.run.kept_ns`). Cold models further behind are wanted meanwhile. If one model refuses, so does the
pipeline, and the others are withdrawn.

Outputs pass on as the views that they came as. Those that no stage needs any more are let go at once, because they may
lie in the memory that a worker shares with this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from clockwright.errors import BadRequestError, Refusal, RefusedError
from clockwright.units import NO_REQUEST, NS_PER_S, NS_PER_US, ModelId, RequestId, WorkerId
from clockwright.wire.bulk import Buffer
from controller.core.admission import way_back_of
from controller.core.forecast import Forecast
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry, Pipeline
from controller.port import (
    INTERNAL,
    Answered,
    Ask,
    Course,
    Failed,
    Parameters,
    PortStage,
    Refused,
    Sink,
    Stale,
    Told,
)
from controller.runtime import Runtime
from controller.selection.live_application import LiveApplication
from controller.stages.pipelines.core.backlog import Backlog
from controller.stages.pipelines.core.graph import FittedStage, PipelineGraph
from controller.stages.pipelines.core.run import (
    PipelineRun,
    StageTime,
    TimePlan,
    ends_ns,
    kept_ns,
    plan,
)
from controller.telemetry.past_requests import OPEN, QueryMade
from controller.telemetry.rows import RequestRow
from controller.telemetry.tables import CANCELLED, OK

log = logging.getLogger(__name__)

#: All requests to pipelines together may have so many bytes between their stages.
HELD_BYTES_MAX: Final = 1 << 30
#: And one of them; a request of so many rows that it could have more is refused as too large.
REQUEST_BYTES_MAX: Final = 64 << 20

# From one stage's answer to the next one's way lie two turns of the event loop.
_HOP_NS: Final = 200 * NS_PER_US
# Work of others counts as so many times what it is in full batches. A modelled device that was offered 1 to 3 times what it
# can do answered 0.8 to 0.9 of its best rate. Counted once, requests were admitted up to the edge, and a fifth to a half
# of the first stages were in vain.
_RATE_MARGIN: Final = 1.25
# A pipeline whose times alone rule its requests out is tried once in so long, as if nothing came behind each stage, or
# a time that was measured too long would stand for ever.
_TRY_NS: Final = NS_PER_S


@dataclass(slots=True)
class _Asked:
    """A stage of a request that has begun."""

    #: The number of the request to its model; 0: it was not asked.
    request_id: RequestId
    begin_ns: int
    end_ns: int = 0
    outcome: str = OPEN
    course: Course | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has no answer yet."""

    pipeline: Pipeline
    ask: Ask
    sink: Sink
    request_id: RequestId
    run: PipelineRun
    #: Bytes that it may have between its stages.
    held_bytes: int
    #: What was predicted when it came, and when that was.
    plan: TimePlan | None = None
    times: Sequence[StageTime] = ()
    planned_ns: int = 0
    #: By index.
    stages: dict[int, _Asked] = field(default_factory=dict)
    #: The work of each stage that is not over: who does it, when it is due, and how much it is.
    work: dict[int, tuple[frozenset[WorkerId], int, int]] = field(default_factory=dict)
    #: Later stages whose weights were not on a device when it came.
    cold: tuple[int, ...] = ()
    #: When its answer was predicted when its last batch was sent.
    expected_ns: int = 0


@dataclass(slots=True)
class _Predicted:
    """When the stages of a request would end."""

    #: What each model predicts; what follows is not known if one has a refusal.
    forecasts: Sequence[Forecast]
    now_ns: int
    times: Sequence[StageTime] = ()
    plan: TimePlan | None = None
    #: By how much it would be late; 0 or less: it would be in time.
    beyond_ns: int = 0
    #: As in `_Open`.
    work: dict[int, tuple[frozenset[WorkerId], int, int]] = field(default_factory=dict)


class PipelineStage:
    """Asks the models of pipelines."""

    def __init__(
        self,
        inner: PortStage[Entry | LiveApplication],
        runtime: Runtime,
        catalogue: Catalogue,
    ) -> None:
        """Begin with no requests; `inner` takes those to models."""
        self._inner = inner
        self._runtime = runtime
        self._catalogue = catalogue
        self._open: dict[RequestId, _Open] = {}
        #: By the number of a request to a model: the request to its pipeline, and the index of the stage.
        self._parts: dict[RequestId, tuple[_Open, int]] = {}
        self._held_bytes = 0
        self._backlog = Backlog()
        runtime.past.find_open.append(self._find_open)

    def holds(self, request_id: RequestId) -> bool:
        """Whether a request to a pipeline is open."""
        return request_id in self._open

    def ask(self, subject: Pipeline, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Do what `PortStage` says."""
        graph = subject.graph
        request_id = self._runtime.number(ask)
        loop = asyncio.get_running_loop()
        if graph is None:  # Its models have changed since it was described.
            loop.call_soon(sink.told, request_id, Stale(), ())
            return request_id
        run, held_bytes = PipelineRun(graph, inputs, ask.rows), graph.held_bytes(ask.rows)
        asking = _Open(subject, ask, sink, request_id, run, held_bytes)
        self._open[request_id] = asking
        self._runtime.pipeline_begun()
        self._held_bytes += held_bytes
        try:
            refused = self._refusal(asking) or self._go_on(asking)
        except BaseException:
            self._close(asking, Refusal.FAILED.value)
            raise
        if refused is not None:
            loop.call_soon(self._refuse, asking, refused)
        elif asking.cold:
            # Behind what the first stages need.
            loop.call_soon(self._want, asking)
        return request_id

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request."""
        if (asking := self._open.get(request_id)) is not None:
            self._close(asking, CANCELLED)

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """Take what came of a stage. Does nothing when its request is over."""
        entry = self._parts.pop(request_id, None)
        if entry is None:
            return
        asking, index = entry
        stage = asking.stages[index]
        stage.end_ns = self._runtime.clock()
        self._stage_over(asking, index)
        try:
            refused = self._take(asking, index, told, outputs)
        except Exception as error:
            # Nothing else would answer the request.
            log.exception("pipeline %s: a request failed", asking.pipeline.name)
            self._refuse(asking, Failed(INTERNAL, f"internal error: {type(error).__name__}"))
            return
        if refused is not None:
            self._tell(asking, refused, ())

    # --- stages ---------------------------------------------------------------------------------

    def _take(
        self, asking: _Open, index: int, told: Told, outputs: Sequence[Buffer]
    ) -> Told | None:
        """Take what came of a stage. Returns why the request is not answered; None: it is, or it goes on."""
        stage, run = asking.stages[index], asking.run
        if not isinstance(told, Answered):
            stage.outcome = Refusal.FAILED.value
            if isinstance(told, Refused):
                stage.outcome = told.refusal.value
                return self._in_stage(asking, index, told)
            return told
        stage.outcome, stage.course = OK, told.course
        try:
            run.answered(index, outputs)
            results = run.results() if run.is_over else None
        except (BadRequestError, RefusedError, ValueError) as error:
            return self._failed(asking, index, error)
        if results is not None:
            self._answer(asking, told, results)
            return None
        return self._go_on(asking)

    def _go_on(self, asking: _Open) -> Refused | None:
        """Ask the models whose inputs are there. Returns why one of them was not asked."""
        for index in asking.run.next():
            try:
                refused = self._begin(asking, index)
            except (BadRequestError, RefusedError, ValueError) as error:
                refused = self._failed(asking, index, error)
            if refused is not None:
                stage = asking.stages[index]
                stage.end_ns, stage.outcome = stage.begin_ns, refused.refusal.value
                return refused
        return None

    def _begin(self, asking: _Open, index: int) -> Refused | None:
        """Ask the model of a stage. Returns why it was not asked; None: it was."""
        ask, graph, planned = asking.ask, asking.run.graph, asking.plan
        assert planned is not None
        stage = graph.stages[index]
        # The time of a stage begins when its inputs are there, as that of a request to a model does.
        begin_ns = self._runtime.clock() if stage.behind else ask.arrival_ns
        asking.stages[index] = asked = _Asked(NO_REQUEST, begin_ns)
        ahead_ns, time = planned.ahead_ns[index], asking.times[index]
        load_ns = max(asking.planned_ns + time.load_ns - begin_ns, 0) if time.load_ns else 0
        left_ns = ask.arrival_ns + ask.slo_ns - begin_ns
        own_ns = left_ns - kept_ns(left_ns, time.step_ns + load_ns, ahead_ns)
        model = self._member(stage)
        if model is None:
            return self._removed(asking, index)
        if own_ns <= 0:
            figures = _figures(max(ask.slo_ns - ahead_ns, 1), time.step_ns, load_ns)
            figures["queue_ns"] = -own_ns
            return self._in_stage(asking, index, Refused(Refusal.OVERLOADED, figures))
        inputs = asking.run.inputs(index)
        rows = stage.work(inputs, ask.rows, model.largest_batch)
        if stage.most_work > 1:
            asking.pipeline.saw_work(index, rows / ask.rows)
        own = Ask(0, rows, begin_ns, own_ns, ask.tenant)
        own.explain, own.weight = ask.explain, ask.weight
        own.work_ahead_ns = ask.work_ahead_ns + ahead_ns
        asked.request_id = self._inner.ask(model, own, inputs, self)
        self._parts[asked.request_id] = asking, index
        return None

    def _members(self, graph: PipelineGraph) -> list[Entry | None]:
        return [self._member(stage) for stage in graph.stages]

    def _member(self, stage: FittedStage) -> Entry | None:
        """Find the model of a stage. Returns None if the model of its name does not take and give the same now."""
        found = self._catalogue.find(stage.model, stage.version)
        if found is None or isinstance(found, Pipeline):
            return None
        return found if (found.inputs, found.outputs) == (stage.takes, stage.gives) else None

    def _want(self, asking: _Open) -> None:
        """Have cold models loaded for stages that have not begun."""
        if asking.request_id not in self._open:
            return
        until_ns = asking.ask.arrival_ns + asking.ask.slo_ns
        for index in asking.cold:
            if (model := self._member(asking.run.graph.stages[index])) is not None:
                self._runtime.want(model.model_id, until_ns)

    def _stage_over(self, asking: _Open, index: int) -> None:
        """The work of a stage is done, or is not wanted any more."""
        if (work := asking.work.pop(index, None)) is not None:
            self._backlog.remove(*work)

    # --- what cannot be in time -------------------------------------------------------------------

    def _refusal(self, asking: _Open) -> Refused | None:
        """Plan a request. Returns why it cannot be answered; None: it may be."""
        ask, graph = asking.ask, asking.run.graph
        if self._runtime.closing:
            return Refused(Refusal.DRAINING, {"slo_ns": ask.slo_ns})
        if self._held_bytes > HELD_BYTES_MAX:
            return Refused(
                Refusal.OVERLOADED,
                {"slo_ns": ask.slo_ns, "request_id": asking.request_id},
                message=f"pipeline {asking.pipeline.name}: found {self._held_bytes} bytes between the stages of all"
                f" requests to pipelines, expected {HELD_BYTES_MAX} at most",
            )
        models = self._members(graph)
        for index, model in enumerate(models):
            if model is None:
                return self._removed(asking, index)
        found = [model for model in models if model is not None]
        predicted = self._predict(asking.pipeline, graph, found, ask)
        times = predicted.forecasts
        for index, time in enumerate(times):
            if time.refusal is not None:
                self._want_cold(asking.pipeline, [(found[index], time)])
                figures = _figures(ask.slo_ns, exec_ns=time.exec_ns, queue_ns=time.wait_ns)
                return self._in_stage(asking, index, Refused(time.refusal, figures))
        asking.times = predicted.times
        planned = asking.plan = predicted.plan
        assert planned is not None
        asking.cold = tuple(
            [i for i, time in enumerate(times) if time.load_ns and graph.stages[i].behind]
        )
        now_ns = asking.planned_ns = predicted.now_ns
        if predicted.beyond_ns <= 0 or not self._runtime.predicts:
            asking.work = predicted.work
            for each in asking.work.values():
                self._backlog.add(*each)
            return None
        pipeline, margin_ns = asking.pipeline, way_back_of(ask.slo_ns)
        load_ns = max([times[index].load_ns for index in planned.path])
        late_ns = ask.slo_ns - margin_ns + predicted.beyond_ns
        queue_ns = late_ns - planned.least_ns - load_ns
        refusal = Refusal.COLD if load_ns else Refusal.OVERLOADED
        if planned.least_ns > ask.slo_ns - margin_ns:
            if now_ns - pipeline.tried_ns > _TRY_NS:
                pipeline.tried_ns = now_ns
                asking.plan = replace(planned, ahead_ns=(0,) * len(found))
                return None
            refusal, load_ns, queue_ns = Refusal.INFEASIBLE, 0, 0
        self._want_cold(pipeline, [(found[index], times[index]) for index in planned.path])
        figures = _figures(ask.slo_ns, planned.least_ns, load_ns, max(queue_ns, 0), margin_ns)
        figures["request_id"] = asking.request_id
        names = ", ".join([graph.stages[index].name for index in planned.path])
        return Refused(refusal, figures, f"the longest way is by {names}")

    def forecast(self, pipeline: Pipeline, ask: Ask) -> Forecast:
        """Predict the answer of a request: when its last stage ends, the work of all, and whether it can be in time."""
        models = [] if pipeline.graph is None else self._members(pipeline.graph)
        found = [model for model in models if model is not None]
        if pipeline.graph is None or len(found) < len(models):
            return Forecast(Refusal.NO_WORKER)
        predicted = self._predict(pipeline, pipeline.graph, found, ask)
        exec_ns = sum([time.exec_ns for time in predicted.forecasts])
        for time in predicted.forecasts:
            if time.refusal is not None:
                return Forecast(time.refusal, time.wait_ns, exec_ns)
        assert predicted.plan is not None
        load_ns = max([predicted.forecasts[index].load_ns for index in predicted.plan.path])
        refusal = None
        if predicted.beyond_ns > 0 and self._runtime.predicts:
            refusal = Refusal.COLD if load_ns else Refusal.OVERLOADED
        return Forecast(refusal, predicted.plan.total_ns, exec_ns, load_ns=load_ns)

    def want(self, pipeline: Pipeline) -> None:
        """Have its cold models loaded, once in a while."""
        graph = pipeline.graph
        found = [] if graph is None else [m for m in self._members(graph) if m is not None]
        if found:
            ask = Ask(0, 1, self._runtime.clock(), NS_PER_S)
            times = self._forecast_models(found, ask, [1.0] * len(found))
            self._want_cold(pipeline, list(zip(found, times, strict=True)))

    def _forecast_models(
        self, models: Sequence[Entry], ask: Ask, work: Sequence[float]
    ) -> list[Forecast]:
        """Predict each model, with so many rows of work."""
        # What does not fit into a batch is asked in parts, which may run at once.
        rows = [
            min(ceil(each), model.largest_batch or ceil(each))
            for model, each in zip(models, work, strict=True)
        ]
        found: dict[tuple[ModelId, int], Forecast] = {}
        for each in sorted(set(rows)):
            of_rows = [
                model.model_id for model, own in zip(models, rows, strict=True) if own == each
            ]
            told = self._runtime.forecast(
                of_rows,
                Ask(0, each, ask.arrival_ns, ask.slo_ns),
                num_bytes=0,
                together=False,
            )
            found |= zip([(model_id, each) for model_id in of_rows], told, strict=True)
        return [found[model.model_id, each] for model, each in zip(models, rows, strict=True)]

    def _predict(
        self, pipeline: Pipeline, graph: PipelineGraph, models: Sequence[Entry], ask: Ask
    ) -> _Predicted:
        """Predict all stages of a request that comes now.

        It is late by as much as a stage would be if all stages that are due before it went first, at the usual rate.
        """
        work = [ask.rows * pipeline.work.get(index, 1.0) for index in range(len(models))]
        forecasts, now_ns = self._forecast_models(models, ask, work), self._runtime.clock()
        predicted = _Predicted(forecasts, now_ns)
        if any(time.refusal is not None for time in forecasts):
            return predicted
        times = predicted.times = [
            StageTime(t.exec_ns + t.way_ns + _HOP_NS * bool(s.behind), t.wait_ns, t.load_ns)
            for t, s in zip(forecasts, graph.stages, strict=True)
        ]
        planned = predicted.plan = plan(graph, times)
        left_ns = ask.arrival_ns + ask.slo_ns - way_back_of(ask.slo_ns) - now_ns
        beyond_ns = max(planned.total_ns - left_ns, -left_ns)
        ends = ends_ns(graph, times, planned.ahead_ns, left_ns)
        for index, (time, end_ns) in enumerate(zip(forecasts, ends, strict=True)):
            estimates, workers = time.estimates, time.workers
            if estimates is None or not workers:
                continue
            due_ns = now_ns + end_ns
            work_ns = int(_RATE_MARGIN * work[index] * estimates.ns_per_row / len(workers))
            predicted.work[index] = workers, due_ns, work_ns
            # Half of what runs now is done, on average.
            running_ns = estimates.exec_ns[-1] // 2
            ahead_ns = max(self._backlog.ahead_ns(workers, due_ns) - running_ns, 0)
            beyond_ns = max(beyond_ns, ahead_ns + time.exec_ns - end_ns)
        predicted.beyond_ns = beyond_ns
        return predicted

    def _want_cold(self, pipeline: Pipeline, times: Sequence[tuple[Entry, Forecast]]) -> None:
        """Have models loaded that keep a request from being answered: no request that waits asks for them.

        Once in a while, as `Queries` has it.
        """
        now_ns = self._runtime.clock()
        cold = [model.model_id for model, time in times if time.load_ns]
        if cold and now_ns - pipeline.wanted_ns > _TRY_NS:
            pipeline.wanted_ns = now_ns
            for model_id in cold:
                asyncio.get_running_loop().call_soon(self._runtime.want, model_id, now_ns + _TRY_NS)

    def _in_stage(self, asking: _Open, index: int, refused: Refused) -> Refused:
        """Say in which stage a request was refused."""
        stage = asking.run.graph.stages[index]
        where = f"stage {stage.name!r}, model {stage.model}"
        refused.figures["request_id"] = asking.request_id
        if refused.message:
            refused.message = f"pipeline {asking.pipeline.name}, {where}: {refused.message}"
        else:
            refused.detail = f"{where}: {refused.detail}" if refused.detail else where
        if refused.refusal is Refusal.INFEASIBLE and stage.behind and asking.plan is not None:
            # Alone in time, but earlier stages took the time that it needs.
            refused.refusal = Refusal.OVERLOADED
        return refused

    def _removed(self, asking: _Open, index: int) -> Refused:
        """Make the refusal of a request to a stage whose model is not the one any more that it was."""
        figures = {"slo_ns": asking.ask.slo_ns}
        return self._in_stage(asking, index, Refused(Refusal.MODEL_REMOVED, figures))

    def _failed(
        self, asking: _Open, index: int, error: BadRequestError | RefusedError | ValueError
    ) -> Refused:
        """Make the refusal of a request whose tensors cannot be passed on."""
        words = error.message if isinstance(error, RefusedError) else str(error)
        figures = {"slo_ns": asking.ask.slo_ns}
        return self._in_stage(asking, index, Refused(Refusal.FAILED, figures, words))

    # --- how it ends ------------------------------------------------------------------------------

    def _answer(self, asking: _Open, told: Answered, outputs: Sequence[Buffer]) -> None:
        run, ask = asking.run, asking.ask
        parameters: Parameters = {}
        if run.ended_by is not None:
            parameters["ended_by"] = run.graph.stages[run.ended_by].name
        if ask.explain:
            parameters |= self._explain(asking)
        asking.expected_ns = told.expected_departure_ns
        answered = Answered(asking.expected_ns, parameters or None)
        self._tell(asking, answered, outputs)

    def _refuse(self, asking: _Open, refused: Told) -> None:
        if asking.request_id in self._open:
            self._tell(asking, refused, ())

    def _tell(self, asking: _Open, told: Told, outputs: Sequence[Buffer]) -> None:
        outcome = OK if isinstance(told, Answered) else "FAILED"
        detail = ""
        if isinstance(told, Refused):
            outcome, detail = told.refusal.value, told.message or told.detail
        self._close(asking, outcome, detail)
        asking.sink.told(asking.request_id, told, outputs)

    def _close(self, asking: _Open, outcome: str, detail: str = "") -> None:
        """Forget a request, withdraw its open stages, and record it."""
        del self._open[asking.request_id]
        self._held_bytes -= asking.held_bytes
        self._runtime.pipeline_over()
        for index in list(asking.work):
            self._stage_over(asking, index)
        for stage in asking.stages.values():
            if self._parts.pop(stage.request_id, None) is not None:
                self._inner.withdraw(stage.request_id)
                stage.end_ns, stage.outcome = self._runtime.clock(), CANCELLED
        ask, now_ns = asking.ask, self._runtime.clock()
        row = RequestRow(
            asking.request_id,
            asking.pipeline.model_id,
            ask.rows,
            ask.arrival_ns,
            ask.slo_ns,
            ask.tenant,
            now_ns,
            outcome,
            weight=ask.weight,
        )
        row.expected_departure_ns = asking.expected_ns
        self._runtime.telemetry.add_request(row)
        self._runtime.past.queried(self._made(asking, outcome, detail))

    def _explain(self, asking: _Open) -> Parameters:
        """Say where the time of each stage went."""
        ask, graph = asking.ask, asking.run.graph
        now_ns = self._runtime.clock()
        said: Parameters = {
            "measured_us": (now_ns - ask.arrival_ns) // NS_PER_US,
            "slo_us": ask.slo_ns // NS_PER_US,
            "request_id": asking.request_id,
            "stages": ",".join([graph.stages[index].name for index in sorted(asking.stages)]),
        }
        for index, stage in sorted(asking.stages.items()):
            name = graph.stages[index].name
            said[f"{name}.begin_us"] = (stage.begin_ns - ask.arrival_ns) // NS_PER_US
            if not stage.end_ns:
                continue
            said[f"{name}.measured_us"] = (stage.end_ns - stage.begin_ns) // NS_PER_US
            said[f"{name}.request_id"] = stage.request_id
            if (course := stage.course) is not None:
                said[f"{name}.queue_us"] = course.queue_ns // NS_PER_US
                said[f"{name}.load_us"] = course.load_ns // NS_PER_US
                said[f"{name}.exec_us"] = course.exec_ns // NS_PER_US
                said[f"{name}.batch_size"] = course.batch_size
        return said

    def _find_open(self, request_id: RequestId) -> QueryMade | None:
        """Tell `explain` of a request that is open; None: it is not."""
        asking = self._open.get(request_id)
        return None if asking is None else self._made(asking, OPEN, "")

    def _made(self, asking: _Open, outcome: str, detail: str) -> QueryMade:
        ask, graph = asking.ask, asking.run.graph
        stages = sorted(asking.stages.items())
        return QueryMade(
            ask.name,
            asking.request_id,
            asking.pipeline.name,
            ask.tenant,
            ask.rows,
            ask.arrival_ns,
            ask.slo_ns,
            self._runtime.clock(),
            outcome,
            detail,
            tuple([(graph.stages[i].model, each.request_id, each.outcome) for i, each in stages]),
            tuple([
                (graph.stages[i].name, each.begin_ns - ask.arrival_ns, each.end_ns - ask.arrival_ns)
                for i, each in stages
            ]),
        )  # fmt: skip


def _figures(
    slo_ns: int, exec_ns: int = 0, load_ns: int = 0, queue_ns: int = 0, margin_ns: int = 0
) -> dict[str, int]:
    return {
        "slo_ns": slo_ns,
        "load_ns": load_ns,
        "exec_ns": exec_ns,
        "queue_ns": queue_ns,
        "margin_ns": margin_ns,
    }
