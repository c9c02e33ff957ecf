"""A client that nothing of the product is part of: open loop, its own HTTP/2, stamps of the kernel.

What a server says about its own promptness is not asked here. Requests leave at the times of a Poisson
process, or of a schedule, whatever happened to those before; every end is counted: answers in time, answers that came late,
refusals by their reason, and all that is neither (a status without a reason, a stream or connection that was
broken, silence).

The client is a process of its own, at real-time priority where that is allowed, so that it is not what is slow. It
writes and reads HTTP/2 frames on plain sockets. Request bytes are made once and answers are judged when the run is
over, which leaves some 20 us of processor time per request.

Two latencies are counted of every request. One begins when the request was due; the other begins when the
client was about to write it to the socket. What the server then does not read, and what its windows and
its limit of streams hold back, is the server's time. Both end when the last bytes of the answer reached this machine:
the client takes the kernel's stamp (`SO_TIMESTAMPNS`), which is that of the newest bytes where one read brings
several packets, never an earlier one. Where the kernel gives no stamp, it is the time at which the client had read
them; `kernel_stamps` says which.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from traces.arrivals import Workload

#: Kind and name: ("ok", ""), ("refused", the reason), ("other", what it was).
End = tuple[str, str]

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoad:
    """What a client is to ask, and when."""

    #: HOST:PORT.
    address: str
    #: Each request asks one of them, drawn at random.
    models: tuple[str, ...]
    slo_ms: int
    seconds: float
    seed: int = 0
    #: Requests per second of a Poisson process; 0: a closed loop.
    rate: float = 0.0
    #: Requests that a closed loop keeps under way.
    concurrency: int = 0
    #: Or the file of a schedule (`write_schedule`), whose models are positions in `models`.
    schedule: str = ""
    connections: int = 4
    #: Shape of the one input, FP32, and its name.
    shape: tuple[int, ...] = (1, 784)
    input: str = "input"
    #: Sends and reads at multiples of this only, which costs less; 0: at once. A request is so much later
    #: at most, and so may its answer's stamp be.
    tick_us: int = 0
    #: An answer that takes as much longer than its SLO is not waited for.
    patience_s: float = 3.0
    #: File with a pickled list of messages: each request sends one of them, and `models` are their positions' names.
    messages: str = ""


@dataclass(slots=True, eq=False)
class Account:
    """Every request of a run, in the order in which they were due; times in ns since the run began."""

    due_ns: Times
    sent_ns: Times
    #: When the end was there.
    done_ns: Times
    ends: list[End]
    slo_ms: int
    #: The time over which requests were due.
    seconds: float
    #: Processor time of the client per request.
    cpu_us: float = 0.0
    kernel_stamps: bool = False
    #: What kept the client from being as it should; empty if nothing did.
    remarks: list[str] = field(default_factory=list)
    #: Which requests the client's own kernel kept at first, for its congestion window was full.
    kept: NDArray[np.bool_] | None = None

    def part(self, begin_s: float, end_s: float) -> Account:
        """Requests that were due between two times of the run."""
        chosen = (self.due_ns >= begin_s * 1e9) & (self.due_ns < end_s * 1e9)
        return Account(
            self.due_ns[chosen], self.sent_ns[chosen], self.done_ns[chosen],
            [self.ends[index] for index in np.flatnonzero(chosen)],
            self.slo_ms, end_s - begin_s, self.cpu_us, self.kernel_stamps, self.remarks,
            None if self.kept is None else self.kept[chosen],
        )  # fmt: skip

    def _are(self, kind: str) -> NDArray[np.bool_]:
        return np.array([end[0] == kind for end in self.ends], bool)

    def _names(self, kind: str) -> Counter[str]:
        return Counter(name for its, name in self.ends if its == kind)

    def _late(self, since_ns: Times) -> NDArray[np.bool_]:
        return self._are("ok") & (self.done_ns - since_ns > self.slo_ms * 1_000_000)

    @property
    def num_offered(self) -> int:
        """Requests that were due."""
        return len(self.ends)

    @property
    def num_ok(self) -> int:
        """Answers given as a success."""
        return int(self._are("ok").sum())

    @property
    def num_late(self) -> int:
        """Answers given as a success after the SLO, counted from the sending."""
        return int(self._late(self.sent_ns).sum())

    @property
    def num_late_kept(self) -> int:
        """The same, of those that had not left the client's machine when they were sent, as far as it is known."""
        return 0 if self.kept is None else int((self._late(self.sent_ns) & self.kept).sum())

    @property
    def num_late_of_due(self) -> int:
        """The same, counted from when the request was due; includes what the client itself was late."""
        return int(self._late(self.due_ns).sum())

    @property
    def goodput_rps(self) -> float:
        """Answers within the SLO, counted from the sending, per second."""
        return (self.num_ok - self.num_late) / self.seconds

    @property
    def refusals(self) -> Counter[str]:
        """Refusals by reason."""
        return self._names("refused")

    @property
    def others(self) -> Counter[str]:
        """Ends that are neither an answer nor a refusal with its reason."""
        return self._names("other")

    def refusal_ms(self, percent: float) -> float:
        """Percentile of the time from sending to refusal; 0 without any."""
        return _percentile_ms((self.done_ns - self.sent_ns)[self._are("refused")], percent)

    def latency_ms(self, percent: float) -> float:
        """Percentile of the time from sending to success; 0 without any."""
        return _percentile_ms((self.done_ns - self.sent_ns)[self._are("ok")], percent)

    def lateness_ms(self, percent: float) -> float:
        """Percentile of how late the client itself was; 0 without requests."""
        return _percentile_ms(self.sent_ns - self.due_ns, percent)

    def row(self) -> dict[str, Any]:
        """The numbers of a line of a table."""
        return {
            "offered": self.num_offered,
            "in_time": self.num_ok - self.num_late,
            "late_successes": self.num_late,
            "late_kept": self.num_late_kept,
            "late_of_due": self.num_late_of_due,
            "refused": sum(self.refusals.values()),
            "other_ends": sum(self.others.values()),
            "goodput_rps": self.goodput_rps,
            "p50_ms": self.latency_ms(50),
            "p99_ms": self.latency_ms(99),
            "p9999_ms": self.latency_ms(99.99),
            "refusal_p50_ms": self.refusal_ms(50),
            "refusal_p99_ms": self.refusal_ms(99),
            "client_late_p99_ms": self.lateness_ms(99),
            "client_cpu_us": self.cpu_us,
            "reasons": " ".join(f"{name}:{count}" for name, count in sorted(self.refusals.items())),
            "others": ", ".join(f"{name}: {count}" for name, count in sorted(self.others.items())),
        }


