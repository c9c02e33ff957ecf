"""`clockwright replay`: a described workload against a live server."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.live.local_server import LocalServer
from modelzoo.build import write_model

CASE = """
seconds = 2

[cluster]
num_workers = 1

[[models]]
row = "resnet18_v1"
copies = 2

[[clients]]
kind = "poisson"
rate_rps = 30
slo_ms = 1000

[[clients]]
kind = "closed"
concurrency = 3
slo_ms = 1000
"""


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clockwright.cli", "replay", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_workload_of_a_case_is_sent_and_the_clients_own_lateness_reported(
    tmp_path: Path,
) -> None:
    models = tmp_path / "models"
    # The graph does not matter to a modelled device; its name finds the row of the profile.
    write_model("mlp-64-32-10", models / "resnet18_v1" / "1" / "model.onnx")
    (models / "resnet18_v1" / "config.toml").write_text("copies = 2\n")
    case = tmp_path / "case.toml"
    case.write_text(CASE)
    requests = tmp_path / "requests.csv"
    keys, key_file = tmp_path / "keys", tmp_path / "key"
    key_file.write_text(add_key(keys, "replay", frozenset({Role.INFERENCE, Role.METADATA})))
    arguments = ["--models", str(models), "--device", "modelled:table1", "--keys", str(keys)]
    with LocalServer([*arguments, "--cache-dir", str(tmp_path / "cache")]) as server:
        to = ("--server", server.address, "--key-file", str(key_file))
        stranger = replay(str(case), "--server", server.address)
        done = replay(*to, str(case), "--requests", str(requests), "--json")
        unknown = tmp_path / "unknown.toml"
        unknown.write_text(CASE.replace("resnet18_v1", "resnet34_v1"))
        refused = replay(*to, str(unknown))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_open"] > 20
    # Each client asks at once, and again as often as the machine allows.
    assert report["num_closed"] >= 3
    assert report["lateness_ns_max"] >= report["lateness_ns_p50"]
    assert isinstance(report["kept_up"], bool)
    with requests.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == report["num_open"] + report["num_closed"]
    assert stranger.returncode == 1
    assert "NO_CREDENTIALS" in stranger.stderr
    assert refused.returncode == 1
    assert "resnet34_v1-0" in refused.stderr
    assert "Traceback" not in refused.stderr
