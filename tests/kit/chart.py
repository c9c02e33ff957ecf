"""The Helm chart as a cluster gets it, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/kubernetes/chart/clockwright"


def render(values: Mapping[str, Any]) -> dict[str, Any]:
    """Render the chart with values, each under a name (`tests.kit.helm`); skips where Helm is missing."""
    folder = Path(sys.prefix) / "chart"
    if not (folder / "helm_python").is_dir():
        pytest.skip(f"Helm is not installed: `make {folder.parent.name}/chart`")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.helm", str(CHART)],
        input=json.dumps(values),
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
