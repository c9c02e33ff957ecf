"""Every exception this project raises, and why a request may be refused.

ClockwrightError
+- ConfigError       the person who started the process must fix it
+- DeviceGoneError   a worker's device is lost for good; the process leaves, another may serve
+- ModelError        a model cannot be served; the message says why
   +- OtherWorkersError  (worker) workers of another kind are to serve the model
   +- UnknownModelError  no model, or no version, has that name
   +- NameTakenError     a model or an application has that name already
+- UnknownWorkerError  no worker has that name
+- UnknownTenantError  the tenant has no quota
+- UnknownRequestError  no request with that id is remembered, or it belongs to another tenant
+- NoRoomError       uploaded models have no room on the controller; says how much there is
+- TraceFormatError  a trace file is not what its reader expects; names file and line
+- BadRequestError   a request does not fit its model; names the field, what was found and expected
+- StoreError        the store of applications cannot be read or written now; the message says why
+- ProtocolError     a peer sent something illegal; its stream is closed, nothing else
+- RefusedError      (client) the request was refused; carries the `Refusal`
+- DeniedError       the caller may not do what it asked for; carries the `Denial`
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class ClockwrightError(Exception):
    """Base of all exceptions of this project."""


class ConfigError(ClockwrightError):
    """Flags, configuration or environment are wrong; the process cannot start."""


class DeviceGoneError(ClockwrightError):
    """The device of this worker process is lost; only a new process can use it, if any can."""


class TraceFormatError(ClockwrightError):
    """A trace file is not what its reader expects; the message begins with `FILE:LINE:`."""


class ModelError(ClockwrightError):
    """A model is not fit to be served."""


class ModelFaults:
    """Collects what is wrong with a model, so that all is said at once."""

    def __init__(self) -> None:
        #: Each in words.
        self.found: list[str] = []

    @contextmanager
    def collected(self, where: str = "") -> Iterator[None]:
        """Note the ModelError that ends the block, with the file in which the fault is."""
        try:
            yield
        except ModelError as error:
            self.found.append(f"{where}: {error}" if where else str(error))

    def check(self) -> None:
        """Raise a ModelError that names all, if there are any."""
        if self.found:
            raise ModelError("; ".join(dict.fromkeys(self.found)))


class OtherWorkersError(ModelError):
    """A model is for workers of another kind; this worker has not checked it."""


class UnknownModelError(ModelError):
    """No model has that name, or it is served in another version."""


class NameTakenError(ModelError):
    """A model, an application or a region has that name already."""


class UnknownWorkerError(ClockwrightError):
    """No worker has that name."""


class UnknownTenantError(ClockwrightError):
    """The tenant has no quota."""


class UnknownRequestError(ClockwrightError):
    """No request with that id or number is remembered, or it belongs to another tenant."""


class UnknownRegionError(ClockwrightError):
    """No region of shared memory has that name."""


class NotAllowedError(ClockwrightError):
    """The server's flags do not allow that to this client."""


class NoRoomError(ClockwrightError):
    """Uploaded models, or regions of shared memory, have no room on the controller."""


class BadRequestError(ClockwrightError):
    """A request does not fit its model."""


class StoreError(ClockwrightError):
    """The store of applications and their states failed; a later attempt may succeed."""


class ProtocolError(ClockwrightError):
    """A peer sent something the protocol does not allow."""


class LinkEndedError(ClockwrightError):
    """The controller closed a worker's connection; the worker may register again."""


class Refusal(enum.Enum):
    """Why a request was refused. The values are the wire's (`google.rpc.ErrorInfo.reason`)."""

    #: The SLO is shorter than the link to a worker and one EXEC on an idle GPU with the weights resident.
    INFEASIBLE = "INFEASIBLE"
    #: The weights are not resident and cannot be loaded in time.
    COLD = "COLD"
    #: The work ahead of the request takes too long.
    OVERLOADED = "OVERLOADED"
    #: The request exceeds the tenant's quota; the figures say which.
    QUOTA = "QUOTA"
    #: The answer was predicted to be in time and was not.
    LATE = "LATE"
    #: A worker that had the request was lost, and no other answered in time, or a second was lost with it.
    WORKER_LOST = "WORKER_LOST"
    #: No connected worker can serve the model now.
    NO_WORKER = "NO_WORKER"
    #: Workers are still preparing the model.
    LOADING = "LOADING"
    #: All workers that looked at the model refused it: it cannot be served.
    UNFIT = "UNFIT"
    #: The controller is shutting down.
    DRAINING = "DRAINING"
    #: The model was removed while the request waited.
    MODEL_REMOVED = "MODEL_REMOVED"
    #: The engine failed on the request's batch; the message quotes it.
    FAILED = "FAILED"
    #: The confidence of an application's answer is below its threshold, and it has no default.
    LOW_CONFIDENCE = "LOW_CONFIDENCE"


class RefusedError(ClockwrightError):
    """The server refused a request, or could not answer within its SLO."""

    def __init__(
        self, refusal: Refusal, message: str, *, figures: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(f"{refusal.value}: {message}")
        self.refusal = refusal
        self.message = message
        #: Times behind the refusal, in ns: `slo_ns`, `load_ns`, `exec_ns`, `queue_ns`, ...; may be empty.
        #: `retry_ns`: a retry after this time may succeed.
        self.figures = dict(figures or {})


class Denial(enum.Enum):
    """Why a call was denied. The values are the wire's (`google.rpc.ErrorInfo.reason`)."""

    #: The caller has no credentials, and the method needs some.
    NO_CREDENTIALS = "NO_CREDENTIALS"
    #: Unknown or invalid credentials.
    UNKNOWN_CREDENTIALS = "UNKNOWN_CREDENTIALS"
    #: The credentials have expired.
    EXPIRED = "EXPIRED"
    #: The caller's roles do not allow the call.
    NOT_ALLOWED = "NOT_ALLOWED"


class DeniedError(ClockwrightError):
    """The server does not let the caller do that."""

    def __init__(self, denial: Denial, message: str) -> None:
        super().__init__(f"{denial.value}: {message}")
        self.denial = denial
        self.message = message
