"""A model as a worker serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from clockwright.errors import OtherWorkersError, RefusedError
from clockwright.units import ArchitectureId, ModelId
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from clockwright.wire.texts import count_texts
from worker.core.io_pool import aligned
from worker.core.model import LoadedModel
from worker.models.model_files import MODEL_FILE, batch_bytes


@dataclass(frozen=True, slots=True)
class IoLayout:
    """Where the tensors of a batch lie in an IO slot: inputs first, each starting on a cache line."""

    #: Offsets from the slot's begin, in the model's order.
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]
    #: Where the first output begins.
    outputs_begin: int
    outputs_bytes: int
    num_bytes: int

    @staticmethod
    def of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], rows: int) -> IoLayout:
        """Lay a batch out."""
        offsets, position = [], 0
        for spec in (*inputs, *outputs):
            offsets.append(position)
            position += aligned(spec.batch_bytes(rows))
        input_offsets, output_offsets = offsets[: len(inputs)], offsets[len(inputs) :]
        begin = output_offsets[0] if output_offsets else position
        return IoLayout(
            tuple(input_offsets), tuple(output_offsets), begin, position - begin, position
        )


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel(LoadedModel):
    """A model that a device is ready to serve; the part that all devices share."""

    architecture_id: ArchitectureId
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights_bytes: int
    #: Durations that seed the controller's estimates.
    load_ns: int
    exec_ns: Mapping[int, int]
    #: The GPU's clock when `exec_ns` was measured; 0 where it is not known.
    clock_mhz: int = 0
    from_cache: bool = False
    #: Why rows are run one by one although larger batches were offered; empty if they are not.
    one_by_one: str = ""
    #: The layout of an IO slot, by batch size.
    layouts: dict[int, IoLayout] = field(init=False)

    def __post_init__(self) -> None:
        self.layouts = {
            size: IoLayout.of(self.inputs, self.outputs, size) for size in self.io_bytes
        }

    def places(
        self, batch_size: int, begin: int
    ) -> tuple[list[tuple[TensorSpec, int]], list[tuple[TensorSpec, int]]]:
        """Inputs and outputs, each with where a batch has it in a slot that begins there."""
        layout = self.layouts[batch_size]
        return (
            [
                (spec, begin + at)
                for spec, at in zip(self.inputs, layout.input_offsets, strict=True)
            ],
            [
                (spec, begin + at)
                for spec, at in zip(self.outputs, layout.output_offsets, strict=True)
            ],
        )

    def payload_problem(self, action: Infer, payload: Sequence[Buffer]) -> str | None:
        """Say what is wrong with an Infer's payload, per request and per input.

        Returns None if it fits the action's rows.
        """
        expected = len(action.rows) * len(self.inputs)
        if len(payload) != expected:
            return f"payload has {len(payload)} tensors, expected {expected}"
        entries = iter(payload)
        for index, rows in enumerate(action.rows):
            for spec in self.inputs:
                entry = next(entries)
                found = len(entry)
                if not spec.fits(found, rows):
                    return (
                        f"request {index}: input {spec.name!r} has {found} bytes, "
                        f"expected {spec.batch_bytes(rows)} for {rows} rows"
                    )
                if spec.vary:
                    try:
                        sized, content = spec.unpack(entry)
                        wanted = prod(sized.row_shape)
                        if spec.datatype == "BYTES" and count_texts(content, wanted) != wanted:
                            return f"request {index}: input {spec.name!r} has not {wanted} texts"
                    except (ValueError, RefusedError) as error:
                        return f"request {index}: {error}"
        return None


def io_bytes_of(tensors: Sequence[TensorSpec], batch_sizes: Sequence[int]) -> dict[int, int]:
    """The bytes of an IO slot, by batch size."""
    return {size: batch_bytes(tensors, size) for size in batch_sizes}


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """One file of a model: its path in the model's folder, and its content's size and hash."""

    name: str
    num_bytes: int
    sha256: str


#: Returns once the worker has these files.
Fetch = Callable[[Sequence[OfferedFile]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that the controller wants served."""

    model_id: ModelId
    files: tuple[OfferedFile, ...]
    batch_sizes: tuple[int, ...]
    fixed_dimensions: Mapping[str, int]
    #: The row of its profile that a modelled device uses; for a container, the model's name.
    profile: str

    @property
    def contents(self) -> dict[str, str]:
        """The files' hashes by path."""
        return {file.name: file.sha256 for file in self.files}

    def check_onnx(self) -> None:
        """Refuse an offer without an ONNX model before any file is fetched.

        Raises OtherWorkersError if the model is code; says which worker would serve it.
        """
        if MODEL_FILE not in self.contents:
            raise OtherWorkersError(
                f"there is no {MODEL_FILE}: it is code, which this worker does not run; start "
                f"`clockwright worker --device container:FOLDER` where the model's folder is"
            )
