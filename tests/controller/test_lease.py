"""The lease: its rules on virtual time, and the places that keep its record."""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from clockwright.errors import ConfigError, StoreError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.wire.leadership import Term
from controller.process.lease.keeper import LeaseKeeper
from controller.process.lease.lease import (
    HELD_NS,
    LEASE_NS,
    LOOK_NS,
    RENEW_NS,
    Lease,
    LeaseRecord,
    Standing,
)
from controller.process.lease.places import open_store
from controller.process.lease.stores import FoundRecord, LeaseStore, decode, encode
from tests.kit.api_server import ApiServer, api_server
from tests.kit.etcd_server import EtcdFiles, etcd_server
from tests.kit.processes import PATIENCE_S

FIRST = LeaseRecord(Term("l", 1), "a")


def leading(now_ns: int = 0) -> Lease:
    lease = Lease("a", lineage="l")
    assert lease.propose(None, now_ns=now_ns) == FIRST
    lease.put(FIRST, asked_ns=now_ns)
    return lease


# --- rules --------------------------------------------------------------------------------------


def test_who_finds_no_record_leads_first() -> None:
    lease = leading()
    assert (lease.standing, lease.term) == (Standing.LEADING, Term("l", 1))


def test_a_leader_that_does_not_renew_has_lost_before_another_may_lead() -> None:
    lease, standby = leading(), Lease("b", lineage="m")
    assert standby.propose(FIRST, now_ns=0) is None
    assert lease.check(HELD_NS - 1) is Standing.LEADING
    assert standby.propose(FIRST, now_ns=LEASE_NS - 1) is None
    assert lease.check(HELD_NS) is Standing.DOUBTFUL
    assert standby.propose(FIRST, now_ns=LEASE_NS) == LeaseRecord(Term("l", 2), "b")


def test_a_renewal_keeps_the_others_waiting() -> None:
    lease, standby = leading(), Lease("b", lineage="m")
    found = FIRST
    for second in range(1, 10):
        assert standby.propose(found, now_ns=second * RENEW_NS) is None
        renewed = lease.propose(found, now_ns=second * RENEW_NS)
        assert renewed is not None
        lease.put(renewed, asked_ns=second * RENEW_NS)
        found = renewed
    assert lease.standing is Standing.LEADING


def test_a_renewal_of_which_nobody_knows_whether_it_succeeded_is_recognised() -> None:
    lease = leading()
    tried = lease.propose(FIRST, now_ns=RENEW_NS)
    assert tried is not None
    # The answer was lost. The record stands, or it does not: both are its own.
    for found in (tried, FIRST):
        again = lease.propose(found, now_ns=2 * RENEW_NS)
        assert again == LeaseRecord(FIRST.term, "a", found.renewals + 1)
    assert lease.check(HELD_NS) is Standing.DOUBTFUL  # it was never told that one stands


def test_a_leader_that_was_stopped_leads_on_where_nobody_has_followed_it() -> None:
    lease, late_ns = leading(), 100 * LEASE_NS
    assert lease.check(late_ns) is Standing.DOUBTFUL
    renewed = lease.propose(FIRST, now_ns=late_ns)
    assert renewed == LeaseRecord(FIRST.term, "a", 1)
    lease.put(renewed, asked_ns=late_ns)
    assert lease.check(late_ns) is Standing.LEADING
    lease.check(2 * late_ns)
    assert lease.propose(LeaseRecord(Term("l", 2), "b"), now_ns=2 * late_ns) is None
    assert lease.standing is Standing.LOST


@pytest.mark.parametrize("found", [None, LeaseRecord(Term("l", 2), "b")])
def test_a_leader_that_finds_somebody_elses_record_or_none_has_lost(
    found: LeaseRecord | None,
) -> None:
    lease = leading()
    assert lease.propose(found, now_ns=RENEW_NS) is None
    assert lease.standing is Standing.LOST
    assert lease.propose(FIRST, now_ns=RENEW_NS) is None


def test_a_released_record_and_one_of_a_dead_holder_are_taken_at_once() -> None:
    released = leading().give_back(FIRST)
    assert released == LeaseRecord(FIRST.term, "a", released=True)
    for found, has_ended, holder in (
        (released, False, "b"),
        (FIRST, True, "b"),
        (FIRST, False, "a"),
    ):
        lease = Lease(holder, lineage="m")
        claim = LeaseRecord(Term("l", 2), holder)
        assert lease.propose(found, now_ns=0, has_ended=has_ended) == claim


def test_who_does_not_lead_gives_nothing_back() -> None:
    assert Lease("b", lineage="m").give_back(FIRST) is None
    assert leading().give_back(LeaseRecord(Term("l", 2), "b")) is None


