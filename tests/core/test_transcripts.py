"""Stories of the scheduler, event by event, as `transcripts/*.txt` tell them; `tests.kit.story` says how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.golden import compare
from tests.kit.story import play

STORIES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
# Ends the script; what follows is the transcript.
RULE = "----\n"


def test_the_stories_are_there() -> None:
    assert len(STORIES) >= 10


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_a_story_goes_as_it_was_written_down(path: Path, request: pytest.FixtureRequest) -> None:
    script = path.read_text(encoding="utf-8").partition(f"\n{RULE}")[0].rstrip("\n") + "\n"
    transcript = f"{script}{RULE}{play(script)}"
    compare(path, transcript, rewrite=request.config.getoption("--rewrite"))


@pytest.mark.parametrize("known", [None, "", "12 other\n"], ids=["missing", "empty", "different"])
def test_what_differs_fails_and_says_how_to_rewrite(tmp_path: Path, known: str | None) -> None:
    path = tmp_path / "story.txt"
    if known is not None:
        path.write_text(known, encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)\+12 request.*pytest --rewrite"):
        compare(path, "12 request\n", rewrite=False)
    assert known is None if not path.exists() else path.read_text(encoding="utf-8") == known


def test_what_differs_is_written_only_with_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    compare(path, "12 request\n", rewrite=True)
    compare(path, "12 request\n", rewrite=False)
    assert path.read_text(encoding="utf-8") == "12 request\n"


def test_the_flag_is_off_unless_given(pytestconfig: pytest.Config) -> None:
    given = "--rewrite" in pytestconfig.invocation_params.args
    assert pytestconfig.getoption("--rewrite") is given
