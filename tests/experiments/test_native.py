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


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_compiled_build_serves(tmp_path: Path) -> None:
    native.build(tmp_path / "native", optimise=0)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVES, str(scratch)],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "native"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.rstrip().endswith("served"), done.stdout + done.stderr
