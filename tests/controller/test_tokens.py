"""JSON Web Tokens: what a token of the issuer allows, and that no other is believed."""

from __future__ import annotations

import json
import secrets
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm

from clockwright.errors import ConfigError, Denial, DeniedError
from controller.access.authoriser import Authoriser, Rules, credentials_of
from controller.access.roles import Role
from controller.access.tokens import Issuer, read_key_set
from controller.front.methods import METHODS

NOW_S = 1_800_000_000
INFER = METHODS["/inference.GRPCInferenceService/ModelInfer"]
CLAIMS = {
    "iss": "https://login.example",
    "aud": "clockwright",
    "sub": "ann",
    "exp": NOW_S + 3600,
    "roles": ["inference", "lunch"],
    "tenant": "gold",
}
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))


def key_set(*keys: tuple[str, ec.EllipticCurvePrivateKey]) -> bytes:
    return json.dumps(
        {
            "keys": [
                {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig"}
                for key_id, key in keys
            ]
        }
    ).encode()


ISSUER = Issuer(
    "https://login.example",
    "clockwright",
    read_key_set(key_set(("k1", KEY), ("k2", OTHER))),
    "roles",
    "tenant",
)


def token(
    key: ec.EllipticCurvePrivateKey = KEY,
    key_id: str | None = "k1",
    **changes: Any,  # noqa: ANN401
) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(claims, key, "ES256", headers=headers)


def test_a_token_says_who_it_is_for_and_what_it_allows() -> None:
    grant = ISSUER.read(token(), now_s=NOW_S)
    assert (grant.name, grant.roles, grant.tenant) == ("ann", frozenset((Role.INFERENCE,)), "gold")
    assert ISSUER.read(token(OTHER, "k2", roles="metadata inference"), now_s=NOW_S).roles == {
        Role.INFERENCE,
        Role.METADATA,
    }
    assert ISSUER.read(token(roles=None, tenant=None), now_s=NOW_S).roles == frozenset()


@pytest.mark.parametrize(
    "changes",
    [
        *({"iss": "https://evil.example"}, {"iss": None}, {"aud": "other"}, {"aud": None}),
        *({"sub": None}, {"sub": ""}, {"sub": "x" * 300}, {"exp": None}, {"nbf": NOW_S + 100}),
        *({"tenant": 7}, {"tenant": "x" * 300}, {"tenant": "\n"}, {"exp": 1e300}),
        *({"key_id": "k2"}, {"key_id": "k3"}, {"key_id": None}),
    ],
)
def test_a_token_that_says_something_else_is_not_believed(changes: dict[str, Any]) -> None:
    with pytest.raises(DeniedError) as found:
        ISSUER.read(token(**changes), now_s=NOW_S)
    assert found.value.denial is Denial.UNKNOWN_CREDENTIALS


def forged(header: dict[str, object], secret: bytes = b"") -> str:
    """A token that is signed with a secret by hand, for the library refuses to."""
    import base64
    import hashlib
    import hmac

    def encoded(part: bytes) -> str:
        return base64.urlsafe_b64encode(part).decode().rstrip("=")

    body = f"{encoded(json.dumps(header).encode())}.{encoded(json.dumps(CLAIMS).encode())}"
    signature = hmac.digest(secret, body.encode(), hashlib.sha256) if secret else b""
    return f"{body}.{encoded(signature)}"


def test_no_token_is_believed_that_everybody_could_have_made() -> None:
    public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    good = token()
    changed = good[:-4] + ("AAAA" if good[-4:] != "AAAA" else "BBBB")
    for text in (
        forged({"alg": "none", "kid": "k1"}),
        forged({"alg": "HS256", "kid": "k1"}, public),
        token(ec.generate_private_key(ec.SECP256R1())),
        changed,
        good.rpartition(".")[0] + ".",
        "a.b.c",
        "..",
        secrets.token_urlsafe(5000),
    ):
        with pytest.raises(DeniedError):
            ISSUER.read(text, now_s=NOW_S)


def test_a_token_opens_nothing_after_its_time() -> None:
    authoriser = Authoriser(Rules(issuer=ISSUER, anonymous=frozenset(), anonymous_tenants=False))
    shown = credentials_of([("authorization", f"Bearer {token()}")])
    caller = authoriser.admit(INFER, shown, now_s=NOW_S)
    assert (caller.name, caller.tenant) == ("ann", "gold")
    # It is verified once.
    assert authoriser.admit(INFER, shown, now_s=NOW_S + 3600) is caller
    later_s = NOW_S + 3600 + 31
    authoriser.expire(later_s)
    assert caller.over
    with pytest.raises(DeniedError) as found:
        authoriser.admit(INFER, shown, now_s=later_s)
    assert found.value.denial is Denial.EXPIRED


def test_callers_stay_when_their_issuer_shows_one_more_key_and_go_with_their_own() -> None:
    def rules(*keys: tuple[str, ec.EllipticCurvePrivateKey]) -> Rules:
        issuer = Issuer(
            ISSUER.name, ISSUER.audience, read_key_set(key_set(*keys)), "roles", "tenant"
        )
        return Rules(issuer=issuer, anonymous=frozenset(), anonymous_tenants=False)

    authoriser = Authoriser(rules(("k1", KEY)))
    shown = credentials_of([("authorization", f"Bearer {token()}")])
    caller = authoriser.admit(INFER, shown, now_s=NOW_S)
    authoriser.use(rules(("k1", KEY), ("k2", OTHER)), now_s=NOW_S)
    assert not caller.over
    authoriser.use(rules(("k2", OTHER)), now_s=NOW_S)
    assert caller.over


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b"[" * 5000, b'{"keys": []}', b'{"keys": [{"kty": "x"}]}', b"1"],
)
def test_what_is_no_set_of_keys_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read_key_set(data)
    # A secret that both sides know would be known to whoever reads the set.
    secret = b'{"keys": [{"kty": "oct", "k": "AAAA", "kid": "k1", "alg": "HS256"}]}'
    with pytest.raises(ConfigError, match="no key that signs"):
        read_key_set(secret)
