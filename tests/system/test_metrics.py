"""The metrics of `clockwright up` as an operator has them, and the rules and the dashboard that ask for them."""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from clockwright import Client, Refusal, RefusedError
from controller.metrics.families import FAMILIES
from experiments.live.local_server import LocalServer
from tests.kit.processes import standing_by, until, write_models

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"
DASHBOARD = ROOT / "deploy/grafana/clockwright.json"

#: What Triton's dashboard and its chart's rule for scaling ask for.
TRITONS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
)
TRITONS_RULE = (
    "avg(delta(nv_inference_queue_duration_us[30s])/(1+delta(nv_inference_request_success[30s])))"
)
#: Labels that Prometheus adds, and those of the rules' own series.
ADDED = {"job", "instance", "alertname", "alertstate"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("up")
    models = write_models(folder / "models", dense="mlp-16-32-4")
    (folder / "quotas.toml").write_text("[gold]\nrate_rps = 1e-6\nburst = 2\n")
    arguments = ["--models", str(models), "--device", "modelled:1ms"]
    arguments += ["--cache-dir", str(cache_dir), "--quotas", str(folder / "quotas.toml")]
    with LocalServer([*arguments, "--fronts", "1", "--metrics-port", "0"]) as server:
        yield server


def read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        text: str = answer.read().decode()
    return text


def samples(server: LocalServer) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(read(server.metrics))
        for sample in family.samples
    }


def test_what_clients_of_up_got_is_what_its_metrics_say(server: LocalServer) -> None:
    outcomes = []
    with Client(server.address) as client:
        for slo_ms, tenant in [(30_000, "")] * 7 + [(0.001, "")] * 2 + [(30_000, "gold")] * 5:
            try:
                inputs = {"input": np.zeros((1, 16), np.float32)}
                client.infer("dense", inputs, slo_ms=slo_ms, tenant=tenant)
                outcomes.append("ok")
            except RefusedError as error:
                outcomes.append(error.refusal.value)
    assert outcomes.count("ok") == 9
    assert outcomes.count(Refusal.QUOTA.value) == 3
    # What a front has refused by itself it tells with its next beat.
    until(
        lambda: samples(server)["clockwright_quota_refused_total", "gold"] == 3,
        what="all refusals are counted",
    )
    found = samples(server)
    assert found["clockwright_requests_total", "", "1", "dense", "ok"] == 9
    assert found["clockwright_requests_total", "1", "INFEASIBLE", "dense", "refused"] == 2
    assert found["nv_inference_request_success_total", "1", "dense"] == 9
    assert found["clockwright_requests_refused_at_door_total", "QUOTA"] == 3
    assert found["clockwright_quota_admitted_total", "gold"] == 2
    assert found["clockwright_fronts",] == 1


