"""Runs the calls of a sweep on a Ray cluster: as a `ProcessPoolExecutor` does on this machine.

Every node has the project's environment where this one has it. A call is pickled here and runs there as
`python -m engines.ray.executor`, so that its result is the same to the bit.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import override

from clockwright.errors import ConfigError
from engines.ray.environment import check_cluster, inside, ray_python


class RayExecutor(Executor):
    """Calls as tasks of a cluster, as many at a time as it has cores."""

    def __init__(self, address: str, python: Path | None = None) -> None:
        """Connect to a cluster; a Python that has Ray is looked for if none is given.

        Raises ConfigError if Ray, or the cluster, was not found.
        """
        check_cluster(address)
        self._stack = ExitStack()
        self._process = self._stack.enter_context(inside(ray_python(python), "calls"))
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._num_calls = 0
        self._ended = False
        paths = os.environ.get("PYTHONPATH", "")
        self._send(
            {
                "address": address,
                "command": [sys.executable, "-m", "engines.ray.executor"],
                "environment": {"PYTHONPATH": paths} if paths else {},
            }
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = base64.b64encode(pickle.dumps((fn, args, kwargs))).decode()
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(ConfigError("the Ray cluster is gone"))
                return future
            number = self._num_calls
            self._num_calls += 1
            self._futures[number] = future
            self._send({"number": number, "call": call})
        # Ray has it: it cannot be taken back.
        future.set_running_or_notify_cancel()
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert self._process.stdin is not None
        if wait and not cancel_futures:
            self._process.stdin.close()
            self._reader.join()
        self._stack.close()
        self._reader.join()

    def _send(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._lock:
                future = self._futures.pop(told["number"])
            if "error" in told:
                future.set_exception(RuntimeError(told["error"]))
                continue
            result, error = pickle.loads(base64.b64decode(told["answer"]))
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        with self._lock:
            self._ended = True
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_exception(ConfigError("the Ray cluster is gone, or was not there"))


def answer() -> None:
    """Run the call of standard input, and write its result, or its error, to standard output."""
    fn, args, kwargs = pickle.loads(sys.stdin.buffer.read())
    # What the call prints is not its result.
    told: tuple[Any, Exception | None]
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            told = fn(*args, **kwargs), None
        except Exception as error:
            told = None, error
        pickle.dump(told, out)


if __name__ == "__main__":
    answer()
