"""Outcomes of a run, live or simulated: one summary of both."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clockwright.client.operator import Operator
from clockwright.units import NS_PER_S
from clockwright.wire.actions import StepTime
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import OK, Telemetry
from experiments.simulator import Case, run
from experiments.study.compared import run_rows
from modelzoo.profile import ProfileRow
from traces.client_record import ClientRecord, summarise

#: Figures by which the two are compared, and what their gaps are called by.
METRICS = {"goodput": "goodput_rps", "p50": "p50_ms", "p99": "p99_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Outcomes of the requests that were due in a stretch of a run; latencies are those of answers."""

    offered: float
    offered_rps: float
    #: Answers within the SLO.
    goodput_rps: float
    goodput_pct: float
    #: Answers after the SLO, and requests refused because their answers would be late.
    late_per_million: float
    refused_per_million: float
    p50_ms: float
    p99_ms: float
    #: Tells nothing of fewer than some 100,000 answers.
    p9999_ms: float
    max_ms: float
    #: Answers whose model was not resident on arrival. This and the fields below come from telemetry only.
    cold_pct: float | None = None
    mean_batch_size: float | None = None
    exec_busy_pct: float | None = None
    load_busy_pct: float | None = None


def gap_pct(live: Side, simulated: Side | None, name: str) -> float | None:
    """The simulator's excess in per cent. Returns None if there is nothing to compare."""
    measured = getattr(live, name)
    if simulated is None or not measured:
        return None
    return float(100 * (getattr(simulated, name) / measured - 1))


def words_of(live: Side, simulated: Side | None) -> str:
    """Say both in one line."""
    said = [
        f"{name} {side.goodput_rps:,.1f} of {side.offered_rps:,.1f} r/s, p50 {side.p50_ms:.2f} ms, "
        f"p99 {side.p99_ms:.2f} ms"
        for name, side in (("live", live), ("simulated", simulated))
        if side is not None
    ]
    gap = gap_pct(live, simulated, "goodput_rps")
    return "; ".join(said) + ("" if gap is None else f" ({gap:+.1f} % goodput)")


def side_of(record: ClientRecord, begin_ns: int, end_ns: int) -> Side:
    """Sum up the requests that were due between two times since the run began."""
    inside = (record.due_ns >= begin_ns) & (record.due_ns < end_ns)
    found = summarise(record.where(inside), (end_ns - begin_ns) / NS_PER_S)
    offered = max(found.num_requests, 1)
    late = found.num_late + found.refusals.get("LATE", 0)
    return Side(
        offered=found.num_requests,
        offered_rps=found.offered_rps,
        goodput_rps=found.goodput_rps,
        goodput_pct=100 * found.num_in_time / offered,
        late_per_million=1e6 * late / offered,
        refused_per_million=1e6 * (offered - found.num_in_time - late) / offered,
        p50_ms=found.latency_ms["50"],
        p99_ms=found.latency_ms["99"],
        p9999_ms=found.latency_ms["99.99"],
        max_ms=found.latency_ms["100"],
    )


@dataclass(frozen=True, slots=True)
class RunRows:
    """What telemetry keeps of a run, live or simulated."""

    requests: Sequence[RequestRow]
    actions: Sequence[ActionRow]
    #: The workload's time 0 on the rows' clock.
    origin_ns: int = 0

    def of(self, model_ids: Collection[str]) -> RunRows:
        """Rows of some models alone."""
        return RunRows(
            [row for row in self.requests if row.model_id in model_ids],
            [row for row in self.actions if row.model_id in model_ids],
            self.origin_ns,
        )

    def side(self, begin_ns: int, end_ns: int, num_workers: int = 1) -> Side:
        """Sum up a stretch, between two times since the workload's time 0."""
        columns = _Columns()
        columns.take(self.requests)
        side = side_of(columns.record(self.origin_ns), begin_ns, end_ns)
        begin_ns, end_ns = begin_ns + self.origin_ns, end_ns + self.origin_ns
        answers = [
            row.cold
            for row in self.requests
            if row.outcome == OK and begin_ns <= row.arrival_ns < end_ns
        ]
        sizes = [
            row.batch_size
            for row in self.actions
            if row.type == "Infer" and row.error == "NONE" and begin_ns <= row.result_ns < end_ns
        ]

        def busy_pct(steps: Iterable[StepTime | None]) -> float:
            spans = ((s.begin_ns, s.begin_ns + s.duration_ns) for s in steps if s is not None)
            busy_ns = sum(max(0, min(last, end_ns) - max(first, begin_ns)) for first, last in spans)
            return 100 * busy_ns / ((end_ns - begin_ns) * num_workers)

        return replace(
            side,
            cold_pct=100 * sum(answers) / max(len(answers), 1),
            mean_batch_size=sum(sizes) / max(len(sizes), 1),
            exec_busy_pct=busy_pct(row.exec for row in self.actions),
            load_busy_pct=busy_pct(row.load for row in self.actions),
        )


class _Columns:
    """Requests as seen by a client without delay or distance: 40 bytes each."""

    def __init__(self) -> None:
        self._models: dict[str, int] = {}
        self._outcomes: dict[str, int] = {}
        self._cells = array("q")

    def take(self, rows: Iterable[RequestRow], _actions: object = ()) -> None:
        """Add some."""
        for row in rows:
            model = self._models.setdefault(row.model_id, len(self._models))
            outcome = self._outcomes.setdefault(row.outcome, len(self._outcomes))
            self._cells.extend((model, outcome, row.slo_ns, row.arrival_ns, row.departure_ns))

    def record(self, origin_ns: int = 0) -> ClientRecord:
        """Give all of them; the run's time 0 is `origin_ns` of their clock."""
        cells = np.array(self._cells, np.int64).reshape(-1, 5)
        model, outcome, slo_ns, due_ns, done_ns = cells.T
        return ClientRecord(
            models=tuple(self._models),
            outcomes=tuple(self._outcomes),
            model=model,
            outcome=outcome,
            is_open=np.ones(len(cells), bool),
            slo_ns=slo_ns,
            due_ns=due_ns - origin_ns,
            sent_ns=due_ns - origin_ns,
            departure_ns=done_ns - origin_ns,
            begin_ns=origin_ns,
        )


def simulated(case: Case) -> RunRows:
    """Run a case on virtual time, and keep every row."""
    telemetry = Telemetry(capacity=10_000_000)
    run(case, telemetry=telemetry)
    return RunRows(telemetry.requests, telemetry.actions)


def simulated_record(case: Case) -> ClientRecord:
    """Run a case of any length on virtual time."""
    columns = _Columns()
    run_rows(case, columns.take)
    return columns.record()


# --- a live server --------------------------------------------------------------------------------


def reported_rows(operator: Operator) -> dict[str, ProfileRow]:
    """Cost of each model of a server, as its workers report it."""
    return {
        model.model_id: ProfileRow(
            name=model.model_id,
            weights_bytes=model.weights_bytes,
            load_ns=model.load_ns,
            exec_ns={batch.batch_size: batch.exec_ns for batch in model.exec},
        )
        for model in operator.models()
    }
