"""Who may do what, without a server: roles, keys, the authoriser."""

from __future__ import annotations

import importlib
import math
import pkgutil
import secrets
from dataclasses import replace

import pytest
from google.protobuf.descriptor import FileDescriptor

from clockwright import v1
from clockwright.errors import ConfigError, Denial, DeniedError
from clockwright.v1 import externalscaler_pb2
from clockwright.wire import peer
from controller.access.authoriser import Authoriser, Certificate, Credentials, Rules, credentials_of
from controller.access.config import AccessConfig, is_loopback
from controller.access.grants import (
    Grant,
    digest,
    id_of,
    make_key,
    read_grants,
    write_grants,
)
from controller.access.roles import EVERY_ROLE, Role
from controller.front.methods import HEALTH, METHODS, REFLECTION, Method

INFER = METHODS["/inference.GRPCInferenceService/ModelInfer"]
READY = METHODS["/inference.GRPCInferenceService/ServerReady"]
DRAIN = METHODS["/clockwright.v1.ControlService/DrainWorker"]
ATTACH = METHODS["/clockwright.v1.WorkerService/Attach"]
CLIENT = frozenset((Role.INFERENCE, Role.FEEDBACK))


def a_key() -> str:
    return make_key(secrets.token_bytes(4), secrets.token_urlsafe(32))


def a_grant(key: str, name: str = "web", **fields: object) -> Grant:
    grant = Grant(name, CLIENT, "gold", key_id=id_of(key), key_sha256=digest(key))
    return replace(grant, **fields)  # type: ignore[arg-type]


def guarded(*grants: Grant, **fields: object) -> Rules:
    rules = Rules(grants, anonymous=frozenset((Role.HEALTH,)), anonymous_tenants=False)
    return replace(rules, **fields)  # type: ignore[arg-type]


def bearer(secret: str) -> Credentials:
    return credentials_of([("authorization", f"Bearer {secret}")])


def denial(
    authoriser: Authoriser, method: Method, credentials: Credentials, now_s: float = 0
) -> Denial:
    with pytest.raises(DeniedError) as found:
        authoriser.admit(method, credentials, now_s=now_s)
    return found.value.denial


# --- roles ----------------------------------------------------------------------------------------


def methods_of(file: FileDescriptor) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for service in file.services_by_name.values()
        for method in service.methods
    }


def test_every_method_of_every_service_belongs_to_a_role() -> None:
    modules = [
        importlib.import_module(f"{v1.__name__}.{found.name}")
        for found in pkgutil.iter_modules(v1.__path__)
        if found.name.endswith("_pb2")
    ]
    # KEDA asks a scaler, which is a process of its own.
    known = set().union(
        *(methods_of(module.DESCRIPTOR) for module in modules if module is not externalscaler_pb2)
    )
    assert len(modules) >= 3
    of_grpc = {f"/{service}/ServerReflectionInfo" for service in REFLECTION} | {
        f"/{HEALTH}/{method}" for method in ("Check", "Watch")
    }
    of_peers = {
        f"/{service}/{peer.ATTACH}" for service in (peer.WORKER_SERVICE, peer.FRONT_SERVICE)
    }
    assert METHODS.keys() == known | of_grpc | of_peers
    assert {method.role for method in METHODS.values()} == EVERY_ROLE


# --- who calls ------------------------------------------------------------------------------------


def test_with_no_rules_everybody_may_do_everything_and_names_his_tenant() -> None:
    caller = Authoriser().admit(ATTACH, Credentials(), now_s=0)
    assert caller.tenant is None
    assert caller.owner == ""


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer {}")],
        [("authorization", "bearer {}")],
        [("triton-grpc-protocol-api-key", "{}")],
        [("authorization", "Basic dTpw"), ("triton-grpc-protocol-infer", "{}")],
        [("triton-grpc-protocol-other", "wrong"), ("triton-grpc-protocol-infer", "{}")],
    ],
)
def test_a_key_opens_what_its_roles_allow(headers: list[tuple[str, str]]) -> None:
    key = a_key()
    authoriser = Authoriser(guarded(a_grant(key)))
    shown = credentials_of([(name, value.format(key)) for name, value in headers])
    caller = authoriser.admit(INFER, shown, now_s=0)
    assert (caller.name, caller.tenant, caller.roles) == ("web", "gold", CLIENT)
    # The next call finds the same caller, and is not hashed again.
    assert authoriser.admit(INFER, shown, now_s=1) is caller
    assert denial(authoriser, DRAIN, shown) is Denial.NOT_ALLOWED
    assert denial(authoriser, ATTACH, shown) is Denial.NOT_ALLOWED


