"""What Clockwright does, in a tenth of a second: requests above, the lanes of the GPU that answers them below.

A simulated GPU (Table 1 of Clockwork's paper) with pages for two of three models, and requests at
times chosen so that everything happens once: a model that is not resident is asked for, loaded and run;
requests that wait for the same model become one batch; what cannot be in time is refused.
What runs when is the scheduler's decision, as it is live.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS
from controller.telemetry.tables import OK, Telemetry
from experiments.policies.load import case_of, hosted
from experiments.simulator import run
from experiments.study.bench import Findings, bench
from experiments.study.pictures import COLOURS
from experiments.study.report import picture
from experiments.study.study import StudyRecord
from modelzoo.profile import Noise, load_profile
from traces.arrivals import Recorded

#: Names in the picture, and rows of Table 1.
MODELS = {"A": "resnet50_v1b", "B": "densenet161", "C": "inceptionv3"}
#: The weights of two models fit.
NUM_PAGES = 14
#: Arrival, model and SLO of each request; ms. The two before `BEGIN_MS` make A and B resident.
REQUESTS = (
    (0, "A", 100), (10, "B", 100), (105, "B", 25),
    (106, "A", 25), (106.5, "A", 30), (107, "A", 25), (107.5, "A", 25),
    (117, "A", 20), (119, "C", 35), (121, "C", 14), (123, "C", 35), (124, "A", 20), (125, "C", 40),
    (135, "A", 20), (142, "A", 25), (146, "A", 20), (150, "B", 35), (154, "A", 20), (157, "C", 25),
    (158, "C", 30), (165, "A", 15), (168, "B", 10),
)  # fmt: skip
BEGIN_MS, END_MS = 100, 200
_COLOURS = {"A": COLOURS[0], "B": COLOURS[4], "C": COLOURS[2]}
TITLE = "Every request is answered before its deadline, or refused before it."
_REFUSED = COLOURS[1]


@dataclass(frozen=True, slots=True)
class Setting:
    """Nothing varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request; ms from the begin of the picture."""

    model: str
    arrival_ms: float
    deadline_ms: float
    departure_ms: float
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One action on its lane; ms from the begin of the picture."""

    model: str
    lane: str
    num_requests: int
    begin_ms: float
    end_ms: float


def simulate() -> tuple[list[Asked], list[Ran]]:
    """Run the case; returns requests in order of arrival, and actions in order of begin."""
    profile, names = load_profile("table1"), list(MODELS)
    models = tuple(hosted(name, profile.row_for(row)) for name, row in MODELS.items())
    sources = tuple(
        Recorded(
            times_ns=np.array(
                [round(at * NS_PER_MS) for at, _, of in REQUESTS if of == slo_ms], np.int64
            ),
            models=np.array([names.index(n) for _, n, of in REQUESTS if of == slo_ms], np.int64),
            slo_ns=slo_ms * NS_PER_MS,
            end_ns=END_MS * NS_PER_MS,
        )
        for slo_ms in sorted({slo_ms for *_, slo_ms in REQUESTS})
    )
    telemetry = Telemetry()
    case = case_of(models, sources, 0, END_MS / 1000, pages=NUM_PAGES, noise=Noise())
    run(case, telemetry=telemetry)
    asked = [
        Asked(
            model=row.model_id,
            arrival_ms=_ms(row.arrival_ns),
            deadline_ms=_ms(row.arrival_ns + row.slo_ns),
            departure_ms=_ms(row.departure_ns),
            outcome=row.outcome,
        )
        for row in telemetry.requests
    ]
    ran = [
        Ran(
            model=row.model_id,
            lane=lane,
            num_requests=row.num_requests,
            begin_ms=_ms(step.begin_ns),
            end_ms=_ms(step.end_ns),
        )
        for row in telemetry.actions
        for lane, step in (("LOAD", row.load), ("INFER", row.exec))
        if step is not None
    ]
    return (
        sorted((a for a in asked if a.arrival_ms >= 0), key=lambda a: a.arrival_ms),
        sorted((r for r in ran if r.begin_ms >= 0), key=lambda r: r.begin_ms),
    )


def _ms(time_ns: int) -> float:
    return round(time_ns / NS_PER_MS - BEGIN_MS, 3)


