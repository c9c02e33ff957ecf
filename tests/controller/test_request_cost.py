"""What a small request costs the controller around its core, counted in lines: on every machine the same.

Time is measured by `experiments.bench.live`, and the core's own lines by tests/core/test_cost.py. These floors
fail where a good part more is done for each request, or for each turn of the event loop.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import clockwright
import controller.core
from clockwright.v1 import inference_pb2 as pb
from controller.front.admission.entrance import Entrance
from controller.front.services.tracing import Tracing, open_tracing
from tests.kit.front_end import serving_in_thread
from tests.kit.raw_http2 import WINDOW, RawClient, call, frame

PRODUCT = tuple(str(Path(package.__path__[0])) for package in (clockwright, controller))
CORE = str(Path(controller.core.__path__[0]))
# What the loop does now and then, whatever is asked.
BESIDES = ("arrival_clock.py", "entrance.py", "clock_sync.py")

# The client takes an answer, and opens the connection's window.
_OPENED = frame(WINDOW, 0, 0, (100).to_bytes(4, "big"))


@pytest.fixture(autouse=True)
def _loops_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that a slow machine cannot begin within a turn, or within 2 ms, would take lines of their own to wait."""
    monkeypatch.setattr(Entrance, "has_time", lambda *_, **__: True)


class Lines:
    """Counts the product's lines that a thread runs, but for the core's."""

    def __init__(self, only: tuple[str, ...] = ()) -> None:
        self.num_lines = 0
        self._only = only

    def enter(self, frame: FrameType, _event: str, _argument: object) -> Any:  # noqa: ANN401
        name = frame.f_code.co_filename
        if not name.startswith(PRODUCT) or name.startswith(CORE) or name.endswith(BESIDES):
            return None
        return self._line if name.endswith(self._only or "") else None

    def _line(self, _frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401
        self.num_lines += event == "line"
        return self._line


def least_lines(
    tmp_path: Path,
    lines: Lines,
    *,
    together: int,
    front: str,
    name: str = "",
    tracing: Tracing | None = None,
) -> float:
    """Ask so many at once, and again; returns lines per request where they were the fewest."""
    request = pb.ModelInferRequest(model_name="double", id=name, raw_input_contents=[bytes(12)])
    request.parameters["slo_ms"].int64_param = 600_000
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    data = request.SerializeToString()
    with (
        serving_in_thread(tmp_path, front=front, tracing=tracing) as server,
        RawClient(server.address, settings=b"", window=b"") as client,
    ):

        def ask() -> None:
            stream_ids = [client.next_id() for _ in range(together)]
            # As gRPC's library sends it.
            calls = [call(stream_id, data, opened=5) + _OPENED for stream_id in stream_ids]
            client.send(b"".join(calls))
            assert all(end.status == 0 for end in client.wait(stream_ids))

        for _ in range(3):
            ask()
        found = []
        for _ in range(20):
            server.do(lambda _: sys.settrace(lines.enter))
            lines.num_lines = 0
            ask()
            # The turn that sent the answer has ended then.
            server.do(lambda _: sys.settrace(None))
            found.append(lines.num_lines / together)
    # What a timer adds, or a client's acknowledgement, is not in the least of them.
    return min(found)


@pytest.mark.parametrize(("together", "most"), [(1, 742), (8, 483)])
def test_a_small_request_costs_no_more_lines_than_it_did(
    tmp_path: Path, together: int, most: int
) -> None:
    assert least_lines(tmp_path, Lines(), together=together, front="here") < most


@pytest.mark.parametrize(("together", "most"), [(1, 91), (8, 68)])
def test_a_request_of_a_front_apart_costs_no_more_lines_of_its_link_than_it_did(
    tmp_path: Path, together: int, most: int
) -> None:
    lines = Lines(only=("front_link.py", "front_asks.py", "front_memory.py", "descriptions.py"))
    assert least_lines(tmp_path, lines, together=together, front="apart") < most


@pytest.mark.parametrize("front", ["here", "apart"])
def test_a_request_pays_nothing_for_metrics_traces_and_explain_where_nobody_asked_for_them(
    tmp_path: Path, front: str
) -> None:
    lines = Lines(
        only=("tally.py", "page.py", "tracing.py", "past_requests.py", "request_report.py")
    )
    assert least_lines(tmp_path, lines, together=1, front=front) == 0


def test_a_request_with_a_name_that_might_be_traced_costs_few_lines_more(tmp_path: Path) -> None:
    # What metrics cost is in test_metrics.py: they count hundreds of requests at a time.
    lines = Lines(only=("tracing.py", "past_requests.py"))
    tracing = open_tracing("127.0.0.1:9", share=0.0, clock=time.monotonic_ns)
    assert tracing is not None
    try:
        cost = least_lines(
            *(tmp_path, lines), together=1, front="here", name="why", tracing=tracing
        )
    finally:
        tracing.close()
    assert 0 < cost < 7
