"""The files of who may do what: written whole, read again when they change, kept when they break."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from jwt.algorithms import ECAlgorithm
from typing_extensions import override

from clockwright.cli.main import main
from clockwright.client.channel import Access
from clockwright.errors import ConfigError, DeniedError
from controller.access.authoriser import Authoriser, Certificate, Credentials, credentials_of
from controller.access.authorities import read_authorities
from controller.access.config import AccessConfig
from controller.access.guard import Guard
from controller.access.issuer_keys import is_url
from controller.access.key_file import add_key, read_key_file, revoke_key
from controller.access.roles import Role
from controller.front.methods import METHODS
from controller.process.app import Ports, running, serve
from controller.process.config import ControllerConfig

INFER = METHODS["/inference.GRPCInferenceService/ModelInfer"]
ATTACH = METHODS["/clockwright.v1.WorkerService/Attach"]
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
CLIENT = frozenset((Role.INFERENCE,))
#: Exit code, standard output, standard error.
Run = Callable[..., tuple[int, str, str]]


def bearer(secret: str) -> Credentials:
    return credentials_of([("authorization", f"Bearer {secret}")])


def tenant_of(authoriser: Authoriser, key: str) -> str | None:
    """Whose share a key's requests use; None: it opens nothing."""
    try:
        return authoriser.admit(INFER, bearer(key), now_s=0).tenant
    except DeniedError:
        return None


# --- the file of keys -----------------------------------------------------------------------------


def test_a_key_is_added_and_revoked_and_the_file_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    web, ops = add_key(path, "web", CLIENT, tenant="gold"), add_key(path, "ops", CLIENT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert web not in path.read_text()
    assert web.split("_", 2)[2] not in path.read_text()
    assert [grant.name for grant in read_key_file(path)] == ["web", "ops"]
    with pytest.raises(ConfigError, match="key web exists already"):
        add_key(path, "web", CLIENT)
    with pytest.raises(ConfigError, match="found name 'a b'"):
        add_key(path, "a b", CLIENT)
    revoke_key(path, "web")
    with pytest.raises(ConfigError, match="no key web, found ops"):
        revoke_key(path, "web")
    path.chmod(0o640)
    add_key(path, "rack-7", frozenset((Role.WORKER,)), certificate="DNS:rack-7")
    assert path.stat().st_mode & 0o777 == 0o640
    assert ops != web


def test_keys_that_are_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    adding = [
        threading.Thread(target=add_key, args=(path, f"key-{index}", CLIENT)) for index in range(8)
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert {grant.name for grant in read_key_file(path)} == {f"key-{i}" for i in range(8)}


def test_a_file_that_everybody_may_write_is_no_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, "web", CLIENT)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="all users may write it"):
        Guard(AccessConfig(keys_file=path))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clockwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        if isinstance(code, str):
            return 1, captured.out, captured.err + code
        return int(code or 0), captured.out, captured.err

    return run_command


