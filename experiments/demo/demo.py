"""`make demo`: digits and photographs, served inside their SLO by a machine that cannot hold all models.

Four small digit classifiers and more ResNet-18s than the weights cache has pages for are served by a
real `clockwright up`. Open-loop clients send held-out digits and photographs at about half of what
the machine can do. Every answer is compared with plain onnxruntime on the same file.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from clockwright import ConfigError
from clockwright.operator import Operator
from clockwright.v1 import control_pb2 as pb
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
# Popularity of the large models: the k-th is asked for in proportion to 1/k, so that some are cold.
_ZIPF = 1.0

_AIM_IN_TIME = limit_of("demo", "in_time_fraction")


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """Counts of one run, by which the demo is judged."""

    offered: int
    answered: int
    #: Requests answered inside the SLO, as the clients saw it.
    in_time: int
    #: Requests not refused at admission: answered, or failed later.
    admitted: int
    wrong: int
    #: Successes reported after the deadline, by the server's own clock.
    late_successes: int
    errors: int

    @property
    def in_time_fraction(self) -> float:
        """Share of the admitted requests that was answered in time; NaN without any."""
        return self.in_time / self.admitted if self.admitted else math.nan


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
            prepared = {model.model_id: model for model in operator.models()}
        loads = plan(small, large, prepared)
        rate = sum(load.rate for load in loads)
        console.print(
            f"sending {rate:.0f} requests/s for {options.seconds:g} s: "
            f"{_UTILISATION:.0%} of the time of the core that computes"
        )
        outcomes = drive(server.address, loads, duration_s=options.seconds, seed=options.seed)
        exit_code = server.stop()
    console.print(_table(loads, outcomes))
    verdict = judge(outcomes)
    _report(console, verdict, outcomes)
    picture = directory / "timeline.png"
    draw_timeline(read_actions(telemetry), picture)
    console.print(f"one second of lanes: {picture}; all in {time.monotonic() - begin_s:.0f} s")
    if options.record:
        _record(verdict, outcomes, options.seed)
    if verdict.wrong or verdict.late_successes or verdict.errors or exit_code:
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


def judge(outcomes: Sequence[RequestOutcome]) -> DemoVerdict:
    """Count the outcomes that the demo is judged by."""
    refused_early = {"INFEASIBLE", "COLD", "OVERLOADED", "NO_WORKER", "DRAINING"}
    refused_late = {"LATE", "WORKER_LOST", "MODEL_REMOVED", "FAILED"}
    answered = [outcome for outcome in outcomes if outcome.outcome == "OK"]
    known = refused_early | refused_late | {"OK"}
    return DemoVerdict(
        offered=len(outcomes),
        answered=len(answered),
        in_time=sum(outcome.in_time for outcome in outcomes),
        admitted=sum(outcome.outcome not in refused_early for outcome in outcomes),
        wrong=sum(not outcome.right for outcome in answered),
        late_successes=sum(outcome.server_ms > outcome.slo_ms for outcome in answered),
        errors=sum(outcome.outcome not in known for outcome in outcomes),
    )


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
        p50, p99, most = (
            (f"{value:.1f}" for value in (*np.percentile(latencies, (50, 99)), max(latencies)))
            if latencies
            else ("-", "-", "-")
        )
        refused = Counter(outcome.outcome for outcome in mine if outcome.outcome != "OK")
        table.add_row(
            load.model.name,
            str(len(mine)),
            str(sum(outcome.in_time for outcome in mine)),
            p50,
            p99,
            most,
            ", ".join(f"{count} {reason}" for reason, count in refused.items()) or "-",
            str(sum(outcome.cold for outcome in answered)),
            *_accuracies(load.model, answered),
        )
    return table


def _accuracies(model: DemoModel, answered: Sequence[RequestOutcome]) -> tuple[str, str]:
    """Share of right labels among the answers, and of the model run alone on the same images."""
    if model.label_output is None or not answered:
        return "-", "-"
    served = np.mean([bool(outcome.label_right) for outcome in answered])
    alone = np.mean([bool(outcome.label_right_alone) for outcome in answered])
    return f"{served:.3f}", f"{alone:.3f}"


def _report(console: Console, verdict: DemoVerdict, outcomes: Sequence[RequestOutcome]) -> None:
    client_late = np.percentile([outcome.late_ms for outcome in outcomes], (50, 99))
    console.print(
        f"offered {verdict.offered}, admitted {verdict.admitted}, answered {verdict.answered}; "
        f"of the admitted {verdict.in_time_fraction:.2%} in time (aim: {_AIM_IN_TIME:.1%})\n"
        f"answers that differ from onnxruntime's own: {verdict.wrong}; "
        f"late, yet reported as success: {verdict.late_successes}; other errors: {verdict.errors}\n"
        f"the clients themselves sent late by {client_late[0]:.2f} ms at p50, "
        f"{client_late[1]:.2f} ms at p99"
    )


def _record(verdict: DemoVerdict, outcomes: Sequence[RequestOutcome], seed: int) -> None:
    latencies = [outcome.latency_ms for outcome in outcomes if outcome.outcome == "OK"]
    figures = {
        "offered": float(verdict.offered),
        "answered": float(verdict.answered),
        "admitted": float(verdict.admitted),
        "in_time": float(verdict.in_time),
        "in_time_fraction": verdict.in_time_fraction,
        "wrong": float(verdict.wrong),
        "late_successes": float(verdict.late_successes),
        "cold_starts": float(sum(outcome.cold for outcome in outcomes)),
        "latency_ms_p50": float(np.percentile(latencies, 50)),
        "latency_ms_p99": float(np.percentile(latencies, 99)),
        "client_late_ms_p99": float(np.percentile([o.late_ms for o in outcomes], 99)),
    }
    refused = Counter(o.outcome for o in outcomes if o.outcome != "OK")
    figures |= {f"refused_{reason.lower()}": float(count) for reason, count in refused.items()}
    command = "python -m experiments demo --record"
    print(write_results("demo", figures, command=command, seeds=[seed]))


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
