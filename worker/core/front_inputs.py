"""Matches the inputs that fronts send with their Infers.

A front sends inputs directly to the worker (`clockwright.wire.frames`), so they come before their action, after
it, late, twice, or never. An action is whole when all its inputs have come. One that is not whole when its window
closes is refused, as if it had arrived too late. Inputs of closed requests are dropped: the numbers of actions
rise, so an action that is neither waiting nor new is over.

No I/O, no clock, no threads: these are in `worker.front_sockets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clockwright.errors import ProtocolError
from clockwright.units import ActionId
from clockwright.wire.actions import FromFronts, Infer
from clockwright.wire.bulk import Buffer, total_bytes

# The least size of an entry.
_ENTRY_BYTES = 256


@dataclass(slots=True)
class WholeInfer:
    """An Infer with all its inputs."""

    action: Infer
    payload: Sequence[Buffer]


class _Waiting:
    """An Infer that is not whole."""

    __slots__ = ("action", "awaited", "fronts", "missing", "payload")

    def __init__(self, action: Infer, payload: Sequence[Buffer], fronts: FromFronts) -> None:
        self.action = action
        self.payload = list(payload)
        self.fronts = fronts.fronts
        self.awaited = fronts.awaited
        num_inputs = len(payload) // len(action.rows)
        #: By request, the numbers of its inputs that have not come.
        self.missing: dict[int, list[int]] = {}
        for number in fronts.awaited:
            self.missing.setdefault(number // num_inputs, []).append(number)


class FrontInputs:
    """The waiting Infers and early inputs of one connection to a controller."""

    def __init__(self) -> None:
        self._waiting: dict[ActionId, _Waiting] = {}
        self._last_id = -1
        #: By front, action and request.
        self._early: dict[int, dict[tuple[int, int], Sequence[Buffer] | None]] = {}
        self._early_bytes: dict[int, int] = {}

    @property
    def num_waiting(self) -> int:
        """Infers that are not whole."""
        return len(self._waiting)

    @property
    def next_due_ns(self) -> int | None:
        """When the first window of a waiting Infer closes. Returns None if no Infer waits."""
        latest_ns = [waiting.action.latest_ns for waiting in self._waiting.values()]
        return min(latest_ns) if latest_ns else None

    def early_bytes(self, front: int) -> int:
        """Bytes of a front's inputs whose actions have not come."""
        return self._early_bytes.get(front, 0)

    def take_action(
        self, action: Infer, payload: Sequence[Buffer], fronts: FromFronts
    ) -> WholeInfer | None:
        """Take an Infer in.

        Args:
            action: newer than all before, or inputs that came before it are lost.
            payload: its inputs; those that its fronts send are empty.
            fronts: the front that sends each request's inputs.

        Returns:
            The Infer, if it is whole.

        Raises:
            ProtocolError: it waits here already.
        """
        action_id = action.action_id
        if action_id in self._waiting:
            raise ProtocolError(f"action {action_id} is sent a second time")
        self._last_id = max(self._last_id, action_id)
        waiting = _Waiting(action, payload, fronts)
        self._waiting[action_id] = waiting
        for front in set(fronts.fronts) & self._early.keys():
            for (early_id, index), tensors in self._take_early(front):
                if early_id == action_id:
                    self._fill(waiting, front, index, tensors)
        return self._whole(waiting)

    def take_inputs(
        self, front: int | None, action_id: int, index: int, tensors: Sequence[Buffer] | None
    ) -> WholeInfer | None:
        """Take a front's inputs to one request in.

        Args:
            front: which sent them. None if the controller has handed them on.
            action_id: the action.
            index: the request's number in it.
            tensors: the inputs that the action awaits for it, in their order. None if no client waits for the answer;
                zeros take their place.

        Returns:
            The Infer, if it is whole with them.

        Raises:
            ProtocolError: they are not what the action awaits of this front.
        """
        waiting = self._waiting.get(ActionId(action_id))
        if waiting is not None:
            self._fill(waiting, front, index, tensors)
            return self._whole(waiting)
        if front is not None and action_id > self._last_id:
            early = self._early.setdefault(front, {})
            if (action_id, index) not in early:
                early[action_id, index] = tensors
                self._early_bytes[front] = self.early_bytes(front) + _size(tensors)
        return None

    def front_gone(self, front: int) -> list[WholeInfer]:
        """Note that a front is gone. Returns the Infers that are whole without it."""
        self._early.pop(front, None)
        self._early_bytes.pop(front, None)
        found = []
        for waiting in list(self._waiting.values()):
            for index in [i for i in waiting.missing if waiting.fronts[i] == front]:
                self._fill(waiting, front, index, None)
            if whole := self._whole(waiting):
                found.append(whole)
        return found

    def withdraw(self, action_id: ActionId) -> bool:
        """Drop an Infer that is not whole; says whether there was one."""
        return self._waiting.pop(action_id, None) is not None

    def overdue(self, now_ns: int) -> list[Infer]:
        """Give up the Infers whose windows have closed."""
        late = [each.action for each in self._waiting.values() if each.action.latest_ns < now_ns]
        for action in late:
            del self._waiting[action.action_id]
        return late

    def _take_early(self, front: int) -> list[tuple[tuple[int, int], Sequence[Buffer] | None]]:
        """Take out what a front has sent for actions up to the last."""
        early = self._early[front]
        due = [key for key in early if key[0] <= self._last_id]
        found = [(key, early.pop(key)) for key in due]
        self._early_bytes[front] -= sum(_size(tensors) for _, tensors in found)
        if not early:
            del self._early[front], self._early_bytes[front]
        return found

    def _fill(
        self, waiting: _Waiting, front: int | None, index: int, tensors: Sequence[Buffer] | None
    ) -> None:
        action_id = waiting.action.action_id
        if index >= len(waiting.fronts) or front not in (None, waiting.fronts[index]):
            raise ProtocolError(f"action {action_id}: request {index} is not of front {front}")
        numbers = waiting.missing.pop(index, None)
        if numbers is None:
            return  # They came by another way already.
        lengths = [waiting.awaited[number] for number in numbers]
        if tensors is None:
            tensors = [bytes(length) for length in lengths]
        elif [len(tensor) for tensor in tensors] != lengths:
            waiting.missing[index] = numbers
            raise ProtocolError(
                f"action {action_id}, request {index}: inputs of"
                f" {[len(tensor) for tensor in tensors]} bytes, expected {lengths}"
            )
        for number, tensor in zip(numbers, tensors, strict=True):
            waiting.payload[number] = tensor

    def _whole(self, waiting: _Waiting) -> WholeInfer | None:
        if waiting.missing:
            return None
        del self._waiting[waiting.action.action_id]
        return WholeInfer(waiting.action, waiting.payload)


def _size(tensors: Sequence[Buffer] | None) -> int:
    return _ENTRY_BYTES + total_bytes(tensors or ())
