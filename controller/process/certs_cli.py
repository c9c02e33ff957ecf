"""`clockwright certs`: a private authority, and certificates of servers, fronts, workers and clients."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clockwright.cli.flags import Json, checked_days
from clockwright.cli.show import print_json
from clockwright.errors import ConfigError

# With the library for certificates, which takes longer to import than help takes to print.
if TYPE_CHECKING:
    from controller.access.issuing import Issued, Purpose

certs = typer.Typer(
    no_args_is_help=True,
    help="Make and renew TLS certificates, signed by an authority of your own.",
)

_KINDS = ("server", "front", "worker", "client")
# Commands on the same machine ask there by default.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_Folder = Annotated[
    Path,
    typer.Option(
        "--certs", envvar="CLOCKWRIGHT_CERTS", help="Folder of the authorities and certificates."
    ),
]


@certs.command("add")
def add(
    kind: Annotated[str, typer.Argument(help=f"What it is for: {', '.join(_KINDS)}.")],
    name: Annotated[str, typer.Argument(help="Name of the holder, and of the files.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address under which a server or front is reached; repeat per name. By default "
            "this machine's name. Always with localhost, 127.0.0.1 and ::1."
        ),
    ] = None,
    days: Annotated[float, typer.Option(help="Days until it expires.")] = 365,
    folder: _Folder = Path("certs"),
) -> None:
    """Make a certificate and its key, and at first the authorities. Print the flags that use it.

    It overwrites nothing. Keys are readable by this user only.
    """
    from controller.access.issuing import Purpose, issue

    if kind not in _KINDS:
        raise ConfigError(f"found {kind!r}, expected one of {', '.join(_KINDS)}")
    is_reached = kind in ("server", "front")
    if host and not is_reached:
        raise ConfigError(f"--host: a {kind} is not reached under a name; leave it out")
    hosts = [*(host or [socket.gethostname()]), *_LOOPBACK] if is_reached else []
    made = issue(folder, Purpose(kind), name, hosts, days=checked_days(days), now=datetime.now(UTC))
    _say(folder, made)
    for line in _use(folder, made.kind, name):
        print(line)


@certs.command("list")
def list_certificates(folder: _Folder = Path("certs"), json: Json = False) -> None:
    """List certificates: what for, names, expiry."""
    from controller.access.issuing import certificates

    now = datetime.now(UTC)
    found = certificates(folder)
    if json:
        print_json(
            [
                {
                    "name": one.name,
                    "kind": one.kind.value,
                    "names": list(one.names),
                    "expires": one.ends.isoformat(),
                    "due": one.is_due(now),
                    "expired": one.ends <= now,
                }
                for one in found
            ]
        )
        return
    if not found:
        print("no certificates")
    for one in found:
        names = f" of {', '.join(one.names)}" if one.names else ""
        word = "expired on" if one.ends <= now else "good until"
        due = "; renew it" if one.is_due(now) else ""
        print(f"{one.name}: {one.kind.value}{names}, {word} {one.ends:%Y-%m-%d %H:%M} UTC{due}")


@certs.command("renew")
def renew_certificates(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Which; by default those with less than a third of their time left."),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(help="Days until it expires; by default as many as it had."),
    ] = None,
    folder: _Folder = Path("certs"),
) -> None:
    """Give certificates, or authorities, a later end. Keys and names stay, so files are replaced one by one.

    Running servers show a renewed certificate within a second; workers and fronts when they connect again.
    """
    from controller.access.issuing import certificates, renew

    now = datetime.now(UTC)
    lasting = None if days is None else checked_days(days)
    # Authorities come first, so that what they sign need not end with their old certificate.
    due = names or [one.name for one in certificates(folder) if one.is_due(now)]
    for name in due:
        _say(folder, renew(folder, name, days=lasting, now=now))
    if not due:
        print("no certificate is due")


def _say(folder: Path, made: Issued) -> None:
    print(f"{folder / made.name}.pem: {made.kind.value}, good until {made.ends:%Y-%m-%d %H:%M} UTC")


def _use(folder: Path, kind: Purpose, name: str) -> list[str]:
    """Which flags use a certificate, and which commands come before."""
    ca, own = folder / "ca.pem", f"{folder / name}.pem"
    key = f"{folder / name}.key"
    register = f"clockwright keys add {name} --certificate DNS:{name} --keys keys"
    if kind.value == "server":
        return [
            f"clockwright controller --host 0.0.0.0 --keys keys --tls-cert {own} --tls-key {key} "
            f"--tls-client-ca {ca} --tls-worker-ca {folder / 'workers-ca.pem'}",
            f"all who connect to it: --tls-ca {ca}, a front: --controller-ca {ca}",
        ]
    if kind.value == "front":
        return [
            f"{register} --role front",
            f"clockwright front --controller HOST:8001 --controller-ca {ca} --front-cert {own} --front-key {key} "
            f"--host 0.0.0.0 --keys keys --tls-cert {own} --tls-key {key} --tls-client-ca {ca}",
        ]
    flags = f"--tls-ca {ca} --tls-cert {own} --tls-key {key}"
    if kind.value == "worker":
        return [f"clockwright worker --controller HOST:8001 {flags}"]
    return [register, f"clockwright infer MODEL --random --server HOST:8001 {flags}"]
