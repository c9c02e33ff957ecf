"""The controller's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from clockwright.channel import Access
from clockwright.errors import ConfigError
from clockwright.leadership import parse_addresses
from clockwright.units import NS_PER_MS
from controller.access.config import AccessConfig
from controller.core import SchedulerConfig
from controller.memory import available_bytes
from controller.selection.config import SelectionConfig
from controller.telemetry import CAPACITY


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/clockwright`, or `~/.local/state/clockwright`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "clockwright"


# An eighth of the memory: on a machine of 16 GiB as much as requests may occupy otherwise, twice.
_SHARED_PART = 8


def default_shared_bytes() -> int:
    """How much memory may be shared with workers, unless somebody says: a part of what there is."""
    return available_bytes() // _SHARED_PART


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Everything about a front process that can be tuned; what `ControllerConfig` has too means the same."""

    #: HOST:PORT of the controller, or of several with commas between: one of them leads.
    controller: str
    host: str = "127.0.0.1"
    port: int = 8001
    #: Other fronts may listen on the same port of this machine, which spreads connections over all.
    shares_port: bool = False
    http_port: int | None = None
    http_optional: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    #: Whom it lets in. Where the controller knows callers, a front has to: nobody else looks who asks here.
    access: AccessConfig = field(default_factory=AccessConfig)
    #: What it shows the controller: a key or certificate with role `front`.
    joining: Access = field(default_factory=Access)
    max_open_requests: int = 10_000
    max_open_bytes: int = 1024 * 1024 * 1024
    max_connections: int = 1000
    #: Memory that is shared with the workers of this host, for large inputs: half of this. Outputs lie in the
    #: controller's.
    shared_memory_bytes: int = field(default_factory=default_shared_bytes)
    allow_client_shm: bool = False
    memory_limit_bytes: int | None = None
    trace_to: str = ""
    trace_share: float = 0.0

    def __post_init__(self) -> None:
        parse_addresses(self.controller)
        _check_traces(self)
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ConfigError(
                f"memory_limit_bytes is {self.memory_limit_bytes}, expected more than 0"
            )
        for name in ("port", "http_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 to 65535")
        if not self.host:
            raise ConfigError("host is empty, expected an address such as 127.0.0.1 or 0.0.0.0")
        for name in ("max_open_requests", "max_open_bytes", "max_connections"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_certificate and tls_key: found one of them, expected both or none"
            )
        self.access.check(self.host, has_tls=self.tls_certificate is not None)

    @property
    def address(self) -> str:
        """Host and port in gRPC's form, with an IPv6 host in brackets."""
        return address_of(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Everything about a controller that can be tuned, and what goes wrong at the extremes."""

    #: Address to listen on: 127.0.0.1 takes calls from this machine only, 0.0.0.0 from everywhere, which
    #: needs keys and TLS.
    host: str = "127.0.0.1"
    #: One port for clients, workers and operators; 0 takes any free one.
    port: int = 8001
    #: The port of REST, on the same address; 0 takes any free one, and None is for none.
    http_port: int | None = None
    #: Where that port is taken there is no REST, and the log says so.
    http_optional: bool = False
    #: Workers on other machines get actions and send results here; 0 takes any free one. Fix it where a
    #: firewall stands between.
    worker_port: int = 0
    #: One folder per model; None starts without models.
    models_dir: Path | None = None
    #: Folder for what survives: models that were added, applications and what they have learned. Only one
    #: controller at a time may use it. None: all of that goes with the process.
    state_dir: Path | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    #: SLO of requests that name none, to models that have none.
    default_slo_ns: int = 100 * NS_PER_MS
    #: Each side of a worker's link sends a heartbeat this often. Too rare: clocks are known badly.
    heartbeat_interval_ms: int = 200
    #: Worker and controller give each other up after this much silence. Too short: a busy machine loses
    #: its workers; too long: requests wait for a machine that is gone. A process that ends is noticed at
    #: once without it, and a worker that hangs at its first action that takes `action_timeout_ns` too long.
    silence_limit_ms: int = 10_000
    #: Largest message that is accepted. A message occupies its size in memory before it is looked at, so
    #: this times the calls at once is what strangers can fill; a batch's outputs have to fit in too.
    max_message_bytes: int = 64 * 1024 * 1024
    #: PEM files of the server's certificate and of its key; None: no TLS. With them, whoever
    #: comes from another machine has to use it, workers too; on this machine nobody has to.
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    #: Whom it lets in.
    access: AccessConfig = field(default_factory=AccessConfig)
    #: Requests that are open at once, over all connections. Too few: bursts that could be served are refused;
    #: too many: memory, and time to find out that most are late. 10,000 is a second's worth of what one
    #: controller process carries.
    max_open_requests: int = 10_000
    #: Bytes of all requests that are open or coming in.
    max_open_bytes: int = 1024 * 1024 * 1024
    #: Memory that is shared with the workers of this host, for large tensors: half of it for inputs, the rest
    #: for outputs. It is taken up as it is used. Too little: what finds no room is copied twice more; 0: all is.
    shared_memory_bytes: int = field(default_factory=default_shared_bytes)
    #: Clients of this machine may leave tensors in shared memory of theirs, and have answers put there. All
    #: who reach the port may name what is registered.
    allow_client_shm: bool = False
    #: Connections beyond which requests are refused. Each takes a file handle.
    max_connections: int = 1000
    #: What models that were added by upload may occupy on this machine's disk, together.
    upload_limit_bytes: int = 16 << 30
    #: File of tenants' quotas (controller/quota_book.py), read again when it changes; None: operators set them.
    quotas_file: Path | None = None
    #: What this process may take up of memory, with what it shares with workers: near it requests are refused.
    #: None: what its control group may, or the machine has.
    memory_limit_bytes: int | None = None
    #: Settings of applications: what they learn, the prediction cache, feedback.
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    #: Folder for `requests.csv` and `actions.csv`; None keeps telemetry in memory only.
    telemetry_dir: Path | None = None
    #: Port of `/metrics` for Prometheus (controller.metrics): 0 takes any free one, None has none.
    metrics_port: int | None = None
    #: Where that port is taken the controller starts without metrics, and the log says so.
    metrics_optional: bool = False
    #: Rows of telemetry kept in memory, per table.
    telemetry_capacity: int = CAPACITY
    #: Collector of OpenTelemetry that gets traces by OTLP over gRPC: HOST:PORT or a URL. Empty: nothing is traced.
    trace_to: str = ""
    #: Requests that are traced of those that come without a W3C context: 0 to 1. Each takes some 0.2 ms of a
    #: processor, beside the event loop.
    trace_share: float = 0.0
    #: Where controllers that follow each other keep who of them leads (`controller.lease`); None: this is the only
    #: one.
    lease: str | None = None
    #: How long a shutdown says that the controller is not ready before it refuses requests: time for a load
    #: balancer to ask, and to send them elsewhere. Fronts and workers need none.
    notice_s: float = 0.0
    #: How long a shutdown waits for admitted requests to be answered.
    drain_limit_s: float = 10.0

    def __post_init__(self) -> None:
        _check_traces(self)
        for name in ("port", "worker_port", "http_port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 to 65535")
        if not self.host:
            raise ConfigError("host is empty, expected an address such as 127.0.0.1 or 0.0.0.0")
        for name in (
            "default_slo_ns",
            "heartbeat_interval_ms",
            "max_message_bytes",
            "max_open_requests",
            "max_open_bytes",
            "max_connections",
            "upload_limit_bytes",
            "telemetry_capacity",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ConfigError(
                f"memory_limit_bytes is {self.memory_limit_bytes}, expected more than 0"
            )
        if self.shared_memory_bytes < 0:
            raise ConfigError(
                f"shared_memory_bytes is {self.shared_memory_bytes}, expected 0 or more"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_certificate and tls_key: found one of them, expected both or none"
            )
        self.access.check(self.host, has_tls=self.tls_certificate is not None)
        for name in ("drain_limit_s", "notice_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.silence_limit_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                f"silence_limit_ms ({self.silence_limit_ms}) is below twice heartbeat_interval_ms "
                f"({self.heartbeat_interval_ms}): one late heartbeat would cost a worker"
            )
        if self.models_dir is not None and not self.models_dir.is_dir():
            raise ConfigError(f"models directory {self.models_dir} is not a folder")

    @property
    def address(self) -> str:
        """Host and port in gRPC's form, with an IPv6 host in brackets."""
        return address_of(self.host, self.port)


def _check_traces(config: FrontConfig | ControllerConfig) -> None:
    if not 0 <= config.trace_share <= 1:
        raise ConfigError(f"trace_share is {config.trace_share}, expected 0 to 1")
    if config.trace_share and not config.trace_to:
        raise ConfigError("trace_to is empty, expected HOST:PORT of a collector for traces")


def address_of(host: str, port: int) -> str:
    """Write a host and a port in gRPC's form, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
