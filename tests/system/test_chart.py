"""The Helm chart as Helm renders it, for each version of Kubernetes that it is for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.chart import CHART, ROOT, render

pytestmark = pytest.mark.long

Objects = dict[tuple[str, str], dict[str, Any]]
FULL = yaml.safe_load((CHART / "ci/full.yaml").read_text())
SMALL = yaml.safe_load((CHART / "ci/small.yaml").read_text())
UNLIKE = {"min": 5, "max": 2}
WRONG = {
    "nothing": ({}, "keys.secret and tls.secret: found one of them empty, expected"),
    "no kind": ({"insecure": True}, "workers: found none, expected a kind"),
    "scale": (
        {"insecure": True, "workers": {"cpu": {"scale": UNLIKE}}, "scaler": {"enabled": True}},
        "workers.cpu.scale: found min 5 and max 2, expected",
    ),
    "no scale": (
        {"insecure": True, "workers": {"cpu": {}}, "scaler": {"enabled": True}},
        "scaler.enabled: found no kind of workers with scale (cpu), expected one at least, such as "
        "--set workers.cpu.scale.min=1,workers.cpu.scale.max=8",
    ),
    "schema": ({"front": {"replicas": "two"}}, "at '/front/replicas': got string, want integer"),
}


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    values = {"full": FULL, "small": SMALL, **{name: own for name, (own, _) in WRONG.items()}}
    return render(values)


def objects_of(answer: dict[str, Any], name: str) -> Objects:
    found = [((each["kind"], each["metadata"]["name"]), each) for each in answer[name]["objects"]]
    assert len(dict(found)) == len(found)
    return dict(found)


def pods(objects: Objects) -> Iterator[dict[str, Any]]:
    for (kind, _), found in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            yield found["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["small", "full"])
def test_no_version_of_kubernetes_has_anything_against_it(
    answer: dict[str, Any], name: str
) -> None:
    assert answer[name]["lint"] == []
    assert answer[name]["complaints"] == []
    assert len(answer["broken"]["complaints"]) == 13


@pytest.mark.parametrize("name", WRONG)
def test_values_that_do_not_go_together_are_refused_with_what_helps(
    answer: dict[str, Any], name: str
) -> None:
    assert WRONG[name][1] in answer[name]["error"]


def test_what_is_told_to_end_has_the_time_that_its_flags_say(answer: dict[str, Any]) -> None:
    for pod in pods(objects_of(answer, "full")):
        (container,) = pod["containers"]
        notice = [
            int(each.partition("=")[2])
            for each in container["args"]
            if each.startswith("--notice-s")
        ]
        assert pod.get("terminationGracePeriodSeconds", 30) > sum(notice) + 10
        assert "lifecycle" not in container


def test_a_pod_may_do_little_and_sees_no_secret_of_others(answer: dict[str, Any]) -> None:
    seen: dict[str, set[str]] = {}
    for pod in pods(objects_of(answer, "full")):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        files = {
            item["key"]
            for volume in pod["volumes"]
            for item in volume.get("secret", {}).get("items", ())
        }
        seen[container["name"]] = files
        asks = pod.get("automountServiceAccountToken", True)
        assert asks == (container["name"] in ("controller", "scaler"))
    serves = {"keys", "tls.crt", "tls.key", "ca.crt"}
    assert seen == {
        "controller": serves,
        "front": {*serves, "front.key"},
        "worker": {"worker.key", "ca.crt"},
        "scaler": {"operator.key", "ca.crt"},
    }


def test_workers_and_fronts_know_each_controller_by_a_name_that_it_keeps(
    answer: dict[str, Any],
) -> None:
    objects = objects_of(answer, "full")
    stateful = objects["StatefulSet", "my-clockwright-controller"]
    service = stateful["spec"]["serviceName"]
    assert objects["Service", service]["spec"]["clusterIP"] == "None"
    names = [
        f"my-clockwright-controller-{i}.{service}.serving.svc:8001"
        for i in range(stateful["spec"]["replicas"])
    ]
    said = f"--controller={','.join(names)}"
    for pod in pods(objects):
        (container,) = pod["containers"]
        if container["name"] in ("worker", "front"):
            assert said in container["args"]
    (lease,) = [
        each
        for each in stateful["spec"]["template"]["spec"]["containers"][0]["args"]
        if "lease" in each
    ]
    assert lease == "--lease=kubernetes://serving/my-clockwright"


def test_keda_and_the_scaler_share_a_deployment_and_others_keep_their_number(
    answer: dict[str, Any],
) -> None:
    objects = objects_of(answer, "full")
    scaled = objects["Deployment", "my-clockwright-worker-a100"]
    assert "replicas" not in scaled["spec"]
    assert scaled["metadata"]["annotations"] == {"clockwright/min-workers": "1"}
    kept = objects["Deployment", "my-clockwright-worker-cpu"]
    assert kept["spec"]["replicas"] == 0
    assert "annotations" not in kept["metadata"]
    wish = objects["ScaledObject", "my-clockwright-worker-a100"]["spec"]
    assert wish["scaleTargetRef"]["name"] == scaled["metadata"]["name"]
    assert [each["type"] for each in wish["triggers"]] == ["external-push"]
    limits = scaled["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "16Gi", "nvidia.com/gpu": 1}


def test_rules_and_dashboard_are_the_projects_own(answer: dict[str, Any]) -> None:
    objects = objects_of(answer, "full")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert objects["PrometheusRule", "my-clockwright"]["spec"] == rules
    (text,) = objects["ConfigMap", "my-clockwright-dashboard"]["data"].values()
    assert text.strip() == (ROOT / "deploy/grafana/clockwright.json").read_text().strip()


def closed(schema: Any) -> Any:  # noqa: ANN401  JSON
    """A schema that refuses fields that it does not name, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    is_open = found.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in found
    if isinstance(found.get("properties"), dict) and found.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found


def test_objects_of_operators_are_what_their_definitions_say(answer: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    folder = os.environ.get("CLOCKWRIGHT_CRDS")
    if folder is None:
        pytest.skip(
            "CLOCKWRIGHT_CRDS names no folder of CustomResourceDefinitions: those of KEDA (config/crd/bases), KServe "
            "(config/crd/full) and the Prometheus Operator (example/prometheus-operator-crd)"
        )
    schemas = {}
    for path in Path(folder).glob("*.yaml"):
        for found in yaml.safe_load_all(path.read_text()):
            if found and found["kind"] == "CustomResourceDefinition":
                for version in found["spec"]["versions"]:
                    api = f"{found['spec']['group']}/{version['name']}"
                    kind = found["spec"]["names"]["kind"]
                    schema = version["schema"]["openAPIV3Schema"]
                    schema["properties"]["metadata"] = {}
                    schemas[api, kind] = closed(schema)
    runtime = yaml.safe_load((ROOT / "deploy/kubernetes/kserve.yaml").read_text())
    checked = []
    for found in (*objects_of(answer, "full").values(), runtime):
        if (schema := schemas.get((found["apiVersion"], found["kind"]))) is not None:
            jsonschema.Draft7Validator(schema).validate(found)
            wrong = {**found, "spec": {**found["spec"], "unknown": 1}}
            assert not jsonschema.Draft7Validator(schema).is_valid(wrong)
            checked.append(found["kind"])
    kinds = ["ClusterServingRuntime", "PrometheusRule", "ScaledObject", "ServiceMonitor"]
    assert sorted(checked) == kinds
