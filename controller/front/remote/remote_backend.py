"""A controller in another process, as its front sees it: over a link that may break and come back.

Without a controller, requests are held (`open_requests`): new ones and those that the last controller had. With the
next controller they begin again: the model is described again, and they are asked with their old arrival time. So a
restart of the controller costs no request that still has slack. A controller that has just started knows few models.
Until it is ready, requests to models that its workers do not know yet are held too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import msgspec

from clockwright.client.channel import Access
from clockwright.errors import Denial, ProtocolError, Refusal
from clockwright.units import NO_REQUEST, NS_PER_MS, RequestId
from clockwright.wire.bulk import Buffer, total_bytes
from clockwright.wire.frame_headers import APART
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import DIRECT_BYTES, Frame
from controller.access.quota_stage import over_quota
from controller.core.events import RequestArrived
from controller.core.quotas import Exceeded
from controller.front.admission.early_quotas import TENANTS_MAX, EarlyQuotas
from controller.front.oip.protocol import Servable
from controller.front.oip.refusals import error_of
from controller.front.oip.statuses import Status, ToldStatusError, failed_of, status_of
from controller.front.remote import link_frames as frames
from controller.front.remote.controller_connection import ControllerConnection
from controller.front.remote.direct_tensors import DirectTensors
from controller.front.remote.fed_requests import Feeding
from controller.front.remote.open_requests import OpenRequests, Waits
from controller.front.remote.shared_tensors import SharedTensors
from controller.links.slabs import SLAB_BYTES_MIN, Slabs
from controller.port import ANSWERS, NOT_FOUND, Answered, Ask, Bound, Failed, Refused, Stale, Told

# Overdue requests are looked for this often, and less often while none is held. The controller refuses its own in
# time, and gets this much longer to say so.
_SWEEP_S, _IDLE_SWEEP_S = 0.02, 0.2
_GRACE_NS = 200 * NS_PER_MS
# A client over its quota is told to wait too long by at most this much.
_SAID_NS = NS_PER_MS
# Names of which the SLO is remembered when their descriptions are forgotten.
_SLOS_MAX = 100_000
# Names and versions that are remembered as lacking.
_LACKING_MAX = 10_000

# gRPC's status ABORTED: clients do not retry by themselves.
_ABORTED = 10
_MAY_HAVE_COUNTED = (
    "the link to the controller was lost while this step of a sequence was open: it may have counted; `sequence_step` of the"
    " next answer says so; if the sequence has ended, begin it again (sequence_start)"
)


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """A model or an application of the controller's."""

    servable: Servable
    number: int
    #: Inputs may stay here until a worker is named.
    is_held: bool


