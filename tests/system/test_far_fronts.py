"""A front, a controller and workers as if each had a host of its own: all links are TCP, and nothing is shared.

What is killed under load costs no answer that was not under way in it, and every answer is right to the byte.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import numpy as np
import pytest

from clockwright import Client
from clockwright.client.operator import Operator
from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from tests.kit.echo_serving import write_model
from tests.kit.processes import PATIENCE_S, listening, until, worker
from tests.kit.slow_echo import ROW_BYTES, VALUES

INFER = "/inference.GRPCInferenceService/ModelInfer"
# A pause of the machine counts as a long execution, and the next ones are predicted to take as long.
SLO_MS = 600_000
NUM_AT_ONCE = 4

# The type stubs want arguments that are optional.
_aio: Any = grpc.aio


class Deployment:
    """A controller that can be started again, two workers, and two fronts."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._directory = directory
        self._models = write_model(directory / "models")
        (self._models / "m" / "config.toml").write_text("batch_sizes = [1, 2, 4]\n")
        # A controller's status does not say which workers are ready for a model: its log does.
        self._log = directory / "controller.log"
        self._num_ready: Counter[str] = Counter()
        self.controller, self.address = self._start_controller(port=0)
        self.workers = {name: self.start_worker(name) for name in ("one", "two")}
        flags = "--port", "0", "--shared-memory-mib", "0"
        self.fronts: list[tuple[Popen[str], str]] = [
            stack.enter_context(listening("front", "--controller", self.address, *flags))
            for _ in range(2)
        ]
        self.wait()

    def _start_controller(self, *, port: int) -> tuple[Popen[str], str]:
        state = str(self._directory / "state")
        arguments = (
            "--models",
            str(self._models),
            "--port",
            str(port),
            "--state",
            state,
            "--verbose",
        )
        with self._log.open("ab") as log:
            return self._stack.enter_context(listening("controller", *arguments, log=log))

    def start_again(self) -> None:
        """Start a controller where the last one was."""
        self._num_ready.update(self.workers.keys())
        self.controller, _ = self._start_controller(port=int(self.address.rpartition(":")[2]))

    def start_worker(self, name: str) -> Popen[bytes]:
        self._num_ready[name] += 1
        cache = str(self._directory / f"cache-{name}")
        flags = ("--pages", "4", "--arena-mib", "16", "--cache-dir", cache, "--id", name)
        return self._stack.enter_context(worker(self.address, *flags))

    def wait(self) -> None:
        """Wait until the model is ready on all workers, and all fronts are there and know them."""
        until(self._is_ready, what="the model is ready on both workers, and all fronts know them")
        for _, address in self.fronts:
            with Client(address) as client:
                until(client.is_ready, what="fronts are there")

    def _is_ready(self) -> bool:
        said = self._log.read_text()
        if any(
            said.count(f"model m is ready on worker {name}\n") < number
            for name, number in self._num_ready.items()
        ):
            return False
        known = [sorted(front.workers) for front in self.status().fronts]
        return known == [sorted(self.workers)] * len(self.fronts)

    def status(self) -> control_pb2.StatusResponse:
        with Operator(self.address) as operator:
            return operator.status()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("far")
    # No Unix socket can have so long a path: workers come by TCP.
    temporary = directory / ("long" * 40)
    temporary.mkdir()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        yield Deployment(directory, stack)


