"""Requests that are alike but for their ids, contexts, sequences and tensors are parsed and checked once.

A message is cut into its id, its parameters `context` and `sequence_id`, its raw tensors, and all the rest, which is the key. Equal keys mean equal
requests, byte for byte: whatever parsing and checking found for the first, but the lengths of its tensors,
holds for its like. What the cut does not know, or a template does not fit, goes the long way through `oip`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from clockwright.errors import BadRequestError
from clockwright.units import NAME_CHARS_MAX
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import SMALL_MESSAGE_BYTES, Buffer, encode_varint
from controller.front.oip.protocol import (
    CheckedRequest,
    ParsedRequest,
    read_sequence_id,
    stated_slo_ns,
    unstated_slo_ns,
)
from controller.front.remote.backend import Askable

#: Templates that are kept. A server has thousands of models, and clients that ask each in two or three ways.
TEMPLATES_MAX: Final = 16_384
#: Longer keys are not looked up. A model of 20 inputs with long names comes to 1 KiB.
KEY_BYTES_MAX: Final = 2048
#: Messages of more fields are not cut, because that would delay other requests.
FIELDS_MAX: Final = 128

_ID, _RAW = 0x1A, 0x3A
# model_name, model_version, parameters, inputs, outputs.
_KEY_TAGS: Final = frozenset((0x0A, 0x12, 0x22, 0x2A, 0x32))
# Longer ones, whose lengths take more than a byte each, go the long way.
_CONTEXT_BYTES_MAX: Final = 0x7F - 2
# A parameter, and how one begins whose name is `context`: its key, and its value's tag.
_PARAMETER, _CONTEXT = 0x22, b"\x0a\x07context\x12"
# The same for `sequence_id`; and the lengths of the two names, which few others have.
_SEQUENCE = b"\x0a\x0bsequence_id\x12"
_CUT_NAMES = (7, 11)


@dataclass(slots=True)
class CutRequest:
    """A serialised ModelInferRequest in parts."""

    #: All fields but the others, in their order; or what REST has in their place.
    key: bytes | tuple[object, ...]
    request_id: bytes
    #: The parameter `context`; None: the message lacks it, and has another template.
    context: bytes | None
    #: `raw_input_contents`; views into the message when that is big.
    raw: list[Buffer]
    #: The value of parameter `sequence_id`, serialised; None: the message lacks it, and has another template.
    sequence: bytes | None = None

    def of(self, version: str) -> CutRequest:
        """Let the key be that of a version's requests, which was drawn because the message names none."""
        self.key = self.key, version
        return self


def cut_request(data: Buffer) -> CutRequest | None:
    """Cut a message up; None: it is malformed, large but for its tensors, or of another kind."""
    end = len(data)
    source = data if end <= SMALL_MESSAGE_BYTES else memoryview(data)
    position = kept_from = num_kept = num_fields = 0
    kept: list[Buffer] = []
    request_id = b""
    has_id = False
    context: bytes | None = None
    sequence: bytes | None = None
    raw: list[Buffer] = []
    try:
        while position < end:
            start = position
            tag, length = data[start], data[start + 1]
            position += 2
            if length >= 0x80:
                length &= 0x7F
                shift = 7
                while (byte := data[position]) >= 0x80:
                    length |= (byte & 0x7F) << shift
                    position += 1
                    shift += 7
                    if shift > 28:
                        return None
                length |= byte << shift
                position += 1
            begin, position = position, position + length
            is_cut = tag == _PARAMETER and data[begin + 1] in _CUT_NAMES
            if is_cut and source[begin : begin + len(_SEQUENCE)] == _SEQUENCE:
                if sequence is not None:
                    return None
                sequence = bytes(source[begin + len(_SEQUENCE) + 1 : position])
                if len(sequence) != data[begin + len(_SEQUENCE)]:
                    return None
                if kept_from < start:
                    kept.append(source[kept_from:start])
                kept_from = position
            elif is_cut and source[begin : begin + len(_CONTEXT)] == _CONTEXT:
                if context is not None:
                    return None
                # A value of one string, whose lengths are a byte each.
                context = bytes(source[begin + len(_CONTEXT) + 3 : position])
                if len(context) > _CONTEXT_BYTES_MAX:
                    return None
                head = bytes((len(context) + 2, 0x1A, len(context)))
                if source[begin + len(_CONTEXT) : position - len(context)] != head:
                    return None
                if kept_from < start:
                    kept.append(source[kept_from:start])
                kept_from = position
            elif tag in _KEY_TAGS:
                num_kept += position - start
            else:
                if tag == _RAW:
                    raw.append(source[begin:position])
                elif tag == _ID and not has_id:
                    has_id = True
                    request_id = bytes(source[begin:position])
                else:
                    return None
                if kept_from < start:
                    kept.append(source[kept_from:start])
                kept_from = position
            num_fields += 1
            if num_fields > FIELDS_MAX or num_kept > KEY_BYTES_MAX:
                return None
    except IndexError:
        return None
    if position != end:
        return None
    if kept_from < end:
        kept.append(source[kept_from:end])
    if context is not None:
        kept.append(_CONTEXT)
    if sequence is not None:
        # Sequences with numbers and with names are told apart.
        kept.append(_SEQUENCE + sequence[:1])
    return CutRequest(b"".join(kept), request_id, context, raw, sequence)


