"""The paper's largest workload: a trace of Azure Functions, replayed to 4,026 models.

61 architectures, 66 instances each; about 17,000 functions, four or five per instance (section 6.5).
The mapping is that of Clockwork's client: functions sorted by total, contiguous, to instances in the
order of their names, so that the most popular functions ask the first architectures by name. It
decides what is possible: dealt out at random, the same 4,860 r/s would cost 17 GPUs at batch size 1,
where the paper's six answered them all.

The paper's trace was never published. Two sources stand in for it, both scaled to its mean rate:

* a file of the published trace. With fewer functions than the paper's, each is repeated until there are
  as many: a sample of 500 stands for a population of 17,000 if each of its functions stands for 34,
  which share their rate in every minute and draw their arrivals apart;
* the generator (`traces.synthetic`), for who has no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from experiments.clockwork_paper import cases
from experiments.simulator import Case, CpuCosts
from experiments.simulator.case import HostedModel, copies_of
from modelzoo.profile import Noise, load_profile
from traces.azure import read_azure_2019
from traces.minutes import MinuteTrace
from traces.synthetic import generate

NS_PER_MINUTE = 60 * NS_PER_S

#: Table 1 has 64 rows, the experiment 61, and the paper does not say which. These three rows have a cell
#: that contradicts its neighbours (see modelzoo/profiles/table1.csv).
LEFT_OUT = ("densenet169", "resnest50", "winograd_resnet152_v2")

#: The file's first minute is 7:59, so that full hours lie where the paper's plots have them.
FIRST_MINUTE = 479


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is replayed, to what."""

    num_functions: int = 17_000
    #: Instances of each architecture.
    num_copies: int = 66
    num_workers: int = 6
    num_pages: int = 1376
    rate_rps: float = 4860.6
    num_minutes: int = 480
    slo_ns: int = 100 * NS_PER_MS
    #: Noise of durations, Figure 5's: 0.3 %. Nothing else disturbs the run: no outliers of the devices, no
    #: delays of hosts or network beyond a constant, and no time of the controller unless `costs` says so.
    noise: Noise = cases.NOISE
    costs: CpuCosts = field(default_factory=CpuCosts)
    seed: int = 8


def hosted_models(setting: Setting) -> tuple[HostedModel, ...]:
    """All instances, in the order in which functions are dealt out to them."""
    rows = load_profile("table1").rows
    names = sorted(name for name in rows if name not in LEFT_OUT)
    return tuple(model for name in names for model in copies_of(rows[name], setting.num_copies))


def find_trace(path: Path) -> Path:
    """The file of invocations per minute: `path` itself, or the only one in that folder.

    Raises:
        ConfigError: the folder has no trace, or several.
    """
    if not path.is_dir():
        return path
    patterns = ("azure2019*_invocations.csv", "invocations_per_function*.csv")
    found = next(filter(None, (sorted(path.glob(f"{pattern}*")) for pattern in patterns)), [])
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ConfigError(
            f"{path}: found {names}, expected one file {' or '.join(patterns)} (also .xz, .gz); "
            "name the file itself"
        )
    return found[0]


def recorded(setting: Setting, path: Path) -> MinuteTrace:
    """Read a trace, and repeat its functions up to the population's size.

    Raises:
        ConfigError: the file cannot be found, or is shorter than the setting.
        TraceFormatError: the file is not a trace.
    """
    trace = read_azure_2019(find_trace(path))
    if trace.num_minutes < setting.num_minutes:
        raise ConfigError(
            f"{path}: found {trace.num_minutes} minutes, expected {setting.num_minutes} or more"
        )
    begin = trace.first_minute
    trace = trace.between(begin, begin + setting.num_minutes)
    times = max(1, round(setting.num_functions / len(trace.functions)))
    return MinuteTrace(trace.functions * times, np.tile(trace.counts, (times, 1)), begin)


def generated(setting: Setting) -> MinuteTrace:
    """Draw a population and its invocations."""
    return generate(
        setting.num_functions,
        num_minutes=setting.num_minutes,
        first_minute=FIRST_MINUTE,
        seed=setting.seed,
    )


def case_of(
    setting: Setting,
    trace: MinuteTrace,
    scheduler: SchedulerConfig,
    *,
    num_minutes: int | None = None,
) -> Case:
    """Describe a run of a trace at the setting's mean rate; of its first minutes, None: of all."""
    total = int(trace.totals.sum())
    if not total:
        raise ConfigError("the trace has no invocation, expected at least one")
    models = hosted_models(setting)
    workload = trace.workload(
        [model.model_id for model in models],
        slo_ns=setting.slo_ns,
        scale=setting.rate_rps * 60 * trace.num_minutes / total,
        seed=setting.seed,
    )
    case = cases.case_of(
        models,
        workload.sources,
        seed=setting.seed,
        end_ns=NS_PER_MINUTE * (num_minutes or trace.num_minutes),
        num_gpus=setting.num_workers,
        num_pages=setting.num_pages,
        noise=setting.noise,
    )
    return replace(case, costs=setting.costs, scheduler=scheduler)