def _percentile_ms(times_ns: Times, percent: float) -> float:
    return float(np.percentile(times_ns, percent)) / 1e6 if len(times_ns) else 0.0


def write_schedule(path: Path, workload: Workload) -> int:
    """Write the open-loop requests of a workload, by time, and return their number.

    The file is one array of two rows (`np.load`): when each is due, in ns, and its model's position.
    """
    columns = [(arrivals.time_ns, arrivals.model) for arrivals in workload.arrivals()]
    times_ns, models = (
        np.concatenate([np.empty(0, np.int64), *column]) for column in zip(*columns, strict=True)
    )
    with path.open("wb") as file:
        np.save(file, np.stack((times_ns, models)))
    return len(times_ns)


class OpenLoop:
    """A client in a process of its own; leaving the `with` block ends it, whatever it does."""

    def __init__(self, load: ClientLoad) -> None:
        self._load = load

    def __enter__(self) -> Self:
        """Start the process; returns when the first requests are about to leave.

        Raises:
            RuntimeError: it ended before, as it does where no server listens.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.live.open_loop_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(self._load)).encode())
        self._process.stdin.close()
        if self._process.stdout.readline() != b"began\n":
            code = self._process.wait()
            self._process.stdout.close()
            raise RuntimeError(f"the client ended with {code} before it had begun")
        return self

    def account(self) -> Account:
        """Wait for the end of the run.

        Raises:
            RuntimeError: the client ended without an account.
        """
        assert self._process.stdout is not None
        data = self._process.stdout.read()
        if self._process.wait():
            raise RuntimeError(f"the client ended with {self._process.returncode}")
        return Account(**pickle.loads(data))

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def before_others() -> Iterator[str]:
    """Have this thread, and threads that it starts, run at real-time priority; a client must not be what is slow.

    Yields:
        Why that is not allowed; empty where it is.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (OSError, AttributeError) as error:
        yield str(error)
        return
    try:
        yield ""
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def offer(load: ClientLoad) -> Account:
    """Run a client in a process of its own from beginning to end."""
    with OpenLoop(load) as client:
        return client.account()


def await_model(address: str, name: str) -> None:
    """Ask until a model answers: its weights are loaded then.

    Raises:
        RuntimeError: it does not.
    """
    load = ClientLoad(address=address, models=(name,), slo_ms=10_000, seconds=0, concurrency=1)
    for _ in range(60):
        if offer(load).num_ok:
            return
        time.sleep(0.5)
    raise RuntimeError(f"{name} gave no answer within 60 requests")
