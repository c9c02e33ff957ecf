"""The worker's end of the sockets by which fronts send inputs and get outputs, past the controller.

The controller says which fronts may connect, and with which token (`ExpectFront`). An Infer with inputs of fronts waits
here until its inputs are complete (`worker.core.front_inputs`); only then do the lanes and the controller count it as
received. If a front cannot reach this worker, its inputs come through the controller, and its outputs go there.

Memory is bounded. If a front sends inputs long before their action, or for actions that do not come, this worker stops
reading from it until they do. It closes the connection of a front that leaves too much of its outputs unread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from clockwright.errors import ProtocolError
from clockwright.units import ActionId, format_ns
from clockwright.wire.actions import Action, ActionError, FromFronts, Infer, Result
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import HEADER_BYTES_MAX, Inputs
from clockwright.wire.frame_socket import FrameSocket, SocketListener
from clockwright.wire.frames import DIRECT_BYTES, Frame, decode_inputs, encode_outputs
from clockwright.wire.worker_messages import ExpectFront
from worker.core.front_inputs import FrontInputs, WholeInfer

logger = logging.getLogger(__name__)

# Bytes of inputs of one front that may wait for their actions. They come some microseconds early.
_EARLY_BYTES_MAX = 64 << 20
# A front that leaves this many bytes of outputs unread counts as lost.
_UNREAD_BYTES_MAX = 256 << 20


class Submit(Protocol):
    """Takes an Infer that is whole; called in any thread."""

    def __call__(
        self,
        action: Action,
        payload: Sequence[Buffer] = (),
        room: memoryview | None = None,
        *,
        inline: bool = True,
    ) -> None:
        """Do what `LaneThreads.submit` does."""


class FrontSockets:
    """The fronts that one controller has announced, on one connection to it."""

    def __init__(
        self,
        listener: SocketListener,
        submit: Submit,
        refuse: Callable[[Result], None],
    ) -> None:
        """Expect no front yet. `submit` takes an Infer that is whole, `refuse` the result of one that never will be."""
        self._listener = listener
        self._submit = submit
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._inputs = FrontInputs()
        #: The fronts of each Infer that has some, until its outcome.
        self._fronts: dict[ActionId, tuple[int, ...]] = {}
        self._tokens: dict[int, bytes] = {}
        self._sockets: dict[int, FrameSocket] = {}
        #: Fronts that this worker does not read from at the moment.
        self._paused: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Infers whose inputs are not whole."""
        return self._inputs.num_waiting

    # --- in any thread ------------------------------------------------------------------------

    def take(self, action: Infer, payload: Sequence[Buffer], fronts: FromFronts) -> None:
        """Take an Infer in; it is submitted once it is whole.

        Raises ProtocolError if the controller has sent it before.
        """
        self._fronts[action.action_id] = fronts.fronts
        with self._lock:
            whole = self._inputs.take_action(action, payload, fronts)
        if whole is not None:
            self._submit(whole.action, whole.payload)
        if whole is None or self._paused:
            self._loop.call_soon_threadsafe(self._look)

    def hand_on(self, inputs: Inputs, tensors: Sequence[Buffer]) -> None:
        """Take inputs that came by the controller. Raises ProtocolError if no action awaits such."""
        self._take_inputs(None, inputs, tensors)

    def withdraw(self, action_id: ActionId) -> bool:
        """Drop an Infer that is not whole, and report it. Returns whether there was one."""
        with self._lock:
            found = self._inputs.withdraw(action_id)
        if found:
            self._end(action_id, ActionError.WITHDRAWN, "taken back before it began")
        return found

    def send_outputs(
        self, action_id: ActionId, outputs: Sequence[Buffer]
    ) -> tuple[Sequence[Buffer], Sequence[int]]:
        """Send large outputs of an Infer, per request and per output, to the fronts that wait for them.

        Returns the outputs that go to the controller, and the numbers of the requests whose outputs do not.
        """
        fronts = self._fronts.pop(action_id, None)
        if fronts is None or not outputs:
            return outputs, ()
        num_outputs = len(outputs) // len(fronts)
        rest: list[Buffer] = []
        sent = []
        for index, front in enumerate(fronts):
            own = outputs[index * num_outputs : (index + 1) * num_outputs]
            data = self._sockets.get(front)
            if data is None or max(map(len, own)) < DIRECT_BYTES:
                rest += own
            else:
                sent.append(index)
                # Lanes use their memory again; what waits for the socket stays as it is.
                frame = encode_outputs(action_id, index, own)
                self._loop.call_soon_threadsafe(data.send, frame)
        return rest, sent

    # --- in the event loop --------------------------------------------------------------------

    def expect(self, front: ExpectFront) -> None:
        """Let a front come."""
        if not self._is_closed:
            self._tokens[front.number] = front.token
            taken = functools.partial(self._dialled, front)
            self._listener.expect(taken, token=front.token)

    def front_gone(self, number: int) -> None:
        """Forget a front, which sends nothing any more."""
        if (token := self._tokens.pop(number, None)) is not None:
            self._listener.forget(token)
        if (data := self._sockets.pop(number, None)) is not None:
            data.close()
        with self._lock:
            found = self._inputs.front_gone(number)
        self._submit_all(found)

    def close(self) -> None:
        """Close the connections to all fronts, and drop what they wait for."""
        self._is_closed = True
        for number in list(self._tokens):
            self._listener.forget(self._tokens.pop(number))
        for data in self._sockets.values():
            data.close()
        self._sockets.clear()
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._inputs = FrontInputs()
        self._fronts.clear()

    def _dialled(self, front: ExpectFront, sock: socket.socket) -> None:
        number = front.number
        if (old := self._sockets.pop(number, None)) is not None:
            old.close()  # The front has noticed before us that it is broken.
        data = FrameSocket(
            sock,
            functools.partial(self._take_frames, number),
            functools.partial(self._lost, number),
            peer="front",
            unsent_bytes_max=_UNREAD_BYTES_MAX,
        )
        data.reader.header_bytes_max = HEADER_BYTES_MAX
        data.reader.payload_bytes_max = front.inputs_bytes_max
        self._sockets[number] = data
        logger.info("front %d has come", number)

    def _lost(self, number: int, reason: str) -> None:
        # What it has sent in vain, it sends again by the controller.
        logger.info("front %d: %s", number, reason)
        self._sockets.pop(number, None)

    def _take_frames(self, number: int, frames: Sequence[Frame]) -> None:
        for frame in frames:
            inputs, tensors = decode_inputs(frame)
            self._take_inputs(number, inputs, tensors)
        data = self._sockets.get(number)
        if data is not None and self._inputs.early_bytes(number) > _EARLY_BYTES_MAX:
            self._paused.add(number)
            data.pause()

    def _take_inputs(self, number: int | None, inputs: Inputs, tensors: Sequence[Buffer]) -> None:
        with self._lock:
            whole = self._inputs.take_inputs(
                number,
                inputs.action_id,
                inputs.index,
                None if inputs.lengths is None else tensors,
            )
        if whole is not None:
            self._submit_all((whole,))

    def _submit_all(self, found: Sequence[WholeInfer]) -> None:
        for whole in found:
            try:
                # A step on the event loop's thread could keep heartbeats waiting for the device.
                self._submit(whole.action, whole.payload, inline=False)
            except ProtocolError as error:
                # The controller is to blame, and no front.
                self._end(whole.action.action_id, ActionError.BAD_INPUT, str(error))

    def _look(self) -> None:
        """Refuse what is overdue, and look again when the next is; listen to those whose actions have come."""
        if self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = time.monotonic_ns()
        with self._lock:
            late = self._inputs.overdue(now_ns)
            due_ns = self._inputs.next_due_ns
        for action in late:
            words = (
                f"{format_ns(now_ns - action.latest_ns)} too late waiting for inputs of its fronts"
            )
            self._end(action.action_id, ActionError.TOO_LATE, words)
        for number in list(self._paused):
            if self._inputs.early_bytes(number) <= _EARLY_BYTES_MAX:
                self._paused.discard(number)
                if (data := self._sockets.get(number)) is not None:
                    data.resume()
        if due_ns is not None:
            self._timer = self._loop.call_later((due_ns + 1 - now_ns) / 1e9, self._look)

    def _end(self, action_id: ActionId, error: ActionError, message: str) -> None:
        self._fronts.pop(action_id, None)
        now_ns = time.monotonic_ns()
        self._refuse(Result(action_id=action_id, error=error, message=message, received_ns=now_ns))
