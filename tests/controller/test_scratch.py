"""What goes with the process goes also when the process was killed, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from controller.process.scratch import clear_left_behind, scratch_folder

HOLDING = """
import time
from controller.process.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_goes_with_its_process_or_with_the_next_one(tmp_path: Path) -> None:
    others = tmp_path / "clockwright-run-but-a-file"
    others.touch()
    with scratch_folder() as ours:
        with subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            theirs = Path(os.fsdecode(holder.stdout.readline().strip()))
            assert theirs.parent == tmp_path
            clear_left_behind()
            assert (theirs / "file").exists()
            holder.kill()
            holder.wait()
        clear_left_behind()
        assert not theirs.exists()
        assert ours.exists()
    assert list(tmp_path.iterdir()) == [others]
