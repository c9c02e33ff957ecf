"""What a record of measurements on a GPU must hold."""

from __future__ import annotations

from experiments.gpu import aims


def wanted_of(file: str) -> set[str]:
    """Figures that the table of aims looks for in a record."""
    found = {aim.figure for aim in aims.AIMS if aim.file == file}
    assert found
    return found
