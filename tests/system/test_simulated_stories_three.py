"""The last third of the random stories of `test_simulated_faults.py`, in a file of its own to run beside it."""

from __future__ import annotations

import pytest

from tests.kit.fault_stories import play_stories

# Groups of the files before.
_FIRST = 13


@pytest.mark.seeds(7)
def test_whatever_goes_wrong_each_request_gets_one_answer_and_all_is_well_afterwards(
    seed: int,
) -> None:
    play_stories(_FIRST + seed)
