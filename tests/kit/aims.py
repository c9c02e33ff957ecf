"""What a record of measurements on a GPU must hold."""

from __future__ import annotations

from experiments.study.aims import AIMS


def wanted_of(file: str) -> set[str]:
    """Figures that the table of aims looks for in a record."""
    found = {aim.key for aim in AIMS[f"gpu/{file}"]}
    assert found
    return found
