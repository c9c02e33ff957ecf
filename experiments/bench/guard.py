"""What it costs to know who calls: processor time of a request without keys, with keys, TLS, and quotas as well.

One `clockwright up` for each variant, all beside each other, asked in turns, in random order
(`experiments.bench.request_cost`). The variant without keys runs twice: how far its two servers lie apart says what a
ratio here is worth.
A refusal over quota, too: one tenant is over its rate, which a front refuses by itself, and another has too many bytes
open, which the controller refuses. Both ask one server with one front, in turns. Writes part `cost` of `guard.json`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import trustme

from clockwright.channel import Access
from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.bench.request_cost import (
    ServerBeside,
    costs_us,
    prepare,
    start_beside,
)
from experiments.study.bench import bench

#: Models by the bytes of a request, and what they are made of.
_MODELS = {"small": "mlp-784-8-4", "large": "mlp-150528-4-4"}
_REFUSED = """
[early]
rate_rps = 1e-6

[late]
open_bytes = 1
"""
_VARIANTS = ("off", "off_again", "keys", "keys_tls", "keys_tls_quotas")


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    rounds: int = 9
    #: Asked of each variant in each round.
    requests: int = 2000


def measure_cost(rounds: int, num_requests: int) -> dict[str, float]:
    """Ask all variants in turns.

    Returns:
        Processor time of the controller per request in us, by size and variant; and by how much it is that of
        `off` in the same round, in the middle of all rounds.
    """
    used_us: dict[tuple[str, str], list[float]] = {}
    rng = random.Random(1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = _start(scratch, stack)
        for number in range(-1, rounds):
            for size in _MODELS:
                for variant in rng.sample(_VARIANTS, len(_VARIANTS)):
                    columns = int(_MODELS[size].split("-")[1])
                    used, _ = costs_us(servers[variant], size, columns, num_requests)
                    if number >= 0:  # What is new to a server is looked at longer.
                        used_us.setdefault((size, variant), []).append(used)
    figures: dict[str, float] = {}
    for (size, variant), found_us in sorted(used_us.items()):
        figures[f"cost_{size}_{variant}_us"] = statistics.median(found_us)
        if variant != "off":
            ratios = [cost / off for cost, off in zip(found_us, used_us[size, "off"], strict=True)]
            figures[f"cost_{size}_{variant}_ratio"] = statistics.median(ratios)
    return figures


def measure_refusals(rounds: int, num_requests: int) -> dict[str, float]:
    """Have one server refuse two tenants in turns.

    Returns:
        Processor time of controller and front per refusal in us, in the middle of all rounds.
    """
    used_us: dict[str, list[float]] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = prepare(scratch, {"small": _MODELS["small"]})
        quotas = scratch / "quotas.toml"
        quotas.write_text(_REFUSED)
        arguments = [*flags, "--fronts", "1", "--quotas", str(quotas)]
        server = start_beside(arguments, Access(), stack)
        for number in range(-1, rounds):
            for tenant in ("early", "late"):
                used = costs_us(server, "small", 784, num_requests, over_quota=tenant)
                if number >= 0:
                    for who, cost in zip(("controller", "front"), used, strict=True):
                        used_us.setdefault(f"refusal_{tenant}_{who}_us", []).append(cost)
    return {name: statistics.median(costs) for name, costs in sorted(used_us.items())}


def _start(scratch: Path, stack: ExitStack) -> dict[str, ServerBeside]:
    flags = prepare(scratch, _MODELS)
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
    quotas.write_text('[""]\nrate_rps = 1000000\nopen_requests = 10000\nslo_ms_max = 100000\n')
    variants = {
        "off": ([], Access()),
        "off_again": ([], Access()),
        "keys": (keys, Access(key=key)),
        "keys_tls": ([*keys, *tls], Access(key=key, ca=ca)),
        "keys_tls_quotas": (
            [*keys, *tls, "--quotas", str(quotas)],
            Access(key=key, ca=ca),
        ),
    }
    return {
        variant: start_beside([*flags, *variants[variant][0]], variants[variant][1], stack)
        for variant in _VARIANTS
    }


def measure(setting: Setting) -> dict[str, float]:
    """Measure requests, then refusals."""
    return measure_cost(setting.rounds, setting.requests) | measure_refusals(
        setting.rounds, setting.requests
    )


STUDY = bench("bench-guard", Setting(), measure, record="guard", part="cost")
