"""Inputs that fronts bring past the controller: early, late, twice or never, wrong, and too many of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clockwright.units import NS_PER_MS
from clockwright.wire import frame_headers, frames
from clockwright.wire import worker_messages as messages
from clockwright.wire.actions import ActionError, Infer
from tests.kit.scripted_controller import Stream, drain, infer, load, play
from tests.kit.worker_models import relu_file
from worker import front_sockets

#: 80 kB in, and as much out.
VALUES = 20_000
ROW_BYTES = 4 * VALUES
INPUTS_BYTES_MAX = 1 << 20


def row(seed: int) -> bytes:
    return np.random.default_rng(seed).standard_normal(VALUES, np.float32).tobytes()


def answer(inputs: bytes) -> bytes:
    return np.maximum(np.frombuffer(inputs, np.float32), 0).tobytes()


class Front:
    """A front by hand."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.token = bytes([number]) * frame_headers.TOKEN_BYTES
        self._cut = frames.FrameReader()
        self._arrived: list[frames.Frame] = []

    async def dial(self, stream: Stream) -> None:
        """Be announced, and come."""
        stream.write(
            *messages.frame(messages.ExpectFront(self.number, self.token, INPUTS_BYTES_MAX))
        )
        # Whoever answers this has heard that.
        await stream.act(infer(1000 + self.number, "nobody"), b"")
        await self.connect(stream)
        self.writer.write(frames.greeting(self.token))

    async def connect(self, stream: Stream) -> None:
        where = stream.register.payload_host, stream.register.payload_port
        self.reader, self.writer = await asyncio.open_connection(*where)
        stream.sockets.append(self.writer)

    def send(self, action_id: int, index: int, tensors: Sequence[bytes] | None) -> None:
        self.writer.writelines(frames.encode_inputs(action_id, index, tensors))

    async def outputs(self) -> tuple[int, int, bytes]:
        """What comes next: action, request and tensor."""
        while not self._arrived:
            data = await self.reader.read(1 << 16)
            assert data, "the worker hung up"
            while data:
                room = self._cut.room()
                piece, data = data[: len(room)], data[len(room) :]
                room[: len(piece)] = piece
                self._arrived += self._cut.received(len(piece))
        found, [tensor] = frames.decode_outputs(self._arrived.pop(0))
        return found.action_id, found.index, bytes(tensor)

    async def is_hung_up(self) -> bool:
        try:
            return not await self.reader.read(1)
        except ConnectionError:
            return True


def order(stream: Stream, action: Infer, fronts: Sequence[int], *own: bytes) -> None:
    """Send an Infer; inputs of requests that are no front's are given."""
    inputs = iter(own)
    payload = [bytes(ROW_BYTES) if front else next(inputs) for front in fronts]
    places = [frame_headers.APART if front else -1 for front in fronts]
    stream.write(*frames.encode_action(action, payload, places=places, fronts=fronts))


async def begin(stream: Stream) -> None:
    await stream.welcome()
    await stream.install("relu", relu_file(VALUES))
    result, _ = await stream.act(load(1, "relu"))
    assert result.error == ActionError.NONE


