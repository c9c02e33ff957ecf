"""The worker link over the loopback, with a scripted worker at the other end."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import msgspec
import pytest
from typing_extensions import override

from clockwright.client.operator import control_stub
from clockwright.errors import ModelError, ProtocolError, Refusal, RefusedError
from clockwright.units import ActionId, WorkerId
from clockwright.v1 import control_pb2
from clockwright.wire import frames
from clockwright.wire import peer as wire
from clockwright.wire import worker_messages as pb
from clockwright.wire.actions import Infer
from clockwright.wire.bulk import Buffer
from clockwright.wire.leadership import Term
from clockwright.wire.tensors import TensorSpec, Variable
from controller.core import SchedulerConfig
from controller.core.events import Event, ModelReady
from controller.links import joining, worker_link, worker_models
from controller.links.worker_models import CHUNK_BYTES, CHUNKS_IN_FLIGHT
from controller.models.entry import Entry, ModelState
from controller.port import Ask, Course
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig
from controller.runtime import Runtime
from tests.kit import asking
from tests.kit.asking import Reply
from tests.kit.scripted_worker import LoopbackWorker

MS = 1_000_000
S = 1000 * MS
ROW = b"0123456789abcdef"


def make_models(directory: Path, *names: str, data: bytes = b"onnx") -> Path:
    for name in names:
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "model.onnx").write_bytes(data)
    return directory


def config(directory: Path, **changes: Any) -> ControllerConfig:  # noqa: ANN401
    values: dict[str, Any] = {
        "port": 0,
        "models_dir": directory,
        "heartbeat_interval_ms": 20,
        # A worker that a test holds back does not hang, however slow the machine is.
        "scheduler": SchedulerConfig(action_timeout_ns=1000 * S),
    }
    return ControllerConfig(**{**values, **changes})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is told to leave hears of it, also when the machine stands still meanwhile."""
    monkeypatch.setattr(worker_link, "LEAVE_LIMIT_S", 60.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so; the test's own limit ends it when it never is."""
    while not condition():  # noqa: ASYNC110 - any condition, not one that signals
        await asyncio.sleep(0.005)


async def until_ready(controller: Controller, name: str = "m") -> Entry:
    def ready() -> bool:
        model = controller.catalogue.find(name)
        return model is not None and controller.catalogue.state(model) is ModelState.READY

    await until(ready)
    model = controller.catalogue.find(name)
    assert model is not None
    return model


def submit(
    controller: Controller, model: Entry, data: bytes = ROW, *, slo_ns: int = 30 * S
) -> asyncio.Future[Reply]:
    runtime = controller.runtime
    return asking.submit(
        runtime, model.model_id, [data], Ask(0, 1, runtime.clock(), slo_ns, explain=True)
    )


def course_of(answer: Reply) -> Course:
    assert answer.told.course is not None
    return answer.told.course


async def test_a_worker_is_offered_all_models_gets_the_files_and_answers(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * CHUNK_BYTES + 17)
    make_models(tmp_path, "a", "b", data=data)
    (tmp_path / "b" / "1" / "empty.bin").write_bytes(b"")
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        for name in ("a", "b"):
            model = await until_ready(controller, name)
            answer = await submit(controller, model)
            assert [bytes(output) for output in answer.outputs] == [ROW]
            assert course_of(answer).worker == "w0"
        assert worker.files[hashlib.sha256(data).hexdigest()] == data
        assert worker.files[hashlib.sha256(b"").hexdigest()] == b""
        offers = await worker.wait_for("model_offer", 2)
        assert [offer.profile for offer in offers] == ["a", "b"]


@pytest.mark.parametrize("skew_ns", [-(10**15), 0, 3600 * S])
async def test_windows_and_results_are_translated_between_the_clocks(
    tmp_path: Path, skew_ns: int
) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, skew_ns=skew_ns) as worker,
    ):
        model = await until_ready(controller)
        before_ns = controller.runtime.clock()
        answer = await submit(controller, model)
        (load,) = await worker.wait_for("load_weights")
        (infer,) = await worker.wait_for("infer")
        # Apart from the skew both ends have one clock, so the estimate errs by the delays alone. A
        # minute is far less than any skew here; test_clock_sync.py tests the estimate's precision.
        slack_ns = 60 * S
        for action in (load, infer):
            assert abs(action.earliest_ns - skew_ns - before_ns) < slack_ns
            assert action.latest_ns > action.earliest_ns
        assert abs(course_of(answer).exec_begin_ns) < slack_ns
        (_, run) = controller.runtime.telemetry.actions
        assert abs(run.received_ns - before_ns) < slack_ns
        link = controller.links.links[0]
        assert link.clock.offset_ns is not None
        assert abs(link.clock.offset_ns - skew_ns) < slack_ns
        assert link.clock.round_trip_ns > 0


