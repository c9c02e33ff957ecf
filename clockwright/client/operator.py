"""The operator's client of `ControlService`: each method is one call, each error one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc
from google.protobuf.message_factory import GetMessageClass

from clockwright.client.arguments import check, check_flag, check_text, number
from clockwright.client.channel import Access, check_dialled
from clockwright.client.statuses import error_of
from clockwright.errors import ClockwrightError, ConfigError, Denial, DeniedError
from clockwright.foreign import escape_texts
from clockwright.v1 import control_pb2 as pb

# Reading calls take milliseconds. A server that is silent for this long has a problem.
_LOOK_LIMIT_S = 30.0

_CHUNK_BYTES = 1 << 20


def control_stub(channel: Any) -> Any:  # noqa: ANN401  grpc's
    """Make the callables of `ControlService` on a channel of grpc or grpc.aio, by the names of the methods."""
    stub = SimpleNamespace()
    for method in pb.DESCRIPTOR.services_by_name["ControlService"].methods:
        kind = "stream_unary" if method.client_streaming else "unary_unary"
        if method.server_streaming:
            kind = "unary_stream"
        request, response = map(GetMessageClass, (method.input_type, method.output_type))
        call = getattr(channel, kind)(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        setattr(stub, method.name, call)
    return stub


class Operator:
    """A connection to one controller.

    Every method raises ConfigError when no controller can be reached, and DeniedError when it does not let the
    caller do that; and BadRequestError when an argument is invalid, before anything is sent.
    """

    def __init__(self, address: str, access: Access | None = None) -> None:
        """Connect to `address` (HOST:PORT) when first needed, with the credentials and TLS of `access`."""
        check_dialled(address, access)
        self._address = address
        self._access = access or Access()
        self._channel = self._access.channel(address)
        self._stub = control_stub(self._channel)

    def status(self) -> pb.StatusResponse:
        """Ask for the controller's totals."""
        response: pb.StatusResponse = self._call(self._stub.Status, pb.StatusRequest())
        return response

    def workers(self) -> list[pb.WorkerInfo]:
        """List all workers."""
        return list(self._call(self._stub.ListWorkers, pb.ListWorkersRequest()).workers)

    def models(self) -> list[pb.ModelInfo]:
        """List all models, sorted by name."""
        return list(self._call(self._stub.ListModels, pb.ListModelsRequest()).models)

    def drain(self, worker_id: str, *, unless_last: bool = False) -> None:
        """Take a worker out; returns once it has left.

        Args:
            worker_id: its name.
            unless_last: not if that leaves a model without a worker.

        Raises:
            ModelError: it would, and nothing has changed.
        """
        check_text("worker_id", worker_id)
        check_flag("unless_last", unless_last)
        request = pb.DrainWorkerRequest(worker_id=worker_id, unless_last=unless_last)
        self._call(self._stub.DrainWorker, request, limit_s=None)

    def workers_wanted(self) -> list[pb.KindWanted]:
        """Say how many workers of each kind the load needs now."""
        for kinds in self.watch_workers_wanted():
            return kinds
        raise ConfigError(f"{self._address} is about to stop")

    def watch_workers_wanted(self) -> Iterator[list[pb.KindWanted]]:
        """Say how many workers of each kind the load needs: at once, at each change, and at least every 10 s.

        It ends when the controller stops; closing it ends the call.
        """
        request = pb.WatchWorkersWantedRequest()
        call = self._stub.WatchWorkersWanted(request, metadata=self._access.metadata)
        try:
            for told in call:
                escape_texts(told)
                yield list(told.kinds)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        finally:
            call.cancel()

    def release_worker(self, gpu_kind: str, worker: str = "") -> pb.ReleaseWorkerResponse:
        """Drain a worker of a kind: the one that is cheapest to lose, unless one is named. Returns at once.

        Raises:
            ModelError: none of the kind may leave unless it is named; nothing has changed.
            UnknownModelError: there is no such worker.
        """
        check_text("gpu_kind", gpu_kind)
        check_text("worker", worker)
        request = pb.ReleaseWorkerRequest(gpu_kind=gpu_kind, worker=worker)
        response: pb.ReleaseWorkerResponse = self._call(self._stub.ReleaseWorker, request)
        return response

    def add_model(self, folder: Path | str, *, name: str, replace: bool) -> list[pb.ModelInfo]:
        """Send a model's folder; returns once a worker is ready to serve it.

        Raises:
            ConfigError: the folder does not exist, is empty, or has a file that cannot be read.
            ModelError: the model cannot be served; nothing has changed.
        """
        check("folder", folder, str | Path, "a path")
        check_text("name", name)
        check_flag("replace", replace)
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; expected one with VERSION/model.onnx")
        paths = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.relative_to(folder).as_posix().startswith(".")
        ]
        if not paths:
            raise ConfigError(f"{folder} has no files; expected VERSION/model.onnx")
        # gRPC keeps for itself why an upload cannot go on.
        faults: list[str] = []
        upload = _upload(folder, paths, faults, name=name, replace=replace)
        try:
            return list(self._call(self._stub.AddModel, upload, limit_s=None).models)
        except ClockwrightError:
            if faults:
                raise ConfigError(faults[0]) from None
            raise

    def remove_model(self, name: str) -> None:
        """Remove a model; requests that wait for it are refused."""
        check_text("name", name)
        self._call(self._stub.RemoveModel, pb.RemoveModelRequest(model_id=name))

    def pin_model(self, name: str, *, pinned: bool) -> list[pb.ModelInfo]:
        """Pin or unpin a model, or all copies of a folder."""
        check_text("name", name)
        check_flag("pinned", pinned)
        request = pb.PinModelRequest(model_id=name, pinned=pinned)
        return list(self._call(self._stub.PinModel, request).models)

    def route_model(
        self,
        name: str,
        *,
        traffic: Mapping[str, float] | None = None,
        aliases: Mapping[str, str] | None = None,
        shadow: Mapping[str, float] | None = None,
    ) -> list[pb.ModelInfo]:
        """Change which of a model's versions requests get.

        Args:
            name: the model.
            traffic: by version or alias: its share, 0 to 1, of the requests that name no version. What they leave goes to
                the other versions in the proportion that those have now.
            aliases: the version of each alias; an empty one removes the alias.
            shadow: the version that gets copies of requests, with their share; 0: none does.

        Returns:
            The versions, ascending.

        Raises:
            ModelError: a version is not served, or shares are more than 1; nothing has changed.
            UnknownModelError: there is no such model.
        """
        check_text("name", name)
        check("aliases", aliases or {}, Mapping, "a version by alias")
        for alias, version in (aliases or {}).items():
            check_text("aliases", alias)
            check_text(f"aliases[{alias}]", version)
        request = pb.RouteModelRequest(
            model_id=name,
            traffic=_shares("traffic", traffic),
            aliases=aliases,
            shadow=_shares("shadow", shadow),
        )
        return list(self._call(self._stub.RouteModel, request).models)

    def roll_back_model(self, name: str) -> list[pb.ModelInfo]:
        """Take back the last change of a model's traffic, aliases or shadow, or of its latest version.

        Raises:
            ModelError: there was none, or what served before it is gone.
            UnknownModelError: there is no such model.
        """
        check_text("name", name)
        request = pb.RouteModelRequest(model_id=name, roll_back=True)
        return list(self._call(self._stub.RouteModel, request).models)

    def put_application(
        self, application: pb.Application, *, replace: bool = False
    ) -> pb.ApplicationInfo:
        """Add an application, or change one.

        Raises:
            ModelError: the name is taken, or a model does not exist or does not fit.
            BadRequestError: the settings are wrong.
        """
        check("application", application, pb.Application, "an Application of control.proto")
        check_flag("replace", replace)
        request = pb.PutApplicationRequest(application=application, replace=replace)
        response: pb.PutApplicationResponse = self._call(self._stub.PutApplication, request)
        return response.application

    def remove_application(self, name: str) -> None:
        """Remove an application with all it has learned."""
        check_text("name", name)
        self._call(self._stub.RemoveApplication, pb.RemoveApplicationRequest(name=name))

    def applications(self, name: str = "", *, context: str = "") -> list[pb.ApplicationInfo]:
        """List all applications, or one, with the weights of a context, or the global ones."""
        check_text("name", name)
        check_text("context", context)
        return list(
            self._call(
                self._stub.ListApplications, pb.ListApplicationsRequest(name=name, context=context)
            ).applications
        )

    def erase_context(self, application: str, context: str) -> bool:
        """Erase what an application learned about a user, session or tenant. Returns whether it knew one."""
        check_text("application", application)
        check_text("context", context)
        response: pb.EraseContextResponse = self._call(
            self._stub.EraseContext,
            pb.EraseContextRequest(application=application, context=context),
        )
        return response.erased

    def set_quota(self, tenant: str, quota: pb.Quota) -> str:
        """Set a tenant's quota; it replaces the previous one.

        Returns:
            What of it has no effect at this server, as text; empty: all of it has.

        Raises:
            BadRequestError: a bound is invalid.
            ClockwrightError: the server's quotas come from a file.
        """
        check_text("tenant", tenant)
        check("quota", quota, pb.Quota, "a Quota of control.proto")
        request = pb.SetQuotaRequest(tenant=tenant, quota=quota)
        response: pb.SetQuotaResponse = self._call(self._stub.SetQuota, request)
        return response.remark

    def remove_quota(self, tenant: str) -> None:
        """Remove a tenant's quota.

        Raises:
            UnknownModelError: it has none.
            ClockwrightError: the server's quotas come from a file.
        """
        check_text("tenant", tenant)
        request = pb.RemoveQuotaRequest(tenant=tenant)
        self._call(self._stub.RemoveQuota, request)

    def quotas(self) -> list[pb.QuotaInfo]:
        """List all quotas with their current use."""
        return list(self._call(self._stub.ListQuotas, pb.ListQuotasRequest()).quotas)

    def explain(self, request_id: str) -> pb.ExplainResponse:
        """Explain what happened to a request: any one, or of the caller's tenant if its role allows no others.

        Args:
            request_id: the client's id or the server's number.

        Raises:
            UnknownModelError: no such request is remembered, or it belongs to another tenant.
        """
        check_text("request_id", request_id)
        request = pb.ExplainRequest(request_id=request_id)
        response: pb.ExplainResponse
        try:
            response = self._call(self._stub.Explain, request)
        except DeniedError as error:
            if error.denial is not Denial.NOT_ALLOWED:
                raise
            response = self._call(self._stub.ExplainOwn, request)
        return response

    def _call(
        self,
        method: Any,  # noqa: ANN401  grpc's
        request: object,
        limit_s: float | None = _LOOK_LIMIT_S,
    ) -> Any:  # noqa: ANN401
        try:
            response = method(request, timeout=limit_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            if limit_s is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConfigError(f"{self._address} did not answer within {limit_s:g} s") from None
            raise error_of(error, self._address) from None
        # Names may contain escape sequences, which a terminal would obey.
        escape_texts(response)
        return response

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _shares(name: str, shares: Mapping[str, float] | None) -> dict[str, float]:
    check(name, shares or {}, Mapping, "a share by version")
    for version in shares or {}:
        check_text(name, version)
    return {
        version: number(f"{name}[{version}]", share, "a share from 0 to 1")
        for version, share in (shares or {}).items()
    }


def _upload(
    folder: Path, paths: Sequence[Path], faults: list[str], *, name: str, replace: bool
) -> Iterator[pb.AddModelRequest]:
    for path in paths:
        relative = path.relative_to(folder).as_posix()
        try:
            with path.open("rb") as file:
                # Even an empty file gets a message, for its path. The model's name counts in the first message
                # only.
                yield pb.AddModelRequest(model_id=name, replace=replace, path=relative)
                while chunk := file.read(_CHUNK_BYTES):
                    yield pb.AddModelRequest(content=chunk)
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
            raise
