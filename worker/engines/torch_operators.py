"""ONNX operators as torch calls, for `worker.engines.torch_program`.

An operator is a function of a node and its input tensors. Inputs that decide a shape (listed in `STATIC`)
arrive as tensors in host memory, so that nothing waits for the device; all other inputs lie on the device.
Inputs that a node leaves out are None. No function changes its inputs.

Where ONNX makes a run fail because of a value (an index outside its table), the operators here go on (as in
`_gather`): a captured kernel cannot raise, and on a GPU the fault would cost the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from onnx import TensorProto, numpy_helper

from clockwright.errors import ModelError

Tensor: TypeAlias = torch.Tensor
#: An attribute of a node; the attribute's name decides its type.
Attribute: TypeAlias = Any
Outputs: TypeAlias = Tensor | Sequence[Tensor]

#: torch's types by ONNX's number of the datatype.
TORCH_TYPES: dict[int, torch.dtype] = {
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    #: The version of ONNX's operator set.
    opset: int = 17
    #: The type that float32 is computed in.
    float_type: torch.dtype = torch.float32

    def get(self, name: str, default: Attribute = None) -> Attribute:
        """The value of an attribute."""
        return self.attributes.get(name, default)

    def refuse(self, problem: str) -> ModelError:
        """Make an error about this node."""
        return ModelError(f"operator {self.op_type}: {problem}, which the torch engine cannot run")

    def element_type(self, number: int) -> torch.dtype:
        """The type to compute in, by ONNX's number.

        Raises:
            ModelError: torch has no such type.
        """
        found = TORCH_TYPES.get(number)
        if found is None:
            raise self.refuse(f"element type {TensorProto.DataType.Name(number)}")
        return self.float_type if found is torch.float32 else found


# --- convolution and pooling --------------------------------------------------------------------------


def _windows(
    node: Node, x: Tensor, kernel: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads (all begins, then all ends) of a sliding window."""
    dimensions = len(kernel)
    strides = list(node.get("strides") or [1] * dimensions)
    dilations = list(node.get("dilations") or [1] * dimensions)
    automatic = node.get("auto_pad", b"NOTSET").decode()
    if automatic in ("NOTSET", "VALID"):
        pads = list(node.get("pads") or [0] * 2 * dimensions)
        return strides, dilations, pads if automatic == "NOTSET" else [0] * 2 * dimensions
    begins, ends = [], []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + dilation * (width - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begins.append(small if automatic == "SAME_UPPER" else large)
        ends.append(large if automatic == "SAME_UPPER" else small)
    return strides, dilations, begins + ends


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Pad here if begin and end differ; otherwise leave the padding to the kernel."""
    half = len(pads) // 2
    begins, ends = list(pads[:half]), list(pads[half:])
    if begins == ends:
        return x, begins
    reverse = [n for pair in zip(reversed(begins), reversed(ends), strict=True) for n in pair]
    return F.pad(x, reverse, value=value), [0] * half


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _for_dimensions(
    node: Node, table: Mapping[int, Callable[..., Tensor]], x: Tensor
) -> Callable[..., Tensor]:
    function = table.get(x.dim() - 2)
    if function is None:
        raise node.refuse(f"an input of {x.dim()} dimensions")
    return function


def _conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    strides, dilations, pads = _windows(node, x, weight.shape[2:])
    x, padding = _padded(x, pads)
    function = _for_dimensions(node, _CONVOLUTIONS, x)
    return function(x, weight, bias, strides, padding, dilations, node.get("group", 1))


def conv_add_relu(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None = None
) -> Tensor:
    """Run a convolution, the addition and the ReLU behind it (`worker.engines.torch_program` joins them).

    cuDNN does all three in one kernel where it has one; elsewhere addition and ReLU reuse the convolution's
    output.
    """
    strides, dilations, pads = _windows(node, x, weight.shape[2:])
    x, padding = _padded(x, pads)
    groups = node.get("group", 1)
    sizes = [
        (size + 2 * pad - dilation * (width - 1) - 1) // stride + 1
        for size, pad, dilation, width, stride in zip(
            x.shape[2:], padding, dilations, weight.shape[2:], strides, strict=True
        )
    ]
    same_shape = other is None or tuple(other.shape) == (x.shape[0], weight.shape[0], *sizes)
    if x.is_cuda and x.dim() == 4 and same_shape:
        geometry = (strides, padding, dilations, groups)
        if other is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
        return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *geometry)
    function = _for_dimensions(node, _CONVOLUTIONS, x)
    y = function(x, weight, bias, strides, padding, dilations, groups)
    if other is not None:
        y = y.add_(other) if same_shape else y + other
    return y.relu_()


def _conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    strides, dilations, pads = _windows(node, x, weight.shape[2:])
    half = len(pads) // 2
    if pads[:half] != pads[half:] or node.get("output_shape") or node.get("auto_pad"):
        raise node.refuse("padding that differs between begin and end, or an output_shape")
    function = _for_dimensions(node, _TRANSPOSED, x)
    extra = list(node.get("output_padding") or [0] * half)
    return function(x, weight, bias, strides, pads[:half], extra, node.get("group", 1), dilations)


def _max_pool(node: Node, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    strides, dilations, pads = _windows(node, x, kernel)
    x, padding = _padded(x, pads, float("-inf"))
    function = _for_dimensions(node, _MAX_POOLS, x)
    return function(x, kernel, strides, padding, dilations, bool(node.get("ceil_mode", 0)))


def _average_pool(node: Node, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    strides, dilations, pads = _windows(node, x, kernel)
    half = len(pads) // 2
    count_pads = bool(node.get("count_include_pad", 0))
    if any(dilation != 1 for dilation in dilations) or (
        pads[:half] != pads[half:] and not count_pads
    ):
        raise node.refuse("dilations, or padding that differs between begin and end")
    x, padding = _padded(x, pads)
    function = _for_dimensions(node, _AVERAGE_POOLS, x)
    return function(x, kernel, strides, padding, bool(node.get("ceil_mode", 0)), count_pads)


def _global_average_pool(node: Node, x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def _global_max_pool(node: Node, x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


# --- products and normalisation -----------------------------------------------------------------------


def _gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = a.t() if node.get("transA", 0) else a
    b = b.t() if node.get("transB", 0) else b
    if c is None:
        y = a @ b
        return y if alpha == 1.0 else y * alpha
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _batch_normalization(
    node: Node, x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    return F.batch_norm(x, mean, variance, scale, shift, eps=node.get("epsilon", 1e-5))


def _layer_normalization(
    node: Node, x: Tensor, scale: Tensor, shift: Tensor | None = None
) -> Tensor:
    axis = node.get("axis", -1) % x.dim()
    return F.layer_norm(x, x.shape[axis:], scale, shift, node.get("epsilon", 1e-5))


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor) -> Tensor:
        if node.opset >= 13:
            return function(x, node.get("axis", -1))
        # Before opset 13 the sum goes over all dimensions from the axis on.
        axis = node.get("axis", 1) % x.dim()
        return function(x.reshape(prod(x.shape[:axis]), -1), 1).reshape(x.shape)

    return operator


# --- elementwise ----------------------------------------------------------------------------------------


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an operator from a torch function that means the same and takes no attributes."""

    def operator(node: Node, *inputs: Tensor) -> Tensor:
        return function(*inputs)

    return operator


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, *inputs: Tensor) -> Tensor:
        return reduce(function, inputs)

    return operator


