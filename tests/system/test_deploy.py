"""What is in `deploy/` agrees with the product: its commands, flags, ports and versions, and refuses what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from clockwright import __version__
from clockwright.cli.main import app

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
CHART = KUBERNETES / "chart/clockwright"
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")

#: What runs which command, in files where flags stand apart from it.
TEMPLATES = {
    "controller.yaml": ["controller"],
    "front.yaml": ["front"],
    "worker.yaml": ["worker"],
    "scaler.yaml": ["scaler"],
    # Flags of all that serve.
    "_helpers.tpl": ["controller", "front"],
}


def flags_of(command: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    found = group.get_command(None, command)
    if found is None:
        pytest.skip(f"there is no command {command}")
    return {flag for parameter in found.params for flag in parameter.opts}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_flag_of_the_chart_is_one_of_the_command(name: str) -> None:
    said = set(FLAG.findall((CHART / "templates" / name).read_text()))
    assert said
    for command in TEMPLATES[name]:
        assert said <= flags_of(command), command


def test_every_template_with_flags_is_looked_at() -> None:
    for path in (CHART / "templates").iterdir():
        assert path.name in TEMPLATES or not re.search(r"^\s+- --", path.read_text(), re.MULTILINE)


def test_every_flag_of_kserves_runtime_is_one_of_its_command() -> None:
    runtime = yaml.safe_load((KUBERNETES / "kserve.yaml").read_text())
    for container in runtime["spec"]["containers"]:
        command, *args = container["args"]
        assert {arg.partition("=")[0] for arg in args} <= flags_of(command)
        assert container["image"].endswith(f":{__version__}")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_every_flag_of_a_unit_is_one_of_its_command(unit: Path) -> None:
    text = unit.read_text()
    (command,) = re.findall(r"^ExecStart=\S+ (\w+)", text, re.MULTILINE)
    assert set(FLAG.findall(text)) <= flags_of(command)


@pytest.mark.parametrize("name", ["controller.yaml", "front.yaml", "worker.yaml", "scaler.yaml"])
def test_a_port_is_the_same_for_the_process_its_container_and_its_service(name: str) -> None:
    text = (CHART / "templates" / name).read_text()
    helper = (CHART / "templates/_helpers.tpl").read_text() if "serving" in text else ""
    said = set(re.findall(r"- --[a-z-]*port=(\d+)", text + helper))
    said |= set(re.findall(r"- --listen=.*:(\d+)", text))
    opened = dict(re.findall(r"\{name: (\w+), containerPort: (\d+)\}", text))
    assert said == set(opened.values())
    services = re.findall(r"port: (\d+),? ?\s*targetPort: (\w+)", text)
    assert {(port, opened[target]) for port, target in services} <= {(p, p) for p in said}
    dialled = {
        p for p in re.findall(r"\.svc:(\d+)", (CHART / "templates/_helpers.tpl").read_text())
    }
    assert dialled == {"8001"}


def test_versions_are_the_products() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_rules_and_dashboard_are_the_projects_own_files() -> None:
    # Helm puts what a link points at into the chart.
    assert (CHART / "files/rules.yml").resolve() == ROOT / "deploy/prometheus/rules.yml"
    assert (CHART / "files/dashboard.json").resolve() == ROOT / "deploy/grafana/clockwright.json"
    for name in ("rules.yml", "dashboard.json"):
        assert f'.Files.Get "files/{name}"' in (CHART / "templates/monitoring.yaml").read_text()


# --- the values -----------------------------------------------------------------------------------


def merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Coalesce values as Helm does."""
    both = {
        name: merged(defaults[name], value)
        for name, value in own.items()
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
    }
    return {**defaults, **own, **both}


def complaint(own: Mapping[str, Any]) -> str:
    """What the schema says of values; empty: nothing."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), own)
    best = jsonschema.exceptions.best_match(jsonschema.Draft7Validator(schema).iter_errors(values))
    return "" if best is None else f"{'.'.join(map(str, best.absolute_path))}: {best.message}"


@pytest.mark.parametrize("name", ["small", "full"])
def test_good_values_are_taken(name: str) -> None:
    assert not complaint({})
    assert not complaint(yaml.safe_load((CHART / f"ci/{name}.yaml").read_text()))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"controler": {}}, "'controler' was unexpected"),
        ({"image": {"repo": "x"}}, "image: .*'repo' was unexpected"),
        ({"controller": {"replicas": 3}}, r"controller.replicas: 3 is not one of \[1, 2\]"),
        ({"controller": {"lease": "zookeeper://x"}}, "controller.lease: 'zookeeper://x'"),
        ({"front": {"replicas": 0}}, "front.replicas: 0 is less than the minimum of 1"),
        ({"front": {"noticeSeconds": "15"}}, "front.noticeSeconds: '15' is not of type 'integer'"),
        ({"workers": {"A100": {}}}, "workers: 'A100' does not match"),
        ({"workers": {"a": {"gpus": 1}}}, "workers.a: .*'gpus' was unexpected"),
        ({"workers": {"a": {"gpu": 1}}}, "workers.a.gpu: 1 is not of type 'string'"),
        ({"workers": {"a": {"args": ["pages=3"]}}}, r"workers.a.args.0: 'pages=3' does not match"),
        ({"workers": {"a": {"scale": {"max": 3}}}}, "workers.a.scale: 'min' is a required"),
        ({"models": {"volume": {"nfs": {}, "image": {}}}}, "models.volume: .*too many properties"),
        ({"tls": {"secret": "My_Secret"}}, "tls.secret: 'My_Secret'"),
        ({"host": "127.0.0.1"}, "host: '127.0.0.1' is not one of"),
        ({"networkPolicy": {"clientsFrom": [{}]}}, "networkPolicy.clientsFrom.0: "),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_wrong_value_is_refused_by_its_name(own: Mapping[str, Any], words: str) -> None:
    assert re.match(words if ": " in words else f": .*{words}", complaint(own))


# --- systemd --------------------------------------------------------------------------------------


def judge(unit: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on a unit whose command is one that this machine has."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("there is no systemd-analyze")
    command = "/opt/clockwright/bin/clockwright"
    text = unit.read_text()
    assert command in text
    copy = folder / unit.name.replace("@.", "@0.")
    copy.write_text(text.replace(command, "/bin/true"))
    return subprocess.run(
        [found, "--no-pager", *arguments, str(copy)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_has_nothing_to_say_against_a_unit(unit: Path, tmp_path: Path) -> None:
    done = judge(unit, tmp_path, "verify", "--man=no")
    # What it does not know it warns of, and succeeds.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_may_do_little(unit: Path, tmp_path: Path) -> None:
    # In tenths; a unit that restricts nothing has 96 in systemd 252.
    most = "30" if "worker" in unit.name else "20"
    done = judge(unit, tmp_path, "security", "--offline=yes", f"--threshold={most}")
    assert done.returncode == 0, done.stdout


def test_a_unit_is_stopped_after_its_process_has_drained() -> None:
    for unit in UNITS:
        (limit,) = re.findall(r"^TimeoutStopSec=(\d+)", unit.read_text(), re.MULTILINE)
        (notice,) = re.findall(r"--notice-s=(\d+)", unit.read_text()) or ("0",)
        assert int(limit) > int(notice) + 10
