"""Members of applications, models and pipelines of models alike: what asks, predicts and wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from clockwright.errors import BadRequestError, Refusal
from clockwright.units import ModelId, RequestId
from clockwright.wire.bulk import Buffer
from clockwright.wire.open_sizes import work_of
from controller.core.forecast import Forecast
from controller.models.entry import Entry, Pipeline
from controller.port import Ask, PortStage, Sink
from controller.runtime import Runtime


class AskedMember(Sink, Protocol):
    """A request to a member."""

    def came(self, outputs: Sequence[Buffer], /) -> None:
        """Take outputs of a model, which may come when the request is over."""


class PipelinePort(PortStage[Pipeline], Protocol):
    """What asks pipelines."""

    def forecast(self, pipeline: Pipeline, ask: Ask) -> Forecast:
        """Predict the answer of a request."""

    def want(self, pipeline: Pipeline) -> None:
        """Have its cold models loaded."""


class Members:
    """Asks members of applications."""

    def __init__(self, runtime: Runtime) -> None:
        """Ask models; `pipelines` is to be set before a pipeline is asked."""
        self.runtime = runtime
        self.pipelines: PipelinePort | None = None

    def ask(
        self, member: Entry, ask: Ask, inputs: Sequence[Buffer], asked: AskedMember
    ) -> RequestId:
        """Ask a member; `asked` is told, as `PortStage` says.

        Raises BadRequestError if the sizes of the inputs do not fit it.
        """
        if isinstance(member, Pipeline):
            return self._pipelines.ask(member, ask, inputs, asked)
        if (work := self.work(member, inputs, ask.rows)) != ask.rows:
            ask = replace(ask, rows=work)
        return self.runtime.ask(member.model_id, ask, inputs, asked, late=asked.came)

    def work(self, member: Entry, inputs: Sequence[Buffer], rows: int) -> int:
        """Find what rows come to for a member whose dimensions are open.

        Raises BadRequestError if the sizes do not fit it.
        """
        if isinstance(member, Pipeline):
            return rows
        return work_of(member.inputs, inputs, rows, member.largest_batch)

    def withdraw(self, member: Entry, request_id: RequestId) -> None:
        """Cancel a request to a member."""
        asker = self._pipelines if isinstance(member, Pipeline) else self.runtime
        asker.withdraw(request_id)

    def want(self, member: Entry) -> None:
        """Have a cold member loaded."""
        if isinstance(member, Pipeline):
            self._pipelines.want(member)
        else:
            self.runtime.want(member.model_id)

    def forecast(
        self, members: Sequence[Entry], ask: Ask, inputs: Sequence[Buffer], *, together: bool
    ) -> list[Forecast]:
        """Predict the answer of a request to each member, the most important first; see `Runtime.forecast`.

        A pipeline is predicted as if nothing else were asked, with `together` too. Where dimensions are open, all are
        predicted with the most rows of work that the request comes to for one of them.
        """
        told, models, rows = dict[ModelId, Forecast](), list[ModelId](), ask.rows
        for each in members:
            if isinstance(each, Pipeline):
                told[each.model_id] = self._pipelines.forecast(each, ask)
                continue
            try:
                rows = max(rows, self.work(each, inputs, ask.rows))
                models.append(each.model_id)
            except BadRequestError:
                told[each.model_id] = Forecast(Refusal.FAILED)
        if models:
            ask = replace(ask, rows=rows) if rows != ask.rows else ask
            num_bytes = sum(map(len, inputs))
            found = self.runtime.forecast(models, ask, num_bytes=num_bytes, together=together)
            told |= zip(models, found, strict=True)
        return [told[each.model_id] for each in members]

    @property
    def _pipelines(self) -> PipelinePort:
        assert self.pipelines is not None
        return self.pipelines
