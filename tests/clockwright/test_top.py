"""`clockwright top` in a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from clockwright.cli.top import Look, screen
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import control_pb2 as pb


def look(at_s: float, requests: int, *, num_models: int = 30, num_workers: int = 20) -> Look:
    recent = pb.RecentRequests(
        over_ns=5 * NS_PER_S,
        requests=1000,
        answered=600,
        latency_ns_p50=20 * NS_PER_MS,
        latency_ns_p99=48 * NS_PER_MS,
        slo_share_p50=0.4,
        slo_share_p99=0.96,
        refusals=[pb.RefusalCount(reason="OVERLOADED", count=400)],
    )
    kind = pb.KindInfo(
        gpu_kind="V100",
        num_workers=20,
        dropped_for_exec_rps=80,
        exec_busy=1,
        wanted=24,
        limit="exec",
    )
    return Look(
        at_s=at_s,
        status=pb.StatusResponse(
            version="0.1.0", policy="edf_mh", ready=True, uptime_ns=7200 * NS_PER_S,
            num_models=num_models, num_models_ready=num_models, recent=recent, kinds=[kind],
        ),
        workers=[
            pb.WorkerInfo(
                worker_id=f"rack-{number}-with-a-rather-long-name-of-its-own", gpu_kind="V100",
                state="READY", num_pages=1376, num_free_pages=10, exec_backlog_ns=9 * NS_PER_MS,
                recent=pb.RecentActions(
                    infers=99, exec_busy=0.5 + number / 100, exec_over_others=1.0
                ),
            )
            for number in range(num_workers)
        ],
        models=[
            pb.ModelInfo(
                model_id=f"resnet50-{number}", state="READY", requests=number * requests,
                answered=number * requests // 2, waiting=3, resident_on=["rack-0"],
                exec=[pb.BatchEstimate(batch_size=1, exec_ns=2_770_000)],
                refusals=[pb.RefusalCount(reason="OVERLOADED", count=number * requests // 2)],
            )
            for number in range(num_models)
        ],
    )  # fmt: skip


def shown(before: Look, now: Look, lines: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False, color_system=None)
    console.print(screen(before, now, lines=lines, address="127.0.0.1:8001"))
    return out.getvalue().rstrip().splitlines()


def test_the_first_line_says_what_is_wrong() -> None:
    assert shown(look(0, 0), look(1, 10), 24)[0].startswith("OVERLOAD: 80.0 of 200.0 r/s refused")
    well = look(1, 10)
    well.status.kinds[0].dropped_for_exec_rps = 0
    assert shown(look(0, 0), well, 24)[0].startswith("REFUSALS: 400 of the 1000 requests")
    well.status.recent.ClearField("refusals")
    assert shown(look(0, 0), well, 24)[0].startswith("WELL")
    # A terminal without colours tells what does no harm yet by a word.
    well.workers[3].recent.exec_over_others = 2.5
    assert shown(look(0, 0), well, 24)[0].startswith("WARNING: SLOW WORKER: rack-3")


def test_what_is_over_is_said_as_past_below_what_is_so_now() -> None:
    quiet = look(1, 0)
    quiet.status.recent.Clear()
    quiet.status.recent.over_ns = 5 * NS_PER_S
    lines = shown(look(0, 0), quiet, 24)
    assert lines[0] == "IDLE: no request ended in the last 5 s; nothing is wrong"
    assert lines[1].startswith(
        "before overload: 80.0 r/s were refused for lack of EXEC time on V100"
    )
    quiet.status.recent.requests = quiet.status.recent.answered = 1000
    lines = shown(look(0, 0), quiet, 24)
    assert lines[0].startswith("WELL")
    assert lines[1].startswith("before overload")


def test_a_large_cluster_fits_a_small_terminal_busiest_first() -> None:
    lines = shown(look(0, 0), look(2, 10), 24)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    text = "\n".join(lines)
    # Rates are between the two looks: 29 times 10 requests in 2 s.
    assert "resnet50-29" in text
    assert "145.0" in text
    assert "rack-19" in text
    assert "more" in text
    assert "in time     120.0 r/s" in text
    assert "good   60.0%" in text
    assert "p99 48.0 ms (96%)" in text
    assert "80.0 OVERLOADED" in text
    assert "workers: 20 of V100, 24 wanted for exec" in text


def test_a_high_terminal_shows_more() -> None:
    lines = shown(look(0, 0), look(1, 10), 100)
    assert sum("resnet50-" in line for line in lines) == 30


def test_a_server_without_models_and_workers_is_drawn_too() -> None:
    empty = Look(at_s=0, status=pb.StatusResponse(), workers=[], models=[])
    assert shown(empty, empty, 24)[0].startswith("NO WORKER")
