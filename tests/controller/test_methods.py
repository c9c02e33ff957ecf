"""The table of methods says what each server answers, and each handler takes what the table says."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from controller.front.http.calls import Directly
from controller.front.methods import INFERENCE, METHODS, AtFront, Method, OnStream, bind
from controller.front.services.control import ControlService
from controller.front.services.forwarding import Forwarding
from controller.front.services.inference import InferenceService
from controller.front.services.repository import RepositoryService
from controller.process import standby
from tests.kit.front_end import serving

OWNERS = (ControlService, InferenceService, RepositoryService)


def test_a_handler_takes_and_gives_the_messages_that_the_table_names() -> None:
    compared = 0
    for method in METHODS.values():
        for owner in OWNERS:
            handler: Any = owner.__dict__.get(method.handler_name)
            if (
                handler is None
                or isinstance(handler, property)
                or method.takes_stream
                or method.gives_stream
            ):
                continue
            hints = typing.get_type_hints(handler)
            assert hints["request" if "request" in hints else "_"] is method.request, method.path
            assert issubclass(method.response, hints["return"]), method.path
            compared += 1
    assert compared > 25


async def test_a_controller_answers_all_methods_but_those_for_its_parts(tmp_path: Path) -> None:
    async with serving(tmp_path) as front_end:
        assert front_end.server is not None
        leadership = {path for path in METHODS if path.endswith("/GetTerm")}
        assert front_end.server.methods.keys() == METHODS.keys() - leadership
        for served in front_end.server.methods.values():
            streams = served.method.takes_stream or served.method.gives_stream
            direct = isinstance(served.handler, Directly)
            assert direct or isinstance(served.handler, OnStream) == streams


def test_a_front_answers_all_that_are_not_absent_there() -> None:
    limits: Any = None
    channel: Any = None
    forwarding = Forwarding(channel, door=limits, client_shm=False)
    answered = forwarding.handlers() | bind(INFERENCE, InferenceService)
    assert answered.keys() == {
        method for method in METHODS.values() if method.at_front is not AtFront.ABSENT
    }


def test_a_controller_that_stands_by_answers_what_the_table_says_and_refuses_the_rest() -> None:
    handlers = standby.handlers()
    assert handlers.keys() == set(METHODS.values())

    def refuses(method: Method) -> bool:
        handler = handlers[method]
        return isinstance(handler, OnStream | Directly)

    assert {each for each in METHODS.values() if not refuses(each)} == {
        each for each in METHODS.values() if each.at_standby
    }
