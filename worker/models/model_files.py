"""A model before and after compiling, as plain data that crosses processes and disks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NoReturn

import msgspec

from clockwright.errors import ModelError
from clockwright.units import PAGE_BYTES
from clockwright.wire.tensors import (
    DATATYPES,
    ONNX_DATATYPES,
    ROWS_OF_UNIT,
    TensorSpec,
    Variable,
    row_elements,
)
from worker.core.io_pool import aligned

#: A batch of a model with open dimensions holds at most so many of its largest rows. Smaller rows: more.
LARGEST_TOGETHER = 4
#: The file that a model folder must have.
MODEL_FILE = "model.onnx"
#: The files of a compiled model.
GRAPH_FILE, WEIGHTS_FILE, METADATA_FILE = "graph.onnx", "weights.bin", "model.json"
#: Default limits of compiling a model: memory, and processor time over all threads. A network takes five times its
#: weights, and in addition what its activations need.
COMPILE_BYTES, COMPILE_CPU_S = 5 << 30, 300.0


#: One Infer may use a quarter of the IO memory, so that there is always room for others.
IO_SHARE = 4

# A key that TOML takes without quotes.
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def sizes_to_write(symbols: Iterable[str], given: Mapping[str, int]) -> str:
    """The line of `config.toml` that gives dimensions their sizes.

    Args:
        symbols: dimensions whose sizes are not known; SIZE stands for them.
        given: what the file says now; a negative size is the largest of an open one.
    """
    sizes = {
        name: str(size) if size > 0 else f"{{ max = {-size} }}" for name, size in given.items()
    }
    sizes |= dict.fromkeys(symbols, "SIZE")
    entries = (
        f"{name if _BARE_KEY.fullmatch(name) else json.dumps(name)} = {size}"
        for name, size in sizes.items()
    )
    return f"dimensions = {{ {', '.join(entries)} }}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker has room for, and what compiling a model for it may take."""

    #: Room for the weights of one model: the arena that EXEC gathers weights into.
    arena_bytes: int
    #: The pages of the whole weights cache.
    num_pages: int
    #: Room for the inputs and outputs of one batch.
    io_bytes: int
    #: Memory of the compiler's process.
    compile_bytes: int = COMPILE_BYTES
    #: Processor time for one model.
    compile_cpu_s: float = COMPILE_CPU_S

    def check_weights(self, weights_bytes: int) -> None:
        """Refuse weights that do not fit.

        Raises ModelError that names the room that is too small, and how to get more.
        """
        if weights_bytes > self.arena_bytes:
            raise ModelError(
                f"the weights have {weights_bytes} bytes, more than the weight arena's "
                f"{self.arena_bytes}; start the worker with --arena-mib {-(-weights_bytes // (1 << 20))}"
            )
        if weights_bytes > self.num_pages * PAGE_BYTES:
            raise ModelError(
                f"the weights have {weights_bytes} bytes, more than the weights cache's "
                f"{self.num_pages} pages of {PAGE_BYTES}; start the worker with --pages "
                f"{-(-weights_bytes // PAGE_BYTES)}"
            )

    def usable_batch_sizes(
        self,
        tensors: Sequence[TensorSpec],
        offered: Sequence[int],
        *,
        fixed_batch: bool,
        room: int = 1,
    ) -> tuple[int, ...]:
        """Select the offered batch sizes that can be served.

        Args:
            tensors: inputs and outputs together.
            offered: the sizes that the controller would like.
            fixed_batch: the model runs single rows only.
            room: a batch needs so many times the bytes of its tensors.

        Returns:
            The usable sizes, ascending.

        Raises:
            ModelError: no size is usable.
        """
        if not offered or min(offered) < 1:
            raise ModelError(f"batch sizes: found {list(offered)}, expected numbers of 1 or more")
        sizes = sorted({size for size in offered if size == 1 or not fixed_batch})
        if not sizes:
            raise ModelError(
                f"its batch dimension is fixed to 1, but batch sizes {list(offered)} are asked for"
            )
        usable = tuple(size for size in sizes if room * batch_bytes(tensors, size) <= self.io_bytes)
        if not usable:
            self.refuse_batch(sizes[0], room * batch_bytes(tensors, sizes[0]))
        return usable

    def refuse_batch(self, size: int, num_bytes: int) -> NoReturn:
        """Refuse a model whose smallest batch has no room.

        Raises ModelError always; names the room, and how to get more.
        """
        raise ModelError(
            f"inputs and outputs of a batch of {size} have {num_bytes} bytes, more than an action's "
            f"{self.io_bytes}; start the worker with --io-mib {-(-num_bytes * IO_SHARE // (1 << 20))}"
        )


