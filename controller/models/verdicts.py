"""What workers say of models: whether each is fit to be served, by whom, and why not.

A model is LOADING until one of the workers has answered, READY while one has it, and UNAVAILABLE when all that are
present have refused it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from clockwright.errors import ModelError, Refusal, RefusedError
from clockwright.units import NS_PER_S, ModelId, WorkerId
from clockwright.wire.tensors import TensorSpec, describe
from controller.core.events import ModelReady
from controller.models.entry import Entry, ModelState, check_labels
from controller.models.preparing import PreparingModels
from controller.models.stepped import find_state
from controller.models.streamed import find_stream
from controller.runtime import Runtime

# As the catalogue is one thing to those who read its log, or turn it down.
log = logging.getLogger("controller.models.catalogue")

#: Models that are offered before requests get their turn.
OFFERS_SLICE = 64
#: How the reason of a model ends whose preparation has not begun.
NOT_BEGUN = "before it"


class OfferTo(Protocol):
    """A worker that is asked for its opinion; in the live controller, its link."""

    def offer(self, model: Entry) -> None:
        """Offer it a model; it answers with `model_ready` or `model_refused`."""

    def withdraw(self, model: Entry) -> None:
        """Have it forget a model that is gone, unless it has answered the offer."""


class Verdicts:
    """All models by id, and what workers say of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        #: Another number whenever a name means another model or application, or one takes other tensors or
        #: batches.
        self.generation = 0
        #: Models that workers may know: all that are served, and new ones on trial.
        self._by_id: dict[ModelId, Entry] = {}
        #: Workers that have joined and take new models.
        self._workers: dict[WorkerId, OfferTo] = {}
        self._preparing = PreparingModels(runtime.clock)
        self._changed: asyncio.Future[None] | None = None
        self._watchers: list[Callable[[], object]] = []

    def find_id(self, model_id: ModelId) -> Entry | None:
        """Find the model of an id: one that is served, or a new one on trial."""
        return self._by_id.get(model_id)

    def state(self, model: Entry) -> ModelState:
        """Whether a model can be served now."""
        if model.folder is None:
            return ModelState.UNAVAILABLE
        if model.ready_on:
            return ModelState.READY
        if self._workers and all(worker in model.refused_by for worker in self._workers):
            return ModelState.UNAVAILABLE
        return ModelState.LOADING

    def reason(self, model: Entry) -> str:
        """Say why a model is unavailable, or at what stage it is; empty when it is ready."""
        match self.state(model):
            case ModelState.READY:
                return ""
            case ModelState.UNAVAILABLE:
                return model.fault or _refusals(model)
            case ModelState.LOADING if not self._workers:
                return "waiting for a worker"
            case ModelState.LOADING:
                place, retry_s = self._expected(model)
                return model.stage or f"in about {retry_s} s: {_before(place)}"

    def refusal(self, model: Entry) -> RefusedError | None:
        """Say why requests to a model are refused before the scheduler sees them. Returns None if they are not.

        A model that was served before is only away while workers that cannot serve it are there.
        """
        state, name = self.state(model), model.name
        if state is ModelState.LOADING and self._workers:
            place, retry_s = self._expected(model)
            stage = model.stage or _before(place)
            return RefusedError(
                Refusal.LOADING,
                f"model {name} is being prepared ({stage}); try again in about {retry_s} s",
                figures={"models_before": place, "retry_ns": retry_s * NS_PER_S},
            )
        if model.outputs or state is ModelState.READY:
            return None
        looked = model.folder is None or model.refused_by.keys() - model.not_for
        if state is ModelState.UNAVAILABLE and looked:
            return RefusedError(
                Refusal.UNFIT, f"model {name} cannot be served: {self.reason(model)}"
            )
        return RefusedError(
            Refusal.NO_WORKER, f"model {name} is {state.value}: {self.reason(model)}"
        )

    def _expected(self, model: Entry) -> tuple[int, int]:
        """How many models come before one that is being prepared, and in how many seconds it may be ready."""
        place = self._preparing.place(model.model_id, self._sizes)
        return place, -(-self._preparing.retry_ns(model.model_id, place) // NS_PER_S)

    def _sizes(self) -> list[tuple[int, ModelId]]:
        return [
            (model.num_bytes, model.model_id)
            for model in self._by_id.values()
            if self.state(model) is ModelState.LOADING
        ]

    def watch(self, renewed: Callable[[], object]) -> None:
        """Have something called at each new generation."""
        self._watchers.append(renewed)

    def renew(self) -> None:
        """Begin a new generation."""
        self.generation += 1
        for renewed in self._watchers:
            renewed()

    def worker_joined(self, worker_id: WorkerId, worker: OfferTo) -> None:
        """Offer a worker all models that it has not answered for already, and let its opinion count from now on."""
        self._workers[worker_id] = worker
        self._preparing.offered()
        self._announce_change()
        self._offer_from(0, list(self._by_id.values()), worker_id, worker)

    def _offer_from(
        self, start: int, models: Sequence[Entry], worker_id: WorkerId, worker: OfferTo
    ) -> None:
        """Offer a slice of the models that were there when a worker joined, and later the next."""
        if self._workers.get(worker_id) is not worker:
            return
        end = start + OFFERS_SLICE
        for model in models[start:end]:
            is_here = self._by_id.get(model.model_id) is model
            if is_here and worker_id not in model.ready_on and worker_id not in model.refused_by:
                worker.offer(model)
        if end < len(models):
            loop = asyncio.get_running_loop()
            loop.call_soon(self._offer_from, end, models, worker_id, worker)

    def worker_left(self, worker_id: WorkerId) -> None:
        """Offer a worker nothing more, and forget its opinions: it is gone, or it drains.

        A worker that drains is not told either when a model is removed that it still prepares. It may
        finish that in vain before it leaves.
        """
        self._workers.pop(worker_id, None)
        self.renew()
        for model in self._by_id.values():
            if sizes := model.ready_on.pop(worker_id, ()):
                model.had_batch = sizes[-1]
            model.refused_by.pop(worker_id, None)
            model.not_for.discard(worker_id)
            model.disagreeing.discard(worker_id)
            self._ended(worker_id, model)
            if not model.ready_on and model.disagreeing:
                self._ask_again(model)
        self._announce_change()

    def _ask_again(self, model: Entry) -> None:
        """Forget a description that no model uses any more, and offer the models that it blocked."""
        model.inputs = model.outputs = ()
        for worker_id in sorted(model.disagreeing):
            model.refused_by.pop(worker_id, None)
            self._workers[worker_id].offer(model)
        model.disagreeing.clear()

    def model_progress(self, worker_id: WorkerId, model_id: ModelId, stage: str) -> None:
        """Note what a worker is doing with a model."""
        if (model := self._by_id.get(model_id)) and worker_id in self._workers:
            self._preparing.begun(model_id)
            model.progress.pop(worker_id, None)
            model.progress[worker_id] = stage

    def _ended(self, worker_id: WorkerId, model: Entry) -> None:
        """A worker does nothing with a model any more."""
        if model.progress.pop(worker_id, None) is not None and not model.progress:
            self._preparing.stopped(model.model_id)

    def model_ready(
        self,
        event: ModelReady,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        weights_bytes: int,
        one_by_one: str = "",
    ) -> bool:
        """Note that a worker has a model ready, and tell the scheduler.

        Returns False when the worker is to forget the model, because it was removed, or because another worker that has
        it ready describes its tensors differently.
        """
        model = self._by_id.get(event.model_id)
        if model is None:
            return False
        state, controls, stream = model.state, model.controls, model.stream
        if (folder := model.folder) is not None:
            settings = folder.settings
            try:
                inputs, outputs = folder.triton.checked(
                    inputs, outputs, one_row=max(event.exec_ns) == 1
                )
                check_labels(folder.labels, outputs)
                state, controls = find_state(
                    settings.state, settings.sequence, folder.initial, inputs, outputs
                )
                stream = find_stream(settings.stream, state, inputs, outputs)
            except ModelError as error:
                self.model_refused(event.worker_id, event.model_id, str(error))
                return False
        if not model.ready_on:
            self._preparing.judged(model.model_id)
        self._ended(event.worker_id, model)
        described = (model.inputs, model.outputs)
        if model.ready_on and described != (inputs, outputs):
            reason = (
                f"the worker finds inputs {describe(inputs)} and outputs {describe(outputs)}, "
                f"an earlier one {describe(model.inputs)} and {describe(model.outputs)}"
            )
            self.model_refused(event.worker_id, event.model_id, reason)
            model.disagreeing.add(event.worker_id)
            return False
        if described != (inputs, outputs):
            model.inputs, model.outputs = inputs, outputs
            model.state, model.controls, model.stream = state, controls, stream
        model.architecture_id = event.architecture_id
        model.num_pages = event.num_pages
        model.weights_bytes = weights_bytes
        model.one_by_one = one_by_one
        model.ready_on[event.worker_id] = tuple(sorted(event.exec_ns))
        model.refused_by.pop(event.worker_id, None)
        self._runtime.tell(event)
        self.renew()
        log.info("model %s is ready on worker %s", event.model_id, event.worker_id)
        if state and not (folder and folder.settings.state):
            pairs = ", ".join(f"{pair.input} -> {pair.output}" for pair in state)
            log.info("model %s: state is recognised by its names: %s", event.model_id, pairs)
        self._announce_change()
        return True

    def model_refused(
        self, worker_id: WorkerId, model_id: ModelId, reason: str, *, for_others: bool = False
    ) -> None:
        """Note that a worker cannot serve a model, and why.

        `for_others`: workers of another kind are to serve it, so it is no news while there is one.
        """
        model = self._by_id.get(model_id)
        if model is None:
            return
        if not model.ready_on and not model.refused_by:
            self._preparing.judged(model_id)
        self._ended(worker_id, model)
        model.refused_by[worker_id] = reason
        if for_others:
            model.not_for.add(worker_id)
        level = logging.INFO if for_others else logging.WARNING
        log.log(level, "model %s is refused by worker %s: %s", model_id, worker_id, reason)
        self._announce_change()

    def _announce_change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _wait_for_change(self) -> None:
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        # Several tasks may wait on the one future. One that is cancelled must not cancel it for the rest.
        await asyncio.shield(self._changed)


def _before(place: int) -> str:
    return f"{place} model{'s' * (place != 1)} {NOT_BEGUN}"


def _refusals(model: Entry) -> str:
    """Join the reasons of the workers that refused a model, each reason once.

    Where some have looked at it, what the others say would only drown the truth.
    """
    looked = {key: why for key, why in model.refused_by.items() if key not in model.not_for}
    reasons = dict.fromkeys((looked or model.refused_by).values())
    return "; ".join(reasons)
