"""Calls of a sweep as Ray's tasks, each of which runs a program of the project's environment.

Runs in Ray's processes, so that it uses the standard library and Ray alone. Lines of JSON come on standard input: first
where the cluster is and what runs a call, then the calls. Each is answered by a line, as soon as it is done.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from engines.ray import supervisor
from engines.ray.supervisor import environment_of

_REASON_CHARS = 2000


def run(command: Sequence[str], environment: Mapping[str, str], call: str) -> str:
    """Run one call.

    Returns what the program has answered, in base64, as the call is. Raises RuntimeError if it failed; says with which
    words.
    """
    done = subprocess.run(
        command,
        input=base64.b64decode(call),
        capture_output=True,
        env=environment_of(environment),
        check=False,
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace")[-_REASON_CHARS:]
        raise RuntimeError(f"a call ended with {done.returncode}: {words}")
    return base64.b64encode(done.stdout).decode()


def main() -> int:
    """Answer standard input until it ends and all is answered."""
    import ray
    from ray import cloudpickle

    # Where Ray runs a call, this file is not.
    cloudpickle.register_pickle_by_value(supervisor)
    order = json.loads(sys.stdin.readline())
    try:
        ray.init(address=order["address"], log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        print(f"error: no Ray cluster at {order['address']}: {error}", file=sys.stderr)
        return 1
    task = ray.remote(run).options(num_cpus=1)
    printing = threading.Lock()
    open_calls: set[threading.Event] = set()

    def begin(number: int, call: str) -> None:
        done = threading.Event()
        open_calls.add(done)

        def answer(future: Any) -> None:  # noqa: ANN401  of concurrent.futures
            error = future.exception()
            told = {"error": str(error)} if error else {"answer": future.result()}
            with printing:
                print(json.dumps({"number": number, **told}), flush=True)
            open_calls.discard(done)
            done.set()

        task.remote(order["command"], order["environment"], call).future().add_done_callback(answer)

    for line in sys.stdin:
        begin(**json.loads(line))
    for done in list(open_calls):
        done.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
