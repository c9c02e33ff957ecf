"""Answers KEDA's external-push trigger, and Kubernetes' probes, with what the controller wants.

While a leader is heard, KEDA gets its number for the workers that the trigger names, by their Deployment or kind. Else calls
fail with UNAVAILABLE, from which an HPA concludes nothing, and the health service says NOT_SERVING.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc.aio

from clockwright.v1 import externalscaler_pb2 as pb
from clockwright.v1.control_pb2 import KindWanted
from engines.kubernetes.wanted import Heard, WantedFeed

#: The metric: so many workers, of which each is worth 1.
METRIC: Final = "workers-wanted"
# What the trigger's metadata name, of which one is needed.
_KIND: Final = "kind"
_DEPLOYMENT: Final = "deployment"

# KEDA keeps its connection for as long as it lives, also to a controller that leads no more.
_CONNECTION_MS: Final = 30_000
# KEDA has three calls open per trigger.
_CALLS_MAX: Final = 256

# Messages of gRPC's health service: a name in and an enum out, both in field 1.
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"
_LIVENESS: Final = b"\x0a\x08liveness"


class Scaler:
    """The services, by their methods."""

    def __init__(self, wanted: WantedFeed, *, takes_away: bool) -> None:
        """Answer from what is heard. `takes_away`: this process ends Pods, so that KEDA has to end none."""
        self._wanted = wanted
        self._takes_away = takes_away

    def server(self) -> Any:  # noqa: ANN401  grpc's
        """Make a server that has no port yet."""
        server = grpc.aio.server(
            maximum_concurrent_rpcs=_CALLS_MAX,
            options=[("grpc.max_connection_age_ms", _CONNECTION_MS)],
        )
        calls = {
            name: _handler(name, getattr(self, behaviour))
            for name, behaviour in (
                ("IsActive", "is_active"),
                ("StreamIsActive", "stream_is_active"),
                ("GetMetricSpec", "get_metric_spec"),
                ("GetMetrics", "get_metrics"),
                ("StreamMetricSpec", "stream_metric_spec"),
            )
        }
        health = {
            "Check": grpc.unary_unary_rpc_method_handler(self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("externalscaler.ExternalScaler", calls),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
            )
        )
        return server

    async def is_active(self, request: Any, context: Any) -> Any:  # noqa: ANN401
        """Say whether there should be any workers."""
        return pb.IsActiveResponse(result=self._is_active(await self._kinds(request, context)))

    async def stream_is_active(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        """Say it at once, when it changes and when more are wanted than before, while the controller leads."""
        heard: Heard | None = await self._heard(request, context)
        was_active, before = None, 0
        while heard is not None:
            news = self._wanted.news
            if kinds := _named(heard, request):
                is_active, wanted = self._is_active(kinds), _sum(kinds)
                if is_active is not was_active or wanted > before:
                    yield pb.IsActiveResponse(result=is_active)
                was_active, before = is_active, wanted
            await news.wait()
            # KEDA opens a stream that ends well again after 2 s, and one that fails after up to a minute.
            heard = self._wanted.heard

    async def get_metric_spec(self, request: Any, context: Any) -> Any:  # noqa: ANN401
        """Name the metric, and what one replica is worth."""
        await self._heard(request, context)
        spec = pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def stream_metric_spec(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        """Say that once: it does not change while the controller leads."""
        yield await self.get_metric_spec(request, context)
        while self._wanted.heard is not None:
            await self._wanted.news.wait()

    async def get_metrics(self, request: Any, context: Any) -> Any:  # noqa: ANN401
        """Say how many workers are wanted."""
        wanted = _sum(await self._kinds(request.scaledObjectRef, context))
        value = pb.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=wanted)
        return pb.GetMetricsResponse(metricValues=[value])

    async def check(self, request: bytes, _: Any) -> bytes:  # noqa: ANN401
        """Say whether the controller leads; asked for `liveness`, that this process lives."""
        if request == _LIVENESS or self._wanted.heard is not None:
            return _SERVING
        return _NOT_SERVING

    async def watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
        """Say the same, whenever it changes."""
        told = b""
        while True:
            news = self._wanted.news
            if (now := await self.check(request, context)) != told:
                yield now
            told = now
            await news.wait()

    def _is_active(self, kinds: Sequence[KindWanted]) -> bool:
        """Whether KEDA is to leave the Deployment its Pods: it would end all at once, whatever they do."""
        num_present = sum([each.ready + each.joining + each.draining for each in kinds])
        return _sum(kinds) > 0 or (self._takes_away and num_present > 0)

    async def _heard(self, request: Any, context: Any) -> Heard:  # noqa: ANN401
        """What the controller said; ends a call that names nothing, and all while the controller does not lead."""
        if not (request.scalerMetadata.keys() & {_KIND, _DEPLOYMENT}):
            text = (
                f"found neither {_DEPLOYMENT} nor {_KIND} in the trigger's metadata, expected one"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        heard = self._wanted.heard
        if heard is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._wanted.problem)
        assert heard is not None, "abort raises"
        return heard

    async def _kinds(self, request: Any, context: Any) -> Sequence[KindWanted]:  # noqa: ANN401
        """What is wanted of the workers that a trigger names; ends the call if it knows no such worker."""
        heard = await self._heard(request, context)
        kinds = _named(heard, request)
        if not kinds:
            # Zero would have KEDA end the Pods that start now.
            metadata = dict(request.scalerMetadata)
            named = {name: metadata[name] for name in (_KIND, _DEPLOYMENT) if name in metadata}
            text = f"no worker of {named} is known; kinds known: {', '.join(heard.kinds) or 'none'}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return kinds


def _named(heard: Heard, request: Any) -> Sequence[KindWanted]:  # noqa: ANN401
    metadata = request.scalerMetadata
    if kind := metadata.get(_KIND, ""):
        return [heard.kinds[kind]] if kind in heard.kinds else []
    return heard.of_deployment(metadata.get(_DEPLOYMENT, ""))


def _sum(kinds: Sequence[KindWanted]) -> int:
    return sum([each.wanted for each in kinds])


def _handler(name: str, behaviour: Any) -> Any:  # noqa: ANN401  grpc's
    method = pb.DESCRIPTOR.services_by_name["ExternalScaler"].methods_by_name[name]
    kind = "unary_stream" if method.server_streaming else "unary_unary"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    request = getattr(pb, method.input_type.name)
    response = getattr(pb, method.output_type.name)
    return make(
        behaviour,
        request_deserializer=request.FromString,
        response_serializer=response.SerializeToString,
    )
