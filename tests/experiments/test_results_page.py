"""Which paragraphs the page of results has while some records are still to be made."""

from __future__ import annotations

from experiments.results_page import LATER, TEMPLATE, written

PAGE = (
    "Of {serve[a]}.\n\nLive {fig8_live[b]:.1f}.\n\nSet {fig8_live.setting[c]}.\n\nLast {costs[d]}."
)


def test_a_paragraph_that_names_a_record_to_be_made_waits_for_it() -> None:
    assert written(PAGE, {"serve"}) == "Of {serve[a]}."
    assert written(PAGE, {"serve", "costs"}) == "Of {serve[a]}.\n\nLast {costs[d]}."
    assert written(PAGE, {"serve", *LATER}) == PAGE


def test_the_page_without_them_still_has_all_other_paragraphs() -> None:
    template = TEMPLATE.read_text(encoding="utf-8")
    short = written(template, ())
    assert written(template, LATER) == template
    left_out = set(template.split("\n\n")) - set(short.split("\n\n"))
    assert left_out
    assert all(any(f"{{{name}" in block for name in LATER) for block in left_out)
