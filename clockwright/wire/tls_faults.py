"""What gRPC says where TLS fails, in words that help."""

from __future__ import annotations

from typing import Final

# By a part of gRPC's text; the first that is found counts.
_FAULTS: Final = (
    ("certificate has expired", "the server's certificate has expired"),
    ("not yet valid", "the server's certificate is not valid yet; do the clocks differ?"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not of the authority that is trusted here (--tls-ca)",
    ),
    ("Hostname Verification", "the server's certificate does not name the host of this address"),
    (
        # TLS 1.3 tells a client whose certificate is refused only after the handshake.
        "TSI_DATA_CORRUPTED",
        "the server does not take the certificate that it is shown: it has expired, or another authority signed it",
    ),
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS there"),
)


def tls_fault(text: str) -> str:
    """Say why TLS failed; empty: the text says nothing of that."""
    return next((words for part, words in _FAULTS if part in text), "")
