"""The dashboard's door: what it tells, to whom, and what it costs whoever does not look."""

from __future__ import annotations

import asyncio
import json
import threading
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from clockwright.client.operator import Operator
from clockwright.units import ModelId, WorkerId
from controller.access.config import AccessConfig
from controller.access.key_file import add_key, revoke_key
from controller.access.roles import Role
from controller.dashboard.live import ASKERS_MAX, VIEWERS_MAX, Live
from controller.dashboard.site import METHOD_OF
from tests.kit import virtual_time
from tests.kit.processes import until
from tests.kit.watched import Served, guarded, serving, taught


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    with guarded(tmp_path_factory.mktemp("closed") / "server") as found:
        yield found


def get(url: str, key: str = "", **headers: str) -> tuple[int, str]:
    """Status and what is said; of a stream only its first event."""
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        asked["Authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(url, headers=asked), timeout=60) as answer:
            is_stream = answer.headers["Content-Type"] == "text/event-stream"
            data: bytes = answer.readline() if is_stream else answer.read()
            return answer.status, data.decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_what_says_something_takes_the_role_of_the_method_that_says_the_same(
    closed: tuple[Served, str, str],
) -> None:
    served, look, infer = closed
    for path in ("/", "/main.js", "/uplot/uPlot.min.css"):
        assert get(served.url + path)[0] == 200
    for path, method in METHOD_OF.items():
        assert get(served.url + path)[0] == 401, path
        assert get(served.url + path, infer)[0] == 403, path
        allowed = method.role is Role.STATISTICS
        assert (get(served.url + path, look)[0] == 200) is allowed, path
    assert get(f"{served.url}/look/nothing")[0] == 404


def test_an_application_tells_what_each_context_believes(tmp_path: Path) -> None:
    with taught(tmp_path / "models") as served:

        def told(asked: str) -> dict[str, Any]:
            status, event = get(f"{served.url}/live/applications{asked}")
            assert status == 200
            found: dict[str, Any] = json.loads(event.removeprefix("data: "))
            return found

        def beliefs(context: str) -> dict[str, float]:
            (found,) = told(f"?name=app&context={context}")["applications"]
            return {row["model"]: row["weight"] for row in found["weights"]}

        (everybodys,) = told("")["applications"]
        assert everybodys["application"]["name"] == "app"
        assert everybodys["queries"] == 8
        assert everybodys["feedbacks"] == [{"reason": "APPLIED", "count": 6}]
        assert told("?name=app&context=ann")["context"] == "ann"
        assert beliefs("ann")["alpha"] > beliefs("ann")["beta"]
        assert beliefs("bob")["alpha"] < beliefs("bob")["beta"]
        with Operator(f"127.0.0.1:{served.controller.port}") as operator:
            (info,) = operator.applications("app", context="ann")
        assert beliefs("ann") == {row.model: row.weight for row in info.weights}
        assert "no application" in get(f"{served.url}/live/applications?name=nobody")[1]


def test_a_store_that_hangs_leaves_out_what_only_it_has_and_holds_up_nobody(tmp_path: Path) -> None:
    with taught(tmp_path / "models") as served:
        applications = served.controller.applications

        async def forget_ann() -> None:
            await applications._states.flush()
            assert applications._states.forget("app", "ann")
            # As where a context had to make room for others.
            applications._states._contexts.has_dropped = True

        def shown(name: str) -> dict[str, Any]:
            _, event = get(f"{served.url}/live/applications?name={name}&context=ann")
            (found,) = json.loads(event.removeprefix("data: "))["applications"]
            assert isinstance(found, dict)
            return found

        believed = shown("app")["weights"]
        served.run(forget_ann())
        gate = threading.Event()
        try:
            applications._store._thread.submit(gate.wait)
            found = shown("app")
            assert (found["weights"], found["queries"]) == ([], 8)
            assert "has not returned the state of 'ann' yet" in found["remark"]
            assert get(f"{served.url}/live/overview")[0] == 200
            assert get(f"{served.url}/look/history")[0] == 200
        finally:
            gate.set()
        until(lambda: shown("app")["weights"] == believed, what="the store has said it")
        assert not shown("app")["remark"]


def test_a_page_of_another_site_learns_nothing(server: Served) -> None:
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403)):
        assert get(f"{server.url}/look/history", Sec_Fetch_Site=site)[0] == status
    assert get(f"{server.url}/look/history", Origin="http://evil.example")[0] == 403
    # A name that its owner lets point to 127.0.0.1.
    assert get(f"{server.url}/look/history", Host="evil.example:8002")[0] == 403
    with urlopen(server.url) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_a_viewer_whose_key_is_revoked_sees_nothing_more(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    work = add_key(keys, "work", frozenset({Role.WORKER}))
    look = add_key(keys, "look", frozenset({Role.STATISTICS}))
    access = AccessConfig(keys_file=keys)
    with serving(tmp_path / "models", access=access, worker_key=work) as served:
        headers = {"Authorization": f"Bearer {look}"}
        with urlopen(Request(f"{served.url}/live/overview", headers=headers), timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
            revoke_key(keys, "look")
            # It ends, instead of going on for ever.
            while answer.readline():
                pass


def test_one_viewer_too_many_is_told_so_and_has_room_when_another_is_gone(server: Served) -> None:
    with ExitStack() as stack:
        streams = [
            stack.enter_context(urlopen(f"{server.url}/live/pages", timeout=60))
            for _ in range(VIEWERS_MAX)
        ]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
        status, words = get(f"{server.url}/live/pages")
        assert (status, words.startswith(f"found {VIEWERS_MAX} viewers")) == (503, True)
        streams[0].close()
        until(lambda: get(f"{server.url}/live/pages")[0] == 200, what="a place is free")


async def test_nobody_looks_and_nothing_is_made_and_a_slow_viewer_gets_the_newest() -> None:
    made = 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        return b"%d" % made

    live = Live(interval_s=0)
    quick, slow = live.watch("same", make), live.watch("same", make)
    assert made == 0
    assert await anext(slow) == b"1"
    for _ in range(20):
        last = await anext(quick)
    assert made == int(last)
    # None of the looks in between was kept.
    assert int(await anext(slow)) == made
    await quick.aclose()
    await slow.aclose()
    assert live.num_viewers == 0
    so_far = made
    for _ in range(100):
        await asyncio.sleep(0)
    assert made == so_far


@pytest.mark.parametrize("look_s", [0.01, 0.4, 3.0])
@pytest.mark.virtual_time
async def test_however_many_look_it_takes_a_part_of_the_loops_time(look_s: float) -> None:
    looking_s = 0.0
    over_s = 6000 * look_s

    async def make() -> bytes:
        nonlocal looking_s
        # Others have their turn between its two halves, which take none of its time.
        for _ in range(2):
            await asyncio.sleep(look_s / 2)
            looking_s += look_s / 2
        return b""

    async def ask_without_a_pause(live: Live) -> None:
        while True:
            await live.look(make)

    async def view(live: Live, name: str) -> None:
        async for _ in live.watch(name, make):
            pass

    live = Live(clock=lambda: looking_s)
    viewers = [view(live, f"page {number}") for number in range(VIEWERS_MAX)]
    tasks = [asyncio.create_task(each) for each in (*viewers, ask_without_a_pause(live))]
    await asyncio.sleep(over_s)
    assert over_s / 25 < looking_s < over_s / 20
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_however_many_ask_without_a_pause_a_viewer_gets_every_second_look() -> None:
    looks: list[str] = []

    async def test() -> None:
        live = Live(interval_s=0)

        async def make(name: str) -> bytes:
            looks.append(name)
            return b""

        async def ask_without_a_pause() -> None:
            while True:
                await live.look(partial(make, "asker"))

        askers = [asyncio.create_task(ask_without_a_pause()) for _ in range(ASKERS_MAX)]
        await asyncio.sleep(0)
        assert not live.has_room_to_ask
        viewer = live.watch("page", partial(make, "viewer"))
        for _ in range(20):
            await anext(viewer)
        await viewer.aclose()
        for task in askers:
            task.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
        assert live.has_room_to_ask
        # The first of them had come before the viewer.
        told = "".join(name[0] for name in looks[looks.index("viewer") :])
        assert "aaa" not in told

    virtual_time.run(test)


def test_the_past_says_of_each_second_what_was_asked_and_what_was_answered(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "models") as served:
        assert served.ask("alpha", times=3) == ["OK"] * 3
        (refused,) = served.ask("beta", slo_ns=1)

        def past(name: str = "") -> list[dict[str, Any]]:
            status, words = get(f"{served.url}/look/history?name={name}")
            assert status == 200
            seconds: list[dict[str, Any]] = json.loads(words)["seconds"]
            return seconds

        # The second that is not over is none of the past yet.
        until(lambda: sum(second["asked_rps"] for second in past()) == 4, what="the past has all")
        assert sum(second["good_rps"] for second in past()) == 3
        assert sum(second["refused_rps"].get(refused, 0) for second in past("beta")) == 1
        assert sum(second["asked_rps"] for second in past("alpha")) == 3
        assert all(0 < second["p99_share"] < 1 for second in past("alpha") if second["good_rps"])
        assert past("nobody") == [] or not any(second["asked_rps"] for second in past("nobody"))


def test_parts_of_a_workers_pages_are_its_whole_whatever_comes_and_goes_during_a_look(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_id = WorkerId(server.worker.register.worker_id)
    # The head of the page was made before these were loaded.
    held = {worker_id: [(ModelId("alpha"), 3, True), (ModelId("beta"), 2, False)]}
    monkeypatch.setattr(server.controller.runtime, "held_pages", lambda: held)
    _, words = get(f"{server.url}/live/pages")
    (shown,) = json.loads(words.removeprefix("data: "))["holders"]
    assert (shown["pages"], shown["free"]) == (8, 3)


def test_all_files_of_the_page_are_shipped() -> None:
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    package = root / "controller" / "dashboard"
    shipped = {
        path
        for pattern in settings["tool"]["setuptools"]["package-data"]["controller.dashboard"]
        for path in package.glob(pattern)
    }
    assert {path for path in package.rglob("static/**/*") if path.is_file()} <= shipped
