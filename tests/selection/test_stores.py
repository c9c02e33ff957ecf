"""Applications and their states outlive the process: in SQLite, in a real Redis, and while these are away."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from clockwright.errors import BadRequestError, ConfigError, ModelError, StoreError
from controller.models.entry import Entry
from controller.selection.core.contexts import Contexts
from controller.selection.core.journal import FeedbackItem, FeedbackStatus
from controller.selection.core.query import Choice, Observation, Query
from controller.selection.policies.tallies import EpsilonGreedy, Tallies
from controller.selection.stores import Store
from tests.kit.asking import Reply
from tests.kit.desk import SLO_NS, Desk, desk, label, run, run_on_real_time
from tests.kit.front_end import until
from tests.kit.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")

OPTIONS = {"eta": 1.0, "crowd": False}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    server: RedisServer = request.getfixturevalue("redis")
    with server.client() as client:
        client.flushall()
    return server.url


def changes(**records: Mapping[str, Any]) -> dict[tuple[str, str], Callable[[], dict[str, Any]]]:
    return {("app", context): partial(dict, record) for context, record in records.items()}


@contextmanager
def held(store: Store) -> Iterator[None]:
    """Keep the store from working, on real time; calls meanwhile wait in its queue."""
    entered, gate = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        gate.wait()

    store._thread.submit(wait)
    assert entered.wait(60)
    try:
        yield
    finally:
        gate.set()


async def begun(task: asyncio.Task[T], store: Store) -> asyncio.Task[T]:
    """Let a task run until it waits for the store."""
    before = store._thread._work_queue.qsize()
    await until(lambda: store._thread._work_queue.qsize() > before)
    return task


# --- the store itself -----------------------------------------------------------------------------


async def test_what_was_saved_is_there_after_closing(where: str) -> None:
    store = Store(where)
    assert await store.load(("app", "ann")) is None
    assert await store.applications() == []
    await store.save_application("b", {"revision": 1}, forget=True)
    await store.save_application("a", {"revision": 2}, forget=True)
    strange = 'f\N{LATIN SMALL LETTER U WITH DIAERESIS}r "\0:*'
    await store.save({**changes(ann={"n": 1}), ("app", strange): lambda: {"n": 2}})
    assert await store.save(changes(ann={"n": 3})) == {}
    await store.close()
    store = Store(where)
    assert await store.load(("app", "ann")) == {"n": 3}
    assert await store.load(("app", strange)) == {"n": 2}
    assert await store.applications() == [{"revision": 2}, {"revision": 1}]
    await store.close()


async def test_what_was_erased_is_gone(where: str) -> None:
    store = Store(where)
    await store.save({**changes(ann={}, bob={}), ("other", "ann"): dict})
    assert await store.erase("app", "ann")
    assert not await store.erase("app", "ann")
    assert await store.load(("app", "ann")) is None
    assert await store.load(("app", "bob")) == {}
    await store.save_application("app", {}, forget=False)
    assert await store.load(("app", "bob")) == {}
    await store.save_application("app", {}, forget=True)
    assert await store.load(("app", "bob")) is None
    await store.save(changes(ann={}))
    await store.remove_application("app")
    assert await store.applications() == []
    assert await store.load(("app", "ann")) is None
    assert await store.load(("other", "ann")) == {}
    await store.close()


async def test_a_record_that_cannot_be_made_leaves_the_others_alone(where: str) -> None:
    store = Store(where)
    records = changes(ann={"n": 1}, bob={"n": object()})
    records["app", "cy"] = partial(fail, 1)
    faults = await store.save(records)
    assert {address: type(fault) for address, fault in faults.items()} == {
        ("app", "bob"): TypeError,
        ("app", "cy"): ZeroDivisionError,
    }
    assert await store.load(("app", "ann")) == {"n": 1}
    await store.close()


def fail(number: int) -> dict[str, Any]:
    return {"n": number / 0}


def test_a_store_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="found layout 99, expected 1"):
        Store(path)
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Store(path)


def test_a_redis_of_another_layout_is_refused(redis: RedisServer) -> None:
    with redis.client() as client:
        client.flushall()
        client.set("clockwright:layout", "99")
    with pytest.raises(ConfigError, match="found layout 99, expected 1"):
        run(Store(redis.url).open)


def test_where_no_redis_answers_is_said_without_the_password() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nobody listens there.
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="expected a Redis server that answers") as caught:
            run(Store(f"redis://ann:secret@127.0.0.1:{port}/3").open)
    assert f"redis://127.0.0.1:{port}/3" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="found database 'three', expected a number"):
        Store("redis://127.0.0.1/three")
    with pytest.raises(ConfigError, match="socket_timout"):
        run(Store("redis://127.0.0.1/0?socket_timout=5").open)
    with pytest.raises(ConfigError, match="found a URL of postgres://, expected a file, or redis"):
        Store("postgres://127.0.0.1/x")


def test_a_redis_without_its_package_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "controller.selection.stores.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'clockwright\[redis\]'"):
        Store("redis://127.0.0.1:1")


# --- applications and their store -----------------------------------------------------------------


async def test_a_user_is_forgotten_on_request(tmp_path: Path, where: str) -> None:
    async with desk(tmp_path, store=where) as app:
        await app.put("right", "wrong", options=OPTIONS)
        for _ in range(5):
            await app.teach(await app.ask(1, context="ann"), label=2)
        open_query = await app.ask(1, context="ann")
        for _ in range(20):
            await app.teach(await app.ask(1, context="bob"), label=1)
        assert (await app.weights("ann"))["wrong"] > 0.9
        assert await app.applications.erase("app", "ann")
        assert await app.weights("ann") == await app.weights()
        assert (await app.teach(open_query, label=2)).status is FeedbackStatus.UNKNOWN
        assert not await app.applications.erase("app", "ann")
        with pytest.raises(BadRequestError, match="context: found none"):
            await app.applications.erase("app", "")


async def test_what_was_learned_survives_a_restart(tmp_path: Path, where: str) -> None:
    async def first() -> tuple[dict[str, float], dict[str, float], Reply]:
        async with desk(tmp_path, store=where) as app:
            await app.put("right", "wrong", slo_ns=SLO_NS, options={"eta": 0.5, "crowd": False})
            for _ in range(5):
                await app.teach(await app.ask(1, context="ann"), label=1)
            return await app.weights(), await app.weights("ann"), await app.ask(1)

    async def second(everybody: dict[str, float], ann: dict[str, float], before: Reply) -> None:
        async with desk(tmp_path, store=where) as app:
            running = app.applications.find("app")
            assert running is not None
            assert running.application.slo_ns == SLO_NS
            assert await app.weights() == everybody
            assert await app.weights("ann") == ann
            after = await app.ask(1)
            assert label(after) == 1
            # Feedback to an answer of the last run finds nothing in this one.
            assert (await app.teach(before, label=2)).status is FeedbackStatus.UNKNOWN

    await second(*await first())


async def test_states_that_left_memory_come_back_from_the_store(tmp_path: Path, where: str) -> None:
    async with desk(tmp_path, store=where, contexts_max=2) as app:
        await app.put("right", "wrong", options=OPTIONS)
        users = [f"user {n}" for n in range(10)]
        for user in users:
            await app.teach(await app.ask(1, context=user), label=2)
        await app.applications._states.flush()
        assert app.applications.num_contexts("app") <= 2
        shares = {(await app.weights(user))["wrong"] for user in users[1:]}
        assert min(shares) > 0.7


def test_what_is_being_read_while_it_is_erased_does_not_come_back(
    tmp_path: Path, where: str
) -> None:
    async def main() -> None:
        async with desk(tmp_path, store=where) as app:
            await app.put("right", "wrong", options=OPTIONS)
            await app.teach(await app.ask(1, context="ann"), label=2)
            for _ in range(5):
                await app.teach(await app.ask(1), label=1)
        async with desk(tmp_path, store=where) as app:
            store = app.applications._store
            query_id = str((await app.ask(1, context="ann")).parameters["query_id"])
            # Forget ann's state in memory, as if it had been evicted between her answer and her feedback.
            app.applications._states.forget("app", "ann")
            with held(store):
                reading = await begun(asyncio.create_task(app.weights("ann")), store)
                # This waits for the same read.
                teaching = asyncio.create_task(
                    app.applications.feedback([FeedbackItem(query_id, label=2)])
                )
                await asyncio.sleep(0)
                erasing = await begun(
                    asyncio.create_task(app.applications.erase("app", "ann")), store
                )
            assert await erasing
            await asyncio.gather(reading, teaching)
            assert await app.weights("ann") == await app.weights()
            await app.applications._states.flush()
            assert await store.load(("app", "ann")) is None

    run_on_real_time(main)


async def test_an_application_whose_name_a_model_has_taken_waits_for_another_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where, folder = str(tmp_path / "store.sqlite"), tmp_path / "app" / "1"
    async with desk(tmp_path, store=where) as app:
        await app.put("right", "wrong", options=OPTIONS)
        await app.teach(await app.ask(1), label=1)
        weights = await app.weights()
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"scripted")
    async with desk(tmp_path, store=where) as app:
        assert app.applications.all == []
        assert app.front_end.catalogue.find("app") is not None
    assert "there is a model of that name" in caplog.text
    (folder / "model.onnx").unlink()
    folder.rmdir()
    folder.parent.rmdir()
    async with desk(tmp_path, store=where) as app:
        assert await app.weights() == weights


def test_names_do_not_clash_while_a_model_or_an_application_is_on_its_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with desk(tmp_path) as app:
            catalogue, store = app.front_end.catalogue, app.applications._store
            (tmp_path / "app" / "1").mkdir(parents=True)
            (tmp_path / "app" / "1" / "model.onnx").write_bytes(b"scripted")
            offered: list[Entry] = []
            app.worker.offer = offered.append  # type: ignore[method-assign,assignment]
            adding = asyncio.create_task(catalogue.reload("app"))
            await until(lambda: bool(offered))
            with pytest.raises(ModelError, match="there is a model of that name"):
                await app.put("right")
            adding.cancel()
            await asyncio.wait([adding])
            with held(store):
                putting = await begun(asyncio.create_task(app.put("right")), store)
                with pytest.raises(ModelError, match="there is an application app already"):
                    await catalogue.reload("app")
            await putting
            assert label(await app.ask(1)) == 1

    run_on_real_time(main)


# --- users of whom nothing is known ---------------------------------------------------------------


@contextmanager
def counted(store: Store) -> Iterator[list[tuple[str, str]]]:
    """Collect the addresses that the store is asked for."""
    reads: list[tuple[str, str]] = []
    load = store.load

    async def counting(address: tuple[str, str]) -> dict[str, Any] | None:
        reads.append(address)
        return await load(address)

    store.load = counting  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        store.load = load  # type: ignore[method-assign]


@pytest.mark.parametrize("together", [False, True])
async def test_a_user_of_whom_nothing_is_known_costs_one_read_of_the_store(
    tmp_path: Path, where: str, together: bool
) -> None:
    async with desk(tmp_path, store=where) as app:
        await app.put("right", "wrong", options=OPTIONS, cache=True)
        with counted(app.applications._store) as reads:
            if together:
                await asyncio.gather(*[app.ask(1, context="ann") for _ in range(1000)])
            else:
                for _ in range(1000):
                    await app.ask(1, context="ann")
            assert reads == [("app", "ann")]
            # Feedback gives her a state, which is found, and is there after it has left memory.
            await app.teach(await app.ask(1, context="ann"), label=2)
            taught = await app.weights("ann")
            assert taught["wrong"] > taught["right"]
            assert await app.applications.erase("app", "ann")
            await app.ask(1, context="ann")
            assert await app.weights("ann") == await app.weights()
            assert len(reads) <= 2


async def test_feedback_of_one_who_had_no_state_is_found_after_it_has_left_memory(
    tmp_path: Path, where: str
) -> None:
    async with desk(tmp_path, store=where, contexts_max=2) as app:
        await app.put("right", "wrong", options=OPTIONS)
        for user in ("ann", "bob", "cy", "dee"):
            answered = await app.ask(1, context=user)
            await app.teach(answered, label=2 if user == "ann" else 1)
            await app.applications._states.flush()
        weights = await app.weights("ann")
        assert weights["wrong"] > weights["right"]


def test_what_is_known_of_users_without_a_state_is_bounded() -> None:
    contexts = Contexts(capacity=2)
    for user in "abc":
        contexts.note_stateless("app", user)
    assert [contexts.is_stateless("app", user) for user in "abc"] == [False, True, True]
    contexts.is_stateless("app", "b")
    contexts.note_stateless("app", "d")
    assert [contexts.is_stateless("app", user) for user in "bcd"] == [True, False, True]
    contexts.set("app", "b", 1)
    assert not contexts.is_stateless("app", "b")
    contexts.erase("app")
    assert not contexts.is_stateless("app", "d")


# --- policies that fail ---------------------------------------------------------------------------


class Clumsy(EpsilonGreedy):
    """A stranger's policy: its states cannot be written, and it learns nothing from an answer of 3."""

    def observe(self, state: Tallies, observation: Observation) -> Tallies:
        if observation.served == 3:
            raise ArithmeticError("3 again")
        return super().observe(state, observation)

    def select(self, state: Tallies, query: Query) -> Choice:
        return Choice(tuple(query.in_time[:1]), (1.0,))

    def dump(self, state: Tallies) -> dict[str, Any]:
        raise ArithmeticError("no idea")


