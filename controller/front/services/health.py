"""gRPC's own health service, which Kubernetes and gRPC's load balancers ask: now, or from now on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from google.protobuf.message import Message

from clockwright.errors import Refusal, RefusedError, UnknownModelError
from clockwright.foreign import quote
from clockwright.wire.bulk import check_fields
from controller.access.caller import Caller
from controller.front.methods import HEALTH, INFERENCE, METHODS, CallStream, Method, bind
from controller.front.oip.health_messages import NOT_SERVING, SERVICE_UNKNOWN, SERVING

#: Any client may watch, and each watcher keeps a call open: so many at once.
WATCHERS_MAX: Final = 64
#: How often a watcher looks, in seconds: what changes and changes back between two looks is not told.
WATCH_INTERVAL_S: Final = 0.5

_Request: Final = METHODS[f"/{HEALTH}/Watch"].request


class HealthService:
    """Says whether a server serves, as often as that changes."""

    def __init__(
        self,
        is_serving: Callable[[], Awaitable[bool]],
        *,
        names: Sequence[str] = (INFERENCE,),
        lives: str = INFERENCE,
    ) -> None:
        """Answer for a server, and services of it by name.

        `is_serving` is asked for each call, and again and again for those who watch. The name `lives` serves as long as
        the process lives.
        """
        self._is_serving = is_serving
        self._names = {"", *names}
        self._lives = lives
        self._num_watchers = 0
        self._leaving = asyncio.Event()

    def handlers(self) -> dict[Method, Any]:
        """What answers the methods of the service."""
        return bind(HEALTH, self)

    def leave(self) -> None:
        """The server stops: tell those who watch, and let them go."""
        self._leaving.set()

    async def check(self, request: Any, _caller: Caller) -> Message:  # noqa: ANN401
        """Say whether the server serves."""
        is_serving = await self._serves(request.service)
        if is_serving is None:
            name, known = quote(request.service), " or ".join(sorted(self._names - {""}))
            raise UnknownModelError(f"there is no service {name}, expected {known}")
        return SERVING if is_serving else NOT_SERVING  # type: ignore[no-any-return]

    async def _serves(self, name: str) -> bool | None:
        """Whether a service serves. Returns None if there is no such service."""
        if name in self._names:
            return await self._is_serving()
        return True if name == self._lives else None

    async def watch(self, stream: CallStream, _caller: Caller) -> None:
        """Tell the status at once and whenever it is another, until the client goes or the server."""
        data = await stream.read() or b""
        check_fields(data)
        request: Any = _Request.FromString(data)
        if self._num_watchers >= WATCHERS_MAX:
            text = f"found {WATCHERS_MAX} who watch the health, expected fewer"
            raise RefusedError(Refusal.OVERLOADED, text)
        self._num_watchers += 1
        told = None
        try:
            while True:
                is_over = self._leaving.is_set()
                is_serving = await self._serves(request.service)
                # As gRPC wants it, a service that is not known is no error: it may come later.
                status = SERVICE_UNKNOWN
                if is_serving is not None:
                    status = SERVING if is_serving and not is_over else NOT_SERVING
                if status is not told:
                    await stream.write(status.SerializeToString())
                    told = status
                if is_over:
                    return
                try:
                    async with asyncio.timeout(WATCH_INTERVAL_S):
                        await self._leaving.wait()
                except TimeoutError:
                    pass
        finally:
            self._num_watchers -= 1
