"""Members of applications, models and pipelines of models alike: what asks, predicts and wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clockwright.units import RequestId
from clockwright.wire.bulk import Buffer
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
        """Ask a member; `asked` is told, as `PortStage` says."""
        if isinstance(member, Pipeline):
            return self._pipelines.ask(member, ask, inputs, asked)
        return self.runtime.ask(member.model_id, ask, inputs, asked, late=asked.came)

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
        self, members: Sequence[Entry], ask: Ask, *, num_bytes: int, together: bool
    ) -> list[Forecast]:
        """Predict the answer of a request to each member, the most important first; see `Runtime.forecast`.

        A pipeline is predicted as if nothing else were asked, with `together` too.
        """
        models = [each.model_id for each in members if not isinstance(each, Pipeline)]
        told = iter(
            self.runtime.forecast(models, ask, num_bytes=num_bytes, together=together)
            if models
            else ()
        )
        return [
            self._pipelines.forecast(each, ask) if isinstance(each, Pipeline) else next(told)
            for each in members
        ]

    @property
    def _pipelines(self) -> PipelinePort:
        assert self.pipelines is not None
        return self.pipelines
