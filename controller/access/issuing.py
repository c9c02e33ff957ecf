"""A private authority in a folder: it signs certificates of servers, fronts, workers and clients.

The folder holds `ca.pem` and `workers-ca.pem`, the authorities, and `NAME.pem` of each certificate. The private key of each
is in a `.key` of the same name. What a certificate is for is in the certificate itself, so nothing else is kept.
"""

from __future__ import annotations

import enum
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from clockwright.errors import ConfigError
from controller.access.key_file import read_text, replace_text

#: Authority of servers, fronts and clients, and that of workers: a client's certificate must not let a worker join.
AUTHORITY: Final = "ca"
WORKERS_AUTHORITY: Final = "workers-ca"

_AUTHORITY_DAYS = 3650
# Clocks of machines differ.
_EARLY = timedelta(hours=1)
# Certificates are renewed when less than this part of their time is left.
_LEFT = 1 / 3

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_NAME_CHARS_MAX = 64


class Purpose(enum.StrEnum):
    """What a certificate is for."""

    AUTHORITY = "authority"
    SERVER = "server"
    FRONT = "front"
    WORKER = "worker"
    CLIENT = "client"


_USES: Final = {
    Purpose.SERVER: (ExtendedKeyUsageOID.SERVER_AUTH,),
    # It serves clients, and is a client of the controller.
    Purpose.FRONT: (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    Purpose.WORKER: (ExtendedKeyUsageOID.CLIENT_AUTH,),
    Purpose.CLIENT: (ExtendedKeyUsageOID.CLIENT_AUTH,),
}


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate in the folder."""

    name: str
    kind: Purpose
    #: Host names, addresses or the holder's own name.
    names: tuple[str, ...]
    begins: datetime
    ends: datetime

    def is_due(self, now: datetime) -> bool:
        """Whether it should be renewed now."""
        return self.ends - now < _LEFT * (self.ends - self.begins)


def issue(
    folder: Path, kind: Purpose, name: str, hosts: Sequence[str], *, days: float, now: datetime
) -> Issued:
    """Make a certificate and its key, and at first the authorities. Overwrites nothing.

    Hosts are names and addresses under which a server or front is reached. It is valid for so many days, but no longer
    than its authority. Raises ConfigError if the name is taken or malformed, the authority has expired, or a file
    cannot be used.
    """
    reserved = (AUTHORITY, WORKERS_AUTHORITY)
    if not _NAME.fullmatch(name) or len(name) > _NAME_CHARS_MAX or name in reserved:
        raise ConfigError(
            f"found name {name!r}, expected at most {_NAME_CHARS_MAX} of A-Z, a-z, 0-9, _, -, . and none of "
            f"{', '.join(reserved)}"
        )
    names = [_general_name(host) for host in hosts]
    if kind is not Purpose.SERVER:
        # By this name the key file knows the holder.
        names.insert(0, x509.DNSName(name))
    with _locked(folder):
        for authority in reserved:
            if not _pem(folder, authority).exists():
                _make_authority(folder, authority, now)
        if _pem(folder, name).exists():
            raise ConfigError(
                f"{_pem(folder, name)} exists already; `clockwright certs renew {name}` gives it a later end"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.SubjectAlternativeName(list(dict.fromkeys(names))), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs=False), True),
            (x509.ExtendedKeyUsage(_USES[kind]), False),
        ]
        signer = WORKERS_AUTHORITY if kind is Purpose.WORKER else AUTHORITY
        made = _sign(folder, signer, name, key.public_key(), extensions, days=days, now=now)
        _write_key(_key(folder, name), key)
        replace_text(_pem(folder, name), made, mode=0o644)
        return _read(folder, name)


def renew(folder: Path, name: str, *, days: float | None, now: datetime) -> Issued:
    """Sign a certificate, or an authority's, again, with the same key and names, so that one file changes in one step.

    It is valid for so many days from now on; None: as long as before. Raises ConfigError if none has this name, its
    authority has expired, or a file cannot be used.
    """
    with _locked(folder):
        if not _pem(folder, name).exists():
            there = ", ".join(one.name for one in certificates(folder)) or "none"
            raise ConfigError(f"{_pem(folder, name)} does not exist, found {there}")
        found = _load(_pem(folder, name))
        lasts = found.not_valid_after_utc - found.not_valid_before_utc - _EARLY
        # What names the signer is added again: an authority's may have changed.
        extensions = [
            (each.value, each.critical)
            for each in found.extensions
            if not isinstance(each.value, x509.AuthorityKeyIdentifier | x509.SubjectKeyIdentifier)
        ]
        kind = _read(folder, name).kind
        signer = WORKERS_AUTHORITY if kind is Purpose.WORKER else AUTHORITY
        made = _sign(
            folder,
            name if kind is Purpose.AUTHORITY else signer,
            name,
            found.public_key(),
            extensions,
            days=lasts / timedelta(days=1) if days is None else days,
            now=now,
        )
        replace_text(_pem(folder, name), made, mode=0o644)
        return _read(folder, name)


def certificates(folder: Path) -> list[Issued]:
    """List the certificates of a folder, authorities first.

    Raises ConfigError if there is no such folder, or a file is no certificate.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; `clockwright certs add` makes it")
    found = [_read(folder, path.stem) for path in sorted(folder.glob("*.pem"))]
    return sorted(found, key=lambda one: one.kind is not Purpose.AUTHORITY)


def _pem(folder: Path, name: str) -> Path:
    return folder / f"{name}.pem"


def _key(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Have those who write a folder take turns."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None


def _make_authority(folder: Path, name: str, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(_key(folder, name), key)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage(signs=True), True),
    ]
    made = _sign(folder, name, name, key.public_key(), extensions, days=_AUTHORITY_DAYS, now=now)
    replace_text(_pem(folder, name), made, mode=0o644)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key, readable by this user only; an existing file stays."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists, but no certificate next to it; remove the key, or put its certificate back"
        ) from None
    with os.fdopen(handle, "wb") as file:
        file.write(pem)


