"""Shares of users: a hash of the context decides, so each user keeps seeing the same model or version."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


def bucket(salt: str, context: str) -> float:
    """Place a context evenly in [0, 1), the same on every machine and after every restart."""
    digest = blake2b(f"{salt}\0{context}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def share_at(position: float, shares: Mapping[str, float]) -> str:
    """Find the model, or version, whose share a position in [0, 1) falls into; shares sum to 1 but for rounding."""
    model = ""
    for model, share in shares.items():  # noqa: B007  if rounding leaves a rest, the last model gets it
        position -= share
        if position < 0:
            break
    return model
