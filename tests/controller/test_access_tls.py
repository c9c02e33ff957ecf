"""A whole controller behind TLS: certificates of clients and of workers, and new ones without a restart."""

from __future__ import annotations

import asyncio
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
import trustme
from cryptography.x509 import load_pem_x509_certificate

from clockwright.cli.flags import JoinFlags
from clockwright.client.channel import Access
from controller.access.config import AccessConfig
from controller.access.key_file import add_key, revoke_key
from controller.access.roles import Role
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig
from tests.kit.echo_serving import until
from tests.kit.scripted_worker import LoopbackWorker
from tests.kit.slow_echo import SlowEcho, serve

METADATA = "/inference.GRPCInferenceService/ServerMetadata"
ADD = "/clockwright.v1.ControlService/ListModels"
CLIENT = frozenset((Role.METADATA, Role.INFERENCE))


@dataclass
class Authorities:
    """Who signs what, and the folder of the files."""

    folder: Path
    server: trustme.CA
    clients: trustme.CA
    workers: trustme.CA

    def certify_server(self) -> tuple[Path, Path]:
        """Write a new certificate of the server, and its key."""
        issued = self.server.issue_cert("localhost", "127.0.0.1")
        certificate, key = self.folder / "server.pem", self.folder / "server.key"
        key.write_bytes(issued.private_key_pem.bytes())
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return certificate, key

    def access(self, authority: trustme.CA | None, name: str = "", *, key: str = "") -> Access:
        """What somebody shows who has a certificate, a key, or neither."""
        ca = self.file("server-ca", self.server)
        if authority is None:
            return Access(ca=ca, key=key)
        number = len(list(self.folder.iterdir()))
        certificate = self.folder / f"{number}.pem"
        certificate_key = self.folder / f"{number}.key"
        issue(authority, name, certificate, certificate_key)
        return Access(ca=ca, certificate=certificate, certificate_key=certificate_key, key=key)

    def file(self, name: str, authority: trustme.CA) -> Path:
        path = self.folder / f"{name}.pem"
        authority.cert_pem.write_to_path(path)
        return path


def issue(authority: trustme.CA, name: str, certificate: Path, certificate_key: Path) -> None:
    """Write a new certificate, and its key."""
    issued = authority.issue_cert(name)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(certificate_key)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(tmp_path_factory.mktemp("tls"), trustme.CA(), trustme.CA(), trustme.CA())


@asynccontextmanager
async def controlling(authorities: Authorities, keys: Path) -> AsyncIterator[Controller]:
    certificate, key = authorities.certify_server()
    config = ControllerConfig(
        port=0,
        http_port=0,
        tls_certificate=certificate,
        tls_key=key,
        access=AccessConfig(
            keys_file=keys,
            client_ca=authorities.file("client-ca", authorities.clients),
            worker_ca=authorities.file("worker-ca", authorities.workers),
        ),
    )
    async with running(config) as controller:
        yield controller


@asynccontextmanager
async def joining(controller: Controller, folder: Path, access: Access) -> AsyncIterator[None]:
    """A real worker, which dials again and again."""
    address = f"127.0.0.1:{controller.port}"
    worker = asyncio.create_task(serve(address, folder, SlowEcho(folder / "cache"), "w", access))
    try:
        yield
        # It has not given up.
        assert not worker.done()
    finally:
        worker.cancel()
        await asyncio.wait([worker])


async def code_of(controller: Controller, access: Access, path: str = METADATA) -> grpc.StatusCode:
    channel: Any = access.async_channel(f"localhost:{controller.port}")
    async with channel:
        try:
            await channel.unary_unary(path)(b"", metadata=access.metadata, timeout=60)
        except grpc.aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


