"""Quotas of tenants at a serving controller: whoever asks, by whichever front, and whoever changes them meanwhile."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from clockwright import AsyncClient, Refusal, RefusedError
from clockwright.cli.main import app
from clockwright.client.operator import Operator
from clockwright.errors import BadRequestError, ClockwrightError, ConfigError, UnknownModelError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import control_pb2 as control
from clockwright.v1 import inference_pb2 as pb
from controller.access.quota_book import QuotaBook, read_quota_file
from controller.core import SchedulerConfig
from controller.core.quotas import OTHERS, Quota
from controller.models.state_file import StateFile
from controller.process.app import running
from controller.process.config import ControllerConfig
from tests.kit.front_end import FrontEnd, serving, until

INFER = "/inference.GRPCInferenceService/ModelInfer"
X = np.zeros((1, 3), np.float32)
#: One that gives back no token while a test runs.
RARE_RPS = 1e-6

Ask = Callable[..., Coroutine[Any, Any, object]]


@pytest.fixture(params=["here", "apart"])
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def asking(directory: Path, front: str = "here") -> AsyncIterator[tuple[FrontEnd, Ask]]:
    """A controller with a front, and a way to ask it: gives the refusal, or None."""
    async with (
        serving(directory, front=front) as front_end,
        AsyncClient(front_end.address) as client,
    ):

        async def ask(
            tenant: str = "", *, model: str = "double", slo_ms: float = 30_000
        ) -> RefusedError | None:
            inputs = {"x": X} if model != "image" else {"image": np.zeros((1, 3, 224, 224), "f4")}
            try:
                await client.infer(model, inputs, slo_ms=slo_ms, tenant=tenant)
            except RefusedError as error:
                return error
            return None

        yield front_end, ask


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def test_a_tenant_beyond_its_rate_is_refused_and_others_are_not(
    tmp_path: Path, front: str
) -> None:
    async with asking(tmp_path, front) as (front_end, ask):
        await front_end.quotas.set("gold", Quota(rate_rps=RARE_RPS, burst=3))
        outcomes = [await ask("gold") for _ in range(5)]
        assert outcomes[:3] == [None, None, None]
        for error in outcomes[3:]:
            assert isinstance(error, RefusedError)
            assert error.refusal is Refusal.QUOTA
            assert "tenant 'gold' may have rate_rps 1e-06 at most" in error.message
            assert error.figures["retry_ns"] > NS_PER_S
        assert [await ask("silver"), await ask()] == [None, None]
        counts = front_end.runtime.telemetry.total
        # What a front refuses by itself it tells at its next beat.
        await until(lambda: counts.refusals["QUOTA"] == 2)
        assert counts.requests == 7


async def test_a_refusal_says_to_every_grpc_library_when_to_come_again(tmp_path: Path) -> None:
    async with asking(tmp_path) as (front_end, _):
        await front_end.quotas.set("", Quota(rate_rps=0.001, burst=1))
        request = pb.ModelInferRequest(
            model_name="double",
            inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])],
            raw_input_contents=[bytes(12)],
        )
        request.parameters["slo_ms"].int64_param = 60_000
        async with grpc.aio.insecure_channel(front_end.address) as channel:
            stub: Any = channel
            call = stub.unary_unary(INFER)
            await call(request.SerializeToString())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request.SerializeToString())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers: Any = caught.value.trailing_metadata()
    details = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"]).details
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert details[0].Unpack(info)
    assert details[1].Unpack(retry)
    assert info.reason == "QUOTA"
    assert retry.retry_delay.ToNanoseconds() == int(info.metadata["retry_ns"])
    assert 0 < retry.retry_delay.ToNanoseconds() <= 1000 * NS_PER_S


async def test_what_is_open_at_once_is_bounded_and_whatever_ends_makes_room(
    tmp_path: Path, front: str
) -> None:
    async with asking(tmp_path, front) as (front_end, ask):
        await front_end.quotas.set("gold", Quota(open_requests=2))
        front_end.worker.hold = True
        inside = [asyncio.create_task(ask("gold")) for _ in range(2)]
        await until(lambda: front_end.runtime.num_waiting == 2)
        error = await ask("gold")
        assert isinstance(error, RefusedError)
        assert error.figures == {"open_requests": 2, "found": 3}
        # A client that goes away makes room, too.
        inside[1].cancel()
        await until(lambda: front_end.runtime.num_waiting == 1)
        inside[1] = asyncio.create_task(ask("gold"))
        await until(lambda: front_end.runtime.num_waiting == 2)
        front_end.worker.release()
        assert await asyncio.gather(*inside) == [None, None]
        assert await ask("gold") is None
        ((_, use),) = front_end.quotas.uses()
        assert (use.num_open, use.num_bytes) == (0, 0)


async def test_bytes_in_flight_are_bounded(tmp_path: Path, front: str) -> None:
    async with asking(tmp_path, front) as (front_end, ask):
        image_bytes = 4 * 3 * 224 * 224
        await front_end.quotas.set("gold", Quota(open_bytes=image_bytes + 12))
        front_end.worker.hold = True
        inside = asyncio.create_task(ask("gold", model="image"))
        await until(lambda: front_end.runtime.num_waiting == 1)
        error = await ask("gold", model="image")
        assert isinstance(error, RefusedError)
        assert error.figures == {"open_bytes": image_bytes + 12, "found": 2 * image_bytes}
        small = asyncio.create_task(ask("gold"))
        await until(lambda: front_end.runtime.num_waiting == 2)
        front_end.worker.release()
        assert [await inside, await small] == [None, None]


async def test_slos_are_bounded_below_and_above(tmp_path: Path, front: str) -> None:
    async with asking(tmp_path, front) as (front_end, ask):
        quota = Quota(slo_ns_min=20 * NS_PER_S, slo_ns_max=40 * NS_PER_S)
        await front_end.quotas.set("gold", quota)
        assert await ask("gold", slo_ms=30_000) is None
        for slo_ms, bound in ((19_999, "slo_ns_min"), (40_001, "slo_ns_max")):
            error = await ask("gold", slo_ms=slo_ms)
            assert isinstance(error, RefusedError)
            assert error.refusal is Refusal.QUOTA
            assert error.figures["found"] == slo_ms * NS_PER_MS
            assert bound in error.figures
            assert "retry_ns" not in error.figures


async def test_what_comes_by_several_fronts_counts_together(tmp_path: Path) -> None:
    async with (
        asking(tmp_path, "apart") as (front_end, ask),
        AsyncClient(front_end.controller) as other,
    ):
        await front_end.quotas.set("gold", Quota(rate_rps=RARE_RPS, burst=4))
        for _ in range(2):
            assert await ask("gold") is None
            await other.infer("double", {"x": X}, slo_ms=30_000, tenant="gold")
        assert isinstance(await ask("gold"), RefusedError)
        with pytest.raises(RefusedError, match="QUOTA"):
            await other.infer("double", {"x": X}, slo_ms=30_000, tenant="gold")


async def test_a_front_refuses_by_itself_what_its_controller_would_refuse_and_says_so(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path, "apart") as (front_end, ask):
        assert front_end.fronts is not None
        await front_end.quotas.set("gold", Quota(rate_rps=RARE_RPS, burst=1))
        assert await ask("gold") is None
        told = await ask("gold")
        ((tenant, use),) = front_end.quotas.uses()
        assert (tenant, use.num_admitted, use.num_refused) == ("gold", 1, 1)
        before = front_end.fronts.num_bytes
        early = [await ask("gold") for _ in range(100)]
        # Beside signs of life, which are some 20 bytes, nothing went there; a request takes 60 and its refusal 200.
        assert front_end.fronts.num_bytes - before < 100 * 100
        assert [await ask("silver"), await ask()] == [None, None]
        for error in early:
            assert isinstance(error, RefusedError)
            assert isinstance(told, RefusedError)
            assert error.message.split(";")[0] == told.message.split(";")[0]
            assert error.figures["retry_ns"] <= told.figures["retry_ns"]
        await until(lambda: use.num_refused == 101)
        assert front_end.runtime.telemetry.total.refusals["QUOTA"] == 101
        # Another quota holds at once.
        await front_end.quotas.set("gold", Quota(rate_rps=RARE_RPS, burst=5))
        assert [await ask("gold") is None for _ in range(6)].count(True) == 4


def test_operators_change_quotas_while_requests_are_served(tmp_path: Path, front: str) -> None:
    async def main() -> None:
        async with asking(tmp_path, front) as (front_end, ask):

            async def operate(work: Callable[[Operator], Any]) -> Any:  # noqa: ANN401
                def call() -> Any:  # noqa: ANN401
                    with Operator(front_end.address) as operator:
                        return work(operator)

                return await asyncio.to_thread(call)

            assert await ask("gold") is None
            quota = control.Quota(
                rate_rps=RARE_RPS,
                burst=2,
                slo_ns_max=60 * NS_PER_S,
                weight=4,
                request_weight_max=2,
            )
            await operate(lambda operator: operator.set_quota("gold", quota))
            assert [await ask("gold") is None for _ in range(3)] == [True, True, False]
            (info,) = await operate(lambda operator: operator.quotas())
            assert (info.tenant, info.quota, info.admitted, info.refused) == ("gold", quota, 2, 1)
            bad = control.Quota(rate_rps=-1)
            with pytest.raises(BadRequestError, match="rate_rps: found -1"):
                await operate(lambda operator: operator.set_quota("gold", bad))
            await operate(lambda operator: operator.remove_quota("gold"))
            assert await ask("gold") is None
            with pytest.raises(UnknownModelError, match="'gold' has no quota of its own"):
                await operate(lambda operator: operator.remove_quota("gold"))

    run(main)


async def test_each_tenant_without_a_quota_of_its_own_has_that_of_the_others(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path) as (front_end, ask):
        await front_end.quotas.set(OTHERS, Quota(rate_rps=RARE_RPS, burst=1))
        await front_end.quotas.set("gold", Quota(rate_rps=RARE_RPS, burst=2))
        asked = ("a", "b", "a", "gold", "gold", "gold", "", "")
        let_in = [await ask(tenant) is None for tenant in asked]
        assert let_in == [True, True, False, True, True, False, True, False]


# --- the file -------------------------------------------------------------------------------------

FILE = """
[gold]
rate_rps = 200.5
burst = 50
open_requests = 64
open_bytes = 1_000_000
slo_ms_min = 0.5
slo_ms_max = 1000
weight = 4

