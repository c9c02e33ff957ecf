"""`clockwright doctor`: what a host is like, what of it costs latency or fails, and what to do about it.

`look` reads the host and changes nothing on it. `examine` judges what was read, and is a pure function, so each
finding has a test. Figures in the words are those of the modules that they are about: `worker.timing` for sleeps,
`clockwright.cores` for cores.
"""

from __future__ import annotations

import contextlib
import enum
import os
import platform
import re
import resource
import socket
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clockwright.cores import fifo_problem, fifo_right_problem, granted_cores, usable_cores
from clockwright.units import NS_PER_MS, NS_PER_US, format_ns
from clockwright.wire.shared_memory import make_shared
from controller.front.admission.memory import available_bytes

# Clock sources that are read without a system call.
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_SLEEPS, _SLEEP_S = 50, 0.001
# The kernel counts in ticks of 10 ms: half a second of two cores are a hundred.
_LOOK_S = 0.5
_STEAL_MAX = 0.02
# A process needs one handle per connection, by default 1,000, and some for itself.
_HANDLES_MIN, _THREADS_MIN = 4096, 4096
_MEMORY_MIN_BYTES, _SHM_MIN_BYTES, _DISK_MIN_BYTES = 4 << 30, 256 << 20, 2 << 30
_BACKLOG_MIN = 1024
# As in the extra `gpu`.
_TORCH_MIN = (2, 11)
_REDIS_TIMEOUT_S = 2.0


class Level(enum.Enum):
    """How bad a finding is. The values are those of the JSON."""

    OK = "OK"
    #: Serving works; something is slower, or less exact, than it could be.
    COSTS = "COSTS"
    #: Something that was asked for does not work, or will not under load.
    FAILS = "FAILS"


