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
#: Usage is counted in steps of this length: what lies in one step fades alike.
STEP_NS = NS_PER_S // 16
# What is older counts half as much after each of so many of them.
_STEPS_PER_HALF = 16
_FADES = tuple(0.5 ** (steps / _STEPS_PER_HALF) for steps in range(8 * _STEPS_PER_HALF))
# What became of requests counts half as much after this time.
_HALF_LIFE_NS = 2 * NS_PER_S
# A model counts as having had so many more requests, served at the mean share. With fewer, one unlucky request of
# a model that is seldom asked for makes it weigh more (with 1, a zoo of 1,500 models lost 4 points).
_PRIOR = 16.0
# Whoever asks for less than this part of what all lanes give floods nobody.
_FLOOD = 0.25
# What a lane gives that is busy all the time, so faded.
_LANE_NS = 1.44 * _STEPS_PER_HALF * STEP_NS

# Whoever asks for less than half of what those ask whose requests are dropped may use a quarter more than the
# level: the level is the mean of noisy seconds, and its own noise is no flood. Whoever asks for as much as those
# can count on half the level only, because where all ask alike, to even out what each was served costs answers
# and isolates nobody: under 196 models asked alike for three times too much, 8 in 100.
_TOLERANCE = 1.25
_SMALL = 0.5
_FLOOR = 0.5

# How fast the level moves: it halves in about this part of the half-life when twice too much is within it.
_GAIN = 8.0

# There is enough for all while less than this part of what was served is dropped.
_FEW = 0.02

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


class ServedShare:
    """Share of the requests served; what is older counts half as much every two seconds."""

    __slots__ = ("_dropped", "_period", "_served")

    def __init__(self) -> None:
        self._served = 0.0
        self._dropped = 0.0
        self._period = 0

    def count(self, now_ns: int, *, served: int = 0, dropped: int = 0) -> None:
        """Requests went to a worker, or were refused."""
        period = now_ns // _HALF_LIFE_NS
        if period != self._period:
            fade = 0.5 ** min(period - self._period, 64)
            self._served *= fade
            self._dropped *= fade
            self._period = period
        self._served += served
        self._dropped += dropped

    def beside(self, mean: float) -> float:
        """The share, as though some more requests had been served at the mean share.

        One unlucky request of a model that is seldom asked for so says little.
        """
        return (self._served + _PRIOR * mean) / (self._served + self._dropped + _PRIOR)


class Usage:
    """Lane time that one tenant or model had, and what it asked for; older counts half as much each second."""

    __slots__ = ("asked_ns", "step", "used_ns")

    def __init__(self) -> None:
        self.used_ns = 0.0
        #: What it used, and what the requests would have used that were dropped.
        self.asked_ns = 0.0
        #: Both are faded up to this step.
        self.step = 0

    def fade(self, step: int) -> None:
        """Let time pass."""
        factor = _fading(step - self.step)
        self.used_ns *= factor
        self.asked_ns *= factor
        self.step = step


class FairShare:
    """The level up to which everybody may use lanes of one sort, per unit of weight."""

    __slots__ = (
        "_asked_by_dropped",
        "_dropped_ns",
        "_flood_step",
        "_served_ns",
        "_step",
        "level_ns",
    )

    def __init__(self) -> None:
        self.level_ns = _LANE_NS
        self._served_ns = 0.0
        #: Time that was asked for and not given; and this times what each who was dropped asks for.
        self._dropped_ns = 0.0
        self._asked_by_dropped = 0.0
        self._flood_step = -_STEPS_PER_HALF
        self._step = 0

    def served(self, usage: Usage, weight: float, time_ns: float, step: int) -> None:
        """Somebody gets so much time of a lane."""
        if usage.step != step:
            usage.fade(step)
        if self._step != step:
            self._fade(step)
        usage.used_ns += time_ns
        asked_ns = usage.asked_ns = usage.asked_ns + time_ns
        self._served_ns += time_ns
        if asked_ns > weight * self.level_ns:
            self._look_for_flood(asked_ns, step)
            self._move(time_ns * (1.0 - weight * self.level_ns / asked_ns))

    def dropped(self, usage: Usage, weight: float, time_ns: float, step: int) -> None:
        """Somebody asked for so much time and does not get it."""
        if usage.step != step:
            usage.fade(step)
        if self._step != step:
            self._fade(step)
        asked_ns = usage.asked_ns = usage.asked_ns + time_ns
        self._dropped_ns += time_ns
        self._asked_by_dropped += time_ns * asked_ns / weight
        if asked_ns > weight * self.level_ns:
            self._look_for_flood(asked_ns, step)
        self._move(-time_ns * min(1.0, weight * self.level_ns / asked_ns))

    def has_left(self, usage: Usage, weight: float, isolation: float, step: int) -> bool:
        """Whether somebody used less than it can count on.

        Args:
            usage: what it used, and asked for.
            weight: its own.
            isolation: the part of the fair share that is warranted.
            step: the present.
        """
        if usage.step != step:
            usage.fade(step)
        level_ns = _TOLERANCE * isolation * weight * self.level_ns
        if usage.used_ns >= level_ns:
            return False
        # What it asks beyond a part of what those ask, on average, whose requests are dropped.
        excess = usage.asked_ns / weight * self._dropped_ns - _SMALL * self._asked_by_dropped
        if excess <= 0.0:
            return True
        part = 1.0 - (1.0 - _FLOOR) * excess / ((1.0 - _SMALL) * self._asked_by_dropped)
        return usage.used_ns < level_ns * max(part, _FLOOR)

    def have_left(self, usages: list[Usage], isolation: float, step: int) -> list[bool]:
        """`has_left` for each of some that have the weight 1."""
        # Whoever used less than this has some left, whatever it asked for; what fades makes it less still.
        least_ns = _TOLERANCE * isolation * self.level_ns * _FLOOR
        return [u.used_ns < least_ns or self.has_left(u, 1.0, isolation, step) for u in usages]

    def _look_for_flood(self, asked_ns: float, step: int) -> None:
        if asked_ns > _FLOOD * self._served_ns:
            self._flood_step = step

    def flooded(self, step: int) -> bool:
        """Whether somebody asked of late for much of all there is, and for more than the level."""
        return step - self._flood_step < _STEPS_PER_HALF

    def _move(self, excess_ns: float) -> None:
        """More was served than is within the level, or less: it rises, or falls."""
        change = _GAIN * excess_ns / max(self._served_ns, _LANE_NS / 8)
        self.level_ns = max(self.level_ns * min(max(1.0 + change, 0.5), 2.0), 1.0)

    def _fade(self, step: int) -> None:
        factor = _fading(step - self._step)
        if self._dropped_ns <= _FEW * self._served_ns:
            # Nobody had more than all together, so while there was enough for all, nobody had more than its share.
            self.level_ns = max(self.level_ns, self._served_ns)
        self._served_ns *= factor
        self._dropped_ns *= factor
        self._asked_by_dropped *= factor
        self._step = step


def _fading(steps: int) -> float:
    return _FADES[steps] if steps < len(_FADES) else 0.0
