"""Identifies the caller, and decides whether it may make the call. No I/O, and time is an argument."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from clockwright.errors import BadRequestError, Denial, DeniedError
from clockwright.foreign import printable
from controller.access.caller import FORWARDED, Caller, read_told
from controller.access.grants import Grant, digest, id_of
from controller.access.roles import EVERY_ROLE, Role, say_roles, with_implied

if TYPE_CHECKING:
    # Imports a library for cryptography, which takes longer than the rest.
    from controller.access.tokens import Issuer

#: Headers with a key or a token. Triton's clients use the second for `--grpc-restricted-protocol`; the rest of its
#: name is any text here.
_BEARER, _TRITON = "authorization", "triton-grpc-protocol-"
#: Limit on the secrets of a call that are checked.
_SECRETS_MAX = 4
#: Tokens that are cached. Others are verified again.
_TOKENS_KEPT = 10_000
#: Longer ones are not cached.
_TOKEN_CHARS_MAX = 8192

# A wrong key is compared with this, so that it takes as long as a right one.
_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A client's certificate, which TLS has verified."""

    #: Its names as KIND:VALUE, most telling first.
    names: tuple[str, ...]
    #: The certificate, in DER.
    der: bytes = field(repr=False)
    #: Unix time at which it expires, in s.
    expires_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Credentials:
    """A caller's credentials."""

    #: Keys and tokens, in the order in which they are tried.
    secrets: tuple[str, ...] = field(default=(), repr=False)
    certificate: Certificate | None = None
    #: The client of the call, if the caller is a front.
    forwarded: bytes = field(default=b"", repr=False)


def nobody(_: bytes) -> bool:
    """Accept no certificate."""
    return False


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of who may do what."""

    grants: Sequence[Grant] = ()
    #: SHA-256 of the workers' token.
    worker_token_sha256: bytes = b""
    #: Whether a certificate, in DER, was signed by the clients' authority, or by the workers'.
    is_client: Callable[[bytes], bool] = nobody
    is_worker: Callable[[bytes], bool] = nobody
    issuer: Issuer | None = None
    #: SHA-256 of this process's own key, for its own workers.
    own_key_sha256: bytes = b""
    #: Roles of callers without credentials.
    anonymous: frozenset[Role] = EVERY_ROLE
    #: Whether requests of callers without credentials name their tenant themselves.
    anonymous_tenants: bool = True


class NeedsRole(Protocol):
    """A method that a caller wants to call."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def role(self) -> Role:
        """The role that it needs."""


