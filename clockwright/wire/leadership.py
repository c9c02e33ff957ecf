"""Which controller leads, as workers and fronts see it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clockwright.errors import ConfigError


def parse_addresses(text: str) -> tuple[str, ...]:
    """Read the addresses of one controller or several: HOST:PORT, with commas between.

    Raises ConfigError if one of them is malformed.
    """
    addresses = tuple(text.split(","))
    for address in addresses:
        if not is_address(address):
            raise ConfigError(f"controller: found {address!r}, expected HOST:PORT")
    return addresses


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT of one server."""
    host, _, port = text.rpartition(":")
    return bool(host) and "," not in host and port.isdecimal() and 0 < int(port) < 65536


def address_of(host: str, port: int) -> str:
    """Write a host and a port in gRPC's form, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host in an address HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class Term:
    """A generation of leadership: exactly one controller leads in it."""

    #: Name of the group of controllers; generations of two lineages cannot be compared.
    lineage: str = ""
    generation: int = 0

    def next(self) -> Term:
        """The generation after this one."""
        return Term(self.lineage, self.generation + 1)

    def is_older_than(self, other: Term) -> bool:
        """Whether another term is later than this one."""
        return self.lineage == other.lineage and self.generation < other.generation


class Fence:
    """Refuses controllers of earlier generations than the latest that is known."""

    def __init__(self) -> None:
        self.newest = Term()

    def admits(self, term: Term) -> bool:
        """Whether no later controller is known. If so, earlier ones are refused from now on.

        A controller of another lineage was chosen on purpose: it is admitted.
        """
        if term.is_older_than(self.newest):
            return False
        self.newest = term
        return True


class Leaders:
    """The latest answers of the controllers at some addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Know no leader yet; addresses are HOST:PORT each, in the order of preference."""
        self.addresses = tuple(addresses)
        self._terms: dict[str, Term] = {}

    def heard(self, address: str, term: Term | None) -> None:
        """Record that a controller leads; None: it does not, or does not answer."""
        if term is None:
            self._terms.pop(address, None)
        else:
            self._terms[address] = term

    def term(self, address: str) -> Term:
        """The generation of a controller that leads."""
        return self._terms[address]

    @property
    def leader(self) -> str | None:
        """The controller to use: of those that claim to lead, the one of the latest generation."""
        return self._latest(lambda _: True)

    def successor(self, term: Term) -> str | None:
        """The leader of a later generation than this one. Returns None if no controller claims that."""
        return self._latest(term.is_older_than)

    def _latest(self, counts: Callable[[Term], bool]) -> str | None:
        terms = self._terms
        leading = [a for a in self.addresses if a in terms and counts(terms[a])]
        return max(leading, key=lambda address: terms[address].generation, default=None)
