"""Whoever watches a server's health is told at once, and whenever it is another, until one of the two goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.front.oip import health_messages
from controller.front.services.health import WATCHERS_MAX
from tests.kit.front_end import FrontEndInThread, serving_in_thread
from tests.kit.processes import until
from tests.kit.watched import serving

WATCH = "/grpc.health.v1.Health/Watch"
INFERENCE = b"\x0a\x1e" + b"inference.GRPCInferenceService"

SERVING, NOT_SERVING, SERVICE_UNKNOWN = (
    status.SerializeToString()
    for status in (
        health_messages.SERVING,
        health_messages.NOT_SERVING,
        health_messages.SERVICE_UNKNOWN,
    )
)


@pytest.fixture(scope="module", params=["here", "apart"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontEndInThread]:
    with serving_in_thread(tmp_path_factory.mktemp("models"), front=request.param) as served:
        served.until(lambda front_end: front_end.catalogue.ready)
        yield served


@pytest.fixture
def channel(server: FrontEndInThread) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as found:
        yield found


def drain(server: FrontEndInThread, draining: bool) -> None:
    server.do(lambda front_end: setattr(front_end.runtime, "draining", draining))


def test_each_change_is_told_and_nothing_else(server: FrontEndInThread, channel: Any) -> None:  # noqa: ANN401
    whole, service = (channel.unary_stream(WATCH)(asked, timeout=60) for asked in (b"", INFERENCE))
    assert next(whole) == next(service) == SERVING
    drain(server, True)
    assert next(whole) == next(service) == NOT_SERVING
    drain(server, False)
    assert next(whole) == next(service) == SERVING
    for call in (whole, service):
        call.cancel()


def test_a_service_that_is_not_known_may_come_later_and_what_is_no_request_is_wrong(
    channel: Any,  # noqa: ANN401
) -> None:
    call = channel.unary_stream(WATCH)(b"\x0a\x01x", timeout=60)
    assert next(call) == SERVICE_UNKNOWN
    assert call.is_active()
    call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        next(channel.unary_stream(WATCH)(b"\x0a\xff", timeout=60))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_so_many_watch_at_once_and_who_leaves_makes_room(channel: Any) -> None:  # noqa: ANN401
    def watch() -> Any:  # noqa: ANN401
        return channel.unary_stream(WATCH)(b"", timeout=120)

    def there_is_room() -> bool:
        call = watch()
        try:
            return bool(next(call) == SERVING)
        except grpc.RpcError:
            return False
        finally:
            call.cancel()

    until(there_is_room, what="those of the tests before have left")
    calls: list[Any] = []
    # A call that was given up may take its place for a moment longer.
    while len(calls) < WATCHERS_MAX:
        call = watch()
        try:
            assert next(call) == SERVING
        except grpc.RpcError:
            continue
        calls.append(call)
    with pytest.raises(grpc.RpcError, match=f"found {WATCHERS_MAX} who watch") as caught:
        next(watch())
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    calls.pop().cancel()
    until(there_is_room, what="a place is free")
    for call in calls:
        call.cancel()


def test_a_server_that_stops_says_so_and_does_not_wait_for_those_who_watch(tmp_path: Path) -> None:
    with serving(tmp_path / "models") as served:
        channel: Any = grpc.insecure_channel(f"127.0.0.1:{served.controller.port}")
        call = channel.unary_stream(WATCH)(b"", timeout=60)
        assert next(call) == SERVING
    assert list(call) == [NOT_SERVING]
    assert call.code() is grpc.StatusCode.OK
    channel.close()
