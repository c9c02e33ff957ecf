"""Who adds, replaces and removes models while all goes on, and writes down what was confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc

from clockwright.v1 import control_pb2 as pb
from experiments.faults.clients import WorldClients
from experiments.faults.device import ModelSpec
from experiments.faults.plant import Plant
from experiments.faults.rpc import Channel

_CONTROL = "/clockwright.v1.ControlService"


@dataclass
class ModelOperator:
    """One operator, who does one thing after the other to each model."""

    plant: Plant
    clients: WorldClients
    #: What is confirmed of each model: what it is, None that it is not there. What is in doubt is missing.
    certain: dict[str, ModelSpec | None] = field(default_factory=dict)
    #: Applications that are confirmed.
    applications: set[str] = field(default_factory=set)
    num_open: int = 0
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)

    def put(self, name: str, spec: ModelSpec) -> None:
        """Add a model, or replace what is there of its name."""
        self._begin(name, spec)

    def remove(self, name: str) -> None:
        """Remove a model."""
        self._begin(name, None)

    def put_application(self, name: str, models: Sequence[str]) -> None:
        """Add an application that asks one of its models and learns which."""
        self.num_open += 1
        loop = self.clients.process.loop
        loop.call_soon(lambda: loop.create_task(self._put_application(name, models)))

    async def _put_application(self, name: str, models: Sequence[str]) -> None:
        application = pb.Application(
            name=name,
            models=models,
            policy="thompson",
            options_json='{"discount": 1.0}',
            combination="one",
            no_cache=True,
        )
        words = "done"
        try:
            async with Channel(self.plant.controller_address) as channel:
                put = channel.unary_unary(
                    f"{_CONTROL}/PutApplication", pb.PutApplicationRequest.SerializeToString
                )
                request = pb.PutApplicationRequest(application=application, replace=True)
                await put(request, metadata=self._metadata)
            self.applications.add(name)
        except grpc.aio.AioRpcError as error:
            words = f"{error.code().name} {(error.details() or '')[:100]}"
        finally:
            self.num_open -= 1
        self.plant.world.say(f"application {name} is put: {words}")

    def _begin(self, name: str, spec: ModelSpec | None) -> None:
        self.num_open += 1
        loop = self.clients.process.loop
        loop.call_soon(lambda: loop.create_task(self._work(name, spec)))

    async def _work(self, name: str, spec: ModelSpec | None) -> None:
        world = self.plant.world
        try:
            async with self._turns.setdefault(name, asyncio.Lock()):
                self.certain.pop(name, None)  # until it is confirmed, both may be so
                if spec is not None:
                    self.clients.versions.setdefault(name, []).append(spec)
                try:
                    async with Channel(self.plant.controller_address) as channel:
                        if spec is not None:
                            await self._put(channel, name, spec)
                        else:
                            await self._remove(channel, name)
                except grpc.aio.AioRpcError as error:
                    words = f"{error.code().name} {(error.details() or '')[:100]}"
                    if error.code() is grpc.StatusCode.NOT_FOUND and spec is None:
                        self.certain[name] = None
                else:
                    words = "done"
                    self.certain[name] = spec
                what = "is removed" if spec is None else f"is put as {spec.key}"
                world.say(f"model {name} {what}: {words}")
        finally:
            self.num_open -= 1

    async def _put(self, channel: Channel, name: str, spec: ModelSpec) -> None:
        async def messages() -> AsyncIterator[bytes]:
            for path, content in spec.files().items():
                message = pb.AddModelRequest(
                    model_id=name, path=path, content=content, replace=True
                )
                yield message.SerializeToString()

        call = channel.stream_stream(f"{_CONTROL}/AddModel")(messages(), metadata=self._metadata)
        async for _ in call:
            pass

    async def _remove(self, channel: Channel, name: str) -> None:
        remove = channel.unary_unary(
            f"{_CONTROL}/RemoveModel", pb.RemoveModelRequest.SerializeToString
        )
        await remove(pb.RemoveModelRequest(model_id=name), metadata=self._metadata)

    @property
    def _metadata(self) -> Sequence[tuple[str, str]]:
        return self.plant.shown_by("operator").metadata
