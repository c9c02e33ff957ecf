"""Reads a model's file, and says why it cannot be served.

Everything here is about the file. `worker.compiling.compile` finds out whether the runtime runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, ValueInfoProto

from clockwright.errors import ModelError, ModelFaults
from clockwright.wire.tensors import DATATYPES, ONNX_DATATYPES, TensorSpec, Variable
from worker.compiling.plain_values import make_plain
from worker.engines.onnxruntime import plain_words
from worker.models.model_files import MODEL_FILE, ModelSource, sizes_to_write

# What domains of operators that onnxruntime has begin with; that of ONNX itself is empty, too.
_DOMAINS = ("ai.onnx", "com.microsoft", "com.ms.", "org.pytorch.aten")

# More of a kind are counted.
_NAMED = 3

# A limit far above any real tensor, and far below an overflow when multiplied by a batch size.
_MOST_ROW_BYTES = 1 << 40


def read_model(
    source: ModelSource, faults: ModelFaults, *, is_whole: bool = False
) -> onnx.ModelProto:
    """Parse and check a model, fix its open dimensions and read external data in.

    Args:
        source: the model.
        faults: gets what is wrong: it is not valid, or refers to files outside its folder, for example.
        is_whole: its batch is an open dimension as any other.

    Raises:
        ModelError: the file is not an ONNX model.
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
    outside = list(_external_faults(model, source.folder))
    faults.found += outside[:_NAMED]
    if len(outside) > _NAMED:
        faults.found.append(f"{len(outside) - _NAMED} more initializers have such external data")
    if not faults.found:
        try:
            onnx.load_external_data_for_model(model, str(source.folder))
        except (onnx.checker.ValidationError, OSError, ValueError) as error:
            faults.found.append(f"{MODEL_FILE}: its external data cannot be read: {error}")
    is_as_read = not _sort_nodes(model.graph)
    # The checker wants shapes of outputs. A run tells them, whatever the file says.
    shapes = [each.type.tensor_type for each in model.graph.output if _is_tensor(each)]
    shapes = [each for each in shapes if not each.HasField("shape")]
    for kind in shapes:
        kind.shape.SetInParent()
    if not faults.found:
        try:
            # Checked by path, because a model in memory must not be larger than 2 GiB.
            onnx.checker.check_model(str(path) if is_as_read and not shapes else model)
        except (onnx.checker.ValidationError, ValueError) as error:
            faults.found.append(f"{MODEL_FILE} is not valid ONNX: {plain_words(error)}")
    for kind in shapes:
        kind.ClearField("shape")
    faults.found += (*_foreign_faults(model), *_training_faults(model.graph))
    if not faults.found:
        make_plain(model)
    for value in (*model.graph.input, *model.graph.output):
        for dimension in _dimensions(value):
            if dimension.dim_value < 0:
                dimension.Clear()  # Paddle writes an open dimension as -1
    _name_dimensions(model.graph, find_rows(model.graph, is_whole=is_whole))
    with faults.collected():
        fix_dimensions(model.graph, source.fixed_dimensions)
    return model


