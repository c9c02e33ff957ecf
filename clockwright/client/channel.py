"""Connecting to a server: options of gRPC's channels, TLS, and the caller's credentials."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockwright.client.arguments import check, check_text, shown
from clockwright.errors import ConfigError

# Settings name `Access`, and help prints faster than gRPC is imported.
if TYPE_CHECKING:
    import grpc

#: The options with which every gRPC channel of this project is opened.
OPTIONS = (
    # No limit here: a server limits the messages that it takes.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The environment's http_proxy is meant for browsers; a proxy would cost milliseconds.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A caller's credentials, and how it verifies the server."""

    #: A key (`clockwright keys add`) or a token.
    key: str = field(default="", repr=False)
    #: File with one, instead. It is read for each call, so that a new key counts from the next call on.
    key_file: Path | None = None
    #: Use TLS; the files below turn it on, too.
    tls: bool = False
    #: PEM file of the trusted authorities of a server's certificate; None: those of the system.
    ca: Path | None = None
    #: PEM files of the caller's own certificate, and of its key.
    certificate: Path | None = None
    certificate_key: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            # Not shown: it is secret.
            raise ConfigError(f"key: found {type(self.key).__name__}, expected a text")
        for name in ("key_file", "ca", "certificate", "certificate_key"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Path(value))
            elif value is not None:
                check(name, value, Path, "a path", ConfigError)
        if (self.certificate is None) != (self.certificate_key is None):
            raise ConfigError("certificate and certificate_key: found one, expected both or none")
        if self.key and self.key_file is not None:
            raise ConfigError("key and key_file: found both, expected one")
        self._read_key()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers of a call that is made now.

        Raises:
            ConfigError: the file with the key cannot be read, or has none.
        """
        key = self._read_key()
        return (("authorization", f"Bearer {key}"),) if key else ()

    def channel(self, address: str, *, options: Sequence[tuple[str, Any]] = OPTIONS) -> Any:  # noqa: ANN401  the stubs' channels want serializers
        """Open a channel to HOST:PORT, which connects when it is first needed.

        Raises:
            ConfigError: a file cannot be read.
        """
        import grpc

        credentials = self._credentials()
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def async_channel(self, address: str, *, options: Sequence[tuple[str, Any]] = OPTIONS) -> Any:  # noqa: ANN401
        """Open a channel for asyncio; as `channel`."""
        import grpc.aio

        credentials = self._credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    @property
    def speaks_tls(self) -> bool:
        """Whether the server must use TLS."""
        return self.tls or self.ca is not None or self.certificate is not None

    def tls_context(self) -> ssl.SSLContext | None:
        """Make the TLS context of other sockets to the same server. Returns None without TLS.

        Raises:
            ConfigError: a file cannot be used.
        """
        if not self.speaks_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.certificate_key, password=lambda: "")
        except OSError as error:
            where = f"{self.ca or 'the authorities of the system'}, {self.certificate or 'none'}"
            text = error.strerror or str(error)
            raise ConfigError(f"authorities and certificate {where}: {text}") from None
        return context

    def _read_key(self) -> str:
        key = self.key if self.key_file is None else read_key(self.key_file)
        if not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"{self.key_file or 'key'}: found characters that no key has, expected one key alone"
            )
        return key

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if not self.speaks_tls:
            return None
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca),
            private_key=_read(self.certificate_key),
            certificate_chain=_read(self.certificate),
        )


def check_dialled(address: object, access: object) -> None:
    """Check the arguments of a client.

    Raises:
        ConfigError: the address or the credentials are malformed.
    """
    if not isinstance(address, str):
        raise ConfigError(f"address: found {shown(address)}, expected HOST:PORT")
    check_text("address", address, ConfigError)
    if isinstance(access, str):
        # Not shown: it is a key, which is secret.
        raise ConfigError("access: found a text, expected Access(key=...)")
    if access is not None:
        check("access", access, Access, "Access(key=...)", ConfigError)


def read_key(path: Path) -> str:
    """Read a file that holds a key or a token.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    data = _read(path)
    assert data is not None
    key = data.decode(errors="replace").strip()
    if not key:
        raise ConfigError(f"{path}: found nothing, expected a key")
    return key


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
