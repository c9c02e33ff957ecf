"""A Ray cluster of several nodes on this machine: a program for Ray's environment, told by lines of JSON.

Each line of standard input is one thing to do, and each is answered by a line: `add` a node, `remove` one as a machine is
lost, `kill` an actor's own process, or `said`: what an actor says of itself. The cluster ends with standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# The head holds Ray's own bookkeeping. Object stores are small: nothing of ours passes them.
_STORE_BYTES = 80_000_000
_AGAIN_S = 0.1


def main() -> None:
    """Do what each line says."""
    # Ray reports nothing to others, and shows nothing.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error"}
    # Processes that nothing may need are not started ahead.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112  its name
    # Ray would run all that it starts at 15.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  its name
    # Ray prints, too: only answers go where answers are read.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import ray
    from ray.cluster_utils import Cluster
    from ray.exceptions import RayError

    settings = json.loads(sys.stdin.readline())
    common = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **settings["head"]})
    nodes: dict[str, Any] = {}
    ray.init(
        address=cluster.address,
        namespace="clockwright",
        log_to_driver=False,
        logging_level="error",
    )
    print(json.dumps({"address": cluster.address}), file=answers)

    def do(order: Mapping[str, Any]) -> Any:  # noqa: ANN401  JSON
        name = order.get("name", "")
        if order["do"] == "add":
            nodes[name] = cluster.add_node(object_store_memory=_STORE_BYTES, **order["room"])
            return nodes[name].node_id
        if order["do"] == "remove":
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
            return name
        actor = ray.get_actor(name)
        if order["do"] == "kill":
            # The actor's own process is another than the one that it supervises.
            pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            return pid
        while True:
            # It may be about to start again.
            with suppress(RayError):
                return ray.get(actor.said.remote(-1))[1]
            time.sleep(_AGAIN_S)

    try:
        for line in sys.stdin:
            print(json.dumps(do(json.loads(line))), file=answers)
    finally:
        ray.shutdown()
        cluster.shutdown()


# It is never imported, as it needs Ray.
main()