async def test_big_tensors_come_back_as_they_went(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(4 * 150_528)
    spec = TensorSpec("x", "FP32", (3, 224, 224))

    class Images(LoopbackWorker):
        async def ready(self, model_id: str, **_: object) -> None:
            await super().ready(model_id, inputs=[spec], outputs=[spec])

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        Images(controller.port),
    ):
        model = await until_ready(controller)
        answers = await asyncio.gather(*(submit(controller, model, data) for _ in range(9)))
        assert all(answer.outputs[0] == data for answer in answers)


async def test_files_never_have_more_than_a_few_chunks_in_flight(tmp_path: Path) -> None:
    make_models(tmp_path, "m", data=bytes(8 * CHUNK_BYTES))

    class Slow(LoopbackWorker):
        async def _store(self, chunk: pb.ModelChunk, content: bytes) -> None:
            pass

    async with (
        running(config(tmp_path)) as controller,
        Slow(controller.port) as worker,
    ):
        await worker.wait_for("model_chunk", CHUNKS_IN_FLIGHT)
        # Twenty heartbeats later no further chunk has come.
        beats = len(worker.received["heartbeat"])
        await worker.wait_for("heartbeat", beats + 20)
        assert len(worker.received["model_chunk"]) == CHUNKS_IN_FLIGHT


async def test_a_file_that_changed_since_it_was_listed_is_refused_by_its_hash(
    tmp_path: Path,
) -> None:
    make_models(tmp_path, "cut", "gone", "fine", data=bytes(2 * CHUNK_BYTES))
    (tmp_path / "cut" / "1" / "model.onnx").write_bytes(bytes(2 * CHUNK_BYTES + 1))
    (tmp_path / "gone" / "1" / "model.onnx").write_bytes(b"gone")
    async with running(config(tmp_path)) as controller:
        (tmp_path / "cut" / "1" / "model.onnx").write_bytes(b"short")
        (tmp_path / "gone" / "1" / "model.onnx").unlink()
        async with LoopbackWorker(controller.port):
            await until_ready(controller, "fine")
            await until(lambda: controller.catalogue.ready)
            reasons = {m.name: controller.catalogue.reason(m) for m in controller.catalogue.models}
            assert reasons["cut"] == "sha256 differs"
            assert "model.onnx cannot be read" in reasons["gone"]


async def test_a_worker_of_another_protocol_version_is_rejected_naming_both(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as controller:
        async with LoopbackWorker(controller.port, version=99) as worker:
            await worker.ended.wait()
            assert worker.end == (
                f"the worker speaks protocol version 99, the controller {wire.PROTOCOL_VERSION}"
            )
        assert controller.links.links == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("worker_id", "", "worker_id ''"),
        ("worker_id", "a b", "worker_id 'a b'"),
        ("device", "", "device is empty"),
        ("gpu_kind", "", "gpu_kind is empty"),
        ("num_pages", 0, "num_pages is 0, expected at least 1"),
        ("page_bytes", 0, "page_bytes is 0"),
        ("page_bytes", 2**63, f"num_pages * page_bytes is {2**66}, expected {2**50} at most"),
        ("arena_bytes", 2**63, f"arena_bytes is {2**63}, expected {2**50} at most"),
        ("device", "cpu\x1b[2J", r"device is 'cpu\x1b[2J', 7 characters, expected 200 at most"),
        ("gpu_kind", "x" * 201, "201 characters, expected 200 at most, all printable"),
        ("host", "here\n2026-11-22 INFO root: all is well", r"host is 'here\n2026"),
        ("host", "\u202e1", r"host is '\u202e1'"),
    ],
)
async def test_a_registration_that_makes_no_sense_is_rejected_with_the_reason(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    async with running(config(tmp_path)) as controller:
        worker = LoopbackWorker(controller.port)
        setattr(worker.register, field, value)
        async with worker:
            await worker.ended.wait()
            assert message in worker.end


async def test_kinds_of_workers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "KINDS_MAX", 1)
    async with running(config(tmp_path)) as controller:
        async with LoopbackWorker(controller.port, "a"):
            await until(lambda: len(controller.links.links) == 1)
        other = LoopbackWorker(controller.port, "b")
        other.register.gpu_kind = "another"
        async with other:
            await other.ended.wait()
            assert (
                "kind 'another' would be kind of worker number 2, expected 1 at most" in other.end
            )
        async with LoopbackWorker(controller.port, "c"):
            await until(lambda: len(controller.links.links) == 1)


