"""What an event costs does not grow with what waits, and what is kept does not grow with what has been."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import override

from clockwright.errors import Refusal
from clockwright.units import ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from controller.core import SchedulerConfig
from controller.core.admission import judge
from controller.core.books import Books
from controller.core.estimator import Estimates
from controller.core.events import ModelAdded, ModelReady, WorkerJoined, WorkerLost
from controller.core.forecast import forecast
from controller.core.link import LinkPlan
from controller.core.policies.batch_clients import BatchClients
from controller.core.policies.clockwork import ClockworkPolicy
from controller.core.state import Batch, Copy, Model, Readiness, Request
from controller.core.sums import SumsInOrder
from tests.kit.core_bench import GPU, GPU2, MS, A, CoreBench, infers

NUM_WAITING = 20_000
NUM_WORKERS = 20


class Counted(list[Request]):
    """A queue that counts how many of its items are looked at."""

    looked = 0

    @override
    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.looked += len(found) if isinstance(key, slice) else 1
        return found

    @override
    def __iter__(self) -> Iterator[Request]:
        for item in super().__iter__():
            self.looked += 1
            yield item


def request_of(model: Model, number: int, due_ns: int, rows: int) -> Request:
    return Request(RequestId(number), model, rows, 0, due_ns, due_ns, due_ns, False, 0)


def long_queue(*, rows: int) -> tuple[Books, Model, Counted]:
    """A model on many workers, with a day's requests waiting."""
    books = Books(ClockworkPolicy(SchedulerConfig()))
    books.add_model(A)
    model = books.models[A]
    estimates = Estimates(load_ns=8 * MS, exec_ns={1: MS, 8: 4 * MS})
    for number in range(NUM_WORKERS):
        worker = WorkerId(f"w{number}")
        link = LinkPlan(least_ns=0, tolerance_ns=MS)
        books.join(worker, GpuKind("k"), 10, link, load_lookahead_ns=MS, now_ns=0)
        books.ready(model, books.workers[worker], Readiness(1, ArchitectureId("a"), estimates))
    for number in range(NUM_WAITING):
        due_ns = 3_600_000 * MS + number * MS
        books.enqueue(request_of(model, number, due_ns, 1 + number % rows))
    queue = Counted(model.queue)
    model.queue = queue
    return books, model, queue


