"""Play a workload to a live server over gRPC: Clockwright, or another server of the Open Inference Protocol.

Open-loop requests are sent when they are due, independent of earlier ones. Closed-loop clients send the next request
when they are answered. After a refusal they wait until the refused request would have been due, as
Clockwork's clients did, or for a pause that the caller sets. A client that is too slow would measure itself instead
of the server, so each request's delay is recorded, and latency counts from when the request was due.

With `requests_csv`, one row per request is written, in order of completion. All times are nanoseconds
since the replay began, by the client's monotonic clock:

- `request_id`: in order of sending, from 0;
- `model_id`: the model's name;
- `tenant`: its tenant; empty: no tenant;
- `loop`: "open" or "closed";
- `slo_ns`: as asked;
- `due_ns`: when it should have left; in a closed loop, when the response before it was there, or the
  pause after a refusal over;
- `sent_ns`: when it left;
- `departure_ns`: when the response was in hand;
- `outcome`: "OK", the reason of a refusal (`Refusal`), or the name of a gRPC status.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gc
import itertools
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import grpc
import numpy as np
import uvloop
from google.rpc import error_details_pb2, status_pb2

from clockwright.cli.inference import check_names
from clockwright.client.channel import OPTIONS, Access
from clockwright.errors import ConfigError, Refusal
from clockwright.foreign import printable
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import Buffer, join_bulk
from traces.arrivals import ClosedLoop, Workload, WorkloadRequest
from traces.client_record import OK, ClientRecord, percentile
from traces.request_inputs import ModelInputs, RequestInputs, ask_server, model_inputs

REQUEST_COLUMNS = (
    "request_id", "model_id", "tenant", "loop", "slo_ns", "due_ns", "sent_ns", "departure_ns", "outcome",
)  # fmt: skip

_INFER = "/inference.GRPCInferenceService/ModelInfer"

# A response arrives by the end of the SLO. The server is assumed dead this much later.
_GRACE_S = 10.0

# Pause of a closed-loop client when no server is there, so that it does not hammer the port.
_RECONNECT_S = 0.1

_Row = tuple[int, str, str, str, int, int, int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayProgress:
    """Progress of a replay, about once a second."""

    #: Time since the replay began.
    elapsed_ns: int
    #: Numbers of requests that were sent, that have a response, and that were answered within their SLO.
    num_sent: int
    num_done: int
    num_in_time: int
    #: Number of requests by outcome: "OK", the reason of a refusal, or the name of a gRPC status.
    outcomes: dict[str, int]
    #: Latency of the answers since the previous progress; 0 without answers.
    latency_ns_p50: int
    latency_ns_p99: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingStyle:
    """Settings of requests that a workload does not have."""

    inputs: RequestInputs = field(default_factory=RequestInputs)
    #: The parameter that carries the SLO: "slo_ms", Triton's "timeout" in microseconds, or none if empty.
    slo_parameter: str = "slo_ms"
    #: Each is to be refused or promised within this time; 0: none asks for that.
    decide_within_ns: int = 0
    #: What an answer is worth; None: requests do not say.
    weight: float | None = None
    #: How long a closed-loop client waits after a refusal, as in the simulator's `Case`; None: until the
    #: deadline of what was refused.
    refusal_pause_ns: int | None = None
    #: Connections, used in turn; fronts that share a port share them.
    connections: int = 1


def play(
    address: str,
    workload: Workload,
    *,
    access: Access | None = None,
    style: AskingStyle | None = None,
    requests_csv: Path | None = None,
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> ClientRecord:
    """Send a workload to a server, and wait for every response. Keeps the outcome of each request in 50 bytes.

    Args:
        address: HOST:PORT.
        workload: its models are names on the server.
        access: what is shown there, and TLS; None: nothing.
        style: how requests are put; None: zeros of each model's shape, one row per request.
        requests_csv: where rows go; replaces a file that is there.
        on_progress: told about once a second.

    Raises:
        ConfigError: no server answers, or the file cannot be written.
        UnknownModelError: the server lacks one of the models.
        RefusedError: no worker has looked at one of the models yet.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            play_async(
                address,
                workload,
                access=access,
                style=style,
                requests_csv=requests_csv,
                on_progress=on_progress,
            )
        )


