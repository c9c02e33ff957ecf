"""Somebody who calls, as the server knows him."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from clockwright.errors import BadRequestError
from controller.access.roles import EVERY_ROLE, JOINING, Role

#: Header in which a front says for whom it hands a call on. It counts where the front has shown that it is one.
FORWARDED = "clockwright-caller-bin"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Caller:
    """One holder of credentials; or everybody who shows none."""

    #: Name of the key, the certificate or the token's subject, for people; empty: nobody knows.
    name: str
    roles: frozenset[Role]
    #: Whose share of the GPUs the requests use. None: what a request says holds, since nobody here is known.
    tenant: str | None
    #: Unix time from which the credentials are good no more, in s.
    expires_s: float = math.inf
    #: The credentials are good no more, or mean something else by now: look at them again.
    over: bool = False

    @property
    def owner(self) -> str:
        """Whose queries these are: feedback for them comes from the same.

        A tenant's keys are one owner, so that one key may ask and another, elsewhere, learn what became of it.
        """
        if not self.name:
            return ""
        return f"tenant {self.tenant}" if self.tenant else f"caller {self.name}"

    def same_as(self, other: Caller) -> bool:
        """Whether two callers are one and may do the same."""
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
    """Write down who calls, for the controller behind a front."""
    return _write_told(_Told(caller.name, tuple(caller.roles), caller.tenant))


def read_told(data: bytes) -> Caller:
    """Read what a front says of who calls. Nobody joins through a front.

    Raises:
        BadRequestError: no front of this version says that.
    """
    try:
        told = _read_told(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{FORWARDED}: {error}") from None
    return Caller(told.name, frozenset(told.roles) - JOINING, told.tenant)


#: Where nobody has to show anything.
ANYBODY = Caller("", EVERY_ROLE, None)

#: Who made the call that the present task answers.
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
