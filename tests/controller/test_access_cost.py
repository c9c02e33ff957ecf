"""What it costs to know who calls: a look at the decoded block of headers, and nothing more."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typing_extensions import override

from clockwright.client.channel import Access
from clockwright.v1 import inference_pb2 as pb
from controller.access.authoriser import Authoriser, Credentials, NeedsRole, Rules
from controller.access.caller import Caller
from controller.access.grants import Grant, digest, id_of, make_key
from controller.access.roles import Role
from tests.kit.front_end import serving

INFER = "/inference.GRPCInferenceService/ModelInfer"
NUM_REQUESTS = 40
KEY = make_key(secrets.token_bytes(4), secrets.token_urlsafe(32))
GUARDED = Rules(
    (Grant("web", frozenset((Role.INFERENCE,)), "", key_id=id_of(KEY), key_sha256=digest(KEY)),),
    anonymous=frozenset(),
    anonymous_tenants=False,
)
#: What is counted: who may do what, how a call begins, and how its message is served.
COUNTED = (
    "controller/access/",
    "controller/front/http/http2_server.py",
    "controller/front/services/inference.py",
)
#: Housekeeping that goes by the clock.
UNCOUNTED = {"sweep", "_keep_sweeping", "_weigh"}


class Counting(Authoriser):
    """Counts how often it is asked."""

    num_asked = 0

    @override
    def admit(self, method: NeedsRole, credentials: Credentials, *, now_s: float) -> Caller:
        self.num_asked += 1
        return super().admit(method, credentials, now_s=now_s)


def question() -> bytes:
    request = pb.ModelInferRequest(model_name="double")
    request.parameters["slo_ms"].int64_param = 600_000
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(bytes(12))
    return request.SerializeToString()


async def lines_per_request(folder: Path, authoriser: Counting, access: Access) -> float:
    """Lines of the front that a request takes which is like one before."""
    lines: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        code = frame.f_code
        if code.co_name in UNCOUNTED or not any(part in code.co_filename for part in COUNTED):
            return None
        if event == "line":
            lines[code.co_name] += 1
        return trace

    async with (
        serving(folder, authoriser=authoriser) as server,
        access.async_channel(server.address) as channel,
    ):
        ask, data = channel.unary_unary(INFER), question()
        for _ in range(3):
            await ask(data, metadata=access.metadata)
        before = authoriser.num_asked
        sys.settrace(trace)
        try:
            for _ in range(NUM_REQUESTS):
                await ask(data, metadata=access.metadata)
        finally:
            sys.settrace(None)
        assert authoriser.num_asked == before, "it asked again about a call like one before"
    return lines["_begin"] / NUM_REQUESTS


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces lines")
def test_a_key_costs_a_request_no_line_more_than_none(tmp_path: Path) -> None:
    async def main() -> tuple[float, float]:
        off = await lines_per_request(tmp_path, Counting(), Access())
        on = await lines_per_request(tmp_path, Counting(GUARDED), Access(key=KEY))
        return off, on

    off, on = asyncio.run(main())
    assert off > 10
    # One asks what the request names as its tenant, the other whether that is the key's.
    assert abs(on - off) <= 1, (off, on)
