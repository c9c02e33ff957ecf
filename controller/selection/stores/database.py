"""The protocol of a database below a `Store`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from controller.selection.core.contexts import Address


class Database(Protocol):
    """Keeps records, and blocks meanwhile. Only one thread uses it.

    Every call may raise one of `faults`. A record that the call was to change is then as before or changed.
    """

    #: Name for people, without a password.
    name: str
    #: Exceptions that mean that the database cannot be reached or does not work.
    faults: tuple[type[Exception], ...]

    def open(self) -> None:
        """Reach it, before anything else is asked.

        Raises ConfigError if it does not answer, or is of another version.
        """

    def load(self, address: Address) -> str | None:
        """Find the record of a context, if there is one."""

    def save(self, records: Mapping[Address, str]) -> None:
        """Write records, all or none."""

    def erase(self, application: str, context: str) -> bool:
        """Erase a context; returns whether there was one."""

    def applications(self) -> dict[str, str]:
        """Give the settings of all applications by name, sorted by name."""

    def save_application(self, name: str, settings: str, *, forget: bool) -> None:
        """Write the settings of an application; with `forget`, also erase all of its states."""

    def remove_application(self, name: str) -> None:
        """Erase an application with all of its states."""

    def has_lost_everything(self) -> bool:
        """Whether everything that it kept is gone, for example with its process; true once for each time."""

    def close(self) -> None:
        """Close the connection."""