async def play_async(
    address: str,
    workload: Workload,
    *,
    access: Access | None = None,
    style: AskingStyle | None = None,
    requests_csv: Path | None = None,
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> ClientRecord:
    """Play in a running event loop; other tasks in it delay requests."""
    access, style = access or Access(), style or AskingStyle()
    # By default gRPC's channels to one address share a connection.
    options = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with contextlib.AsyncExitStack() as open_channels:
        channels = [
            await open_channels.enter_async_context(access.async_channel(address, options=options))
            for _ in range(style.connections)
        ]
        messages = await _messages(channels[0], address, access, workload, style)
        with contextlib.ExitStack() as stack:
            file = None if requests_csv is None else stack.enter_context(_open(requests_csv))
            if file is not None:
                _write(file, [REQUEST_COLUMNS])
            driver = _Driver(
                channels,
                access.metadata,
                workload.models,
                workload.tenants,
                messages,
                style.refusal_pause_ns,
                keep_rows=file is not None,
            )
            # A collection of the objects made before would make requests late.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            async with _watched(driver, file, on_progress):
                await driver.drive(workload)
        return driver.record()


@dataclass(slots=True)
class _Driver:
    """Sends requests and records them."""

    channels: Sequence[Any]
    shown: Sequence[tuple[str, str]]
    names: tuple[str, ...]
    tenants: tuple[str, ...]
    #: Message of each model, by its position in `names`.
    messages: list[_Message]
    #: Pause of a closed-loop client after a refusal; None: until the refused request would be due.
    refusal_pause_ns: int | None
    #: Every request leaves a row.
    keep_rows: bool
    rows: list[_Row] = field(default_factory=list)
    begin_ns: int = 0
    num_in_time: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    #: Columns of the record, and positions of outcomes.
    sent_model: array[int] = field(default_factory=lambda: array("q"))
    sent_is_open: array[int] = field(default_factory=lambda: array("b"))
    sent_slo_ns: array[int] = field(default_factory=lambda: array("q"))
    sent_due_ns: array[int] = field(default_factory=lambda: array("q"))
    sent_ns: array[int] = field(default_factory=lambda: array("q"))
    departure_ns: array[int] = field(default_factory=lambda: array("q"))
    outcome: array[int] = field(default_factory=lambda: array("q"))
    positions: dict[str, int] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    #: Latencies of answers since the previous progress.
    new_latencies_ns: list[int] = field(default_factory=list)
    _calls: Iterator[Any] = field(default_factory=lambda: iter(()))

    async def drive(self, workload: Workload) -> None:
        """Send all requests; return when the last response is there."""
        self._calls = itertools.cycle([channel.unary_unary(_INFER) for channel in self.channels])
        chunks = _in_lists(workload)
        # The first requests are made before the clock starts, the others in a thread.
        chunk = await asyncio.to_thread(next, chunks, None)
        self.begin_ns = time.monotonic_ns()
        async with asyncio.TaskGroup() as tasks:
            for loop in workload.closed_loops:
                for start_ns in loop.starts_ns():
                    tasks.create_task(self._closed(loop, start_ns))
            while chunk is not None:
                following = tasks.create_task(asyncio.to_thread(next, chunks, None))
                for request in chunk:
                    await self._wait_until(request.time_ns)
                    tasks.create_task(self._open(request))
                chunk = await following

    def progress(self) -> ReplayProgress:
        """Report progress."""
        latencies_ns, self.new_latencies_ns = np.array(self.new_latencies_ns, np.int64), []
        return ReplayProgress(
            elapsed_ns=self._now_ns() if self.begin_ns else 0,
            num_sent=len(self.sent_ns),
            num_done=self.outcomes.total(),
            num_in_time=self.num_in_time,
            outcomes=dict(self.outcomes),
            latency_ns_p50=percentile(latencies_ns, 50),
            latency_ns_p99=percentile(latencies_ns, 99),
        )

    def record(self) -> ClientRecord:
        """Return the record of the whole run."""
        return ClientRecord(
            models=self.names,
            outcomes=tuple(self.positions),
            model=np.array(self.sent_model, np.int64),
            outcome=np.array(self.outcome, np.int64),
            is_open=np.array(self.sent_is_open, bool),
            slo_ns=np.array(self.sent_slo_ns, np.int64),
            due_ns=np.array(self.sent_due_ns, np.int64),
            sent_ns=np.array(self.sent_ns, np.int64),
            departure_ns=np.array(self.departure_ns, np.int64),
            begin_ns=self.begin_ns,
            words=self.words,
        )

    async def _open(self, request: WorkloadRequest) -> None:
        sent_ns = self._now_ns()
        tenant = self.tenants[request.tenant]
        await self._ask(request.model, "open", request.slo_ns, tenant, request.time_ns, sent_ns)

    async def _closed(self, loop: ClosedLoop, start_ns: int) -> None:
        await self._wait_until(start_ns)
        due_ns, tenant = start_ns, self.tenants[loop.tenant]
        while (sent_ns := self._now_ns()) < loop.end_ns:
            outcome = await self._ask(loop.model, "closed", loop.slo_ns, tenant, due_ns, sent_ns)
            if outcome == grpc.StatusCode.UNAVAILABLE.name:
                await asyncio.sleep(_RECONNECT_S)
            departure_ns, deadline_ns = self._now_ns(), due_ns + loop.slo_ns
            due_ns = departure_ns
            if outcome in Refusal.__members__:
                pause_ns = self.refusal_pause_ns
                due_ns = max(due_ns, deadline_ns) if pause_ns is None else due_ns + pause_ns
                await self._wait_until(due_ns)

    async def _ask(
        self, model: int, loop: str, slo_ns: int, tenant: str, due_ns: int, sent_ns: int
    ) -> str:
        number = len(self.sent_ns)
        self.sent_model.append(model)
        self.sent_is_open.append(loop == "open")
        self.sent_slo_ns.append(slo_ns)
        self.sent_due_ns.append(due_ns)
        self.sent_ns.append(sent_ns)
        self.departure_ns.append(0)
        self.outcome.append(0)
        message = self.messages[model].encode(number, slo_ns, tenant)
        outcome = OK
        try:
            call = next(self._calls)
            await call(message, metadata=self.shown, timeout=slo_ns / NS_PER_S + _GRACE_S)
        except grpc.aio.AioRpcError as error:
            outcome = _reason(error)
            if outcome not in Refusal.__members__ and outcome not in self.words:
                self.words[outcome] = printable(error.details() or "")
        departure_ns = self._now_ns()
        self.departure_ns[number] = departure_ns
        self.outcome[number] = self.positions.setdefault(outcome, len(self.positions))
        self.outcomes[outcome] += 1
        if outcome == OK:
            self.new_latencies_ns.append(departure_ns - due_ns)
            self.num_in_time += departure_ns - due_ns <= slo_ns
        if self.keep_rows:
            name = self.names[model]
            times = (due_ns, sent_ns, departure_ns)
            self.rows.append((number, name, tenant, loop, slo_ns, *times, outcome))
        return outcome

    async def _wait_until(self, time_ns: int) -> None:
        # Sleep once even when it is late: tasks that send must get their turn in the loop.
        await asyncio.sleep(max(0, time_ns - self._now_ns()) / NS_PER_S)
        # Timers may ring up to a millisecond early.
        while (left_ns := time_ns - self._now_ns()) > 0:  # noqa: ASYNC110  a time is no event
            await asyncio.sleep(left_ns / NS_PER_S)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self.begin_ns


@dataclass(slots=True)
class _Message:
    """A request to a model, which lacks only its SLO and its tenant."""

    name: str
    inputs: ModelInputs
    style: AskingStyle
    headers: dict[tuple[int, str], bytes] = field(default_factory=dict)

    def encode(self, number: int, slo_ns: int, tenant: str) -> bytes:
        header = self.headers.get((slo_ns, tenant))
        if header is None:
            request = pb.ModelInferRequest(model_name=self.name, inputs=self.inputs.tensors)
            slo_parameter, within_ns = self.style.slo_parameter, self.style.decide_within_ns
            if slo_parameter == "timeout":
                request.parameters["timeout"].int64_param = slo_ns // NS_PER_US
            elif slo_parameter:
                request.parameters[slo_parameter].double_param = slo_ns / NS_PER_MS
            if within_ns:
                request.parameters["decide_within_ms"].double_param = within_ns / NS_PER_MS
            if self.style.weight is not None:
                request.parameters["weight"].double_param = self.style.weight
            if tenant:
                request.parameters["tenant"].string_param = tenant
            header = self.headers[slo_ns, tenant] = request.SerializeToString()
        variants = self.inputs.variants
        payload: Sequence[Buffer] = variants[number % len(variants)]
        return join_bulk(header, 7, payload)


async def _messages(
    channel: Any,  # noqa: ANN401
    address: str,
    access: Access,
    workload: Workload,
    style: AskingStyle,
) -> list[_Message]:
    # Models that take the same share their payloads.
    known: dict[bytes, ModelInputs] = {}
    messages: list[_Message] = []
    for name in workload.models:
        request = pb.ModelMetadataRequest(name=name)
        metadata = pb.ModelMetadataResponse.FromString(
            await ask_server(channel, address, access, "ModelMetadata", request)
        )
        key = b"".join(spec.SerializeToString(deterministic=True) for spec in metadata.inputs)
        if key not in known:
            known[key] = model_inputs(metadata, style.inputs)
        messages.append(_Message(name, known[key], style))
    # Models may have different inputs.
    names = {tensor.name for inputs in known.values() for tensor in inputs.tensors}
    check_names("--shape", style.inputs.shapes, names)
    check_names("--input", style.inputs.arrays, names)
    return messages


def _in_lists(workload: Workload) -> Iterator[list[WorkloadRequest]]:
    """Give open-loop requests some thousands at a time."""
    for arrivals in workload.arrivals():
        rows = zip(*(column.tolist() for column in arrivals), strict=True)
        yield list(map(WorkloadRequest._make, rows))


@contextlib.asynccontextmanager
async def _watched(
    driver: _Driver, file: TextIO | None, on_progress: Callable[[ReplayProgress], None] | None
) -> AsyncIterator[None]:
    """Write rows and report progress each second, and at the end."""
    done = asyncio.Event()

    async def watch() -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 1.0)
            # The replay may end while rows are written; new rows are written the next time.
            is_over = done.is_set()
            rows, driver.rows = driver.rows, []
            if file is not None:
                await asyncio.to_thread(_write, file, rows)
            if on_progress is not None:
                on_progress(driver.progress())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        done.set()
        await watcher


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"requests file {path}: {error.strerror or error}") from None


def _write(file: TextIO, rows: Iterable[Sequence[object]]) -> None:
    try:
        csv.writer(file).writerows(rows)
        file.flush()
    except OSError as error:
        raise ConfigError(f"requests file {file.name}: {error.strerror or error}") from None


def _reason(error: Any) -> str:  # noqa: ANN401  grpc's stubs do not know its metadata
    """Name the reason of a failure: the refusal that the server attached, or else the status."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info) and info.reason in Refusal.__members__:
                    return str(info.reason)
    return str(error.code().name)
