"""The study of streams: random stories cross no states, and would notice if they did; modelled devices keep what they admit."""

from __future__ import annotations

import pytest

from controller.stages.sequences import stage
from controller.stages.sequences.book import Book, SequenceKey, Turn
from experiments.bench import streams
from experiments.bench.step_stories import play


def broken(seeds: range) -> int:
    outcomes = [play(seed) for seed in seeds]
    return sum(bool(each.crossed or each.violations) for each in outcomes)


@pytest.mark.seeds(40)
def test_random_stories_cross_no_states(seed: int) -> None:
    outcome = play(seed)
    assert (outcome.crossed, outcome.violations) == (0, [])


@pytest.mark.parametrize("fault", ["forgotten first step", "state of a failed step", "no callers"])
def test_stories_notice_what_crosses_states(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each is a way in which the book was, or could be, wrong."""
    if fault == "forgotten first step":
        # A first step that is given up as it waits leaves no trace.
        withdraw = Book.withdraw

        def forget(book: Book[object], turn: Turn[object]) -> None:
            withdraw(book, turn)
            if turn in turn.sequence.queue:
                turn.sequence.queue.remove(turn)

        monkeypatch.setattr(Book, "withdraw", forget)
    elif fault == "state of a failed step":

        def counts(book: Book[object], turn: Turn[object]) -> None:
            if turn.sequence.running is turn:
                book.answered(turn, (bytes(8),))

        monkeypatch.setattr(Book, "withdraw", counts)
    else:
        monkeypatch.setattr(
            stage, "SequenceKey", lambda _owner, _tenant, *rest: SequenceKey("", "", *rest)
        )
    # Without the runtime, which would log what fails in the stage.
    assert broken(range(0, 60, 2))


def test_what_modelled_devices_admit_is_in_time() -> None:
    found = streams._modelled(streams.Setting(devices=1, virtual_s=0.1))
    assert found["modelled_streams_admitted"] > 1500
    for share in (0.5, 0.8, 1.1):
        assert found[f"modelled_{share:g}_in_time"] > 0.999
    assert found["modelled_0.5_refused_at_start"] == found["modelled_0.8_refused_at_start"] == 0
    assert found["modelled_1.1_refused_at_start"] > 0
