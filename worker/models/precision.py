"""In which arithmetic a model runs. Plain data: nothing here needs torch."""

from __future__ import annotations

import enum

from clockwright.errors import ConfigError


class Precision(enum.Enum):
    """A property of the compiled model: it decides the weights' bytes and which kernels run."""

    #: As onnxruntime on a processor, but for the order of sums.
    FLOAT32 = "float32"
    #: Weights and sums in float32; products on tensor cores, with 10 bits of mantissa.
    TF32 = "tf32"
    #: Weights and activations in float16, so half the pages and half the LOAD; sums in float32.
    FLOAT16 = "float16"

    @property
    def tensor_cores(self) -> bool:
        """Whether convolutions run on tensor cores, which want channels last."""
        return self is not Precision.FLOAT32

    @property
    def tolerance(self) -> float:
        """How far an output may be from onnxruntime's in float32, in parts of the largest output.

        TF32 and float16 both keep 10 bits of mantissa, a relative error of 2^-11 per product; the rest
        is what 50 to 150 layers make of it.
        """
        return 1e-3 if self is Precision.FLOAT32 else 3e-2


def parse_precision(name: str) -> Precision:
    """Find a precision by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return Precision(name)
    except ValueError:
        expected = ", ".join(each.value for each in Precision)
        raise ConfigError(f"precision: found {name!r}, expected one of {expected}") from None
