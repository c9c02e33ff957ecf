"""What is wrong with a server is told from its statistics alone, causes first."""

from __future__ import annotations

import pytest

from clockwright.findings import PagesAsked, diagnose, overload, slow_workers, too_few_pages, well
from clockwright.units import NS_PER_S
from clockwright.v1 import control_pb2 as pb


def status_of(refused: int = 0, **kind: float) -> pb.StatusResponse:
    """A server of whose last 1000 requests, in 5 s, some were refused."""
    info = pb.KindInfo(gpu_kind="V100", num_workers=2, **kind)  # type: ignore[arg-type]
    rows = [pb.RefusalCount(reason="OVERLOADED", count=refused)]
    recent = pb.RecentRequests(
        over_ns=5 * NS_PER_S, requests=1000, answered=1000 - refused, refusals=rows
    )
    return pb.StatusResponse(ready=True, recent=recent, kinds=[info])


def worker(name: str, kind: str = "V100", **recent: float) -> pb.WorkerInfo:
    actions = pb.RecentActions(**{"infers": 50, **recent})  # type: ignore[arg-type]
    return pb.WorkerInfo(
        worker_id=name, gpu_kind=kind, state="READY", num_pages=8, num_free_pages=0, recent=actions
    )


WELL = (worker("a", exec_over_others=1.0), worker("b", exec_over_others=1.0))


def test_a_server_that_is_well_has_no_findings() -> None:
    assert diagnose(status_of(exec_busy=0.9, evictions_per_s=20), WELL) == []


def test_models_that_push_each_other_out_are_a_warning_before_anything_is_refused() -> None:
    busy = (
        worker("a", exec_over_others=1.0, load_busy=0.7),
        worker("b", exec_over_others=1.0, load_busy=0.6),
    )
    (finding,) = diagnose(status_of(evictions_per_s=29, load_busy=0.65), busy)
    assert (finding.name, finding.harmful, finding.past) == ("too few pages", False, False)
    assert finding.words.startswith(
        "nothing is refused for it yet, but loading takes 65% of the time of 2 workers of V100: models on V100 evict each other"
    )
    # The first loads of all models are none, nor is a long tail of cold models that leaves the lanes time.
    assert diagnose(status_of(load_busy=0.65), busy) == []
    assert diagnose(status_of(evictions_per_s=29), WELL) == []


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
    # A kind's rates look back further than those that a page shows: theirs is what counts.
    (finding,) = diagnose(status_of(100, **{shortage: 33.0}), WELL)
    assert finding.name == name
    assert finding.harmful
    assert "20.0 of 200.0 r/s refused in the last 5 s" in finding.words
    assert figure in finding.words
    # One of 200 requests per second does not matter.
    assert diagnose(status_of(5, **{shortage: 1.0}), WELL) == []
    # What ended some seconds ago is told as past, behind what is so now, and without advice.
    over = status_of(0, over_ns=10 * NS_PER_S, **{shortage: 33.0})
    (past,) = diagnose(over, WELL)
    assert (past.name, past.harmful, past.past) == (name, False, True)
    assert past.words.startswith("33.0 r/s were refused for lack of ")
    assert past.words.endswith(" on V100 in the last 10 s, none in the last 5 s")
    assert [row.past for row in diagnose(over, (*WELL, TORTOISE))] == [False, True]


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
    assert finding.harmful
    others = status_with(QUOTA=500, INFEASIBLE=400, LATE=10)
    assert diagnose(others, WELL) == []
    # It is well, but nobody is told that all are answered.
    assert well(others) == (
        "nothing is short; 90% of the requests in the last 5 s were refused for other reasons: 400 INFEASIBLE, 500 QUOTA"
    )
    assert well(status_with(QUOTA=1)) == "nothing is short, requests are answered in time"
    short = status_with(OVERLOADED=200)
    short.kinds.add(gpu_kind="V100", num_workers=2, dropped_for_exec_rps=40.0)
    assert [found.name for found in diagnose(short, WELL)] == ["overload"]


def test_an_overload_says_how_busy_its_workers_were_and_how_many_are_wanted() -> None:
    busy = (worker("a", exec_busy=0.8), worker("b", exec_busy=0.9), worker("c", "A100"))
    status = status_of(250, dropped_for_exec_rps=70.0, exec_busy=0.98, wanted=5)
    (finding,) = overload(status, busy)
    assert "85% busy" in finding.words
    assert finding.words.endswith("add workers: 5 are wanted")
    # As many as there are: pages or links may be what is short.
    status.kinds[0].wanted = status.kinds[0].num_workers
    (finding,) = overload(status, busy)
    assert finding.words.endswith("add workers")


def test_workers_that_wait_while_requests_are_refused_are_not_asked_for_too_much() -> None:
    status = status_of(250, dropped_for_exec_rps=70.0, exec_busy=0.4)
    (finding,) = overload(status, [worker("a", exec_busy=0.4, too_late=3), worker("b", too_late=2)])
    assert finding.name == "late workers"
    assert (
        "50.0 of 200.0 r/s refused in the last 5 s, though 2 workers of V100 only 20% busy"
        in finding.words
    )
    assert "5 actions arrived too late" in finding.words
    # A full lane is too late for some of its actions, and that is the overload.
    (finding,) = overload(status, [worker("a", exec_busy=0.9, too_late=30)])
    assert finding.name == "overload"


