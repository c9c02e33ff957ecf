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
from clockwright.client.client import Client
from controller.core import scheduler
from experiments import native
from experiments.live.local_server import LocalServer
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


DECIDES = """
import sys
from pathlib import Path
from tests.kit.story import play

for path in sorted(Path(sys.argv[1]).glob("*.txt")):
    # What follows the rule is the transcript.
    print(path.stem, play(path.read_text().partition("\\n----\\n")[0].rstrip("\\n") + "\\n"))
"""

REUSES = """
from controller.links.slabs import Slabs

slabs = Slabs(64 << 20)
rooms = []
for _ in range(1000):
    view = slabs.room(602_112)[5:]
    rooms.append(slabs.inputs.find(view))
    del view
print(rooms, slabs.inputs.used_bytes)
held = [slabs.room(602_112) for _ in range(40)]
print([slabs.inputs.find(view) for view in held], slabs.inputs.used_bytes)
"""


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled build, and with the kit of the tests, which is not compiled."""
    target = tmp_path_factory.mktemp("build") / "native"
    native.build(target, optimise=0)
    shutil.copytree(native.ROOT / "tests/kit", target / "tests/kit")
    return target


def run(build: Path, program: str, argument: Path, *, cwd: Path) -> str:
    """Run a program with the modules of a build; returns what it said."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(argument)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(build), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_compiled_build_serves(compiled: Path, tmp_path: Path) -> None:
    assert run(compiled, SERVES, tmp_path, cwd=tmp_path).rstrip().endswith("served")


def test_the_compiled_core_decides_as_the_sources_do(compiled: Path, tmp_path: Path) -> None:
    stories = native.ROOT / "tests/core/transcripts"
    told = run(compiled, DECIDES, stories, cwd=tmp_path)
    assert len(told) > 10_000
    assert told == run(native.ROOT, DECIDES, stories, cwd=tmp_path)


def test_the_compiled_build_uses_memory_again_as_the_sources_do(
    compiled: Path, tmp_path: Path
) -> None:
    told = run(compiled, REUSES, tmp_path, cwd=tmp_path)
    assert "-1" in told
    assert told == run(native.ROOT, REUSES, tmp_path, cwd=tmp_path)
