"""Clients in an open loop: requests leave when they are due, whatever has come of those before."""

from __future__ import annotations

import asyncio
import time

from clockwright.errors import ConfigError
from experiments.live.asker import AskedOnce, Asker, ask_at


def test_requests_leave_when_they_are_due_and_what_came_of_them_is_in_their_order() -> None:
    times_s = (0.0, 0.02, 0.03)

    async def ask_all() -> list[tuple[int, float]]:
        last = asyncio.Event()
        begin_s = time.monotonic()

        async def ask(number: int) -> tuple[int, float]:
            sent_s = time.monotonic() - begin_s
            # None ends before all have left.
            if number == 2:
                last.set()
            await last.wait()
            return number, sent_s

        return await ask_at(times_s, ask)

    found = asyncio.run(ask_all())
    assert [number for number, _ in found] == [0, 1, 2]
    assert all(sent_s >= due_s for due_s, (_, sent_s) in zip(times_s, found, strict=True))


def test_a_client_asks_as_long_as_its_block_and_waits_for_what_is_open() -> None:
    async def ask(asked: AskedOnce) -> None:
        await asyncio.sleep(0.05)
        if asked is client.asked[1]:
            raise ConfigError("no")

    client = Asker(AskedOnce, ask, lambda: 0.001)

    async def play() -> int:
        async with client:
            while len(client.asked) < 3:  # noqa: ASYNC110  the client has no event for it
                await asyncio.sleep(0.001)
        return len(client.asked)

    num_asked = asyncio.run(play())
    assert all(each.done_s - each.sent_s >= 0.04 for each in client.asked)
    assert [each.fault for each in client.asked[:3]] == ["", "ConfigError: no", ""]
    assert len(client.asked) == num_asked
