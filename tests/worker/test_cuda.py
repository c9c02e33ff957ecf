"""How a GPU is used, with a stand-in for torch's half of CUDA that has the driver's rules and no kernels."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from worker.devices.cuda import CudaAccelerator, CudaEvent


class FakeStream:
    def __init__(self, device: torch.device, priority: int = 0, device_index: int = 0) -> None:
        self.device, self.priority, self.device_index = device, priority, device_index
        self.cuda_stream = id(self)

    def synchronize(self) -> None:
        pass


class FakePool:
    """Memory that several graphs share; of no use once the last of them is gone."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.is_new = True

    def add(self, graph: FakeGraph) -> None:
        if not self.graphs and not self.is_new:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.is_new = False
        self.graphs.add(graph)


class FakeGraph:
    """A CUDA graph of one fake card: empty, captured or spoilt."""

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self.is_spoilt = False
        self.is_ready = False

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert pool is self._card.pool
        self._card.pool.add(self)
        self._card.capturing = self

    def capture_end(self) -> None:
        self._card.capturing = None
        if self.is_spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def raw_cuda_graph(self) -> int:
        return self._card.raw_graph

    def instantiate(self) -> None:
        assert self._card.capturing is None
        self.is_ready = True

    def replay(self) -> None:
        assert self.is_ready


