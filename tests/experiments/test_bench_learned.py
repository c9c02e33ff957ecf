"""The benchmark of the first minute after a restart: what was learned makes it like the minute before."""

from __future__ import annotations

from experiments.bench.learned import PROFILES, Setting, measure


def test_with_what_was_learned_a_restart_changes_less_than_without() -> None:
    figures = measure(Setting(models=20, rate_rps=20, seconds=5, restarts=2))
    assert len(figures) == 6 * len(PROFILES)

    def apart(case: str, name: str, what: str) -> float:
        before = figures[f"{case}_before_{what}_pct"]
        return abs(figures[f"{case}_{name}_{what}_pct"] - before)

    # Profiles that are too long refuse what could be in time; those that are too short let in what is late.
    assert apart("triple", "learned", "refused") < apart("triple", "unlearned", "refused")
    assert figures["half_learned_late_pct"] < figures["half_unlearned_late_pct"]
