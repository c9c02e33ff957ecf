"""A front's sockets to workers with which it shares no memory: inputs out, outputs in, past the controller.

The controller says where a worker listens. The front dials it until the controller says that it is gone. While it
cannot be reached, its inputs and outputs go through the controller.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

from clockwright.wire.bulk import Buffer
from clockwright.wire.data_socket import dial, pinned_context, prepare
from clockwright.wire.frame_headers import HEADER_BYTES_MAX
from clockwright.wire.frame_socket import FrameSocket
from clockwright.wire.frames import Frame, decode_outputs, encode_inputs, greeting
from controller.front.remote.fed_requests import Feeding
from controller.front.remote.link_frames import WorkerThere

log = logging.getLogger(__name__)

_DIAL_LIMIT_S = 5.0
# Between attempts to reach a worker.
_BACKOFF_S, _BACKOFF_S_MAX = 0.02, 2.0
# A worker that leaves so many bytes of inputs unread counts as lost. They belong to open requests.
_UNREAD_BYTES_MAX = 256 << 20


@dataclass(eq=False)
class WorkerSockets:
    """The workers that one controller has announced."""

    #: Given outputs as they come.
    take: Callable[[Feeding, Sequence[Buffer]], object]
    #: Hears of a worker that cannot be reached any more.
    broke: Callable[[int], object]
    _: KW_ONLY
    #: Bytes of the outputs of one request.
    outputs_bytes_max: int
    silence_limit_ms: int
    #: Workers without TLS are left out, because the controller uses it.
    needs_tls: bool

    def __post_init__(self) -> None:
        self._dialling: dict[int, asyncio.Task[None]] = {}
        #: Workers that are gone, and whose last outputs may still be on their way.
        self._leaving: set[asyncio.Task[None]] = set()
        self._sockets: dict[int, FrameSocket] = {}

    @property
    def num_known(self) -> int:
        """Workers that the controller has announced."""
        return len(self._dialling)

    @property
    def num_reached(self) -> int:
        """Workers that can be reached."""
        return len(self._sockets)

    def is_there(self, worker: int) -> bool:
        """Whether the controller has announced a worker, which is not gone."""
        return worker in self._dialling

    def there(self, worker: WorkerThere) -> None:
        """Dial a worker until it is gone."""
        self._dialling[worker.number] = asyncio.create_task(self._keep(worker))

    def gone(self, number: int) -> None:
        """Stop dialling a worker; outputs that it has sent still come."""
        dialling = self._dialling.pop(number, None)
        if dialling is None:
            return
        if number in self._sockets:
            self._leaving.add(dialling)
            dialling.add_done_callback(self._leaving.discard)
        else:
            dialling.cancel()
            self.broke(number)

    def send(self, feeding: Feeding, tensors: Sequence[Buffer] | None) -> bool:
        """Send inputs, or None if the request is withdrawn. Returns whether the worker can be reached."""
        worker, action_id, index = feeding
        data = self._sockets.get(worker)
        if data is None or worker not in self._dialling:
            return False
        data.send(encode_inputs(action_id, index, tensors))
        return True

    def close(self) -> None:
        """Forget all workers."""
        for task in (*self._dialling.values(), *self._leaving):
            task.cancel()
        for data in self._sockets.values():
            data.close()
        self._dialling.clear()
        self._sockets.clear()

    async def _keep(self, worker: WorkerThere) -> None:
        backoff_s = _BACKOFF_S
        told = False
        while True:
            begun = asyncio.get_running_loop().time()
            reason = await self._connect(worker)
            if worker.number not in self._dialling:
                return
            if asyncio.get_running_loop().time() - begun > _BACKOFF_S_MAX:
                backoff_s, told = _BACKOFF_S, False
            if not told and backoff_s > 4 * _BACKOFF_S:
                told = True
                log.warning(
                    "worker at %s:%d: %s; its tensors go by the controller meanwhile",
                    *(worker.host, worker.port, reason),
                )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)

    async def _connect(self, worker: WorkerThere) -> str:
        """Serve one connection; says why it ended."""
        if self.needs_tls and not worker.certificate_sha256:
            return "speaks no TLS"
        try:
            sock = await asyncio.to_thread(
                dial,
                worker.host,
                worker.port,
                limit_s=_DIAL_LIMIT_S,
                tls=pinned_context() if worker.certificate_sha256 else None,
                certificate_sha256=worker.certificate_sha256,
            )
        except OSError as error:
            return f"cannot be reached: {error}"
        sock.setblocking(False)
        with suppress(OSError):
            prepare(sock, silence_limit_ms=self.silence_limit_ms)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        data = FrameSocket(
            sock,
            functools.partial(self._take_frames, worker.number),
            functools.partial(self._ended, worker.number, ended),
            peer="worker",
            unsent_bytes_max=_UNREAD_BYTES_MAX,
        )
        data.reader.header_bytes_max = HEADER_BYTES_MAX
        data.reader.payload_bytes_max = self.outputs_bytes_max
        data.send_now([greeting(worker.token)])
        self._sockets[worker.number] = data
        try:
            return await ended
        finally:
            data.close()

    def _ended(self, number: int, ended: asyncio.Future[str], reason: str) -> None:
        self._sockets.pop(number, None)
        if not ended.done():
            ended.set_result(reason)
        self.broke(number)

    def _take_frames(self, number: int, received: Sequence[Frame]) -> None:
        for frame in received:
            outputs, tensors = decode_outputs(frame)
            self.take((number, outputs.action_id, outputs.index), tensors)
