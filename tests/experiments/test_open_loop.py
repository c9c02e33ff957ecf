"""The independent client, against a server whose every answer is known beforehand."""

from __future__ import annotations

import base64
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import hpack
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from clockwright.v1 import inference_pb2 as oip
from experiments.live.open_loop import Account, ClientLoad, OpenLoop, offer, write_schedule
from experiments.live.open_loop_client import frame, judge, request_bytes, run
from traces.arrivals import Recorded, Workload

SLO_MS = 2_000
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
NO_LIMITS = frame(SETTINGS, 0, 0, b"")


class Server:
    """Speaks HTTP/2 on one port; `answer` is called with each request's connection, stream and number."""

    def __init__(
        self,
        answer: Callable[[Peer, int, int], None],
        *,
        greeting: bytes = NO_LIMITS,
        pong: Callable[[Peer], None] = lambda _: None,
    ) -> None:
        self.answer = answer
        #: What each connection hears first.
        self.greeting = greeting
        #: Called when a PING comes back; whatever the client sent before it read the PING has come by then.
        self.pong = pong
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.messages: list[bytes] = []
        self.lock = threading.Lock()
        self.peers: list[Peer] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            peer = Peer(self, sock)
            self.peers.append(peer)
            threading.Thread(target=peer.serve, daemon=True).start()

    def close(self) -> None:
        # Without it the thread that accepts would take in one more.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for peer in self.peers:
            peer.close()


class Peer:
    """One connection of the server."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server, self.sock = server, sock
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.headers: list[tuple[str, str]] = []

    def serve(self) -> None:
        try:
            self._read(24)
            self.send(self.server.greeting)
            decoder: Any = hpack.Decoder()
            while True:
                head, flags, stream = struct.unpack(">IBI", self._read(9))
                payload = self._read(head >> 8)
                if head & 255 == HEADERS:
                    self.headers = list(decoder.decode(payload))
                elif head & 255 == DATA:
                    assert flags & END_STREAM
                    with self.server.lock:
                        number = len(self.server.messages)
                        self.server.messages.append(payload)
                    self.server.answer(self, stream, number)
                elif head & 255 == PING:
                    assert flags & ACK
                    self.server.pong(self)
        except OSError:
            return

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionResetError
            data += more
        return data

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def ok(self, stream: int) -> None:
        self.send(
            headers(stream, 0, (":status", "200")),
            frame(DATA, 0, stream, bytes(9)),
            headers(stream, END_STREAM, ("grpc-status", "0")),
        )

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has gone already
        self.sock.close()


def headers(stream: int, flags: int, *fields: tuple[str, str | bytes]) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream, block(*fields))


def block(*fields: tuple[str, str | bytes], huffman: bool = True) -> bytes:
    encoder: Any = hpack.Encoder()
    encoder.header_table_size = 0
    data: bytes = encoder.encode(fields, huffman=huffman)
    return data


def refusal(reason: str) -> bytes:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="clockwright"))
    status = status_pb2.Status(code=8, message="no", details=[detail])
    return bytes(status.SerializeToString())


def refused(peer: Peer, stream: int, reason: str) -> None:
    fields = (":status", "200"), ("grpc-status", "8"), ("grpc-message", "no")
    details = ("grpc-status-details-bin", b"\0" + refusal(reason))
    peer.send(headers(stream, END_STREAM, *fields, details))


def ok(peer: Peer, stream: int, number: int) -> None:
    peer.ok(stream)


@contextmanager
def serving(answer: Callable[[Peer, int, int], None] = ok, **others: Any) -> Iterator[Server]:  # noqa: ANN401
    server = Server(answer, **others)
    try:
        yield server
    finally:
        if server.listener.fileno() >= 0:
            server.close()


def load_of(address: str, **others: Any) -> ClientLoad:  # noqa: ANN401
    usual = ClientLoad(
        address=address, models=("m",), slo_ms=SLO_MS, seconds=0.5, shape=(1, 4), connections=1,
        patience_s=20.0,
    )  # fmt: skip
    return replace(usual, **others)


def ask(server: Server, **others: Any) -> Account:  # noqa: ANN401
    """Ask in this process: the client's own is tried once below."""
    return run(load_of(server.address, **others))


