"""Observers of single requests in a run; not compiled, so that any class may implement it."""

from __future__ import annotations

from typing import Protocol

from clockwright.errors import Refusal
from controller.core import Scheduler
from controller.core.events import RefuseRequest, RequestArrived


class Watch(Protocol):
    """Observes single requests in a run."""

    def arrived(self, request: RequestArrived, /) -> None:
        """A request is about to be opened, and may be changed."""

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler, /) -> None:
        """The scheduler refuses a request, and can be asked about it now."""

    def over(self, request: RequestArrived, refusal: Refusal | None, /) -> None:
        """A request is answered in time, or not."""
