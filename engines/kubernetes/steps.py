"""Which Pod of a Deployment ends, and the next step towards that: one step from all that can be seen, and no memory.

A ReplicaSet that has too many Pods deletes those first that are not ready, then those with the lowest deletion cost. So
a Pod that is not ready is chosen before any other, because it would be the one that ends. It costs nothing
if no worker in it is connected: a start that is still pending never stands in the way of a worker that is to leave.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class WorkLeft(enum.IntEnum):
    """What a Pod's worker still has, the least first."""

    #: It is not connected: it starts, or has drained and left.
    NOTHING = 0
    #: It drains.
    REST = 1
    #: It serves, or is about to.
    ALL = 2


@dataclass(frozen=True, slots=True)
class Pod:
    """A Pod that is not being deleted."""

    name: str
    #: As Kubernetes sees it.
    ready: bool
    #: It has the lowest deletion cost.
    marked: bool
    #: Which version of the Deployment it is of.
    template: str
    left: WorkLeft


class Act(enum.Enum):
    """What a step does."""

    #: Drain the worker of the Pod.
    RELEASE = "release"
    #: Drain the worker that is cheapest to lose.
    RELEASE_CHEAPEST = "release the cheapest"
    #: Give the Pod the lowest deletion cost, or take it away again.
    MARK = "mark"
    UNMARK = "unmark"
    #: Give the Deployment one replica fewer.
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class NextStep:
    """A change of one object."""

    act: Act
    #: The Pod's name, where there is one.
    pod: str = ""


def next_step(pods: Sequence[Pod], *, replicas: int, wanted: int) -> NextStep | None:
    """Decide on the next step. Returns None if there is nothing to do now.

    The Pods are of one Deployment, which asks for `replicas`; at least `wanted` there should be.
    """
    pod = None if replicas <= wanted else _choose(pods)
    for other in pods:
        if other.marked and other is not pod:
            return NextStep(Act.UNMARK, other.name)
    if replicas <= wanted:
        return None
    if len(pods) > replicas or len({each.template for each in pods}) > 1:
        # The last step is still being carried out; or a rollout is, in which a Pod of another version would end.
        return None
    if pod is None or len(pods) < replicas:
        # Some are not even made.
        return NextStep(Act.LOWER)
    if pod.left is WorkLeft.ALL:
        is_free = pod.ready and not pod.marked and len(pods) > 1
        return NextStep(Act.RELEASE_CHEAPEST) if is_free else NextStep(Act.RELEASE, pod.name)
    if not pod.marked:
        return NextStep(Act.MARK, pod.name)
    return NextStep(Act.LOWER) if pod.left is WorkLeft.NOTHING else None


def _choose(pods: Sequence[Pod]) -> Pod | None:
    """Choose the Pod that ends, among those that a ReplicaSet would delete first."""
    first = [pod for pod in pods if not pod.ready] or pods
    # A choice that was made stands.
    return min(first, key=lambda pod: (not pod.marked, pod.left, pod.name), default=None)
