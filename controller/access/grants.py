"""What keys and certificates allow, as lines of a file. No I/O here.

A file of grants is JSON Lines, one object each::

    {"name": "web", "roles": ["inference"], "tenant": "gold", "key": "9f2c01ab", "sha256": "..."}
    {"name": "rack-7", "roles": ["worker"], "certificate": "DNS:rack-7.example", "expires": "2027-01-01T00:00:00Z"}

Only the SHA-256 of a key is kept. A slow hash would not be safer, because a key is 256 random bits and not a password
that could be guessed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from clockwright.errors import ConfigError
from clockwright.units import NAME_CHARS_MAX
from controller.access.roles import Role, read_roles

_NAME = re.compile(r"[A-Za-z0-9_.@:/+-]+")
_KEY = re.compile(r"cw_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
_KEY_ID = re.compile(r"[0-9a-f]{8}")
_CERTIFICATE_NAME = re.compile(r"[A-Za-z ]+:.+")

#: Bytes of randomness in a key.
SECRET_BYTES = 32
KEY_ID_BYTES = 4
#: Longest line: a thousand roles would fit in.
_LINE_CHARS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Grant:
    """What the holder of a key, a certificate or a token may do."""

    #: Name for messages.
    name: str
    roles: frozenset[Role]
    #: Tenant of the requests; empty: no tenant.
    tenant: str = ""
    #: Unix time at which it expires, in s.
    expires_s: float = math.inf
    #: The public part of a key, and the SHA-256 of the whole; empty: it is not a key.
    key_id: str = ""
    key_sha256: bytes = b""
    #: Name in a client's certificate as KIND:VALUE, such as `DNS:web.example`; empty: it is not a certificate.
    certificate: str = ""


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    roles: list[str]
    tenant: str = ""
    expires: datetime | None = None
    key: str = ""
    sha256: str = ""
    certificate: str = ""


def make_key(key_id: bytes, secret: str) -> str:
    """Make a key's text of `KEY_ID_BYTES` random bytes, and of `SECRET_BYTES` in URL-safe base64."""
    return f"cw_{key_id.hex()}_{secret}"


def id_of(key: str) -> str:
    """Return the public part of a key; empty: it is not one of our keys."""
    match = _KEY.fullmatch(key)
    return match[1] if match else ""


def digest(secret: str) -> bytes:
    """Hash a key or token as files keep it."""
    return hashlib.sha256(secret.encode()).digest()


def read_grants(text: str, *, where: str) -> tuple[Grant, ...]:
    """Read the lines of a file, named `where` in messages; empty lines and comments behind # are skipped.

    Raises ConfigError if a line is malformed, or two have the same name, key or certificate.
    """
    grants: list[Grant] = []
    taken: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        place = f"{where}:{number}"
        grant = _read_line(line, place)
        for kind in ("name", "key_id", "certificate"):
            value: str = getattr(grant, kind)
            if value and (earlier := taken.setdefault((kind, value), number)) != number:
                raise ConfigError(f"{place}: found {kind} {value!r} as in line {earlier}")
        grants.append(grant)
    return tuple(grants)


def write_grants(grants: Iterable[Grant]) -> str:
    """Make the text that `read_grants` reads."""
    return "".join(
        msgspec.json.encode(
            _Line(
                name=grant.name,
                roles=[role.value for role in Role if role in grant.roles],
                tenant=grant.tenant,
                expires=(
                    None
                    if math.isinf(grant.expires_s)
                    else datetime.fromtimestamp(grant.expires_s, UTC)
                ),
                key=grant.key_id,
                sha256=grant.key_sha256.hex(),
                certificate=grant.certificate,
            )
        ).decode()
        + "\n"
        for grant in grants
    )


def check_grant(grant: Grant, *, where: str) -> None:
    """Check a grant. Raises ConfigError if a field is malformed, or it allows nothing."""
    if not _NAME.fullmatch(grant.name) or len(grant.name) > NAME_CHARS_MAX:
        raise ConfigError(
            f"{where}: found name {grant.name[:80]!r}, expected letters, digits and _.@:/+-,"
            f" {NAME_CHARS_MAX} at most"
        )
    if len(grant.tenant) > NAME_CHARS_MAX or not grant.tenant.isprintable():
        raise ConfigError(f"{where}: found tenant {grant.tenant[:80]!r}, expected a shorter name")
    if not grant.roles:
        raise ConfigError(f"{where}: found no roles, expected one or more")
    if bool(grant.key_id) == bool(grant.certificate):
        raise ConfigError(f"{where}: expected either a key or a certificate")
    if grant.certificate and not _CERTIFICATE_NAME.fullmatch(grant.certificate):
        raise ConfigError(
            f"{where}: found certificate {grant.certificate[:80]!r}, expected KIND:VALUE such as"
            " CN:web, DNS:web.example or URI:spiffe://example/web"
        )


def name_list(grants: Sequence[Grant]) -> str:
    """List the names of grants."""
    return ", ".join(grant.name for grant in grants[:10]) or "none"


def _read_line(line: str, place: str) -> Grant:
    if len(line) > _LINE_CHARS_MAX:
        raise ConfigError(f"{place}: found {len(line)} characters, expected fewer")
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise ConfigError(f"{place}: {error}") from None
    expires_s = math.inf
    if found.expires is not None:
        if found.expires.tzinfo is None:
            raise ConfigError(f"{place}: expires: expected a time zone, such as Z behind it")
        expires_s = found.expires.timestamp()
    try:
        sha256 = bytes.fromhex(found.sha256)
    except ValueError:
        sha256 = b""
    if found.key and (
        not _KEY_ID.fullmatch(found.key) or len(sha256) != hashlib.sha256().digest_size
    ):
        raise ConfigError(f"{place}: expected 8 hexadecimal digits as key, and 64 as its sha256")
    grant = Grant(
        name=found.name,
        roles=read_roles(found.roles, where=place),
        tenant=found.tenant,
        expires_s=expires_s,
        key_id=found.key,
        key_sha256=sha256 if found.key else b"",
        certificate=found.certificate,
    )
    check_grant(grant, where=place)
    return grant
