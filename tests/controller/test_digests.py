"""Files that have not changed are not read again."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from controller.models.digests import FileDigests
from controller.models.model_folder import read_versions
from controller.models.state_file import StateFile, keep_digests, read_digests

LIE = "0" * 64


def settled(path: Path, data: bytes) -> Path:
    """Write a file whose last change is past."""
    path.write_bytes(data)
    while time.time_ns() - path.stat().st_ctime_ns < 300_000_000:
        time.sleep(0.05)
    return path


def test_a_file_that_is_as_it_was_is_not_read_and_one_that_changed_is(tmp_path: Path) -> None:
    path = settled(tmp_path / "file", b"one")
    first = FileDigests()
    assert first.of(path) == (hashlib.sha256(b"one").hexdigest(), 3)
    (identity,) = first.seen
    # What it is told is what it says: it did not look.
    assert FileDigests({identity: LIE}).of(path) == (LIE, 3)
    times = path.stat()
    settled(path, b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert FileDigests({identity: LIE}).of(path) == (hashlib.sha256(b"two").hexdigest(), 3)


def test_a_file_that_may_still_change_unseen_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "file"
    digests = FileDigests()
    # As if it were written this moment, whatever the machine does meanwhile.
    looked_ns = time.time_ns()
    path.write_bytes(b"one")
    digests.of(path)
    if time.time_ns() - looked_ns < 50_000_000:
        assert not digests.seen


def test_the_state_file_keeps_what_was_seen_last(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    settled(folder / "1" / "model.onnx", b"onnx")
    digests = FileDigests()
    read = read_versions(folder, digests)[-1]
    state = StateFile(tmp_path / "state.sqlite")
    for kept in ({"gone": LIE}, digests.seen):
        state.thread.submit(keep_digests, state.connection, kept).result()
    known = state.thread.submit(read_digests, state.connection).result()
    assert known == digests.seen
    state.thread.submit(state.connection.close).result()
    state.thread.shutdown()
    assert read_versions(folder, FileDigests(known))[-1] == read
