"""`make demo`: digits and photographs, served inside their SLO by a machine that cannot hold all models.

Four small digit classifiers and more ResNet-18s than the weights cache has pages for are served by a
real `clockwright up`. Open-loop clients send held-out digits and photographs at about half of what
the machine can do. Every answer is compared with plain onnxruntime on the same file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from clockwright import ConfigError
from clockwright.client.operator import Operator
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import control_pb2 as pb
from controller.process.doctor import core_ticks, steal_between
from controller.telemetry.rows import ActionRow
from experiments.demo.clients import ModelLoad, RequestOutcome, drive
from experiments.demo.models import DemoModel, write_digit_models, write_large_models
from experiments.live.local_server import LocalServer
from experiments.results_file import write_results
from experiments.study.aims import limit_of
from experiments.telemetry.tables import read_actions
from experiments.telemetry.timeline import draw_timeline

_LARGE_PAGES = 3
_NUM_QUESTIONS = 8

_SMALL_SLOS_MS = (100.0, 150.0, 250.0)
_LARGE_SLOS_MS = (250.0, 500.0, 1000.0)
_SMALL_RATE = 12.0
# The rates keep the core that computes busy for this share of the time.
_UTILISATION = 0.5
# Models were prepared on cores that did nothing else. While clients and server work they take up to twice as long.
_REHEARSAL_S = 3.0
# Popularity of the large models: the k-th is asked for in proportion to 1/k, so that some are cold.
_ZIPF = 1.0

_AIM_IN_TIME = limit_of("demo", "in_time_fraction")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 1 when an answer was wrong, or late and yet a success."""
    options = _options(arguments)
    if options.large < 2:
        raise ConfigError(f"--large is {options.large}, expected 2 or more")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=150)
    begin_s = time.monotonic()
    directory: Path = options.directory
    models_dir = directory / "models"
    console.print("training digit classifiers, writing ResNet-18s ...")
    small = write_digit_models(models_dir)
    large = write_large_models(models_dir, options.large, num_questions=_NUM_QUESTIONS)
    console.print(
        f"{len(small) + len(large)} models in {time.monotonic() - begin_s:.0f} s; serving"
    )

    telemetry = directory / "telemetry"
    # Room for half of the large models, and for the small ones, which have a page each.
    pages = options.large // 2 * _LARGE_PAGES + len(small)
    server_options = [
        *("--models", str(models_dir), "--pages", str(pages), "--arena-mib", "64"),
        *("--telemetry", str(telemetry), "--cache-dir", str(directory / "cache")),
    ]
    with LocalServer(server_options, show=console.print) as server:
        with Operator(server.address) as operator:
            loads = plan(small, large, {model.model_id: model for model in operator.models()})
            console.print(
                f"rehearsing for {_REHEARSAL_S:g} s, which shows what runs take while clients ask"
            )
            drive(server.address, loads, duration_s=_REHEARSAL_S, seed=options.seed + 1)
            loads = plan(small, large, {model.model_id: model for model in operator.models()})
        rate = sum(load.rate for load in loads)
        console.print(
            f"sending {rate:.0f} requests/s for {options.seconds:g} s: "
            f"{_UTILISATION:.0%} of the time of the core that computes, by what runs are expected to take"
        )
        ticks, begin_ns = core_ticks(), time.monotonic_ns()
        outcomes = drive(server.address, loads, duration_s=options.seconds, seed=options.seed)
        steal = steal_between(ticks, core_ticks())
        exit_code = server.stop()
    console.print(_table(loads, outcomes))
    found = judge(outcomes) | ({} if steal is None else {"steal_pct": 100 * steal})
    console.print(
        f"offered {found['offered']}, admitted {found['admitted']}, answered {found['answered']}; "
        f"of the admitted {found['in_time_fraction']:.2%} in time (aim: {_AIM_IN_TIME:.1%})\n"
        f"answers that differ from onnxruntime's own: {found['wrong']}; "
        f"late, yet reported as success: {found['late_successes']}; other errors: {found['errors']}\n"
        f"this host was away for {'an unknown part' if steal is None else f'{steal:.1%}'} of its cores' time (steal); "
        f"timers of the clients were late by {found['client_late_ms_p50']:.2f} ms at p50, "
        f"{found['client_late_ms_p99']:.2f} ms at p99"
    )
    actions = [action for action in read_actions(telemetry) if action.sent_ns >= begin_ns]
    found |= runs_over(actions) | {"busy_fraction": busy_ns(actions) / NS_PER_S / options.seconds}
    console.print(
        f"models ran for {found['busy_fraction']:.0%} of the time, {found['run_over_ms_p99']:.0f} ms longer than expected "
        f"at p99, {found['run_over_ms_max']:.0f} ms at worst"
    )
    picture = directory / "timeline.png"
    draw_timeline(actions, picture)
    console.print(f"one second of lanes: {picture}; all in {time.monotonic() - begin_s:.0f} s")
    if options.record:
        command = "python -m experiments demo --record"
        print(write_results("demo", found, command=command, seeds=[options.seed]))
    if exit_code or any(found[name] for name in ("wrong", "late_successes", "errors")):
        console.print(f"[red]failed[/red] (server's exit code {exit_code})")
        return 1
    return 0


