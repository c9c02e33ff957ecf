"""Fronts as processes: what each of them may do to the others, and what a controller that dies costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton

from clockwright import Client
from clockwright.v1 import inference_pb2 as pb
from experiments.demo.models import run_alone
from experiments.live.local_server import LocalServer
from tests.kit.processes import PATIENCE_S, listening, lives, until, worker, write_models

INFER = "/inference.GRPCInferenceService/ModelInfer"
Input = pb.ModelInferRequest.InferInputTensor
# A pause of the machine counts as a long execution, and the next ones are predicted to take as long.
SLO_MS = 600_000
NUM_AT_ONCE = 16
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]

# The type stubs want arguments that are optional.
_aio: Any = grpc.aio


class Deployment:
    """A controller that can be started again, a worker, and two fronts."""

    def __init__(self, directory: Path, cache_dir: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._state = directory / "state"
        self._models = write_models(directory / "models", mlp="mlp-16-8-4", other="mlp-16-4-4")
        self.controller, self.address = self.start("controller", port=0)
        cache = str(cache_dir)
        stack.enter_context(
            worker(self.address, *("--pages", "4", "--arena-mib", "16", "--cache-dir", cache))
        )
        self.fronts: list[tuple[Popen[str], str]] = [
            stack.enter_context(listening("front", "--controller", self.address, "--port", "0"))
            for _ in range(2)
        ]
        for address in self.addresses:
            with Client(address) as client:
                until(client.is_ready, what="all models are ready")

    @property
    def addresses(self) -> Sequence[str]:
        return [address for _, address in self.fronts]

    def start(self, command: str, *, port: int) -> tuple[Popen[str], str]:
        arguments = ["--models", str(self._models), "--port", str(port)]
        arguments += ["--state", str(self._state)]
        return self._stack.enter_context(listening(command, *arguments))

    def start_again(self) -> None:
        """Start a controller where the last one was."""
        port = int(self.address.rpartition(":")[2])
        self.controller, _ = self.start("controller", port=port)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield Deployment(tmp_path_factory.mktemp("fronts"), cache_dir, stack)


def request(index: int) -> bytes:
    x = np.random.default_rng(index).random((1, 16), np.float32)
    return pb.ModelInferRequest(
        model_name="mlp",
        inputs=[Input(name="input", datatype="FP32", shape=x.shape)],
        raw_input_contents=[x.tobytes()],
        parameters={"slo_ms": pb.InferParameter(int64_param=SLO_MS)},
    ).SerializeToString()


def logits(answer: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(
        pb.ModelInferResponse.FromString(answer).raw_output_contents[0], np.float32
    )


class Load:
    """Closed-loop clients of one front, and what they got."""

    def __init__(self, address: str) -> None:
        self.answers: dict[int, bytes] = {}
        self.errors: list[grpc.aio.AioRpcError] = []
        self._address = address
        self._last = 0
        self._stopped = False

    async def run(self) -> None:
        async with _aio.insecure_channel(self._address) as channel:
            infer = channel.unary_unary(INFER)
            await asyncio.gather(*(self._ask(infer) for _ in range(NUM_AT_ONCE)))

    async def reach(self, num_answers: int) -> None:
        """Wait until there are so many more answers."""
        wanted = len(self.answers) + num_answers
        async with asyncio.timeout(PATIENCE_S):
            # What is waited for happens in other processes.
            while len(self.answers) < wanted and not self.errors:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._stopped = True

    async def _ask(self, infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        while not self._stopped:
            self._last = index = self._last + 1
            try:
                self.answers[index] = await infer(request(index))
            except grpc.aio.AioRpcError as error:
                self.errors.append(error)
                return


def check(deployment: Deployment, load: Load) -> None:
    """All answers are right: what the controller itself says."""
    assert not load.errors
    channel: Any
    with grpc.insecure_channel(deployment.address) as channel:
        infer = channel.unary_unary(INFER)
        for index, answer in list(load.answers.items())[:: max(1, len(load.answers) // 20)]:
            expected = logits(infer(request(index)))
            np.testing.assert_allclose(logits(answer), expected, rtol=1e-4, atol=1e-5)


def test_every_front_gives_the_controllers_answers_byte_for_byte(deployment: Deployment) -> None:
    answers = []
    channel: Any
    for address in (deployment.address, *deployment.addresses):
        with grpc.insecure_channel(address) as channel:
            infer = channel.unary_unary(INFER)
            answers.append([infer(request(index)) for index in range(20)])
    assert answers[0] == answers[1] == answers[2]


def test_a_controller_that_is_killed_and_started_again_costs_nothing_that_has_slack(
    deployment: Deployment,
) -> None:
    async def main() -> list[Load]:
        loads = [Load(address) for address in deployment.addresses]
        running = [asyncio.ensure_future(load.run()) for load in loads]
        for load in loads:
            await load.reach(50)
        deployment.controller.kill()
        await asyncio.to_thread(deployment.start_again)
        for load in loads:
            await load.reach(50)
            load.stop()
        await asyncio.gather(*running)
        return loads

    for load in asyncio.run(main()):
        check(deployment, load)


def test_a_front_that_is_stopped_or_killed_costs_no_others_clients_anything(
    deployment: Deployment,
) -> None:
    doomed, address = deployment.fronts[0]

    async def main() -> list[Load]:
        loads = [Load(each) for each in (address, deployment.addresses[1])]
        running = [asyncio.ensure_future(load.run()) for load in loads]
        for load in loads:
            await load.reach(50)
        os.kill(doomed.pid, signal.SIGSTOP)
        await loads[1].reach(100)
        doomed.kill()
        await loads[1].reach(100)
        for load in loads:
            load.stop()
        await asyncio.gather(*running)
        return loads

    broken, whole = asyncio.run(main())
    assert broken.errors
    check(deployment, whole)


def children(pid: int) -> dict[int, list[str]]:
    """Processes that a process has started, and their command lines."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError):
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().split("\0")
    return found


