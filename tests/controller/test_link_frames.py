"""What a front and a controller of different releases tell each other: a field that is new costs nobody the link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from clockwright.bulk import Buffer
from clockwright.errors import ProtocolError, Refusal
from clockwright.frames import PREFIX
from clockwright.tensors import TensorSpec
from controller.front import link_frames
from controller.front.oip import Servable

ASKS, FRONT_BEAT = 0, 3


def header(message: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode(message)


def fields(frame: Sequence[Buffer]) -> list[Any]:
    """What a message without tensors says, after the number of its kind."""
    message: list[Any] = msgspec.msgpack.decode(bytes(b"".join(frame))[PREFIX.size :])
    return message[1:]


def test_a_front_of_the_first_release_is_understood() -> None:
    # It says nothing of owners, nor of calls that were denied.
    ask = (7, 2, 1, 1_000, 100_000, False, "gold", "ann", (12,), ())
    asks = link_frames.decode_from_front(header((ASKS, [ask])))
    assert isinstance(asks, link_frames.Asks)
    (taken,) = asks.asks
    assert (taken.tenant, taken.context, taken.lengths, taken.owner) == ("gold", "ann", (12,), "")
    beat = link_frames.decode_from_front(header((FRONT_BEAT, 5, None, {"LATE": 2})))
    assert isinstance(beat, link_frames.FrontBeat)
    assert (beat.refused, beat.denied) == ({Refusal.LATE: 2}, {})


def test_a_front_of_the_first_release_hears_no_field_that_it_does_not_know() -> None:
    servable = Servable(
        "m", "1", (TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (3,)),), 8, None, False
    )
    described = link_frames.described(1, 2, servable, is_held=True)
    assert len(fields(link_frames.encode_for_the_first(described))) == 5
    assert len(fields(link_frames.encode(link_frames.Beat(1, None, True, 1, True)))) == 5
    told = link_frames.encode_told([], [], [], [], [], [])
    assert len(fields(told)) == 5


@pytest.mark.parametrize("expected", [math.inf, math.nan, -1.0, 1e300])
def test_what_a_tenant_may_have_is_a_number_that_can_be_told(expected: float) -> None:
    def beat(number: float) -> bytes:
        early = ("a", "m", "gold", 1, 1, 2, 3, "slo_ns_min", number, None)
        return header((FRONT_BEAT, 5, None, {}, {}, {}, [early]))

    taken = link_frames.decode_from_front(beat(1e9))
    assert isinstance(taken, link_frames.FrontBeat)
    assert taken.early[0].expected == 1e9
    with pytest.raises(ProtocolError, match="Expected `float`"):
        link_frames.decode_from_front(beat(expected))
