"""Virtual time, the hosts and processes that live in it, and their event loops and threads.

One thread of the machine runs everything. A process is an event loop, whose turns are events of the world, and
threads, which are greenlets: whatever would block lets the world go on and comes back when it is due. So a
process can stand still, be slow, or vanish between two turns, and no order depends on the machine.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import heapq
import inspect
import os
import random
import sqlite3
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import greenlet
from typing_extensions import override

from clockwright.errors import ClockwrightError
from clockwright.units import NS_PER_S, NS_PER_US
from controller.selection.stores.sqlite import SqliteDatabase
from experiments.faults.disk import Disk, close_database

T = TypeVar("T")

# Callbacks of a turn take no time; between two turns of a loop passes so much.
_TURN_NS = 20 * NS_PER_US
# What writes to a disk, as threads are handed it.
_WRITES = frozenset({"add", "finish", "write", "begin_term", "keep_digests"})
# Likewise in the store of applications, where it has the names of those who ask for it.
_STORE_WRITES = ("Store.save", "Store.remove_application", "Store.erase")
# No task awaits more on its way out, when nothing that it awaits goes well.
_AWAITS_MAX = 9
# Waking a thread or a loop takes so long, at most.
_WAKE_NS = 50 * NS_PER_US


class Violation(AssertionError):
    """Something that must hold did not."""


@dataclass(eq=False)
class Host:
    """A machine: its clocks, its disk, and how much memory it gives."""

    name: str
    world: World
    #: The monotonic clock is `base_ns` at the time `since_ns` and goes `drift_ppm` too fast from there on.
    base_ns: int = 0
    since_ns: int = 0
    drift_ppm: int = 0
    #: What the wall clock is ahead of the monotonic one.
    wall_ns: int = 0
    #: Until then the disk takes nothing, and until then no shared memory is given.
    disk_full_until_ns: int = 0
    no_memory_until_ns: int = 0
    #: How long work in a thread takes in addition to what it waits for.
    work_ns: int = 100 * NS_PER_US
    #: Its clocks have jumped.
    has_jumped: bool = False
    processes: list[WorldProcess] = field(default_factory=list)
    disk: Disk = field(default_factory=Disk)

    def clock_ns(self) -> int:
        """The monotonic clock."""
        passed_ns = self.world.now_ns - self.since_ns
        return self.base_ns + passed_ns + passed_ns * self.drift_ppm // 10**6

    def true_ns(self, clock_ns: int) -> int:
        """When the monotonic clock will show a time, rounded up."""
        passed_ns = clock_ns - self.base_ns
        return self.since_ns + -(-passed_ns * 10**6 // (10**6 + self.drift_ppm))

    def before_work(self, work: Callable[..., object], args: Sequence[object]) -> None:
        """Fail what would write, while the disk is full.

        Raises:
            OSError: it is.
            sqlite3.OperationalError: it is, and a database would be written to.
        """
        if self.world.now_ns < self.disk_full_until_ns:
            if isinstance(work, functools.partial):
                # asyncio.to_thread has put it first.
                work = work.args[0] if work.args else work.func
            is_store = getattr(work, "__qualname__", "").startswith(_STORE_WRITES)
            if is_store and not _is_on_disk(work):
                return
            if is_store or getattr(work, "__name__", "") in _WRITES:
                if is_store or (args and isinstance(args[0], sqlite3.Connection)):
                    raise sqlite3.OperationalError("database or disk is full")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lose_power(self) -> None:
        """All that runs here ends, unheard, with what was not synced; the monotonic clock begins again."""
        for process in list(self.processes):
            process.kill(silently=True)
        self.disk.lose_power(self.world.random)
        clock_ns = self.clock_ns()
        self.base_ns, self.since_ns = NS_PER_S, self.world.now_ns
        self.wall_ns += clock_ns - self.base_ns

    def jump(self, by_ns: int) -> None:
        """The monotonic clock jumps forward."""
        self.has_jumped = True
        self.base_ns, self.since_ns = self.clock_ns() + by_ns, self.world.now_ns
        for process in self.processes:
            process.wake(self.world.now_ns)


def _is_on_disk(work: Callable[..., object]) -> bool:
    """Whether what a store does for itself is written here, and not by a Redis elsewhere."""
    store = inspect.getclosurevars(work).nonlocals["self"]
    return isinstance(store._database, SqliteDatabase)


class World:
    """One run, in the thread that makes it. Other threads of the machine are none of its processes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.draw = self.random.random
        self.now_ns = NS_PER_S
        self.hosts: dict[str, Host] = {}
        self.processes: list[WorldProcess] = []
        #: What happened, a line each, with its time.
        self.transcript: list[str] = []
        self.num_events = 0
        #: Asserted between two events.
        self.checks: list[Callable[[], None]] = []
        #: A path that transcripts do not show, because it is another each time.
        self.folder = ""
        self.violation: BaseException | None = None
        self.over = False
        self.hub = greenlet.getcurrent()
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._sequence = 0
        self._last_number = 0
        self._current: WorldProcess | None = None
        self._thread = threading.get_ident()

    @property
    def is_here(self) -> bool:
        """Whether the world's thread asks."""
        return threading.get_ident() == self._thread

    @property
    def current(self) -> WorldProcess | None:
        """The process whose code asks; None: code of no process of the world does."""
        return self._current if threading.get_ident() == self._thread else None

    @current.setter
    def current(self, process: WorldProcess | None) -> None:
        self._current = process

    @property
    def running(self) -> WorldProcess:
        """The process whose code asks, where no other process can."""
        assert self.current is not None, "no process of the world asks"
        return self.current

    def door(self, inside: Callable[..., T], outside: Callable[..., T]) -> Callable[..., T]:
        """Make what does one thing for the world's processes, and another for all other code."""

        def door(*args: Any, **kwargs: Any) -> T:
            return (inside if self.current is not None else outside)(*args, **kwargs)

        return door

    def below(self, limit: int) -> int:
        """Draw a number from 0 up to a limit."""
        return int(self.draw() * limit)

    def number(self) -> int:
        """Make a number that no other thing of this world has."""
        self._last_number += 1
        return self._last_number

    def host(self, name: str) -> Host:
        """Find or make a host, whose clock is its own."""
        if name not in self.hosts:
            draw = self.random
            base_ns = draw.randrange(1, 10**6) * NS_PER_S // 10
            wall_ns = 1_700_000_000 * NS_PER_S + draw.randrange(NS_PER_S)
            drift_ppm = draw.choice([0, 0, 20, -20, 45, -45])
            self.hosts[name] = Host(name, self, base_ns, self.now_ns, drift_ppm, wall_ns)
        return self.hosts[name]

    def say(self, words: str) -> None:
        """Note what happened."""
        if self.folder:
            words = words.replace(self.folder, "")
        self.transcript.append(f"{self.now_ns / 1e6:12.6f} ms  {words}")

    def at(self, time_ns: int, event: Callable[[], object]) -> None:
        """Have something happen; in the past is now."""
        self._sequence += 1
        heapq.heappush(self._events, (max(time_ns, self.now_ns), self._sequence, event))

    def after(self, delay_ns: int, event: Callable[[], object]) -> None:
        """Have something happen later."""
        self.at(self.now_ns + delay_ns, event)

    def run(self, until_ns: int) -> None:
        """Let time pass.

        Raises:
            Violation: a check failed, or a process ended by an error.
        """
        events = self._events
        while events and events[0][0] <= until_ns:
            self.now_ns, _, event = heapq.heappop(events)
            self.num_events += 1
            event()
            if self.violation is not None:
                raise self.violation
            for check in self.checks:
                check()
        self.now_ns = max(self.now_ns, until_ns)

    def fail(self, reason: str) -> None:
        """Something that must hold did not."""
        if self.violation is None:
            self.violation = Violation(f"{reason}, at {self.now_ns / 1e6:.3f} ms")

    def end(self) -> None:
        """Let go of everything that still runs, unheard."""
        self.over = True
        for process in self.processes:
            process.vanish()


