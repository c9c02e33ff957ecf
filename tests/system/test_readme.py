"""What README quotes from recorded runs is what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", " ".join(cells))]


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


def test_the_table_of_clippers_figures_is_the_recorded_runs() -> None:
    fig3, fig4, fig5, fig6, fig7, fig8, fig9, fig10 = (
        figures(f"clipper_fig{number}") for number in range(3, 11)
    )
    for start, places, *expected in (
        (
            "Fig 3: rows",
            0,
            fig3["paper_max_batch_linear_over_kernel_svm_ratio"],
            fig3["native_max_batch_linear_over_kernel_svm_ratio"],
        ),
        (
            "Fig 4: requests/s",
            0,
            fig4["paper_native_linear_svm_aimd_gain_ratio"],
            fig4["native_linear_svm_aimd_gain_ratio"],
        ),
        (
            "Fig 4: AIMD over",
            2,
            fig4["paper_native_aimd_over_quantile_ratio"],
            fig4["native_aimd_over_quantile_ratio"],
        ),
        (
            "Fig 5: requests/s",
            1,
            fig5["paper_native_linear_svm_delay2_gain_ratio"],
            fig5["native_linear_svm_delay2_gain_ratio"],
        ),
        (
            "Fig 6: four",
            2,
            fig6["paper_clipper_10gbps_r4_speedup_ratio"],
            fig6["clipper_10gbps_r4_speedup_ratio"],
            fig6["clockwork_10gbps_r4_speedup_ratio"],
        ),
        # The paper's 5.2 % less is of ImageNet.
        (
            "Fig 7: an ensemble's",
            2,
            1 - 0.052,
            1 - fig7["alike_exp4_full_gain"],
            1 - fig7["mixed_exp4_full_gain"],
        ),
        ("Fig 8: error", 4, fig8["cumulative_error"], fig8["exp3_error"]),
        ("Fig 8: the best", 4, fig8["best_static_error"], fig8["oracle_error"]),
        ("Fig 9: P99", 1, fig9["blocking_20_p99_ms"], fig9["mitigated_20_p99_ms"]),
        (
            "Fig 9: error",
            3,
            1 - fig9["blocking_20_accuracy"],
            1 - fig9["mitigated_20_accuracy"],
            round(100 * fig9["mitigated_20_missing"], 1),
        ),
        (
            "Fig 10: error of one",
            4,
            fig10["one_for_all_error_after_8"],
            fig10["own_group_error_after_8"],
        ),
        (
            "Fig 10: of a policy",
            4,
            fig10["policy_one_for_all_too_from_nothing_error_after_8"],
        ),
        ("section 4.2", 1, 1.6, figures("selection")["cache_feedback_speedup"]),
    ):
        assert row(start) == [round(figure, places) for figure in expected], start
    sizes = [fig4[key] for key in fig4 if re.fullmatch(r"native_.*_aimd_mean_batch", key)]
    assert (len(sizes), sizes.count(1024)) == (5, 3)
    # What is said not to hold.
    assert fig7["mixed_exp4_full_gain"] < 0
    own = fig10["own_group_error_after_8"]
    assert all(
        error > own
        for key, error in fig10.items()
        if key.startswith("policy_") and key.endswith("_error_after_8")
    )


def test_what_is_said_of_the_poisoned_application_is_the_recorded_run() -> None:
    section = README.split("`make poisoned` shows")[1].split("\n## ")[0]
    found = figures("poisoned")
    before, during, after = (
        f"{found[f'{phase}_accuracy']:.3f}" for phase in ("before", "poisoned", "repaired")
    )
    said = " ".join(section.split())
    assert f"is {before} before, {during} meanwhile and {after} afterwards" in said
    assert f"after {found['poisoned_queries_to_turn']:.0f} queries" in said
    assert f"again after {found['repaired_queries_to_turn']:.0f}." in said
    assert found["members_missing"] == 0


def test_the_table_beside_the_paper_is_the_recorded_runs() -> None:
    fig5, fig6, fig8, scale = (figures(name) for name in ("fig5", "fig6", "fig8", "scale"))
    policies = ("clockwork", "edf_mh")
    for start, recorded, paper, ours, digits in (
        ("Fig 5: goodput", fig5, "paper_slo500_goodput_rps", "slo500_goodput_rps", None),
        ("Fig 5: the same", fig5, None, "slo25_goodput_rps", None),
        ("Fig 6: goodput", fig6, "paper_end_minor_goodput_rps", "end_minor_goodput_rps", None),
        ("Fig 8: failed", fig8, "paper_failed_requests", "trace_failed_requests", None),
        ("Fig 8: median", fig8, None, "trace_p50_ms", 1),
        (
            "scale: in time on 20",
            scale,
            "paper_gpus20_slo25_satisfaction_pct",
            "gpus20_slo25_satisfaction_pct",
            1,
        ),
        ("scale: in time on 150", scale, None, "gpus150_slo25_satisfaction_pct", 2),
    ):
        keys = [f"{policy}_{ours}" for policy in policies]
        expected = [recorded[key] for key in ([paper] if paper else []) + keys]
        assert row(start) == [round(number, digits) for number in expected], start
    section = " ".join(README.split("\n## Against the paper")[1].split("\n## ")[0].split())
    shares = {
        (policy, rate): f"{100 - fig8[f'{policy}_trace_x{rate}_failed_ppm'] / 1e4:.1f}"
        for policy in policies
        for rate in ("1.5", "2")
    }
    late = [f"{fig8[f'edf_mh_trace_x{rate}_late_per_million']:.1f}" for rate in ("1.5", "2")]
    assert (
        f"`clockwork` answers {shares['clockwork', '1.5']} and {shares['clockwork', '2']} % in time, "
        f"`edf_mh` {shares['edf_mh', '1.5']} and {shares['edf_mh', '2']} %, with {late[0]} and "
        f"{late[1]} of a million late"
    ) in section


def test_the_table_of_edf_mh_is_the_recorded_run() -> None:
    shares = figures("edf_mh")
    for start, scenario in (
        ("Fig 5, SLO 10", "fig5_slo10"),
        ("Fig 7, 12 models", "fig7_left_n12_r2400_x3.38"),
        ("Fig 7, the same", "fig7_right_m12c16_x3.38"),
        ("Fig 8's replay at twice", "azure_x2_noisy"),
        ("overload, 48 models on", "overload_n48_r5514_slo25"),
        ("overload, 48 models of", "overload_zoo48_r3000_slo50"),
        ("more models than memory: 600", "zoo_zoo600_slo100"),
    ):
        assert row(start)[-3:] == [
            round(100 * shares[f"{policy}_{scenario}_bound_share"], 1)
            for policy in ("clockwork", "clockwork1ms", "edf_mh")
        ]


def test_the_aims_of_edf_mh_and_what_was_measured_are_the_recorded_run() -> None:
    shares = figures("edf_mh")
    recorded = json.loads((ROOT / "experiments/results/edf_mh.json").read_text())["aims"]
    for start, key, factor, digits in (
        ("worst goodput beside", "worst_vs_clockwork_points", 1, 2),
        ("largest median latency", "p50_ratio_max_at_low_utilisation", 1, 3),
        ("overload, least share", "overload_share_min", 100, 1),
        ("Fig 5 at an SLO of 10", "fig5_slo10_rps", 1, 0),
        ("Fig 7 left at 2,400", "fig7_left_multiple", 1, 1),
        ("Fig 7 right at 3.4", "fig7_right_ls_pct", 1, 1),
        ("and batch clients", "fig7_right_bc_rps", 1, 0),
        ("more models than memory, share", "zoo_share", 100, 1),
        ("worst-served twentieth", "p5_model_share", 1, 2),
        ("late answers per million", "azure_late_per_million", 1, 1),
    ):
        aim = recorded.pop(key)
        assert row(start) == [
            pytest.approx(factor * aim.get("least", aim.get("most"))),
            round(factor * shares[key], digits),
        ], start
        assert aim["measured"] == shares[key]
    assert recorded.pop("azure_exact_late_per_million")["met"]
    assert recorded == {}
    # Recorded apart, on a quiet machine.
    assert row("cost of the core per request") == [25, round(shares["core_us_4026x20"], 1)]
    section = README.split("Policy `edf_mh` decides")[1].split("\n## ")[0]
    assert f"the bound is {shares['fig5_slo10_bound_rps']:.0f} " in section
    assert f"all at once could have {shares['p5_model_share_bound']:.2f} " in section
    cases = sum(key.startswith("edf_mh_") and key.endswith("_goodput_pct") for key in shares)
    assert f"over {cases} loads" in section
    worst = json.loads((ROOT / "experiments/results/edf_mh.json").read_text())["worst_scenario"]
    ours, base = (
        shares[f"{policy}_{worst['clockwork']}_goodput_pct"] for policy in ("edf_mh", "clockwork")
    )
    assert f"{ours:.1f} beside {base:.1f} % of the bound" in section
    shared = "clockwork_fig7_right_m12c16_x3.38"
    for quoted in (
        f"at most {shares['p50_ratio_max_at_low_utilisation_all_answered']:.3f} of",
        f"gives them {shares[f'{shared}_bc_rps']:,.0f} r/s",
        f"leaves {shares[f'{shared}_goodput_pct']:.1f} % of the others",
    ):
        assert quoted in section


def test_what_pieces_of_edf_mh_are_said_to_be_worth_is_the_recorded_run() -> None:
    section = " ".join(README.split("`make ablation` tells")[1].split("\n## ")[0].split())
    found = figures("ablation")
    overloads = [
        found[f"prune_infers_overload_{name}_worth_points"]
        for name in ("n48_r5514_slo25", "zoo48_r3000_slo50")
    ]
    batch = found["limit_batch_fig7_right_m12c16_x3.38_worth_points"]
    growing = found["deferral_few_n1_gpus32_r22080_worth_points"]
    assert f"overloads lose {min(overloads):.0f} to {max(overloads):.0f};" in section
    assert f"the others lose {batch:.1f};" in section
    assert f"share one model {growing:.1f}." in section
    replay = "azure_x1_quiet"
    cold = [found[f"{name}_{replay}_cold_per_million"] for name in ("prefetch", "all")]
    assert round(cold[0] / cold[1], 1) == 0.1
    assert abs(found[f"prefetch_{replay}_gain_points"]) < 0.01


def test_what_is_said_of_figure_6_on_the_processor_is_the_recorded_run() -> None:
    found = figures("gpu_on_cpu/fig6")
    section = " ".join(README.split("\n## On a GPU")[1].split("\n## ")[0].split())
    instances, answered = (
        f"{found[key]:,.0f}" for key in ("num_instances", "num_instances_answered")
    )
    worst_pct = abs(found["worst_goodput_gap_pct"])
    assert f"for 201 of {instances} instances: {answered} were asked and answered" in section
    assert f"was within {worst_pct:.1f} % of the simulated one" in section
    record = json.loads((ROOT / "experiments/results/gpu_on_cpu/fig6.json").read_text())
    assert record["hardware"]["accelerator"] == "cpu"
    assert "--pages 201" in record["command"]


def test_how_near_the_torch_engine_comes_is_the_recorded_run() -> None:
    path = ROOT / "experiments" / "results" / "torch_zoo.json"
    record = json.loads(path.read_text())
    found = figures("torch_zoo")
    match = re.search(
        r"outputs of all (\d+) networks differ by at most (\S+) of the largest in float32, "
        r"(\S+) in TF32 .* and (\S+) in float16",
        " ".join(README.split()),
    )
    assert match is not None
    for precision, said in zip(("float32", "tf32", "float16"), match.groups()[1:], strict=True):
        assert int(match[1]) == found[f"num_{precision}"]
        worst = found[f"worst_{precision}_error_ratio"]
        assert worst <= float(said) < 1.1 * worst
    # All, and by the same code.
    assert (record["left_out"], record["failed"], record["earlier"]) == ([], {}, {})
