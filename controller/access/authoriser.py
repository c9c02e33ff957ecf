"""Finds out who calls, and whether the caller may. No I/O, and time is an argument."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from clockwright.errors import BadRequestError, Denial, DeniedError
from clockwright.foreign import printable
from controller.access.caller import FORWARDED, Caller, read_told
from controller.access.grants import Grant, digest, id_of
from controller.access.roles import EVERY_ROLE, ROLE_OF, Role, say_roles

if TYPE_CHECKING:
    # With a library for cryptography, which takes longer to import than the rest.
    from controller.access.tokens import Issuer

#: Headers in which clients show a key or a token. The second is how Triton's clients open what
#: `--grpc-restricted-protocol` restricts; the rest of its name is the server's choice there, and free here.
_BEARER, _TRITON = "authorization", "triton-grpc-protocol-"
#: Secrets of a call that are looked at.
_SECRETS_MAX = 4
#: Tokens that are remembered. Forgotten ones are read again.
_TOKENS_KEPT = 10_000
#: Longer ones are read each time, as their headers are.
_TOKEN_CHARS_MAX = 8192

# What a wrong key is compared with, so that it takes as long as a right one.
_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A client's certificate, which TLS has verified."""

    #: Its names as KIND:VALUE, most telling first.
    names: tuple[str, ...]
    #: The whole, in DER.
    der: bytes = field(repr=False)
    #: Unix time from which it is good no more, in s.
    expires_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller shows."""

    #: Keys and tokens, in the order in which they are tried.
    secrets: tuple[str, ...] = field(default=(), repr=False)
    certificate: Certificate | None = None
    #: For whom the caller hands this on, if it is a front.
    forwarded: bytes = field(default=b"", repr=False)


def nobody(_: bytes) -> bool:
    """Say of no certificate that it is the one."""
    return False


@dataclass(frozen=True, slots=True)
class Rules:
    """Whom to let in, and to what."""

    grants: Sequence[Grant] = ()
    #: SHA-256 of the token with which workers join.
    worker_token_sha256: bytes = b""
    #: Say whether a certificate, in DER, is one of the authorities that make clients', or workers'.
    is_client: Callable[[bytes], bool] = nobody
    is_worker: Callable[[bytes], bool] = nobody
    issuer: Issuer | None = None
    #: SHA-256 of the key of the process itself, which looks after its own workers.
    own_key_sha256: bytes = b""
    #: What everybody may, whom nobody knows.
    anonymous: frozenset[Role] = EVERY_ROLE
    #: A request says itself whose share of the GPUs it uses, where its sender is not known.
    anonymous_tenants: bool = True


class Authoriser:
    """Knows the callers. It belongs to the event loop, like those who ask it."""

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        role_of: Mapping[str, Role] = ROLE_OF,
        count: Callable[[Denial], object] = lambda _: None,
    ) -> None:
        """Begin to judge.

        Args:
            rules: by which; None: everybody may do everything.
            role_of: the role that each path needs.
            count: hears of each call that is denied.
        """
        self._count = count
        self._role_of = role_of
        self._rules = Rules()
        self._anybody = Caller("", EVERY_ROLE, None)
        self._by_key: Mapping[str, Grant] = {}
        self._by_certificate: Mapping[str, Grant] = {}
        self._by_secret: dict[str, Caller] = {}
        # Everybody who was let in and may still be inside, and by what.
        self._inside: WeakKeyDictionary[Caller, Credentials] = WeakKeyDictionary()
        if rules is not None:
            self.use(rules, now_s=0)

    def use(self, rules: Rules, *, now_s: float) -> None:
        """Judge by other rules from now on; callers that they change are `over`."""
        self._rules = rules
        self._by_key = {grant.key_id: grant for grant in rules.grants if grant.key_id}
        self._by_certificate = {
            grant.certificate: grant for grant in rules.grants if grant.certificate
        }
        self._by_secret.clear()
        tenant = None if rules.anonymous_tenants else ""
        self._anybody = Caller("", rules.anonymous, tenant)
        for caller, credentials in list(self._inside.items()):
            found, _ = self._identify(credentials, now_s)
            # What is shown by one of those whom nobody knew may be known by now.
            caller.over = not caller.name or not found.same_as(caller)

    def expire(self, now_s: float) -> None:
        """Have callers be `over` whose time is up; called about once a second."""
        for caller in list(self._inside):
            if now_s >= caller.expires_s:
                caller.over = True

    def admit(self, path: str, credentials: Credentials, *, now_s: float) -> Caller:
        """Judge one call.

        Args:
            path: `/package.Service/Method`.
            credentials: what the caller shows.
            now_s: the present in Unix time.

        Returns:
            The caller, which may do this until it is `over`.

        Raises:
            DeniedError: the caller may not.
        """
        role = self._role_of.get(path)
        caller, fault = self._identify(credentials, now_s)
        if role in caller.roles or role in self._rules.anonymous:
            self._inside.setdefault(caller, credentials)
            return caller
        method = printable(path.rpartition("/")[2], 80)
        if caller.name:
            needs = f"role {role.value}" if role is not None else "a role that nobody has"
            fault = DeniedError(
                Denial.NOT_ALLOWED,
                f"{method} needs {needs}; {printable(caller.name)} has {say_roles(caller.roles)}",
            )
        elif fault is None:
            fault = DeniedError(
                Denial.NO_CREDENTIALS,
                f"{method} needs a key (authorization: Bearer KEY), a token or a client's certificate",
            )
        self._count(fault.denial)
        raise fault

    def _identify(
        self, credentials: Credentials, now_s: float
    ) -> tuple[Caller, DeniedError | None]:
        """Find out for whom such credentials are shown; why not, where that is nobody."""
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
        """Find out who shows such credentials; why not, where that is nobody."""
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
            return DeniedError(Denial.UNKNOWN_CREDENTIALS, f"there is no key {key_id} like this")
        if rules.own_key_sha256 and hmac.compare_digest(sha256, rules.own_key_sha256):
            return Caller("this process", EVERY_ROLE, "")
        if rules.worker_token_sha256 and hmac.compare_digest(sha256, rules.worker_token_sha256):
            return Caller("the workers' token", frozenset((Role.WORKER,)), "")
        if rules.issuer is not None and secret.count(".") == 2:
            try:
                return _caller_of(rules.issuer.read(secret, now_s=now_s), now_s)
            except DeniedError as error:
                return error
        return DeniedError(
            Denial.UNKNOWN_CREDENTIALS, "the key or token shown is none that is known here"
        )

    def _of_certificate(self, certificate: Certificate, now_s: float) -> Caller | DeniedError:
        # The names count that a clients' authority has vouched for, and no others.
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
        return DeniedError(
            Denial.UNKNOWN_CREDENTIALS, f"the certificate's names are not known here: {names}"
        )


def credentials_of(
    metadata: Iterable[tuple[str, str | bytes]], certificate: Certificate | None = None
) -> Credentials:
    """Find what a caller shows, in a call's headers and in TLS."""
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
    return Caller(grant.name, grant.roles, grant.tenant, grant.expires_s)
