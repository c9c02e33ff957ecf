"""Which controller leads, as those see it who know several."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import trustme

from clockwright.client.channel import Access
from clockwright.errors import ConfigError
from clockwright.v1.leadership_pb2 import GetTermRequest
from clockwright.wire.leader_search import OPTIONS, LeaderSearch
from clockwright.wire.leadership import Fence, Leaders, Term, host_of, parse_addresses
from controller.access.caller import ANYBODY
from controller.front.services.leadership import LeadershipService

aio: Any = grpc.aio
OLD, NEW, OTHER = Term("l", 3), Term("l", 4), Term("m", 1)


def test_addresses_are_read_one_by_one() -> None:
    assert parse_addresses("a:1") == ("a:1",)
    assert parse_addresses("a:1,[::1]:2") == ("a:1", "[::1]:2")
    assert host_of("[::1]:2") == "::1"
    for text in ("", "a", "a:1,", "a:1,b", "a:x", ":1", "a:70000"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_addresses(text)


def test_a_fence_admits_nobody_who_was_followed() -> None:
    fence = Fence()
    assert fence.admits(Term())
    assert fence.admits(NEW)
    assert not fence.admits(OLD)
    assert fence.admits(NEW)
    # Somebody else's generations say nothing of these.
    assert fence.admits(OTHER)
    assert fence.admits(Term())


def test_the_latest_of_those_who_say_that_they_lead_is_turned_to() -> None:
    leaders = Leaders(["a", "b", "c"])
    assert leaders.leader is None
    leaders.heard("b", OLD)
    assert leaders.leader == "b"
    assert leaders.successor(OLD) is None
    leaders.heard("c", NEW)
    assert leaders.leader == "c"
    assert leaders.successor(OLD) == "c"
    # A stopped leader that goes on says so for a moment; nobody goes back to it.
    assert leaders.successor(NEW) is None
    leaders.heard("c", None)
    assert leaders.leader == "b"
    # One of another lineage follows nobody here, however high it counts.
    leaders.heard("a", Term("m", 9))
    assert leaders.successor(OLD) is None


def a_controller(term: Callable[[], Term | None]) -> Any:  # noqa: ANN401
    service = LeadershipService(term)

    async def get_term(data: bytes, _: object) -> bytes:
        request = GetTermRequest.FromString(data)
        return (await service.get_term(request, ANYBODY)).SerializeToString()

    methods = {"GetTerm": grpc.unary_unary_rpc_method_handler(get_term)}
    return grpc.method_handlers_generic_handler("clockwright.v1.LeadershipService", methods)


class Controllers:
    """Servers that say which generation they lead in, if any; None of them: they do not answer."""

    def __init__(self, *terms: Term | None) -> None:
        self.terms = list(terms)
        self._servers: list[Any] = []
        self.addresses: list[str] = []

    async def __aenter__(self) -> Controllers:
        for index in range(len(self.terms)):
            server = aio.server()
            look = functools.partial(self.terms.__getitem__, index)
            server.add_generic_rpc_handlers((a_controller(look),))
            self.addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            self._servers.append(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.stop(0)


def search(controller: str) -> LeaderSearch:
    return LeaderSearch(controller, lambda address: aio.insecure_channel(address, options=OPTIONS))


def test_the_search_finds_the_leader_and_then_its_successor() -> None:
    async def main() -> None:
        async with (
            Controllers(None, OLD) as controllers,
            search(",".join(controllers.addresses)) as looking,
        ):
            first, second = controllers.addresses
            assert await looking.find() == second
            following = asyncio.create_task(looking.wait_for_successor(second, lambda: OLD))
            controllers.terms[0] = NEW
            assert await following == (first, NEW)
            # One that was dialled and says nothing is left for any other that leads.
            assert await looking.wait_for_successor(second, lambda: None) == (first, NEW)
            controllers.terms[:] = [None, None]
            assert await looking.find() is None

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_certificate_that_was_renewed_is_shown_to_controllers_that_took_the_old_one_not(
    tmp_path: Path,
) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    ca, certificate, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    ours.cert_pem.write_to_path(ca)
    own = ours.issue_cert("127.0.0.1")
    credentials = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())],
        root_certificates=ours.cert_pem.bytes(),
        require_client_auth=True,
    )

    def issue(authority: trustme.CA) -> None:
        issued = authority.issue_cert("worker")
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)

    async def main() -> None:
        server = aio.server()
        server.add_generic_rpc_handlers((a_controller(lambda: NEW),))
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        issue(theirs)
        access = Access(ca=ca, certificate=certificate, certificate_key=key)
        address = f"127.0.0.1:{port}"
        dial = functools.partial(access.async_channel, options=OPTIONS)
        async with LeaderSearch(f"{address},127.0.0.1:1", dial) as looking:
            assert await looking.find() is None
            assert looking.problem == "none leads"
            certificate.unlink()
            assert await looking.find() is None
            assert looking.problem == f"{certificate}: No such file or directory"
            issue(ours)
            # A moment of a busy machine may end an attempt.
            while await looking.find() is None:
                pass
            assert await looking.find() == address
        await server.stop(0)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_single_controller_is_dialled_without_being_asked() -> None:
    async def main() -> None:
        async with search("127.0.0.1:1") as looking:
            assert await looking.find() == "127.0.0.1:1"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_file_says_where_the_controller_is_and_is_read_again_for_each_attempt(
    tmp_path: Path,
) -> None:
    path = tmp_path / "controller"

    async def main() -> None:
        async with search(f"file:{path}") as looking:
            assert await looking.find() is None
            assert looking.problem == f"controller: {path}: No such file or directory"
            path.write_text("node1:8001\n")
            assert await looking.find() == "node1:8001"
            path.write_text("node2:8001\n")
            assert await looking.find() == "node2:8001"
            path.write_text("")
            assert await looking.find() is None
            assert looking.problem == f"controller: {path}: expected one line, HOST:PORT"

    asyncio.run(asyncio.wait_for(main(), 60))
