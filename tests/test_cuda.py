"""How a GPU is used, with a stand-in for torch's half of CUDA that has the driver's rules and no kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.cuda import CudaAccelerator


class FakeStream:
    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.device_index = device.index or 0

    def synchronize(self) -> None:
        pass


class FakeGraph:
    """Of one card."""

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self.stream: FakeStream | None = None

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert pool is self._card.pool
        self._card.capturing = self
        self.stream = self._card.current

    def capture_end(self) -> None:
        self._card.capturing = None

    def replay(self) -> None:
        pass


class FakeCard:
    """What `worker.cuda` calls as `torch.cuda`."""

    def __init__(self) -> None:
        self.pool = object()
        self.current = FakeStream(torch.device("cpu"))
        self.capturing: FakeGraph | None = None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        pass

    def get_device_properties(self, device: torch.device) -> Any:  # noqa: ANN401
        return SimpleNamespace(name="fake", uuid="0")

    def graph_pool_handle(self) -> object:
        return self.pool

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        return FakeStream(device, priority)

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
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
