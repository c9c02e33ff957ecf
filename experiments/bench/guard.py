"""What it costs to know who calls: processor time of a request without keys, with keys, TLS, and quotas as well.

One `clockwright up` for each variant, all side by side, asked in turns (`experiments.bench.request_cost`). The
variant without keys runs twice: how far its two servers lie apart says what a ratio here is worth.
A refusal over quota, too: one tenant is over its rate, which a front refuses by itself, and another has too many bytes
open, which the controller refuses. Both ask one server with one front, in turns. Writes part `cost` of `guard.json`.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import trustme
import uvloop

from clockwright.client.channel import Access
from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.bench.request_cost import (
    ServerBeside,
    compare,
    costs_us,
    infer_request,
    prepare,
    start_beside,
)
from experiments.study.bench import bench

#: Models by name: what they are, and the shape of their input.
_MODELS = {"small": ("mlp-784-8-4", (1, 784)), "large": ("mlp-150528-4-4", (1, 150_528))}
_WITHIN_QUOTA = '[""]\nrate_rps = 1000000\nopen_requests = 10000\nslo_ms_max = 100000\n'
_OVER_QUOTA = "[early]\nrate_rps = 1e-6\n[late]\nopen_bytes = 1\n"


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    rounds: int = 9
    #: For which each variant is asked in a round.
    seconds: float = 0.5


async def _measure(setting: Setting) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = prepare(scratch, {name: kind for name, (kind, _) in _MODELS.items()})
        servers = _start(flags, scratch, stack)
        for name, (_, shape) in _MODELS.items():
            request = infer_request(name, shape)
            asked = {
                variant: (server, await server.askers(lambda: request, stack))  # noqa: B023
                for variant, server in servers.items()
            }
            found = await compare(asked, setting.rounds, setting.seconds)
            figures |= {f"cost_{name}_{key}": figure for key, figure in found.items()}
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return figures | await _measure_refusals(setting, scratch, stack)


async def _measure_refusals(
    setting: Setting, scratch: Path, stack: AsyncExitStack
) -> dict[str, float]:
    """Have one server refuse two tenants in turns; medians over the rounds, of its controller and its front."""
    flags = prepare(scratch, {"small": _MODELS["small"][0]})
    quotas = scratch / "quotas.toml"
    quotas.write_text(_OVER_QUOTA)
    server = start_beside([*flags, "--fronts", "1", "--quotas", str(quotas)], stack)
    asked = {}
    for tenant in ("early", "late"):
        request = infer_request("small", _MODELS["small"][1], tenant=tenant)
        asked[tenant] = await server.askers(lambda request=request: request, stack, over_quota=True)  # type: ignore[misc]
    rows = []
    for _ in range(setting.rounds + 1):
        row = {}
        for tenant, askers in asked.items():
            used_us = await costs_us(askers, setting.seconds, server.controller, server.fronts)
            for process, cost_us in zip(("controller", "front"), used_us, strict=True):
                row[f"refusal_{tenant}_{process}_us"] = cost_us
        rows.append(row)
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}


def _start(flags: list[str], scratch: Path, stack: AsyncExitStack) -> dict[str, ServerBeside]:
    """Start the variants, by name."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, certificate, tls_key = (scratch / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(tls_key)
    key = add_key(scratch / "keys", "bench", frozenset({Role.INFERENCE, Role.METADATA}))
    keys = ["--keys", str(scratch / "keys")]
    tls = ["--tls-cert", str(certificate), "--tls-key", str(tls_key)]
    quotas = scratch / "quotas.toml"
    quotas.write_text(_WITHIN_QUOTA)
    variants: dict[str, tuple[list[str], Access]] = {
        "off": ([], Access()),
        "off_again": ([], Access()),
        "keys": (keys, Access(key=key)),
        "keys_tls": ([*keys, *tls], Access(key=key, ca=ca)),
        "keys_tls_quotas": ([*keys, *tls, "--quotas", str(quotas)], Access(key=key, ca=ca)),
    }
    return {
        name: start_beside([*flags, *more], stack, access)
        for name, (more, access) in variants.items()
    }


def measure(setting: Setting) -> dict[str, float]:
    """Measure requests, then refusals."""
    return uvloop.run(_measure(setting))


STUDY = bench("bench-guard", Setting(), measure, record="guard", part="cost")
