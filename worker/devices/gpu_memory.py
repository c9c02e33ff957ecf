"""All the memory that serving on a GPU needs, allocated at start."""

from __future__ import annotations

import logging

import torch

from clockwright.errors import ConfigError
from clockwright.units import PAGE_BYTES
from worker.devices.accelerator import Accelerator
from worker.engines.torch_operators import Tensor
from worker.models.model_files import Limits

logger = logging.getLogger(__name__)

# The paper's engine has 512 MB. Here rehearsals keep as much as captured kernels do, and at batch 16 some
# networks have two layers' outputs of 200 MB each at a time: reckoned, not measured.
_WORKSPACE_BYTES_MIN, _WORKSPACE_PART = 2 << 30, 16
# Instantiated graphs, cuDNN's and cuBLAS's kernels, onnxruntime's arena: torch knows of none of them.
_UNSEEN_PART = 32
# Pages are gathered as rows of the largest type: for up to 16 of them torch's kernel (`index_select`) moves a word per
# thread and step, and counts in 64 bits from 2**31 words in the cache on, which are 32 GiB of these. (A copy per page
# would need no list; but each would be a node to change, and might wait in a copy engine for a LOAD's pages.)
_WORD = torch.complex128
_NUMBER_BYTES = 8


def workspace_limit(accelerator: Accelerator, wanted: int | None) -> int:
    """The bytes that captured kernels may take for their intermediates: as configured, or a part of the card."""
    if wanted is not None:
        return wanted
    return max(_WORKSPACE_BYTES_MIN, (accelerator.total_bytes() or 0) // _WORKSPACE_PART)


def pages_that_fit(
    accelerator: Accelerator, *, arena_bytes: int, io_bytes: int, workspace_bytes: int
) -> int:
    """How many pages fit on a card with memory of its own, when everything else has its room.

    Raises ConfigError if not one page fits.
    """
    free, total = accelerator.free_bytes(), accelerator.total_bytes()
    assert free is not None
    assert total is not None
    others = {
        "the arena": arena_bytes,
        "IO": io_bytes,
        "workspace": workspace_bytes,
        "graphs and libraries": total // _UNSEEN_PART,
    }
    words = ", ".join(f"{num_bytes >> 20} MiB for {what}" for what, num_bytes in others.items())
    pages = (free - sum(others.values())) // PAGE_BYTES
    if pages < 1:
        raise ConfigError(
            f"{accelerator.name}: {free >> 20} MiB are free, too little for a page and {words}"
        )
    logger.info(
        "%s: the weights cache takes %d pages, %d MiB of %d MiB that are free: %s are left",
        accelerator.name,
        pages,
        pages * PAGE_BYTES >> 20,
        free >> 20,
        words,
    )
    return pages


class GpuMemory:
    """The fixed places on the device and on the host; kernels are captured with their addresses."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        limits: Limits,
        io_pool_bytes: int,
        host_bytes: int,
        host_file: int | None = None,
    ) -> None:
        """Allocate everything: for one model, for all IO slots, and on the host for copies of all weights.

        These lie in the file in memory, if other workers share it. Raises ConfigError if the memory does not suffice.
        """
        arena_pages = -(-limits.arena_bytes // PAGE_BYTES)
        try:
            #: The weights cache, one row a page.
            self.pages = rows_of_pages(accelerator.device_memory(limits.num_pages * PAGE_BYTES))
            #: The running model's weights, gathered, in rows as well.
            self.arena = rows_of_pages(accelerator.device_memory(arena_pages * PAGE_BYTES))
            #: The IO slots.
            self.io = accelerator.device_memory(io_pool_bytes)
            #: The static batch that captured kernels read and write, laid out like an IO slot.
            self.batch = accelerator.device_memory(limits.io_bytes)
            lists = accelerator.device_memory((limits.num_pages + 1) * arena_pages * _NUMBER_BYTES)
            #: The host's copies of all models' weights.
            self.host = accelerator.host_memory(host_bytes, host_file)
            # Inputs and outputs on their way. Whole pools, because a slot then has the same offset here
            # and on the device.
            self.io_in = accelerator.host_memory(io_pool_bytes)
            self.io_out = accelerator.host_memory(io_pool_bytes)
            load_list = accelerator.host_memory(arena_pages * _NUMBER_BYTES)
        except MemoryError as error:
            raise ConfigError(
                f"not enough memory for {limits.num_pages} pages, arena and IO: {error}; "
                "start with less host memory, or fewer pages"
            ) from None
        # The numbers of the pages that an EXEC gathers; and, for each page, those of the model that begins there.
        # An EXEC finds them on the device: in the copy engine it would wait behind the pages of a LOAD.
        self.page_list, *self.page_lists = lists.view(torch.int64).view(-1, arena_pages)
        #: Those of a model that is being loaded.
        self.load_list = load_list.view(torch.int64)


def rows_of_pages(memory: Tensor) -> Tensor:
    """Pages as rows of a matrix, which can be gathered by number."""
    return memory.view(_WORD).view(-1, PAGE_BYTES // _WORD.itemsize)
