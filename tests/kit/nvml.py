"""A stand-in for NVML, and what a watch over it tells."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from worker.devices.device import GpuHealth, WatchedDevice


class NotSupportedError(Exception):
    pass


def driver(**answers: Any) -> Any:  # noqa: ANN401
    """NVML of a card in good health, but for what is said otherwise."""
    facts: dict[str, Any] = {
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,  # idle, which is no complaint
        "nvmlDeviceGetName": b"NVIDIA A GPU",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:3B:00.0"),
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetTotalEccErrors": 0,
        **answers,
    }

    def answer(value: object) -> Any:  # noqa: ANN401
        def function(*arguments: object) -> object:
            if isinstance(value, Exception):
                raise value
            return value

        return function

    functions = {name: answer(value) for name, value in facts.items() if value is not None}
    return SimpleNamespace(
        NVMLError=NotSupportedError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        **functions,
    )


def told_by(watched: WatchedDevice, count: int) -> list[GpuHealth]:
    """What a watch tells first."""
    told: list[GpuHealth] = []

    async def scenario() -> None:
        enough = asyncio.Event()

        def tell(health: GpuHealth) -> None:
            told.append(health)
            if len(told) == count:
                enough.set()

        task = asyncio.create_task(watched.watch(tell))
        await asyncio.wait(
            [task, waiting := asyncio.create_task(enough.wait())], return_when="FIRST_COMPLETED"
        )
        waiting.cancel()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    return told[:count]
