"""`clockwright up` with keys and TLS, as an operator runs it, and the commands that get in."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
from typer.main import get_command

from clockwright import Access, Client, ClockwrightError, Denial, DeniedError
from clockwright.cli.main import app, main
from clockwright.client.operator import Operator
from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.live.local_server import LocalServer
from tests.kit.addresses import own_address
from tests.kit.processes import until, write_models

ROOT = Path(__file__).resolve().parents[2]
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
    made = subprocess.run(
        [*CLOCKWRIGHT, "keys", "add", "ops", "--keys", str(keys), "--role", "statistics"],
        capture_output=True,
        text=True,
        check=True,
    )
    key_file.write_text(made.stdout)
    web_key = add_key(keys, "web", frozenset({Role.METADATA, Role.HEALTH}))
    models = write_models(tmp_path / "models", dense="mlp-16-32-4")
    arguments = ["--models", str(models), "--device", "modelled:1ms"]
    arguments += ["--cache-dir", str(cache_dir), "--keys", str(keys)]
    arguments += ["--tls-cert", str(certificate), "--tls-key", str(tls_key)]
    arguments += ["--fronts", str(fronts)]
    # It is ready only once its own worker has joined, and it has looked itself.
    with LocalServer(arguments) as server:
        web = Access(key=web_key, ca=ca)
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
        status = json.loads(told)
        assert [worker["state"] for worker in status["workers"]] == ["READY"]
        assert status["knows_callers"]
        assert status["has_tls"]
        told = command("drain", "local-0", server=server.address, access=web, key_file=key_file)
        assert re.search("error: NOT_ALLOWED: DrainWorker needs role operator; ops has", told)
        # Fronts tell what they have denied with their signs of life.
        counted = {"NO_CREDENTIALS": 1, "NOT_ALLOWED": 2}
        with Operator(server.address, Access(key=key_file.read_text().strip(), ca=ca)) as operator:
            until(
                lambda: {row.reason: row.count for row in operator.status().denials} == counted,
                what="all that was denied is counted",
            )


def test_one_role_is_enough_for_all_that_the_page_for_operators_shows(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = commands_of(ROOT / "docs" / "operate.md")
    assert len(shown) >= 12
    keys, key_file = tmp_path / "keys", tmp_path / "ops.key"
    key_file.write_text(add_key(keys, "ops", frozenset({Role.OPERATOR})))
    models = write_models(tmp_path / "models", m="mlp-16-32-4")
    write_models(tmp_path, new="mlp-16-32-4")
    meant = {"NAME": "m", "FOLDER": str(tmp_path / "new"), "WORKER": "nobody", "ID": "999"}
    arguments = ["--models", str(models), "--device", "modelled:1ms", "--pages", "4"]
    arguments += ["--cache-dir", str(cache_dir), "--keys", str(keys)]
    with LocalServer(arguments) as server:
        access = ("--server", server.address, "--key-file", str(key_file))
        told: dict[str, str] = {}
        # What removes comes last.
        for words in sorted(shown, key=lambda words: "remove" in words):
            # What is watched has no end.
            command = [meant.get(word, word) for word in words if word != "--watch"]
            command += {"top": ["--json"], "explain": ["999"]}.get(" ".join(command), [])
            monkeypatch.setattr(sys, "argv", ["clockwright", *command, *access])
            with pytest.raises(SystemExit) as caught:
                main()
            told[" ".join(words)] = str(caught.value.code or "")
    assert [words for words, end in told.items() if "NOT_ALLOWED" in end] == []
    # What is asked of a worker, a version or a request that there is not, and nothing else.
    failed = {words for words, end in told.items() if end.startswith("error")}
    assert failed == {"drain WORKER", "models traffic NAME 2=10%", "explain", "explain ID"}


def commands_of(page: Path) -> list[list[str]]:
    """The commands that a page shows, in blocks and in sentences, which ask a server."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in fenced for line in block.splitlines()]
    for block in fenced:
        text = text.replace(block, "")
    found: dict[tuple[str, ...], None] = {}
    # Made once: that takes longer than all that is looked up in it.
    whole = get_command(app)
    for line in (*lines, *re.findall(r"`([^`\n]+)`", text)):
        try:
            words = shlex.split(line.removeprefix("clockwright "))
        except ValueError:
            continue
        command: Any = whole
        for word in words:
            if not hasattr(command, "commands"):
                break
            command = command.get_command(None, word)
        if any(parameter.name == "server" for parameter in getattr(command, "params", ())):
            found[tuple(words)] = None
    return [[*words] for words in found]
