"""Which Pod ends, and by which steps: played on a cluster of records, whatever happens between two steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engines.kubernetes.steps import Act, NextStep, Pod, WorkLeft, next_step

SERVING = Pod("a", ready=True, marked=False, template="1", left=WorkLeft.ALL)


def pods(*changes: dict[str, object]) -> list[Pod]:
    """Pods a, b, ... that serve, but for these changes."""
    return [
        replace(SERVING, name="abcdef"[index], **change)  # type: ignore[arg-type]
        for index, change in enumerate(changes)
    ]


def test_the_cheapest_worker_drains_then_its_pod_is_marked_then_one_replica_goes() -> None:
    found = pods({}, {}, {})
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.RELEASE_CHEAPEST)
    found[1] = replace(found[1], left=WorkLeft.REST)
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.MARK, "b")
    found[1] = replace(found[1], marked=True)
    assert next_step(found, replicas=3, wanted=2) is None
    found[1] = replace(found[1], left=WorkLeft.NOTHING)
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.LOWER)
    # Until the Pod is gone, no other is touched.
    assert next_step(found, replicas=2, wanted=1) is None
    assert next_step([found[0], found[2]], replicas=2, wanted=2) is None


def test_a_pending_start_goes_first_and_nobody_waits_for_it() -> None:
    found = pods({}, {"ready": False, "left": WorkLeft.NOTHING}, {})
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.MARK, "b")
    found[1] = replace(found[1], marked=True)
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.LOWER)
    # A Pod that was not even made cannot be marked.
    assert next_step(found[::2], replicas=3, wanted=2) == NextStep(Act.LOWER)


def test_a_pod_that_would_be_deleted_first_is_drained_though_another_was_cheaper() -> None:
    found = pods({}, {"ready": False}, {})
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.RELEASE, "b")


def test_who_is_wanted_again_is_no_longer_marked() -> None:
    found = pods({}, {"marked": True, "left": WorkLeft.REST})
    assert next_step(found, replicas=2, wanted=2) == NextStep(Act.UNMARK, "b")
    # A Pod that starts would end before it.
    found = pods({"marked": True, "left": WorkLeft.NOTHING}, {}, {"ready": False})
    assert next_step(found, replicas=3, wanted=2) == NextStep(Act.UNMARK, "a")


def test_a_marked_worker_that_joined_again_drains_again() -> None:
    found = pods({}, {"marked": True})
    assert next_step(found, replicas=2, wanted=1) == NextStep(Act.RELEASE, "b")


def test_the_last_worker_goes_by_name() -> None:
    assert next_step(pods({}), replicas=1, wanted=0) == NextStep(Act.RELEASE, "a")


def test_nothing_ends_while_a_rollout_replaces_pods() -> None:
    found = pods({}, {}, {"template": "2", "left": WorkLeft.NOTHING, "ready": False})
    assert next_step(found, replicas=3, wanted=1) is None


class Cluster:
    """A Deployment, its ReplicaSet, its Pods with their workers, and what becomes of them."""

    def __init__(self, replicas: int) -> None:
        self.replicas = self.wanted = replicas
        self.pods: dict[str, Pod] = {}
        self.num_made = 0
        self.reconcile()
        for name in self.pods:
            self.change(name, ready=True, left=WorkLeft.ALL)

    def change(self, name: str, **changes: object) -> None:
        self.pods[name] = replace(self.pods[name], **changes)  # type: ignore[arg-type]

    def reconcile(self) -> list[Pod]:
        """Do what a ReplicaSet does. Returns the Pods that it deleted."""
        while len(self.pods) < self.replicas:
            self.num_made += 1
            name = f"p{self.num_made}"
            self.pods[name] = Pod(name, False, False, "1", WorkLeft.NOTHING)
        # Among equals, the Pod that was made last goes first.
        order = sorted(reversed(self.pods.values()), key=lambda pod: (pod.ready, not pod.marked))
        gone = order[: len(self.pods) - self.replicas]
        for pod in gone:
            del self.pods[pod.name]
        return gone

    def step(self) -> NextStep | None:
        """Take the next step, as one who has just started would."""
        step = next_step(list(self.pods.values()), replicas=self.replicas, wanted=self.wanted)
        match step:
            case NextStep(Act.RELEASE, name):
                assert self.pods[name].left is WorkLeft.ALL
                self.change(name, left=WorkLeft.REST)
            case NextStep(Act.RELEASE_CHEAPEST):
                serving = [name for name, pod in self.pods.items() if pod.left is WorkLeft.ALL]
                assert len(serving) > 1, "the last one is released by name"
                # Any one, as far as is known here.
                self.change(serving[len(serving) // 2], left=WorkLeft.REST)
            case NextStep(Act.MARK | Act.UNMARK as act, name):
                assert self.pods[name].marked is (act is Act.UNMARK)
                self.change(name, marked=act is Act.MARK)
            case NextStep(Act.LOWER):
                assert len(self.pods) <= self.replicas > self.wanted
                self.replicas -= 1
                for pod in self.reconcile():
                    assert pod.left is WorkLeft.NOTHING, f"{pod} ended while it had work"
        return step

    def happen(self, event: str, number: int) -> None:
        """Something else happens, to one of the Pods."""
        if event == "wanted":
            self.wanted = number % 7
        elif event == "keda":
            self.replicas = max(self.replicas, self.wanted)
            self.reconcile()
        elif self.pods:
            name = list(self.pods)[number % len(self.pods)]
            pod = self.pods[name]
            if event == "starts" and pod.left is WorkLeft.NOTHING:
                self.change(name, ready=True, left=WorkLeft.ALL)
            elif event == "drained" and pod.left is WorkLeft.REST:
                self.change(name, left=WorkLeft.NOTHING)
            elif event == "unready":
                self.change(name, ready=False)
            elif event == "lost":
                self.change(name, left=WorkLeft.NOTHING)
            elif event == "deleted":
                del self.pods[name]
                self.reconcile()


EVENTS = ("wanted", "keda", "starts", "drained", "unready", "lost", "deleted", "steps", "steps")


@given(
    replicas=st.integers(0, 6),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 41)), max_size=60),
    wanted=st.integers(0, 6),
)
def test_no_pod_with_work_ends_and_all_that_are_not_wanted_do_whatever_happens(
    replicas: int, events: list[tuple[str, int]], wanted: int
) -> None:
    cluster = Cluster(replicas)
    for event, number in events:
        if event == "steps":
            for _ in range(1 + number % 3):
                cluster.step()
        else:
            cluster.happen(event, number)
    # Nothing else happens from now on, but that workers drain: no start that is pending ever ends.
    cluster.wanted = wanted
    before = cluster.replicas
    for _ in range(10 * (before + 1)):
        if cluster.step() is None:
            for name in list(cluster.pods):
                cluster.happen("drained", list(cluster.pods).index(name))
    assert cluster.replicas == min(before, wanted)
    assert not any(pod.marked for pod in cluster.pods.values())
    assert cluster.step() is None
