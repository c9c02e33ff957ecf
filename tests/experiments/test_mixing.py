"""Models asked while strangers send outliers: a quick variant of `make bench NAME=bench-mixing`."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from clockwright.client.client import Client
from clockwright.errors import BadRequestError
from experiments.bench import mixing
from experiments.bench.mixing_models import Array, MixingModel, Row, all_models, quantised
from experiments.live.local_server import LocalServer


@functools.cache
def models() -> dict[str, MixingModel]:
    """All, by name; made when first asked for, because they take sklearn, whoever collects the tests."""
    return {each.name: each for each in all_models()}


#: Row by row, and the four whose rows met unnoticed before the graph was asked.
FEW = ["mlp-16-64-8", "labels", "mlp-16-64-8-int8", "encoder-int8", "int-mix", "control-if"]


def test_no_answer_has_seen_a_stranger_and_no_good_model_runs_alone() -> None:
    outcomes = mixing.ask_all([models()[name] for name in FEW], mixing.Setting(questions=40))
    figures = mixing.figures_of(outcomes)
    assert figures["models"] == len(FEW)
    assert figures["served_share"] == 1.0
    assert figures["answers"] == 40 * len(FEW)
    assert (figures["mixed_answers"], figures["missed_models"]) == (0, 0)
    assert (figures["served_at_batch_1"], figures["wrongly_batch_1"]) == (4, 0)
    # The strangers were there: without them no batch has room for two.
    assert figures["shared_answers"] > 0
    assert not any(each.shared_answers for each in outcomes if not each.row_by_row)


def test_an_answer_that_is_not_plain_onnxruntimes_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = mixing.expected_answers

    def wrong(model: MixingModel, rows: list[Row]) -> list[dict[str, Array]]:
        answers = right(model, rows)
        if model.name == "labels":
            answers = [{**each, "label": each["label"] + 1} for each in answers]
        return answers

    monkeypatch.setattr(mixing, "expected_answers", wrong)
    outcomes = mixing.ask_all([models()["labels"]], mixing.Setting(questions=5))
    assert mixing.figures_of(outcomes)["mixed_answers"] == 5


def test_a_model_that_runs_alone_says_so_and_stands_in_an_application(
    tmp_path: Path, cache_dir: Path
) -> None:
    labels = models()["labels"].model
    # Who asks for single rows knows what he does, and is not told.
    for name, model, config in (
        ("apart", labels, ""),
        ("eight-bits", quantised(labels), ""),
        ("told", quantised(labels), "batch_sizes = [1]"),
    ):
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        onnx.save(model, folder / "1" / "model.onnx")
        if config:
            (folder / "config.toml").write_text(config)

    def command(*words: str) -> str:
        call = [sys.executable, "-m", "clockwright.cli", *words, "--server", server.address]
        return subprocess.run(call, check=True, capture_output=True, text=True).stdout

    folders = ["--models", str(tmp_path / "models"), "--cache-dir", str(cache_dir)]
    with LocalServer(folders) as server, Client(server.address) as client:
        listed = command("models", "list")
        assert [line for line in listed.splitlines() if "one row per request" in line] == [
            "eight-bits: one row per request: DynamicQuantizeLinear makes one result of all rows "
            "of a batch"
        ]
        x = np.zeros((1, 16), dtype=np.float32)
        # A larger request is cut into runs of one row.
        answer = client.infer("eight-bits", x.repeat(2, axis=0), slo_ms=60_000)
        assert answer.outputs["label"].shape == (2,)
        with pytest.raises(BadRequestError, match="expected 1 to 16"):
            client.infer("eight-bits", x.repeat(17, axis=0), slo_ms=60_000)
        words = ("--model", "apart", "--model", "eight-bits", "--default", "0")
        command("app", "add", "both", *words, "--slo-ms", "60000")
        answer = client.infer("both", x, slo_ms=60_000)
        assert answer.explanation["models"] == "apart,eight-bits"
        assert not answer.explanation["default"]