def _sign(
    folder: Path,
    signer: str,
    name: str,
    public_key: object,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
    *,
    days: float,
    now: datetime,
) -> str:
    """Have an authority sign a certificate. Returns it in PEM."""
    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    own = signer == name
    path = _key(folder, signer)
    authority = None if own else _load(_pem(folder, signer))
    try:
        key = load_pem_private_key(read_text(path).encode(), None)
    except (ValueError, TypeError):  # garbage, or under a password
        key = None
    # What another key signs is not trusted.
    signs = public_key if authority is None else authority.public_key()
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != signs:
        raise ConfigError(
            f"{path}: expected the key of {_pem(folder, signer)} that `clockwright certs` made"
        )
    ends = now + timedelta(days=days)
    subject = _subject(f"Clockwright {name}" if own else name)
    issuer = subject
    if authority is not None:
        issuer = authority.subject
        if authority.not_valid_after_utc <= now:
            raise ConfigError(
                f"{_pem(folder, signer)} expired on {authority.not_valid_after_utc:%Y-%m-%d}; "
                f"`clockwright certs renew {signer}` gives it a later end"
            )
        ends = min(ends, authority.not_valid_after_utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
    )
    for value, critical in extensions:
        builder = builder.add_extension(value, critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"found host {host!r}, expected a name or an address, without a port"
            ) from None
        return x509.DNSName(host)


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read_text(path).encode())
    except ValueError as error:
        raise ConfigError(f"{path}: expected a certificate in PEM: {error}") from None


def _kind(found: x509.Certificate) -> Purpose:
    extensions = found.extensions
    if extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
        return Purpose.AUTHORITY
    uses = tuple(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    if found.issuer == _subject(f"Clockwright {WORKERS_AUTHORITY}"):
        return Purpose.WORKER
    return next(
        kind for kind, of_kind in _USES.items() if kind != Purpose.WORKER and of_kind == uses
    )


def _read(folder: Path, name: str) -> Issued:
    path = _pem(folder, name)
    found = _load(path)
    try:
        kind = _kind(found)
        names: tuple[str, ...] = ()
        if kind is not Purpose.AUTHORITY:
            there = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names = tuple(str(one.value) for one in there)
    except (x509.ExtensionNotFound, StopIteration):
        raise _foreign(path) from None
    if not isinstance(found.public_key(), ec.EllipticCurvePublicKey):
        raise _foreign(path)
    return Issued(name, kind, names, found.not_valid_before_utc, found.not_valid_after_utc)


def _foreign(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: expected a certificate that `clockwright certs` made; keep others elsewhere"
    )
