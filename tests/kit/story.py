"""Stories of the scheduler: a script of what happens, played on a virtual clock, and its transcript.

A story is a text file. Above a line `----` stands what people write, below it what the scheduler made of
it, once for each policy, as `pytest --rewrite` left it. Each line of the script is one of

    # words                                      repeated in the transcript, where the next line happens
    # edf_mh, infaas: words                      only in the transcripts of those policies
    policies clockwork edf_mh                    which play the story
    config window_ns=3ms deferral=no             fields of `SchedulerConfig` or `EdfMhConfig`
    link out=0.5ms back=0.2ms [says_when=no]     how long actions and results are on their way
    [TIME] SOMETHING HAPPENS                     at once, if there is no time

and these may happen (`m1..m9` and `a,b` stand for several models):

    gpu g1 pages=10 [kind=k] [slow=1.5] [knows=a,b]        joins, slower than profiled models say
    model a load=8ms exec=1:10ms,2:14ms pages=2 [arch=r50] [on=g1,g2] [mhz=1400]
    request a slo=50ms [rows=2] [tenant=x] [ago=1ms] [every 2ms 10 times]
    5 requests a slo=50ms ...                              which arrive together, of each model so many
    cancel 3 | want a | remove a | drain g1 | lose g1 | clock g1 1200 | close
    ready a g1                                             g1 has it ready, wherever and whether it is wanted
    stray g1 99                                            results of an action that was never sent
    pace g1 1.5                                            its EXECs take 1.5 times the profile from now on
    way g1 20ms                                            so long is an action on its way to it from now on
    next infer|load [a] takes 25ms | fails DEVICE          what becomes of an action not yet sent
    next infer|load [a] hangs                              with it, its GPU says nothing more

Workers are played: an action begins when it is there, its lane is free and its weights are loaded, and takes
what the profile says. It fails as a worker would have it fail: TOO_LATE where its window has passed,
NOT_RESIDENT where its load failed. One that is withdrawn before it has begun fails WITHDRAWN, and those
behind it move up.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from decimal import Decimal
from heapq import heappop, heappush
from typing import Any, Final

from clockwright.units import ActionId, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights
from controller.core import EdfMhConfig, Scheduler, SchedulerConfig
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AdmissionClosed,
    AnswerRequest,
    ClockSeen,
    CloseWorker,
    Event,
    ForgetModel,
    ModelAdded,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    SendAction,
    TimerFired,
    WithdrawAction,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WriteOffAction,
)
from tests.kit.transcript import say_commands, say_event, say_ms

UNITS: Final = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
POLICIES: Final = ("clockwork", "edf_mh", "clipper", "infaas")
ALL: Final = frozenset(POLICIES)

# In the transcripts of which policies it stands, and what it says.
Comment = tuple[AbstractSet[str], str]

# A story that says more than this does not end.
MAX_LINES: Final = 100_000


@dataclass(slots=True)
class Step:
    """One line of a script that happens at a time."""

    at_ns: int
    words: list[str]
    #: Those before it.
    comments: list[Comment]


@dataclass(slots=True)
class Story:
    """A script."""

    policies: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    edf_mh: dict[str, Any] = field(default_factory=dict)
    out_ns: int = 500_000
    back_ns: int = 200_000
    #: Whether results say when the worker had the action, and its inputs.
    says_when: bool = True
    steps: list[Step] = field(default_factory=list)
    last_comments: list[Comment] = field(default_factory=list)


def parse_ns(text: str) -> int:
    match = TIME.fullmatch(text)
    assert match, f"{text!r}: expected a time, such as 2.5ms"
    return int(Decimal(match[1]) * UNITS[match[2]])


def parse(script: str) -> Story:
    story = Story()
    comments: list[Comment] = []
    begun = (
        False  # comments before the first time are about the whole, and for readers of the script
    )
    for line in script.splitlines():
        if line.startswith("#"):
            text = line.removeprefix("#").strip()
            whose, colon, rest = text.partition(": ")
            policies = set(whose.split(", "))
            comments.append((policies, rest) if colon and policies <= ALL else (ALL, text))
            continue
        words = line.split()
        if not words:
            continue
        if words[0] == "policies":
            story.policies = words[1:]
        elif words[0] == "config":
            _configure(story, options(words[1:]))
        elif words[0] == "link":
            ways = options(words[1:])
            story.out_ns, story.back_ns = parse_ns(ways["out"]), parse_ns(ways["back"])
            story.says_when = ways.get("says_when", "yes") == "yes"
        else:
            at_ns = 0
            if TIME.fullmatch(words[0]):
                at_ns, begun = parse_ns(words.pop(0)), True
            story.steps.append(Step(at_ns, words, comments if begun else []))
            comments = []
    story.last_comments = comments
    assert story.policies, "a story needs a line `policies ...`"
    assert set(story.policies) <= set(POLICIES), f"unknown among {story.policies}"
    return story


def options(words: list[str]) -> dict[str, str]:
    for word in words:
        assert "=" in word, f"{word!r}: expected NAME=VALUE"
    return dict(word.split("=", 1) for word in words)


def _configure(story: Story, settings: dict[str, str]) -> None:
    pieces = {piece.name for piece in fields(EdfMhConfig)}
    for name, text in settings.items():
        value: Any = text
        if TIME.fullmatch(text):
            value = parse_ns(text)
        elif text in ("yes", "no"):
            value = text == "yes"
        elif name == "tenant_weights":
            weights = (pair.split(":") for pair in text.split(","))
            value = {tenant: float(weight) for tenant, weight in weights}
        elif re.fullmatch(r"\d+", text):
            value = int(text)
        elif re.fullmatch(r"\d+\.\d+", text):
            value = float(text)
        (story.edf_mh if name in pieces else story.config)[name] = value


def several(text: str) -> list[str]:
    """`a,b` and `m1..m3` in full."""
    names: list[str] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\D*)(\d+)\.\.\1(\d+)", part)
        if span:
            names += [f"{span[1]}{number}" for number in range(int(span[2]), int(span[3]) + 1)]
        else:
            names.append(part)
    return names


@dataclass(slots=True)
class Planned:
    """An action that a GPU has, and when it plays it."""

    command: SendAction
    fate: Fate
    received_ns: int
    begin_ns: int
    #: When its lane would be free without it.
    free_ns: int
    #: Its place on the agenda; None: its result will not come.
    serial: int | None = None


@dataclass(slots=True, eq=False)
class Gpu:
    """A worker that is played."""

    slow: float
    knows: list[str]
    out_ns: int
    pace: float = 1.0
    load_free_ns: int = 0
    exec_free_ns: int = 0
    #: It says nothing any more.
    hangs: bool = False
    #: When the weights are there; None where their load failed.
    loaded_ns: dict[str, int | None] = field(default_factory=dict)
    #: What it has been sent, in order, until its result is told.
    planned: dict[ActionId, Planned] = field(default_factory=dict)


@dataclass(slots=True)
class Profile:
    """What is true of a model."""

    architecture: str
    num_pages: int
    load_ns: int
    exec_ns: dict[int, int]
    clock_mhz: int
    #: The GPUs that have it; none named: all.
    on: list[str]

    def is_for(self, worker: str, gpu: Gpu, model: str) -> bool:
        return (not self.on or worker in self.on) and (not gpu.knows or model in gpu.knows)


@dataclass(slots=True)
class Fate:
    """What becomes of an action that is not sent yet."""

    kind: str
    model: str
    takes_ns: int | None = None
    error: ActionError = ActionError.NONE
    hangs: bool = False


class Play:
    """A story on one policy."""

    def __init__(self, story: Story, policy: str) -> None:
        self._story = story
        self._policy = policy
        edf_mh = EdfMhConfig(**story.edf_mh)
        config = SchedulerConfig(policy=policy, edf_mh=edf_mh, **story.config)
        self._scheduler = Scheduler(config)
        self._now_ns = 0
        self._wake_ns: int | None = None
        self._serial = itertools.count()
        self._request_ids = itertools.count(1)
        #: (time, 0 for results and 1 for the script, serial, what: its worker and it, or words).
        self._agenda: list[tuple[int, int, int, tuple[str, Gpu, Event] | Step]] = []
        #: Results that will not come: their actions were withdrawn, or moved up.
        self._void: set[int] = set()
        self._gpus: dict[str, Gpu] = {}
        self._profiles: dict[str, Profile] = {}
        #: Those of removed models too.
        self._known: dict[str, Profile] = {}
        self._fates: list[Fate] = []
        self._outcomes: Counter[str] = Counter()
        self.lines: list[str] = []

    def run(self) -> list[str]:
        """The transcript."""
        for step in self._story.steps:
            for each in repeated(step):
                heappush(self._agenda, (each.at_ns, 1, next(self._serial), each))
        while len(self.lines) < MAX_LINES:
            while self._agenda and self._agenda[0][2] in self._void:
                heappop(self._agenda)
            wake_ns = self._wake_ns
            if wake_ns is not None and (not self._agenda or wake_ns < self._agenda[0][0]):
                self._now_ns = max(self._now_ns, wake_ns)
                self._tell(TimerFired())
            elif self._agenda:
                at_ns, _, _, item = heappop(self._agenda)
                self._now_ns = max(self._now_ns, at_ns)
                if isinstance(item, Step):
                    self._comment(item.comments)
                    self._happen(item.words)
                elif self._gpus.get(item[0]) is item[1]:
                    _, gpu, event = item
                    if isinstance(event, ActionSucceeded | ActionFailed):
                        gpu.planned.pop(event.action_id, None)
                    self._tell(event)
            else:
                break
        else:
            raise AssertionError(f"more than {MAX_LINES} lines: does the story end?")
        self._comment(self._story.last_comments)
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self._outcomes.items()))
        self.lines.append(f"{'':<11} in all: {outcomes or 'no request'}")
        return self.lines

    def _comment(self, comments: list[Comment]) -> None:
        mine = [text for policies, text in comments if self._policy in policies]
        if mine:
            self.lines += ["", *(f"# {text}".rstrip() for text in mine)]

    # --- the script ---------------------------------------------------------------------------

    def _happen(self, words: list[str]) -> None:
        match words:
            case ["gpu", name, *rest]:
                self._join(name, options(rest))
            case ["model", names, *rest]:
                for name in several(names):
                    self._add(name, options(rest))
            case ["request", names, *rest]:
                for event in self._requests(1, names, options(rest)):
                    self._tell(event)
            case [count, "requests", names, *rest]:
                requests = self._requests(int(count), names, options(rest))
                self._tell(RequestsArrived(requests=tuple(requests)))
            case ["cancel", number]:
                self._outcomes["cancelled"] += 1
                self._tell(RequestCancelled(request_id=RequestId(int(number))))
            case ["want", names]:
                for name in several(names):
                    self._tell(ModelWanted(model_id=ModelId(name)))
            case ["remove", name]:
                self._profiles.pop(name, None)
                self._tell(ModelRemoved(model_id=ModelId(name)))
            case ["drain", name]:
                self._tell(WorkerDraining(worker_id=WorkerId(name)))
            case ["lose", name]:
                self._gpus.pop(name, None)
                self._tell(WorkerLost(worker_id=WorkerId(name)))
            case ["clock", name, mhz]:
                for each in several(mhz):
                    self._tell(ClockSeen(worker_id=WorkerId(name), clock_mhz=int(each)))
            case ["ready", name, worker]:
                self._make_ready(worker, self._known[name], name)
            case ["stray", name, number]:
                self._stray(WorkerId(name), ActionId(int(number)))
            case ["close"]:
                self._tell(AdmissionClosed())
            case ["pace", name, factor]:
                if gpu := self._gpus.get(name):
                    gpu.pace = float(factor)
            case ["way", name, time]:
                if gpu := self._gpus.get(name):
                    gpu.out_ns = parse_ns(time)
            case ["next", kind, *rest]:
                self._fates.append(fate(kind, rest))
            case _:
                raise AssertionError(f"cannot read {' '.join(words)!r}")

    def _join(self, name: str, given: dict[str, str]) -> None:
        knows = several(given["knows"]) if "knows" in given else []
        gpu = Gpu(float(given.get("slow", "1")), knows, self._story.out_ns)
        self._gpus[name] = gpu
        self._tell(
            WorkerJoined(
                worker_id=WorkerId(name),
                gpu_kind=GpuKind(given.get("kind", "k")),
                num_pages=int(given["pages"]),
            )
        )
        for model, profile in self._profiles.items():
            if profile.is_for(name, gpu, model):
                self._make_ready(name, profile, model)

    def _add(self, name: str, given: dict[str, str]) -> None:
        sizes = (pair.split(":") for pair in given["exec"].split(","))
        profile = Profile(
            architecture=given.get("arch", name),
            num_pages=int(given["pages"]),
            load_ns=parse_ns(given["load"]),
            exec_ns={int(size): parse_ns(time) for size, time in sizes},
            clock_mhz=int(given.get("mhz", "0")),
            on=several(given["on"]) if "on" in given else [],
        )
        self._profiles[name] = self._known[name] = profile
        self._tell(ModelAdded(model_id=ModelId(name)))
        for worker, gpu in self._gpus.items():
            if profile.is_for(worker, gpu, name):
                self._make_ready(worker, profile, name)

    def _make_ready(self, worker: str, profile: Profile, model: str) -> None:
        slow = self._gpus[worker].slow if worker in self._gpus else 1.0
        self._tell(
            ModelReady(
                worker_id=WorkerId(worker),
                model_id=ModelId(model),
                architecture_id=ArchitectureId(profile.architecture),
                num_pages=profile.num_pages,
                load_ns=profile.load_ns,
                exec_ns={size: int(ns * slow) for size, ns in profile.exec_ns.items()},
                clock_mhz=profile.clock_mhz,
            )
        )

    def _stray(self, worker_id: WorkerId, action_id: ActionId) -> None:
        now_ns = self._now_ns
        self._tell(
            ActionSucceeded(
                worker_id=worker_id,
                action_id=action_id,
                begin_ns=now_ns,
                end_ns=now_ns,
                duration_ns=0,
            )
        )
        self._tell(
            ActionFailed(worker_id=worker_id, action_id=action_id, error=ActionError.TOO_LATE)
        )

    def _requests(self, count: int, names: str, given: dict[str, str]) -> Iterator[RequestArrived]:
        for name in several(names):
            for _ in range(count):
                yield RequestArrived(
                    request_id=RequestId(next(self._request_ids)),
                    model_id=ModelId(name),
                    rows=int(given.get("rows", "1")),
                    arrival_ns=self._now_ns - parse_ns(given.get("ago", "0ms")),
                    slo_ns=parse_ns(given["slo"]),
                    tenant=given.get("tenant", ""),
                )

    # --- the scheduler and its workers ----------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self.lines.append(f"{say_ms(self._now_ns):<11} {say_event(event, self._now_ns)}")
        commands = self._scheduler.handle(event, now_ns=self._now_ns)
        self.lines += (f"{'':<11}   > {line}" for line in say_commands(commands, self._now_ns))
        for command in commands:
            match command:
                case SendAction():
                    self._act(command)
                case WithdrawAction():
                    self._withdraw(self._gpus[command.worker_id], command.action_id)
                case AnswerRequest():
                    self._outcomes["answered"] += 1
                case RefuseRequest():
                    self._outcomes[command.refusal.value] += 1
                case CloseWorker():
                    del self._gpus[command.worker_id]
                case ForgetModel() | WriteOffAction():
                    pass
        wake_ns = self._scheduler.next_wakeup_ns()
        if wake_ns != self._wake_ns:
            self._wake_ns = wake_ns
            self.lines.append(f"{'':<11} wake {'never' if wake_ns is None else say_ms(wake_ns)}")

    def _act(self, command: SendAction) -> None:
        """Play an action that was sent, and put its result on the agenda."""
        action, gpu = command.action, self._gpus[command.worker_id]
        if isinstance(action, EvictWeights):
            del gpu.loaded_ns[action.model_id]
            return  # the scheduler hears nothing of it
        self._plan(gpu, command, self._fate_of(action), self._now_ns + gpu.out_ns)

    def _plan(self, gpu: Gpu, command: SendAction, fate: Fate, received_ns: int) -> None:
        action = command.action
        assert not isinstance(action, EvictWeights)
        profile = self._profiles.get(action.model_id)
        error = fate.error
        duration_ns = action.expected_duration_ns
        if isinstance(action, LoadWeights):
            begin_ns = max(received_ns, gpu.load_free_ns)
            if profile is not None:
                duration_ns = profile.load_ns
        else:
            loaded_ns = gpu.loaded_ns.get(action.model_id, 0)
            begin_ns = max(received_ns, gpu.exec_free_ns, loaded_ns or 0)
            if profile is not None:
                duration_ns = int(profile.exec_ns[action.batch_size] * gpu.slow * gpu.pace)
            if loaded_ns is None and error is ActionError.NONE:
                error = ActionError.NOT_RESIDENT
        if fate.takes_ns is not None:
            duration_ns = fate.takes_ns
        if begin_ns > action.latest_ns and error is ActionError.NONE:
            error = ActionError.TOO_LATE
        if error is ActionError.TOO_LATE:
            begin_ns = max(begin_ns, action.latest_ns)
        # Only an engine that fails has been busy.
        end_ns = (
            begin_ns
            if error not in (ActionError.NONE, ActionError.DEVICE)
            else begin_ns + duration_ns
        )
        free_ns = gpu.load_free_ns if isinstance(action, LoadWeights) else gpu.exec_free_ns
        planned = Planned(command, fate, received_ns, begin_ns, free_ns)
        gpu.planned[action.action_id] = planned
        if isinstance(action, LoadWeights):
            gpu.load_free_ns = end_ns
            gpu.loaded_ns[action.model_id] = end_ns if error is ActionError.NONE else None
        else:
            gpu.exec_free_ns = max(gpu.exec_free_ns, end_ns)
        gpu.hangs |= fate.hangs
        if gpu.hangs:
            return
        said_ns = received_ns if self._story.says_when else None
        result: Event
        if error is ActionError.NONE:
            result = ActionSucceeded(
                worker_id=command.worker_id,
                action_id=action.action_id,
                begin_ns=begin_ns,
                end_ns=end_ns,
                duration_ns=duration_ns,
                received_ns=said_ns,
                staged_ns=said_ns if isinstance(action, Infer) else None,
            )
        else:
            result = ActionFailed(
                worker_id=command.worker_id,
                action_id=ActionId(action.action_id),
                error=error,
                message="as the story has it" if error is ActionError.DEVICE else "",
                received_ns=said_ns,
            )
        planned.serial = self._report(gpu, result, end_ns)

    def _report(self, gpu: Gpu, result: ActionSucceeded | ActionFailed, end_ns: int) -> int:
        serial = next(self._serial)
        at_ns = end_ns + self._story.back_ns
        heappush(self._agenda, (at_ns, 0, serial, (str(result.worker_id), gpu, result)))
        return serial

    def _withdraw(self, gpu: Gpu, action_id: ActionId) -> None:
        """Drop an action that will not have begun when the word is there; plan those behind it anew."""
        there_ns = self._now_ns + gpu.out_ns
        gone = gpu.planned.get(action_id)
        if gone is None or gone.begin_ns <= there_ns or gpu.hangs:
            return
        sent = list(gpu.planned)
        behind = [gpu.planned[each] for each in sent[sent.index(action_id) :]]
        behind = [each for each in behind if each.begin_ns > there_ns]
        for each in reversed(behind):
            del gpu.planned[each.command.action.action_id]
            if each.serial is not None:
                self._void.add(each.serial)
            if isinstance(each.command.action, LoadWeights):
                gpu.load_free_ns = each.free_ns
            else:
                gpu.exec_free_ns = each.free_ns
        if isinstance(gone.command.action, LoadWeights):
            gpu.loaded_ns[gone.command.action.model_id] = None
        for each in behind[1:]:
            self._plan(gpu, each.command, each.fate, each.received_ns)
        result = ActionFailed(
            worker_id=gone.command.worker_id,
            action_id=action_id,
            error=ActionError.WITHDRAWN,
            received_ns=gone.received_ns if self._story.says_when else None,
        )
        self._report(gpu, result, there_ns)

    def _fate_of(self, action: LoadWeights | Infer) -> Fate:
        kind = "load" if isinstance(action, LoadWeights) else "infer"
        for fate in self._fates:
            if fate.kind == kind and fate.model in ("", action.model_id):
                self._fates.remove(fate)
                return fate
        return Fate(kind, "")


def fate(kind: str, words: list[str]) -> Fate:
    assert kind in ("infer", "load"), f"{kind!r}: expected infer or load"
    model = ""
    if words[0] not in ("takes", "fails", "hangs"):
        model = words.pop(0)
    match words:
        case ["takes", time]:
            return Fate(kind, model, takes_ns=parse_ns(time))
        case ["fails", name]:
            return Fate(kind, model, error=ActionError[name])
        case ["hangs"]:
            return Fate(kind, model, hangs=True)
    raise AssertionError(f"cannot read {' '.join(words)!r}")


def repeated(step: Step) -> Iterator[Step]:
    """A step, once or as often as it says; models take turns."""
    words = step.words
    if "every" not in words:
        yield step
        return
    position = words.index("every")
    match words[position:]:
        case ["every", time, count, "times"]:
            interval_ns, times = parse_ns(time), int(count)
        case _:
            raise AssertionError(f"cannot read {' '.join(words)!r}")
    head = words[:position]
    which = 1 if head[0] == "request" else 2
    names = several(head[which])
    for number in range(times):
        turn = [*head[:which], names[number % len(names)], *head[which + 1 :]]
        yield Step(step.at_ns + number * interval_ns, turn, [] if number else step.comments)


def play(script: str) -> str:
    """What the scheduler makes of a script, for all its policies."""
    story = parse(script)
    sections = []
    for policy in story.policies:
        sections.append("\n".join([f"==== {policy}", "", *Play(story, policy).run()]))
    return "\n\n".join(sections) + "\n"
