"""Handles of tensors whose bytes pass between a front and a worker, unread by the controller.

The runtime and the ledger treat a handle like a tensor, because they use only its length. The link to the worker
(`worker_link`) and the link to the front (`front.remote.front_link`) tell handles and tensors apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clockwright.wire.bulk import Buffer


class Holder(Protocol):
    """A front that has inputs, and waits for outputs, as a worker's link sees it."""

    @property
    def number(self) -> int:
        """Another for each front."""

    @property
    def is_local(self) -> bool:
        """Whether it shares memory with the workers of this host."""

    def feed(self, ask_id: int, worker: int, action_id: int, index: int) -> None:
        """Have it send the inputs of a request to the worker of a number, for an action.

        `index` is the request's in that.
        """


class HeldInput:
    """An input of a front's request."""

    __slots__ = ("ask_id", "content", "holder", "num_bytes")

    def __init__(self, holder: Holder, ask_id: int, num_bytes: int, content: Buffer | None) -> None:
        self.holder = holder
        self.ask_id = ask_id
        self.num_bytes = num_bytes
        #: The tensor, where it is small or lies in memory of this host; None: its front alone has it.
        self.content = content

    def __len__(self) -> int:
        return self.num_bytes


class SentOutput:
    """An output that a worker has sent to the front that waits for it."""

    __slots__ = ("action_id", "index", "num_bytes", "worker")

    def __init__(self, worker: int, action_id: int, index: int, num_bytes: int) -> None:
        self.worker = worker
        self.action_id = action_id
        self.index = index
        self.num_bytes = num_bytes

    def __len__(self) -> int:
        return self.num_bytes


def has_held(tensors: Sequence[object]) -> bool:
    """Whether any of these is held by a front."""
    return HeldInput in map(type, tensors)
