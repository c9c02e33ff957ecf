"""`clockwright keys`: who may do what, in a file that a controller reads again when it changes."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from clockwright.cli.flags import Json, checked_days
from clockwright.cli.show import print_json
from controller.access.roles import Role

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke keys of clients and workers.")

_File = Annotated[
    Path,
    typer.Option(
        "--keys", envvar="CLOCKWRIGHT_KEYS", help="The key file that `controller --keys` reads."
    ),
]

_ROLES_OF_CLIENTS = ("inference", "feedback", "metadata")


@keys.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Name of the key's holder.")],
    file: _File,
    role: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What it may do: {', '.join(role.value for role in Role)}; once per role. By default "
            f"{', '.join(_ROLES_OF_CLIENTS)}."
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of the key's requests.")] = "",
    days: Annotated[
        float | None,
        typer.Option(help="Days until it expires; by default it is valid until it is revoked."),
    ] = None,
    certificate: Annotated[
        str,
        typer.Option(
            metavar="KIND:VALUE",
            help="Register a name in a client's certificate instead of a key, such as DNS:web.example.",
        ),
    ] = "",
) -> None:
    """Make a key and print it once: the file holds only its SHA-256."""
    from controller.access.key_file import add_key
    from controller.access.roles import read_roles

    expires_s = math.inf
    if days is not None:
        lasting = timedelta(days=checked_days(days))
        expires_s = math.ceil((datetime.now(UTC) + lasting).timestamp())
    roles = read_roles(role or _ROLES_OF_CLIENTS, where="--role")
    key = add_key(file, name, roles, tenant=tenant, expires_s=expires_s, certificate=certificate)
    print(key or f"added {name}")


@keys.command("list")
def list_keys(file: _File, json: Json = False) -> None:
    """List keys and certificates: roles, tenant, expiry."""
    from controller.access.key_file import read_key_file
    from controller.access.roles import Role, say_roles

    now_s = time.time()
    grants = read_key_file(file)
    if json:
        print_json(
            [
                {
                    "name": grant.name,
                    "roles": [role.value for role in Role if role in grant.roles],
                    "tenant": grant.tenant,
                    "key": grant.key_id,
                    "certificate": grant.certificate,
                    "expires": _time(grant.expires_s),
                    "expired": grant.expires_s <= now_s,
                }
                for grant in grants
            ]
        )
        return
    if not grants:
        print("no keys")
    for grant in grants:
        shown = grant.certificate or f"key {grant.key_id}"
        tenant = f", tenant {grant.tenant}" if grant.tenant else ""
        until = _time(grant.expires_s)
        word = "expired" if grant.expires_s <= now_s else "good until"
        end = f", {word} {until}" if until else ""
        print(f"{grant.name}: {shown}, may {say_roles(grant.roles)}{tenant}{end}")


@keys.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key's holder.")], file: _File
) -> None:
    """Revoke a key. A running controller refuses it within two seconds."""
    from controller.access.key_file import revoke_key

    revoke_key(file, name)
    print(f"revoked {name}")


def _time(unix_s: float) -> str:
    """Write a time of a file; empty: never."""
    return "" if math.isinf(unix_s) else datetime.fromtimestamp(unix_s, UTC).isoformat()
