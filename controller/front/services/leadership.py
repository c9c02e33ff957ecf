"""Says whether this controller leads, to workers and fronts that know several."""

from __future__ import annotations

from collections.abc import Callable

from clockwright.v1 import leadership_pb2 as pb
from clockwright.wire.leadership import Term
from controller.access.caller import Caller


class LeadershipService:
    """Answers `GetTerm`."""

    def __init__(self, term: Callable[[], Term | None]) -> None:
        """`term`: gives the generation in which this controller leads; None: it does not lead."""
        self._term = term

    async def get_term(self, _: pb.GetTermRequest, _caller: Caller) -> pb.GetTermResponse:
        """Say in which generation this controller leads, if it does."""
        own = self._term()
        if own is None:
            return pb.GetTermResponse()
        return pb.GetTermResponse(leading=True, lineage=own.lineage, generation=own.generation)