def test_every_end_of_a_request_is_counted_as_what_it_was() -> None:
    def answer(peer: Peer, stream: int, number: int) -> None:
        match number % 7:
            case 0:
                peer.ok(stream)
            case 1:
                refused(peer, stream, "OVERLOADED")
            case 2:
                refused(peer, stream, "LATE")
            case 3:
                peer.send(headers(stream, END_STREAM, (":status", "200"), ("grpc-status", "1")))
            case 4:
                peer.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 11)))
            case 5:
                peer.send(headers(stream, END_STREAM, (":status", "503")))
            case 6:
                peer.send(headers(stream, 0, (":status", "200")), frame(DATA, 1, stream, b""))

    with serving(answer) as server:
        account = ask(server, rate=200)
    count = account.num_offered
    assert count == len(server.messages) > 50

    def share(place: int) -> int:
        return len(range(place, count, 7))

    assert account.num_ok == share(0)
    assert account.refusals == {"OVERLOADED": share(1), "LATE": share(2)}
    assert account.others == {
        "CANCELLED": share(3),
        "RST_STREAM 11": share(4),
        "HTTP 503 without grpc-status": share(5),
        "no grpc-status": share(6),
    }
    assert account.kernel_stamps


def test_a_schedule_is_asked_at_its_times_of_its_models(tmp_path: Path) -> None:
    times_ns = np.array([0, 30, 30, 90], np.int64) * 1_000_000
    source = Recorded(
        times_ns=times_ns,
        models=np.array([1, 0, 1, 0]),
        slo_ns=SLO_MS * 1_000_000,
        end_ns=100_000_000,
    )
    path = tmp_path / "schedule.npy"
    assert write_schedule(path, Workload(models=("a", "b"), sources=(source,))) == 4
    with serving() as server:
        load = load_of(server.address, models=("a", "b"), seconds=0.1, schedule=str(path))
        account = run(load)
    assert account.due_ns.tolist() == times_ns.tolist()
    assert account.num_ok == 4
    asked = [oip.ModelInferRequest.FromString(message[5:]) for message in server.messages]
    assert [request.model_name for request in asked] == ["b", "a", "b", "a"]
    assert {request.parameters["slo_ms"].int64_param for request in asked} == {SLO_MS}
    wrong: dict[str, Any]
    for wrong in ({"rate": 5.0}, {"schedule": ""}):
        with pytest.raises(ValueError, match="expected one of the three"):
            run(replace(load, **wrong))


def test_a_client_with_ticks_sends_what_was_due_at_the_next_one() -> None:
    load_ms, tick_us = 300, 20_000
    with serving() as server:
        account = ask(server, rate=500, seconds=load_ms / 1e3, connections=2, tick_us=tick_us)
    assert account.num_ok == account.num_offered > 75
    # As many moments as ticks, and one before the first.
    assert len(set(account.sent_ns.tolist())) <= load_ms * 1000 / tick_us + 1
    assert (account.sent_ns >= account.due_ns).all()


def test_a_success_after_the_slo_is_counted_as_late() -> None:
    slo_ms = 100

    def answer(peer: Peer, stream: int, number: int) -> None:
        if number == 3:
            # It is the server's pause that is tried here: nothing has to happen meanwhile.
            time.sleep(3 * slo_ms / 1000)
        peer.ok(stream)

    with serving(answer) as server:
        account = ask(server, rate=10, slo_ms=slo_ms)
    taken_ms = (account.done_ns - account.sent_ns) / 1e6
    assert account.num_ok == account.num_offered == 5
    assert taken_ms[3] >= 3 * slo_ms
    assert account.num_late == (taken_ms > slo_ms).sum() >= 1
    assert account.num_late_of_due >= account.num_late
    assert account.goodput_rps == (account.num_ok - account.num_late) / 0.5
    assert account.latency_ms(100) == taken_ms.max()


def test_requests_that_the_client_s_own_kernel_keeps_are_told_apart() -> None:
    slo_ms = 100

    def answer(peer: Peer, stream: int, number: int) -> None:
        if not number:
            # Nothing is read meanwhile, so that a small window fills: longer than anybody asks, and an SLO more.
            time.sleep(0.5 + 3 * slo_ms / 1000)
        peer.ok(stream)

    with serving(answer) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        account = ask(server, rate=100, slo_ms=slo_ms, shape=(1, 250))
    assert account.kept is not None
    assert not account.kept.all()
    assert account.kept[-1]
    late = account.done_ns - account.sent_ns > slo_ms * 1_000_000
    assert account.num_late_kept == (late & account.kept).sum() > 1
    assert account.part(0, 0.2).num_late_kept < account.num_late_kept


