"""The standard library's doors to the machine lead into a world while it runs."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import os
import secrets
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

import controller.front.http.http2_server
import controller.models.state_file
import controller.selection.stores
import worker.action_thread
import worker.controller_socket
import worker.lane_threads
from clockwright.units import NS_PER_S
from experiments.faults import rpc, threads
from experiments.faults.sockets import Socket, Waiter, WorldNetwork, create_connection
from experiments.faults.world import (
    PROCESS_FILES,
    Executor,
    ProcessFile,
    World,
    running_thread,
)
from experiments.faults.writer import start_writer


@contextmanager
def interposed(world: World, folder: Path) -> Iterator[WorldNetwork]:
    """Have the standard library's doors lead into a world.

    What no world's process calls goes where it always went.

    Args:
        world: whose.
        folder: temporary files lie there.
    """
    network = WorldNetwork(world)
    real_open, real_close, real_memfd = os.open, os.close, os.memfd_create
    real_connect, real_write, real_sync = sqlite3.connect, os.write, os.fsync

    def monotonic_ns() -> int:
        return world.running.host.clock_ns()

    def wall_ns() -> int:
        return monotonic_ns() + world.running.host.wall_ns

    def sleep(seconds: float) -> None:
        running_thread().block(round(seconds * NS_PER_S))

    def open_process(number: int, _flags: int = 0) -> int:
        for process in world.processes:
            if process.pid == number and process.alive:
                fd = open_file(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                PROCESS_FILES[fd] = ProcessFile(process, world.running)
                return fd
        raise ProcessLookupError(3, "No such process")

    def shared_memory(name: str, flags: int = 0) -> int:
        if world.now_ns < world.running.host.no_memory_until_ns:
            raise OSError(12, "Cannot allocate memory")
        return kept(real_memfd(name, flags))

    def kept(fd: int) -> int:
        """Note a file that goes with its process."""
        world.running.files.add(fd)
        return fd

    def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return kept(real_open(path, flags, mode, dir_fd=dir_fd))

    def write_file(fd: int, data: Any) -> int:
        process = world.running
        if fd not in process.files:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if world.now_ns < process.host.disk_full_until_ns:
            # Some of it may find room.
            if world.below(2) or len(data) < 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: len(data) // 2]
        return real_write(fd, data)

    def sync_file(fd: int) -> None:
        real_sync(fd)
        world.running.host.disk.sync(fd)

    def close_file(fd: int) -> None:
        process = world.running
        if process.alive or fd in process.files:
            process.files.discard(fd)
            real_close(fd)

    def connect(path: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        own = world.running
        for process in world.processes:
            others = process.databases.values() if process.alive else ()
            if str(path) in others and str(path) != ":memory:" and process is not own:
                world.fail(f"{own.name} opens the state of {process.name}, which runs")
        connection: sqlite3.Connection = real_connect(path, *args, **kwargs)
        own.databases[connection] = str(path)
        own.host.disk.databases.add(str(path))
        return connection

    def addresses(host: str, port: int, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]

    def randomness(num_bytes: int = 32) -> bytes:
        return world.random.randbytes(num_bytes)

    with ExitStack() as stack:

        def put(owner: Any, name: str, inside: Callable[..., Any]) -> None:
            door = world.door(inside, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, door))

        stack.enter_context(mock.patch.object(Socket, "network", network, create=True))
        put(time, "monotonic_ns", monotonic_ns)
        put(time, "monotonic", lambda: monotonic_ns() / NS_PER_S)
        put(time, "time_ns", wall_ns)
        put(time, "time", lambda: wall_ns() / NS_PER_S)
        put(time, "clock_gettime_ns", lambda _: monotonic_ns())
        put(time, "sleep", sleep)
        put(os, "getpid", lambda: world.running.pid)
        put(os, "memfd_create", shared_memory)
        put(os, "open", open_file)
        put(os, "close", close_file)
        put(os, "write", write_file)
        put(os, "fsync", sync_file)
        put(asyncio, "create_subprocess_exec", start_writer)
        put(sqlite3, "connect", connect)
        put(os, "pidfd_open", open_process)
        names = map("{:08x}".format, count(1))
        put(tempfile, "_get_candidate_names", lambda: names)
        put(tempfile, "_gettempdir", lambda: str(folder))
        put(socket, "gethostname", lambda: world.running.host.name)
        put(socket, "socket", Socket)
        put(socket, "create_connection", create_connection)
        put(socket, "getaddrinfo", addresses)
        put(worker.action_thread, "SocketWaiter", Waiter)
        put(secrets, "token_bytes", randomness)
        put(secrets, "token_hex", lambda num_bytes=32: randomness(num_bytes).hex())
        # What the world's processes have left behind is collected when the world says so.
        for name in ("collect", "enable", "freeze"):
            real = getattr(gc, name)
            own = functools.partial(_only_here, world, real)
            stack.enter_context(mock.patch.object(gc, name, own))
        put(grpc.aio, "insecure_channel", lambda address, **_: rpc.Channel(address))
        # Its threads are the world's, which need not spin: they wake when they are due.
        for module in (worker.lane_threads, worker.action_thread, worker.controller_socket):
            stack.enter_context(mock.patch.object(module, "threading", threads.Threading(world)))
        stack.enter_context(mock.patch.object(worker.lane_threads, "SPIN_NS", 0))
        # These ask the kernel about the machine's threads.
        for module in (worker.lane_threads, worker.action_thread):
            put(module, "tune_thread", lambda **_: None)
        for module in (controller.selection.stores, controller.models.state_file):
            put(module, "ThreadPoolExecutor", Executor)
        # No process of the world is ever busy: turns take no time.
        put(controller.front.http.http2_server, "thread_used_ns", lambda: lambda: 0)
        yield network
    network.drop(list(network.files))


def _only_here(world: World, work: Callable[..., Any], *args: Any) -> Any:
    """Do something in the world's thread, and nothing in others."""
    return work(*args) if world.is_here else 0
