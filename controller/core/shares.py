"""Measures each tenant's and model's use of the lanes, and the share that each may use before others go first.

The fair share is the max-min one: a tenant that asks for less than the share gets all of it, and the others get equal
parts of the rest. It is the level L at which the sum over all of min(asked, L) is what the lanes gave. Sorting would
cost more, the more tenants and models there are. Here each request that is served or dropped moves the level a
little: it should have been served with probability min(1, L / asked), and the level falls or rises by the difference. So does Core-Stateless Fair Queueing (Stoica, Shenker
and Zhang, SIGCOMM 1998) without state per flow in its routers.
"""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_S

_RECENT_NS = 50 * NS_PER_MS
#: Usage is counted in steps of this length: what lies in one step fades alike.
STEP_NS = NS_PER_S // 16
# Usage counts half as much after each of so many of them.
_STEPS_PER_HALF = 16
_FADES = tuple(0.5 ** (steps / _STEPS_PER_HALF) for steps in range(8 * _STEPS_PER_HALF))
# Outcomes of requests count half as much after this time.
_HALF_LIFE_NS = 2 * NS_PER_S
# A model counts as having had so many more requests, served at the mean share. With fewer, one unlucky request of
# a model that is seldom asked for makes it weigh more (with 1, a zoo of 1,500 models lost 4 points).
_PRIOR = 16.0
# To ask for less than this part of what all lanes give is no flood.
_FLOOD = 0.25
# Nor does it flood if the others ask for the second of these parts of what all lanes give: they would push each other
# out without it. If they ask for less than the first, it alone pushes them out. Beside floods they ask for 0.5 to 1.0
# of it, beside the most popular of 400 functions for 1.2 to 1.4.
_FIT, _EXCEED = 1.0, 1.2
# Time that a lane gives if it is always busy, faded like usage.
_LANE_NS = 1.44 * _STEPS_PER_HALF * STEP_NS

# A tenant or model that asks for less than half of what those ask whose requests are dropped may use a quarter more
# than the level: the level is the mean of noisy seconds, and its own noise is no flood. One that asks for as much as
# those can count on half the level only. Where all ask alike, to even out what each was served isolates none of them
# and costs answers: 8 in 100 under 196 models asked alike for three times too much.
_TOLERANCE = 1.25
_SMALL = 0.5
_FLOOR = 0.5

# How fast the level moves: it halves in about this part of the half-life when twice too much is within it.
_GAIN = 8.0

# There is enough for all while less than this part of what was served is dropped.
_FEW = 0.02
# What has faded so far is nothing: the smallest numbers do not fade, and half of the very smallest is 0.
_NOTHING = 1e-200

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

    def smoothed(self, mean: float) -> float:
        """The share, as though some more requests had been served at the mean share.

        So one refused request of a seldom used model changes little.
        """
        return (self._served + _PRIOR * mean) / (self._served + self._dropped + _PRIOR)


