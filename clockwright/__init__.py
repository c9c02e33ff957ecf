"""Clockwright: serving deep networks with latency you can promise.

Users import their client from here:

    from clockwright import Client

    with Client("127.0.0.1:8001") as client:
        result = client.infer("resnet50", images, slo_ms=25)

All other packages import their vocabulary from here, and it imports none of them:

    client         the two kinds of clients, and their exceptions
    wire           what travels between processes: frames, sockets, tensors and their datatypes
    cli            the command line; the other packages bring commands of their own
    v1             stubs, generated from proto/
    containers     the declaration of a model that is code
    findings       what is wrong with a running server, by its own figures
    errors, units  every exception; identifiers and units of time
    foreign        text from elsewhere, made safe for logs and terminals
    process, cores  memory, garbage and the end of a process; its processors
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clockwright.errors import (
    BadRequestError,
    ClockwrightError,
    ConfigError,
    Denial,
    DeniedError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)

if TYPE_CHECKING:
    from clockwright.client.channel import Access
    from clockwright.client.client import (
        AsyncClient,
        Client,
        Feedback,
        FeedbackOutcome,
        InferResult,
        ModelMetadata,
        ModelStatus,
    )
    from clockwright.client.sequences import SequenceStep

__version__ = "0.1.0"

__all__ = [
    "Access",
    "AsyncClient",
    "BadRequestError",
    "Client",
    "ClockwrightError",
    "ConfigError",
    "Denial",
    "DeniedError",
    "Feedback",
    "FeedbackOutcome",
    "InferResult",
    "ModelError",
    "ModelMetadata",
    "ModelStatus",
    "Refusal",
    "RefusedError",
    "SequenceStep",
    "UnknownModelError",
]


def __getattr__(name: str) -> object:
    # The client imports numpy and gRPC, which the cores and the controller's start do not need.
    if name in __all__:
        from clockwright.client import channel, client, sequences

        places = {"Access": channel, "SequenceStep": sequences}
        return getattr(places.get(name, client), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
