"""What the worker's core knows of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clockwright.units import ModelId


# A module of its own, because `make native` leaves it as it is: nothing that is not compiled, such as the
# devices' models, can derive from a class that is.
@dataclass(slots=True, kw_only=True, eq=False)
class LoadedModel:
    """What the core knows of a model. Shells derive from it, and find their own class in a `Step`."""

    model_id: ModelId
    #: The pages that its weights fill, at least 1.
    num_pages: int
    #: Bytes of inputs and outputs together, by compiled batch size.
    io_bytes: Mapping[int, int]
