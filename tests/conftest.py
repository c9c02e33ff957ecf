"""Every scheduler in every test is audited after its events; random tests are drawn anew at length."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import os
import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from typing_extensions import override

from clockwright.units import RequestId
from controller.core import Scheduler
from controller.core.events import AnswerRequest, Command, Event, RefuseRequest
from controller.core.invariants import check, check_commands, size_of

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
# Its list of fonts takes seconds to make: it stays where it is, whatever else is cached elsewhere (`states`).
os.environ.setdefault("MPLCONFIGDIR", str(Path("~/.cache/matplotlib").expanduser()))
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

# How many times as many examples a long run draws, and seeds, which are fewer. Nothing is remembered between
# runs, so that the seed alone says what was drawn.
LONG: Final = 15
LONG_SEEDS: Final = 20
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
    share = getattr(config, "workerinput", None)
    # What is named is read even if `--ignore` names it, too.
    is_whole = not (config.option.ignore or config.option.ignore_glob)
    if share is not None and is_whole and config.args_source is config.ArgsSource.TESTPATHS:
        # Each process of several reads all files, and the first one that reads a file leaves bytecode with its
        # assertions to the others: so each begins somewhere else.
        files = sorted(str(path) for path in Path(__file__).parent.rglob("test_*.py"))
        first = int(share["workerid"].removeprefix("gw")) * len(files) // share["workercount"]
        config.args = [*files[first:], *files[:first]]


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
        seeds = [drawn.getrandbits(32) for _ in range(LONG_SEEDS * count)]
    metafunc.parametrize("seed", seeds, ids=[f"seed={seed}" for seed in seeds])


#: How long a test that is a coroutine may take on real time: longer than on the slowest machine.
_COROUTINE_S: Final = 300


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own: on virtual time where it is marked so."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    if pyfuncitem.get_closest_marker("virtual_time") is not None:
        from tests.kit import virtual_time  # not before its assertions can be rewritten

        virtual_time.run(lambda: test(**arguments))
    else:
        asyncio.run(asyncio.wait_for(test(**arguments), _COROUTINE_S))
    return True


#: Files that take longest, from some 70 s of processor time to some 10: `make test` begins with them, so that
#: none of them is left over for the end, when the other processes have nothing to do.
_LONGEST: Final = (
    *("test_docs", "test_simulated_faults", "test_plan", "test_torch_device", "test_restart"),
    *("test_end_to_end", "test_gpu_experiments", "test_cost", "test_figures", "test_cli"),
    *("test_bounds", "test_fig8", "test_clipper_figures", "test_truth", "test_unseen"),
    *("test_scenarios", "test_simulator", "test_autoscale"),
    *("test_gpu_live", "test_isolation", "test_mixing", "test_containers", "test_programs"),
    *("test_modelzoo", "test_explain", "test_random"),
    *("test_lane_threads", "test_rows", "test_operate", "test_attached", "test_bench_fuzz"),
    *("test_reactive", "test_dashboard_pages", "test_faults", "test_policies", "test_chaos"),
    *("test_hostile_peers", "test_torch_engine", "test_torch_operators", "test_digests"),
    *("test_prose", "test_secured", "test_front_processes", "test_far_fronts", "test_payload"),
    *("test_rest", "test_arrivals", "test_broken", "test_shortages", "test_direct_payload"),
    "test_demo",
)


@pytest.hookimpl(trylast=True)  # behind Hypothesis, which marks its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a long run what does not depend on its seed, and of any other what is marked `long`.

    What is left is put in the order in which files are shared out, if they are.
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

    def turn(item: pytest.Item) -> tuple[int, Path]:
        name = item.path.stem
        return (_LONGEST.index(name) if name in _LONGEST else len(_LONGEST), item.path)

    # One process alone keeps the order in which files were named.
    if hasattr(config, "workerinput"):
        items.sort(key=turn)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """The collector does not look at what was imported and collected: half a second each time, and simulations begin so.

    Some tests undo it.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled models for servers of tests that do not ask how models are compiled: each network once."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session", autouse=True)
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where controllers that are told no folder keep state: apart from the user's and from other processes' tests.

    A folder has one controller at a time: of two that tests of different files started at once, the second ended.
    What workers compile is kept apart as well, and what a home that cannot be written would not take.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("states")
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield folder


_NUMBERS: Final = itertools.count()


@pytest.fixture(autouse=True)
def state_of_a_test(states: Path) -> Iterator[None]:
    """A test finds no models that another one has added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(states / f"{next(_NUMBERS)}"))
        yield


#: What the audit may look at for each event of a scheduler, on average: requests, models, copies and so on.
_LOOKS: Final = 8
#: Events of a scheduler after each of which everything is audited.
_FIRST_EVENTS: Final = 250


@dataclass
class _Audited:
    """What has been audited of one scheduler."""

    num_events: int = 0
    #: What the audit may look at; earlier events leave it over.
    looks: int = 0
    responded: set[RequestId] = field(default_factory=set)
    #: Its books have not been checked since its last event.
    is_due: bool = False


@pytest.fixture(autouse=True)
def audit(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Iterator[None]:
    """Check the commands of every `Scheduler.handle`, and its books as often as their size allows.

    A check of the books is linear in what is open, so that one after every event would be quadratic. Small books
    are checked after every event, large ones after every so many, and all at the end of the test. Which events
    these are depends on the books alone, never on time. A long run checks after every event.
    """
    handle = Scheduler.handle
    checks_all = pytestconfig.getoption("--long") is not None
    audits: weakref.WeakKeyDictionary[Scheduler, _Audited] = weakref.WeakKeyDictionary()

    def audited(self: Scheduler, event: Event, *, now_ns: int) -> list[Command]:
        commands = handle(self, event, now_ns=now_ns)
        audit = audits.setdefault(self, _Audited())
        audit.num_events += 1
        audit.looks += _LOOKS
        if checks_all or audit.num_events <= _FIRST_EVENTS:
            audit.is_due = False
        else:
            size = size_of(self)
            audit.is_due = size > audit.looks
            audit.looks -= 0 if audit.is_due else size
        if not audit.is_due:
            check(self)
        check_commands(self, commands, now_ns)
        _check_responses(audit.responded, commands)
        return commands

    monkeypatch.setattr(Scheduler, "handle", audited)
    yield
    for scheduler, audit in audits.items():
        if audit.is_due:
            check(scheduler)


class _Kept(logging.Handler):
    """Keeps errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def runtime_errors() -> Iterator[list[str]]:
    """Fail a test in whose process a `Runtime` logs an error. A test that expects some clears the list."""
    log, kept = logging.getLogger("controller.runtime"), _Kept()
    log.addHandler(kept)
    yield kept.messages
    log.removeHandler(kept)
    assert not kept.messages, "\n".join(kept.messages)


def _check_responses(responded: set[RequestId], commands: list[Command]) -> None:
    for command in commands:
        if isinstance(command, AnswerRequest | RefuseRequest):
            assert command.request_id not in responded, (
                f"request {command.request_id}: two responses"
            )
            responded.add(command.request_id)
