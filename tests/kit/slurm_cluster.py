"""A Slurm cluster of a test's own: three nodes on this host, each with a GPU that is none."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from experiments.live.local_server import free_ports
from tests.kit.processes import until

NODES = ("n1", "n2", "n3")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


def slurm_programs() -> dict[str, str]:
    """Where Slurm's programs are; skips where one is missing."""
    found = {name: shutil.which(name, path=_PATH) for name in _PROGRAMS}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"there is no {missing[0]} here: apt-get install slurm-wlm munge")
    return {name: path for name, path in found.items() if path is not None}


class SlurmCluster:
    """Its daemons, and what its commands say."""

    def __init__(self, folder: Path, programs: dict[str, str]) -> None:
        self._folder = folder
        self._programs = programs
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                [self._programs[name], *arguments],
                env=os.environ | self.environment,
                stdout=log,
                stderr=log,
            )

    def start_node(self, name: str) -> None:
        """Start a node, or start it again."""
        self._slurmds[name] = self.spawn("slurmd", "-D", "-N", name)
        if self.run("sinfo", "-h", "-n", name, "-o", "%T").startswith("down"):
            self.run("scontrol", "update", f"nodename={name}", "state=resume")
        until(
            lambda: self.run("sinfo", "-h", "-n", name, "-o", "%T") in ("idle", "allocated"),
            what=f"node {name} is there",
        )

    def lose_node(self, name: str) -> None:
        """End all that runs on a node, as a power failure does."""
        daemon = self._slurmds.pop(name)
        daemon.kill()
        daemon.wait()
        mark = f"SLURMD_NODENAME={name}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def run(self, name: str, *arguments: str, **variables: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            [self._programs[name], *arguments],
            env=os.environ | self.environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol` says of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def stop(self) -> None:
        for daemon in self._slurmds.values():
            daemon.terminate()
            daemon.wait()


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster whose nodes are idle; ends its jobs and daemons at the end."""
    programs = slurm_programs()
    # A socket's path is short.
    folder.mkdir(exist_ok=True)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    host, user = socket.gethostname().partition(".")[0], _user()
    control, *ports = free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 "
        "Gres=gpu:a100:1 State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmUser={user}
SlurmdUser={user}
ReturnToService=0
MpiDefault=none
KillWait=20
GresTypes=gpu
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    gpus = (f"NodeName={name} Name=gpu Type=a100 File=/dev/null\n" for name in NODES)
    (folder / "gres.conf").write_text("".join(gpus))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    cluster = SlurmCluster(folder, programs)
    daemons: list[subprocess.Popen[Any]] = []
    files = {name: f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in _MUNGE_FILES}
    try:
        daemons.append(cluster.spawn("munged", "--foreground", "--force", *files.values()))
        until((folder / "munge.socket").exists, what="munged listens")
        daemons.append(cluster.spawn("slurmctld", "-D"))
        until(lambda: _answers(cluster), what="slurmctld answers")
        for name in NODES:
            cluster.start_node(name)
        yield cluster
    finally:
        if len(daemons) == 2:
            _end_jobs(cluster)
        cluster.stop()
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


_MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _answers(cluster: SlurmCluster) -> bool:
    try:
        return bool(cluster.run("sinfo", "-h"))
    except AssertionError:
        return False


def _end_jobs(cluster: SlurmCluster) -> None:
    with suppress(AssertionError):
        for number in cluster.run("squeue", "-h", "-o", "%A").split():
            cluster.run("scontrol", "update", f"jobid={number}", "requeue=0")
            cluster.run("scancel", "--full", "--signal=KILL", number)
