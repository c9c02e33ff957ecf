"""Settings of who may do what."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from clockwright.errors import ConfigError
from controller.access.roles import EVERY_ROLE, JOINING, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Whom a controller lets in. With nothing set, everybody who reaches it may do everything."""

    #: File of keys and of names in certificates (`controller.access.grants`).
    keys_file: Path | None = None
    #: PEM files of the certificates that sign clients' and workers'. A client's counts by its names in
    #: `keys_file`; a worker's by its signature alone.
    client_ca: Path | None = None
    worker_ca: Path | None = None
    #: File of a token with which workers join.
    worker_token_file: Path | None = None
    #: Whose JSON Web Tokens are believed, and made for whom; with `issuer_keys`, a file or an HTTPS URL.
    issuer: str = ""
    audience: str = ""
    issuer_keys: str = ""
    #: Claims with a token's roles and its tenant.
    roles_claim: str = "roles"
    tenant_claim: str = "tenant"
    #: What everybody may who shows nothing; None: health where callers are known, else everything.
    anonymous: frozenset[Role] | None = None
    #: Serve other machines without keys or without TLS.
    insecure: bool = False
    #: The key of this process, with which it looks after itself and its own workers; empty: it has none.
    own_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if len({bool(self.issuer), bool(self.audience), bool(self.issuer_keys)}) > 1:
            raise ConfigError(
                f"issuer {self.issuer!r}, audience {self.audience!r}, issuer_keys"
                f" {self.issuer_keys!r}: expected all three or none"
            )
        if self.client_ca is not None and self.keys_file is None:
            raise ConfigError(
                "client_ca: expected keys_file too, which says what certificates allow"
            )

    @property
    def knows_callers(self) -> bool:
        """Whether clients have to show something."""
        return self.keys_file is not None or bool(self.issuer)

    @property
    def knows_workers(self) -> bool:
        """Whether workers have to show something."""
        return (
            self.knows_callers or self.worker_token_file is not None or self.worker_ca is not None
        )

    @property
    def open_roles(self) -> frozenset[Role]:
        """What everybody may who shows nothing."""
        if self.anonymous is not None:
            return self.anonymous
        if self.knows_callers:
            return frozenset((Role.HEALTH,))
        return EVERY_ROLE - JOINING if self.knows_workers else EVERY_ROLE

    def check(self, host: str, *, has_tls: bool) -> None:
        """Look whether a server may listen on an address like this.

        Raises:
            ConfigError: strangers could do harm there, and nobody said that they may.
        """
        if not has_tls and (self.client_ca is not None or self.worker_ca is not None):
            raise ConfigError(
                "client_ca, worker_ca: certificates come with TLS, expected tls_certificate too"
            )
        if not self.insecure and (dangers := self.dangers(host, has_tls=has_tls)):
            raise ConfigError(
                f"host is {host}, which other machines reach: {'; '.join(dangers)}. Listen on 127.0.0.1;"
                " or make keys (`clockwright keys add NAME --keys FILE`) and start with --keys FILE"
                " --tls-cert FILE --tls-key FILE; or say --insecure, where a private network of containers,"
                " a mesh or a proxy sees to it"
            )

    def dangers(self, host: str, *, has_tls: bool) -> list[str]:
        """Say what strangers could do to a server on an address; nothing where they do not reach it."""
        if is_loopback(host):
            return []
        found = []
        if not self.knows_callers:
            found.append(
                "without keys whoever reaches it may use, replace and remove every model, read what is"
                " learned of users, and join as a worker that sees all requests"
            )
        if not has_tls:
            found.append("without TLS whoever is on the way may read and change all of it")
        return found


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
