"""The table in `books` is true: the policy hears of every change what it says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps

import pytest

from controller.core import SchedulerConfig, books
from controller.core.books import Books
from controller.core.policies import POLICIES
from controller.core.policy import Policy, PolicyKind
from controller.core.state import Phase, Request
from tests.kit.chaos import Chaos

HEARD = ("queue_changed", "demand_changed", "copy_gone", "infer_ended", "refused", "unpark")


def rows(header: str) -> Iterator[list[str]]:
    """Rows of the table of the module's docstring that begins so, cell by cell."""
    assert books.__doc__ is not None
    table = books.__doc__.split(f"| {header} ")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


#: By change: what the policy hears, as a regular expression over names each of which a space follows.
TOLD = {
    change.strip("`"): re.compile(re.sub(r"(\w+) ?", r"\1 ", heard))
    for change, _, heard in rows("change")
}


class Listening:
    """Notes what a policy is told, and under which change of the books."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[str] = []
        self.unasked: list[str] = []
        self.seen: set[str] = set()
        self._depth = 0
        for change in TOLD:
            monkeypatch.setattr(Books, change, self._checked(change, getattr(Books, change)))

    def _checked(self, change: str, apply: Callable[..., object]) -> Callable[..., object]:
        expected = TOLD[change]

        @wraps(apply)
        def checked(*args: object, **options: object) -> object:
            before, self.heard = self.heard, []
            self._depth += 1
            result = apply(*args, **options)
            self._depth -= 1
            told = "".join(f"{name} " for name in self.heard)
            assert expected.fullmatch(told), f"{change}: told {told}, expected {expected.pattern}"
            self.seen.add(change)
            self.heard = before + self.heard
            return result

        return checked

    def kind(self, name: str) -> PolicyKind:
        """The policy of a name, with somebody who listens at its door."""
        known = POLICIES[name]

        def make(config: SchedulerConfig) -> Policy:
            policy = known.make(config)
            for method in HEARD:
                setattr(policy, method, self._heard(method, getattr(policy, method)))
            return policy

        return PolicyKind(make, known.traits)

    def _heard(self, name: str, hear: Callable[..., object]) -> Callable[..., object]:
        inside = False

        def heard(*args: object, **options: object) -> object:
            nonlocal inside
            if inside:
                return hear(*args, **options)
            inside = True
            if self._depth:
                self.heard.append(name)
            else:
                self.unasked.append(name)
            result = hear(*args, **options)
            inside = False
            return result

        return heard


def test_the_policy_hears_of_every_change_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening = Listening(monkeypatch)
    for policy in ("clockwork", "edf_mh"):
        for seed in (0, 1, 2, 13, 16):  # with 13 and 16 what a silent worker has is given to others
            Chaos(seed, policy, listening.kind(policy)).run()
    assert listening.unasked == [], "somebody else told the policy"
    assert listening.seen == TOLD.keys(), "a row that nothing came to pass of"


def test_a_request_lives_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(before, after) for before, after, _ in rows("from")}
    seen: set[tuple[str, str]] = set()
    phases: dict[Request, Phase] = {}

    def name(phase: Phase | None) -> str:
        return "-" if phase is None else phase.name

    def watched(change: str) -> None:
        apply = getattr(Books, change)

        @wraps(apply)
        def changed(self: Books, *args: object, **options: object) -> object:
            open_before = list(self.requests.values())
            result = apply(self, *args, **options)
            for request in {*open_before, *self.requests.values()}:
                before = phases.get(request)
                if before is not request.phase:
                    seen.add((name(before), request.phase.name))
                    phases[request] = request.phase
            return result

        monkeypatch.setattr(Books, change, changed)

    for change in TOLD:
        watched(change)
    for seed in range(4):
        Chaos(seed, "edf_mh").run()
    assert seen == table
