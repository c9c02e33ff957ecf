"""Renders the chart as Helm does, and reads what comes out as clusters do; in a process of its own (`tests/chart.txt`).

The input is JSON: values, by any name. The output, for each of these names: what Helm's linter says, the error or the
objects, and what each version of Kubernetes has against an object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml

VERSIONS = [f"1.{minor}" for minor in range(25, 38)]


def rendered(chart: helm.Chart, values: dict[str, Any]) -> dict[str, Any]:
    """The objects of the chart with these values, or the error."""
    try:
        chart.validate_schema(values)
        files = chart.render(values, name="my", namespace="serving")
    except helm.HelmError as error:
        return {"error": str(error)}
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {"objects": objects, "complaints": [*complaints(objects)]}


def complaints(objects: list[dict[str, Any]]) -> Any:  # noqa: ANN401  an iterator of texts
    """What versions of Kubernetes say of objects that are theirs."""
    for found in objects:
        group = found["apiVersion"].partition("/")[0]
        if "." in group and not group.endswith(".k8s.io"):
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(found, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{version} {found['kind']} {found['metadata']['name']}: {error.message}"


def main() -> None:
    """Do it for the chart at the path that is named."""
    path = sys.argv[1]
    chart = helm.Chart.load(path)
    answer = {}
    for name, values in json.load(sys.stdin).items():
        answer[name] = rendered(chart, values)
        lint = helm.lint(path, values, strict=True)
        answer[name]["lint"] = [each["error"] for each in lint["messages"] if each["severity"] > 1]
    answer["broken"] = {"complaints": [*complaints([{**BROKEN}])]}
    json.dump(answer, sys.stdout)


#: That a mistake is found shows that one is looked for.
BROKEN = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "broken"},
    "spec": {"replica": 1, "selector": {}, "template": {}},
}

if __name__ == "__main__":
    main()
