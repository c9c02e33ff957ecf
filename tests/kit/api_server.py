"""The API of Kubernetes as far as it is used here: objects, merge patches, and what resourceVersion guards.

No API server can be had without a cluster, and emulators do not compare versions. What is compared here is what
`registry.Store.Update` of k8s.io/apiserver compares: a patch that names a resourceVersion succeeds only on that one.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from typing_extensions import override

Object = dict[str, Any]


@dataclass
class ApiServer:
    """The objects, by their paths."""

    url: str = ""
    objects: dict[str, Object] = field(default_factory=dict)
    #: What calls are answered with instead, by "VERB PATH".
    refusals: dict[str, int] = field(default_factory=dict)
    #: What was called, as "VERB PATH", but for reading.
    calls: list[str] = field(default_factory=list)
    #: The only token that is let in; empty: any call is.
    token: str = ""
    #: Called after each change, under the lock: the cluster's own controllers.
    changed: Callable[[], object] = lambda: None
    lock: threading.RLock = field(default_factory=threading.RLock)
    _version: int = 0

    def put(self, path: str, content: Object) -> None:
        """Write an object, as somebody else would."""
        with self.lock:
            self._version += 1
            metadata = {**content.get("metadata", {}), "name": path.rpartition("/")[2]}
            metadata["resourceVersion"] = str(self._version)
            self.objects[path] = {**content, "metadata": metadata}

    def delete(self, path: str) -> None:
        """Delete an object, likewise."""
        with self.lock:
            del self.objects[path]

    def answer(self, verb: str, path: str, body: Object | None, shown: str) -> tuple[int, Object]:
        """Do what is asked: the status of HTTP, and the object."""
        path, _, query = path.partition("?")
        with self.lock:
            if self.token and shown != f"Bearer {self.token}":
                return 401, {"message": "Unauthorized"}
            if verb != "GET":
                self.calls.append(f"{verb} {path}")
            refusal = self.refusals.get(f"{verb} {path}")
            if refusal is not None:
                return refusal, {"message": f"{path} is forbidden"}
            if verb == "POST":
                assert body is not None
                return self._create(f"{path}/{body['metadata']['name']}", body)
            found = self.objects.get(path.removesuffix("/scale"))
            if verb == "GET" and found is None:
                return self._list(path, query)
            if found is None:
                return 404, {"message": f"{path} not found"}
            if verb == "GET":
                return 200, found
            assert body is not None
            return self._patch(path.removesuffix("/scale"), found, body)

    def _create(self, path: str, body: Object) -> tuple[int, Object]:
        if path in self.objects:
            return 409, {"message": f"{path} already exists"}
        self.put(path, body)
        self.changed()
        return 201, self.objects[path]

    def _list(self, path: str, query: str) -> tuple[int, Object]:
        if not path.endswith(("/deployments", "/pods")):
            return 404, {"message": f"{path} not found"}
        selector = parse_qs(query).get("labelSelector", [""])[0]
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        own = [found for name, found in self.objects.items() if name.startswith(f"{path}/")]
        items = [
            found for found in own if wanted.items() <= found["metadata"].get("labels", {}).items()
        ]
        return 200, {"items": items}

    def _patch(self, path: str, found: Object, body: Object) -> tuple[int, Object]:
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            return 409, {"message": "the object has been modified"}
        self.put(path, merged(found, body))
        self.changed()
        return 200, self.objects[path]


def merged(found: Any, patch: Any) -> Any:  # noqa: ANN401  JSON
    """Apply a merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


@contextmanager
def api_server(tls: ssl.SSLContext | None = None) -> Iterator[ApiServer]:
    """Serve on a free port."""
    api = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A small answer would wait for the acknowledgement of its header.
        wbufsize = -1
        disable_nagle_algorithm = True

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.command == "PATCH":
                assert self.headers["Content-Type"] == "application/merge-patch+json"
            body = json.loads(content) if content else None
            shown = self.headers.get("Authorization", "")
            status, answer = api.answer(self.command, self.path, body, shown)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _answer

        @override
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "http" if tls is None else "https"
    api.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
