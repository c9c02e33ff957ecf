"""Commands and clients at a server that lies: escapes in every text, numbers that are none, statuses that are garbage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from clockwright import Client
from clockwright.cli.main import main
from clockwright.errors import ClockwrightError, ProtocolError, RefusedError
from clockwright.v1 import control_pb2 as control
from clockwright.v1 import inference_pb2 as oip

#: A title for the terminal, a clear screen, a line that nobody wrote, and rich's own markup.
WORDS = "\x1b]0;PWNED\x07\x1b[2J\r\nall is well\u202e[/no][red]" + "x" * 300


def fill(message: Message, number: float, depth: int = 4) -> Message:
    """Have each text of a message be hostile, and each number of one kind."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        many = field.is_repeated
        here = getattr(message, field.name)
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            if depth:
                fill(here.add() if many else here, number, depth - 1)
            continue
        value: Any = WORDS
        if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            value = number
        elif field.cpp_type == field.CPPTYPE_BOOL:
            value = True
        elif field.cpp_type == field.CPPTYPE_ENUM:
            value = 0
        elif field.type == field.TYPE_BYTES:
            value = b"\x00"
        elif field.cpp_type != field.CPPTYPE_STRING:
            most = 31 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 62
            value = 0 if number == 0 else (1 << most) - 1
        if many:
            here.append(value)
        else:
            setattr(message, field.name, value)
    return message


@contextmanager
def hostile_server(answer: Callable[[type[Message], Any], Message]) -> Iterator[str]:
    """A server of all of our methods that answers as it is told; gives HOST:PORT."""
    server = grpc.server(ThreadPoolExecutor(2))
    for file in (control, oip):
        for service in file.DESCRIPTOR.services_by_name.values():
            methods = {}
            for method in service.methods:
                if method.client_streaming or method.server_streaming:
                    continue
                asked: Any = getattr(file, method.input_type.name)
                answered: Any = getattr(file, method.output_type.name)

                def respond(_: object, context: Any, kind: Any = answered) -> Message:  # noqa: ANN401
                    return answer(kind, context)

                methods[method.name] = grpc.unary_unary_rpc_method_handler(
                    respond, asked.FromString, answered.SerializeToString
                )
            handler = grpc.method_handlers_generic_handler(service.full_name, methods)
            server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


Run = Callable[..., str]

COMMANDS = (
    ("status",),
    ("top", "--once", "--interval-s", "0.1"),
    ("explain", "1"),
    ("models", "list"),
    ("models", "pin", "m"),
    ("app", "list"),
    ("quotas", "list"),
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; gives all that it printed."""

    def run_command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["clockwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        told = capsys.readouterr()
        # A text is what the interpreter prints as it ends.
        ended = caught.value.code if isinstance(caught.value.code, str) else ""
        return told.out + told.err + ended

    return run_command


def is_fit_for_a_terminal(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_server_says_reaches_a_terminal_escaped_and_breaks_no_command(
    command: tuple[str, ...], number: float, run: Run
) -> None:
    with hostile_server(lambda kind, _: fill(kind(), number)) as address:
        told = run(*command, "--server", address)
    assert is_fit_for_a_terminal(told), repr(told)
    assert "error" not in told
    assert command[0] == "quotas" or "PWNED" in told  # a column of those is narrow
    assert "all is well" not in told.splitlines()


def refusing(details: bytes, words: str = WORDS) -> Callable[[type[Message], Any], Message]:
    def refuse(kind: type[Message], context: Any) -> Message:  # noqa: ANN401
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        context.set_details(words)
        context.set_trailing_metadata((("grpc-status-details-bin", details),))
        return kind()

    return refuse


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_why_a_server_refuses_reaches_a_terminal_escaped(
    command: tuple[str, ...], run: Run
) -> None:
    with hostile_server(refusing(b"")) as address:
        told = run(*command, "--server", address)
    assert is_fit_for_a_terminal(told), repr(told)
    assert "all is well" not in told.splitlines()


def details_of(figure: str, reason: str = "OVERLOADED") -> bytes:
    status = status_pb2.Status(code=8, message="OVERLOADED: no time")
    info = error_details_pb2.ErrorInfo(reason=reason, metadata={"slo_ns": figure, "good": "7"})
    status.details.add().Pack(info)
    message: bytes = status.SerializeToString()
    return message


@pytest.mark.parametrize("figure", ["\u00b2", "9" * 5000, "--5", "", "\u0661"])
def test_a_figure_of_a_refusal_that_is_no_number_is_left_out(figure: str) -> None:
    with (
        hostile_server(refusing(details_of(figure), "OVERLOADED: no time")) as address,
        Client(address) as client,
        pytest.raises(RefusedError) as caught,
    ):
        client.infer("m", {"x": np.zeros((1, 1), np.float32)}, slo_ms=1000)
    assert caught.value.figures == {"good": 7}


def test_details_that_are_garbage_are_no_reason_to_raise_anything_else() -> None:
    with (
        hostile_server(refusing(b"\xff\xff\xff")) as address,
        Client(address) as client,
        pytest.raises(ClockwrightError),
    ):
        client.infer("m", {"x": np.zeros((1, 1), np.float32)}, slo_ms=1000)


def describing(shape: tuple[int, ...], datatype: str) -> Callable[[type[Message], Any], Message]:
    """A server that describes one input."""

    def answer(kind: type[Message], _: object) -> Message:
        response = kind()
        if isinstance(response, oip.ModelMetadataResponse):
            response.inputs.add(name="\x1b[2Jx", datatype=datatype, shape=shape)
        return response

    return answer


@pytest.mark.parametrize("command", [("infer", "m", "--random"), ("load", "m", "--rate", "5")])
@pytest.mark.parametrize(
    ("shape", "datatype"),
    [
        ((-1, 1 << 40), "FP32"),
        ((1 << 62, 1 << 40), "FP32"),
        ((1 << 31, 1 << 31), "INT8"),
        ((-1, -7), "FP32"),
        ((1,) * 5000, "FP32"),
        ((-1, 3), "\x1b[2J"),
    ],
)
def test_inputs_that_no_client_can_make_are_refused_by_their_name(
    shape: tuple[int, ...], datatype: str, command: tuple[str, ...], run: Run
) -> None:
    with hostile_server(describing(shape, datatype)) as address:
        told = run(*command, "--server", address)
    assert "x1b[2Jx': " in told
    assert is_fit_for_a_terminal(told), repr(told)


@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_an_answer_that_is_none_is_the_servers_fault_by_name(number: float) -> None:
    with (
        hostile_server(lambda kind, _: fill(kind(), number)) as address,
        Client(address) as client,
        pytest.raises(ProtocolError, match="violates the protocol"),
    ):
        client.infer("m", {"x": np.zeros((1, 1), np.float32)}, slo_ms=1000)
