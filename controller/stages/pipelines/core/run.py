"""One request to a pipeline: which stages can be asked when, what each gets of the time, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from clockwright.wire.bulk import Buffer
from controller.stages.pipelines.core.graph import PipelineGraph

#: The part of their even share of the slack that later stages are sure of: see `kept_ns`.
SLACK_SHARE: Final = 0.5


class PipelineRun:
    """The progress of one request."""

    def __init__(self, graph: PipelineGraph, inputs: Sequence[Buffer], rows: int) -> None:
        """Begin with nothing but the client's inputs."""
        self.graph = graph
        #: The stage that has ended it early; None: none has.
        self.ended_by: int | None = None
        self._rows = rows
        self._inputs = inputs
        #: Outputs of each stage that is over.
        self._outputs: dict[int, Sequence[Buffer]] = {}
        self._begun: set[int] = set()
        # How many stages still need the outputs of each, those that the client gets once more.
        self._users = [0] * len(graph.stages)
        for stage in graph.stages:
            for index in stage.behind:
                self._users[index] += 1
        for result in graph.results:
            self._users[result.stage] += 1

    @property
    def is_over(self) -> bool:
        """Whether every stage is over, or one has ended the pipeline."""
        return self.ended_by is not None or len(self._outputs) == len(self.graph.stages)

    def next(self) -> list[int]:
        """Begin the stages that can begin now, all of whose inputs are there."""
        ready = [
            index
            for index, stage in enumerate(self.graph.stages)
            if index not in self._begun and stage.behind <= self._outputs.keys()
        ]
        self._begun.update(ready)
        return ready

    def inputs(self, index: int) -> list[Buffer]:
        """The inputs of a stage, in its model's order. Raises RefusedError, ValueError as `Passage.take`."""
        stage = self.graph.stages[index]
        found = [
            each.take(
                self._inputs[each.index]
                if each.stage < 0
                else self._outputs[each.stage][each.index],
                self._rows,
            )
            for each in stage.inputs
        ]
        for each in stage.behind:
            self._let_go(each)
        return found

    def answered(self, index: int, outputs: Sequence[Buffer]) -> None:
        """Take the outputs of a stage, which may end the pipeline.

        Raises RefusedError or ValueError if the output that decides is none.
        """
        self._outputs[index] = outputs
        ending = self.graph.stages[index].ending
        if ending is not None and ending.holds(outputs[ending.index]):
            self.ended_by = index

    def results(self) -> list[Buffer]:
        """The outputs that the client gets. Of stages that did not run, because another ended the pipeline: zeros or empty texts.

        Raises:
            RefusedError, ValueError: as `Passage.take`.
        """
        found: list[Buffer] = []
        for result in self.graph.results:
            spec = result.target
            if result.stage in self._outputs:
                found.append(result.take(self._outputs[result.stage][result.index], self._rows))
            elif spec.vary:
                found.append(spec.nothing(self._rows))
            else:
                found.append(bytes(spec.batch_bytes(self._rows)))
        return found

    def _let_go(self, index: int) -> None:
        """A stage has what it needs of another one's outputs, which may lie in a worker's memory: free what is not needed."""
        self._users[index] -= 1
        if not self._users[index]:
            self._outputs[index] = ()


@dataclass(frozen=True, slots=True)
class StageTime:
    """What is predicted of a stage."""

    #: Its way to a worker and its EXEC, with nothing in the way.
    step_ns: int
    #: From now to its end if it was asked now: with the queue, and the load where it is cold.
    wait_ns: int = 0
    #: From now until its weights are there; 0: they are.
    load_ns: int = 0


@dataclass(frozen=True, slots=True)
class TimePlan:
    """What is predicted of a request when it comes."""

    #: For each stage: the time that what comes after it needs at least.
    ahead_ns: tuple[int, ...]
    #: From now to the end: the longest path, on which a stage that is not ready before counts with all it waits for.
    total_ns: int
    #: The same with nothing in the way of any stage.
    least_ns: int
    #: The longest path: indices of stages.
    path: tuple[int, ...] = field(default=())


def kept_ns(left_ns: int, own_ns: int, ahead_ns: int) -> int:
    """The time that a stage leaves to those behind it, of what is left when it begins.

    They get what they need, and a part of the slack. With what they need alone, an overloaded server would answer each
    stage at the last moment: the next one could wait for no batch, and most of the work would be for requests that end
    there. In a simulation of three stages of ResNet50, overloaded up to twice, half of an even share completes 1.2 to
    1.9 times as many; all of it, and none, complete less. Where there is time enough it makes no difference.

    Args:
        left_ns: until the answer of the pipeline is due.
        own_ns: what the stage needs, its load included.
        ahead_ns: what those behind it need.
    """
    slack_ns = max(left_ns - own_ns - ahead_ns, 0)
    return ahead_ns + int(SLACK_SHARE * slack_ns * ahead_ns / max(own_ns + ahead_ns, 1))


def ends_ns(
    graph: PipelineGraph, times: Sequence[StageTime], ahead_ns: Sequence[int], left_ns: int
) -> list[int]:
    """When each stage is due at the latest, from now: each begins when those before it were due, and keeps `kept_ns`."""
    ends: list[int] = []
    for stage, time, ahead in zip(graph.stages, times, ahead_ns, strict=True):
        begin_ns = max([ends[each] for each in stage.behind], default=0)
        own_ns = max(time.step_ns, time.load_ns + time.step_ns - begin_ns)
        ends.append(left_ns - kept_ns(left_ns - begin_ns, own_ns, ahead))
    return ends


def plan(graph: PipelineGraph, times: Sequence[StageTime]) -> TimePlan:
    """Predict a request, a lower bound: stages that run at once are not in each other's way.

    Weights of later stages are loaded, and queues before them get shorter, while earlier ones run. So a stage ends
    when those before it have ended and its step is over, but not before it would end if it were asked now.
    """
    count = len(graph.stages)
    ends, least, came = [0] * count, [0] * count, [-1] * count
    for index, stage in enumerate(graph.stages):
        begin = max((ends[each] for each in stage.behind), default=0)
        ends[index] = max(begin + times[index].step_ns, times[index].wait_ns)
        if begin and ends[index] > times[index].wait_ns:
            came[index] = next(each for each in stage.behind if ends[each] == begin)
        least[index] = times[index].step_ns + max((least[each] for each in stage.behind), default=0)
    ahead = [0] * count
    for index in reversed(range(count)):
        for each in graph.stages[index].behind:
            ahead[each] = max(ahead[each], times[index].step_ns + ahead[index])
    path, at = list[int](), max(range(count), key=ends.__getitem__)
    while at >= 0:
        path.append(at)
        at = came[at]
    return TimePlan(tuple(ahead), max(ends), max(least), tuple(reversed(path)))
