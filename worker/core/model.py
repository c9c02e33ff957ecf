"""The worker core's record of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clockwright.units import ModelId


# A module of its own, which `make native` leaves as it is: devices, which are not compiled, derive their models,
# and a class that is compiled allows none that is not to derive from it.
@dataclass(slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model, as the core knows it. Shells derive from it, so a `Step` holds their own class."""

    model_id: ModelId
    #: The pages that its weights fill, at least 1.
    num_pages: int
    #: Bytes of inputs and outputs together, by compiled batch size.
    io_bytes: Mapping[int, int]
