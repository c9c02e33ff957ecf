"""Tenants' quotas while a controller runs: read from a file, or set by operators.

The file is TOML, a table per tenant::

    [gold]
    rate_rps = 200
    burst = 50
    open_requests = 64
    open_bytes = 268435456
    slo_ms_min = 10
    slo_ms_max = 1000
    weight = 4
    request_weight_max = 10

    ["*"]          # each tenant that has no table, for itself
    rate_rps = 20

    [""]           # requests that have no tenant
    rate_rps = 5

It is read again when it changes. Where there is a file, it alone says what quotas there are; else what operators
set is kept in the state file.
"""

from __future__ import annotations

import functools
import json
import logging
import sqlite3
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clockwright.errors import ConfigError, NotAllowedError, UnknownTenantError
from clockwright.foreign import printable
from clockwright.units import NS_PER_MS
from controller.core.quotas import BOUNDS, Quota, Quotas, TenantUse, check_quotas
from controller.models.state_file import StateFile

log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 4 << 20
_MS = "_ms"


class QuotaBook:
    """Holds what operators want, and has it take effect."""

    def __init__(
        self,
        *,
        file: Path | None = None,
        state: StateFile | None = None,
        changed: Callable[[Mapping[str, float]], object] = lambda _: None,
        policy_without_weights: str = "",
    ) -> None:
        """Begin with what a file says; without one operators set quotas, which `state` keeps.

        Without a state, quotas that operators set end with the process. `changed` is called with the tenants' weights after
        each change. `policy_without_weights` names the scheduling policy if it has no shares of tenants. Raises ConfigError
        if the file cannot be read, or says what cannot be.
        """
        self.file = file
        #: Counts what tenants have.
        self.quotas = Quotas({} if file is None else read_quota_file(file))
        self._state = state
        self._changed = changed
        self._policy_without_weights = policy_without_weights

    async def start(self) -> None:
        """Apply the quotas of the file or, without a file, those that operators had set before.

        Raises ConfigError if what was kept cannot be; StoreError if it cannot be read.
        """
        if self.file is None and self._state is not None:
            rows = await self._state.run(_load)
            quotas = {}
            for tenant, record in rows:
                try:
                    quotas[tenant] = Quota(**json.loads(record))
                except (ConfigError, TypeError, ValueError) as error:
                    raise ConfigError(
                        f"state {self._state.name}: quota of tenant {printable(tenant)!r}:"
                        f" {printable(str(error))}"
                    ) from None
            self.quotas.bind(quotas)
        if self.quotas:
            self._have_effect()

    def read_again(self) -> None:
        """Take what the file says now. Raises ConfigError as above; what was read before still holds."""
        assert self.file is not None
        self._bind(read_quota_file(self.file))
        log.info("quotas were read again: %d tenants", len(self.quotas.quotas))

    async def set(self, tenant: str, quota: Quota) -> None:
        """Give a tenant a quota.

        Raises NotAllowedError if a file says what quotas there are; ConfigError if the name cannot be, or there are too
        many; StoreError if the disk does not take it, and nothing has changed.
        """
        self._check_file()
        check_quotas({**self.quotas.quotas, tenant: quota})
        if self._state is not None:
            await self._state.run(functools.partial(_save, tenant, quota))
        self._bind({**self.quotas.quotas, tenant: quota})
        log.info("tenant %s has a quota: %s", printable(tenant) or "(none)", quota)

    def remark(self, weights: Mapping[str, float]) -> str:
        """Say what of tenants' weights has no effect here; empty: they have."""
        if not weights or not self._policy_without_weights:
            return ""
        return f"weight has no effect under policy {self._policy_without_weights}, as it has under edf_mh"

    async def remove(self, tenant: str) -> None:
        """Take a tenant's quota away.

        Raises NotAllowedError if a file says what quotas there are; UnknownTenantError if it has none; StoreError if
        the disk does not take it, and nothing has changed.
        """
        self._check_file()
        if tenant not in self.quotas.quotas:
            raise UnknownTenantError(f"tenant {printable(tenant)!r} has no quota of its own")
        if self._state is not None:
            await self._state.run(functools.partial(_erase, tenant))
        self._bind({name: quota for name, quota in self.quotas.quotas.items() if name != tenant})
        log.info("tenant %s has no quota any more", printable(tenant) or "(none)")

    def uses(self) -> list[tuple[str, TenantUse]]:
        """What tenants have now."""
        return self.quotas.uses()

    def _check_file(self) -> None:
        if self.file is not None:
            raise NotAllowedError(f"quotas come from {self.file}: change them there")

    def _bind(self, quotas: Mapping[str, Quota]) -> None:
        self.quotas.bind(quotas)
        self._have_effect()

    def _have_effect(self) -> None:
        weights = self.quotas.weights
        if remark := self.remark(weights):
            names = ", ".join(printable(tenant) or "(none)" for tenant in weights)
            log.warning("quotas of %s: %s", names, remark)
        self._changed(weights)


def _load(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT tenant, record FROM quota").fetchall()


def _save(tenant: str, quota: Quota, connection: sqlite3.Connection) -> None:
    record = json.dumps({name: getattr(quota, name) for name in BOUNDS})
    with connection:
        connection.execute("INSERT OR REPLACE INTO quota VALUES (?, ?)", (tenant, record))


def _erase(tenant: str, connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute("DELETE FROM quota WHERE tenant = ?", (tenant,))


def read_quota_file(path: Path) -> dict[str, Quota]:
    """Read the quotas of a file.

    Raises ConfigError if it cannot be read, or says what cannot be; names the tenant and the bound.
    """
    try:
        if (num_bytes := path.stat().st_size) > _FILE_BYTES_MAX:
            raise ConfigError(
                f"{path}: found {num_bytes} bytes, expected {_FILE_BYTES_MAX} at most"
            )
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {printable(str(error))}") from None
    quotas = {}
    for tenant, table in found.items():
        where = f"{path}: tenant {printable(tenant)!r}"
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: expected a table of bounds")
        try:
            bounds: dict[str, Any] = dict(_bound(name, value) for name, value in table.items())
            quotas[tenant] = Quota(**bounds)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    try:
        check_quotas(quotas)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return quotas


def _bound(name: str, value: object) -> tuple[str, float]:
    """Read one line of a table. Times are in milliseconds there."""
    known = [bound.replace("_ns", _MS) for bound in BOUNDS]
    if name not in known:
        raise ConfigError(f"found {printable(name)!r}, expected some of {', '.join(known)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: found {printable(repr(value))}, expected a number")
    if _MS in name:
        if not 0 < value < 1e12:
            raise ConfigError(f"{name}: found {value:g}, expected more than 0")
        return name.replace(_MS, "_ns"), round(value * NS_PER_MS)
    if name not in ("rate_rps", "weight", "request_weight_max") and not isinstance(value, int):
        raise ConfigError(f"{name}: found {value:g}, expected a whole number")
    return name, value
