"""README and the page of results say what was recorded."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from experiments.study.results_page import PAGE, page, records

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_results_is_what_its_records_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "`make bench NAME=results_page` writes it anew"
    )


def test_numbers_in_the_readme_are_those_of_their_records() -> None:
    found = records()
    said = " ".join(README.split())
    with (PAGE.parent / "other_servers.csv").open(newline="", encoding="utf-8") as file:
        others = list(csv.DictReader(file))
    assert len(others) == 6
    default = [int(row["150 r/s"]) for row in others]
    tuned = [int(cell.split()[0]) for row in others if (cell := row["150 r/s when tuned by hand"])]
    for words in (
        "fifteen copies of ResNet50 share one GPU, SLO {overload.setting[slo_ms]} ms",
        "sent 150 req/s: Clockwright answers {serve[overload_goodput_150]:.0f} req/s within the SLO of 100 ms "
        "and refuses the rest after {serve[overload_refusal_p50_ms_150]:.1f} ms (median; "
        "p99 {serve[overload_refusal_p99_ms_150]:.0f} ms)",
        f"answered {min(default)} to {max(default)} req/s within the SLO as installed, "
        f"and {min(tuned)} to {max(tuned)} after tuning by hand",
    ):
        assert words.format(**found) in said
    overload = found["overload"]
    assert overload.setting["num_models"] == 15
    assert "servers that queue collapse just above half of its capacity" in said
    for name in ("infaas", "clipper"):
        assert overload[f"{name}_x0.6_goodput_rps"] < overload[f"{name}_x0.5_goodput_rps"] / 1.5


def test_what_the_page_says_without_a_number_is_so() -> None:
    found = records()
    # "queues none"
    overload = found["overload"]
    assert not any(
        overload[f"{name}_x3_goodput_rps"] for name in ("infaas", "clipper", "one_by_one")
    )
    # Below these SLOs "the reactive policies of Figure 5 answer nothing in time".
    fig5 = found["fig5"]
    for policy in ("clipper", "infaas"):
        below = [slo for slo in fig5.setting["slos_ms"] if slo < fig5[f"{policy}_collapse_slo_ms"]]
        assert below
        assert not any(fig5[f"{policy}_slo{slo}_goodput_rps"] for slo in below)
    # "for the same goodput"
    fig6 = found["fig6"]
    ends = [fig6[f"{policy}_end_goodput_rps"] for policy in ("clockwork", "edf_mh")]
    assert ends[1] == pytest.approx(ends[0], rel=0.01)
    # "An ensemble with one model that is much better than the others loses to it."
    assert found["clipper_fig7"]["mixed_exp4_full_gain"] < 0
    # "no policy errs less than the model of the user's own group"
    fig10 = found["clipper_fig10"]
    own = fig10["own_group_error_after_8"]
    policies = [key for key in fig10.figures if re.fullmatch(r"policy_.*_error_after_8", key)]
    assert policies
    assert all(fig10[key] > own for key in policies)
    # "Holding batches back gains nothing"
    assert found["clipper_fig5"]["native_linear_svm_delay2_gain_ratio"] < 1
    # The code for GPUs ran on the processor, all networks by the same code.
    assert found["gpu_on_cpu_fig6"].hardware["accelerator"] == "cpu"


@pytest.mark.parametrize("document", [ROOT / "README.md", PAGE])
def test_what_a_document_links_to_is_there(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert local
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len(README.splitlines()) <= 200
