"""What a front shows its controller, and whose word counts when a call comes by way of a front."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright.client.channel import Access
from clockwright.errors import ConfigError
from clockwright.v1 import control_pb2
from controller.access.authoriser import Authoriser, Rules
from controller.access.caller import FORWARDED, Caller, tell
from controller.access.config import AccessConfig
from controller.access.grants import Grant, digest, id_of, make_key
from controller.access.key_file import add_key
from controller.access.roles import EVERY_ROLE, Role
from controller.process import front_process
from controller.process.config import FrontConfig
from controller.process.front_flags import FrontJoinFlags
from tests.kit.front_end import serving, until

STATUS = "/clockwright.v1.ControlService/Status"
JOIN_AS_WORKER = "/clockwright.v1.WorkerService/Attach"
LOOKS = frozenset({Role.STATISTICS})
OPERATOR = Caller("ops", EVERY_ROLE, "")


def a_key() -> str:
    return make_key(secrets.token_bytes(4), secrets.token_urlsafe(32))


def a_grant(key: str, name: str, *roles: Role) -> Grant:
    return Grant(name, frozenset(roles), "", key_id=id_of(key), key_sha256=digest(key))


async def code_of(
    address: str, path: str, key: str, forwarded: bytes | None = None
) -> grpc.StatusCode:
    """How a call ends that shows a key, and says for whom it is handed on."""
    shown: list[tuple[str, str | bytes]] = list(Access(key=key).metadata)
    if forwarded is not None:
        shown.append((FORWARDED, forwarded))
    async with Access().async_channel(address) as channel:
        try:
            await channel.unary_unary(path)(b"", metadata=shown, timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("front", ["here", "apart"])
async def test_who_is_no_front_is_not_believed_for_whom_it_calls(
    tmp_path: Path, front: str
) -> None:
    keys = {name: a_key() for name in ("web", "front")}
    rules = Rules(
        (
            a_grant(keys["web"], "web", Role.INFERENCE),
            a_grant(keys["front"], "front", Role.FRONT),
        ),
        anonymous=frozenset(),
        anonymous_tenants=False,
    )
    async with serving(
        tmp_path,
        front=front,
        authoriser=Authoriser(rules),
        joining=Access(key=keys["front"]),
    ) as server:
        if server.guard is not None:
            server.guard.authoriser.use(rules, now_s=0)
        said = tell(OPERATOR)
        for address in {server.address, server.controller}:
            found = await code_of(address, STATUS, keys["web"], said)
            assert found is grpc.StatusCode.PERMISSION_DENIED
            assert await code_of(address, STATUS, "", said) is grpc.StatusCode.UNAUTHENTICATED
            stranger = await code_of(address, STATUS, a_key(), said)
            assert stranger is grpc.StatusCode.UNAUTHENTICATED
        # A front is believed, but lets nobody join, and has no rights of its own.
        controller, own = server.controller, keys["front"]
        assert await code_of(controller, STATUS, own, said) is grpc.StatusCode.OK
        for forwarded in (said, None):
            found = await code_of(controller, JOIN_AS_WORKER, own, forwarded)
            assert found is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(controller, STATUS, own) is grpc.StatusCode.PERMISSION_DENIED
        for nonsense in (b"", b"\xff", said[:-1], said + b"\0", b"\x93\xa1x\x91\xa5queen\xc0"):
            found = await code_of(controller, STATUS, own, nonsense)
            assert found is not grpc.StatusCode.OK, nonsense


async def test_a_front_joins_with_a_key_of_its_role_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    key = {
        name: add_key(keys, name, frozenset({role}))
        for name, role in (("web", Role.INFERENCE), ("front", Role.FRONT))
    }
    access = AccessConfig(keys_file=keys)

    async def attached(server: Any, shown: str) -> bool:  # noqa: ANN401
        """Whether it is let in; otherwise it says why not, and tries again for good."""
        caplog.clear()
        config = FrontConfig(
            controller=server.controller, port=0, access=access, joining=Access(key=shown)
        )

        async def serve() -> None:
            async with front_process.serving(config):
                pass

        joining = asyncio.create_task(serve())
        await until(lambda: joining.done() or "trying again" in caplog.text)
        if joining.done():
            await joining
            return True
        joining.cancel()
        await asyncio.wait([joining])
        return False

    async with serving(tmp_path, access=access) as server:
        assert await attached(server, key["front"])
        assert not await attached(server, key["web"])
        assert "Attach needs role front; web has inference" in caplog.text
        assert not await attached(server, "")


async def test_a_front_that_lets_everybody_in_is_told_why_a_controller_with_keys_takes_it_not(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    front_key = add_key(keys, "front", frozenset({Role.FRONT}))
    async with serving(tmp_path, access=AccessConfig(keys_file=keys)) as server:
        config = FrontConfig(controller=server.controller, port=0, joining=Access(key=front_key))
        with pytest.raises(ConfigError, match=r"admits all callers.*expected --keys"):
            async with front_process.serving(config):
                pass


async def test_the_link_of_a_front_ends_with_its_key(tmp_path: Path) -> None:
    key = a_key()
    rules = Rules((a_grant(key, "front", Role.FRONT),), anonymous=LOOKS)
    authoriser = Authoriser(rules)
    async with serving(
        tmp_path, front="apart", authoriser=authoriser, joining=Access(key=key)
    ) as server:
        fronts = server.fronts
        assert fronts is not None
        assert fronts.num_fronts == 1
        authoriser.use(Rules(anonymous=LOOKS), now_s=0)
        await until(lambda: fronts.num_fronts == 0)
        # And it comes back with it.
        authoriser.use(rules, now_s=0)
        await until(lambda: fronts.num_fronts == 1)
        async with Access().async_channel(server.address) as channel:
            status = channel.unary_unary(
                STATUS, response_deserializer=control_pb2.StatusResponse.FromString
            )
            assert (await status(b"", timeout=60)).num_models


async def test_a_front_whose_key_was_rotated_comes_back_by_itself(tmp_path: Path) -> None:
    old, new = a_key(), a_key()
    own = tmp_path / "front.key"
    own.write_text(old)
    of = {key: Rules((a_grant(key, "front", Role.FRONT),), anonymous=LOOKS) for key in (old, new)}
    authoriser = Authoriser(of[old])
    joining = FrontJoinFlags(front_token_file=own).access()
    async with serving(tmp_path, front="apart", authoriser=authoriser, joining=joining) as server:
        fronts = server.fronts
        assert fronts is not None
        # As whoever writes a file in place leaves it for a moment.
        own.write_text("")
        authoriser.use(of[new], now_s=0)
        await until(lambda: fronts.num_fronts == 0)
        own.write_text(new)
        await until(lambda: fronts.num_fronts == 1)
        # What it hands on shows the new key too.
        assert await code_of(server.address, STATUS, "") is grpc.StatusCode.OK
