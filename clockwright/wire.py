"""What both ends of `worker.proto`'s stream have to agree on."""

from __future__ import annotations

import hashlib
from collections import deque

from clockwright.bulk import join_bulk
from clockwright.v1 import worker_pb2 as pb

# What both ends have to share: a peer of another version is refused and told both versions.
PROTOCOL_VERSION = 2

# Field numbers of `payload` and `next` in the envelopes.
PAYLOAD_FIELD = 15
NEXT_FIELD = 14

# Messages are put together up to this size: enough for dozens of offers, little enough
# that copying it once more does not count.
TOGETHER_BYTES = 64 * 1024

ATTACH_METHOD = "/clockwright.v1.WorkerService/Attach"


def take_together(outgoing: deque[bytes]) -> bytes:
    """Take the next message from a queue, with those after it that can travel in one with it."""
    first = outgoing.popleft()
    if not outgoing:
        return first
    size = len(first)
    following: list[bytes] = []
    while outgoing and (size := size + len(outgoing[0])) <= TOGETHER_BYTES:
        following.append(outgoing.popleft())
    return join_bulk(first, NEXT_FIELD, following)


def offer_digest(offer: pb.ModelOffer) -> bytes:
    """A digest of all that an offer says of a model but its id: who answers two with one digest answers alike."""
    anonymous = pb.ModelOffer()
    anonymous.CopyFrom(offer)
    anonymous.ClearField("model_id")
    return hashlib.sha256(anonymous.SerializeToString(deterministic=True)).digest()
