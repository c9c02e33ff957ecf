"""Figure 9: how well the controller predicts how long actions take, and when they will be complete.

The workload of Figure 8 from the generator (`azure_replay`): 4,026 models, 6 GPUs, SLO 100 ms. The paper
replayed 8 hours; here a minute and a half is measured, with a full hour in it, after half a minute that
fills the caches.

The errors depend on the noise that is put in, so each result belongs to a stated noise model:

* `quiet`: LOAD and EXEC durations are log-normal with sigma 0.3 %, ten times what the paper measured on
  an otherwise idle GPU (section 2); messages take exactly 0.1 ms.
* `noisy`: sigma 2 %; messages take 0.1 ms and an exponential time of mean 50 us more; one LOAD or EXEC of
  100,000 takes five times as long as it should.

What the system adds is the figure's argument: how often and by how much the estimator errs to the safe
side, and how errors of earlier actions add up in the predicted completion of later ones.

An error is measured less predicted. *Over*predicted: faster than predicted; *under*predicted: slower.
Percentiles are those of the errors of one sign, as in the paper. Completion is the end of the EXEC or LOAD
against its predicted begin and duration, both predicted when the action was sent. On an idle lane the
begin is predicted `dispatch_delay_ns`, 0.5 ms, after sending, where messages take 0.1 ms here: completions
are 0.4 ms earlier than predicted for that alone. The bound (B1) is that of the same requests, by GPU time
alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clockwright.units import NS_PER_S, NS_PER_US
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.clockwork_paper import azure_replay
from experiments.clockwork_paper.stretch import stretch_bound
from experiments.results_file import RESULTS
from experiments.simulator import Case, Faults, Network
from experiments.study.report import Comparison, colour_of, picture, write_csv, write_figure
from experiments.study.study import POLICIES, Study, from_command_line, run_rows
from modelzoo.profile import Noise

#: Predicted quantities, each of one kind of action.
QUANTITIES = ("infer", "load", "infer_completion", "load_completion")

#: Section 6.5, "Predictable executions", in us; the completion error of INFER is "~1ms" there.
_PAPER = {
    "infer_over_p99_us": 250.0,
    "infer_under_p99_us": 250.0,
    "load_over_p99_us": 338.0,
    "load_under_p99_us": 240.0,
    "infer_completion_over_p99_us": 1000.0,
    "infer_completion_under_p99_us": 1000.0,
}
_REASON = (
    "errors are those of the noise model that is put in, which says nothing of the paper's GPUs, hosts "
    "and clocks; to compare are the signs and how prediction errors add up to completion errors"
)

#: Share of the errors of one sign, in percent, at which they are kept; spread out towards the tail.
PERCENTILES = tuple(round(float(100 * (1 - 10**-nines)), 4) for nines in np.arange(0, 5.01, 0.1))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseModel:
    """A noise model: disturbances of durations and delays."""

    name: str
    noise: Noise
    network: Network = field(default_factory=Network)
    faults: Faults = field(default_factory=Faults)


NOISE_MODELS = (
    NoiseModel(name="quiet", noise=Noise(exec_sigma=0.003, load_sigma=0.003)),
    NoiseModel(
        name="noisy",
        noise=Noise(exec_sigma=0.02, load_sigma=0.02),
        network=Network(jitter_ns=50 * NS_PER_US),
        faults=Faults(slow_probability=1e-5, slow_factor=5.0),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Study):
    """How much is simulated. The noise of other figures is of no effect here."""

    noise_models: tuple[NoiseModel, ...] = NOISE_MODELS
    replay: azure_replay.Setting = field(
        default_factory=lambda: azure_replay.Setting(num_minutes=60)
    )
    warmup_ns: int = 30 * NS_PER_S
    measured_ns: int = 90 * NS_PER_S
    seed: int = 9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Errors:
    """One policy under one noise model."""

    policy: str
    noise_model: str
    #: Errors by quantity, measured less predicted, ns; shape (action,).
    errors_ns: dict[str, NDArray[np.int64]]
    goodput_rps: float
    bound_rps: float

    def over_us(self, quantity: str) -> NDArray[np.float64]:
        """How much faster than predicted the overpredicted actions were."""
        errors = self.errors_ns[quantity]
        return -errors[errors < 0] / NS_PER_US

    def under_us(self, quantity: str) -> NDArray[np.float64]:
        """How much slower than predicted the underpredicted actions were."""
        errors = self.errors_ns[quantity]
        return errors[errors > 0] / NS_PER_US

    def under_share(self, quantity: str) -> float:
        """Share of all actions that were slower than predicted."""
        return len(self.under_us(quantity)) / max(1, len(self.errors_ns[quantity]))


def case_of(setting: Setting, policy: str, noise_model: NoiseModel) -> Case:
    """Describe one run."""
    replay = replace(setting.replay, noise=noise_model.noise, seed=setting.seed)
    case = azure_replay.case_of(replay, azure_replay.generated(replay), POLICIES[policy])
    return replace(
        case,
        duration_ns=setting.warmup_ns + setting.measured_ns,
        network=noise_model.network,
        faults=noise_model.faults,
    )


def measure(setting: Setting, policy: str, noise_model: NoiseModel) -> Errors:
    """Simulate one policy under one noise model."""
    case = case_of(setting, policy, noise_model)
    measured = range(setting.warmup_ns, case.duration_ns)
    errors = {quantity: array("q") for quantity in QUANTITIES}
    answered = 0

    def take(requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> None:
        nonlocal answered
        answered += sum(row.outcome == OK and row.arrival_ns in measured for row in requests)
        for action in actions:
            kind, step = ("load", action.load) if action.exec is None else ("infer", action.exec)
            if step is None or action.error != "NONE" or action.sent_ns not in measured:
                continue
            errors[kind].append(step.duration_ns - action.expected_duration_ns)
            expected_end_ns = action.expected_begin_ns + action.expected_duration_ns
            errors[f"{kind}_completion"].append(step.end_ns - expected_end_ns)

    run_rows(case, take)
    seconds = setting.measured_ns / NS_PER_S
    return Errors(
        policy=policy,
        noise_model=noise_model.name,
        errors_ns={quantity: np.array(values, np.int64) for quantity, values in errors.items()},
        goodput_rps=answered / seconds,
        bound_rps=stretch_bound(case, measured.start, measured.stop)[0] / seconds,
    )


def figures_of(results: Sequence[Errors]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    for result in results:
        key = f"{result.policy}_{result.noise_model}"
        for quantity in QUANTITIES:
            figures[f"{key}_{quantity}_under_pct"] = 100 * result.under_share(quantity)
            for sign, errors_us in (
                ("over", result.over_us(quantity)),
                ("under", result.under_us(quantity)),
            ):
                if len(errors_us):
                    p99_us = _percentiles(errors_us)[PERCENTILES.index(99.0)]
                    figures[f"{key}_{quantity}_{sign}_p99_us"] = p99_us
                    figures[f"{key}_{quantity}_{sign}_max_us"] = float(errors_us.max())
        figures[f"{key}_goodput_rps"] = result.goodput_rps
        figures[f"{key}_bound_share_pct"] = 100 * result.goodput_rps / result.bound_rps
        figures[f"bound_{result.noise_model}_goodput_rps"] = result.bound_rps
        figures |= {f"paper_{result.noise_model}_{name}": us for name, us in _PAPER.items()}
    return figures


def _percentiles(errors_us: NDArray[np.float64]) -> list[float]:
    """At `PERCENTILES`."""
    found: list[float] = np.percentile(errors_us, PERCENTILES, method="inverted_cdf").tolist()
    return found


def comparisons(results: Sequence[Errors]) -> list[Comparison]:
    """Every number of the paper, beside ours under each noise model."""
    return [
        Comparison(
            key=f"{result.policy}_{result.noise_model}_{name}",
            paper_key=f"paper_{result.noise_model}_{name}",
            reason=_REASON,
        )
        for result in results
        for name in _PAPER
    ]


def produce(setting: Setting, directory: Path = RESULTS) -> list[Errors]:
    """Measure everything and write `fig9.json`, `fig9.csv` and `fig9.png`."""
    results = []
    for noise_model in setting.noise_models:
        for policy in setting.policies:
            result = measure(setting, policy, noise_model)
            results.append(result)
            print(
                f"{policy} {noise_model.name}: {100 * result.under_share('infer'):.1f} % of INFERs and "
                f"{100 * result.under_share('infer_completion'):.1f} % of their completions later "
                "than predicted",
                flush=True,
            )
    write_csv(
        directory / "fig9.csv",
        ["policy", "noise_model", "quantity", "sign", "percentile", "error_us"],
        [
            (result.policy, result.noise_model, quantity, sign, percentile, error_us)
            for result in results
            for quantity in QUANTITIES
            for sign, errors_us in (
                ("over", result.over_us(quantity)),
                ("under", result.under_us(quantity)),
            )
            if len(errors_us)
            for percentile, error_us in zip(PERCENTILES, _percentiles(errors_us), strict=True)
        ],
    )
    draw(results, directory / "fig9.png")
    write_figure("fig9", figures_of(results), comparisons(results), setting, directory=directory)
    return results


def draw(results: Sequence[Errors], target: Path) -> None:
    """Durations above, completions below, as in the paper; a column for each noise model."""
    models = list(dict.fromkeys(result.noise_model for result in results))
    nines = [-float(np.log10(1 - percentile / 100)) for percentile in PERCENTILES]
    with picture(target, 2, len(models), size=(5 * len(models), 6.4)) as grid:
        for column, name in enumerate(models):
            for row, suffix in enumerate(("", "_completion")):
                panel = grid[row, column]
                for result in results:
                    if result.noise_model != name:
                        continue
                    for kind, style in (("infer", "-"), ("load", "--")):
                        for sign, width in (("over", 0.9), ("under", 1.9)):
                            quantity = kind + suffix
                            errors_us = getattr(result, f"{sign}_us")(quantity)
                            if not len(errors_us):
                                continue
                            panel.plot(
                                _percentiles(errors_us),
                                nines,
                                style,
                                lw=width,
                                color=colour_of(result.policy),
                                label=f"{result.policy}: {kind.upper()} {sign}predicted",
                            )
                for kind, marker in (("infer", "kx"), ("load", "k+")):
                    for sign in ("over", "under"):
                        paper_us = _PAPER.get(f"{kind}{suffix}_{sign}_p99_us")
                        if paper_us is not None:
                            label = f"paper: {kind.upper()}, 99 %" if sign == "over" else None
                            panel.plot(paper_us, 2, marker, label=label)
                panel.set_xscale("log")
                panel.set_xlim(left=0.1)
                panel.set_yticks(range(6), ["0", "90", "99", "99.9", "99.99", "99.999"])
                what = "completion time" if suffix else "duration"
                panel.set_title(f"{what}, noise model {name}", fontsize="medium")
                panel.set_xlabel("error, us")
        for row in range(2):
            grid[row, 0].set_ylabel("percentile of errors of one sign")
        grid[0, 0].legend(fontsize="x-small")


def main() -> None:
    """Produce the figure."""
    produce(from_command_line("Figure 9 of the paper.", Setting()))


if __name__ == "__main__":
    main()