async def test_a_name_in_use_is_rejected_but_the_same_process_may_come_back(tmp_path: Path) -> None:
    # The name is free after ten heartbeats without an answer. At this interval no busy machine loses ten.
    settings = config(make_models(tmp_path, "m"), heartbeat_interval_ms=500)
    async with (
        running(settings) as controller,
        LoopbackWorker(controller.port, pid=1) as first,
    ):
        model = await until_ready(controller)
        async with LoopbackWorker(controller.port, pid=2) as other:
            await other.ended.wait()
            assert "there is a worker w0 already, process 1 on host here" in other.end
        await submit(controller, model)
        async with LoopbackWorker(controller.port, pid=1) as again:
            await first.ended.wait()
            await again.wait_for("model_offer")
            await until_ready(controller)
            await submit(controller, model)
            assert len(await again.wait_for("infer")) == 1


async def test_the_requests_of_a_worker_that_vanishes_are_served_by_another(tmp_path: Path) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, "mute", hold=True) as mute,
    ):
        model = await until_ready(controller)
        future = submit(controller, model)
        await mute.wait_for("load_weights")
        async with LoopbackWorker(controller.port, "good"):
            await until(lambda: "good" in model.ready_on)
            mute.hang_up()
            assert course_of(await future).worker == "good"
            # The answer may have come from the one before the other was missed.
            await until(lambda: controller.links.find(WorkerId("mute")) is None)


async def test_silence_is_death(tmp_path: Path) -> None:
    settings = config(make_models(tmp_path, "m"), heartbeat_interval_ms=20, silence_limit_ms=3000)
    async with running(settings) as controller:
        async with LoopbackWorker(controller.port, beats=False) as worker:
            await worker.beat_once()
            await until_ready(controller)
            await worker.ended.wait()
            assert "silent for" in worker.end
        assert controller.links.links == []
        model = controller.catalogue.find("m")
        assert model is not None
        with pytest.raises(RefusedError) as caught:
            await submit(controller, model)
        assert caught.value.refusal is Refusal.NO_WORKER


HEARTBEAT, NEEDED, PROGRESS, READY, REFUSED, RECEIVED, OFFER, *_, LAST = range(32, 49)


def frame(*header: object, payload: bytes = b"") -> bytes:
    """A frame with such a header."""
    encoded = msgspec.msgpack.encode(header)
    return frames.PREFIX.pack(len(encoded), len(payload)) + encoded + payload


# A result of action 7 begins so, and these are its four steps.
RESULT = (4, 7, 0, "", 0)
STEPS = (None, None, None, None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff" * 100, "a frame with a header of 4294967295 bytes and a payload of 4294967295"),
        (
            frames.PREFIX.pack(1 << 21, 0),
            "a header of 2097152 bytes and a payload of 0, expected 1048576",
        ),
        (frames.PREFIX.pack(10, 17), "a payload of 17, expected 1048576 and 0 at most"),
        (frame(*RESULT, *STEPS, [0] * 9000), "a result with a header of .* bytes, expected 8192"),
        (frames.PREFIX.pack(4, 0) + b"\xff" * 4, "4 bytes that are no result"),
        (frame("text"), "that are no result"),
        (frame(0, 7, "m"), "that are no result"),
        (frame(*RESULT, *STEPS, []), "result of action 7, which is not under way"),
        (frame(4, 7, 55, "", 0, *STEPS, []), "Invalid enum value 55"),
        (frame(4, -1, 0, "", 0, *STEPS, []), "Expected `int` >= 0"),
        (frame(4, 7, 0, "x" * 1001, 0, *STEPS, []), "`str` of length <= 1000"),
        (frame(4, 7, 0, "", -(2**63), *STEPS, []), "Expected `int` >= -2305843009213693951"),
        (frame(*RESULT, None, None, (0, 0, 2**62), None, []), "`int` <= 3600000000000"),
        (frame(*RESULT, None, None, (2**62, 0, 0), None, []), "`int` <= 2305843009213693951"),
        (frame(*RESULT, *STEPS, [2]), "action 7: tensors of 2 bytes in a payload of 0"),
        (frame(*RESULT, *STEPS, [], 1), "that are no result"),
        (
            # An array of four billion lengths, without any of them.
            frames.PREFIX.pack(15, 0)
            + b"\x9a\x04\x07\x00\xa0\x00\xc0\xc0\xc0\xc0\xdd"
            + b"\xff" * 4,
            "Expected `array` of length <= 1048576",
        ),
        (frame(HEARTBEAT, 2**63 - 1), "int` <= 2305843009213693951"),
        (frame(HEARTBEAT, 1, 2**63 - 1), "int` <= 2305843009213693951"),
        (
            frame(HEARTBEAT, 1, None, [2**32 - 1]),
            "a card at 4294967295 of 0 MHz, expected 100000 at most",
        ),
        (frame(HEARTBEAT, 1, None, [1, 1, ["hot"] * 101]), "101 complaints of a card"),
        (frame(HEARTBEAT, "now"), "that are no message of a worker"),
        (frame(HEARTBEAT, 1, None, None, 1), "that are no message of a worker"),
        (frame(NEEDED, "m", ["ff"]), "no file with sha256 'ff'"),
        (frame(NEEDED, "m", [""] * 20_001), "it waits for more than 20000 files"),
        (frame(PROGRESS, 1, 2), "that are no message of a worker"),
        (frame(READY, "m", "a", -1), "that are no message of a worker"),
        (frame(RECEIVED, "m", "ff", 1), "a chunk was acknowledged that was not sent"),
        (frame(OFFER, "m"), "that are no message of a worker"),
        (frame(LAST, "bye"), "that are no message of a worker"),
        (frame(LAST + 1), "that are no message of a worker"),
        (frame(64), "that are no result"),
    ],
)
def test_what_the_protocol_does_not_allow_ends_one_link_and_nothing_else(
    tmp_path: Path, data: bytes, said: str
) -> None:
    async def write(bad: LoopbackWorker) -> None:
        assert bad.data is not None
        bad.data.write(data)

    check_that_it_ends_one_link(tmp_path, write, said)


