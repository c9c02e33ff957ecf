"""The API of Kubernetes over TLS, with the token of a Pod's service account."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from clockwright.errors import ConfigError
from clockwright.kubernetes import ApiError, KubernetesApi
from tests.kit.api_server import api_server

PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/n"


def test_a_pod_shows_its_token_which_may_be_replaced_and_knows_the_server(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first\n")
    with api_server(context) as server:
        server.token = "first"
        server.put(PATH, {"spec": {"holderIdentity": "a"}})
        api = KubernetesApi(server.url, limit_s=60, account=tmp_path)
        assert api.call("GET", PATH)["spec"] == {"holderIdentity": "a"}
        server.token = "second"
        with pytest.raises(ApiError, match="401 Unauthorized") as refused:
            api.call("GET", PATH)
        assert refused.value.status == 401
        (tmp_path / "token").write_text("second")
        assert api.call("GET", PATH)["spec"] == {"holderIdentity": "a"}
        api.close()
        stranger.cert_pem.write_to_path(tmp_path / "ca.crt")
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            api.call("GET", PATH)
        api.close()


def test_a_server_that_is_away_is_an_error_that_names_it() -> None:
    with api_server() as server:
        pass
    api = KubernetesApi(server.url, limit_s=60)
    with pytest.raises(OSError, match=rf"{server.url}: .*refused") as away:
        api.call("GET", PATH)
    assert not isinstance(away.value, ApiError)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://a:1", "http://a", "http://a:b", "http://a:1/b"]
)
def test_urls_of_no_api_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http"):
        KubernetesApi(url, limit_s=1)
