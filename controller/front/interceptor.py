"""Asks the authoriser about each call of a grpc.aio server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from typing_extensions import override

from clockwright.errors import DeniedError
from controller.access.authoriser import Authoriser, Credentials, credentials_of
from controller.access.caller import CALLER, Caller
from controller.front.statuses import end, fail, status_of

# Only the stubs are generic.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(slots=True, eq=False)
class _Stream:
    """A call that may go on for long."""

    path: str
    credentials: Credentials
    caller: Caller
    task: asyncio.Task[Any]
    #: Why it is cut; None: it goes on.
    fault: DeniedError | None = None


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls in whose callers may make them, and has streams end whose callers may no more."""

    def __init__(self, authoriser: Authoriser) -> None:
        """Ask this authoriser."""
        self._authoriser = authoriser
        self._streams: set[_Stream] = set()

    @override
    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        path: str = handler_call_details.method
        credentials = credentials_of(handler_call_details.invocation_metadata or ())
        handler: _Handler | None = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            caller = self._authoriser.admit(path, credentials, now_s=time.time())
        except DeniedError as error:
            return _denial(error, path)
        # A call's handler runs in the task that asks here.
        CALLER.set(caller)
        if handler.request_streaming or handler.response_streaming:
            return self._watched(handler, path, credentials, caller)
        return handler

    def look(self) -> None:
        """End the streams of callers who may not go on; called once a second."""
        for stream in self._streams:
            if stream.caller.over and stream.fault is None:
                try:
                    stream.caller = self._authoriser.admit(
                        stream.path, stream.credentials, now_s=time.time()
                    )
                except DeniedError as error:
                    stream.fault = error
                    stream.task.cancel()

    def _watched(
        self, handler: _Handler, path: str, credentials: Credentials, caller: Caller
    ) -> _Handler:
        behaviour: Any = handler.stream_stream or handler.stream_unary or handler.unary_stream

        async def behave(requests: Any, context: Any) -> Any:  # noqa: ANN401
            task: Any = asyncio.current_task()
            stream = _Stream(path, credentials, caller, task)
            self._streams.add(stream)
            try:
                return await behaviour(requests, context)
            except asyncio.CancelledError:
                if stream.fault is None:
                    raise
                task.uncancel()
                return fail(context, stream.fault, method=_name(path))
            finally:
                self._streams.discard(stream)

        if not handler.request_streaming:
            return grpc.unary_stream_rpc_method_handler(behave)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(behave)
        return grpc.stream_unary_rpc_method_handler(behave)


def _denial(error: DeniedError, path: str) -> _Handler:
    # Its status is kept and not the error, which holds frames that hold the call.
    status = status_of(error, method=_name(path))

    async def deny(_requests: Any, context: Any) -> None:  # noqa: ANN401
        end(context, status)

    # As a stream, which ends before the caller has sent anything.
    return grpc.stream_stream_rpc_method_handler(deny)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