def found() -> Findings:
    """All that happens, and how often."""
    asked, ran = simulate()
    slack_ms = [r.deadline_ms - r.departure_ms for r in asked if r.outcome == OK]
    num_loads = sum(action.lane == "LOAD" for action in ran)
    figures = {
        "num_requests": len(asked),
        "num_answered": len(slack_ms),
        "num_refused": len(asked) - len(slack_ms),
        "num_loads": num_loads,
        "num_infers": len(ran) - num_loads,
        "least_slack_ms": min(slack_ms),
    }
    rows = {"requests": list(map(asdict, asked)), "actions": list(map(asdict, ran))}
    return Findings(figures, {"models": MODELS, **rows})


def draw(target: Path, _setting: Setting, recorded: StudyRecord) -> None:
    """Requests from arrival to deadline, a line each; below, the lanes of the GPU."""
    asked = [Asked(**request) for request in recorded.record["requests"]]
    ran = [Ran(**action) for action in recorded.record["actions"]]
    with picture(target, 2, 1, size=(10, 6.6), share_x=True) as grid:
        above, below = grid[:, 0]
        above.get_gridspec().set_height_ratios([2.6, 1])
        for place, request in enumerate(asked):
            _draw_request(above, place, request)
        first = asked[0]
        for at_ms, text in (
            (first.arrival_ms, "asked"),
            (first.departure_ms, "answered"),
            (first.deadline_ms, "deadline"),
        ):
            above.annotate(
                text,
                (at_ms, 0),
                (0, 10),
                textcoords="offset points",
                fontsize=12,
                color="#444444",
                ha="center",
            )
        above.set_ylim(len(asked), -1.8)
        above.set_yticks([])
        above.set_ylabel("requests, by model (A, B, C)", fontsize=14)
        above.set_title(TITLE, fontsize=15, loc="left", fontweight="bold")
        for action in ran:
            _draw_action(below, action)
        below.set_ylim(1.55, -0.55)
        below.set_yticks([0, 1], ["LOAD\nweights", "INFER"], fontsize=13)
        below.tick_params(axis="x", labelsize=13)
        below.set_xlim(0, END_MS - BEGIN_MS)
        below.set_xlabel("time, ms", fontsize=14)
        below.set_title(
            "The GPU meanwhile: it loads one model while it runs another (x4: a batch of four)",
            fontsize=13,
            loc="left",
        )
        for axes in (above, below):
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            axes.grid(axis="x", color="#e5e5e5")
            axes.set_axisbelow(True)


def _draw_request(axes: Any, place: int, request: Asked) -> None:  # noqa: ANN401
    colour = _COLOURS[request.model]
    refused = request.outcome != OK
    axes.plot(
        [request.arrival_ms, request.deadline_ms], [place, place], color=colour, lw=1.2, alpha=0.6
    )
    axes.plot([request.deadline_ms], [place], marker="|", ms=13, mew=2.5, color="black")
    axes.plot(
        [request.arrival_ms, request.departure_ms], [place, place],
        color="#bbbbbb" if refused else colour, lw=7, solid_capstyle="butt",
    )  # fmt: skip
    if refused:
        axes.plot([request.departure_ms], [place], marker="X", ms=13, color=_REFUSED)
        # At the right end there is no room for a label behind the deadline.
        left = request.deadline_ms > 0.6 * (END_MS - BEGIN_MS)
        axes.annotate(
            f"refused {request.deadline_ms - request.departure_ms:.0f} ms early: {request.outcome}",
            (request.arrival_ms if left else request.deadline_ms, place),
            (-28 if left else 8, -5), textcoords="offset points", ha="right" if left else "left",
            fontsize=13, color=_REFUSED, fontweight="bold",
        )  # fmt: skip
    axes.annotate(
        request.model, (request.arrival_ms, place), (-7, -5), textcoords="offset points",
        ha="right", fontsize=13, color=colour, fontweight="bold",
    )  # fmt: skip


def _draw_action(axes: Any, action: Ran) -> None:  # noqa: ANN401
    lane = 0 if action.lane == "LOAD" else 1
    width = action.end_ms - action.begin_ms
    colour = _COLOURS[action.model]
    axes.barh(lane, width, left=action.begin_ms, height=0.7, color=colour, edgecolor="white")
    text = f"load {action.model}" if lane == 0 else f"x{action.num_requests}"
    axes.text(
        action.begin_ms + width / 2, lane, text, ha="center", va="center", fontsize=12,
        color="black" if action.model == "B" else "white", fontweight="bold",
    )  # fmt: skip


STUDY = replace(
    bench("lanes", Setting(), lambda _: found()),
    title=TITLE,
    picture=draw,
)
