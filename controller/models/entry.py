"""A model, or a pipeline of models, as the catalogue knows it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clockwright.errors import ModelError
from clockwright.units import ArchitectureId, ModelId, WorkerId
from clockwright.wire.tensors import TensorSpec
from controller.models.model_folder import ModelFolder
from controller.models.stepped import Control, StatePair
from controller.models.streamed import StreamPlan
from controller.models.uploads import Upload
from controller.stages.pipelines.core.graph import PipelineGraph, fit

# What rows of open sizes came to before counts so much, and what the latest did counts the rest.
_WORK_KEPT = 0.9


class ModelState(enum.Enum):
    """Whether a model can be asked now. The values are the wire's, as `RepositoryIndex` has them."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, eq=False)
class Entry:
    """One generation of one instance of a model, with the workers' verdicts on it."""

    model_id: ModelId
    #: Public name; instances of one folder have a name each.
    name: str
    #: None: the folder is malformed, and no worker will see it.
    folder: ModelFolder | None
    #: How the folder is malformed; empty when it is not.
    fault: str = ""
    #: Tensors of one row, in the model's order; empty until a worker was ready, and while those who
    #: have been ready disagree. So are `outputs`.
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    architecture_id: ArchitectureId | None = None
    num_pages: int = 0
    weights_bytes: int = 0
    #: Why the latest worker runs its rows one by one although larger batches were asked for; empty if it does
    #: not.
    one_by_one: str = ""
    #: Batch sizes, ascending, of each worker that has the model ready.
    ready_on: dict[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    #: The largest batch of the worker that had it ready last; 0: none had.
    had_batch: int = 0
    #: Reason of each worker that refused the model.
    refused_by: dict[WorkerId, str] = field(default_factory=dict)
    #: Those of them that did not look at the model, because workers of another kind are to serve it.
    not_for: set[WorkerId] = field(default_factory=set)
    #: Those of them who describe its tensors otherwise than an earlier one that has it ready.
    disagreeing: set[WorkerId] = field(default_factory=set)
    #: The stages that workers are at with the model ("optimising"), the latest last.
    progress: dict[WorkerId, str] = field(default_factory=dict)
    #: A digest of what workers are offered; empty until it is needed.
    offer_digest: bytes = b""
    #: What brought its files; None: they are not ours.
    upload: Upload | None = None
    #: Which inputs are outputs of the step before, where it is run in steps; and those that say where a step is.
    state: tuple[StatePair, ...] = ()
    controls: tuple[Control, ...] = ()
    #: How it answers a request several times, and how many such are open; None: it answers once.
    stream: StreamPlan | None = None
    num_streams: int = 0
    #: What its ids begin with: the name, and the version if several may be served; empty: the name.
    key: str = ""

    def __post_init__(self) -> None:
        self.key = self.key or self.name

    @property
    def is_stepped(self) -> bool:
        """Whether requests may be steps of a sequence: it has state or controls, or its settings speak of sequences."""
        settings = self.folder.settings if self.folder else None
        return bool(self.state or self.controls or (settings and settings.sequence))

    @property
    def stage(self) -> str:
        """The stage that a worker is at with the model; empty when none is at it."""
        return next(reversed(self.progress.values()), "")

    @property
    def version(self) -> str:
        """Version that is served; empty when the folder is malformed."""
        return self.folder.version if self.folder else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.num_bytes for file in self.folder.files) if self.folder else 0

    @property
    def slo_ns(self) -> int | None:
        """Default latency objective; None: the controller's."""
        return self.folder.settings.slo_ns if self.folder else None

    @property
    def is_cached(self) -> bool:
        """Whether the prediction cache may answer requests for the model."""
        return self.folder is not None and self.folder.settings.cache

    @property
    def largest_batch(self) -> int:
        """Most rows of a batch on the workers that have the model, or on the one that had it last; 0: none had."""
        return max((sizes[-1] for sizes in self.ready_on.values()), default=self.had_batch)


@dataclass(slots=True, eq=False)
class Pipeline(Entry):
    """Several models that are asked together under one name. No worker sees it: it can be asked when they can be."""

    #: How they fit together; None: they do not, or not all are described.
    graph: PipelineGraph | None = None
    #: Why they do not; empty: they do, or that is not known.
    misfit: str = ""
    #: By stage, the rows of work of a row lately, where sizes are open; nothing: one.
    work: dict[int, float] = field(default_factory=dict)
    #: When a request was last tried whose stages are said to take longer than its SLO.
    tried_ns: int = 0
    #: When cold models were last wanted for requests that were refused.
    wanted_ns: int = 0
    #: Kinds, versions, inputs and outputs of the models that this was found for.
    _described: tuple[object, ...] | None = None

    def saw_work(self, index: int, work: float) -> None:
        """Take in what a row came to in a stage."""
        self.work[index] = work + _WORK_KEPT * (self.work.get(index, work) - work)

    @property
    def members(self) -> list[tuple[str, str]]:
        """The public names of its models and the versions that it wants of them, by stage; "": any."""
        spec = self.folder.settings.pipeline if self.folder is not None else None
        return [(stage.model, stage.version) for stage in spec.stages] if spec is not None else []

    def look_at(self, models: Sequence[Entry | None]) -> None:
        """Take in its models as they are now."""
        described = tuple([m and (type(m), m.version, m.inputs, m.outputs) for m in models])
        if described == self._described:
            return
        self._described, self.graph, self.misfit = described, None, ""
        self.inputs = self.outputs = ()
        self.work.clear()
        folder = self.folder
        assert folder is not None
        assert folder.settings.pipeline is not None
        stages, found = folder.settings.pipeline.stages, [m for m in models if m is not None]
        faults = [
            f"stage {stage.name!r}: there is no model {stage.model}"
            for stage, model in zip(stages, models, strict=True)
            if model is None
        ] + [
            f"stage {stage.name!r}: {stage.model} is a pipeline; write its stages here"
            for stage, model in zip(stages, models, strict=True)
            if isinstance(model, Pipeline)
        ]
        if not faults and all(model.outputs for model in found):
            try:
                graph = fit(folder.settings.pipeline, found)
                self.inputs, self.outputs = folder.triton.checked(
                    graph.inputs, graph.outputs, one_row=graph.one_row
                )
                check_labels(folder.labels, graph.outputs)
                self.graph = graph
                self.had_batch = 1 if graph.one_row else min([m.largest_batch for m in found])
            except ModelError as error:
                faults = [str(error)]
        self.misfit = "; ".join(faults)


def check_labels(labels: Iterable[str], outputs: Iterable[TensorSpec]) -> None:
    """Raise ModelError if an output has labels that the model lacks."""
    names = [spec.name for spec in outputs]
    if lacking := [name for name in labels if name not in names]:
        raise ModelError(
            f"labels of output {lacking[0]!r}: expected one of the model's: {', '.join(names)}"
        )
