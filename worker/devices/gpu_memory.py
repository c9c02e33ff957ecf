"""All the memory that a worker with a GPU ever needs for serving, taken at once and kept."""

from __future__ import annotations

import torch

from clockwright.errors import ConfigError
from clockwright.units import PAGE_BYTES
from worker.devices.accelerator import Accelerator
from worker.engines.torch_operators import Tensor
from worker.models.model_files import Limits

# Pages are copied and gathered as rows of the largest plain type.
_WORD_BYTES = 8


class GpuMemory:
    """The fixed places on the device and on the host; kernels are captured with their addresses."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        limits: Limits,
        io_pool_bytes: int,
        host_bytes: int,
        num_launches: int,
    ) -> None:
        """Take everything.

        Args:
            accelerator: gives the memory.
            limits: what one model may need.
            io_pool_bytes: the size of all IO slots together.
            host_bytes: the size of the host's copies of all weights together.
            num_launches: how many EXEC may be under way, each with a list of pages of its own.

        Raises:
            ConfigError: there is not enough memory.
        """
        arena_pages = -(-limits.arena_bytes // PAGE_BYTES)
        try:
            #: The weights cache, one row a page.
            self.pages = _rows(accelerator.device_memory(limits.num_pages * PAGE_BYTES))
            #: The running model's weights, gathered, in rows as well.
            self.arena = _rows(accelerator.device_memory(arena_pages * PAGE_BYTES))
            #: The IO slots.
            self.io = accelerator.device_memory(io_pool_bytes)
            #: The static batch that captured kernels read and write, laid out like an IO slot.
            self.batch = accelerator.device_memory(limits.io_bytes)
            #: The numbers of the pages that an EXEC gathers.
            self.page_list = accelerator.device_memory(arena_pages * _WORD_BYTES).view(torch.int64)
            #: The host's copies of all models' weights.
            self.host = accelerator.host_memory(host_bytes)
            # Inputs and outputs on their way. Whole pools, because a slot then has the same offset here
            # and on the device.
            self.io_in = accelerator.host_memory(io_pool_bytes)
            self.io_out = accelerator.host_memory(io_pool_bytes)
            lists = accelerator.host_memory(num_launches * arena_pages * _WORD_BYTES)
        except MemoryError as error:
            raise ConfigError(
                f"not enough memory for {limits.num_pages} pages, arena and IO: {error}"
            ) from None
        #: For each launch, the host's side of `page_list`.
        self.launch_lists = lists.view(torch.int64).view(num_launches, -1)


def _rows(memory: Tensor) -> Tensor:
    """Pages as rows of a matrix, which can be gathered by number."""
    return memory.view(torch.int64).view(-1, PAGE_BYTES // _WORD_BYTES)
