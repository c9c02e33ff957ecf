"""Which memory of a process is moved into huge pages, and how it comes to lie together."""

from __future__ import annotations

import ast
import subprocess
import sys

from clockwright.process import _HUGE_BYTES as HUGE
from clockwright.process import _pieces_in_use

SMAPS = """\
55e300000000-55e300a00000 rw-p 00000000 00:00 0                          [heap]
Size:              10240 kB
Rss:                9000 kB
VmFlags: rd wr mr mw me ac
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                1024 kB
7f1000000000-7f1000800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                 200 kB
7f1800000000-7f1820000000 rw-p 00000000 00:00 0
Size:             524288 kB
Rss:              524288 kB
7f2000000000-7f2000400000 r-xp 00000000 fe:00 260131                     /usr/lib/libpython3.11.so
Size:               4096 kB
Rss:                4096 kB
7f3000000000-7f3000400000 rw-s 00000000 00:01 77                         /memfd:clockwright-inputs (deleted)
Size:               4096 kB
Rss:                4096 kB
7ffe00000000-7ffe00800000 rw-p 00000000 00:00 0                          [stack]
Size:               8192 kB
Rss:                4096 kB
"""


def test_the_heap_and_pieces_in_use_are_found_but_no_stack_no_file_no_weights_and_nothing_shared() -> (
    None
):
    assert list(_pieces_in_use(SMAPS)) == [
        (0x55E300000000, 0x55E300A00000),
        (0x7F0000000000, 0x7F0000400000),
    ]


def pieces_after(call: str) -> list[tuple[int, int]]:
    """The pieces that a new process has after a call. Places are not drawn, so that all processes have the same gaps."""
    program = f"""
from pathlib import Path
from clockwright.process import _pieces_in_use, keep_together
{call}
print(list(_pieces_in_use(Path("/proc/self/smaps").read_text())))
"""
    not_drawn = "import ctypes, os, sys; ctypes.CDLL(None).personality(0x40000);"
    not_drawn += "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", not_drawn, program], capture_output=True, text=True
    )
    found: list[tuple[int, int]] = ast.literal_eval(done.stdout)
    return found


def test_memory_that_is_kept_together_stays_and_has_room_for_huge_pages() -> None:
    """How large the gaps are that the kernel fills first depends on what else is mapped, and differs by machine."""
    usual, kept = pieces_after(""), pieces_after("keep_together()")
    mib = [sum(end - begin for begin, end in pieces) >> 20 for pieces in (usual, kept)]
    assert mib[1] >= mib[0] + 20
    huge = [sum(max(e // HUGE + -b // HUGE, 0) for b, e in pieces) for pieces in (usual, kept)]
    assert huge[1] >= huge[0] + 2
