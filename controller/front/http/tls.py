"""The server's end of TLS on one connection: ciphertext in, plaintext out, and back. No I/O here."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from clockwright.errors import ConfigError
from clockwright.wire.bulk import Buffer
from controller.access.authoriser import Certificate

#: Each connection of TLS begins with a record of this type; HTTP/2's own preface begins with a P.
HANDSHAKE_RECORD = 22

_PROTOCOL = "h2"
_READ_BYTES = 64 << 10


def server_context(
    certificate: Path,
    key: Path,
    client_ca: Path | None = None,
    worker_ca: Path | None = None,
    *,
    protocol: str = _PROTOCOL,
) -> ssl.SSLContext:
    """Make what all connections of a server share.

    A client need not show a certificate, for it may have a key; one that it shows has to be good.

    Args:
        certificate: PEM file of the server's certificate, and of those up to its authority's.
        key: PEM file of the certificate's private key, without a passphrase.
        client_ca: PEM file of the certificates that sign clients'; None: no client has one.
        worker_ca: PEM file of those that sign workers'.
        protocol: what is spoken behind TLS, by its name in ALPN.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([protocol])
    try:
        # A key with a passphrase would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        text = error.strerror or str(error)
        raise ConfigError(f"TLS certificate {certificate} and key {key}: {text}") from error
    for authority in (client_ca, worker_ca):
        if authority is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(authority)
            except OSError as error:
                text = error.strerror or str(error)
                raise ConfigError(f"TLS authorities {authority}: {text}") from error
    return context


class TlsSession:
    """One connection's."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        #: The peers know each other: what is sent from now on can be sealed.
        self.established = False
        #: The peer has said goodbye.
        self.closed = False

    def receive(self, ciphertext: Buffer) -> bytes:
        """Take in what a socket brought; returns what is readable of it.

        Raises ssl.SSLError if the bytes are no TLS, were altered, or the peers do not agree. `take_output` says so.
        """
        self._incoming.write(ciphertext)
        parts = []
        try:
            if not self.established:
                self._tls.do_handshake()
                if (found := self._tls.selected_alpn_protocol()) != _PROTOCOL:
                    raise ssl.SSLError(f"found ALPN protocol {found}, expected {_PROTOCOL}")
                self.established = True
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            self.closed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.closed = True
        return b"".join(parts)

    def client_certificate(self) -> Certificate | None:
        """The peer's certificate, which is verified; None: it has shown none."""
        return client_certificate(self._tls)

    def seal(self, plaintext: Buffer) -> None:
        """Encrypt for the peer, once `established`."""
        self._tls.write(plaintext)

    def take_output(self) -> bytes:
        """Take what is to be sent."""
        return self._outgoing.read()


def client_certificate(tls: ssl.SSLObject) -> Certificate | None:
    """The certificate that a peer has shown, which is verified; None: it has shown none."""
    der = tls.getpeercert(binary_form=True)
    found = tls.getpeercert()
    if not der or not found:
        return None
    names = [f"{kind}:{value}" for kind, value in _pairs(found.get("subjectAltName"))]
    subject = found.get("subject", ())
    assert isinstance(subject, tuple)
    for parts in subject:
        names += [f"CN:{value}" for kind, value in _pairs(parts) if kind == "commonName"]
    return Certificate(tuple(names), der, ssl.cert_time_to_seconds(str(found["notAfter"])))


def _pairs(found: object) -> Iterator[tuple[str, str]]:
    """Read pairs of texts, of which Python's types do not say that they are."""
    if isinstance(found, tuple):
        for pair in found:
            if isinstance(pair, tuple) and len(pair) == 2:
                yield str(pair[0]), str(pair[1])
