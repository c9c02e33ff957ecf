"""The lease as a key of etcd, and the directory of cells as several, by the JSON gateway, which every member serves.

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

from clockwright.errors import StoreError
from controller.process.lease.lease import LeaseRecord
from controller.process.lease.stores import FoundRecord, decode, encode

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
        """Read the files as they are now. Raises OSError if they cannot be read, or do not belong together."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            # A key with a passphrase would be asked for on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        return context


class EtcdGateway:
    """The JSON gateway of a cluster's members, of which any may answer. Used by one thread at a time."""

    def __init__(self, endpoints: Sequence[str], where: str, tls: EtcdTls | None = None) -> None:
        """Set the place: HOST:PORT of members. `where` is for messages; without `tls` there is no TLS."""
        #: In messages.
        self.where = where
        #: The one that answered last comes first.
        self._endpoints = list(endpoints)
        self._connection: http.client.HTTPConnection | None = None
        self._tls = tls

    def call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the key-value service.

        Raises StoreError if no member answered as it should; the outcome is unknown.
        """
        body = json.dumps(request)
        try:
            connection = self._connection
            if connection is None:
                self._connection = connection = self._connect(self._endpoints[0])
            connection.request("POST", f"/v3/kv/{method}", body)
            response = connection.getresponse()
            data = response.read()
            if response.status != http.client.OK:
                raise StoreError(f"{self.where}: {response.status} {data[:200]!r}")
            answer = json.loads(data)
            if not isinstance(answer, dict):
                raise StoreError(f"{self.where}: answered {data[:200]!r}")
            return answer
        except (OSError, http.client.HTTPException, ValueError, StoreError) as error:
            self.close()
            self._endpoints.append(self._endpoints.pop(0))
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self.where}: {error}") from error

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, endpoint: str) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(endpoint, timeout=_LIMIT_S)
        # Certificates are replaced while controllers run.
        context = self._tls.context()
        return http.client.HTTPSConnection(endpoint, timeout=_LIMIT_S, context=context)


class LeaseKey:
    """A record under a key."""

    def __init__(self, endpoints: Sequence[str], key: str, tls: EtcdTls | None = None) -> None:
        """Set the place: HOST:PORT of members, of which any may answer, and the record's key."""
        self._where = f"etcd {','.join(endpoints)}/{key}"
        self._gateway = EtcdGateway(endpoints, f"lease {self._where}", tls)
        self._key = as_base64(key)

    def read(self) -> FoundRecord:
        """Do what `LeaseStore` says."""
        # Linearizable, as etcd reads by default: a member that is cut off from the others does not answer.
        answer = self._gateway.call("range", {"key": self._key})
        try:
            [kept] = answer.get("kvs") or [None]
            if kept is None:
                return FoundRecord(None)
            value, revision = base64.b64decode(kept["value"]), str(kept["mod_revision"])
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
            "mod_revision": found.revision or "0",
        }
        put = {"key": self._key, "value": as_base64(encode(record))}
        transaction = {"compare": [unchanged], "success": [{"request_put": put}]}
        answer = self._gateway.call("txn", transaction)
        return answer.get("succeeded") is True

    def close(self) -> None:
        """Do what `LeaseStore` says."""
        self._gateway.close()


def as_base64(data: bytes | str) -> str:
    """Write bytes, or text, as the gateway wants them in JSON."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


class EtcdDirectory:
    """Entries under keys that begin alike."""

    def __init__(self, endpoints: Sequence[str], prefix: str, tls: EtcdTls | None = None) -> None:
        """Set the place: HOST:PORT of members, and what the keys begin with, without the stroke behind it."""
        where = f"directory etcd {','.join(endpoints)}/{prefix}"
        self._gateway = EtcdGateway(endpoints, where, tls)
        self._prefix = f"{prefix}/"
        #: The latest revision of etcd's that was read; 0: nothing was.
        self._revision = 0
        #: The keys that there were.
        self._keys: frozenset[str] = frozenset()

    def put(self, key: str, data: bytes) -> None:
        """Do what `DirectoryStore` says."""
        request = {"key": as_base64(self._prefix + key), "value": as_base64(data)}
        self._gateway.call("put", request)

    def remove(self, key: str) -> None:
        """Do what `DirectoryStore` says."""
        self._gateway.call("deleterange", {"key": as_base64(self._prefix + key)})

    def changes(self) -> tuple[dict[str, bytes], frozenset[str]]:
        """Do what `DirectoryStore` says."""
        # "0" is the key after all that begin with the stroke.
        area = {
            "key": as_base64(self._prefix),
            "range_end": as_base64(f"{self._prefix[:-1]}0"),
            # Rows may be a moment old, so any member answers by itself.
            "serializable": True,
        }
        changed = {**area, "min_mod_revision": str(self._revision + 1)}
        answer = self._gateway.call("range", changed)
        try:
            revision = int(answer["header"]["revision"])
            found = {
                self._name(kept): base64.b64decode(kept.get("value", ""))
                for kept in answer.get("kvs", ())
            }
            keys = self._keys | found.keys()
            # Counts all keys, changed or not.
            if int(answer.get("count", 0)) != len(keys):
                listed = self._gateway.call("range", {**area, "keys_only": True})
                keys = frozenset(map(self._name, listed.get("kvs", ())))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{self._gateway.where}: {error!r} in its answer") from error
        gone, self._keys = self._keys - keys, keys
        # A member that lags behind another has a lower one.
        self._revision = max(self._revision, revision)
        return found, gone

    def close(self) -> None:
        """Do what `DirectoryStore` says."""
        self._gateway.close()

    def _name(self, kept: dict[str, Any]) -> str:
        return base64.b64decode(kept["key"]).decode(errors="replace").removeprefix(self._prefix)
