"""Keys of those who call, and the file in which controllers and fronts find what a key allows."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from clockwright.client.channel import Access
from controller.access.grants import KEY_ID_BYTES, Grant, digest, id_of, make_key, write_grants
from controller.access.roles import Role

#: Each user with a key: what the user may do, and whose share of the GPUs that uses.
HOLDERS: dict[str, tuple[frozenset[Role], str]] = {
    "gold": (frozenset((Role.INFERENCE, Role.FEEDBACK)), "gold"),
    "tin": (frozenset((Role.INFERENCE, Role.FEEDBACK)), "tin"),
    "looker": (frozenset((Role.METADATA, Role.STATISTICS)), "gold"),
    "operator": (frozenset((Role.MODEL_REPOSITORY, Role.OPERATOR)), ""),
    "worker": (frozenset((Role.WORKER,)), ""),
    "front": (frozenset((Role.FRONT,)), ""),
}
#: Those who ask and may not: who has another role, and whose key is unknown.
UNWELCOME = ("looker", "stranger")


class KeyFile:
    """The file, and each user's key. A user that is not in the file has one, too."""

    def __init__(self, path: Path) -> None:
        """Write the file."""
        self.path = path
        #: Who is not in the file at present.
        self.revoked = set[str]()
        self._num_written = 0
        self._write()

    def revoke(self, name: str) -> None:
        """Take a user's key away."""
        self.revoked.add(name)
        self._write()

    def restore(self) -> None:
        """Give each user the key again."""
        self.revoked.clear()
        self._write()

    def _write(self) -> None:
        grants = [
            Grant(
                name,
                roles,
                tenant,
                key_id=id_of(self._key(name)),
                key_sha256=digest(self._key(name)),
            )
            for name, (roles, tenant) in HOLDERS.items()
            if name not in self.revoked
        ]
        self.path.write_text(write_grants(grants))
        self.path.chmod(0o600)
        # Who looks whether it has changed finds so, however little real time has passed.
        self._num_written += 1
        os.utime(self.path, (self._num_written, self._num_written))

    def access(self, name: str) -> Access:
        """What a user shows."""
        return Access(key=self._key(name))

    @staticmethod
    def _key(name: str) -> str:
        sha256 = digest(name)
        return make_key(
            sha256[:KEY_ID_BYTES], base64.urlsafe_b64encode(sha256).decode().rstrip("=")
        )
