"""A GPU's clocks, bus, throttling and memory errors, as the driver reports them (NVML, by nvidia-ml-py).

Nothing here needs torch, and nothing fails when NVML is missing or a GPU does not answer: a fact is then
None. A worker reads the facts every second, and reports to its log and its controller.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from worker.devices.device import GpuHealth

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Source: nvml.h, nvmlClocksEventReasons. Idleness and clocks that an operator has set are left out.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
# The clocks of an idle GPU are low for that reason alone, and say nothing about the next EXEC.
_IDLE = 0x1
# A boosting GPU's clock wanders by one or two percent all the time, and durations with it; a larger move has
# a cause that holds the clock down. Two levels of the clock are this factor apart.
_LEVEL_STEP = 0.95
# A clock just across the border of its level still belongs to it, up to this part of a level.
_LEVEL_INERTIA = 0.2
# If a reading shows another clock, it may have changed at any time since the reading before, so measurements
# in between are dropped. A reading takes milliseconds of one core.
_WATCH_INTERVAL_S = 1.0
# Source: nvml.h, nvmlReturn_t.
_GPU_IS_LOST = 15
_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One reading of a GPU; None where the GPU does not answer."""

    name: str | None
    #: The address on the bus, written as in sysfs: 0000:3b:00.0.
    bus_id: str | None
    #: Lanes of PCIe, now and at most: an idle GPU saves power with a slower link.
    pcie_width: int | None
    pcie_width_max: int | None
    sm_clock_mhz: int | None
    sm_clock_mhz_max: int | None
    #: Whether the GPU has nothing to do; its clocks may be low for that reason alone.
    idle: bool
    #: Why the clocks are lower than they could be, in words.
    throttled: tuple[str, ...] = ()
    #: Memory errors since the driver was loaded that could not be corrected.
    uncorrected_errors: int | None = None
    #: Whether the driver says that it cannot reach the GPU any more; all other facts are then missing.
    lost: bool = False


class NvmlGpu:
    """One GPU, by NVML."""

    def __init__(self, nvml: Any, uuid: str) -> None:  # noqa: ANN401
        """Open it by torch's id, because NVML's own numbers ignore CUDA_VISIBLE_DEVICES.

        Raises NVMLError if there is no driver, or no such GPU.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        #: Whether the driver said so since the last look began.
        self._lost = False

    def look(self) -> GpuFacts:
        """Ask the driver now. Takes a few milliseconds, hundreds after a long pause."""
        nvml, gpu = self._nvml, self._handle
        self._lost = False
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
        return GpuFacts(
            name=self._ask(lambda: _text(nvml.nvmlDeviceGetName(gpu))),
            bus_id=self._ask(lambda: _sysfs_name(_text(nvml.nvmlDeviceGetPciInfo(gpu).busId))),
            pcie_width=self._ask(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu))),
            pcie_width_max=self._ask(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))),
            sm_clock_mhz=self._ask(
                lambda: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
            ),
            sm_clock_mhz_max=self._ask(
                lambda: int(nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM))
            ),
            idle=bool(reasons & _IDLE),
            throttled=tuple(word for bit, word in THROTTLE_REASONS.items() if reasons & bit),
            uncorrected_errors=self._ask(
                lambda: int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                    )
                )
            ),
            # Last, because the questions above find it out.
            lost=self._lost,
        )

    def _ask(self, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except AttributeError:  # the module does not know the question
            return None
        except self._nvml.NVMLError as error:  # the GPU does not, or it is gone
            self._lost = self._lost or getattr(error, "value", None) == _GPU_IS_LOST
            return None


def open_gpu(uuid: str) -> NvmlGpu | None:
    """Open a GPU. Returns None and logs one line if NVML is missing."""
    try:
        import pynvml
    except ImportError:
        logger.warning("no facts about the GPU: install nvidia-ml-py (clockwright[gpu])")
        return None
    try:
        return NvmlGpu(pynvml, uuid)
    except pynvml.NVMLError as error:
        logger.warning("no facts about GPU %s: %s", uuid, error)
        return None


def complaints(facts: GpuFacts) -> list[str]:
    """List in words what slows a GPU down or makes its results wrong."""
    found = [f"its clock is held down: {reason}" for reason in facts.throttled]
    if facts.lost:
        found.append("the driver cannot reach it any more: restart the host")
    if facts.uncorrected_errors:
        found.append(
            f"{facts.uncorrected_errors} memory errors could not be corrected: replace the card"
        )
    if facts.pcie_width and facts.pcie_width_max and facts.pcie_width < facts.pcie_width_max:
        found.append(f"its PCIe link has {facts.pcie_width} of {facts.pcie_width_max} lanes")
    return found


class ClockLevel:
    """The level that a clock is at, so that measurements at different levels are not mixed.

    Levels are counted down from the highest clock, so all GPUs of a kind have the same levels.
    """

    def __init__(self, max_mhz: int) -> None:
        self._max_mhz = max_mhz
        self._index = 0

    def see(self, mhz: int) -> int:
        """Take a reading in. Returns the level's clock."""
        position = math.log(min(mhz / self._max_mhz, 1.0), _LEVEL_STEP)
        if abs(position - self._index) > 0.5 + _LEVEL_INERTIA:
            self._index = round(position)
        return self.mhz

    @property
    def mhz(self) -> int:
        """The level's clock."""
        return round(self._max_mhz * _LEVEL_STEP**self._index)


