"""Refused at once instead of in vain: under overload some models are closed for a moment, in turn.

When more is asked than the lanes can do, a policy that strikes batches out decides late, because it keeps what
happens to make dense batches. Nobody can know at arrival which requests those will be. So the gate makes room
for itself: it refuses requests at arrival, as many as its part of all that are dropped, and the policy then
drops the fewer. Refusing at random would thin every model's batches. All requests of a few models are refused
for some SLOs, then those of others, which leaves the batches of the rest as dense as they were.

A model is closed between two of its batches, not while one gathers. Models of which the policy drops more are
closed for longer, so that who is refused stays the policy's choice. Where full batches wait, there are none to
cut: a request is refused that would wait for more of them than its model has run in such a time of late.

A request is let in whose SLO is longer than the time between two batches of its model, and whoever is within its
fair share (`Policy.has_share_left`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS
from controller.core.shares import ServedShare

if TYPE_CHECKING:
    from controller.core.policy import Policy
    from controller.core.state import Model, Request, WorkerState

# What was counted before counts half as much after each window.
_WINDOW_NS = 50 * NS_PER_MS

# With fewer dropped, a burst that passes would close models whose requests could be served.
_FROM = 0.01

# Each model's turn comes once in so many SLOs. Shorter turns cut more batches; longer ones refuse a client for
# longer.
_SLOS = 16.0

# The time between two batches of a model is the mean of about so many.
_GAPS = 4

# A request waits while so many batches of its model come by, in the mean, before it would be too late.
_LET = 4

# The share closed follows what is missing of the aim, by this much per window.
_STEP = 0.3
_MOST = 0.95

# Spreads the models' turns evenly whatever their number: 2^32 over the golden ratio.
_GOLDEN: Final = 2654435769
_CIRCLE: Final = 1 << 32


class Gate:
    """What became of the requests for one exec lane, or for all loads, and the share of models closed for it."""

    __slots__ = ("_at_door", "_fate", "_served", "_share", "_turned_away", "_until_ns", "_waited")

    def __init__(self) -> None:
        # Requests of late: served; refused after they waited, by prediction, by the gate.
        self._served = self._waited = self._at_door = self._turned_away = 0.0
        #: Those that were not turned away, over seconds.
        self._fate = ServedShare()
        self._share = 0.0
        self._until_ns = 0

    def served(self, number: int, now_ns: int) -> None:
        """Requests went to a worker."""
        self._served += number
        self._fate.count(now_ns, served=number)

    def dropped(self, now_ns: int, *, waited: bool) -> None:
        """A request was refused for want of time, at arrival or later."""
        if waited:
            self._waited += 1
        else:
            self._at_door += 1
        self._fate.count(now_ns, dropped=1)

    def turns_away(self, request: Request, at_once: float, now_ns: int) -> bool:
        """Whether a request that arrives is refused because its model is closed now.

        Args:
            request: it could be served as far as anybody can predict.
            at_once: share of all requests dropped that is to be refused at arrival.
            now_ns: the present.
        """
        if now_ns >= self._until_ns:
            self._follow(at_once, now_ns)
        share = self._share
        if not share:
            return False
        model = request.model
        if not request.cold:
            queue, due_ns, fastest = model.queue, request.due_ns, model.fastest
            full = 0
            if queue and fastest is not None:
                ahead = len(queue)
                if due_ns < queue[-1].due_ns:
                    ahead = bisect_right(queue, due_ns, key=_due_ns_of)
                full = ahead // fastest.sizes[-1]
            late_ns = (1 + full) * model.served_gap_ns - (due_ns - now_ns)
            if full:
                return now_ns - model.sent_ns < share * late_ns
            if _LET * model.served_gap_ns < due_ns - now_ns:
                return False  # its turn may well come before it is too late
        mean = 1.0 - self._fate.beside(1.0)
        own = 1.0 - model.fate.beside(1.0 - mean)
        share = min(share * own / mean, _MOST) if mean > 0.0 else share
        turn_ns = int(request.slo_ns * _SLOS)
        place = (model.sequence * _GOLDEN + now_ns * _CIRCLE // turn_ns) % _CIRCLE
        if place >= share * _CIRCLE:
            return False
        # If not: a batch has been gathering since before it was closed.
        return not model.queue or model.sent_ns >= now_ns - place * turn_ns // _CIRCLE

    def turned_away(self) -> None:
        """A request is refused because its model is closed."""
        self._turned_away += 1

    def _follow(self, at_once: float, now_ns: int) -> None:
        """A window is over: close more models, or fewer."""
        dropped = self._waited + self._at_door + self._turned_away
        total = dropped + self._served
        if now_ns >= self._until_ns + _WINDOW_NS or not total:
            self._served = self._waited = self._at_door = self._turned_away = self._share = 0.0
        elif self._waited + self._at_door < _FROM * total:
            # What the gate itself refuses is no sign that there is still too much.
            self._share = self._share / 2 if self._share > _FROM else 0.0
        else:
            missing = at_once * dropped - self._at_door - self._turned_away
            self._share = min(max(self._share + _STEP * missing / total, 0.0), _MOST)
        self._served /= 2
        self._waited /= 2
        self._at_door /= 2
        self._turned_away /= 2
        self._until_ns = now_ns + _WINDOW_NS


class Gates:
    """A gate for each worker's exec lane, and one for loads."""

    def __init__(self, policy: Policy, at_once: float, batch_slo_ns: int) -> None:
        """Make them open.

        Args:
            policy: says who is within its fair share.
            at_once: share of all requests dropped that is to be refused at arrival; 0: the gates stay open.
            batch_slo_ns: requests with such an SLO wait for time left over, and are let in.
        """
        self._policy = policy
        self._at_once = at_once
        #: Whether they ever close; else nothing has to be told.
        self.active = at_once > 0.0
        self._batch_slo_ns = batch_slo_ns
        self._loads = Gate()

    def sent(self, worker: WorkerState, model: Model, requests: list[Request], now_ns: int) -> None:
        """A batch goes to a worker."""
        number = len(requests)
        if model.sent_ns:
            model.served_gap_ns += (now_ns - model.sent_ns - model.served_gap_ns) / _GAPS
        model.ran_on, model.sent_ns = worker, now_ns
        model.fate.count(now_ns, served=number)
        worker.gate.served(number, now_ns)
        if requests[0].cold:
            self._loads.served(number, now_ns)

    def dropped(self, request: Request, refusal: Refusal, now_ns: int, *, waited: bool) -> None:
        """A request is refused that was never sent; reasons other than want of time do not count."""
        if not self.active or request.slo_ns >= self._batch_slo_ns:
            return
        model = request.model
        if refusal is Refusal.COLD:
            self._loads.dropped(now_ns, waited=waited)
        elif refusal is Refusal.OVERLOADED and model.ran_on is not None:
            model.ran_on.gate.dropped(now_ns, waited=waited)
        else:
            return
        model.fate.count(now_ns, dropped=1)

    def turn_away(self, request: Request, now_ns: int) -> Refusal | None:
        """Why a request that arrives is refused although it could be in time; None: it is not."""
        if request.slo_ns >= self._batch_slo_ns:
            return None
        gate, refusal = self._loads, Refusal.COLD
        if not request.cold:
            worker = request.model.ran_on
            # What finds a lane idle is served.
            if worker is None or not worker.exec_lane:
                return None
            gate, refusal = worker.gate, Refusal.OVERLOADED
        if not gate.turns_away(request, self._at_once, now_ns) or self._policy.has_share_left(
            request, now_ns
        ):
            return None
        gate.turned_away()
        return refusal


def _due_ns_of(request: Request) -> int:
    return request.due_ns