class Authoriser:
    """Knows the callers. It belongs to the event loop, like the servers that use it."""

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        count: Callable[[Denial], object] = lambda _: None,
    ) -> None:
        """Start with these rules; without rules all callers may do everything.

        `count` hears of each call that is denied.
        """
        self._count = count
        self._rules = Rules()
        self._anybody = Caller("", EVERY_ROLE, None)
        self._by_key: Mapping[str, Grant] = {}
        self._by_certificate: Mapping[str, Grant] = {}
        self._by_secret: dict[str, Caller] = {}
        # All callers that were admitted and may still be active, by their credentials.
        self._inside: WeakKeyDictionary[Caller, Credentials] = WeakKeyDictionary()
        if rules is not None:
            self.use(rules, now_s=0)

    def use(self, rules: Rules, *, now_s: float) -> None:
        """Use other rules from now on; callers that they change are `over`."""
        self._rules = rules = replace(rules, anonymous=with_implied(rules.anonymous))
        self._by_key = {grant.key_id: grant for grant in rules.grants if grant.key_id}
        self._by_certificate = {
            grant.certificate: grant for grant in rules.grants if grant.certificate
        }
        self._by_secret.clear()
        tenant = None if rules.anonymous_tenants else ""
        self._anybody = Caller("", rules.anonymous, tenant)
        known = replace(rules, own_key_sha256=b"", anonymous=EVERY_ROLE, anonymous_tenants=True)
        for caller, credentials in list(self._inside.items()):
            found, _ = self._identify(credentials, now_s)
            # Credentials that were unknown may be known now, unless none are.
            caller.over = not found.same_as(caller) or (not caller.name and known != Rules())

    def expire(self, now_s: float) -> None:
        """Mark expired callers as `over`; called about once a second."""
        for caller in list(self._inside):
            if now_s >= caller.expires_s:
                caller.over = True

    def admit(self, method: NeedsRole, credentials: Credentials, *, now_s: float) -> Caller:
        """Judge one call. Returns the caller, which may make such calls until it is `over`.

        Raises DeniedError if the caller may not make the call. `now_s` is in Unix time.
        """
        role = method.role
        caller, fault = self._identify(credentials, now_s)
        if role in caller.roles or role in self._rules.anonymous:
            self._inside.setdefault(caller, credentials)
            return caller
        if caller.name:
            fault = DeniedError(
                Denial.NOT_ALLOWED,
                f"{method.name} needs role {role.value}; {printable(caller.name)} has {say_roles(caller.roles)}",
            )
        elif fault is None:
            fault = DeniedError(
                Denial.NO_CREDENTIALS,
                f"{method.name} needs a key (authorization: Bearer KEY), a token or a client's certificate",
            )
        self._count(fault.denial)
        raise fault

    def _identify(
        self, credentials: Credentials, now_s: float
    ) -> tuple[Caller, DeniedError | None]:
        """Identify the client of a call: of a front's call, the front's client. Also returns why it failed, or None."""
        caller, fault = self._shown_by(credentials, now_s)
        if not credentials.forwarded or Role.FRONT not in caller.roles:
            return caller, fault
        try:
            told = read_told(credentials.forwarded)
        except BadRequestError as error:
            return self._anybody, DeniedError(Denial.UNKNOWN_CREDENTIALS, str(error))
        told.expires_s = caller.expires_s
        return told, None

    def _shown_by(
        self, credentials: Credentials, now_s: float
    ) -> tuple[Caller, DeniedError | None]:
        """Identify the caller. Also returns why it failed, or None."""
        fault: DeniedError | None = None
        for secret in credentials.secrets[:_SECRETS_MAX]:
            known = self._by_secret.get(secret)
            if known is not None and not known.over and now_s < known.expires_s:
                return known, None
            found = self._of_secret(secret, now_s)
            if isinstance(found, DeniedError):
                fault = fault or found
                continue
            if len(self._by_secret) >= _TOKENS_KEPT:
                self._by_secret.clear()
            if len(secret) <= _TOKEN_CHARS_MAX:
                self._by_secret[secret] = found
            return found, None
        if credentials.certificate is not None:
            found = self._of_certificate(credentials.certificate, now_s)
            if not isinstance(found, DeniedError):
                return found, None
            fault = fault or found
        return self._anybody, fault

    def _of_secret(self, secret: str, now_s: float) -> Caller | DeniedError:
        rules = self._rules
        sha256 = digest(secret)
        if key_id := id_of(secret):
            grant = self._by_key.get(key_id)
            expected = grant.key_sha256 if grant is not None else _NO_DIGEST
            if hmac.compare_digest(sha256, expected) and grant is not None:
                return _caller_of(grant, now_s)
            return DeniedError(
                Denial.UNKNOWN_CREDENTIALS, f"no key {key_id} with this value exists"
            )
        if rules.own_key_sha256 and hmac.compare_digest(sha256, rules.own_key_sha256):
            return Caller("this process", EVERY_ROLE, "")
        if rules.worker_token_sha256 and hmac.compare_digest(sha256, rules.worker_token_sha256):
            return Caller("the workers' token", frozenset((Role.WORKER,)), "")
        if rules.issuer is not None and secret.count(".") == 2:
            try:
                return _caller_of(rules.issuer.read(secret, now_s=now_s), now_s)
            except DeniedError as error:
                return error
        return DeniedError(Denial.UNKNOWN_CREDENTIALS, "unknown key or token")

    def _of_certificate(self, certificate: Certificate, now_s: float) -> Caller | DeniedError:
        # Only names in certificates of the clients' authority count.
        if self._rules.is_client(certificate.der):
            for name in certificate.names:
                grant = self._by_certificate.get(name)
                if grant is not None:
                    expires_s = min(grant.expires_s, certificate.expires_s)
                    return _caller_of(replace(grant, expires_s=expires_s), now_s)
        elif self._rules.is_worker(certificate.der):
            name = certificate.names[0] if certificate.names else "a worker's certificate"
            return _caller_of(
                Grant(name, frozenset((Role.WORKER,)), expires_s=certificate.expires_s), now_s
            )
        names = printable(", ".join(certificate.names[:4])) or "none"
        return DeniedError(Denial.UNKNOWN_CREDENTIALS, f"unknown names in the certificate: {names}")


def credentials_of(
    metadata: Iterable[tuple[str, str | bytes]], certificate: Certificate | None = None
) -> Credentials:
    """Find a caller's credentials, in a call's headers and in TLS."""
    secrets: list[str] = []
    forwarded = b""
    for name, value in metadata:
        if not isinstance(value, str):
            if name == FORWARDED:
                forwarded = value
        elif name == _BEARER:
            kind, _, secret = value.partition(" ")
            if kind.lower() == "bearer":
                secrets.insert(0, secret.strip())
        elif name.startswith(_TRITON):
            secrets.append(value)
    return Credentials(tuple(secrets), certificate, forwarded)


def _caller_of(grant: Grant, now_s: float) -> Caller | DeniedError:
    if now_s >= grant.expires_s:
        return DeniedError(Denial.EXPIRED, f"the credentials of {printable(grant.name)} expired")
    return Caller(grant.name, with_implied(grant.roles), grant.tenant, grant.expires_s)
