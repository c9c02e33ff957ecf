"""Finds the controller that leads, of several: asks at each address, at once, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from clockwright.errors import ConfigError
from clockwright.leadership import Leaders, Term
from clockwright.v1 import leadership_pb2 as pb

METHOD = "/clockwright.v1.LeadershipService/GetTerm"

#: Options of the channels by which it is asked: a controller that starts again is found as soon as it listens.
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # This one is how long an attempt may take.
    ("grpc.min_reconnect_backoff_ms", 2000),
)

# Between two questions; a part of what it costs that a leader is followed by another.
_PAUSE_S = 0.1
# A controller that leads answers sooner.
_LIMIT_S = 1.0

_NONE_LEADS = "none leads"


class LeaderSearch:
    """Knows the controllers' addresses, and holds a channel to each while there are several.

    A channel that failed is not used again: the next one shows the certificate that there is by then.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        open_channel: Callable[[str], Any],
        shown: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """Ask nobody yet.

        Args:
            addresses: HOST:PORT of each. A single one is dialled without being asked.
            open_channel: makes grpc.aio's channel to one, with `OPTIONS`; may raise ConfigError.
            shown: gives the headers by which they know who asks; likewise.
        """
        self._shown = shown
        #: Why nobody was found, in words.
        self.problem = _NONE_LEADS
        self._leaders = Leaders(addresses)
        self._open_channel = open_channel
        self._channels: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for address in list(self._channels):
            await self._hang_up(address)

    async def find(self) -> str | None:
        """Say who leads; None: nobody says so, at the moment."""
        if len(self._leaders.addresses) == 1:
            return self._leaders.addresses[0]
        return await self._ask_all(lambda: self._leaders.leader)

    async def wait_for_successor(
        self, address: str, term: Callable[[], Term | None]
    ) -> tuple[str, Term]:
        """Say which other controller leads in a later generation, once one does.

        Args:
            address: that of the controller that is dialled.
            term: its generation; None while it has said nothing.
        """
        if len(self._leaders.addresses) == 1:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(_PAUSE_S)
            successor = await self._ask_all(lambda: self._successor(address, term()))
            if successor is not None:
                return successor, self._leaders.term(successor)

    def _successor(self, address: str, term: Term | None) -> str | None:
        if term is not None:
            return self._leaders.successor(term)
        leader = self._leaders.leader
        return None if leader == address else leader

    async def _ask_all(self, wanted: Callable[[], str | None]) -> str | None:
        """Ask at all addresses, until it is known who is wanted or all have answered."""
        # What was said before may hold no more.
        self._leaders = Leaders(self._leaders.addresses)
        self.problem = _NONE_LEADS
        asking = {asyncio.create_task(self._ask(address)) for address in self._leaders.addresses}
        waiting = asking
        try:
            while waiting and wanted() is None:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # One that does not answer, because it was stopped, keeps nobody from those who do.
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return wanted()

    async def _ask(self, address: str) -> None:
        try:
            shown = self._shown()
            if address not in self._channels:
                self._channels[address] = self._open_channel(address)
            ask = self._channels[address].unary_unary(
                METHOD,
                request_serializer=pb.GetTermRequest.SerializeToString,
                response_deserializer=pb.GetTermResponse.FromString,
            )
            answer = await ask(pb.GetTermRequest(), timeout=_LIMIT_S, metadata=shown)
        except ConfigError as error:
            # A file that is not whole at the moment.
            self.problem = str(error)
            self._leaders.heard(address, None)
        except grpc.aio.AioRpcError as error:
            self._leaders.heard(address, None)
            # An attempt to connect may take longer than a question, and goes on.
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                await self._hang_up(address)
        except asyncio.CancelledError:
            self._leaders.heard(address, None)
            raise
        else:
            term = Term(answer.lineage, answer.generation)
            self._leaders.heard(address, term if answer.leading else None)

    async def _hang_up(self, address: str) -> None:
        await self._channels.pop(address).close()