def test_a_refusal_s_time_runs_from_the_sending_until_its_bytes_are_there() -> None:
    def answer(peer: Peer, stream: int, number: int) -> None:
        time.sleep(0.04)
        refused(peer, stream, "COLD")

    with serving(answer) as server:
        account = ask(server, concurrency=1, seconds=0.03)
        assert account.num_offered == 1
        assert account.refusal_ms(50) >= 40
        assert account.refusal_ms(50) == account.refusal_ms(99)
        assert account.latency_ms(50) == 0


def test_who_waits_for_a_server_that_says_nothing_hears_of_silence() -> None:
    with serving(lambda *_: None) as server:
        account = ask(server, rate=100, slo_ms=10, seconds=0.2, patience_s=0.1)
    assert account.others == {"no answer": account.num_offered}


def test_a_connection_that_dies_costs_what_was_on_it_and_the_next_one_serves() -> None:
    def answer(peer: Peer, stream: int, number: int) -> None:
        if number == 5:
            peer.close()
        elif number < 3 or number > 5:
            peer.ok(stream)

    with serving(answer) as server:
        account = ask(server, rate=100)
    assert account.others["connection lost"] >= 3
    assert account.num_ok == account.num_offered - account.others["connection lost"] > 3
    assert account.ends[-1][0] == "ok"


def test_nobody_who_listens_is_told_apart_from_a_connection_that_dies() -> None:
    def answer(peer: Peer, stream: int, number: int) -> None:
        if number == 2:
            server.close()
        else:
            peer.ok(stream)

    with serving(answer) as server:
        account = ask(server, rate=100, seconds=0.3)
    assert account.ends[:2] == [("ok", "")] * 2
    assert account.ends[-1] == ("other", "no connection")


def test_after_goaway_answers_still_come_and_new_requests_take_a_new_connection() -> None:
    def answer(peer: Peer, stream: int, number: int) -> None:
        if number == 4:
            peer.send(frame(GOAWAY, 0, 0, struct.pack(">II", stream, 0)))
            peer.ok(stream)
        elif number > 4 and peer is server.peers[0]:
            return  # It crossed the GOAWAY on the way, and was given up.
        else:
            peer.ok(stream)

    with serving(answer) as server:
        account = ask(server, rate=50)
    assert len(server.peers) == 2
    assert account.ends[4] == ("ok", "")
    assert account.ends[-1] == ("ok", "")
    assert account.num_ok + account.others["GOAWAY 0"] == account.num_offered


def test_no_request_leaves_before_the_server_has_said_what_it_takes() -> None:
    early = -1

    def pong(peer: Peer) -> None:
        nonlocal early
        early = len(server.messages)
        peer.send(NO_LIMITS)

    greeting = frame(PING, 0, 0, bytes(8))
    with serving(greeting=greeting, pong=pong) as server:
        account = ask(server, concurrency=30, seconds=0)
    assert early == 0
    assert account.num_ok == 30


def test_a_server_that_never_says_what_it_takes_is_asked_all_the_same() -> None:
    with serving(greeting=b"") as server:
        account = ask(server, concurrency=3, seconds=0)
    assert account.num_ok == 3


