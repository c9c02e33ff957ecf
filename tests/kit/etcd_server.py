"""An etcd server of a test's own, in a folder of its own."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.live.local_server import free_ports
from tests.kit.processes import until


def etcd_program() -> str | None:
    """The program, as the system installs it."""
    return shutil.which("etcd")


@dataclass(frozen=True, slots=True)
class EtcdFiles:
    """PEM files of a server that speaks TLS, and asks who calls."""

    ca: Path
    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Call as the server itself."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.certificate, self.key)
        return context


@contextmanager
def etcd_server(tls: EtcdFiles | None = None) -> Iterator[str]:
    """Start one; gives HOST:PORT."""
    program = etcd_program()
    if program is None:
        pytest.skip("there is no etcd here: .ci/run tells how to get one")
    port, peers = free_ports(2)
    scheme = "http" if tls is None else "https"
    urls = {
        "--listen-client-urls": f"{scheme}://127.0.0.1:{port}",
        "--advertise-client-urls": f"{scheme}://127.0.0.1:{port}",
        "--listen-peer-urls": f"http://127.0.0.1:{peers}",
        "--initial-advertise-peer-urls": f"http://127.0.0.1:{peers}",
        "--initial-cluster": f"default=http://127.0.0.1:{peers}",
    }
    with tempfile.TemporaryDirectory(prefix="etcd-") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as output:
            flags = [part for flag in urls.items() for part in flag]
            if tls is not None:
                flags += [f"--cert-file={tls.certificate}", f"--key-file={tls.key}"]
                flags += [f"--trusted-ca-file={tls.ca}", "--client-cert-auth"]
            process = subprocess.Popen(
                [program, "--data-dir", f"{directory}/data", *flags], stdout=output, stderr=output
            )

        def is_healthy() -> bool:
            assert process.poll() is None, f"the server has ended: {log.read_text()}"
            try:
                context = None if tls is None else tls.context()
                health = f"{scheme}://127.0.0.1:{port}/health"
                with urllib.request.urlopen(health, timeout=5, context=context) as answer:
                    return bool(json.load(answer)["health"] == "true")
            except OSError:
                return False

        try:
            until(is_healthy, what="etcd is healthy")
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
