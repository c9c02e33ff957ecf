"""Telemetry rows of a server that played several workloads go to the workload that they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.front.admission.entrance import Entrance, Waiting
from controller.telemetry.files import TelemetryFiles
from experiments.clockwork_paper.cases import case_of
from experiments.live import truth
from experiments.live.live_run import Played, Served, hosted, play
from experiments.study.beside import Beside, say
from tests.kit.front_end import FrontEndInThread, serving_in_thread
from tests.kit.pretended_play import ROW, pretend_play
from traces.arrivals import Recorded, Workload

NUM_ASKED = 6


def asking(model: str) -> Workload:
    source = Recorded(
        times_ns=np.arange(NUM_ASKED) * 10 * NS_PER_MS,
        models=np.zeros(NUM_ASKED, np.int64),
        slo_ns=900 * NS_PER_MS,
        end_ns=NS_PER_S,
    )
    return Workload(models=(model,), sources=(source,))


class EverySecond(Entrance):
    """Refuses every other request."""

    num_judged = 0

    @override
    def has_time(self, now_ns: int, arrival_ns: int, *, judged: bool = False) -> bool:
        return False

    @override
    def enter(
        self,
        source: object,
        request: Waiting,
        arrival_ns: int,
        slo_ns: int,
        *,
        judged: bool = False,
    ) -> bool:
        self.num_judged += 1
        if self.num_judged % 2:
            request.begin_waiting()
        return bool(self.num_judged % 2)


def test_requests_that_an_entrance_refused_do_not_move_the_rows_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    @contextmanager
    def running(_served: Served, *more: str) -> Iterator[tuple[FrontEndInThread, Path]]:
        with (
            serving_in_thread(tmp_path / "models", front="apart", entrance=EverySecond) as server,
            TelemetryFiles(Path(more[-1])) as files,
        ):
            keep = (files.requests.add, files.actions.add)
            server.do(lambda front_end: front_end.runtime.telemetry.write_to(*keep))
            yield server, tmp_path

    monkeypatch.setattr(Served, "running", running)
    models = ("double", "mixed", "right")
    case = case_of(hosted(ROW), seed=1, end_ns=NS_PER_S)
    runs = play([asking(model) for model in models], Served(case=case)).runs
    for model, run in zip(models, runs, strict=True):
        assert run.report.is_open.sum() == NUM_ASKED
        assert run.report.num_by_outcome["OVERLOADED"] == NUM_ASKED // 2
        assert [row.model_id for row in run.rows.requests] == [model] * (NUM_ASKED // 2)
        assert {row.model_id for row in run.rows.actions} == {model}
        assert run.num_without_row == NUM_ASKED // 2


def test_results_say_how_many_requests_left_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def throttled(workloads: Sequence[Workload], served: Served) -> Played:
        played = pretend_play(workloads, served)
        rehearsed, (first, *others) = played.runs[:2], played.runs[2:]
        first = replace(first, rows=replace(first.rows, requests=first.rows.requests[::2]))
        return replace(played, runs=[*rehearsed, first, *others])

    monkeypatch.setattr(truth, "play", throttled)
    setting = truth.Setting(seconds=2, warmup_s=1, calibration_s=1.0, repeats=1)
    played = truth.play_case(setting, truth.cases(setting)["steady"])
    (lost,) = played.num_without_row
    assert lost > 50
    line = truth.compare("steady", "goodput", "goodput_rps", played)
    assert line.reason == f"the server refused {lost} requests before its scheduler heard of them"
    point = Beside(
        live=played.live[0], simulated=None, client_late_p99_ms=0.0, num_without_row=lost
    )
    assert say("steady", point).endswith(f"; {lost} requests left no row")
