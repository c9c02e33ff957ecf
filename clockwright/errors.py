"""Every exception this project raises, and why a request may be refused.

ClockwrightError
+- ConfigError       the person who started the process must fix it
+- DeviceGoneError   a worker's device is lost for good; the process leaves, another may serve
+- ModelError        a model cannot be served; the message says why
   +- OtherWorkersError  (worker) workers of another kind are to serve the model
   +- UnknownModelError  there is no model, or no version, of that name
   +- NameTakenError     there is a model or an application of that name already
+- UnknownWorkerError  there is no worker of that name
+- UnknownTenantError  there is no quota for a tenant of that name
+- UnknownRequestError  no request of that name is remembered, or it is somebody else's
+- NoRoomError       uploaded models have no room on the controller; says how much there is
+- TraceFormatError  a trace file is not what its reader expects; names file and line
+- BadRequestError   a request does not fit its model; names the field, what was found and expected
+- StoreError        what applications learn cannot be read or written now; the message says why
+- ProtocolError     a peer sent something illegal; its stream is closed, nothing else
+- RefusedError      (client) the request was refused; carries the `Refusal`
+- DeniedError       the caller may not do what it asked for; carries the `Denial`
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


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


class OtherWorkersError(ModelError):
    """A model is for workers of another kind; here nobody has looked whether it is fit."""


class UnknownModelError(ModelError):
    """There is no model of that name, or it is served in another version."""


class NameTakenError(ModelError):
    """There is a model, an application or a region of that name already."""


class UnknownWorkerError(ClockwrightError):
    """There is no worker of that name."""


class UnknownTenantError(ClockwrightError):
    """There is no quota for a tenant of that name."""


class UnknownRequestError(ClockwrightError):
    """No request of that name or number is remembered, or it is somebody else's."""


class UnknownRegionError(ClockwrightError):
    """There is no region of shared memory of that name."""


class NotAllowedError(ClockwrightError):
    """The server was not started so that this client may do that."""


class NoRoomError(ClockwrightError):
    """Uploaded models, or regions of shared memory, have no room on the controller."""


class BadRequestError(ClockwrightError):
    """A request does not fit its model."""


class StoreError(ClockwrightError):
    """The store of applications and their states does not do what it was asked for; later it may."""


class ProtocolError(ClockwrightError):
    """A peer sent something the protocol does not allow."""


class Refusal(enum.Enum):
    """Why a request got no answer. The values are the wire's (`google.rpc.ErrorInfo.reason`)."""

    #: The SLO is below what the model can ever do, even resident on an idle GPU: the way to a worker, and the EXEC.
    INFEASIBLE = "INFEASIBLE"
    #: The weights are not resident and cannot be loaded in time.
    COLD = "COLD"
    #: The work ahead of the request takes too long.
    OVERLOADED = "OVERLOADED"
    #: The tenant has used up what it may have, or asks for what it may not have; the figures say which quota.
    QUOTA = "QUOTA"
    #: The answer was predicted to be in time and was not.
    LATE = "LATE"
    #: The worker that had the request vanished, and no other could answer in time.
    WORKER_LOST = "WORKER_LOST"
    #: No worker can serve the model.
    NO_WORKER = "NO_WORKER"
    #: The controller is shutting down.
    DRAINING = "DRAINING"
    #: The model was removed while the request waited.
    MODEL_REMOVED = "MODEL_REMOVED"
    #: The engine failed on the request's batch; the message has its words.
    FAILED = "FAILED"
    #: An application's models were not sure enough, and it has no default.
    LOW_CONFIDENCE = "LOW_CONFIDENCE"


class RefusedError(ClockwrightError):
    """The server refused a request, or could not answer inside its SLO."""

    def __init__(
        self, refusal: Refusal, message: str, *, figures: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(f"{refusal.value}: {message}")
        self.refusal = refusal
        self.message = message
        #: Times behind the refusal, in ns: `slo_ns`, `load_ns`, `exec_ns`, `queue_ns`, ...; may be empty.
        #: `retry_ns`: after this time it may be worth to ask again.
        self.figures = dict(figures or {})


class Denial(enum.Enum):
    """Why a caller may not do something. The values are the wire's (`google.rpc.ErrorInfo.reason`)."""

    #: The caller shows nothing, and not everybody may.
    NO_CREDENTIALS = "NO_CREDENTIALS"
    #: What the caller shows is nobody's, or not to be believed.
    UNKNOWN_CREDENTIALS = "UNKNOWN_CREDENTIALS"
    #: It was good once.
    EXPIRED = "EXPIRED"
    #: The caller is known, and may not do this.
    NOT_ALLOWED = "NOT_ALLOWED"


class DeniedError(ClockwrightError):
    """The server does not let the caller do that."""

    def __init__(self, denial: Denial, message: str) -> None:
        super().__init__(f"{denial.value}: {message}")
        self.denial = denial
        self.message = message