class GpuMonitor:
    """Reads a GPU's facts; any thread may call it."""

    def __init__(self, gpu: NvmlGpu, *, interval_s: float = _WATCH_INTERVAL_S) -> None:
        """Look once."""
        self._gpu = gpu
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._level: ClockLevel | None = None
        self._complaints: tuple[str, ...] = ()
        #: Why the clock is held down: at the last look, and lastingly, which is what complaints name.
        self._throttled: tuple[str, ...] = ()
        self._lastingly_throttled: tuple[str, ...] = ()
        self.facts = gpu.look()
        #: For the log: a GPU that is lost no longer tells its name.
        self._bus_id, self._name = self.facts.bus_id, self.facts.name
        self._judge(self.facts)

    def look(self) -> GpuHealth:
        """Look now, and log every complaint that is new and lasts, or that has gone."""
        with self._lock:
            self.facts = self._gpu.look()
            return self._judge(self.facts)

    async def watch(self, tell: Callable[[GpuHealth], None]) -> None:
        """Read the facts every second and report them, until cancelled.

        The controller plans again at every change of level. So the first reading of a new level is held back
        until the next shows whether the level lasts. Reporting the old level meanwhile would be wrong: it would
        confirm measurements that were taken at the new one.
        """
        failed = held_back = False
        told_mhz: int | None = None
        while True:
            try:
                health = await asyncio.to_thread(self.look)
            except Exception:  # the driver's module may raise anything about a sick GPU
                if not failed:
                    failed = True
                    logger.exception("GPU %s: cannot be looked at; trying again", self._bus_id)
            else:
                held_back = not held_back and told_mhz not in (None, health.clock_mhz)
                if not held_back:
                    told_mhz = health.clock_mhz
                    tell(health)
            await asyncio.sleep(self._interval_s)

    def _judge(self, facts: GpuFacts) -> GpuHealth:
        # Throttling comes and goes: a reason lasts if two of three views name it. Other complaints do not
        # flicker.
        views = (self._lastingly_throttled, self._throttled, facts.throttled)
        self._throttled = facts.throttled
        self._lastingly_throttled = tuple(
            words
            for words in THROTTLE_REASONS.values()
            if sum(words in view for view in views) >= 2
        )
        found = tuple(complaints(replace(facts, throttled=self._lastingly_throttled)))
        for words in found:
            if words not in self._complaints:
                logger.error("GPU %s (%s): %s", self._bus_id, self._name, words)
        for words in self._complaints:
            if words not in found:
                logger.warning("GPU %s (%s): no more: %s", self._bus_id, self._name, words)
        self._complaints = found
        if self._level is None and facts.sm_clock_mhz_max:
            self._level = ClockLevel(facts.sm_clock_mhz_max)
        if self._level is None:
            return GpuHealth(0, 0, found)
        if facts.sm_clock_mhz and not facts.idle:
            self._level.see(facts.sm_clock_mhz)
        return GpuHealth(self._level.mhz, facts.sm_clock_mhz_max or 0, found)


def near_cores(bus_id: str, *, devices: Path = _PCI_DEVICES) -> set[int]:
    """The cores whose memory is near a GPU, by its bus id; empty when the system does not say."""
    try:
        text = (devices / bus_id.lower() / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def stay_near(facts: GpuFacts, *, devices: Path = _PCI_DEVICES) -> None:
    """Keep this thread, and those that it will start, on the cores near the GPU, if any are known."""
    cores = near_cores(facts.bus_id, devices=devices) if facts.bus_id else set()
    allowed = cores & os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if allowed:
        os.sched_setaffinity(0, allowed)


def _text(value: str | bytes) -> str:
    # Older versions of the module return bytes.
    return value.decode() if isinstance(value, bytes) else value


def _sysfs_name(bus_id: str) -> str:
    """A bus id as sysfs writes it: NVML gives the domain eight digits, sysfs four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
