"""Not one byte of a schedule changes unseen: digests of what random stories come to.

Where one differs, the transcripts say more: of the stories beside this file, which people read, or of the
random one itself, which the failing test leaves in a file; `diff` it with what another commit leaves.

A digest depends on sums of floats, which Python 3.12 rounds otherwise than 3.11: where only digests differ
between two versions of Python, and no story does, that is why.
"""

from __future__ import annotations

import itertools
from hashlib import sha256
from pathlib import Path

import pytest

from tests.kit.golden import compare
from tests.kit.random_story import RandomStory
from tests.kit.story import POLICIES, play

DIGESTS = Path(__file__).with_name("digests.txt")
SEEDS = range(3)


def test_random_stories_go_as_ever(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    lines = ["# policy, seed, lines and SHA-256 of the transcript"]
    for policy, seed in itertools.product(POLICIES, SEEDS):
        transcript = play(f"policies {policy}\n{RandomStory(seed).script()}")
        (tmp_path / f"{policy}-{seed}.txt").write_text(transcript, encoding="utf-8")
        digest = sha256(transcript.encode()).hexdigest()
        lines.append(f"{policy} {seed} {len(transcript.splitlines())} {digest}")
    text = "\n".join(lines) + "\n"
    print(f"the transcripts are in {tmp_path}")
    compare(DIGESTS, text, rewrite=request.config.getoption("--rewrite"))
