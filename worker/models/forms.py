"""Forms of a model with an open dimension: the sizes that a GPU has kernels for, and which rows run together in which.

A GPU's kernels have fixed shapes, so rows are padded to the next form, where that changes no answer. No I/O, no arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from worker.models.model_files import OpenSizes, powers_and_halves

#: `OpenSizes.room`, because tensors lie in a batch padded.
PADDED_ROOM = 3
# A run has at most so many times the elements of its rows: less, as tensors do not grow with elements alone.
_PADDED_MAX = 2.5
# To hand one more run over takes the host so long.
_LAUNCH_NS = 50_000


def forms_of(sizes: OpenSizes) -> tuple[int, ...]:
    """The sizes with kernels, ascending: powers of two, halves between, and the largest size.

    The smallest is what a row counts as at least. So there are at most 16, however large the largest is.
    """
    (least,), (largest,) = sizes.taken[0], sizes.taken[-1]
    least = max(least, sizes.least_elements)
    return tuple(sorted({*(size for size in powers_and_halves(largest) if size >= least), largest}))


def row_counts(form: int, elements: int) -> list[int]:
    """The rows of a form's kernels: powers of two, as far as a batch of so many elements may hold them."""
    return [1 << power for power in range((elements // form).bit_length())]


class FormRun(NamedTuple):
    """One run of a form's kernel, with some of the rows of a batch."""

    form: int
    #: Those of the kernel; behind the batch's there are zeros.
    rows: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FormTimes:
    """How long the kernels take, and what follows from that."""

    #: By form, ascending, and by rows; in ns.
    exec_ns: Mapping[int, Mapping[int, int]]
    #: What a gather of the weights takes, once for each batch.
    gather_ns: int
    #: A row counts as so many elements at least.
    least: int

    def form_of(self, size: int) -> int | None:
        """The form that a row is padded to; None: it is too large, or too small by far."""
        forms = list(self.exec_ns)
        index = bisect_left(forms, size)
        if index == len(forms) or forms[index] > _PADDED_MAX * max(size, self.least):
            return None
        return forms[index]

    def plan(self, sizes: Sequence[int]) -> tuple[int, list[FormRun]]:
        """Divide rows among runs, so that all together take the least time.

        Rows of several forms share a run where one more run would take longer than the padding.

        Args:
            sizes: of the rows, the largest first; each has a form.

        Returns:
            How long the runs take in ns, and the runs in the order of the rows.
        """
        count = len(sizes)
        elements = [0, *accumulate(max(size, self.least) for size in sizes)]
        # For the rows from one on to the last: the time, and the first run.
        best: list[tuple[int, FormRun | None]] = [(0, None)] * (count + 1)
        for begin in reversed(range(count)):
            form = self.form_of(sizes[begin])
            assert form is not None
            options = []
            for rows, exec_ns in self.exec_ns[form].items():
                end = min(begin + rows, count)
                if rows == 1 or rows * form <= _PADDED_MAX * (elements[end] - elements[begin]):
                    total_ns = exec_ns + _LAUNCH_NS + best[end][0]
                    options.append((total_ns, FormRun(form, rows, begin, end)))
            best[begin] = min(options)
        runs, begin = [], 0
        while (run := best[begin][1]) is not None:
            runs.append(run)
            begin = run.end
        return self.gather_ns + best[0][0], runs

    def estimates(self, unit: int, batch_sizes: Sequence[int]) -> dict[int, int]:
        """How long batches take, by rows of work of so many elements; the longest of some that fill them.

        They are filled by rows of one form, as small as it has them, and by such rows of all forms in equal parts.
        """
        forms = list(self.exec_ns)
        least = max(self.least, int(forms[0] / _PADDED_MAX))
        smallest = [least, *(form + 1 for form in forms[:-1])]
        found, longest_ns = {}, 0
        for work in sorted(batch_sizes):
            fit = [size for size in reversed(smallest) if size <= work * unit] or [least]
            share = work * unit // len(fit)
            fills = [[size] * max(work * unit // size, 1) for size in fit]
            fills.append([size for size in fit for _ in range(share // size)])
            longest_ns = max(longest_ns, *(self.plan(sizes)[0] for sizes in fills))
            found[work] = longest_ns
        return found
