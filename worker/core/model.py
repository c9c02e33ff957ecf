"""What the worker's core knows of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clockwright.units import ModelId


# A module of its own, which `make native` leaves as it is: devices, which are not compiled, derive their models,
# and a class that is compiled allows none that is not to derive from it.
@dataclass(slots=True, kw_only=True, eq=False)
class LoadedModel:
    """What the core knows of a model. Shells derive from it, and find their own class in a `Step`."""

    model_id: ModelId
    #: The pages that its weights fill, at least 1.
    num_pages: int
    #: Bytes of inputs and outputs together, by compiled batch size.
    io_bytes: Mapping[int, int]