class FakeCard:
    """What `worker.devices.cuda` calls as `torch.cuda`. Its last device is the one in use."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.num_devices = 1
        self.raw_graph = 1
        #: Index of the GPU that each thread has set.
        self._thread = threading.local()
        self.current = FakeStream(torch.device("cpu"))
        self.capturing: FakeGraph | None = None
        #: Torch's settings.
        self.backends = SimpleNamespace(
            cudnn=SimpleNamespace(), cuda=SimpleNamespace(matmul=SimpleNamespace())
        )

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.num_devices

    def synchronize(self, device: torch.device) -> None:
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def current_device(self) -> int:
        return int(getattr(self._thread, "device_index", 0))

    def set_device(self, device: torch.device) -> None:
        self._thread.device_index = self.num_devices - 1

    def get_device_properties(self, device: torch.device) -> Any:  # noqa: ANN401
        return SimpleNamespace(name="fake", uuid="0")

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"num_device_alloc": 5, "num_alloc_retries": 9}

    def memory_reserved(self, device: torch.device) -> int:
        return 6 << 20

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 3 << 20, 7 << 20

    def graph_pool_handle(self) -> FakePool:
        """Another one each time."""
        self.pool = FakePool()
        return self.pool

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        return FakeStream(device, priority, device_index=self.num_devices - 1)

    def Event(self, *, enable_timing: bool, blocking: bool) -> Any:  # noqa: ANN401
        return SimpleNamespace(is_timed=enable_timing, blocks=blocking)

    def CUDAGraph(self, *, keep_graph: bool) -> FakeGraph:
        assert keep_graph
        return FakeGraph(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class FakeTorch:
    """Torch with a card in it; tensors stay in the host's memory."""

    version = SimpleNamespace(cuda="13.0")

    def __init__(self) -> None:
        self.cuda = FakeCard()
        self.backends = self.cuda.backends

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(torch, name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    fake = FakeTorch()
    monkeypatch.setattr("worker.devices.cuda.torch", fake)
    # Installed ones, which torch for CUDA brings, would ask a real driver about graphs that are none.
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    return fake.cuda


def capture(
    accelerator: CudaAccelerator, work: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    return accelerator.capture(work, rehearsal=lambda: None, tensor_cores=False)


def test_kernels_are_captured_on_an_urgent_stream_and_rehearsed_on_another(card: FakeCard) -> None:
    seen: list[tuple[FakeStream, bool]] = []

    def work() -> None:
        seen.append((card.current, card.capturing is not None))

    CudaAccelerator(0).capture(work, rehearsal=work, tensor_cores=False)
    *rehearsals, (stream, captured) = seen
    assert captured
    assert stream.priority == -1
    assert rehearsals
    for other, captured in rehearsals:
        assert not captured
        assert other is not stream


def test_a_capture_begins_when_three_rehearsals_have_ended(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = CudaAccelerator(0)
    order: list[object] = []
    rehearsed_on: set[FakeStream] = set()

    def rehearsal() -> None:
        rehearsed_on.add(card.current)
        order.append("rehearsal")

    def work() -> None:
        # Onnxruntime's rehearsals are handed to the stream that is captured.
        streams = {*rehearsed_on, card.current}
        assert len(streams) == 2
        assert set(order[3:]) == streams
        order.append("work")

    def synchronize(stream: FakeStream) -> None:
        order.append(stream)

    monkeypatch.setattr(FakeStream, "synchronize", synchronize)
    accelerator.capture(work, rehearsal=rehearsal, tensor_cores=False)
    assert order[:3] == ["rehearsal"] * 3
    assert order[-1] == "work"
    assert order.count("work") == 1


@pytest.mark.parametrize("tensor_cores", [True, False])
def test_float32_products_are_tf32_only_where_the_model_is(
    tensor_cores: bool, card: FakeCard
) -> None:
    accelerator = CudaAccelerator(0)
    seen: list[tuple[bool, bool]] = []

    def work() -> None:
        settings = card.backends
        seen.append((settings.cuda.matmul.allow_tf32, settings.cudnn.allow_tf32))

    # As the model before has left them.
    accelerator.capture(lambda: None, rehearsal=lambda: None, tensor_cores=not tensor_cores)
    accelerator.capture(work, rehearsal=work, tensor_cores=tensor_cores)
    assert set(seen) == {(tensor_cores, tensor_cores)}


@pytest.mark.parametrize("search", [True, False])
def test_cudnn_looks_for_its_fastest_algorithms_where_that_is_asked_for(
    search: bool, card: FakeCard
) -> None:
    CudaAccelerator(0, search=search)
    assert card.backends.cudnn.benchmark is search


def test_only_the_kernels_of_an_urgent_stream_go_first(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)
    priorities: list[int] = []
    for stream in (accelerator.stream(urgent=True), accelerator.stream()):
        stream.run(lambda: priorities.append(card.current.priority))
    assert priorities == [-1, 0]


def test_too_little_memory_of_a_card_is_said_with_what_there_is(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = CudaAccelerator(0)

    def full(*arguments: object, **settings: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(MemoryError, match=r"^cuda:fake: 16 MiB are needed, 3 of 7 MiB are free$"):
        accelerator.device_memory(16 << 20)


def test_a_fault_is_told_in_its_first_words(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = CudaAccelerator(0)
    assert accelerator.fault() is None

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand much more")

    with monkeypatch.context() as patch:
        patch.setattr(card, "synchronize", fail)
        words = "cuda:fake: CUDA error: an illegal memory access was encountered"
        assert accelerator.fault() == words
    monkeypatch.setattr(torch, "zeros", torch.ones)
    assert accelerator.fault() == "cuda:fake: 0 + 1 is not 1 on it"


def test_a_cards_memory_is_counted_by_its_driver(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)
    assert accelerator.num_allocations() == 5
    assert accelerator.reserved_bytes() == 6 << 20
    assert accelerator.free_bytes() == 3 << 20


def test_onnxruntime_works_on_the_stream_that_is_captured_and_does_not_wait_for_it(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = CudaAccelerator(0)
    providers = ["CPUExecutionProvider"]
    monkeypatch.setattr("worker.devices.cuda.ort.get_available_providers", lambda: providers)
    assert accelerator.onnxruntime_place() is None
    providers.append("CUDAExecutionProvider")
    place = accelerator.onnxruntime_place()
    assert place is not None
    captured: list[FakeStream] = []
    capture(accelerator, lambda: captured.append(card.current))
    assert [place.options["user_compute_stream"]] == [str(each.cuda_stream) for each in captured]
    assert place.options["use_tf32"] == "0"
    assert place.run_options["disable_synchronize_execution_providers"] == "1"


def test_when_all_graphs_are_gone_others_can_be_captured(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)
    kernels = [capture(accelerator) for _ in range(2)]
    assert len(card.pool.graphs) == 3
    kernels.clear()
    gc.collect()
    capture(accelerator)()


def test_what_went_wrong_in_a_capture_is_told_and_it_has_ended(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)

    def work() -> None:
        assert card.capturing is not None
        card.capturing.is_spoilt = True
        raise RuntimeError("cuDNN has no such kernel")

    with pytest.raises(RuntimeError, match="cuDNN has no such kernel"):
        capture(accelerator, work)
    assert card.capturing is None
    capture(accelerator)


def test_a_card_is_not_lost_because_an_action_failed_while_another_thread_captures(
    card: FakeCard,
) -> None:
    accelerator = CudaAccelerator(0)
    captures, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        captures.set()
        assert goes_on.wait(60)

    with ThreadPoolExecutor(2) as pool:
        captured = pool.submit(capture, accelerator, work)
        assert captures.wait(60)
        fault = pool.submit(accelerator.fault)
        # Time enough to fail at once, were it not to wait.
        assert not wait([fault], timeout=0.05).done
        goes_on.set()
        assert fault.result(60) is None
        captured.result(60)


def test_a_capture_that_failed_leaves_a_card_that_can_be_asked(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)

    def work() -> None:
        raise RuntimeError("cuDNN has no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        capture(accelerator, work)
    assert accelerator.fault() is None


def test_a_lanes_thread_works_on_the_card_of_its_stream_from_its_first_kernel_on(
    card: FakeCard,
) -> None:
    card.num_devices = 3
    stream = CudaAccelerator(2).stream()
    devices: list[int] = []
    thread = threading.Thread(
        target=stream.run, args=(lambda: devices.append(card.current_device()),)
    )
    thread.start()
    thread.join()
    assert devices == [2]


def test_only_waits_for_patient_events_sleep(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)
    for event, blocks in ((accelerator.event(), False), (accelerator.event(patient=True), True)):
        assert isinstance(event, CudaEvent)
        assert event.event == SimpleNamespace(is_timed=True, blocks=blocks)


class FakeDriver(ModuleType):
    """`cuda.bindings.driver`: graphs are lists of the types of their nodes."""

    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=0, CU_GRAPH_NODE_TYPE_HOST=3)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.graphs: dict[int, list[int]] = {}

    def cuGraphGetNodes(
        self, graph: int, numNodes: int = 0
    ) -> tuple[int, list[int] | None, int | None]:
        if graph not in self.graphs:
            return 1, None, None
        nodes = self.graphs[graph]
        return 0, nodes[:numNodes], numNodes or len(nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, int]:
        return 0, node


def test_kernels_that_call_functions_of_the_host_are_refused(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    driver.graphs = {1: [], 2: [0, 0], 3: [0, 3]}
    bindings = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    accelerator = CudaAccelerator(0)
    # 4: the driver does not say, and the graph is taken.
    for card.raw_graph in (1, 2, 4):
        capture(accelerator)()
    card.raw_graph = 3
    with pytest.raises(RuntimeError, match="call functions of the host"):
        capture(accelerator)


def test_without_bindings_of_cuda_kernels_are_taken_as_they_are(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    # With the bindings this graph is refused: its second node calls a function of the host.
    card.raw_graph = 3
    captured: list[bool] = []
    replay = capture(CudaAccelerator(0), lambda: captured.append(card.capturing is not None))
    assert captured == [True]
    replay()