def check_that_it_ends_one_link(
    tmp_path: Path, do: Callable[[LoopbackWorker], Awaitable[None]], said: str
) -> None:
    async def test() -> None:
        async with (
            running(config(make_models(tmp_path, "m"))) as controller,
            LoopbackWorker(controller.port, "good"),
            LoopbackWorker(controller.port, "bad", beats=False) as bad,
        ):
            await bad.beat_once()
            model = await until_ready(controller)
            await until(lambda: len(model.ready_on) == 2)
            await do(bad)
            await bad.ended.wait()
            assert bad.end.startswith("protocol error: ")
            assert re.search(said, bad.end)
            await until(lambda: len(controller.links.links) == 1)
            assert course_of(await submit(controller, model)).worker == "good"

    run(test)


async def test_of_a_long_complaint_about_a_card_the_beginning_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(config(tmp_path)) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        await until(lambda: any(link.joined for link in controller.links.links))
        (link,) = controller.links.links
        caplog.clear()
        with caplog.at_level("WARNING", logger="controller.links.worker_link"):
            for clock_mhz in (1, 2):
                card = pb.CardReport(clock_mhz, complaints=("hot" * 1000, "dusty"))
                await worker.send(pb.Heartbeat(worker.now_ns(), card=card))
                await until(lambda: link.card.clock_mhz == clock_mhz)  # noqa: B023
        assert list(link.card.complaints) == [("hot" * 1000)[:197] + "...", "dusty"]
        assert [len(record.getMessage()) < 300 for record in caplog.records] == [True, True]


async def test_outputs_of_the_wrong_length_never_reach_a_client(tmp_path: Path) -> None:
    class Short(LoopbackWorker):
        async def answer(self, action: Any, payload: Sequence[Buffer]) -> None:  # noqa: ANN401
            cut = [tensor[:-1] for tensor in payload]
            await super().answer(action, cut if isinstance(action, Infer) else payload)

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        Short(controller.port, beats=False) as worker,
    ):
        await worker.beat_once()
        model = await until_ready(controller)
        with pytest.raises(RefusedError) as caught:
            await submit(controller, model)
        assert caught.value.refusal is Refusal.WORKER_LOST
        await worker.ended.wait()
        assert "outputs of [15] bytes, expected [16]" in worker.end


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batches": []}, "batch sizes []"),
        ({"batches": [pb.BatchProfile(batch_size=1, exec_ns=0)]}, "exec_ns 0 for batch 1"),
        (
            {"batches": [pb.BatchProfile(batch_size=3, exec_ns=9)]},
            "batch sizes [3], expected some of [1, 2",
        ),
        (
            {"batches": [pb.BatchProfile(batch_size=2 * 10**7, exec_ns=9)]},
            "batch sizes [20000000], expected some of [1, 2, 4, 8, 16]",
        ),
        (
            {"batches": [pb.BatchProfile(batch_size=n, exec_ns=9) for n in range(1, 100_000)]},
            "batch sizes [1, 2, 3, 4, 5, 6], expected some of [1, 2, 4, 8, 16]",
        ),
        (
            {"batches": [pb.BatchProfile(batch_size=1, exec_ns=2**63 - 1)]},
            "exec_ns 9223372036854775807 for batch 1, expected 1 to 3600000000000",
        ),
        ({"load_ns": 2**63 - 1}, "load_ns 9223372036854775807, expected 1 to 3600000000000"),
        ({"clock_mhz": 2**32 - 1}, "it was measured at 4294967295 MHz, expected 100000 at most"),
        ({"architecture_id": "a" * 50_000}, "50000 characters, expected 200 at most"),
        ({"architecture_id": "a\n"}, r"architecture_id is 'a\n', 2 characters"),
        ({"inputs": [TensorSpec("x", "FP32", ())] * 257}, "257 inputs and 1 outputs"),
        ({"inputs": [TensorSpec("x" * 201, "FP32", ())]}, "a tensor's name is 'xxx"),
        (
            {"inputs": [TensorSpec("x", "FP32", (1,) * 10_000)]},
            "expected 32 dimensions at most",
        ),
        (
            {"outputs": [TensorSpec("y", "FP32", (2**62,) * 32)]},
            " bytes, a message 67108864 at most (--max-message-mib)",
        ),
        ({"load_ns": -1}, "load_ns -1"),
        ({"num_pages": 9}, "it needs 9 pages, the worker's cache has 8"),
        ({"num_pages": 0}, "it needs 0 pages"),
        ({"outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [TensorSpec("x", "TEXT", ())]}, "datatype 'TEXT'"),
        ({"inputs": [TensorSpec("x", "BYTES", ())]}, "tensor x of BYTES does not carry its size"),
        ({"architecture_id": ""}, "empty architecture_id"),
        (
            {"inputs": [TensorSpec("x", "FP32", (), None, Variable(64, may_lack=True))]},
            "inputs that may lack dimensions",
        ),
    ],
)
async def test_a_description_that_cannot_be_true_makes_the_model_unavailable(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    class Odd(LoopbackWorker):
        async def ready(self, model_id: str, **_: object) -> None:
            await super().ready(model_id, **changes)

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        Odd(controller.port) as worker,
    ):
        (drop,) = await worker.wait_for("model_drop")
        assert drop.model_id == "m"
        (model,) = controller.catalogue.models
        assert controller.catalogue.state(model) is ModelState.UNAVAILABLE
        assert reason in controller.catalogue.reason(model)
        assert controller.catalogue.ready


