"""The batch script for Slurm: what it says is so, and a cluster of three nodes that loses some of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from clockwright import Access, Client, ClockwrightError
from clockwright.cli.main import app
from clockwright.client.operator import Operator
from tests.kit.processes import until, write_models
from tests.kit.slurm_cluster import SlurmCluster, slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "clockwright.sbatch"
ROW = np.zeros((1, 4), np.float32)


def test_the_batch_script_is_one_that_bash_and_shellcheck_take() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("there is no shellcheck here: apt-get install shellcheck")
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


def test_every_command_of_the_batch_script_takes_the_flags_that_it_is_given() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    arrays: dict[str, list[str]] = {}
    for name, words in re.findall(r"\b(\w+)=\(([^()]*(?:\([^()]*\)[^()]*)*)\)", text):
        arrays.setdefault(name, []).extend(flags_in(words))
    seen = Counter[str]()
    for line in re.sub(r"\\\n", " ", text).splitlines():
        called = re.search(
            r"(?<![#`\w/.])clockwright ((?:certs |keys )?[a-z]+) (.*)", line.split(" # ")[0]
        )
        if called is None or line.lstrip().startswith("#"):
            continue
        command, rest = called.group(1), called.group(2)
        given = flags_in(rest)
        for array in re.findall(r"\"\$\{(\w+)\[@\]\}\"", rest):
            given += arrays[array]
        assert {*given} <= flags_of(command), command
        seen[command] += len(given)
    assert seen.keys() >= {"controller", "worker", "front", "certs add", "keys add"}
    assert seen["controller"] >= 8


def flags_in(words: str) -> list[str]:
    return re.findall(r"(?<!\S)(--[a-z][a-z-]*)", words)


def flags_of(name: str) -> set[str]:
    command: Any = get_command(app)
    for part in name.split():
        command = command.get_command(None, part)
    return {flag for parameter in command.params for flag in parameter.opts}


class Asking:
    """A client that asks again and again, wherever the controller is, and keeps what came of it."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder, self._access = folder, access
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        #: What came of each request: "answered", or why not.
        self.outcomes: list[str] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def answers_again(self) -> None:
        """Wait until a request that is sent from now on is answered."""
        begin = len(self.outcomes) + 1
        until(lambda: "answered" in self.outcomes[begin:], what="requests are answered")

    def _ask(self) -> None:
        while not self._ends.wait(0.02):
            address = (self._folder / "address").read_text().strip()
            with Client(address, self._access) as client:
                while not self._ends.wait(0.02):
                    try:
                        client.infer("echo", {"input": ROW}, slo_ms=10_000)
                    except ClockwrightError as error:
                        self.outcomes.append(str(error))
                        break
                    self.outcomes.append("answered")


