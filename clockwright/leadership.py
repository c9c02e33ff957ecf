"""Which controller leads, as workers and fronts see it: generations, and who has said what. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clockwright.errors import ConfigError


def parse_addresses(text: str) -> tuple[str, ...]:
    """Read the addresses of one controller or several: HOST:PORT, with commas between.

    Raises:
        ConfigError: one of them is none.
    """
    addresses = tuple(text.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"controller: found {address!r}, expected HOST:PORT")
    return addresses


def host_of(address: str) -> str:
    """The host in an address HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class Term:
    """A generation of controllers: one of them leads in it, and in no other."""

    #: Names those that follow each other; generations of two lineages cannot be compared.
    lineage: str = ""
    generation: int = 0

    def next(self) -> Term:
        """The generation after this one."""
        return Term(self.lineage, self.generation + 1)

    def is_older_than(self, other: Term) -> bool:
        """Whether another has followed this one."""
        return self.lineage == other.lineage and self.generation < other.generation


class Fence:
    """Keeps those out who led before somebody that was heard of."""

    def __init__(self) -> None:
        self.newest = Term()

    def admits(self, term: Term) -> bool:
        """Whether nobody is known to have followed a controller; from now on, none that it follows is admitted.

        One of another lineage was dialled on purpose: it is admitted.
        """
        if term.is_older_than(self.newest):
            return False
        self.newest = term
        return True


class Leaders:
    """What the controllers at some addresses have said last."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Know of none that it leads.

        Args:
            addresses: HOST:PORT each, in the order of preference.
        """
        self.addresses = tuple(addresses)
        self._terms: dict[str, Term] = {}

    def heard(self, address: str, term: Term | None) -> None:
        """A controller says that it leads; None: it does not, or says nothing."""
        if term is None:
            self._terms.pop(address, None)
        else:
            self._terms[address] = term

    def term(self, address: str) -> Term:
        """The generation of a controller that leads."""
        return self._terms[address]

    @property
    def leader(self) -> str | None:
        """Whom to turn to: of those who lead, as they say, the one of the latest generation."""
        return self._latest(lambda _: True)

    def successor(self, term: Term) -> str | None:
        """Who leads in a later generation than this one; None: nobody says so."""
        return self._latest(term.is_older_than)

    def _latest(self, counts: Callable[[Term], bool]) -> str | None:
        terms = self._terms
        leading = [a for a in self.addresses if a in terms and counts(terms[a])]
        return max(leading, key=lambda address: terms[address].generation, default=None)
