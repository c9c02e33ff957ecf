from __future__ import annotations

import asyncio
import csv
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import traces.replay
from clockwright.errors import ConfigError, UnknownModelError
from clockwright.units import NS_PER_MS, NS_PER_S
from tests.kit.front_end import FrontEndInThread, serving_in_thread
from traces.arrivals import ClosedLoop, FixedRate, Poisson, Workload
from traces.replay import REQUEST_COLUMNS, AskingStyle, ReplayProgress, play, play_async

SLO_NS = 60 * NS_PER_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEndInThread]:
    with serving_in_thread(tmp_path_factory.mktemp("models")) as front_end:
        yield front_end


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose time goes on by 5 ms whenever it looks: no pause of the machine skips any."""
    ticks = count(NS_PER_S, 5 * NS_PER_MS)
    monkeypatch.setattr(traces.replay, "time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


OPEN = Workload(
    models=("double", "mixed"),
    sources=(
        Poisson(models=(0, 1), rate_rps=100, slo_ns=SLO_NS, end_ns=NS_PER_S // 2, seed=1),
        FixedRate(models=(1,), rate_rps=20, slo_ns=2 * SLO_NS, end_ns=NS_PER_S // 2),
    ),
)


def test_every_open_loop_request_is_sent_when_due_and_has_its_row(
    server: FrontEndInThread, tmp_path: Path
) -> None:
    path = tmp_path / "requests.csv"
    record = play(server.address, OPEN, requests_csv=path)
    expected = list(OPEN)
    assert record.is_open.all()
    assert record.num_by_outcome == {"OK": len(expected)}
    assert record.in_time.all()
    rows = rows_of(path)
    assert list(rows[0]) == list(REQUEST_COLUMNS)
    rows.sort(key=lambda row: int(row["request_id"]))
    assert [int(row["request_id"]) for row in rows] == list(range(len(expected)))
    assert [(int(row["due_ns"]), row["model_id"], int(row["slo_ns"])) for row in rows] == [
        (request.time_ns, OPEN.models[request.model], request.slo_ns) for request in expected
    ]
    for row in rows:
        assert int(row["due_ns"]) <= int(row["sent_ns"]) < int(row["departure_ns"])
        assert row["loop"] == "open"
    for name, times_ns in (
        ("due_ns", record.due_ns),
        ("sent_ns", record.sent_ns),
        ("departure_ns", record.departure_ns),
    ):
        assert [int(row[name]) for row in rows] == times_ns.tolist()


def test_requests_take_turns_on_as_many_connections_as_are_asked_for(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server:
        seen: list[int] = []

        def count_connections(_: ReplayProgress) -> None:
            seen.append(server.do(lambda front_end: len(front_end.server._peers)))  # type: ignore[union-attr]

        record = play(
            server.address, OPEN, style=AskingStyle(connections=3), on_progress=count_connections
        )
        assert record.num_by_outcome == {"OK": len(record)}
        assert seen[-1] == 3


def test_the_controller_hears_whose_each_request_is(
    server: FrontEndInThread, tmp_path: Path
) -> None:
    path = tmp_path / "requests.csv"
    end_ns = NS_PER_S // 2
    owned = Workload(
        models=("double",),
        tenants=("", "ann", "bob"),
        sources=(
            FixedRate(models=(0,), tenants=(1,), rate_rps=40, slo_ns=SLO_NS, end_ns=end_ns),
            FixedRate(models=(0,), rate_rps=20, slo_ns=SLO_NS, end_ns=end_ns),
        ),
        closed_loops=(
            ClosedLoop(model=0, tenant=2, concurrency=1, slo_ns=SLO_NS, end_ns=NS_PER_MS),
        ),
    )
    before = server.do(lambda front_end: len(front_end.runtime.telemetry.requests))
    record = play(server.address, owned, requests_csv=path)
    assert record.num_by_outcome == {"OK": len(record)}
    heard = server.do(lambda front_end: list(front_end.runtime.telemetry.requests)[before:])
    expected = Counter(owned.tenants[request.tenant] for request in owned)
    assert len(expected) == 2
    expected["bob"] = int((~record.is_open).sum())
    assert Counter(row.tenant for row in heard) == expected
    assert Counter(row["tenant"] for row in rows_of(path)) == expected


def test_refusals_are_counted_by_their_reason(server: FrontEndInThread) -> None:
    hopeless = Workload(
        models=("double",),
        sources=(FixedRate(models=(0,), rate_rps=100, slo_ns=1000, end_ns=NS_PER_S // 10),),
    )
    record = play(server.address, hopeless)
    assert record.num_by_outcome == {"INFEASIBLE": 9}
    assert not record.answered.any()


@pytest.mark.usefixtures("ticking")
def test_closed_loop_clients_have_one_request_out_each(
    server: FrontEndInThread, tmp_path: Path
) -> None:
    path = tmp_path / "requests.csv"
    begin_ns, end_ns = 20 * NS_PER_MS, 300 * NS_PER_MS
    workload = Workload(
        models=("double",),
        closed_loops=(
            ClosedLoop(model=0, concurrency=3, slo_ns=SLO_NS, begin_ns=begin_ns, end_ns=end_ns),
        ),
    )
    server.do(lambda front_end: setattr(front_end.worker, "hold", True))
    with ThreadPoolExecutor(1) as client:
        replaying = client.submit(play, server.address, workload, requests_csv=path)
        try:
            server.until(lambda front_end: front_end.runtime.num_waiting == 3)
        finally:
            server.do(lambda front_end: front_end.worker.release())
        record = replaying.result()
    rows = rows_of(path)
    assert not record.is_open.any()
    assert len(record) == len(rows) > 6
    assert all(begin_ns <= int(row["sent_ns"]) < end_ns for row in rows)
    edges = [(int(row["sent_ns"]), 1) for row in rows]
    edges += [(int(row["departure_ns"]), -1) for row in rows]
    out, most = 0, 0
    for _, change in sorted(edges):
        out += change
        most = max(most, out)
    assert most == 3
    assert out == 0


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("pause_ns", [None, 30 * NS_PER_MS])
def test_a_refused_closed_loop_client_waits(
    server: FrontEndInThread, tmp_path: Path, pause_ns: int | None
) -> None:
    path = tmp_path / "requests.csv"
    slo_ns = NS_PER_MS // 2  # an EXEC takes 1 ms
    loop = ClosedLoop(model=0, concurrency=1, slo_ns=slo_ns, end_ns=NS_PER_S // 10)
    record = play(
        server.address,
        Workload(models=("double",), closed_loops=(loop,)),
        style=AskingStyle(refusal_pause_ns=pause_ns),
        requests_csv=path,
    )
    assert record.num_by_outcome == {"INFEASIBLE": len(record)}
    rows = rows_of(path)
    assert len(rows) > 1
    for before, after in pairwise(rows):
        departure_ns, deadline_ns = int(before["departure_ns"]), int(before["due_ns"]) + slo_ns
        least_ns = deadline_ns if pause_ns is None else departure_ns + pause_ns
        assert int(after["sent_ns"]) >= int(after["due_ns"]) >= least_ns


async def test_a_client_that_is_late_says_so(
    server: FrontEndInThread,
) -> None:
    workload = Workload(
        models=("double",),
        sources=(FixedRate(models=(0,), rate_rps=200, slo_ns=SLO_NS, end_ns=NS_PER_S // 2),),
    )
    replaying = asyncio.create_task(play_async(server.address, workload))
    while not replaying.done():
        await asyncio.sleep(0.01)
        time.sleep(0.06)  # noqa: ASYNC251  the point of the test
    record = await replaying
    assert len(record) == 99
    # During each pause of 60 ms, several requests fall due 40 to 60 ms before their turn comes.
    assert record.lateness_ns_p99 > 40 * NS_PER_MS
    assert (record.latency_ns >= record.lateness_ns).all()
    assert record.left_late.sum() > 10
    assert not record.kept_up


def test_progress_is_told(server: FrontEndInThread) -> None:
    told: list[ReplayProgress] = []
    record = play(server.address, OPEN, on_progress=told.append)
    assert told
    last = told[-1]
    assert last.num_sent == last.num_done == last.num_in_time == len(record)


def test_nothing_to_send_is_not_an_error(server: FrontEndInThread) -> None:
    record = play(server.address, Workload(models=("double",)))
    assert len(record) == record.lateness_ns_p99 == 0
    assert record.kept_up


def test_a_model_that_the_server_lacks_is_named(server: FrontEndInThread) -> None:
    with pytest.raises(UnknownModelError, match="nobody"):
        play(server.address, Workload(models=("double", "nobody")))


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConfigError, match=address):
            play(address, OPEN)


def test_a_file_that_cannot_be_written_is_named(server: FrontEndInThread, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-folder"):
        play(server.address, OPEN, requests_csv=tmp_path / "no-folder" / "requests.csv")