def _is_tensor(value: ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type")


def _training_faults(graph: onnx.GraphProto) -> Iterator[str]:
    """Name operators that write to their weights, which all runs share."""
    made = [
        node.output[0]
        for node in graph.node
        if node.op_type == "BatchNormalization"
        and any(each.name == "training_mode" and each.i for each in node.attribute)
    ]
    if made:
        yield (
            f"BatchNormalization that makes {', '.join(map(repr, made))} is in training mode, expected"
            " training_mode = 0; export the model in evaluation mode (in PyTorch: model.eval())"
        )


def _foreign_faults(model: onnx.ModelProto) -> Iterator[str]:
    """Name operators of domains that the runtime does not have, and that the model does not define."""
    own = {(each.domain, each.name) for each in model.functions}
    foreign = dict.fromkeys(
        f"{node.domain}.{node.op_type}"
        for node in model.graph.node
        if node.domain
        and not node.domain.startswith(_DOMAINS)
        and (node.domain, node.op_type) not in own
    )
    if foreign:
        yield (
            f"onnxruntime does not have the operators {', '.join(foreign)}; export the model with ONNX's own"
            " operators, or serve it with its runtime in a container"
        )


def _sort_nodes(graph: onnx.GraphProto) -> bool:
    """Put each node behind those that make its inputs, as runtimes do. Returns whether a node moved."""
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needs = [{makers[name] for name in used_names(node) if name in makers} for node in graph.node]
    if all(max(before, default=-1) < index for index, before in enumerate(needs)):
        return False
    try:
        order = list(TopologicalSorter(dict(enumerate(needs))).static_order())
    except CycleError:
        return False  # The checker says so.
    nodes = [onnx.NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def used_names(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node uses, in the graphs inside it too."""
    yield from node.input
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                yield from used_names(inner)


def model_inputs(graph: onnx.GraphProto) -> list[ValueInfoProto]:
    """The inputs that a client provides. Old files list initializers as inputs; those are left out."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]


@dataclass(frozen=True, slots=True)
class RowAxes:
    """Where a model's inputs have the batch. The one place that decides it; runs tell where outputs have it."""

    #: By input: the position of the batch dimension; None: the input belongs to a request as a whole.
    axes: Mapping[str, int | None]
    #: Whether runs may have several rows: the batch dimension is open.
    is_open: bool
    #: By input, the symbol of an open batch dimension; of those that have one.
    symbols: Mapping[str, str] = field(default_factory=dict)
    #: Whether an input has the batch in another dimension, too: every row with every other.
    is_square: bool = False


def find_rows(graph: onnx.GraphProto, *, is_whole: bool = False) -> RowAxes:
    """Find the batch dimension of the inputs; none if a request is one run whatever the file says (`is_whole`).

    It is the open first dimension of all inputs. Elsewhere it is an open dimension that all inputs with open
    dimensions share and that is first in one of them or is called batch, or their only one. A first dimension of 1 in all inputs is a
    batch of one row. Otherwise there is no batch: a request is one run.
    """
    inputs = model_inputs(graph)
    shapes = {value.name: [_symbol(each) for each in _dimensions(value)] for value in inputs}
    axes = None if is_whole else _shared_axes(shapes)
    if axes is not None:
        symbols = {
            name: shapes[name][axis] or "" for name, axis in axes.items() if axis is not None
        }
        names = {name: symbol for name, symbol in symbols.items() if symbol}
        is_square = any(
            each and each in names.values() and index != axes[name]
            for name, shape in shapes.items()
            for index, each in enumerate(shape)
        )
        return RowAxes(axes, True, names, is_square)
    if inputs and not is_whole and all(_is_one(_dimensions(value)) for value in inputs):
        return RowAxes(dict.fromkeys(shapes, 0), False)
    return RowAxes(dict.fromkeys(shapes), False)


def _shared_axes(shapes: Mapping[str, Sequence[str | None]]) -> dict[str, int | None] | None:
    """Find the open batch dimension; see `find_rows`. Returns None if no dimension is.

    Args:
        shapes: by input, for each dimension its symbol; None: it is fixed.
    """
    opened = {
        name: shape for name, shape in shapes.items() if any(each is not None for each in shape)
    }
    if not opened:
        return None
    first_in_all = all(shape and shape[0] is not None for shape in shapes.values())
    symbols = dict.fromkeys(each for shape in opened.values() for each in shape if each is not None)
    for symbol in sorted(symbols, key=lambda each: "batch" not in each.lower()):
        is_called_batch = "batch" in symbol.lower()
        if first_in_all and not is_called_batch:
            break
        if all(shape.count(symbol) == 1 for shape in opened.values()) and (
            is_called_batch or any(shape[0] == symbol for shape in opened.values())
        ):
            return {
                name: shape.index(symbol) if name in opened else None
                for name, shape in shapes.items()
            }
    if first_in_all:
        return dict.fromkeys(shapes, 0)
    # Exporters may give the batch a symbol in each input.
    positions = {
        name: [index for index, each in enumerate(shape) if each is not None]
        for name, shape in shapes.items()
    }
    if [0] in positions.values() and all(len(each) <= 1 for each in positions.values()):
        return {name: each[0] if each else None for name, each in positions.items()}
    return None


def _name_dimensions(graph: onnx.GraphProto, rows: RowAxes) -> None:
    """Name the open dimensions of inputs that have no name and are not the batch: `INPUT[INDEX]`."""
    opened = [
        (dimension, f"{value.name}[{place}]")
        for value in model_inputs(graph)
        for place, dimension in enumerate(_dimensions(value))
        if _symbol(dimension) in ("", "?") and place != rows.axes[value.name]
    ]
    # Paddle calls all of them "?".
    is_said = [dimension.dim_param for dimension, _ in opened].count("?") == 1
    for dimension, name in opened:
        if not dimension.dim_param or not is_said:
            dimension.dim_param = name


def fix_dimensions(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Replace named dimensions of inputs and outputs by their sizes. A negative size is the largest of an open one.

    Args:
        graph: is changed.
        sizes: by symbol, or by place: `INPUT[INDEX]`. A place that is not open, or is the batch, stays as it is.

    Raises:
        ModelError: names are no dimensions of any input, or the batch dimension, or sizes are not positive; all of them.
    """
    inputs = model_inputs(graph)
    rows = find_rows(graph)
    sizes = _by_symbol(inputs, rows, sizes)
    batch_names = {symbol for name, symbol in rows.symbols.items() if rows.axes[name] == 0}
    names = sorted({d.dim_param for v in inputs for d in _dimensions(v)} - {""} - batch_names)
    faults = []
    for name, size in sizes.items():
        if not size:
            faults.append(f"fixed dimension {name!r}: found size {size}, expected 1 or more")
        elif name in batch_names:
            faults.append(f"fixed dimension {name!r} is the batch dimension, which cannot be fixed")
        elif name not in names:
            told = ""
            if name.endswith("]"):  # A place, which the dims of a config.pbtxt give too.
                told = f" of inputs {', '.join(repr(each.name) for each in inputs)}"
                told += " (config.pbtxt gives sizes by its dims)"
            faults.append(
                f"fixed dimension {name!r}: no input has it; "
                f"found {', '.join(map(repr, names)) or 'no open dimensions besides the batch'}{told}"
            )
    if faults:
        raise ModelError("; ".join(faults))
    if not sizes:
        return
    for value in (*inputs, *graph.output):
        for dimension in _dimensions(value):
            if sizes.get(dimension.dim_param, 0) > 0:
                dimension.dim_value = sizes[dimension.dim_param]
    # Shapes recorded inside the graph still have the open dimension; the runtime infers them again.
    del graph.value_info[:]


def _by_symbol(
    inputs: Sequence[ValueInfoProto], rows: RowAxes, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Give the sizes of symbols, of which some are said by a place."""
    by_symbol = dict(sizes)
    for value in inputs:
        for index, dimension in enumerate(_dimensions(value)):
            size = by_symbol.pop(f"{value.name}[{index}]", 0)
            if size and _symbol(dimension) is not None and index != rows.axes[value.name]:
                by_symbol.setdefault(dimension.dim_param, size)
    return by_symbol


def input_specs(
    graph: onnx.GraphProto,
    rows: RowAxes,
    given: Mapping[str, int],
    *,
    open_max: int = 0,
) -> list[TensorSpec]:
    """The specs of all inputs. Of open sizes only the symbols are known.

    Args:
        graph: the model's.
        rows: where it has the batch.
        given: the sizes that its owner gives.
        open_max: so many dimensions besides the batch may be open.

    Raises:
        ModelError: an input or output cannot be served, or dimensions other than the batch are open; names all.
    """
    inputs = model_inputs(graph)
    if not inputs:
        raise ModelError("the model has no input, expected at least one")
    faults = []
    for role, values in (("input", inputs), ("output", graph.output)):
        for value in values:
            try:
                tensor_spec_type(value, role)
            except ModelError as error:
                faults.append(str(error))
    batch_names = set(rows.symbols.values())
    missing: dict[str, None] = {}
    for value in inputs:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            faults.append(f"input {value.name!r} has no shape, expected one")
        for index, dimension in enumerate(_dimensions(value)):
            symbol = _symbol(dimension)
            if symbol is None or index == rows.axes[value.name]:
                continue
            if symbol not in batch_names:
                missing[symbol] = None
            else:
                faults.append(
                    f"input {value.name!r} has {symbol!r} in dimension {index}, which is the batch elsewhere, expected"
                    " it once; export the model with a size or a name of its own there"
                )
    if len(missing) > open_max:
        faults.append(
            f"found open dimensions besides the batch: {', '.join(map(repr, missing))}; write their sizes in"
            f" config.toml: {sizes_to_write(missing, given)}"
        )
    if faults:
        raise ModelError("; ".join(faults))
    vary = Variable(0) if missing else None
    return [tensor_spec(value, "input", rows.axes[value.name], vary) for value in inputs]


def tensor_spec_type(value: ValueInfoProto, role: str) -> str:
    """The datatype of an input or output.

    Raises ModelError if the value is no tensor, or its datatype cannot be served.
    """
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "nothing").removesuffix("_type")
        raise ModelError(f"{role} {value.name!r} is of type {found}, expected a tensor")
    number = value.type.tensor_type.elem_type
    if number not in ONNX_DATATYPES:
        found = (
            TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else number
        )
        raise ModelError(
            f"{role} {value.name!r} has datatype {found}, expected one of {', '.join(DATATYPES)}"
        )
    return ONNX_DATATYPES[number].name


def tensor_spec(
    value: ValueInfoProto, role: str, axis: int | None = 0, vary: Variable | None = None
) -> TensorSpec:
    """The spec of an input or output, which may have open dimensions if `vary` is given.

    Raises ModelError if the tensor cannot be served, or a dimension other than the batch is open.
    """
    datatype = tensor_spec_type(value, role)
    row_shape = []
    for index, dimension in enumerate(_dimensions(value)):
        if index == axis:
            continue
        if dimension.HasField("dim_value"):
            row_shape.append(dimension.dim_value)
        elif vary is not None:
            row_shape.append(-1)
            vary = replace(vary, symbols=(*vary.symbols, dimension.dim_param))
        else:
            name = dimension.dim_param
            found = f"is open ({name!r})" if name else "has neither size nor name"
            raise ModelError(f"{role} {value.name!r}: dimension {index} {found}, expected a number")
    spec = TensorSpec(value.name, datatype, tuple(row_shape), axis, vary)
    if spec.batch_bytes(1) > _MOST_ROW_BYTES:
        raise ModelError(
            f"{role} {value.name!r}: a row has {spec.batch_bytes(1)} bytes, far too many"
        )
    return spec


def describe_outputs(model: onnx.ModelProto, rows: RowAxes) -> list[TensorSpec]:
    """Find the output specs by ONNX's shape inference, without running the model.

    Raises ModelError if a shape cannot be inferred.
    """
    names = [value.name for value in model.graph.output]
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"shapes cannot be inferred: {plain_words(error)}") from None
    values = {value.name: value for value in inferred.graph.output}
    return [tensor_spec(values[name], "output", _output_axis(values[name], rows)) for name in names]


def _output_axis(value: ValueInfoProto, rows: RowAxes) -> int | None:
    """The position of the batch dimension in an output, as its shape says."""
    shape = [_symbol(each) for each in _dimensions(value)]
    if not value.type.tensor_type.HasField("shape"):
        return 0
    if not rows.is_open:
        return 0 if 0 in rows.axes.values() and _is_one(_dimensions(value)) else None
    batch_names = set(rows.symbols.values())
    axes = [index for index, symbol in enumerate(shape) if symbol in batch_names]
    is_row = shape and (shape[0] is not None or _is_one(_dimensions(value)))
    return next(iter(axes), 0 if is_row else None)


def _external_faults(model: onnx.ModelProto, folder: Path) -> Iterator[str]:
    """Name tensors whose data are not in a file of the model."""
    root = folder.resolve()
    for tensor in _tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        # A key may come twice, and onnx takes the last.
        for location in [e.value for e in tensor.external_data if e.key == "location"] or [""]:
            path = PurePosixPath(location)
            where = f"initializer {tensor.name!r}: external data in {location!r}"
            if not location or path.is_absolute() or ".." in path.parts or "\\" in location:
                yield f"{where}, expected a file inside the model's folder"
            elif not (folder / path).is_file():
                yield f"{where}, which is not among the model's files"
            elif not (folder / path).resolve().is_relative_to(root):
                yield f"{where}, which leads outside the model's folder"


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


def _symbol(dimension: onnx.TensorShapeProto.Dimension) -> str | None:
    """The symbol of an open dimension, empty if it has no name. Returns None if the dimension is fixed."""
    return None if dimension.HasField("dim_value") else dimension.dim_param


def _is_one(dimensions: Sequence[onnx.TensorShapeProto.Dimension]) -> bool:
    """Whether a shape begins with a fixed 1."""
    return bool(dimensions) and dimensions[0].dim_value == 1
