"""Entrances of event loops that have no time, or none yet: a test says when they have."""

from __future__ import annotations

from typing_extensions import override

from controller.front.admission.entrance import Entrance, Waiting
from controller.front.http.http2_server import Http2Server


class FullEntrance(Entrance):
    """Refuses every request."""

    @override
    def has_time(self, now_ns: int, arrival_ns: int, *, judged: bool = False) -> bool:
        return False

    @override
    def may_enter(
        self, source: object, arrival_ns: int, slo_ns: int, now_ns: int, besides: int = 0
    ) -> bool:
        return False


class HeldEntrance(Entrance):
    """Has requests with an SLO of a minute or more wait until it is opened, and refuses others."""

    held: list[Waiting]
    opened = False

    @override
    def has_time(self, now_ns: int, arrival_ns: int, *, judged: bool = False) -> bool:
        return self.opened

    @override
    def may_enter(
        self, source: object, arrival_ns: int, slo_ns: int, now_ns: int, besides: int = 0
    ) -> bool:
        return slo_ns >= 60_000_000_000

    @override
    def enter(
        self,
        source: object,
        request: Waiting,
        arrival_ns: int,
        slo_ns: int,
        *,
        judged: bool = False,
    ) -> bool:
        if not judged and not self.may_enter(source, arrival_ns, slo_ns, 0):
            return False
        self._waiting().append(request)
        self.num_waiting += 1
        return True

    def open(self) -> None:
        """Begin with all that wait and were not given up."""
        self.opened = True
        held, self.held = self._waiting(), []
        self.num_waiting = 0
        for request in held:
            if not request.over:
                request.begin_waiting()

    @classmethod
    def of(cls, server: Http2Server | None) -> HeldEntrance:
        """Find the one of a server."""
        assert server is not None
        assert isinstance(server.entrance, cls)
        return server.entrance

    def _waiting(self) -> list[Waiting]:
        if not hasattr(self, "held"):
            self.held = []
        return self.held
