"""An endpoint picker answers gateways by Envoy's external processing, in each way in which they send a call."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS
from clockwright.v1 import inference_pb2 as pb
from clockwright.v1.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from controller.front.cells.rows import SLO_CLASSES_NS, CellModels, CellRow, encode, key_of
from controller.front.oip import health_messages
from controller.process.config import ServingConfig
from controller.process.lease.places import open_directory
from controller.process.picker.picker import DESTINATION, METHOD, serving
from tests.kit.front_end import until

# The type stubs want arguments that are optional.
_aio: Any = grpc.aio

INFER = "/inference.GRPCInferenceService/ModelInfer"
#: A cell that has `m` and could begin after 30 ms, and one that has `n` too and could begin at once.
BUSY, IDLE = "10.0.0.1:8001", "10.0.0.2:8001"


@asynccontextmanager
async def picking(
    folder: Path, *, empty: bool = False, clock: Callable[[], int] = lambda: 0
) -> AsyncIterator[Any]:
    """A channel to a picker of a directory with two cells, or with none; rows expire by the clock."""
    store = open_directory(f"file:{folder}/cells")

    def write(serial: int) -> None:
        for address, wait_us, models in ((BUSY, 30_000, ("m",)), (IDLE, 0, ("m", "n"))):
            waits = (wait_us,) * len(SLO_CLASSES_NS)
            row = CellRow(address=address, serial=serial, waits_us=waits, num_workers=1)
            times = dict.fromkeys(models, (5_000, 5_000, 0))
            for entry in (row, CellModels(address=address, models=times)):
                store.put(key_of(entry), encode(entry))

    if not empty:
        write(1)
    config = ServingConfig(port=0)
    async with (
        serving(
            config, f"file:{folder}/cells", default_slo_ns=100 * NS_PER_MS, clock=clock
        ) as running,
        _aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        if not empty:
            # One row alone may be that of a controller that is gone.
            write(2)
            serves = running.picker.choices.serves
            await until(lambda: serves(BUSY, "m") and serves(IDLE, "n"))
        yield channel


def headers(path: str, *, last: bool = True, mode: int = 0, subset: Any = None, **more: str) -> Any:  # noqa: ANN401
    request = ProcessingRequest()
    request.request_headers.end_of_stream = last
    for key, value in {":path": path, **more}.items():
        name = key.replace("_", "-")
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    request.protocol_config.request_body_mode = mode
    if subset is not None:
        hints = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hints["x-gateway-destination-endpoint-subset"] = subset
    return request


def body(data: bytes, *, last: bool = True) -> Any:  # noqa: ANN401
    request = ProcessingRequest()
    request.request_body.body, request.request_body.end_of_stream = data, last
    return request


def inference(model: str = "m", slo_ms: int | None = None) -> bytes:
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(100)])
    if slo_ms is not None:
        message.parameters["slo_ms"].int64_param = slo_ms
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


async def process(channel: Any, *requests: Any) -> list[Any]:  # noqa: ANN401
    """What is answered to the messages of one call."""
    call = channel.stream_stream(
        METHOD.path,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )(iter(requests))
    return [response async for response in call]


def picked(response: Any, kind: str = "request_headers") -> str:  # noqa: ANN401
    """Where an answer sends a call."""
    common = getattr(response, kind).response
    found = {
        option.header.key: option.header.raw_value.decode()
        for option in common.header_mutation.set_headers
    }
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == found[DESTINATION]
    return str(found[DESTINATION])


async def test_rest_names_the_model_in_its_path_or_in_a_header(tmp_path: Path) -> None:
    async with picking(tmp_path) as channel:
        # 35 ms do not fit into a quarter of 100 ms, and do into one of 400.
        (answer,) = await process(channel, headers("/v2/models/m/infer"))
        assert picked(answer) == IDLE
        asked = headers("/v2/models/m/infer", x_clockwright_slo_ms="400")
        assert picked((await process(channel, asked))[0]) == BUSY
        asked = headers("/v2/models/none/infer", x_gateway_model_name="n")
        assert picked((await process(channel, asked))[0]) == IDLE
        # What only asks about a model has no deadline.
        for path in ("/v2/models/m", "/v2/models/m/ready"):
            asked = headers(path, x_clockwright_slo_ms="1")
            assert picked((await process(channel, asked))[0]) in (BUSY, IDLE)
        assert picked((await process(channel, headers("/v2/models/stats")))[0]) in (BUSY, IDLE)
        # Whatever names no model goes to any controller.
        assert picked((await process(channel, headers("/v2/health/ready")))[0]) in (BUSY, IDLE)


async def test_a_call_that_no_controller_answers_in_time_is_refused_at_once(tmp_path: Path) -> None:
    async with picking(tmp_path) as channel:
        asked = headers("/v2/models/m/infer", x_clockwright_slo_ms="2")
        (answer,) = await process(channel, asked)
        assert answer.immediate_response.status.code == 429
        assert b"in 5.0 ms > SLO 2.0 ms" in answer.immediate_response.body
        assert answer.immediate_response.body.startswith(b'{"error": "OVERLOADED: ')
        assert not answer.immediate_response.HasField("grpc_status")
        (answer,) = await process(channel, headers("/v2/models/unknown/infer"))
        assert answer.immediate_response.status.code == 503
        assert b"'unknown'" in answer.immediate_response.body


async def test_of_grpc_the_first_bytes_of_the_body_name_the_model_and_its_slo(
    tmp_path: Path,
) -> None:
    async with picking(tmp_path) as channel:
        # Full duplex: the headers are answered when the model is known, and the body is sent back.
        data = inference("m", slo_ms=400)
        begin = headers(INFER, last=False, mode=4, grpc_timeout="9S")
        pieces = [body(data[:7], last=False), body(data[7:50], last=False), body(data[50:])]
        answers = await process(channel, begin, *pieces)
        assert picked(answers[0]) == BUSY
        back = [each.request_body.response.body_mutation.streamed_response for each in answers[1:]]
        assert b"".join(piece.body for piece in back) == data
        assert [piece.end_of_stream for piece in back] == [False] * (len(back) - 1) + [True]
        # Buffered: the headers go on, and the whole body decides.
        begin = headers(INFER, last=False, mode=2)
        first, second = await process(channel, begin, body(inference("n")))
        assert first.HasField("request_headers")
        assert picked(second, "request_body") == IDLE
        assert not second.request_body.response.HasField("body_mutation")
        for mode in (2, 4):
            begin = headers(INFER, last=False, mode=mode)
            *_, refused = await process(channel, begin, body(inference("m", slo_ms=2)))
            assert refused.immediate_response.grpc_status.status == 8
            assert b"SLO 2.0 ms" in refused.immediate_response.body


async def test_the_time_limit_of_a_call_is_its_slo_if_it_states_none(tmp_path: Path) -> None:
    async with picking(tmp_path) as channel:
        begin = headers(INFER, last=False, mode=2, grpc_timeout="2000u")
        *_, refused = await process(channel, begin, body(inference("m")))
        assert refused.immediate_response.status.code == 429
        for odd in ("", "x", "1", "1x", "-1S"):
            begin = headers(INFER, last=False, mode=2, grpc_timeout=odd)
            *_, answer = await process(channel, begin, body(inference("m")))
            assert picked(answer, "request_body") == IDLE


@pytest.mark.parametrize("form", [list, ",".join])
async def test_a_gateway_may_say_which_endpoints_there_are(tmp_path: Path, form: Any) -> None:  # noqa: ANN401
    async with picking(tmp_path) as channel:
        asked = headers("/v2/models/m/infer", subset=form([BUSY, "10.9.9.9:1"]))
        assert picked((await process(channel, asked))[0]) == BUSY
        asked = headers("/v2/models/n/infer", subset=form([BUSY, "10.9.9.9:1"]))
        (answer,) = await process(channel, asked)
        assert answer.immediate_response.status.code == 503


@pytest.mark.parametrize("hint", [5.0, True, None, {"a": 1}, "", [], [None, 5.0]])
async def test_a_subset_that_names_no_endpoint_is_empty(tmp_path: Path, hint: Any) -> None:  # noqa: ANN401
    asked = headers("/v2/models/m/infer", subset="")
    asked.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {"x-gateway-destination-endpoint-subset": hint}
    )
    async with picking(tmp_path) as channel:
        (answer,) = await process(channel, asked)
    assert answer.immediate_response.status.code == 503


async def test_what_is_none_of_its_business_goes_on(tmp_path: Path) -> None:
    async with picking(tmp_path) as channel:
        further = [ProcessingRequest() for _ in range(3)]
        further[0].request_trailers.SetInParent()
        further[1].response_headers.SetInParent()
        further[2].response_body.body = b"x"
        begin = headers("/v2/models/m/infer", last=False, mode=4)
        kinds = [
            answer.WhichOneof("response")
            for answer in await process(channel, begin, body(b"{}"), *further)
        ]
        assert kinds == [
            *("request_headers", "request_body"),
            *("request_trailers", "response_headers", "response_body"),
        ]


async def test_its_health_says_that_it_lives_and_whether_a_controller_is_there(
    tmp_path: Path,
) -> None:
    service = METHOD.service.encode()
    for empty in (True, False):
        async with picking(tmp_path / str(empty), empty=empty) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            serving_, not_serving = (
                each.SerializeToString()
                for each in (health_messages.SERVING, health_messages.NOT_SERVING)
            )
            ready = not_serving if empty else serving_
            assert await check(b"\x0a\x08liveness") == serving_
            for name in (b"", b"readiness", service):
                asked = b"\x0a" + bytes([len(name)]) + name if name else b""
                assert await check(asked) == ready
            with pytest.raises(grpc.aio.AioRpcError, match="no service"):
                await check(b"\x0a\x01x")


async def test_rows_expire_and_then_no_controller_is_there(tmp_path: Path) -> None:
    async with picking(tmp_path, clock=time.monotonic_ns) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        answers = []

        async def ask() -> None:
            answers.append(await check(b""))

        while not answers or answers[-1] != health_messages.NOT_SERVING.SerializeToString():
            await ask()
        (answer,) = await process(channel, headers("/v2/models/m/infer"))
        assert answer.immediate_response.status.code == 503


def test_other_machines_reach_it_only_with_keys_and_tls() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        ServingConfig(host="0.0.0.0")