def plan(
    small: Sequence[DemoModel], large: Sequence[DemoModel], prepared: dict[str, pb.ModelInfo]
) -> list[ModelLoad]:
    """Choose rates that keep the computing core busy for `_UTILISATION` of the time.

    Args:
        small: models with a fixed rate.
        large: models that share what is left, in order of popularity.
        prepared: the server's view of each model, above all its EXEC durations.
    """
    loads = [ModelLoad(model, _SMALL_RATE, _SMALL_SLOS_MS) for model in small]
    used = sum(load.rate * _exec_s(prepared[load.model.name]) for load in loads)
    popularity = np.arange(1, len(large) + 1, dtype=float) ** -_ZIPF
    popularity /= popularity.sum()
    left = max(_UTILISATION - used, 0.1 * _UTILISATION)
    for model, share in zip(large, popularity, strict=True):
        rate = left * float(share) / _exec_s(prepared[model.name])
        loads.append(ModelLoad(model, rate, _LARGE_SLOS_MS))
    return loads


def judge(outcomes: Sequence[RequestOutcome]) -> dict[str, float]:
    """Count the outcomes that the demo is judged by, and what else is recorded."""
    at_admission = ("INFEASIBLE", "COLD", "OVERLOADED", "NO_WORKER", "DRAINING")
    known = (*at_admission, "OK", "LATE", "WORKER_LOST", "MODEL_REMOVED", "FAILED")
    answered = [outcome for outcome in outcomes if outcome.outcome == "OK"]
    # Requests that were answered, or failed later.
    admitted = [outcome for outcome in outcomes if outcome.outcome not in at_admission]
    # Answered inside the SLO, as the clients saw it.
    num_in_time = sum(outcome.in_time for outcome in outcomes)
    figures: dict[str, float] = {
        "offered": len(outcomes),
        "answered": len(answered),
        "admitted": len(admitted),
        "in_time": num_in_time,
        "in_time_fraction": num_in_time / max(len(admitted), 1),
        "wrong": sum(not outcome.right for outcome in answered),
        # Successes after the deadline, by the server's own clock.
        "late_successes": sum(outcome.server_ms > outcome.slo_ms for outcome in answered),
        "errors": sum(outcome.outcome not in known for outcome in outcomes),
        "cold_starts": sum(outcome.cold for outcome in answered),
        **_latencies("latency_ms", [outcome.latency_ms for outcome in answered]),
        **_latencies("client_late_ms", [outcome.late_ms for outcome in outcomes]),
    }
    refused = Counter(outcome.outcome.lower() for outcome in outcomes if outcome.outcome != "OK")
    return figures | {f"refused_{reason}": count for reason, count in refused.items()}


def runs_over(actions: Sequence[ActionRow]) -> dict[str, float]:
    """How much longer than expected models ran, in ms; a host that is slow for a while need not show as steal."""
    over_ms = [
        max(action.exec.duration_ns - action.expected_duration_ns, 0) / NS_PER_MS
        for action in actions
        if action.exec is not None and action.error == "NONE"
    ] or [0.0]
    return {"run_over_ms_p99": float(np.percentile(over_ms, 99)), "run_over_ms_max": max(over_ms)}


def busy_ns(actions: Sequence[ActionRow]) -> int:
    """How long models ran."""
    return sum(action.exec.duration_ns for action in actions if action.exec is not None)


def _latencies(name: str, times_ms: Sequence[float]) -> dict[str, float]:
    """Percentiles; nothing where there are no times."""
    ranks = (50, 99) if times_ms else ()
    return {f"{name}_p{rank}": float(np.percentile(times_ms, rank)) for rank in ranks}


def _exec_s(model: pb.ModelInfo) -> float:
    return float(min(row.exec_ns for row in model.exec if row.batch_size == 1) / 1e9)


def _table(loads: Sequence[ModelLoad], outcomes: Sequence[RequestOutcome]) -> Table:
    table = Table(
        "model", "offered", "in time", "p50 ms", "p99 ms", "max ms", "refused", "cold starts",
        "accuracy", "run alone", title="as the clients saw it",
    )  # fmt: skip
    for load in loads:
        mine = [outcome for outcome in outcomes if outcome.model == load.model.name]
        answered = [outcome for outcome in mine if outcome.outcome == "OK"]
        latencies = [outcome.latency_ms for outcome in answered]
        shown = (
            [f"{ms:.1f}" for ms in np.percentile(latencies, (50, 99, 100))] if latencies else "---"
        )
        refused = Counter(outcome.outcome for outcome in mine if outcome.outcome != "OK")
        table.add_row(
            load.model.name,
            str(len(mine)),
            str(sum(outcome.in_time for outcome in mine)),
            *shown,
            ", ".join(f"{count} {reason}" for reason, count in refused.items()) or "-",
            str(sum(outcome.cold for outcome in answered)),
            *_accuracies(load.model, answered),
        )
    return table


def _accuracies(model: DemoModel, answered: Sequence[RequestOutcome]) -> tuple[str, str]:
    """Share of right labels among the answers, and of the model run alone on the same images."""
    if model.labels is None or not answered:
        return "-", "-"
    rows = [outcome.row for outcome in answered]
    served, alone = [outcome.label for outcome in answered], model.answers["label"][rows]
    right = model.labels[rows]
    return f"{np.mean(served == right):.3f}", f"{np.mean(alone == right):.3f}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments demo", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="for all that is made")
    parser.add_argument("--large", type=int, default=8, help="ResNet-18s; half of them fit")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long clients send")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, SLOs and questions")
    parser.add_argument(
        "--record", action="store_true", help="write experiments/results/demo.json as well"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