async def test_the_largest_figures_that_a_worker_may_report_are_shown_to_everybody(
    tmp_path: Path,
) -> None:
    class Slowest(LoopbackWorker):
        async def ready(self, model_id: str, **_: object) -> None:
            hour = pb.BatchProfile(batch_size=1, exec_ns=3600 * S)
            await super().ready(
                model_id,
                batches=[hour],
                load_ns=3600 * S,
                clock_mhz=100_000,
                weights_bytes=2**64 - 1,
            )

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        Slowest(controller.port, beats=False) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        await worker.beat_once()
        await until_ready(controller)
        # Estimates at another clock are derived from those that there are, again and again.
        for clock_mhz in (1, 99_999, 2, 99_998, 3):
            card = pb.CardReport(clock_mhz=clock_mhz)
            beat = pb.Heartbeat(sent_ns=worker.now_ns(), card=card)
            await worker.send(beat)
            await until(lambda: controller.links.links[0].card.clock_mhz == clock_mhz)  # noqa: B023
        control = control_stub(channel)
        (shown,) = (await control.ListModels(control_pb2.ListModelsRequest())).models
        assert (shown.load_ns, shown.exec[0].exec_ns) == (3600 * S, 3600 * S)
        (worker_shown,) = (await control.ListWorkers(control_pb2.ListWorkersRequest())).workers
        assert worker_shown.clock_mhz == 3


async def test_batches_whose_outputs_fit_in_no_message_are_not_planned(tmp_path: Path) -> None:
    class Wide(LoopbackWorker):
        async def ready(self, model_id: str, **_: object) -> None:
            mebibyte = TensorSpec("y", "UINT8", (1 << 20,))
            await super().ready(model_id, outputs=[mebibyte])

    settings = config(make_models(tmp_path, "m"), max_message_bytes=3 << 20)
    async with running(settings) as controller, Wide(controller.port):
        model = await until_ready(controller)
        assert list(model.ready_on.values()) == [(1, 2)]


async def test_what_a_worker_says_of_a_model_that_it_has_is_escaped_too(tmp_path: Path) -> None:
    words = "\x1b]0;PWNED\x07\n" + "!" * 5000

    class Talker(LoopbackWorker):
        async def ready(self, model_id: str, **changes: object) -> None:
            await super().ready(model_id, one_by_one=words)

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        Talker(controller.port),
    ):
        model = await until_ready(controller)
        assert model.one_by_one.startswith(r"\x1b]0;PWNED\x07\n!!!")
        assert len(model.one_by_one) == 1000


def test_the_words_of_a_worker_cannot_command_a_terminal_nor_forge_a_line_of_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "\x1b]0;PWNED\x07\n2026-11-22 INFO root: all is well" + "!" * 5000

    async def test() -> None:
        async with (
            running(config(make_models(tmp_path, "m"))) as controller,
            LoopbackWorker(controller.port, refuse=lambda _: words) as worker,
        ):
            model = controller.catalogue.models[0]
            await until(lambda: bool(model.refused_by))
            (reason,) = model.refused_by.values()
            assert reason.startswith(r"\x1b]0;PWNED\x07\n2026")
            assert len(reason) == 1000
            # What was answered is answered: no more is heard, or logged, of the model.
            logged = len(caplog.records)
            again = pb.ModelRefused(model_id="m", reason="again")
            await worker.send(again)
            await worker.send(pb.Drain(reason=words))
            await until(lambda: controller.links.links == [] or controller.links.links[0].draining)
            assert not any("again" in record.getMessage() for record in caplog.records[logged:])
        assert all(record.getMessage().isprintable() for record in caplog.records)

    with caplog.at_level("INFO", logger="controller"):
        run(test)


