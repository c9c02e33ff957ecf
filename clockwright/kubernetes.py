"""The API of a Kubernetes cluster, as a process in a Pod calls it: JSON over HTTPS, as the Pod's service account.

No library: what is needed here is four verbs on a few objects. A lease needs a limit on each call and a token
that is read again when the kubelet replaces it, and a controller none of the megabytes that clients bring.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from clockwright.errors import ConfigError

#: Where the kubelet puts a Pod's token, and the certificate of the API's authority.
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: What names of namespaces and objects look like.
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

# A patch names what changes. With a resourceVersion, it fails if the object is another one by now.
_CONTENT: Final = {"PATCH": "application/merge-patch+json", "POST": "application/json"}


class ApiError(OSError):
    """The API refused a call: nothing has changed."""

    def __init__(self, status: int, message: str) -> None:
        """Keep the status of HTTP, and say the message."""
        super().__init__(f"{status} {message}")
        self.status = status


class KubernetesApi:
    """One connection, for one thread at a time. Token and certificates are read whenever they are used."""

    def __init__(self, url: str, *, limit_s: float, account: Path = SERVICE_ACCOUNT) -> None:
        """Connect when first needed; `limit_s` is how long a connection may be silent.

        The URL is http://HOST:PORT, as `kubectl proxy` serves it, or https://HOST:PORT; empty: the Pod's own cluster.
        For https the service account's folder counts. Raises ConfigError if it is malformed, or empty outside of a Pod.
        """
        if not url:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
            if not host:
                raise ConfigError(
                    "found no KUBERNETES_SERVICE_HOST in the environment, which every Pod has; elsewhere, "
                    "run `kubectl proxy` and name its URL, http://127.0.0.1:8001"
                )
            port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        parts = urlsplit(url)
        try:
            self._place = parts.hostname or "", parts.port
        except ValueError:
            self._place = "", None
        if parts.scheme not in ("http", "https") or not all(self._place) or parts.path.strip("/"):
            raise ConfigError(f"the URL of the API is {url!r}, expected http[s]://HOST:PORT")
        self._url, self._limit_s = url, limit_s
        self._account = account if parts.scheme == "https" else None
        self._connection: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of HTTP on a path, and return the object that it answers.

        Raises ApiError if the API refused; OSError if it cannot be reached, or its answer cannot be read; whether
        something has changed is not known.
        """
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = _CONTENT[method]
        try:
            if self._account is not None:
                token = (self._account / "token").read_text().strip()
                headers["Authorization"] = f"Bearer {token}"
            if self._connection is None:
                self._connection = self._connect()
            content = None if body is None else json.dumps(body)
            self._connection.request(method, path, content, headers)
            response = self._connection.getresponse()
            data = response.read()
            answer = json.loads(data) if data[:1] == b"{" else {"message": repr(data[:200])}
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise OSError(f"{self._url}: {error or type(error).__name__}") from error
        if not 200 <= response.status < 300:
            raise ApiError(response.status, f"{answer.get('message', data[:200])}")
        return answer

    def close(self) -> None:
        """Hang up, until the next call."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._place
        if self._account is None:
            return http.client.HTTPConnection(host, port, timeout=self._limit_s)
        context = ssl.create_default_context(cafile=self._account / "ca.crt")
        return http.client.HTTPSConnection(host, port, timeout=self._limit_s, context=context)
