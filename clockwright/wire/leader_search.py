"""Finds the leader among several controllers: asks all addresses in parallel, repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from clockwright.errors import ConfigError
from clockwright.v1 import leadership_pb2 as pb
from clockwright.wire.controller_file import FILE, read_addresses
from clockwright.wire.leadership import Leaders, Term

METHOD = "/clockwright.v1.LeadershipService/GetTerm"

#: Options of the channels: a restarted controller is found as soon as it listens.
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Time limit of an attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 2000),
)

# Pause between two questions; part of the time that a takeover costs.
_PAUSE_S = 0.1
# A leader answers sooner.
_LIMIT_S = 1.0

_NONE_LEADS = "none leads"


class LeaderSearch:
    """Knows the controllers' addresses, and holds a channel to each while there are several.

    A channel that failed is not used again, so that the next one has the current certificate.
    """

    def __init__(
        self,
        controller: str,
        open_channel: Callable[[str], Any],
        shown: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """Ask no controller yet. Where they are: as for `read_addresses`; a file is read again each time.

        A single controller is not asked. `open_channel` makes grpc.aio's channel with `OPTIONS`, and `shown` gives the
        headers with credentials; either may raise ConfigError.
        """
        self._shown = shown
        #: Why no leader was found.
        self.problem = _NONE_LEADS
        self._controller = controller
        self._leaders = Leaders(() if controller.startswith(FILE) else read_addresses(controller))
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
        """Find the leader. Returns None if no controller leads at the moment."""
        if self._controller.startswith(FILE):
            try:
                # Orchestrators keep it on storage that all machines share, which may hang.
                addresses = await asyncio.to_thread(read_addresses, self._controller)
            except ConfigError as error:
                self.problem = str(error)
                return None
            self._leaders = Leaders(addresses)
        if len(self._leaders.addresses) == 1:
            return self._leaders.addresses[0]
        return await self._ask_all(lambda: self._leaders.leader)

    async def wait_for_successor(
        self, address: str, term: Callable[[], Term | None]
    ) -> tuple[str, Term]:
        """Wait for another controller than that at `address`, and return it.

        It leads in a later generation than `term` gives; None: that is not known yet.
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
        """Ask all addresses, until the wanted one is known or all have answered."""
        # Earlier answers may be outdated.
        self._leaders = Leaders(self._leaders.addresses)
        self.problem = _NONE_LEADS
        asking = {asyncio.create_task(self._ask(address)) for address in self._leaders.addresses}
        waiting = asking
        try:
            while waiting and wanted() is None:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A controller that does not answer, because it was stopped, does not delay the others.
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
            # A file that is incomplete at the moment.
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
