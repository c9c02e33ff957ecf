"""Reads a model as its owner wrote it, and says in words why it cannot be served.

Everything here is about the file. `worker.compiling.compile` finds out what the runtime makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, ValueInfoProto

from clockwright.errors import ModelError
from clockwright.tensors import TensorSpec
from worker.models.model_files import MODEL_FILE, ModelSource

#: The Open Inference Protocol's names of datatypes, by ONNX's numbers.
DATATYPES: dict[int, str] = {
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
    TensorProto.UINT16: "UINT16",
    TensorProto.UINT32: "UINT32",
    TensorProto.UINT64: "UINT64",
    TensorProto.INT8: "INT8",
    TensorProto.INT16: "INT16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT: "FP32",
    TensorProto.DOUBLE: "FP64",
}

# A limit far above any real tensor, and far below an overflow when multiplied by a batch size.
_MOST_ROW_BYTES = 1 << 40


def read_model(source: ModelSource) -> onnx.ModelProto:
    """Parse and check a model, fix its open dimensions and read external data in.

    Raises:
        ModelError: the file is not a valid ONNX model, or refers to files outside its folder.
    """
    path = source.folder / MODEL_FILE
    try:
        model = onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise ModelError(f"no {MODEL_FILE} among the model's files") from None
    except (DecodeError, OSError, ValueError) as error:
        raise ModelError(f"{MODEL_FILE} is not an ONNX file, or is truncated: {error}") from None
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(
            f"{MODEL_FILE} is not an ONNX file: found no graph, or no operator set version"
        )
    _check_external_data(model, source.folder)
    try:
        onnx.load_external_data_for_model(model, str(source.folder))
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        raise ModelError(f"{MODEL_FILE}: its external data cannot be read: {error}") from None
    try:
        # Checked by path, because a model in memory must not be larger than 2 GiB.
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, ValueError) as error:
        raise ModelError(f"{MODEL_FILE} is not valid ONNX: {_first_line(error)}") from None
    fix_dimensions(model.graph, source.fixed_dimensions)
    return model


def model_inputs(graph: onnx.GraphProto) -> list[ValueInfoProto]:
    """The inputs that a client provides. Old files list initializers as inputs; those are left out."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]


