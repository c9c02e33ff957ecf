"""What it costs to know who calls: processor time of a request without keys, with keys, TLS, and quotas as well.

One `clockwright up` for each variant, all beside each other, asked in turns, in random order
(`experiments.bench.request_cost`). The variant without keys runs twice: how far its two servers lie apart says what a
ratio here is worth. Writes part `cost` of `guard.json`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import trustme

from clockwright.channel import Access
from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.bench.request_cost import ServerBeside, cost_us, prepare, start_beside
from experiments.results_file import RESULTS, add_results, write_results

#: Models by the bytes of a request, and what they are made of.
_MODELS = {"small": "mlp-784-8-4", "large": "mlp-150528-4-4"}
_VARIANTS = ("off", "off_again", "keys", "keys_tls", "keys_tls_quotas")


def measure(rounds: int, num_requests: int) -> dict[str, float]:
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
                    used = cost_us(servers[variant], size, columns, num_requests)
                    if number >= 0:  # What is new to a server is looked at longer.
                        used_us.setdefault((size, variant), []).append(used)
    figures: dict[str, float] = {}
    for (size, variant), costs_us in sorted(used_us.items()):
        figures[f"{size}_{variant}_us"] = statistics.median(costs_us)
        if variant != "off":
            ratios = [cost / off for cost, off in zip(costs_us, used_us[size, "off"], strict=True)]
            figures[f"{size}_{variant}_ratio"] = statistics.median(ratios)
    return figures


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


def produce(rounds: int, num_requests: int, directory: Path = RESULTS) -> dict[str, float]:
    """Measure, and write part `cost` of `guard.json`."""
    figures = measure(rounds, num_requests)
    command = f"python -m experiments bench-guard --rounds {rounds} --requests {num_requests}"
    if not (directory / "guard.json").exists():
        write_results("guard", {}, command=command, directory=directory)
    cost = {f"cost_{key}": figure for key, figure in figures.items()}
    add_results("guard", cost, part="cost", command=command, directory=directory)
    return figures


def main() -> None:
    """Measure as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=2000, help="of each variant and round")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the record goes")
    options = parser.parse_args()
    for key, figure in produce(options.rounds, options.requests, options.directory).items():
        print(f"{key:32} {figure:10.3f}")


if __name__ == "__main__":
    main()