@pytest.mark.parametrize("rows", [1, 3])
def test_a_forecast_looks_at_few_of_those_that_wait(rows: int) -> None:
    _, model, queue = long_queue(rows=rows)
    due_ns = 3_600_000 * MS + NUM_WAITING // 2 * MS
    (found,) = forecast([model], 1, due_ns=due_ns, now_ns=0, together=True)
    assert found.refusal is None
    ahead = sum(1 + number % rows for number in range(NUM_WAITING // 2 + 1))
    assert found.wait_ns == 8 * MS + (ahead + 1) * MS // 2
    assert queue.looked < 100


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_an_arrival_looks_at_few_of_those_that_wait(rows: int, where: str) -> None:
    books, model, queue = long_queue(rows=rows)
    place = {"first": -1, "middle": NUM_WAITING // 2, "last": NUM_WAITING}[where]
    request = request_of(model, -1, 3_600_000 * MS + place * MS, 1)
    verdict = judge(request, 0, books.load_lanes, arriving=True)
    assert verdict.refusal is None
    assert queue.looked < 100


def test_sums_are_those_of_all_that_is_there() -> None:
    draw = random.Random(1)
    sums, known = SumsInOrder(), list[tuple[int, int]]()
    for _ in range(2000):
        if known and draw.random() < 0.4:
            key, number = known.pop(draw.randrange(len(known)))
            sums.add(key, -number)
        else:
            key, number = draw.choice([draw.randrange(1 << 46), draw.randrange(100)]), 1
            number = draw.randint(1, 7)
            known.append((key, number))
            sums.add(key, number)
        asked = draw.choice([draw.randrange(1 << 46), draw.randrange(100), key, key + 1])
        assert sums.before(asked) == sum(number for key, number in known if key < asked)
    assert sums.total == sum(number for _, number in known)


@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_slow_gpu_that_never_is_in_time_gathers_nothing(policy: str) -> None:
    bench = CoreBench(SchedulerConfig(policy=policy, dispatch_delay_ns=0, margin_ns=0))
    bench.tell(ModelAdded(model_id=A))
    for worker, kind, exec_ms in ((GPU, "slow", 100), (GPU2, "fast", 2)):
        bench.tell(WorkerJoined(worker_id=worker, gpu_kind=GpuKind(kind), num_pages=10))
        bench.ready(A, worker, exec_ms={1: exec_ms})
        bench.request(A, slo_ms=100_000)
        bench.request(A, slo_ms=100_000)
        while bench.in_flight:
            bench.finish(next(iter(bench.in_flight.values())))
    bench.wait(2_000 * MS)

    def references() -> int:
        copies = [each for each in gc.get_objects() if type(each) is Copy]
        return max(sys.getrefcount(copy) for copy in copies if copy.worker.worker_id == GPU)

    def serve(count: int) -> None:
        for _ in range(count):
            for command in infers(bench.request(A, slo_ms=50)):
                assert command.worker_id == GPU2
                bench.finish(command)

    serve(10)
    before = references()
    serve(1000)
    assert references() == before


def test_what_workers_said_of_models_that_are_gone_is_forgotten() -> None:
    bench = CoreBench()
    bench.tell(ModelAdded(model_id=A))

    def kept() -> int:
        gc.collect()
        return sum(type(each) is Estimates for each in gc.get_objects())

    before = kept()
    for number in range(2000):
        worker = WorkerId(f"w{number}")
        bench.tell(WorkerJoined(worker_id=worker, gpu_kind=GpuKind(f"k{number}"), num_pages=9))
        bench.tell(
            ModelReady(
                worker_id=worker,
                model_id=A,
                architecture_id=ArchitectureId(f"a{number}"),
                num_pages=1,
                load_ns=MS,
                exec_ns={1: MS},
            )
        )
        bench.tell(WorkerLost(worker_id=worker))
    assert kept() - before < 300


def test_a_model_that_is_ready_on_one_gpu_limits_no_other_models_batch_work() -> None:
    books = Books(ClockworkPolicy(SchedulerConfig()))
    clients = BatchClients(10_000 * MS)
    estimates = Estimates(load_ns=MS, exec_ns={1: MS})
    copies: dict[str, list[Copy]] = {"wide": [], "narrow": []}
    for name, gpus in (("wide", 6), ("narrow", 1)):
        books.add_model(ModelId(name))
        model = books.models[ModelId(name)]
        for number in range(gpus):
            worker_id = WorkerId(f"w{number}")
            if worker_id not in books.workers:
                link = LinkPlan(least_ns=0, tolerance_ns=MS)
                books.join(worker_id, GpuKind("k"), 9, link, load_lookahead_ns=MS, now_ns=0)
            worker = books.workers[worker_id]
            books.ready(model, worker, Readiness(1, ArchitectureId("a"), estimates))
            copies[name].append(Copy(model, worker, 1, estimates, resident=True))

    def taken(now_ms: int) -> int:
        """GPUs that the work of the wide model may run on at once."""
        for copy in copies["wide"]:
            if clients.may_run(Batch(copy, 0, 1, 0, 0, 0), copy.worker, now_ms * MS):
                clients.runs(copy.worker)
        num_taken = len(clients.workers)
        for worker in list(clients.workers):
            clients.release(worker)
        return num_taken

    for period in range(40):
        clients.served += 1000
        taken(101 * period)
    assert taken(5_000) == 6
    (narrow,) = copies["narrow"]
    assert clients.may_run(Batch(narrow, 0, 1, 0, 0, 0), narrow.worker, 10_000 * MS)
    assert taken(10_001) == 6


def test_nobody_is_refused_for_rows_that_are_due_later() -> None:
    books, model, _ = long_queue(rows=3)
    verdict = judge(request_of(model, -1, 20 * MS, 2), 0, books.load_lanes, arriving=True)
    assert verdict.refusal is None
    verdict = judge(request_of(model, -1, 5 * MS, 2), 0, books.load_lanes, arriving=True)
    assert verdict.refusal is Refusal.COLD