@dataclass(slots=True)
class _Layout:
    """Where the parts of a message lie that has its key in front, no id, and its tensors behind."""

    key_bytes: int
    #: What stands before each tensor, with its position, and the tensor's own.
    tensors: list[tuple[int, bytes, int, int]]
    #: Bytes of each tensor.
    lengths: list[int]


@dataclass(slots=True)
class Template:
    """What all requests of a key have in common."""

    described: Askable
    #: The first of them, without what is its own; where versions share the requests, each has a template of its own.
    checked: CheckedRequest
    #: The SLO that the request states, and where; None: it depends on the call.
    stated_slo_ns: tuple[int, str] | None
    #: Bytes of each raw tensor, in the message's order.
    lengths: list[int]
    #: Which of them are the servable's inputs, in its order; None: they stand in that order.
    order: Sequence[int] | None
    #: What carries the size of each input, in the servable's order; empty: none does.
    headers: Sequence[bytes] = ()
    #: How such a request was refused last by the scheduler; None: not lately.
    refusal: Any = None

    def fill(
        self, cut: CutRequest, *, rpc_remaining_s: float | None, default_slo_ns: int
    ) -> CheckedRequest | None:
        """Make the request of a message of this key; None: it does not fit."""
        raw = cut.raw
        if self.lengths != [len(tensor) for tensor in raw]:
            return None
        request_id = context = ""
        if cut.request_id or cut.context:
            try:
                request_id = cut.request_id.decode()
                context = (cut.context or b"").decode()
            except UnicodeDecodeError:
                return None
            if max(len(request_id), len(context)) > NAME_CHARS_MAX:
                return None
        if not self.described.servable.has_contexts:
            context = ""
        made = self.make(request_id, context, raw, rpc_remaining_s, default_slo_ns)
        if cut.sequence is not None:
            try:
                sequence = read_sequence_id(pb.InferParameter.FromString(cut.sequence))
            except (DecodeError, BadRequestError):
                return None
            if not sequence or self.checked.step is None:
                return None
            made.step = msgspec.structs.replace(self.checked.step, sequence=sequence)
        return made

    def make(
        self,
        request_id: str,
        context: str,
        raw: list[Buffer],
        rpc_remaining_s: float | None,
        default_slo_ns: int,
    ) -> CheckedRequest:
        """Make a request whose tensors have the right lengths; the other arguments are those of `fill`."""
        slo_ns, slo_source = self.stated_slo_ns or unstated_slo_ns(
            rpc_remaining_s,
            model_slo_ns=self.described.servable.slo_ns,
            default_slo_ns=default_slo_ns,
        )
        checked = self.checked
        inputs = raw if self.order is None else [raw[position] for position in self.order]
        if self.headers:
            inputs = [b"".join(parts) for parts in zip(self.headers, inputs, strict=True)]
        return CheckedRequest(
            request_id,
            checked.rows,
            inputs,
            checked.outputs,
            slo_ns,
            slo_source,
            checked.explain,
            context,
            checked.tenant,
            checked.answer_header,
            decide_within_ns=checked.decide_within_ns,
            weight=checked.weight,
            work_ahead_ns=checked.work_ahead_ns,
        )