def test_curl_gets_the_page(server: LocalServer) -> None:
    done = subprocess.run(
        ["curl", "--silent", "--fail", server.metrics], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("# HELP nv_inference_request_success ")


def test_a_standby_says_that_it_does_not_lead_and_at_the_same_place_when_it_does(
    tmp_path: Path,
) -> None:
    flags = ["--port", "0", "--metrics-port", "0", "--http-port", "0"]
    flags += ["--lease", f"file:{tmp_path}/lease", "--state", str(tmp_path / "state")]

    def places_of(process: subprocess.Popen[str]) -> tuple[str, str]:
        assert process.stdout is not None
        said = (line for line in process.stdout if line.startswith(("REST on ", "metrics on ")))
        rest, metrics = (next(said).split()[-1] for _ in range(2))
        return rest, metrics

    def health(rest: str, what: str) -> int:
        """The status with which REST answers who looks whether it lives, or is ready."""
        try:
            return int(urllib.request.urlopen(f"{rest}/v2/health/{what}").status)
        except urllib.error.HTTPError as error:
            return error.code

    def leads(url: str) -> bool:
        try:
            return "\nclockwright_leader 1\n" in read(url)
        except OSError:
            return False  # It stands by no more and does not lead yet.

    with standing_by("controller", *flags) as (leader, address):
        _, first = places_of(leader)
        until(functools.partial(leads, first), what="the first leads")
        with standing_by("controller", *flags) as (standby, _):
            rest, second = places_of(standby)
            # Who restarts what does not live leaves it alone, and who sends requests sends none.
            assert (health(rest, "live"), health(rest, "ready")) == (200, 400)
            assert "\nclockwright_leader 0\n" in read(second)
            assert "clockwright_workers" not in read(second)
            # The dashboard is there, and says why it shows nothing.
            site = second.removesuffix("metrics")
            assert "This controller stands by" in read(site)
            with urllib.request.urlopen(f"{site}live/overview") as events:
                said = json.loads(events.readline().removeprefix(b"data: "))["standby"]
            assert f"that listens on {address} leads, in generation 1" in said
            leader.send_signal(signal.SIGTERM)
            until(functools.partial(leads, second), what="the second leads")
            assert 'clockwright_workers{state="READY"} 0' in read(second)
            assert (health(rest, "live"), health(rest, "ready")) == (200, 200)


# --- rules, alerts and the dashboard --------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions_of_dashboard() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    # What Grafana fills in.
    return [
        target["expr"].replace("$__rate_interval", "1m")
        for panel in panels
        for target in panel.get("targets", ())
    ]


@functools.cache
def known_labels() -> dict[str, set[str]]:
    """The labels of each series that rules may ask for."""
    known = {"up": ADDED, "ALERTS": ADDED}
    for family in FAMILIES.values():
        labels = {*family.labels, *ADDED}
        if family.kind == "histogram":
            known[f"{family.name}_bucket"] = {*labels, "le"}
            known[f"{family.name}_sum"] = known[f"{family.name}_count"] = labels
        else:
            known[family.name] = labels
    for rule in rules():
        if "record" in rule:
            by = re.search(r"by \(([^)]*)\)", rule["expr"])
            assert by is not None
            known[rule["record"]] = set(by[1].replace(" ", "").split(","))
    return known


def faults_of(expression: str) -> list[str]:
    """What an expression asks for that is not exported."""
    known, faults, grouped, seen = known_labels(), [], set(), set()

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            if node.name not in known:
                faults.append(f"{node.name} is not exported")
                return True
            seen.update(known[node.name])
            faults.extend(
                f"{node.name} has no label {matcher.name}"
                for matcher in node.matchers.matchers
                if matcher.name not in known[node.name]
            )
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return faults + [f"nothing there has a label {label}" for label in sorted(grouped - seen)]


def test_every_rule_asks_for_what_is_exported() -> None:
    assert [fault for rule in rules() for fault in faults_of(rule["expr"])] == []


def test_every_panel_asks_for_what_is_exported() -> None:
    expressions = expressions_of_dashboard()
    assert len(expressions) > 30
    assert [fault for expression in expressions for fault in faults_of(expression)] == []


def test_what_tritons_dashboard_and_its_rule_for_scaling_ask_for_is_exported() -> None:
    assert [fault for name in TRITONS for fault in faults_of(name)] == []
    assert faults_of(TRITONS_RULE) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(nv_inference_reqest_success[5m])", "nv_inference_reqest_success is not exported"),
        ('clockwright_pages{model="m"}', "clockwright_pages has no label model"),
        ("sum by (tenant) (clockwright_pages)", "nothing there has a label tenant"),
    ],
)
def test_a_name_that_is_not_exported_is_found(expression: str, fault: str) -> None:
    assert faults_of(expression) == [fault]


def test_every_alert_says_what_it_means_and_is_played() -> None:
    played = (RULES.parent / "rules_test.yml").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) > 10
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["alert"] in played, alert["alert"]


promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool comes with Prometheus (apt: prometheus)"
)


@promtool
def test_promtool_takes_the_rules_and_plays_their_alerts() -> None:
    for command in ("check", "test"):
        name = "rules.yml" if command == "check" else "rules_test.yml"
        done = subprocess.run(
            ["promtool", command, "rules", name],
            cwd=RULES.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_finds_no_fault_but_with_tritons_names(server: LocalServer) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=read(server.metrics),
        capture_output=True,
        text=True,
        check=False,
    )
    faults = (done.stdout + done.stderr).splitlines()
    assert [fault for fault in faults if not fault.startswith("nv_")] == []
