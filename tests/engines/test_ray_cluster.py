"""A real Ray cluster on this machine: served from, hurt, and stopped. Needs `CLOCKWRIGHT_RAY_PYTHON` or the command `ray`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clockwright import Client
from clockwright.errors import ConfigError
from engines.ray.environment import VARIABLE, ray_python
from engines.ray.executor import RayExecutor
from experiments.live.ray_cluster import RayCluster, kinds_file, ray_cluster
from modelzoo.build import write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
KINDS = {"fast": {"device": "500us", "min": 1, "max": 2}}
X = np.zeros((1, 16), np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    try:
        ray_python()
    except ConfigError as error:
        pytest.skip(str(error))
    with ray_cluster() as cluster:
        cluster.add("fast", clockwright_fast=2)
        yield cluster


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    write_model("mlp-16-8-4", tmp_path / "models" / "net" / "1" / "model.onnx")
    return kinds_file(tmp_path, KINDS, models=tmp_path / "models")


def test_a_cluster_serves_and_brings_back_what_is_lost(cluster: RayCluster, kinds: Path) -> None:
    up = cluster.clockwright(f"--kinds={kinds}")
    assert up.returncode == 0, up.stdout + up.stderr
    *_, ready = up.stdout.splitlines()
    fronts = ready.removeprefix("ready: clients ask ").split(", ")
    assert len(fronts) == 2
    for front in fronts:
        with Client(front) as client:
            assert client.infer("net", X, slo_ms=60_000).outputs
    before = cluster.said("worker-fast-0")
    assert before["node"] == cluster.nodes["fast"]
    os.kill(before["pid"], signal.SIGKILL)
    cluster.kill("keeper")
    # What is there stays, with a keeper that has found it; the worker that came again is another.
    assert cluster.clockwright(f"--kinds={kinds}").returncode == 0
    after = cluster.said("worker-fast-0")
    assert (after["starts"], after["worker"] != before["worker"]) == (2, True)
    assert cluster.said("front-0")["starts"] == 1
    with Client(fronts[0]) as client:
        assert client.infer("net", X, slo_ms=60_000).outputs
    stopped = cluster.clockwright(f"--kinds={kinds}", "--stop").stdout.splitlines()
    assert stopped == [
        *("front-0 has left", "front-1 has left", "worker-fast-0 has left"),
        *("controller-0 has left", "stopped"),
    ]


def test_settings_that_cannot_work_are_told_with_the_reason(
    cluster: RayCluster, kinds: Path
) -> None:
    kinds.write_text(kinds.read_text().replace("modelled:500us", "modelled:nothing"))
    up = cluster.clockwright(f"--kinds={kinds}")
    assert up.returncode == 1
    assert "no profile 'nothing'" in up.stderr
    assert "error: worker-fast-0 cannot work with its settings" in up.stderr
    assert cluster.clockwright("--stop").returncode == 0


def test_a_kind_that_no_node_has_room_for_is_named_and_not_waited_for_without_limit(
    cluster: RayCluster, kinds: Path
) -> None:
    text = kinds.read_text().replace('name = "fast"', 'name = "slow"\nstart_limit_s = 30')
    kinds.write_text(text)
    up = cluster.clockwright(f"--kinds={kinds}")
    assert up.returncode == 1
    assert "found 0 clockwright_slow in the cluster. Add a node" in up.stdout
    assert "error: found 1 of worker-slow not ready" in up.stderr
    # What has started stays, and the rest follows.
    assert cluster.said("front-0")["starts"] == 1
    cluster.add("slow", clockwright_slow=1)
    assert cluster.clockwright(f"--kinds={kinds}").returncode == 0
    assert cluster.clockwright("--stop").returncode == 0


def test_calls_run_as_tasks_with_the_same_results(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(cluster.python))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    with RayExecutor(cluster.address) as calls:
        results = list(calls.map(divmod, range(3), [2] * 3))
        failed = calls.submit(int, "x")
    assert results == [divmod(number, 2) for number in range(3)]
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