def test_the_command_makes_lists_and_revokes_keys(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    where = ("--keys", str(path))
    code, key, _ = run("keys", "add", "web", "--tenant", "gold", "--days", "30", *where)
    assert code == 0
    assert tenant_of(Guard(AccessConfig(keys_file=path)).authoriser, key.strip()) == "gold"
    roles = ("--role", "worker", "--certificate", "URI:spiffe://example/w")
    assert run("keys", "add", "w", *roles, *where)[:2] == (0, "added w\n")
    _, listed, _ = run("keys", "list", *where)
    web, worker = listed.splitlines()
    assert web.startswith(f"web: key {key[3:11]}, may inference, feedback, metadata, tenant gold")
    assert worker == "w: URI:spiffe://example/w, may worker"
    _, text, _ = run("keys", "list", "--json", *where)
    assert [row["roles"] for row in json.loads(text)][1] == ["worker"]
    assert run("keys", "revoke", "web", *where)[:2] == (0, "revoked web\n")
    for arguments, words in (
        (("add", "x", "--role", "root"), "--role: found role 'root', expected some of health"),
        (("add", "x", "--days", "nan"), "--days is nan"),
        (("revoke", "web"), "no key web, found w"),
        (("list", "--keys", str(tmp_path / "none")), "No such file"),
    ):
        code, _, err = run("keys", *arguments, *(where if "list" not in arguments else ()))
        assert code == 1
        assert words in err


# --- reading again --------------------------------------------------------------------------------


def test_keys_are_read_again_when_their_file_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    web = add_key(path, "web", CLIENT, tenant="gold")
    guard = Guard(AccessConfig(keys_file=path))
    authoriser = guard.authoriser
    caller = authoriser.admit(INFER, bearer(web), now_s=0)
    late = add_key(path, "late", CLIENT, tenant="silver")
    assert tenant_of(authoriser, late) is None
    guard.look()
    assert (tenant_of(authoriser, web), tenant_of(authoriser, late)) == ("gold", "silver")
    assert not caller.over
    # What cannot be read changes nothing, and is said once.
    good = path.read_text()
    for broken in (lambda: path.write_text(good + "{"), path.unlink):
        broken()
        caplog.clear()
        guard.look()
        guard.look()
        assert len([row for row in caplog.records if row.levelname == "ERROR"]) == 1
        assert tenant_of(authoriser, web) == "gold"
    path.write_text("")
    guard.look()
    assert tenant_of(authoriser, web) is None
    assert caller.over


@pytest.mark.parametrize("leads", [True, False])
def test_sighup_has_everything_read_again_whatever_its_files_look_like(
    tmp_path: Path, leads: bool
) -> None:
    path = tmp_path / "keys"
    key = add_key(path, "web", frozenset((Role.METADATA,)))
    (grant,) = read_key_file(path)
    before = path.stat()

    async def is_known(port: int) -> bool:
        access = Access(key=key)
        async with access.async_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary(METADATA)(b"", metadata=access.metadata)
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.UNAUTHENTICATED
        return True

    async def main() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Where nobody says who leads, it stands by.
        lease = None if leads else "etcd://127.0.0.1:1"
        config = ControllerConfig(port=0, access=AccessConfig(keys_file=path), lease=lease)

        def started(ports: Ports) -> None:
            port.set_result(ports.port)

        serving = asyncio.create_task(
            serve(config, started=started) if leads else serve(config, standing_by=started)
        )
        assert await is_known(await port)
        # Another key in the same number of bytes, of the same moment.
        sha256 = grant.key_sha256.hex()
        path.write_text(path.read_text().replace(sha256, sha256[::-1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.kill(os.getpid(), signal.SIGHUP)
        # Each call takes its time.
        while await is_known(port.result()):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0

    asyncio.run(main())


# --- authorities, tokens, issuers -----------------------------------------------------------------


def certificate(authority: trustme.CA, name: str) -> bytes:
    pem = authority.issue_cert(name).cert_chain_pems[0].bytes()
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def test_a_certificate_is_known_by_the_one_that_signed_it(tmp_path: Path) -> None:
    clients, workers, others = trustme.CA(), trustme.CA(), trustme.CA()
    client_ca, worker_ca = tmp_path / "clients.pem", tmp_path / "workers.pem"
    clients.cert_pem.write_to_path(client_ca)
    workers.cert_pem.write_to_path(worker_ca)
    is_client, is_worker = read_authorities(client_ca, worker_ca)
    for authority, expected in (
        *((clients, (True, False)), (workers, (False, True)), (others, (False, False))),
        # One who works for the workers' authority is not the authority, unless the file says so.
        (workers.create_child_ca(), (False, False)),
    ):
        der = certificate(authority, "web.example")
        assert (is_client(der), is_worker(der)) == expected
    with pytest.raises(ConfigError, match="found one authority in both"):
        read_authorities(client_ca, client_ca)
    worker_ca.write_text("no certificate")
    with pytest.raises(ConfigError, match="expected certificates in PEM"):
        read_authorities(client_ca, worker_ca)


def test_the_workers_token_is_read_again_and_a_short_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t" * 40 + "\n")
    guard = Guard(AccessConfig(worker_token_file=path))

    def joins(token: str) -> bool:
        try:
            guard.authoriser.admit(ATTACH, bearer(token), now_s=0)
        except DeniedError:
            return False
        return True

    # Clients of such a controller need nothing.
    assert guard.authoriser.admit(INFER, Credentials(), now_s=0).tenant is None
    assert (joins("t" * 40), joins("u" * 30)) == (True, False)
    path.write_text("u" * 30)
    guard.look()
    assert (joins("t" * 40), joins("u" * 30)) == (False, True)
    path.write_text("short")
    with pytest.raises(ConfigError, match="found 5 characters, expected a token of 20 or more"):
        Guard(AccessConfig(worker_token_file=path))


@contextmanager
def issuing(answers: list[bytes]) -> Iterator[str]:
    """A server that gives each answer once, the last one for good; yields its address."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(200 if data else 500)
            self.end_headers()
            self.wfile.write(data)

        @override
        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/keys"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_issuers_keys_are_fetched_and_tokens_wait_for_them() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    shown = {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "k1"}
    # Once there is nobody, once nonsense, then the keys.
    answers = [b"", b"nonsense", json.dumps({"keys": [shown]}).encode()]
    claims = {"iss": "i", "aud": "a", "sub": "ann", "exp": 1000, "roles": ["inference"]}
    token = jwt.encode({**claims, "tenant": "gold"}, key, "ES256", headers={"kid": "k1"})

    async def main(url: str) -> None:
        config = AccessConfig(issuer="i", audience="a", issuer_keys=url)
        guard = Guard(config, clock=lambda: 0.0)
        found = []
        for _ in range(3):
            found.append(tenant_of(guard.authoriser, token))
            guard.read_again()  # Does not wait for the minute to be over.
            await guard.fetch()
        assert found == [None, None, None]
        assert tenant_of(guard.authoriser, token) == "gold"

    with issuing(answers) as url:
        asyncio.run(main(url))


def test_keys_come_over_https_or_from_this_machine() -> None:
    assert is_url("https://login.example/keys")
    assert is_url("http://127.0.0.1:1/keys")
    assert not is_url("/etc/keys.json")
    with pytest.raises(ConfigError, match="expected https"):
        is_url("http://login.example/keys")


def test_settings_that_cannot_be_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected all three or none"):
        AccessConfig(issuer="i")
    with pytest.raises(ConfigError, match="expected keys_file too"):
        AccessConfig(client_ca=tmp_path)
    for missing in ("keys_file", "worker_token_file", "worker_ca"):
        with pytest.raises(ConfigError, match="No such file"):
            Guard(AccessConfig(**{missing: tmp_path / "none"}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="certificates come with TLS"):
        ControllerConfig(access=AccessConfig(worker_ca=tmp_path / "ca"))


# --- secure by default ----------------------------------------------------------------------------


def test_a_controller_that_others_reach_needs_keys_and_tls_or_somebody_who_says_otherwise(
    tmp_path: Path,
) -> None:
    tls = {"tls_certificate": tmp_path / "cert", "tls_key": tmp_path / "key"}
    keys = AccessConfig(keys_file=tmp_path / "keys")
    ControllerConfig(host="127.0.0.1")
    ControllerConfig(host="0.0.0.0", access=AccessConfig(insecure=True))
    ControllerConfig(host="0.0.0.0", access=keys, **tls)  # type: ignore[arg-type]
    for access, files, words in (
        (AccessConfig(), {}, "without keys .* without TLS .*clockwright keys add .*--insecure"),
        (keys, {}, "without TLS"),
        (AccessConfig(), tls, "without keys"),
        # A token for workers keeps no client out.
        (AccessConfig(worker_token_file=tmp_path / "token"), tls, "without keys"),
    ):
        with pytest.raises(ConfigError, match=words):
            ControllerConfig(host="0.0.0.0", access=access, **files)  # type: ignore[arg-type]


def test_what_insecure_means_is_said_at_each_start(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        config = ControllerConfig(host="0.0.0.0", port=0, access=AccessConfig(insecure=True))
        async with running(config):
            pass

    asyncio.run(main())
    told = [row.getMessage() for row in caplog.records if "--insecure" in row.getMessage()]
    assert [words.split(": ")[1].split()[:2] for words in told] == [
        ["without", "keys"],
        ["without", "TLS"],
    ]


def test_a_certificate_shows_no_key(tmp_path: Path) -> None:
    assert "der" not in repr(Certificate(("DNS:x",), b"\x30"))
