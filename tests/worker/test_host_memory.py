"""The host's memory for weights: how much there is, that all of it is there, that the driver knows it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from worker.devices import host_memory
from worker.devices.cuda import LockedMemory
from worker.devices.host_memory import available_bytes, present_memory

MIB = 1 << 20


def system(root: Path, files: dict[str, str]) -> Path:
    """A file system that says this, and nothing else."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(mib: int) -> str:
    return f"MemTotal:       99999999 kB\nMemFree:               1 kB\nMemAvailable:   {mib * 1024} kB\n"


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({}, None),
        ({"proc/meminfo": meminfo(700)}, 700),
        # No limit anywhere: the machine's.
        (
            {
                "proc/meminfo": meminfo(700),
                "proc/self/cgroup": "0::/user.slice/one\n",
                "sys/fs/cgroup/user.slice/one/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/one/memory.current": "12345\n",
            },
            700,
        ),
        # A group's own limit, of which the page cache takes a part that it gives back.
        (
            {
                "proc/meminfo": meminfo(700),
                "proc/self/cgroup": "0::/one\n",
                "sys/fs/cgroup/one/memory.max": f"{500 * MIB}\n",
                "sys/fs/cgroup/one/memory.current": f"{300 * MIB}\n",
                "sys/fs/cgroup/one/memory.stat": (
                    f"anon 1\ninactive_file {50 * MIB}\nactive_file {20 * MIB}\nslab 2\n"
                ),
            },
            270,
        ),
        # The group around it has less, and is already beyond its limit.
        (
            {
                "proc/meminfo": meminfo(700),
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/inner/memory.max": f"{500 * MIB}\n",
                "sys/fs/cgroup/outer/inner/memory.current": f"{100 * MIB}\n",
                "sys/fs/cgroup/outer/inner/memory.stat": "inactive_file 0\n",
                "sys/fs/cgroup/outer/memory.max": f"{200 * MIB}\n",
                "sys/fs/cgroup/outer/memory.current": f"{201 * MIB}\n",
                "sys/fs/cgroup/outer/memory.stat": "inactive_file 0\n",
            },
            0,
        ),
        # In a container: the path is the host's, the files are at the base.
        (
            {
                "proc/self/cgroup": "0::/../../pod7/one\n",
                "sys/fs/cgroup/memory.max": f"{500 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{300 * MIB}\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
            },
            200,
        ),
        # Version 1, beside controllers that say nothing of memory.
        (
            {
                "proc/meminfo": meminfo(700),
                "proc/self/cgroup": "5:cpu,cpuacct:/one\n4:memory:/one\n0::/\n",
                "sys/fs/cgroup/memory/one/memory.limit_in_bytes": f"{400 * MIB}\n",
                "sys/fs/cgroup/memory/one/memory.usage_in_bytes": f"{300 * MIB}\n",
                "sys/fs/cgroup/memory/one/memory.stat": (
                    "inactive_file 1\nactive_file 2\n"
                    f"total_inactive_file {20 * MIB}\ntotal_active_file {5 * MIB}\n"
                ),
            },
            125,
        ),
    ],
)
def test_memory_is_what_the_machine_and_every_group_around_us_grant(
    files: dict[str, str], mib: int | None, tmp_path: Path
) -> None:
    found = available_bytes(system(tmp_path, files))
    assert found == (None if mib is None else mib * MIB)


def test_this_machine_says_how_much_it_has() -> None:
    found = available_bytes()
    assert found is None or found > 0


