"""A controller that starts where one was killed has two seconds."""

from __future__ import annotations

import subprocess
import sys


def test_a_controller_starts_without_what_only_some_need() -> None:
    script = (
        "import sys, controller.process.cli, controller.process.up; "
        "rare = {'cryptography', 'jwt', 'onnx', 'onnxruntime', 'redis', 'rich.progress', 'torch'}; "
        "print(sorted(rare & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
