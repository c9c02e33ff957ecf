"""A caller, as the server knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from clockwright.errors import BadRequestError
from controller.access.roles import EVERY_ROLE, JOINING, Role

#: Header in which a front names the client of a call. It counts only if the caller has role `front`.
FORWARDED = "clockwright-caller-bin"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Caller:
    """A holder of credentials, or all callers without any."""

    #: Name of the key, the certificate or the token's subject, for messages; empty: unknown.
    name: str
    roles: frozenset[Role]
    #: Tenant of its requests. None: each request names its tenant, because callers are not identified.
    tenant: str | None
    #: Unix time at which the credentials expire, in s.
    expires_s: float = math.inf
    #: The credentials expired or changed: check them again.
    over: bool = False

    @property
    def owner(self) -> str:
        """Owner of the caller's queries: only the owner may give feedback on them.

        All keys of a tenant are one owner, so that one key may send queries and another one the feedback.
        """
        if not self.name:
            return ""
        return f"tenant {self.tenant}" if self.tenant else f"caller {self.name}"

    def same_as(self, other: Caller) -> bool:
        """Whether two callers are the same with the same roles."""
        return (self.name, self.roles, self.tenant, self.expires_s) == (
            *(other.name, other.roles, other.tenant, other.expires_s),
        )


class _Told(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    roles: tuple[Role, ...]
    tenant: str | None


_read_told = msgspec.msgpack.Decoder(_Told).decode
_write_told = msgspec.msgpack.Encoder().encode


def tell(caller: Caller) -> bytes:
    """Encode the caller, from a front to its controller."""
    return _write_told(_Told(caller.name, tuple(caller.roles), caller.tenant))


def read_told(data: bytes) -> Caller:
    """Decode a front's client. Roles to join as worker or front are dropped.

    Raises BadRequestError if the text is malformed.
    """
    try:
        told = _read_told(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{FORWARDED}: {error}") from None
    return Caller(told.name, frozenset(told.roles) - JOINING, told.tenant)


#: The caller if no credentials are needed.
ANYBODY = Caller("", EVERY_ROLE, None)
