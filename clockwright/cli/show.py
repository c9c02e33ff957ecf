"""What the reading commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from clockwright.foreign import printable
from clockwright.units import format_ns

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from clockwright.v1 import control_pb2 as pb

_Found = TypeVar("_Found", bound="Message | Sequence[Message]")

# A table of workers names this many resident models of each.
_NAMES_SHOWN = 6

# An explanation has sentences twice as long as other untrusted text.
_SENTENCE_CHARS_MAX = 1000


def plain(message: Message) -> dict[str, object]:
    """Turn a message into what JSON has: every field by its name, integers as numbers."""
    from google.protobuf.message import Message

    result: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            result[field.name] = plain(value)
        elif isinstance(value, str | int | float):
            result[field.name] = value
        else:
            result[field.name] = [
                plain(item) if isinstance(item, Message) else item for item in value
            ]
    return result


def show(
    found: _Found,
    for_people: Callable[[_Found], None],
    *,
    as_json: bool,
    indent: int | None = 1,
) -> None:
    """Print what a server answered: all of it as JSON, or what `for_people` makes of it."""
    if not as_json:
        for_people(found)
    elif isinstance(found, Sequence):
        print_json([plain(message) for message in found], indent)
    else:
        print_json(plain(found), indent)


def print_json(value: object, indent: int | None = 1) -> None:
    """Print for programs; without indent on one line, at once."""
    print(json.dumps(value, indent=indent), flush=indent is None)


def print_explanation(told: pb.ExplainResponse) -> None:
    """Print what happened to a request, a sentence per line."""
    called = f" ({printable(told.client_request_id)})" if told.client_request_id else ""
    number = str(told.request_id or "without a number")
    print(f"request {number}{called} for model {told.model_id}, {format_ns(told.age_ns)} ago")
    for sentence in told.words:
        print(f"  {printable(sentence, _SENTENCE_CHARS_MAX)}")


def print_status(status: pb.StatusResponse, workers: Sequence[pb.WorkerInfo]) -> None:
    """Print totals, and a row per worker."""
    state = "ready" if status.ready else "preparing models"
    if status.draining:
        state = "draining"
    elif status.num_workers == 0:
        state = "no worker is connected"
    console = wide_console()
    console.print(
        f"Clockwright {status.version}, policy {status.policy}, up {format_ns(status.uptime_ns)}: "
        f"{state}\n"
        f"models: {status.num_models_ready} of {status.num_models} ready\n"
        f"requests: {status.requests}, answered {status.answered} "
        f"({_counters(status.counters)}), waiting {status.waiting}, "
        f"refused: {_refusals(status.refusals)}\n"
        f"callers: {'known' if status.knows_callers else 'anonymous'}, "
        f"{'TLS' if status.has_tls else 'no TLS'}, denied: {_refusals(status.denials)}"
    )
    if status.memory_limit_bytes:
        short = {
            "LARGE_REFUSED": ": large requests are refused",
            "ALL_REFUSED": ": all requests are refused",
        }.get(status.memory_state, "")
        console.print(
            f"memory: {status.memory_bytes >> 20} of {status.memory_limit_bytes >> 20} MiB{short}"
        )
    table = Table(
        "worker", "device", "state", "pages free", "in flight", "clock", "tensors at", "resident"
    )
    for worker in workers:
        table.add_row(
            worker.worker_id,
            _device(worker),
            worker.state,
            f"{worker.num_free_pages}/{worker.num_pages}",
            str(worker.actions_in_flight),
            f"{worker.clock_offset_us:+.0f} us",
            worker.payload_address,
            _names([*worker.resident, *(f"({name})" for name in worker.loading)]),
        )
    console.print(table if workers else "workers: none")
    for worker in workers:
        for words in worker.complaints:
            console.print(f"worker {worker.worker_id}: its GPU is unwell: {words}", soft_wrap=True)
        for words in worker.suspended:
            console.print(f"worker {worker.worker_id}: avoided for {words}", soft_wrap=True)
    if status.fronts:
        console.print(_fronts_table(status.fronts))
    for kind in status.kinds:
        _print_kind(console, kind)
    if status.dropped_without_worker_rps:
        console.print(f"dropped without a worker: {status.dropped_without_worker_rps:.1f} r/s")


def _fronts_table(fronts: Sequence[pb.FrontInfo]) -> Table:
    table = Table("front", "address", "age", "open", "link carried", "tensors directly to")
    for front in fronts:
        table.add_row(
            front.name,
            front.address or "this host",
            format_ns(front.age_ns),
            str(front.requests_open),
            f"{front.link_bytes / 1e6:.1f} MB",
            _names(front.workers),
        )
    return table


def _print_kind(console: Console, kind: pb.KindInfo) -> None:
    """Print how busy a kind of worker is and, if requests are dropped, what is short."""
    dropped = {
        "EXEC time": kind.dropped_for_exec_rps,
        "link capacity": kind.dropped_for_links_rps,
        "PCIe time": kind.dropped_for_loads_rps,
        "pages": kind.dropped_for_pages_rps,
    }
    short = ", ".join(f"{rate:.1f} r/s for lack of {of}" for of, rate in dropped.items() if rate)
    console.print(
        f"{kind.num_workers} of {kind.gpu_kind}, in {format_ns(kind.over_ns)}: "
        f"EXEC {kind.exec_busy:.0%}, PCIe {kind.load_busy:.0%} busy, {kind.run_rps:.1f} r/s run, "
        f"{kind.evictions_per_s:.1f} evictions/s; "
        + (f"dropped: {short}" if short else "nothing dropped")
        + f"; {kind.wanted} wanted",
        soft_wrap=True,
    )


def print_wanted(kinds: Sequence[pb.KindWanted]) -> None:
    """Print a line per kind of worker."""
    for kind in kinds:
        may_go = f"; may go: {_names(kind.may_go)}" if kind.may_go else ""
        print(
            f"{kind.gpu_kind}: {kind.wanted} wanted{f' for {kind.limit}' if kind.limit else ''};"
            f" {kind.ready} ready, {kind.joining} joining, {kind.draining} draining;"
            f" a start takes {kind.start_s:.0f} s{may_go}",
            flush=True,
        )
    if not kinds:
        print("no worker was there yet", flush=True)


def print_released(told: pb.ReleaseWorkerResponse) -> None:
    """Print which worker leaves, and why."""
    print(f"worker {told.worker} drains: {told.reason}")


def print_models(models: Sequence[pb.ModelInfo]) -> None:
    """Print a row per model that is ready, and a line per other one: reasons are long."""
    if not models:
        print("no models")
        return
    console = wide_console()
    ready = [model for model in models if model.state == "READY"]
    names = Counter(_served_name(model) for model in models)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    table.add_column("model", no_wrap=True)
    counted = sorted(models[0].counters)
    headings = [name.replace("_", " ") for name in counted]
    for name in ("version", "pages", "load", "run", "answered", *headings):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("refused", overflow="fold")
    table.add_column("resident on", overflow="fold")
    for model in ready:
        smallest = min(model.exec, key=lambda row: row.batch_size, default=None)
        table.add_row(
            model.model_id,
            _version(model, has_others=names[_served_name(model)] > 1),
            str(model.num_pages or "-"),
            format_ns(model.load_ns) if model.load_ns else "-",
            format_ns(smallest.exec_ns) if smallest else "-",
            str(model.answered),
            *[str(model.counters[name]) for name in counted],
            _refusals(model.refusals),
            _names(model.resident_on) + " (pinned)" * model.pinned,
        )
    if ready:
        console.print(table)
    for model in ready:
        if model.one_by_one:
            console.print(
                f"{model.model_id}: rows run one by one: {model.one_by_one}", soft_wrap=True
            )
    for model in models:
        if model.state != "READY":
            state = f"{model.state}: {model.reason}" if model.reason else model.state
            console.print(f"{model.model_id}: {state}", soft_wrap=True)


def _served_name(model: pb.ModelInfo) -> str:
    """The name that all versions have in common."""
    return model.model_id.removesuffix(f":{model.version}")


def _version(model: pb.ModelInfo, *, has_others: bool) -> str:
    """A version with its aliases, and its share of the requests unless it is the only one."""
    marks = [*model.aliases]
    if has_others or model.share != 1:
        marks.append(f"{100 * model.share:.3g}%")
    if model.shadow:
        marks.append(f"shadow of {100 * model.shadow:.3g}%")
    return model.version + (f" ({', '.join(marks)})" if marks else "")


def wide_console() -> Console:
    """Make where tables are printed."""
    console = Console(highlight=False, markup=False)
    # Not a terminal: lines are not folded, so that a search finds a name in one piece.
    return console if console.is_terminal else Console(highlight=False, markup=False, width=240)


def _device(worker: pb.WorkerInfo) -> str:
    if not worker.clock_mhz:
        return worker.device
    return f"{worker.device} at {worker.clock_mhz} of {worker.clock_mhz_max} MHz"


def _counters(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{counters[name]} {name.replace('_', ' ')}" for name in sorted(counters))


def _refusals(refusals: Iterable[pb.RefusalCount]) -> str:
    return ", ".join(f"{row.count} {row.reason}" for row in refusals) or "none"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more or "-"
