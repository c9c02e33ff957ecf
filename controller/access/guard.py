"""Reads the files of access control, again when they change, and gives them to the authoriser.

A file that cannot be read at the start is an error. Later it is logged, and the previous content stays valid. A key is revoked, and a certificate renewed, without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clockwright.errors import ConfigError, Denial
from controller.access.authoriser import Authoriser, Rules, nobody
from controller.access.config import AccessConfig
from controller.access.grants import Grant, digest
from controller.access.issuer_keys import fetch_keys, is_url
from controller.access.key_file import read_key_file, read_text

if TYPE_CHECKING:
    import jwt

log = logging.getLogger(__name__)

#: How often files are checked, and keys fetched.
LOOK_S = 1.0
_FETCH_S = 60.0
# A shorter token could be guessed.
_TOKEN_CHARS_MIN = 20

# Identifies a version of a file: a Kubernetes secret changes through a symlink in its path.
_Stamp = tuple[int, int, int] | None


@dataclass(slots=True)
class _Watched:
    """Files that are read together."""

    files: Sequence[Path]
    read: Callable[[], None]
    #: Their versions just before they were last read.
    stamps: list[_Stamp]


class Guard:
    """Keeps one authoriser up to date. It lives in one event loop."""

    def __init__(
        self,
        config: AccessConfig,
        *,
        count: Callable[[Denial], object] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read all files; `count` is called for each denied call. Raises ConfigError if one of them cannot be used."""
        self._config = config
        self._clock = clock
        self._grants: tuple[Grant, ...] = ()
        self._worker_token_sha256 = b""
        self._is_client: Callable[[bytes], bool] = nobody
        self._is_worker: Callable[[bytes], bool] = nobody
        self._issuer_keys: Mapping[str, jwt.PyJWK] = {}
        self._fetches = is_url(config.issuer_keys)
        self._fetched = b""
        self._fetch_due_s = 0.0
        self._watched: list[_Watched] = []
        own = [config.keys_file, config.worker_token_file, config.client_ca, config.worker_ca]
        if config.issuer_keys and not self._fetches:
            own.append(Path(config.issuer_keys))
        self.watch([path for path in own if path is not None], self._read_again)
        self._read()
        #: Decides on calls.
        self.authoriser = Authoriser(self._rules(), count=count)

    def watch(self, files: Sequence[Path], read: Callable[[], None]) -> None:
        """Register a function to call when any of some files changes; it may raise ConfigError."""
        self._watched.append(_Watched(files, read, _stamps(files)))

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Watch all files in this context."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            try:
                await self.fetch()
                self.look()
            except Exception:
                # This is our bug. The previous content stays valid.
                log.exception("a changed file cannot be read")
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read changed files, and mark callers that lost their roles."""
        for watched in self._watched:
            stamps = _stamps(watched.files)
            if stamps != watched.stamps:
                watched.stamps = stamps
                _try(watched.read)
        self.authoriser.expire(self._clock())

    def read_again(self) -> None:
        """Read all files, whether they look changed or not."""
        self._fetch_due_s = 0.0
        for watched in self._watched:
            watched.stamps = _stamps(watched.files)
            _try(watched.read)

    # --- reading ------------------------------------------------------------------------------

    def _read_again(self) -> None:
        self._read()
        self.authoriser.use(self._rules(), now_s=self._clock())
        log.info("read access rules again: %d keys and certificates", len(self._grants))

    def _read(self) -> None:
        config = self._config
        grants: tuple[Grant, ...] = ()
        worker_token_sha256 = b""
        issuer_keys = self._issuer_keys
        if config.keys_file is not None:
            grants = read_key_file(config.keys_file)
        if config.worker_token_file is not None:
            worker_token_sha256 = digest(read_token(config.worker_token_file))
        is_client, is_worker = self._is_client, self._is_worker
        if config.client_ca is not None or config.worker_ca is not None:
            from controller.access.authorities import read_authorities

            is_client, is_worker = read_authorities(config.client_ca, config.worker_ca)
        if config.issuer_keys and not self._fetches:
            from controller.access.tokens import read_key_set

            issuer_keys = read_key_set(read_text(Path(config.issuer_keys)).encode())
        self._grants, self._worker_token_sha256 = grants, worker_token_sha256
        self._is_client, self._is_worker = is_client, is_worker
        self._issuer_keys = issuer_keys

    def _rules(self) -> Rules:
        config = self._config
        issuer = None
        if config.issuer:
            from controller.access.tokens import Issuer

            issuer = Issuer(
                config.issuer,
                config.audience,
                self._issuer_keys,
                config.roles_claim,
                config.tenant_claim,
            )
        return Rules(
            grants=self._grants,
            worker_token_sha256=self._worker_token_sha256,
            is_client=self._is_client,
            is_worker=self._is_worker,
            issuer=issuer,
            own_key_sha256=digest(config.own_key) if config.own_key else b"",
            anonymous=config.open_roles,
            anonymous_tenants=not config.knows_callers,
        )

    async def fetch(self) -> None:
        """Fetch the keys of an issuer, if they come by a URL and are due."""
        now_s = self._clock()
        if not self._fetches or now_s < self._fetch_due_s:
            return
        from controller.access.tokens import read_key_set

        self._fetch_due_s = now_s + _FETCH_S
        try:
            data = await asyncio.to_thread(fetch_keys, self._config.issuer_keys)
            # An issuer changes its keys a few times a year, and each change has all callers checked again.
            if data == self._fetched:
                return
            self._issuer_keys = read_key_set(data)
        except ConfigError as error:
            log.error("the keys of issuer %s: %s", self._config.issuer, error)
            return
        self._fetched = data
        self.authoriser.use(self._rules(), now_s=now_s)


def read_token(path: Path) -> str:
    """Read a file that holds one token. Raises ConfigError if it cannot be read, or its token could be guessed."""
    token = read_text(path).strip()
    if len(token) < _TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path}: found {len(token)} characters, expected a token of {_TOKEN_CHARS_MIN} or more:"
            " `head -c 32 /dev/urandom | base64` makes one"
        )
    return token


def _try(read: Callable[[], None]) -> None:
    try:
        read()
    except ConfigError as error:
        log.error("%s; the previous content stays valid", error)


def _stamps(files: Sequence[Path]) -> list[_Stamp]:
    return [_stamp(path) for path in files]


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
