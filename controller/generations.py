"""Ids of models: a name, and for a model that took another's place a generation."""

from __future__ import annotations

from clockwright.units import ModelId

# In no name, so an id is never another model's name.
_SEPARATOR = "@"


def generation_id(name: str, generation: int) -> ModelId:
    """The id of the nth model of a name, from 1."""
    return ModelId(name if generation == 1 else f"{name}{_SEPARATOR}{generation}")


def name_of(model_id: str) -> str:
    """What users call a model; they know nothing of generations."""
    return model_id.partition(_SEPARATOR)[0]