def fix_dimensions(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Replace named dimensions of inputs and outputs by their sizes.

    Raises:
        ModelError: a name is not a dimension of any input, is the batch dimension, or a size is not
            positive.
    """
    inputs = model_inputs(graph)
    batch_names = {_first_dimension_name(value) for value in inputs}
    names = sorted({d.dim_param for v in inputs for d in _dimensions(v)} - {""} - batch_names)
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"fixed dimension {name!r}: found size {size}, expected 1 or more")
        if name in batch_names:
            raise ModelError(
                f"fixed dimension {name!r} is the batch dimension, which cannot be fixed"
            )
        if name not in names:
            raise ModelError(
                f"fixed dimension {name!r}: no input has it; "
                f"found {', '.join(map(repr, names)) or 'no open dimensions besides the batch'}"
            )
    if not sizes:
        return
    for value in (*inputs, *graph.output):
        for dimension in _dimensions(value):
            if dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    # Shapes recorded inside the graph still have the open dimension; the runtime infers them anew.
    del graph.value_info[:]


def has_fixed_batch(graph: onnx.GraphProto) -> bool:
    """Whether the first dimension of the inputs is a fixed 1 instead of a symbol.

    Raises:
        ModelError: there is no input, an input is a scalar, its first dimension is another number, or
            inputs differ.
    """
    inputs = model_inputs(graph)
    if not inputs:
        raise ModelError("the model has no input, expected at least one")
    fixed = []
    for value in inputs:
        tensor_spec_type(value, "input")
        dimensions = _dimensions(value)
        if not dimensions:
            raise ModelError(
                f"input {value.name!r} is a scalar, expected a batch as its first dimension"
            )
        first = dimensions[0]
        if first.HasField("dim_value") and first.dim_value != 1:
            raise ModelError(
                f"input {value.name!r}: first dimension is fixed to {first.dim_value}, expected the "
                f"batch: a symbol, or 1 if the model can run single rows only"
            )
        fixed.append(first.HasField("dim_value"))
    if any(fixed) and not all(fixed):
        odd = inputs[fixed.index(True)].name
        raise ModelError(
            f"input {odd!r}: first dimension is fixed to 1, but that of other inputs is a symbol; "
            f"expected the batch first in all of them"
        )
    return all(fixed)


def tensor_spec_type(value: ValueInfoProto, role: str) -> str:
    """The datatype of an input or output.

    Raises:
        ModelError: the value is no tensor, or its datatype cannot be served.
    """
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "nothing").removesuffix("_type")
        # skl2onnx makes a sequence of a classifier's probabilities unless it is told otherwise.
        hint = " (skl2onnx: convert with options={'zipmap': False})" if found == "sequence" else ""
        raise ModelError(f"{role} {value.name!r} is of type {found}, expected a tensor{hint}")
    number = value.type.tensor_type.elem_type
    if number not in DATATYPES:
        found = (
            TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else number
        )
        raise ModelError(
            f"{role} {value.name!r} has datatype {found}, expected one of "
            f"{', '.join(DATATYPES.values())}"
        )
    return DATATYPES[number]


def tensor_spec(value: ValueInfoProto, role: str) -> TensorSpec:
    """The spec of an input or output.

    Raises:
        ModelError: the tensor cannot be served, or a dimension other than the first is open.
    """
    datatype = tensor_spec_type(value, role)
    row_shape = []
    for index, dimension in enumerate(_dimensions(value)[1:], start=1):
        if dimension.HasField("dim_value") and dimension.dim_value >= 1:
            row_shape.append(dimension.dim_value)
        elif dimension.HasField("dim_value"):
            raise ModelError(
                f"{role} {value.name!r}: dimension {index} is {dimension.dim_value}, expected 1 or more"
            )
        else:
            name = dimension.dim_param
            found = f"is open ({name!r})" if name else "has neither size nor name"
            remedy = f"; give {name} a size under [dimensions] in config.toml" if name else ""
            raise ModelError(
                f"{role} {value.name!r}: dimension {index} {found}, expected a number{remedy}"
            )
    spec = TensorSpec(value.name, datatype, tuple(row_shape))
    if spec.row_bytes > _MOST_ROW_BYTES:
        raise ModelError(f"{role} {value.name!r}: a row has {spec.row_bytes} bytes, far too many")
    return spec


def describe_outputs(model: onnx.ModelProto) -> list[TensorSpec]:
    """Find the output specs by ONNX's shape inference, without running the model.

    Raises:
        ModelError: a shape cannot be inferred.
    """
    names = [value.name for value in model.graph.output]
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"shapes cannot be inferred: {_first_line(error)}") from None
    values = {value.name: value for value in inferred.graph.output}
    return [tensor_spec(values[name], "output") for name in names]


def _check_external_data(model: onnx.ModelProto, folder: Path) -> None:
    root = folder.resolve()
    for tensor in _tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        # A key may come twice, and onnx takes the last.
        for location in [e.value for e in tensor.external_data if e.key == "location"] or [""]:
            path = PurePosixPath(location)
            if not location or path.is_absolute() or ".." in path.parts or "\\" in location:
                raise ModelError(
                    f"initializer {tensor.name!r}: external data in {location!r}, expected a file "
                    f"inside the model's folder"
                )
            if not (folder / path).is_file():
                raise ModelError(
                    f"initializer {tensor.name!r}: external data in {location!r}, "
                    f"which is not among the model's files"
                )
            if not (folder / path).resolve().is_relative_to(root):
                raise ModelError(
                    f"initializer {tensor.name!r}: external data in {location!r}, which leads outside "
                    f"the model's folder"
                )


def _tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """All tensors anywhere in a model: its graphs, its functions, its training; sparse ones too."""
    yield from _tensors_in(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _tensors_of(node.attribute)
        yield from _tensors_of(function.attribute_proto)
    for training in model.training_info:
        yield from _tensors_in(training.initialization)
        yield from _tensors_in(training.algorithm)


def _tensors_in(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of(node.attribute)


def _tensors_of(attributes: Iterable[onnx.AttributeProto]) -> Iterator[TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _tensors_in(subgraph)


def _dimensions(value: ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(value.type.tensor_type.shape.dim)


def _first_dimension_name(value: ValueInfoProto) -> str:
    dimensions = _dimensions(value)
    return dimensions[0].dim_param if dimensions else ""


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
