"""The lease as a key of etcd, by its JSON gateway, which every member serves next to gRPC.

etcd's own leases are not used: a standby decides by its own clock that the record has not changed
(`controller.process.lease.lease`), so etcd only has to compare and swap.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clockwright.errors import ConfigError, StoreError
from controller.process.lease.lease import LeaseRecord
from controller.process.lease.stores import EXPECTED, FoundRecord, decode, encode

# A member that takes longer is skipped. With several, all are asked within a lease.
_LIMIT_S: Final = 0.7


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files for TLS between members of etcd and this controller."""

    #: Certificates of the authorities that may have signed the members'.
    ca: Path
    #: This controller's certificate and its key; None: the members need none.
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files as they are now.

        Raises:
            OSError: they cannot be read, or do not belong together.
        """
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            # A key with a passphrase would be asked for on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        return context


class LeaseKey:
    """A record under a key."""

    def __init__(self, endpoints: Sequence[str], key: str, tls: EtcdTls | None = None) -> None:
        """Set the place.

        Args:
            endpoints: HOST:PORT of members, of which any may answer.
            key: the record's.
            tls: TLS for all of them; None: no TLS.

        Raises:
            ConfigError: an endpoint is malformed.
        """
        for endpoint in endpoints:
            host, _, port = endpoint.rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigError(f"lease: found member {endpoint!r} of etcd, expected {EXPECTED}")
        #: The one that answered last comes first.
        self._endpoints = list(endpoints)
        self._connection: http.client.HTTPConnection | None = None
        self._tls = tls
        self._key = base64.b64encode(key.encode()).decode()
        self._where = f"etcd {','.join(endpoints)}/{key}"

    def read(self) -> FoundRecord:
        """Do what `LeaseStore` says."""
        # Linearizable, as etcd reads by default: a member that is cut off from the others does not answer.
        answer = self._call("range", {"key": self._key})
        try:
            [kept] = answer.get("kvs") or [None]
            if kept is None:
                return FoundRecord(None)
            value, revision = base64.b64decode(kept["value"]), int(kept["mod_revision"])
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"lease {self._where}: {error!r} in its answer") from error
        return FoundRecord(decode(value, where=self._where), revision=revision)

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        """Do what `LeaseStore` says."""
        unchanged = {
            "key": self._key,
            "target": "MOD",
            "result": "EQUAL",
            # A key that does not exist has 0.
            "mod_revision": str(found.revision),
        }
        put = {"key": self._key, "value": base64.b64encode(encode(record)).decode()}
        answer = self._call("txn", {"compare": [unchanged], "success": [{"request_put": put}]})
        return answer.get("succeeded") is True

    def close(self) -> None:
        """Do what `LeaseStore` says."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, endpoint: str) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(endpoint, timeout=_LIMIT_S)
        # Certificates are replaced while controllers run.
        context = self._tls.context()
        return http.client.HTTPSConnection(endpoint, timeout=_LIMIT_S, context=context)

    def _call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request)
        try:
            connection = self._connection
            if connection is None:
                self._connection = connection = self._connect(self._endpoints[0])
            connection.request("POST", f"/v3/kv/{method}", body)
            response = connection.getresponse()
            data = response.read()
            if response.status != http.client.OK:
                raise StoreError(f"lease {self._where}: {response.status} {data[:200]!r}")
            answer = json.loads(data)
            if not isinstance(answer, dict):
                raise StoreError(f"lease {self._where}: answered {data[:200]!r}")
            return answer
        except (OSError, http.client.HTTPException, ValueError, StoreError) as error:
            self.close()
            self._endpoints.append(self._endpoints.pop(0))
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"lease {self._where}: {error}") from error
