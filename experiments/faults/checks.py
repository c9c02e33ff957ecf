"""What must hold whatever happens: after each event, and when all is at rest.

After each event of the world: requests that ended did so once, and one controller leads. After each event of a
scheduler: its books. As it happens: a worker's answer that contradicts the books, whom it obeys, answers' bytes and
times, and a slab that is free, or handed out, while a process uses it (`slabs`). Whenever a controller has heard the
outcome of all that it asked of a worker: whether the books have there what is there (`plant.CheckedLink`). Before that
they say what is to be, and only the worker knows how far it has come. At rest alone: that all models are known
to both, slabs without a holder, telemetry, and what is to be remembered.
"""

from __future__ import annotations

import gc

from experiments.faults.clients import WorldClients
from experiments.faults.plant import Plant
from experiments.faults.world import Violation


def after_each(plant: Plant, clients: WorldClients) -> None:
    """What holds after every event.

    Raises:
        Violation: it does not.
    """
    for asked in clients.just_ended:
        if asked.num_ends != 1:
            raise Violation(f"request {asked.number} ended {asked.num_ends} times")
    clients.just_ended.clear()
    lease = plant.lease
    if lease is None or any(host.has_jumped for host in plant.controller_hosts.values()):
        return  # A clock that jumps makes a lease look older than it is; then generations keep order.
    if len(leaders := lease.leaders()) > 1:
        names = " and ".join(process.name for process in leaders)
        raise Violation(f"{names} lead at once")


def at_rest(plant: Plant, clients: WorldClients) -> None:
    """What holds when all clients have their answers, and nothing goes wrong.

    Raises:
        Violation: it does not.
    """
    for asked in clients.asked:
        if asked.num_ends != 1:
            raise Violation(f"request {asked.number} ended {asked.num_ends} times")
    controller = plant.controller
    if controller is None or plant.num_leading != 1:
        raise Violation(f"{plant.num_leading} controllers lead")
    if controller.runtime.num_waiting:
        raise Violation(f"{controller.runtime.num_waiting} requests wait without a client")
    statistics = controller.runtime.statistics()
    if statistics.num_waiting or statistics.num_sent:
        raise Violation(f"{statistics.num_waiting} requests wait, {statistics.num_sent} are sent")
    for told in statistics.workers:
        worker = plant.workers[told.worker_id]
        believed = {*told.resident, *told.loading}
        if told.loading or told.num_in_flight:
            raise Violation(f"{told.worker_id} is at work: {told}")
        found = worker.core.resident()
        if believed != set(found):
            raise Violation(f"{told.worker_id} has {found}, and the books say {sorted(believed)}")
    if held_bytes := num_held_bytes(plant):
        raise Violation(f"{held_bytes} bytes of slabs are held without a holder")


def num_held_bytes(plant: Plant) -> int:
    """Bytes of slabs that the controller holds for its users."""
    controller = plant.controller
    if controller is None:
        return 0
    arenas = [link.actions.outputs for link in controller.links.links] + [controller.slabs.inputs]
    if any(arena is not None and arena.used_bytes for arena in arenas):
        gc.collect()  # Something may be held by a circle of garbage.
    return sum(arena.used_bytes for arena in arenas if arena is not None)
