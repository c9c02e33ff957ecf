"""How a GPU is used, with a stand-in for torch's half of CUDA that has the driver's rules and no kernels."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clockwright.errors import ConfigError
from worker.devices.accelerator import DeviceCopy, Piece
from worker.devices.cuda import CudaAccelerator
from worker.devices.cuda_graph import CudaEvent, CudaWork


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
        #: The type of each node, and what it works with.
        self.nodes: list[tuple[str, Any]] = []

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert pool is self._card.pool
        self._card.pool.add(self)
        self._card.capturing = self

    def capture_end(self) -> None:
        self._card.capturing = None
        if self.is_spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def instantiate(self) -> None:
        assert self._card.capturing is None

    def raw_cuda_graph_exec(self) -> str:
        return "executable"


class FakeEvent:
    def __init__(self, card: FakeCard, *, blocks: bool) -> None:
        self._card, self.blocks = card, blocks
        self.cuda_event: object = None

    def record(self, stream: FakeStream) -> None:
        self.cuda_event = self
        if self._card.capturing is not None:
            self._card.capturing.nodes.append(("EVENT_RECORD", self))


class FakeMemory:
    """A place in the card's memory."""

    def __init__(self, card: FakeCard, address: int) -> None:
        self._card, self._address = card, address

    def data_ptr(self) -> int:
        return self._address

    def copy_(self, source: FakeMemory, *, non_blocking: bool) -> None:
        assert self._card.capturing is not None
        params = SimpleNamespace(dstDevice=self.data_ptr(), srcDevice=source.data_ptr())
        self._card.capturing.nodes.append((self._card.copies_are, params))


class FakeDriver:
    """`cuda.bindings.driver`. A node is its place in the graph that was captured last, from 1 on."""

    CUgraphNodeType = SimpleNamespace(
        **{f"CU_GRAPH_NODE_TYPE_{name}": name for name in ("HOST", "MEMCPY", "EVENT_RECORD")}
    )

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self._graph = FakeGraph(card)
        #: What was changed and launched.
        self.calls: list[tuple[Any, ...]] = []
        #: The change that fails, counted from now on from 1; 0: none.
        self.refuses = 0

    def CUgraphExec(self, executable: str) -> str:
        return executable

    def cuCtxGetCurrent(self) -> tuple[int, str]:
        return 0, "context"

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:
        assert context == "context"
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        assert self._card.capturing is not None
        self._graph = self._card.capturing
        return 0, "active", 1, self._graph, [], [], 0

    def cuGraphGetNodes(self, graph: FakeGraph, count: int = 0) -> tuple[int, list[int], int]:
        return 0, list(range(1, count + 1)), len(graph.nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, str]:
        return 0, self._graph.nodes[node - 1][0]

    def cuGraphMemcpyNodeGetParams(self, node: int) -> tuple[int, Any]:
        return 0, self._graph.nodes[node - 1][1]

    def cuGraphExecMemcpyNodeSetParams(
        self, executable: str, node: int, params: SimpleNamespace, context: str
    ) -> tuple[Any]:
        return self._change("copy", node, params.dstDevice, params.srcDevice)

    def cuGraphExecEventRecordNodeSetEvent(
        self, executable: str, node: int, event: object
    ) -> tuple[Any]:
        return self._change("event", node, event)

    def cuGraphNodeSetEnabled(self, executable: str, node: int, is_enabled: int) -> tuple[Any]:
        return self._change("enabled", node, is_enabled)

    def cuGraphLaunch(self, executable: str, stream: int) -> tuple[Any]:
        return self._change("launch")

    def _change(self, *call: object) -> tuple[Any]:
        if self.refuses:
            self.refuses -= 1
            if not self.refuses:
                return (FakeStatus(1),)
        self.calls.append(call)
        return (0,)


class FakeStatus(int):
    name = "CUDA_ERROR_INVALID_VALUE"