def resident_pages(mapping: mmap.mmap) -> int:
    """How many pages of a mapping are in memory, by the kernel's own count."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    flags = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), flags)
    assert status == 0, os.strerror(ctypes.get_errno())
    return sum(flag & 1 for flag in flags)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_every_page_is_there_before_it_is_used(
    old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        # Advice that no kernel knows, as this one is to those before 5.14.
        monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 12345)
    # In pieces, the last of them smaller.
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 2 * MIB)
    mapping = present_memory(5 * MIB + 1)
    num_pages = 5 * MIB // mmap.PAGESIZE + 1
    assert len(mapping) == num_pages * mmap.PAGESIZE
    assert resident_pages(mapping) == num_pages
    assert not np.frombuffer(mapping, np.uint8).any()


GROUP_OF_9_MIB = {
    "proc/self/cgroup": "0::/one\n",
    "sys/fs/cgroup/one/memory.max": f"{9 * MIB}\n",
    "sys/fs/cgroup/one/memory.current": "0\n",
    "sys/fs/cgroup/one/memory.stat": "",
}


def test_more_than_a_group_grants_is_refused_before_any_of_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_map", None)
    root = system(tmp_path, {"proc/meminfo": meminfo(700), **GROUP_OF_9_MIB})
    with pytest.raises(MemoryError, match=r"^10 MiB of the host's memory are needed, 9 MiB are"):
        present_memory(10 * MIB, root=root)


def test_a_machine_that_gets_memory_as_it_is_taken_gives_all_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = system(tmp_path, {"proc/meminfo": meminfo(5)})
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 2 * MIB)
    monkeypatch.setattr(host_memory, "_SPARE_BYTES", 1 * MIB)
    # It has five again whenever somebody looks a second time.
    left = iter([5, 2, 5, 0, 5, 3, 4])

    def grow(seconds: float) -> None:
        system(tmp_path, {"proc/meminfo": meminfo(next(left))})

    taken: list[int] = []

    def take(mapping: mmap.mmap, begin: int, num_bytes: int) -> None:
        taken.append(num_bytes // MIB)
        grow(0.0)

    monkeypatch.setattr(host_memory, "_take", take)
    monkeypatch.setattr("time.sleep", grow)
    assert len(present_memory(9 * MIB, root=root)) == 9 * MIB
    assert taken == [2, 2, 2, 2, 1]


def test_a_machine_that_gets_no_more_memory_is_left_with_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = system(tmp_path, {"proc/meminfo": meminfo(5)})
    monkeypatch.setattr(host_memory, "_GROWTH_S", 0.0)
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 2 * MIB)
    monkeypatch.setattr(host_memory, "_SPARE_BYTES", 1 * MIB)
    left = iter([3, 2])
    monkeypatch.setattr(
        host_memory, "_take", lambda *_: system(tmp_path, {"proc/meminfo": meminfo(next(left))})
    )
    words = "^9 MiB of the host's memory are needed; after 4 MiB there are 2 MiB left, and 1 MiB of them stay"
    with pytest.raises(MemoryError, match=words):
        present_memory(9 * MIB, root=root)


@pytest.mark.parametrize(
    "num_bytes",
    [1 << 62, 1 << 80],  # more than addresses; more than a size
)
def test_what_cannot_be_mapped_is_an_error_in_words(num_bytes: int, tmp_path: Path) -> None:
    # The root says nothing, so nothing is refused beforehand.
    with pytest.raises(MemoryError, match=r"^\d+ MiB of the host's memory: "):
        present_memory(num_bytes, root=tmp_path)


def test_memory_that_ends_while_it_is_taken_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Exhausted(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "_map", lambda size, file: Exhausted(-1, size))
    with pytest.raises(MemoryError, match=r"^1 MiB of the host's memory: .*Cannot allocate memory"):
        present_memory(MIB, root=tmp_path)


def test_the_driver_knows_all_of_it_and_forgets_it_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: dict[int, int] = {}
    answers = iter([0, 0, 2])

    def register(address: int, num_bytes: int, flags: int) -> int:
        registered[address] = num_bytes
        return next(answers)

    driver: Any = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: registered.pop(address)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    locked = LockedMemory()
    taken = [locked.take(num_bytes) for num_bytes in (MIB, 100)]
    assert [memory.nbytes for memory in taken] == [MIB, 100]
    # Whole pages: the driver locks nothing smaller.
    assert registered == {taken[0].data_ptr(): MIB, taken[1].data_ptr(): mmap.PAGESIZE}
    kept = dict(registered)
    # A kernel takes the error away that the runtime keeps.
    swallowed: list[object] = []
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **_: swallowed.append(arguments))
    with pytest.raises(MemoryError, match=r"cannot lock 3 MiB of host memory \(error 2\)"):
        locked.take(3 * MIB)
    assert len(swallowed) == 1
    registered.clear()
    registered.update(kept)
    locked.close()
    assert registered == {}
    taken[0][:] = 7  # still memory of ours
