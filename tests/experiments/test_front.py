"""What is made of the flood's accounts, and a short run of it against this server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.bench import front
from experiments.bench.front import FrontCase, Setting, figures_of


def case(
    *,
    who: str = "all",
    connections: int = 8,
    multiple: float = 2.0,
    repeat: int = 0,
    ok: int = 900,
    offered: int = 2000,
    refused: int = 1100,
    refusal_ms: float = 1.0,
    late: int = 0,
    client_late: int = 0,
    late_kept: int = 0,
    capacity_rps: float = 1000.0,
) -> FrontCase:
    return FrontCase(
        server="ours", who=who, connections=connections, slo_ms=50, multiple=multiple, repeat=repeat,
        capacity_rps=capacity_rps, seconds=1.0, offered=offered, ok=ok, late=late, client_late=client_late,
        late_kept=late_kept, refused=refused, given_up=0, unanswered=0, ok_ms_p50=5.0, ok_ms_p99=20.0,
        refusal_ms_p50=refusal_ms, refusal_ms_p99=10.0, client_late_ms=0.1, client_cpu_s=0.1,
    )  # fmt: skip


def test_of_repeats_the_median_counts_and_of_numbers_of_connections_the_worst() -> None:
    cases = [case(repeat=number, ok=ok) for number, ok in enumerate((100, 900, 950))]
    cases += [case(repeat=number, ok=ok, connections=64) for number, ok in enumerate((700, 990, 0))]
    figures = figures_of(cases)
    assert figures["ours_c8_slo50_share_x2"] == pytest.approx(0.9)
    assert figures["ours_c64_slo50_share_x2"] == pytest.approx(0.7)
    assert figures["slo50_share_x2"] == pytest.approx(0.7)
    assert figures["refusal_ms_p50"] == 1.0
    assert figures["refusal_slo_share_p99"] == pytest.approx(0.2)
    assert figures["below_capacity_loss"] == 0.0
    assert figures["late_success"] == 0


def test_a_search_that_ends_too_low_changes_no_median() -> None:
    figures = figures_of(
        [
            case(repeat=repeat, ok=round(0.9 * rps), capacity_rps=rps)
            for repeat, rps in enumerate((300.0, 1000.0, 1040.0))
        ]
    )
    assert figures["ours_c8_capacity_rps"] == 1000.0
    assert figures["ours_c8_capacity_spread"] == pytest.approx(1040 / 300)
    assert figures["slo50_share_x2"] == pytest.approx(0.9)


def test_below_the_capacity_every_request_without_an_answer_is_a_loss() -> None:
    figures = figures_of([case(multiple=0.9, offered=900, ok=891, refused=9, late=1)])
    assert figures["below_capacity_loss"] == pytest.approx(0.01)
    assert figures["late_success"] == 1
    assert figures["refusal_ms_p50"] == 0.0


def test_those_who_behave_are_compared_with_themselves_alone() -> None:
    figures = figures_of(
        [
            case(who="alone", offered=500, ok=500, refused=0),
            case(who="behaving", offered=500, ok=450, refused=50),
            case(who="flooding", connections=1, ok=10),
        ]
    )
    assert figures["slo50_behaving_share"] == pytest.approx(0.9)


def test_an_answer_that_the_client_itself_delayed_is_no_late_success() -> None:
    figures = figures_of([case(ok=900, late=0, client_late=7, refused=1093)])
    assert figures["late_success"] == 0
    assert figures["client_late"] == 7


def test_late_answers_to_what_the_clients_kernel_kept_are_told_and_count() -> None:
    figures = figures_of([case(ok=900, late=7, late_kept=5, refused=1093)])
    assert figures["late_success"] == 7
    assert figures["late_kept"] == 5


def test_server_and_client_have_a_core_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cores, found = {2, 5}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))

    def keep_to(_: int, wanted: set[int]) -> None:
        cores.clear()
        cores.update(wanted)

    monkeypatch.setattr(os, "sched_setaffinity", keep_to)

    class Started(Exception):
        pass

    @contextmanager
    def serve(_: str) -> Iterator[tuple[str, int]]:
        found.append(set(cores))
        yield "127.0.0.1:1", 1

    def ask(command: list[str], **_: object) -> None:
        found.append(set(cores))
        raise Started

    monkeypatch.setattr(front, "bare_server", serve)
    monkeypatch.setattr(front, "build", lambda folder: folder / "flood")
    monkeypatch.setattr(subprocess, "run", ask)
    with pytest.raises(Started):
        list(front.measure(Setting(servers=("grpcio",))))
    assert found == [{2}, {5}]
    assert cores == {2, 5}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_every_request_of_a_short_run_is_accounted_for(tmp_path: Path) -> None:
    setting = Setting(
        servers=("ours",), connections=(2,), slos_ms=(100,), multiples=(0.5, 2.0), seconds=0.3, repeats=1,
        behaving=3,
    )  # fmt: skip
    cases = front.STUDY.produce(setting, tmp_path)
    assert [each.who for each in cases] == ["all", "all", "alone", "behaving", "flooding"]
    for each in cases:
        ends = (
            each.ok + each.late + each.client_late + each.refused + each.given_up + each.unanswered
        )
        assert ends == each.offered > 0
