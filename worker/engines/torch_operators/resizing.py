"""Operators that sample an image between its elements."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import torch
import torch.nn.functional as F

from worker.engines.torch_operators.node import Node, Outputs, Tensor, axes_of, ints

# What torch's own kernels do, all dimensions at once: mode, coordinates and rounding, by its `align_corners`.
_INTERPOLATIONS: dict[tuple[str, str, str], tuple[bool | None]] = {
    ("nearest", "asymmetric", "floor"): (None,),
    ("linear", "half_pixel", ""): (False,),
    ("linear", "pytorch_half_pixel", ""): (False,),
    ("linear", "align_corners", ""): (True,),
}
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}

_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_floor": lambda x: torch.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: torch.floor(x + 0.5),
}


def _resize(
    node: Node,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    if node.opset == 10:  # has scales alone
        scales = roi
    axes = [axis % x.dim() for axis in axes_of(node, None) or range(x.dim())]
    wanted, factors = _sizes_and_factors(node, [x.shape[axis] for axis in axes], scales, sizes)
    mode = node.get("mode", b"nearest").decode()
    before_11 = node.opset < 11
    where = "asymmetric" if before_11 else node.get("coordinate_transformation_mode", b"half_pixel")
    where = where if isinstance(where, str) else where.decode()
    rounding = "floor" if before_11 else node.get("nearest_mode", b"round_prefer_floor").decode()
    if node.get("antialias", 0) or where == "tf_crop_and_resize":
        raise node.refuse("antialias, or tf_crop_and_resize")
    changed = {
        axis: (size, factor)
        for axis, size, factor in zip(axes, wanted, factors, strict=True)
        if (size, factor) != (x.shape[axis], 1.0)
    }
    own = _INTERPOLATIONS.get((mode, where, rounding if mode == "nearest" else ""))
    # torch takes each scale to be the quotient of the sizes, and does not treat a size of one apart.
    is_plain = all(size == x.shape[axis] * by and size > 1 for axis, (size, by) in changed.items())
    if own and is_plain and x.dim() in _LINEAR and min(changed, default=0) > 1:
        shape = [changed.get(axis, x.shape[axis:])[0] for axis in range(2, x.dim())]
        kernel = _LINEAR[x.dim()] if mode == "linear" else mode
        return F.interpolate(x, shape, mode=kernel, align_corners=own[0])
    for axis, (size, factor) in changed.items():
        x = _sampled(node, x, axis, _places(x, axis, size, factor, where), mode, rounding)
    return x


def _sizes_and_factors(
    node: Node, old: list[int], scales: Tensor | None, sizes: Tensor | None
) -> tuple[list[int], list[float]]:
    """The sizes to resize to, and the scales that say which old place a new one has."""
    given = node.get("scales") if scales is None else scales.tolist()
    if given:
        return [floor(size * factor) for size, factor in zip(old, given, strict=True)], given
    wanted = ints(sizes) or []
    factors = [new / size for new, size in zip(wanted, old, strict=True)]
    policy = node.get("keep_aspect_ratio_policy", b"stretch").decode()
    if policy == "stretch":
        return wanted, factors
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [floor(size * factor + 0.5) for size in old], [factor] * len(old)


def _places(x: Tensor, axis: int, size: int, factor: float, where: str) -> Tensor:
    """Where the elements of a resized dimension lie in the old one, as float32 or x's own type."""
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    new = torch.arange(size, dtype=kind, device=x.device)
    old = x.shape[axis]
    match where:
        case "asymmetric":
            return new / factor
        case "align_corners":
            # The resized length may be a fraction, and its whole part the number of elements.
            return new * ((old - 1) / (old * factor - 1)) if old * factor != 1 else new * 0
        case "pytorch_half_pixel" if old * factor == 1:
            return new * 0
        case "half_pixel_symmetric":
            center = old / 2 * (1 - size / (old * factor))
            return center + (new + 0.5) / factor - 0.5
        case _:
            return (new + 0.5) / factor - 0.5


def _sampled(node: Node, x: Tensor, axis: int, places: Tensor, mode: str, rounding: str) -> Tensor:
    """Sample one dimension at places between its elements."""
    last = x.shape[axis] - 1
    if mode == "nearest":
        nearest = _ROUNDINGS[rounding](places).to(torch.int64).clamp(0, last)
        return torch.index_select(x, axis, nearest)
    left = places.floor()
    part = places - left
    if mode == "linear":
        weights = {0: 1 - part, 1: part}
    elif mode == "cubic":
        a = node.get("cubic_coeff_a", -0.75)
        weights = {step: _cubic((part - step).abs(), a) for step in (-1, 0, 1, 2)}
    else:
        raise node.refuse(f"mode {mode!r}")
    if node.get("exclude_outside", 0):
        for step in weights:
            inside = (left + step >= 0) & (left + step <= last)
            weights[step] = weights[step] * inside
        total = sum(weights.values())
        weights = {step: weight / total for step, weight in weights.items()}
    shape = [-1 if each == axis else 1 for each in range(x.dim())]
    parts = [
        torch.index_select(x, axis, (left + step).to(torch.int64).clamp(0, last))
        * weight.to(x.dtype).view(shape)
        for step, weight in weights.items()
    ]
    return torch.stack(parts).sum(0)


def _cubic(distance: Tensor, a: float) -> Tensor:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, far)


def _upsample(node: Node, x: Tensor, scales: Tensor | None = None) -> Tensor:
    return _resize(node, x, None, scales)


def _grid_sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = node.get("mode", b"linear").decode()
    return F.grid_sample(
        x,
        grid,
        names.get(mode, mode),
        node.get("padding_mode", b"zeros").decode(),
        bool(node.get("align_corners", 0)),
    )


OPERATORS: dict[str, Callable[..., Outputs]] = {
    "GridSample": _grid_sample,
    "Resize": _resize,
    "Upsample": _upsample,
}

STATIC: dict[str, tuple[int, ...]] = {"Resize": (1, 2, 3), "Upsample": (1,)}
