"""Requests that are refused before anything is made of them, because the scheduler would refuse them. No I/O.

While a device is overloaded, most of what comes is in vain, and to find that out the long way costs as much as an answer:
a request is made, asked, judged, recorded and refused in words of its own. So the words of a refusal are kept with
the template of its request, for some milliseconds. The next request of the template is judged where it is read, by the
scheduler and as things stand (`Scheduler.is_in_vain`), and refused with the same words if it is in vain. So nothing is refused
that would have been served. Each refusal counts, and has its row in telemetry, but no number: its words name the
request that was refused the long way.

Those that are refused the long way soon after one like them share its words, too. When results come late, all that wait are
refused at once; in words of their own that took three times as long, in which no result was read.

A request that says more of itself than its SLO takes the long way: one with a name, a tenant, a weight or a time to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from clockwright.wire.bulk import Buffer
from controller.core.events import RequestArrived
from controller.front.oip.protocol import CheckedRequest
from controller.front.oip.refusals import NoAnswerError
from controller.front.remote.backend import Backend
from controller.front.services.templates import Templates
from controller.port import Refused

#: After so long one request takes the long way, and has new words made.
_RENEWED_NS: Final = 10 * NS_PER_MS
#: Words are so old at most.
_KEPT_NS: Final = 100 * NS_PER_MS


@dataclass(slots=True, eq=False)
class WordsKept:
    """The refusal of all requests of a template that are in vain."""

    error: NoAnswerError
    slo_ns: int
    made_ns: int
    #: When the next request takes the long way, and until when this may be used.
    renewed_ns: int
    until_ns: int
    #: Bytes at the beginning of a message that tell its template.
    num_bytes: int


class EarlyRefusals:
    """Finds requests that are in vain, of one read at a time."""

    def __init__(self, backend: Backend[Any], templates: Templates) -> None:
        """Find none until the first is refused the long way."""
        #: Until then some may be found.
        self.until_ns = 0
        self._backend, self._templates = backend, templates
        # Requests of this read that were in vain, and how many were like each.
        self._away: list[tuple[RequestArrived, int]] = []

    def refused(
        self, data: Buffer, asked: CheckedRequest, told: Refused, now_ns: int
    ) -> NoAnswerError | None:
        """The scheduler refused a request: keep the words for its like, if that can be told from its message.

        Returns those of one like it that was refused just before; None: it needs words of its own.
        """
        if (
            told.refusal is not Refusal.OVERLOADED
            or "queue_ns" not in told.figures
            or asked.request_id
            or asked.tenant
            or asked.context
            or asked.explain
            or asked.decide_within_ns
            or asked.weight != 1.0
            or asked.work_ahead_ns
        ):
            return None
        template = self._templates.laid_out(data, 0, len(data), self._backend.generation)
        if template is None:
            return None
        kept: WordsKept | None = template.refusal
        if kept is not None and now_ns - kept.made_ns < _RENEWED_NS and kept.slo_ns == asked.slo_ns:
            return kept.error
        words = f"as found for request {told.figures.get('request_id', 0)}, which was like this one"
        detail = f"{told.detail}; {words}" if told.detail else words
        self.until_ns = now_ns + _KEPT_NS
        template.refusal = WordsKept(
            NoAnswerError(
                told.refusal, ModelId(template.described.servable.name), told.figures, detail=detail
            ),
            asked.slo_ns,
            now_ns,
            now_ns + _RENEWED_NS,
            self.until_ns,
            self._templates.num_key_bytes(len(data)),
        )
        return None

    def find(
        self,
        data: Buffer,
        begin: int,
        end: int,
        timeout_ns: int | None,
        arrival_ns: int,
        now_ns: int,
    ) -> WordsKept | None:
        """Judge a request that was read, well-formed or not, from `begin` to `end`.

        Returns the refusal if it is in vain.
        """
        backend = self._backend
        template = self._templates.laid_out(data, begin, end, backend.generation)
        words: WordsKept | None = None if template is None else template.refusal
        if template is None or words is None:
            return None
        if now_ns >= words.renewed_ns:
            words.renewed_ns = now_ns + _RENEWED_NS
            if now_ns >= words.until_ns:
                template.refusal = None
            return None
        asked = template.make(
            "",
            "",
            [b""] * len(template.lengths),
            None if timeout_ns is None else timeout_ns / NS_PER_S,
            backend.default_slo_ns,
        )
        slo_ns = asked.slo_ns
        if slo_ns != words.slo_ns:
            return None
        rows, num_bytes = asked.rows, sum(template.lengths)
        request = backend.in_vain(template.described, rows, arrival_ns, slo_ns, num_bytes)
        if request is None:
            return None
        self._away.append((request, 1))
        return words

    def alike(self, count: int) -> None:
        """So many more are refused that are like the one found last."""
        request, number = self._away[-1]
        self._away[-1] = request, number + count

    def end(self) -> None:
        """The read is over: count what was turned away."""
        if self._away:
            away, self._away = self._away, []
            for request, number in away:
                self._backend.turned_away(request, number)
