"""A call of a sweep that runs elsewhere: what goes in, and what comes back."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from clockwright.errors import ConfigError
from engines.ray.calls import run
from experiments.study.pool import on_cluster, pool

COMMAND = [sys.executable, "-m", "engines.ray.executor"]
ENVIRONMENT = {"PYTHONPATH": os.getcwd()}


def answered(*call: object) -> tuple[Any, Any]:
    told = run(COMMAND, ENVIRONMENT, base64.b64encode(pickle.dumps(call)).decode())
    result, error = pickle.loads(base64.b64decode(told))
    return result, error


def test_a_call_runs_in_a_process_of_its_own_and_gives_its_result() -> None:
    assert answered(divmod, (7, 2), {}) == ((3, 1), None)
    result, error = answered(os.getpid, (), {})
    assert (result != os.getpid(), error) == (True, None)


def test_what_a_call_prints_is_not_its_result() -> None:
    assert answered(print, ("words",), {}) == (None, None)


def test_the_error_of_a_call_comes_back() -> None:
    result, error = answered(int, ("x",), {})
    assert result is None
    assert isinstance(error, ValueError)


def test_a_call_that_ends_its_process_is_an_error_with_its_words() -> None:
    with pytest.raises(RuntimeError, match="a call ended with 3"):
        answered(os._exit, (3,), {})


def test_a_pool_is_of_this_machine_unless_a_cluster_is_named() -> None:
    with pool(1) as calls:
        assert calls.submit(divmod, 7, 2).result() == (3, 1)
    with on_cluster("127.0.0.1:1"), pytest.raises(ConfigError, match="found no Ray cluster"):
        pool(1)
    with on_cluster("127.0.0.1:1"), on_cluster(""), pool(1) as calls:
        assert calls.submit(divmod, 7, 2).result() == (3, 1)


def test_a_study_without_calls_has_nothing_for_a_cluster() -> None:
    command = [sys.executable, "-m", "experiments", "bench-core", "--ray=127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "bench-core runs in one process, expected one with --processes" in done.stderr
