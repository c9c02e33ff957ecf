"""Traces of single requests, by OpenTelemetry: where their time went, as spans that a collector gets by OTLP.

Off unless a collector is configured. Then it follows what clients ask for: a request that comes with a sampled
W3C `traceparent` is traced, up to 200 a second, one whose caller has decided against it never, and of the others a share. What the
event loop does for a traced request is to put some values into a queue. Spans are made of them, and sent, by threads.

A request is one span of kind SERVER, named as OpenTelemetry names calls, with up to three below it:

    queue  from its arrival until its EXEC began, or until it was refused
    load   the LOAD of its model that it waited for, if its model was cold
    exec   the EXEC of its batch

A front that is a process of its own gets their times with the answer: the time on the link is at the end of the
request's span, in none of the three. A request to an application has none of the three spans, nor has one that the
prediction cache answers.
"""

from __future__ import annotations

import logging
import queue
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from clockwright import __version__
from clockwright.errors import ConfigError, RefusedError
from clockwright.units import NS_PER_S
from controller.front.http.calls import Call
from controller.front.oip.protocol import CheckedRequest
from controller.front.oip.statuses import CODES
from controller.port import Answered

log = logging.getLogger(__name__)

SPAN: Final = "inference.GRPCInferenceService/ModelInfer"

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1

# Requests that wait to be made into spans; what comes beyond that is dropped, and counted.
_WAITING_MAX: Final = 4096
_END_LIMIT_S: Final = 2.0

# A client may have its own requests traced, each of which takes 100 us of this process's threads, but not so many
# that others are late.
_ASKED_PER_S: Final = 200


class Trace:
    """One request that is traced."""

    __slots__ = ("_arrival_ns", "_parent", "_tracing")

    def __init__(self, tracing: Tracing, arrival_ns: int, parent: tuple[int, int] | None) -> None:
        self._tracing = tracing
        self._arrival_ns = arrival_ns
        self._parent = parent

    def answered(self, told: Answered, asked: CheckedRequest) -> None:
        """The request is answered now."""
        attributes: dict[str, Any] = {"rpc.response.status_code": "OK"}
        inner: list[tuple[str, int, int, dict[str, Any]]] = []
        if (course := told.course) is not None:
            arrival_ns, now_ns = self._arrival_ns, self._tracing.clock()
            attributes["clockwright.request_id"] = course.request_id
            on_worker = {"clockwright.worker": course.worker}
            # A worker's clock may be known a little wrong. No EXEC begins before its request comes, or ends after
            # its answer is here.
            begin_ns, end_ns = (
                min(arrival_ns + max(from_arrival_ns, 0), now_ns)
                for from_arrival_ns in (course.exec_begin_ns, course.exec_end_ns)
            )
            inner.append(("queue", arrival_ns, begin_ns, {}))
            if course.load_end_ns:
                load_ns = arrival_ns + course.load_begin_ns, arrival_ns + course.load_end_ns
                inner.append(("load", *load_ns, on_worker))
            of_batch = {
                **on_worker,
                "clockwright.action_id": course.action_id,
                "clockwright.batch_size": course.batch_size,
            }
            inner.append(("exec", begin_ns, end_ns, of_batch))
        self._over(asked, attributes, inner)

    def failed(self, error: Exception, asked: CheckedRequest | None) -> None:
        """The request is refused, or wrong."""
        attributes: dict[str, Any] = {"error.type": type(error).__name__}
        inner: list[tuple[str, int, int, dict[str, Any]]] = []
        if isinstance(error, RefusedError):
            attributes["error.type"] = error.refusal.value
            attributes["rpc.response.status_code"] = CODES[error.refusal].name
            for name, figure in error.figures.items():
                attributes[f"clockwright.{name}"] = figure
            inner.append(("queue", self._arrival_ns, self._tracing.clock(), {}))
        self._over(asked, attributes, inner)

    def gone(self, asked: CheckedRequest | None) -> None:
        """The client gave the request up."""
        attributes = {"error.type": "CANCELLED", "rpc.response.status_code": "CANCELLED"}
        self._over(asked, attributes, [])

    def _over(
        self,
        asked: CheckedRequest | None,
        attributes: dict[str, Any],
        inner: list[tuple[str, int, int, dict[str, Any]]],
    ) -> None:
        if asked is not None:
            attributes["clockwright.slo_ns"] = asked.slo_ns
            if asked.request_id:
                attributes["request_id"] = asked.request_id
        self._tracing.put(
            (self._parent, self._arrival_ns, self._tracing.clock(), attributes, inner)
        )


