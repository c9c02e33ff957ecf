"""What became of a run, live or simulated: one way to sum both up, and to play a case to a server that runs."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clockwright.actions import StepTime
from clockwright.operator import Operator
from clockwright.units import NS_PER_S
from controller.telemetry import OK, ActionRow, RequestRow, Telemetry
from experiments.simulator import Case, run
from experiments.study.compared import run_rows
from modelzoo.profile import ProfileRow
from traces.client_record import ClientRecord, summarise
from traces.replay import AskingStyle, play

#: Figures by which the two are compared, and what their gaps are called by.
METRICS = {"goodput": "goodput_rps", "p50": "p50_ms", "p99": "p99_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What became of the requests that were due in a stretch of one run; latencies are those of answers."""

    offered: float
    offered_rps: float
    #: Answers within the SLO.
    goodput_rps: float
    goodput_pct: float
    #: Answers after the SLO, and requests that were given up because theirs would be.
    late_per_million: float
    refused_per_million: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    #: Answers whose model was not resident when it was asked. Like all that follows, only telemetry knows it.
    cold_pct: float | None = None
    mean_batch_size: float | None = None
    exec_busy_pct: float | None = None
    load_busy_pct: float | None = None


def gap_pct(live: Side, simulated: Side | None, name: str) -> float | None:
    """How much more of something the simulator says, in per cent; None: there is nothing to compare."""
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
    """Requests as a client would see them that is never late and has no way to go: 40 bytes of each."""

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
            elapsed_ns=int(done_ns.max(initial=origin_ns)) - origin_ns,
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


# --- a server that runs ---------------------------------------------------------------------------


def reported_rows(operator: Operator) -> dict[str, ProfileRow]:
    """What each model of a server costs, as its workers report."""
    return {
        model.model_id: ProfileRow(
            name=model.model_id,
            weights_bytes=model.weights_bytes,
            load_ns=model.load_ns,
            exec_ns={batch.batch_size: batch.exec_ns for batch in model.exec},
        )
        for model in operator.models()
    }


def beside_server(address: str, cases: Mapping[str, Case]) -> Iterator[tuple[str, Side, Side]]:
    """Play cases to a server that runs, and simulate each with its policy, workers and costs.

    Args:
        address: HOST:PORT.
        cases: by name; their models are names on the server.

    Returns:
        Name of the case, what its client saw, and the simulated side.

    Raises:
        ConfigError: no server answers.
        UnknownModelError: the server lacks a model.
    """
    for name, case in cases.items():
        end_ns = case.duration_ns
        # The simulator sends nothing afterwards.
        workload = case.workload.sliced(0, end_ns)
        style = AskingStyle(refusal_pause_ns=case.refusal_pause_ns)
        live = side_of(play(address, workload, style=style), 0, end_ns)
        with Operator(address) as operator:
            rows, policy = reported_rows(operator), operator.status().policy
            pages = [worker.num_pages for worker in operator.workers()]
        models = (replace(model, row=rows[model.model_id]) for model in case.cluster.models)
        cluster = replace(
            case.cluster, models=tuple(models), num_workers=len(pages), num_pages=min(pages)
        )
        scheduler = replace(case.scheduler, policy=policy)
        given = replace(case, workload=workload, cluster=cluster, scheduler=scheduler)
        yield name, live, side_of(simulated_record(given), 0, end_ns)
