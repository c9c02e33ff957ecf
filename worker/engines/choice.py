"""Lists in which ways a GPU can run a compiled graph, and chooses between them.

Plain data: nothing here needs torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from clockwright.errors import ConfigError
from clockwright.units import format_ns
from worker.models.precision import Precision


class Engine(enum.Enum):
    """What runs models on a GPU."""

    #: The engine that is measured to be the fastest, per architecture and batch size.
    AUTO = "auto"
    TORCH = "torch"
    ONNXRUNTIME = "onnxruntime"


class Way(enum.Enum):
    """How a graph can be run; of two equally fast ways the first is taken."""

    #: Convolutions joined with the ReLUs and additions behind them.
    TORCH_JOINED = "torch"
    #: Convolutions alone. cuDNN has a joint kernel for most shapes only, and it is not always faster.
    TORCH_APART = "torch, convolutions apart"
    ONNXRUNTIME = "onnxruntime"

    @property
    def engine(self) -> Engine:
        """The engine of this way."""
        return Engine.ONNXRUNTIME if self is Way.ONNXRUNTIME else Engine.TORCH


# Measurements this close count as equal, or workers of one kind would choose by chance.
_NOISE = 0.02


def parse_engine(name: str) -> Engine:
    """Find an engine by its name. Raises ConfigError if no engine has that name."""
    try:
        return Engine(name)
    except ValueError:
        expected = ", ".join(each.value for each in Engine)
        raise ConfigError(f"engine: found {name!r}, expected one of {expected}") from None


def ways_to_try(
    engine: Engine, precision: Precision, *, on_host: bool, has_onnxruntime: bool
) -> tuple[Way, ...]:
    """List the ways that are measured before one is chosen.

    Args:
        engine: the configured engine.
        precision: the models' arithmetic. onnxruntime wants weights and activations as the ONNX file
            has them, so it runs float32 alone.
        on_host: whether a processor computes. There joining only saves memory traffic, so there is
            nothing to find out.
        has_onnxruntime: whether onnxruntime can compute on the device.

    Raises:
        ConfigError: the engine cannot run such models here.
    """
    plain = precision is Precision.FLOAT32
    if engine is Engine.ONNXRUNTIME and not plain:
        raise ConfigError(
            f"engine 'onnxruntime': found precision {precision.value!r}, expected 'float32'"
        )
    if engine is Engine.ONNXRUNTIME and not has_onnxruntime:
        raise ConfigError(
            "engine 'onnxruntime': found no onnxruntime that computes on this device; expected "
            "onnxruntime-gpu (clockwright[gpu-ort]) without onnxruntime"
        )
    ways: list[Way] = []
    if engine is not Engine.ONNXRUNTIME:
        ways += [Way.TORCH_JOINED] if on_host else [Way.TORCH_JOINED, Way.TORCH_APART]
    if engine is not Engine.TORCH and plain and has_onnxruntime:
        ways.append(Way.ONNXRUNTIME)
    return tuple(ways)


def fastest(exec_ns: Mapping[Way, int]) -> Way:
    """Choose the first way that is as fast as any; `exec_ns` holds at least one."""
    limit_ns = min(exec_ns.values()) * (1 + _NOISE)
    return next(way for way in Way if way in exec_ns and exec_ns[way] <= limit_ns)


def describe(exec_ns: Mapping[Way, int | None]) -> str:
    """Put measurements into words; None is a way that does not work."""
    return "; ".join(
        f"{way.value}: {'does not work' if taken is None else format_ns(taken)}"
        for way, taken in exec_ns.items()
    )
