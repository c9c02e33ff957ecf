"""The HTTP/2 server before the real service: when a request came, what is too much, who does not read."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from typing_extensions import override

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S
from clockwright.v1 import inference_pb2 as pb
from controller.front.admission.entrance import Entrance
from controller.front.admission.limits import AdmissionLimits
from controller.front.http import http2_server
from controller.front.http.http2_server import STREAM_REQUESTS_MAX, Http2Server
from controller.front.http.peer_socket import PeerSocket
from controller.front.services import inference
from controller.front.services.inference import InferenceService
from tests.kit.front_end import FrontEnd, FrontEndInThread, serving_in_thread
from tests.kit.full_entrance import FullEntrance, HeldEntrance
from tests.kit.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GREEDY_WINDOW,
    HEADERS,
    PING,
    RST,
    WINDOW,
    End,
    RawClient,
    call,
    frame,
    headers,
    message,
)

OVERLOADED, LATE = 8, 4


def question(slo_ms: float = 600_000, *, model: str = "double") -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.parameters["slo_ms"].double_param = slo_ms
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(struct.pack("<3f", 1, 2, 3))
    return request.SerializeToString()


class Standstill:
    """The server's event loop does nothing inside the `with` block."""

    def __init__(self, server: FrontEndInThread) -> None:
        self._server = server
        self._over = threading.Event()
        self._began = threading.Event()

    def __enter__(self) -> None:
        def stand() -> None:
            self._began.set()
            self._over.wait(60)

        self._server.loop.call_soon_threadsafe(stand)
        assert self._began.wait(60)

    def __exit__(self, *_: object) -> None:
        self._over.set()


# --- when the bytes came --------------------------------------------------------------------------


