"""The chart's Pods under podman and runc: limits, keys and TLS, probes, and what is told to end while it serves."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from clockwright import Access, Client, ClockwrightError
from controller.access.key_file import add_key
from controller.access.roles import Role
from tests.kit.chart import render
from tests.kit.podman import Node, Pod
from tests.kit.processes import until, write_models

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

NOTICE_S = 10
VALUES: dict[str, Any] = {
    "keys": {"secret": "keys"},
    "tls": {"secret": "tls"},
    "models": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "controller": {"resources": {"limits": {"memory": "1Gi"}}},
    "front": {"noticeSeconds": NOTICE_S, "resources": {"limits": {"memory": "512Mi"}}},
    "workers": {
        "cpu": {
            "args": ["--pages=4", "--arena-mib=16"],
            "resources": {"limits": {"memory": "2Gi", "cpu": "1"}},
        }
    },
}
CONTROLLER = "my-clockwright-controller-0"
X = np.random.default_rng(0).random((1, 16), np.float32)


class Cluster:
    """The chart's Pods, and a client of each front."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node = node
        self._folder = folder
        values = {**VALUES, "image": {"repository": "clockwright"}}
        objects = render({"pods": values})["pods"]["objects"]
        self._templates = {
            each["metadata"]["name"]: each["spec"]["template"]
            for each in objects
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        node.names[f"{CONTROLLER}.my-clockwright-controller.serving.svc"] = node.address(0)
        self._volumes = {"models": self._write_models(), **self._write_secrets()}
        self.controller = self._start("my-clockwright-controller", CONTROLLER, 0)
        self.workers = [self._start("my-clockwright-worker-cpu", f"w-{i}", 1 + i) for i in (0, 1)]
        self.fronts = [self._start("my-clockwright-front", f"f-{i}", 3 + i) for i in (0, 1)]

    def _start(self, template: str, name: str, index: int) -> Pod:
        return self._node.start(name, self._templates[template], index, self._volumes)

    def _write_models(self) -> Path:
        """A volume as claims and ConfigMaps are: with a folder of the disk's own, and models behind links."""
        folder = self._node.folder("models")
        write_models(folder / "..2026_11_29", mlp="mlp-16-8-4")
        for path in (folder / "..2026_11_29").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "..data").symlink_to("..2026_11_29")
        (folder / "mlp").symlink_to("..data/mlp")
        (folder / "lost+found").mkdir(mode=0o700)
        return folder

    def _write_secrets(self) -> dict[str, Path]:
        keys, tls = self._node.folder("keys"), self._node.folder("tls")
        roles = {
            "front": frozenset({Role.FRONT}),
            "worker": frozenset({Role.WORKER}),
            "client": frozenset({Role.INFERENCE, Role.METADATA, Role.STATISTICS, Role.HEALTH}),
        }
        for name, may in roles.items():
            (keys / f"{name}.key").write_text(add_key(keys / "keys", name, may))
        authority = trustme.CA()
        names = [*self._node.names, *(self._node.address(i) for i in range(8))]
        certificate = authority.issue_cert(*names)
        authority.cert_pem.write_to_path(str(tls / "ca.crt"))
        certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
        chain = b"".join(each.bytes() for each in certificate.cert_chain_pems)
        (tls / "tls.crt").write_bytes(chain)
        self.access = Access(key_file=keys / "client.key", ca=tls / "ca.crt")
        for path in (*keys.iterdir(), *tls.iterdir()):
            # As the kubelet gives them to the group of the Pod's volumes.
            shutil.chown(path, 0, 0)
            path.chmod(0o444)
        return {"keys": keys, "tls": tls}


class Load:
    """A client of the Service: it asks the fronts that are ready, each over one connection that it keeps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._clients = {
            front.name: Client(f"{front.address}:8001", cluster.access) for front in cluster.fronts
        }
        self.ready = list(self._clients)
        self.answers = 0
        self.by_front = dict.fromkeys(self._clients, 0)
        self.problems: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for client in self._clients.values():
            client.close()

    def ask(self, front: str) -> None:
        try:
            self._clients[front].infer("mlp", X, slo_ms=60_000)
            self.answers += 1
            self.by_front[front] += 1
        except ClockwrightError as error:
            self.problems.append(f"{front}: {error}")

    def _ask_on(self) -> None:
        while not self._over.wait(0.02):
            for front in list(self.ready):
                self.ask(front)

    def goes_on(self) -> None:
        """Wait until some more has been answered."""
        wanted = self.answers + 50
        until(lambda: self.answers > wanted or self.problems, what="requests are answered")
        assert self.problems == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("node")
    folder.chmod(0o755)
    with Node(folder) as node:
        yield Cluster(node, folder)


def test_the_charts_pods_serve_and_each_leaves_in_order(cluster: Cluster) -> None:
    pods = (cluster.controller, *cluster.workers, *cluster.fronts)
    for pod in pods:
        until(partial(pod.is_well, "startupProbe"), what=f"{pod.name} has started")
    for pod in pods:
        until(partial(pod.is_well, "readinessProbe"), what=f"{pod.name} is ready")

    # What a container may not do, and what it may use.
    for pod in pods:
        found = pod.run_inside(
            "import os; print(os.getuid()); open('/tmp/x', 'w').close()\n"
            "try: open('/x', 'w')\n"
            "except OSError as error: print(error.errno)\n"
            "status = open('/proc/self/status').read()\n"
            "print(status.partition('CapEff:')[2].split()[0], status.partition('NoNewPrivs:')[2].split()[0])"
        )
        assert found.split() == ["10001", "30", "0" * 16, "1"], pod.name
    limit = "import worker.devices.host_memory as m; print(m.granted_bytes())"
    assert int(cluster.workers[0].run_inside(limit)) <= 2 << 30

    with Load(cluster) as load:
        load.goes_on()
        # A front is told to end: it is not ready at once, answers whoever still asks, and ends in its time by itself.
        leaving, staying = cluster.fronts
        stopping = threading.Thread(target=leaving.stop)
        began_s = time.monotonic()
        stopping.start()
        until(lambda: not leaving.is_well("readinessProbe"), what="it is not ready")
        assert leaving.is_well("livenessProbe")
        answered = load.by_front[leaving.name]
        until(lambda: load.by_front[leaving.name] > answered + 20, what="it still answers")
        load.ready.remove(leaving.name)
        stopping.join()
        assert NOTICE_S <= time.monotonic() - began_s < leaving.grace_s
        assert leaving.state()["ExitCode"] == 0
        load.goes_on()

        # A worker is told to end: it is drained, and the other one takes all.
        cluster.workers[1].stop()
        assert cluster.workers[1].state()["ExitCode"] == 0
        assert "drained: leaving" in cluster.workers[1].log()
        load.goes_on()

        # The controller is told to end, and is started again: the front keeps what is open.
        cluster.controller.stop()
        assert cluster.controller.state()["ExitCode"] == 0
        assert staying.is_well("livenessProbe")
        cluster.controller.restart()
        load.goes_on()
        until(lambda: staying.is_well("readinessProbe"), what="the front is ready again")
