"""Traces of single requests, by OpenTelemetry: where their time went, as spans that a collector gets by OTLP.

Off unless somebody names a collector, and then it follows what clients ask for: a request that comes with a sampled
W3C `traceparent` is traced, up to 200 a second, one whose caller has decided against it never, and of the others a share. What the
event loop does for a traced request is to put some values into a queue. Spans are made of them, and sent, by threads.

A request is one span of kind SERVER, named as OpenTelemetry names calls, with up to three below it:

    queue  from its arrival until its EXEC began, or until it was refused
    load   the LOAD of its model that it waited for, if its model was cold
    exec   the EXEC of its batch

A front that is a process of its own has their durations with the answer, and sets them one behind the other from when
the request came: what the way between the two took is at the end, in none of the three. Of a request to an
application, and of one that the prediction cache may answer, there are none.
"""

from __future__ import annotations

import logging
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from clockwright import __version__
from clockwright.errors import ConfigError, RefusedError
from clockwright.units import NS_PER_S, NS_PER_US
from controller.front.backend import ToldAnswer
from controller.front.calls import Call
from controller.front.oip import CheckedRequest
from controller.front.statuses import CODES
from controller.runtime import Answer
from controller.selection.queries import Answered

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

    def answered(self, result: Answer | Answered | ToldAnswer, asked: CheckedRequest) -> None:
        """The request is answered now."""
        attributes: dict[str, Any] = {"rpc.response.status_code": "OK"}
        inner: list[tuple[str, int, int, dict[str, Any]]] = []
        if isinstance(result, Answer):
            finished, command = result.finished, result.command
            attributes["clockwright.request_id"] = result.request.request_id
            run, load = finished.result.exec, finished.load if command.cold else None
            # A worker's clock may be known a little wrong. No EXEC begins before its request comes.
            begin_ns = finished.result_ns if run is None else run.begin_ns
            begin_ns = max(begin_ns, self._arrival_ns)
            inner.append(("queue", self._arrival_ns, begin_ns, {}))
            if load is not None:
                on_worker = {"clockwright.worker": command.worker_id}
                inner.append(("load", load.begin_ns, load.end_ns, on_worker))
            if run is not None:
                of_batch = {
                    "clockwright.worker": command.worker_id,
                    "clockwright.action_id": command.action_id,
                    "clockwright.batch_size": command.batch_size,
                }
                inner.append(("exec", begin_ns, run.end_ns, of_batch))
        elif isinstance(result, ToldAnswer) and "exec_us" in (told := result.parameters or {}):
            attributes["clockwright.request_id"] = told["request_id"]
            inner += self._told_steps(told)
        self._over(asked, attributes, inner)

    def _told_steps(
        self, told: Mapping[str, bool | int | str]
    ) -> list[tuple[str, int, int, dict[str, Any]]]:
        """Place what `explain` tells of a request after its arrival here."""
        queue_ns, load_ns, input_ns, exec_ns, network_ns = (
            int(told[f"{name}_us"]) * NS_PER_US
            for name in ("queue", "load", "input", "exec", "network")
        )
        on_worker = {"clockwright.worker": told["worker"]}
        loaded_ns = self._arrival_ns + queue_ns + load_ns
        # The way to the worker and back is told as one time, so each half of it is a guess.
        begin_ns = loaded_ns + network_ns // 2 + input_ns
        steps: list[tuple[str, int, int, dict[str, Any]]] = [
            ("queue", self._arrival_ns, begin_ns, {}),
            (
                "exec",
                begin_ns,
                begin_ns + exec_ns,
                {**on_worker, "clockwright.batch_size": told["batch_size"]},
            ),
        ]
        if told["cold"]:
            steps.insert(1, ("load", loaded_ns - load_ns, loaded_ns, on_worker))
        return steps

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
        generator: random.Random | None = None,
    ) -> None:
        """Begin.

        Args:
            collector: HOST:PORT, or a URL with http:// or https://, of whoever takes OTLP over gRPC.
            share: of the requests that come without a context, 0 to 1.
            clock: the server's, in ns.
            generator: draws those; None: a new one.

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
        self._random = generator or random.Random()
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

        # The wall clock's time of the server clock's zero changes when somebody sets the wall clock.
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

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    return Tracing(collector, share=share, clock=clock) if collector else None