@contextmanager
def deployed(folder: Path, cluster: SlurmCluster) -> Iterator[Access]:
    """A folder as the page says to make it; gives an operator's credentials."""
    write_models(folder / "models", first="echo-4")
    program = folder / "venv" / "bin" / "clockwright"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m clockwright.cli "$@"\n')
    program.chmod(0o755)
    cluster.environment |= {
        "CLOCKWRIGHT_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "FRONTS": "1",
    }
    roles = ("operator", "statistics", "inference", "metadata", "model-repository")
    made = subprocess.run(
        [program, "keys", "add", "me", "--keys", "keys", *(f"--role={role}" for role in roles)],
        env=os.environ | cluster.environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "me.key").write_text(made.stdout)
    yield Access(key=made.stdout.strip(), ca=folder / "certs" / "ca.pem")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_job_that_loses_its_node_or_comes_to_its_time_limit_serves_again(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with slurm_cluster(tmp_path / "slurm") as cluster, deployed(folder, cluster) as access:
        flags = ("--nodes=1", f"--output={folder}/%j.log")

        def submit(kinds: str, *arguments: str) -> str:
            return cluster.run("sbatch", "--parsable", *flags, str(SCRIPT), *arguments, KINDS=kinds)

        def node_of(job: str) -> str:
            until(lambda: cluster.job(job)["JobState"] == "RUNNING", what="it runs")
            return cluster.job(job)["BatchHost"]

        def begin_again(job: str) -> None:
            # Slurm waits two minutes before it starts a job again.
            until(lambda: cluster.job(job)["JobState"] == "PENDING", what="it is queued again")
            cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")

        def workers(operator: Operator) -> dict[str, int]:
            return {row.worker_id: row.pid for row in operator.workers() if row.state == "READY"}

        def operator() -> Operator:
            return Operator((folder / "address").read_text().strip(), access)

        # Their logs say which models they have ready.
        kind = "a100 1 --device modelled:1ms --pages 4 --verbose"
        serving = submit(kind)
        first = node_of(serving)
        until((folder / "address").exists, what="it says where it is")
        more = submit(kind, "workers")
        second = node_of(more)
        names = {f"a100-{serving}-0", f"a100-{more}-0"}
        assert first != second

        def all_joined() -> bool:
            try:
                with operator() as asked:
                    return workers(asked).keys() == names
            except ClockwrightError:
                return False

        until(all_joined, what="both workers have joined")
        with operator() as asked:
            write_models(tmp_path / "uploaded", echo="echo-4")
            asked.add_model(tmp_path / "uploaded" / "echo", name="echo", replace=False)
        logs = [folder / f"{job}.log" for job in (serving, more)]
        until(
            lambda: all("model echo: ready" in log.read_text() for log in logs),
            what="both workers have the model ready",
        )
        with Client((folder / "fronts").read_text().strip(), access) as at_front:
            until(at_front.is_ready, what="the front is ready")
            at_front.infer("echo", {"input": ROW}, slo_ms=60_000)
        with Asking(folder, access) as client:
            client.answers_again()

            # A worker's node: the others serve on, and it comes back elsewhere.
            cluster.lose_node(second)
            begin_again(more)
            assert node_of(more) not in (first, second)
            until(all_joined, what="the worker is back")
            assert [text for text in client.outcomes if text != "answered"] == []
            with operator() as asked:
                kept = workers(asked)[f"a100-{more}-0"]

            # The controller's node: all that it knew is in the state folder, and the other job's worker finds it.
            cluster.start_node(second)
            cluster.lose_node(first)
            begin_again(serving)
            assert node_of(serving) == second
            until(all_joined, what="the worker has found the controller")
            with operator() as asked:
                assert workers(asked)[f"a100-{more}-0"] == kept
            client.answers_again()

            # A drained worker stays away, and its job ends.
            with operator() as asked:
                asked.drain(f"a100-{more}-0")
            until(lambda: cluster.job(more)["JobState"] == "COMPLETED", what="its job ends")
            client.answers_again()

            # The time limit: it answers what it has taken, ends in order, and is queued again.
            before = len(client.outcomes)
            cluster.run(
                "scontrol", "update", f"jobid={serving}", f"timelimit={minutes(cluster, serving)}"
            )
            begin_again(serving)
            assert "the time limit is near: ending in order" in logs[0].read_text()
            told = [text for text in client.outcomes[before:] if text != "answered"]
            assert told
            assert [text for text in told if not is_refused(text)] == []
            cluster.run("scontrol", "update", f"jobid={serving}", "timelimit=60")
            node_of(serving)
            client.answers_again()

        # An operator ends it in the same order, and it does not come back.
        cluster.run("scancel", "--batch", "--signal=TERM", serving)
        until(lambda: cluster.job(serving)["JobState"] == "COMPLETED", what="it has ended")
        assert "told to end: ending in order" in logs[0].read_text()


def minutes(cluster: SlurmCluster, job: str) -> int:
    """A time limit that ends two minutes from now at most."""
    hours, of_hour, _ = cluster.job(job)["RunTime"].split(":")
    return 60 * int(hours) + int(of_hour) + 2


def is_refused(text: str) -> bool:
    """Whether a server took no request: it said so, or it was not there."""
    return text.startswith("DRAINING") or "no server answers" in text