async def test_the_clock_that_a_model_was_measured_at_reaches_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ModelReady] = []
    tell = Runtime.tell

    def told(runtime: Runtime, event: Event) -> None:
        if isinstance(event, ModelReady):
            seen.append(event)
        tell(runtime, event)

    monkeypatch.setattr(Runtime, "tell", told)

    class Slow(LoopbackWorker):
        async def ready(self, model_id: str, **_: object) -> None:
            await super().ready(model_id, clock_mhz=966)

    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        Slow(controller.port),
    ):
        await until_ready(controller)
    assert [event.clock_mhz for event in seen] == [966]


async def test_a_worker_that_wants_to_leave_finishes_and_is_told_to(tmp_path: Path) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, hold=True) as worker,
    ):
        model = await until_ready(controller)
        future = submit(controller, model)
        await worker.wait_for("load_weights")
        await worker.send(pb.Drain(reason="SIGTERM"))
        await until(lambda: controller.links.links[0].draining)
        await worker.release()
        # Its Infer may have been sent behind the load, or not at all.
        await asyncio.gather(future, return_exceptions=True)
        with pytest.raises(RefusedError) as caught:
            await submit(controller, model)
        assert caught.value.refusal is Refusal.NO_WORKER
        await worker.ended.wait()
        assert worker.end.startswith("drain:")
        await until(lambda: controller.links.links == [])


@pytest.mark.parametrize("turns", range(8, 20, 2))
async def test_closing_ends_the_links_of_those_that_come_meanwhile(
    turns: int, tmp_path: Path
) -> None:
    async with running(config(make_models(tmp_path, "m"))) as controller:
        workers = [LoopbackWorker(controller.port, f"w{number}") for number in range(8)]
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(worker)
            # After some number of turns, a worker has its welcome and is not listed yet.
            for _ in range(turns):
                await asyncio.sleep(0)
            await controller.links.close("it is over")
            for worker in workers:
                await worker.ended.wait()
            for worker in workers:
                assert "drain" not in worker.received
            assert controller.links.links == []


async def test_a_model_removed_at_run_time_is_dropped_by_the_workers(tmp_path: Path) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        model = await until_ready(controller)
        await submit(controller, model)
        controller.catalogue.remove("m")
        (drop,) = await worker.wait_for("model_drop")
        assert drop.model_id == "m"
        assert len(await worker.wait_for("evict_weights")) == 1


async def test_what_a_worker_refused_it_may_have_ready_later_until_it_is_removed(
    tmp_path: Path,
) -> None:
    async with (
        running(config(make_models(tmp_path, "m", "n"))) as controller,
        LoopbackWorker(controller.port, refuse=lambda _: "its server is away") as worker,
    ):
        await until(lambda: controller.catalogue.ready)
        model, other = controller.catalogue.models
        assert controller.catalogue.state(model) is ModelState.UNAVAILABLE
        assert "its server is away" in controller.catalogue.reason(model)
        await worker.ready(model.model_id)
        assert (await until_ready(controller)).model_id == model.model_id
        answer = await submit(controller, model)
        assert [bytes(output) for output in answer.outputs] == [ROW]
        controller.catalogue.remove("n")
        (drop,) = await worker.wait_for("model_drop")
        assert drop.model_id == other.model_id


async def test_a_model_removed_while_its_weights_load_and_added_again_stays_with_the_worker(
    tmp_path: Path,
) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, hold=True) as worker,
    ):
        first = await until_ready(controller)
        future = submit(controller, first)
        await worker.wait_for("load_weights")
        controller.catalogue.remove("m")
        (second,) = await controller.catalogue.reload("m")
        await worker.release()
        # Its Infer may have been sent behind the load, or not at all.
        await asyncio.gather(future, return_exceptions=True)
        (drop,) = await worker.wait_for("model_drop")
        assert drop.model_id == first.model_id != second.model_id
        answer = await submit(controller, second)
        assert [bytes(output) for output in answer.outputs] == [ROW]
        assert len(worker.received["model_drop"]) == 1


