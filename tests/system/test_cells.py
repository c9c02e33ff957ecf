"""Two controllers in processes of their own: a model moves while it is asked, one is killed, and Envoy asks a picker."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest

from clockwright import Client, RefusedError
from clockwright.client.operator import Operator
from experiments.live.envoy import ENVOY_HINT, envoy, envoy_program
from tests.kit.processes import listening, until, worker, write_models

ROW = {"input": np.ones((1, 16), np.float32)}
# A pause of the machine counts as a long execution, and the next ones are predicted to take as long.
SLO_MS = 60_000


class TwoCells:
    """Two controllers with a modelled device each, of which the first has a model."""

    def __init__(self, directory: Path, cache_dir: Path, stack: ExitStack) -> None:
        self.cells = f"file:{directory}/cells"
        self.folder = write_models(directory / "models", moved="mlp-16-8-4") / "moved"
        self.processes: list[Popen[str]] = []
        self.addresses: list[str] = []
        for name in ("one", "two"):
            flags = ["--port", "0", "--state", f"{directory}/{name}", "--cells", self.cells]
            process, address = stack.enter_context(listening("controller", *flags))
            self.processes.append(process)
            self.addresses.append(address)
            flags = ["--pages", "4", "--arena-mib", "16", "--cache-dir", str(cache_dir)]
            stack.enter_context(worker(address, "--device", "modelled:1ms", *flags))
        for address in self.addresses:
            with Operator(address) as operator:
                until(lambda: operator.status().num_workers, what="its worker is there")
        self.run("models", "add", str(self.folder), "--server", self.addresses[0])

    def run(self, *arguments: str) -> str:
        """Run a command to its end."""
        command = [sys.executable, "-m", "clockwright.cli", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def two_cells(tmp_path: Path, cache_dir: Path) -> Iterator[TwoCells]:
    with ExitStack() as stack:
        yield TwoCells(tmp_path, cache_dir, stack)


def test_a_model_moves_while_it_is_asked_and_a_killed_controller_costs_no_request(
    two_cells: TwoCells,
) -> None:
    one, two = two_cells.addresses
    flags = ("--cells", two_cells.cells)
    with listening("front", *flags, "--port", "0") as (_, address):
        over, asked, faults = threading.Event(), [0], []

        def ask() -> None:
            with Client(address) as client:
                while not over.is_set():
                    try:
                        client.infer("moved", ROW, slo_ms=SLO_MS)
                        asked[0] += 1
                    except Exception as error:
                        faults.append(error)
                        return

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: asked[0] > 10 or faults, what="it is served")
        assert not faults
        told = two_cells.run(
            *("cells", "move", str(two_cells.folder), "--to", two, "--server", one, *flags)
        )
        assert told == f"moved moved to {two}\n"
        with Operator(one) as operator:
            assert not operator.models()
        moved = asked[0]
        until(lambda: asked[0] > moved + 10 or faults, what="it is served there")
        # Back on the first as well, and the other one dies.
        two_cells.run("models", "add", str(two_cells.folder), "--server", one)
        listed = two_cells.run("cells", "list", *flags)
        assert one in listed
        assert two in listed
        two_cells.processes[1].send_signal(signal.SIGKILL)
        killed = asked[0]
        until(lambda: asked[0] > killed + 10 or faults, what="the other one serves it")
        over.set()
        client.join()
        assert not faults
    # What is gone is not listed.
    assert two not in two_cells.run("cells", "list", *flags)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
def test_envoy_sends_each_call_where_the_picker_says(two_cells: TwoCells, mode: str) -> None:
    if envoy_program() is None:
        pytest.skip(f"there is no envoy here: {ENVOY_HINT}")
    flags = ("--cells", two_cells.cells, "--port", "0")
    with (
        listening("picker", *flags) as (_, picker),
        envoy(picker, mode=mode) as address,
        Client(address) as client,
    ):
        until(client.is_ready, what="a controller answers")
        assert client.metadata("moved").name == "moved"
        for _ in range(20):
            client.infer("moved", ROW, slo_ms=SLO_MS)
        # Refused as a controller refuses.
        with pytest.raises(RefusedError, match=r"SLO 0\.1 ms"):
            client.infer("moved", ROW, slo_ms=0.1)
        with pytest.raises(RefusedError, match="no controller that is there has model 'none'"):
            client.infer("none", ROW, slo_ms=SLO_MS)
        # Only the first has it.
        with Operator(two_cells.addresses[0]) as operator:
            assert operator.status().answered >= 20
