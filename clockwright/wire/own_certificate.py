"""A self-signed certificate that peers verify by its fingerprint."""

from __future__ import annotations

import hashlib
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

# Dates are not checked: the fingerprint counts, and each process makes a new one.
_DAYS = 3650


def make_certificate() -> tuple[ssl.SSLContext, bytes]:
    """Make a key and a certificate. Returns the listener's TLS context, and the SHA-256 of its certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "clockwright")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_DAYS))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    pem = serialization.Encoding.PEM
    # Python reads them from a file only. It is readable by this user only, and removed immediately.
    with tempfile.TemporaryDirectory(prefix="clockwright-") as folder:
        file = Path(folder) / "own.pem"
        file.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            + certificate.public_bytes(pem)
        )
        context.load_cert_chain(file)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return context, hashlib.sha256(der).digest()
