"""What `clockwright load` shows: a line while it runs, tables at its end, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, format_ns
from traces.client_record import ClientRecord, LoadSummary, in_slices
from traces.load import LoadReport
from traces.replay import ReplayProgress

# Models that the table names; all are in the JSON.
_MODELS_SHOWN = 20
# Rows and width of the histogram in the terminal, which has 80 columns.
_BARS, _BAR_CHARS = 12, 44
# Points per slice of the picture's upper part, at most.
_SLICES_MAX = 120


def progress_line(now: ReplayProgress, before: ReplayProgress | None) -> str:
    """Describe the last second, or all of it if there was none before."""
    since_ns = before.elapsed_ns if before is not None else 0
    seconds = max(now.elapsed_ns - since_ns, 1) / NS_PER_S
    sent = now.num_sent - (before.num_sent if before is not None else 0)
    good = now.num_in_time - (before.num_in_time if before is not None else 0)
    earlier: Mapping[str, int] = before.outcomes if before is not None else {}
    others = {
        name: num - earlier.get(name, 0)
        for name, num in sorted(now.outcomes.items())
        if name != "OK" and num > earlier.get(name, 0)
    }
    not_good = ", ".join(f"{num / seconds:,.0f} {name}" for name, num in others.items())
    return (
        f"{now.elapsed_ns / NS_PER_S:4.0f} s  sent {sent / seconds:,.0f} r/s, in time "
        f"{good / seconds:,.0f} r/s, p50 {format_ns(now.latency_ns_p50)}, "
        f"p99 {format_ns(now.latency_ns_p99)}{', ' + not_good if not_good else ''}; "
        f"{now.num_sent - now.num_done} open"
    )


def print_report(report: LoadReport, record: ClientRecord, remark: str) -> None:
    """Print all for people, in 80 columns."""
    console = Console(highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    names = ("requests", "good %", "in time/s", "p50 ms", "p90", "p99", "p99.9", "max")
    for name in ("SLO ms", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for slo_ms, summary in report.by_slo_ms.items():
        table.add_row(slo_ms, *_cells(summary))
    if len(report.by_slo_ms) != 1:
        table.add_row("all", *_cells(report.total))
    console.print(table)
    total = report.total
    console.print(
        f"in time {total.num_in_time:,}, late {total.num_late:,}, refused {_counts(total.refusals)}, "
        f"failed {_counts(total.failures)}",
        soft_wrap=True,
    )
    for status in sorted(total.failures):
        if words := record.words.get(status):
            console.print(f"{status}: {words}", soft_wrap=True)
    if total.num_refused:
        console.print(
            f"refusals came after {_ms(total.refusal_ms['50'])} (p50), {_ms(total.refusal_ms['99'])} (p99)"
        )
    if len(report.by_model) > 1:
        _print_models(console, report.by_model)
    for line in histogram(record):
        console.print(line)
    console.print("latency counts from when a request was due")
    if remark:
        console.print(remark, soft_wrap=True)


def histogram(record: ClientRecord) -> list[str]:
    """Draw the latencies of answers as bars of text; the largest SLO is marked."""
    latency_ms = record.latency_ns[record.answered] / NS_PER_MS
    if not len(latency_ms):
        return []
    low, high = float(latency_ms.min()), float(latency_ms.max())
    edges = np.geomspace(max(low, 1e-3), max(high, low * 1.01, 2e-3), _BARS + 1)
    counts, _ = np.histogram(np.clip(latency_ms, edges[0], edges[-1]), edges)
    slo_ms = float(record.slo_ns.max()) / NS_PER_MS
    lines = []
    for count, begin, end in zip(counts.tolist(), edges, edges[1:], strict=False):
        bar = "#" * round(_BAR_CHARS * count / counts.max())
        mark = " < SLO" if begin <= slo_ms < end else ""
        lines.append(f"{_ms(float(end)):>9} {bar}{' ' if bar else ''}{count or ''}{mark}".rstrip())
    return lines


def draw(report: LoadReport, record: ClientRecord, target: Path) -> None:
    """Draw the outcomes of the requests over time, and the latencies with their SLOs, as PNG, SVG or PDF.

    Raises ConfigError if matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib: pip install 'clockwright[pictures]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    figure, (over_time, shares) = pyplot.subplots(2, 1, figsize=(8, 7), layout="constrained")
    try:
        slice_ns = max(NS_PER_S // 2, round(report.seconds * NS_PER_S / _SLICES_MAX))
        slices = in_slices(record, slice_ns)
        # Each slice is drawn until the next begins, so the last one is drawn to its own end.
        begins_s = [begin_s for begin_s, _ in slices]
        ends_s = [begin_s + slice_ns / NS_PER_S for begin_s in begins_s[-1:]]
        rows = [summary for _, summary in (*slices, *slices[-1:])]
        kinds = {
            "in time": ("#2a9d8f", [row.num_in_time for row in rows]),
            "late": ("#e9c46a", [row.num_late for row in rows]),
            "refused": ("#9aa5b1", [row.num_refused for row in rows]),
            "failed": ("#c1121f", [row.num_failed for row in rows]),
        }
        over_time.stackplot(
            [*begins_s, *ends_s],
            *(np.array(numbers) * NS_PER_S / slice_ns for _, numbers in kinds.values()),
            labels=list(kinds),
            colors=[colour for colour, _ in kinds.values()],
            step="post",
        )
        over_time.margins(x=0, y=0.25)
        over_time.set(
            title=f"{report.total.good_request_fraction:.1%} of {report.total.num_requests:,} requests to "
            f"{report.address} were answered in time",
            xlabel="seconds since the first request was due",
            ylabel="requests per second",
        )
        over_time.legend(loc="upper left", frameon=False, ncols=4)
        for slo_ms in report.by_slo_ms:
            mine = record.where(record.slo_ns == round(float(slo_ms) * NS_PER_MS))
            latency_ms = np.sort(mine.latency_ns[mine.answered]) / NS_PER_MS
            if not len(latency_ms):
                continue
            # Refused requests count too: the curve ends at the share that was answered.
            share = 100 * np.arange(1, len(latency_ms) + 1) / len(mine)
            (line,) = shares.plot(latency_ms, share, label=f"SLO {slo_ms} ms")
            shares.axvline(float(slo_ms), color=line.get_color(), linestyle=":")
        shares.set(
            xscale="log", ylim=(0, 101),
            title="Share of the requests that were answered within a time",
            xlabel="latency in ms, from when the request was due; dotted: the SLO",
            ylabel="% of requests",
        )  # fmt: skip
        shares.xaxis.set_major_formatter("{x:g}")
        shares.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        shares.xaxis.set_minor_formatter("{x:g}")
        if shares.get_legend_handles_labels()[0]:
            shares.legend(loc="lower right", frameon=False)
        try:
            figure.savefig(target, dpi=120)
        except (OSError, ValueError) as error:
            raise ConfigError(f"picture {target}: {error}") from None
    finally:
        pyplot.close(figure)


def _print_models(console: Console, by_model: Mapping[str, LoadSummary]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    for name in ("requests", "good %", "in time/s", "p50 ms", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("refused", overflow="fold")
    worst_first = sorted(by_model.items(), key=lambda item: item[1].good_request_fraction)
    for name, summary in worst_first[:_MODELS_SHOWN]:
        cells = _cells(summary)
        table.add_row(name, *cells[:4], cells[5], _counts(summary.refusals))
    console.print(table)
    if len(by_model) > _MODELS_SHOWN:
        console.print(f"and {len(by_model) - _MODELS_SHOWN} more models; --json has them")


def _cells(summary: LoadSummary) -> list[str]:
    return [
        f"{summary.num_requests:,}",
        f"{100 * summary.good_request_fraction:.2f}",
        f"{summary.goodput_rps:,.1f}",
        *(f"{summary.latency_ms[percent]:,.1f}" for percent in ("50", "90", "99", "99.9", "100")),
    ]


def _ms(milliseconds: float) -> str:
    return format_ns(round(milliseconds * NS_PER_MS))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num:,} {name}" for name, num in sorted(counts.items())) or "none"