async def test_a_client_is_known_by_its_certificate_or_by_its_key(
    authorities: Authorities, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    add_key(keys, "web", CLIENT, certificate="DNS:web.example")
    key = add_key(keys, "batch", CLIENT)
    stranger = trustme.CA()
    async with controlling(authorities, keys) as controller:
        web = authorities.access(authorities.clients, "web.example")
        assert await code_of(controller, web) is grpc.StatusCode.OK
        assert await code_of(controller, web, ADD) is grpc.StatusCode.PERMISSION_DENIED
        for shown, expected in (
            (authorities.access(None, key=key), grpc.StatusCode.OK),
            (authorities.access(None), grpc.StatusCode.UNAUTHENTICATED),
            # Its authority has signed it, and nobody knows its name.
            (
                authorities.access(authorities.clients, "other.example"),
                grpc.StatusCode.UNAUTHENTICATED,
            ),
            # A worker's authority says nothing of clients, whatever the name.
            (
                authorities.access(authorities.workers, "web.example"),
                grpc.StatusCode.PERMISSION_DENIED,
            ),
            # TLS itself refuses what nobody has signed.
            (authorities.access(stranger, "web.example"), grpc.StatusCode.UNAVAILABLE),
        ):
            assert await code_of(controller, shown) is expected, expected
        revoke_key(keys, "web")
        controller.guard.look()
        web = authorities.access(authorities.clients, "web.example")
        assert await code_of(controller, web) is grpc.StatusCode.UNAUTHENTICATED


async def test_tritons_client_gets_in_with_tls_and_a_header(
    authorities: Authorities, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    key = add_key(keys, "web", CLIENT)

    def ask(port: int) -> str:
        client = triton.InferenceServerClient(
            f"localhost:{port}",
            ssl=True,
            root_certificates=str(authorities.file("server-ca", authorities.server)),
        )
        with client:
            assert client.is_server_live()
            with pytest.raises(triton.InferenceServerException, match="NO_CREDENTIALS"):
                client.get_server_metadata()
            found = client.get_server_metadata(headers={"triton-grpc-protocol-key": key})
            name: str = found.name
            return name

    async with controlling(authorities, keys) as controller:
        assert await asyncio.to_thread(ask, controller.port) == "clockwright"


async def test_rest_knows_the_same_callers_and_shows_a_renewed_certificate_too(
    authorities: Authorities, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    add_key(keys, "web", CLIENT, certificate="DNS:web.example")
    key = add_key(keys, "batch", CLIENT)

    def ask(port: int, access: Access, path: str = "/v2") -> int:
        """The status of an answer; 0 where TLS refuses."""
        context = ssl.create_default_context(cafile=access.ca)
        if access.certificate is not None:
            context.load_cert_chain(access.certificate, access.certificate_key)
        request = urllib.request.Request(
            f"https://localhost:{port}{path}", headers=dict(access.metadata)
        )
        try:
            with urllib.request.urlopen(request, context=context, timeout=60) as answer:
                status: int = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError:
            return 0
        return status

    def serial(port: int) -> int:
        pem = ssl.get_server_certificate(("localhost", port))
        return load_pem_x509_certificate(pem.encode()).serial_number

    async with controlling(authorities, keys) as controller:
        port = controller.http_port
        assert port is not None
        web = authorities.access(authorities.clients, "web.example")
        for access, path, expected in (
            (web, "/v2", 200),
            (web, "/v2/applications", 403),
            (authorities.access(None, key=key), "/v2", 200),
            (authorities.access(None), "/v2", 401),
            (authorities.access(None), "/v2/health/live", 200),
            (authorities.access(authorities.clients, "other.example"), "/v2", 401),
            (authorities.access(authorities.workers, "web.example"), "/v2", 403),
            (authorities.access(trustme.CA(), "web.example"), "/v2", 0),
        ):
            assert await asyncio.to_thread(ask, port, access, path) == expected, path
        before = await asyncio.to_thread(serial, port)
        authorities.certify_server()
        controller.guard.look()
        assert await asyncio.to_thread(serial, port) != before
        assert await asyncio.to_thread(ask, port, web) == 200
        revoke_key(keys, "web")
        controller.guard.look()
        assert await asyncio.to_thread(ask, port, web) == 401


async def test_a_worker_joins_with_a_certificate_of_its_own_authority(
    authorities: Authorities, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    key = add_key(keys, "web", CLIENT)
    add_key(keys, "web-too", CLIENT, certificate="DNS:web.example")
    async with controlling(authorities, keys) as controller:
        honest = authorities.access(authorities.workers, "rack-7.example")
        async with LoopbackWorker(controller.port, "honest", access=honest) as worker:
            await worker.wait_for("heartbeat")
            for access in (
                Access(),
                authorities.access(None),
                authorities.access(None, key=key),
                authorities.access(authorities.clients, "web.example"),
            ):
                async with LoopbackWorker(controller.port, "fake", access=access) as fake:
                    await fake.ended.wait()
                    assert not fake.welcome.token
            assert [link.worker_id for link in controller.links.links] == ["honest"]


async def test_a_worker_joins_with_a_token_and_leaves_when_it_is_another(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 40)
    config = ControllerConfig(port=0, access=AccessConfig(worker_token_file=token))
    async with running(config) as controller:
        async with LoopbackWorker(controller.port, "fake") as fake:
            await fake.ended.wait()
            assert not fake.welcome.token
        access = Access(key="t" * 40)
        async with LoopbackWorker(controller.port, "honest", access=access) as worker:
            await worker.wait_for("heartbeat")
            token.write_text("u" * 40)
            await worker.ended.wait()
            assert not controller.links.links


async def test_a_worker_whose_token_was_rotated_comes_back_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, own = tmp_path / "token", tmp_path / "own"
    for path in (token, own):
        path.write_text("t" * 40)
    config = ControllerConfig(port=0, access=AccessConfig(worker_token_file=token))
    access = JoinFlags(worker_token_file=own).access()
    async with running(config) as controller, joining(controller, tmp_path, access):
        links = controller.links
        await until(lambda: len(links.links) == 1)
        token.write_text("u" * 40)
        controller.guard.look()
        await until(lambda: not links.links)
        # As whoever writes a file in place leaves it for a moment.
        own.write_text("")
        await until(lambda: "own: found nothing, expected a key" in caplog.text)
        own.write_text("u" * 40 + "\n")
        await until(lambda: len(links.links) == 1)


async def test_a_workers_new_certificate_counts_when_it_dials_again(
    authorities: Authorities, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    add_key(keys, "web", CLIENT)
    access = authorities.access(authorities.clients, "web.example")
    assert access.certificate is not None
    assert access.certificate_key is not None
    async with (
        controlling(authorities, keys) as controller,
        joining(controller, tmp_path, access),
    ):
        await until(lambda: "trying again" in caplog.text)
        access.certificate.unlink()
        await until(lambda: "No such file" in caplog.text)
        assert not controller.links.links
        issue(authorities.workers, "rack-7", access.certificate, access.certificate_key)
        await until(lambda: len(controller.links.links) == 1)


async def test_another_authority_of_clients_is_trusted_once_its_file_names_it(
    authorities: Authorities, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    add_key(keys, "web", CLIENT, certificate="DNS:web.example")
    successor = trustme.CA()
    async with controlling(authorities, keys) as controller:
        before = authorities.access(authorities.clients, "web.example")
        after = authorities.access(successor, "web.example")
        assert await code_of(controller, before) is grpc.StatusCode.OK
        assert await code_of(controller, after) is grpc.StatusCode.UNAVAILABLE
        authorities.file("client-ca", successor)
        controller.guard.look()
        assert await code_of(controller, before) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(controller, after) is grpc.StatusCode.OK


async def test_a_new_certificate_is_shown_to_whoever_connects_once_it_is_there(
    authorities: Authorities, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    key = add_key(keys, "web", CLIENT)

    def shown(port: int) -> bytes:
        """The certificate that the server shows."""
        context = ssl.create_default_context(
            cafile=str(authorities.file("server-ca", authorities.server))
        )
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port)) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""

    access = authorities.access(None, key=key)
    async with controlling(authorities, keys) as controller:
        channel: Any = access.async_channel(f"localhost:{controller.port}")
        async with channel:
            ask = channel.unary_unary(METADATA)
            await ask(b"", metadata=access.metadata)
            before = await asyncio.to_thread(shown, controller.port)
            # Half of it: what is there goes on.
            (authorities.folder / "server.key").write_text("half a key")
            controller.guard.look()
            assert await asyncio.to_thread(shown, controller.port) == before
            authorities.certify_server()
            controller.guard.look()
            after = await asyncio.to_thread(shown, controller.port)
            assert after not in (before, b"")
            # Who was there stays.
            await ask(b"", metadata=access.metadata)