def test_inputs_come_before_their_action_after_it_and_twice(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        front = Front(5)
        await front.dial(stream)
        front.send(2, 0, [row(2)])
        front.send(2, 0, [row(0)])
        order(stream, infer(2, "relu"), [5])
        assert await front.outputs() == (2, 0, answer(row(2)))
        result, outputs = await stream.result()
        assert (result.action_id, result.error, outputs, stream.sent) == (2, 0, [], (0,))
        order(stream, infer(3, "relu"), [5])
        await asyncio.sleep(0)
        front.send(3, 0, [row(3)])
        front.send(3, 0, [row(0)])
        assert await front.outputs() == (3, 0, answer(row(3)))
        assert (await stream.result())[0].error == ActionError.NONE
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_a_batch_of_several_fronts_and_of_none_gives_each_its_own(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        near, far = Front(5), Front(6)
        await near.dial(stream)
        await far.dial(stream)
        order(stream, infer(2, "relu", rows=(1, 1), batch_size=2), [6, 0], row(1))
        far.send(2, 0, [row(2)])
        assert await far.outputs() == (2, 0, answer(row(2)))
        assert (await stream.result())[1] == [answer(row(1))]
        assert stream.sent == (0,)
        order(stream, infer(3, "relu", rows=(1, 1), batch_size=2), [6, 5])
        near.send(3, 1, [row(4)])
        far.send(3, 0, [row(3)])
        assert await far.outputs() == (3, 0, answer(row(3)))
        assert await near.outputs() == (3, 1, answer(row(4)))
        assert (await stream.result())[1] == []
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_an_action_whose_inputs_never_come_is_refused_when_its_window_closes(
    tmp_path: Path,
) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        front = Front(5)
        await front.dial(stream)
        action = infer(2, "relu")
        action = replace(action, latest_ns=action.earliest_ns + 50 * NS_PER_MS)
        order(stream, action, [5])
        result, _ = await stream.result()
        assert (result.action_id, result.error) == (2, ActionError.TOO_LATE)
        assert "waiting for inputs of its fronts" in result.message
        assert action.latest_ns < result.received_ns <= time.monotonic_ns()
        # What comes now is for nobody, and spoils nothing.
        front.send(2, 0, [row(2)])
        order(stream, infer(3, "relu"), [5])
        front.send(3, 0, [row(3)])
        assert await front.outputs() == (3, 0, answer(row(3)))
        assert (await stream.result())[0].action_id == 3
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_an_action_that_waits_for_inputs_can_be_taken_back(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        action = infer(2, "relu")
        order(stream, action, [5])
        stream.write(*frames.encode_withdrawal(action.action_id))
        result, _ = await stream.result()
        assert (result.action_id, result.error) == (2, ActionError.WITHDRAWN)
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_without_a_front_its_inputs_are_zeros_and_the_others_of_the_batch_are_served(
    tmp_path: Path,
) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        front = Front(5)
        await front.dial(stream)
        for action_id, leave in ((2, False), (3, True)):
            order(
                stream,
                infer(action_id, "relu", rows=(1, 1), batch_size=2),
                [5, 0],
                row(action_id),
            )
            if leave:
                stream.write(*messages.frame(messages.FrontGone(5)))
            else:
                front.send(action_id, 0, None)
            result, outputs = await stream.result()
            assert result.error == ActionError.NONE
            assert outputs[-1] == answer(row(action_id))
        assert outputs[0] == bytes(ROW_BYTES)
        assert stream.sent == ()
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_inputs_that_the_controller_hands_on_are_as_good(tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        order(stream, infer(2, "relu"), [5])
        stream.write(*frames.encode_inputs(2, 0, [row(2)]))
        # The front is not there, so that its outputs go by the controller too.
        assert (await stream.result())[1] == [answer(row(2))]
        await drain(stream)

    play(tmp_path, script, device="cpu")


@pytest.mark.parametrize("fault", ["token", "nonsense", "too long", "another's", "lengths"])
def test_a_front_that_is_none_or_misbehaves_is_hung_up_on_and_others_are_served(
    tmp_path: Path, fault: str
) -> None:
    async def script(stream: Stream) -> None:
        await begin(stream)
        good, bad = Front(5), Front(6)
        await good.dial(stream)
        order(stream, infer(2, "relu"), [5 if fault == "another's" else 6])
        if fault == "token":
            await bad.connect(stream)
            bad.writer.write(frames.greeting(bad.token))
        else:
            await bad.dial(stream)
        if fault == "nonsense":
            bad.writer.writelines(frames.make_frame(b"\xff" * 64, ()))
        elif fault == "too long":
            bad.writer.write(frames.PREFIX.pack(10, INPUTS_BYTES_MAX + 1))
        elif fault != "token":
            bad.send(2, 0, [row(2)[:-4] if fault == "lengths" else row(2)])
        assert await bad.is_hung_up()
        order(stream, infer(3, "relu"), [5])
        good.send(3, 0, [row(3)])
        assert await good.outputs() == (3, 0, answer(row(3)))
        await drain(stream)

    play(tmp_path, script, device="cpu")


def test_a_front_that_sends_far_ahead_is_not_listened_to_until_its_actions_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_sockets, "_EARLY_BYTES_MAX", 2 * ROW_BYTES)
    num_inputs = 400

    async def script(stream: Stream) -> None:
        await begin(stream)
        eager, other = Front(5), Front(6)
        await eager.dial(stream)
        await other.dial(stream)
        for action_id in range(2, 2 + 2 * num_inputs, 2):
            eager.send(action_id, 0, [row(action_id)])
        order(stream, infer(3, "relu"), [6])
        other.send(3, 0, [row(3)])
        assert await other.outputs() == (3, 0, answer(row(3)))
        assert (await stream.result())[0].action_id == 3
        # 32 MB are more than the kernel holds for a connection that nobody reads.
        assert eager.writer.transport.get_write_buffer_size() > 0
        for action_id in range(4, 2 + 2 * num_inputs, 2):
            order(stream, infer(action_id, "relu"), [5])
            assert await eager.outputs() == (action_id, 0, answer(row(action_id)))
            assert (await stream.result())[0].error == ActionError.NONE
        await drain(stream)

    play(tmp_path, script, device="cpu")