def test_up_with_fronts_answers_rightly_on_one_port_and_ends_with_all_its_processes(
    tmp_path: Path,
    cache_dir: Path,
) -> None:
    models = write_models(tmp_path / "models", mlp="mlp-16-8-4")
    x = np.random.default_rng(0).random((1, 16), np.float32)
    (expected,) = run_alone(models / "mlp" / "1" / "model.onnx", x).values()
    tensor = triton.InferInput("input", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    memory = ("--pages", "4", "--arena-mib", "16", "--cache-dir", str(cache_dir))
    flags = ("--fronts", "2", "--http-port", "0", *memory)
    with LocalServer(["--models", str(models), *flags]) as server:
        [rest] = [line for line in server.output if line.startswith("REST on ")]

        def ask() -> None:
            # Each has a connection of its own, and the kernel gives it to one of the fronts.
            with triton.InferenceServerClient(server.address, channel_args=OWN_CONNECTION) as asker:
                found = asker.infer("mlp", [tensor], parameters={"slo_ms": SLO_MS})
            np.testing.assert_allclose(found.as_numpy("output"), expected, rtol=1e-4, atol=1e-5)
            inputs = [{"name": "input", "shape": x.shape, "datatype": "FP32", "data": x.tolist()}]
            answer = requests.post(
                f"{rest.removeprefix('REST on ')}/v2/models/mlp/infer",
                json={"inputs": inputs},
                headers={"x-clockwright-slo-ms": str(SLO_MS)},
                timeout=PATIENCE_S,
            )
            data = answer.json()["outputs"][0]["data"]
            np.testing.assert_allclose([data], expected, rtol=1e-4, atol=1e-5)

        def fronts() -> set[int]:
            started = children(server.process.pid).items()
            return {child for child, command in started if "front" in command}

        [own] = [line for line in server.output if line.startswith("controller on ")]
        assert server.address != own.removeprefix("controller on ")
        for _ in range(8):
            ask()
        first, second = fronts()
        os.kill(first, signal.SIGKILL)
        until(lambda: len(fronts() - {first}) == 2, what="a front is started again")
        assert second in fronts()
        ask()
        started = children(server.process.pid)
        assert server.stop() == 0
        assert not [child for child in started if lives(child)]
    assert server.output[-1] == "stopped"
