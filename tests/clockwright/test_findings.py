"""What is wrong with a server is told from its statistics alone, causes first."""

from __future__ import annotations

import pytest

from clockwright.findings import diagnose, overload, slow_workers, too_few_pages
from clockwright.units import NS_PER_S
from clockwright.v1 import control_pb2 as pb

ASKED = pb.RecentRequests(over_ns=5 * NS_PER_S, requests=1000, answered=900)


def status_of(**kind: float) -> pb.StatusResponse:
    info = pb.KindInfo(gpu_kind="V100", num_workers=2, **kind)  # type: ignore[arg-type]
    return pb.StatusResponse(ready=True, recent=ASKED, kinds=[info])


def worker(name: str, kind: str = "V100", **recent: float) -> pb.WorkerInfo:
    actions = pb.RecentActions(**{"infers": 50, **recent})  # type: ignore[arg-type]
    return pb.WorkerInfo(
        worker_id=name, gpu_kind=kind, state="READY", num_pages=8, num_free_pages=0, recent=actions
    )


WELL = (worker("a", exec_over_others=1.0), worker("b", exec_over_others=1.0))


def test_a_server_that_is_well_has_no_findings() -> None:
    assert diagnose(status_of(exec_busy=0.9, evictions_per_s=20), WELL) == []


@pytest.mark.parametrize(
    ("shortage", "name", "figure"),
    [
        ("dropped_for_exec_rps", "overload", "EXEC"),
        ("dropped_for_loads_rps", "overload", "loading"),
        ("dropped_for_pages_rps", "too few pages", "pages free"),
        ("dropped_for_links_rps", "thin links", "links"),
    ],
)
def test_what_is_short_is_named_with_its_figures(shortage: str, name: str, figure: str) -> None:
    (finding,) = diagnose(status_of(**{shortage: 20.0}), WELL)
    assert finding.name == name
    assert "20.0 r/s" in finding.words
    assert figure in finding.words
    # One of 200 requests per second does not matter.
    assert diagnose(status_of(**{shortage: 1.0}), WELL) == []


def test_refusals_that_nothing_else_explains_are_told_but_not_those_that_their_callers_brought_about() -> (
    None
):
    def status_with(**refusals: int) -> pb.StatusResponse:
        rows = [pb.RefusalCount(reason=reason, count=count) for reason, count in refusals.items()]
        recent = pb.RecentRequests(over_ns=5 * NS_PER_S, requests=1000, refusals=rows)
        return pb.StatusResponse(ready=True, recent=recent)

    (finding,) = diagnose(status_with(LATE=20, OVERLOADED=5, QUOTA=100), WELL)
    assert finding.name == "refusals"
    assert "25 of the 1000 requests of the last 5.0 s" in finding.words
    assert "20 LATE, 5 OVERLOADED" in finding.words
    assert diagnose(status_with(QUOTA=500, INFEASIBLE=400, LATE=10), WELL) == []
    short = status_with(LATE=200)
    short.kinds.add(gpu_kind="V100", num_workers=2, dropped_for_exec_rps=40.0)
    assert [found.name for found in diagnose(short, WELL)] == ["overload"]


def test_an_overload_says_what_one_more_worker_would_answer() -> None:
    (finding,) = overload(status_of(dropped_for_exec_rps=50.0, exec_busy=0.98, one_more_rps=40.0))
    assert "98% busy" in finding.words
    assert "one more would answer 40.0 r/s" in finding.words


def test_pages_are_counted_over_the_workers_of_the_kind_alone() -> None:
    status = status_of(dropped_for_pages_rps=50.0)
    (finding,) = too_few_pages(status, [*WELL, worker("c", "A100")])
    assert "0 of 16 pages free" in finding.words


def test_a_worker_that_is_slower_than_others_is_named_and_the_others_are_not() -> None:
    slow = worker("tortoise", exec_over_others=1.9, exec_over_predicted=1.0)
    (finding,) = slow_workers([worker("a", exec_over_others=0.5), slow])
    assert finding.name == "slow worker"
    assert finding.words.startswith("tortoise: ")
    assert "1.9 times" in finding.words
    assert "clockwright drain tortoise" in finding.words


def test_one_alone_is_compared_with_what_was_predicted() -> None:
    (finding,) = slow_workers([worker("a", exec_over_predicted=2.0)])
    assert "2.0 times as long as was predicted" in finding.words
    assert slow_workers([worker("a", exec_over_predicted=1.2)]) == []


def test_a_few_runs_say_nothing() -> None:
    assert slow_workers([worker("a", exec_over_others=9.0, infers=2)]) == []


def test_whom_the_scheduler_avoids_is_named_with_its_reason() -> None:
    avoided = worker("w")
    avoided.suspended.append("m: worker w takes 3 times as long as predicted")
    sick = worker("v")
    sick.suspended.append("m: the engine failed")
    hot = worker("u")
    hot.complaints.append("its clock is throttled by heat")
    names = [(row.name, row.words.partition(";")[0]) for row in slow_workers([avoided, sick, hot])]
    assert names == [
        ("slow worker", "w: avoided: worker w takes 3 times as long as predicted"),
        ("sick worker", "v: avoided for m: the engine failed"),
        ("slow worker", "u: its GPU is unwell: its clock is throttled by heat"),
    ]


def test_causes_come_before_what_follows_from_them() -> None:
    slow = (*WELL, worker("tortoise", exec_over_others=3.0))
    status = status_of(dropped_for_exec_rps=50.0, dropped_for_pages_rps=20.0)
    assert [row.name for row in diagnose(status, slow)] == [
        "slow worker",
        "too few pages",
        "overload",
    ]


def test_nobody_who_serves_is_the_first_thing_to_say() -> None:
    assert [row.name for row in diagnose(pb.StatusResponse(), [])] == ["no worker"]
    assert [row.name for row in diagnose(pb.StatusResponse(draining=True), [])] == ["draining"]
    short = pb.StatusResponse(memory_state="ALL_REFUSED", memory_limit_bytes=1 << 30)
    assert [row.name for row in diagnose(short, WELL)] == ["short of memory"]


def test_models_that_cannot_be_served_are_counted() -> None:
    models = [
        pb.ModelInfo(model_id="a", state="READY"),
        pb.ModelInfo(model_id="b", state="UNAVAILABLE", reason="no weights"),
        pb.ModelInfo(model_id="c", state="UNAVAILABLE"),
    ]
    (finding,) = diagnose(status_of(), WELL, models)
    assert finding.words == "b and 1 more: no weights"
