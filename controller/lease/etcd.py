"""The lease as a key of etcd, by its JSON gateway, which every member serves beside gRPC.

No lease of etcd's is used: who follows decides by its own clock that the record has stood still
(`controller.lease.lease`), so what etcd has to do is to compare and swap.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Sequence
from typing import Any, Final

from clockwright.errors import ConfigError, StoreError
from controller.lease.lease import LeaseRecord
from controller.lease.stores import EXPECTED, FoundRecord, decode, encode

# A member that takes longer is passed over. With several, all are asked within a lease.
_LIMIT_S: Final = 0.7


class LeaseKey:
    """A record under a key."""

    def __init__(self, endpoints: Sequence[str], key: str) -> None:
        """Know where.

        Args:
            endpoints: HOST:PORT of members, of which any may answer.
            key: the record's.

        Raises:
            ConfigError: an endpoint is none.
        """
        for endpoint in endpoints:
            host, _, port = endpoint.rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigError(f"lease: found member {endpoint!r} of etcd, expected {EXPECTED}")
        #: The one that answered last first.
        self._endpoints = list(endpoints)
        self._connection: http.client.HTTPConnection | None = None
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
            # A key that is not there has 0.
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

    def _call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request)
        try:
            connection = self._connection
            if connection is None:
                connection = http.client.HTTPConnection(self._endpoints[0], timeout=_LIMIT_S)
                self._connection = connection
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
