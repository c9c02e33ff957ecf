"""Models asked while strangers send outliers: rows never mix."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from clockwright.client.client import AsyncClient, Client
from clockwright.client.operator import Operator
from clockwright.errors import BadRequestError, RefusedError
from experiments.live.local_server import LocalServer
from tests.kit.mixing_models import Array, MixingModel, models, quantised

#: Row by row, and the four whose rows met unnoticed before the graph was asked.
FEW = ["mlp-16-64-8", "labels", "mlp-16-64-8-int8", "encoder-int8", "int-mix", "control-if"]
#: The last scale gives zeros.
SCALES = (100.0, -1.0, 1e4, 0.0)
NUM_STRANGERS, NUM_ROWS, NUM_QUESTIONS = 6, 12, 24
# The SLO is long: a model may have to be loaded, and seven clients share it.
SLO_MS = 20_000.0


def alone(model: MixingModel, rows: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """What plain onnxruntime answers to rows alone."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.model.SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    return [dict(zip(names, session.run(names, row), strict=True)) for row in rows]


def distance(found: Array, wanted: Array) -> float:
    """How far an answer is from another, as a part of the largest number; 1 for another label."""
    if found.shape != wanted.shape:
        return 1.0
    if np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f"):
        return 0.0
    if wanted.dtype.kind != "f":
        return 1.0
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    scale = max(float(np.max(np.abs(other), initial=0.0)), 1e-9)
    return float(np.max(np.abs(one - other), initial=0.0)) / scale


async def asked_among_strangers(address: str, model: MixingModel) -> int:
    """Ask a model's rows while other clients send outliers to it. Gives how many answers shared a batch."""
    rows = model.rows(np.random.default_rng(7), NUM_ROWS)
    expected = alone(model, rows)
    generator = np.random.default_rng(8)
    strangers = [row for scale in SCALES for row in model.rows(generator, 2, scale)]

    async def disturb(client: AsyncClient, first: int) -> None:
        for number in itertools.count(first):
            with contextlib.suppress(RefusedError):
                await client.infer(model.name, strangers[number % len(strangers)], slo_ms=SLO_MS)

    num_shared = 0
    async with AsyncClient(address) as client, AsyncClient(address) as other:
        others = [asyncio.create_task(disturb(other, n)) for n in range(NUM_STRANGERS)]
        try:
            for number in range(NUM_QUESTIONS):
                place = number % len(rows)
                result = await client.infer(model.name, rows[place], slo_ms=SLO_MS, explain=True)
                num_shared += int(result.explanation["batch_size"]) > 1
                # Answers that are drawn by chance cannot be compared.
                for name, wanted in expected[place].items() if model.repeats else ():
                    # What is not a number is wrong as well.
                    assert distance(result.outputs[name], wanted) <= model.tolerance, model.name
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    return num_shared


@pytest.mark.parametrize(
    "names", [FEW, pytest.param([], marks=pytest.mark.long)], ids=["few", "all"]
)
def test_no_answer_has_seen_a_stranger_and_no_good_model_runs_alone(
    names: list[str], tmp_path: Path, cache_dir: Path
) -> None:
    names = names or list(models())
    for name in names:
        path = tmp_path / "models" / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        onnx.save(models()[name].model, path)
    folders = ["--models", str(tmp_path / "models"), "--cache-dir", str(cache_dir)]
    folders += ["--pages", "16", "--arena-mib", "64"]
    with LocalServer(folders) as server, Operator(server.address) as operator:
        told = {info.model_id: info for info in operator.models()}
        assert {info.state for info in told.values()} == {"READY"}
        row_by_row = [name for name in names if not told[name].one_by_one]
        assert row_by_row == [name for name in names if models()[name].row_by_row]
        num_shared = {
            name: asyncio.run(asked_among_strangers(server.address, models()[name]))
            for name in names
        }
    # The strangers were there: without them no batch has room for two.
    assert any(num_shared.values())
    assert not any(num_shared[name] for name in names if name not in row_by_row)


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
    folders += ["--pages", "16", "--arena-mib", "64"]
    with LocalServer(folders) as server, Client(server.address) as client:
        listed = command("models", "list")
        assert [line for line in listed.splitlines() if "rows run one by one" in line] == [
            "eight-bits: rows run one by one: DynamicQuantizeLinear makes one result of all rows "
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