def test_without_a_key_there_is_health_and_nothing_else() -> None:
    authoriser = Authoriser(guarded(a_grant(a_key())))
    for method in METHODS.values():
        if method.role is Role.HEALTH:
            assert authoriser.admit(method, Credentials(), now_s=0).tenant == ""
            # A probe that shows a wrong key is a probe all the same.
            assert authoriser.admit(method, bearer(a_key()), now_s=0).name == ""
        else:
            assert denial(authoriser, method, Credentials()) is Denial.NO_CREDENTIALS


def test_a_wrong_secret_is_nobodys_whatever_it_looks_like() -> None:
    key = a_key()
    authoriser = Authoriser(guarded(a_grant(key), worker_token_sha256=digest("t" * 40)))
    others = a_key()
    same_id = key[:12] + others[12:]
    assert id_of(same_id) == id_of(key)
    for wrong in (others, same_id, key[:-1], key + "x", digest(key).hex(), "", "a.b.c", "t" * 39):
        assert denial(authoriser, INFER, bearer(wrong)) in (
            Denial.UNKNOWN_CREDENTIALS,
            Denial.NO_CREDENTIALS,
        )


def test_a_key_opens_nothing_after_its_time() -> None:
    key = a_key()
    authoriser = Authoriser(guarded(a_grant(key, expires_s=100.0)))
    caller = authoriser.admit(INFER, bearer(key), now_s=99)
    authoriser.expire(99)
    assert not caller.over
    authoriser.expire(100)
    assert caller.over
    assert denial(authoriser, INFER, bearer(key), now_s=100) is Denial.EXPIRED


def test_a_key_that_is_revoked_or_changed_has_its_caller_looked_at_again() -> None:
    key, other = a_key(), a_key()
    grant, staying = a_grant(key), a_grant(other, "other")
    authoriser = Authoriser(guarded(grant, staying))
    caller = authoriser.admit(INFER, bearer(key), now_s=0)
    untouched = authoriser.admit(INFER, bearer(other), now_s=0)
    changed = replace(grant, tenant="bronze")
    authoriser.use(guarded(changed, staying), now_s=0)
    assert (caller.over, untouched.over) == (True, False)
    assert authoriser.admit(INFER, bearer(key), now_s=0).tenant == "bronze"
    authoriser.use(guarded(staying), now_s=0)
    assert denial(authoriser, INFER, bearer(key)) is Denial.UNKNOWN_CREDENTIALS
    assert not untouched.over


def test_the_workers_token_lets_workers_join_and_do_nothing_else() -> None:
    token = "t" * 40
    sha256 = digest(token)
    authoriser = Authoriser(guarded(worker_token_sha256=sha256))
    assert authoriser.admit(ATTACH, bearer(token), now_s=0).roles == {Role.WORKER}
    assert denial(authoriser, INFER, bearer(token)) is Denial.NOT_ALLOWED
    # Where clients need nothing, workers do.
    anonymous = EVERY_ROLE - {Role.WORKER}
    authoriser.use(Rules(worker_token_sha256=sha256, anonymous=anonymous), now_s=0)
    assert authoriser.admit(INFER, Credentials(), now_s=0).tenant is None
    assert denial(authoriser, ATTACH, Credentials()) is Denial.NO_CREDENTIALS


def test_who_is_known_may_do_what_everybody_may() -> None:
    key = a_key()
    authoriser = Authoriser(guarded(a_grant(key)))
    assert authoriser.admit(READY, bearer(key), now_s=0).name == "web"