class _Descriptions:
    """Descriptions of models and applications that the controller has sent."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], RemoteDescription] = {}
        #: What the controller does not have, and what it said of that.
        self.lacking: dict[tuple[str, str], Failed] = {}
        self._asked: dict[tuple[str, str], int] = {}
        self._waiting: dict[int, tuple[tuple[str, str], list[Waits]]] = {}
        self._last_query = 0
        self._slos_ns: dict[str, int | None] = {}

    def wait(self, sink: Waits, name: str, version: str) -> frames.Describe | None:
        """Let a request wait for a description. Returns the question to send, or None if it is sent already."""
        key, question = (name, version), None
        query_id = self._asked.get(key)
        if query_id is None:
            self._last_query = query_id = self._last_query + 1
            self._asked[key] = query_id
            self._waiting[query_id] = key, []
            question = frames.Describe(query_id, name, version)
        self._waiting[query_id][1].append(sink)
        return question

    def take(self, query_id: int, failure: Failed | None) -> tuple[tuple[str, str], list[Waits]]:
        """A question is answered. Returns its name and version, and the requests that wait for it."""
        key, sinks = self._waiting.pop(query_id, (("", ""), []))
        if self._asked.get(key) == query_id:
            del self._asked[key]
            if failure is not None and failure.code == NOT_FOUND:
                if len(self.lacking) >= _LACKING_MAX:
                    self.lacking.clear()
                self.lacking[key] = failure
        return key, sinks

    def add(self, key: tuple[str, str], described: RemoteDescription) -> None:
        """Keep a description."""
        self.known[key] = described
        if len(self._slos_ns) > _SLOS_MAX:
            self._slos_ns.clear()
        self._slos_ns[described.servable.name] = described.servable.slo_ns

    def slo_ns(self, name: str, default_ns: int) -> int | None:
        """Find the SLO of requests to a name that state no SLO. Returns None if it is not known."""
        if name not in self._slos_ns:
            return None
        slo_ns = self._slos_ns[name]
        return slo_ns if slo_ns is not None else default_ns

    def forget(self) -> None:
        """All descriptions may have changed."""
        self.known.clear()
        self.lacking.clear()
        # Descriptions on their way may be out of date.
        self._asked.clear()

    def left(self) -> None:
        """The link to the controller is lost."""
        self._waiting.clear()


class _Refusals:
    """Refusals of this front by itself, and their counts for the controller."""

    def __init__(self) -> None:
        self.quotas = EarlyQuotas()
        self._refused: Counter[Refusal] = Counter()
        self._denied: Counter[Denial] = Counter()
        self.num_bad = 0
        #: For quotas, since the last beat: the first of those that have names.
        self._early: list[frames.RefusedEarly] = []
        # The refusals that tenants over their quota get, and since when.
        self._said: dict[str, tuple[int, Status]] = {}

    def refused(self, refusal: Refusal, number: int) -> None:
        """Count refusals."""
        self._refused[refusal] += number

    def denied(self, denial: Denial) -> None:
        """Count a call that its client has no right to make."""
        self._denied[denial] += 1

    def judge(self, name: str, ask: Ask, now_ns: int) -> None:
        """Refuse what the controller would refuse because of a quota. Raises ToldStatusError if it would."""
        exceeded = self.quotas.judge(ask.tenant, now_ns, ask.slo_ns)
        if exceeded is not None:
            if ask.name and len(self._early) < frames.EARLY_TOLD_MAX:
                bound = cast("Bound", exceeded.bound)
                early = frames.RefusedEarly(
                    ask, name, now_ns, bound, exceeded.expected, exceeded.retry_ns
                )
                self._early.append(early)
            raise ToldStatusError(self._over_quota(ask.tenant, exceeded, now_ns))

    def _over_quota(self, tenant: str, exceeded: Exceeded, now_ns: int) -> Status:
        """Make the controller's refusal. It is reused for some time, because making it is most of a refusal's cost."""
        said_ns, status = self._said.get(tenant, (0, None))
        if status is None or exceeded.found is not None or now_ns - said_ns > _SAID_NS:
            error = error_of(over_quota(tenant, exceeded), "")
            status = status_of(error, method="ModelInfer")
            if exceeded.found is None:
                if len(self._said) >= TENANTS_MAX:
                    self._said.clear()
                self._said[tenant] = now_ns, status
        return status

    def told(self, tenant: str, spent: tuple[Bound, float, int]) -> None:
        """The controller tells a bound of a tenant's quota that holds for a while or for good."""
        bound, expected, until_ns = spent
        if bound == "rate_rps":
            self.quotas.told(tenant, until_ns, expected)
        else:
            self.quotas.told_slo(tenant, round(expected), is_least=bound == "slo_ns_min")

    def make_beat(self, sent_ns: int, min_delta_ns: int | None) -> frames.FrontBeat:
        """Make a heartbeat with the counts since the last one."""
        refused, self._refused = dict(self._refused), Counter()
        denied, self._denied = dict(self._denied), Counter()
        early, self._early = tuple(self._early), []
        num_bad, self.num_bad = self.num_bad, 0
        return frames.FrontBeat(
            sent_ns, min_delta_ns, refused, denied, self.quotas.take_refused(), early, num_bad
        )

    def forget(self) -> None:
        """Quotas may have changed."""
        self.quotas.forget()
        self._said.clear()


