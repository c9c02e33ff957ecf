"""A client of HTTP/2 that sends frames at random: most of them such as clients send, some broken or untimely."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from tests.kit.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    call,
    frame,
    headers,
    message,
)


class RandomPeer:
    """Draws what it sends from a generator, and remembers what is open."""

    def __init__(
        self,
        rng: random.Random,
        blocks: Sequence[bytes],
        content: Callable[[random.Random], bytes],
    ) -> None:
        """Begin with nothing open.

        Args:
            rng: decides everything.
            blocks: headers of calls.
            content: draws a message.
        """
        self.rng = rng
        self.next_id = 1
        #: Frames so far, or what stands for one.
        self.num_drawn = 0
        #: Open streams, and what is left to send of the message under way.
        self.open: dict[int, bytes] = {}
        self._blocks = blocks
        self._content = content

    def some_frames(self) -> bytes:
        """Draw a frame, or some that belong together."""
        rng = self.rng
        self.num_drawn += 1
        stream_id = rng.choice([*self.open, 0])
        match rng.randrange(14):
            case 0 | 1 | 2:
                # A call's one frame of DATA is one that every peer takes.
                content = self._content(rng)[:20_000]
                return call(self._new(), content, rng.choice(self._blocks))
            case 3 | 4:
                stream_id = self._new()
                self.open[stream_id] = message(self._content(rng))
                return frame(HEADERS, END_HEADERS, stream_id, rng.choice(self._blocks))
            case 5 | 6 | 7 | 8 | 9 if self.open:
                return self._go_on()
            case 10:
                size = struct.pack(">I", rng.choice([1, 1000, 1 << 16]))
                return frame(WINDOW, 0, stream_id, size)
            case 11:
                value = rng.choice([0, 10, 65_535, 1 << 20])
                return frame(SETTINGS, 0, 0, struct.pack(">HI", 4, value))
            case 12 if stream_id:
                del self.open[stream_id]
                return frame(RST, 0, stream_id, bytes(4))
            case _ if rng.random() < 0.01:
                return self._broken(stream_id)
            case _:
                return frame(PING, 0, 0, bytes(8))

    def _new(self) -> int:
        stream_id, self.next_id = self.next_id, self.next_id + 2
        return stream_id

    def _go_on(self) -> bytes:
        rng = self.rng
        stream_id = rng.choice(list(self.open))
        left = self.open[stream_id]
        part = left[: rng.choice([1, 5, 9, 16_000, 16_384, len(left)])]
        self.open[stream_id] = left[len(part) :]
        flags = 0
        if not self.open[stream_id] or rng.random() < 0.02:
            if rng.random() < 0.7:
                flags = END_STREAM
                del self.open[stream_id]
            else:
                self.open[stream_id] = message(self._content(rng))
        if rng.random() < 0.1:
            padding = rng.randrange(20)
            return frame(DATA, flags | PADDED, stream_id, bytes((padding,)) + part + bytes(padding))
        return frame(DATA, flags, stream_id, part)

    def _broken(self, stream_id: int) -> bytes:
        rng = self.rng
        kind, flags = rng.randrange(12), rng.randrange(256)
        return rng.choice(
            [
                frame(kind, flags, stream_id, rng.randbytes(rng.randrange(40))),
                frame(WINDOW, 0, stream_id, struct.pack(">I", rng.choice([0, 2**31 - 1]))),
                frame(RST, 0, rng.randrange(1 << 31), bytes(4)),
                frame(HEADERS, 0, self._new(), headers()[:30]) + frame(CONTINUATION, 0, 1),
                frame(DATA, 0, stream_id, struct.pack(">BI", 2, 10)),
                frame(DATA, 0, stream_id, struct.pack(">BI", 0, 1 << 30)),
                rng.randbytes(rng.randrange(1, 50)),
            ]
        )
