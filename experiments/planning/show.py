"""What `clockwright plan` shows: tables for people, JSON for programs, a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.planning.limits import EXEC
from experiments.planning.plan import SloCost, WorkerPlan
from experiments.planning.question import Size
from experiments.planning.trials import Trial

_LIMITS = {
    EXEC: "the time that runs take on the devices (EXEC)",
    "pages": "pages: the models do not fit on the devices together",
    "loads": "loads: weights take long to reach the devices (PCIe)",
    "links": "links: tensors take long to reach the workers",
    "controller": "the controller's core",
}


def numbers(plan: WorkerPlan) -> dict[str, Any]:
    """Everything, as for JSON."""
    question = plan.question
    return {
        "target_pct": 100 * question.target,
        "workers": question.named(plan.size),
        "price": question.price(plan.size),
        "alone": {
            name: _alone(size, number) for number, (name, size) in enumerate(plan.alone.items())
        },
        "planned": _trial(plan, plan.planned),
        "limit": plan.limits.name if plan.limits else None,
        "without_pct": {
            name: 100 * share
            for name, share in (plan.limits.relieved if plan.limits else {}).items()
        },
        "one_fewer": {name: _trial(plan, trial) for name, trial in plan.fewer.items()},
        "one_more": {name: _trial(plan, trial) for name, trial in plan.more.items()},
        "slos": [
            {
                "slo_ms": cost.slo_ns / NS_PER_MS,
                "share_pct": 100 * cost.share,
                "attainment_pct": 100 * cost.attainment,
            }
            | (
                {
                    "half": cost.half and question.named(cost.half),
                    "double": cost.double and question.named(cost.double),
                }
                if cost.costed
                else {}
            )
            for cost in plan.slos
        ],
        "tried": [_trial(plan, trial) for trial in plan.trials],
        "seconds": question.case.duration_ns / NS_PER_S,
        "warmup_s": question.warmup_ns / NS_PER_S,
        "seed": question.case.seed,
        "runs": plan.num_runs,
        "wall_s": plan.wall_s,
    }


def _alone(size: Size | None, kind: int) -> int | None:
    return None if size is None else size[kind]


def _trial(plan: WorkerPlan, trial: Trial) -> dict[str, Any]:
    low, high = trial.interval
    found: dict[str, Any] = {
        "workers": plan.question.named(trial.size),
        "meets": bool(trial.meets),
        "attainment_pct": 100 * trial.attainment,
        "low_pct": 100 * low,
        "high_pct": 100 * high,
        "runs": len(trial.scores),
        "requests": trial.num_asked,
        "ended_early": any(score.cut for score in trial.scores),
    }
    if not found["ended_early"]:
        found |= {
            "latency_p99_ms": trial.mean(lambda score: score.latency_p99_ms),
            "goodput_rps": trial.mean(lambda score: score.goodput_rps),
            "loads_per_s": trial.mean(lambda score: score.loads_per_s),
            "mean_batch_size": trial.mean(lambda score: score.mean_batch_size),
            "utilisation": trial.utilisations(),
        }
    return found


def print_plan(plan: WorkerPlan) -> None:
    """Print it for people, in 80 columns."""
    console = Console(highlight=False, markup=False)
    question = plan.question
    price = f", price {question.price(plan.size):g}" if len(plan.alone) > 1 else ""
    console.print(f"{question.words(plan.size)}{price}: {_outcome(plan.planned)}", soft_wrap=True)
    if len(plan.alone) > 1:
        alone = ", ".join(
            f"{name} {'none' if size is None else size[number]}"
            for number, (name, size) in enumerate(plan.alone.items())
        )
        console.print(f"of one kind alone: {alone}", soft_wrap=True)
    if plan.limits is not None:
        console.print(f"what limits one worker fewer: {_LIMITS[plan.limits.name]}", soft_wrap=True)
        for name, share in plan.limits.relieved.items():
            console.print(f"  without {name} it would answer {_percent(share)} in time")
    if plan.fewer or plan.more:
        _print_sizes(console, plan)
    _print_slos(console, plan)
    seeds = "; arrivals are as recorded, so seeds change the noise of devices only"
    console.print(
        f"{plan.num_runs} runs of {question.case.duration_ns / NS_PER_S:g} s, of which "
        f"{question.warmup_ns / NS_PER_S:g} s are warm-up, in {plan.wall_s:.0f} s; intervals are 95 % over seeds"
        f"{seeds if question.is_recorded else ''}",
        soft_wrap=True,
    )


def _print_sizes(console: Console, plan: WorkerPlan) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    table.add_column("workers", overflow="fold")
    for name in ("in time %", "interval", "p99 ms", "batch", "loads/s", "EXEC %", "PCIe %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("busiest")
    trials = {
        trial.size: trial for trial in (*plan.fewer.values(), plan.planned, *plan.more.values())
    }
    for size in sorted(trials, key=lambda size: (sum(size), size)):
        trial = trials[size]
        low, high = trial.interval
        busy = trial.utilisations()
        table.add_row(
            f"{plan.question.words(size)}{' <' if size == plan.size else ''}",
            f"{100 * trial.attainment:.3f}",
            f"{100 * low:.3f}-{100 * high:.3f}",
            f"{trial.mean(lambda score: score.latency_p99_ms):.1f}",
            f"{trial.mean(lambda score: score.mean_batch_size):.1f}",
            f"{trial.mean(lambda score: score.loads_per_s):.1f}",
            f"{100 * busy.get('EXEC', 0):.0f}",
            f"{100 * busy.get('PCIe', 0):.0f}",
            trial.bottleneck,
        )
    console.print(table)


def _print_slos(console: Console, plan: WorkerPlan) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    for name in ("SLO ms", "requests %", "in time %"):
        table.add_column(name, justify="right", no_wrap=True)
    costed = any(cost.costed for cost in plan.slos)
    for name in ("workers at half of it", "at double") if costed else ():
        table.add_column(name, overflow="fold")
    for cost in plan.slos:
        table.add_row(
            f"{cost.slo_ns / NS_PER_MS:g}",
            f"{100 * cost.share:.1f}",
            f"{100 * cost.attainment:.3f}",
            *(_cost(plan, cost) if costed else ()),
        )
    console.print(table)


def _cost(plan: WorkerPlan, cost: SloCost) -> tuple[str, str]:
    if not cost.costed:
        return "", ""
    half, double = (
        "no number is enough" if size is None else plan.question.words(size)
        for size in (cost.half, cost.double)
    )
    return half, double


def _outcome(trial: Trial) -> str:
    low, high = trial.interval
    return (
        f"{_percent(trial.attainment)} inside their SLO ({_percent(low)} to {_percent(high)}, "
        f"{trial.num_asked:,} requests, {len(trial.scores)} seeds), expected {_percent(trial.target)}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.5g} %"


def draw(plan: WorkerPlan, target: Path) -> None:
    """Draw what share each size that was tried answers in time, and what each SLO costs.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install 'clockwright[pictures]'")
    from experiments.study import pictures

    trials = {
        trial.size: trial for trial in (*plan.trials, *plan.fewer.values(), *plan.more.values())
    }
    sizes = sorted(trials, key=lambda size: (sum(size), size))
    places = range(len(sizes))
    shares = [100 * trials[size].attainment for size in sizes]
    lows, highs = zip(*(trials[size].interval for size in sizes), strict=True)
    panels = [
        pictures.Panel(
            title="Requests inside their SLO, by workers; bars: 95 % over seeds",
            x="workers",
            y="% of requests",
            curves=[
                pictures.Curve(
                    x=list(places),
                    y=shares,
                    marker="o",
                    colour=pictures.COLOURS[0],
                    spread=(
                        [max(0.0, y - 100 * low) for y, low in zip(shares, lows, strict=True)],
                        [max(0.0, 100 * high - y) for y, high in zip(shares, highs, strict=True)],
                    ),
                )
            ],
            x_ticks={
                place: plan.question.words(size) for place, size in zip(places, sizes, strict=True)
            },
            y_range=(max(0.0, min(shares) - 2), 100.5),
            levels={100 * plan.question.target: f"target {100 * plan.question.target:g} %"},
        )
    ]
    costed = [cost for cost in plan.slos if cost.costed]
    if costed:
        factors = {"half": 0.5, "planned": 1.0, "double": 2.0}
        panels.append(
            pictures.Panel(
                title="What each SLO costs: the size at half and double of it",
                x="SLO in ms",
                y="workers",
                log_x=True,
                curves=[
                    pictures.Curve(
                        x=[cost.slo_ns / NS_PER_MS * factors[name] for name in found],
                        y=[sum(size) for size in found.values()],
                        marker=pictures.MARKERS[number],
                        colour=pictures.COLOURS[number],
                        label=f"{cost.slo_ns / NS_PER_MS:g} ms",
                    )
                    for number, cost in enumerate(costed)
                    for found in [
                        {
                            name: size
                            for name, size in (
                                ("half", cost.half),
                                ("planned", plan.size),
                                ("double", cost.double),
                            )
                            if size is not None
                        }
                    ]
                ],
            )
        )
    title = f"{plan.question.words(plan.size)} answer {_percent(plan.planned.attainment)} inside their SLO"
    try:
        pictures.draw(target, title, [panels])
    except (OSError, ValueError) as error:
        raise ConfigError(f"picture {target}: {error}") from None
