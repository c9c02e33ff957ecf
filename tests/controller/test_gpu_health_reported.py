"""A worker's report on its GPU reaches the scheduler and the operator: real streams, a driver of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from clockwright.cli.show import print_status
from clockwright.client.operator import Operator
from clockwright.v1 import control_pb2 as pb
from controller.process.app import running
from controller.process.config import ControllerConfig
from tests.kit.nvml import driver
from tests.kit.processes import write_models
from tests.kit.worker_models import IO_POOL_BYTES, LIMITS
from worker.action_thread import ActionThread
from worker.config import WorkerConfig
from worker.devices.accelerator import HostAccelerator
from worker.devices.gpu import TorchDevice
from worker.devices.gpu_health import GpuMonitor, NvmlGpu
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.precision import Precision

LIMIT_S = 200
COMPLAINT = "its clock is held down: power cap"


def test_a_throttled_card_is_told_to_scheduler_and_operator_and_so_is_its_recovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", tiny="tiny_conv")
    nvml = driver()

    async def test() -> None:
        async with running(
            ControllerConfig(port=0, models_dir=models, heartbeat_interval_ms=20)
        ) as controller:
            address = f"127.0.0.1:{controller.port}"
            files = FileStore(tmp_path / "cache")
            device = TorchDevice(
                HostAccelerator(),
                limits=LIMITS,
                io_pool_bytes=IO_POOL_BYTES,
                host_bytes=16 << 20,
                precision=Precision.FLOAT32,
                files=files,
                cache_dir=tmp_path / "cache",
                compile_limit_s=LIMIT_S,
                on_lost=lambda reason: None,
                monitor=GpuMonitor(NvmlGpu(nvml, "GPU-1"), interval_s=0.01),
            )
            config = WorkerConfig(controller=address, cache_dir=tmp_path / "cache")
            actions = ActionThread()
            worker = ControllerLink(config, device, files, actions)
            serving = asyncio.create_task(worker.run())
            with Operator(address) as operator:

                async def until(is_so: Callable[[pb.WorkerInfo], bool]) -> pb.WorkerInfo:
                    while True:
                        for info in await asyncio.to_thread(operator.workers):
                            if is_so(info):
                                return info
                        assert not serving.done(), serving.result()
                        await asyncio.sleep(0.01)

                def exec_ns() -> int:
                    (model,) = controller.runtime.statistics().models
                    return model.exec_ns[1]

                try:
                    well = await until(
                        lambda info: controller.catalogue.ready and info.clock_mhz == 1980
                    )
                    assert not well.complaints
                    seed_ns = exec_ns()
                    nvml.nvmlDeviceGetClockInfo = lambda *_: 960
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda *_: 0x4
                    unwell = await until(lambda info: bool(info.complaints))
                    assert (unwell.clock_mhz, unwell.clock_mhz_max) == (966, 1980)
                    assert list(unwell.complaints) == [COMPLAINT]
                    assert exec_ns() == int(seed_ns * (1980 / 966))
                    print_status(await asyncio.to_thread(operator.status), [unwell])
                    nvml.nvmlDeviceGetClockInfo = lambda *_: 1980
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda *_: 0
                    await until(lambda info: info.clock_mhz == 1980 and not info.complaints)
                    assert exec_ns() == seed_ns
                finally:
                    worker.leave()
                    await asyncio.wait([serving])
                    await device.close()
                    actions.close()

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))
    told = capsys.readouterr().out
    assert f"its GPU is unwell: {COMPLAINT}" in told
    assert "at 966 of 1980 MHz" in told
