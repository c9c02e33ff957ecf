"""The lease as a Lease object of Kubernetes (`coordination.k8s.io`).

The record is an annotation of the object. Its `spec` names the holder for `kubectl get lease` and is not read back, but
for one thing: an object with a holder and without a record belongs to another program.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from clockwright.errors import StoreError
from clockwright.kubernetes import ApiError, KubernetesApi
from clockwright.units import NS_PER_S
from controller.process.lease.lease import LEASE_NS, LeaseRecord
from controller.process.lease.stores import FoundRecord, decode, encode

#: A call that takes longer has failed; several fit into a lease.
LIMIT_S: Final = 0.7

_RECORD: Final = "clockwright/lease"


class LeaseObject:
    """A record in an object, which the API changes only if its resourceVersion is the one that was read."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str) -> None:
        """Set the place; the object may exist already, without a holder."""
        self._api = api
        self._name = name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._where = f"kubernetes://{namespace}/{name}"

    def read(self) -> FoundRecord:
        """Do what `LeaseStore` says."""
        try:
            # Asked without a resourceVersion, the API answers with the newest, by a quorum of its etcd.
            found = self._api.call("GET", f"{self._path}/{self._name}")
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return FoundRecord(None)
            raise self._failed(error) from error
        except OSError as error:
            raise self._failed(error) from error
        try:
            metadata: dict[str, Any] = found["metadata"]
            revision = str(metadata["resourceVersion"])
            text = (metadata.get("annotations") or {}).get(_RECORD, "")
            holder = (found.get("spec") or {}).get("holderIdentity") or ""
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"lease {self._where}: {error!r} in the object") from error
        if not text and not holder:
            return FoundRecord(None, revision=revision)
        if not text:
            raise StoreError(
                f"lease {self._where}: found a Lease that {holder!r} holds, expected none or a controller's"
            )
        return FoundRecord(decode(text.encode(), where=self._where), revision=revision)

    def swap(self, found: FoundRecord, record: LeaseRecord) -> bool:
        """Do what `LeaseStore` says."""
        metadata: dict[str, Any] = {"annotations": {_RECORD: encode(record).decode()}}
        spec = {
            "holderIdentity": "" if record.released else record.holder,
            "leaseDurationSeconds": LEASE_NS // NS_PER_S,
        }
        try:
            if found.revision:
                metadata["resourceVersion"] = found.revision
                body = {"metadata": metadata, "spec": spec}
                self._api.call("PATCH", f"{self._path}/{self._name}", body)
            else:
                metadata["name"] = self._name
                kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
                self._api.call("POST", self._path, {**kind, "metadata": metadata, "spec": spec})
        except ApiError as error:
            is_gone = bool(found.revision) and error.status == HTTPStatus.NOT_FOUND
            if error.status == HTTPStatus.CONFLICT or is_gone:
                return False
            raise self._failed(error) from error
        except OSError as error:
            raise self._failed(error) from error
        return True

    def close(self) -> None:
        """Do what `LeaseStore` says."""
        self._api.close()

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(f"lease {self._where}: {error}")
