"""`clockwright certs`: what it makes lets servers, fronts, workers and clients in, and nobody else."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from clockwright import (
    Access,
    AsyncClient,
    Client,
    ClockwrightError,
    ConfigError,
)
from clockwright.cli.main import main
from clockwright.wire.tls_faults import tls_fault
from controller.access.config import AccessConfig
from controller.access.issuing import Purpose, certificates, issue, renew
from controller.access.key_file import add_key
from controller.access.roles import Role
from controller.process.app import running
from controller.process.config import ControllerConfig
from tests.kit.processes import listening, until, worker, write_models
from tests.kit.slow_echo import SlowEcho, serve

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command prints, or its error, as lines."""

    def run_command(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["clockwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        told = capsys.readouterr().out
        return (told if caught.value.code in (0, None) else str(caught.value.code)).splitlines()

    return run_command


def test_a_certificate_ends_when_it_is_said_to_and_never_after_its_authority(
    tmp_path: Path,
) -> None:
    made = issue(tmp_path, Purpose.CLIENT, "web", [], days=30, now=NOW)
    assert (made.kind, made.names, made.ends) == (Purpose.CLIENT, ("web",), NOW + 30 * DAY)
    assert not made.is_due(NOW + 19 * DAY)
    assert made.is_due(NOW + 21 * DAY)
    late = issue(tmp_path, Purpose.SERVER, "head", ["head", "10.0.0.1"], days=9999, now=NOW)
    authority = certificates(tmp_path)[0]
    assert (authority.name, authority.kind) == ("ca", Purpose.AUTHORITY)
    assert late.ends == authority.ends == NOW + 3650 * DAY
    # After that it signs nothing, until it is renewed itself; what it has signed stays good.
    then = authority.ends + DAY
    with pytest.raises(
        ConfigError, match=r"ca\.pem expired on 2036-02-27; `clockwright certs renew ca`"
    ):
        renew(tmp_path, "web", days=None, now=then)
    with pytest.raises(ConfigError, match="expired"):
        issue(tmp_path, Purpose.CLIENT, "late", [], days=9, now=then)
    assert not list(tmp_path.glob("late*"))
    assert renew(tmp_path, "ca", days=None, now=then).ends == then + 3650 * DAY
    assert renew(tmp_path, "web", days=None, now=then).ends == then + 30 * DAY


def test_nothing_is_overwritten_and_keys_are_their_owners_only(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    for kind in (Purpose.SERVER, Purpose.FRONT, Purpose.WORKER, Purpose.CLIENT):
        issue(
            folder,
            kind,
            f"a-{kind}",
            ["h.example"] * (kind in ("server", "front")),
            days=9,
            now=NOW,
        )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {
        f"{path.stem}.key": 0o600 for path in folder.glob("*.pem")
    }
    with pytest.raises(ConfigError, match=r"a-worker\.pem exists already"):
        issue(folder, Purpose.CLIENT, "a-worker", [], days=9, now=NOW)
    (folder / "a-client.pem").rename(tmp_path / "elsewhere.pem")
    with pytest.raises(ConfigError, match=r"a-client\.key exists, but no certificate next to it"):
        issue(folder, Purpose.CLIENT, "a-client", [], days=9, now=NOW)
    (tmp_path / "elsewhere.pem").rename(folder / "a-client.pem")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    renewed = renew(folder, "a-front", days=3, now=NOW + DAY)
    assert renewed.ends == NOW + 4 * DAY
    assert (renewed.kind, renewed.names) == (Purpose.FRONT, ("a-front", "h.example"))
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"a-front.pem"}


@pytest.mark.parametrize(
    ("name", "hosts", "complaint"),
    [
        ("ca", [], "found name 'ca'"),
        ("../web", [], r"found name '\.\./web'"),
        ("", [], "found name ''"),
        (
            "web",
            ["web:8001"],
            "found host 'web:8001', expected a name or an address, without a port",
        ),
    ],
)
def test_what_no_certificate_can_be_made_of_is_named(
    tmp_path: Path, name: str, hosts: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        issue(tmp_path / "certs", Purpose.SERVER, name, hosts, days=9, now=NOW)
    assert not list(tmp_path.rglob("*.pem"))


@pytest.mark.parametrize("key", ["garbage", "another's", "under a password"])
def test_an_authority_signs_with_its_own_key_only(tmp_path: Path, key: str) -> None:
    issue(tmp_path, Purpose.CLIENT, "web", [], days=9, now=NOW)
    path = tmp_path / "ca.key"
    own = load_pem_private_key(path.read_bytes(), None)
    hidden = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    other = (tmp_path / "workers-ca.key").read_bytes()
    path.write_bytes({"garbage": b"?", "another's": other}.get(key, hidden))
    for name in ("web", "ca"):
        with pytest.raises(ConfigError, match=r"ca\.key: expected the key of \S*ca\.pem"):
            renew(tmp_path, name, days=9, now=NOW)
    with pytest.raises(ConfigError, match="expected the key"):
        issue(tmp_path, Purpose.CLIENT, "app", [], days=9, now=NOW)
    assert not list(tmp_path.glob("app.*"))


@pytest.mark.parametrize("kind", ["rsa", "ec"])
def test_a_certificate_from_elsewhere_is_not_renewed(tmp_path: Path, kind: str) -> None:
    issue(tmp_path, Purpose.CLIENT, "web", [], days=9, now=NOW)
    key = (
        rsa.generate_private_key(65537, 2048)
        if kind == "rsa"
        else ec.generate_private_key(ec.SECP256R1())
    )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "theirs")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, NOW, NOW + DAY)
    # An authority, or none of what `clockwright certs` makes.
    basic = x509.BasicConstraints(ca=kind == "rsa", path_length=None)
    made = builder.add_extension(basic, critical=True).sign(key, SHA256())
    (tmp_path / "theirs.pem").write_bytes(made.public_bytes(Encoding.PEM))
    for act in (lambda: renew(tmp_path, "theirs", days=9, now=NOW), lambda: certificates(tmp_path)):
        with pytest.raises(ConfigError, match=r"theirs\.pem: expected a certificate that"):
            act()


def test_the_commands_list_and_renew_what_is_due(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("certs", "list") == [
        "error: certs is not a folder; `clockwright certs add` makes it"
    ]
    assert run("certs", "add", "server", "head")[0].startswith(
        "certs/head.pem: server, good until "
    )
    old = datetime.now(UTC) - 10 * DAY
    issue(Path("certs"), Purpose.CLIENT, "old", [], days=9, now=old)
    issue(Path("certs"), Purpose.WORKER, "due", [], days=14, now=old)
    listed = {line.partition(":")[0]: line for line in run("certs", "list")}
    assert [*listed] == ["ca", "workers-ca", "due", "head", "old"]
    assert "expired on" in listed["old"]
    assert listed["due"].endswith("; renew it")
    assert "localhost, 127.0.0.1, ::1, good until" in listed["head"]
    run("certs", "add", "front", "rack", "--host", "rack.example", "--host", "::1")
    (rack,) = [line for line in run("certs", "list") if line.startswith("rack:")]
    assert "front of rack, rack.example, ::1, localhost, 127.0.0.1, good until" in rack
    rows = json.loads("\n".join(run("certs", "list", "--json")))
    assert [row["name"] for row in rows if row["due"]] == ["due", "old"]
    assert [row["name"] for row in rows if row["expired"]] == ["old"]
    assert [line.split(":")[0] for line in run("certs", "renew")] == [
        "certs/due.pem",
        "certs/old.pem",
    ]
    assert run("certs", "renew") == ["no certificate is due"]
    assert run("certs", "add", "king", "x") == [
        "error: found 'king', expected one of server, front, worker, client"
    ]
    assert run("certs", "renew", "head", "--days", "nan") == [
        "error: --days is nan, expected more than 0 and less than 100000"
    ]


def test_what_is_printed_starts_a_controller_a_worker_a_front_and_lets_a_client_in(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    """Every process of its own shows and asks for certificates, over the loopback, which no --host has to name."""
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path / "models", echo="echo-4")
    made = {
        kind: run("certs", "add", kind, f"a-{kind}", *host)
        for kind, host in (
            ("server", ["--host", "head.example"]),
            ("worker", []),
            ("front", ["--host", "front.example", "--host", "127.0.0.1"]),
            ("client", []),
        )
    }

    def flags(line: str, controller: str = "") -> list[str]:
        words = line.replace("HOST:8001", controller).replace("0.0.0.0", "127.0.0.1")
        return shlex.split(words)[2:]

    for kind in ("front", "client"):
        assert run(*shlex.split(made[kind][1])[1:]) == [f"added a-{kind}"]
    with ExitStack() as stack:
        serving = ["--models", "models", "--port", "0", "--state", "state"]
        arguments = [*flags(made["server"][1]), *serving]
        _, address = stack.enter_context(listening("controller", *arguments))
        modelled = ["--device", "modelled:1ms", "--pages", "4", "--cache-dir", str(cache_dir)]
        stack.enter_context(worker(address, *flags(made["worker"][1], address)[2:], *modelled))
        _, front = stack.enter_context(
            listening("front", *flags(made["front"][2], address), "--port", "0")
        )
        shown = iter(flags(made["client"][2], front))
        files = dict(zip(shown, shown, strict=True))
        access = Access(
            ca=Path(files["--tls-ca"]),
            certificate=Path(files["--tls-cert"]),
            certificate_key=Path(files["--tls-key"]),
        )
        row = np.ones((1, 4), np.float32)
        for where in (address, front):
            with Client(where, access) as client:
                until(client.is_ready, what="the worker has joined")
                result = client.infer("echo", {"input": row}, slo_ms=60_000)
                assert result.outputs["output"].shape == row.shape


#: What a peer shows or trusts, and what it is told.
REFUSED = (
    ("old", "has expired, or another authority signed it"),
    ("stranger", "has expired, or another authority signed it"),
    ("trusts another", "not of the authority that is trusted here"),
)


async def test_who_shows_what_has_expired_or_is_anothers_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    now = datetime.now(UTC)
    issue(ours, Purpose.SERVER, "head", ["127.0.0.1"], days=9, now=now)
    for kind in (Purpose.CLIENT, Purpose.WORKER):
        issue(ours, kind, kind.value, [], days=9, now=now)
        issue(ours, kind, f"old-{kind}", [], days=9, now=now - 10 * DAY)
        issue(theirs, kind, kind.value, [], days=9, now=now)
    add_key(ours / "keys", "c", frozenset((Role.METADATA,)), certificate="DNS:client")

    def access(kind: str, what: str = "") -> Access:
        folder = theirs if what == "stranger" else ours
        name = f"old-{kind}" if what == "old" else kind
        return Access(
            ca=(theirs if what == "trusts another" else ours) / "ca.pem",
            certificate=folder / f"{name}.pem",
            certificate_key=folder / f"{name}.key",
        )

    def config(name: str) -> ControllerConfig:
        return ControllerConfig(
            port=0,
            tls_certificate=ours / f"{name}.pem",
            tls_key=ours / f"{name}.key",
            access=AccessConfig(
                keys_file=ours / "keys",
                client_ca=ours / "ca.pem",
                worker_ca=ours / "workers-ca.pem",
            ),
        )

    async def fault(port: int, shown: Access) -> str:
        async with AsyncClient(f"127.0.0.1:{port}", shown) as client:
            with pytest.raises(ClockwrightError) as caught:
                await client.metadata("x")
        return str(caught.value)

    async with running(config("head")) as controller:
        assert "there is no model 'x'" in await fault(controller.port, access("client"))
        # A worker's certificate lets it join, and do nothing else.
        assert "needs role metadata" in await fault(controller.port, access("worker"))
        for what, words in REFUSED:
            assert words in await fault(controller.port, access("client", what))
            caplog.clear()
            joining = asyncio.create_task(
                serve(
                    f"127.0.0.1:{controller.port}",
                    tmp_path,
                    SlowEcho(tmp_path / "cache"),
                    "w",
                    access("worker", what),
                )
            )
            while words not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            joining.cancel()
            await asyncio.wait([joining])
            assert not controller.links.links
    issue(ours, Purpose.SERVER, "old-head", ["127.0.0.1"], days=9, now=now - 10 * DAY)
    issue(ours, Purpose.SERVER, "elsewhere", ["other.example"], days=9, now=now)
    for name, words in (
        ("old-head", "the server's certificate has expired"),
        ("elsewhere", "the server's certificate does not name the host of this address"),
    ):
        async with running(config(name)) as controller:
            assert words in await fault(controller.port, access("client"))


def test_what_is_said_of_other_failures_is_left_as_it_is() -> None:
    assert tls_fault("failed to connect: Connection refused") == ""
