"""`clockwright top`: a live view of a running server.

It uses rich like all tables of the command; it needs no curses, and a pipe gets plain text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import Json, ServerFlags, takes_flags
from clockwright.units import NS_PER_S, format_ns

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from clockwright.client.operator import Operator
    from clockwright.findings import ClusterFinding, PagesAsked
    from clockwright.v1 import control_pb2 as pb

_COLUMNS = 80
_BAR_CHARS = 10
# Lines of the totals and the tables' heads, besides rows of workers and models. A finding takes three lines.
_OTHER_LINES = 16
_WORKERS_SHOWN = 8
# Reading thousands of models takes the server's time, so the next reading waits this many times as long.
_PAUSE_FACTOR = 20
_INTERVAL_S_MAX = 86_400
_ROWS_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A server's figures at one time."""

    #: When all of it had arrived, on this process's clock.
    at_s: float
    status: pb.StatusResponse
    workers: Sequence[pb.WorkerInfo]
    models: Sequence[pb.ModelInfo]


@takes_flags
def top(
    interval_s: Annotated[
        float, typer.Option(help="Seconds between refreshes.", min=0.1, max=_INTERVAL_S_MAX)
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print once; exit with 1 if something is wrong.")
    ] = False,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Watch a server: the first line says what is wrong; then goodput, latency, workers and models.

    Press Ctrl-C to stop. --json prints once.
    """
    from rich.console import Console
    from rich.live import Live

    from clockwright.cli.show import plain, print_json
    from clockwright.findings import diagnose

    # Brackets in a name are not markup.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_COLUMNS)
    with to.operator() as operator:
        before = _look(operator)
        if once or json:
            time.sleep(interval_s)
            now = _look(operator)
            findings = diagnose(now.status, now.workers, now.models, _pages_asked(before, now))
            if json:
                print_json(
                    {
                        "findings": [asdict(row) for row in findings],
                        **plain(now.status),
                        "workers": [plain(row) for row in now.workers],
                        "models": [plain(row) for row in now.models],
                    }
                )
            else:
                console.print(screen(before, now, lines=1000, address=to.server))
            if not all(row.past for row in findings):
                raise typer.Exit(1)
            return
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            cost_s = 0.0
            while True:
                time.sleep(max(interval_s, _PAUSE_FACTOR * cost_s))
                began_s = time.monotonic()
                now = _look(operator)
                cost_s = now.at_s - began_s
                live.update(
                    screen(before, now, lines=console.size.height, address=to.server), refresh=True
                )
                before = now


def screen(before: Look, now: Look, *, lines: int, address: str) -> RenderableType:
    """Draw all that there is to see, in so many lines. Rates are those since an earlier look."""
    from rich.console import Group
    from rich.text import Text

    from clockwright.findings import diagnose

    findings = diagnose(now.status, now.workers, now.models, _pages_asked(before, now))
    status, recent = now.status, now.status.recent
    seconds = max(recent.over_ns, 1) / NS_PER_S
    head = _head(findings, status)
    good = recent.answered / recent.requests if recent.requests else 1.0
    refused = ", ".join(f"{row.count / seconds:.1f} {row.reason}" for row in recent.refusals)
    totals = [
        f"Clockwright {status.version} at {address}, {status.policy}, up {_age(status.uptime_ns)}; "
        f"{status.num_models_ready} of {status.num_models} models ready",
        f"asked   {recent.requests / seconds:9,.1f} r/s   in time {recent.answered / seconds:9,.1f} r/s   "
        f"good {good:7.1%}   waiting {status.waiting:,}",
        f"refused per second: {refused or 'none'}",
        f"latency p50 {format_ns(recent.latency_ns_p50)} ({recent.slo_share_p50:.0%} of its SLO), "
        f"p99 {format_ns(recent.latency_ns_p99)} ({recent.slo_share_p99:.0%})",
        "workers: " + (", ".join(map(_wanted, status.kinds)) or "none"),
    ]
    others = [
        Text(
            f"{'before' if row.past else 'also'} {row.name}: {row.words}",
            style="" if row.past else "red" if row.harmful else "yellow",
        )
        for position, row in enumerate(findings)
        if row.past or position
    ]
    room = max(lines - _OTHER_LINES - 3 * len(others), 2 * _ROWS_MIN)
    num_workers = min(len(now.workers), _WORKERS_SHOWN, room - _ROWS_MIN)
    return Group(
        head,
        *others,
        *map(Text, totals),
        _worker_table(now.workers, num_workers),
        _model_table(before, now, room - num_workers),
    )


def _head(findings: Sequence[ClusterFinding], status: pb.StatusResponse) -> Text:
    """The first line: what is wrong now, or that nothing is."""
    from rich.text import Text

    from clockwright.findings import well

    recent = status.recent
    if findings and not findings[0].past:
        harmful = any(row.harmful for row in findings)
        return Text(
            f"{'' if harmful else 'WARNING: '}{findings[0].name.upper()}: {findings[0].words}",
            style="bold red" if harmful else "bold yellow",
        )
    if not status.ready:
        return Text("PREPARING: models are not ready yet", style="bold yellow")
    words = f"WELL: {well(status)}"
    if not recent.requests and not status.waiting:
        words = f"IDLE: no request ended in the last {recent.over_ns / NS_PER_S:.0f} s; nothing is wrong"
    return Text(words, style="bold green")


def _wanted(kind: pb.KindInfo) -> str:
    return f"{kind.num_workers} of {kind.gpu_kind}, {kind.wanted} wanted" + (
        f" for {kind.limit}" if kind.limit and kind.wanted > kind.num_workers else ""
    )


def _pages_asked(before: Look, now: Look) -> PagesAsked:
    """What the models need that were asked for between two looks."""
    from clockwright.findings import PagesAsked
    from clockwright.v1 import control_pb2 as pb

    then = {row.model_id: row for row in before.models}
    asked, refused = 0, []
    for model in now.models:
        earlier = then.get(model.model_id, pb.ModelInfo())
        if model.requests > earlier.requests:
            asked += model.num_pages
        if model.num_pages and sum(_counts(model).values()) > sum(_counts(earlier).values()):
            refused.append(model.num_pages)
    return PagesAsked(num_pages=asked, num_least=min(refused, default=0))


def _worker_table(workers: Sequence[pb.WorkerInfo], num_shown: int) -> Table:
    table = _table("worker", "EXEC", "", "load", "pages", "", "ahead", "slow x", "state")
    # Readers look for the busiest workers, and for those with problems.
    ordered = sorted(workers, key=lambda row: (not (row.suspended or row.complaints), -_busy(row)))
    for worker in ordered[:num_shown]:
        used = worker.num_pages - worker.num_free_pages
        state = "avoided" if worker.suspended else worker.state.lower()
        table.add_row(
            worker.worker_id,
            _bar(worker.recent.exec_busy),
            f"{worker.recent.exec_busy:.0%}",
            f"{worker.recent.load_busy:.0%}",
            _bar(used / worker.num_pages if worker.num_pages else 0.0),
            f"{used}/{worker.num_pages}",
            format_ns(worker.exec_backlog_ns),
            f"{worker.recent.exec_over_others or worker.recent.exec_over_predicted:.2f}"
            if worker.recent.infers
            else "-",
            state,
        )
    if len(workers) > num_shown:
        table.add_row(f"and {len(workers) - num_shown} more")
    return table


def _model_table(before: Look, now: Look, num_shown: int) -> Table:
    counted = sorted({name for model in now.models[:1] for name in model.counters})
    headings = [name.replace("_", " ") for name in counted]
    table = _table("model", "r/s", "good", "wait", *headings, "run", "on", "refused/s")
    then = {row.model_id: row for row in before.models}
    seconds = max(now.at_s - before.at_s, 1e-3)
    rows = []
    for model in now.models:
        earlier = then.get(model.model_id)
        asked = model.requests - (earlier.requests if earlier is not None else 0)
        answered = model.answered - (earlier.answered if earlier is not None else 0)
        counts = _counts(model)
        if earlier is not None:
            counts = {name: num - _counts(earlier).get(name, 0) for name, num in counts.items()}
        rows.append((asked, answered, counts, model))
    rows.sort(key=lambda row: (-row[0], row[3].model_id))
    for asked, answered, counts, model in rows[:num_shown]:
        refused = ", ".join(
            f"{num / seconds:.1f} {name}"
            for name, num in sorted(counts.items(), key=lambda item: -item[1])
            if num > 0
        )
        run_ns = min((row.exec_ns for row in model.exec), default=0)
        table.add_row(
            model.model_id,
            f"{asked / seconds:,.1f}",
            f"{answered / asked:.0%}" if asked > 0 else "-",
            str(model.waiting),
            *[str(model.counters[name]) for name in counted],
            format_ns(run_ns) if run_ns else "-",
            str(len(model.resident_on)),
            refused if model.state == "READY" else model.state.lower(),
        )
    if len(rows) > num_shown:
        table.add_row(f"and {len(rows) - num_shown} more")
    return table


def _table(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, collapse_padding=True
    )
    for position, name in enumerate(names):
        text = position in (0, len(names) - 1) or not name or name == "EXEC" or name == "pages"
        table.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if text else "right",
            max_width=24 if position == 0 else None,
        )
    return table


def _look(operator: Operator) -> Look:
    status, workers, models = operator.status(), operator.workers(), operator.models()
    return Look(at_s=time.monotonic(), status=status, workers=workers, models=models)


def _counts(model: pb.ModelInfo) -> Mapping[str, int]:
    return {row.reason: row.count for row in model.refusals}


def _busy(worker: pb.WorkerInfo) -> float:
    return worker.recent.exec_busy + worker.recent.load_busy


def _bar(share: float) -> str:
    # The order of arguments makes 0 of what is no number.
    filled = round(_BAR_CHARS * min(max(0.0, share), 1.0))
    return "#" * filled + "." * (_BAR_CHARS - filled)


def _age(duration_ns: int) -> str:
    seconds = duration_ns // NS_PER_S
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds} s"