async def test_a_state_that_cannot_be_written_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path, store=tmp_path / "store.sqlite") as app:
        app.applications._plugins["clumsy"] = Clumsy
        await app.put("right", name="clumsy", policy="clumsy")
        await app.put("right", "wrong", options=OPTIONS)
        for _ in range(3):
            for name in ("clumsy", "app"):
                await app.teach(await app.ask(1, context="ann", name=name), label=1)
            await app.applications._states.flush()
        record = await app.applications._store.load(("app", "ann"))
        assert record is not None
        assert record["state"]["rounds"] == 3
        assert await app.applications._store.load(("clumsy", "ann")) is None
    assert caplog.text.count("cannot be written: PolicyError") == 1
    assert "policy clumsy: dump: ArithmeticError('no idea')" in caplog.text


async def test_in_a_bulk_of_feedback_each_has_an_outcome_of_its_own(tmp_path: Path) -> None:
    async with desk(tmp_path) as app:
        app.applications._plugins["clumsy"] = Clumsy
        await app.put("right", policy="clumsy")
        ids = [
            str((await app.ask(number, context="ann")).parameters["query_id"])
            for number in (1, 3, 2)
        ]
        items = [FeedbackItem(query_id, label=1) for query_id in ids]
        first = await app.applications.feedback(items)
        assert [r.status.value for r in first] == ["APPLIED", "FAILED", "APPLIED"]
        assert first[1].message == "policy clumsy: observe: ArithmeticError('3 again')"
        # Nothing was learned from the item that failed, so it may be given again. The others count once.
        second = await app.applications.feedback(items)
        assert [r.status.value for r in second] == ["DUPLICATE", "FAILED", "DUPLICATE"]
        running = app.applications.find("app")
        assert running is not None
        assert running.counts.feedbacks == {"APPLIED": 2, "FAILED": 2, "DUPLICATE": 2}


