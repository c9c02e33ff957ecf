"""Pods of the chart under podman and runc, with a test as their kubelet: it starts, probes and stops them.

What podman lacks is done here as a kubelet does it: Secrets, claims and empty folders are folders of the host, the Pod's
address is put where the chart asks for it, names of Services are lines in /etc/hosts, and probes are asked by the test.
"""

from __future__ import annotations

import copy
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

IMAGE = os.environ.get("CLOCKWRIGHT_IMAGE", "localhost/clockwright")
USER = 10001
_SERVING = b"\x08\x01"


def run(*arguments: str, limit_s: float = 120) -> str:
    """Run podman; gives what it prints."""
    done = subprocess.run(
        ["podman", *arguments], capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


class Node:
    """A network for Pods, and the Pods on it."""

    def __init__(self, folder: Path) -> None:
        """Make the network; skips where podman or the image is missing."""
        if shutil.which("podman") is None or os.getuid() != 0:
            pytest.skip("Pods need podman, and root")
        if subprocess.run(["podman", "image", "exists", IMAGE], check=False).returncode:
            pytest.skip(f"there is no image {IMAGE}: `make image`")
        self._folder = folder
        (folder / "containers.conf").write_text(
            # runc of Debian cannot set limits that the host does not have.
            "[containers]\ndefault_ulimits = []\n"
            "[engine]\nruntime = 'runc'\ncgroup_manager = 'cgroupfs'\nevents_logger = 'file'\n"
        )
        self.network = f"clockwright-{os.getpid()}"
        self._pods: list[Pod] = []
        #: By name, as the cluster's DNS has them.
        self.names: dict[str, str] = {}

    def __enter__(self) -> Node:
        os.environ.setdefault("CONTAINERS_CONF", str(self._folder / "containers.conf"))
        run("network", "create", "--disable-dns", self.network)
        (found,) = json.loads(run("network", "inspect", self.network))
        gateway = found["subnets"][0]["gateway"]
        self._subnet = gateway.rpartition(".")[0]
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._pods:
            # For the report of a test that fails.
            print(pod.name, pod.log()[-4000:], sep=":\n")
            subprocess.run(
                ["podman", "pod", "rm", "--force", "--time", "0", pod.name],
                capture_output=True,
                check=False,
            )
        run("network", "rm", "--force", self.network)

    def address(self, index: int) -> str:
        """The address that the Pod of this number gets."""
        return f"{self._subnet}.{10 + index}"

    def folder(self, *parts: str) -> Path:
        """A folder that Pods may write to."""
        folder = self._folder.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, USER, USER)
        return folder

    def start(
        self, name: str, template: Mapping[str, Any], index: int, volumes: Mapping[str, Path]
    ) -> Pod:
        """Start a Pod of a template, with the folders that its volumes are; others are empty."""
        pod = Pod(self, name, copy.deepcopy(template["spec"]), self.address(index))
        self._pods.append(pod)
        pod.start(volumes)
        return pod


class Pod:
    """One Pod with one container."""

    def __init__(self, node: Node, name: str, spec: dict[str, Any], address: str) -> None:
        """Set up; `start` starts it."""
        self._node = node
        self.name, self.address = name, address
        self._spec = spec
        (self._container,) = spec["containers"]
        self.container = f"{name}-{self._container['name']}"
        # This podman would open them on the host, too.
        ports = self._container.pop("ports")
        self._ports = {each["name"]: each["containerPort"] for each in ports}
        self._probes = {
            kind: self._container.pop(kind)
            for kind in ("startupProbe", "livenessProbe", "readinessProbe")
            if kind in self._container
        }
        self.grace_s: int = spec.get("terminationGracePeriodSeconds", 30)

    def start(self, volumes: Mapping[str, Path]) -> None:
        """Start it as podman does it."""
        # Those of a StatefulSet's claims, too.
        names = [each["name"] for each in self._container["volumeMounts"]]
        paths = {
            name: volumes.get(name) or self._node.folder("pods", self.name, name) for name in names
        }
        self._spec["volumes"] = [
            {"name": name, "hostPath": {"path": str(path)}} for name, path in paths.items()
        ]
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        for variable in self._container.pop("env", ()):
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            said = f"$({variable['name']})"
            self._container["args"] = [
                each.replace(said, value) for each in self._container["args"]
            ]
        self._container["image"], self._container["imagePullPolicy"] = IMAGE, "Never"
        self._spec["hostAliases"] = [
            {"ip": address, "hostnames": [name]} for name, address in self._node.names.items()
        ]
        for unknown in ("topologySpreadConstraints", "automountServiceAccountToken"):
            self._spec.pop(unknown, None)
        path = self._node.folder("pods") / f"{self.name}.yaml"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name}}
        path.write_text(yaml.safe_dump({**pod, "spec": self._spec}))
        # Its neighbours know it by the hardware's address, which it keeps when its container starts again.
        last = int(self.address.rpartition(".")[2])
        address = ["--ip", self.address, "--mac-address", f"02:00:00:00:00:{last:02x}"]
        run("kube", "play", "--quiet", "--network", self._node.network, *address, str(path))

    def is_well(self, kind: str) -> bool:
        """Ask a probe once, as the kubelet does."""
        probe = self._probes[kind]
        limit_s = probe.get("timeoutSeconds", 1) + 5
        try:
            if (wanted := probe.get("grpc")) is not None:
                service = wanted.get("service", "").encode()
                request = b"\x0a%c%s" % (len(service), service) if service else b""
                with grpc.insecure_channel(f"{self.address}:{wanted['port']}") as channel:
                    check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
                    return bool(check(request, timeout=limit_s) == _SERVING)
            if (wanted := probe.get("tcpSocket")) is not None:
                where = (self.address, self._ports[wanted["port"]])
                socket.create_connection(where, limit_s).close()
                return True
            wanted = probe["httpGet"]
            where = (self.address, self._ports[wanted["port"]])
            asking = http.client.HTTPConnection(*where, timeout=limit_s)
            if wanted.get("scheme") == "HTTPS":
                # The kubelet does not look whose certificate it is.
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                asking = http.client.HTTPSConnection(*where, timeout=limit_s, context=context)
            with closing(asking):
                asking.request("GET", wanted["path"])
                return asking.getresponse().status == 200
        except (OSError, grpc.RpcError, http.client.HTTPException):
            return False

    def stop(self) -> None:
        """Stop it as the kubelet does: SIGTERM, and SIGKILL when its time is over."""
        run("stop", "--time", str(self.grace_s), self.container, limit_s=self.grace_s + 60)

    def restart(self) -> None:
        """Start its container again."""
        run("start", self.container)

    def state(self) -> dict[str, Any]:
        """What podman knows of its container."""
        (found,) = json.loads(run("inspect", self.container))
        return dict(found["State"])

    def run_inside(self, source: str) -> str:
        """Run Python code in the container; gives what it prints."""
        return run("exec", self.container, "python", "-c", source)

    def log(self) -> str:
        """What the process said."""
        command = ["podman", "logs", self.container]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr
