"""What a family of unseen cases is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from experiments.simulator import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A load, not yet drawn: by its name and a seed it gives the same requests to every policy."""

    name: str
    #: What the family tries: `spikes`, `links`, `flood`, ... Families of one part are in one module.
    part: str
    #: The case of a seed, under the default policy; whoever runs it replaces `case.scheduler`.
    case: Callable[[int], Case]
    #: The same load without the fault, where there is a fault; None: the family is held against its bound.
    #: Where the fault is what others ask, only whoever asks here is compared: tenants, or else models.
    without: Callable[[int], Case] | None = None
    #: The bound: `density` (B1), `memory` (B3), `residency` (B6), `rate` (closed loops), or empty: none is known.
    bound: str = "density"
    #: Requests that arrive before this are not counted: caches are cold at the start.
    begin_ns: int = 0
    #: Whose answers policies are compared by. Isolation gives to the small what the large would have made more
    #: of, so where it decides, the sum of all answers says nothing of whether it does what it is for.
    #: `innocent`: who asks in `without`, too. `small`: tenants, or else models, that ask for less than the mean.
    compared: Literal["all", "innocent", "small"] = "all"