async def test_a_strangers_description_is_gone_with_the_stranger(tmp_path: Path) -> None:
    odd = [TensorSpec("Z", "INT8", (1,))]

    class Stranger(LoopbackWorker):
        async def ready(self, model_id: str, **_: object) -> None:
            await super().ready(model_id, inputs=odd, outputs=odd)

    async with running(config(make_models(tmp_path, "m"))) as controller:
        async with Stranger(controller.port, "stranger") as stranger:
            model = await until_ready(controller)
            honest = LoopbackWorker(controller.port, "honest")
            await honest.__aenter__()
            await until(lambda: "honest" in model.refused_by)
            assert "Z INT8 [1]" in model.refused_by[WorkerId("honest")]
            stranger.hang_up()
            await until(lambda: "honest" in model.ready_on)
        answer = await submit(controller, model)
        assert [bytes(output) for output in answer.outputs] == [ROW]
        assert model.refused_by == {}
        await honest.__aexit__(None, None, None)


class MuteWorker(LoopbackWorker):
    """Lives, and says nothing of what it is offered."""

    @override
    async def _judge(self, offer: pb.ModelOffer) -> None:
        pass


def test_a_worker_that_says_nothing_of_a_model_keeps_nobody_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        def refuse(name: str) -> str:
            return "" if name == "m" else "bad"

        async with (
            running(config(make_models(tmp_path / "served", "m"))) as controller,
            MuteWorker(controller.port, "mute") as mute,
            LoopbackWorker(controller.port, "good", refuse=refuse),
        ):
            await until_ready(controller)
            # Longer than the other takes to refuse it.
            monkeypatch.setattr(worker_models, "OFFER_SILENCE_S", 4.0)
            new = make_models(tmp_path / "new", "other") / "other"
            with pytest.raises(ModelError) as caught:
                await controller.catalogue.add(new)
            assert "worker mute has said nothing of it for 4 s" in str(caught.value)
            assert await mute.wait_for("model_drop", 2)

    run(test)


@pytest.mark.parametrize(
    ("request_bytes", "said"),
    [
        (b"", "0 bytes that are no Register"),
        (b"\xff\xff garbage", "10 bytes that are no Register"),
        (msgspec.msgpack.encode([wire.PROTOCOL_VERSION, 7]), "that are no Register"),
        (
            msgspec.msgpack.encode([wire.PROTOCOL_VERSION, "w", "d", "k", -1]),
            "that are no Register",
        ),
        (bytes(2_000_000), "2000000 bytes that are no Register"),
    ],
)
async def test_what_is_no_registration_is_rejected(
    tmp_path: Path, request_bytes: bytes, said: str
) -> None:
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port, "good"),
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as opened,
    ):
        channel: Any = opened
        attach = channel.unary_unary(f"/{wire.WORKER_SERVICE}/{wire.ATTACH}")
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await attach(request_bytes)
        await submit(controller, await until_ready(controller))


async def test_a_worker_that_holds_twenty_thousand_models_joins(tmp_path: Path) -> None:
    held = pb.Held(
        pb.ReadyModel(
            model_id="the-name-of-a-model-is-longer-than-most#0123456789abcdef",
            architecture_id="a" * 64,
            inputs=(TensorSpec("input", "FP32", (3, 224, 224)),),
            outputs=(TensorSpec("output", "FP32", (1000,)),),
            batches=tuple(pb.BatchProfile(size, 1_000_000 * size) for size in (1, 2, 4, 8, 16)),
        ),
        offer_digest=bytes(32),
    )
    register = LoopbackWorker(0, "w").register
    register.held = (held,) * 20_000
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as opened,
    ):
        channel: Any = opened
        attach = channel.unary_unary(f"/{wire.WORKER_SERVICE}/{wire.ATTACH}")
        welcome = msgspec.msgpack.decode(await attach(wire.encode(register)), type=wire.Welcome)
        assert welcome.token


async def test_of_workers_that_ask_and_do_not_connect_the_first_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_EXPECTED_MAX", 2)
    async with running(config(make_models(tmp_path, "m"))) as controller:
        asking = [LoopbackWorker(controller.port, name, dials=False) for name in "abc"]
        for worker in asking:
            async with worker:
                await worker.wait_for("welcome")
        for worker, is_known in zip(asking, (False, True, True), strict=True):
            reader, writer = await asyncio.open_unix_connection(worker.welcome.socket_path)
            writer.write(frames.greeting(worker.welcome.token))
            assert bool(await reader.read(1)) is is_known
            writer.close()


async def test_garbage_bytes_on_the_port_harm_nobody(tmp_path: Path) -> None:
    async with running(config(make_models(tmp_path, "m"))) as controller:
        rng = random.Random(3)
        for size in (1, 24, 1000, 100_000):
            _, writer = await asyncio.open_connection("127.0.0.1", controller.port)
            writer.write(rng.randbytes(size))
            writer.close()
            # The server may reset the connection before everything is written.
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        async with LoopbackWorker(controller.port):
            await submit(controller, await until_ready(controller))


