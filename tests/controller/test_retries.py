"""Whether a refused request may be asked again, and when: what clients are told, and what their libraries make of it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from clockwright.v1 import inference_pb2 as pb
from controller.core.quotas import Quota
from controller.front.http.rest import answer_of
from controller.front.oip.refusals import NoAnswerError, retry_ns
from controller.front.oip.statuses import DETAILS, PUSHBACK, status_of
from tests.kit.front_end import serving, until

INFER = "/inference.GRPCInferenceService/ModelInfer"


def refused(refusal: Refusal, **times_ms: int) -> NoAnswerError:
    names = ("slo", "load", "exec", "queue", "margin")
    figures = {f"{name}_ns": times_ms.get(name, 0) * NS_PER_MS for name in names}
    return NoAnswerError(refusal, ModelId("m"), figures)


@pytest.mark.parametrize(
    ("error", "after_ms"),
    [
        # 30 ms of 40 stand before it, and it takes 20: in 10 ms there is room.
        (refused(Refusal.OVERLOADED, slo=40, queue=30, exec=20), 10),
        # It waited, and lost the race: the next one may win.
        (refused(Refusal.OVERLOADED, slo=40, queue=5, exec=20), 20),
        (refused(Refusal.OVERLOADED, slo=40), 1),
        (refused(Refusal.COLD, slo=40, load=300, exec=20, queue=50), 350),
        (RefusedError(Refusal.OVERLOADED, "the front is full"), 1000),
        (RefusedError(Refusal.QUOTA, "", figures={"retry_ns": 250 * NS_PER_MS}), 250),
        (RefusedError(Refusal.QUOTA, "", figures={"slo_ns_max": 1}), None),
        (refused(Refusal.INFEASIBLE, slo=1, exec=20), None),
        (refused(Refusal.LATE, slo=1), None),
        (RefusedError(Refusal.DRAINING, ""), None),
    ],
)
def test_a_retry_is_offered_only_where_it_can_help(
    error: RefusedError, after_ms: int | None
) -> None:
    found = retry_ns(error)
    assert found == (None if after_ms is None else after_ms * NS_PER_MS)
    status = status_of(error, method="ModelInfer")
    metadata = dict(status.details)
    details = status_pb2.Status.FromString(bytes(metadata[DETAILS])).details  # type: ignore[arg-type]
    headers = dict(answer_of(status).headers)
    if after_ms is None:
        assert PUSHBACK not in metadata
        assert len(details) == 1
        assert b"retry-after" not in headers
        return
    retry = error_details_pb2.RetryInfo()
    assert details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == after_ms
    assert metadata[PUSHBACK] == str(after_ms)
    # In HTTP it is whole seconds.
    assert headers[b"retry-after"] == b"%d" % -(-after_ms // 1000)


# A server of grpcio begins each answer with headers, behind which its clients retry nothing.
@pytest.mark.parametrize("front", ["here", "apart"])
async def test_grpcs_own_retries_come_when_they_are_told_to(tmp_path: Path, front: str) -> None:
    # Without a word of the server the library would wait for more than a minute here. Its clock has whole milliseconds
    # and may stand still while the processor is busy, so it can come a little too early and be told again.
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "600s",
        "maxBackoff": "600s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    request = pb.ModelInferRequest(model_name="double", raw_input_contents=[bytes(12)])
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.parameters["slo_ms"].int64_param = 60_000
    async with serving(tmp_path, front=front) as front_end:
        await front_end.quotas.set("", Quota(rate_rps=4, burst=1))
        options = [("grpc.service_config", config), ("grpc.enable_retries", 1)]
        async with grpc.aio.insecure_channel(front_end.address, options=options) as channel:
            stub: Any = channel
            infer = stub.unary_unary(INFER)
            before = time.monotonic()
            for _ in range(3):
                await infer(request.SerializeToString(), timeout=60)
            assert time.monotonic() - before > 0.3
        refusals = front_end.runtime.telemetry.total.refusals
        assert refusals["QUOTA"] >= 2


async def test_a_client_that_waits_as_it_is_told_under_overload_is_answered(tmp_path: Path) -> None:
    def question(slo_ms: int) -> dict[str, Any]:
        inputs = [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]
        return {"inputs": inputs, "parameters": {"slo_ms": slo_ms}}

    ahead_ns = 0
    clock = lambda: time.monotonic_ns() + ahead_ns  # noqa: E731
    async with (
        serving(tmp_path, rest=True, clock=clock) as front_end,
        httpx.AsyncClient(base_url=f"http://{front_end.rest}", timeout=60) as http,
    ):
        front_end.worker.hold = True
        # A batch of a model that takes 2 s stands before it, and it has 3.
        path = "/v2/models/long-1/infer"
        before = [asyncio.create_task(http.post(path, json=question(60_000))) for _ in "ab"]
        await until(lambda: front_end.runtime.num_waiting == 2)
        refused = await http.post(path, json=question(3000))
        assert (refused.status_code, refused.json()["reason"]) == (429, "OVERLOADED")
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        ahead_ns = int(refused.headers["retry-after"]) * NS_PER_S
        front_end.worker.hold = False
        front_end.worker.release()
        assert (await http.post(path, json=question(60_000))).status_code == 200
        assert [(await each).status_code for each in before] == [200, 200]
