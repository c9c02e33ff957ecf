"""What `make native` compiles serves clients as the sources do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import native

SERVES = """
import sys
import numpy as np
from clockwright.client import Client
from controller.core import scheduler
from experiments import native
from experiments.local_server import LocalServer
from modelzoo.build import write_model
from worker.core import lanes
from pathlib import Path

assert native.is_compiled()
for module in (scheduler, lanes):
    assert not module.__file__.endswith(".py"), module.__file__
scratch = Path(sys.argv[1])
write_model("tiny_conv", scratch / "models/tiny/1/model.onnx")
for device in ("cpu", "modelled:1ms"):
    arguments = ["--models", str(scratch / "models"), "--device", device]
    with LocalServer([*arguments, "--cache-dir", str(scratch / "cache")]) as server:
        with Client(server.address) as client:
            metadata = client.metadata("tiny")
            (image,) = metadata.inputs
            row = np.ones((1, *image.row_shape), np.float32)
            for _ in range(50):
                answer = client.infer("tiny", {image.name: row}, slo_ms=60_000)
            assert len(answer.outputs) == len(metadata.outputs)
print("served")
"""


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled build, and with the tests of the core, which are not compiled."""
    target = tmp_path_factory.mktemp("build") / "native"
    native.build(target, optimise=0)
    for name in ("core", "kit", "conftest.py"):
        source, copy = native.ROOT / "tests" / name, target / "tests" / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    shutil.copy(native.ROOT / "pyproject.toml", target)
    return target


def run(compiled: Path, *arguments: str, cwd: Path) -> str:
    """Run Python with the compiled build; returns what it said."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(compiled), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_compiled_build_serves(compiled: Path, tmp_path: Path) -> None:
    assert run(compiled, "-c", SERVES, str(tmp_path), cwd=tmp_path).rstrip().endswith("served")


def test_the_compiled_core_decides_what_was_written_down(compiled: Path) -> None:
    tests = ("tests/core/test_transcripts.py", "tests/core/test_digests.py")
    assert "passed" in run(compiled, "-m", "pytest", "-q", *tests, cwd=compiled)