class Load:
    """Closed-loop clients of one front, who look at every byte of what they get."""

    def __init__(self, address: str) -> None:
        self.num_answers = 0
        self.errors: list[str] = []
        self._address = address
        self._last = 0
        self._stopped = False

    async def run(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with _aio.insecure_channel(self._address, options=options) as channel:
            infer = channel.unary_unary(INFER)
            await asyncio.gather(*(self._ask(infer) for _ in range(NUM_AT_ONCE)))

    async def reach(self, num_answers: int) -> None:
        """Wait until there are so many more answers."""
        wanted = self.num_answers + num_answers
        async with asyncio.timeout(PATIENCE_S):
            # What is waited for happens in other processes.
            while self.num_answers < wanted and not self.errors:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._stopped = True

    async def _ask(self, infer: Any) -> None:  # noqa: ANN401
        while not self._stopped:
            self._last = number = self._last + 1
            x = np.random.default_rng(number).standard_normal((1, VALUES), np.float32)
            message = pb.ModelInferRequest(model_name="m", raw_input_contents=[x.tobytes()])
            message.inputs.add(name="x", datatype="FP32", shape=x.shape)
            message.parameters["slo_ms"].int64_param = SLO_MS
            try:
                answer = await infer(message.SerializeToString())
            except grpc.aio.AioRpcError as error:
                self.errors.append(f"{error.code().name}: {error.details()}")
                return
            [y] = pb.ModelInferResponse.FromString(answer).raw_output_contents
            assert y == np.maximum(x, 0).tobytes(), f"answer {number} is another's"
            self.num_answers += 1


def test_tensors_go_past_the_controller_and_every_answer_is_right(deployment: Deployment) -> None:
    async def main() -> list[Load]:
        loads = [Load(address) for _, address in deployment.fronts]
        running = [asyncio.ensure_future(load.run()) for load in loads]
        for load in loads:
            await load.reach(30)
            load.stop()
        await asyncio.gather(*running)
        return loads

    before = deployment.status()
    loads = asyncio.run(main())
    after = deployment.status()
    assert [load.errors for load in loads] == [[], []]
    for front in after.fronts:
        assert front.address.startswith("127.0.0.1:")
        assert list(front.workers) == ["one", "two"]
    carried = sum(front.link_bytes for front in after.fronts)
    carried -= sum(front.link_bytes for front in before.fronts)
    assert carried < ROW_BYTES * sum(load.num_answers for load in loads) / 50


def test_a_request_of_several_batches_goes_through_the_controller(deployment: Deployment) -> None:
    x = np.random.default_rng(0).standard_normal((7, VALUES), np.float32)
    with Client(deployment.fronts[0][1]) as client:
        found = client.infer("m", x, slo_ms=SLO_MS).outputs["y"]
    np.testing.assert_array_equal(found, np.maximum(x, 0))


def test_a_worker_that_is_killed_costs_no_more_than_what_it_has(deployment: Deployment) -> None:
    async def main() -> list[Load]:
        loads = [Load(address) for _, address in deployment.fronts]
        running = [asyncio.ensure_future(load.run()) for load in loads]
        await loads[0].reach(10)
        os.kill(deployment.workers["one"].pid, signal.SIGKILL)
        for load in loads:
            await load.reach(20)
            load.stop()
        await asyncio.gather(*running)
        return loads

    loads = asyncio.run(main())
    assert not [words for load in loads for words in load.errors if "WORKER_LOST" not in words]
    deployment.workers["one"] = deployment.start_worker("one")
    deployment.wait()


def test_a_controller_that_is_killed_and_started_again_costs_nothing(
    deployment: Deployment,
) -> None:
    async def main() -> list[Load]:
        loads = [Load(address) for _, address in deployment.fronts]
        running = [asyncio.ensure_future(load.run()) for load in loads]
        for load in loads:
            await load.reach(10)
        deployment.controller.kill()
        await asyncio.to_thread(deployment.start_again)
        for load in loads:
            await load.reach(20)
            load.stop()
        await asyncio.gather(*running)
        return loads

    assert [load.errors for load in asyncio.run(main())] == [[], []]
    deployment.wait()


def test_a_front_that_is_stopped_or_killed_costs_others_nothing(deployment: Deployment) -> None:
    doomed, address = deployment.fronts[0]

    async def main() -> list[Load]:
        loads = [Load(each) for each in (address, deployment.fronts[1][1])]
        running = [asyncio.ensure_future(load.run()) for load in loads]
        for load in loads:
            await load.reach(10)
        os.kill(doomed.pid, signal.SIGSTOP)
        await loads[1].reach(30)
        doomed.kill()
        await loads[1].reach(30)
        for load in loads:
            load.stop()
        await asyncio.gather(*running)
        return loads

    broken, whole = asyncio.run(main())
    assert broken.errors
    assert whole.errors == []
    until(lambda: len(deployment.status().fronts) == 1, what="the front is gone from the list")
