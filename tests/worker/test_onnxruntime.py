"""onnxruntime 1.29 and later tell their maker of every session unless they are told not to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["worker.engines.onnxruntime", "experiments.demo.models"])
def test_onnxruntime_reports_to_nobody(module: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    # Each of them would keep it silent by itself.
    for name in ("ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "CI"):
        environment.pop(name, None)
    script = (
        f"import {module}, onnxruntime, os\n"
        "onnxruntime.SessionOptions()\n"
        "print(os.environ.get('ORT_DISABLE_TELEMETRY'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert not (tmp_path / ".cache" / "Microsoft").exists()