@pytest.mark.parametrize(("room", "width", "streams"), [(3, 4, 3), (4, 4_000, 1_000)])
def test_requests_wait_for_the_server_s_windows_and_its_limit_of_streams(
    room: int, width: int, streams: int
) -> None:
    found: list[int] = []
    open_streams: list[int] = []

    def answer(peer: Peer, stream: int, number: int) -> None:
        open_streams.append(stream)
        if len(open_streams) == room:
            peer.send(frame(PING, 0, 0, bytes(8)))

    def pong(peer: Peer) -> None:
        # Whatever the client sent while it was free to send more has come before the PING came back.
        found.append(len(open_streams))
        taken = sum(map(len, server.messages[-len(open_streams) :]))
        peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", taken)))
        for stream in open_streams:
            peer.ok(stream)
        open_streams.clear()

    greeting = frame(SETTINGS, 0, 0, struct.pack(">HI", 3, streams))
    with serving(answer, greeting=greeting, pong=pong) as server:
        account = ask(server, concurrency=24, seconds=0, shape=(1, width))
    assert found == [room] * (24 // room)
    assert account.num_ok == account.num_offered == 24
    # They count as sent when the client would have sent them.
    assert len(np.unique(account.sent_ns)) == 1 < len(np.unique(account.done_ns))


def test_the_same_seed_asks_at_the_same_times() -> None:
    with serving() as server:
        first, second, other = (
            ask(server, rate=100, seconds=0.2, models=("a", "b"), seed=seed) for seed in (1, 1, 2)
        )
        asked = [oip.ModelInferRequest.FromString(data[5:]).model_name for data in server.messages]
    count = first.num_offered
    assert (first.due_ns == second.due_ns).all()
    assert asked[:count] == asked[count : 2 * count]
    assert set(asked) == {"a", "b"}
    assert len(first.due_ns) != len(other.due_ns) or (first.due_ns != other.due_ns).any()


def test_a_part_of_a_run_is_what_was_due_in_it() -> None:
    with serving() as server:
        account = ask(server, rate=200, seconds=0.4)
    early, late = account.part(0.0, 0.1), account.part(0.1, 0.4)
    assert early.num_offered + late.num_offered == account.num_offered
    assert early.due_ns.max() < 1e8 <= late.due_ns.min()
    assert late.goodput_rps == pytest.approx((late.num_ok - late.num_late) / 0.3)


@pytest.mark.parametrize("model", ["m", "x" * 200])
def test_what_is_sent_is_a_request_of_the_open_inference_protocol(model: str) -> None:
    load = load_of("", models=(model,), slo_ms=250, shape=(1, 3, 200), input="x")
    request = oip.ModelInferRequest.FromString(request_bytes(model, load))
    assert request.model_name == model
    assert request.parameters["slo_ms"].int64_param == 250
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("x", "FP32", [1, 3, 200])
    assert request.raw_input_contents == [bytes(2400)]


def test_headers_are_those_that_grpc_asks_for() -> None:
    with serving() as server:
        ask(server, concurrency=1, seconds=0.001)
        assert server.peers[0].headers == [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/inference.GRPCInferenceService/ModelInfer"),
            (":authority", server.address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]


@pytest.mark.parametrize("huffman", [False, True])
def test_a_reason_is_read_in_base64_and_in_plain_bytes(huffman: bool) -> None:
    status = ("grpc-status", "8")
    plain = ("grpc-status-details-bin", b"\0" + refusal("COLD"))
    assert judge(block(status, plain, huffman=huffman)) == ("refused", "COLD")
    assert judge(block(status, huffman=huffman)) == ("other", "RESOURCE_EXHAUSTED")
    for padded in (False, True):
        text = base64.b64encode(refusal("DRAINING")).decode()
        coded = ("grpc-status-details-bin", text if padded else text.rstrip("="))
        assert judge(block(status, coded, huffman=huffman)) == ("refused", "DRAINING")


@pytest.mark.parametrize(("rate", "concurrency"), [(100, 0), (0, 4)])
def test_ends_of_a_server_of_grpcio_are_counted_in_a_process_of_its_own(
    rate: int, concurrency: int
) -> None:
    calls = iter(range(1_000_000))

    def infer(request: bytes, context: grpc.ServicerContext) -> bytes:
        number = next(calls)
        if number % 3 == 1:
            context.set_trailing_metadata((("grpc-status-details-bin", refusal("COLD")),))
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        if number % 3 == 2:
            context.set_code(grpc.StatusCode.CANCELLED)
        return b""

    handler = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    )
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        load = load_of(f"127.0.0.1:{port}", slo_ms=20_000, rate=rate, concurrency=concurrency)
        account = offer(replace(load, connections=2))
        server.stop(None).wait()
    count = account.num_offered
    assert count > concurrency
    assert account.num_ok == len(range(0, count, 3))
    assert account.refusals == {"COLD": len(range(1, count, 3))}
    assert account.others == {"CANCELLED": len(range(2, count, 3))}
    assert account.kernel_stamps
    assert (account.done_ns > account.sent_ns).all()
    assert (account.sent_ns >= account.due_ns).all()


def test_a_client_that_cannot_begin_says_so() -> None:
    load = load_of("127.0.0.1:1", rate=10)
    with pytest.raises(RuntimeError, match="ended with 1 before"), OpenLoop(load):
        pass


@pytest.mark.parametrize(("rate", "concurrency"), [(0, 0), (1, 1)])
def test_a_load_that_is_neither_open_nor_closed_is_refused(rate: float, concurrency: int) -> None:
    load = load_of("127.0.0.1:1", rate=rate, concurrency=concurrency)
    with pytest.raises(ValueError, match="expected"):
        run(load)


def test_a_request_that_is_larger_than_a_frame_is_refused() -> None:
    load = load_of("127.0.0.1:1", rate=1, shape=(1, 3, 224, 224))
    with pytest.raises(ValueError, match=r"a request of 602\d+ bytes, expected one frame"):
        run(load)
