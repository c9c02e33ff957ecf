"""A scheduling policy comes from another package, by entry point."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clockwright.cli.main import app
from clockwright.errors import ConfigError
from controller.core import Scheduler, SchedulerConfig
from controller.core.policies import POLICIES
from controller.core.policy import Policy
from controller.process.schedulers import kind_of, make_scheduler

# A policy made of the product's parts, but for its rule: one request at a time.
MODULE = """
from collections import deque

from controller.core.policies.eviction import least_recently_used
from controller.core.policies.strategies import Strategies
from controller.core.policy import PolicyKind, Traits
from controller.core.state import Batch


def oldest(copy, begin_ns):
    required_ns = copy.model.queue[0].due_ns - copy.estimates.exec_ns[0]
    if required_ns < begin_ns:
        return None
    return Batch(copy, 0, 1, 0, required_ns, begin_ns)


class OneAtATime:
    def __init__(self, config):
        self.lookahead_ns = config.lookahead_ns
        self.max_outstanding = config.max_outstanding
        self.margin_ns = config.margin_ns
        self.strategies = Strategies()
        self.wanted = deque()

    @property
    def wants_any(self):
        return bool(self.wanted)

    def runs(self, batch, now_ns):
        pass

    def queue_changed(self, model):
        if model.queue:
            self.strategies.update(model)

    def catch_up(self, worker):
        self.strategies.catch_up(worker)

    def demand_changed(self, model):
        pass

    def copy_gone(self, copy):
        copy.strategy_key = None

    def infer_ended(self, sent, event, now_ns):
        pass

    def leaves_room(self, request, now_ns):
        return 0.0

    def refused(self, request, refusal, *, now_ns):
        pass

    def unpark(self, worker):
        self.strategies.unpark(worker)

    def next_infer(self, worker, free_ns, now_ns):
        for batch in self.strategies.find(worker, free_ns, now_ns, oldest, []):
            self.strategies.take_out(batch)
            return batch
        return None

    def want_load(self, model, now_ns):
        if model.queue and not model.copies and model not in self.wanted:
            self.wanted.append(model)
            model.load_key = 0.0
        return model.load_key is not None

    def forget_unwanted(self, now_ns):
        while self.wanted and not self.wanted[0].queue:
            self.wanted.popleft().load_key = None

    def next_load(self, worker, begin_ns, now_ns):
        self.forget_unwanted(now_ns)
        if not self.wanted or worker not in self.wanted[0].ready:
            return None
        model = self.wanted.popleft()
        model.load_key = None
        return model

    def victims(self, worker, num_pages, now_ns):
        return least_recently_used(worker, num_pages, wanted=False)

    def victims_of_refused(self, model, worker, num_pages, now_ns):
        return None


KIND = PolicyKind(OneAtATime, Traits(predicts=True))


class Earlier(OneAtATime):
    def __init__(self, config):
        super().__init__(config)
        del self.margin_ns

    def victims(self, worker, num_pages):
        return None

    def refused(self, request, refusal, now):
        pass


EARLIER = PolicyKind(Earlier, Traits(predicts=True))
NOTHING_AT_ALL = PolicyKind(lambda config: object(), Traits())
"""

CASE = """
seconds = 0.5

[[models]]
row = "resnet50_v1b"
copies = 2

[[clients]]
kind = "poisson"
rate_rps = 200
slo_ms = 100
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution of one module, whose policies the test names."""

    def install(entry_points: str) -> None:
        site = tmp_path / "site"
        information = site / "one_at_a_time-1.0.dist-info"
        information.mkdir(parents=True)
        (site / "one_at_a_time.py").write_text(MODULE)
        (site / "one_that_leaves.py").write_text("raise SystemExit\n")
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: one-at-a-time\nVersion: 1.0\n"
        )
        (information / "entry_points.txt").write_text(f"[clockwright.schedulers]\n{entry_points}\n")
        monkeypatch.syspath_prepend(site)

    return install


def simulated(tmp_path: Path, policy: str) -> Result:
    case = tmp_path / "case.toml"
    case.write_text(CASE)
    return CliRunner().invoke(app, ["simulate", str(case), "--json", f"--policy={policy}"])


def test_a_packages_policy_serves_a_simulated_run(tmp_path: Path, install: Install) -> None:
    install("one-at-a-time = one_at_a_time:KIND")
    outcome = simulated(tmp_path, "one-at-a-time")
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    assert figures["policy"] == "one-at-a-time"
    assert figures["answered"] > 50
    assert set(figures["batches"]) == {"1"}
    assert set(json.loads(simulated(tmp_path, "clockwork").stdout)["batches"]) > {"1"}


def test_a_scheduler_is_made_with_it_and_its_traits(install: Install) -> None:
    install("one-at-a-time = one_at_a_time:KIND")
    scheduler = make_scheduler(SchedulerConfig(policy="one-at-a-time"))
    assert scheduler.traits is kind_of("one-at-a-time").traits
    with pytest.raises(ConfigError, match="policy is 'one-at-a-time', expected one of clockwork"):
        Scheduler(SchedulerConfig(policy="one-at-a-time"))  # the core alone reads no files


def test_a_built_in_name_means_the_built_in_policy(install: Install) -> None:
    install("clockwork = one_at_a_time:KIND")
    assert kind_of("clockwork") is POLICIES["clockwork"]


@pytest.mark.parametrize(
    ("entry_point", "problem"),
    [
        ("mine = no.such.module:X", r"policy mine \(no\.such\.module:X\): No module named 'no'"),
        ("mine = one_that_leaves:KIND", r"policy mine \(one_that_leaves:KIND\): SystemExit"),
        ("mine = one_at_a_time:NOTHING", r"policy mine \(one_at_a_time:NOTHING\): .*no attribute"),
        (
            "mine = one_at_a_time:OneAtATime",
            r"found <class 'one_at_a_time\.OneAtATime'>, expected a PolicyKind",
        ),
        (
            "other = one_at_a_time:KIND",
            "policy is 'mine', expected one of clockwork, edf_mh, clipper, infaas, other",
        ),
    ],
)
def test_a_policy_that_cannot_be_had_is_named_with_the_reason(
    tmp_path: Path, install: Install, entry_point: str, problem: str
) -> None:
    install(entry_point)
    with pytest.raises(ConfigError, match=problem):
        kind_of("mine")
    outcome = simulated(tmp_path, "mine")
    assert isinstance(outcome.exception, ConfigError)


def test_a_policy_that_lacks_what_it_is_asked_is_refused_when_it_is_made(install: Install) -> None:
    install("mine = one_at_a_time:EARLIER")
    with pytest.raises(ConfigError) as refused:
        make_scheduler(SchedulerConfig(policy="mine"))
    assert str(refused.value) == (
        "policy mine (one_at_a_time:EARLIER): lacks margin_ns; "
        "cannot be asked refused(request, refusal, now_ns); "
        "cannot be asked victims(worker, num_pages, now_ns)"
    )


def test_all_that_is_asked_of_a_policy_is_looked_for(install: Install) -> None:
    install("mine = one_at_a_time:NOTHING_AT_ALL")
    with pytest.raises(ConfigError) as refused:
        make_scheduler(SchedulerConfig(policy="mine"))
    asked = {name for name in (*Policy.__annotations__, *vars(Policy)) if name[0] != "_"}
    assert {"margin_ns", "wants_any", "next_infer"} < asked
    assert str(refused.value).endswith(f": lacks {', '.join(sorted(asked))}")