class FakeCard:
    """What `worker.devices.cuda` calls as `torch.cuda`. Its last device is the one in use."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.num_devices = 1
        self.driver = FakeDriver(self)
        #: The nodes that copies become.
        self.copies_are = "MEMCPY"
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

    def default_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def Event(self, *, enable_timing: bool, blocking: bool, external: bool) -> FakeEvent:
        assert enable_timing
        assert external
        return FakeEvent(self, blocks=blocking)

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
    monkeypatch.setattr("worker.devices.cuda_graph.torch", fake)
    bindings = SimpleNamespace(driver=fake.cuda.driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return fake.cuda


def capture(accelerator: CudaAccelerator, *pieces: Piece | None) -> CudaWork:
    return accelerator.capture(pieces, rehearsal=lambda: None, tensor_cores=False)


def test_kernels_are_captured_on_an_urgent_stream_and_rehearsed_on_another(card: FakeCard) -> None:
    seen: list[tuple[FakeStream, bool]] = []

    def work() -> None:
        seen.append((card.current, card.capturing is not None))

    CudaAccelerator(0).capture([work], rehearsal=work, tensor_cores=False)
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
    accelerator.capture([work], rehearsal=rehearsal, tensor_cores=False)
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
    accelerator.capture([], rehearsal=lambda: None, tensor_cores=not tensor_cores)
    accelerator.capture([work], rehearsal=work, tensor_cores=tensor_cores)
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
    capture(accelerator)


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
        assert event.event.blocks is blocks
        # It can be given to a node.
        assert event.event.cuda_event is not None


def copy(card: FakeCard, target: int, source: int) -> DeviceCopy:
    ends: Any = FakeMemory(card, target), FakeMemory(card, source)
    return DeviceCopy(*ends)


def kernels(card: FakeCard, *types: str) -> Callable[[], None]:
    def work() -> None:
        assert card.capturing is not None
        card.capturing.nodes.extend((each, None) for each in types)

    return work


def test_a_launch_changes_what_is_not_as_it_was_and_hands_all_over_in_one_call(
    card: FakeCard,
) -> None:
    accelerator = CudaAccelerator(0)
    stream, calls = accelerator.stream(), card.driver.calls
    begin, end, other = (accelerator.event() for _ in range(3))
    gather, compute = kernels(card, "KERNEL", "KERNEL"), kernels(card, "KERNEL", "MEMCPY")
    work = capture(accelerator, begin, copy(card, 10, 20), gather, compute, None, end)
    assert not calls
    work.launch(stream, [begin, copy(card, 10, 20), gather, compute, None, end])
    assert calls == [("launch",)]
    calls.clear()
    work.launch(stream, [begin, copy(card, 10, 30), None, compute, None, other])
    assert isinstance(other, CudaEvent)
    assert calls == [
        ("copy", 2, 10, 30),
        ("enabled", 3, 0),
        ("enabled", 4, 0),
        ("event", 7, other.event),
        ("launch",),
    ]
    calls.clear()
    work.launch(stream, [begin, None, gather, compute, None, other])
    assert calls == [("enabled", 2, 0), ("enabled", 3, 1), ("enabled", 4, 1), ("launch",)]
    calls.clear()
    # Where the copy went is not forgotten meanwhile.
    work.launch(stream, [begin, copy(card, 10, 30), gather, compute, None, other])
    assert calls == [("enabled", 2, 1), ("launch",)]


def test_a_change_that_the_driver_refuses_is_told_and_made_before_the_next_launch(
    card: FakeCard,
) -> None:
    accelerator = CudaAccelerator(0)
    work = capture(accelerator, copy(card, 10, 20))
    card.driver.refuses = 1
    with pytest.raises(RuntimeError, match="CUDA error: CUDA_ERROR_INVALID_VALUE"):
        work.launch(accelerator.stream(), [copy(card, 10, 30)])
    assert not card.driver.calls
    work.launch(accelerator.stream(), [copy(card, 10, 30)])
    assert card.driver.calls == [("copy", 1, 10, 30), ("launch",)]


def test_a_piece_that_was_switched_off_in_part_is_whole_at_the_next_launch(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)
    gather = kernels(card, "KERNEL", "KERNEL")
    work = capture(accelerator, gather)
    card.driver.refuses = 2
    with pytest.raises(RuntimeError, match="CUDA error"):
        work.launch(accelerator.stream(), [None])
    assert card.driver.calls == [("enabled", 1, 0)]
    work.launch(accelerator.stream(), [gather])
    assert ("enabled", 1, 1) in card.driver.calls


def test_kernels_that_call_functions_of_the_host_are_refused(card: FakeCard) -> None:
    accelerator = CudaAccelerator(0)
    capture(accelerator, kernels(card, "KERNEL", "MEMCPY"))
    with pytest.raises(RuntimeError, match="call functions of the host"):
        capture(accelerator, kernels(card, "KERNEL", "HOST"))


def test_a_copy_that_cannot_be_changed_later_is_refused(card: FakeCard) -> None:
    card.copies_are = "KERNEL"
    with pytest.raises(RuntimeError, match=r"copy was captured as \['KERNEL'\], expected one node"):
        capture(CudaAccelerator(0), copy(card, 10, 20))


def test_a_gpu_without_bindings_of_cuda_is_refused(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        ConfigError, match=r"no cuda\.bindings \(.*\); expected the package cuda-bin"
    ):
        CudaAccelerator(0)