class Play:
    """Controllers of one record, on virtual time: slow stores, lost answers, pauses, clocks that run unlike."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.record: LeaseRecord | None = None
        self.now_ns = 0
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.num_events = 0
        self.generations: list[int] = []
        self.players = [Player(self, index) for index in range(3)]

    def later(self, delay_ns: int, act: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.agenda, (self.now_ns + delay_ns, self.num_events, act))

    def run(self, until_ns: int) -> None:
        while self.agenda and self.agenda[0][0] <= until_ns:
            self.now_ns, _, act = heapq.heappop(self.agenda)
            act()
            leading = [p.name for p in self.players if p.may_act]
            assert len(leading) <= 1, f"{leading} lead at {self.now_ns}"
            assert self.generations == sorted(set(self.generations))


class Player:
    def __init__(self, play: Play, index: int) -> None:
        self.play = play
        self.name = f"{index}"
        # 100 parts per million off, as bad crystals are.
        self.rate = 1 + self.play.random.choice((-1e-4, 0, 1e-4))
        self.start()

    def clock(self) -> int:
        return round(self.play.now_ns * self.rate)

    @property
    def may_act(self) -> bool:
        """As its next look at the clock would tell it."""
        return (
            self.lease.standing is Standing.LEADING
            and self.lease.check(self.clock()) is Standing.LEADING
        )

    def start(self) -> None:
        # A process of its own name: whether the last one has ended is not known to the others.
        self.lives = getattr(self, "lives", 0) + 1
        self.lease = Lease(f"{self.name}.{self.lives}", lineage=f"l{self.name}")
        self.play.later(self.delay(), self.look)

    def delay(self) -> int:
        chance = self.play.random.random()
        most = 5 * LEASE_NS if chance < 0.02 else LEASE_NS // 2 if chance < 0.1 else 5 * NS_PER_MS
        return self.play.random.randrange(most)

    def look(self) -> None:
        found = self.play.record
        self.play.later(self.delay(), lambda: self.decide(found))

    def decide(self, found: LeaseRecord | None) -> None:
        if self.lease.check(self.clock()) is Standing.LOST:
            self.start()
            return
        asked_ns = self.clock()
        record = self.lease.propose(found, now_ns=asked_ns)
        if record is None:
            self.play.later(LOOK_NS, self.look)
            return

        def swap() -> None:
            succeeds = self.play.record == found
            if succeeds:
                self.play.record = record
                if found is None or record.term != found.term:
                    self.play.generations.append(record.term.generation)
            told = self.play.random.random() > 0.05
            self.play.later(
                self.delay(), lambda: self.answered(record, asked_ns, succeeds and told)
            )

        self.play.later(self.delay(), swap)

    def answered(self, record: LeaseRecord, asked_ns: int, succeeded: bool) -> None:
        if succeeded:
            self.lease.put(record, asked_ns=asked_ns)
        self.play.later(
            RENEW_NS if self.lease.standing is Standing.LEADING else LOOK_NS,
            self.look,
        )


@pytest.mark.parametrize("seed", range(30))
def test_no_two_lead_at_once_whatever_is_slow_lost_or_stopped(seed: int) -> None:
    play = Play(seed)
    play.run(300 * NS_PER_S)
    assert len(play.generations) > 3


# --- places -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with etcd_server() as address:
        yield address


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServer]:
    with api_server() as server:
        yield server


@dataclass
class Place:
    setting: str

    def open(self) -> LeaseStore:
        return open_store(self.setting)


@pytest.fixture(params=["file", "etcd", "kubernetes"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "file":
        return Place(f"file:{tmp_path}/folder/lease")
    if request.param == "kubernetes":
        url = request.getfixturevalue("api").url
        return Place(f"kubernetes://ns/{tmp_path.name.replace('_', '-').lower()}?api={url}")
    return Place(f"etcd://{request.getfixturevalue('etcd')}/{tmp_path.name}")


def test_a_place_keeps_a_record_and_swaps_only_what_was_found(place: Place) -> None:
    store = place.open()
    nothing = store.read()
    assert nothing.record is None
    assert store.swap(nothing, FIRST)
    assert not store.swap(nothing, FIRST)
    found = store.read()
    assert found.record == FIRST
    second = LeaseRecord(Term("l", 1), "a", 1)
    assert store.swap(found, second)
    assert not store.swap(found, LeaseRecord(Term("l", 1), "a", 2))
    assert store.read().record == second
    store.close()


def test_leaders_follow_each_other_by_a_place(place: Place) -> None:
    async def main() -> None:
        first = LeaseKeeper(place.open(), "a")
        term = await first.take()
        assert term.generation == 1
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await first.give_back()
        second = LeaseKeeper(place.open(), "b")
        assert await second.take() == term.next()
        await second.give_back()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


class Stalling:
    """A store that may say nothing for as long as the test likes."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.answers = threading.Event()
        self.answers.set()

    def read(self) -> FoundRecord:
        assert self.answers.wait(PATIENCE_S)
        return self._store.read()

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        return self._store.swap(found, record)

    def close(self) -> None:
        self._store.close()


