"""Short random stories of the whole system with faults, some hundred in all; files of tests share them.

A file of tests runs in one process. So the stories lie in several files, which run beside each other.
"""

from __future__ import annotations

from collections import Counter

from clockwright.units import NS_PER_MS
from experiments.faults.story import Story, play

#: A test plays so many.
STORIES = 12
#: What makes them short.
NUM_REQUESTS = 40
LENGTH_NS = 500 * NS_PER_MS


def play_stories(group: int) -> None:
    """Play the stories of a group, of which each has other seeds.

    Raises:
        AssertionError: something that must hold does not, in one of them.
    """
    ends: Counter[str] = Counter()
    for seed in range(group * STORIES, (group + 1) * STORIES):
        outcome = play(Story(seed, num_requests=NUM_REQUESTS, length_ns=LENGTH_NS))
        assert not outcome.violation, "\n".join((f"seed {seed}", *outcome.transcript))
        ends += outcome.outcomes
    # Most groups have more than half of their requests answered. But a host without power, or a
    # controller that stands still, can take away all that one of these short stories asks.
    assert ends["answered"] > ends.total() / 3
