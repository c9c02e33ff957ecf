"""Descriptions of models and applications that fronts have, by number, and whether they still hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from clockwright.errors import ClockwrightError, ProtocolError, Refusal, RefusedError
from clockwright.wire.frames import DIRECT_BYTES
from controller.front.oip.statuses import failed_of
from controller.front.remote import link_frames as frames
from controller.front.remote.backend import LocalBackend, LocalDescription
from controller.models.catalogue import Catalogue
from controller.port import Ask

# So many may be there before it is looked which of them hold.
_LEAST = 1000


@dataclass(slots=True)
class AskSize:
    """Size of a request with a number of rows."""

    #: Bytes of each input, and of all.
    lengths: tuple[int, ...]
    num_bytes: int
    #: One of its tensors, in or out, is large enough for a message of its own.
    is_large: bool


@dataclass(slots=True)
class Description:
    """The description of a model or an application that fronts have."""

    described: LocalDescription
    #: The generation of the catalogue at which it was found to hold.
    generation: int
    #: The version as clients named it; may be empty.
    version: str = ""
    #: By rows, as far as requests had so many; negative: of steps.
    _sizes: dict[int, AskSize] = field(default_factory=dict)

    def keeps_inputs(self, ask: Ask) -> bool:
        """Whether the controller itself needs the inputs of a request."""
        return ask.step is not None or self.described.keeps_inputs(ask.rows)

    @property
    def name(self) -> str:
        """What it is called."""
        return self.described.servable.name

    def check(self, ask: Ask) -> AskSize:
        """Check again that a request fits, as its front did; returns its size. Raises ProtocolError if it does not."""
        rows, servable = ask.rows, self.described.servable
        if (ask.streaming is None) == bool(servable.max_steps):
            what = "several answers" if ask.streaming is not None else "one answer"
            raise ProtocolError(f"request {ask.ask_id} to {self.name}: {what}")
        key = rows
        if ask.step is not None:
            if servable.steps is None:
                raise ProtocolError(f"request {ask.ask_id} to {self.name}: a step")
            key, servable = -rows, servable.steps
            if ask.step.leaves(len(ask.lengths), len(servable.inputs)):
                return AskSize((), 0, is_large=False)
        size = self._sizes.get(key)
        if size is None and 1 <= rows <= servable.max_work:
            lengths = tuple([spec.batch_bytes(rows) for spec in servable.inputs])
            largest = max((0, *lengths, *[spec.batch_bytes(rows) for spec in servable.outputs]))
            size = self._sizes[key] = AskSize(lengths, sum(lengths), largest >= DIRECT_BYTES)
        if size is not None and ask.lengths != size.lengths and servable.varies:
            specs, size = servable.inputs, AskSize(ask.lengths, sum(ask.lengths), size.is_large)
            if len(ask.lengths) != len(specs) or not all(
                [spec.fits(n, rows) for spec, n in zip(specs, ask.lengths, strict=True)]
            ):
                size = None
        if size is None or ask.lengths != size.lengths:
            raise ProtocolError(
                f"request {ask.ask_id} to {self.name}: {rows} rows of {list(ask.lengths)} bytes"
            )
        return size


class Descriptions:
    """The descriptions that fronts have."""

    def __init__(self, backend: LocalBackend, catalogue: Catalogue) -> None:
        self._backend = backend
        self._catalogue = catalogue
        self._descriptions: dict[int, Description] = {}
        #: By name and version, as clients named them.
        self._numbers: dict[tuple[str, str], int] = {}
        self._last_number = 0
        #: With more of them, those that do not hold any more are forgotten: no request asks for versions that are gone.
        self._most = _LEAST

    def __len__(self) -> int:
        """How many there are."""
        return len(self._descriptions)

    def describe(self, asked: frames.Describe) -> frames.Described:
        """Describe what a client names."""
        try:
            found = self._backend.find(asked.name, asked.version)
        except ClockwrightError as error:
            not_yet = False
            if isinstance(error, RefusedError):
                not_yet = error.refusal in (Refusal.NO_WORKER, Refusal.LOADING)
                self._backend.refused_at_door(error.refusal)
            failure = failed_of(error, method="ModelInfer")
            return frames.Described(asked.query_id, 0, None, failure, not_yet, is_held=False)
        servable = found.servable
        key = servable.name, asked.version
        number = self._numbers.get(key, 0)
        if self.find(number) is None:
            self._last_number = number = self._last_number + 1
            self._descriptions[number] = Description(
                found, self._catalogue.generation, asked.version
            )
            self._numbers[key] = number
            if len(self._descriptions) > self._most:
                for each in list(self._descriptions):
                    self.find(each)
                self._most = 2 * len(self._descriptions) + _LEAST
        is_held = not self._descriptions[number].described.keeps_inputs(1)
        return frames.Described(
            asked.query_id, number, servable, None, not_yet=False, is_held=is_held
        )

    def find(self, number: int) -> Description | None:
        """Find the description of a number. Returns None if it does not hold any more."""
        description = self._descriptions.get(number)
        if description is None:
            return None
        if description.generation != self._catalogue.generation:
            try:
                found: LocalDescription | None = self._backend.find(
                    description.name, description.version
                )
            except ClockwrightError:
                found = None
            if found is None or found.servable != description.described.servable:
                del self._descriptions[number]
                del self._numbers[description.name, description.version]
                return None
            description.described = found
            description.generation = self._catalogue.generation
        return description
