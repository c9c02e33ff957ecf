"""Every scheduler in every test is audited after every event; random tests are drawn anew at length."""

from __future__ import annotations

import os
import random
import weakref
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from clockwright.units import RequestId
from controller.core import Scheduler
from controller.core.events import AnswerRequest, Command, Event, RefuseRequest
from controller.core.invariants import check, check_commands

# An assertion that fails in the kit says as much as one in a test.
pytest.register_assert_rewrite("tests.kit")

# Tests import onnxruntime too; see `worker`.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# What CI systems set for others: clients of other makes would ask a proxy for 127.0.0.1, and what a
# command prints would be coloured, or cut to a width.
for _name in (
    *("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
    *("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS", "TERMINAL_WIDTH"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE"),
):
    os.environ.pop(_name, None)
# One thread of BLAS and of torch each, here and in all processes that tests start: threads that wait
# for each other on busy cores made a second of training half a minute. Read when numpy is imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# The same examples everywhere, and none that fails because a machine was busy.
settings.register_profile(
    "clockwright",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("clockwright")

# How many times as many examples a long run draws. Nothing is remembered between runs, so that the seed
# alone says what was drawn.
LONG: Final = 5
settings.register_profile(
    "long",
    settings.get_profile("clockwright"),
    derandomize=False,
    database=None,
    max_examples=LONG * settings.get_profile("clockwright").max_examples,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rewrite` and `--long`.

    An option has to be in this file: pytest reads the `conftest.py` of `testpaths`, or above the paths it
    is given, before it parses arguments, and those of folders further down only when it collects them.
    """
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write down what happens now where a transcript or digest says otherwise",
    )
    parser.addoption(
        "--long",
        type=int,
        metavar="SEED",
        help="run only random and slow tests, with fresh examples, and more of them, drawn from this seed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load the long profile before any `@settings` of a test copies from it, and seed Hypothesis."""
    if (long_seed := config.getoption("--long")) is not None:
        settings.load_profile("long")
        config.option.hypothesis_seed = str(long_seed)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say how to repeat a long run."""
    long_seed = config.getoption("--long")
    return [] if long_seed is None else [f"fresh examples: make test-long SEED={long_seed}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked `seeds(n)` its `seed`: each of `range(n)`, or in a long run fresh ones.

    Fresh seeds depend on the run's seed and the test's name alone: whichever tests are chosen, the same
    are drawn.
    """
    if (marker := metafunc.definition.get_closest_marker("seeds")) is None:
        return
    (count,) = marker.args
    seeds = list(range(count))
    if (long_seed := metafunc.config.getoption("--long")) is not None:
        drawn = random.Random(f"{long_seed} {metafunc.definition.nodeid}")
        seeds = [drawn.getrandbits(32) for _ in range(LONG * count)]
    metafunc.parametrize("seed", seeds, ids=[f"seed={seed}" for seed in seeds])


#: Folders of tests in the order in which `make test` begins them, and after these the others: the rooms where
#: one file takes a minute and waits for most of it come first, so that none of them is left over for the end.
_FIRST: Final = ("system", "experiments", "controller", "worker", "clockwright")


@pytest.hookimpl(trylast=True)  # behind Hypothesis, which marks its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a long run what does not depend on its seed, and of any other what is marked `long`.

    What is left is put in the order in which files are shared out.
    """
    is_long = config.getoption("--long") is not None
    random_or_slow = {"seeds", "hypothesis", "long"}

    def runs(item: pytest.Item) -> bool:
        names = {marker.name for marker in item.iter_markers()}
        return not names.isdisjoint(random_or_slow) if is_long else "long" not in names

    left = [item for item in items if not runs(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if runs(item)]

    def turn(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    items.sort(key=turn)


_responded: weakref.WeakKeyDictionary[Scheduler, set[RequestId]] = weakref.WeakKeyDictionary()


@pytest.fixture(autouse=True)
def audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the books and the commands of every `Scheduler.handle`."""
    handle = Scheduler.handle

    def audited(self: Scheduler, event: Event, *, now_ns: int) -> list[Command]:
        commands = handle(self, event, now_ns=now_ns)
        check(self)
        check_commands(self, commands, now_ns)
        _check_responses(self, commands)
        return commands

    monkeypatch.setattr(Scheduler, "handle", audited)
    return


def _check_responses(scheduler: Scheduler, commands: list[Command]) -> None:
    responded = _responded.setdefault(scheduler, set())
    for command in commands:
        if isinstance(command, AnswerRequest | RefuseRequest):
            assert command.request_id not in responded, (
                f"request {command.request_id}: two responses"
            )
            responded.add(command.request_id)
