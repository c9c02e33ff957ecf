"""The sizes of a request to a model with open dimensions: whether they fit each other, and what they come to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from clockwright.errors import BadRequestError
from clockwright.foreign import quote
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec, Variable, addends, row_elements, sum_of

#: By symbol the size, and the input that had it.
Sizes = dict[str, tuple[int, str]]


def check_sizes(spec: TensorSpec, shape: Sequence[int], sizes: Sizes) -> None:
    """Check an input's open dimensions. `sizes` has those before it, and gets those of this one.

    Raises BadRequestError if a size is too small or too large, or another than in an earlier input.
    """
    assert spec.vary is not None
    places = [place for place, size in enumerate(spec.shape(1)) if size < 0]
    for symbol, most, place in zip(spec.vary.symbols, spec.vary.most, places, strict=True):
        found = shape[place]
        what = f"input {quote(spec.name)}: found {symbol} {found} (shape[{place}]), expected"
        least = 0 if symbol in spec.vary.empty else 1
        if not least <= found <= most:
            raise BadRequestError(
                f"{what} {least} to {most}, the largest size that the model is served with"
            )
        known, other = sizes.setdefault(symbol, (found, spec.name))
        if known != found:
            raise BadRequestError(f"{what} {known} as in input {quote(other)}")


def rows_of_work(
    vary: Variable, rows: int, sizes: Mapping[str, tuple[int, str]], largest_batch: int
) -> int:
    """Find what rows of open sizes come to.

    Args:
        vary: of an input of the model, all of which have the same unit.
        rows: of the request.
        sizes: of all inputs.
        largest_batch: the most rows of work that a request may have.

    Raises:
        BadRequestError: it has more, or a size that is a sum is not the sum.
    """
    own, sums = {symbol: size for symbol, (size, _) in sizes.items()}, {}
    for symbol, (size, name) in sizes.items():
        if "+" in symbol and (parts := addends(symbol, sizes)):
            del own[symbol]
            sums[symbol] = parts
            if size != (wanted := sum_of(parts, own)):
                raise BadRequestError(
                    f"input {quote(name)}: found {symbol} {size}, expected {wanted} in this request"
                )
    elements = row_elements(own, sums, vary.empty)
    work = vary.work(rows, elements)
    if work > largest_batch:
        words = " x ".join(("rows", *own))
        raise BadRequestError(
            f"found {words} = {rows * elements}, expected {largest_batch * vary.unit} at most in a request;"
            " send fewer rows at a time, or smaller ones"
        )
    return work


def work_of(
    specs: Sequence[TensorSpec], inputs: Sequence[Buffer], rows: int, largest_batch: int
) -> int:
    """Find what the rows of a request come to for a model: as many rows of work, if its dimensions are open.

    Args:
        specs: the model's inputs.
        inputs: of the request.
        rows: of the request.
        largest_batch: the most rows of work that it may have.

    Raises:
        BadRequestError: its sizes do not fit each other or the model, or are too large for a batch.
        RefusedError: an input stands for a request that failed.
        ValueError: an input is no tensor of its spec.
    """
    vary, sizes = specs[0].vary if specs else None, Sizes()
    if vary is None:
        return rows
    for spec, tensor in zip(specs, inputs, strict=True):
        check_sizes(spec, spec.unpack(tensor)[0].row_shape, sizes)
    if not vary.unit:
        return rows
    work = rows_of_work(vary, rows, sizes, largest_batch)
    for spec, tensor in zip(specs, inputs, strict=True):
        if not spec.fits(len(tensor), work):
            raise BadRequestError(
                f"input {quote(spec.name)}: found {len(tensor)} bytes, expected {spec.batch_bytes(work)} at most"
                " for a request of such sizes"
            )
    return work


def in_rows(spec: TensorSpec, work: int, prefix: str = "") -> TensorSpec:
    """Describe a tensor of a model with open dimensions by rows, of which each comes to so many rows of work at most.

    `prefix` tells the names of its open dimensions from those of other models.
    """
    vary = spec.vary
    if vary is None or not (vary.symbols or vary.unit):
        return spec
    room = Variable(
        vary.unit_bytes * work,
        tuple(prefix + symbol for symbol in vary.symbols),
        vary.most,
        may_lack=vary.may_lack,
        empty=tuple(prefix + symbol for symbol in vary.empty),
    )
    return replace(spec, vary=room)


def largest_work(specs: Iterable[TensorSpec]) -> int:
    """The rows of work of a row with all sizes at their largest, given a model's inputs; 1: its sizes are fixed."""
    sizes: dict[str, int] = {}
    unit: Variable | None = None
    for spec in specs:
        if spec.vary is not None and spec.vary.unit:
            unit = spec.vary
            sizes |= zip(unit.symbols, unit.most, strict=True)
    if unit is None:
        return 1
    sums = {symbol: parts for symbol in sizes if (parts := addends(symbol, sizes))}
    own = {symbol: size for symbol, size in sizes.items() if symbol not in sums}
    return unit.work(1, row_elements(own, sums, unit.empty))