# --- a store that is away -------------------------------------------------------------------------


async def taught(app: Desk) -> None:
    """Make an application that has learned, and more of ann than of others."""
    await app.put("right", "wrong", options=OPTIONS)
    for _ in range(3):
        await app.teach(await app.ask(1, context="ann"), label=2)
        await app.teach(await app.ask(1, context="bob"), label=1)


def query_id(answered: Reply) -> str:
    return str(answered.parameters["query_id"])


@contextmanager
def away(store: Store) -> Iterator[None]:
    """A store that fails at everything, at once."""

    class Away:
        name, faults = "elsewhere", (OSError,)

        def __getattr__(self, _: str) -> Callable[..., None]:
            return self._fail

        def _fail(self, *_: object, **__: object) -> None:
            raise OSError("gone fishing")

    database, store._database = store._database, Away()  # type: ignore[assignment]
    try:
        yield
    finally:
        store._database = database


async def test_while_the_store_is_away_memory_serves_and_nothing_is_half_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = str(tmp_path / "store.sqlite")
    async with desk(tmp_path, store=where) as app:
        await taught(app)
        ann, bob = await app.weights("ann"), await app.weights("bob")
    async with desk(tmp_path, store=where) as app:
        applications, states = app.applications, app.applications._states
        assert await app.weights("bob") == bob
        with away(applications._store):
            # Bob's state is in memory, so his feedback is learned from. Ann's state is not.
            of_bob, of_ann = await app.ask(1, context="bob"), await app.ask(1, context="ann")
            assert (label(of_bob), label(of_ann)) == (1, 1)
            results = await applications.feedback(
                [
                    FeedbackItem(query_id(of_ann), label=2),
                    FeedbackItem(query_id(of_bob), label=1),
                ]
            )
            assert [r.status.value for r in results] == ["FAILED", "APPLIED"]
            assert results[0].message == "selection store elsewhere: gone fishing"
            bob = await app.weights("bob")
            for _ in range(3):
                await states.flush()
            with pytest.raises(StoreError, match="gone fishing"):
                await app.weights("ann")
            with pytest.raises(StoreError, match="gone fishing"):
                await applications.erase("app", "bob")
            with pytest.raises(StoreError, match="gone fishing"):
                await applications.remove("app")
            with pytest.raises(StoreError, match="gone fishing"):
                await app.put("right", options=OPTIONS, replace=True)
            with pytest.raises(StoreError, match="gone fishing"):
                await app.put("right", name="new")
            assert [running.application.name for running in applications.all] == ["app"]
            assert await app.weights("bob") == bob
        assert caplog.text.count("gone fishing; serving from memory") == 1
        assert await app.weights("ann") == ann
        (again,) = await applications.feedback([FeedbackItem(query_id(of_ann), label=2)])
        assert again.status is FeedbackStatus.APPLIED
        ann = await app.weights("ann")
        await states.flush()
    async with desk(tmp_path, store=where) as app:
        assert await app.weights("ann") == ann
        assert await app.weights("bob") == bob


