"""Play random stories of the whole system with faults in them, and say which break a promise.

`make bench NAME=simulate_faults`; 10,000 stories take two cores half an hour. A seed that fails is printed with its
story, made shorter where that can be done quickly; `python -m experiments simulate_faults --first SEED --seeds 1` plays it again. The counts go into
`guard.json`, part `faults`.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.faults.story import FAULTS, Happening, Story, StoryOutcome, play
from experiments.study.bench import Findings, bench

# A process plays so many stories and is followed by another.
_CHUNK = 50
# Plays that go into making a story shorter.
_SHORTENING_PLAYS = 60
_LINES_MAX = 200


def shorten(story: Story, violation: str) -> list[Happening]:
    """Leave out what does not matter to how a story fails, as far as some plays get."""
    kept = list(story.happenings)
    begin = _beginning(violation)
    size, plays = len(kept) // 2, 0
    while size and plays < _SHORTENING_PLAYS:
        at = 0
        while at < len(kept) and plays < _SHORTENING_PLAYS:
            fewer = kept[:at] + kept[at + size :]
            plays += 1
            if _beginning(play(story, fewer).violation) == begin:
                kept = fewer
            else:
                at += size
        size //= 2
    return kept


def _beginning(violation: str) -> str:
    """What two violations of one kind have in common."""
    return "".join(letter for letter in violation[:60] if not letter.isdigit())


def tell(outcome: StoryOutcome) -> Iterator[str]:
    """Tell how a seed fails, line by line."""
    story = Story(outcome.seed)
    kept = shorten(story, outcome.violation)
    again = play(story, kept)
    yield f"seed {outcome.seed} fails: {outcome.violation}"
    yield f"  {story.num_workers} workers, {story.num_fronts} fronts, {story.policy}, {story.kinds}"
    if not again.violation:
        kept, again = list(story.happenings), outcome
    yield f"  {len(kept)} of {len(story.happenings)} happenings do:"
    yield from again.transcript[-_LINES_MAX:]


def _play_some(seeds: Sequence[int]) -> list[StoryOutcome]:
    """Play stories in a process of a pool."""
    logging.getLogger().addHandler(logging.NullHandler())
    outcomes = []
    for seed in seeds:
        outcome = play(Story(seed))
        if not outcome.violation:
            outcome.transcript = ()
        outcomes.append(outcome)
    return outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How many stories are played, and the seed of the first."""

    seeds: int = 10_000
    first: int = 0


def measure(setting: Setting) -> Findings:
    """Play, tell, count."""
    seeds = range(setting.first, setting.first + setting.seeds)
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    ends: Counter[str] = Counter()
    failed: list[int] = []
    num_played = 0
    begin_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=4) as pool:
        for outcomes in pool.imap_unordered(_play_some, chunks):
            for outcome in outcomes:
                num_played += 1
                ends.update(outcome.outcomes)
                if outcome.violation:
                    failed.append(outcome.seed)
                    print("\n".join(tell(outcome)), flush=True)
            took_s = time.monotonic() - begin_s
            print(f"{num_played} seeds, {len(failed)} fail, {took_s:.0f} s", file=sys.stderr)
    figures = {
        "fault_seeds": float(num_played),
        "fault_violations": float(len(failed)),
        "fault_requests": float(ends.total()),
        "fault_answered": float(ends["answered"]),
        "fault_kinds": float(len(FAULTS)),
    }
    fault = f"{len(failed)} of {num_played} seeds fail: {failed}" if failed else ""
    return Findings(figures, extra={"ends": dict(ends.most_common(30))}, fault=fault)


STUDY = bench("simulate_faults", Setting(), measure, record="guard", part="faults")
