"""Counts and times of requests and actions by model and worker, from telemetry's records. No I/O and no clock.

Telemetry counts the outcomes of a model's requests itself, also if metrics are off; here they are only combined under
a name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from clockwright.units import ActionId, ModelId, WorkerId
from controller.metrics.histogram import Buckets, Histogram
from controller.metrics.text import labels_of
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CANCELLED, OK, Counts, Telemetry

#: Limit on the values of a label from clients. llm-d's router has the same bound.
NAMES_MAX: Final = 1000
#: Label for all others.
OTHER: Final = "other"

# Workers that left and were not scraped since are forgotten beyond this number.
_WORKERS_MAX = 10_000

_NO_ERROR: Final = "NONE"


#: Latency of answers: models on a GPU take milliseconds, and SLOs are milliseconds to seconds.
DURATIONS: Final = Buckets(
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
)
#: Time from answer to deadline; negative if the answer was late.
SLACKS: Final = Buckets(
    *(-1.0, -0.1, -0.01, -0.001, 0.0),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
#: Time to refusal: short if a request can never be in time.
REFUSALS: Final = Buckets(
    *(0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
)
#: Measured minus predicted time.
ERRORS: Final = Buckets(
    *(-0.1, -0.025, -0.01, -0.0025, -0.001, -0.00025, -0.0001, 0.0),
    *(0.0001, 0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1),
)

#: Predicted values: departure of an answer, and the device's time for a batch and for weights.
PREDICTED: Final = ("departure", "exec", "load")


@dataclass(slots=True, eq=False)
class SizeTally:
    """Totals of a model's batches of one size."""

    batches: int = 0
    #: Times of their steps.
    input_ns: int = 0
    exec_ns: int = 0
    output_ns: int = 0


@dataclass(slots=True, eq=False)
class ModelTally:
    """Totals of one model, or of all without a name here."""

    #: Its labels, as between the braces of a line.
    labels: str
    #: Telemetry's counts of each present generation of the model.
    generations: dict[ModelId, Counts] = field(default_factory=dict)
    #: The same of past generations, and of all models without a name here.
    past: Counts = field(default_factory=Counts)
    #: When the last request was answered or refused; 0: never.
    last_ns: int = 0
    #: Sum of the times to refusal.
    refused_ns: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(DURATIONS))
    #: Batches, and rows in them.
    batches: int = 0
    rows: int = 0
    #: Times of all requests together: before their batch began, and of its steps.
    queue_ns: int = 0
    input_ns: int = 0
    exec_ns: int = 0
    output_ns: int = 0
    #: By rows of a batch.
    by_size: dict[int, SizeTally] = field(default_factory=dict)
    loads: int = 0
    evictions: int = 0

    @property
    def answered(self) -> int:
        """Requests that were answered in time."""
        return sum([counts.answered for counts in self.generations.values()], self.past.answered)

    def counter(self, index: int) -> int:
        """One of `COUNTERS`."""
        generations = self.generations.values()
        return sum([counts.counters[index] for counts in generations], self.past.counters[index])

    @property
    def unanswered(self) -> Counter[str]:
        """All others, by "CANCELLED" or the name of a `Refusal`."""
        unanswered = Counter(self.past.unanswered)
        for counts in self.generations.values():
            unanswered.update(counts.unanswered)
        return unanswered


