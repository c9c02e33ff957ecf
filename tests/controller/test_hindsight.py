"""What became of a request, and why: whoever may know it asks a running controller, by whichever front."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright.client.channel import Access
from clockwright.client.operator import Operator
from clockwright.client.statuses import error_of
from clockwright.errors import ClockwrightError, Refusal, RefusedError, UnknownModelError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import control_pb2 as control
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.actions import ActionError, Result
from controller.access.authoriser import Authoriser, Rules
from controller.access.grants import Grant, digest, id_of, make_key
from controller.access.roles import Role
from controller.core.quotas import Quota
from controller.selection.core.application import Application
from controller.telemetry.past_requests import PastRequests
from tests.kit.front_end import FrontEnd, serving, until
from tests.kit.scripted_worker import WORKER

INFER = "/inference.GRPCInferenceService/ModelInfer"
CLIENT = frozenset((Role.INFERENCE,))


@pytest.fixture(params=["here", "apart"])
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def ask(
    front_end: FrontEnd,
    name: str = "",
    *,
    model: str = "double",
    slo_ms: float = 30_000,
    tenant: str = "",
    key: str = "",
) -> RefusedError | None:
    """Ask a model by the protocol; gives the refusal, or None."""
    request = pb.ModelInferRequest(
        model_name=model,
        id=name,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])],
        raw_input_contents=[bytes(12)],
    )
    request.parameters["slo_ms"].double_param = slo_ms
    if tenant:
        request.parameters["tenant"].string_param = tenant
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    aio: Any = grpc.aio
    async with aio.insecure_channel(front_end.address) as channel:
        try:
            await channel.unary_unary(INFER)(request.SerializeToString(), metadata=metadata)
        except grpc.RpcError as error:
            refused = error_of(error, front_end.address)
            assert isinstance(refused, RefusedError), refused
            return refused
    return None


async def explain(
    front_end: FrontEnd, request_id: str, *, key: str = ""
) -> control.ExplainResponse:
    """Ask as an operator does, who does not use asyncio."""

    def call() -> control.ExplainResponse:
        with Operator(front_end.address, Access(key=key) if key else None) as operator:
            return operator.explain(request_id)

    return await asyncio.to_thread(call)


async def explain_once_known(front_end: FrontEnd, request_id: str) -> control.ExplainResponse:
    """Ask until the controller has heard of it."""
    while True:
        with suppress(UnknownModelError):
            return await explain(front_end, request_id)


async def test_an_answered_request_is_known_by_its_clients_name_with_its_batch_and_where_its_time_went(
    tmp_path: Path, front: str
) -> None:
    async with serving(tmp_path, front=front) as front_end:
        assert await ask(front_end, "first") is None
        assert await ask(front_end, "second") is None
        told = await explain(front_end, "first")
        assert (told.outcome, told.client_request_id, told.model_id) == (
            "OK",
            "first",
            "double",
        )
        assert told.cold
        assert told.load.error == told.run.error == "NONE"
        assert told.load.end_ns <= told.run.begin_ns
        assert (told.run.batch_size, told.run.num_requests) == (1, 1)
        assert told.run.earliest_ns <= told.run.latest_ns
        assert told.slo_ns == 30 * NS_PER_S
        parts = (
            *(told.spent_queue_ns, told.spent_load_ns, told.spent_input_ns),
            *(told.spent_exec_ns, told.spent_output_ns, told.spent_network_ns),
        )
        assert sum(parts) == told.latency_ns
        assert any("loaded" in sentence for sentence in told.words)
        # The second found the weights there.
        told = await explain(front_end, "second")
        assert not told.cold
        assert "No load was needed" in told.words[-1]
        assert (await explain(front_end, str(told.request_id))).outcome == "OK"


async def test_a_refused_request_is_known_with_what_stood_in_its_way_and_its_remedy_is_in_the_refusal(
    tmp_path: Path, front: str
) -> None:
    async with serving(tmp_path, front=front) as front_end:
        assert await ask(front_end) is None  # from now on it is resident
        refused = await ask(front_end, "hasty", slo_ms=0.5)
        # A front whose own clock runs out first does not wait for the controller's reason.
        while refused is not None and refused.refusal is Refusal.NO_WORKER:
            refused = await ask(front_end, "hasty", slo_ms=0.5)
        assert refused is not None
        told = await explain(front_end, "hasty")
        assert told.outcome == refused.refusal.value == "INFEASIBLE"
        assert told.request_id == refused.figures["request_id"]
        assert told.enough_slo_ns == refused.figures["enough_slo_ns"]
        assert told.exec_ns == refused.figures["exec_ns"]
        (lane,) = told.lanes
        assert lane.resident
        assert 0 < lane.num_free_pages < lane.num_pages
        assert f"SLO of {told.enough_slo_ns / NS_PER_MS:.1f} ms" in told.words[-1]
        # By how much depends on how busy this machine is.
        assert told.exec_ns < told.enough_slo_ns
        assert (await explain(front_end, str(told.request_id))).outcome == "INFEASIBLE"


async def test_a_request_that_waits_is_known_and_so_is_one_that_was_given_up(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as front_end:
        front_end.worker.hold = True
        asked = asyncio.create_task(ask(front_end, "slow"))
        await until(lambda: front_end.runtime.num_waiting == 1)
        told = await explain(front_end, "slow")
        assert (told.outcome, told.slo_ns) == ("OPEN", 30 * NS_PER_S)
        asked.cancel()
        await until(lambda: front_end.runtime.num_waiting == 0)
        assert (await explain(front_end, "slow")).outcome == "CANCELLED"
        front_end.worker.release()


async def test_a_refused_request_whose_obstacles_are_forgotten_is_not_said_to_be_answered(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as front_end:
        front_end.runtime.past = PastRequests(num_refused=1)
        assert await ask(front_end) is None
        first, second = [await ask(front_end, slo_ms=0.5) for _ in range(2)]
        assert first is not None
        assert second is not None
        (words,) = (await explain(front_end, str(first.figures["request_id"]))).words
        assert words.startswith("It was refused as INFEASIBLE ")
        assert "not known any more" in words


@pytest.mark.parametrize("end", ["TOO_LATE", "failed", "answered"])
async def test_of_a_late_request_it_is_said_whether_its_batch_was_run(
    tmp_path: Path, end: str
) -> None:
    async with serving(tmp_path) as front_end:
        worker = front_end.worker
        worker.hold = True
        refused = await ask(front_end, "late", slo_ms=2000)
        assert refused is not None
        assert refused.refusal.value == "LATE"
        if end == "failed":
            worker.failing.add("double")
        if end == "TOO_LATE":
            for action, _ in worker.take_held():
                result = Result(action_id=action.action_id, error=ActionError.TOO_LATE)
                front_end.runtime.action_finished(WORKER, result, ())
        worker.release()
        await front_end.runtime.wait_idle()
        words = " ".join((await explain(front_end, "late")).words)
        assert "with 1 request." in words
        if end == "TOO_LATE":
            assert "ran it" not in words
            assert "measured" not in words
            assert "It was not run: the worker could not begin it within that window." in words
        else:
            assert "ran it in a batch of 1" in words
            assert "1.0 ms were measured" in words
            assert ("It failed: DEVICE." in words) is (end == "failed")


async def test_a_request_to_an_application_is_explained_with_the_requests_to_its_models(
    tmp_path: Path, front: str
) -> None:
    async with serving(tmp_path, front=front) as front_end:
        await front_end.applications.put(Application(name="app", models=("right", "wrong")))
        assert await ask(front_end, "both", model="app", tenant="gold") is None
        told = await explain(front_end, "both")
        assert (told.outcome, told.client_request_id, told.model_id, told.tenant) == (
            *("OK", "both", "app", "gold"),
        )
        assert [(each.model, each.outcome) for each in told.members] == [
            *(("right", "OK"), ("wrong", "OK")),
        ]
        assert told.request_id not in {each.request_id for each in told.members}
        for each in told.members:
            member = await explain(front_end, str(each.request_id))
            assert (member.model_id, member.outcome) == (each.model, "OK")
            assert any(f"request {each.request_id}" in sentence for sentence in told.words)
        assert (await explain(front_end, str(told.request_id))).model_id == "app"
        # The same question again is answered by the cache.
        assert await ask(front_end, "again", model="app") is None
        told = await explain(front_end, "again")
        assert {(each.request_id, each.outcome) for each in told.members} == {(0, "OK")}


async def test_a_request_to_an_application_is_explained_while_it_waits_and_when_it_had_no_answer(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as front_end:
        await front_end.applications.put(Application(name="app", models=("right",)))
        front_end.worker.hold = True
        asked = asyncio.create_task(ask(front_end, "slow", model="app"))
        await until(lambda: front_end.runtime.num_waiting == 1)
        told = await explain(front_end, "slow")
        assert (told.outcome, [each.outcome for each in told.members]) == ("OPEN", ["OPEN"])
        asked.cancel()
        await until(lambda: front_end.runtime.num_waiting == 0)
        assert (await explain(front_end, "slow")).outcome == "CANCELLED"
        told = control.ExplainResponse()
        # On a busy machine it may be late before a model is asked.
        while not told.members:
            refused = await ask(front_end, "hasty", model="app", slo_ms=50)
            assert refused is not None
            told = await explain(front_end, "hasty")
        assert refused is not None
        assert told.outcome == refused.refusal.value
        assert told.request_id == refused.figures["request_id"]
        (member,) = told.members
        assert member.outcome == told.outcome
        front_end.worker.release()


async def test_a_quota_that_stood_in_the_way_is_named(tmp_path: Path, front: str) -> None:
    async with serving(tmp_path, front=front) as front_end:
        await front_end.quotas.set("gold", Quota(slo_ns_max=NS_PER_S))
        refused = await ask(front_end, "greedy", tenant="gold")
        assert refused is not None
        told = await explain(front_end, "greedy")
        assert (told.outcome, told.tenant, told.request_id) == ("QUOTA", "gold", 0)
        assert "slo_ns_max" in told.detail
        assert told.words[-1] == "What would have let it succeed: an SLO of 1.00 s at most."


@pytest.mark.parametrize(
    ("quota", "remedy"),
    [
        (Quota(slo_ns_min=60 * NS_PER_S), "an SLO of 60.00 s at least."),
        (
            Quota(rate_rps=1e-4),
            "later, or more rate_rps for its tenant (`clockwright quotas set`).",
        ),
    ],
)
async def test_what_a_front_refuses_by_itself_is_explained_too(
    tmp_path: Path, quota: Quota, remedy: str
) -> None:
    async with serving(tmp_path, front="apart") as front_end:
        await front_end.quotas.set("gold", quota)
        told = control.ExplainResponse()
        # The controller refuses until it has told its front, which tells at its next beat whom it refused.
        for name in (f"greedy-{number}" for number in range(1000)):
            if await ask(front_end, name, tenant="gold") is not None:
                told = await explain_once_known(front_end, name)
            if any("front refused it by itself" in sentence for sentence in told.words):
                break
        assert (told.outcome, told.tenant, told.model_id) == ("QUOTA", "gold", "double")
        assert told.client_request_id == name
        assert 0 <= told.latency_ns < 30 * NS_PER_S
        assert told.words[-1].endswith(remedy)


async def test_names_may_be_given_twice_and_the_latest_request_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as front_end:
        assert await ask(front_end, "again") is None
        assert await ask(front_end, "again", slo_ms=0.5) is not None
        assert (await explain(front_end, "again")).outcome == "INFEASIBLE"
        for unknown in ("never", "999999", ""):
            with pytest.raises(UnknownModelError, match="no request"):
                await explain(front_end, unknown)


async def test_a_tenant_is_told_of_its_own_requests_only_and_an_operator_of_all(
    tmp_path: Path,
) -> None:
    keys = {
        name: make_key(secrets.token_bytes(4), secrets.token_urlsafe(32))
        for name in ("gold", "silver", "nobody", "ops")
    }

    def grant(name: str, roles: frozenset[Role], tenant: str) -> Grant:
        return Grant(name, roles, tenant, key_id=id_of(keys[name]), key_sha256=digest(keys[name]))

    grants = (
        grant("gold", CLIENT, "gold"),
        grant("silver", CLIENT, "silver"),
        grant("nobody", CLIENT, ""),
        grant("ops", frozenset((Role.OPERATOR,)), ""),
    )
    authoriser = Authoriser()
    authoriser.use(Rules(grants, anonymous=frozenset(), anonymous_tenants=False), now_s=0)
    async with serving(tmp_path, authoriser=authoriser) as front_end:
        assert await ask(front_end, "mine", key=keys["gold"]) is None
        assert await ask(front_end, "no-one's", key=keys["nobody"]) is None
        # Another's request of the same name does not hide one's own.
        assert await ask(front_end, "mine", key=keys["silver"], slo_ms=0.5) is not None
        told = await explain(front_end, "mine", key=keys["gold"])
        assert (told.outcome, told.tenant) == ("OK", "gold")
        other = await explain(front_end, "mine", key=keys["ops"])
        assert (other.outcome, other.tenant) == ("INFEASIBLE", "silver")
        for number, key in (
            (str(told.request_id), "silver"),
            (str(other.request_id), "gold"),
            ("no-one's", "gold"),
            ("no-one's", "nobody"),
        ):
            with pytest.raises(ClockwrightError, match="no request"):
                await explain(front_end, number, key=keys[key])
        assert (await explain(front_end, "no-one's", key=keys["ops"])).outcome == "OK"
