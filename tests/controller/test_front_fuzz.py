"""Random clients of the whole front, over sockets: others are served, and nothing of them stays behind."""

from __future__ import annotations

import logging
import random
import socket
import ssl
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest

from clockwright.v1 import inference_pb2 as pb
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.tls import server_context
from tests.kit.certificates import self_signed
from tests.kit.front_end import serving_in_thread
from tests.kit.random_peer import RandomPeer
from tests.kit.raw_http2 import MODEL_INFER, PREFACE, SETTINGS, RawClient, frame, headers

SERVICE = "/inference.GRPCInferenceService"
METHODS = ["ModelInfer"] * 3 + ["ModelStreamInfer"] * 3 + [
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "RepositoryIndex",
    "NoSuchMethod",
]  # fmt: skip
BLOCKS = [
    *(headers(f"{SERVICE}/{method}") for method in METHODS),
    headers("/grpc.health.v1.Health/Check"),
    headers("/grpc.health.v1.Health/Watch"),
    headers(MODEL_INFER, ("grpc-timeout", "3S")),
    headers(MODEL_INFER, ("grpc-encoding", "gzip"), ("a-bin", "AAA")),
]
#: Connections at once, and frames on one before its client leaves.
PEERS = 5
FRAMES_OF_ONE = 300


def question(*, model: str = "double", values: int = 3, slo_ms: int = 600_000) -> bytes:
    request = pb.ModelInferRequest(model_name=model, id="r")
    request.parameters["slo_ms"].int64_param = slo_ms
    request.inputs.add(name="x", datatype="FP32", shape=(1, values))
    request.raw_input_contents.append(struct.pack(f"<{values}f", *range(values)))
    return request.SerializeToString()


GOOD = question()


def some_message(rng: random.Random) -> bytes:
    """A request: good, or for nobody, or with some bytes changed, or cut, or no request at all."""
    match rng.randrange(8):
        case 0 | 1 | 2:
            return GOOD
        case 3:
            return question(model=rng.choice(["nobody", "", "mixed"]), values=rng.randrange(5))
        case 4:
            return question(slo_ms=rng.choice([0, 1, -5]))
        case 5:
            return rng.randbytes(rng.choice([0, 1, 10, 1000]))
        case 6:
            return GOOD[: rng.randrange(len(GOOD))] + bytes(rng.choice([0, 0, 50_000]))
        case _:
            changed = bytearray(GOOD)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)


class Talker:
    """A random peer on a socket. It reads, or does not, and goes away at some time."""

    def __init__(self, rng: random.Random, address: str, certificate: Path | None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(60)
        if certificate is not None:
            context = ssl.create_default_context(cafile=str(certificate))
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self.socket.setblocking(False)
        self.peer = RandomPeer(rng, BLOCKS, some_message)
        self._reads = rng.random() < 0.8
        self._num_frames = rng.randrange(FRAMES_OF_ONE)
        self._unsent = bytearray(PREFACE + frame(SETTINGS, 0, 0))

    def go_on(self) -> bool:
        """Send a frame, as far as the server takes it; returns whether that is to be continued."""
        self._unsent += self.peer.some_frames()
        size = self.peer.rng.choice([1, 100, 1 << 16, 1 << 16])
        try:
            if self._reads:
                self.socket.recv(1 << 16)
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            return False
        try:
            sent = self.socket.send(self._unsent[:size])
            del self._unsent[:sent]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            return False
        return self.peer.num_drawn < self._num_frames and len(self._unsent) < 1 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["plain", "tls"])
def certificate(request: pytest.FixtureRequest) -> tuple[Path, Path] | None:
    return request.getfixturevalue("files") if request.param == "tls" else None


def talk(
    rng: random.Random, num_frames: int, directory: Path, files: tuple[Path, Path] | None
) -> None:
    """Have random peers send so many frames to one server, while somebody else asks for what is right."""
    door = AdmissionLimits(max_requests=200, max_bytes=4 << 20)
    tls = None if files is None else server_context(*files)
    certificate = None if files is None else files[0]
    with (
        serving_in_thread(directory, door=door, tls=tls) as server,
        RawClient(server.address) as other,
    ):
        talkers: list[Talker] = []
        drawn = 0
        with ExitStack() as stack:
            while drawn < num_frames:
                while len(talkers) < PEERS:
                    talkers.append(Talker(rng, server.address, certificate))
                    stack.callback(talkers[-1].socket.close)
                for talker in [talker for talker in talkers if not talker.go_on()]:
                    drawn += talker.peer.num_drawn
                    talkers.remove(talker)
                    talker.socket.close()
                if rng.random() < 0.02:
                    # Whatever there is, the front may be full of what others asked, and says so.
                    assert other.wait([other.infer(GOOD)])[0].status in (0, 8)
        assert drawn >= num_frames
        server.until(lambda front: front.runtime.num_waiting == 0)
        server.until(lambda _: (door.num_requests, door.num_bytes) == (0, 0))
        # What they sent may still be read, and the loop have no time beside it: it says so for as long.
        while status := other.wait([other.infer(GOOD)])[0].status:
            assert status == 8
        server.until(lambda _: (door.num_requests, door.num_bytes) == (0, 0))
        assert server.front_end.slabs.inputs is None or not server.do(
            lambda front: front.slabs.inputs is not None and front.slabs.inputs.used_bytes
        )


def no_bugs(caplog: pytest.LogCaptureFixture) -> None:
    """Fail where something was raised that nobody foresaw."""
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.seeds(1)
def test_random_clients_leave_nothing_behind_and_keep_nobody_waiting(
    seed: int,
    certificate: tuple[Path, Path] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    talk(random.Random(seed), 5000, tmp_path, certificate)
    no_bugs(caplog)


@pytest.mark.long
@pytest.mark.seeds(1)
def test_random_clients_leave_nothing_behind_for_half_a_million_frames(
    seed: int,
    certificate: tuple[Path, Path] | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A long run draws five seeds, and plays each with TLS and without.
    talk(random.Random(seed), 50_000, tmp_path, certificate)
    no_bugs(caplog)