@dataclass(frozen=True, slots=True)
class HostFinding:
    """What one look at the host found."""

    #: What was looked at.
    name: str
    level: Level
    #: What there is, in words.
    found: str
    #: What that costs, and what to do; both empty if all is well.
    costs: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What was read; None where the system does not say."""

    system: str
    python: str
    clock_source: str | None
    #: Smallest step of the monotonic clock that was seen.
    clock_step_ns: int
    #: How much longer than asked sleeps of 1 ms took: the median, and the longest of 50.
    sleep_late_ns: int
    sleep_late_ns_max: int
    #: Threads that ran or waited for a core of the machine, the mean of the last minute, and its cores.
    load_average: float | None
    num_machine_cores: int
    #: Part of the cores' time during the look that a virtual machine's host gave to others.
    steal: float | None
    num_cores: int
    #: Cores' worth of time that control groups grant.
    num_granted: int
    #: Cores of the machine are hardware threads that share one.
    has_smt: bool | None
    #: Governors of the cores' clocks; empty: nothing sets them here.
    governors: tuple[str, ...]
    #: Why there is no real-time priority at all, and why none for threads that compute all the time; empty if
    #: there is.
    no_real_time: str
    no_real_time_computing: str
    #: Hard limits of this user's processes; -1: none.
    handles_max: int
    threads_max: int
    locked_bytes_max: int
    #: Memory for this process, and what of it is swap's to take.
    memory_bytes: int
    swap_bytes: int | None
    #: Room on /dev/shm, which clients share regions by; None: /dev/shm is missing.
    shm_bytes: int | None
    #: Why there is no memfd, by which a host's processes share memory; empty if there is.
    no_memfd: str
    #: Room where compiled models are kept.
    cache_folder: str
    cache_bytes: int | None
    #: Settings of TCP.
    backlog_max: int | None
    slow_start_after_idle: bool | None
    #: Version of the NVIDIA driver; empty: no driver. Cards that this user sees and may not open.
    driver: str
    num_cards: int
    closed_cards: tuple[str, ...]
    #: Versions of the packages that run models, by name.
    engines: dict[str, str]
    #: Address of a Redis, and why it does not answer; both empty if no Redis was named.
    redis: str = ""
    no_redis: str = ""


def look(root: Path = Path("/"), *, redis: str = "", cache: Path | None = None) -> HostState:
    """Read what a host is like, below `root`; takes half a second.

    A Redis, HOST:PORT or redis://HOST:PORT, is to answer. The folder of compiled models is the user's if none is given.
    """
    ticks, until_s = core_ticks(root), time.monotonic() + _LOOK_S
    late_ns = _sleeps_late_ns()
    time.sleep(max(until_s - time.monotonic(), 0.0))
    load = (_read(root / "proc/loadavg") or "").split()
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    nvidia = sorted((root / "dev").glob("nvidia[0-9]*"))
    driver = re.search(r"(\d+\.\d+(\.\d+)?)\s", _read(root / "proc/driver/nvidia/version") or "")
    governors = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    swap = re.search(r"^SwapTotal:\s+(\d+) kB$", _read(root / "proc/meminfo") or "", re.MULTILINE)
    smt = _read(root / "sys/devices/system/cpu/smt/active")
    slow_start = _number(root / "proc/sys/net/ipv4/tcp_slow_start_after_idle")
    return HostState(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        clock_source=_read(
            root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
        ),
        clock_step_ns=_clock_step_ns(),
        sleep_late_ns=round(statistics.median(late_ns)),
        sleep_late_ns_max=max(late_ns),
        load_average=float(load[0]) if load else None,
        num_machine_cores=os.cpu_count() or 1,
        steal=steal_between(ticks, core_ticks(root)),
        num_cores=len(usable_cores()),
        num_granted=granted_cores(root),
        has_smt=None if smt is None else smt == "1",
        governors=tuple(sorted({found for path in governors if (found := _read(path))})),
        no_real_time=fifo_right_problem(),
        no_real_time_computing=fifo_problem(root),
        handles_max=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        threads_max=_threads_max(root),
        locked_bytes_max=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        memory_bytes=available_bytes(root / "proc/self/cgroup", root / "sys/fs/cgroup"),
        swap_bytes=None if swap is None else int(swap[1]) * 1024,
        shm_bytes=_room(root / "dev/shm"),
        no_memfd=_memfd_problem(),
        cache_folder=str(cache),
        cache_bytes=_room(cache),
        backlog_max=_number(root / "proc/sys/net/core/somaxconn"),
        slow_start_after_idle=None if slow_start is None else slow_start != 0,
        driver=driver[1] if driver else "",
        num_cards=len(nvidia),
        closed_cards=tuple(path.name for path in nvidia if not os.access(path, os.R_OK | os.W_OK)),
        engines=_engines(),
        redis=redis,
        no_redis=_redis_problem(redis) if redis else "",
    )


def examine(host: HostState) -> list[HostFinding]:
    """Say of everything that was read what it costs."""
    return [
        _judge(
            "system",
            f"{host.system}, Python {host.python}",
            host.system.startswith("Linux"),
            "priorities, shared memory and limits are Linux's; nothing is tested elsewhere",
            "run it on Linux, or in a container of it",
            Level.FAILS,
        ),
        _judge(
            "clock",
            f"source {host.clock_source or 'unknown'}, step {format_ns(host.clock_step_ns)}",
            host.clock_source in (None, *_FAST_CLOCKS) and host.clock_step_ns < 10 * NS_PER_US,
            "each look at the time is a system call of a microsecond or more, and a request has some tens",
            "boot with clocksource=tsc where the processor's counter is stable; in a virtual machine, ask its "
            "host for one",
        ),
        _judge(
            "timers",
            f"sleeps of 1 ms end {format_ns(host.sleep_late_ns)} late (median), "
            f"{format_ns(host.sleep_late_ns_max)} (longest of {_SLEEPS})",
            host.sleep_late_ns_max < 5 * NS_PER_MS,
            "actions start late by as much, and requests with short SLOs are refused as LATE",
            "keep other work off this machine, or give workers cores of their own (worker --cores)",
        ),
        *_load(host),
        _real_time(host),
        _cores(host),
        _judge(
            "hyper-threads",
            {None: "unknown", False: "off", True: "on"}[host.has_smt],
            not host.has_smt,
            "an EXEC on the processor takes longer while the other thread of its core computes, so durations "
            "spread and margins grow",
            "give workers one thread of each core (worker --cores), or write off to "
            "/sys/devices/system/cpu/smt/control",
        ),
        _judge(
            "governor",
            ", ".join(host.governors) or "none to set here",
            not set(host.governors) - {"performance"},
            "the first batch after a pause runs at a low clock, longer than was predicted",
            "cpupower frequency-set -g performance",
        ),
        _judge(
            "file handles",
            _limit(host.handles_max),
            not 0 <= host.handles_max < _HANDLES_MIN,
            "every connection takes one, and clients beyond that are turned away",
            f"raise the hard limit to {_HANDLES_MIN} or more (LimitNOFILE=, docker --ulimit nofile=)",
            Level.FAILS,
        ),
        _judge(
            "processes and threads",
            _limit(host.threads_max),
            not 0 <= host.threads_max < _THREADS_MIN,
            "compilers and containers of models cannot be started, or workers end when one thread more is made",
            "raise it (LimitNPROC=, TasksMax=, docker --pids-limit)",
            Level.FAILS,
        ),
        _judge(
            "memory",
            f"{_size(host.memory_bytes)} for this process",
            host.memory_bytes >= _MEMORY_MIN_BYTES,
            "the weights of all models stay in memory; at 85 % large requests are refused, at 95 % all",
            "raise the limit of the control group, or lower --pages, --arena-mib and --host-mib",
        ),
        _judge(
            "swap",
            _size(host.swap_bytes) if host.swap_bytes else "none",
            not host.swap_bytes,
            "weights that were swapped out make a LOAD or an EXEC take a hundred times as long as predicted",
            "swapoff -a, or vm.swappiness=0",
        ),
        _judge(
            "memfd",
            host.no_memfd or "there is one",
            not host.no_memfd,
            "workers and fronts of this host get their tensors by socket, copied twice",
            "allow memfd_create (a seccomp profile, or a kernel before 3.17, forbids it)",
        ),
        _judge(
            "/dev/shm",
            "it is missing" if host.shm_bytes is None else f"{_size(host.shm_bytes)} free",
            (host.shm_bytes or 0) >= _SHM_MIN_BYTES,
            "clients that register system shared memory (--allow-client-shm) have no room for tensors",
            "docker --shm-size 1g; Kubernetes: an emptyDir with medium Memory at /dev/shm",
        ),
        _judge(
            "compiled models",
            f"{host.cache_folder} cannot be looked at"
            if host.cache_bytes is None
            else f"{_size(host.cache_bytes)} free at {host.cache_folder}",
            (host.cache_bytes or 0) >= _DISK_MIN_BYTES,
            "models that cannot be kept compiled are compiled at each start, seconds to minutes for each",
            "--cache-dir on a disk with room",
        ),
        _tcp(host),
        _engine(host),
        *_gpu(host),
        *_redis(host),
    ]


def _judge(
    name: str, found: str, well: bool, costs: str, remedy: str, level: Level = Level.COSTS
) -> HostFinding:
    if well:
        return HostFinding(name, Level.OK, found)
    return HostFinding(name, level, found, costs, remedy)


def _real_time(host: HostState) -> HostFinding:
    name = "real-time priority"
    if host.no_real_time:
        return HostFinding(
            name,
            Level.COSTS,
            host.no_real_time,
            "on a busy machine actions start late by milliseconds; with it, by 5 us at the 99th percentile",
            "grant CAP_SYS_NICE (docker --cap-add SYS_NICE; systemd AmbientCapabilities=CAP_SYS_NICE)",
        )
    return _judge(
        name,
        host.no_real_time_computing or "there is a right to it",
        not host.no_real_time_computing,
        "models on the processor run at ordinary priority, and whatever else runs here delays them",
        "sysctl kernel.sched_rt_runtime_us=-1 where workers have cores of their own",
    )


def _cores(host: HostState) -> HostFinding:
    found = f"{host.num_cores} cores, {host.num_granted} granted"
    if host.num_granted < 2:
        return HostFinding(
            "cores",
            Level.COSTS,
            found,
            "the controller and a worker take turns on one core, so every EXEC on the processor delays it",
            "grant two cores or more: one for the controller, one for each worker on the processor",
        )
    return _judge(
        "cores",
        found,
        host.num_granted >= host.num_cores,
        "when the quota of a period is used up, every thread is stopped until the next, for up to 100 ms",
        "bind to cores instead of a quota (docker --cpuset-cpus; Kubernetes: whole CPUs, static policy)",
    )


def _load(host: HostState) -> list[HostFinding]:
    load, steal = host.load_average, host.steal
    return [
        _judge(
            "load",
            f"{'unknown' if load is None else f'{load:.1f}'} (average) on {host.num_machine_cores} cores",
            (load or 0.0) <= host.num_machine_cores,
            "more threads want to run than there are cores: controller, fronts and workers wait for their turn, "
            "actions come too late, and requests are refused as LATE",
            "see with top what runs here and move it away, give workers cores of their own (worker --cores), or send "
            "less",
        ),
        _judge(
            "steal",
            "unknown" if steal is None else f"{steal:.1%} of the cores' time",
            (steal or 0.0) <= _STEAL_MAX,
            "the machine that this virtual one runs on gives its cores to others, so any action may stop for "
            "milliseconds",
            "ask for dedicated cores, or for another machine",
        ),
    ]


def _tcp(host: HostState) -> HostFinding:
    found = f"backlog up to {host.backlog_max if host.backlog_max is not None else 'unknown'}"
    if host.backlog_max is not None and host.backlog_max < _BACKLOG_MIN:
        return HostFinding(
            "TCP",
            Level.COSTS,
            found,
            "of clients that connect together, as after a restart, some wait 1 s and more for the next try",
            f"sysctl net.core.somaxconn={4 * _BACKLOG_MIN}",
        )
    return _judge(
        "TCP",
        f"{found}, slow start after idle" if host.slow_start_after_idle else found,
        not host.slow_start_after_idle,
        "after a pause a large request or a batch's inputs take several round trips; nothing on one host",
        "sysctl net.ipv4.tcp_slow_start_after_idle=0 where workers or clients are far away",
    )


def _engine(host: HostState) -> HostFinding:
    found = ", ".join(f"{name} {number}" for name, number in sorted(host.engines.items())) or "none"
    engines = {"onnxruntime", "onnxruntime-gpu"}
    if engines <= host.engines.keys():
        return HostFinding(
            "engines",
            Level.FAILS,
            found,
            "both install into one folder, the CUDA provider vanishes, and workers on GPUs refuse to start",
            "pip uninstall onnxruntime onnxruntime-gpu, then install one: clockwright[cpu] or [gpu-ort]",
        )
    return _judge(
        "engines",
        found,
        bool(engines & host.engines.keys()),
        "no worker can compile a model here; a controller or front alone needs none",
        "pip install 'clockwright[cpu]', or [gpu-ort]",
        Level.FAILS,
    )


def _gpu(host: HostState) -> list[HostFinding]:
    if not host.num_cards and not host.driver:
        return [HostFinding("GPU", Level.OK, "none: models run on the processor")]
    found = f"{host.num_cards} cards, driver {host.driver or 'not loaded'}"
    if not host.driver or not host.num_cards or host.closed_cards:
        what = f"; not to be opened: {', '.join(host.closed_cards)}" if host.closed_cards else ""
        return [
            HostFinding(
                "GPU",
                Level.FAILS,
                found + what,
                "--device cuda does not start",
                "load the driver (nvidia-smi says whether it works); in a container, the NVIDIA toolkit and "
                "--gpus all; else the rights of /dev/nvidia*",
            )
        ]
    unfit = _unfit_engine(host.engines)
    gpu = _judge(
        "GPU",
        f"{found}, {unfit}" if unfit else found,
        not unfit,
        "--device cuda does not start",
        "pip uninstall torch, which pip may keep, then pip install 'clockwright[gpu]' from "
        "an index without +cpu builds, as https://pypi.org/simple",
        Level.FAILS,
    )
    if not 0 <= host.locked_bytes_max < host.memory_bytes // 2:
        return [gpu]
    locked = HostFinding(
        "locked memory",
        Level.COSTS,
        f"up to {_size(host.locked_bytes_max)}",
        "weights are paged from memory that the kernel may move, at a part of the bus's speed, if the "
        "driver does not lock it for itself",
        "raise it (LimitMEMLOCK=infinity, docker --ulimit memlock=-1)",
    )
    return [gpu, locked]


def _unfit_engine(engines: dict[str, str]) -> str:
    """Say what the GPU engine lacks, by the versions of packages; empty if nothing."""
    torch = engines.get("torch")
    if torch is None:
        return "no torch"
    number, _, build = torch.partition("+")
    release = re.match(r"(\d+)\.(\d+)", number)
    if release and (int(release[1]), int(release[2])) < _TORCH_MIN:
        return f"torch {torch}, expected {_TORCH_MIN[0]}.{_TORCH_MIN[1]} or later"
    # A build that names nothing, as those of PyPI, or something else, may be right.
    if re.match(r"cpu|cu|rocm|xpu", build) and not build.startswith("cu13"):
        return f"torch {torch}, expected one for CUDA 13"
    bindings = engines.get("cuda-bindings")
    if bindings is None or bindings.partition(".")[0] != "13":
        return f"{f'cuda-bindings {bindings}' if bindings else 'no cuda-bindings'}, expected cuda-bindings 13"
    return ""


def _redis(host: HostState) -> list[HostFinding]:
    if not host.redis:
        return []
    return [
        _judge(
            "Redis",
            f"{host.redis}: {host.no_redis}" if host.no_redis else f"{host.redis} answers",
            not host.no_redis,
            "with --selection-store a controller does not start, and one that runs takes no feedback for users "
            "whom it does not know yet",
            "start it, or look at its address, firewall and password",
            Level.FAILS,
        )
    ]


# --- reading --------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_read(path) or "")
    except ValueError:
        return None


def core_ticks(root: Path = Path("/")) -> tuple[int, ...]:
    """Time of all cores since the boot, by use: user, nice, system, idle, iowait, irq, softirq, steal, ..."""
    line = (_read(root / "proc/stat") or "").partition("\n")[0]
    return tuple([int(number) for number in line.split()[1:9] if number.isdecimal()])


def steal_between(before: tuple[int, ...], after: tuple[int, ...]) -> float | None:
    """Find the part of the time between two looks that was stolen. Returns None if the kernel does not say."""
    spent = [late - early for early, late in zip(before, after, strict=False)]
    return spent[7] / sum(spent) if len(spent) == 8 and sum(spent) > 0 else None


def _room(folder: Path) -> int | None:
    """Bytes free where a folder is, or would be."""
    for at in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(at)
            return found.f_bavail * found.f_frsize
        if at.name == "shm":
            break  # What holds the folder is another file system.
    return None


def _threads_max(root: Path) -> int:
    """The least of the limits of threads that say something; -1: none does."""
    limits = [resource.getrlimit(resource.RLIMIT_NPROC)[1]]
    for name in ("sys/fs/cgroup/pids.max", "sys/fs/cgroup/pids/pids.max"):
        limits.append(_number(root / name) or -1)
    return min((limit for limit in limits if limit >= 0), default=-1)


def _clock_step_ns() -> int:
    steps = []
    for _ in range(100):
        begin_ns = time.monotonic_ns()
        while (end_ns := time.monotonic_ns()) == begin_ns:
            pass
        steps.append(end_ns - begin_ns)
    return min(steps)


def _sleeps_late_ns() -> list[int]:
    late = []
    for _ in range(_SLEEPS):
        begin_ns = time.monotonic_ns()
        time.sleep(_SLEEP_S)
        late.append(time.monotonic_ns() - begin_ns - round(_SLEEP_S * 1e9))
    return late


def _memfd_problem() -> str:
    try:
        fd, memory = make_shared("clockwright-doctor", 4096, others_write=True)
    except OSError as error:
        return str(error)
    memory.close()
    os.close(fd)
    return ""


def _engines() -> dict[str, str]:
    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu", "torch", "cuda-bindings"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _redis_problem(url: str) -> str:
    """Say why a Redis does not answer; empty if it does, or asks for a password, which is an answer too."""
    address = url.partition("://")[2] or url
    host, _, port = address.partition("/")[0].rpartition("@")[2].rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_REDIS_TIMEOUT_S
        ) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except ValueError:
        return "expected redis://HOST:PORT/DB"
    except OSError as error:
        return str(error)
    if answer.startswith((b"+PONG", b"-NOAUTH")):
        return ""
    return f"it says {answer[:40]!r}, expected PONG"


def _limit(number: int) -> str:
    return "no limit" if number < 0 else f"up to {number:,}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"
