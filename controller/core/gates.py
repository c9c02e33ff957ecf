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
from typing import Final

from clockwright.errors import Refusal
from controller.core.gate import Gate
from controller.core.policy import Policy
from controller.core.state import Model, Request, WorkerState, due_ns_of

# Each model's turn comes once in so many SLOs. Shorter turns cut more batches; longer ones refuse a client for
# longer.
_SLOS = 16.0

# The time between two batches of a model is the mean of about so many.
_GAPS = 4

# A request waits while so many batches of its model come by, in the mean, before it would be too late.
_LET = 4

# Spreads the models' turns evenly whatever their number: 2^32 over the golden ratio.
_GOLDEN: Final = 2654435769
_CIRCLE: Final = 1 << 32


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
        closed = gate.share_closed(self._at_once, now_ns)
        if (
            not closed
            or not _closed(gate, request, closed, now_ns)
            or self._policy.has_share_left(request, now_ns)
        ):
            return None
        gate.turned_away()
        return refusal


def _closed(gate: Gate, request: Request, closed: float, now_ns: int) -> bool:
    """Whether a request's model is closed now, for which it could be in time as far as anybody can predict."""
    model = request.model
    if not request.cold:
        queue, due_ns, fastest = model.queue, request.due_ns, model.fastest
        full = 0
        if queue and fastest is not None:
            ahead = len(queue)
            if due_ns < queue[-1].due_ns:
                ahead = bisect_right(queue, due_ns, key=due_ns_of)
            full = ahead // fastest.sizes[-1]
        late_ns = (1 + full) * model.served_gap_ns - (due_ns - now_ns)
        if full:
            return now_ns - model.sent_ns < closed * late_ns
        if _LET * model.served_gap_ns < due_ns - now_ns:
            return False  # its turn may well come before it is too late
    turn_ns = int(request.slo_ns * _SLOS)
    place = (model.sequence * _GOLDEN + now_ns * _CIRCLE // turn_ns) % _CIRCLE
    if place >= gate.share_of(model.fate, closed) * _CIRCLE:
        return False
    # If not: a batch has been gathering since before it was closed.
    return not model.queue or model.sent_ns >= now_ns - place * turn_ns // _CIRCLE