def test_a_leader_whose_store_says_nothing_ends_when_its_lease_does(tmp_path: Path) -> None:
    place = Place(f"file:{tmp_path}/lease")

    async def main() -> None:
        store = Stalling(place.open())
        keeper = LeaseKeeper(store, "a")
        await keeper.take()
        store.answers.clear()
        try:
            # The store is silent until after that.
            async with asyncio.timeout(PATIENCE_S / 2):
                assert "in time" in await keeper.keep()
        finally:
            store.answers.set()
        await keeper.give_back()
        found = place.open().read().record
        assert found is not None
        assert found.released

    asyncio.run(main())


HOLDER = """
import asyncio, sys
from controller.process.lease.keeper import LeaseKeeper
from controller.process.lease.places import open_store
async def main():
    keeper = LeaseKeeper(open_store(sys.argv[1]), sys.argv[2])
    await keeper.take()
    print(keeper.term.generation, flush=True)
    print(await keeper.keep(), flush=True)
asyncio.run(main())
"""


def holder(place: Place, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), place.setting, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_is_killed_or_stopped_is_followed(place: Place, number: int) -> None:
    with holder(place, "a") as first:
        assert line(first) == "1"
        with holder(place, "b") as second:
            os.kill(first.pid, number)
            assert line(second) == "2"
            if number == signal.SIGSTOP and not place.setting.startswith("file"):
                # It may be on another machine, and nobody can end it. It finds out by itself.
                os.kill(first.pid, signal.SIGCONT)
                assert "lease" in line(first)
            elif number == signal.SIGSTOP:
                assert first.wait(PATIENCE_S) == -signal.SIGKILL
            second.kill()
        first.kill()


def test_a_leader_of_this_host_that_was_killed_is_known_to_have_ended(tmp_path: Path) -> None:
    place = Place(f"file:{tmp_path}/lease")
    store = place.open()
    with holder(place, "a") as first:
        assert line(first) == "1"
        assert not store.read().has_ended
        first.kill()
        first.wait()
        assert store.read().has_ended
    store.close()


RELEASER = """
import sys
from dataclasses import replace
from clockwright.wire.leadership import Term
from controller.process.lease.lease import LeaseRecord
from controller.process.lease.places import open_store
store = open_store(sys.argv[1])
record = LeaseRecord(Term("l", 1), "a")
store.swap(store.read(), record)
store.swap(store.read(), replace(record, released=True))
print("released", flush=True)
input()
"""


def test_a_leader_of_this_host_that_has_released_the_lease_ends_by_itself(tmp_path: Path) -> None:
    place = Place(f"file:{tmp_path}/lease")
    command = [sys.executable, "-c", RELEASER, place.setting]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert line(first) == "released"
        store = place.open()
        assert store.swap(store.read(), LeaseRecord(Term("l", 2), "b"))
        store.close()
        first.communicate("\n", PATIENCE_S)
        assert first.returncode == 0


_NO_TLS = (
    *("etcd://a:1?ca=x", "etcds://a:1", "etcds://a:1?cert=x&key=y", "etcds://a:1?ca=x&cert=y"),
    "etcds://a:1?ca=x&user=me",
)
_NO_OBJECT = ("kubernetes:", "kubernetes://ns", "kubernetes://ns/N", "kubernetes://ns/n?user=me")


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "file:",
        "etcd:",
        "etcd://",
        "etcd://a",
        "etcd://a:b",
        "redis://a:1",
        "/tmp/x",
        *_NO_TLS,
        *_NO_OBJECT,
    ],
)
def test_settings_that_name_no_place_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="expected file:PATH or etcd://"):
        open_store(setting)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    whole = json.loads(encode(FIRST))
    for data in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        json.dumps({**whole, "generation": 0}).encode(),
        json.dumps({**whole, "generation": 1 << 63}).encode(),
        json.dumps({**whole, "holder": 1}).encode(),
        json.dumps({**whole, "released": None}).encode(),
    ):
        path.write_bytes(data)
        store = open_store(f"file:{path}")
        with pytest.raises(StoreError, match="expected a record"):
            store.read()
        store.close()
    assert decode(encode(FIRST), where="here") == FIRST


