"""Files of certificate authorities, and which of them signed a peer's certificate.

TLS has already verified a client's certificate, its times and its chain to a trusted authority, but does not say which
authority. Clients' and workers' authorities are trusted for different roles, so the signature itself is checked: the
signing certificate, an authority's or an intermediate one, must be in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from clockwright.errors import ConfigError
from controller.access.key_file import read_text


def read_authorities(
    client_ca: Path | None, worker_ca: Path | None
) -> tuple[Callable[[bytes], bool], Callable[[bytes], bool]]:
    """Read the authorities of clients and of workers. Each result tells whether they signed a certificate in DER.

    Raises ConfigError if a file does not hold certificates in PEM, or both hold the same one.
    """
    clients, workers = _read(client_ca), _read(worker_ca)
    keys = [authority.public_key() for authority in clients]
    if any(authority.public_key() in keys for authority in workers):
        raise ConfigError(
            f"{client_ca}, {worker_ca}: found one authority in both, expected workers to have their own"
        )
    return _signed_by(clients), _signed_by(workers)


def name_in(path: Path) -> str:
    """Find a name in the first certificate of a file. Raises ConfigError if it has no name."""
    for certificate in _read(path)[:1]:
        with suppress(x509.ExtensionNotFound):
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            for kind in (x509.DNSName, x509.IPAddress):
                if found := names.value.get_values_for_type(kind):
                    return str(found[0])
    raise ConfigError(f"{path}: found no name in it, expected that of the server")


def _read(path: Path | None) -> list[x509.Certificate]:
    if path is None:
        return []
    try:
        return x509.load_pem_x509_certificates(read_text(path).encode())
    except ValueError as error:
        raise ConfigError(f"{path}: expected certificates in PEM: {error}") from None


def _signed_by(authorities: list[x509.Certificate]) -> Callable[[bytes], bool]:
    def is_signed(der: bytes) -> bool:
        try:
            certificate = x509.load_der_x509_certificate(der)
        except ValueError:
            return False  # TLS accepts some that this library does not.
        return any(_signed(certificate, authority) for authority in authorities)

    return is_signed


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