["*"]
rate_rps = 20
"""


def test_a_file_says_who_may_have_what(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text(FILE)
    assert read_quota_file(file) == {
        "gold": Quota(
            rate_rps=200.5,
            burst=50,
            open_requests=64,
            open_bytes=1_000_000,
            slo_ns_min=500_000,
            slo_ns_max=NS_PER_S,
            weight=4,
        ),
        OTHERS: Quota(rate_rps=20),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gold\n", "quotas.toml: "),
        ("gold = 5", "tenant 'gold': expected a table"),
        ("[gold]\nrate = 5", "tenant 'gold': found 'rate', expected some of rate_rps, burst"),
        ("[gold]\nrate_rps = true", "rate_rps: found True, expected a number"),
        ("[gold]\nrate_rps = -1", "tenant 'gold': rate_rps: found -1, expected 1e-06 to"),
        ("[gold]\nopen_bytes = 1.5", "open_bytes: found 1.5, expected a whole number"),
        ("[gold]\nslo_ms_max = 0", "slo_ms_max: found 0, expected more than 0"),
        ('["*"]\nweight = 2', "found weight 2 of [*]"),
        ("\x00", "quotas.toml: "),
        ("a = " + "[" * 100_000, "quotas.toml: "),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused_with_its_place(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_quota_file(file)


def test_a_file_that_changes_is_taken_and_one_that_is_wrong_is_not(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text(FILE)
    told: list[Any] = []
    book = QuotaBook(file=file, changed=told.append)
    asyncio.run(book.start())
    file.write_text("[silver]\nweight = 2\n")
    book.read_again()
    file.write_text("[silver]\nweight = 200\n")
    with pytest.raises(ConfigError, match="weight: found 200"):
        book.read_again()
    assert book.quotas.quotas == {"silver": Quota(weight=2)}
    assert told == [{"gold": 4}, {"silver": 2}]


def test_where_there_is_a_file_operators_are_told_to_change_that(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text(FILE)
    book = QuotaBook(file=file)
    with pytest.raises(
        ClockwrightError, match=r"quotas come from .*quotas\.toml: change them there"
    ):
        asyncio.run(book.set("gold", Quota(rate_rps=1)))
    with pytest.raises(ClockwrightError, match="change them there"):
        asyncio.run(book.remove("gold"))
    assert book.quotas.quotas["gold"].rate_rps == 200.5


# --- what is kept ---------------------------------------------------------------------------------


@asynccontextmanager
async def kept(path: Path) -> AsyncIterator[QuotaBook]:
    state = StateFile(path)
    try:
        book = QuotaBook(state=state)
        await book.start()
        yield book
    finally:
        await state.close()


async def test_what_operators_set_is_there_after_a_restart_and_what_they_removed_is_not(
    tmp_path: Path,
) -> None:
    quota = Quota(rate_rps=2.5, open_bytes=7, slo_ns_max=NS_PER_S, weight=3)
    async with kept(tmp_path / "state.sqlite") as book:
        await book.set("gold", Quota(rate_rps=1))
        await book.set("gold", quota)
        await book.set("", Quota(open_requests=1))
        await book.set("silver", Quota(open_requests=1))
        await book.remove("silver")
    async with kept(tmp_path / "state.sqlite") as book:
        assert book.quotas.quotas == {"gold": quota, "": Quota(open_requests=1)}
        assert book.quotas.weights == {"gold": 3}


async def test_a_kept_quota_that_cannot_be_stops_the_start_with_its_tenant(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.sqlite")

    def spoil(connection: sqlite3.Connection) -> None:
        with connection:
            connection.execute("INSERT INTO quota VALUES ('gold', '{\"rate_rps\": -1}')")

    try:
        await state.run(spoil)
        with pytest.raises(ConfigError, match="quota of tenant 'gold': rate_rps: found -1"):
            await QuotaBook(state=state).start()
    finally:
        await state.close()


def test_a_running_controller_reads_its_file_again(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "quotas.toml"
        file.write_text("[gold]\nrate_rps = 5\n")
        config = ControllerConfig(port=0, quotas_file=file, state_dir=tmp_path / "state")
        async with running(config) as controller:

            def listed() -> list[tuple[str, float]]:
                with Operator(f"127.0.0.1:{controller.port}") as operator:
                    return [(info.tenant, info.quota.rate_rps) for info in operator.quotas()]

            assert await asyncio.to_thread(listed) == [("gold", 5)]
            file.write_text("[silver]\nrate_rps = 6\n")
            controller.guard.read_again()  # As SIGHUP does, and the change itself a second later.
            assert await asyncio.to_thread(listed) == [("silver", 6)]

    run(main)


@pytest.mark.parametrize("policy", ["edf_mh", "clockwork"])
async def test_who_sets_a_weight_that_weighs_nothing_is_told(
    policy: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    told = f"weight has no effect under policy {policy}, as it has under edf_mh"
    config = ControllerConfig(port=0, scheduler=SchedulerConfig(policy=policy))
    async with running(config) as controller:
        at = ("--server", f"127.0.0.1:{controller.port}")
        for flags, expected in (
            (("--rate-rps", "5"), ""),
            (("--weight", "4"), "" if policy == "edf_mh" else told),
        ):
            command = ["quotas", "set", "gold", *flags, *at]
            await asyncio.to_thread(app, command, standalone_mode=False)
            assert capsys.readouterr().err == (f"warning: {expected}\n" if expected else "")
            assert (f"quotas of gold: {told}" in caplog.text) is bool(expected)
