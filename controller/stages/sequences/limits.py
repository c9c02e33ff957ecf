"""Bounds of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clockwright.settings import MIB, check, setting

#: Steps that wait in one sequence: two seconds of steps that come every 32 ms, long after the first was late.
WAITING_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceConfig:
    """How many sequences there may be. Their state is in the memory of the controller."""

    #: 10,000 voice streams with a state of 1 KiB take 10 MiB; one decoder with a cache of 2,000 tokens takes 100.
    sequence_bytes: int = setting(
        256 << 20,
        least=0,
        unit=MIB,
        help="Memory for the state of all sequences together; more are refused at their start.",
    )
    #: Each takes some 600 bytes besides its state.
    sequences_max: int = setting(
        100_000,
        flag="sequences",
        least=0,
        help="Limit on live sequences of all models; more are refused at their start.",
    )

    def __post_init__(self) -> None:
        check(self)
