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

from worker.cuda import CudaAccelerator, CudaEvent


class FakeStream:
    def __init__(self, device: torch.device, priority: int = 0, device_index: int = 0) -> None:
        self.device, self.priority, self.device_index = device, priority, device_index

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
    """Of one card."""

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
    """What `worker.cuda` calls as `torch.cuda`. Its last device is the one in use."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.num_devices = 1
        self.raw_graph = 1
        #: Of which GPU each thread is.
        self._thread = threading.local()
        self.current = FakeStream(torch.device("cpu"))
        self.capturing: FakeGraph | None = None

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

    def graph_pool_handle(self) -> FakePool:
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
        self.backends = SimpleNamespace(
            cudnn=SimpleNamespace(), cuda=SimpleNamespace(matmul=SimpleNamespace())
        )

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(torch, name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    fake = FakeTorch()
    monkeypatch.setattr("worker.cuda.torch", fake)
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


class FakeRuntime(ModuleType):
    """`cuda.bindings.runtime`: graphs are lists of the types of their nodes."""

    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeKernel=0, cudaGraphNodeTypeHost=3)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.graphs: dict[int, list[int]] = {}

    def cudaGraphGetNodes(
        self, graph: int, numNodes: int = 0
    ) -> tuple[int, list[int] | None, int | None]:
        if graph not in self.graphs:
            return 1, None, None
        nodes = self.graphs[graph]
        return 0, nodes[:numNodes], numNodes or len(nodes)

    def cudaGraphNodeGetType(self, node: int) -> tuple[int, int]:
        return 0, node


def test_kernels_that_call_functions_of_the_host_are_refused(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime()
    runtime.graphs = {1: [], 2: [0, 0], 3: [0, 3]}
    bindings = SimpleNamespace(runtime=runtime)
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
    capture(CudaAccelerator(0))()