class WorldProcess:
    """A process: an event loop and threads, on a host."""

    def __init__(self, world: World, host: Host, name: str) -> None:
        self.world, self.host, self.name = world, host, name
        self.pid = 1000 + world.number()
        self.alive = True
        #: Set by `freeze`: nothing of it runs before.
        self.frozen_until_ns = 0
        #: How many times longer its turns take.
        self.slowness = 1
        #: Called when it has ended, however.
        self.on_end: list[Callable[[], None]] = []
        #: Sockets that its kernel closes.
        self.sockets: dict[Any, None] = {}
        #: Real files that the kernel closes, and databases that are open, with their paths.
        self.files: set[int] = set()
        self.databases: dict[sqlite3.Connection, str] = {}
        self.loop = WorldLoop(self)  # type: ignore[abstract]  # what is not asked for is missing
        self.main_task: asyncio.Task[Any] | None = None
        self.threads: dict[WorldThread, None] = {}
        self._turn_at_ns: int | None = None
        self._in_turn = False
        self._not_before_ns = 0
        world.processes.append(self)
        host.processes.append(self)

    def __hash__(self) -> int:
        return self.pid

    def start(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine; the process ends with it."""

        def begin() -> None:
            self.main_task = self.loop.create_task(main())
            self.main_task.add_done_callback(self._main_over)

        self.loop.call_soon(begin)

    def _main_over(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.say(f"{self.name} ends: {type(error).__name__}: {error}")
        if isinstance(error, Exception) and not isinstance(error, ClockwrightError):
            self.world.fail(f"{self.name} failed: {''.join(traceback.format_exception(error))}")
        self.kill()

    # --- faults -------------------------------------------------------------------------------

    def freeze(self, for_ns: int) -> None:
        """Nothing of it runs for a while, as after SIGSTOP."""
        self.frozen_until_ns = max(self.frozen_until_ns, self.world.now_ns + for_ns)

    def signal(self, number: int) -> None:
        """Send it a signal, as soon as its loop turns; one that it does not listen to ends it."""
        handler = self.loop.signal_handlers.get(number)
        if handler is None:
            self.kill()
        else:
            callback, args = handler
            self.loop.call_soon(callback, *args)

    def kill(self, *, silently: bool = False) -> None:
        """It ends at once, as by SIGKILL: its kernel closes its sockets.

        Args:
            silently: its host lost power, and others hear of it only by asking.
        """
        if not self.alive:
            return
        self.alive = False
        self.host.processes.remove(self)
        for sock in list(self.sockets):
            sock.close(silently=silently)
        self._close_files(lost_power=silently)
        for told in self.on_end:
            told()

    def _close_files(self, *, lost_power: bool = False) -> None:
        """Let go of its files; databases lie there as they were, with what was being written."""
        for connection, path in self.databases.items():
            close_database(connection, path, self.world.random, lost_power=lost_power)
        self.databases.clear()
        for fd in list(self.files):
            os.close(fd)
            PROCESS_FILES.pop(fd, None)
        self.files.clear()

    def vanish(self) -> None:
        """Let go of its threads and tasks; nothing of what they say on their way out is heard."""
        self.alive = False
        self._close_files()
        self.world.current = self
        asyncio._set_running_loop(self.loop)
        try:
            for thread in list(self.threads):
                thread.abandon()
            self.threads.clear()
            self.loop.abandon()
        finally:
            asyncio._set_running_loop(None)
            self.world.current = None

    # --- running ------------------------------------------------------------------------------

    def wake(self, at_ns: int) -> None:
        """Have a turn of the loop not later than that."""
        if self._in_turn or (self._turn_at_ns is not None and self._turn_at_ns <= at_ns):
            return
        at_ns = max(at_ns, self._not_before_ns)
        self._turn_at_ns = at_ns
        self.world.at(at_ns, lambda: self._turn(at_ns))

    def wake_soon(self) -> None:
        """Have a turn after what waking a process takes."""
        if not self._in_turn:
            self.wake(self.world.now_ns + self.world.below(_WAKE_NS))

    def _turn(self, at_ns: int) -> None:
        if not self.alive or at_ns != self._turn_at_ns:
            return
        world = self.world
        if world.now_ns < self.frozen_until_ns:
            self._turn_at_ns = at_ns = self.frozen_until_ns
            world.at(at_ns, lambda: self._turn(at_ns))
            return
        self._turn_at_ns = None
        self._in_turn = True
        world.current = self
        asyncio._set_running_loop(self.loop)
        try:
            self.loop.turn()
        finally:
            asyncio._set_running_loop(None)
            world.current = None
            self._in_turn = False
        if self.alive:
            self._not_before_ns = world.now_ns + _TURN_NS * self.slowness
            due_ns = self.loop.due_ns()
            if due_ns is not None:
                self.wake(due_ns)

    def run_thread(self, thread: WorldThread) -> None:
        """Let a thread go on, now or when the process does again."""
        world = self.world
        if not self.alive:
            return
        if world.now_ns < self.frozen_until_ns:
            world.at(self.frozen_until_ns, lambda: self.run_thread(thread))
            return
        world.current = self
        try:
            thread.resume()
        finally:
            world.current = None


class _Greenlet(greenlet.greenlet):
    thread: WorldThread


class WorldThread:
    """A thread of a process. Its code runs until it blocks."""

    def __init__(
        self, process: WorldProcess, target: Callable[..., object], args: tuple[Any, ...] = ()
    ) -> None:
        self.process = process
        self.is_over = False
        self._number = process.world.number()
        self._target, self._args = target, args
        self._greenlet = _Greenlet(self._run, process.world.hub)
        self._greenlet.thread = self
        self._greenlet.gr_context = contextvars.copy_context()
        self._joining: list[Callable[[], None]] = []
        #: Counts blocks: a wake-up of an earlier one is void.
        self._blocks = 0

    def __hash__(self) -> int:
        return self._number

    def start(self) -> None:
        """Begin, soon."""
        self.process.threads[self] = None
        self.wake_after(self.process.world.below(_WAKE_NS))

    def resume(self) -> None:
        """Go on until it blocks again, or ends."""
        self._greenlet.switch()

    def _run(self) -> None:
        try:
            self._target(*self._args)
        except greenlet.GreenletExit:
            return
        except Exception:
            self.process.world.fail(
                f"a thread of {self.process.name} failed: {traceback.format_exc()}"
            )
        finally:
            self.is_over = True
            self.process.threads.pop(self, None)
            for told in self._joining:
                told()

    def wake_after(self, delay_ns: int) -> None:
        """Go on after a while, unless something else has woken it before."""
        blocks = self._blocks

        def wake() -> None:
            if blocks == self._blocks and not self.is_over:
                self.process.run_thread(self)

        self.process.world.after(delay_ns, wake)

    def wake(self) -> None:
        """Go on, after what waking a thread takes."""
        self.wake_after(self.process.world.below(_WAKE_NS))

    def waker(self) -> Callable[[], None]:
        """Make what wakes it from the block that it is about to begin, and from no later one."""
        blocks = self._blocks

        def wake() -> None:
            if blocks == self._blocks:
                self.wake()

        return wake

    def block(self, for_ns: int | None = None) -> None:
        """Called by the thread itself: let the world go on until another thread wakes it, or it is time."""
        if for_ns is not None:
            self.wake_after(for_ns)
        self.process.world.hub.switch()
        self._blocks += 1

    def when_over(self, told: Callable[[], None]) -> None:
        """Have something called when it has ended."""
        self._joining.append(told)

    def abandon(self) -> None:
        """Let go of it."""
        self._joining.clear()
        if self._greenlet:
            self._greenlet.throw(greenlet.GreenletExit)


class Executor:
    """In place of a pool of one thread: what loops ask for is done in turn, what is submitted otherwise at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self._queue: deque[WorldThread] = deque()
        self._wakers: dict[WorldThread, Callable[[], None]] = {}

    def queue(self, thread: WorldThread) -> None:
        """Take in a thread of the world that does a loop's work, behind those that are here."""
        self._queue.append(thread)

    def wait_for_turn(self, thread: WorldThread) -> None:
        """Block that thread until those before it are done."""
        while self._queue[0] is not thread:
            self._wakers[thread] = thread.waker()
            thread.block()

    def done(self) -> None:
        """The first thread has done its work."""
        self._queue.popleft()
        if self._queue and (wake := self._wakers.pop(self._queue[0], None)) is not None:
            wake()

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do it."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing is left to be done."""


def current_thread() -> WorldThread | None:
    """The thread that runs; None: it is a loop's."""
    running = greenlet.getcurrent()
    return running.thread if isinstance(running, _Greenlet) else None


def running_thread() -> WorldThread:
    """The thread that runs, where it may have to wait."""
    thread = current_thread()
    assert thread is not None, "a loop would block"
    return thread


class _Task(asyncio.Task[T]):
    """A task whose place in a set does not depend on where it lies in memory."""

    def __init__(self, number: int, coro: Any, **more: Any) -> None:
        self._number = number
        super().__init__(coro, **more)

    @override
    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[T]):
    """Likewise a future."""

    def __init__(self, number: int, loop: WorldLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    @override
    def __hash__(self) -> int:
        return self._number


class WorldLoop(asyncio.AbstractEventLoop):
    """The event loop of a process. Its time is its host's monotonic clock."""

    def __init__(self, process: WorldProcess) -> None:
        self.process = process
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._readers: dict[Any, asyncio.Handle] = {}
        self._writers: dict[Any, asyncio.Handle] = {}
        #: Sockets that something may be done with now.
        self._marked: dict[Any, None] = {}
        self._tasks: dict[_Task[Any], None] = {}
        self.signal_handlers: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    # --- time ---------------------------------------------------------------------------------

    @override
    def time(self) -> float:
        return self.process.host.clock_ns() / NS_PER_S

    @override
    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        if not self._ready:
            self.process.wake_soon()
        self._ready.append(handle)
        return handle

    @override
    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    @override
    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        when_ns = self.process.host.clock_ns() + round(delay * NS_PER_S)
        return self._call_at_ns(when_ns, callback, args, context)

    @override
    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._call_at_ns(round(when * NS_PER_S), callback, args, context)

    def _call_at_ns(
        self, when_ns: int, callback: Any, args: tuple[Any, ...], context: Any
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when_ns / NS_PER_S, callback, args, self, context)
        heapq.heappush(self._timers, (when_ns, self._world.number(), handle))
        self.process.wake(self.process.host.true_ns(when_ns))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    # --- turns --------------------------------------------------------------------------------

    def turn(self) -> None:
        """Look at sockets and timers, and run what is ready now."""
        ready = self._ready
        if self._marked:
            due = []
            for sock in list(self._marked):
                handles = self._handles(sock)
                due += handles
                if not handles:
                    del self._marked[sock]
            if len(due) > 1:
                self._world.random.shuffle(due)
            ready.extend(due)
        timers = self._timers
        now_ns = self.process.host.clock_ns()
        while timers and timers[0][0] <= now_ns:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
            if not self.process.alive:
                return

    def due_ns(self) -> int | None:
        """When the next turn is to be; None: when another thread wakes it."""
        if self._ready or any([self._handles(sock) for sock in self._marked]):
            return self._world.now_ns
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        return self.process.host.true_ns(timers[0][0]) if timers else None

    def abandon(self) -> None:
        """Let go of all tasks."""
        self._ready.clear()
        self._timers.clear()
        self._readers.clear()
        self._writers.clear()
        self._marked.clear()
        while self._tasks:
            task, _ = self._tasks.popitem()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # `close` would leave what awaits on its way out half done, for the collector: that would run the rest
            # of it outside of the world, where a number of a file of this process is somebody else's.
            for _ in range(_AWAITS_MAX):
                try:
                    task.get_coro().throw(asyncio.CancelledError)
                except (Exception, asyncio.CancelledError):
                    break
        self._ready.clear()
        self._timers.clear()

    # --- sockets ------------------------------------------------------------------------------

    def mark(self, sock: Any) -> None:
        """Look at a socket in the next turns, until there is nothing to do with it."""
        self._marked[sock] = None

    def _handles(self, sock: Any) -> list[asyncio.Handle]:
        handles = []
        if (reader := self._readers.get(sock)) is not None and sock.is_readable():
            handles.append(reader)
        if (writer := self._writers.get(sock)) is not None and sock.is_writable():
            handles.append(writer)
        return handles

    @override
    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        fd = self._world_socket(fd)
        self._readers[fd] = asyncio.Handle(callback, args, self, None)
        self._marked[fd] = None
        if fd.is_readable():
            self.process.wake_soon()

    @override
    def remove_reader(self, fd: Any) -> bool:
        handle = self._readers.pop(self._world_socket(fd), None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    @override
    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self._writers[fd] = asyncio.Handle(callback, args, self, None)
        self._marked[fd] = None
        if fd.is_writable():
            self.process.wake_soon()

    @override
    def remove_writer(self, fd: Any) -> bool:
        handle = self._writers.pop(fd, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def _world_socket(self, fd: Any) -> Any:
        return PROCESS_FILES[fd] if isinstance(fd, int) else fd

    # --- the rest of what asyncio asks for ----------------------------------------------------

    @override
    def create_future(self) -> _Future[Any]:
        return _Future(self._world.number(), self)

    @override
    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> _Task[Any]:
        task: _Task[Any] = _Task(
            self._world.number(), coro, loop=self, name=name or "task", context=context
        )
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: Any) -> None:
        self._tasks.pop(task, None)

    @override
    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        process = self.process
        # A pool of one thread works in the order in which it is asked; Python's own has many.
        executor = executor if isinstance(executor, Executor) else None

        def tell(result: object, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            result: object = None
            fault: Exception | None = None
            thread = running_thread()
            if executor is not None:
                executor.wait_for_turn(thread)
            thread.block(self._world.random.randrange(2 * process.host.work_ns))
            try:
                process.host.before_work(func, args)
                result = func(*args)
            except Exception as error:
                fault = error
            if executor is not None:
                executor.done()
            self.call_soon_threadsafe(tell, result, fault)

        thread = WorldThread(process, work)
        if executor is not None:
            executor.queue(thread)
        thread.start()
        return future

    @override
    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self.signal_handlers[sig] = callback, args

    @override
    def remove_signal_handler(self, sig: int) -> bool:
        return self.signal_handlers.pop(sig, None) is not None

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def is_running(self) -> bool:
        return True

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._world.over or not self.process.alive:
            return
        error = context.get("exception")
        words = "".join(traceback.format_exception(error)) if error is not None else ""
        self._world.fail(f"{self.process.name}: {context.get('message')}: {words}")


class ProcessFile:
    """Readable when a process has ended, as Linux's pidfd."""

    def __init__(self, process: WorldProcess, watcher: WorldProcess) -> None:
        self._process = process
        self._number = process.world.number()

        def tell() -> None:
            watcher.loop.mark(self)
            watcher.wake_soon()

        process.on_end.append(tell)

    def __hash__(self) -> int:
        return self._number

    def is_readable(self) -> bool:
        return not self._process.alive


#: By the number of a real file, which the product closes.
PROCESS_FILES: dict[int, ProcessFile] = {}