def test_members_of_etcd_that_do_not_answer_are_passed_over(etcd: str) -> None:
    store = open_store(f"etcd://127.0.0.1:1,{etcd}/passed-over")
    with pytest.raises(StoreError, match="refused"):
        store.read()
    assert store.read() == FoundRecord(None)
    store.close()


def test_files_of_tls_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_store(f"etcds://127.0.0.1:1?ca={tmp_path}/ca.pem")


def test_etcd_over_tls_knows_who_calls_and_is_known(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = EtcdFiles(*(tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem")))
    authority.cert_pem.write_to_path(files.ca)
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(files.certificate)
    issued.private_key_pem.write_to_path(files.key)
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    shown = f"cert={files.certificate}&key={files.key}"
    with etcd_server(files) as etcd:
        store = open_store(f"etcds://{etcd}/lease?ca={files.ca}&{shown}")
        assert store.read() == FoundRecord(None)
        assert store.swap(FoundRecord(None), FIRST)
        assert store.read().record == FIRST
        store.close()
        for options, why in (
            (f"ca={tmp_path}/stranger.pem&{shown}", "CERTIFICATE_VERIFY_FAILED"),
            # Whoever shows no certificate is hung up on.
            (f"ca={files.ca}", "lease etcd"),
        ):
            store = open_store(f"etcds://{etcd}/lease?{options}")
            with pytest.raises(StoreError, match=why):
                store.read()
            store.close()


@pytest.fixture
def lease_object(api: ApiServer, tmp_path: Path) -> Iterator[tuple[LeaseStore, str]]:
    """A store for an object of a test's own, and the object's path."""
    name = tmp_path.name.replace("_", "-").lower()
    store = open_store(f"kubernetes://ns/{name}?api={api.url}")
    yield store, f"/apis/coordination.k8s.io/v1/namespaces/ns/leases/{name}"
    store.close()


def test_a_lease_object_says_who_holds_it_and_keeps_what_others_wrote(
    api: ApiServer, lease_object: tuple[LeaseStore, str]
) -> None:
    store, path = lease_object
    # A chart may make it, so that controllers need not be allowed to.
    api.put(path, {"metadata": {"labels": {"of": "chart"}}, "spec": {}})
    assert store.swap(store.read(), FIRST)
    found = api.objects[path]
    assert found["spec"] == {"holderIdentity": "a", "leaseDurationSeconds": 3}
    assert found["metadata"]["labels"] == {"of": "chart"}
    assert store.swap(store.read(), LeaseRecord(FIRST.term, "a", released=True))
    assert api.objects[path]["spec"]["holderIdentity"] == ""
    assert store.read().record == LeaseRecord(FIRST.term, "a", released=True)


def test_a_lease_object_that_was_deleted_is_not_made_again_by_a_renewal(
    api: ApiServer, lease_object: tuple[LeaseStore, str]
) -> None:
    store, path = lease_object
    assert store.swap(store.read(), FIRST)
    found = store.read()
    api.delete(path)
    assert not store.swap(found, LeaseRecord(FIRST.term, "a", 1))
    assert store.read() == FoundRecord(None)


def test_somebody_elses_lease_object_is_left_alone(
    api: ApiServer, lease_object: tuple[LeaseStore, str]
) -> None:
    store, path = lease_object
    api.put(path, {"spec": {"holderIdentity": "kube-scheduler"}})
    with pytest.raises(StoreError, match="'kube-scheduler' holds"):
        store.read()
    api.put(path, {"metadata": {"annotations": {"clockwright/lease": "{}"}}})
    with pytest.raises(StoreError, match="expected a record"):
        store.read()


def test_what_the_api_refuses_is_an_error_and_no_lost_race(
    api: ApiServer, lease_object: tuple[LeaseStore, str]
) -> None:
    store, path = lease_object
    for status in (403, 404, 429, 500):
        api.refusals[f"POST {path.rpartition('/')[0]}"] = status
        with pytest.raises(StoreError, match=f"kubernetes://ns/[-a-z0-9]+: {status} "):
            store.swap(FoundRecord(None), FIRST)
    api.refusals.clear()
    assert store.swap(store.read(), FIRST)
    found = store.read()
    api.refusals[f"PATCH {path}"] = 500
    with pytest.raises(StoreError, match="500"):
        store.swap(found, LeaseRecord(FIRST.term, "a", 1))
    api.refusals.clear()


def test_a_place_in_a_cluster_is_known_in_a_pod_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="kubectl proxy"):
        open_store("kubernetes://ns/n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    store = open_store("kubernetes://ns/n")
    # It has an address now, and no token.
    with pytest.raises(StoreError, match=r"https://\[fd00::1\]:443: .*serviceaccount/token"):
        store.read()