def _div(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    least = node.get("min") if low is None else low
    most = node.get("max") if high is None else high
    if least is None and most is None:
        return x
    if isinstance(least, torch.Tensor) is isinstance(most, torch.Tensor) or None in (least, most):
        return torch.clamp(x, least, most)
    return torch.clamp(torch.clamp(x, min=least), max=most)


def _hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return torch.clamp(x * node.get("alpha", 0.2) + node.get("beta", 0.5), 0.0, 1.0)


def _hard_swish(node: Node, x: Tensor) -> Tensor:
    return F.hardswish(x)


def _leaky_relu(node: Node, x: Tensor) -> Tensor:
    return F.leaky_relu(x, node.get("alpha", 0.01))


def _elu(node: Node, x: Tensor) -> Tensor:
    return F.elu(x, node.get("alpha", 1.0))


def _prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    # ONNX broadcasts the slope like any other operand; torch's own takes one number per channel.
    return torch.where(x < 0, x * slope, x)


def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.get("approximate", b"none").decode())


def _cast(node: Node, x: Tensor) -> Tensor:
    return x.to(node.element_type(node.get("to")))


def _where(node: Node, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


# --- shapes ---------------------------------------------------------------------------------------------


def _ints(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else [int(number) for number in tensor.reshape(-1).tolist()]


def _axes(node: Node, given: Tensor | None) -> list[int] | None:
    """Read the axes, an attribute in older operator sets and an input in newer ones."""
    found = node.get("axes") if given is None else _ints(given)
    return None if found is None else list(found)


def _reshape(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape)
    assert sizes is not None
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis += x.dim() if axis < 0 else 0
    return x.reshape(prod(x.shape[:axis]), -1)


def _transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(node.get("perm") or list(range(x.dim()))[::-1])


def _concat(node: Node, *parts: Tensor) -> Tensor:
    return torch.cat(parts, node.get("axis"))


def _split(node: Node, x: Tensor, sizes: Tensor | None = None) -> Sequence[Tensor]:
    axis = node.get("axis", 0)
    lengths = node.get("split") if sizes is None else _ints(sizes)
    if lengths is None:
        # The last part is smaller when the size does not divide.
        lengths = -(-x.shape[axis] // len(node.outputs))
    return list(torch.split(x, lengths, axis))


def _slice(
    node: Node,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    begins = node.get("starts") if starts is None else _ints(starts)
    finishes = node.get("ends") if ends is None else _ints(ends)
    assert begins is not None
    assert finishes is not None
    chosen = _axes(node, axes) or list(range(len(begins)))
    strides = _ints(steps) or [1] * len(begins)
    if min(strides) < 1:
        raise node.refuse(f"steps {strides}")
    for axis, begin, end, stride in zip(chosen, begins, finishes, strides, strict=True):
        index: list[slice] = [slice(None)] * x.dim()
        index[axis] = slice(begin, end, stride)
        x = x[tuple(index)]
    return x


def _gather(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    """Take rows of a table. An index outside the table counts as the nearest inside (ONNX: an error)."""
    axis = node.get("axis", 0) % table.dim()
    size = table.shape[axis]
    inside = indices.to(torch.int64)
    inside = torch.where(inside < 0, inside + size, inside).clamp(0, size - 1)
    shape = (*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :])
    return torch.index_select(table, axis, inside.reshape(-1)).reshape(shape)


def _squeeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _axes(node, axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


def _unsqueeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _axes(node, axes) or []
    dimensions = x.dim() + len(chosen)
    for axis in sorted(axis % dimensions for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _constant_of_shape(node: Node, shape: Tensor) -> Tensor:
    value = node.get("value")
    sizes = _ints(shape)
    if value is None:
        return torch.zeros(sizes, dtype=node.float_type)
    array = numpy_helper.to_array(value)
    return torch.full(sizes, array.item(), dtype=node.element_type(value.data_type))


def _expand(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _ints(shape)
    assert sizes is not None
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(sizes)))


def _shape(node: Node, x: Tensor) -> Tensor:
    sizes = list(x.shape)[node.get("start", 0) : node.get("end")]
    return torch.tensor(sizes, dtype=torch.int64)


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = _axes(node, axes)
        if chosen is None and node.get("noop_with_empty_axes", 0):
            return x
        dimensions = tuple(chosen) if chosen else tuple(range(x.dim()))
        return function(x, dimensions, keepdim=bool(node.get("keepdims", 1)))

    return operator


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def operator(node: Node, x: Tensor) -> Tensor:
        if node.get("select_last_index", 0):
            raise node.refuse("select_last_index")
        return function(x, node.get("axis", 0), keepdim=bool(node.get("keepdims", 1)))

    return operator


def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    size = node.get("blocksize")
    if node.get("mode", b"DCR") == b"CRD":
        return F.pixel_shuffle(x, size)
    rows, channels, height, width = x.shape
    x = x.reshape(rows, size, size, channels // size**2, height, width)
    return x.permute(0, 3, 4, 1, 5, 2).reshape(rows, -1, height * size, width * size)


def _pad(
    node: Node,
    x: Tensor,
    pads: Tensor | None = None,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    sizes = node.get("pads") if pads is None else _ints(pads)
    mode = node.get("mode", b"constant").decode()
    chosen = [axis % x.dim() for axis in _axes(node, axes) or range(x.dim())]
    assert sizes is not None
    if mode != "constant" or min(sizes) < 0:
        raise node.refuse(f"mode {mode!r}, or less than nothing")
    both = [0] * 2 * x.dim()
    for index, axis in enumerate(chosen):
        # torch counts dimensions from the last.
        position = 2 * (x.dim() - 1 - axis)
        both[position : position + 2] = [sizes[index], sizes[len(chosen) + index]]
    filling = node.get("value", 0.0) if value is None else value.reshape(-1).tolist()[0]
    return F.pad(x, both, value=filling)


def _identity(node: Node, x: Tensor, *settings: Tensor) -> Tensor:
    return x


#: The operators that can be run, by ONNX's name.
OPERATORS: dict[str, Callable[..., Outputs]] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(torch.add),
    "And": _plain(torch.logical_and),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "Div": _div,
    "Dropout": _identity,
    "Elu": _elu,
    "Equal": _plain(torch.eq),
    "Erf": _plain(torch.erf),
    "Exp": _plain(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _global_max_pool,
    "Greater": _plain(torch.gt),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Identity": _identity,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "Less": _plain(torch.lt),
    "Log": _plain(torch.log),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _plain(torch.matmul),
    "Max": _folded(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _folded(torch.minimum),
    "Mul": _plain(torch.mul),
    "Neg": _plain(torch.neg),
    "Not": _plain(torch.logical_not),
    "Or": _plain(torch.logical_or),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _plain(torch.pow),
    "Reciprocal": _plain(torch.reciprocal),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _plain(torch.relu),
    "Reshape": _reshape,
    "Shape": _shape,
    "Sigmoid": _plain(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax(torch.softmax),
    "Softplus": _plain(F.softplus),
    "Split": _split,
    "Sqrt": _plain(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _plain(torch.sub),
    "Sum": _folded(torch.add),
    "Tanh": _plain(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
    "conv_add_relu": conv_add_relu,
}

#: Positions of inputs that decide shapes, and so must be known before the device computes.
STATIC: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1, 2, 3),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
}
