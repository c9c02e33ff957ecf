"""Who had how much of the lanes of late, and how much each may have before others go first.

The fair share is the max-min one: whoever asks for less than it gets what it asks for, and leaves the rest to
the others, who have as much as each other. It is the level L at which the sum over all of min(asked, L) is what
the lanes gave. To find it by sorting would cost more the more tenants and models there are. Here each request
that is served or dropped moves the level a little: it should have been served by min(1, L / asked), it was or it
was not, and the level falls or rises by the difference. So does Core-Stateless Fair Queueing (Stoica, Shenker
and Zhang, SIGCOMM 1998) without state per flow in its routers.
"""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_S

_RECENT_NS = 50 * NS_PER_MS
# What is older counts half as much after each of so many steps.
_STEP_NS = NS_PER_S // 16
_STEPS_PER_HALF = 16
_FADES = tuple(0.5 ** (steps / _STEPS_PER_HALF) for steps in range(8 * _STEPS_PER_HALF))
# What a lane gives that is busy all the time, so faded.
_LANE_NS = 1.44 * _STEPS_PER_HALF * _STEP_NS

# Whoever asks for less than half of what those ask whose requests are dropped may use a quarter more than the
# level: the level is the mean of noisy seconds, and its own noise is no flood. Whoever asks for as much as those
# can count on half the level only, because where all ask alike, to even out what each was served costs answers
# and isolates nobody: under 196 models asked alike for three times too much, 8 in 100.
_TOLERANCE = 1.25
_SMALL = 0.5
_FLOOR = 0.5

# How fast the level moves: it halves in about this part of the half-life when twice too much is within it.
_GAIN = 8.0

#: Clients name tenants, so there may be any number of names: the latest ones are kept, so many.
MAX_TENANTS = 1024


class RecentDrops:
    """Share of the requests dropped in the last 50 to 100 ms."""

    __slots__ = ("_dropped", "_served", "_until_ns")

    def __init__(self) -> None:
        # Each list counts the window before, then this one.
        self._dropped = [0, 0]
        self._served = [0, 0]
        self._until_ns = 0

    def count(self, now_ns: int, *, served: int = 0, dropped: int = 0) -> None:
        """Requests went to a worker, or were refused."""
        if now_ns >= self._until_ns:
            self._turn(now_ns)
        self._served[1] += served
        self._dropped[1] += dropped

    def share(self, now_ns: int) -> float:
        """0 to 1; 0 when nothing happened."""
        if now_ns >= self._until_ns:
            self._turn(now_ns)
        dropped = sum(self._dropped)
        return dropped / (dropped + sum(self._served)) if dropped else 0.0

    def _turn(self, now_ns: int) -> None:
        missed = now_ns >= self._until_ns + _RECENT_NS
        self._dropped = [0 if missed else self._dropped[1], 0]
        self._served = [0 if missed else self._served[1], 0]
        self._until_ns = now_ns + _RECENT_NS


class Usage:
    """Lane time that one tenant or model had, and what it asked for; older counts half as much each second."""

    __slots__ = ("_step", "asked_ns", "used_ns")

    def __init__(self) -> None:
        self.used_ns = 0.0
        #: What it used, and what the requests would have used that were dropped.
        self.asked_ns = 0.0
        self._step = 0

    def fade(self, now_ns: int) -> None:
        """Let time pass."""
        step = now_ns // _STEP_NS
        if step != self._step:
            passed = step - self._step
            factor = _FADES[passed] if passed < len(_FADES) else 0.0
            self.used_ns *= factor
            self.asked_ns *= factor
            self._step = step


class FairShare:
    """The level up to which everybody may use lanes of one sort, per unit of weight."""

    __slots__ = ("_dropped", "_total", "level_ns")

    def __init__(self) -> None:
        self.level_ns = _LANE_NS
        self._total = Usage()
        #: Time that was asked for and not given, and this times what each of those asked for.
        self._dropped = Usage()

    def served(self, usage: Usage, weight: float, time_ns: float, now_ns: int) -> None:
        """Somebody gets so much time of a lane."""
        usage.fade(now_ns)
        usage.used_ns += time_ns
        usage.asked_ns += time_ns
        self._move(time_ns, self._within(usage, weight, time_ns), now_ns)

    def dropped(self, usage: Usage, weight: float, time_ns: float, now_ns: int) -> None:
        """Somebody asked for so much time and does not get it."""
        usage.fade(now_ns)
        usage.asked_ns += time_ns
        dropped = self._dropped
        dropped.fade(now_ns)
        dropped.used_ns += time_ns
        dropped.asked_ns += time_ns * usage.asked_ns
        self._move(0.0, self._within(usage, weight, time_ns), now_ns)

    def has_left(self, usage: Usage, allowed: float, now_ns: int) -> bool:
        """Whether somebody used less than it can count on.

        Args:
            usage: what it used, and asked for.
            allowed: its weight, times the part of the fair share that is warranted.
            now_ns: the present.
        """
        usage.fade(now_ns)
        level_ns = _TOLERANCE * allowed * self.level_ns
        used_ns = usage.used_ns
        if used_ns >= level_ns:
            return False
        dropped = self._dropped
        # What it asks beside those whose requests are dropped: their mean, weighed by what is dropped.
        excess = usage.asked_ns * dropped.used_ns - _SMALL * dropped.asked_ns
        if excess <= 0.0:
            return True
        part = 1.0 - (1.0 - _FLOOR) * excess / ((1.0 - _SMALL) * dropped.asked_ns)
        return used_ns < level_ns * max(part, _FLOOR)

    def _within(self, usage: Usage, weight: float, time_ns: float) -> float:
        level_ns = weight * self.level_ns
        return time_ns if usage.asked_ns <= level_ns else time_ns * level_ns / usage.asked_ns

    def _move(self, served_ns: float, within_ns: float, now_ns: int) -> None:
        total = self._total
        total.fade(now_ns)
        total.used_ns += served_ns
        change = _GAIN * (served_ns - within_ns) / max(total.used_ns, _LANE_NS / 8)
        self.level_ns = max(self.level_ns * min(max(1.0 + change, 0.5), 2.0), 1.0)
