"""Help names every policy, and `clockwright policies` every option of each."""

from __future__ import annotations

import inspect
import json
import sys

import pytest

from clockwright.cli.main import main
from controller.core.policies import POLICIES
from controller.process.policies_cli import known
from controller.selection.policies import BUILT_IN


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["clockwright", *arguments])
    with pytest.raises(SystemExit):
        main()
    # What the frame of the help cuts into lines is one text again.
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "names"), [(("up",), POLICIES), (("app", "add"), BUILT_IN)], ids=["up", "app add"]
)
def test_help_names_every_policy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    names: dict[str, object],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = shown(monkeypatch, capsys, *command, "--help")
    words = {word.strip("(),.;:") for word in text.split()}
    assert set(names) <= words
    assert "clockwright policies" in text


def test_every_option_of_every_policy_says_what_it_is() -> None:
    found = {row.name: row for row in known()}
    assert set(found) >= {*POLICIES, *BUILT_IN}
    for name, policy in BUILT_IN.items():
        options = {option.name: option for option in found[name].options}
        assert options.keys() == inspect.signature(policy).parameters.keys()
        assert all(option.words for option in options.values()), name
    for row in found.values():
        assert row.words
    assert [option.name for option in found["clipper"].options] == [
        "--batching",
        "--batch-delay-ms",
    ]
    # Nobody can leave it out, so it has no default.
    assert {o.name for o in found["canary"].options if not o.default} == {"stable", "canary"}


def test_one_policy_is_shown_alone_and_an_unknown_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(monkeypatch, capsys, "policies", "epsilon-greedy")
    assert "epsilon (by default 0.05): share of queries that use a random model." in text
    assert "thompson" not in text
    (one,) = json.loads(shown(monkeypatch, capsys, "policies", "static", "--json"))
    assert [option["name"] for option in one["options"]] == ["model", "ensemble"]
    monkeypatch.setattr(sys, "argv", ["clockwright", "policies", "nobody"])
    with pytest.raises(SystemExit, match="expected one of clockwork, edf_mh"):
        main()
