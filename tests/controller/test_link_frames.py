"""What a front and its controller tell each other: what cannot be is refused."""

from __future__ import annotations

import math

import msgspec
import pytest

from clockwright.errors import ProtocolError
from controller.front.remote import link_frames

FRONT_BEAT = 3


@pytest.mark.parametrize("expected", [math.inf, math.nan, -1.0, 1e300])
def test_what_a_tenant_may_have_is_a_number_that_can_be_told(expected: float) -> None:
    def beat(number: float) -> bytes:
        early = ((0, 1, 1, 3, "gold", "a"), "m", 2, "slo_ns_min", number, None)
        return msgspec.msgpack.encode((FRONT_BEAT, 5, None, {}, {}, {}, [early]))

    taken = link_frames.decode_from_front(beat(1e9))
    assert isinstance(taken, link_frames.FrontBeat)
    assert taken.early[0].expected == 1e9
    with pytest.raises(ProtocolError, match="Expected `float`"):
        link_frames.decode_from_front(beat(expected))
