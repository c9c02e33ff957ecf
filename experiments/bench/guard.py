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
from experiments.bench.request_cost import ServerBeside, costs_us, prepare, start_beside
from experiments.study.bench import bench

#: Columns of the models.
_COLUMNS = {"small": 784, "large": 150_528}
_MODELS = {"small": "mlp-784-8-4", "large": "mlp-150528-4-4"}
_WITHIN_QUOTA = '[""]\nrate_rps = 1000000\nopen_requests = 10000\nslo_ms_max = 100000\n'
_OVER_QUOTA = "[early]\nrate_rps = 1e-6\n[late]\nopen_bytes = 1\n"


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
    rng = random.Random(1)
    rows = []
    with ExitStack() as stack:
        servers = _start(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        for _ in range(rounds + 1):
            row = {}
            for size, columns in _COLUMNS.items():
                for variant in rng.sample(tuple(servers), len(servers)):
                    row[size, variant], _ = costs_us(servers[variant], size, columns, num_requests)
            rows.append(row)
    del rows[0]  # What is new to a server is looked at longer.
    figures: dict[str, float] = {}
    for size, variant in sorted(rows[0]):
        name = f"cost_{size}_{variant}"
        figures[f"{name}_us"] = statistics.median(row[size, variant] for row in rows)
        if variant != "off":
            ratios = (row[size, variant] / row[size, "off"] for row in rows)
            figures[f"{name}_ratio"] = statistics.median(ratios)
    return figures


def measure_refusals(rounds: int, num_requests: int) -> dict[str, float]:
    """Have one server refuse two tenants in turns.

    Returns:
        Processor time of controller and front per refusal in us, in the middle of all rounds.
    """
    rows = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = prepare(scratch, {"small": _MODELS["small"]})
        quotas = scratch / "quotas.toml"
        quotas.write_text(_OVER_QUOTA)
        arguments = [*flags, "--fronts", "1", "--quotas", str(quotas)]
        server = start_beside(arguments, Access(), stack)
        for _ in range(rounds + 1):
            row = {}
            for tenant in ("early", "late"):
                used_us = costs_us(
                    server, "small", _COLUMNS["small"], num_requests, over_quota=tenant
                )
                for who, cost_us in zip(("controller", "front"), used_us, strict=True):
                    row[f"refusal_{tenant}_{who}_us"] = cost_us
            rows.append(row)
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}


def _start(scratch: Path, stack: ExitStack) -> dict[str, ServerBeside]:
    """Start the variants, by name."""
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
    quotas.write_text(_WITHIN_QUOTA)
    variants: dict[str, tuple[list[str], Access]] = {
        "off": ([], Access()),
        "off_again": ([], Access()),
        "keys": (keys, Access(key=key)),
        "keys_tls": ([*keys, *tls], Access(key=key, ca=ca)),
        "keys_tls_quotas": ([*keys, *tls, "--quotas", str(quotas)], Access(key=key, ca=ca)),
    }
    return {
        name: start_beside([*flags, *more], access, stack)
        for name, (more, access) in variants.items()
    }


def measure(setting: Setting) -> dict[str, float]:
    """Measure requests, then refusals."""
    asked = setting.rounds, setting.requests
    return measure_cost(*asked) | measure_refusals(*asked)


STUDY = bench("bench-guard", Setting(), measure, record="guard", part="cost")
