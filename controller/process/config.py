"""The controller's settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from clockwright.client.channel import Access
from clockwright.errors import ConfigError
from clockwright.settings import MIB, MS, check, part, setting
from clockwright.units import NS_PER_MS, SLO_NS_MAX
from clockwright.wire.controller_file import read_addresses
from clockwright.wire.leadership import address_of, is_address
from controller.access.config import AccessConfig
from controller.core import SchedulerConfig
from controller.front.admission.memory import available_bytes
from controller.selection.config import SelectionConfig
from controller.stages.sequences.limits import SequenceConfig
from controller.telemetry.tables import CAPACITY


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/clockwright`, or `~/.local/state/clockwright`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "clockwright"


# An eighth of the memory: on a machine of 16 GiB as much as requests may occupy otherwise, twice.
_SHARED_PART = 8


def default_shared_bytes() -> int:
    """The memory shared with workers by default: a part of the machine's."""
    return available_bytes() // _SHARED_PART


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Where clients are served, which of them, and how many: of a controller and of a front alike."""

    #: 127.0.0.1 takes calls from this machine only, 0.0.0.0 from everywhere, which needs keys and TLS.
    host: str = setting(
        "127.0.0.1",
        help="Address to listen on. Addresses that other machines can reach, such as 0.0.0.0, need --keys "
        "and --tls-cert.",
    )
    port: int = setting(
        8001,
        least=0,
        most=65535,
        help="Port for clients, workers and operators; 0: any free port.",
    )
    #: The port of REST, on the same address; 0 takes any free one. None: no REST.
    http_port: int | None = None
    #: If that port is taken, start without REST and log a warning.
    http_optional: bool = False
    #: With TLS, clients, workers and fronts of other machines have to use it; those of this machine need not.
    tls_certificate: Path | None = setting(
        None,
        flag="tls_cert",
        help="PEM file of the server's certificate; other machines must then use TLS.",
    )
    tls_key: Path | None = setting(None, help="PEM file of the certificate's key.")
    #: Too few: bursts that could be served are refused; too many: memory, and time to find out that most are late.
    #: 10,000 is a second's worth of what one controller process carries.
    max_open_requests: int = setting(
        10_000, above=0, help="Limit on open requests; more are refused."
    )
    max_open_bytes: int = setting(
        1 << 30, above=0, unit=MIB, help="Limit on MiB of open requests; more are refused."
    )
    #: Each takes a file handle.
    max_connections: int = setting(
        1000, above=0, help="Limit on connections; requests on more connections are refused."
    )
    #: Half of it for inputs, the rest for outputs; a front needs the first half only. It is taken up as it is used.
    #: Too little: what finds no room is copied twice more.
    shared_memory_bytes: int = setting(
        default_factory=default_shared_bytes,
        least=0,
        unit=MIB,
        help="Shared memory with workers of this host, for large tensors; 0: off. Unset: an eighth of all "
        "memory.",
    )
    memory_limit_bytes: int | None = setting(
        None,
        above=0,
        unit=MIB,
        help="Memory limit of this process: large requests are refused from 85 % of it, all from 95 %. "
        "Unset: the limit of its cgroup, or the machine's memory.",
    )
    #: All who reach the port may name what is registered.
    allow_client_shm: bool = setting(
        False,
        help="Let clients of this machine register shared memory for tensors (Triton's extension).",
    )
    trace_to: str = setting(
        "",
        metavar="HOST:PORT|URL",
        help="OpenTelemetry collector for traces (OTLP over gRPC). Needs the extra `otel`.",
    )
    #: Each trace takes some 0.2 ms of a processor, outside the event loop.
    trace_share: float = setting(
        0.0,
        least=0,
        most=1,
        help="Share of requests without a W3C traceparent that are traced, 0 to 1. Requests with a sampled"
        " one are traced.",
    )
    #: Time for a load balancer to ask, and to send requests elsewhere. A controller behind fronts needs none.
    notice_s: float = setting(
        0.0,
        least=0,
        help="Grace period after SIGTERM during which requests are still served but readiness is false.",
    )
    #: Which callers it lets in.
    access: AccessConfig = part(AccessConfig)

    def __post_init__(self) -> None:
        check(self)
        if not self.host:
            raise ConfigError("host is empty, expected an address such as 127.0.0.1 or 0.0.0.0")
        if not 0 <= (self.http_port or 0) <= 65535:
            raise ConfigError(f"http_port is {self.http_port}, expected 0 to 65535")
        if self.trace_share and not self.trace_to:
            raise ConfigError("trace_to is empty, expected HOST:PORT of a collector for traces")
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
class FrontConfig(ServingConfig):
    """A front process. If the controller knows callers, a front has to: nothing else checks who asks it."""

    #: Where the controller is: as for `read_addresses`. Of several one leads.
    controller: str
    #: Other fronts may listen on the same port of this machine, which spreads connections over all.
    shares_port: bool = False
    access: AccessConfig = part(AccessConfig, without=("worker_ca", "worker_token_file"))
    #: What it shows the controller: a key or certificate with role `front`.
    joining: Access = field(default_factory=Access)

    #: Controllers of a directory, instead of the one above: each request goes to one of them.
    cells: str | None = setting(
        None,
        metavar="file:FOLDER|etcd://HOST:PORT",
        help="Directory of several controllers (`clockwright controller --cells`), instead of --controller.",
    )

    def __post_init__(self) -> None:
        ServingConfig.__post_init__(self)
        if self.cells is None:
            read_addresses(self.controller)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig(ServingConfig):
    """Everything about a controller that can be tuned, and what goes wrong at the extremes."""

    #: Not a folder: it starts without models.
    models_dir: Path | None = setting(
        None,
        flag="models",
        help="Folder of models: NAME/VERSION/model.onnx, and optionally NAME/config.toml. Code of models "
        "in this folder is run.",
    )
    #: Only one controller at a time may use it. None: everything in it goes with the process.
    state_dir: Path | None = setting(
        None,
        flag="state",
        help="Folder for added models, applications and all that is learned. Unset: the user's state folder "
        "for `controller`; `up` keeps no state.",
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker_port: int = setting(
        0,
        least=0,
        most=65535,
        help="Port for actions and results of workers on other machines; 0: any free port.",
    )
    telemetry_dir: Path | None = setting(
        None,
        flag="telemetry",
        help="Folder for requests.csv and actions.csv; existing files are appended to.",
    )
    #: Port of `/metrics` for Prometheus (controller.metrics): 0 takes any free one, None has none.
    metrics_port: int | None = None
    #: If that port is taken, start without metrics and log a warning.
    metrics_optional: bool = False
    default_slo_ns: int = setting(
        100 * NS_PER_MS,
        flag="slo_ms",
        above=0,
        most=SLO_NS_MAX,
        unit=MS,
        help="SLO of requests without one, to models without one.",
    )
    #: Each side of a worker's link sends a heartbeat this often. Too rare: clocks are known badly.
    heartbeat_interval_ms: int = 200
    #: Worker and controller give each other up after this much silence. Too short: a busy machine loses
    #: its workers; too long: requests wait for a machine that is gone. A process that ends is noticed at
    #: once without it, and a worker that hangs at its first action that takes `action_timeout_ns` too long.
    silence_limit_ms: int = 10_000
    #: A message occupies its size in memory before it is looked at, so this times the calls at once is what
    #: clients can fill; a batch's outputs have to fit in too.
    max_message_bytes: int = setting(
        64 << 20,
        above=0,
        unit=MIB,
        help="Largest message: inputs of a request, outputs of a batch.",
    )
    server_name: str = setting(
        "clockwright",
        help="Name that metadata give the server. Some clients look for Triton's, `triton`.",
    )
    quotas_file: Path | None = setting(
        None,
        flag="quotas",
        help="TOML file of quotas, read again when it changes. Unset: operators set quotas.",
    )
    upload_limit_bytes: int = setting(
        16 << 30, above=0, unit=MIB, help="Disk space for all models from `models add` together."
    )
    #: What applications learn, the prediction cache, feedback.
    selection: SelectionConfig = part(SelectionConfig)
    #: Sequences of steps, and the state that they leave.
    sequences: SequenceConfig = part(SequenceConfig)
    #: Rows of telemetry kept in memory, per table.
    telemetry_capacity: int = CAPACITY
    lease: str | None = setting(
        None,
        metavar="file:PATH|etcd://HOST:PORT|kubernetes://NAMESPACE/NAME",
        help="Lease that decides which of several controllers leads; the others stand by. file: works on "
        "one host, kubernetes: in one cluster. With TLS: etcds://HOST:PORT?ca=PATH&cert=PATH&key=PATH.",
    )
    #: A folder, or keys of etcd that begin alike.
    cells: str | None = setting(
        None,
        metavar="file:FOLDER|etcd://HOST:PORT",
        help="Directory in which this controller tells ten times a second how it does, for fronts and pickers "
        "that choose among several (`clockwright front --cells`). Forms as of --lease.",
    )
    cell_address: str = setting(
        "",
        metavar="HOST:PORT",
        help="With --cells: where fronts and gateways reach this controller. Unset: --host and --port.",
    )
    #: How long a shutdown waits for admitted requests to be answered.
    drain_limit_s: float = 10.0

    def __post_init__(self) -> None:
        ServingConfig.__post_init__(self)
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}, expected 0 to 65535")
        for name in ("heartbeat_interval_ms", "telemetry_capacity"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.cell_address and not is_address(self.cell_address):
            raise ConfigError(f"cell_address is {self.cell_address!r}, expected HOST:PORT")
        if not self.drain_limit_s >= 0:
            raise ConfigError(f"drain_limit_s is {self.drain_limit_s}, expected 0 or more")
        if self.silence_limit_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                f"silence_limit_ms ({self.silence_limit_ms}) is below twice heartbeat_interval_ms "
                f"({self.heartbeat_interval_ms}): one late heartbeat would cost a worker"
            )
        if self.models_dir is not None and not self.models_dir.is_dir():
            raise ConfigError(f"models directory {self.models_dir} is not a folder")
