"""`clockwright up` with keys and TLS, as an operator runs it, and the commands that get in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from clockwright import Access, Client, ClockwrightError, Denial, DeniedError
from clockwright.client.operator import Operator
from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.live.local_server import LocalServer
from tests.kit.addresses import own_address
from tests.kit.processes import until, write_models

CLOCKWRIGHT = (sys.executable, "-m", "clockwright.cli")


def command(*arguments: str, server: str, access: Access, key_file: Path) -> str:
    """What a command prints, which finds server, key and authority in its environment."""
    assert access.ca is not None
    environment = {
        "CLOCKWRIGHT_SERVER": server,
        "CLOCKWRIGHT_KEY_FILE": str(key_file),
        "CLOCKWRIGHT_TLS_CA": str(access.ca),
    }
    done = subprocess.run(
        [*CLOCKWRIGHT, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def write_certificate(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """The files of an authority, of a certificate for a name, and of its key."""
    authority = trustme.CA()
    issued = authority.issue_cert(name)
    ca, certificate, tls_key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(tls_key)
    return ca, certificate, tls_key


@pytest.mark.skipif(own_address() is None, reason="the machine has no address but the loopback's")
@pytest.mark.parametrize("by_name", [True, False])
def test_a_controller_on_an_address_that_others_reach_says_when_it_is_ready(
    tmp_path: Path, by_name: bool
) -> None:
    host = own_address()
    assert host is not None
    _, certificate, tls_key = write_certificate(tmp_path, "models.example" if by_name else host)
    key = add_key(tmp_path / "keys", "web", frozenset({Role.STATISTICS}))
    arguments = ["--host", host, "--keys", str(tmp_path / "keys")]
    arguments += ["--tls-cert", str(certificate), "--tls-key", str(tls_key)]
    arguments += ["--state", str(tmp_path / "state")]
    with LocalServer(arguments, command="controller") as server:
        assert server.output[-1] == f"ready: 0 of 0 models on {server.address}"
        # From there nobody gets in without TLS, and it is not asked to serve who has none.
        with (
            Operator(server.address, Access(key=key)) as operator,
            pytest.raises(ClockwrightError),
        ):
            operator.status()


@pytest.mark.parametrize("fronts", [pytest.param(0, marks=pytest.mark.long), 2])
def test_up_with_keys_and_tls_serves_who_has_a_key_and_nobody_else(
    tmp_path: Path, cache_dir: Path, fronts: int
) -> None:
    ca, certificate, tls_key = write_certificate(tmp_path, "127.0.0.1")
    keys, key_file = tmp_path / "keys", tmp_path / "ops.key"
    for name, roles in (("web", []), ("ops", ["--role", "statistics"])):
        made = subprocess.run(
            [*CLOCKWRIGHT, "keys", "add", name, "--keys", str(keys), *roles],
            capture_output=True,
            text=True,
            check=True,
        )
        (tmp_path / f"{name}.key").write_text(made.stdout)
    models = write_models(tmp_path / "models", dense="mlp-16-32-4")
    arguments = ["--models", str(models), "--device", "modelled:1ms"]
    arguments += ["--cache-dir", str(cache_dir), "--keys", str(keys)]
    arguments += ["--tls-cert", str(certificate), "--tls-key", str(tls_key)]
    arguments += ["--fronts", str(fronts)]
    # It is ready only once its own worker has joined, and it has looked itself.
    with LocalServer(arguments) as server:
        web = Access(key=(tmp_path / "web.key").read_text().strip(), ca=ca)
        with Client(server.address, web) as client:
            (spec,) = client.metadata("dense").inputs
            assert client.is_ready()
            with pytest.raises(DeniedError) as denied:
                client.models()
            assert denied.value.denial is Denial.NOT_ALLOWED
        assert spec.row_shape == (16,)
        with Client(server.address) as client, pytest.raises(DeniedError) as denied:
            client.metadata("dense")
        assert denied.value.denial is Denial.NO_CREDENTIALS
        told = command("status", "--json", server=server.address, access=web, key_file=key_file)
        assert [worker["state"] for worker in json.loads(told)["workers"]] == ["READY"]
        told = command("drain", "local-0", server=server.address, access=web, key_file=key_file)
        assert re.search("error: NOT_ALLOWED: DrainWorker needs role operator; ops has", told)

        def status() -> dict[str, Any]:
            told = command("status", "--json", server=server.address, access=web, key_file=key_file)
            found: dict[str, Any] = json.loads(told)
            return found

        assert status()["knows_callers"]
        assert status()["has_tls"]
        # Fronts tell what they have denied with their signs of life.
        counted = {"NO_CREDENTIALS": 1, "NOT_ALLOWED": 2}
        until(
            lambda: {row["reason"]: row["count"] for row in status()["denials"]} == counted,
            what="all that was denied is counted",
        )
