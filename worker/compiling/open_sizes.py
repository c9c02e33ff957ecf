"""Finds out which sizes a model with open dimensions takes, how large its tensors get, and whether padding changes answers.

All of it by runs of one row, because files seldom say it: an encoder that has 512 positions declares `sequence_length`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from clockwright.elements import Array, array_of, bytes_of, elements_of, raw_of
from clockwright.errors import ModelError
from clockwright.units import NS_PER_S
from clockwright.wire.tensors import DATATYPES, TensorSpec, Variable, addends, sum_of
from worker.compiling.row_probes import SAME_SIZE, differ, draw_numbers
from worker.engines.open_kernel import Answer, RunOpen, open_places
from worker.models.model_files import (
    LARGEST_TOGETHER,
    TEXT_BATCH_BYTES,
    WORDS_BYTES,
    CompiledModel,
    OpenSizes,
    element_bytes,
    sizes_to_write,
)

#: Where no size is declared, none is tried that is larger,
SIZE_MAX: Final = 1 << 16
#: nor any at which a row takes more processor time.
SLOW_NS: Final = NS_PER_S
#: Rows of work of the largest row: a finer unit makes more batch sizes to measure, a coarser one wastes more of a batch.
_UNITS: Final = 32

# Sizes to begin with, all dimensions alike, until the model takes one; most take the first.
_FIRST = (16, 32, 64, 128, 256, 8, 4, 3, 2, 1, 512)
# Each of more than five dimensions smallest or largest would be too many to try.
_CORNERS_MAX = 32
_NO_LIMIT = 1 << 62
# An output whose shape follows from values has room for so many times what a run to try gave, and for so many bytes
# or a part of what a batch has.
_ROOM_FACTOR, _ROOM_BYTES, _ROOM_PART = 4, 1 << 20, 8
# Requests of unlike sizes that a profile asks together, and again.
_UNLIKE = 16

Numbers = np.ndarray[Any, np.dtype[Any]]
Sizes = tuple[int, ...]
Shapes = list[tuple[int, ...]]
#: Runs one row at some sizes. Returns the shapes of the outputs.
RunAt = Callable[[Mapping[str, int]], Shapes]


def symbols_of(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """The symbols of all open dimensions, but for those that are sums of others."""
    found = dict.fromkeys(symbol for spec in specs for symbol, _ in open_places(spec))
    return tuple(symbol for symbol in found if not addends(symbol, found))


def sums_of(specs: Sequence[TensorSpec]) -> dict[str, tuple[str, ...]]:
    """The symbols that are sums of others, with what they are made of."""
    found = dict.fromkeys(symbol for spec in specs for symbol, _ in open_places(spec))
    return {symbol: parts for symbol in found if (parts := addends(symbol, found))}


def at_sizes(spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    """The spec of an input at some sizes."""
    symbols = iter(spec.vary.symbols if spec.vary else ())
    shape = tuple(_size(next(symbols), sizes) if size < 0 else size for size in spec.row_shape)
    return TensorSpec(spec.name, spec.datatype, shape, spec.axis)


def at_form(compiled: CompiledModel, form: int) -> CompiledModel:
    """A model with one open dimension as one of that size alone, which is an architecture of its own."""
    assert compiled.open is not None
    sizes = dict.fromkeys(compiled.open.symbols, form)
    inputs, outputs = (
        tuple(replace(tensor, spec=at_sizes(tensor.spec, sizes)) for tensor in side)
        for side in (compiled.inputs, compiled.outputs)
    )
    name = f"{compiled.architecture_id}-{form}"
    return replace(compiled, architecture_id=name, inputs=inputs, outputs=outputs, open=None)


class RanksError(ModelError):
    """Answers of some sizes have fewer dimensions than others, so there are no rows of one rank."""


def _size(symbol: str, sizes: Mapping[str, int]) -> int:
    return sizes[symbol] if symbol in sizes else sum_of(addends(symbol, sizes), sizes)


@dataclass(slots=True)
class SizeSearch:
    """What a model takes, as far as it was tried."""

    run: RunAt
    symbols: tuple[str, ...]
    #: The largest sizes that its owner declares.
    bounds: Mapping[str, int]
    #: Bytes that the inputs and outputs of one row may have.
    io_bytes: int
    inputs: Sequence[TensorSpec]
    outputs: Sequence[str]
    #: The symbols whose size may be 0. Only parts of sums are tried: what a decoder has seen is nothing at first.
    empty: tuple[str, ...] = ()
    #: The shapes of outputs, by the sizes.
    taken: dict[Sizes, Shapes] = field(default_factory=dict)
    #: Why the latest try failed.
    why: str = ""
    #: How long the latest run took.
    run_ns: int = 0

    def find(self) -> Sizes:
        """Find the smallest, some, and the largest sizes. Returns those to begin with.

        Raises ModelError if the model takes none that was tried, or not its owner's.
        """
        first = next(filter(self._takes, self._starts()), None)
        if first is None:
            raise ModelError(
                f"it fails at all sizes that were tried of {', '.join(map(repr, self.symbols))}: {self.why}; write"
                f" those that it takes in config.toml: {sizes_to_write(self.symbols, {})}"
            )
        everything = range(len(self.symbols))
        for size in range(1, max(first)):
            # Few sizes, because where small ones fail, many do.
            least = tuple(min(size, each) for each in first)
            if size.bit_count() <= 1 and self._takes(least):
                break
        else:
            least = first
        largest = self._grow(first, everything)
        if len(self.symbols) > 1:
            for index in everything:
                self._grow(first, [index])
        for index, symbol in enumerate(self.symbols):
            found = max(sizes[index] for sizes in self.taken)
            if found < self.bounds.get(symbol, 0):
                raise ModelError(
                    f"[dimensions] says that {symbol!r} goes up to {self.bounds[symbol]}, but {found} is the largest"
                    f" size that works: {self.why}"
                )
        for index in everything:
            # A network may drop dimensions of size 1.
            self._takes((*first[:index], 1, *first[index + 1 :]))
        for parts in sums_of(self.inputs).values():
            self._try_empty(first, parts)
        # How much an output grows with each of them.
        for corner in islice(product(*zip(least, largest, strict=True)), _CORNERS_MAX):
            self._takes(corner)
        return first

    def _try_empty(self, sizes: Sizes, parts: Sequence[str]) -> None:
        """Find the first part of a sum that may be 0. Exporters write the past first."""
        for part in parts:
            if part in self.empty:
                return
            if part in self.symbols:
                index = self.symbols.index(part)
                nothing = (*sizes[:index], 0, *sizes[index + 1 :])
                if self._takes(nothing):
                    del self.taken[nothing]
                    self.empty = (*self.empty, part)
                    return

    def _starts(self) -> Iterator[Sizes]:
        for size in _FIRST:
            yield tuple(min(size, self.bounds.get(symbol, size)) for symbol in self.symbols)

    def _most(self, index: int) -> int:
        return self.bounds.get(self.symbols[index], SIZE_MAX)

    def _grow(self, sizes: Sizes, places: Sequence[int]) -> Sizes:
        """Double some of the sizes until that fails or takes long; then look for the largest that works."""
        self.run_ns = 0
        while True:
            wider = tuple(
                min(2 * size, self._most(place)) if place in places else size
                for place, size in enumerate(sizes)
            )
            if wider == sizes:
                return sizes
            is_declared = all(self.symbols[place] in self.bounds for place in places)
            if not is_declared and self.run_ns > SLOW_NS // 4:
                self.why = f"a row of {self._words(sizes)} takes {self.run_ns / NS_PER_S:.2g} s"
                return sizes
            if self._takes(wider):
                if is_declared or self.run_ns <= SLOW_NS:
                    sizes = wider
                    continue
                del self.taken[wider]
            if self.run_ns > SLOW_NS:
                return sizes
            low, high = sizes, wider
            while (middle := tuple((a + b) // 2 for a, b in zip(low, high, strict=True))) != low:
                if self._takes(middle):
                    low = middle
                else:
                    high = middle
            return low

    def _words(self, sizes: Sizes) -> str:
        return ", ".join(f"{name} {size}" for name, size in zip(self.symbols, sizes, strict=True))

    def _takes(self, sizes: Sizes) -> bool:
        if sizes in self.taken:
            return True
        named = dict(zip(self.symbols, sizes, strict=True))
        # Not what other load on the machine makes of it: workers are to find the same.
        begin_ns = time.process_time_ns()
        num_bytes = sum(
            prod(at_sizes(spec, named).shape(1)) * element_bytes(spec.datatype)
            for spec in self.inputs
        )
        try:
            if num_bytes > self.io_bytes:
                raise ModelError(self._too_large(sizes, num_bytes))
            shapes = self.run(named)
            num_bytes += sum(
                prod(shape) * element_bytes(datatype)
                for shape, datatype in zip(shapes, self.outputs, strict=True)
            )
            if num_bytes > self.io_bytes:
                raise ModelError(self._too_large(sizes, num_bytes))
        except ModelError as error:
            self.why = str(error)
            return False
        finally:
            self.run_ns = time.process_time_ns() - begin_ns
        self.taken[sizes] = shapes
        return True

    def _too_large(self, sizes: Sizes, num_bytes: int) -> str:
        return (
            f"inputs and outputs of a row of {self._words(sizes)} have {num_bytes} bytes, more than the"
            f" {self.io_bytes} that one has room for"
        )

    def open_sizes(self) -> OpenSizes:
        """Sum up what was found."""
        sizes = OpenSizes(0, self.symbols, (), sums=sums_of(self.inputs), empty=self.empty)
        return taking(sizes, sorted(self.taken, key=sizes.elements))


def taking(sizes: OpenSizes, taken: Sequence[Sizes]) -> OpenSizes:
    """Choose the row of work of a model that takes these sizes, the largest last."""
    return replace(sizes, unit=-(-sizes.elements(taken[-1]) // _UNITS), taken=tuple(taken))


def fullest(sizes: OpenSizes, work: int) -> Sizes:
    """The largest sizes that the model takes and that are no more than so many rows of work."""
    fit = [each for each in sizes.taken if sizes.elements(each) <= work * sizes.unit]
    return fit[-1] if fit else sizes.taken[0]


def short_sizes(sizes: OpenSizes) -> list[Sizes]:
    """Some unlike sizes of a row of work each, the smallest that the model takes first. It may not take the others."""
    longest = fullest(sizes, 1)
    less = [tuple(max(1, size - number) for size in longest) for number in range(_UNLIKE)]
    return list(dict.fromkeys((sizes.taken[0], *less)))


def open_inputs(specs: Sequence[TensorSpec], sizes: OpenSizes, *, whole: bool) -> list[TensorSpec]:
    """The specs of inputs. `whole`: a request is one run, whatever its shape; there are no rows."""
    found = []
    corners = product(*(sorted({min(each), max(each)}) for each in zip(*sizes.taken, strict=True)))
    every = [*sizes.taken, *islice(corners, _CORNERS_MAX)]
    for spec in specs:
        at = {
            each: at_sizes(spec, dict(zip(sizes.symbols, each, strict=True))).shape(1)
            for each in every
        }
        row_shape, axis = (spec.shape(1), None) if whole else (spec.row_shape, spec.axis)
        symbols = [symbol for symbol, _ in open_places(spec)]
        found.append(_bounded(spec, row_shape, axis, symbols, at, sizes))
    return found


def open_outputs(
    specs: Sequence[TensorSpec],
    shapes: Mapping[Sizes, Shapes],
    sizes: OpenSizes,
    by_value: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    io_bytes: int = 0,
    *,
    whole: bool,
) -> list[TensorSpec]:
    """The specs of outputs.

    Args:
        specs: theirs at some sizes.
        shapes: their whole shapes in runs of one row.
        sizes: what the model takes.
        by_value: what is known of shapes that follow from values, by output; -1: a dimension does.
        io_bytes: the room for inputs and outputs of a batch.
        whole: as in `open_inputs`.

    Raises:
        RanksError: an output of rows has not always as many dimensions.
    """
    found = []
    room = min(_ROOM_BYTES, io_bytes // _ROOM_PART)
    for index, spec in enumerate(specs):
        at = {each: shapes[each][index] for each in sizes.taken}
        ranks = sorted({len(shape) for shape in at.values()})
        # A number of dimensions that sizes decide was told of one size only.
        if (told := by_value.get(spec.name)) is not None and len(ranks) == 1:
            at = {each: shape if len(shape) == len(told) else told for each, shape in at.items()}
            ranks = [len(told)]
        if len(ranks) > 1 and not whole:
            raise RanksError(
                f"output {spec.name!r} has {' or '.join(map(str, ranks))} dimensions, expected as many for all sizes"
            )
        at = {each: (*shape, *[1] * (ranks[-1] - len(shape))) for each, shape in at.items()}
        axis = None if whole else spec.axis
        row_shape, symbols = [], []
        for place in range(ranks[-1]):
            if place == axis:
                continue
            here = {each: shape[place] for each, shape in at.items()}
            is_fixed = len(set(here.values())) == 1 and len(ranks) == 1
            if is_fixed and (told is None or told[place] >= 0):
                row_shape.append(next(iter(here.values())))
            else:
                row_shape.append(-1)
                symbols.append(_symbol_of(here, sizes.symbols) or f"{spec.name}[{place}]")
        made = _bounded(spec, tuple(row_shape), axis, symbols, at, sizes)
        if len(ranks) > 1 and made.vary is not None:
            made = replace(made, vary=replace(made.vary, may_lack=True))
        if told is not None and made.vary is not None:
            most = max(_ROOM_FACTOR * made.vary.unit_bytes, room // sizes.largest)
            usual = made.vary.unit_bytes
            made = replace(made, vary=replace(made.vary, unit_bytes=most, usual_bytes=usual))
        found.append(made)
    return found


def _bounded(
    spec: TensorSpec,
    row_shape: tuple[int, ...],
    axis: int | None,
    symbols: Sequence[str],
    at: Mapping[Sizes, tuple[int, ...]],
    sizes: OpenSizes,
) -> TensorSpec:
    """Find how large tensors get.

    Their elements are a number times a power of each size. So their number for each row of work is largest where each
    size is smallest or largest. `at` has whole shapes of one row, by the sizes.
    """
    vary = Variable(0, tuple(symbols), (), sizes.unit, empty=sizes.empty)
    made = TensorSpec(spec.name, spec.datatype, row_shape, axis, vary)
    places = [place for _, place in open_places(made)]
    unit_bytes, most = 0, (1,) * len(places)
    for each, shape in at.items():
        elements = sizes.elements(each)
        rows = 1 if axis is None else max(1, min(vary.rows_of_unit, sizes.unit // max(elements, 1)))
        num_bytes = rows * prod(shape) * element_bytes(spec.datatype)
        unit_bytes = max(unit_bytes, -(-num_bytes // vary.work(rows, elements)))
        here = tuple(shape[place] for place in places)
        most = tuple(map(max, most, here))
    usual_bytes = 0
    if spec.datatype == "BYTES":
        # A short row may have one long text.
        usual_bytes = made.header_bytes + unit_bytes
        most_work = max(sizes.batch_sizes((LARGEST_TOGETHER,)))
        unit_bytes = max(unit_bytes, TEXT_BATCH_BYTES // most_work)
    unit_bytes += made.header_bytes + WORDS_BYTES
    vary = replace(vary, unit_bytes=unit_bytes, most=most, usual_bytes=usual_bytes)
    return replace(made, vary=vary)


def _symbol_of(found: Mapping[Sizes, int], symbols: Sequence[str]) -> str | None:
    """Find the one symbol whose size a dimension has. Returns None if the symbol is missing or not the only one."""
    equal = [
        symbol
        for index, symbol in enumerate(symbols)
        if all(each[index] == size for each, size in found.items())
    ]
    return equal[0] if len(equal) == 1 else None


def prove_padding(
    run: RunOpen,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    sizes: OpenSizes,
    *,
    most: int,
) -> OpenSizes:
    """Find out by runs whether zeros behind a row change its answer.

    Rows of several lengths are answered alone, and with a longer row. Contents are random numbers, small ones, ones in
    one input after the other (a mask), and then whatever makes zeros stand out: a maximum over the length is that of the
    row unless all its numbers are negative. An input that bears only some of these is guarded: its rows are padded where
    none has a negative number, and each has one of 1 or more. With a mask of zeros, an encoder attends to its padding.

    Args:
        run: the model, with a kernel that pads.
        inputs: what it takes.
        outputs: what it gives.
        sizes: what it takes of open sizes.
        most: integers to try are below this.
    """
    if not all(symbol in sizes.symbols for spec in outputs for symbol, _ in open_places(spec)):
        return sizes
    trial = _PaddingTrial(run, inputs, outputs, sizes.symbols)
    pairs = _lengths(sizes)
    padded = [index for index, spec in enumerate(inputs) if any(open_places(spec))]

    def hold(most: int, kinds: Mapping[int, str]) -> bool:
        return all(trial.holds(pair, most, kinds) for pair in pairs)

    ones = [index for index in padded if not DATATYPES[inputs[index].datatype].is_float]
    if not pairs or not (hold(most, {}) and hold(2, {})):
        return sizes
    if not all(hold(most, {index: "ones"}) for index in ones):
        return sizes
    guarded = tuple(
        index in padded and not all(hold(most, {index: kind}) for kind in _KINDS)
        for index in range(len(inputs))
    )
    trial.guarded = guarded
    # What each input bears alone, they may not bear together.
    together = [{index: kind for index in padded} for kind in _KINDS]
    alone = [{index: kind} for index in padded if guarded[index] for kind in _KINDS]
    if not all(hold(most, kinds) for kinds in (*alone, *together)):
        return sizes
    return replace(sizes, pads=True, guarded=guarded)


def _lengths(sizes: OpenSizes) -> list[tuple[Sizes, Sizes]]:
    """Short and long rows to compare: of sizes that the model takes, some next to them, and the shortest."""
    middle = [each for each in sizes.taken if max(each) >= 8] or list(sizes.taken)
    short, long = middle[0], middle[len(middle) // 2]
    if short == long:
        # A bound may be all that was tried.
        short = tuple(max(1, size // 2) for size in long)
    if short == long:
        return []
    less = tuple(max(1, size - 3) for size in short)
    one = tuple(1 for _ in short)
    return [(short, long), (less, short), (less, tuple(size - 1 for size in long)), (one, less)]


#: Contents of an input, by name: of random numbers.
_KINDS: Final[Mapping[str, Callable[[Numbers], Numbers]]] = {
    "zeros": np.zeros_like,
    "ones": np.ones_like,
    "negative": lambda numbers: -abs(numbers),
    "positive": abs,
    "small": lambda numbers: numbers / 1000,
    "large": lambda numbers: numbers * 100,
}


@dataclass(slots=True)
class _PaddingTrial:
    """Rows alone and padded."""

    run: RunOpen
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    symbols: Sequence[str]
    #: The inputs whose rows have no negative number, and one of 1 at least.
    guarded: Sequence[bool] = ()

    def holds(self, lengths: tuple[Sizes, Sizes], most: int, kinds: Mapping[int, str]) -> bool:
        """Whether rows have the same answers padded, and rows of other contents have other answers.

        Args:
            lengths: of the rows that are padded, and of a longer one.
            most: integers are below this.
            kinds: what some inputs are, by their places; see `_KINDS`.
        """
        rows = [
            self._row(dict(zip(self.symbols, each, strict=True)), most, kinds, seed)
            for seed, each in enumerate((lengths[0], lengths[1], lengths[0]))
        ]
        alone = [self.run([row], _NO_LIMIT)[0] for row in rows]
        together = self.run(rows, _NO_LIMIT)
        # One that takes no row of these lengths, or contents, takes none that is padded to them.
        same = all(map(self._same, alone, together))
        is_plain = not kinds and min(map(max, lengths)) > 1
        return same and not (is_plain and self._same(alone[0], alone[2]))

    def _row(
        self, sizes: Mapping[str, int], most: int, kinds: Mapping[int, str], seed: int
    ) -> list[Array]:
        return draw_row(self.inputs, sizes, most, seed, self.guarded, kinds)

    def _same(self, one: Answer, other: Answer) -> bool:
        if isinstance(one, str) or isinstance(other, str):
            return isinstance(one, str) and isinstance(other, str)
        for spec, a, b in zip(self.outputs, one, other, strict=True):
            if a.shape != b.shape:
                return False
            rows = [elements_of(spec.datatype, raw_of(each)).reshape(1, -1) for each in (a, b)]
            if differ(*rows, tolerance=SAME_SIZE):
                return False
        return True


def draw_row(
    inputs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    most: int,
    seed: int,
    guarded: Sequence[bool] = (),
    kinds: Mapping[int, str] = MappingProxyType({}),
) -> list[Array]:
    """Draw a row that a model may be padded with.

    Args:
        inputs: what the model takes.
        sizes: of the row, by symbol.
        most: integers are below this.
        seed: other rows for other seeds.
        guarded: the inputs whose rows have no negative number, and one of 1 at least.
        kinds: what some inputs are, by their places; see `_KINDS`.
    """
    row: list[Array] = []
    for index, spec in enumerate(inputs):
        here = at_sizes(spec, sizes)
        generator = np.random.default_rng([seed, index])
        raw = _draw(here, generator, most, kinds.get(index, ""))
        is_guarded = bool(guarded) and guarded[index]
        if (is_guarded or index not in kinds) and any(open_places(spec)):
            numbers = elements_of(spec.datatype, raw_of(raw)).copy()
            if is_guarded and spec.datatype != "BOOL":
                numbers = abs(numbers)
            if not (numbers >= 1).any():
                numbers[generator.integers(numbers.size)] = 1
            raw = bytes_of(spec.datatype, numbers)
        row.append(array_of(spec.datatype, raw_of(raw), here.shape(1)))
    return row


def _draw(spec: TensorSpec, generator: np.random.Generator, most: int, kind: str) -> Numbers:
    """Draw the bytes of a tensor whose contents are of a kind; integers stay within what their datatype can say."""
    raw = draw_numbers(spec, generator, most, plain=False)
    if not kind:
        return raw
    numbers = elements_of(spec.datatype, raw.reshape(-1).view(np.uint8))
    if DATATYPES[spec.datatype].is_float:
        return bytes_of(spec.datatype, _KINDS[kind](numbers))
    if spec.datatype == "BOOL":
        return np.full_like(numbers, kind not in ("zeros", "negative"))
    low, high = np.iinfo(numbers.dtype).min, np.iinfo(numbers.dtype).max
    if kind == "large":
        return np.full_like(numbers, min(max(most - 1, 1), high))
    if kind == "small":
        return numbers
    made = _KINDS[kind](numbers)
    return np.maximum(made, 1 if kind == "positive" else low)
