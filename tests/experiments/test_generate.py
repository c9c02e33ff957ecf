"""Streams of tokens on modelled devices, admitted and refused, and under continuous batching."""

from __future__ import annotations

from experiments.bench.generate import Setting, measure


def test_admitted_streams_get_every_token_in_time_and_others_none() -> None:
    setting = Setting(parts=("modelled", "batching"), devices=1, virtual_s=1.0, loads=(3.0,))
    found = measure(setting).figures
    assert found["modelled_3_streams"] == found["batching_3_streams"] > 100
    assert found["modelled_3_refused_at_start"] > 0
    assert found["modelled_3_broken_off"] == 0
    assert found["modelled_3_every_token"] == 1
    # Nothing is refused there, and nearly all come late.
    assert found["batching_3_refused_at_start"] == 0
    assert found["batching_3_every_token"] < 0.9
    again = measure(setting).figures
    assert again == found