def test_what_a_request_waited_before_a_busy_loop_counts(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        client.wait([client.infer(question())])
        with Standstill(server):
            impatient = client.infer(question(50))
            patient = client.infer(question())
            time.sleep(0.06)
        refused, answered = client.wait([impatient, patient])
        assert (refused.status, refused.text.split(":")[0]) == (LATE, "LATE")
        assert "waited" in refused.text
        assert answered.status == 0
        assert server.do(lambda front: front.runtime.telemetry.total.refusals["LATE"]) == 1


def test_the_rpc_deadline_counts_from_the_first_byte_too(tmp_path: Path) -> None:
    request = pb.ModelInferRequest.FromString(question())
    del request.parameters["slo_ms"]
    block = headers("/inference.GRPCInferenceService/ModelInfer", ("grpc-timeout", "50m"))
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        client.wait([client.infer(question())])
        with Standstill(server):
            stream_id = client.infer(request.SerializeToString(), block)
            time.sleep(0.06)
        assert client.wait([stream_id])[0].status == LATE


def test_a_request_that_came_after_a_standstill_is_not_charged_for_it(tmp_path: Path) -> None:
    ahead_ns = 0
    with (
        serving_in_thread(tmp_path, clock=lambda: time.monotonic_ns() + ahead_ns) as server,
        RawClient(server.address) as client,
    ):
        client.wait([client.infer(question())])
        # What the client still acknowledged would else be read together with the request, and in doubt
        # the older of the two counts.
        client.settle()
        with Standstill(server):
            # By the server's clock the loop stood still for 1000 s; the request came at their end.
            ahead_ns = 1000 * NS_PER_S
            stream_id = client.infer(question())
        assert client.wait([stream_id])[0].status == 0


def test_a_connection_that_was_not_accepted_for_long_is_charged_too(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server:
        with RawClient(server.address) as client:
            client.wait([client.infer(question())])
        with Standstill(server):
            client = RawClient(server.address)
            stream_id = client.infer(question(50))
            time.sleep(0.06)
        with client:
            assert client.wait([stream_id])[0].status == LATE


def test_more_connections_than_a_turn_accepts_are_all_charged(tmp_path: Path) -> None:
    ahead_ns = 0
    with serving_in_thread(tmp_path, clock=lambda: time.monotonic_ns() + ahead_ns) as server:
        with Standstill(server):
            clients = [RawClient(server.address) for _ in range(300)]
            ids = [client.infer(question()) for client in clients]
            # By the server's clock they lie there for 1000 s; nobody has to wait for it.
            ahead_ns = 1000 * NS_PER_S
        ends = [client.wait([i])[0] for client, i in zip(clients, ids, strict=True)]
        for client in clients:
            client.socket.close()
    assert Counter(end.status for end in ends) == {LATE: 300}


# --- bounds ---------------------------------------------------------------------------------------


def reason_of(details: str) -> error_details_pb2.ErrorInfo:
    import base64

    status = status_pb2.Status.FromString(base64.b64decode(details + "=" * (-len(details) % 4)))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


def test_more_open_requests_than_the_bound_are_refused_by_name(tmp_path: Path) -> None:
    counted: list[Refusal] = []
    door = AdmissionLimits(
        max_requests=20, max_bytes=1 << 30, count=lambda refusal, _: counted.append(refusal)
    )
    with serving_in_thread(tmp_path, door=door) as server, RawClient(server.address) as client:
        server.do(lambda front: setattr(front.worker, "hold", True))
        open_ones = [client.infer(question()) for _ in range(20)]
        server.until(lambda front: front.runtime.num_waiting == 20)
        [refused] = client.wait([client.infer(question())])
        assert refused.status == OVERLOADED
        assert refused.text == (
            "OVERLOADED: the front is full: found 20 open calls, expected 20 at most"
        )
        info = reason_of(refused.headers["grpc-status-details-bin"])
        assert (info.reason, dict(info.metadata)) == ("OVERLOADED", {"found": "20", "bound": "20"})
        assert counted == [Refusal.OVERLOADED]
        # Operators can still look, and there is room again when answers have left.
        with grpc.insecure_channel(server.address) as channel:
            status: Any = cast(Any, channel).unary_unary("/clockwright.v1.ControlService/Status")
            assert status(b"", wait_for_ready=True)
        server.do(lambda front: front.worker.release())
        assert {end.status for end in client.wait(open_ones)} == {0}
        server.do(lambda front: setattr(front.worker, "hold", False))
        assert client.wait([client.infer(question())])[0].status == 0
    assert (door.num_requests, door.num_bytes) == (0, 0)


def test_more_bytes_than_the_bound_are_refused_while_they_come(tmp_path: Path) -> None:
    door = AdmissionLimits(max_requests=1000, max_bytes=100_000)
    with serving_in_thread(tmp_path, door=door) as server, RawClient(server.address) as client:
        first, second = client.next_id(), client.next_id()
        announced = struct.pack(">BI", 0, 1 << 20)
        for stream_id in (first, second):
            opening = frame(HEADERS, END_HEADERS, stream_id, headers())
            client.send(opening + frame(DATA, 0, stream_id, announced + bytes(16_000)))
        server.until(lambda _: door.num_bytes == 32_000)
        for _ in range(10):
            client.send(frame(DATA, 0, first, bytes(16_000)))
        [refused] = client.wait([first])
        assert refused.status == OVERLOADED
        assert "bytes of open requests" in refused.text
        # The room that it had is free, and the other still comes.
        assert client.wait([client.infer(question())])[0].status == 0
        assert door.num_bytes == 16_000
    assert door.num_bytes == 0


def test_uploads_and_feedback_find_no_more_room_than_requests(tmp_path: Path) -> None:
    door = AdmissionLimits(max_requests=1000, max_bytes=100_000)
    with serving_in_thread(tmp_path, door=door) as server, RawClient(server.address) as client:
        announced = struct.pack(">BI", 0, 1 << 20)
        for method in ("AddModel", "Feedback"):
            stream_id = client.next_id()
            block = headers(f"/clockwright.v1.ControlService/{method}")
            client.send(frame(HEADERS, END_HEADERS, stream_id, block))
            client.send(frame(DATA, 0, stream_id, announced))
            for _ in range(10):
                client.send(frame(DATA, 0, stream_id, bytes(16_000)))
            [refused] = client.wait([stream_id])
            assert refused.status == OVERLOADED
            assert "bytes of open requests" in refused.text
        server.until(lambda _: door.num_bytes == 0)


def test_thousands_of_messages_in_parts_are_refused_as_far_as_they_are_too_much(
    tmp_path: Path,
) -> None:
    door = AdmissionLimits(max_requests=5000, max_bytes=1000)
    announced = struct.pack(">BI", 0, 1 << 20)
    with serving_in_thread(tmp_path, door=door) as server:
        with RawClient(server.address) as client:
            ids = [client.next_id() for _ in range(4000)]
            opening = [frame(HEADERS, END_HEADERS, i, headers()) for i in ids]
            client.send(b"".join(opening))
            client.send(b"".join(frame(DATA, 0, i, announced + b"x") for i in ids))
            client.wait(ids[:3000])
            assert server.do(lambda _: door.num_bytes) == 1000
            assert len(client.ended) == 3000
        server.until(lambda _: door.num_bytes == 0)


def test_whole_messages_that_nobody_reads_have_a_bound(tmp_path: Path) -> None:
    door = AdmissionLimits(max_requests=1000, max_bytes=100_000)
    with serving_in_thread(tmp_path, door=door) as server, RawClient(server.address) as client:
        # The calls go on, as far as these say: nothing asks for their messages yet.
        ids = [client.next_id() for _ in range(20)]
        for stream_id in ids:
            opening = frame(HEADERS, END_HEADERS, stream_id, headers())
            client.send(opening + frame(DATA, 0, stream_id, message(bytes(10_000))))
        refused = client.wait([i for i in ids if i in client.ended] or ids[:1])
        assert refused[0].status == OVERLOADED
        assert "bytes of open requests" in refused[0].text
    assert door.num_bytes == 0


def test_empty_messages_are_not_free(tmp_path: Path) -> None:
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    door = AdmissionLimits(max_requests=1000, max_bytes=1_000_000)
    with serving_in_thread(tmp_path, door=door) as server, RawClient(server.address) as client:
        server.do(lambda front: setattr(front.worker, "hold", True))
        stream_id = client.next_id()
        client.send(frame(HEADERS, END_HEADERS, stream_id, headers(path)))
        for _ in range(10):
            client.send(frame(DATA, 0, stream_id, message(b"") * 3000))
        [refused] = client.wait([stream_id])
        assert refused.status == OVERLOADED


def sweep_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the test to sweep, which counts how often."""
    monkeypatch.setattr(http2_server, "_SWEEP_S", 1e6)


def sweep_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep all the time, and give up no client that is silent for a while, as on a busy machine."""
    monkeypatch.setattr(http2_server, "_SWEEP_S", 0.02)
    for bound in ("_PING_AFTER", "_SILENCE_MAX", "_STALL_MAX", "_COMING_MAX"):
        monkeypatch.setattr(http2_server, bound, 1_000_000)


def test_who_is_gone_before_the_connection_begins_is_not_counted_and_others_are_looked_after(
    tmp_path: Path,
) -> None:
    with serving_in_thread(tmp_path, max_connections=2) as server:
        http2 = server.front_end.server
        assert isinstance(http2, Http2Server)
        host, _, port = server.address.rpartition(":")

        def reset_before_it_is_accepted(_: FrontEnd) -> None:
            # Nobody accepts while this runs.
            with socket.create_connection((host, int(port))) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        for _ in range(3):
            server.do(reset_before_it_is_accepted)
        with RawClient(server.address) as client:
            assert client.wait([client.infer(question())])[0].status == 0
            server.do(lambda _: http2.sweep())
            assert len(http2._peers) == 1


def test_connections_beyond_the_bound_hear_why_they_are_refused(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path, max_connections=2) as server:
        clients = [RawClient(server.address) for _ in range(3)]
        ends = [client.wait([client.infer(question())])[0] for client in clients]
        assert [end.status for end in ends] == [0, 0, OVERLOADED]
        assert ends[2].text == (
            "OVERLOADED: the front is full: found 3 connections, expected 2 at most"
        )
        for client in clients:
            client.socket.close()


def test_idle_connections_make_room_for_those_that_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_often(monkeypatch)
    with serving_in_thread(tmp_path, max_connections=20) as server, ExitStack() as stack:
        server.do(lambda front: setattr(front.worker, "hold", True))
        busy = stack.enter_context(RawClient(server.address))
        waiting = busy.infer(question())
        server.until(lambda front: front.runtime.num_waiting == 1)
        for _ in range(60):
            stack.enter_context(RawClient(server.address))
        # It is told by sweeps how long they are idle; until then a newcomer is refused.
        end = None
        while end is None or end.status == OVERLOADED:
            with RawClient(server.address) as newcomer:
                stream_id = newcomer.infer(question(50))
                [end] = newcomer.wait([stream_id])
                assert "connections" in end.text or end.status == LATE
        # One that has a call stays.
        server.do(lambda front: front.worker.release())
        assert busy.wait([waiting])[0].status == 0


def test_unread_answers_of_all_clients_together_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_often(monkeypatch)
    closed = struct.pack(">HI", 4, 0)
    door = AdmissionLimits(max_requests=1000, max_bytes=20_000)
    with serving_in_thread(tmp_path, door=door) as server, ExitStack() as stack:
        modest, greedy = (
            stack.enter_context(RawClient(server.address, settings=closed, window=b""))
            for _ in range(2)
        )
        for _ in range(5):
            modest.infer(question())
        for _ in range(2000):
            if greedy.closed:
                break
            with suppress(OSError):
                greedy.infer(question())
            greedy.take(0.005)
        assert greedy.closed
        modest.take()
        assert not modest.closed


def test_every_call_of_a_burst_ends_with_a_status_of_ours(tmp_path: Path) -> None:
    with serving_in_thread(
        tmp_path, door=AdmissionLimits(max_requests=500, max_bytes=1 << 30)
    ) as server:
        with RawClient(server.address) as client:
            ids = [client.next_id() for _ in range(5000)]
            for begin in range(0, 5000, 100):
                client.send(b"".join(call(i, question(20)) for i in ids[begin : begin + 100]))
                client.take()
            ends = client.wait(ids)
        reasons = Counter(end.text.split(":")[0] for end in ends)
        assert set(reasons) <= {"", "LATE", "OVERLOADED", "INFEASIBLE", "COLD"}
        assert not client.reset


# --- peers that mean harm, or sleep ---------------------------------------------------------------


@pytest.mark.parametrize("where", ["read", "refusal"])
def test_a_fault_of_ours_ends_the_call_and_no_other_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyError(where)

    with serving_in_thread(tmp_path) as server, RawClient(server.address) as other:
        other.wait([other.infer(question())])
        with RawClient(server.address) as client, monkeypatch.context() as patched:
            if where == "read":
                patched.setattr(http2_server._Peer, "_handle", fail)
                client.infer(question())
                assert client.wait_closed() == (2, "internal error")
            else:
                patched.setattr(inference, "error_of", fail)
                [end] = client.wait([client.infer(question(0.001))])
                assert (end.status, end.text) == (13, "internal error in ModelInfer: KeyError")
        assert other.wait([other.infer(question())])[0].status == 0


def test_a_flood_ends_its_own_connection_with_a_reason(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as other:
        with RawClient(server.address) as client:
            try:
                for _ in range(200):
                    client.send(frame(PING, 0, 0, bytes(8)) * 1000)
                    client.take()
            except (BrokenPipeError, ConnectionResetError):
                pass
            client.wait_closed()
        assert other.wait([other.infer(question())])[0].status == 0


def test_who_is_hung_up_on_can_read_why_and_is_let_go_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_never(monkeypatch)
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        http2 = server.front_end.server
        assert isinstance(http2, Http2Server)
        client.settle()
        # What comes behind it is not read, and would take the answer back if the server just closed.
        with Standstill(server):
            client.send(frame(PING, 0, 0, b"1234567") + bytes(1 << 20))
        goodbye = client.wait_closed()
        assert goodbye is not None
        assert "found PING of 7 bytes" in goodbye[1]
        for _ in range(http2_server._LEAVING_SWEEPS):
            server.do(lambda _: http2.sweep())
        with suppress(BrokenPipeError, ConnectionResetError):
            while True:
                client.send(bytes(1000))


def test_answers_wait_for_a_client_that_gives_no_window(tmp_path: Path) -> None:
    closed = struct.pack(">HI", 4, 0)
    with (
        serving_in_thread(tmp_path) as server,
        RawClient(server.address, settings=closed, window=b"") as client,
    ):
        ids = [client.infer(question()) for _ in range(10)]
        server.until(lambda front: front.runtime.telemetry.total.answered == 10)
        for stream_id in ids:
            client.send(frame(8, 0, stream_id, struct.pack(">I", 1 << 20)))
        assert {end.status for end in client.wait(ids)} == {0}


def test_a_client_that_leaves_withdraws_what_it_asked(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server:
        server.do(lambda front: setattr(front.worker, "hold", True))
        with RawClient(server.address) as client:
            for _ in range(30):
                client.infer(question())
            server.until(lambda front: front.runtime.num_waiting == 30)
        server.until(lambda front: front.runtime.num_waiting == 0)


def test_a_client_that_breaks_off_before_all_it_sent_is_read_withdraws_what_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The event loop tells of the end once, when there is still something to read, and never again.
    monkeypatch.setattr(http2_server, "_PING_AFTER", 1_000_000)
    monkeypatch.setattr(http2_server, "_SILENCE_MAX", 1_000_000)
    with serving_in_thread(tmp_path) as server:
        server.do(lambda front: setattr(front.worker, "hold", True))
        with RawClient(server.address) as client:
            client.settle()
            client.infer(question())
            server.until(lambda front: bool(front.worker.held))
            with Standstill(server):
                # More than is read at once.
                large = frame(HEADERS, END_HEADERS, stream_id := client.next_id(), headers())
                large += frame(DATA, 0, stream_id, struct.pack(">BI", 0, 4_000_000))
                client.send(large + frame(DATA, 0, stream_id, bytes(16_384)) * 64)
                client.socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                client.socket.close()
            server.until(lambda front: front.runtime.num_waiting == 0)


def test_a_client_that_is_silent_is_given_up_and_one_that_answers_pings_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_never(monkeypatch)
    with serving_in_thread(tmp_path) as server:
        http2 = server.front_end.server
        assert isinstance(http2, Http2Server)
        server.do(lambda front: setattr(front.worker, "hold", True))
        with RawClient(server.address) as silent, RawClient(server.address) as awake:
            silent.infer(question())
            stream_id = awake.infer(question())
            server.until(lambda front: front.runtime.num_waiting == 2)
            for _ in range(http2_server._PING_AFTER):
                server.do(lambda _: http2.sweep())
            # Both are pinged, and one answers.
            while all(server.do(lambda _: [peer._silent_sweeps for peer in http2._peers])):
                awake.take(0.01)
            for _ in range(http2_server._SILENCE_MAX - http2_server._PING_AFTER):
                server.do(lambda _: http2.sweep())
            server.until(lambda front: front.runtime.num_waiting == 1)
            server.do(lambda front: front.worker.release())
            assert awake.wait([stream_id])[0].status == 0


def test_a_client_that_leaves_its_answers_unread_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_SWEEP_S", 0.02)
    closed = struct.pack(">HI", 4, 0)
    with (
        serving_in_thread(tmp_path) as server,
        RawClient(server.address, settings=closed, window=b"") as client,
    ):
        client.infer(question())
        goodbye = client.wait_closed()
        assert goodbye is not None
        assert re.fullmatch(r"the client leaves \d+ bytes of answers unread", goodbye[1])


def test_a_frame_that_does_not_come_to_its_end_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_SWEEP_S", 0.002)
    monkeypatch.setattr(http2_server, "_SILENCE_MAX", 1_000_000)
    monkeypatch.setattr(http2_server, "_PING_AFTER", 1_000_000)
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        client.settle()
        client.send(frame(HEADERS, END_HEADERS, 1, headers())[:-1])
        goodbye = client.wait_closed()
        assert goodbye is not None
        assert "a frame did not come within" in goodbye[1]


def test_calls_that_bring_no_request_make_room_for_others(tmp_path: Path) -> None:
    door = AdmissionLimits(max_requests=100, max_bytes=1 << 20)
    with (
        serving_in_thread(tmp_path, door=door) as server,
        RawClient(server.address) as greedy,
        RawClient(server.address) as modest,
    ):
        coming = modest.next_id()
        modest.send(frame(HEADERS, END_HEADERS, coming, headers()))
        modest.settle()
        ids = [greedy.next_id() for _ in range(1000)]
        for stream_id in ids:
            greedy.send(frame(HEADERS, END_HEADERS, stream_id, headers()))
        greedy.settle()
        assert modest.wait([modest.infer(question())])[0].status == 0
        # A request that takes its time is no worse off for it.
        modest.send(frame(DATA, END_STREAM, coming, message(question())))
        assert modest.wait([coming])[0].status == 0
        ended = greedy.wait([stream_id for stream_id in ids if stream_id in greedy.ended])
        assert len(ended) >= 900
        assert {end.status for end in ended} == {OVERLOADED}
        assert "others need the room of a call that brings no request" in ended[0].text


def test_connections_of_calls_that_come_slowly_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_SWEEP_S", 0.01)
    monkeypatch.setattr(http2_server, "_SILENCE_MAX", 1_000_000)
    monkeypatch.setattr(http2_server, "_COMING_MAX", 1_000_000)
    with serving_in_thread(tmp_path, max_connections=10) as server, ExitStack() as stack:
        for _ in range(10):
            slow = stack.enter_context(RawClient(server.address))
            slow.send(frame(HEADERS, END_HEADERS, 1, headers()))
            slow.send(frame(DATA, 0, 1, message(question())[:-1]))
        status: int | None = None
        while status != 0:
            with RawClient(server.address) as client:
                status = client.wait([client.infer(question())])[0].status


def test_a_request_that_does_not_come_to_its_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_SWEEP_S", 0.002)
    monkeypatch.setattr(http2_server, "_SILENCE_MAX", 1_000_000)
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        stream_id = client.next_id()
        client.send(frame(HEADERS, END_HEADERS, stream_id, headers()))
        client.send(frame(DATA, 0, stream_id, message(question())[:-1]))
        assert "did not come within" in client.wait([stream_id])[0].text


@pytest.mark.parametrize("cut", [1, 9, 10, 60, 200])
def test_a_request_in_pieces_is_answered(tmp_path: Path, cut: int) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        stream_id = client.next_id()
        data = call(stream_id, question())
        client.send(data[:cut])
        client.send(data[cut:])
        assert client.wait([stream_id])[0].status == 0


def test_a_call_without_a_message_or_with_two_is_refused(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        none, two = client.next_id(), client.next_id()
        client.send(frame(HEADERS, END_HEADERS | 1, none, headers()))
        client.send(frame(HEADERS, END_HEADERS, two, headers()))
        client.send(frame(DATA, 1, two, message(question()) * 2))
        assert [end.text for end in client.wait([none, two])] == [
            "found 0 messages, expected one",
            "found 2 messages, expected one",
        ]
        endless = client.next_id()
        client.send(frame(HEADERS, END_HEADERS, endless, headers()))
        client.send(frame(DATA, 0, endless, message(b"") * 1000))
        assert client.wait([endless])[0].text == "found 2 messages, expected one"


def test_an_answer_that_cannot_be_written_ends_its_call_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr("controller.front.services.inference.encode_response", broken)
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        [end] = client.wait([client.infer(question())])
        assert (end.status, end.text) == (13, "internal error in ModelInfer: RuntimeError")


def test_an_answer_that_cannot_be_put_into_a_message_ends_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What explains an answer comes from workers and from policies of other packages.
    monkeypatch.setattr(
        "controller.front.services.inference.explain", lambda *_, **__: {"took_us": 2**70}
    )
    asked = pb.ModelInferRequest.FromString(question())
    asked.parameters["explain"].bool_param = True
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        [end] = client.wait([client.infer(asked.SerializeToString())])
        assert (end.status, end.text) == (13, "internal error in ModelInfer: ValueError")


# --- streams of requests --------------------------------------------------------------------------

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


def begin_stream(client: RawClient, *requests: bytes) -> int:
    stream_id = client.next_id()
    client.send(frame(HEADERS, END_HEADERS, stream_id, headers(STREAM_INFER)))
    send_requests(client, stream_id, *requests)
    return stream_id


def send_requests(client: RawClient, stream_id: int, *requests: bytes, flags: int = 0) -> None:
    content = b"".join(message(request) for request in requests)
    client.send(frame(DATA, flags, stream_id, content))


def errors(end: End) -> list[str]:
    return [pb.ModelStreamInferResponse.FromString(each).error_message for each in end.messages]


def test_requests_of_a_stream_wait_for_their_answers_without_a_task_each(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        server.do(lambda front: setattr(front.worker, "hold", True))
        stream_id = begin_stream(client, question())
        server.until(lambda front: front.runtime.num_waiting == 1)
        num_tasks = server.do(lambda _: len(asyncio.all_tasks()))
        send_requests(client, stream_id, *[question()] * 100)
        server.until(lambda front: front.runtime.num_waiting == 101)
        assert server.do(lambda _: len(asyncio.all_tasks())) == num_tasks
        # Behind the last request the client has nothing to say, and still hears all answers.
        send_requests(client, stream_id, question(model="nobody"), flags=END_STREAM)
        server.do(lambda front: front.worker.release())
        [end] = client.wait([stream_id])
        *answers, error = sorted(errors(end))
        assert answers == [""] * 101
        assert "there is no model 'nobody'" in error
        assert end.status == 0


def test_a_stream_has_a_bound_of_requests_that_are_served_at_once(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        server.do(lambda front: setattr(front.worker, "hold", True))
        stream_id = begin_stream(client, *[question()] * (STREAM_REQUESTS_MAX + 100))
        client.settle()
        server.until(lambda front: front.runtime.num_waiting == STREAM_REQUESTS_MAX)
        send_requests(client, stream_id, flags=END_STREAM)
        server.do(lambda front: front.worker.release())
        [end] = client.wait([stream_id])
        assert errors(end) == [""] * (STREAM_REQUESTS_MAX + 100)


def test_a_stream_whose_client_takes_no_answers_waits_and_goes_on_when_it_does(
    tmp_path: Path,
) -> None:
    closed = struct.pack(">HI", 4, 0)
    with (
        serving_in_thread(tmp_path) as server,
        RawClient(server.address, settings=closed, window=GREEDY_WINDOW) as client,
    ):
        stream_id = begin_stream(client, *[question()] * 3 * STREAM_REQUESTS_MAX)
        client.settle()
        server.until(lambda front: front.runtime.num_waiting == 0)
        assert server.do(lambda front: front.runtime.telemetry.total.answered) < (
            2 * STREAM_REQUESTS_MAX
        )
        send_requests(client, stream_id, flags=END_STREAM)
        client.send(frame(WINDOW, 0, stream_id, struct.pack(">I", 1 << 30)))
        [end] = client.wait([stream_id])
        assert errors(end) == [""] * 3 * STREAM_REQUESTS_MAX


def test_a_stream_that_stands_still_inside_a_message_is_given_up_and_one_between_two_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_SWEEP_S", 0.002)
    monkeypatch.setattr(http2_server, "_SILENCE_MAX", 1_000_000)
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        rests, stands = begin_stream(client, question()), begin_stream(client, question())
        client.send(frame(DATA, 0, stands, message(question())[:-1]))
        assert "did not come within" in client.wait([stands])[0].text
        send_requests(client, rests, question(), flags=END_STREAM)
        assert errors(client.wait([rests])[0]) == ["", ""]


def test_a_busy_loop_refuses_calls_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        # The caller, the headers and the length of the message are known from then on.
        client.wait([client.infer(question())])
        monkeypatch.setattr(Entrance, "has_time", FullEntrance.has_time)
        monkeypatch.setattr(Entrance, "may_enter", FullEntrance.may_enter)
        monkeypatch.setattr(http2_server._Call, "__init__", None)
        monkeypatch.setattr(InferenceService, "infer", None)
        ends = client.wait([client.infer(question()) for _ in range(100)])
        assert {end.status for end in ends} == {OVERLOADED}
        assert all("the controller itself is busy all the time" in end.text for end in ends)
        assert server.do(lambda front: front.runtime.telemetry.at_door["OVERLOADED"]) == 100


class JudgingEntrance(Entrance):
    """Lets everything in that it has judged; it waits for a turn where `waits` says so."""

    waits = False
    num_judged = 0

    @override
    def has_time(self, now_ns: int, arrival_ns: int, *, judged: bool = False) -> bool:
        return judged and not self.waits

    @override
    def may_enter(
        self, source: object, arrival_ns: int, slo_ns: int, now_ns: int, besides: int = 0
    ) -> bool:
        self.num_judged += 1
        return True


@pytest.mark.parametrize("waits", [False, True])
def test_each_call_that_comes_to_a_busy_loop_is_judged_once(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JudgingEntrance, "waits", waits)
    with (
        serving_in_thread(tmp_path, entrance=JudgingEntrance) as server,
        RawClient(server.address) as client,
    ):
        client.settle()

        def num_judged(front: FrontEnd) -> int:
            assert front.server is not None
            assert isinstance(front.server.entrance, JudgingEntrance)
            return front.server.entrance.num_judged

        # All come in one read: nothing is known of the caller, and then its headers are.
        for num_asked in (10, 20):
            with Standstill(server):
                calls = [client.infer(question(60_000)) for _ in range(10)]
            client.wait(calls)
            assert server.do(num_judged) == num_asked


def test_a_connection_is_left_unread_for_its_pause_while_the_loop_has_no_time_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(front: FrontEnd, pressed: bool) -> None:
        assert front.server is not None
        front.server.entrance.is_pressed = pressed

    puts_off: list[PeerSocket] = []
    monkeypatch.setattr(PeerSocket, "put_off", lambda peer: puts_off.append(peer))
    monkeypatch.setattr(Entrance, "_end_window", lambda *_: None)
    monkeypatch.setattr(Entrance, "pause_ns", lambda *_: 3600 * NS_PER_S)
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        client.settle()
        server.do(lambda front: press(front, True))
        client.wait([client.infer(question())])
        asked = client.infer(question())
        server.until(lambda _: len(puts_off) > 0)
        assert server.do(lambda front: front.runtime.telemetry.total.answered) == 1
        server.do(lambda front: press(front, False))
        assert client.wait([asked])[0].status == 0


def test_calls_past_their_slo_are_refused_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        client.wait([client.infer(question(50))])
        monkeypatch.setattr(http2_server._Call, "__init__", None)
        monkeypatch.setattr(InferenceService, "infer", None)
        with Standstill(server):
            old = [client.infer(question(50)) for _ in range(20)]
            time.sleep(0.06)
        ends = client.wait(old)
        assert {(end.status, end.text.split(":")[0]) for end in ends} == {(LATE, "LATE")}
        assert server.do(lambda front: front.runtime.telemetry.at_door["LATE"]) == 20


def test_an_answer_that_would_be_sent_too_late_is_refused_and_the_next_one_is_not(
    tmp_path: Path,
) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:

        def stand_still(front: FrontEnd) -> None:
            assert front.server is not None
            front.server.sending_ns = 3600 * NS_PER_S

        server.do(stand_still)
        assert client.wait([client.infer(question())])[0].status == LATE
        assert client.wait([client.infer(question())])[0].status == 0


def test_a_call_that_its_client_takes_back_while_it_waits_is_never_begun(tmp_path: Path) -> None:
    with (
        serving_in_thread(tmp_path, entrance=HeldEntrance) as server,
        RawClient(server.address) as client,
    ):
        kept, taken_back = client.infer(question()), client.infer(question())
        server.until(lambda front: HeldEntrance.of(front.server).num_waiting == 2)
        client.send(frame(RST, 0, taken_back, bytes((0, 0, 0, 8))))
        server.until(lambda front: any(each.over for each in HeldEntrance.of(front.server).held))
        server.do(lambda front: HeldEntrance.of(front.server).open())
        assert client.wait([kept])[0].status == 0
        assert server.do(lambda front: len(front.runtime.telemetry.requests)) == 1
        assert server.do(lambda front: front.server.door.num_bytes if front.server else -1) == 0


def test_a_busy_loop_keeps_requests_of_a_stream_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        stream_id = begin_stream(client, question())
        server.until(lambda front: front.runtime.telemetry.total.answered == 1)
        monkeypatch.setattr(Entrance, "has_time", FullEntrance.has_time)
        monkeypatch.setattr(Entrance, "may_enter", FullEntrance.may_enter)
        send_requests(client, stream_id, *[question()] * 2000, flags=END_STREAM)
        answered, *refused = errors(client.wait([stream_id])[0])
        assert answered == ""
        assert len(refused) == 2000
        assert all("the controller itself is busy" in text for text in refused)


def test_a_request_of_a_stream_costs_hardly_more_lines_than_one_of_its_own(tmp_path: Path) -> None:
    num_lines = 0

    def count(frame_: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        nonlocal num_lines
        if "/controller/" not in frame_.f_code.co_filename:
            return None
        num_lines += event == "line"
        return count

    with serving_in_thread(tmp_path) as server, RawClient(server.address) as client:
        stream_id, num_asked = begin_stream(client), 0

        def ask_in_stream() -> None:
            nonlocal num_asked
            num_asked += 1
            send_requests(client, stream_id, question())
            client.wait_messages(stream_id, num_asked)

        def lines_of_50(ask: Callable[[], object]) -> int:
            nonlocal num_lines
            ask()
            num_lines = 0
            server.do(lambda _: sys.settrace(count))
            for _ in range(50):
                ask()
            server.do(lambda _: sys.settrace(None))
            return num_lines

        alone = lines_of_50(lambda: client.wait([client.infer(question())]))
        # A message of a stream comes by the longer way through the frames.
        assert lines_of_50(ask_in_stream) < 1.2 * alone
