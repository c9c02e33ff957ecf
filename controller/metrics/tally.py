"""Counts and times of requests and actions by model and worker, made of telemetry's records. No I/O and no clock.

What became of a model's requests telemetry counts itself, whether somebody measures or not; here it is only put
together under a name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from clockwright.errors import Refusal
from clockwright.units import ActionId, ModelId, WorkerId
from controller.metrics.histogram import Buckets, Histogram
from controller.metrics.text import escape
from controller.telemetry import CANCELLED, OK, ActionRecord, Counts, RequestRecord, Telemetry

#: Values of a label that comes from outside which are told apart. llm-d's router has the same bound.
NAMES_MAX: Final = 1000
#: Stands for all the others.
OTHER: Final = "other"

# Workers that nobody scraped before they left are forgotten from here on.
_WORKERS_MAX = 10_000

_LATE: Final = Refusal.LATE.value
_NO_ERROR: Final = "NONE"


#: How long answers took: models on a GPU take milliseconds, and SLOs are about that or some seconds.
DURATIONS: Final = Buckets(
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
)
#: How long before the deadline answers left. Below 0 they were too late.
SLACKS: Final = Buckets(
    *(-1.0, -0.1, -0.01, -0.001, 0.0),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
#: How long it took to refuse: at once where a request can never be in time.
REFUSALS: Final = Buckets(
    *(0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
)
#: How much later something was than predicted. Below 0 it was earlier.
ERRORS: Final = Buckets(
    *(-0.1, -0.025, -0.01, -0.0025, -0.001, -0.00025, -0.0001, 0.0),
    *(0.0001, 0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1),
)

#: What is predicted: when an answer leaves, and how long a device takes for a batch and for weights.
PREDICTED: Final = ("departure", "exec", "load")


class SizeTally:
    """Totals of a model's batches of one size."""

    __slots__ = ("batches", "exec_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.batches = 0
        #: Times of their steps.
        self.input_ns = 0
        self.exec_ns = 0
        self.output_ns = 0


class ModelTally:
    """Totals of one model, or of all that have no name here."""

    __slots__ = (
        "batches",
        "by_size",
        "durations",
        "evictions",
        "exec_ns",
        "generations",
        "input_ns",
        "labels",
        "last_ns",
        "loads",
        "output_ns",
        "past",
        "queue_ns",
        "refused_ns",
        "rows",
    )

    def __init__(self, name: str, version: str) -> None:
        #: As they stand between the braces of a line.
        self.labels = f'model="{escape(name)}",version="{escape(version)}"'
        #: What telemetry counts of each generation of the model that there is.
        self.generations: dict[ModelId, Counts] = {}
        #: The same of generations that are gone; and of all that have no name here.
        self.past = Counts()
        #: When the last one was answered or refused; 0: none was.
        self.last_ns = 0
        #: How long it took to refuse, all together.
        self.refused_ns = 0
        self.durations = Histogram(DURATIONS)
        #: Batches, and rows in them.
        self.batches = 0
        self.rows = 0
        #: Times of all requests together: before their batch began, and of its steps.
        self.queue_ns = 0
        self.input_ns = 0
        self.exec_ns = 0
        self.output_ns = 0
        #: By rows of a batch.
        self.by_size: dict[int, SizeTally] = {}
        self.loads = 0
        self.evictions = 0

    @property
    def answered(self) -> int:
        """Requests that were answered in time."""
        return sum([counts.answered for counts in self.generations.values()], self.past.answered)

    @property
    def cold_starts(self) -> int:
        """Those of them whose model was not resident when they arrived."""
        generations = self.generations.values()
        return sum([counts.cold_starts for counts in generations], self.past.cold_starts)

    @property
    def unanswered(self) -> Counter[str]:
        """All others, by "CANCELLED" or the name of a `Refusal`."""
        unanswered = Counter(self.past.unanswered)
        for counts in self.generations.values():
            unanswered.update(counts.unanswered)
        return unanswered


class WorkerTally:
    """Totals of one worker."""

    __slots__ = ("actions", "exec_ns", "load_ns")

    def __init__(self) -> None:
        #: Time in which its lanes were busy.
        self.exec_ns = 0
        self.load_ns = 0
        #: Actions by type and error.
        self.actions: Counter[tuple[str, str]] = Counter()


class Tally:
    """Counts what telemetry hands over."""

    def __init__(
        self,
        telemetry: Telemetry,
        describe: Callable[[ModelId], tuple[str, str] | None],
        *,
        names_max: int = NAMES_MAX,
    ) -> None:
        """Begin to count, from the next request on.

        Args:
            telemetry: hands over its records.
            describe: finds a model's public name and version; None: it is gone.
            names_max: models that are counted apart.
        """
        self._describe = describe
        self._by_model = telemetry.by_model
        self.names_max = names_max
        #: Models that are counted apart, by name and version: the first that were asked.
        self.models: dict[tuple[str, str], ModelTally] = {}
        #: All others together.
        self.others = ModelTally(OTHER, "")
        self.workers: dict[WorkerId, WorkerTally] = {}
        self.slacks = Histogram(SLACKS)
        self.refusals: dict[str, Histogram] = {}
        self.errors = {what: Histogram(ERRORS) for what in PREDICTED}
        self._by_id: dict[ModelId, ModelTally] = {}
        # Requests that are answered by an action whose own record is still to come, and the sum of their arrivals.
        self._answered: dict[ActionId, list[int]] = {}
        telemetry.count_by(self._take, self._forget)

    def _take(self, requests: Sequence[RequestRecord], actions: Sequence[ActionRecord]) -> None:
        """Count requests and actions that are over; an action never comes before the requests that it answered."""
        by_id, answered, others = self._by_id, self._answered, self.others
        slacks, departures = self.slacks, self.errors["departure"]
        slack_counts, departure_counts = slacks.counts, departures.counts
        durations_ns, slacks_ns, errors_ns = (
            DURATIONS.bounds_ns,
            SLACKS.bounds_ns,
            ERRORS.bounds_ns,
        )
        for record in requests:
            model_id, arrival_ns, slo_ns = record[1], record[3], record[4]
            departure_ns, outcome, action_id = record[6], record[7], record[14]
            model = by_id.get(model_id) or self._find(model_id)
            if model is others:
                model.past.add(outcome, cold=record[12])
            latency_ns = departure_ns - arrival_ns
            if action_id is None:
                if outcome != CANCELLED:
                    self._refused(model, record)
                continue
            # What is done for each answer is written out: a call takes as long as all it would do.
            slack_counts[bisect_left(slacks_ns, slo_ns - latency_ns)] += 1
            departure_counts[bisect_left(errors_ns, departure_ns - record[16])] += 1
            if outcome == OK:
                durations = model.durations
                durations.counts[bisect_left(durations_ns, latency_ns)] += 1
                durations.sum_ns += latency_ns
                model.last_ns = departure_ns
            else:
                self._refused(model, record)
            sums = answered.get(action_id)
            if sums is None:
                answered[action_id] = [1, arrival_ns]
            else:
                sums[0] += 1
                sums[1] += arrival_ns
        for action in actions:
            self._take_action(action)

    def add(self, model_id: ModelId) -> None:
        """Count a model apart, although nobody has asked for it yet, if there is room."""
        if model_id not in self._by_id:
            self._find(model_id)

    def find(self, model_id: ModelId) -> ModelTally:
        """Where a model is counted, or would be if somebody asked for it now."""
        model = self._by_id.get(model_id)
        if model is not None:
            return model
        described = self._describe(model_id)
        return self.others if described is None else self.models.get(described, self.others)

    def _forget(self, model_id: ModelId) -> None:
        """A model is removed, and its counts with it, unless another generation has the same name and version."""
        model = self._by_id.pop(model_id, None)
        if model is None or model is self.others:
            return
        past, counts = model.past, model.generations.pop(model_id)
        past.answered += counts.answered
        past.cold_starts += counts.cold_starts
        past.unanswered.update(counts.unanswered)
        if not model.generations:
            self.models = {key: each for key, each in self.models.items() if each is not model}

    def _find(self, model_id: ModelId) -> ModelTally:
        described, counts = self._describe(model_id), self._by_model.get(model_id)
        if described is None or counts is None:
            return self.others
        model = self.models.get(described)
        if model is None:
            # A model may be called like this too.
            if described[0] == OTHER or len(self.models) >= self.names_max:
                model = self.others
            else:
                model = self.models[described] = ModelTally(*described)
        if model is not self.others:
            model.generations[model_id] = counts
        self._by_id[model_id] = model
        return model

    def _refused(self, model: ModelTally, record: RequestRecord) -> None:
        departure_ns, reason = record[6], record[7]
        latency_ns = departure_ns - record[3]
        model.last_ns = departure_ns
        model.refused_ns += latency_ns
        refusals = self.refusals.get(reason)
        if refusals is None:
            refusals = self.refusals[reason] = Histogram(REFUSALS)
        refusals.add(latency_ns)

    def _take_action(self, record: ActionRecord) -> None:
        action_id, kind, worker_id, model_id = record[0], record[1], record[2], record[3]
        rows, expected_ns, error = record[5], record[11], record[14]
        load, brought_in, exec_, brought_out = record[15], record[16], record[17], record[18]
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
