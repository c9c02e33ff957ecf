"""Predicts when a lane (a GPU's exec or load executor) will be free."""

from __future__ import annotations

from clockwright.units import ActionId


class Timeline:
    """Outstanding actions of one lane in the order they were sent.

    The lane works through them back to back. Each entry is the time it adds to the lane: its
    predicted duration, and before it the gap while it waits for a load, if any. The chain is
    anchored to the last reported end, so prediction errors do not add up.
    """

    __slots__ = ("_front_end_ns", "_work", "end_ns")

    def __init__(self) -> None:
        self._work: dict[ActionId, int] = {}
        #: When the first entry is planned to end, and the last; without any, when the last one did.
        self._front_end_ns = 0
        self.end_ns = 0

    def __len__(self) -> int:
        return len(self._work)

    def available_ns(self, now_ns: int) -> int:
        """Predicted time at which everything outstanding has ended, never before `now_ns`.

        An action past its predicted end is assumed to end right now.
        """
        if not self._work:
            return now_ns
        if self._front_end_ns < now_ns:
            return self.end_ns + now_ns - self._front_end_ns
        return self.end_ns

    def late(self, now_ns: int) -> bool:
        """Whether the front action is past its predicted end: its result will say more than a timer."""
        return bool(self._work) and self._front_end_ns <= now_ns

    def push(self, action_id: ActionId, *, begin_ns: int, duration_ns: int, now_ns: int) -> None:
        """Append an action predicted to begin at `begin_ns`, which is not before the lane is free."""
        gap_ns = begin_ns - self.available_ns(now_ns)
        assert gap_ns >= 0, f"action {action_id} would begin {-gap_ns} ns before the lane is free"
        if not self._work:
            self._work[action_id] = duration_ns
            self.end_ns = self._front_end_ns = begin_ns + duration_ns
        else:
            self._work[action_id] = gap_ns + duration_ns
            self.end_ns += gap_ns + duration_ns

    def skip(self, action_id: ActionId) -> bool:
        """An action will not run: it takes no time, though it is still to be completed.

        Returns False if that was known.
        """
        skipped_ns = self._work[action_id]
        if next(iter(self._work)) == action_id:
            self._front_end_ns -= skipped_ns
        self.end_ns -= skipped_ns
        self._work[action_id] = 0
        return skipped_ns > 0

    def complete(self, action_id: ActionId, *, end_ns: int) -> None:
        """Take out an action that ended, or was refused, at `end_ns`."""
        was_front = next(iter(self._work), None) == action_id
        added_ns = self._work.pop(action_id)
        if was_front:
            self.end_ns += end_ns - self._front_end_ns
            self._front_end_ns = end_ns + next(iter(self._work.values()), 0)
        else:
            self.end_ns -= added_ns