def test_a_certificate_counts_by_the_authority_that_signed_it() -> None:
    web = Grant("web", CLIENT, "gold", certificate="DNS:web.example")
    authoriser = Authoriser(guarded(web, is_client=b"client".__eq__, is_worker=b"worker".__eq__))

    def shown(der: bytes, *names: str) -> Credentials:
        return Credentials(certificate=Certificate(names, der))

    caller = authoriser.admit(INFER, shown(b"client", "URI:x:y", "DNS:web.example"), now_s=0)
    assert (caller.name, caller.tenant) == ("web", "gold")
    worker = shown(b"worker", "DNS:web.example")
    assert authoriser.admit(ATTACH, worker, now_s=0).roles == {Role.WORKER}
    # A worker's authority vouches for no client, nor a client's for a worker, nor a third for anybody.
    assert denial(authoriser, INFER, worker) is Denial.NOT_ALLOWED
    assert denial(authoriser, ATTACH, shown(b"client", "DNS:w")) is Denial.UNKNOWN_CREDENTIALS
    assert denial(authoriser, INFER, shown(b"other", "DNS:web.example")) is (
        Denial.UNKNOWN_CREDENTIALS
    )


def test_keys_of_one_tenant_are_one_owner() -> None:
    asking, telling, other, alone = (a_key() for _ in range(4))
    authoriser = Authoriser(
        guarded(
            a_grant(asking, "asking"),
            a_grant(telling, "telling"),
            a_grant(other, "other", tenant="bronze"),
            a_grant(alone, "gold", tenant=""),
        )
    )
    owners = [
        authoriser.admit(INFER, bearer(key), now_s=0).owner
        for key in (asking, telling, other, alone)
    ]
    assert owners[0] == owners[1]
    # Nor is a key that is called like a tenant.
    assert len(set(owners)) == 3


# --- the file -------------------------------------------------------------------------------------


def test_grants_come_back_from_their_lines() -> None:
    grants = (
        a_grant(a_key()),
        a_grant(a_key(), "ops", roles=EVERY_ROLE, tenant="", expires_s=1_900_000_000.0),
        Grant("rack-7", frozenset((Role.WORKER,)), certificate="URI:spiffe://example/rack-7"),
    )
    text = write_grants(grants)
    assert read_grants("# ours\n\n" + text, where="keys") == grants
    assert math.isinf(read_grants(text, where="keys")[0].expires_s)


KEY_LINE = f'"roles":["inference"],"key":"00000000","sha256":"{"0" * 64}"'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "keys:1: JSON is malformed"),
        ("[]", "keys:1: Expected `object`"),
        (f'{{"name":"a b",{KEY_LINE}}}', "keys:1: found name 'a b'"),
        (f'{{"name":"a",{KEY_LINE},"role":1}}', "keys:1: .*unknown field `role`"),
        ('{"name":"a","roles":["root"]}', "keys:1: found role 'root', expected some of health"),
        ('{"name":"a","roles":["inference"]}', "expected either a key or a certificate"),
        ('{"name":"a","roles":["worker"],"certificate":"web"}', "expected KIND:VALUE"),
        ('{"name":"a","roles":[],"key":"00000000","sha256":"00"}', "expected 8 hexadecimal digits"),
        (f'{{"name":"a",{KEY_LINE},"expires":"2027-01-01T00:00:00"}}', "expected a time zone"),
        (f'{{"name":"a",{KEY_LINE},"tenant":"\\n"}}', "found tenant"),
        (f'{{"name":"a",{KEY_LINE}}}\n{{"name":"b",{KEY_LINE}}}', "keys:2: found key_id .* line 1"),
        ("[" * 9000, "keys:1: "),
        ("x" * 20_000, "keys:1: found 20000 characters"),
    ],
)
def test_a_line_that_is_no_grant_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_grants(line, where="keys")


def test_no_secret_stands_in_a_file_or_in_words() -> None:
    key = a_key()
    grant = a_grant(key)
    assert key not in write_grants([grant])
    assert key not in repr((bearer(key), grant, AccessConfig(own_key=key)))


# --- secure by default ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("gpu-7.example", False)),
    ],
)
def test_what_other_machines_reach_is_known(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
    assert bool(AccessConfig().dangers(host, has_tls=False)) is not is_local
