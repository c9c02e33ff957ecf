"""Clockwright: serving deep networks with latency you can promise.

Users import their client from here:

    from clockwright import Client

    with Client("127.0.0.1:8001") as client:
        result = client.infer("resnet50", images, slo_ms=25)

All other packages import their vocabulary from here, and it imports none of them:

    client, operator, statuses      the two kinds of clients, and their exceptions
    arguments                       what programs pass to them, looked at
    channel                         how a server is dialled: TLS, and what the caller shows
    wire, bulk                      messages to bytes and back; tensor bytes pass uncopied
    actions                         what a controller asks of a worker, and what comes back
    frames, frame_socket            actions, results and tensors between processes, and the sockets for them
    data_socket, own_certificate    dialling those sockets, and TLS on them
    leadership, leader_search       which of several controllers leads
    findings                        what is wrong with a running server, by its own figures
    tensors, containers             shapes and datatypes; the declaration of a model that is code
    errors, units                   every exception; identifiers and units of time
    process                         memory, garbage and the end of a process
    v1                              stubs, generated from proto/
    cli                             the command line; the other packages bring commands of their own
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
    from clockwright.channel import Access
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
    "UnknownModelError",
]


def __getattr__(name: str) -> object:
    # The client brings numpy and gRPC along, which the cores and the controller's start do without.
    if name in __all__:
        from clockwright import channel, client

        return getattr(channel if name == "Access" else client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
