"""The operator's end of `ControlService`: each method is one call, each error one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from clockwright.arguments import check, check_flag, check_text
from clockwright.channel import Access, check_dialled
from clockwright.errors import ConfigError, Denial, DeniedError
from clockwright.foreign import escape_texts
from clockwright.statuses import error_of
from clockwright.v1 import control_pb2 as pb
from clockwright.v1 import control_pb2_grpc as pb_grpc

# Looking takes milliseconds. A server that is silent for this long is not well.
_LOOK_LIMIT_S = 30.0

_CHUNK_BYTES = 1 << 20


class Operator:
    """A connection to one controller.

    Every method raises ConfigError when no controller can be reached, and DeniedError when it does not let the
    caller do that; and BadRequestError when an argument is none that there can be, before anything is sent.
    """

    def __init__(self, address: str, access: Access | None = None) -> None:
        """Connect, when first needed, to `address` (HOST:PORT), with a key or TLS if need be."""
        check_dialled(address, access)
        self._address = address
        self._access = access or Access()
        self._channel = self._access.channel(address)
        self._stub: Any = pb_grpc.ControlServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> pb.StatusResponse:
        """Ask for the controller's totals."""
        response: pb.StatusResponse = self._call(
            self._stub.Status, pb.StatusRequest(), limit_s=_LOOK_LIMIT_S
        )
        return response

    def workers(self) -> list[pb.WorkerInfo]:
        """List all workers."""
        response: pb.ListWorkersResponse = self._call(
            self._stub.ListWorkers, pb.ListWorkersRequest(), limit_s=_LOOK_LIMIT_S
        )
        return list(response.workers)

    def models(self) -> list[pb.ModelInfo]:
        """List all models, sorted by name."""
        response: pb.ListModelsResponse = self._call(
            self._stub.ListModels, pb.ListModelsRequest(), limit_s=_LOOK_LIMIT_S
        )
        return list(response.models)

    def drain(self, worker_id: str) -> None:
        """Take a worker out; returns once it has left."""
        check_text("worker_id", worker_id)
        self._call(self._stub.DrainWorker, pb.DrainWorkerRequest(worker_id=worker_id), limit_s=None)

    def add_model(self, folder: Path | str, *, name: str, replace: bool) -> list[pb.ModelInfo]:
        """Send a model's folder; returns once a worker is ready to serve it.

        Raises:
            ConfigError: there is no such folder.
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
        upload = _upload(folder, paths, name=name, replace=replace)
        response: pb.AddModelResponse = self._call(self._stub.AddModel, upload, limit_s=None)
        return list(response.models)

    def remove_model(self, name: str) -> None:
        """Remove a model; requests that wait for it are refused."""
        check_text("name", name)
        self._call(
            self._stub.RemoveModel, pb.RemoveModelRequest(model_id=name), limit_s=_LOOK_LIMIT_S
        )

    def pin_model(self, name: str, *, pinned: bool) -> list[pb.ModelInfo]:
        """Keep a model's weights loaded, or those of all copies of a folder; or let them go again."""
        check_text("name", name)
        check_flag("pinned", pinned)
        request = pb.PinModelRequest(model_id=name, pinned=pinned)
        response: pb.PinModelResponse = self._call(
            self._stub.PinModel, request, limit_s=_LOOK_LIMIT_S
        )
        return list(response.models)

    def put_application(
        self, application: pb.Application, *, replace: bool = False
    ) -> pb.ApplicationInfo:
        """Add an application, or change one.

        Raises:
            ModelError: the name is taken, or a model is not there or does not fit.
            BadRequestError: the settings are wrong.
        """
        check("application", application, pb.Application, "an Application of control.proto")
        check_flag("replace", replace)
        request = pb.PutApplicationRequest(application=application, replace=replace)
        response: pb.PutApplicationResponse = self._call(
            self._stub.PutApplication, request, limit_s=_LOOK_LIMIT_S
        )
        return response.application

    def remove_application(self, name: str) -> None:
        """Remove an application with all it has learned."""
        check_text("name", name)
        self._call(
            self._stub.RemoveApplication,
            pb.RemoveApplicationRequest(name=name),
            limit_s=_LOOK_LIMIT_S,
        )

    def applications(self, name: str = "", *, context: str = "") -> list[pb.ApplicationInfo]:
        """List all applications, or one, with the weights of a context, or the global ones."""
        check_text("name", name)
        check_text("context", context)
        response: pb.ListApplicationsResponse = self._call(
            self._stub.ListApplications,
            pb.ListApplicationsRequest(name=name, context=context),
            limit_s=_LOOK_LIMIT_S,
        )
        return list(response.applications)

    def erase_context(self, application: str, context: str) -> bool:
        """Have an application forget a user, session or tenant; says whether it knew one."""
        check_text("application", application)
        check_text("context", context)
        response: pb.EraseContextResponse = self._call(
            self._stub.EraseContext,
            pb.EraseContextRequest(application=application, context=context),
            limit_s=_LOOK_LIMIT_S,
        )
        return response.erased

    def set_quota(self, tenant: str, quota: pb.Quota) -> str:
        """Give a tenant a quota, in place of any that it has.

        Returns:
            What of it has no effect at this server, in words; empty: nothing.

        Raises:
            BadRequestError: a bound cannot be.
            ClockwrightError: the server's quotas come from a file.
        """
        check_text("tenant", tenant)
        check("quota", quota, pb.Quota, "a Quota of control.proto")
        request = pb.SetQuotaRequest(tenant=tenant, quota=quota)
        response: pb.SetQuotaResponse = self._call(
            self._stub.SetQuota, request, limit_s=_LOOK_LIMIT_S
        )
        return response.remark

    def remove_quota(self, tenant: str) -> None:
        """Take a tenant's quota away.

        Raises:
            UnknownModelError: it has none.
            ClockwrightError: the server's quotas come from a file.
        """
        check_text("tenant", tenant)
        request = pb.RemoveQuotaRequest(tenant=tenant)
        self._call(self._stub.RemoveQuota, request, limit_s=_LOOK_LIMIT_S)

    def quotas(self) -> list[pb.QuotaInfo]:
        """List all quotas, with what their tenants have now."""
        response: pb.ListQuotasResponse = self._call(
            self._stub.ListQuotas, pb.ListQuotasRequest(), limit_s=_LOOK_LIMIT_S
        )
        return list(response.quotas)

    def explain(self, request_id: str) -> pb.ExplainResponse:
        """Ask what became of a request: of any, or of one of the caller's tenant where no other may be asked about.

        Args:
            request_id: what its client called it, or the number that the server gave it.

        Raises:
            UnknownModelError: no such request is remembered, or it is somebody else's.
        """
        check_text("request_id", request_id)
        request = pb.ExplainRequest(request_id=request_id)
        response: pb.ExplainResponse
        try:
            response = self._call(self._stub.Explain, request, limit_s=_LOOK_LIMIT_S)
        except DeniedError as error:
            if error.denial is not Denial.NOT_ALLOWED:
                raise
            response = self._call(self._stub.ExplainOwn, request, limit_s=_LOOK_LIMIT_S)
        return response

    def _call(self, method: Any, request: object, *, limit_s: float | None) -> Any:  # noqa: ANN401
        try:
            response = method(request, timeout=limit_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            if limit_s is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConfigError(f"{self._address} did not answer within {limit_s:g} s") from None
            raise error_of(error, self._address) from None
        # A terminal obeys escape sequences, whoever made the name that has them.
        escape_texts(response)
        return response

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()


def _upload(
    folder: Path, paths: Sequence[Path], *, name: str, replace: bool
) -> Iterator[pb.AddModelRequest]:
    for path in paths:
        relative = path.relative_to(folder).as_posix()
        with path.open("rb") as file:
            # Even an empty file gets a message, for its path. The model's name counts in the first message
            # only.
            yield pb.AddModelRequest(model_id=name, replace=replace, path=relative)
            while chunk := file.read(_CHUNK_BYTES):
                yield pb.AddModelRequest(content=chunk)
