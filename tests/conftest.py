"""Every scheduler in every test is audited after every event."""

from __future__ import annotations

import os
import weakref

import pytest
from hypothesis import HealthCheck, settings

from clockwright.units import RequestId
from controller.core import Scheduler
from controller.core.events import AnswerRequest, Command, Event, RefuseRequest
from controller.core.invariants import check, check_commands

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rewrite`.

    An option has to be in this file: pytest reads the `conftest.py` of `testpaths`, or above the paths it
    is given, before it parses arguments, and those of folders further down only when it collects them.
    """
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write down what happens now where a transcript or digest says otherwise",
    )


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