class RemoteBackend:
    """The controller at an address."""

    def __init__(
        self,
        controller: str,
        slabs: Slabs,
        *,
        joining: Access | None = None,
        knows_callers: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin without a controller; `run` connects to it. The arguments are those of `ControllerConnection`."""
        self.clock = clock
        #: Changes whenever a description may have changed.
        self.generation = 0
        self.link = ControllerConnection(
            controller, slabs, self, joining=joining, knows_callers=knows_callers, clock=clock
        )
        self._book: OpenRequests[Waits] = OpenRequests(grace_ns=_GRACE_NS)
        #: Those that are held may go on.
        self._resuming = False
        self._is_held = asyncio.Event()
        #: A controller that is not ready may only have started again.
        self._recovering = False
        self._descriptions = _Descriptions()
        self._refusals = _Refusals()
        self._shared = SharedTensors(slabs, self._flush_soon)
        #: None: no controller is connected.
        self._direct: DirectTensors | None = None
        # Messages of this turn of the event loop.
        self._asks: list[Ask] = []
        self._payload: list[Buffer] = []
        self._payload_bytes = 0
        self._withdrawn: list[int] = []
        self._is_due = False

    @property
    def default_slo_ns(self) -> int:
        """SLO of requests that name no SLO, to servables that have none."""
        return self.link.default_slo_ns

    @property
    def num_held(self) -> int:
        """Requests whose inputs are kept for workers, or whose outputs are awaited from there."""
        return 0 if self._direct is None else self._direct.num_held

    @property
    def num_workers_reached(self) -> int:
        """Workers without memory in common that can be reached."""
        return 0 if self._direct is None else self._direct.workers.num_reached

    @property
    def attached(self) -> asyncio.Event:
        """Set when a controller is there for the first time."""
        return self.link.attached

    @property
    def message_bytes_max(self) -> int:
        """Bytes of the largest request that the controller takes."""
        return self.link.message_bytes_max

    async def find_link(
        self, limit_s: float, _model: Callable[[], str] = str
    ) -> ControllerConnection | None:
        """The link for calls that the controller answers itself. Returns None if it was not connected in time."""
        return self.link if await self.link.wait_for_channel(limit_s) is not None else None

    async def run(self) -> None:
        """Keep a controller attached, for good. Raises ConfigError if it takes no front of this version."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            await self.link.run()
        finally:
            sweeper.cancel()
            await asyncio.wait([sweeper])

    # --- what the service asks ----------------------------------------------------------------

    def known(self, name: str, version: str) -> RemoteDescription | None:
        """The description of what a client names. Returns None if it is not known here."""
        return self._descriptions.known.get((name, version))

    def lacks(self, name: str, version: str) -> bool:
        """Whether the controller has said that it does not have what a client names."""
        return (name, version) in self._descriptions.lacking

    def why_lacking(self, name: str, version: str) -> Failed | None:
        """What the controller said of what it does not have. Returns None if it has it, or has not been asked."""
        return self._descriptions.lacking.get((name, version))

    def describe(
        self, sink: Waits, name: str, version: str, until: Callable[[], int]
    ) -> RemoteDescription | None:
        """Find what a client names. Asks the controller for a description that is not known."""
        described = self.known(name, version)
        if described is not None:
            return described
        self._book.hold(sink, until())
        self._is_held.set()
        if self.link.joined:
            question = self._descriptions.wait(sink, name, version)
            if question is not None:
                self.link.send(question)
        return None

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state no SLO."""
        return self._descriptions.slo_ns(name, self.default_slo_ns)

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count refusals, and report them to the controller."""
        self._refusals.refused(refusal, number)

    def denied(self, denial: Denial) -> None:
        """Count a call that its client has no right to make, and report it to the controller."""
        self._refusals.denied(denial)

    def bad_request(self) -> None:
        """Count a request that is malformed, or does not fit what it names, and report it to the controller."""
        self._refusals.num_bad += 1

    def ask(
        self, described: RemoteDescription, ask: Ask, inputs: Sequence[Buffer], sink: Waits
    ) -> RequestId:
        """Ask the controller. Raises ToldStatusError if it would refuse the request."""
        due_ns = ask.arrival_ns + ask.slo_ns
        if not self.link.joined:
            self._book.hold(sink, due_ns)
            self._is_held.set()
            return NO_REQUEST
        quotas = self._refusals.quotas
        if quotas:
            self._refusals.judge(described.servable.name, ask, self.clock())
        ask.ask_id = ask_id = self._book.send(sink, due_ns, ask.tenant)
        if quotas:
            quotas.passed(ask.tenant, ask_id)
        lengths = ask.lengths = tuple([len(tensor) for tensor in inputs])
        largest = max(lengths, default=0)
        direct = self._direct
        if largest >= DIRECT_BYTES and direct is not None:
            direct.hold(ask_id, inputs)
        if largest >= SLAB_BYTES_MIN and (places := self._shared.find(ask_id, inputs)) is not None:
            ask.places = tuple(places)
            inputs = [tensor for tensor, place in zip(inputs, places, strict=True) if place < 0]
        elif (
            largest >= DIRECT_BYTES
            and direct is not None
            and direct.workers.num_reached
            and described.is_held
            and ask.rows <= described.servable.largest_batch
            and ask.step is None
        ):
            ask.places = tuple([APART if length >= DIRECT_BYTES else -1 for length in lengths])
            inputs = [tensor for tensor in inputs if len(tensor) < DIRECT_BYTES]
        self._asks.append(ask)
        self._payload += inputs
        self._payload_bytes += total_bytes(inputs)
        if self._payload_bytes > frames.PAYLOAD_BYTES or len(self._asks) >= frames.REQUESTS_MAX:
            self._flush()
        else:
            self._flush_soon()
        return RequestId(ask_id)

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request."""
        if self._take(request_id) is not None:
            self._withdrawn.append(request_id)
            self._flush_soon()

    def in_vain(self, *_: object) -> None:
        """Only the controller knows."""

    def turned_away(self, request: RequestArrived, number: int) -> None:
        """Nothing is found to be in vain here."""

    def _take(self, ask_id: int, *, answered: bool = True) -> tuple[Waits, str] | None:
        """A request is over, here at least."""
        if self._refusals.quotas:
            self._refusals.quotas.over(ask_id, answered=answered)
        self._let_go(ask_id)
        return self._book.take(ask_id)

    def _let_go(self, ask_id: int) -> None:
        if self._direct is not None:
            self._direct.forget(ask_id)

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        if self._asks or self._withdrawn or self._shared.has_returned:
            self._flush()

    def _flush(self) -> None:
        asks, self._asks = self._asks, []
        payload, self._payload, self._payload_bytes = self._payload, [], 0
        withdrawn, self._withdrawn = self._withdrawn, []
        if not self.link.is_open:
            return  # The requests are held.
        buffers = frames.encode_asks(asks, payload) if asks else []
        if withdrawn:
            buffers += frames.encode(frames.Withdrawn(tuple(withdrawn)))
        if self._shared.has_returned:
            returned = self._shared.take_returned()
            buffers += frames.encode(frames.Returned(tuple(returned)))
        self.link.send_now(buffers)

    # --- what the controller says -------------------------------------------------------------

    def take(self, message: frames.FromController, frame: Frame, data: FrameSocket) -> None:
        """Take a message of the controller's."""
        direct = self._direct
        assert direct is not None
        if isinstance(message, frames.Answers):
            self._take_told(message, frame)
        elif isinstance(message, frames.Described):
            self._take_described(message)
        elif isinstance(message, frames.LentMemory):
            self._shared.take(message, data)
        elif isinstance(message, frames.Mapped):
            self._shared.is_mapped = True
        elif isinstance(message, frames.Feed):
            for ask_id, *feeding in message.feeds:
                direct.feed(ask_id, (feeding[0], feeding[1], feeding[2]))
        elif isinstance(message, frames.WorkerThere):
            direct.workers.there(message)
        elif isinstance(message, frames.WorkerGone):
            direct.workers.gone(message.number)
        elif isinstance(message, frames.Forget):
            self._shared.forget(message.number)

    def _take_told(self, message: frames.Answers, frame: Frame) -> None:
        answered = [told for told in message.told if isinstance(told, Answered)]
        outputs = frames.cut_payload(frame, answered, self._shared.look)
        for told in message.told:
            if isinstance(told, Answered):
                tensors = next(outputs)
                if told.more:
                    self._tell_one(told, tensors)
                elif told.sent is not None:
                    self._take_apart(told, told.sent)
                else:
                    self._tell(told, tensors)
            elif isinstance(told, Refused) and self._is_held_back(told):
                self._let_go(told.ask_id)
                self._book.put_back(told.ask_id)
                self._is_held.set()
            else:
                self._tell(told, ())
        next(outputs, None)  # Raises if there is more in the payload.
        self._shared.freed(message.freed)

    def _is_held_back(self, told: Refused) -> bool:
        """Whether the next controller, or this one when it has started, may take a request that is refused."""
        refusal = told.refusal
        if refusal is Refusal.DRAINING:
            self._recovering = True
        may_be_taken = self._recovering and refusal in (Refusal.DRAINING, Refusal.NO_WORKER)
        return may_be_taken and ANSWERS not in told.figures

    def _tell(self, told: Told, outputs: Sequence[Buffer]) -> None:
        sent = self._take(told.ask_id, answered=isinstance(told, Answered))
        if sent is None:
            return
        sink, tenant = sent
        if isinstance(told, Stale):
            self._forget()
        elif isinstance(told, Refused) and told.spent is not None:
            self._refusals.told(tenant, told.spent)
        sink.told(RequestId(told.ask_id), told, outputs)

    def _tell_one(self, told: Answered, outputs: Sequence[Buffer]) -> None:
        """Tell one of several answers: the request stays with the controller."""
        if (sink := self._book.find(told.ask_id)) is not None:
            sink.told(RequestId(told.ask_id), told, outputs)
            self._book.renew(told.ask_id, sink.due_ns)

    def _take_described(self, described: frames.Described) -> None:
        failure = described.failure
        key, sinks = self._descriptions.take(described.query_id, failure)
        if failure is not None:
            if described.not_yet and self._recovering:
                return  # They are held until the next generation, or until they are due.
            for sink in sinks:
                if self._book.release(sink):
                    sink.told(NO_REQUEST, msgspec.structs.replace(failure), ())
            return
        self._descriptions.add(
            key, RemoteDescription(described.read(), described.number, described.is_held)
        )
        for sink in sinks:
            if self._book.release(sink):
                sink.told(NO_REQUEST, Stale(), ())

    # --- tensors of workers on other hosts ----------------------------------------------------

    def due_ns(self, ask_id: int) -> int | None:
        """When a request that is sent is due. Returns None if it is over."""
        return self._book.due_ns(ask_id)

    def answer_apart(self, answered: Answered, outputs: Sequence[Buffer]) -> None:
        """Answer a request with outputs that came from a worker."""
        lengths = tuple([len(tensor) for tensor in outputs])
        wanted = answered.lengths
        # 0: a tensor that carries its size, which is looked at when the answer is written.
        if len(lengths) != len(wanted) or any(
            [a not in (0, b) for a, b in zip(wanted, lengths, strict=True)]
        ):
            words = f"outputs of {lengths} bytes, expected {answered.lengths}"
            failed = failed_of(ProtocolError(words), method="ModelInfer")
            failed.ask_id = answered.ask_id
            self._tell(failed, ())
        else:
            self._tell(answered, outputs)

    def begin_again(self, ask_id: int) -> None:
        """An answer is lost: the request is asked again, if it has slack."""
        if (sent := self._take(ask_id)) is not None:
            sent[0].told(RequestId(ask_id), Stale(), ())

    def hand_on(self, feeding: Feeding, tensors: Sequence[Buffer] | None) -> None:
        """Send inputs through the controller to a worker that cannot be reached."""
        self.link.send_now(frames.encode_hand_on(*feeding, tensors))

    @property
    def _awaits_outputs(self) -> bool:
        return self._direct is not None and self._direct.awaits

    def _take_apart(self, answered: Answered, feeding: Feeding) -> None:
        assert self._direct is not None
        self._direct.told(answered, feeding)
        if self._direct.awaits:
            self._is_held.set()

    def _give_up_outputs(self) -> None:
        """Refuse requests whose outputs have not come in time."""
        if self._direct is None:
            return
        now_ns = self.clock()
        for ask_id in self._direct.awaited:
            due_ns = self._book.due_ns(ask_id)
            if due_ns is None or due_ns >= now_ns:
                continue
            if (sent := self._take(ask_id)) is not None:
                self.refused_at_door(Refusal.LATE)
                words = "its outputs did not come from their worker within the SLO"
                sent[0].told(RequestId(ask_id), Refused(Refusal.LATE, {}, message=words), ())

    # --- the link -----------------------------------------------------------------------------

    def opened(self, data: FrameSocket, silence_limit_ms: int) -> None:
        """A connection is open."""
        self._direct = DirectTensors(
            self, silence_limit_ms=silence_limit_ms, needs_tls=self.link.joining.speaks_tls
        )

    def renewed(self) -> None:
        """All descriptions may have changed."""
        self._forget()
        self._resuming = bool(self._book.num_held)

    def ready(self) -> None:
        """Every model is ready, or known to be unfit."""
        if self._recovering:
            self._recovering = False
            self._resuming = True

    def joined(self) -> None:
        """The controller has joined: requests that are held go on."""
        self._resume()

    def left(self, *, was_joined: bool) -> None:
        """The link is lost: open requests are held."""
        self._recovering = self._recovering or was_joined
        self._forget()
        self._descriptions.left()
        self._shared.left()
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        for sink in self._book.interrupt():
            told = Failed(_ABORTED, _MAY_HAVE_COUNTED) if sink.is_step() else Stale()
            sink.told(NO_REQUEST, told, ())
        self._is_held.set()

    def make_beat(self, sent_ns: int, min_delta_ns: int | None) -> frames.FrontBeat:
        """Make a heartbeat, with the counts since the last one."""
        if self._shared.has_returned:
            self._flush_soon()
        return self._refusals.make_beat(sent_ns, min_delta_ns)

    def still_looks_at(self) -> Iterable[int]:
        """Drop outputs that are not read any more. Returns the request of each output that still is."""
        self._shared.take_returned()
        return self._shared.still_looks_at()

    def _resume(self) -> None:
        self._resuming = False
        for sink in self._book.resume():
            sink.told(NO_REQUEST, Stale(), ())

    def _forget(self) -> None:
        """All descriptions may have changed."""
        self.generation += 1
        self._descriptions.forget()
        self._refusals.forget()

    async def _sweep(self) -> None:
        """End requests whose time is over, whether there is a controller or not."""
        while True:
            if self._book.num_held or self._resuming or self._awaits_outputs:
                await asyncio.sleep(_SWEEP_S)
            else:
                self._is_held.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_SWEEP_S):
                        await self._is_held.wait()
            # Not at each generation: a controller that starts may have thousands in a second.
            if self._resuming and self.link.joined:
                self._resume()
            self._give_up_outputs()
            overdue = self._book.overdue(self.clock())
            if overdue and self._direct is not None:
                self._direct.forget_overdue()
            for sink in overdue:
                self.refused_at_door(Refusal.NO_WORKER)
                words = "the controller could not be reached within the SLO"
                sink.told(NO_REQUEST, Refused(Refusal.NO_WORKER, {}, message=words), ())
