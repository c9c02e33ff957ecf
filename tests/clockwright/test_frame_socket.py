"""Sockets of frames over TLS, and who may come to a Unix socket."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clockwright.wire.data_socket import dial, pinned_context
from clockwright.wire.frame_headers import HEADER_BYTES_MAX
from clockwright.wire.frame_socket import FrameSocket, SocketListener
from clockwright.wire.frames import PAYLOAD_BYTES_MAX, Frame, greeting, make_frame
from clockwright.wire.own_certificate import make_certificate

SILENCE_LIMIT_MS = 100_000
NOBODY = 65534


class End:
    """One end of a connection, and what came there."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.frames: list[tuple[bytes, bytes]] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.data = FrameSocket(sock, self.take, self.ended.set_result)
        self.data.reader.header_bytes_max = HEADER_BYTES_MAX
        self.data.reader.payload_bytes_max = PAYLOAD_BYTES_MAX

    def take(self, frames: Sequence[Frame]) -> None:
        self.frames += [(bytes(header), bytes(payload)) for header, payload in frames]
        if len(self.frames) % 7 == 0:
            # What is deciphered already waits too, and comes afterwards.
            self.data.pause()
            asyncio.get_running_loop().call_soon(self.data.resume)


async def until(ends: Sequence[End], count: int) -> None:
    while not all(len(end.frames) >= count for end in ends):  # noqa: ASYNC110  they tell nobody
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", range(3))
async def test_frames_of_any_size_come_whole_and_in_order_over_tls_both_ways_at_once(
    seed: int,
) -> None:
    rng = random.Random(seed)

    def frame() -> tuple[bytes, bytes]:
        size = rng.choice((0, 1, 100, 16 << 10, 300_000))
        return rng.randbytes(rng.choice((1, 30, 5000))), rng.randbytes(rng.randint(0, size))

    listener = SocketListener(silence_limit_ms=SILENCE_LIMIT_MS)
    listener.tls, fingerprint = make_certificate()
    listener.listen("127.0.0.1", 0)
    taken: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    token = listener.expect(taken.set_result)
    sock = await asyncio.to_thread(
        dial,
        "127.0.0.1",
        listener.port,
        limit_s=60,
        tls=pinned_context(),
        certificate_sha256=fingerprint,
    )
    ours = End(sock)
    sent: list[list[tuple[bytes, bytes]]] = [[frame() for _ in range(60)] for _ in range(2)]
    # The first frames come with the token.
    ours.data.send([greeting(token)])
    for header, payload in sent[0][:20]:
        ours.data.send(make_frame(header, [payload]))
    theirs = End(await taken)
    for number in range(60):
        if number >= 20:
            ours.data.send(make_frame(sent[0][number][0], [sent[0][number][1]]))
        theirs.data.send(make_frame(sent[1][number][0], [sent[1][number][1]]))
        if number % 10 == 0:
            await asyncio.sleep(0)
    await until((ours, theirs), 60)
    assert theirs.frames == sent[0]
    assert ours.frames == sent[1]
    ours.data.close()
    assert "closed its connection" in await theirs.ended
    listener.close()


async def test_a_listener_with_another_certificate_is_not_talked_to() -> None:
    listener = SocketListener(silence_limit_ms=SILENCE_LIMIT_MS)
    listener.tls, _ = make_certificate()
    _, expected = make_certificate()
    listener.listen("127.0.0.1", 0)
    with pytest.raises(ConnectionError, match="another certificate"):
        await asyncio.to_thread(
            dial,
            "127.0.0.1",
            listener.port,
            limit_s=60,
            tls=pinned_context(),
            certificate_sha256=expected,
        )
    listener.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder into which every user may look."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_a_process_of_another_user_is_not_heard(
    open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = open_folder / "socket"

    async def main() -> None:
        listener = SocketListener(silence_limit_ms=SILENCE_LIMIT_MS)
        listener.listen("127.0.0.1", 0, path)
        path.chmod(0o777)
        token = listener.expect(lambda _: pytest.fail("it was heard"))
        child = os.fork()
        if not child:
            try:
                os.setuid(NOBODY)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(path))
                    sock.sendall(greeting(token))
                    sock.recv(1)
            finally:
                os._exit(0)  # It is hung up on, sooner or later.
        await asyncio.to_thread(os.waitpid, child, 0)
        listener.close()

    asyncio.run(main())
    assert "a process of another user connected" in caplog.text


async def test_what_has_come_is_read_at_a_look_before_the_event_loop_says_so() -> None:
    near, far = socket.socketpair()
    with far:
        end = End(near)
        end.data.look()  # There is nothing.
        far.sendall(b"".join(make_frame(b"header", [b"payload"])))
        end.data.look()
        assert end.frames == [(b"header", b"payload")]
        far.close()
        end.data.look()
        assert end.ended.done()
        end.data.look()  # It is closed.
