"""A controller in another process, as its front sees it: over a link that may break and come back.

While there is no controller, requests are held (`open_requests`), those that come as well as those that
were with the last one; with the next they begin afresh: the model is described again, and they are asked
again with the arrival that they had. So a controller that starts again costs nothing that still has slack.
A controller that has just started knows few models at first. Until it is ready, requests to models that it
says to be unknown to its workers are held too.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import grpc

from clockwright import leader_search, wire
from clockwright.bulk import Buffer, total_bytes
from clockwright.channel import OPTIONS, Access
from clockwright.data_socket import dial, prepare
from clockwright.errors import ConfigError, Denial, ProtocolError, Refusal, RefusedError
from clockwright.frame_headers import APART, HEADER_BYTES_MAX, PLACE_BITS
from clockwright.frame_socket import FrameSocket
from clockwright.frames import DIRECT_BYTES, PAYLOAD_BYTES_MAX, Frame, greeting
from clockwright.leader_search import LeaderSearch
from clockwright.leadership import Fence, Term, host_of, parse_addresses
from clockwright.units import NS_PER_MS, ModelId
from clockwright.v1 import front_pb2 as pb
from controller.clock_sync import ClockSync
from controller.core.quotas import Exceeded
from controller.front import link_frames as frames
from controller.front.backend import Asker, OverQuotaError, Question, ToldAnswer
from controller.front.early_quotas import TENANTS_MAX, EarlyQuotas
from controller.front.fed_requests import FedRequests, Feeding
from controller.front.oip import Servable
from controller.front.open_requests import OpenRequests
from controller.front.statuses import Status, ToldStatusError, status_of
from controller.front.worker_sockets import WorkerSockets
from controller.runtime import NoAnswerError
from controller.slabs import SLAB_BYTES_MIN, MappedMemory, Slabs

log = logging.getLogger(__name__)

_ATTACH = "/clockwright.v1.FrontService/Attach"
_CHANNEL_OPTIONS = (
    *OPTIONS,
    # A channel per attempt, so that ours is the only back-off.
    ("grpc.use_local_subchannel_pool", 1),
    *leader_search.OPTIONS,
)

# A controller that is there answers sooner.
_ATTACH_LIMIT_S = 5.0
# Between attempts to reach one. What waits has little slack, so there are many.
_BACKOFF_S, _BACKOFF_S_MAX = 0.02, 0.5
# Requests whose time is over are looked for this often, less often while none is held; the controller refuses its own in time, and gets this
# much longer to say so.
_SWEEP_S, _IDLE_SWEEP_S = 0.02, 0.2
_GRACE_NS = 200 * NS_PER_MS
# Whoever is over his quota is told a time that is too long by so much at most.
_SAID_NS = NS_PER_MS
# Names of which the SLO is remembered when their descriptions are forgotten.
_SLOS_MAX = 100_000

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _RemoteAnswerer:
    """A model or an application of the controller's."""

    __slots__ = ("_backend", "is_held", "number", "servable")

    def __init__(
        self, backend: RemoteBackend, number: int, servable: Servable, *, is_held: bool
    ) -> None:
        self.number = number
        #: Inputs may stay here until a worker is named.
        self.is_held = is_held
        self.servable = servable
        self._backend = backend

    def ask(
        self, asker: Asker, question: Question, inputs: Sequence[Buffer], arrival_ns: int
    ) -> Callable[[], object]:
        """Do what `Answerer` says."""
        return self._backend.ask(self, asker, question, inputs, arrival_ns)


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
        """Know nothing yet; `run` finds the controller.

        Args:
            controller: HOST:PORT, or several with commas between: one of them leads.
            slabs: where large inputs lie, for the workers of this host to read.
            joining: what the front shows the controller.
            knows_callers: the front finds out who its clients are.
            clock: the front's, in ns.
        """
        self.clock = clock
        #: Another number whenever something may be described otherwise than before.
        self.generation = 0
        #: The controller's, once it was there.
        self.default_slo_ns = 0
        self.message_bytes_max = 0
        #: For calls that the controller answers itself; None: it is not there.
        self.channel: Any = None
        self._reachable = asyncio.Event()
        #: Set when a controller is there for the first time.
        self.attached = asyncio.Event()
        self._controllers = parse_addresses(controller)
        self._fence = Fence()
        #: The generation of the controller that is dialled, once it has said so.
        self._term: Term | None = None
        self.joining = joining or Access()
        #: Headers by which the controller knows this front: those with which it was dialled last.
        self.shown: Sequence[tuple[str, str]] = ()
        self._knows_callers = knows_callers
        self._book: OpenRequests[Asker] = OpenRequests(grace_ns=_GRACE_NS)
        #: Those that are held may go on.
        self._resuming = False
        self._is_held = asyncio.Event()
        self._data: FrameSocket | None = None
        self._clock_sync = ClockSync()
        self._peer_generation = -1
        #: The controller is there and knows our clock.
        self._joined = False
        #: A controller that is not ready may only have started again.
        self._recovering = False
        self._silent_ticks = 0
        self._known: dict[tuple[str, str], _RemoteAnswerer] = {}
        self._describing: dict[tuple[str, str], int] = {}
        self._described: dict[int, tuple[tuple[str, str], list[Asker]]] = {}
        self._last_query = 0
        self._slos_ns: dict[str, int | None] = {}
        self._refused: Counter[Refusal] = Counter()
        self._denied: Counter[Denial] = Counter()
        #: Refused by this front since its last beat, the first of those that have names.
        self._early: list[frames.RefusedEarly] = []
        self._spent = EarlyQuotas()
        # What tenants over their quota hear, and since when.
        self._said: dict[str, tuple[int, Status]] = {}
        # What this turn of the event loop has to say.
        self._asks: list[tuple[object, ...]] = []
        self._payload: list[Buffer] = []
        self._payload_bytes = 0
        self._withdrawn: list[int] = []
        self._is_due = False
        self._slabs = slabs
        #: The controller has mapped our memory for inputs. Who reads there: inputs that it looks at, and of how
        #: many of each request.
        self._is_mapped = False
        self._lent: dict[int, tuple[Sequence[Buffer], int]] = {}
        #: Workers' memory for outputs, and whose outputs nobody looks at any more: noted in any thread.
        self._outputs: dict[int, MappedMemory] = {}
        self._returned: deque[int] = deque()
        self._instance = secrets.token_hex(8)
        #: Outputs that somebody looks at, by request; over which connection they came does not matter.
        self._looks: Counter[int] = Counter()
        self._thread = threading.get_ident()
        #: Workers with which we share no memory, once there is a controller; inputs that they may be sent; what they
        #: were sent; and what is told beside their outputs: departure, parameters, and bytes of the outputs.
        self._workers: WorkerSockets | None = None
        self._held: dict[int, Sequence[Buffer]] = {}
        self._fed = FedRequests()
        self._told: dict[int, tuple[int, frames.Parameters | None, Sequence[int]]] = {}

    @property
    def num_held(self) -> int:
        """Requests whose inputs are kept for workers, or whose outputs are awaited from there."""
        return len({*self._held, *self._told, *self._fed.fed})

    @property
    def num_workers_reached(self) -> int:
        """Workers without memory in common that can be reached."""
        return 0 if self._workers is None else self._workers.num_reached

    # --- what the service asks ----------------------------------------------------------------

    def describe(
        self, asker: Asker, name: str, version: str, until: Callable[[], int]
    ) -> _RemoteAnswerer | None:
        """Find what a client names; what is not known is asked."""
        key = name, version
        answerer = self._known.get(key)
        if answerer is not None:
            return answerer
        self._book.hold(asker, until())
        self._is_held.set()
        if self._joined:
            query_id = self._describing.get(key)
            if query_id is None:
                assert self._data is not None
                self._last_query = query_id = self._last_query + 1
                self._describing[key] = query_id
                self._described[query_id] = key, []
                self._data.send(frames.encode(frames.Describe(query_id, name, version)))
            self._described[query_id][1].append(asker)
        return None

    def slo_ns(self, name: str) -> int | None:
        """Find the SLO of requests to a name that state none."""
        if name not in self._slos_ns:
            return None
        slo_ns = self._slos_ns[name]
        return slo_ns if slo_ns is not None else self.default_slo_ns

    async def wait_for_channel(self, limit_s: float) -> Any:  # noqa: ANN401  grpc.aio's
        """The channel for calls that the controller answers itself; None: it was not there in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._reachable.wait()
        return self.channel

    def refused_at_door(self, refusal: Refusal) -> None:
        """Count a refusal, for the controller to hear."""
        self._refused[refusal] += 1

    def denied(self, denial: Denial) -> None:
        """Count a call that somebody may not make, for the controller to hear."""
        self._denied[denial] += 1

    def ask(
        self,
        answerer: _RemoteAnswerer,
        asker: Asker,
        question: Question,
        inputs: Sequence[Buffer],
        arrival_ns: int,
    ) -> Callable[[], object]:
        """Ask the controller.

        Raises:
            ToldStatusError: it would refuse the request.
        """
        due_ns = arrival_ns + question.slo_ns
        if not self._joined:
            self._book.hold(asker, due_ns)
            self._is_held.set()
            return _nothing
        spent, tenant = self._spent, question.tenant
        if spent:
            now_ns = self.clock()
            if (exceeded := spent.judge(tenant, now_ns, question.slo_ns)) is not None:
                if question.request_id and len(self._early) < frames.EARLY_TOLD_MAX:
                    self._keep_early(answerer.servable.name, question, arrival_ns, exceeded, now_ns)
                raise ToldStatusError(self._over_quota(tenant, exceeded, now_ns))
        ask_id = self._book.send(asker, due_ns, answerer.servable.name)
        if spent:
            spent.passed(tenant, ask_id)
        lengths = [len(tensor) for tensor in inputs]
        places: Sequence[int] = ()
        arena = self._slabs.inputs
        workers = self._workers
        is_large = max(lengths, default=0) >= DIRECT_BYTES
        if is_large and workers is not None and workers.num_known:
            self._held[ask_id] = inputs
        if arena is not None and self._is_mapped and max(lengths, default=0) >= SLAB_BYTES_MIN:
            places = [
                arena.find(tensor) if len(tensor) >= SLAB_BYTES_MIN else -1 for tensor in inputs
            ]
            if num_lent := sum(place >= 0 for place in places):
                self._lent[ask_id] = inputs, num_lent
            inputs = [tensor for tensor, place in zip(inputs, places, strict=True) if place < 0]
        elif is_large and workers is not None and workers.num_reached and answerer.is_held:
            places = [APART if length >= DIRECT_BYTES else -1 for length in lengths]
            inputs = [tensor for tensor in inputs if len(tensor) < DIRECT_BYTES]
        self._asks.append(
            (
                ask_id,
                answerer.number,
                question.rows,
                arrival_ns,
                question.slo_ns,
                # What the prediction cache may answer keeps its inputs, and would be asked past it.
                question.explain or (question.traced and answerer.is_held),
                question.tenant,
                question.context,
                lengths,
                places,
                question.owner,
                question.request_id,
            )
        )
        self._payload += inputs
        self._payload_bytes += total_bytes(inputs)
        if self._payload_bytes > frames.PAYLOAD_BYTES or len(self._asks) >= frames.REQUESTS_MAX:
            self._flush()
        else:
            self._flush_soon()
        return functools.partial(self._withdraw, ask_id)

    def _over_quota(self, tenant: str, exceeded: Exceeded, now_ns: int) -> Status:
        """Say what the controller would say; the same for some time, since it is most of what a refusal takes."""
        if exceeded.found is not None:
            return status_of(OverQuotaError(tenant, exceeded), method="ModelInfer")
        said_ns, status = self._said.get(tenant, (0, None))
        if status is None or now_ns - said_ns > _SAID_NS:
            status = status_of(OverQuotaError(tenant, exceeded), method="ModelInfer")
            if len(self._said) >= TENANTS_MAX:
                self._said.clear()
            self._said[tenant] = now_ns, status
        return status

    def _keep_early(
        self, name: str, question: Question, arrival_ns: int, exceeded: Exceeded, now_ns: int
    ) -> None:
        """Have the controller hear of a refusal, which somebody may ask it about."""
        self._early.append(
            frames.RefusedEarly(
                question.request_id,
                name,
                question.tenant,
                question.rows,
                arrival_ns,
                now_ns,
                question.slo_ns,
                cast("Literal['rate_rps', 'slo_ns_min', 'slo_ns_max']", exceeded.bound),
                exceeded.expected,
                exceeded.retry_ns,
            )
        )

    def _withdraw(self, ask_id: int) -> None:
        if self._take(ask_id) is not None:
            self._withdrawn.append(ask_id)
            self._flush_soon()

    def _take(self, ask_id: int, *, answered: bool = True) -> tuple[Asker, str] | None:
        """A request is over, here at least."""
        if self._spent:
            self._spent.over(ask_id, answered=answered)
        self._let_go(ask_id)
        return self._book.take(ask_id)

    def _let_go(self, ask_id: int) -> None:
        if self._workers is not None:
            self._held.pop(ask_id, None)
            self._told.pop(ask_id, None)
            self._fed.forget(ask_id)

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        if self._asks or self._withdrawn or self._returned:
            self._flush()

    def _flush(self) -> None:
        asks, self._asks = self._asks, []
        payload, self._payload, self._payload_bytes = self._payload, [], 0
        withdrawn, self._withdrawn = self._withdrawn, []
        data = self._data
        if data is None:
            return  # Whoever asked is held.
        buffers = frames.encode_asks(asks, payload) if asks else []
        if withdrawn:
            buffers += frames.encode(frames.Withdrawn(tuple(withdrawn)))
        if self._returned:
            returned = self._take_returned()
            buffers += frames.encode(frames.Returned(tuple(returned)))
        data.send_now(buffers)

    def _take_returned(self) -> list[int]:
        """Take what was noted of outputs that nobody looks at any more."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        self._looks.subtract(returned)
        for ask_id in returned:
            if not self._looks[ask_id]:
                del self._looks[ask_id]
        return returned

    # --- what the controller says -------------------------------------------------------------

    def _take_frames(self, received: Sequence[Frame]) -> None:
        self._silent_ticks = 0
        for frame in received:
            if self._data is None:
                return
            message = frames.decode_from_controller(frame[0])
            if isinstance(message, frames.Told):
                self._take_told(message, frame)
            elif isinstance(message, frames.Described):
                self._take_described(message)
            elif isinstance(message, frames.Beat):
                self._take_beat(message)
            elif isinstance(message, frames.LentMemory):
                self._take_memory(message, self._data)
            elif isinstance(message, frames.Mapped):
                self._is_mapped = True
            elif isinstance(message, frames.SpentTenants):
                for tenant, until_ns, rate_rps in message.rates:
                    self._spent.told(tenant, until_ns, rate_rps)
                for tenant, slo_ns, is_least in message.slos:
                    self._spent.told_slo(tenant, slo_ns, is_least=is_least)
            elif isinstance(message, frames.Feed):
                for ask_id, *feeding in message.feeds:
                    self._feed(ask_id, (feeding[0], feeding[1], feeding[2]))
            elif isinstance(message, frames.WorkerThere):
                assert self._workers is not None
                self._workers.there(message)
            elif isinstance(message, frames.WorkerGone):
                assert self._workers is not None
                self._workers.gone(message.number)
            else:
                self._outputs.pop(message.number, None)

    # --- workers of other hosts ---------------------------------------------------------------

    def _feed(self, ask_id: int, feeding: Feeding) -> None:
        """Send a worker the large inputs of a request, or say that nobody waits for its answer."""
        if self._book.due_ns(ask_id) is None:
            self._send_inputs(feeding, None)
            return
        self._fed.feed(ask_id, feeding)
        self._feed_again(ask_id, feeding)

    def _feed_again(self, ask_id: int, feeding: Feeding) -> None:
        if (inputs := self._held.get(ask_id)) is not None:
            self._send_inputs(feeding, [each for each in inputs if len(each) >= DIRECT_BYTES])

    def _send_inputs(self, feeding: Feeding, tensors: Sequence[Buffer] | None) -> None:
        assert self._workers is not None
        if not self._workers.send(feeding, tensors) and self._data is not None:
            self._data.send(frames.encode_hand_on(*feeding, tensors))

    def _take_outputs(self, feeding: Feeding, outputs: Sequence[Buffer]) -> None:
        if (ask_id := self._fed.outputs_came(feeding, outputs)) is not None:
            self._answer_with(ask_id, outputs)

    def _take_told_apart(self, answered: frames.ToldOutputs, feeding: Feeding) -> None:
        """A request is answered, by outputs that come from their worker."""
        ask_id = answered.ask_id
        if self._book.due_ns(ask_id) is None:
            return
        if not self._fed.told(ask_id, feeding):
            self._begin_again(ask_id)
            return
        departure_ns = answered.expected_departure_ns
        self._told[ask_id] = departure_ns, answered.parameters, answered.lengths
        outputs = self._fed.outputs(ask_id)
        if outputs is not None:
            self._answer_with(ask_id, outputs)
        else:
            self._is_held.set()

    def _answer_with(self, ask_id: int, outputs: Sequence[Buffer]) -> None:
        departure_ns, parameters, lengths = self._told[ask_id]
        if (sent := self._take(ask_id)) is None:
            return
        if [len(tensor) for tensor in outputs] != list(lengths):
            sent[0].set_exception(
                ProtocolError(
                    f"outputs of {[len(tensor) for tensor in outputs]} bytes, expected {lengths}"
                )
            )
            return
        sent[0].set_result(ToldAnswer(outputs, departure_ns, parameters))

    def _broke(self, worker: int) -> None:
        """The way to a worker broke: what it may not have got goes by the controller."""
        fed, lost = self._fed.broke(worker)
        if self._workers is not None and self._workers.is_there(worker):
            for ask_id, feeding in fed:
                self._feed_again(ask_id, feeding)
        for ask_id in lost:
            self._begin_again(ask_id)

    def _begin_again(self, ask_id: int) -> None:
        """An answer is lost: the request is asked again, if it has slack."""
        if (sent := self._take(ask_id)) is not None:
            sent[0].begin()

    def _let_go_of_overdue(self) -> None:
        for ask_id in [*self._held, *self._fed.fed]:
            if self._book.due_ns(ask_id) is None:
                self._let_go(ask_id)

    def _give_up_outputs(self) -> None:
        """Refuse requests whose outputs have not come in time."""
        now_ns = self.clock()
        for ask_id in self._fed.awaited:
            due_ns = self._book.due_ns(ask_id)
            if due_ns is None or due_ns >= now_ns:
                continue
            if (sent := self._take(ask_id)) is not None:
                self.refused_at_door(Refusal.LATE)
                words = "its outputs did not come from their worker within the SLO"
                sent[0].set_exception(RefusedError(Refusal.LATE, words))

    # --- memory of this host ------------------------------------------------------------------

    def _take_memory(self, offer: frames.LentMemory, data: FrameSocket) -> None:
        """Map a worker's memory for outputs."""
        if not data.files:
            raise ProtocolError("memory that was not handed over")
        fd = data.files.popleft()
        try:
            memory = MappedMemory(offer.number, fd, offer.num_bytes)
        except OSError as error:
            log.warning("a worker's memory cannot be mapped: %s", error)
            return
        finally:
            os.close(fd)
        self._outputs[offer.number] = memory
        data.send(frames.encode(frames.Mapped(offer.number)))

    def _look(self, ask_id: int, place: int, num_bytes: int) -> Buffer:
        if place == APART:
            return b""
        memory = self._outputs.get(place >> PLACE_BITS)
        if memory is None:
            raise ProtocolError(f"request {ask_id}: outputs in memory that is not mapped")
        begin = place & (1 << PLACE_BITS) - 1
        self._looks[ask_id] += 1
        return memory.look(begin, num_bytes, functools.partial(self._return, ask_id))

    def _return(self, ask_id: int) -> None:
        """Nobody looks at an output any more. Called in any thread."""
        self._returned.append(ask_id)
        if threading.get_ident() == self._thread and self._data is not None:
            self._flush_soon()

    def _take_told(self, told: frames.Told, frame: Frame) -> None:
        book = self._book
        for answered, outputs in zip(
            told.answered, frames.cut_payload(frame, told.answered, self._look), strict=True
        ):
            if answered.sent is not None:
                self._take_told_apart(answered, answered.sent)
            elif (sent := self._take(answered.ask_id)) is not None:
                departure_ns = answered.expected_departure_ns
                sent[0].set_result(ToldAnswer(outputs, departure_ns, answered.parameters))
        for refused in told.refused:
            refusal = refused.refusal
            if refusal is Refusal.DRAINING:
                # The next controller may take it.
                self._recovering = True
            if self._recovering and refusal in (Refusal.DRAINING, Refusal.NO_WORKER):
                self._let_go(refused.ask_id)
                book.put_back(refused.ask_id)
                self._is_held.set()
            elif (sent := self._take(refused.ask_id, answered=False)) is not None:
                asker, name = sent
                asker.set_exception(
                    NoAnswerError(refusal, ModelId(name), refused.figures, detail=refused.detail)
                )
        for failure in told.failed:
            if (sent := self._take(failure.ask_id, answered=False)) is not None:
                sent[0].set_exception(_error(failure))
        for ask_id in told.freed:
            if ask_id in self._lent:
                inputs, num_lent = self._lent.pop(ask_id)
                if num_lent > 1:
                    self._lent[ask_id] = inputs, num_lent - 1
        for ask_id in told.stale:
            if (sent := self._take(ask_id, answered=False)) is not None:
                self._forget()
                sent[0].begin()

    def _take_described(self, described: frames.Described) -> None:
        key, askers = self._described.pop(described.query_id, (("", ""), []))
        if self._describing.get(key) == described.query_id:
            del self._describing[key]
        failure = described.failure
        if failure is not None:
            if described.not_yet and self._recovering:
                return  # They are held until the next generation, or until they are due.
            error = _error(failure)
            for asker in askers:
                if self._book.release(asker):
                    asker.set_exception(error)
            return
        servable = described.read()
        self._known[key] = _RemoteAnswerer(
            self, described.number, servable, is_held=described.is_held
        )
        if len(self._slos_ns) > _SLOS_MAX:
            self._slos_ns.clear()
        self._slos_ns[servable.name] = servable.slo_ns
        for asker in askers:
            if self._book.release(asker):
                asker.begin()

    def _take_beat(self, beat: frames.Beat) -> None:
        self._clock_sync.heard(
            sent_ns=beat.sent_ns, received_ns=self.clock(), peer_min_delta_ns=beat.min_delta_ns
        )
        if not beat.known:
            self._beat()
            return
        if beat.generation != self._peer_generation:
            self._peer_generation = beat.generation
            self._forget()
            self._resuming = bool(self._book.num_held)
        if beat.ready and self._recovering:
            self._recovering = False
            self._resuming = True
        if not self._joined:
            self._joined = True
            self.attached.set()
            self._resume()

    def _resume(self) -> None:
        self._resuming = False
        for asker in self._book.resume():
            asker.begin()

    def _forget(self) -> None:
        """Whatever was described may be described otherwise now."""
        self.generation += 1
        self._known.clear()
        self._spent.forget()
        self._said.clear()
        # What is on its way may be of before.
        self._describing.clear()

    # --- the link -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a controller attached, for good.

        Raises:
            ConfigError: it takes no front of this version.
        """
        loop = asyncio.get_running_loop()
        sweeper = loop.create_task(self._sweep())
        backoff_s = _BACKOFF_S
        told = ""
        try:
            async with LeaderSearch(
                self._controllers, self._open_channel, lambda: self.joining.metadata
            ) as search:
                while True:
                    address = await search.find()
                    reason, joined = search.problem, False
                    if address is not None:
                        reason, joined = await self._serve(search, address)
                    if joined:
                        told, backoff_s = "", _BACKOFF_S
                    if reason != told:
                        told = reason
                        name = address or ",".join(self._controllers)
                        log.warning("controller %s: %s; trying again", name, reason)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
        finally:
            sweeper.cancel()
            await asyncio.wait([sweeper])

    def _open_channel(self, address: str) -> Any:  # noqa: ANN401  grpc.aio's
        return self.joining.async_channel(address, options=_CHANNEL_OPTIONS)

    async def _serve(self, search: LeaderSearch, address: str) -> tuple[str, bool]:
        """Attach to a controller, until the connection ends or another leads; as `_attach`."""
        self._term = None
        try:
            # Files that are being renewed are not whole at each moment: the next attempt reads them again.
            self.shown, opened = self.joining.metadata, self._open_channel(address)
        except ConfigError as error:
            return str(error), False
        async with opened as channel:
            attached = asyncio.create_task(self._attach(channel, address))
            followed = asyncio.create_task(search.wait_for_successor(address, lambda: self._term))
            try:
                await asyncio.wait((attached, followed), return_when=asyncio.FIRST_COMPLETED)
                if attached.done():
                    return attached.result()
                successor, term = followed.result()
                self._fence.admits(term)
                return f"controller {successor} leads now", self._term is not None
            finally:
                for task in (attached, followed):
                    task.cancel()
                await asyncio.gather(attached, followed, return_exceptions=True)

    async def _attach(self, channel: Any, address: str) -> tuple[str, bool]:  # noqa: ANN401  grpc.aio's
        """Serve one connection; says why it ended, and whether it was of use."""
        # What comes back from now on is told over the connection that this begins.
        self._take_returned()
        request = pb.AttachFrontRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            knows_callers=self._knows_callers,
            still_looks_at=self._looks.elements(),
            instance=self._instance,
        )
        attach = channel.unary_unary(
            _ATTACH,
            request_serializer=pb.AttachFrontRequest.SerializeToString,
            response_deserializer=pb.AttachFrontResponse.FromString,
        )
        try:
            welcome = await attach(request, timeout=_ATTACH_LIMIT_S, metadata=self.shown)
            term = Term(welcome.lineage, welcome.generation)
            if not self._fence.admits(term):
                return (
                    f"it leads in generation {term.generation}, and another has followed it",
                    False,
                )
            self._term = term
            port, path = welcome.socket_port, welcome.socket_path
            if self._slabs.inputs is None:
                path = ""  # As on another host: nothing is shared.
            sock = await asyncio.to_thread(
                dial,
                host_of(address),
                port,
                path,
                limit_s=_ATTACH_LIMIT_S,
                tls=self.joining.tls_context(),
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
                raise ConfigError(
                    f"controller {address} takes no front: {error.details()}"
                ) from None
            return error.details() or error.code().name, False
        except ConfigError as error:
            return str(error), False
        except (OSError, TimeoutError) as error:
            return f"its socket cannot be reached: {error}", False
        sock.setblocking(False)
        with suppress(OSError):
            prepare(sock, silence_limit_ms=welcome.silence_limit_ms)
        self.default_slo_ns = welcome.default_slo_ns
        self.message_bytes_max = welcome.message_bytes_max
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        end = functools.partial(_end, ended)
        data = FrameSocket(sock, self._take_frames, end, peer="controller", takes_files=True)
        data.reader.header_bytes_max = HEADER_BYTES_MAX
        data.reader.payload_bytes_max = PAYLOAD_BYTES_MAX
        self._data, self.channel = data, channel
        self._workers = WorkerSockets(
            self._take_outputs,
            self._broke,
            outputs_bytes_max=PAYLOAD_BYTES_MAX,
            silence_limit_ms=welcome.silence_limit_ms,
            needs_tls=self.joining.speaks_tls,
        )
        self._reachable.set()
        data.send_now([greeting(welcome.token)])
        arena = self._slabs.inputs
        if arena is not None and data.hands_over:
            message = frames.encode_one(frames.LentMemory(0, arena.num_bytes))
            data.hand_over(message, (arena.fd,))
        beating = asyncio.get_running_loop().create_task(self._beats(welcome, ended))
        try:
            reason = await ended
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            data.close()
            joined = self._joined
            self._detach()
        return reason, joined

    def _detach(self) -> None:
        """The controller is gone: what is open is held."""
        self._data = self.channel = None
        self._reachable.clear()
        self._recovering = self._recovering or self._joined
        self._joined = False
        self._clock_sync = ClockSync()
        self._peer_generation = -1
        self._forget()
        self._described.clear()
        # Workers may still read, and nobody takes what they make of it.
        self._is_mapped = False
        self._lent.clear()
        self._outputs.clear()
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._held.clear()
        self._told.clear()
        self._fed = FedRequests()
        self._book.interrupt()
        self._is_held.set()

    async def _beats(self, welcome: pb.AttachFrontResponse, ended: asyncio.Future[str]) -> None:
        interval_ms = welcome.heartbeat_interval_ms
        self._silent_ticks = 0
        while not ended.done():
            self._beat()
            await asyncio.sleep(interval_ms / 1000)
            self._silent_ticks += 1
            silence_ms = self._silent_ticks * interval_ms
            if silence_ms > welcome.silence_limit_ms:
                _end(ended, f"silent for {silence_ms} ms")

    def _beat(self) -> None:
        if self._data is None:
            return
        if self._returned:
            self._flush_soon()
        refused, self._refused = dict(self._refused), Counter()
        denied, self._denied = dict(self._denied), Counter()
        early, self._early = tuple(self._early), []
        beat = frames.FrontBeat(
            self.clock(),
            self._clock_sync.min_delta_ns,
            refused,
            denied,
            self._spent.take_refused(),
            early,
        )
        self._data.send_now(frames.encode(beat))

    async def _sweep(self) -> None:
        """End requests whose time is over, whether there is a controller or not."""
        while True:
            if self._book.num_held or self._resuming or self._told:
                await asyncio.sleep(_SWEEP_S)
            else:
                self._is_held.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_SWEEP_S):
                        await self._is_held.wait()
            # Not at each generation: a controller that starts may have thousands in a second.
            if self._resuming and self._joined:
                self._resume()
            self._give_up_outputs()
            overdue = self._book.overdue(self.clock())
            if overdue:
                self._let_go_of_overdue()
            for asker in overdue:
                self.refused_at_door(Refusal.NO_WORKER)
                asker.set_exception(
                    RefusedError(
                        Refusal.NO_WORKER, "the controller could not be reached within the SLO"
                    )
                )


def _error(failure: frames.Failure) -> ToldStatusError:
    code = _STATUS_CODES.get(failure.code)
    if code is None:
        raise ProtocolError(f"status {failure.code}, which gRPC does not know")
    # As gRPC tells text from bytes.
    details = tuple(
        (name, each if name.endswith("-bin") else each.decode(errors="replace"))
        for name, each in failure.details.items()
    )
    return ToldStatusError(Status(code, failure.text, details))


def _end(ended: asyncio.Future[str], reason: str) -> None:
    if not ended.done():
        ended.set_result(reason)


def _nothing() -> None:
    pass
