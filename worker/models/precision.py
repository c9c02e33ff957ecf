"""The arithmetic that a model runs in. Plain data: nothing here needs torch."""

from __future__ import annotations

import enum

from clockwright.errors import ConfigError


class Precision(enum.Enum):
    """A property of the compiled model: it decides the weights' bytes and which kernels run."""

    #: What onnxruntime computes on a processor, but for the order of sums.
    FLOAT32 = "float32"
    #: Weights and sums in float32; products on tensor cores, with 10 bits of mantissa.
    TF32 = "tf32"
    #: Weights and activations in float16, which halves pages and LOAD; sums in float32.
    FLOAT16 = "float16"

    @property
    def tensor_cores(self) -> bool:
        """Whether convolutions run on tensor cores. Tensor cores want channels last."""
        return self is not Precision.FLOAT32

    @property
    def tolerance(self) -> float:
        """How far an output may be from onnxruntime's in float32, as a part of the largest output.

        TF32 and float16 both keep 10 bits of mantissa, a relative error of 2^-11 per product, which
        grows over 50 to 150 layers.
        """
        return 1e-3 if self is Precision.FLOAT32 else 3e-2


def parse_precision(name: str) -> Precision:
    """Find a precision by its name. Raises ConfigError if no precision has that name."""
    try:
        return Precision(name)
    except ValueError:
        expected = ", ".join(each.value for each in Precision)
        raise ConfigError(f"precision: found {name!r}, expected one of {expected}") from None
