"""The host's copies of weights, which the workers of one host share: each lies there once, whoever is killed."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from clockwright.errors import ModelError
from worker.devices.host_memory import present_memory
from worker.devices.host_weights import TABLE_BYTES, HostWeightsStore
from worker.models.model_files import WEIGHTS_FILE, CompiledModel

KIB = 1 << 10
ROOM = 16 * KIB

# A worker that has one model's weights and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from tests.worker.test_host_weights import store_of, weights
held = store_of(Path(sys.argv[1])).get(*weights(Path(sys.argv[2]), sys.argv[3], 8))
print(int(held.memory[0]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    file = os.memfd_create("test")
    os.ftruncate(file, ROOM + TABLE_BYTES)
    yield Path(f"/proc/{os.getpid()}/fd/{file}")
    os.close(file)


def store_of(path: Path) -> HostWeightsStore:
    file = os.open(path, os.O_RDWR)
    memory = present_memory(ROOM + TABLE_BYTES, file=file)
    return HostWeightsStore(torch.frombuffer(memory, dtype=torch.uint8)[: ROOM + TABLE_BYTES], file)


def weights(folder: Path, name: str, kib: int) -> tuple[Path, CompiledModel]:
    """Weights that all consist of their name's first letter."""
    blob = name[0].encode() * (kib * KIB)
    target = folder / name
    target.mkdir(exist_ok=True)
    (target / WEIGHTS_FILE).write_bytes(blob)
    digest = hashlib.sha256(blob).hexdigest()
    return target, CompiledModel("", digest, len(blob), (), ())


def is_filled(memory: torch.Tensor, letter: str) -> bool:
    return bool(np.all(memory.numpy() == ord(letter)))


def test_workers_read_the_same_weights_once(shared: Path, tmp_path: Path) -> None:
    one, other = store_of(shared), store_of(shared)
    held = one.get(*weights(tmp_path, "a", 4))
    folder, model = weights(tmp_path, "a", 4)
    (folder / WEIGHTS_FILE).unlink()
    again = other.get(folder, model)
    assert is_filled(held.memory, "a")
    assert is_filled(again.memory, "a")
    held.memory[0] = 7
    assert again.memory[0] == 7


@pytest.mark.parametrize("alone", [True, False])
def test_weights_stay_until_their_room_is_needed_and_no_worker_holds_them(
    alone: bool, shared: Path, tmp_path: Path
) -> None:
    if alone:
        one = other = HostWeightsStore(torch.zeros(ROOM, dtype=torch.uint8))
    else:
        one, other = store_of(shared), store_of(shared)
    held = one.get(*weights(tmp_path, "a", 8))
    unneeded = one.get(*weights(tmp_path, "b", 8))
    with pytest.raises(ModelError, match=rf"no room for {8 * KIB} bytes .* {ROOM} bytes for all"):
        other.get(*weights(tmp_path, "c", 8))
    del unneeded
    gc.collect()
    # Its store unlocks what is not needed when it is asked the next time.
    folder, model = weights(tmp_path, "b", 8)
    (folder / WEIGHTS_FILE).unlink()
    again = one.get(folder, model)
    assert is_filled(again.memory, "b")
    del again
    gc.collect()
    assert one.get(*weights(tmp_path, "a", 8)) is held
    one._drop_unused()
    newer = other.get(*weights(tmp_path, "c", 8))
    assert is_filled(newer.memory, "c")
    assert is_filled(held.memory, "a")


def test_a_file_that_was_cut_off_is_refused_and_nothing_else_takes_its_bytes(
    shared: Path, tmp_path: Path
) -> None:
    one, other = store_of(shared), store_of(shared)
    folder, model = weights(tmp_path, "a", 8)
    os.truncate(folder / WEIGHTS_FILE, KIB)
    with pytest.raises(ModelError, match=f"found {KIB} bytes, expected {8 * KIB}"):
        one.get(folder, model)
    assert is_filled(other.get(*weights(tmp_path, "a", 8)).memory, "a")


def test_a_killed_worker_leaves_its_weights_to_the_others(shared: Path, tmp_path: Path) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(shared), str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in "ab"
    ]
    try:
        for holder, letter in zip(holders, b"ab", strict=True):
            assert holder.stdout is not None
            assert int(holder.stdout.readline()) == letter
        store = store_of(shared)
        with pytest.raises(ModelError, match="no room"):
            store.get(*weights(tmp_path, "c", 8))
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        first = store.get(*weights(tmp_path, "a", 8))
        with pytest.raises(ModelError, match="no room"):
            store.get(*weights(tmp_path, "c", 8))
        holders[1].send_signal(signal.SIGKILL)
        holders[1].wait()
        third = store.get(*weights(tmp_path, "c", 8))
        assert is_filled(first.memory, "a")
        assert is_filled(third.memory, "c")
    finally:
        for holder in holders:
            with holder:
                holder.kill()


def test_what_a_worker_was_writing_when_it_was_killed_counts_for_nothing(
    shared: Path, tmp_path: Path
) -> None:
    dead = store_of(shared)
    # Half of the weights, and half of an entry: `is_there` is written last.
    dead._memory[: 4 * KIB] = ord("x")
    dead._table[0]["sha256"], dead._table[0]["end"] = (
        weights(tmp_path, "a", 16)[1].weights_sha256,
        3,
    )
    dead._lock(1, ROOM, ROOM + 1)
    dead.close()
    store = store_of(shared)
    held = store.get(*weights(tmp_path, "a", 16))
    assert is_filled(held.memory, "a")
