"""Clockwright: serving deep networks with latency you can promise.

This package is the shared vocabulary (identifiers, actions, errors, the wire) and what users import:

    from clockwright import Client

    with Client("127.0.0.1:8001") as client:
        result = client.infer("resnet50", images, slo_ms=25)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clockwright.errors import (
    BadRequestError,
    ClockwrightError,
    ConfigError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)

if TYPE_CHECKING:
    from clockwright.client import (
        AsyncClient,
        Client,
        Feedback,
        FeedbackOutcome,
        InferResult,
        ModelMetadata,
        ModelStatus,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BadRequestError",
    "Client",
    "ClockwrightError",
    "ConfigError",
    "Feedback",
    "FeedbackOutcome",
    "InferResult",
    "ModelError",
    "ModelMetadata",
    "ModelStatus",
    "Refusal",
    "RefusedError",
    "UnknownModelError",
]


def __getattr__(name: str) -> object:
    # The client brings numpy and gRPC along, which the cores and the controller's start do without.
    if name in __all__:
        from clockwright import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