class Tracing:
    """Decides which requests are traced, and has their spans made and sent in a thread."""

    def __init__(
        self,
        collector: str,
        *,
        share: float,
        clock: Callable[[], int],
    ) -> None:
        """Begin.

        Args:
            collector: HOST:PORT, or a URL with http:// or https://, of a service that takes OTLP over gRPC.
            share: of the requests that come without a context, 0 to 1.
            clock: the server's, in ns.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"traces need `pip install clockwright[otel]`: {error}") from None
        url = collector if "://" in collector else f"http://{collector}"
        resource = Resource.create({"service.name": "clockwright", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self.clock = clock
        self._share = share
        self._random = random.Random()
        self._waiting: queue.Queue[Any] = queue.Queue(_WAITING_MAX)
        self._num_dropped = 0
        # What clients have traced in the present second, and when that began.
        self._num_asked, self._second_ns = 0, clock()
        self._thread = threading.Thread(target=self._make_spans, name="tracing", daemon=True)
        self._thread.start()

    def begin(self, call: Call) -> Trace | None:
        """Decide whether a request is traced; None: it is not."""
        parent: tuple[int, int] | None = None
        text = call.header("traceparent")
        if text and (found := _TRACEPARENT.match(text)):
            trace_id, span_id, flags = (int(part, 16) for part in found.groups())
            if trace_id and span_id:
                if not flags & _SAMPLED:
                    return None
                if not self._has_time():
                    self._num_dropped += 1
                    return None
                parent = trace_id, span_id
        # Nothing is drawn where nothing could come of it, as it is by default.
        if parent is None and not (self._share and self._random.random() < self._share):
            return None
        return Trace(self, call.arrival_ns, parent)

    def _has_time(self) -> bool:
        """Whether one more may be traced because its client says so."""
        now_ns = self.clock()
        if now_ns - self._second_ns >= NS_PER_S:
            self._num_asked, self._second_ns = 0, now_ns
        self._num_asked += 1
        return self._num_asked <= _ASKED_PER_S

    def put(self, record: object) -> None:
        """Have spans made of a request that is over."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Send what there is, for some seconds at most."""
        # A collector that does not answer is asked again and again, whatever limit its exporter is given.
        ender = threading.Thread(target=self._end, name="traces' end", daemon=True)
        ender.start()
        ender.join(_END_LIMIT_S)
        if self._num_dropped:
            log.warning("traces lack %d requests, which came too fast", self._num_dropped)

    def _end(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        self._provider.shutdown()

    def _make_spans(self) -> None:
        tracer = self._provider.get_tracer("clockwright", __version__)
        while (record := self._waiting.get()) is not None:
            try:
                self._make(tracer, *record)
            except Exception:
                log.exception("a trace is lost")

    def _make(
        self,
        tracer: Any,  # noqa: ANN401  OpenTelemetry is optional
        parent: tuple[int, int] | None,
        begin_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        inner: list[tuple[str, int, int, dict[str, Any]]],
    ) -> None:
        from opentelemetry import trace

        # The wall clock's time of the server clock's zero changes when the wall clock is set.
        zero_ns = time.time_ns() - self.clock()
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if parent is not None:
            trace_id, span_id = parent
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
            above = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(above))
        span = tracer.start_span(
            SPAN,
            context,
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": SPAN, **attributes},
            start_time=zero_ns + begin_ns,
        )
        if "error.type" in attributes:
            span.set_status(trace.StatusCode.ERROR)
        below = trace.set_span_in_context(span)
        for name, from_ns, until_ns, more in inner:
            child = tracer.start_span(name, below, attributes=more, start_time=zero_ns + from_ns)
            child.end(zero_ns + max(from_ns, until_ns))
        span.end(zero_ns + end_ns)


def open_tracing(collector: str, *, share: float, clock: Callable[[], int]) -> Tracing | None:
    """Begin what the settings ask for; None: they name no collector, and nothing is traced.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    return Tracing(collector, share=share, clock=clock) if collector else None
