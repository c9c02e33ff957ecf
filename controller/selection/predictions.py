"""The prediction cache as a stage of the port: models of which the cache may know the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from clockwright.units import RequestId
from clockwright.wire.bulk import Buffer
from controller.models.entry import Entry
from controller.port import Answered, Ask, Sink
from controller.runtime import Runtime
from controller.selection.core.cache import Key
from controller.selection.ensemble import Cache, Outputs, keep


class Predictions:
    """Asks a model, unless the cache has its answer."""

    def __init__(self, runtime: Runtime, cache: Cache) -> None:
        self._runtime = runtime
        self._cache = cache
        #: Answers from the cache that are told in the next turn of the event loop.
        self._found: dict[RequestId, asyncio.Handle] = {}

    def ask(self, model: Entry, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Do what `PortStage` says."""
        # What waits for another request's computation could not be decided by its own time.
        asks_more = ask.explain or ask.decide_within_ns
        if not model.is_cached or asks_more or not self._cache.on:
            return self._runtime.ask(model.model_id, ask, inputs, sink)
        runtime, cache = self._runtime, self._cache
        key = Key(model.model_id, tuple(map(bytes, inputs)))
        # No computation in flight was promised for this deadline. A query that joined one that is refused would
        # have to send another request, and would be refused later than all others.
        found = cache.request(key, deadline_ns=0, now_ns=runtime.clock())
        if not isinstance(found, tuple):
            return runtime.ask(model.model_id, ask, inputs, sink, late=partial(self._keep, key))
        request_id = runtime.new_number()
        told = Answered(ask.arrival_ns + ask.slo_ns)
        self._found[request_id] = asyncio.get_running_loop().call_soon(
            self._tell, request_id, sink, told, found
        )
        return request_id

    def withdraw(self, request_id: RequestId) -> None:
        """Do what `PortStage` says."""
        handle = self._found.pop(request_id, None)
        if handle is None:
            self._runtime.withdraw(request_id)
        else:
            handle.cancel()

    def _tell(self, request_id: RequestId, sink: Sink, told: Answered, outputs: Outputs) -> None:
        del self._found[request_id]
        sink.told(request_id, told, outputs)

    def _keep(self, key: Key, views: Sequence[Buffer]) -> None:
        keep(self._cache, key, views, self._runtime.clock())
