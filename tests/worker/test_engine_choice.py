"""Which engine runs a model on a GPU: the choice alone."""

from __future__ import annotations

import pytest

from clockwright.errors import ConfigError
from worker.config import WorkerConfig
from worker.engines.choice import Engine, Way, describe, fastest, parse_engine, ways_to_try
from worker.models.precision import Precision

JOINED, APART, ORT = Way


@pytest.mark.parametrize(
    ("exec_ns", "taken"),
    [
        ({JOINED: 100, APART: 120, ORT: 150}, JOINED),
        ({JOINED: 120, APART: 100, ORT: 150}, APART),
        ({JOINED: 1200, APART: 1100, ORT: 1000}, ORT),
        # Equally fast, as far as can be told: workers of one kind choose alike.
        ({JOINED: 1019, APART: 1010, ORT: 1000}, JOINED),
        ({JOINED: 1030, APART: 1015, ORT: 1000}, APART),
        ({ORT: 5}, ORT),
    ],
)
def test_the_first_of_the_fastest_ways_is_taken(exec_ns: dict[Way, int], taken: Way) -> None:
    assert fastest(exec_ns) is taken
    assert fastest(dict(reversed(exec_ns.items()))) is taken


@pytest.mark.parametrize(
    ("engine", "precision", "on_host", "has_onnxruntime", "ways"),
    [
        (Engine.AUTO, Precision.FLOAT32, False, True, (JOINED, APART, ORT)),
        (Engine.AUTO, Precision.FLOAT32, False, False, (JOINED, APART)),
        (Engine.AUTO, Precision.FLOAT32, True, True, (JOINED, ORT)),
        (Engine.AUTO, Precision.FLOAT32, True, False, (JOINED,)),
        (Engine.AUTO, Precision.TF32, False, True, (JOINED, APART)),
        (Engine.AUTO, Precision.FLOAT16, False, True, (JOINED, APART)),
        (Engine.TORCH, Precision.FLOAT32, False, True, (JOINED, APART)),
        (Engine.ONNXRUNTIME, Precision.FLOAT32, False, True, (ORT,)),
    ],
)
def test_ways_that_can_run_a_model_compete(
    engine: Engine,
    precision: Precision,
    on_host: bool,
    has_onnxruntime: bool,
    ways: tuple[Way, ...],
) -> None:
    found = ways_to_try(engine, precision, on_host=on_host, has_onnxruntime=has_onnxruntime)
    assert found == ways


@pytest.mark.parametrize("precision", [Precision.TF32, Precision.FLOAT16])
def test_onnxruntime_is_refused_for_weights_that_are_laid_out_for_torch(
    precision: Precision,
) -> None:
    with pytest.raises(ConfigError, match=f"found precision '{precision.value}', expected 'float"):
        ways_to_try(Engine.ONNXRUNTIME, precision, on_host=False, has_onnxruntime=True)


def test_an_unknown_engine_is_refused_by_name() -> None:
    assert parse_engine("torch") is Engine.TORCH
    with pytest.raises(ConfigError, match="engine: found 'tvm', expected one of auto, torch, onnx"):
        WorkerConfig(controller="there:1", engine="tvm")


def test_measurements_are_told_in_words() -> None:
    words = describe({JOINED: 1_500_000, ORT: None})
    assert words == "torch: 1.5 ms; onnxruntime: does not work"
