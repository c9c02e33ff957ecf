"""Captured work on an NVIDIA GPU: a CUDA graph with a few nodes that change from launch to launch.

torch captures and instantiates the graph. The driver then changes single nodes of the instance: where a copy begins
and ends, which event is recorded, and whether a node does anything. Changes affect later launches only. From the
launch on, the graph's events count as recorded and not done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from clockwright.errors import ConfigError
from worker.devices.accelerator import CapturedWork, DeviceCopy, Event, Piece, Stream


class CudaEvent(Event):
    """A CUDA event with a time."""

    def __init__(self, device: torch.device, *, patient: bool = False) -> None:
        # External: inside of a capture it becomes a node that records it, and no order within the graph.
        self.event = torch.cuda.Event(enable_timing=True, blocking=patient, external=True)
        # Before its first record torch has no event that a node could be given.
        self.event.record(torch.cuda.default_stream(device))

    @override
    def synchronize(self) -> None:
        self.event.synchronize()

    @override
    def is_done(self) -> bool:
        return bool(self.event.query())

    @override
    def ns_since(self, earlier: Event) -> int:
        assert isinstance(earlier, CudaEvent)
        return max(int(1e6 * earlier.event.elapsed_time(self.event)), 1)


class CudaStream(Stream):
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    @override
    def run(self, work: Callable[[], object]) -> None:
        # Every thread begins on the first GPU, and would take memory there for nothing.
        if torch.cuda.current_device() != self.stream.device_index:
            torch.cuda.set_device(self.stream.device)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            work()

    @override
    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)


def load_driver(device: torch.device) -> Any:  # noqa: ANN401
    """Import the driver's own functions, which torch does not offer. Raises ConfigError if the package is not there."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"device '{device}': found no cuda.bindings ({error}); expected the package cuda-bindings "
            "of torch's CUDA version, which clockwright[gpu] brings"
        ) from None
    return driver


class CudaWork(CapturedWork):
    """Pieces of work in a graph; first captured, then instantiated, then launched."""

    def __init__(self, driver: Any) -> None:  # noqa: ANN401
        self._driver = driver
        self._context = _check(driver.cuCtxGetCurrent())
        #: Kept: changes name the nodes of the graph that was captured.
        self._graph: torch.cuda.CUDAGraph | None = None
        self._exec: Any = None
        self._parts: list[_Part] = []

    def capture(self, stream: torch.cuda.Stream, pieces: Sequence[Piece | None]) -> None:
        """Hand the pieces to a stream that is being captured, which is torch's current one.

        Raises RuntimeError if a copy or an event did not become the node that can be changed.
        """
        before: set[int] = set()
        for piece in pieces:
            if isinstance(piece, DeviceCopy):
                piece.target.copy_(piece.source, non_blocking=True)
            elif isinstance(piece, CudaEvent):
                piece.event.record(stream)
            elif callable(piece):
                piece()
            info = _check(self._driver.cuStreamGetCaptureInfo(stream.cuda_stream))
            nodes = self._nodes(info[2])
            new = [node for node in nodes if int(node) not in before]
            before.update(map(int, new))
            self._parts.append(self._part(piece, new))

    def instantiate(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the graph that the pieces were captured in ready to be launched.

        Raises RuntimeError if its kernels call functions of the host, and each launch would call them again:
        onnxruntime before 1.31 frees memory in such a function (onnxruntime#32081).
        """
        host = self._driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST
        if any(self._type(node) == host for part in self._parts for node in part.nodes):
            raise RuntimeError("its kernels call functions of the host, which cannot be replayed")
        graph.instantiate()
        self._graph = graph
        self._exec = self._driver.CUgraphExec(graph.raw_cuda_graph_exec())

    @override
    def launch(self, stream: Stream, pieces: Sequence[Piece | None]) -> None:
        assert isinstance(stream, CudaStream)
        # A thread begins without a context.
        _check(self._driver.cuCtxSetCurrent(self._context))
        for part, piece in zip(self._parts, pieces, strict=True):
            self._change(part, piece)
        _check(self._driver.cuGraphLaunch(self._exec, stream.stream.cuda_stream))

    def _change(self, part: _Part, piece: Piece | None) -> None:
        """Set a piece's nodes to the next launch's work; the driver is called for differences only."""
        driver, is_there = self._driver, piece is not None
        if is_there is not part.is_enabled:
            part.is_enabled = None  # should a change fail
            for node in part.nodes:
                _check(driver.cuGraphNodeSetEnabled(self._exec, node, int(is_there)))
            part.is_enabled = is_there
        if isinstance(piece, DeviceCopy):
            ends = _ends(piece)
            if ends != part.now:
                part.copy.dstDevice, part.copy.srcDevice = ends
                (node,) = part.nodes
                _check(
                    driver.cuGraphExecMemcpyNodeSetParams(
                        self._exec, node, part.copy, self._context
                    )
                )
                part.now = ends
        elif isinstance(piece, CudaEvent) and piece is not part.now:
            (node,) = part.nodes
            event = piece.event.cuda_event
            _check(driver.cuGraphExecEventRecordNodeSetEvent(self._exec, node, event))
            part.now = piece

    def _part(self, piece: Piece | None, nodes: list[Any]) -> _Part:
        types, names = self._driver.CUgraphNodeType, [self._type(node) for node in nodes]
        if isinstance(piece, DeviceCopy):
            if names != [types.CU_GRAPH_NODE_TYPE_MEMCPY]:
                raise RuntimeError(f"a copy was captured as {names}, expected one node that copies")
            params = _check(self._driver.cuGraphMemcpyNodeGetParams(nodes[0]))
            return _Part(nodes, _ends(piece), params)
        if isinstance(piece, CudaEvent) and names != [types.CU_GRAPH_NODE_TYPE_EVENT_RECORD]:
            raise RuntimeError(f"an event was captured as {names}, expected one node that records")
        return _Part(nodes, piece, None)

    def _nodes(self, graph: Any) -> list[Any]:  # noqa: ANN401
        _, count = _check(self._driver.cuGraphGetNodes(graph))
        nodes, _ = _check(self._driver.cuGraphGetNodes(graph, count))
        return list(nodes)

    def _type(self, node: Any) -> Any:  # noqa: ANN401
        return _check(self._driver.cuGraphNodeGetType(node))


class _Part:
    """The nodes of a piece, and what they would do at the next launch."""

    def __init__(self, nodes: list[Any], now: object, copy: Any) -> None:  # noqa: ANN401
        self.nodes = nodes
        #: None: some of the nodes may be, and others not.
        self.is_enabled: bool | None = True
        #: The event, or both ends of the copy.
        self.now = now
        #: The copy as the driver has it.
        self.copy = copy


def _ends(copy: DeviceCopy) -> tuple[int, int]:
    return copy.target.data_ptr(), copy.source.data_ptr()


def _check(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return the values of a driver function without its status: None, one value or several.

    Raises RuntimeError if it failed; with the driver's name for the reason.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA error: {status.name}")
    return values[0] if len(values) == 1 else values
