"""The description of a run. Every part is a value; two runs of equal cases are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S, NS_PER_US, PAGE_BYTES, ArchitectureId, ModelId
from controller.core import SchedulerConfig
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Workload

_PPB = 1_000_000_000


def _positive(value: object, *names: str) -> None:
    """Check fields, of which None stands for nothing."""
    for name in names:
        if (found := getattr(value, name)) is not None and found <= 0:
            raise ConfigError(f"{name} is {found}, expected more than 0")


def _not_negative(value: object, *names: str) -> None:
    for name in names:
        if (found := getattr(value, name)) is not None and found < 0:
            raise ConfigError(f"{name} is {found}, expected 0 or more")


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model that every worker holds in host memory."""

    model_id: ModelId
    #: The model's row of a profile: what it costs.
    row: ProfileRow

    @property
    def architecture_id(self) -> ArchitectureId:
        """Models of one row share their estimates."""
        return ArchitectureId(self.row.name)

    @property
    def num_pages(self) -> int:
        """Pages that its weights fill."""
        return pages_of(self.row)


def pages_of(row: ProfileRow) -> int:
    """Pages that the weights of one model fill."""
    return max(1, -(-row.weights_bytes // PAGE_BYTES))


def copies_of(row: ProfileRow, count: int) -> tuple[HostedModel, ...]:
    """Models `NAME-0` to `NAME-(count-1)`, all costing what `row` says."""
    return tuple(HostedModel(ModelId(f"{row.name}-{number}"), row) for number in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """A kind of device, and what each model costs on it."""

    name: str = "simulated"
    #: By name of a model's row: the row that holds here instead; None: such models cannot run here.
    rows: Mapping[str, ProfileRow | None] = field(default_factory=dict, hash=False)
    #: Size of each weights cache; None: as the cluster says.
    num_pages: int | None = None
    #: What one costs, in any unit: for plans.
    price: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "num_pages", "price")
        for name, row in self.rows.items():
            if row is not None and row.name != name:
                raise ConfigError(f"kind {self.name!r}: row {name!r} is named {row.name!r}")

    def row_of(self, row: ProfileRow) -> ProfileRow | None:
        """The row of a model on this kind, given its own; None: it cannot run here."""
        return self.rows.get(row.name, row)


def slower_kind(name: str, rows: Iterable[ProfileRow], exec_factor: float) -> WorkerKind:
    """A kind on which every EXEC takes so many times as long; LOADs take what they take elsewhere.

    Args:
        name: of the kind.
        rows: those of all models.
        exec_factor: 0.01 to 100.
    """
    # The comparison is false for NaN too.
    if not 0.01 <= exec_factor <= 100:
        raise ConfigError(f"kind {name!r}: exec_factor is {exec_factor}, expected 0.01 to 100")
    return WorkerKind(
        name=name,
        rows={
            row.name: replace(
                row,
                exec_ns={size: round(ns * exec_factor) for size, ns in row.exec_ns.items()},
            )
            for row in rows
        },
    )


_ONE_KIND = WorkerKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers, each one GPU, named `gpu0`, `gpu1`, ...; equal but for their `kinds`.

    Inputs and outputs share the PCIe bus with loads on a real GPU; here each has it to itself.
    """

    models: tuple[HostedModel, ...]
    num_workers: int = 1
    #: Pages of the weights cache. The paper's V100s keep 1,376 (22.5 GB).
    num_pages: int = 1376
    #: INPUT and OUTPUT copy this fast. Table 1: 102.1 MB of weights in 8.33 ms.
    copy_bytes_per_s: int = 12_250_000_000
    #: Added to every INPUT and OUTPUT.
    copy_overhead_ns: int = 0
    #: Time from a LOAD's or EXEC's turn on its lane until the device begins: a thread takes over.
    start_delay_ns: int = 0
    #: Memory for inputs and outputs on the device: Clockwork's 512 MB.
    io_pool_bytes: int = 512 << 20
    #: Noise of LOAD and EXEC durations.
    noise: Noise = field(default_factory=Noise)
    #: Measured durations of EXECs by the name of a row and by batch size. Every such EXEC takes one of them at random,
    #: without noise.
    exec_samples_ns: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    #: The kind of each worker. Empty: all models cost on all workers what their rows say.
    kinds: tuple[WorkerKind, ...] = ()

    def __post_init__(self) -> None:
        if self.kinds and len(self.kinds) != self.num_workers:
            raise ConfigError(
                f"cluster: found kinds of {len(self.kinds)} workers, expected one for each of "
                f"{self.num_workers} workers"
            )
        named = {kind.name: kind for kind in self.kinds}
        if any(named[kind.name] != kind for kind in self.kinds):
            raise ConfigError("cluster: two different kinds have the same name")
        _positive(self, "num_workers", "num_pages", "copy_bytes_per_s", "io_pool_bytes")
        _not_negative(self, "copy_overhead_ns", "start_delay_ns")
        if not self.models:
            raise ConfigError("cluster: no models")
        if self.kinds and self.exec_samples_ns:
            raise ConfigError(
                "cluster: found durations that were measured and workers of several kinds"
            )
        if unknown := set(self.exec_samples_ns) - {model.row.name for model in self.models}:
            words = ", ".join(sorted(unknown))
            raise ConfigError(f"cluster: found measured durations of {words}, which no model has")
        names = [model.model_id for model in self.models]
        if len(set(names)) < len(names):
            raise ConfigError("cluster: two models have the same name")
        rows: dict[str, ProfileRow] = {}
        for model in self.models:
            if rows.setdefault(model.row.name, model.row) != model.row:
                raise ConfigError(f"cluster: two different rows are named {model.row.name!r}")

    def kind_of(self, worker: int) -> WorkerKind:
        """The kind of a worker."""
        return self.kinds[worker] if self.kinds else _ONE_KIND

    def least_row(self, model: HostedModel) -> ProfileRow:
        """What the model costs at least: each figure of its row on the kind where that is smallest.

        No schedule needs less, so bounds take it for what every worker needs.
        """
        rows = [row for kind in self.kinds if (row := kind.row_of(model.row)) is not None]
        if not rows:
            return model.row
        sizes = sorted({size for row in rows for size in row.exec_ns})
        return replace(
            model.row,
            weights_bytes=min(row.weights_bytes for row in rows),
            load_ns=min(row.load_ns for row in rows),
            exec_ns={
                size: min(row.exec_ns[size] for row in rows if size in row.exec_ns)
                for size in sizes
            },
        )

    def pages_of_worker(self, worker: int) -> int:
        """Pages of a worker's weights cache."""
        return self.kind_of(worker).num_pages or self.num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between clients, controller and workers. Every worker has a link of its own, in order each way."""

    #: Delay of an empty message, one way between controller and worker; then that of the way to the
    #: controller, where it is another.
    delay_ns: int = 100 * NS_PER_US
    up_delay_ns: int | None = None
    #: Mean of an exponential addition to every message's delay.
    jitter_ns: int = 0
    #: Measured additions to the delay of messages to workers, and to the controller. Every message gets
    #: one of them at random.
    down_samples_ns: tuple[int, ...] = ()
    up_samples_ns: tuple[int, ...] = ()
    #: Speed of tensors on a worker's link, each way; messages wait for the ones before them. None: tensors
    #: take no time, as in the paper's large experiments, where workers made up the inputs.
    bytes_per_s: int | None = None
    #: Speed on the way to the controller, where it is another.
    up_bytes_per_s: int | None = None
    #: By worker: its link, where links are unlike. Empty: all are as said above. What concerns clients is said
    #: above only.
    links: tuple[Network, ...] = ()
    #: Delay one way between a closed-loop client and the controller.
    client_delay_ns: int = 100 * NS_PER_US
    #: Mean of an exponential addition to a closed-loop client's round trip.
    client_jitter_ns: int = 0
    #: Measured additions to a closed-loop client's round trip, one at random each time.
    client_samples_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _not_negative(
            self, "delay_ns", "up_delay_ns", "jitter_ns", "client_delay_ns", "client_jitter_ns"
        )
        _positive(self, "bytes_per_s", "up_bytes_per_s")
        if any(link.links for link in self.links):
            raise ConfigError("network: a link has links itself")
        for name in ("down_samples_ns", "up_samples_ns", "client_samples_ns"):
            if least := min((0, *getattr(self, name))):
                raise ConfigError(f"{name} has {least}, expected 0 or more")

    def of(self, worker: int) -> Network:
        """The link of one worker."""
        return self.links[worker] if self.links else self

    def delay_ns_of(self, *, up: bool) -> int:
        """Delay of an empty message one way."""
        return self.up_delay_ns if up and self.up_delay_ns is not None else self.delay_ns

    def bytes_per_s_of(self, *, up: bool) -> int | None:
        """Speed of tensors one way."""
        return self.up_bytes_per_s or self.bytes_per_s if up else self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCosts:
    """CPU time that serving takes on the one core which the controller's process has.

    Whatever reaches the controller waits for its turn on that core. An SLO counts from a request's
    arrival, so the wait is part of it. Nothing is charged by default, as in the paper's simulations;
    `experiments.simulator.costs.measured` has what the live controller was measured to take. What the
    live front end turns away before it costs much is not modelled: a core that is overloaded here works
    on what is too late, and answers hardly anything.
    """

    #: Front end, per request: the call, its message, and its answer or refusal.
    front_ns: int = 0
    #: Scheduler and ledger, per request, with all that becomes of it.
    request_ns: int = 0
    #: Putting an action on a worker's link, and taking a result from it.
    action_ns: int = 0
    result_ns: int = 0

    def __post_init__(self) -> None:
        _not_negative(self, "front_ns", "request_ns", "action_ns", "result_ns")

    @property
    def charged(self) -> bool:
        """Whether anything costs anything."""
        return any((self.front_ns, self.request_ns, self.action_ns, self.result_ns))

    def requests_per_s(self, requests_per_batch: float) -> float:
        """Rate that keeps the core busy all the time, where each batch is an action with a result."""
        batch_ns = self.action_ns + self.result_ns
        return NS_PER_S / (self.front_ns + self.request_ns + batch_ns / requests_per_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that vanishes with everything on it, and may start afresh later."""

    worker: int
    at_ns: int
    back_ns: int | None = None

    def __post_init__(self) -> None:
        if self.back_ns is not None and self.back_ns <= self.at_ns:
            raise ConfigError(f"worker {self.worker} is back at {self.back_ns} ns, lost only then")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerClock:
    """How a worker's clock differs from the controller's. Heartbeats estimate it as they do live."""

    offset_ns: int = 0
    #: How fast the worker's clock gains, in parts per billion; a crystal has up to 50,000.
    drift_ppb: int = 0

    def local_ns(self, time_ns: int) -> int:
        """Time that the worker's clock shows at a virtual time, which is the controller's."""
        return time_ns + self.offset_ns + time_ns * self.drift_ppb // _PPB

    def time_ns(self, local_ns: int) -> int:
        """The first virtual time at which the worker's clock shows at least `local_ns`."""
        time_ns = (local_ns - self.offset_ns) * _PPB // (_PPB + self.drift_ppb)
        while self.local_ns(time_ns) >= local_ns:
            time_ns -= 1
        while self.local_ns(time_ns) < local_ns:
            time_ns += 1
        return time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongProfile:
    """Profiles that workers announce, if they differ from the models' rows. The device follows the rows."""

    #: Announced durations are this multiple of the rows'.
    exec_factor: float = 1.0
    load_factor: float = 1.0
    #: `exec_factor` is for these batch sizes only; empty: for all.
    sizes: tuple[int, ...] = ()
    #: Only this worker announces so; None: all do.
    worker: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "exec_factor", "load_factor")

    def of(self, row: ProfileRow) -> ProfileRow:
        """What is announced for a row."""
        exec_ns = {
            size: max(1, round(ns * self.exec_factor))
            if size in (self.sizes or row.exec_ns)
            else ns
            for size, ns in row.exec_ns.items()
        }
        return replace(row, exec_ns=exec_ns, load_ns=max(1, round(row.load_ns * self.load_factor)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of a run. None by default."""

    #: Share of LOADs and EXECs that take `slow_factor` times as long as they should.
    slow_probability: float = 0.0
    slow_factor: float = 10.0
    #: Share of messages between controller and worker that are delayed by `delay_ns`, as by a lost
    #: packet and its retransmission; messages behind them on the same link wait.
    delay_probability: float = 0.0
    delay_ns: int = 200_000_000
    #: Share of messages that never arrive. A stream would rather break; this is the worst case.
    loss_probability: float = 0.0
    lost_workers: tuple[LostWorker, ...] = ()
    #: Time until the controller notices that a worker vanished.
    detection_ns: int = 100 * NS_PER_US
    #: A worker that the controller let go registers again after this.
    rejoin_ns: int = NS_PER_S
    #: Clock of each worker. Empty: all read the controller's clock, and there are no heartbeats.
    clocks: tuple[WorkerClock, ...] = ()
    #: How far profiles are wrong; several of one worker multiply.
    wrong_profiles: tuple[WrongProfile, ...] = ()

    def __post_init__(self) -> None:
        for name in ("slow_probability", "delay_probability", "loss_probability"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}, expected 0 to 1")
        _positive(self, "slow_factor")
        _not_negative(self, "delay_ns", "detection_ns", "rejoin_ns")

    def announced(self, row: ProfileRow, worker: int) -> ProfileRow:
        """The row as a worker announces it."""
        for wrong in self.wrong_profiles:
            if wrong.worker is None or wrong.worker == worker:
                row = wrong.of(row)
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, before it has run."""

    workload: Workload
    cluster: Cluster
    #: Arrivals end here; requests that are open then are still answered.
    duration_ns: int
    network: Network = field(default_factory=Network)
    costs: CpuCosts = field(default_factory=CpuCosts)
    faults: Faults = field(default_factory=Faults)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    #: Seed of noise, jitter and faults. The workload has seeds of its own.
    seed: int = 0
    #: How long a closed-loop client waits after a refusal, beyond its round trip. None: until the refused
    #: request's deadline, which is when Clockwork's clients heard of a refusal. A client that asks again
    #: at once floods the controller with requests that it has just refused.
    refusal_pause_ns: int | None = None
    #: This share of the requests, at random, is to be refused or promised within a time; 0: none is.
    decide_within_ns: int = 0
    decide_share: float = 1.0
    #: A request has one of these numbers of rows, and one of these weights, at random; empty: 1.
    rows: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    #: Models that are asked one after the other. The workload asks the first; who is answered by one asks the next at
    #: once, with what is left of the first SLO.
    pipelines: tuple[tuple[ModelId, ...], ...] = ()
    #: Each request of a pipeline says what time the models after it need, one request at a time.
    tells_work_ahead: bool = True
    #: They are planned by the server: each answer is due as the pipeline stage of the port would have it.
    plans_pipelines: bool = False

    def __post_init__(self) -> None:
        _positive(self, "duration_ns")
        _not_negative(self, "refusal_pause_ns", "decide_within_ns", "decide_share")
        # Virtual time would stand still while a client asks and is refused.
        if self.refusal_pause_ns == self.network.client_delay_ns == 0:
            raise ConfigError("refusal_pause_ns and client_delay_ns are both 0")
        if min((1.0, *self.rows, *self.weights)) <= 0:
            raise ConfigError("rows and weights: found 0 or less, expected more than 0")
        hosted = {model.model_id for model in self.cluster.models}
        if unknown := {model for stages in self.pipelines for model in stages} - hosted:
            raise ConfigError(f"pipelines: found {min(unknown)!r}, which no worker has")
        for name in self.workload.models:
            if name not in hosted:
                raise ConfigError(f"the workload asks for model {name!r}, which no worker has")
        number = self.cluster.num_workers
        for name, given in (("links", self.network.links), ("clocks", self.faults.clocks)):
            if given and len(given) != number:
                raise ConfigError(f"{len(given)} {name} for {number} workers")
        named = [("lost", lost.worker) for lost in self.faults.lost_workers]
        wrong = self.faults.wrong_profiles
        named += [("wrong profile of", one.worker) for one in wrong if one.worker is not None]
        for words, worker in named:
            if not 0 <= worker < number:
                raise ConfigError(f"{words} worker {worker}: there are {number}")