class Usage:
    """Lane time that one tenant or model had, and what it asked for; older counts half as much each second."""

    __slots__ = ("asked_ns", "floods", "step", "used_ns")

    def __init__(self) -> None:
        self.used_ns = 0.0
        #: It asked for much of all lane time, and for more than the level, when it last asked.
        self.floods = False
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
    """The level up to which every model or tenant may use lanes of one sort, per unit of weight."""

    __slots__ = (
        "_asked_by_dropped",
        "_dropped_ns",
        "_flood_ns",
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
        #: What those asked for who ask for much of all lane time.
        self._flood_ns = 0.0
        self._flood_step = -_STEPS_PER_HALF
        self._step = 0

    def served(self, usage: Usage, weight: float, time_ns: float, step: int) -> None:
        """A tenant or model gets so much time of a lane."""
        if usage.step != step:
            usage.fade(step)
        if self._step != step:
            self._fade(step)
        usage.used_ns += time_ns
        asked_ns = usage.asked_ns = usage.asked_ns + time_ns
        self._served_ns += time_ns
        is_over = asked_ns > weight * self.level_ns
        if is_over or usage.floods:
            self._look_for_flood(usage, is_over, time_ns, step)
        if is_over:
            self._move(time_ns * (1.0 - weight * self.level_ns / asked_ns))

    def dropped(self, usage: Usage, weight: float, time_ns: float, step: int) -> None:
        """A tenant or model asked for so much time and does not get it."""
        if usage.step != step:
            usage.fade(step)
        if self._step != step:
            self._fade(step)
        asked_ns = usage.asked_ns = usage.asked_ns + time_ns
        self._dropped_ns += time_ns
        self._asked_by_dropped += time_ns * asked_ns / weight
        is_over = asked_ns > weight * self.level_ns
        if is_over or usage.floods:
            self._look_for_flood(usage, is_over, time_ns, step)
        self._move(-time_ns * min(1.0, weight * self.level_ns / asked_ns))

    def has_left(self, usage: Usage, weight: float, isolation: float, step: int) -> bool:
        """Whether a tenant or model used less than it can count on.

        Args:
            usage: what it used, and asked for.
            weight: its own.
            isolation: the part of the fair share that is warranted.
            step: the present.
        """
        if usage.step != step:
            usage.fade(step)
        part = _TOLERANCE * isolation
        level_ns = part * weight * self.level_ns
        # Who asks for less than the level has all of that for its share.
        if usage.used_ns >= level_ns or usage.used_ns > part * usage.asked_ns:
            return False
        # Demand beyond a part of the average demand of those whose requests are dropped.
        excess = usage.asked_ns / weight * self._dropped_ns - _SMALL * self._asked_by_dropped
        if excess <= 0.0:
            return True
        rest = 1.0 - (1.0 - _FLOOR) * excess / ((1.0 - _SMALL) * self._asked_by_dropped)
        return usage.used_ns < level_ns * max(rest, _FLOOR)

    def have_left(self, usages: list[Usage], isolation: float, step: int) -> list[bool]:
        """`has_left` for each of some that have the weight 1."""
        # Usage below this always leaves some, whatever was asked for, and fading makes usage smaller.
        part = _TOLERANCE * isolation
        least_ns = part * self.level_ns * _FLOOR
        return [
            (u.used_ns < least_ns and u.used_ns <= part * u.asked_ns)
            or self.has_left(u, 1.0, isolation, step)
            for u in usages
        ]

    def _look_for_flood(self, usage: Usage, is_over: bool, time_ns: float, step: int) -> None:
        """Keep the sum of what those ask for who flood: one asked for more, and `is_over` the level, by `time_ns`."""
        asked_ns = usage.asked_ns
        if is_over and asked_ns > _FLOOD * self._served_ns:
            self._flood_step = step
            self._flood_ns += time_ns if usage.floods else asked_ns
            usage.floods = True
        elif usage.floods:
            self._flood_ns -= asked_ns - time_ns
            usage.floods = False

    def flood(self, step: int) -> float:
        """How far a flood is what pushes others out, 0 to 1.

        0: no tenant or model asked of late for much of all lane time, and for more than the level; or the others
        would push each other out without it. 1: the others would all fit.
        """
        if step - self._flood_step >= _STEPS_PER_HALF:
            return 0.0
        others_ns = self._served_ns + self._dropped_ns - self._flood_ns
        excess = (_EXCEED * self._served_ns - others_ns) / (_EXCEED - _FIT)
        return min(max(excess / max(self._served_ns, 1.0), 0.0), 1.0)

    def _move(self, excess_ns: float) -> None:
        """More was served than is within the level, or less: it rises, or falls."""
        change = _GAIN * excess_ns / max(self._served_ns, _LANE_NS / 8)
        self.level_ns = max(self.level_ns * min(max(1.0 + change, 0.5), 2.0), 1.0)

    def _fade(self, step: int) -> None:
        factor = _fading(step - self._step)
        if self._dropped_ns <= _FEW * self._served_ns:
            # None had more than all together. So while there was enough for all, none had more than its share.
            self.level_ns = max(self.level_ns, self._served_ns)
        self._served_ns *= factor
        self._dropped_ns *= factor
        self._asked_by_dropped *= factor
        if self._asked_by_dropped < _NOTHING:
            self._dropped_ns = self._asked_by_dropped = 0.0
        self._flood_ns *= factor
        self._step = step


def _fading(steps: int) -> float:
    return _FADES[steps] if steps < len(_FADES) else 0.0
