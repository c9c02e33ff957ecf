"""Checks of what a worker says of itself and of models: a worker is not trusted. No I/O, no state."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clockwright.foreign import TEXT_CHARS_MAX, printable
from clockwright.units import DURATION_NS_MAX
from clockwright.wire.tensors import DATATYPES, Variable, total_bytes
from clockwright.wire.worker_messages import ReadyModel, Register

CLOCK_MHZ_MAX = 100_000

_WORKER_ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
# Larger than anything there is. A petabyte of weights still fits in.
_ARENA_BYTES_MAX = 1 << 50
_TENSORS_MAX = 256
_RANK_MAX = 32
_BATCHES_MAX = 64


def registration_fault(register: Register) -> str:
    """Say what is wrong with a registration; empty if nothing is."""
    if not _WORKER_ID.fullmatch(register.worker_id):
        return f"worker_id {register.worker_id[:200]!r}: expected 1 to 128 of A-Z a-z 0-9 _ . : @ -"
    for name in ("device", "gpu_kind"):
        if not getattr(register, name):
            return f"{name} is empty"
    if register.payload_port > 65535:
        return f"payload_port is {register.payload_port}, expected 65535 at most"
    if len(register.payload_certificate_sha256) not in (0, 32):
        return "payload_certificate_sha256 has not 32 bytes"
    for name in ("device", "gpu_kind", "host", "payload_host"):
        if fault := _text_fault(getattr(register, name)):
            return f"{name} {fault}"
    for name in ("num_pages", "page_bytes"):
        if getattr(register, name) == 0:
            return f"{name} is 0, expected at least 1"
    for name, num_bytes in (
        ("num_pages * page_bytes", register.num_pages * register.page_bytes),
        ("arena_bytes", register.arena_bytes),
    ):
        if num_bytes > _ARENA_BYTES_MAX:
            return f"{name} is {num_bytes}, expected {_ARENA_BYTES_MAX} at most"
    return ""


def model_fault(
    ready: ReadyModel, *, num_pages: int, batch_sizes: Sequence[int], message_bytes_max: int
) -> str:
    """Say what cannot be true in a worker's description of a model; empty if all of it can.

    The sizes are those that the worker was offered, ascending; a batch's outputs come in one message.
    """
    if any(spec.vary and spec.vary.unit for spec in ready.inputs):
        # Sizes of its batches are in units of work, which the worker has chosen.
        batch_sizes = [
            batch.batch_size for batch in ready.batches[:_BATCHES_MAX] if batch.batch_size
        ]
    sizes = [batch.batch_size for batch in ready.batches[: len(batch_sizes) + 1]]
    if not sizes or sizes != sorted(set(sizes)) or not set(sizes) <= set(batch_sizes):
        return f"the worker reports batch sizes {sizes}, expected some of {list(batch_sizes)}, ascending"
    for batch in ready.batches:
        if not 0 < batch.exec_ns <= DURATION_NS_MAX:
            return (
                f"the worker reports exec_ns {batch.exec_ns} for batch {batch.batch_size},"
                f" expected 1 to {DURATION_NS_MAX}"
            )
    if not 0 < ready.load_ns <= DURATION_NS_MAX:
        return f"the worker reports load_ns {ready.load_ns}, expected 1 to {DURATION_NS_MAX}"
    if not 1 <= ready.num_pages <= num_pages:
        return f"it needs {ready.num_pages} pages, the worker's cache has {num_pages}"
    if ready.clock_mhz > CLOCK_MHZ_MAX:
        return f"it was measured at {ready.clock_mhz} MHz, expected {CLOCK_MHZ_MAX} at most"
    if not ready.architecture_id:
        return "the worker reports an empty architecture_id"
    if fault := _text_fault(ready.architecture_id):
        return f"architecture_id {fault}"
    if not (1 <= len(ready.inputs) <= _TENSORS_MAX and 1 <= len(ready.outputs) <= _TENSORS_MAX):
        return (
            f"it has {len(ready.inputs)} inputs and {len(ready.outputs)} outputs,"
            f" expected 1 to {_TENSORS_MAX} each"
        )
    if any(spec.vary and spec.vary.may_lack for spec in ready.inputs):
        return "it has inputs that may lack dimensions, expected that of outputs only"
    for spec in (*ready.inputs, *ready.outputs):
        if fault := _text_fault(spec.name):
            return f"a tensor's name {fault}"
        if spec.datatype not in DATATYPES:
            return (
                f"tensor {spec.name} has datatype {spec.datatype[:TEXT_CHARS_MAX]!r},"
                " which is not served"
            )
        if spec.vary is None and (spec.datatype == "BYTES" or ready.inputs[0].vary is not None):
            return f"tensor {spec.name} of {spec.datatype} does not carry its size, which it has to in this model"
        shape = list(spec.row_shape[: _RANK_MAX + 1])
        if (vary := spec.vary) is not None:
            if fault := _variable_fault(vary, num_open=shape.count(-1)):
                return f"tensor {spec.name} {fault}"
            shape = [max(size, 0) if size == -1 else size for size in shape]
        if len(shape) > _RANK_MAX or any(size < 0 for size in shape):
            return (
                f"tensor {spec.name} has shape {shape}, expected {_RANK_MAX} dimensions at most,"
                " of 0 or more each"
            )
        if (
            spec.axis != 0
            and vary is None
            and (sizes != [1] or not 0 <= (spec.axis or 0) <= len(shape))
        ):
            return f"tensor {spec.name} has its rows in dimension {spec.axis}, expected 0 for batches of {sizes}"
    if (num_bytes := total_bytes(ready.outputs, sizes[0])) > message_bytes_max:
        return (
            f"the outputs of batch {sizes[0]} have {num_bytes} bytes, a message"
            f" {message_bytes_max} at most (--max-message-mib)"
        )
    return ""


def _variable_fault(vary: Variable, *, num_open: int) -> str:
    """Say what cannot be true of sizes that vary; empty if all of it can."""
    for symbol in vary.symbols:
        if fault := _text_fault(symbol):
            return f"has a dimension that {fault}"
    if not len(vary.symbols) == len(vary.most) == num_open:
        return (
            f"has {num_open} open dimensions, {len(vary.symbols)} names and {len(vary.most)} sizes"
        )
    numbers = (vary.unit_bytes, *vary.most, vary.unit + 1)
    if not all(0 < number <= _ARENA_BYTES_MAX for number in numbers):
        return f"has sizes {list(numbers)}, expected 1 to {_ARENA_BYTES_MAX}"
    return ""


def _text_fault(text: str) -> str:
    """Say why a text cannot be a name; empty if it can."""
    if len(text) <= TEXT_CHARS_MAX and text.isprintable():
        return ""
    return (
        f"is '{printable(text, 80)}', {len(text)} characters,"
        f" expected {TEXT_CHARS_MAX} at most, all printable"
    )