#: The bytes of text of a batch, for each of its tensors of datatype BYTES: those of a row are a part of them.
TEXT_BATCH_BYTES = 1 << 20
# A short text, where nothing else is known.
_TEXT_BYTES = 32
#: Room for the words of a failure in place of a tensor.
WORDS_BYTES = 512


def element_bytes(datatype: str) -> int:
    """The bytes of an element; of a short text, where nothing else is known."""
    return DATATYPES[datatype].num_bytes or _TEXT_BYTES


def carrying(
    specs: Sequence[TensorSpec], largest_batch: int, usual_bytes: Sequence[int] = ()
) -> tuple[TensorSpec, ...]:
    """Make the tensors of a model with texts, or of a container with open dimensions, carry their sizes.

    Args:
        specs: the tensors; of open ones the bytes of the largest row are known, without what stands before them.
        largest_batch: the rows of the largest batch.
        usual_bytes: of each, the bytes of a row in a run to try; empty: they are guessed.
    """
    made = []
    for index, spec in enumerate(specs):
        content = usual = spec.batch_bytes(1)
        if spec.datatype == "BYTES":
            usual = element_bytes(spec.datatype) * prod(spec.largest_row)
            content = max(TEXT_BATCH_BYTES // largest_batch, usual)
        if usual_bytes:
            usual = usual_bytes[index]
        header = spec.header_bytes
        room, usual = header + max(content, WORDS_BYTES), header + usual
        known = spec.vary or Variable(0)
        made.append(replace(spec, vary=replace(known, unit_bytes=room, usual_bytes=usual)))
    return tuple(made)


def batch_bytes(tensors: Sequence[TensorSpec], batch_size: int) -> int:
    """The bytes of a batch of all these tensors, each starting on a cache line."""
    return sum(aligned(spec.batch_bytes(batch_size)) for spec in tensors)


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One lifted initializer: an input of the compiled graph whose bytes lie in the weights blob."""

    name: str
    #: ONNX's number of the datatype.
    element_type: int
    shape: tuple[int, ...]
    #: Where its bytes begin in the blob.
    offset: int
    num_bytes: int
    #: Whether the bytes are in the order (first, height, width, channel); `shape` has channels second.
    channels_last: bool = False


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """An input or output of the compiled graph, as the client and as the graph know it."""

    spec: TensorSpec
    graph_name: str
    #: ONNX's number of the datatype.
    element_type: int


def powers_and_halves(end: int) -> list[int]:
    """Powers of two, and halves between, below an end."""
    found = {size for power in range(end.bit_length()) for size in (1 << power, 3 << power)}
    return sorted(size for size in found if size < end)


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """What is known of a model whose inputs have open dimensions besides the batch."""

    #: Elements of a row of work, as `clockwright.wire.tensors.Variable.unit`.
    unit: int
    symbols: tuple[str, ...]
    #: Sizes of them that the model takes, ascending; the last are the largest.
    taken: tuple[tuple[int, ...], ...]
    #: Whether a row's answer is the same when zeros are appended to its inputs, and what is appended to its outputs is
    #: cut off. Then requests of unlike sizes may share a run.
    pads: bool = False
    #: By input, whether that holds only of rows with no negative number and one of 1 or more: masks.
    guarded: tuple[bool, ...] = ()
    #: The symbols that are sums of others, with their parts.
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: The symbols whose size may be 0.
    empty: tuple[str, ...] = ()
    #: A batch has room for so many times its tensors.
    room: int = 1

    def elements(self, sizes: Sequence[int]) -> int:
        """The elements of a row of these sizes, one for each symbol."""
        return row_elements(dict(zip(self.symbols, sizes, strict=True)), self.sums, self.empty)

    @property
    def least_elements(self) -> int:
        """The elements that a row counts as at least."""
        return max(self.unit // ROWS_OF_UNIT, 1)

    @property
    def largest(self) -> int:
        """The rows of work of the largest row."""
        return -(-self.elements(self.taken[-1]) // self.unit)

    def batch_sizes(self, offered: Sequence[int]) -> tuple[int, ...]:
        """The rows of work of batches, ascending: powers of two, and halves between.

        The largest holds as many of the largest rows as `offered` allows, but few: on a processor such rows gain
        nothing by company.
        """
        most = self.largest * min(max(offered), LARGEST_TOGETHER)
        return tuple(sorted({*powers_and_halves(most), self.largest, most}))


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """`model.json`: everything but the graph and the weights themselves."""

    #: The graph's hash. The graph has canonical names, so instances of one network share the hash.
    architecture_id: str
    #: The weights file's hash, to notice damage.
    weights_sha256: str
    weights_bytes: int
    inputs: tuple[BoundTensor, ...]
    outputs: tuple[BoundTensor, ...]
    weights: tuple[WeightTensor, ...] = ()
    #: Whether the batch dimension is a fixed 1 in the ONNX file, so that no other batch size exists.
    fixed_batch: bool = False
    #: Why rows are run one by one although the file's batch is open, in words; empty if they need not be.
    one_by_one: str = ""
    #: The batch sizes that were tried, ascending.
    tried: tuple[int, ...] = (1,)
    #: The threads of a run on the processor that the rows were seen apart with.
    threads: int = 1
    #: What the integers of a first run are.
    fill: int = 0
    #: Its open sizes; None: all sizes but the batch are fixed.
    open: OpenSizes | None = None
    #: The lists of texts that it knows, of which the texts of a first run are.
    texts: tuple[tuple[str, ...], ...] = ()
    #: The bytes of a row of each output in a run to try, if the model has texts.
    usual_bytes: tuple[int, ...] = ()
    #: The graph's hash where that is not `architecture_id`, to notice damage.
    graph_sha256: str = ""

    @property
    def has_texts(self) -> bool:
        """Whether an input or output is text."""
        return any(each.spec.datatype == "BYTES" for each in (*self.inputs, *self.outputs))

    @property
    def num_pages(self) -> int:
        """The pages that the weights fill; a model without weights still takes one."""
        return max(1, -(-self.weights_bytes // PAGE_BYTES))

    def covers(self, batch_sizes: Sequence[int], io_bytes: int) -> bool:
        """Whether it is known how to serve those of these batch sizes that have room."""
        if self.fixed_batch or self.one_by_one or self.open:
            return True
        tensors = [tensor.spec for tensor in (*self.inputs, *self.outputs)]
        return all(
            size in (1, *self.tried) or batch_bytes(tensors, size) > io_bytes
            for size in batch_sizes
        )

    def to_json(self) -> str:
        """Write as JSON."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> CompiledModel:
        """Read what `to_json` wrote.

        Raises ValueError if the text is something else, or a tensor in it leads outside its memory.
        """
        try:
            compiled = msgspec.json.decode(text, type=CompiledModel)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
        for weight in compiled.weights:
            end = weight.offset + weight.num_bytes
            if not 0 <= weight.offset <= end <= compiled.weights_bytes:
                raise ValueError(
                    f"weight {weight.name}: found bytes {weight.offset} to {end}, expected them among"
                    f" {compiled.weights_bytes}"
                )
            _check_size(weight.name, weight.element_type, weight.shape, weight.num_bytes)
        for tensor in (*compiled.inputs, *compiled.outputs):
            spec = tensor.spec
            if spec.vary is None:
                _check_size(spec.name, tensor.element_type, spec.shape(1), spec.batch_bytes(1))
        return compiled


def _check_size(name: str, element_type: int, shape: tuple[int, ...], num_bytes: int) -> None:
    """Raise a ValueError unless a tensor of a known type has as many bytes as its shape says."""
    kind = ONNX_DATATYPES.get(element_type)
    sized = kind and kind.num_bytes
    if min(shape, default=0) < 0 or (sized and prod(shape) * sized != num_bytes):
        raise ValueError(f"tensor {name}: found {num_bytes} bytes for shape {list(shape)}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as its owner wrote it."""

    #: The folder with `model.onnx` and the files that it refers to.
    folder: Path
    #: Sizes for dimensions that the file leaves open, other than the batch.
    fixed_dimensions: Mapping[str, int] = field(default_factory=dict)
    #: The batch sizes that it is to be served with, each of which is checked.
    batch_sizes: tuple[int, ...] = (1, 2)
