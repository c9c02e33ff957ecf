"""What README quotes from recorded runs is what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def figures(name: str) -> dict[str, float]:
    recorded: dict[str, float] = json.loads(
        (ROOT / "experiments" / "results" / f"{name}.json").read_text()
    )["figures"]
    return recorded


def row(start: str) -> list[float]:
    """The numbers in the cells of a table row behind its first cell."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    cells = line.strip("|").split("|")[1:]
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", " ".join(cells))]


def test_the_overload_row_is_the_recorded_run() -> None:
    serve = figures("serve")
    assert row("**Clockwright**") == [
        round(serve[f"overload_goodput_{rate}"]) for rate in (50, 90, 150, 300)
    ]


def test_the_cost_table_is_the_recorded_run() -> None:
    serve = figures("serve")
    cases = ("15x1", "4026x6", "4026x20")
    assert row("scheduler")[:3] == [round(serve[f"core_us_{case}"]) for case in cases]
    assert row("requests per second")[:3] == [
        round(serve[f"grpc_ratio_small_c{clients}"], 2) for clients in (1, 8, 32)
    ]
    assert row("the same with")[0] == round(serve["grpc_ratio_602kb_c8"], 2)
    assert row("EXEC through")[0] == round(serve["paging_ratio"], 2)
    assert row("begin of an action")[:2] == [
        round(serve["start_late_us_p50"]),
        round(serve["start_late_us_p99"]),
    ]
    assert row("measured against")[0] == round(serve["exec_error_us_p99"] / 1000, 1)


def test_what_applications_gain_is_the_recorded_runs() -> None:
    section = README.split("## Applications")[1].split("\n## ")[0]
    fig8, fig9 = figures("clipper_fig8"), figures("clipper_fig9")
    for quoted in (
        f"errs {fig8['cumulative_error']:.4f}",
        f"hindsight {fig8['best_static_error']:.4f}",
        f"best {fig8['oracle_error']:.4f}",
        f"within {fig9['mitigated_20_p99_ms']:.1f} ms",
        f"instead of {fig9['blocking_20_p99_ms']:.1f}",
        f"{100 * fig9['mitigated_20_missing']:.1f} % of the members",
    ):
        assert quoted in section


def test_the_table_beside_the_paper_is_the_recorded_runs() -> None:
    fig5, fig6, fig8, scale = (figures(name) for name in ("fig5", "fig6", "fig8", "scale"))
    for start, paper, ours in (
        ("Fig 5: goodput", fig5["paper_slo500_goodput_rps"], fig5["clockwork_slo500_goodput_rps"]),
        (
            "Fig 6: goodput",
            fig6["paper_end_minor_goodput_rps"],
            fig6["clockwork_end_minor_goodput_rps"],
        ),
        ("Fig 8: failed", fig8["paper_failed_requests"], fig8["clockwork_trace_failed_requests"]),
    ):
        assert row(start) == [round(paper), round(ours)]
    assert row("scale: in time on 20") == [
        round(scale["paper_gpus20_slo25_satisfaction_pct"], 1),
        round(scale["clockwork_gpus20_slo25_satisfaction_pct"], 1),
    ]
    assert row("scale: in time on 150") == [
        round(scale["clockwork_gpus150_slo25_satisfaction_pct"], 2)
    ]


def test_the_table_of_edf_mh_is_the_recorded_run() -> None:
    shares = figures("edf_mh")
    for start, scenario in (
        ("Fig 5, SLO 10", "fig5_slo10"),
        ("Fig 7, 12 models", "fig7_left_n12_r2400_x3.38"),
        ("Fig 7, the same", "fig7_right_m12c16_x3.38"),
        ("overload, 48 models on", "overload_n48_r5514_slo25"),
        ("overload, 48 models of", "overload_zoo48_r3000_slo50"),
        ("more models than memory", "zoo_zoo600_slo100"),
    ):
        assert row(start) == [
            round(100 * shares[f"{policy}_{scenario}_bound_share"], 1)
            for policy in ("clockwork", "clockwork1ms", "edf_mh")
        ]
    assert shares["worst_vs_clockwork_points"] >= 0
    section = README.split("It is in no case")[1].split("\n## ")[0]
    assert f"overload {100 * shares['overload_share_min']:.1f} of" in section
    assert f"{shares['fig7_right_bc_rps']:,.0f} of" in section
