"""The HTTP/2 server behind TLS: gRPC's own clients, what is no TLS, and who may come without."""

from __future__ import annotations

import socket
import ssl
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright.client.channel import OPTIONS
from clockwright.errors import ConfigError
from clockwright.v1 import inference_pb2 as pb
from controller.front.http.tls import TlsSession, server_context
from controller.process.config import ControllerConfig
from tests.kit.addresses import own_address
from tests.kit.certificates import self_signed
from tests.kit.front_end import serving_in_thread
from tests.kit.raw_http2 import MODEL_INFER, RawClient


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


def credentials(files: tuple[Path, Path]) -> Any:  # noqa: ANN401
    return grpc.ssl_channel_credentials(files[0].read_bytes())


def secure_channel(address: str, files: tuple[Path, Path], *options: tuple[str, str]) -> Any:  # noqa: ANN401
    # The types of gRPC's stubs want serializers; its clients do not.
    return grpc.secure_channel(address, credentials(files), options=[*OPTIONS, *options])


def question() -> bytes:
    request = pb.ModelInferRequest(model_name="double")
    request.parameters["slo_ms"].int64_param = 600_000
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(struct.pack("<3f", 0, 1, 2))
    return request.SerializeToString()


def test_on_this_machine_nobody_needs_tls(tmp_path: Path, files: tuple[Path, Path]) -> None:
    with (
        serving_in_thread(tmp_path, tls=server_context(*files)) as server,
        RawClient(server.address) as client,
    ):
        assert client.wait([client.infer(question())])[0].status == 0


@pytest.mark.skipif(own_address() is None, reason="the machine has no address but the loopback's")
def test_from_elsewhere_nobody_gets_in_without_tls(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    with serving_in_thread(tmp_path, tls=server_context(*files), host="0.0.0.0") as server:
        port = server.address.rpartition(":")[2]
        with RawClient(f"{own_address()}:{port}") as client:
            client.wait_closed()
            assert not client.ended
        elsewhere = f"{own_address()}:{port}"
        name = ("grpc.ssl_target_name_override", "localhost")
        with secure_channel(elsewhere, files, name) as channel:
            assert channel.unary_unary(MODEL_INFER)(question())


@pytest.mark.parametrize("data", [b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x16" * 70_000])
def test_what_only_looks_like_tls_harms_nobody(
    tmp_path: Path, files: tuple[Path, Path], data: bytes
) -> None:
    with serving_in_thread(tmp_path, tls=server_context(*files)) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(data)
            if len(data) > 1:
                sock.settimeout(60)
                while sock.recv(1000):
                    pass
        with secure_channel(server.address, files) as channel:
            assert channel.unary_unary(MODEL_INFER)(question())


def pair(files: tuple[Path, Path], *protocols: str) -> tuple[TlsSession, Any, ssl.MemoryBIO, Any]:
    """A session, and a client of Python's with the two ends of its wire."""
    context = ssl.create_default_context(cafile=str(files[0]))
    if protocols:
        context.set_alpn_protocols(list(protocols))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    return TlsSession(server_context(*files)), client, incoming, outgoing


def shake_hands(session: TlsSession, client: Any, incoming: Any, outgoing: Any) -> None:  # noqa: ANN401
    """Byte by byte."""
    for _ in range(10):
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        for byte in outgoing.read():
            assert session.receive(bytes((byte,))) == b""
        incoming.write(session.take_output())
        if session.established:
            return


def test_a_session_reads_whatever_way_the_bytes_are_cut(files: tuple[Path, Path]) -> None:
    session, client, incoming, outgoing = pair(files, "h2")
    shake_hands(session, client, incoming, outgoing)
    client.write(b"x" * 40_000)
    sent = outgoing.read()
    found = b"".join(session.receive(sent[i : i + 999]) for i in range(0, len(sent), 999))
    assert found == b"x" * 40_000
    session.seal(b"back")
    incoming.write(session.take_output())
    assert client.read() == b"back"
    client.write(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    assert session.receive(outgoing.read()) == b"last"
    assert session.closed


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
def test_a_client_that_does_not_ask_for_http2_is_sent_away(
    files: tuple[Path, Path], protocols: tuple[str, ...]
) -> None:
    session, client, incoming, outgoing = pair(files, *protocols)
    with pytest.raises(ssl.SSLError, match="expected h2"):
        shake_hands(session, client, incoming, outgoing)


def test_settings_of_tls_that_cannot_be_are_config_errors(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    certificate, key = files
    with pytest.raises(ConfigError, match="found one of them, expected both or none"):
        ControllerConfig(tls_certificate=certificate)
    with pytest.raises(ConfigError, match="No such file"):
        server_context(tmp_path / "nowhere", key)
    with pytest.raises(ConfigError, match="TLS certificate"):
        server_context(key, certificate)