@dataclass(slots=True, eq=False)
class WorkerTally:
    """Totals of one worker."""

    #: Time in which its lanes were busy.
    exec_ns: int = 0
    load_ns: int = 0
    #: Actions by type and error.
    actions: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tally:
    """Counts telemetry's records."""

    def __init__(
        self,
        telemetry: Telemetry,
        describe: Callable[[ModelId], tuple[str, str] | None],
    ) -> None:
        """Begin to count, from the next request on.

        `describe` finds a model's public name and version; None: it is gone.
        """
        self._describe = describe
        self._by_model = telemetry.by_model
        #: Models that are counted apart, by name and version: the first with requests.
        self.models: dict[tuple[str, str], ModelTally] = {}
        #: All others together.
        self.others = ModelTally(labels_of(model=OTHER, version=""))
        self.workers: dict[WorkerId, WorkerTally] = {}
        self.slacks = Histogram(SLACKS)
        self.refusals: dict[str, Histogram] = {}
        self.errors = {what: Histogram(ERRORS) for what in PREDICTED}
        self._by_id: dict[ModelId, ModelTally] = {}
        # Requests answered by an action whose own row has not arrived, and the sum of their arrivals.
        self._answered: dict[ActionId, list[int]] = {}
        telemetry.count_by(self._take, self._forget)

    def _take(self, requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> None:
        """Count finished requests and actions; an action never comes before the requests that it answered."""
        by_id, answered, others = self._by_id, self._answered, self.others
        slacks, departures = self.slacks, self.errors["departure"]
        slack_counts, departure_counts = slacks.counts, departures.counts
        durations_ns, slacks_ns, errors_ns = (
            DURATIONS.bounds_ns,
            SLACKS.bounds_ns,
            ERRORS.bounds_ns,
        )
        for row in requests:
            model_id, arrival_ns, slo_ns = row.model_id, row.arrival_ns, row.slo_ns
            departure_ns, outcome, action_id = row.departure_ns, row.outcome, row.action_id
            model = by_id.get(model_id) or self._find(model_id)
            if model is others:
                model.past.add(row)
            latency_ns = departure_ns - arrival_ns
            if action_id is None:
                if outcome != CANCELLED:
                    self._refused(model, row)
                continue
            # The work per answer is inlined: a call would take as long as the work.
            slack_counts[bisect_left(slacks_ns, slo_ns - latency_ns)] += 1
            departure_counts[bisect_left(errors_ns, departure_ns - row.expected_departure_ns)] += 1
            if outcome == OK:
                durations = model.durations
                durations.counts[bisect_left(durations_ns, latency_ns)] += 1
                durations.sum_ns += latency_ns
                model.last_ns = departure_ns
            else:
                self._refused(model, row)
            sums = answered.get(action_id)
            if sums is None:
                answered[action_id] = [1, arrival_ns]
            else:
                sums[0] += 1
                sums[1] += arrival_ns
        for action in actions:
            self._take_action(action)

    def add(self, model_id: ModelId) -> None:
        """Count a model without requests apart, if there is room."""
        if model_id not in self._by_id:
            self._find(model_id)

    def find(self, model_id: ModelId) -> ModelTally:
        """The totals in which a model is counted, or would be at its first request."""
        model = self._by_id.get(model_id)
        if model is not None:
            return model
        described = self._describe(model_id)
        return self.others if described is None else self.models.get(described, self.others)

    def _forget(self, model_id: ModelId) -> None:
        """Remove a model and its counts, unless another generation has the same name and version."""
        model = self._by_id.pop(model_id, None)
        if model is None or model is self.others:
            return
        past, counts = model.past, model.generations.pop(model_id)
        past.merge(counts)
        if not model.generations:
            self.models = {key: each for key, each in self.models.items() if each is not model}

    def _find(self, model_id: ModelId) -> ModelTally:
        described, counts = self._describe(model_id), self._by_model.get(model_id)
        if described is None or counts is None:
            return self.others
        model = self.models.get(described)
        if model is None:
            # A model may have this name too.
            if described[0] == OTHER or len(self.models) >= NAMES_MAX:
                model = self.others
            else:
                model = ModelTally(labels_of(model=described[0], version=described[1]))
                self.models[described] = model
        if model is not self.others:
            model.generations[model_id] = counts
        self._by_id[model_id] = model
        return model

    def _refused(self, model: ModelTally, row: RequestRow) -> None:
        departure_ns, reason = row.departure_ns, row.outcome
        latency_ns = departure_ns - row.arrival_ns
        model.last_ns = departure_ns
        model.refused_ns += latency_ns
        refusals = self.refusals.get(reason)
        if refusals is None:
            refusals = self.refusals[reason] = Histogram(REFUSALS)
        refusals.add(latency_ns)

    def _take_action(self, row: ActionRow) -> None:
        action_id, kind = row.action_id, row.type
        worker_id, model_id = row.worker_id, row.model_id
        rows, expected_ns, error = row.rows, row.expected_duration_ns, row.error
        load, brought_in, exec_, brought_out = row.load, row.input, row.exec, row.output
        worker = self.workers.get(worker_id)
        if worker is None:
            if len(self.workers) >= _WORKERS_MAX:
                del self.workers[next(iter(self.workers))]
            worker = self.workers[worker_id] = WorkerTally()
        worker.actions[kind, error] += 1
        num_answered, arrivals_ns = self._answered.pop(action_id, (0, 0))
        if error != _NO_ERROR:
            return
        model = self._by_id.get(model_id) or self._find(model_id)
        if exec_ is not None:
            worker.exec_ns += exec_.duration_ns
            self.errors["exec"].add(exec_.duration_ns - expected_ns)
            model.batches += 1
            model.rows += rows
            size = model.by_size.get(rows)
            if size is None:
                size = model.by_size[rows] = SizeTally()
            size.batches += 1
            begin_ns = exec_.begin_ns
            if brought_in is not None:
                begin_ns = brought_in.begin_ns
                size.input_ns += brought_in.duration_ns
                model.input_ns += num_answered * brought_in.duration_ns
            if brought_out is not None:
                size.output_ns += brought_out.duration_ns
                model.output_ns += num_answered * brought_out.duration_ns
            size.exec_ns += exec_.duration_ns
            model.exec_ns += num_answered * exec_.duration_ns
            # The worker's clock is known to some microseconds only.
            model.queue_ns += max(0, num_answered * begin_ns - arrivals_ns)
        elif load is not None:
            worker.load_ns += load.duration_ns
            self.errors["load"].add(load.duration_ns - expected_ns)
            model.loads += 1
        else:
            model.evictions += 1
