"""Versions of a name: what operators may say of them, which one a request gets, and how they come and go."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ModelError, Refusal, UnknownModelError
from clockwright.units import NS_PER_S, WEIGHT_MIN, RequestId
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire.bulk import Buffer
from controller.core import Scheduler
from controller.front.remote import link_frames as frames
from controller.front.remote.descriptions import Descriptions
from controller.front.services.inference import _user_of
from controller.models.catalogue import Catalogue, name_of
from controller.models.entry import Entry
from controller.models.model_folder import read_versions
from controller.models.state_file import StateFile
from controller.models.versions import Routing, ServedVersions, Versions, read_served
from controller.models.warming import warm
from controller.port import Answered, Ask, Refused, Told
from controller.runtime import Runtime
from controller.selection import shadows
from controller.selection.core.buckets import bucket, share_at
from controller.selection.shadows import Shadows
from controller.telemetry.tables import Telemetry
from tests.kit.catalogue_bench import CatalogueBench, make_folder
from tests.kit.double import INFER, first, request
from tests.kit.examples import examples
from tests.kit.front_end import FrontEnd, serving, serving_in_thread, until

# --- what operators say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"serve": "all"}, ["1", "2", "10"]),
        ({"serve": [10, 1]}, ["1", "10"]),
        ({"serve": [1, 7]}, ["1"]),
        ({"serve": {"latest": 2}}, ["2", "10"]),
        ({"serve": {"latest": 9}}, ["1", "2", "10"]),
        ({"serve": []}, None),
        ({"serve": [True]}, None),
        ({"serve": ["1"]}, None),
        ({"serve": "latest"}, None),
        ({"serve": {"latest": 0}}, None),
        ({"serve": {"latest": 33}}, None),
        ({"serve": [1], "also": 2}, None),
        ({"serve": [7]}, None),
        (3, None),
    ],
)
def test_served_versions_are_a_list_all_or_the_latest(
    table: object, expected: list[str] | None
) -> None:
    if expected is None:
        with pytest.raises(ModelError, match="versions"):
            read_served(table).choose(["10", "2", "1"])
    else:
        assert read_served(table).choose(["10", "2", "1"]) == expected


def test_too_many_versions_at_once_are_refused_and_not_cut() -> None:
    found = [str(number) for number in range(1, 34)]
    with pytest.raises(ModelError, match="found 33, expected 32 at most"):
        ServedVersions().choose(found)
    assert ServedVersions(latest=2).choose(found) == ["32", "33"]


@pytest.mark.parametrize(
    ("aliases", "traffic", "shadow", "message"),
    [
        ({"2": "1"}, {}, {}, "alias '2': expected"),
        ({"latest": "1"}, {}, {}, "neither a number nor latest"),
        ({"stable": "one"}, {}, {}, "alias stable: found 'one', expected a version"),
        ({f"a{n}": "1" for n in range(65)}, {}, {}, "aliases: found 65, expected 64 at most"),
        ({}, {"1": 0.5}, {}, "shares of 0.5 together, expected 1"),
        ({}, {"1": 1.5}, {}, "traffic.1 is 1.5, expected a share from 0 to 1"),
        ({}, {"1": float("nan")}, {}, "traffic.1 is nan"),
        ({}, {"1": True}, {}, "traffic.1 is True"),
        ({}, {}, {"1": 0.1, "2": 0.1}, "shadow: found 1, 2, expected one version"),
        ([], {}, {}, "aliases is \\[\\], expected a table"),
    ],
)
def test_what_cannot_be_said_of_versions_is_named(
    aliases: Any,  # noqa: ANN401
    traffic: dict[str, float],
    shadow: dict[str, float],
    message: str,
) -> None:
    with pytest.raises(ModelError, match=message):
        Routing.read(aliases, traffic, shadow)


def changed(routing: Routing, present: dict[str, float], **change: Any) -> Routing:  # noqa: ANN401
    whole: dict[str, Any] = {"aliases": {}, "traffic": {}, "shadow": {}}
    return routing.changed(**(whole | change), present=present)


def test_a_share_is_taken_from_the_others_in_proportion() -> None:
    present = {"1": 0.0, "2": 0.0, "3": 1.0}
    # The highest serves all: the rest goes to the one before it.
    routing = changed(Routing(), present, traffic={"3": 0.1})
    assert routing.traffic == pytest.approx({"3": 0.1, "2": 0.9})
    routing = changed(routing, present, traffic={"1": 0.5}, aliases={"canary": "3"})
    assert routing.traffic == pytest.approx({"1": 0.5, "3": 0.05, "2": 0.45})
    routing = changed(routing, present, traffic={"canary": 1.0})
    assert routing.traffic == {"canary": 1.0}
    # What has its traffic by an alias keeps it by the alias.
    routing = changed(routing, present, traffic={"1": 0.25})
    assert routing.traffic == pytest.approx({"1": 0.25, "canary": 0.75})
    routing = changed(routing, present, shadow={"2": 0.1})
    assert routing.shadow == {"2": 0.1}
    assert changed(routing, present, shadow={"2": 0}).shadow == {}
    assert changed(routing, present, traffic={"latest": 1}).traffic == {"latest": 1}
    for change, message in (
        ({"traffic": {"4": 0.1}}, "found version '4', expected one of 1, 2, 3, canary, latest"),
        ({"traffic": {"1": 0.7, "2": 0.7}}, "shares of 1.4 together, expected 1 at most"),
        ({"traffic": {"latest": 0.5}}, "latest with a part of the requests"),
        ({"aliases": {"gone": ""}}, "there is no alias gone"),
        ({"aliases": {"canary": ""}}, "alias canary has traffic"),
        ({"aliases": {"stable": "9"}}, "found version '9'"),
        ({"shadow": {"9": 0.1}}, "found version '9'"),
    ):
        with pytest.raises(ModelError, match=message):
            changed(routing, present, **change)
    with pytest.raises(ModelError, match="no other version that is served"):
        changed(Routing(), {"1": 1.0}, traffic={"1": 0.5})
    with pytest.raises(ModelError, match="version 1 is the only one that is served"):
        changed(Routing(), {"1": 1.0}, shadow={"1": 0.1})
    assert changed(Routing(), {"1": 1.0}, shadow={"1": 0}).shadow == {}
    assert Routing.from_json(routing.to_json()) == routing


def test_wrong_shares_do_not_hide_that_a_version_is_missing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config="[versions]\nserve = [7]\n[traffic]\n1 = 0.5\n")
    with pytest.raises(ModelError) as caught:
        read_versions(folder)
    assert "traffic: found shares of 0.5 together, expected 1" in str(caught.value)
    assert "expected one of the versions 7, found 1" in str(caught.value)


class Version:
    def __init__(self, version: str) -> None:
        self.version = version


@given(
    st.lists(st.sampled_from(["1", "2", "3", "10"]), min_size=1, unique=True),
    st.lists(st.sampled_from(["1", "2", "3", "10"]), unique=True),
    st.dictionaries(st.sampled_from(["1", "2", "3", "10", "stable"]), st.integers(1, 5)),
)
@examples(200)
def test_shares_are_one_together_and_nothing_that_is_not_ready_gets_any_but_the_largest(
    served: list[str], ready: list[str], parts: dict[str, int]
) -> None:
    versions: Versions[Version] = Versions()
    for each in served:
        versions.put(Version(each))
    total = sum(parts.values())
    versions.routing = Routing({"stable": "2"}, {each: n / total for each, n in parts.items()})
    shares = versions.shares(ready)
    assert list(shares) == sorted(shares, key=int)
    assert sum(shares.values()) == pytest.approx(1)
    assert set(shares) <= set(served)
    largest = max(shares, key=lambda each: shares[each])
    assert set(shares) - {largest} <= set(ready)
    assert versions.find("", ready) is versions.find(largest, ready)


def test_no_version_stands_in_for_the_one_that_most_requests_are_for() -> None:
    versions: Versions[Version] = Versions()
    for each in ("1", "2", "3"):
        versions.put(Version(each))
    versions.routing = Routing({}, {"1": 0.9, "2": 0.1})
    assert versions.shares(["1", "2"]) == pytest.approx({"1": 0.9, "2": 0.1})
    assert versions.shares(["1"]) == {"1": 1.0}
    assert versions.shares(["2", "3"]) == pytest.approx({"1": 0.9, "2": 0.1})
    versions.routing = Routing()
    assert versions.shares(["1", "2"]) == {"2": 1.0}
    assert versions.shares([]) == {"3": 1.0}


# --- the catalogue --------------------------------------------------------------------------------

ALL = '[versions]\nserve = "all"\n'


def add_version(folder: Path, version: str) -> None:
    (folder / version).mkdir()
    (folder / version / "model.onnx").write_bytes(version.encode())


async def offered(bench: CatalogueBench, number: int) -> list[Entry]:
    return [await bench.offers.offered.get() for _ in range(number)]


async def test_versions_are_models_of_their_own_and_one_that_is_as_it_was_serves_on(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path, config=ALL)
    add_version(folder, "2")
    bench = await CatalogueBench.scanned(tmp_path, "w")
    catalogue = bench.catalogue
    one, two = await offered(bench, 2)
    assert [one.model_id, two.model_id] == ["m:1", "m:2"]
    assert {name_of(each.model_id) for each in (one, two)} == {"m"}
    # Until one is ready the highest is named; then what can answer does.
    assert catalogue.find("m") is two
    bench.ready("m:1", "w")
    assert catalogue.find("m") is one
    bench.ready("m:2", "w")
    assert catalogue.find("m") is two
    assert catalogue.find("m", "1") is one
    assert catalogue.find("m", "3") is None
    assert [model.version for model in catalogue.models] == ["1", "2"]

    add_version(folder, "3")
    (folder / "1" / "model.onnx").write_bytes(b"mended")
    reloading = asyncio.create_task(catalogue.reload("m"))
    mended, three = await offered(bench, 2)
    assert [mended.model_id, three.model_id] == ["m:1@2", "m:3"]
    bench.ready("m:1@2", "w")
    assert catalogue.find("m", "1") is one
    assert catalogue.find("m") is two
    bench.ready("m:3", "w")
    assert set(await reloading) == {two, mended, three}
    assert catalogue.versions("m") == [mended, two, three]
    assert catalogue.find("m") is three
    # The latest was another before.
    await catalogue.roll_back("m")
    assert catalogue.find("m") is two
    await catalogue.roll_back("m")
    assert catalogue.find("m") is three

    os.rename(folder / "2", tmp_path / ".gone")
    (folder / "config.toml").write_text(ALL + "[aliases]\nstable = 1\n")
    assert set(await catalogue.reload("m")) == {mended, three}
    assert bench.offers.offered.empty()
    await until(lambda: catalogue.find_id(two.model_id) is None)
    with pytest.raises(ModelError, match="version 2, which served before, is not served any more"):
        await catalogue.roll_back("m")
    await catalogue.remove("m")
    assert catalogue.models == []
    assert not catalogue.holds("m")


async def test_a_new_version_runs_before_it_takes_requests_and_a_first_model_need_not(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path, config=ALL)
    bench = CatalogueBench(tmp_path)
    warmed: asyncio.Queue[Entry] = asyncio.Queue()
    may_end = asyncio.Event()

    async def warm_one(model: Entry) -> None:
        warmed.put_nowait(model)
        await may_end.wait()

    bench.catalogue = Catalogue(bench.runtime, tmp_path, warm=warm_one)
    bench.join("w")
    adding = asyncio.create_task(bench.catalogue.reload("m"))
    [one] = await offered(bench, 1)
    bench.ready(one.model_id, "w")
    assert await adding == [one]
    assert warmed.empty()
    add_version(folder, "2")
    reloading = asyncio.create_task(bench.catalogue.reload("m"))
    [two] = await offered(bench, 1)
    bench.ready(two.model_id, "w")
    assert await warmed.get() is two
    assert bench.catalogue.find("m", "2") is None
    may_end.set()
    await reloading
    assert bench.catalogue.find("m") is two


async def test_what_an_operator_said_outlives_a_restart_and_goes_with_the_model(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path, config=ALL + "[traffic]\n1 = 1\n")
    add_version(folder, "2")
    state_path = tmp_path / ".state" / "state.sqlite"

    async def started() -> tuple[Catalogue, StateFile]:
        state = StateFile(state_path)
        catalogue = Catalogue(Runtime(Scheduler(), Telemetry()), tmp_path, state=state)
        await catalogue.restore()
        await catalogue.scan()
        return catalogue, state

    catalogue, state = await started()
    assert catalogue.routing("m").traffic == {"1": 1}
    with pytest.raises(ModelError, match="found no change to roll back"):
        await catalogue.roll_back("m")
    await catalogue.route("m", aliases={"stable": "2"}, traffic={"stable": 0.3}, shadow={"1": 0.1})
    said = catalogue.routing("m")
    assert said == Routing({"stable": "2"}, {"stable": 0.3, "1": 0.7}, {"1": 0.1})
    await state.close()

    catalogue, state = await started()
    assert catalogue.routing("m") == said
    await catalogue.roll_back("m")
    await state.close()
    catalogue, state = await started()
    assert catalogue.routing("m") == Routing({}, {"1": 1})
    with pytest.raises(UnknownModelError, match="there is no model x"):
        await catalogue.route("x", aliases={"a": "1"}, traffic={}, shadow={})
    await catalogue.remove("m")
    await state.close()
    catalogue, state = await started()
    assert catalogue.routing("m") == Routing({}, {"1": 1})
    with pytest.raises(ModelError, match="found no change to roll back"):
        await catalogue.roll_back("m")
    await state.close()


# --- requests -------------------------------------------------------------------------------------


async def call(address: str, path: str, message: bytes) -> bytes:
    aio: Any = grpc.aio
    async with aio.insecure_channel(address) as channel:
        answer: bytes = await channel.unary_unary(path)(message)
    return answer


def served_by(front_end: FrontEnd) -> Counter[str]:
    """Rows of requests by the model that ran them."""
    counts: Counter[str] = Counter()
    for infer in front_end.worker.infers:
        counts[infer.model_id] += sum(infer.rows)
    return counts


def two_versions(directory: Path, config: str) -> None:
    folder = make_folder(directory, "double", config=ALL + config)
    add_version(folder, "2")


@pytest.mark.parametrize("front", ["here", "apart"])
async def test_requests_without_a_version_are_shared_out_and_others_get_theirs(
    tmp_path: Path, front: str
) -> None:
    two_versions(tmp_path, "[traffic]\n1 = 0.5\n2 = 0.5\n")
    async with serving(tmp_path, front=front) as front_end:

        async def ask(version: str = "", context: str = "") -> str:
            message = pb.ModelInferRequest.FromString(request(3))
            message.model_version = version
            if context:
                message.parameters["context"].string_param = context
            data = await call(front_end.address, INFER, message.SerializeToString())
            assert first(data) == 6
            return pb.ModelInferResponse.FromString(data).model_version

        assert [await ask(version) for version in ("1", "2", "1")] == ["1", "2", "1"]
        drawn = Counter([await ask() for _ in range(40)])
        assert set(drawn) == {"1", "2"}
        users = [f"user {number}" for number in range(20)]
        seen = [await ask(context=user) for user in users]
        assert set(seen) == {"1", "2"}
        assert [await ask(context=user) for user in users] == seen
        by_model = served_by(front_end)
        assert by_model["double:1"] == 2 + drawn["1"] + 2 * seen.count("1")
        # All fronts follow at once.
        await front_end.catalogue.route("double", aliases={}, traffic={"2": 1}, shadow={})
        assert {await ask(context=user) for user in users} == {"2"}


@pytest.mark.parametrize("front", ["here", "apart"])
async def test_requests_with_the_sequence_0_or_an_empty_one_are_of_no_sequence(
    tmp_path: Path, front: str
) -> None:
    two_versions(tmp_path, "[traffic]\n1 = 0.5\n2 = 0.5\n")
    async with serving(tmp_path, front=front) as front_end:

        async def ask(**sequence: Any) -> str:  # noqa: ANN401
            message = pb.ModelInferRequest.FromString(request(3))
            message.parameters["sequence_id"].MergeFrom(pb.InferParameter(**sequence))
            data = await call(front_end.address, INFER, message.SerializeToString())
            return pb.ModelInferResponse.FromString(data).model_version

        for none in ({"int64_param": 0}, {"uint64_param": 0}, {"string_param": ""}):
            assert {await ask(**none) for _ in range(40)} == {"1", "2"}


def test_a_sequence_has_one_version_whatever_integer_its_id_is() -> None:
    users = set()
    for kind in ("int64_param", "uint64_param"):
        message = pb.ModelInferRequest()
        setattr(message.parameters["sequence_id"], kind, 300)
        users.add(_user_of(message))
    assert len(users) == 1
    assert users != {b""}


async def test_a_request_whose_version_goes_before_its_front_hears_of_it_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_versions(tmp_path, "[traffic]\n1 = 0.5\n2 = 0.5\n")
    describe = Descriptions.describe
    described: list[str] = []

    def count(self: Descriptions, asked: frames.Describe) -> frames.Described:
        described.append(asked.version)
        return describe(self, asked)

    monkeypatch.setattr(Descriptions, "describe", count)
    async with serving(tmp_path, front="apart") as front_end:

        async def ask(user: str) -> str:
            message = pb.ModelInferRequest.FromString(request(3))
            message.parameters["context"].string_param = user
            data = await call(front_end.address, INFER, message.SerializeToString())
            return pb.ModelInferResponse.FromString(data).model_version

        shares = {"1": 0.5, "2": 0.5}
        users = {share_at(bucket("double", f"{n}"), shares): f"{n}" for n in range(20)}
        # The front knows the traffic, and of the versions the first.
        assert await ask(users["1"]) == "1"
        catalogue = front_end.catalogue
        two = catalogue.find("double", "2")
        assert two is not None
        catalogue._drop(two)
        asking = asyncio.create_task(ask(users["2"]))
        await until(lambda: described.count("2") > 2)
        catalogue.renew()
        assert await asking == "1"


@pytest.mark.parametrize("front", ["here", "apart"])
def test_a_user_of_rest_keeps_the_version_too(tmp_path: Path, front: str) -> None:
    two_versions(tmp_path, "[traffic]\n1 = 0.5\n2 = 0.5\n")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    with serving_in_thread(tmp_path, front=front, rest=True) as server:

        def ask(user: str, version: str = "") -> str:
            path = f"versions/{version}/infer" if version else "infer"
            parameters = {"slo_ms": 600_000} | ({"context": user} if user else {})
            answer = requests.post(
                f"http://{server.rest}/v2/models/double/{path}",
                json={"inputs": [tensor], "parameters": parameters},
                timeout=60,
            ).json()
            return str(answer["model_version"])

        users = [f"user {number}" for number in range(12)]
        seen = [ask(user) for user in users]
        assert set(seen) == {"1", "2"}
        for _ in range(3):
            assert [ask(user) for user in users] == seen
        assert {ask("") for _ in range(40)} == {"1", "2"}
        assert {ask("", "1") for _ in range(3)} == {"1"}


@pytest.mark.parametrize("front", ["here", "apart"])
async def test_a_shadow_gets_copies_of_what_was_answered_and_no_client_sees_it(
    tmp_path: Path, front: str
) -> None:
    two_versions(tmp_path, "[traffic]\n1 = 1\n[shadow]\n2 = 1.0\n")
    async with serving(tmp_path, front=front) as front_end:
        for number in range(10):
            data = await call(front_end.address, INFER, request(number))
            assert first(data) == 2 * number
            assert pb.ModelInferResponse.FromString(data).model_version == "1"
        await until(lambda: served_by(front_end)["double:2"] == 10)
        # They are worth next to nothing, and are for no tenant; the scheduler takes them for a batch client's.
        rows = [row for row in front_end.runtime.telemetry.requests if row.model_id == "double:2"]
        assert {(row.weight, row.slo_ns >= 10 * NS_PER_S, row.tenant) for row in rows} == {
            (WEIGHT_MIN, True, "")
        }
        # Its own requests get no copies.
        message = pb.ModelInferRequest.FromString(request(1))
        message.model_version = "2"
        await call(front_end.address, INFER, message.SerializeToString())
        await until(lambda: front_end.runtime.num_waiting == 0)
        assert served_by(front_end) == {"double:1": 10, "double:2": 11}
        await front_end.catalogue.route("double", aliases={}, traffic={}, shadow={"2": 0})
        await call(front_end.address, INFER, request(1))
        assert served_by(front_end)["double:2"] == 11


class TellsHow:
    """Takes what is told of a request."""

    def __init__(self) -> None:
        self.told_of: list[Told] = []

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        self.told_of.append(told)


async def test_copies_are_bounded_and_a_refused_request_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows, "OPEN_MAX", 3)
    async with serving(tmp_path) as front_end:
        model = front_end.catalogue.find("double")
        assert model is not None
        made = Shadows(front_end.runtime)
        ask = Ask(0, 1, 0, NS_PER_S)

        def follow(told: Told) -> None:
            sink = TellsHow()
            made.follow(model, 1.0, ask, (bytes(12),), sink).told(RequestId(1), told, ())
            assert sink.told_of == [told]

        follow(Refused(Refusal.LATE, {}))
        assert front_end.runtime.num_waiting == 0
        for _ in range(5):
            follow(Answered(0))
        assert front_end.runtime.num_waiting == 3
        await until(lambda: front_end.runtime.num_waiting == 0)
        follow(Answered(0))
        assert front_end.runtime.num_waiting == 1
        sink = TellsHow()
        assert made.follow(model, 0.0, ask, (), sink) is sink
        assert made.follow(model, 1.0, Ask(0, 1000, 0, 1), (), sink) is sink


async def test_warming_loads_a_model_and_runs_it_and_gives_up_where_it_cannot(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as front_end:
        model = front_end.catalogue.find("mixed")
        assert model is not None
        await warm(front_end.runtime, model)
        assert served_by(front_end)["mixed"] == 1
        row = front_end.runtime.model_statistics(model.model_id)
        assert row is not None
        assert row.resident_on
        front_end.worker.failing.add("mixed")
        await warm(front_end.runtime, model)