def test_a_read_that_fails_when_its_query_has_given_up_waiting_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_later(_: object) -> None:
        await asyncio.sleep(10)
        raise StoreError("it is away")

    async def main() -> None:
        async with desk(tmp_path, store=str(tmp_path / "store.sqlite")) as app:
            await taught(app)
            states = app.applications._states
            monkeypatch.setattr(states._store, "load", fail_later)
            await app.ask(1, context="somebody new")
            assert len(states._reading) == 1
            await until(lambda: not states._reading)
            gc.collect()

    run(main)
    assert "never retrieved" not in caplog.text
    assert "it is away; serving from memory" in caplog.text


def test_a_redis_that_stops_and_starts_again_loses_nothing(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        async with desk(tmp_path, store=server.url, contexts_max=2) as app:
            await taught(app)
            states = app.applications._states
            await states.flush()
            # Only two stay in memory: the global state and cy's.
            await app.teach(await app.ask(1, context="cy"), label=1)
            await states.flush()
            server.stop()
            of_ann = await app.ask(1, context="ann")
            assert label(of_ann) == 1
            assert (await app.teach(of_ann, label=2)).status is FeedbackStatus.FAILED
            assert (
                await app.teach(await app.ask(1, context="cy"), label=1)
            ).status.value == "APPLIED"
            await states.flush()
            assert states.num_waiting > 0
            with pytest.raises(StoreError, match="expected a Redis server that answers"):
                await app.applications.erase("app", "ann")
            server.start()
            # The states are written without a call, once a second.
            await until(lambda: states.num_waiting == 0)
            assert (await app.teach(of_ann, label=2)).status is FeedbackStatus.APPLIED
            weights = [await app.weights(context) for context in ("", "ann", "bob", "cy")]
        async with desk(tmp_path, store=server.url) as app:
            assert [await app.weights(c) for c in ("", "ann", "bob", "cy")] == weights

    with redis_server() as server:
        run(lambda: main(server))


@pytest.mark.parametrize("restarted", [True, False])
def test_a_redis_that_comes_back_empty_is_filled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarted: bool
) -> None:
    async def main(server: RedisServer) -> None:
        with server.client() as client:
            async with desk(tmp_path, store=server.url) as app:
                await taught(app)
                await app.applications._states.flush()
                weights = [await app.weights(context) for context in ("", "ann", "bob")]
                if restarted:
                    server.stop()
                    server.forget()
                    server.start()
                    assert client.keys("*") == []
                else:
                    client.flushall()
                # Nobody asks or teaches meanwhile.
                await until(lambda: client.hlen("clockwright:states:app") == 3)
        async with desk(tmp_path, store=server.url) as app:
            assert [await app.weights(c) for c in ("", "ann", "bob")] == weights
        assert caplog.text.count("is back") == 1
        assert "/socket is back, empty" in caplog.text

    with redis_server() as server, caplog.at_level(logging.INFO):
        run(lambda: main(server))


