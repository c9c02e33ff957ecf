"""Settings of access control."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from clockwright.errors import ConfigError
from clockwright.settings import setting
from controller.access.roles import EVERY_ROLE, JOINING, Role, read_roles


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access to a controller. By default, every caller that reaches it may do everything."""

    #: What the file holds: `controller.access.grants`.
    keys_file: Path | None = setting(
        None,
        flag="keys",
        help="Key file (`clockwright keys`); callers without a key may then ask for health only.",
    )
    #: A client's certificate counts by its names in `keys_file`, a worker's by its signature alone.
    client_ca: Path | None = setting(
        None,
        flag="tls_client_ca",
        help="PEM file of the authority of clients' certificates. Their names must be in --keys.",
    )
    worker_ca: Path | None = setting(
        None,
        flag="tls_worker_ca",
        help="PEM file of a separate authority whose certificates let workers join.",
    )
    worker_token_file: Path | None = setting(None, help="File with a token that lets workers join.")
    issuer: str = setting("", flag="jwt_issuer", help="Trusted JWT issuer (claim iss).")
    audience: str = setting("", flag="jwt_audience", help="Required JWT audience (claim aud).")
    issuer_keys: str = setting(
        "", flag="jwt_keys", metavar="FILE|URL", help="The JWT issuer's public keys (JWKS)."
    )
    roles_claim: str = setting(
        "roles", flag="jwt_roles_claim", help="JWT claim with the caller's roles."
    )
    tenant_claim: str = setting(
        "tenant", flag="jwt_tenant_claim", help="JWT claim with the caller's tenant."
    )
    anonymous: frozenset[Role] | None = setting(
        None,
        kind=list[str],
        read=lambda names: read_roles(names, where="--anonymous"),
        help="A role of callers without a key; repeat per role. With keys the default is health.",
    )
    insecure: bool = setting(
        False, help="Allow remote clients without authentication or TLS (unsafe)."
    )
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
        """Whether clients need credentials."""
        return self.keys_file is not None or bool(self.issuer)

    @property
    def knows_workers(self) -> bool:
        """Whether workers need credentials."""
        return (
            self.knows_callers or self.worker_token_file is not None or self.worker_ca is not None
        )

    @property
    def open_roles(self) -> frozenset[Role]:
        """Roles of callers without credentials."""
        if self.anonymous is not None:
            return self.anonymous
        if self.knows_callers:
            return frozenset((Role.HEALTH,))
        return EVERY_ROLE - JOINING if self.knows_workers else EVERY_ROLE

    def check(self, host: str, *, has_tls: bool) -> None:
        """Check that a server may listen on an address.

        Raises ConfigError if other machines can reach it, it lacks keys or TLS, and --insecure is not set.
        """
        if not has_tls and (self.client_ca is not None or self.worker_ca is not None):
            raise ConfigError(
                "client_ca, worker_ca: certificates come with TLS, expected tls_certificate too"
            )
        if not self.insecure and (dangers := self.dangers(host, has_tls=has_tls)):
            raise ConfigError(
                f"host is {host}, which other machines can reach: {'; '.join(dangers)}. Listen on 127.0.0.1;"
                " or make keys (`clockwright keys add NAME --keys FILE`) and start with --keys FILE"
                " --tls-cert FILE --tls-key FILE; or use --insecure, if a private network of containers,"
                " a mesh or a proxy protects it"
            )

    def dangers(self, host: str, *, has_tls: bool) -> list[str]:
        """List what untrusted clients could do to a server on an address; empty if they cannot reach it."""
        if is_loopback(host):
            return []
        found = []
        if not self.knows_callers:
            found.append(
                "without keys every client may use, replace and remove every model, read what is"
                " learned about users, and join as a worker that sees all requests"
            )
        if not has_tls:
            found.append("without TLS an attacker on the network may read and change all of it")
        return found


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
