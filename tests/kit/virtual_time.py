"""The controller's shells on virtual time: an event loop whose clock jumps to the next event.

The simulator drives the scheduler alone. Here the real runtime, catalogue and applications run unchanged, as fast
as the processor can and with the same outcome on any machine. Work takes no time unless a worker says so.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from typing_extensions import override

from clockwright.units import NS_PER_S

T = TypeVar("T")

_BEGIN_NS = 1000 * NS_PER_S


class _Jumping(selectors.DefaultSelector):
    """Sets the clock to the next timer, where a loop would sleep until then."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = _BEGIN_NS

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("virtual time stands still: no timer is set and nothing is ready")
        ready = super().select(0)
        if not ready and timeout > 0:
            # Rounded up, or the loop finds its timer a moment away and asks again, for ever.
            self.now_ns += max(round(timeout * NS_PER_S), 0) + 1
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)

    @override
    def time(self) -> float:
        return self.clock.now_ns / NS_PER_S

    @override
    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Wait for the thread, or the machine would decide how far the clock gets meanwhile."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args) if executor is None else executor.submit(func, *args).result()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work())


def now_ns() -> int:
    """The running loop's present: the clock to give to a `Runtime` that lives in it."""
    return round(asyncio.get_running_loop().time() * NS_PER_S)