def test_that_a_redis_has_lost_all_is_known_although_an_answer_was_lost(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = Store(redis.url)
        await store.open()
        assert not await store.has_lost_everything()
        with redis.client() as client:
            client.flushall()
        client = store._database._client  # type: ignore[attr-defined]
        setnx = client.setnx

        def done_unheard(*words: str) -> None:
            setnx(*words)
            raise TimeoutError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(client, "setnx", done_unheard)
            with pytest.raises(StoreError, match="no answer"):
                await store.has_lost_everything()
        store._database._away_until_s = -1  # type: ignore[attr-defined]
        assert await store.has_lost_everything()
        assert not await store.has_lost_everything()
        await store.close()

    with redis.client() as client:
        client.flushall()
    run(main)


def test_a_redis_that_does_not_answer_holds_up_only_who_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(server: RedisServer) -> None:
        async with desk(tmp_path, store=server.url) as app:
            await taught(app)
            await app.applications._states.flush()
            server.freeze()
            # These users are new, so the store has to be asked for each of them.
            answers = [await app.ask(1, context=f"user {n}") for n in range(20)]
            assert [label(answered) for answered in answers] == [1] * 20
            erasing = asyncio.create_task(app.applications.erase("app", "ann"))
            teaching = asyncio.create_task(app.teach(answers[0], label=1))
            # Ann's state is in memory. It has learned that the model "wrong" is right.
            assert label(await app.ask(1, context="ann")) == 2
            assert not erasing.done()
            assert not teaching.done()
            server.thaw()
            assert await erasing
            assert (await teaching).status is FeedbackStatus.APPLIED
            assert await app.weights("ann") == await app.weights()

    # A query waits for the store this part of its 30 s.
    monkeypatch.setattr("controller.selection.queries._LOAD_SHARE", 0.0005)
    with redis_server() as server:
        run_on_real_time(lambda: main(server))


def test_a_redis_that_did_not_answer_is_asked_again(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        store = Store(server.url)
        await store.save(changes(ann={"n": 1}, bob={"n": 2}))
        await store.close()
        store = await impatient(server)
        server.freeze()
        for _ in range(3):
            with pytest.raises(StoreError, match="expected a Redis server that answers"):
                await store.load(("app", "ann"))
        server.thaw()
        record = None
        while record is None:
            with suppress(StoreError):
                record = await store.load(("app", "bob"))
            await asyncio.sleep(0.01)
        # The answer is not that of the call for ann, which was given up.
        assert record == {"n": 2}
        await store.close()

    with redis_server() as server:
        run_on_real_time(lambda: main(server))


async def impatient(server: RedisServer) -> Store:
    """A store that waits for a tenth of a second; on a busy machine not every attempt to open it succeeds."""
    while True:
        store = Store(server.url.replace("socket_timeout=60", "socket_timeout=0.1"))
        with suppress(ConfigError):
            await store.open()
            return store


async def test_a_store_is_one_controllers_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(ConfigError, match=f"process {os.getpid()} uses it"):
        Store(tmp_path / "store")
    await store.close()
    await Store(tmp_path / "store").close()


def test_in_memory_about_as_many_contexts_are_kept_as_may_be_and_global_states_all(
    tmp_path: Path,
) -> None:
    async def known(where: Path | None) -> tuple[int, bool]:
        store = Store(where, contexts_max=50)
        for begin in range(0, 1000, 100):
            await store.save(
                {("app", str(number)): dict for number in range(begin, begin + 100)}
                | {("app", ""): dict}
            )
        found = [await store.load(("app", str(number))) for number in range(1000)]
        has_global = await store.load(("app", "")) is not None
        await store.close()
        return sum(record is not None for record in found), has_global

    kept, has_global = asyncio.run(known(None))
    assert 45 <= kept <= 60
    assert has_global
    assert asyncio.run(known(tmp_path / "store.sqlite")) == (1000, True)