def test_pages_are_counted_over_the_workers_of_the_kind_alone() -> None:
    status = status_of(250, dropped_for_pages_rps=50.0)
    (finding,) = too_few_pages(status, [*WELL, worker("c", "A100")])
    assert "0 of 16 pages free" in finding.words


def test_too_few_pages_says_how_many_would_do() -> None:
    status = status_of(250, dropped_for_pages_rps=50.0)
    (finding,) = too_few_pages(status, WELL, PagesAsked(num_pages=41, num_least=6))
    assert "the models asked for need 41 pages" in finding.words
    # On two workers.
    assert "at least --pages 21" in finding.words
    assert "smallest model that was refused, which needs 6" in finding.words
    (enough,) = too_few_pages(status, WELL, PagesAsked(num_pages=16, num_least=0))
    assert "give workers more --pages" in enough.words


TORTOISE = worker("tortoise", exec_over_others=1.9, exec_over_predicted=1.0, exec_busy=0.38)


def test_a_worker_that_is_slower_than_others_is_named_and_the_others_are_not() -> None:
    others = [worker("a", exec_over_others=0.5, exec_busy=0.4)]
    (finding,) = slow_workers([*others, TORTOISE], status_of())
    assert finding.name == "slow worker"
    # Nothing is refused.
    assert not finding.harmful
    assert finding.words.startswith("tortoise: ")
    assert "1.9 times" in finding.words
    # The other takes 0.2 of its time more for it, and is 0.4 busy; each runs half of 200 r/s.
    assert "safe (clockwright drain tortoise)" in finding.words
    assert "room for its 100.0 r/s" in finding.words


@pytest.mark.parametrize(
    ("others", "refused", "because"),
    [
        ([worker("a", exec_busy=0.7)], 0, "50.0 of its 100.0 r/s would be too much"),
        ([worker("a", exec_busy=0.1)], 4, "requests were refused in the last 5 s"),
        ([], 0, "no other of V100"),
        ([worker("a", "A100")], 0, "no other of V100"),
    ],
)
def test_nobody_is_told_to_drain_a_worker_whose_work_others_cannot_do(
    others: list[pb.WorkerInfo], refused: int, because: str
) -> None:
    (finding,) = slow_workers([*others, TORTOISE], status_of(refused))
    assert "do not drain it" in finding.words
    assert because in finding.words
    assert "clockwright drain" not in finding.words


def test_what_is_late_is_no_overload() -> None:
    status = status_of(5, dropped_for_exec_rps=1.0)
    status.recent.refusals.add(reason="LATE", count=200)
    assert [row.name for row in diagnose(status, WELL)] == ["refusals"]


def test_a_worker_is_not_drained_while_refusals_are_remembered_that_a_page_no_more_counts() -> None:
    status = status_of(dropped_for_exec_rps=0.4, over_ns=10 * NS_PER_S)
    others = [worker("a", exec_busy=0.1)]
    (finding,) = slow_workers([*others, TORTOISE], status)
    assert "do not drain it" in finding.words
    assert "requests were refused in the last 10 s" in finding.words


def test_a_slow_worker_does_harm_while_requests_are_refused() -> None:
    found = diagnose(status_of(50), (*WELL, TORTOISE))
    assert [(row.name, row.harmful) for row in found] == [("slow worker", True)]


def test_one_alone_is_compared_with_what_was_predicted() -> None:
    (finding,) = slow_workers([worker("a", exec_over_predicted=2.0)], status_of())
    assert "2.0 times as long as was predicted" in finding.words
    assert slow_workers([worker("a", exec_over_predicted=1.2)], status_of()) == []


def test_a_few_runs_say_nothing() -> None:
    assert slow_workers([worker("a", exec_over_others=9.0, infers=2)], status_of()) == []


def test_whom_the_scheduler_avoids_is_named_with_its_reason() -> None:
    avoided = worker("w")
    avoided.suspended.append("m: worker w takes 3 times as long as predicted")
    sick = worker("v")
    sick.suspended.append("m: the engine failed")
    hot = worker("u")
    hot.complaints.append("its clock is throttled by heat")
    found = slow_workers([avoided, sick, hot], status_of())
    names = [(row.name, row.words.partition(";")[0]) for row in found]
    assert names == [
        ("slow worker", "w: avoided: worker w takes 3 times as long as predicted"),
        ("sick worker", "v: avoided for m: the engine failed"),
        ("slow worker", "u: its GPU is unwell: its clock is throttled by heat"),
    ]


def test_causes_come_before_what_follows_from_them() -> None:
    slow = (*WELL, worker("tortoise", exec_over_others=3.0))
    status = status_of(350, dropped_for_exec_rps=50.0, dropped_for_pages_rps=20.0)
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
