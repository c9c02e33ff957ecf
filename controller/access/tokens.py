"""JSON Web Tokens: verification, and the roles and tenant in them. No I/O, and time is an argument.

Source: RFC 7519 (tokens), RFC 8725 (best practices). Only asymmetric signatures are accepted, so a token can neither be
unsigned nor be signed with the public key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from clockwright.errors import ConfigError, Denial, DeniedError
from clockwright.foreign import printable
from clockwright.units import NAME_CHARS_MAX
from controller.access.grants import Grant
from controller.access.roles import Role

_ALGORITHMS = (
    *("ES256", "ES384", "EdDSA"),
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
)
#: Clocks of issuer and server differ by less.
_LEEWAY_S = 30.0
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True, slots=True)
class Issuer:
    """The trusted issuer, and the claims that are used."""

    #: Claim `iss` of its tokens.
    name: str
    #: Claim `aud`: tokens for other services are refused.
    audience: str
    #: Public keys by id; with no id, any.
    keys: Mapping[str, jwt.PyJWK]
    #: Claim with the roles: a list, or words separated by spaces.
    roles_claim: str
    #: Claim with the tenant.
    tenant_claim: str

    def read(self, token: str, *, now_s: float) -> Grant:
        """Verify a token and return its grant.

        Raises DeniedError if the signature is invalid, or it is for another time or service.
        """
        try:
            key = self._key_of(token)
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self.audience,
                issuer=self.name,
                # Times are checked below: the library would use the machine's clock.
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError as error:
            raise _invalid(str(error)) from None
        expires_s = _time(claims, "exp") + _LEEWAY_S
        if now_s >= expires_s:
            raise DeniedError(Denial.EXPIRED, "the token has expired")
        if "nbf" in claims and now_s < _time(claims, "nbf") - _LEEWAY_S:
            raise _invalid("it is not valid yet")
        name, tenant = claims["sub"], claims.get(self.tenant_claim, "")
        for text in (name, tenant):
            if not isinstance(text, str) or len(text) > NAME_CHARS_MAX or not text.isprintable():
                raise _invalid("its subject or tenant is not a valid name")
        if not name:
            raise _invalid("it has no subject")
        roles = claims.get(self.roles_claim, ())
        if isinstance(roles, str):
            roles = roles.split()
        # An issuer may list roles of other services too.
        known = frozenset(_ROLES[word] for word in _words(roles) if word in _ROLES)
        return Grant(name, known, tenant, expires_s)

    def _key_of(self, token: str) -> jwt.PyJWK:
        key_id = jwt.get_unverified_header(token).get("kid")
        if key_id is None and len(self.keys) == 1:
            return next(iter(self.keys.values()))
        key = self.keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise _invalid("its key is not among the issuer's public keys")
        return key


def read_key_set(data: bytes) -> dict[str, jwt.PyJWK]:
    """Read an issuer's public keys (JWKS, RFC 7517); keys of unused kinds are skipped.

    Raises ConfigError if it is not a key set, or has no key for signatures.
    """
    try:
        found = jwt.PyJWKSet.from_json(data.decode()).keys
    except (jwt.PyJWTError, ValueError, RecursionError, TypeError, AttributeError) as error:
        raise ConfigError(f"not a set of keys: {error}") from None
    keys = {
        key.key_id or "": key
        for key in found
        if key.algorithm_name in _ALGORITHMS and key.public_key_use in (None, "sig")
    }
    if not keys:
        raise ConfigError(f"no key that signs with one of {', '.join(_ALGORITHMS)}")
    return keys


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    # The comparison is false for NaN too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise _invalid(f"its claim {name} is not a time")
    return float(value)


def _invalid(why: str) -> DeniedError:
    text = f"invalid token: {printable(why)}"
    return DeniedError(Denial.UNKNOWN_CREDENTIALS, text)


def _words(found: object) -> Iterable[str]:
    return [word for word in found if isinstance(word, str)] if isinstance(found, list) else ()
