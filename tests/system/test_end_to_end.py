"""`clockwright up` in processes of its own, asked by Triton's client and by ours."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from clockwright import AsyncClient, Client, Refusal, RefusedError
from clockwright.client.operator import Operator
from experiments.demo.models import DemoModel, run_alone, write_digit_models
from experiments.live.local_server import LocalServer
from tests.kit.processes import PATIENCE_S, lives, until, worker, write_models

# A pause of the machine counts as a long execution, and the next ones are predicted to take as long:
# all that wait have the time for it.
SLO_MS = 600_000
SLO = {"slo_ms": SLO_MS}
ROW = np.zeros((1, 4), np.float32)


class Served:
    """A server and what its models should answer."""

    def __init__(self, address: str, models: list[DemoModel]) -> None:
        self.address = address
        self.models = models


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("demo")
    models_dir = directory / "models"
    models = write_digit_models(models_dir)
    write_models(models_dir, config="batch_sizes = [1, 2]\n", tiny="tiny_conv")
    questions = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    answers = run_alone(models_dir / "tiny" / "1" / "model.onnx", questions)
    models.append(DemoModel("tiny", questions, answers))
    # One page less than all models need together: one is always evicted.
    arguments = ["--pages", "4", "--arena-mib", "64", "--cache-dir", str(cache_dir)]
    with LocalServer(["--models", str(models_dir), *arguments]) as server:
        yield Served(server.address, models)


def tensors(model: DemoModel, metadata: Any, rows: slice) -> list[triton.InferInput]:  # noqa: ANN401
    [described] = metadata["inputs"]
    questions = model.questions[rows]
    tensor = triton.InferInput(described["name"], list(questions.shape), described["datatype"])
    tensor.set_data_from_numpy(questions)
    return [tensor]


def check(model: DemoModel, result: triton.InferResult, rows: slice) -> None:
    for name, expected in model.answers.items():
        np.testing.assert_allclose(
            result.as_numpy(name), expected[rows], rtol=1e-3, atol=1e-3, err_msg=model.name
        )


def test_tritons_client_gets_what_onnxruntime_answers(served: Served) -> None:
    with triton.InferenceServerClient(served.address) as client:
        for model in served.models:
            metadata = client.get_model_metadata(model.name, as_json=True)
            for rows in (slice(0, 1), slice(0, 2)):
                inputs = tensors(model, metadata, rows)
                check(model, client.infer(model.name, inputs, parameters=SLO), rows)


def test_our_client_is_told_where_the_time_went(served: Served) -> None:
    with Client(served.address) as client:
        result = client.infer("tiny", served.models[-1].questions[:1], slo_ms=SLO_MS, explain=True)
    parts = ("queue_us", "load_us", "input_us", "exec_us", "output_us", "network_us")
    measured = int(result.explanation["measured_us"])
    # Each part is rounded down to a microsecond.
    assert sum(int(result.explanation[part]) for part in parts) <= measured
    assert result.explanation["worker"] == "local-0"


class Asker:
    """Clients that ask one after the other, in a thread of their own, until they are stopped."""

    def __init__(self, address: str, model: str, *, num_clients: int) -> None:
        self._address, self._model, self._num_clients = address, model, num_clients
        #: Answers by worker, failures by what they said.
        self.workers: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._stopped = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))

    async def _ask(self) -> None:
        async with AsyncClient(self._address) as client:
            await asyncio.gather(*(self._ask_on(client) for _ in range(self._num_clients)))

    async def _ask_on(self, client: AsyncClient) -> None:
        while not self._stopped:
            try:
                result = await client.infer(
                    self._model, {"input": ROW}, slo_ms=SLO_MS, explain=True
                )
            except RefusedError as error:
                self.failures[error.refusal.value] += 1
            except Exception as error:
                self.failures[f"{type(error).__name__}: {error}"] += 1
            else:
                self.workers[str(result.explanation["worker"])] += 1

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()


def test_a_second_worker_takes_load_while_clients_run_and_its_end_fails_nobody_else(
    tmp_path: Path,
    cache_dir: Path,
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    common = ["--device", "modelled:50ms", "--cache-dir", str(cache_dir)]
    with (
        LocalServer(["--models", str(models), *common]) as server,
        # More work than one worker is credited with (100 ms), so that a second copy is worth a load,
        # and longer than it takes the slowest of clients to ask again.
        Asker(server.address, "echo", num_clients=24) as asker,
    ):
        until(lambda: asker.workers["local-0"] > 10, what="the first worker answers")
        with worker(server.address, "--id", "second", *common) as second:
            until(lambda: asker.workers["second"] > 20, what="the second worker answers")
            assert not asker.failures
            second.send_signal(signal.SIGKILL)
            second.wait()
        asked_then = asker.workers["local-0"]
        until(lambda: asker.workers["local-0"] > asked_then + 20, what="the first answers on")
        with Operator(server.address) as operator:
            until(lambda: len(operator.workers()) == 1, what="the second worker is forgotten")
    # At the end the server drains, which refuses nothing that was admitted.
    assert set(asker.failures) <= {Refusal.WORKER_LOST.value}, asker.failures


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in children for child in path.read_text().split()]


def pids_of(operator: Operator) -> dict[str, int]:
    return {row.worker_id: row.pid for row in operator.workers()}


def test_a_local_worker_that_is_killed_is_replaced_and_one_that_was_sent_home_is_not(
    tmp_path: Path, cache_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    arguments = ["--device", "modelled:1ms", "--cache-dir", str(cache_dir)]
    with (
        LocalServer(["--models", str(models), "--workers", "2", *arguments]) as server,
        Operator(server.address) as operator,
        Client(server.address) as client,
    ):
        first = pids_of(operator)
        assert sorted(first) == ["local-0", "local-1"]
        os.kill(first["local-1"], signal.SIGKILL)
        until(lambda: first["local-1"] not in pids_of(operator).values(), what="it is forgotten")
        until(lambda: len(pids_of(operator)) == 2, what="another takes its place")
        second = pids_of(operator)
        assert second["local-0"] == first["local-0"]
        # Those that serve now are the ones that were started again.
        for pid in second.values():
            os.kill(pid, signal.SIGKILL)
        until(
            lambda: len(set(pids_of(operator).values()) - set(second.values())) == 2,
            what="both are replaced",
        )
        until(lambda: client.models()[0].state == "READY", what="they have the model")
        client.infer("echo", {"input": ROW}, slo_ms=SLO_MS)
        third = pids_of(operator)
        # One that was sent home stays away.
        operator.drain("local-1")
        until(lambda: not lives(third["local-1"]), what="it has left")
        assert pids_of(operator) == {"local-0": third["local-0"]}
        assert server.stop() == 0
    assert not [pid for pid in third.values() if lives(pid)]
    told = capfd.readouterr().err
    pid = first["local-1"]
    assert f"worker local-1 (pid {pid}) was killed by SIGKILL; starting it again in 0.5 s" in told
    assert f"{second['local-1']}) was killed by SIGKILL; starting it again in 1 s" in told


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT]
)
def test_up_ends_although_its_worker_and_the_compiler_do_not_listen(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    models = write_models(tmp_path / "models", mlp="mlp-1000-4000-10")
    server = LocalServer(["--models", str(models), "--cache-dir", str(tmp_path / "cache")])
    server.wait_for("model mlp: ")
    with Operator(server.address) as operator:
        (pid,) = pids_of(operator).values()
    # A compiler that is as deaf as the longest compilation, and a worker as deaf as one in a library.
    compilers = list(children_of(pid))
    for deaf in (*compilers, pid):
        os.kill(deaf, signal.SIGSTOP)
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE_S) == 0
    server.stop()
    until(lambda: not lives(pid), what="the worker is gone")
    # The kernel has told them to end, which who stands still does not hear.
    for compiler in compilers:
        os.kill(compiler, signal.SIGCONT)
        until(lambda pid=compiler: not lives(pid), what="the compiler is gone")  # type: ignore[misc]
    assert "stopped" in server.output
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_finishes_what_is_admitted_and_leaves_no_process_behind(
    tmp_path: Path, cache_dir: Path, number: signal.Signals
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    # One execution takes longer than it takes all requests to arrive.
    arguments = ["--device", "modelled:300ms", "--cache-dir", str(cache_dir)]
    with LocalServer(["--models", str(models), *arguments]) as server:
        with Operator(server.address) as operator:
            pids = [row.pid for row in operator.workers()]

        async def ask_and_stop() -> list[object]:
            async with AsyncClient(server.address) as client:
                asks = [
                    asyncio.create_task(client.infer("echo", {"input": ROW}, slo_ms=SLO_MS))
                    for _ in range(3)
                ]
                with Operator(server.address) as operator:
                    # However many of them are answered by then, which on a slow machine may be some.
                    while operator.status().requests < 3:  # noqa: ASYNC110  another process's state
                        await asyncio.sleep(0.01)
                server.process.send_signal(number)
                return await asyncio.gather(*asks, return_exceptions=True)

        outcomes = asyncio.run(ask_and_stop())
        # No second signal: one that comes when the first is done with ends the process at once.
        assert server.process.wait(PATIENCE_S) == 0
        server.stop()
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    assert not [pid for pid in pids if lives(pid)]
    assert "stopped" in server.output


def test_a_server_runs_a_policy_for_comparison_and_its_workers_do_not_outlive_it_when_it_is_killed(
    tmp_path: Path, cache_dir: Path
) -> None:
    models = write_models(tmp_path / "models", echo="echo-4")
    arguments = ["--device", "modelled:1ms", "--cache-dir", str(cache_dir)]
    arguments += ["--policy", "clipper", "--batching", "quantile", "--batch-delay-ms", "2"]
    with (
        LocalServer(["--models", str(models), *arguments]) as server,
        Client(server.address) as client,
        Operator(server.address) as operator,
    ):
        assert operator.status().policy == "clipper"
        for _ in range(5):
            client.infer("echo", {"input": ROW}, slo_ms=SLO_MS)
        pids = pids_of(operator).values()
        server.process.kill()
        assert server.stop() == -signal.SIGKILL
    until(lambda: not [pid for pid in pids if lives(pid)], what="the worker ends")
