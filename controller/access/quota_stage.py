"""Quotas as a stage of the port: a request counts against its tenant's quota until it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, cast

from clockwright.errors import Refusal
from clockwright.units import NO_REQUEST, RequestId, format_ns
from clockwright.wire.bulk import Buffer, total_bytes
from controller.core.quotas import Exceeded, Quotas, TenantUse
from controller.port import Answered, Ask, Bound, PortStage, Refused, Sink, Told
from controller.runtime import Runtime

# Longest name of a tenant in a sentence.
_NAME_CHARS_MAX = 80


class Named(Protocol):
    """What is asked."""

    @property
    def name(self) -> str:
        """Its public name."""


S = TypeVar("S", bound=Named)


class QuotaStage(Generic[S]):
    """Refuses what tenants may not have, and passes on the rest."""

    def __init__(self, inner: PortStage[S], quotas: Quotas, runtime: Runtime) -> None:
        """Begin with no requests; the runtime keeps what is refused."""
        self._inner = inner
        self._quotas = quotas
        self._runtime = runtime
        #: Metered requests: their sinks, and what they take.
        self._open: dict[RequestId, tuple[Sink, TenantUse, int]] = {}

    def before(self, inner: PortStage[S]) -> QuotaStage[S]:
        """The same stage, with the same open requests, in front of another one."""
        other = QuotaStage(inner, self._quotas, self._runtime)
        other._open = self._open
        return other

    def ask(self, subject: S, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Do what `PortStage` says; refuse at once what is over a quota."""
        if ask.weight != 1.0:
            exceeded = self._quotas.excess_weight(ask.tenant, ask.weight)
            if exceeded is not None:
                return self._refuse(subject, ask, sink, exceeded)
        # Without quotas, skip metering entirely.
        if not self._quotas:
            return self._inner.ask(subject, ask, inputs, sink)
        now_ns = self._runtime.clock()
        use = self._quotas.find(ask.tenant, now_ns)
        if use is None:
            return self._inner.ask(subject, ask, inputs, sink)
        num_bytes = total_bytes(inputs)
        exceeded = use.enter(now_ns, num_bytes, ask.slo_ns)
        if exceeded is not None:
            return self._refuse(subject, ask, sink, exceeded)
        try:
            request_id = self._inner.ask(subject, ask, inputs, self)
        except BaseException:
            use.leave(num_bytes)
            raise
        self._open[request_id] = sink, use, num_bytes
        return request_id

    def _refuse(self, subject: S, ask: Ask, sink: Sink, exceeded: Exceeded) -> RequestId:
        refused = over_quota(ask.tenant, exceeded)
        self._runtime.refused_at_door(ask, subject.name, refused, quota_remedy(exceeded))
        sink.told(NO_REQUEST, refused, ())
        return NO_REQUEST

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        """End a metered request, unless more of its answers follow."""
        if isinstance(told, Answered) and told.more:
            sink, use, _ = self._open[request_id]
            use.owe(self._runtime.clock())
            sink.told(request_id, told, outputs)
            return
        sink, use, num_bytes = self._open.pop(request_id)
        use.leave(num_bytes)
        sink.told(request_id, told, outputs)

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            _, use, num_bytes = entry
            use.leave(num_bytes)
        self._inner.withdraw(request_id)


def over_quota(tenant: str, exceeded: Exceeded) -> Refused:
    """Make the refusal of a request over its quota."""
    shown = tenant
    if len(shown) > _NAME_CHARS_MAX:
        shown = f"{shown[: _NAME_CHARS_MAX - 3]}..."
    whose = f"tenant {shown!r}" if tenant else "a request without a tenant"
    bound, expected = exceeded.bound, f"{exceeded.expected:.15g}"
    found = "all are used up" if exceeded.found is None else f"found {exceeded.found:.15g}"
    limit = "at least" if bound == "slo_ns_min" else "at most"
    words = f"{whose} may have {bound} {expected} {limit}, {found}"
    figures: dict[str, int] = {}
    if bound == "request_weight_max":  # a fraction, which the words say
        words += ": what its parameters weight and priority make it worth"
    else:
        figures[bound] = round(exceeded.expected)
        if exceeded.found is not None:
            figures["found"] = round(exceeded.found)
    if exceeded.retry_ns is not None:
        figures["retry_ns"] = exceeded.retry_ns
        words += f"; again in {format_ns(exceeded.retry_ns)}"
    spent: tuple[Bound, float, int] | None = None
    if exceeded.until_ns is not None:
        spent = "rate_rps", exceeded.expected, exceeded.until_ns
    elif bound in ("slo_ns_min", "slo_ns_max"):
        spent = cast("Bound", bound), exceeded.expected, 0
    return Refused(Refusal.QUOTA, figures, message=words, spent=spent)


def quota_remedy(exceeded: Exceeded) -> str:
    """Say what would have let the request succeed."""
    bound, retry_ns = exceeded.bound, exceeded.retry_ns
    if bound in ("slo_ns_min", "slo_ns_max"):
        limit = "at least" if bound == "slo_ns_min" else "at most"
        return f"an SLO of {format_ns(round(exceeded.expected))} {limit}"
    if bound == "request_weight_max":
        return f"a weight of {exceeded.expected:g} at most"
    again = "" if retry_ns is None else f"to come again {format_ns(retry_ns)} later, or "
    return f"{again}more {bound} for its tenant (`clockwright quotas set`)"