@pytest.mark.seeds(1)
def test_parsing_never_raises_anything_but_a_protocol_error(seed: int) -> None:
    rng = random.Random(4 + seed)
    for _ in range(3000):
        tag = rng.choice((b"", b"\x92\x20", b"\x93\x21", b"\x9b\x23"))
        data = tag + rng.randbytes(rng.choice((1, 2, 3, 10, 100, 20_000)))
        with suppress(ProtocolError):
            pb.decode_from_worker((data, b""))


async def test_a_worker_told_nothing_for_a_while_by_a_stopped_controller_is_kept(
    tmp_path: Path,
) -> None:
    settings = config(make_models(tmp_path, "m"), heartbeat_interval_ms=20, silence_limit_ms=1000)
    async with (
        running(settings) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        model = await until_ready(controller)
        await asyncio.sleep(0)
        time.sleep(1.5)  # noqa: ASYNC251 - the whole process stands still
        await submit(controller, model)
        assert not worker.ended.is_set()


async def offers_of(controller: Controller, number: int) -> dict[str, pb.ModelOffer]:
    """What the controller offers to whoever joins."""
    async with LoopbackWorker(controller.port, "asks") as worker:
        offers = {offer.model_id: offer for offer in await worker.wait_for("model_offer", number)}
    await until(lambda: not controller.links.links)
    return offers


async def test_what_a_worker_holds_since_before_is_neither_offered_nor_loaded_again(
    tmp_path: Path,
) -> None:
    async with running(config(make_models(tmp_path, "a", "b", "c"))) as controller:
        offers = await offers_of(controller, 3)
        changed = msgspec.structs.replace(offers["c"], batch_sizes=(1,))
        worker = LoopbackWorker(controller.port, num_pages=2)
        worker.hold_over(offers["a"], resident=True)
        worker.hold_over(offers["b"], resident=False)
        worker.hold_over(changed, resident=True)
        worker.hold_over(pb.ModelOffer(model_id="gone"), resident=True)
        async with worker:
            a, b, c = [await until_ready(controller, name) for name in "abc"]
            assert list(worker.welcome.keep) == ["a", "b"]
            assert [offer.model_id for offer in await worker.wait_for("model_offer")] == ["c"]
            # The one that is resident has its page, the other two share what is left.
            (before,) = controller.runtime.statistics().workers
            assert (before.num_free_pages, list(before.resident)) == (1, ["a"])
            for model in (a, b, c):
                await submit(controller, model)
            loads = await worker.wait_for("load_weights", 2)
            assert [load.model_id for load in loads] == ["b", "c"]


async def test_a_worker_cannot_hold_more_than_its_cache_nor_one_model_twice(tmp_path: Path) -> None:
    async with running(config(make_models(tmp_path, "a", "b"))) as controller:
        offers = await offers_of(controller, 2)
        for models in (("a", "b"), ("a", "a")):
            worker = LoopbackWorker(controller.port, num_pages=1)
            for name in models:
                worker.hold_over(offers[name], resident=name == "b" or models == ("a", "b"))
            async with worker:
                await worker.ended.wait()
            assert "it holds 2 models" in worker.end
        assert not controller.links.links


async def test_a_model_that_was_removed_while_a_worker_joins_costs_it_a_second_registration(
    tmp_path: Path,
) -> None:
    async with running(config(make_models(tmp_path, "a", "b"))) as controller:
        offers = await offers_of(controller, 2)
        worker = LoopbackWorker(controller.port, beats=False)
        worker.hold_over(offers["a"], resident=True)
        async with worker:
            await worker.wait_for("welcome")
            assert list(worker.welcome.keep) == ["a"]
            await controller.catalogue.remove("a")
            await worker.beat_once()
            await worker.ended.wait()
            assert "models have changed" in worker.end


async def test_orders_carry_the_generation(tmp_path: Path) -> None:
    term = Term("lineage", 7)
    async with (
        running(config(make_models(tmp_path, "m")), term) as controller,
        LoopbackWorker(controller.port) as worker,
    ):
        model = await until_ready(controller)
        await submit(controller, model)
        assert (worker.welcome.lineage, worker.welcome.generation) == ("lineage", 7)
        assert set(worker.generations) == {7}


async def test_a_worker_that_loses_many_results_is_let_go_and_late_results_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("controller.links.worker_link.LOST_MAX", 2)
    async with (
        running(config(make_models(tmp_path, "m"))) as controller,
        LoopbackWorker(controller.port),
    ):
        await until_ready(controller)
        (link,) = controller.links.links
        infers = link.actions._infers
        for number in (1001, 1002, 1003, 1004):
            infers[ActionId(number)] = Mock()  # as if it had been sent
            link.write_off(ActionId(number))
            if number == 1001:
                del infers[ActionId(number)]  # its result came late
            link.write_off(ActionId(1))  # of a load
            assert link.left.is_set() is False
        await link.left.wait()
        assert "lost the results of 3 Infers, expected 2 at most" in caplog.text
