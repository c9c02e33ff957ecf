"""`clockwright up` with keys and TLS, as an operator runs it, and the commands that get in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from clockwright import Access, Client, Denial, DeniedError
from experiments.local_server import LocalServer
from tests.kit.processes import write_models

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


@pytest.mark.parametrize("fronts", [0, 2])
def test_up_with_keys_and_tls_serves_who_has_a_key_and_nobody_else(
    tmp_path: Path, fronts: int
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, certificate, tls_key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(tls_key)
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
    arguments += ["--cache-dir", str(tmp_path / "cache"), "--keys", str(keys)]
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