class Templates:
    """The templates of the requests that came lately."""

    def __init__(self) -> None:
        self._generation = 0
        self._templates: dict[bytes | tuple[object, ...], Template] = {}
        # By length of the message, of the last that was kept.
        self._layouts: dict[int, _Layout] = {}

    def known(
        self,
        data: Buffer,
        *,
        generation: int,
        rpc_remaining_s: float | None,
        default_slo_ns: int,
    ) -> tuple[CheckedRequest, Askable] | None:
        """Find what a message asks, in few steps, where it is laid out like one before.

        The arguments are `Template.fill`'s. Returns what `cut_request`, `find` and `Template.fill` return together, and
        the servable; None: no template is known.
        """
        num_bytes = len(data)
        layout = self._layouts.get(num_bytes)
        if layout is None or generation != self._generation:
            return None
        template = self._templates.get(bytes(data[: layout.key_bytes]))
        if template is None or template.lengths != layout.lengths:
            return None
        source = data if num_bytes <= SMALL_MESSAGE_BYTES else memoryview(data)
        raw: list[Buffer] = []
        for start, head, begin, end in layout.tensors:
            if source[start:begin] != head:
                return None
            raw.append(source[begin:end])
        return template.make("", "", raw, rpc_remaining_s, default_slo_ns), template.described

    def laid_out(self, data: Buffer, begin: int, end: int, generation: int) -> Template | None:
        """Find the template of a message between two places, whose tensors are not looked at."""
        layout = self._layouts.get(end - begin)
        if layout is None or generation != self._generation:
            return None
        template = self._templates.get(bytes(data[begin : begin + layout.key_bytes]))
        if template is None or template.lengths != layout.lengths:
            return None
        return template

    def num_key_bytes(self, num_bytes: int) -> int:
        """How many bytes at the beginning of a message of this length tell its template, if it is laid out."""
        return self._layouts[num_bytes].key_bytes

    def find(self, cut: CutRequest, *, generation: int) -> Template | None:
        """Find a message's template. With another generation of the backend than before all templates are forgotten."""
        if generation != self._generation:
            self._generation = generation
            self._clear()
        return self._templates.get(cut.key)

    def _clear(self) -> None:
        self._templates.clear()
        self._layouts.clear()

    def share_out(self, cut: CutRequest, described: Askable) -> None:
        """Keep of a message's like that versions share them; no message has the layout of this template."""
        if len(self._templates) >= TEMPLATES_MAX:
            self._clear()
        none = CheckedRequest("", 0, [], (), 0, "", False, "", "", b"")
        self._templates[cut.key] = Template(described, none, None, [], None)

    def add(
        self,
        cut: CutRequest,
        parsed: ParsedRequest,
        described: Askable,
        checked: CheckedRequest,
    ) -> None:
        """Keep what was found out of a request that came the long way, right after `find` did not know it."""
        if not cut.raw:
            return  # Its tensors are in the key.
        servable, step = described.servable, checked.step
        if step is not None:
            servable = servable.stepped(step)
            if cut.sequence is None or not servable.inputs:
                return  # Only a sequence that was cut out is put into the next request.
        if any([spec.datatype == "BYTES" for spec in servable.inputs]):
            return  # Texts are looked at in each request.
        if checked.context and cut.context is None:
            return  # Only a context that was cut out is put into the next request.
        if len(self._templates) >= TEMPLATES_MAX:
            self._clear()
        positions = {tensor.name: index for index, tensor in enumerate(parsed.message.inputs)}
        order = [positions[spec.name] for spec in servable.inputs]
        self._templates[cut.key] = Template(
            described,
            msgspec.structs.replace(checked, request_id="", context="", inputs=[]),
            stated_slo_ns(parsed.message),
            [len(tensor) for tensor in cut.raw],
            None if order == list(range(len(order))) else order,
            headers=[
                bytes(tensor[: len(tensor) - len(cut.raw[place])])
                for tensor, place in zip(checked.inputs, order, strict=True)
            ]
            if servable.varies
            else (),
        )
        if cut.context is not None or step is not None or not isinstance(cut.key, bytes):
            return  # The first bytes of a message do not tell it.
        tensors = []
        position = len(cut.key)
        for tensor in cut.raw:
            head = b"%c" % _RAW + encode_varint(len(tensor))
            begin = position + len(head)
            tensors.append((position, head, begin, begin + len(tensor)))
            position = begin + len(tensor)
        lengths = [len(tensor) for tensor in cut.raw]
        self._layouts[position] = _Layout(len(cut.key), tensors, lengths)
